"""``fitter.Llama`` and ``plan.load``: one call that fits and loads, and a model that is what its users know."""

from __future__ import annotations

import copy
import ctypes
import pickle
import subprocess
import sys
import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import llama_cpp
import pytest

import fitter
from fitter.errors import ModelError, PlanError, PlanWarning, UsageError
from fitter.llama.load.breakdown import breakdown_of
from fitter.llama.load.structs import apply
from fitter.llama.types import TensorBuftOverride
from fitter.parameters.table import of_a_struct
from tests.support.cases import cases

OPTIONS: dict[str, Any] = {"n_ctx": 512, "verbose": False, "n_threads": 1}


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[llama_cpp.Llama]:
    # a tuple of patterns is what only fit knows, a chat format what only Llama knows
    loaded = fitter.Llama(
        model, override_tensor=["ffn_down_exps=CPU"], type_k="q8_0", chat_format="chatml", seed=7, **OPTIONS
    )
    yield loaded
    loaded.close()


def say(llm: llama_cpp.Llama) -> Any:
    return llm.create_completion("ba lu mi", max_tokens=4, temperature=0)["choices"][0]["text"]  # type: ignore[index]


def rows(breakdown: fitter.Breakdown) -> dict[str, tuple[int, int, int]]:
    return {row.buffer_type: (row.model, row.context, row.compute) for row in breakdown.rows if row.used}


def test_it_is_a_llama_with_its_plan(llm: llama_cpp.Llama, model: Path) -> None:
    assert repr(llm).startswith("<Llama: Plan: ")
    assert isinstance(llm, llama_cpp.Llama)
    assert isinstance(llm, fitter.Llama)
    assert not issubclass(llama_cpp.Llama, fitter.Llama)
    plan = llm.plan
    assert isinstance(plan, fitter.Plan)
    assert plan.fits
    assert plan.model.path == str(model)
    assert llm.n_ctx() == plan.params.n_ctx == 512
    assert llm.context_params.type_k == llama_cpp.GGML_TYPE_Q8_0
    assert llm.chat_format == "chatml"
    assert llm._seed == 7
    assert llm.n_threads == 1


def test_it_does_what_a_llama_does(llm: llama_cpp.Llama) -> None:
    chat: Any = llm.create_chat_completion(messages=[{"role": "user", "content": "ba"}], max_tokens=4)
    assert chat["usage"]["completion_tokens"] == 4
    streamed: Any = llm.create_completion("ba lu mi", max_tokens=4, temperature=0, stream=True)
    assert "".join(part["choices"][0]["text"] for part in streamed) == say(llm)
    said, state = say(llm), llm.save_state()
    llm.load_state(state)
    assert say(llm) == said


def test_copies_are_loaded_again(llm: llama_cpp.Llama) -> None:
    for again in (pickle.loads(pickle.dumps(llm)), copy.copy(llm)):
        assert again.plan == llm.plan
        assert again.chat_format == "chatml"
        assert say(again) == say(llm)
        again.close()
        again.close()


def test_all_that_a_plan_has_is_in_the_structs() -> None:
    """``PlannedLlama`` copies the fields that ``apply`` writes; one that is forgotten would be llama.cpp's default."""
    params = fitter.Params(
        tensor_split=(1.0,), devices=(), tensor_buft_overrides=(TensorBuftOverride("a", "CPU"),), n_ctx=512
    )
    structs = llama_cpp.llama_model_default_params(), llama_cpp.llama_context_default_params()
    for struct in structs:
        # what no parameter is
        ctypes.memset(ctypes.addressof(struct), 0x5A, ctypes.sizeof(struct))
    before = [bytes(struct) for struct in structs]
    kept = apply(params, *structs)
    written = []
    for struct, old in zip(structs, before, strict=True):
        places = [(name, getattr(type(struct), name)) for name, *_ in struct._fields_]
        ends = {name: slice(place.offset, place.offset + place.size) for name, place in places}
        written.append({name for name, where in ends.items() if bytes(struct)[where] != old[where]})
    assert kept
    # llama-cpp-python's llama.cpp has no cache of experts
    there = [{each.field for each in of_a_struct(struct)} - {"moe_cache_size"} for struct in ("model", "context")]
    assert written == there


