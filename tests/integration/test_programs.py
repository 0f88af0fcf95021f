"""The program of a plan: its outputs, its slots and its later memory, in plans, locks and loaded models."""

from __future__ import annotations

import copy
import importlib
import itertools
import json
import math
import re
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import pytest
from gguf import PoolingType
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

import fitter
from fitter.errors import PlanError, UsageError
from fitter.output.documents.plan_document import read_plan
from fitter.output.tables.plan_facts import facts
from fitter.parameters.table import PARAMETERS
from fitter.parameters.targets import PROGRAMS
from fitter.planning.plan.plan import Plan
from fitter.programs import facts as program_facts
from fitter.programs.later import Later
from fitter.regression import check_cases
from tests.support.cases import cases, named_cases, refused, stored
from tests.support.command import run_fitter
from tests.support.plans import GIB, MIB
from tools.models import shapes
from tools.models.tiny import TINY_MOE
from tools.models.tiny_kinds import write_bert, write_hybrid, write_swa

SERVER, CLI, PYTHON, BENCH = [*PROGRAMS][:4]
pytestmark = pytest.mark.usefixtures("one_worker")

ANY = "any"

MODELS = {
    **{name: shapes.SHAPES[name] for name in ("llama-3.1-8b", "gemma3-12b")},
    "tiny": TINY_MOE,
    "swa": write_swa,
    "hybrid": write_hybrid,
}


@pytest.fixture(scope="module")
def folder(models: dict[str, Path], directory: Path) -> Path:
    """Headers of real shapes, and small models that run."""
    assert {path.stem for path in directory.iterdir()} == models.keys()
    return directory


