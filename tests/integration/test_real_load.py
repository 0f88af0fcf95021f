"""Real models, loaded with the parameters that were fitted: they take the bytes that were predicted, and they generate.

The loads of one model, made in one way, are in a process of their own, one after another.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import fitter
from fitter.errors import PlanError
from tests.support.cases import cases, named_cases
from tests.support.command import run_python
from tools.models.tiny import TINY_DENSE, TINY_MOE, write_tiny
from tools.models.tiny_kinds import write_swa

LOAD = """
import json, sys
import llama_cpp
import fitter
from fitter.llama.processes import wire
from fitter.llama.load.breakdown import breakdown_of

path, how, load_options = sys.argv[1], sys.argv[2], json.loads(sys.argv[4])
for options in json.loads(sys.argv[3]):
    plan = fitter.fit(path, **options)
    if how == "plan.load":
        llm = plan.load(**load_options)
    else:
        llm = llama_cpp.Llama(path, **load_options, **plan.llama_kwargs())
    real = breakdown_of(llm._ctx.ctx)
    answer = llm.create_completion("ba lu mi", max_tokens=4, temperature=0)
    print(json.dumps({
        "predicted": wire.encode(plan.breakdown),
        "real": wire.encode(real),
        "after": wire.encode(breakdown_of(llm._ctx.ctx)),
        "tokens": answer["usage"]["completion_tokens"],
        "text": answer["choices"][0]["text"],
    }), flush=True)
    llm.close()
"""

OPTIONS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "n_ctx": {"n_ctx": 1000},
    "cache in q8_0": {"type_k": "q8_0", "type_v": "q8_0", "flash_attn": "on"},
    "cache K in q8_0": {"type_k": "q8_0", "flash_attn": "off"},
    "no flash attention": {"flash_attn": "off"},
    "four sequences": {"n_seq_max": 4},
    "four sequences, one cache": {"n_seq_max": 4, "kv_unified": True},
    "n_ubatch": {"n_ubatch": 128},
    "n_batch": {"n_batch": 64, "n_ubatch": 32},
    "n_ubatch over the default n_batch": {"n_ubatch": 4096},
    "cache on the host, no op_offload": {"offload_kqv": False, "op_offload": False},
}

SWA_OPTIONS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "swa_full": {"swa_full": True},
    "four sequences": {"n_seq_max": 4, "n_ctx": 8192},
}

FOR_LLAMA = ("defaults", "cache in q8_0", "no flash attention", "n_batch")
"""Options whose plans ``llama_cpp.Llama`` itself can take."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {
        "dense": write_tiny(folder / "dense.gguf", TINY_DENSE),
        "moe": write_tiny(folder / "moe.gguf", TINY_MOE),
        "swa": write_swa(folder / "swa.gguf"),
    }


def run(
    path: Path, options: Mapping[str, Any], how: str = "plan.load", **load_options: Any
) -> tuple[dict[str, Any], str]:
    """Fit and load ``path`` in a process of its own, and return its answer and its stderr.

    One process answers for all of a model's table of options.
    """
    table = SWA_OPTIONS if path.stem == "swa" else OPTIONS
    every = list(table.values()) if how == "plan.load" else [OPTIONS[name] for name in FOR_LLAMA]
    every = every if options in every and not load_options else [options]
    load_options = {"use_mmap": False, "verbose": False, **load_options}
    found, log = _run(str(path), how, json.dumps(every), json.dumps(load_options))
    return found[every.index(options)], log


@functools.cache
def _run(*arguments: str) -> tuple[list[dict[str, Any]], str]:
    done = run_python(LOAD, *arguments)
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()], done.stderr


def sizes(breakdown: Mapping[str, Any], *kinds: str) -> dict[tuple[str, str], int]:
    """Bytes by buffer type and kind, where there are any."""
    found = {
        (row["buffer_type"], kind): row[kind]
        for row in breakdown["rows"]
        for kind in kinds or ("model", "context", "compute")
    }
    return {key: size for key, size in found.items() if size}


def check(found: Mapping[str, Any]) -> None:
    predicted = sizes(found["predicted"])
    assert sizes(found["real"]) == predicted
    assert sizes(found["after"]) == predicted, "generating takes no more"
    assert {kind for _, kind in predicted} == {"model", "context", "compute"}
    assert found["real"]["n_ctx"] == found["predicted"]["n_ctx"]
    assert found["tokens"] == 4


# --- predicted and real bytes