def test_embeddings_take_the_predicted_bytes(model: Path) -> None:
    plan = fitter.fit(model, n_ctx=512, embedding=True)
    llm = plan.load(verbose=False, use_mmap=False)
    assert rows(breakdown_of(llm.ctx)) == rows(plan.breakdown)
    assert plan.params.n_batch == plan.params.n_ubatch == 512
    texts = [f"ba lu {'mi ' * (i % 3)}" for i in range(300)]
    found: Any = llm.create_embedding(texts)
    assert len(found["data"]) == 300
    upstream = llama_cpp.Llama(
        str(model), n_ctx=512, n_batch=plan.params.n_batch, flash_attn=True, embedding=True, verbose=False
    )
    assert llm.embed(texts[1]) == upstream.embed(texts[1])
    assert plan.arguments()[-3:] == ["-kvu", "-fit", "off"]
    assert "--embedding" in plan.arguments()
    llm.close()
    upstream.close()


def test_llama_itself_embeds_what_was_planned(model: Path) -> None:
    plan = fitter.fit(model, n_ctx=512, embedding=True)
    llm = llama_cpp.Llama(str(model), verbose=False, use_mmap=False, **plan.llama_kwargs())
    assert rows(breakdown_of(llm.ctx)) == rows(plan.breakdown)
    assert llm.context_params.n_seq_max == plan.params.n_seq_max == 256
    assert len(llm.embed(["ba", "lu"])) == 2
    llm.close()


@pytest.mark.parametrize(
    ("said", "planned"),
    [
        ({"flash_attn": True}, {"flash_attn": "on"}),
        ({"flash_attn": False}, {"flash_attn": "off"}),
        ({"type_k": llama_cpp.GGML_TYPE_Q8_0}, {"type_k": "q8_0"}),
        ({"type_v": None, "tensor_split": None, "swa_full": None, "op_offload": None}, {"type_v": "f16"}),
        ({"split_mode": llama_cpp.LLAMA_SPLIT_MODE_NONE}, {"split_mode": "none"}),
        ({"n_gpu_layers": 0}, {"n_gpu_layers": 0}),
    ],
    ids=str,
)
def test_what_llama_calls_differently(model: Path, said: Mapping[str, Any], planned: Mapping[str, Any]) -> None:
    """Who has called ``llama_cpp.Llama`` so far need not say it in other words."""
    llm = fitter.Llama(model, **{**OPTIONS, **said})
    assert {name: getattr(llm.plan.params, name) for name in planned} == planned
    llm.close()


def test_what_a_chat_handler_brings_is_told(model: Path) -> None:
    class Handler:
        clip_model_path = "projector.gguf"

    handler: Any = Handler()
    with pytest.warns(PlanWarning, match="projector.gguf takes memory that the plan does not include") as caught:
        fitter.Llama(model, chat_handler=handler, **OPTIONS).close()
    assert caught[0].filename == __file__, "who is told is who called"


