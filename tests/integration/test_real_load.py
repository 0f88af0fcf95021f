"""Real models, loaded with the parameters that were fitted: they take the bytes that were predicted, and they generate.

The loads of one model, made in one way, are in a process of their own, one after another.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

import fitter
from examples.tiny_moe import TOKENS
from fitter.errors import PlanError
from fitter.llama.client import Worker
from fitter.planning.request.ask import Ask
from fitter.programs.later import output_bytes
from tests.support.cases import cases, named_cases, stored
from tests.support.command import json_of_python, run_python
from tools.faults.cut_servers import RpcServer
from tools.models import shapes
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

MODELS = {"dense": TINY_DENSE, "moe": TINY_MOE, "swa": write_swa}

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


# --- ``fitter.measure`` has both figures of a compute buffer: a dummy load's, and what a real load prints


MIB = 2**20
_PRINTED = re.compile(r"sched_reserve: +(\S+) compute buffer size = +([0-9.]+) MiB")


@pytest.fixture(scope="module")
def servers() -> Iterator[list[str]]:
    with RpcServer() as first, RpcServer() as second:
        yield [first.address, second.address]


# model, rpc-servers, parameters, whether the real figure is another one than the dummy's
@cases(stored("real_load", "the_figure_of_a_real_load"))
def test_the_figure_of_a_real_load(
    name: str, n_servers: int, parameters: dict[str, Any], differs: bool, models: dict[str, Path], servers: list[str]
) -> None:
    rpc = servers[:n_servers]
    dummy = fitter.measure(models[name], rpc=rpc, **parameters)
    log: list[str] = []
    with Worker(rpc=rpc, on_log=log.append) as worker:
        real = worker.load(models[name], Ask.of_a_load(parameters).load).breakdown
    assert dummy.real.rows == real.rows
    printed = dict(match.groups() for line in log if (match := _PRINTED.search(line)))
    reserved = {row.buffer_type: f"{row.reserved / MIB:.2f}" for row in dummy.rows if row.reserved}
    assert reserved == printed and printed
    assert any(row.reserved != row.compute for row in dummy.rows) == differs


def test_a_plan_has_room_when_it_is_loaded(tmp_path: Path) -> None:
    # a real load of what is found first takes up to 68 MiB more on a device than its dummy load
    gpus = ["4x 4GiB:free=2908MiB", "2x 3GiB:free=1925MiB", "2x 2GiB:free=942MiB"]
    steps: list[str] = []
    model = shapes.write("qwen3-32b", tmp_path, vocab=False)
    plan = fitter.fit(model, gpus=gpus, margin=0, on_progress=lambda step: steps.append(step.text))
    assert any(step.startswith("searching again: in use, it would take ") for step in steps)
    real = plan.breakdown.real
    assert plan.fits
    assert all(use.free >= real.on(use.name).used for use in plan.devices)


# --- how much llama.cpp keeps of the outputs of a batch, against the buffers that it really allocates for them


MODEL = TINY_DENSE

N_VOCAB = len(TOKENS)
N_BATCH = 64

ALLOCATED = """
import ctypes, json, sys
from fitter.llama.build import library as native
from fitter.llama.processes import interpreter
interpreter.become_worker()
from fitter.llama.load.breakdown import breakdown_of
from fitter.llama.build.functions import Batch
native.prepare()
library = native.libraries()
llama, backend = library.llama, native.open_backend()
path, settings = sys.argv[1], json.loads(sys.argv[2])

def decode(n_outputs):
    n = settings["n_batch"]
    sequence = ctypes.pointer(ctypes.c_int32(0))
    asked = (ctypes.c_int8 * n)(*[1] * n_outputs + [0] * (n - n_outputs))
    batch = Batch(n, (ctypes.c_int32 * n)(*range(n)), None, None, (ctypes.c_int32 * n)(*[1] * n),
                  (ctypes.POINTER(ctypes.c_int32) * n)(*[sequence] * n), ctypes.cast(asked, ctypes.c_void_p))
    assert llama.llama_decode(context, batch) == 0
    llama.llama_synchronize(context)

model = llama.llama_model_load_from_file(path.encode(), llama.llama_model_default_params())
params = llama.llama_context_default_params()
params.n_ctx = params.n_batch = params.n_ubatch = 4 * settings["n_batch"]
params.n_seq_max, params.n_outputs_max = settings["n_seq_max"], settings["n_outputs"]
params.embeddings, params.n_threads = settings["embeddings"], 1
context = llama.llama_init_from_model(model, params)
if settings["warm"]:
    decode(1)
if settings["has_samplers"]:
    raw = llama.library
    raw.llama_sampler_chain_init.restype = raw.llama_sampler_init_top_k.restype = ctypes.c_void_p
    chain = raw.llama_sampler_chain_init(ctypes.c_bool(False))
    raw.llama_sampler_chain_add(ctypes.c_void_p(chain), ctypes.c_void_p(raw.llama_sampler_init_top_k(10)))
    assert raw.llama_set_sampler(ctypes.c_void_p(context), 0, ctypes.c_void_p(chain))
assert backend.fitter_allocations_begin(True)
decode(settings["n_outputs"])
rows = library.ffi.new("fitter_row_t[]", 16)
count = backend.fitter_allocations_rows(rows, 16)
print(json.dumps([sum(int(row.model) for row in rows[0:count]), breakdown_of(context).host.compute]))
"""


def allocated(path: Path, **settings: object) -> tuple[int, int]:
    """Bytes of the buffers that computing with a batch made llama.cpp allocate, and of those that it computes in.

    ``warm``: after it had computed with one output; with ``has_samplers`` it gets a sampler after that.
    """
    settings = {
        "n_batch": N_BATCH,
        "n_seq_max": 1,
        "embeddings": False,
        "has_samplers": False,
        "warm": True,
        **settings,
    }
    taken, compute = json_of_python(ALLOCATED, path, json.dumps(settings))
    return int(taken), int(compute)


@named_cases(
    ("all of a batch", {"n_outputs": N_BATCH}, output_bytes(N_BATCH, N_VOCAB)),
    ("some of a batch", {"n_outputs": 5}, output_bytes(5, N_VOCAB)),
    ("as many as sequences", {"n_outputs": 4, "n_seq_max": 4}, 0),
    (
        "embeddings",
        {"n_outputs": N_BATCH, "embeddings": True, "warm": False},
        output_bytes(N_BATCH, N_VOCAB, n_embd=TINY_DENSE.n_embd),
    ),
)
def test_outputs_have_a_buffer_of_their_own(settings: dict[str, int], expected: int, model: Path) -> None:
    assert allocated(model, **settings)[0] == expected


def test_a_sampler_on_the_device_has_its_rows_on_the_host(model: Path) -> None:
    taken, compute = allocated(model, n_outputs=1, has_samplers=True)
    # with a sampler the graphs are reserved again, in larger buffers
    assert taken == compute + output_bytes(1, N_VOCAB, has_samplers=True)