@pytest.mark.parametrize("name", ["dense", "moe"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_loaded_plan_takes_the_predicted_bytes(
    models: Mapping[str, Path], name: str, options: Mapping[str, Any]
) -> None:
    found, log = run(models[name], options)
    check(found)
    assert log == ""


@cases(SWA_OPTIONS)
def test_sliding_windows_take_the_predicted_bytes(options: Mapping[str, Any], models: Mapping[str, Path]) -> None:
    found, _ = run(models["swa"], options)
    check(found)
    context = sum(sizes(found["predicted"], "context").values())
    full = found["predicted"]["n_ctx"] * 6 * 2 * 2 * 32 * 2  # layers, K and V, heads, head size, bytes of f16
    assert (context == full) == options.get("swa_full", False)


@cases(
    ("defaults", "n_ctx", "context"),
    ("defaults", "cache K in q8_0", "context"),
    ("cache K in q8_0", "cache in q8_0", "context"),
    ("four sequences", "defaults", "context"),
    ("no flash attention", "defaults", "compute"),
    ("defaults", "n_ubatch", "compute"),
    ("n_ubatch over the default n_batch", "defaults", "compute"),
)
def test_parameters_change_the_real_bytes(larger: str, smaller: str, kind: str, models: Mapping[str, Path]) -> None:
    """Were they lost on the way to llama.cpp, on both sides, prediction and reality would still agree."""
    more, less = (sum(sizes(run(models["moe"], OPTIONS[name])[0]["real"], kind).values()) for name in (larger, smaller))
    assert more > less


@pytest.mark.parametrize("name", ["dense", "moe", "swa"])
@pytest.mark.parametrize("options", FOR_LLAMA)
def test_llama_itself_takes_the_predicted_bytes(models: Mapping[str, Path], name: str, options: str) -> None:
    found, _ = run(models[name], OPTIONS[options], "llama_kwargs")
    check(found)


def test_mapped_weights_take_no_other_cache_and_compute_buffers(models: Mapping[str, Path]) -> None:
    found, _ = run(models["moe"], {}, use_mmap=True)
    assert sizes(found["real"], "context", "compute") == sizes(found["predicted"], "context", "compute")
    assert found["tokens"] == 4


def test_the_same_words_whoever_loads(models: Mapping[str, Path]) -> None:
    said = {how: run(models["moe"], {}, how)[0]["text"] for how in ("plan.load", "llama_kwargs")}
    assert said["plan.load"] == said["llama_kwargs"]
    assert said["plan.load"].strip()


# --- overrides


@named_cases(("without", []), ("with", ["ffn_down_exps=CPU"]))
def test_overrides_of_the_user_are_applied(overrides: list[str], models: Mapping[str, Path]) -> None:
    found, log = run(models["moe"], {"override_tensor": overrides}, verbose=True)
    check(found)
    moved = [line.split()[1] for line in log.splitlines() if "buffer type overridden to CPU" in line]
    layers = range(TINY_MOE.n_layer) if overrides else ()
    assert sorted(set(moved)) == [f"blk.{i}.ffn_down_exps.weight" for i in layers]


def test_llama_itself_has_no_overrides(models: Mapping[str, Path]) -> None:
    plan = fitter.fit(models["moe"], override_tensor=["ffn_down_exps=CPU"])
    with pytest.raises(PlanError, match=r"no parameter for tensor overrides.*use plan\.load\(\)"):
        plan.llama_kwargs()


# --- plans that cannot be loaded


@named_cases(
    (
        "virtual",
        {"gpus": ["24GiB"]},
        "the plan is for virtual devices, which cannot run a model: fit again without them",
    ),
    ("too little memory", {"host_memory": "1GiB"}, "the plan does not fit: "),
    ("both", {"gpus": ["24GiB"], "n_gpu_layers": 0, "host_memory": "1GiB"}, "the plan does not fit: "),
)
def test_a_plan_that_cannot_be_loaded(options: Mapping[str, Any], message: str, models: Mapping[str, Path]) -> None:
    plan = fitter.fit(models["moe"], **options)
    with pytest.raises(PlanError) as caught:
        plan.load()
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_a_model_that_is_gone(models: Mapping[str, Path], tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "gone.gguf")
    plan = fitter.fit(path)
    path.unlink()
    with pytest.raises(fitter.FitterError, match=r"gone\.gguf") as caught:
        plan.load(verbose=False)
    assert "\n" not in str(caught.value)