@cases(("60MiB", True), ("2GiB", False))
def test_what_logits_of_all_tokens_take_is_told(host_memory: str, is_told: bool, model: Path) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", PlanWarning)
        options = {**OPTIONS, "n_ctx": 16384, "logits_all": True, "host_memory": host_memory, "host_margin": 0}
        fitter.Llama(model, **options).close()
    assert ["keeps up to 32366592 bytes" in str(warning.message) for warning in caught] == [True] * is_told


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"n_thread": 3}, UsageError, "fitter.Llama has no keyword 'n_thread'; did you mean 'n_threads'?"),
        ({"marginn": 3}, UsageError, "fitter.Llama has no keyword 'marginn'; did you mean 'margin'?"),
        ({"lora_path": "adapter.gguf"}, UsageError, "lora_path='adapter.gguf' takes memory"),
        ({"vocab_only": True}, UsageError, "vocab_only=True"),
        ({"type_k": 9999}, UsageError, "type_k is 9999: give one of 0"),
        ({"split_mode": 7}, UsageError, "split_mode is 7: give one of 0"),
        ({"split_mode": llama_cpp.LLAMA_SPLIT_MODE_ROW}, UsageError, "split mode 'row' cannot be fitted"),
        ({"rpc": "nowhere"}, UsageError, "host:port"),
        ({"host_memory": "1MiB"}, PlanError, "the plan does not fit: the host lacks"),
        ({"gpus": ["24GiB"]}, PlanError, "virtual devices"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_words_that_make_no_sense(model: Path, options: Mapping[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message.replace("?", r"\?")) as caught:
        fitter.Llama(model, **{**OPTIONS, **options})
    assert "\n" not in str(caught.value)


HUB = """
from pathlib import Path

import huggingface_hub.utils

FILES = Path(__file__).parents[1] / "files"


class HfFileSystem:
    def ls(self, repo_id, recursive):
        return [f"{repo_id}/{path.name}" for path in FILES.iterdir()]


def hf_hub_download(repo_id, filename, **_):
    if repo_id == "a/offline":
        raise OSError("no network")
    return str(FILES / filename)
"""


@pytest.fixture
def hub(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A package in the place of ``huggingface_hub`` that has a directory for a hub."""
    package = tmp_path / "huggingface_hub"
    package.mkdir()
    (package / "__init__.py").write_text(HUB)
    (package / "utils.py").write_text("def validate_repo_id(repo_id): pass\n")
    (tmp_path / "files").mkdir()
    for name in ("one.gguf", "two.gguf"):
        (tmp_path / "files" / name).symlink_to(model)
    saved = {name: sys.modules.pop(name) for name in list(sys.modules) if name.startswith("huggingface_hub")}
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    for name in [name for name in sys.modules if name.startswith("huggingface_hub")]:
        del sys.modules[name]
    sys.modules.update(saved)


@pytest.mark.usefixtures("hub")
def test_a_model_of_the_hub(model: Path, tmp_path: Path) -> None:
    llm = fitter.Llama.from_pretrained("a/b", "one*", margin=0, local_dir=str(tmp_path / "files"), **OPTIONS)
    assert isinstance(llm, fitter.Llama)
    assert Path(llm.plan.model.path).resolve() == model
    assert (llm.plan.params.n_ctx, llm.n_threads) == (512, 1)
    llm.close()


@pytest.mark.usefixtures("hub")
@cases(
    ("a/b", "*.gguf", {}, UsageError, "a/b: Multiple files found in a/b matching"),
    ("a/b", "x.gguf", {}, UsageError, "a/b: No file found in a/b that match x.gguf"),
    ("a/offline", "one.gguf", {}, ModelError, "a/offline cannot be downloaded: no network"),
    ("a/offline", "one.gguf", {"n_ctxx": 1}, UsageError, "fitter.Llama has no keyword 'n_ctxx'; did you mean 'n_ctx'"),
)
def test_what_goes_wrong_with_the_hub(
    repository: str, pattern: str, options: Mapping[str, Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message.replace("*", r"\*")) as caught:
        fitter.Llama.from_pretrained(repository, pattern, **options)
    assert "\n" not in str(caught.value)


def test_without_the_package_of_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(fitter.LibraryError, match="from_pretrained needs huggingface-hub: pip install huggingface-hub"):
        fitter.Llama.from_pretrained("a/b", "c")


def test_it_cannot_be_subclassed() -> None:
    with pytest.raises(TypeError, match="cannot be subclassed"):
        type("Mine", (fitter.Llama,), {})


def test_a_plan_keeps_the_keywords_of_fit(model: Path) -> None:
    plan = fitter.fit(model, n_ctx=512, type_k="q8_0")
    assert plan.fit_keywords["n_ctx"] == 512
    assert plan.fit_keywords["type_k"] == "q8_0"
    assert "model" not in plan.fit_keywords
    assert not {"asked", "fit_keywords"} & plan.to_dict().keys()
    again = fitter.fit(plan.model.path, **plan.fit_keywords)
    assert (again.params, again.breakdown.rows) == (plan.params, plan.breakdown.rows)


def test_nothing_is_said_where_all_is_well(model: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fitter.Llama(model, **OPTIONS).close()


def test_loads_at_the_same_time(model: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """llama-cpp-python turns stdout and stderr off for each of them, and must find what it left."""
    with ThreadPoolExecutor(4) as threads:
        loaded = list(threads.map(lambda _: fitter.Llama(model, **OPTIONS), range(8)))
    assert len({say(each) for each in loaded}) == 1
    for each in loaded:
        each.close()
    subprocess.run([sys.executable, "-c", "print('still there')"], check=True, timeout=60)
    assert capfd.readouterr().out == "still there\n"


def test_llama_cpp_is_imported_with_the_first_model() -> None:
    heavy = "{'llama_cpp', 'numpy', 'fitter.api.fits.fit_model'}"
    code = f"import fitter, sys; fitter.Llama; assert not {heavy} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
