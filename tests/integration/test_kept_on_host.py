"""Weights that llama.cpp keeps on the host although the plan has their layer on a device, by the real libllama."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import fitter
from fitter.api.call_worker import one_load
from fitter.api.report_plan import layer_map
from fitter.llama.build import verdicts
from fitter.llama.build.build_folder import find
from fitter.llama.build.library import own_libraries
from fitter.llama.build.verdicts import answers_folder
from fitter.llama.client import Worker
from fitter.llama.load.canary import DENSE, write
from fitter.llama.types import VirtualDevice, describe
from fitter.model.header import open_model
from fitter.planning.plan.plan import Plan
from fitter.planning.request.ask import Ask
from fitter.planning.speed.model_facts import facts_of
from fitter.planning.speed.work import host_only_tensors
from tests.support.cases import cases, named_cases
from tests.support.command import json_of_python
from tools.loopback import rpc_servers
from tools.models.tiny import TINY_DENSE, write_tiny

TERNARY = "shape://llama-3.2-1b:TQ2_0"
NOTE = (
    "112 tensors (239.2 MiB) of layers on {} stay in host memory, and the host computes with them: they have no "
    "kernels in llama.cpp there"
)


def planned(worker: Worker, model: str, *gpus: str, **given: object) -> Plan:
    keywords = {"n_ctx": 4096, "host_memory": "64GiB", "host_bandwidth": "60GB/s", **given}
    return fitter.fit(model, gpus=gpus, worker=worker, **keywords)  # type: ignore[arg-type]


@named_cases(
    # how many weights, and the name of one
    ("ternary, CUDA", TERNARY, "rtx-4090", 7 * 16, "blk.0.attn_q.weight"),
    ("ternary, ROCm", TERNARY, "rx-7900-xtx", 7 * 16, "blk.15.ffn_down.weight"),
    ("ternary, Vulkan", TERNARY, "vulkan:24GiB", 0, ""),
    ("the other ternary one, Metal", "shape://llama-3.2-1b:TQ1_0", "metal:64GiB", 7 * 16, "blk.0.attn_q.weight"),
    # what is quantized in rows of 256 is another type where rows have no such length
    ("ternary experts", "shape://qwen3-30b-a3b:TQ1_0", "rtx-4090", 7 * 48, "blk.0.ffn_up_exps.weight"),
    ("ternary, a part of attention", "shape://gpt-oss-20b:TQ2_0", "rtx-4090", 24, "blk.0.attn_output.weight"),
    ("embeddings of each layer", "shape://gemma-3n-e4b:Q4_0", "rtx-4090", 0, ""),
    ("a state, CUDA", "shape://mamba-130m", "rtx-4090", 0, ""),
    ("a state, Vulkan", "shape://mamba-130m", "vulkan:24GiB", 24, "blk.0.ssm_a"),
    ("an encoder, whose embedding is only looked up", "shape://bge-small-en-v1.5", "rtx-4090", 0, ""),
)
def test_what_is_kept_is_what_llama_cpp_has_on_the_host(
    model: str, gpu: str, count: int, name: str, worker: Worker
) -> None:
    with one_load(Ask.of_a_load({"gpus": (gpu,), "n_ctx": 512}), model, worker, None) as load:
        breakdown, layout = load.measured()
        facts, tensors = facts_of(load.model), {tensor.name: tensor.bytes for tensor in load.model.tensors}
    kept = host_only_tensors(facts, layout, ()).without_kernels
    assert len(kept) == count and (not name or name in kept)
    # and the load has room for all of them there, beside the embeddings
    on_device = sum(tensors[each] for each in layout.on_device if each in tensors)
    embeddings = sum(size for each, size in tensors.items() if each.endswith(("token_embd.weight", "_types.weight")))
    embeddings += tensors.get("position_embd.weight", 0)
    assert breakdown.host.model == pytest.approx(sum(tensors[each] for each in kept) + embeddings, rel=0.001)
    assert sum(row.model for row in breakdown.rows if not row.is_host) == pytest.approx(on_device, rel=0.001)


def test_the_card_does_not_compute_with_what_it_has_no_kernels_for(worker: Worker) -> None:
    ternary, other = (planned(worker, f"shape://llama-3.2-1b:{kind}", "rtx-4090") for kind in ("TQ2_0", "Q8_0"))
    assert ternary.params.n_gpu_layers == other.params.n_gpu_layers == 17
    assert ternary.estimate and other.estimate
    # seven times the bits are slower to read, and yet faster
    assert 4 * ternary.estimate.generation_tokens_per_second < other.estimate.generation_tokens_per_second
    assert 20 * ternary.estimate.prompt_tokens_per_second < other.estimate.prompt_tokens_per_second
    parts = {part.name: part for part in ternary.estimate.parts}
    assert parts["host: weights"].generation > 10 * parts["CUDA0: weights"].generation
    assert parts["graph splits"].generation > parts["CUDA0: layers"].generation
    assert [note for note in ternary.notes if "kernels" in note] == [NOTE.format("CUDA0")]
    assert not [note for note in other.notes if "kernels" in note]
    # the bound knows of it as well
    assert ternary.bound is not None and ternary.bound.times < 2


@named_cases(
    ("attention is worth the splits", {"prompt": 3500, "generate": 512}, 17),
    ("little to attend to is not", {"prompt": 64, "generate": 512}, 1),
)
def test_layers_of_which_little_is_computed_there_are_on_a_card_where_that_is_faster(
    workload: dict[str, object], n_gpu_layers: int, worker: Worker
) -> None:
    plan = planned(worker, TERNARY, "rtx-4090", **workload)
    assert plan.params.n_gpu_layers == n_gpu_layers and plan.estimate is not None
    for other in {1, 17} - {n_gpu_layers}:
        slower = planned(worker, TERNARY, "rtx-4090", **workload, n_gpu_layers=other, n_ctx=plan.params.n_ctx)
        assert slower.estimate is not None and slower.params.n_gpu_layers == other
        assert slower.estimate.seconds > 1.1 * plan.estimate.seconds


TOO_LARGE = "shape://llama-4-maverick:Q8_0"


def test_a_card_does_not_compute_with_what_is_too_large_for_it(worker: Worker) -> None:
    vulkan, cuda = (
        planned(worker, TOO_LARGE, gpu, host_memory="600GiB") for gpu in ("vulkan:512GiB", "cuda:9.0:512GiB")
    )
    assert vulkan.fits and cuda.fits and vulkan.params.n_gpu_layers == cuda.params.n_gpu_layers == 49
    assert vulkan.breakdown.host.model > 380 * 2**30 and cuda.breakdown.host.model < 2 * 2**30
    assert vulkan.estimate and cuda.estimate
    parts = {part.name: part for part in vulkan.estimate.parts}
    assert parts["host: weights"].generation > 2 * parts["Vulkan0: weights"].generation
    assert not any(part.name.startswith("host: weights") for part in cuda.estimate.parts)
    assert [note for note in vulkan.notes if "host computes" in note] == [
        "72 tensors (382.5 GiB) of layers on Vulkan0 stay in host memory, and the host computes with them: they are "
        "larger than a tensor may be there"
    ]
    batches = {"n_batch": vulkan.params.n_batch, "n_ubatch": vulkan.params.n_ubatch}
    found = fitter.estimate(
        TOO_LARGE, gpus="vulkan:512GiB", n_ctx=4096, host_bandwidth="60GB/s", n_seq_max=4, kv_unified=True, **batches
    )
    assert found.estimate == vulkan.estimate.estimate


def test_what_is_too_large_for_a_card_takes_no_room_on_it(worker: Worker) -> None:
    small, large = (planned(worker, TOO_LARGE, gpu, host_memory="600GiB") for gpu in ("vulkan:20GiB", "vulkan:512GiB"))
    assert small.breakdown.on("Vulkan0").model == large.breakdown.on("Vulkan0").model
    assert small.params.tensor_buft_overrides == () and small.params.n_gpu_layers == 49


@named_cases(
    ("ternary", TERNARY, ("rtx-4090",), {}),
    ("ternary, a part on the card", TERNARY, ("rtx-4090",), {"n_gpu_layers": 5}),
    ("ternary, Metal", "shape://llama-3.2-1b:TQ1_0", ("metal:16GiB",), {"host_memory": None}),
    ("an embedding that is the output, Metal", "shape://llama-3.2-1b:Q4_0", ("metal:16GiB",), {"host_memory": None}),
    ("two kinds, the first has no kernels", TERNARY, ("rtx-4060", "vulkan:8GiB"), {"tensor_split": [1, 1]}),
    ("ternary experts, a small card", "shape://qwen3-30b-a3b:TQ1_0", ("4GiB",), {}),
    ("a state", "shape://mamba-130m", ("vulkan:8GiB",), {"n_gpu_layers": 25}),
    ("too large for a tensor", "shape://llama-4-maverick:Q8_0", ("vulkan:24GiB",), {"host_memory": "600GiB"}),
    (
        "too large for one of two",
        *("shape://llama-4-maverick:Q8_0", ("vulkan:24GiB", "rtx-4090")),
        {"host_memory": "600GiB", "tensor_split": [29, 20], "cpu_moe": False},
    ),
    ("embeddings of each layer", "shape://gemma-3n-e4b:Q4_0", ("8GiB",), {}),
)
def test_rows_of_the_map_add_up_to_the_plans_bytes(
    model: str, gpus: tuple[str, ...], given: dict[str, object], worker: Worker
) -> None:
    plan = planned(worker, model, *gpus, **given)
    found = layer_map(plan, open_model(model, worker.header), worker)
    assert found is not None
    host = plan.breakdown.host
    assert found.on("host") == pytest.approx(host.model + host.context, rel=0.001, abs=2**14)
    for row in map(plan.breakdown.on, plan.breakdown.devices):
        assert found.on(str(row.device)) == pytest.approx(row.model + row.context, rel=0.001, abs=2**14)


def test_a_device_of_another_kind_computes_with_its_part(worker: Worker) -> None:
    both = planned(worker, TERNARY, "rtx-4060", "vulkan:8GiB", tensor_split=[8, 9])
    assert both.estimate is not None
    parts = {part.name: part for part in both.estimate.parts}
    assert parts["host: weights"].generation > 0 and parts["Vulkan0: weights"].generation > 0
    assert [note for note in both.notes if "kernels" in note] == [
        NOTE.format("CUDA0").replace("112", "56").replace("239.2", "119.6")
    ]


def test_a_server_computes_with_what_a_card_here_could_not(worker: Worker) -> None:
    with rpc_servers.servers(1) as endpoints:
        plan = fitter.fit(
            TERNARY, rpc=endpoints, n_ctx=512, n_gpu_layers=17, rpc_bandwidth="10GB/s", host_bandwidth="60GB/s"
        )
    assert plan.estimate is not None and plan.breakdown.on("RPC0").model > 300 * 2**20
    assert {part.name for part in plan.estimate.parts} >= {"RPC0: weights", "RPC0: attention"}
    assert not [part.name for part in plan.estimate.parts if part.name.startswith("host")]
    assert not [note for note in plan.notes if "kernels" in note]


# --- layouts of weights that only the processor here has: not on a described machine, nor where llama.cpp crashes


CRASHED = "it ended with signal 11 when a small model was loaded"

# A processor with AMX: ggml's CPU buffer type under that name, which llama.cpp then prefers to CPU_REPACK.
WITH_AMX = """
import ctypes, json, sys
from fitter.llama.build import library as native
from fitter.llama.load import backend_devices
from fitter.llama.processes import interpreter
from fitter.llama.load.backend_devices import registry
from fitter.llama.load.loader import Loader
from fitter.llama.types import Params