def command(*words: Any, program: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run the command as a user has it, whose environment names ``program``, or none."""
    return run_fitter(*words, FITTER_PROGRAM=program)


# --- whom a plan is for

ONE = "-c 4096 -ngl 33 -np 1 -fit off"
FOUR = "-c 4096 -ngl 33 -np 4 -kvu -fit off"

LINES: dict[str, tuple[tuple[str, ...], str | None, str, str]] = {
    "nothing is said": ((), None, FOUR, SERVER),
    "the environment says any": ((), ANY, ONE, ANY),
    "the option goes before it": (("--for", SERVER), ANY, FOUR, SERVER),
    "one slot": (("-np", "1"), None, ONE, SERVER),
    "slots, each with its cache": (("-np", "4"), None, FOUR.replace("-kvu ", ""), SERVER),
    **{f"for {name}": (("--for", name), None, ONE, name) for name in (CLI, PYTHON, BENCH, ANY)},
    "windows are kept whole": (("--for", "ik_llama"), None, ONE.replace("-np", "--swa-full -np"), "ik_llama"),
    "a batch of its own": (("--for", "ollama"), None, ONE.replace("-np", "-b 512 -np"), "ollama"),
}


@cases(LINES)
def test_the_command_is_for_a_llama_server(
    words: tuple[str, ...], program: str | None, arguments: str, expected: str, folder: Path
) -> None:
    said = command(folder / "llama-3.1-8b.gguf", "--gpu", "24GiB", "-c", "4096", "--json", *words, program=program)
    assert said.returncode == 0, said.stderr
    document = json.loads(said.stdout)
    assert (document["program"], " ".join(document["arguments"])) == (expected, arguments)


def test_a_plan_for_python_is_for_llama_cpp_python(folder: Path) -> None:
    words = (folder / "llama-3.1-8b.gguf", "--gpu", "24GiB", "-c", "4096")
    assert 'program="llama-cpp-python"' in command(*words, "--format", "python").stdout
    assert fitter.fit(words[0], gpus="24GiB", n_ctx=4096).program == "any", "as the environment of these tests says"


# --- outputs


def used(plan: fitter.Plan) -> dict[str, int]:
    return {each.name: each.used for each in plan.devices}


def test_a_server_has_an_output_for_each_slot(folder: Path) -> None:
    """One output for each slot leaves 118 MiB free on the device with the output layer of Llama 3.1 8B."""
    words: dict[str, Any] = {"gpus": ["24GiB", "24GiB"], "n_ctx": 8192, "n_seq_max": 4, "kv_unified": True}
    words |= {"tensor_split": (1, 1), "n_gpu_layers": 99}
    model = folder / "llama-3.1-8b.gguf"
    every, few = (fitter.fit(model, program=program, **words) for program in (ANY, SERVER))
    assert (every.params.n_outputs_max, few.params.n_outputs_max) == (0, 4)
    freed = {device: size - used(few)[device] for device, size in used(every).items()}
    assert freed["CUDA1"] >= 118 * MIB
    assert freed["CUDA0"] == 0, "the output layer is on the last device"
    # what a plan says is what llama.cpp says of such a load
    for plan in (every, few):
        pinned = {name: value for name, value in words.items() if name != "n_gpu_layers"}
        again = fitter.measure(
            model, **pinned, n_gpu_layers=plan.params.n_gpu_layers, n_outputs_max=plan.params.n_outputs_max
        )
        assert {device: again.on(device).used for device in used(plan)} == used(plan)


@named_cases(
    # n_seq_max, n_outputs_max, n_batch
    ("a server", {"program": SERVER}, (4, 4, 2048)),
    ("a server that drafts with ngrams", {"program": SERVER, "spec_type": "ngram-mod"}, (4, 260, 2048)),
    (
        "with fewer tokens at a time",
        {"program": SERVER, "n_seq_max": 2, "spec_type": "ngram-mod", "spec_ngram_mod_n_max": 8},
        (2, 18, 2048),
    ),
    ("a server that embeds", {"program": SERVER, "embedding": True, "pooling_type": "mean"}, (4, 0, 1024)),
    ("a server that ranks", {"program": SERVER, "reranking": True, "n_ubatch": 1024}, (4, 0, 1024)),
    ("llama-cli", {"program": CLI}, (1, 1, 2048)),
    ("Llama", {"program": PYTHON}, (1, 1, 2048)),
    ("Llama with every logit", {"program": PYTHON, "logits_all": True}, (1, 0, 2048)),
    ("Llama that embeds", {"program": PYTHON, "embedding": True}, (256, 0, 1024)),
    ("llama-bench", {"program": BENCH}, (1, 0, 2048)),
    ("any", {"program": ANY}, (1, 0, 2048)),
)
def test_outputs_of_each_program(words: dict[str, Any], expected: tuple[int, int, int], folder: Path) -> None:
    plan = fitter.fit(folder / "tiny.gguf", gpus="24GiB", n_ctx=1024, **words)
    assert (plan.params.n_seq_max, plan.params.n_outputs_max, plan.params.n_batch) == expected
    assert plan.program == words["program"]
    kinds = [later.kind for later in plan.later]
    assert ("prompt cache" in kinds) == (words["program"] in (SERVER, CLI) and not plan.params.embeddings)
    assert ("logits" in kinds) == (words["program"] not in (BENCH, ANY)), "of those it is not known"


# --- texts that are only read


def test_a_header_that_pools_makes_an_embedder_or_a_reranker(folder: Path) -> None:
    model, ranker = write_bert(folder / "bert.gguf"), write_bert(folder / "ranker.gguf", PoolingType.RANK)
    found = fitter.fit(model, gpus="24GiB", program=SERVER)
    assert found.params.embeddings
    assert "planned with --embedding: bert.pooling_type of the header is mean" in found.notes
    said = fitter.fit(model, gpus="24GiB", program=SERVER, embedding=True)
    assert (said.params, len(said.notes)) == (found.params, len(found.notes) - 1)
    assert not fitter.fit(model, gpus="24GiB", program=SERVER, embedding=False).params.embeddings
    assert fitter.fit(ranker, gpus="24GiB", program=SERVER).params.of_parameter(PARAMETERS["pooling_type"]) == "rank"
    python = fitter.fit(ranker, gpus="24GiB", program=PYTHON)
    assert (python.params.embeddings, python.params.n_batch, python.params.n_seq_max) == (True, 1024, 256)


@named_cases(
    ("a server", "tiny.gguf", {}, "last", False),
    ("a server, as the user says", "tiny.gguf", {"pooling_type": "none"}, "none", True),
    ("a server with a mean", "tiny.gguf", {"pooling_type": "mean"}, "mean", True),
    ("a server that ranks", "tiny.gguf", {"embedding": None, "reranking": True}, "rank", False),
    ("llama-cpp-python", "tiny.gguf", {"program": PYTHON}, None, True),
    ("attention that is not causal", "unpooled.gguf", {}, "mean", True),
)
def test_a_header_without_a_pooling(
    name: str, words: dict[str, Any], pooling: str | None, is_whole: bool, folder: Path
) -> None:
    write_bert(folder / "unpooled.gguf", PoolingType.NONE)
    plan = fitter.fit(folder / name, gpus="24GiB", **{"program": SERVER, "embedding": True, "n_ctx": 1024, **words})
    assert plan.params.of_parameter(PARAMETERS["pooling_type"]) == (pooling or "model")
    assert plan.params.n_ubatch == (1024 if is_whole else 512)
    is_chosen = pooling is not None and not {"pooling_type", "reranking"} & {*words}
    note = f"planned with --pooling {pooling}: the header has none, and /v1/embeddings refuses --pooling none"
    assert (note in plan.notes) == is_chosen


def test_inputs_a_second_take_the_place_of_generation(folder: Path, tmp_path: Path) -> None:
    model = write_bert(folder / "bert.gguf")
    plan = fitter.fit(model, gpus="24GiB", program=SERVER, prompt=100)
    assert plan.estimate is not None
    assert (plan.estimate.input_tokens, plan.estimate.workload.generate) == (100, 0)
    estimate = plan.to_dict()["estimate"]
    assert estimate["generation_tokens_per_second"] is None
    assert estimate["inputs_per_second"] * 100 == pytest.approx(estimate["prompt_tokens_per_second"], rel=0.001)
    assert fitter.fit(folder / "tiny.gguf", gpus="24GiB").to_dict()["estimate"]["inputs_per_second"] is None
    (tmp_path / "plan.json").write_text(json.dumps(plan.to_dict()))
    read = read_plan(str(tmp_path / "plan.json"))
    words = (model, "--gpu", "24GiB", "--prompt", "100")
    texts = [str(plan), str(read), command(*words).stderr, command(*words, "-v").stderr]
    page = tmp_path / "report.html"
    assert command("report", *words, "-o", page).returncode == 0
    for text in texts:
        assert " inputs/s of 100 tokens" in text
        assert "generation" not in text
    assert "a second of 100 tokens, estimated" in page.read_text(encoding="utf-8")
    assert "of generation" not in page.read_text(encoding="utf-8")
    assert command("report", "--shape", "modernbert-base", *words[1:3], "--embedding", "-o", page).returncode == 0
    other_contexts = page.read_text(encoding="utf-8").partition('id="contexts"')[2].partition("For scripts")[0]
    assert '<th scope="row">4,096</th>' in other_contexts
    assert "prompt, tokens/s" in other_contexts and "generation" not in other_contexts


@named_cases(
    ("room for the longest input", "2GiB", 8192),
    ("room for half of it", "400MiB", 4096),
    ("no room for a whole layer", "20MiB", 8192),
)
def test_the_longest_input_that_costs_little_time(free: str, n_ctx: int) -> None:
    words: dict[str, Any] = {"gpus": free, "margin": 0, "program": SERVER, "embedding": True}
    plan = fitter.fit("shape://modernbert-base", **words)
    assert plan.fits
    assert (plan.params.n_ctx, plan.params.n_batch, plan.params.n_ubatch) == (n_ctx, n_ctx, n_ctx)
    assert fitter.fit("shape://modernbert-base", **words, n_ctx=2048).params.n_ubatch == 2048


# --- what comes later


@cases(stored("programs", "host_memory_is_planned_with_what_comes_later"))
def test_host_memory_is_planned_with_what_comes_later(
    name: str, words: dict[str, Any], expected: str, fits: bool, folder: Path
) -> None:
    # a smaller micro batch would leave more of the host
    plan = fitter.fit(folder / f"{name}.gguf", gpus="24GiB", n_ctx=8192, n_ubatch=512, program=SERVER, **words)
    said = " ".join(plan.arguments()) if plan.fits else ""
    assert plan.fits == fits
    assert plan.host.later == sum(later.bytes or 0 for later in plan.later)
    assert plan.to_dict()["host"]["later"] == plan.host.later
    limits = [" ".join(pair) for pair in itertools.pairwise(said.split()) if pair[0] in ("-cram", "-ctxcp")]
    assert " ".join(limits) == expected
    assert [problem.device for problem in plan.problems] == ([] if fits else ["host"])
    if plan.host.left is not None:
        assert (plan.host.left >= plan.host.margin) == fits


@named_cases(
    ("checkpoints on the host, weights on a card", "gemma3-12b", "24GiB", (2, 8, 24, 51, 52, 60)),
    ("all on the host", "gemma3-12b", "none", (10, 16, 48, 59, 60, 80)),
    ("a cache on the host", "llama-3.1-8b", "none", (8, 13, 14, 15, 20, 32)),
    ("weights in both", "llama-3.1-8b", "4GiB", (5, 8, 11, 12, 13, 20)),
)
def test_an_open_context_leaves_half_for_what_the_server_keeps(
    name: str, gpu: str, sizes: tuple[int, ...], folder: Path
) -> None:
    before: Plan | None = None
    for size in sizes:
        words: dict[str, Any] = {"gpus": gpu, "host_memory": f"{size}GiB", "program": SERVER, "prompt": 2048}
        plan = fitter.fit(folder / f"{name}.gguf", **words)
        least = fitter.fit(folder / f"{name}.gguf", **words, n_ctx=4096)
        assert plan.fits and plan.estimate and least.estimate
        is_lowered = bool({"cache_ram", "ctx_checkpoints"} & {*dict(plan.params.more)})
        is_smallest = plan.params.n_ctx == 4096
        # a context in a card's own memory only has larger compute buffers on the host
        more = plan.host.compute - least.host.compute
        checkpoint = max((each.each * 4 for each in plan.later if each.kind == "checkpoints"), default=0)
        conversation = sum(each.each for each in plan.later if each.kind == "prompt cache")
        enough = min(8192 * MIB, conversation) if "ctx_checkpoints" not in dict(plan.params.more) else math.inf
        half = (least.host.later - more) / 2 - checkpoint - MIB
        kept = min(enough, least.host.later if plan.host.context == 0 else half)
        assert plan.host.later >= kept - more - checkpoint - MIB
        assert any(note.startswith("the context is the smallest") for note in plan.notes) == (
            is_lowered and is_smallest
        )
        if before is not None and before.estimate is not None:
            # more memory is never worse; more context may take a tenth longer
            assert plan.params.n_ctx >= before.params.n_ctx
            assert plan.host.later >= before.host.later
            longest = 1.1 if plan.params.n_ctx > before.params.n_ctx else 1.0
            assert plan.estimate.seconds <= before.estimate.seconds * longest * 1.01
        before = plan
    assert before is not None
    assert not is_lowered
    assert not is_smallest


def test_what_is_kept_gets_less_where_the_user_sets_the_context(folder: Path) -> None:
    # a worker of its own each: one that is shared remembers loads
    words: dict[str, Any] = {"gpus": "none", "host_memory": "16GiB", "program": SERVER, "worker": None}
    fitted, given, most = (
        fitter.fit(folder / "llama-3.1-8b.gguf", **words, **more)
        for more in ({}, {"n_ctx": 65536}, {"objective": "context"})
    )
    assert 4096 < fitted.params.n_ctx < given.params.n_ctx < most.params.n_ctx
    kept = [dict(plan.params.more)["cache_ram"] for plan in (fitted, given, most)]
    assert kept == sorted(kept, reverse=True) and len(set(kept)) == 3
    # what only a longer context would take is not searched for twice
    assert fitted.search.dummy_loads <= 3 * given.search.dummy_loads


def test_what_is_kept_has_the_size_that_llama_cpp_gives_it(folder: Path) -> None:
    words: dict[str, Any] = {"gpus": "24GiB", "n_ctx": 8192, "program": SERVER}
    plan = fitter.fit(folder / "llama-3.1-8b.gguf", **words)
    cache, idle, logits = plan.later
    a_cell = 2 * 32 * 8 * 128 * 2
    assert (cache.kind, cache.bytes) == ("prompt cache", 8 * GIB)
    assert 8192 * a_cell < cache.each < 8192 * (a_cell + 32), "the rows of every token, and a little beside them"
    assert cache.count == 8 * GIB // cache.each
    assert (idle.kind, idle.bytes, idle.each, idle.count) == ("idle slots", 0, cache.each, 4)
    other = fitter.fit(folder / "llama-3.1-8b.gguf", **words, cache_idle_slots=False, type_k="q8_0")
    assert [later.kind for later in other.later] == ["prompt cache", "logits"]
    assert other.later[0].each < cache.each
    row = 4 * 128256
    assert logits == Later("logits", 4 * row, row, 4)


@cases(("tiny", False), ("swa", True), ("hybrid", True))
def test_checkpoints_are_made_where_nothing_can_be_rolled_back(name: str, is_made: bool, folder: Path) -> None:
    plan = fitter.fit(folder / f"{name}.gguf", gpus="24GiB", n_ctx=2048, program=SERVER)
    kinds = {later.kind: later for later in plan.later}
    assert ("checkpoints" in kinds) == is_made
    if is_made:
        made = kinds["checkpoints"]
        assert (made.per_slot, made.count) == (32, 4 * 32)
        assert made.bytes == 4 * 32 * made.each
        assert 0 < made.each < kinds["prompt cache"].each


def test_a_draft_model_has_a_state_too(folder: Path) -> None:
    words: dict[str, Any] = {"gpus": "24GiB", "n_ctx": 4096, "program": SERVER}
    model = folder / "llama-3.1-8b.gguf"
    alone, both = (fitter.fit(model, **words, **more) for more in ({}, {"model_draft": str(folder / "tiny.gguf")}))
    assert both.later[0].each > alone.later[0].each
    assert both.params.n_outputs_max == 4 * (1 + 3)


def test_the_table_says_what_is_smaller_and_why(folder: Path) -> None:
    words = (folder / "gemma3-12b.gguf", "--gpu", "24GiB", "-c", "8192", "--host-memory", "8GiB")
    said = command(*words)
    assert said.stdout.strip().endswith("-np 4 -kvu -cram 3788 -ctxcp 2 -fit off")
    assert "reduced to fit host memory: -cram 3788 -ctxcp 2\n" in said.stderr
    given = command(*words, "-cram", "3788", "-ctxcp", "2")
    assert given.stdout.strip() == said.stdout.strip()
    assert "reduced" not in given.stderr


FOUR_SLOTS = "40.0 GiB of checkpoints of 4 slots (32 each), 8.0 GiB of prompt cache, 4.0 MiB of logits"
ONE_SLOT = "10.0 GiB of checkpoints of 1 slot (32 each), 1.0 MiB of logits"
EMBEDDER = {"embedding": True, "pooling_type": "mean"}
OWN_BATCH = {"embedding": True, "n_batch": 8192, "n_ubatch": 8192}


@named_cases(
    ("checkpoints of four slots", "gemma3-12b", {}, FOUR_SLOTS, "-ctxcp, -np or -cram"),
    ("checkpoints of one", "gemma3-12b", {"n_seq_max": 1, "cache_ram": 0}, ONE_SLOT, "-ctxcp"),
    ("a prompt cache alone", "llama-3.1-8b", {}, "", ""),
    ("logits of every token", "gemma3-12b", {"program": PYTHON, "logits_all": True}, "2.0 GiB of logits", "-b"),
    ("outputs of an embedder", "llama-3.1-8b", EMBEDDER, "4.0 GiB of logits", "-c"),
    ("outputs of an embedder with the user's batch", "llama-3.1-8b", OWN_BATCH, "4.0 GiB of logits", "-b"),
)
def test_what_takes_much_memory_later_is_named(
    name: str, words: dict[str, Any], said: str, options: str, folder: Path
) -> None:
    words = {"gpus": "48GiB", "n_ctx": 8192, "program": SERVER, **words}
    plan = fitter.fit(folder / f"{name}.gguf", **words)
    assert plan.fits
    sentence = f"in host memory while it runs, up to {said}: less with a smaller {options}"
    assert dict(facts(plan)).get("later") == (sentence if said else None)
    for option in re.findall(r"-[a-z]+", options):
        # what it names makes it less
        [key] = [each.name for each in PARAMETERS.values() if option in each.options]
        value = {"-c": 4096, "-np": 2, "-b": 1024, "-ctxcp": 4, "-cram": 100}[option]
        less = fitter.fit(folder / f"{name}.gguf", **{**words, key: value})
        assert less.host.later < plan.host.later - MIB


def test_what_is_set_and_has_no_room_is_said(folder: Path) -> None:
    words = ("--gpu", "24GiB", "-c", "8192", "--host-memory", "4GiB", "-cram", "8192", "-ub", "512")
    said = command(folder / "llama-3.1-8b.gguf", *words)
    assert (said.returncode, said.stdout) == (1, "")
    [line] = (line for line in said.stderr.splitlines() if line.startswith("fitter: "))
    assert line.startswith("fitter: does not fit: the host lacks 5428 MiB: ")
    assert "MiB of them for what the program keeps later) plus a margin of 1024 MiB" in line
    # the whole cache for the context is a GiB, and on the device
    assert line.endswith("; use a smaller -cram")


# --- Llama

LOADED: dict[str, Any] = {"n_ctx": 512, "n_threads": 1, "n_threads_batch": 1, "verbose": False}
PROMPT = b"ba lu mi tu " * 30
"""More tokens than a batch of 64 has."""


@pytest.fixture
def for_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FITTER_PROGRAM")


@pytest.fixture
def pair(folder: Path, for_python: None, request: pytest.FixtureRequest) -> Iterator[Any]:
    """``fitter.Llama`` and ``llama_cpp.Llama`` of the same model, batches and attention."""
    name, words = request.param
    words = {**LOADED, "n_batch": 64, "n_ubatch": 64, "flash_attn": True, **words}
    if words.pop("drafts", False):
        words["draft_model"] = LlamaPromptLookupDecoding(num_pred_tokens=4)
    ours = fitter.Llama(folder / f"{name}.gguf", **words)
    # without it, Llama has no rows for what a prompt of several batches asks of it with a draft model
    words |= {"logits_all": True} if "draft_model" in words else {}
    theirs = llama_cpp.Llama(str(folder / f"{name}.gguf"), **words)
    yield ours, theirs
    ours.close()
    theirs.close()


def generated(llm: llama_cpp.Llama, **how: Any) -> list[int]:
    tokens = llm.tokenize(PROMPT)
    assert len(tokens) > 64
    return list(itertools.islice(llm.generate(tokens, **how), 24))


TEXTS = ["tiny", "swa", "hybrid"]


@pytest.mark.parametrize("pair", [(name, {}) for name in TEXTS], indirect=True, ids=TEXTS)
def test_one_output_says_the_same_tokens(pair: tuple[fitter.Llama, llama_cpp.Llama]) -> None:
    ours, theirs = pair
    assert (ours.plan.program, ours.plan.params.n_outputs_max) == (PYTHON, 1)
    assert ours.context_params.n_outputs_max == 1
    assert generated(ours, temp=0) == generated(theirs, temp=0)
    # what has never been read of the rows of logits
    how: dict[str, Any] = {"max_tokens": 24, "temperature": 1.5, "seed": 7, "top_k": 0, "top_p": 1.0}
    texts = [each.create_completion("ba lu mi", **how)["choices"] for each in pair]  # type: ignore[index]
    assert texts[0] == texts[1]
    chat: list[Any] = [{"role": "user", "content": "ba lu " * 40}]
    said = [each.create_chat_completion(chat, max_tokens=16, temperature=0)["choices"] for each in pair]  # type: ignore[index]
    assert said[0] == said[1]


@pytest.mark.parametrize("pair", [(name, {"logits_all": True}) for name in TEXTS[:2]], indirect=True, ids=TEXTS[:2])
def test_every_logit_is_the_same(pair: tuple[fitter.Llama, llama_cpp.Llama]) -> None:
    ours, theirs = pair
    assert ours.plan.params.n_outputs_max == 0
    tokens = ours.tokenize(PROMPT)
    for each in pair:
        each.reset()
        each.eval(tokens)
    found, expected = (np.array(each.scores[: len(tokens)]) for each in pair)
    assert found.shape[0] == len(tokens)
    assert np.array_equal(found, expected)
    assert found.std() > 0
    how: dict[str, Any] = {"max_tokens": 4, "temperature": 0, "logprobs": 3}
    assert ours.create_completion("ba lu", **how)["choices"] == theirs.create_completion("ba lu", **how)["choices"]  # type: ignore[index]


@pytest.mark.parametrize("pair", [("tiny", {"drafts": True})], indirect=True, ids=["tiny"])
def test_a_draft_model_has_the_logits_that_it_needs(pair: tuple[fitter.Llama, llama_cpp.Llama]) -> None:
    ours, theirs = pair
    assert ours.plan.params.n_outputs_max == 0
    assert generated(ours, temp=0) == generated(theirs, temp=0)


@pytest.mark.parametrize("name", TEXTS)
def test_embeddings_are_the_same(folder: Path, for_python: None, name: str) -> None:
    words: dict[str, Any] = {**LOADED, "n_batch": 512, "n_ubatch": 512, "embedding": True, "flash_attn": True}
    ours = fitter.Llama(folder / f"{name}.gguf", **words)
    theirs = llama_cpp.Llama(str(folder / f"{name}.gguf"), **words)
    texts = ["ba", "lu mi ba", "ba lu mi " * 40]
    assert ours.embed(texts) == theirs.embed(texts)
    assert ours.create_embedding(texts)["data"] == theirs.create_embedding(texts)["data"]
    ours.close()
    theirs.close()


ALL = "needs the outputs of all tokens, and the plan counts 1: fit again with logits_all=True"


def test_a_plan_of_one_output_is_not_loaded_for_more(folder: Path, for_python: None) -> None:
    plan = fitter.fit(folder / "tiny.gguf", n_ctx=1024)
    assert plan.params.n_outputs_max == 1
    with refused(UsageError, f"logits_all {ALL}"):
        plan.load(verbose=False, logits_all=True)
    with refused(UsageError, f"draft_model {ALL}, which a draft model needs"):
        plan.load(verbose=False, draft_model=LlamaPromptLookupDecoding())
    plan.load(verbose=False, logits_all=False, draft_model=None).close()
    # a Llama of one's own, where there is room
    kwargs = plan.llama_kwargs()
    assert "logits_all" not in kwargs
    llm = llama_cpp.Llama(str(folder / "tiny.gguf"), verbose=False, **kwargs)
    assert llm.create_completion("ba", max_tokens=2)
    llm.close()


def test_a_plan_of_all_outputs_is_loaded_for_both(folder: Path, for_python: None) -> None:
    plan = fitter.fit(folder / "tiny.gguf", n_ctx=1024, logits_all=True)
    assert plan.llama_kwargs()["logits_all"] is True
    plan.load(verbose=False, logits_all=True, draft_model=LlamaPromptLookupDecoding()).close()


def test_a_llama_of_ones_own_where_there_is_none(folder: Path, for_python: None) -> None:
    ample = fitter.fit(folder / "tiny.gguf", n_ctx=1024)
    full = ample.host.used + ample.host.margin
    plan = fitter.fit(folder / "tiny.gguf", n_ctx=1024, host_memory=full)
    assert plan.fits
    more = fitter.fit(folder / "tiny.gguf", n_ctx=1024, program="any").host.used - ample.host.used
    assert more > 0
    outputs = "llama_cpp.Llama makes every token of a batch an output, which the plan does not count"
    lacks = f"for which the host lacks {-(-more // MIB)} MiB: use plan.load(), or fit with program='any'"
    with refused(PlanError, f"{outputs}, and {lacks}"):
        plan.llama_kwargs()
    plan.load(verbose=False).close()


# --- cases and their locks

CASES = """\
[defaults]
gpu = "24GiB"
n_ctx = 4096

[cases.any]
model = "tiny.gguf"

[cases.served]
model = "swa.gguf"
program = "llama-server"
"""


@pytest.fixture(scope="module")
def locked(folder: Path) -> Path:
    (folder / "fitter.toml").write_text(CASES)
    assert all(each.error is None for each in check_cases.lock(folder / "fitter.toml"))
    return folder / "fitter.toml"


def found(cases: Path) -> dict[str, tuple[str, list[str]]]:
    """The status of every case, and what moved where it failed."""
    results = {}
    for each in check_cases.check(cases):
        assert each.comparison is not None, each.error
        moves = [move for move in each.comparison.moves if move.failure]
        results[each.name] = each.status, [f"{move.what}: {move.detail}" for move in moves]
    return results


def test_nothing_changed(locked: Path) -> None:
    assert found(locked) == {"any": ("same", []), "served": ("same", [])}
    for program in (None, SERVER, ANY):
        said = command("check", "--cases", locked, program=program)
        assert (said.returncode, said.stdout) == (0, "2 cases: 2 unchanged\n"), "whatever the environment is for"


def set_fact(monkeypatch: pytest.MonkeyPatch, name: str, value: Any) -> None:
    """Have every version of llama-server set ``value`` by itself."""
    module = importlib.import_module("fitter.programs.facts")
    data = copy.deepcopy(module.data())
    data[SERVER][name] = [{"since": "0.13.1", "value": value, "source": "a test"}]
    monkeypatch.setattr(module, "data", lambda: data)
    assert getattr(program_facts(SERVER), name) == value


@named_cases(
    ("twice the checkpoints", "n_ctx_checkpoints", 64, "host: later +"),
    ("a larger prompt cache", "cache_ram_mib", 8193, "host: later +1.0 MiB"),
    ("outputs without a limit", "sets_outputs", False, "CUDA0: compute +"),
    ("more slots", "n_parallel", 8, "CUDA0: context +"),
)
def test_a_new_default_of_the_server_fails(
    name: str, value: Any, moved: str, locked: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later version of llama-server, which takes more."""
    set_fact(monkeypatch, name, value)
    results = found(locked)
    assert results["any"] == ("same", [])
    status, moves = results["served"]
    assert status == "failed"
    assert any(each.startswith(moved) for each in moves), moves


def test_a_default_that_takes_less_does_not_fail(locked: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_fact(monkeypatch, "cache_ram_mib", 4096)
    assert found(locked)["served"] == ("changed", [])


def test_a_case_without_a_program_is_locked_as_before(locked: Path) -> None:
    lock = check_cases.read_lock(locked.with_name("fitter.lock"))
    text = locked.with_name("fitter.lock").read_text()
    alone = text[text.index("[cases.any]") : text.index("[cases.served]")]
    assert "program" not in alone
    assert "later" not in alone
    assert lock.cases["served"].host.later > 8 * GIB
    assert lock.cases["served"].params.n_outputs_max == 4
    assert replace(lock.cases["any"].host, later=0) == lock.cases["any"].host
