"""The profiles of CUDA, ROCm, Metal and Vulkan beside their tables of answers, which test_profile_tables asks."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import fitter
from fitter.llama.client import Worker
from fitter.llama.types import Params, VirtualDevice, describe
from fitter.machine.gpu import parse_gpus
from fitter.machine.gpu_catalogue import capability
from tests.support.cases import cases
from tests.support.command import run_python
from tests.support.llama_builds import NEWEST, PINNED, where
from tools.comparisons.backend_loads import METAL, Load, answers, stored
from tools.comparisons.cuda_reference import MEMORY, write_model
from tools.comparisons.load_answers import answer, params_of
from tools.metal import check
from tools.metal.build import build
from tools.models import shapes
from tools.models.tiny import write_tiny
from tools.oracle import operations


def reserved(path: Path, card: VirtualDevice, params: Params) -> int:
    with Worker([card]) as worker:
        return worker.measure(path, params).on(card.name).compute


# The vector kernel reads the cache as it is, the others want it in f16.
TOKENS_WITHOUT_COPIES = {610: 2, 700: 0, 750: 1, 860: 1, 890: 2, 900: 2, 1200: 2}


@pytest.mark.parametrize(("compute_capability", "most"), TOKENS_WITHOUT_COPIES.items())
def test_how_many_tokens_need_no_copy_of_the_cache(directory: Path, compute_capability: int, most: int) -> None:
    card = VirtualDevice("CUDA0", "Card", "cuda", compute_capability, MEMORY, MEMORY)
    path = write_model("llama31-8b", directory)
    copies = 2 * 32768 * 1024 * 2
    for n_ubatch in (1, 2, 3):
        params = Params(n_ctx=32768, n_ubatch=n_ubatch, type_k="q8_0", type_v="q8_0")
        assert (reserved(path, card, params) < copies) == (n_ubatch <= most), n_ubatch


# Matrix instructions take over from 9 columns on, those of CDNA from 17 with heads of 128, and 8 heads of Q for one of
# K are 8 columns a token.
ON_AMD = {
    ("gpt-oss-20b", "gfx906"): 2,
    ("gpt-oss-20b", "gfx950"): 1,
    ("gpt-oss-20b", "gfx1030"): 2,
    ("gpt-oss-20b", "gfx1201"): 1,
    ("qwen3-30b-a3b", "gfx90a"): 2,
    ("qwen3-30b-a3b", "gfx1100"): 1,
}


@pytest.mark.parametrize(("model", "architecture"), ON_AMD)
def test_how_many_tokens_need_no_copy_of_the_cache_on_amd(directory: Path, model: str, architecture: str) -> None:
    card = VirtualDevice("ROCm0", "Card", "rocm", capability(architecture), MEMORY, MEMORY)
    cache = {"type_k": "q8_0", "type_v": "q8_0", "swa_full": True}
    sizes = [
        reserved(write_model(model, directory), card, Params(n_ctx=131072, n_ubatch=n_ubatch, **cache))  # type: ignore[arg-type]
        for n_ubatch in (1, 2, 3)
    ]
    # The copies are most of what the largest of them takes.
    assert sum(size < sizes[-1] / 2 for size in sizes) == ON_AMD[model, architecture]


EVERY_FIFTH = 5
"""One row of so many is asked about."""


@pytest.mark.slow
def test_the_real_code_gives_the_stored_answers(tmp_path: Path) -> None:
    fetch = Path(__file__).parents[2] / "vendor" / "llama.cpp" / "fetch.py"
    done = subprocess.run([sys.executable, str(fetch)], capture_output=True, text=True, check=True)
    source = Path(done.stdout.strip())
    library = build(source, tmp_path, operations.LIBRARIES / "libggml-base.so.0")
    ops = operations.build_ops(source / "ggml" / "include", tmp_path)
    assert check.compare_operations(ops, library, 200_000) == "different: 0"
    sample = stored(METAL)[::EVERY_FIFTH]
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


@cases("f16", "q8_0")
def test_attention_reserves_its_cache_in_f16(cache: str, tmp_path: Path) -> None:
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
    done = run_python(code, path, device)
    assert done.returncode == 0, done.stderr
    found = ast.literal_eval(done.stdout.splitlines()[-1])
    assert 0 < found["MTL0"] <= path.stat().st_size and set(found) == {"MTL0", "CPU", "CPU_Mapped"}


@cases("nemotron-h-9b", "qwen3-next-80b-a3b")
def test_sizes_of_recurrent_layers_are_recorded(shape: str, tmp_path: Path) -> None:
    plan = fitter.fit(shapes.write(shape, tmp_path, vocab=False), gpus=["metal:64GiB"], n_ctx=4096)
    assert plan.fits and plan.estimate is not None


def measure(devices: tuple[VirtualDevice, ...], directory: Path, model: str, params: Params) -> str:
    with Worker(devices) as worker:
        return answer(worker, shapes.write(model, directory, vocab=False), params)


def test_without_a_driver_it_is_radv(tmp_path: Path) -> None:
    params = Params(n_ctx=4096)
    answers = [
        measure(parse_gpus([spec]), tmp_path, "qwen3-30b-a3b", params) for spec in ("vulkan:80GiB", "vulkan:radv:80GiB")
    ]
    assert answers[0] == answers[1]
    assert "Vulkan0=" in answers[0]
    assert "Vulkan_Host=" in answers[0]


def test_what_the_devices_say_of_themselves() -> None:
    with Worker(parse_gpus(["2x vulkan:nvidia:24GiB:free=23GiB"])) as worker:
        devices = [(d.name, d.description, d.type, d.total, d.free) for d in worker.devices() if d.virtual]
    assert devices == [
        (f"Vulkan{i}", "virtual Vulkan GPU (NVIDIA's driver)", "gpu", 24 * 2**30, 23 * 2**30) for i in range(2)
    ]


# --- rules of ggml-metal that only some versions have, against what ggml-metal's own C++ of b11549 answered


LOAD = Load(
    METAL,
    "gpt-oss-20b",
    "",
    1,
    "",
    params_of("n_ctx=4096 n_gpu_layers=12 override=ffn_(up|gate|down)=CPU flash_attn=off swa_full=1"),
)


@cases((NEWEST, 617220096), (PINNED, 621021184))
def test_sums_are_computed_with_their_products(build: str, compute: int, tmp_path: Path) -> None:
    def model(load: Load) -> Path:
        return shapes.write(load.model, tmp_path, vocab=False)

    (said,) = answers([LOAD], model, llama_cpp=where(build))
    assert f"MTL0=926159616/92274688/{compute} splits=204/24" in said