interpreter.become_worker()
native.prepare()
ggml = native.libraries().llama.library
LIST, NAME = b"ggml_backend_dev_get_extra_bufts", ctypes.CFUNCTYPE(ctypes.c_char_p, ctypes.c_void_p)
LOOK_UP = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)
OFFER = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)

def function(name, result, *arguments):
    found = getattr(ggml, name)
    found.restype, found.argtypes = result, arguments
    return found

cpu = function("ggml_backend_dev_by_type", ctypes.c_void_p, ctypes.c_int)(0)
registration = function("ggml_backend_dev_backend_reg", ctypes.c_void_p, ctypes.c_void_p)(cpu)
plain = function("ggml_backend_cpu_buffer_type", ctypes.c_void_p)()
look_up = (ctypes.c_void_p * 6).from_address(registration)
own = LOOK_UP(look_up[4])
amx = (ctypes.c_void_p * 8)(*(ctypes.c_void_p * 8).from_address(plain))
name = NAME(lambda _: b"AMX")
amx[0] = ctypes.cast(name, ctypes.c_void_p).value
types = [ctypes.addressof(amx)]
if (offered := own(registration, LIST)) and (pointer := OFFER(offered)(cpu)):
    every = ctypes.cast(pointer, ctypes.POINTER(ctypes.c_void_p))
    while every[len(types) - 1]:
        types.append(every[len(types) - 1])
