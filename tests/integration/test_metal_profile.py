"""The metal profile beside its table of answers (test_profile_tables), and ggml-metal's own C++."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import fitter
from fitter.llama.client import Worker
from fitter.llama.types import Params, describe
from fitter.machine.gpu import parse_gpus
from tools import shapes
from tools.backend_loads import METAL, answers, stored
from tools.metal import check
from tools.metal.build import build
from tools.oracle import operations
from tools.tiny import write_tiny

SAMPLE = 5
"""One row of so many is asked about."""


@pytest.mark.slow
def test_the_real_code_gives_the_stored_answers(tmp_path: Path) -> None:
    fetch = Path(__file__).parents[2] / "vendor" / "llama.cpp" / "fetch.py"
    done = subprocess.run([sys.executable, str(fetch)], capture_output=True, text=True, check=True)
    source = Path(done.stdout.strip())
    library = build(source, tmp_path, operations.LIBRARIES / "libggml-base.so.0")
    ops = operations.build_ops(source / "ggml" / "include", tmp_path)
    assert check.compare_operations(ops, library, 200_000) == "different: 0"
    sample = stored(METAL)[::SAMPLE]
    real = answers(
        [load for load, _ in sample],
        lambda load: shapes.write(load.model, tmp_path, vocab=False),
        lambda load: check.variables(load, library),
    )
    assert list(real) == [answer for _, answer in sample]


def test_what_a_mac_says_of_itself() -> None:
    with Worker(parse_gpus(["metal:64GiB"])) as worker:
        (device,) = worker.devices()
    assert (device.name, device.buffer_type, device.type) == ("MTL0", "MTL0", "gpu")
    assert device.total == device.free == 48 * 2**30


def rows(directory: Path, params: Params) -> dict[str, tuple[int, int, int]]:
    with Worker(parse_gpus(["metal:64GiB"])) as worker:
        breakdown = worker.measure(shapes.write("llama-3.1-8b", directory, vocab=False), params)
    return {row.buffer_type: (row.model, row.context, row.compute) for row in breakdown.rows}


def test_no_host_memory_is_pinned(tmp_path: Path) -> None:
    assert set(rows(tmp_path, Params(n_ctx=4096))) == {"CPU", "MTL0"}


@pytest.mark.parametrize("cache", ["f16", "q8_0"])
def test_attention_reserves_its_cache_in_f16(tmp_path: Path, cache: str) -> None:
    def compute(n_ctx: int) -> int:
        params = Params(n_ctx=n_ctx, n_ubatch=512, type_k=cache, type_v=cache, flash_attn="on")
        return rows(tmp_path, params)["MTL0"][2]

    # What a row of the cache more costs: K and V of 8 heads of 128 in f16, whatever the cache's own type is; a byte for
    # each 64 rows of it and 8 queries; and its column of the f16 mask.
    assert compute(131072) - compute(65536) == 65536 * (2 * 8 * 128 * 2) + 65536 // 64 * (512 // 8) + 65536 * 512 * 2


def test_a_mapped_file_is_in_a_macs_memory(tmp_path: Path) -> None:
    # A real load, which maps the file: llama.cpp asks a device for that where it says that it can.
    code = (
        "import os, sys, llama_cpp\n"
        "from fitter.llama.build import library\n"
        "from fitter.llama.load.breakdown import breakdown_of\n"
        "from fitter.llama.load.backend_devices import register_virtual, registry\n"
        "from fitter.llama.load.structs import apply\n"
        "from fitter.llama.types import Params\n"
        "library.libraries(); register_virtual(sys.argv[2])\n"
        "model, context = llama_cpp.llama_model_default_params(), llama_cpp.llama_context_default_params()\n"
        "keep = apply(Params(n_ctx=64), model, context, registry(True))\n"
        "model = llama_cpp.llama_model_load_from_file(os.fsencode(sys.argv[1]), model)\n"
        "context = llama_cpp.llama_init_from_model(model, context)\n"
        "print({row.buffer_type: row.model for row in breakdown_of(context).rows})\n"
        "llama_cpp.llama_free(context); llama_cpp.llama_model_free(model)\n"
    )
    path = write_tiny(tmp_path / "tiny.gguf")
    device = describe(parse_gpus(["metal:16GiB"]))
    done = subprocess.run([sys.executable, "-c", code, str(path), device], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = ast.literal_eval(done.stdout.splitlines()[-1])
    assert 0 < found["MTL0"] <= path.stat().st_size and set(found) == {"MTL0", "CPU", "CPU_Mapped"}


@pytest.mark.parametrize("shape", ["nemotron-h-9b", "qwen3-next-80b-a3b"])
def test_sizes_of_recurrent_layers_are_recorded(shape: str, tmp_path: Path) -> None:
    plan = fitter.fit(shapes.write(shape, tmp_path, vocab=False), gpus=["metal:64GiB"], n_ctx=4096)
    assert plan.fits and plan.estimate is not None
