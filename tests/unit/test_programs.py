"""What each program makes of a load: slots, batches and outputs, by what its user says and by its version."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fitter import programs
from fitter.errors import UsageError
from fitter.llama.types import LlamaCpp, Params
from fitter.model.header import Model
from fitter.parameters import table, targets
from fitter.planning.request.ask import Ask
from fitter.programs import PROGRAMS, Asked, Facts, Shape, chosen, facts, unless_named
from fitter.programs.facts import data
from fitter.programs.ik_llama import LayerSizes, cut, shares
from fitter.programs.program import OF_A_SERVER as SERVER_OPTIONS
from tests.support.cases import cases, named_cases, stored

SERVER, CLI, PYTHON, BENCH, ANY = "llama-server", "llama-cli", "llama-cpp-python", "llama-bench", "any"
IK, OLLAMA = "ik_llama", "ollama"
TEXTS = Asked(reads_texts=True)


def build(ggml: str) -> LlamaCpp:
    return LlamaCpp(f"0 (ggml {ggml})", ggml, "", "", "", "")


def test_a_program_is_called_the_same_everywhere() -> None:
    assert list(PROGRAMS) == list(targets.PROGRAMS)
    assert PROGRAMS.keys() <= data().keys()


@named_cases(
    # n_seq_max, kv_unified, n_batch, n_ubatch, n_outputs_max
    ("any", ANY, Asked(), Shape(1, False, None, None, 0)),
    ("any with slots", ANY, Asked(n_seq_max=4), Shape(4, False, None, None, 0)),
    ("any, unified", ANY, Asked(n_seq_max=4, kv_unified=True), Shape(4, True, None, None, 0)),
    ("any, with drafts", ANY, Asked(drafted=3), Shape(1, False, None, None, 0)),
    ("any, for texts", ANY, TEXTS, Shape(256, True, 512, 512, 0)),
    ("a server", SERVER, Asked(), Shape(4, True, None, None, 4)),
    ("a server with one slot", SERVER, Asked(n_seq_max=1), Shape(1, False, None, None, 1)),
    ("a server with four slots", SERVER, Asked(n_seq_max=4), Shape(4, False, None, None, 4)),
    ("a server with four in one cache", SERVER, Asked(n_seq_max=4, kv_unified=True), Shape(4, True, None, None, 4)),
    ("a server with a cache for each", SERVER, Asked(kv_unified=False), Shape(4, False, None, None, 4)),
    ("a server that drafts", SERVER, Asked(n_seq_max=2, drafted=3), Shape(2, False, None, None, 8)),
    ("four slots that draft", SERVER, Asked(drafted=48), Shape(4, True, None, None, 4 * 49)),
    ("more drafts than a batch has", SERVER, Asked(drafted=64, n_batch=128), Shape(4, True, 128, None, 128)),
    ("more slots than a batch", SERVER, Asked(n_seq_max=256, drafted=48), Shape(256, False, None, None, 2048)),
    ("a server for texts", SERVER, TEXTS, Shape(4, True, 512, 512, 0)),
    ("a server for texts, in batches", SERVER, replace(TEXTS, n_batch=2048, n_ubatch=256), Shape(4, True, 256, 256, 0)),
    (
        "a server for texts, less at once",
        SERVER,
        replace(TEXTS, n_batch=128, n_ubatch=512),
        Shape(4, True, 128, 512, 0),
    ),
    ("a server that pools", SERVER, Asked(is_pooled=True, n_seq_max=2), Shape(2, False, None, None, 0)),
    ("llama-cli", CLI, Asked(), Shape(1, False, None, None, 1)),
    ("llama-cli that drafts", CLI, Asked(drafted=8), Shape(1, False, None, None, 9)),
    ("llama-cli with slots", CLI, Asked(n_seq_max=2), Shape(2, False, None, None, 2)),
    ("Llama", PYTHON, Asked(), Shape(1, False, None, None, 1)),
    ("Llama with every logit", PYTHON, Asked(logits_all=True), Shape(1, False, None, None, 0)),
    ("Llama for texts", PYTHON, TEXTS, Shape(256, True, 512, 512, 0)),
    ("Llama for texts, in small batches", PYTHON, replace(TEXTS, n_batch=32), Shape(32, True, 32, 32, 0)),
    ("Llama for texts, in larger batches", PYTHON, replace(TEXTS, n_batch=4096), Shape(256, True, 4096, 4096, 0)),
    ("Llama that pools", PYTHON, Asked(is_pooled=True), Shape(1, False, None, None, 0)),
    ("Llama with sequences", PYTHON, Asked(n_seq_max=4), Shape(4, False, None, None, 4)),
    ("llama-bench", BENCH, Asked(), Shape(1, False, None, None, 0)),
    ("ik_llama", IK, Asked(), Shape(1, False, None, None, 0)),
    ("ik_llama's slots", IK, Asked(n_seq_max=4, drafted=3), Shape(4, False, None, None, 0)),
    ("Ollama", OLLAMA, Asked(), Shape(1, False, None, None, 1)),
    ("Ollama's batch", OLLAMA, Asked(n_batch=512, n_ubatch=4096), Shape(1, False, 512, 512, 1)),
    ("Ollama's micro batch", OLLAMA, Asked(n_ubatch=1024), Shape(1, False, 1024, 1024, 1)),
    ("llama-bench with drafts", BENCH, Asked(drafted=3), Shape(1, False, None, None, 0)),
)
def test_shapes(name: str, asked: Asked, expected: Shape) -> None:
    assert PROGRAMS[name].shape(asked, facts(name)) == expected


BATCHES: dict[str, tuple[Asked, tuple[int | None, int | None]]] = {
    "nothing": (Asked(), (None, None)),
    "a batch": (Asked(n_batch=4096), (4096, None)),
    "a micro batch": (Asked(n_ubatch=1024), (None, 1024)),
    "embeddings": (TEXTS, (512, 512)),
    "embeddings in larger batches": (replace(TEXTS, n_batch=2048), (2048, 2048)),
    "embeddings in larger micro batches": (replace(TEXTS, n_ubatch=1024), (1024, 1024)),
    "both are given": (replace(TEXTS, n_batch=2048, n_ubatch=256), (2048, 256)),
}


@pytest.mark.parametrize("name", [name for name in PROGRAMS if not PROGRAMS[name].is_server])
@pytest.mark.parametrize(("asked", "expected"), BATCHES.values(), ids=BATCHES)
def test_batches(name: str, asked: Asked, expected: tuple[int | None, int | None]) -> None:
    assert PROGRAMS[name].batches(asked) == expected


@pytest.mark.parametrize("name", [SERVER, CLI])
@pytest.mark.parametrize(("asked", "expected"), BATCHES.values(), ids=BATCHES)
def test_batches_of_a_server(name: str, asked: Asked, expected: tuple[int | None, int | None]) -> None:
    if asked.reads_texts and asked.n_ubatch == 256:
        expected = (256, 256)
    assert PROGRAMS[name].batches(asked) == expected


@named_cases(
    ("a server that limits no outputs", SERVER, {"sets_outputs": False}, Asked(), Shape(4, True, None, None, 0)),
    ("a Llama that limits none", PYTHON, {"sets_outputs": False}, Asked(), Shape(1, False, None, None, 0)),
    (
        "a server of other slots",
        SERVER,
        {"n_parallel": 8, "kv_unified": False},
        Asked(),
        Shape(8, False, None, None, 8),
    ),
    (
        "a server whose slots are in one cache",
        SERVER,
        {"kv_unified_of_slots": True},
        Asked(n_seq_max=2),
        Shape(2, True, None, None, 2),
    ),
)
def test_shapes_of_other_versions(name: str, changed: dict[str, object], asked: Asked, expected: Shape) -> None:
    other = replace(facts(name), **changed)  # type: ignore[arg-type]
    assert PROGRAMS[name].shape(asked, other) == expected


@cases("0.13.1", "0.15.1", "0.20.0", "0.25.3", "0.26.0")
def test_a_server_of_every_known_version_has_an_output_for_each_slot(ggml: str) -> None:
    shape = PROGRAMS[SERVER].shape(Asked(), facts(SERVER, build(ggml)))
    assert (shape.n_seq_max, shape.kv_unified, shape.n_outputs_max) == (4, True, 4)


ASKED = st.builds(
    Asked,
    n_seq_max=st.none() | st.integers(1, 256),
    kv_unified=st.none() | st.booleans(),
    n_batch=st.none() | st.integers(1, 8192),
    n_ubatch=st.none() | st.integers(1, 8192),
    reads_texts=st.booleans(),
    is_pooled=st.booleans(),
    logits_all=st.booleans(),
    drafted=st.integers(0, 1024),
)


@given(name=st.sampled_from(list(PROGRAMS)), asked=ASKED)
def test_what_holds_for_every_shape(name: str, asked: Asked) -> None:
    if name == CLI and asked.kv_unified:
        # which it has no option for
        asked = replace(asked, kv_unified=None)
    shape = PROGRAMS[name].shape(asked, facts(name))
    n_batch = Params.n_batch if shape.n_batch is None else shape.n_batch
    assert 0 <= shape.n_outputs_max <= n_batch
    if shape.n_outputs_max:
        assert not (asked.reads_texts or asked.is_pooled or asked.logits_all)
        assert shape.n_outputs_max >= min(shape.n_seq_max, n_batch)
    if asked.n_seq_max is not None:
        assert shape.n_seq_max == asked.n_seq_max
    if asked.kv_unified is not None and not asked.reads_texts:
        assert shape.kv_unified == asked.kv_unified
    if not asked.reads_texts and name != OLLAMA:
        assert (shape.n_batch, shape.n_ubatch) == (asked.n_batch, asked.n_ubatch)


# --- what is an option of which program

OF_A_SERVER = SERVER_OPTIONS | {
    "cache_ram": "-cram",
    "ctx_checkpoints": "-ctxcp",
    "checkpoint_min_step": "-cms",
    "cache_idle_slots": "--cache-idle-slots",
    "reranking": "--reranking",
    "spec_type": "--spec-type",
    "backend_sampling": "-bs",
}
KNOWN = {
    SERVER: set(OF_A_SERVER),
    CLI: {"cache_ram", "ctx_checkpoints", "spec_type", "backend_sampling"},
    IK: {"cache_ram", "ctx_checkpoints", "checkpoint_min_step", "spec_type"},
    OLLAMA: {"cache_ram", "ctx_checkpoints", "checkpoint_min_step", "cache_idle_slots"},
}


def cells() -> Iterable[tuple[str, str, bool]]:
    for name in PROGRAMS:
        for keyword in OF_A_SERVER:
            yield name, keyword, keyword in KNOWN.get(name, ())


@pytest.mark.parametrize(("name", "keyword", "is_known"), list(cells()))
def test_options_of_a_server(name: str, keyword: str, is_known: bool) -> None:
    PROGRAMS[name].check({"n_ctx": 512})
    if is_known:
        PROGRAMS[name].check({keyword: 1, "n_ctx": 512})
        return
    with pytest.raises(UsageError) as caught:
        PROGRAMS[name].check({keyword: 1, "n_ctx": 512})
    assert str(caught.value) == (
        f"{OF_A_SERVER[keyword]} is an option of llama-server, but the plan is for {name}: leave one of the two out"
    )


def test_every_option_that_a_program_knows_is_a_parameter() -> None:
    for keyword, option in OF_A_SERVER.items():
        assert option in " ".join(table.PARAMETERS[keyword].options)
    assert {keyword for each in PROGRAMS.values() for keyword in each.knows} == OF_A_SERVER.keys()


# --- whom a plan is for


@named_cases(
    ("nothing", None, SERVER, SERVER),
    ("nothing, as an empty text", "", SERVER, SERVER),
    ("another", "llama-cli", "llama-cli", None),
    ("any", "any", ANY, None),
)
def test_the_environment_names_a_program(
    named: str | None, expected: str, left: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FITTER_PROGRAM", raising=False)
    if named is not None:
        monkeypatch.setenv("FITTER_PROGRAM", named)
    assert chosen(SERVER) == expected
    assert unless_named(SERVER) == left


def test_the_environment_names_no_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FITTER_PROGRAM", "llama_server")
    with pytest.raises(UsageError) as caught:
        chosen(SERVER)
    assert str(caught.value) == (
        "FITTER_PROGRAM is 'llama_server': give one of llama-server, llama-cli, llama-cpp-python, llama-bench, "
        "ik_llama, ollama, any, or unset it"
    )


def test_what_is_exported_is_there() -> None:
    assert all(hasattr(programs, name) for name in programs.__all__)
    assert isinstance(facts(SERVER), Facts)


def test_options_that_a_version_does_not_have() -> None:
    older, newer = (facts("llama-server", build(ggml)) for ggml in ("0.20.0", "0.25.3"))
    asked = frozenset({"kv_unified_per_slot"})
    PROGRAMS["llama-server"].check_facts(asked, newer)
    for known, name in ((older, "llama-server"), (facts("llama-cli"), "llama-cli")):
        with pytest.raises(UsageError, match=f"^this {name} has no --kv-unified-per-slot: leave it out, and limit"):
            PROGRAMS[name].check_facts(asked, known)
    PROGRAMS["any"].check_facts(asked, facts("any"))
    drafting = frozenset({"n_ubatch_draft"})
    for name, called in {"any": "llama.cpp", "llama-server": "llama-server", "ik_llama": "ik_llama.cpp"}.items():
        with pytest.raises(UsageError, match=rf"^this {called} has no --spec-draft-n-ubatch: leave it out, or use b1"):
            PROGRAMS[name].check_facts(drafting, facts(name, build("0.26.0")))
    PROGRAMS["llama-server"].check_facts(drafting, facts("llama-server", build("0.27.0")))
    with pytest.raises(UsageError, match=r"^llama-cli has no -kvu: leave it out, or plan"):
        Ask.of({"program": "llama-cli", "n_seq_max": 2, "kv_unified": True})
    assert not Ask.of({"program": "llama-cli", "n_seq_max": 2, "kv_unified": False}).load.kv_unified


def test_what_a_server_says_of_itself_is_planned_with() -> None:
    other = replace(facts("llama-server"), n_batch=4096, n_ubatch=1024, flash_attn="off", n_parallel=2)
    load = Ask.of({"program": "llama-server"}).with_facts(other).load
    assert (load.n_batch, load.n_ubatch, load.flash_attn, load.n_seq_max) == (4096, 1024, "off", 2)
    asked = Ask.of({"program": "llama-server", "n_ubatch": 256, "flash_attn": "on"}).with_facts(other).load
    assert (asked.n_ubatch, asked.flash_attn) == (256, "on")


@named_cases(
    ("the model's own layers", {"mtp": True}, (5, 5, 4 * 6)),
    ("a draft model", {"model_draft": "d.gguf"}, (5, 0, 4 * 6)),
    ("as it is given", {"mtp": True, "draft_max": 2}, (2, 2, 4 * 3)),
    ("nothing drafts", {}, (None, 0, 4)),
)
def test_a_server_that_drafts_more_by_itself(drafts: dict[str, object], expected: tuple[object, ...]) -> None:
    other = replace(facts(SERVER), draft_tokens={**facts(SERVER).draft_tokens, "draft-simple": 5})
    ask = Ask.of({"program": SERVER, **drafts}).with_facts(other)  # type: ignore[typeddict-item]
    assert (ask.sharing.draft_max, ask.load.n_rs_seq, ask.load.n_outputs_max) == expected


# --- programs with rules of their own


@cases(
    stored("programs", "lacks")
    | {
        "n-grams": (
            OLLAMA,
            {"spec_type": ("ngram-mod",)},
            "--spec-type is an option of llama-server, but the plan is for ollama",
        ),
    }
)
def test_what_a_program_cannot_be_told(program: str, words: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        Ask.of({"program": program, **words})  # type: ignore[typeddict-item]


@cases({"split_mode": "none"}, {"offload_kqv": True}, {"cache_ram": 0}, {"n_batch": 64})
def test_what_a_program_has_may_be_said(words: dict[str, Any]) -> None:
    for program in (OLLAMA, IK):
        Ask.of({"program": program, **words})  # type: ignore[typeddict-item]


def model_of(architecture: str, n_ctx_train: int = 8192, size: int = 1 << 30) -> Model:
    path = Path("m.gguf")
    return Model(path, (path,), "m", architecture, size, 32, 0, n_ctx_train, 0, (), {})


@named_cases(
    ("nothing", OLLAMA, "llama", {}, {}),
    ("one slot", OLLAMA, "qwen35moe", {}, {"n_seq_max": 1}),
    ("two slots instead of one", OLLAMA, "qwen35moe", {"n_seq_max": 2}, "one slot for qwen35moe models: leave -np 2"),
    ("the trained context of each slot", OLLAMA, "llama", {"n_seq_max": 2, "n_ctx": 16384}, {}),
    ("more than the trained context", OLLAMA, "llama", {"n_ctx": 8193}, "at the 8192 tokens .*: give -c 8192 or less"),
    ("large images", OLLAMA, "qwen2vl", {"mmproj": "p"}, {"image_min_tokens": 1024}),
    ("a small context with images", OLLAMA, "gemma3", {"mmproj": "p", "n_ctx": 1024}, "give -c 2048 or more"),
    ("windows", IK, "gemma3", {}, {"swa_full": True}),
    ("no such model", IK, "nemotron_h", {}, "ik_llama.cpp loads no nemotron_h models: plan for llama-server"),
)
def test_what_a_program_sets_for_a_model(
    program: str, architecture: str, words: dict[str, Any], expected: dict[str, Any] | str
) -> None:
    if isinstance(expected, str):
        with pytest.raises(UsageError, match=expected):
            PROGRAMS[program].of_model(model_of(architecture), words)
        return
    assert PROGRAMS[program].of_model(model_of(architecture), words) == expected


def tried(program: str, free: dict[str, int], **words: Any) -> list[list[dict[str, Any]]]:
    """The keywords of every attempt."""
    return [[each.words for each in group] for group in PROGRAMS[program].attempts(model_of("llama"), free, words)]


GIB = 1 << 30


def test_ollama_is_asked_for_few_cards_first() -> None:
    assert tried(OLLAMA, {"CUDA0": GIB}) == [[{}]]
    assert tried(OLLAMA, {"CUDA0": GIB, "CUDA1": 2 * GIB}) == [[{"devices": ("CUDA1",)}], [{}]]
    assert tried(OLLAMA, {"CUDA0": GIB, "CUDA1": GIB}) == [[{}]]
    assert tried(OLLAMA, {"CUDA0": GIB, "CUDA1": 2 * GIB}, devices=("CUDA0", "CUDA1")) == [[{}]]


def test_images_are_where_ollama_has_them() -> None:
    on_first, on_host = {"mmproj_device": "CUDA0"}, {"mmproj_device": "none"}
    assert tried(OLLAMA, {"CUDA0": 2 * GIB}, mmproj="missing") == [
        [{**on_first, "n_gpu_layers": -1}, on_host, {**on_host, "n_gpu_layers": 32}]
    ]
    assert tried(OLLAMA, {"CUDA0": 2 * GIB}, mmproj="missing", n_gpu_layers=5) == [[on_first, on_host]]
    # a card with less than a projector and a gibibyte
    assert tried(OLLAMA, {"CUDA0": GIB - 1}, mmproj="missing") == [[on_host]]
    assert tried(OLLAMA, {"CUDA0": 2 * GIB}, mmproj="missing", mmproj_device="none") == [[{}]]


@given(
    sizes=st.lists(st.integers(1 << 10, 1 << 34), min_size=4, max_size=100),
    compute=st.integers(0, 1 << 34),
    cuts=st.lists(st.floats(0, 1), max_size=7),
    first=st.integers(0, 3),
)
def test_ik_llama_cuts_layers_of_any_size_so(sizes: list[int], compute: int, cuts: list[float], first: int) -> None:
    """Layers that differ by a factor of a few thousand may be too small for the numbers that it adds in."""
    sizes = [max(size, (sum(sizes) + 8 * compute) >> 16) for size in sizes]
    bounds = [first, *sorted(first + round(part * (len(sizes) - first)) for part in cuts), len(sizes)]
    counts = [stop - start for start, stop in itertools.pairwise(bounds)]
    counted = LayerSizes(tuple(map(float, sizes)), float(compute))
    split = shares(counted, first, counts)
    assert split is not None and len(split) == len(counts)
    assert cut(split, counted, first, len(sizes)) == counts


def test_ik_llama_has_all_layers_where_the_output_is_no_tensor_of_its_own() -> None:
    (group,) = PROGRAMS[IK].attempts(model_of("llama"), {"CUDA0": GIB}, {})
    assert [set(each.layers) for each in group] == [{0, 33}, set(), set(), set()]
    assert [each.words.get("n_gpu_layers") for each in group] == [None, -1, -1, 0]