array = (ctypes.c_void_p * (len(types) + 1))(*types, None)
offer = OFFER(lambda _: ctypes.addressof(array))
other = LOOK_UP(lambda asked, name: ctypes.cast(offer, ctypes.c_void_p).value if name == LIST else own(asked, name))
look_up[4] = ctypes.cast(other, ctypes.c_void_p).value

backend = native.open_backend()
assert backend.fitter_virtual_has_own_layouts()

def has_amx():
    loader = Loader(registry())
    try:
        found = loader.measure(sys.argv[1], Params(n_ctx=256, devices=(), n_gpu_layers=0))
    finally:
        loader.close()
    return "AMX" in {row.buffer_type for row in found.rows}

said = []
"""


def run(code: str, model: Path, cache: Path) -> Any:
    return json_of_python(f"{WITH_AMX}{code}\nprint(json.dumps(said))", model, XDG_CACHE_HOME=str(cache))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("models"), DENSE)


def test_only_this_machine_has_them(model: Path, tmp_path: Path) -> None:
    described = "; ".join(
        f"backend.fitter_virtual_host_is_described({is_described}); said.append(has_amx())"
        for is_described in (True, False)
    )
    assert run(f"said.append(has_amx()); {described}", model, tmp_path) == [True, False, True]


@cases(("", False), (CRASHED, True))
def test_what_crashes_is_left_out(
    problem: str, is_left_out: bool, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    kept_verdict(problem)
    code = (
        "said += [backend_devices.settle_host_layouts(), has_amx()]; backend.fitter_virtual_host_is_described(False); "
    )
    assert run(code + "said.append(has_amx())", model, tmp_path) == [is_left_out, not is_left_out, not is_left_out]


def kept_verdict(problem: str) -> None:
    """Have it be known already how this build computes."""
    build = find(os.environ.get("FITTER_LLAMA_CPP", "python"))
    assert verdicts.problem_of_computing(build, own_libraries()) == ""
    (file,) = answers_folder().glob("computing-*.json")
    file.write_text(json.dumps({"problem": problem}))


@cases(("", True), (CRASHED, False))
def test_a_worker_has_them_where_it_is_asked_about_this_machine(
    problem: str, is_there: bool, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    kept_verdict(problem)
    mac = describe([VirtualDevice("MTL0", "Apple M3 Max", "metal", 0, 2**36, 2**36)])
    code = f"""
from fitter.llama.worker.worker import Commands

session = Commands()
for description in ({mac!r}, "", {mac!r}):
    session.configure(description)
    rows = session.measure(sys.argv[1], Params(n_ctx=256, devices=(), n_gpu_layers=0), "own", False).rows
    said.append("AMX" in {{row.buffer_type for row in rows}})
"""
    assert run(code, model, tmp_path) == [False, is_there, False]


@cases(("", False), (CRASHED, True))
def test_a_model_is_loaded_without_what_crashes(
    problem: str, is_warned: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    kept_verdict(problem)
    code = """
import warnings
import fitter

with warnings.catch_warnings(record=True) as warned:
    warnings.simplefilter("always")
    llm = fitter.Llama(sys.argv[1], n_ctx=256, gpus=None, verbose=False)
said += [any("crashes where it computes with AMX" in str(each.message) for each in warned)]
said += [has_amx()]
"""
    tiny = write_tiny(tmp_path / "tiny.gguf", TINY_DENSE)
    assert run(code, tiny, tmp_path) == [is_warned, not is_warned]


def test_what_cannot_be_tried_is_not_left_out(model: Path, tmp_path: Path) -> None:
    code = """
from fitter.errors import LibraryError
from fitter.llama.build import verdicts

def refuse(*_):
    raise LibraryError("not now")

verdicts.problem_of_computing = refuse
said += [backend_devices.settle_host_layouts(), has_amx()]
"""
    assert run(code, model, tmp_path) == [False, True]


def test_it_is_tried_with_a_real_load() -> None:
    code = """
import os
from fitter.llama.load import canary

class Loaded(canary.RealLoad):
    def __init__(self, *arguments):
        super().__init__(*arguments)
        os.abort()

canary.RealLoad = Loaded
canary.compute()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=120, check=False)
    assert done.returncode == -signal.SIGABRT
