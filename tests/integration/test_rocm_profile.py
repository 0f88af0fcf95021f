"""The profile ``rocm`` answers as the real ggml-cuda does when it is compiled for AMD's cards."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fitter.llama.client import Worker
from fitter.llama.library import backend_path
from fitter.llama.types import Params, VirtualDevice
from fitter.machine.catalogue import capability
from tools.cuda_reference import MEMORY, Load, Workers, loads, spread, write_model
from tools.oracle import operations
from tools.oracle.draw import ARCHITECTURES

SAMPLE = spread(loads("rocm"), 6)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    with Workers() as started:
        yield started


@pytest.mark.parametrize("load", SAMPLE, ids=lambda load: load.name)
def test_a_load_is_what_it_is_on_real_rocm(workers: Workers, models: Path, load: Load) -> None:
    assert not workers.difference(models, load)


@pytest.mark.slow
def test_every_load_is_what_it_is_on_real_rocm(workers: Workers, models: Path) -> None:
    different = [said for load in loads("rocm") if (said := workers.difference(models, load))]
    assert not different, f"{len(different)} of {len(loads('rocm'))}: {different[:10]}"


def test_the_table_is_what_it_is_said_to_be() -> None:
    drawn = loads("rocm")
    assert len(drawn) == 600
    devices = {device for load in drawn for device in load.devices}
    assert {device.compute_capability for device in devices} == set(map(capability, ARCHITECTURES))
    assert {device.profile for device in devices} == {"rocm"}
    buffer_types = {name for load in drawn for name in load.rows or ()}
    assert {"ROCm0", "ROCm1", "ROCm_Host", "CPU"} <= buffer_types


def test_what_is_supported_is_what_real_rocm_supports(tmp_path: Path) -> None:
    fetch = Path(__file__).parents[2] / "vendor" / "llama.cpp" / "fetch.py"
    source = subprocess.run(
        [sys.executable, str(fetch), "--headers-only"], capture_output=True, text=True, check=True
    ).stdout.strip()
    ops = operations.build_ops(Path(source) / "ggml" / "include", tmp_path)
    answers = operations.answers(ops, backend_path(), operations.ROCM_CARDS)
    assert answers.splitlines() == operations.ROCM_ANSWERS.read_text().splitlines()


def card(architecture: str) -> VirtualDevice:
    return VirtualDevice("ROCm0", "Card", "rocm", capability(architecture), MEMORY, MEMORY)


# What a batch of that many tokens reserves with a quantized KV cache depends on the kernel: the vector kernel reads it
# as it is, the others want it in f16. Matrix instructions take over from 9 columns on, those of CDNA from 17 with heads
# of 128, and 8 heads of Q for one of K are 8 columns a token.
TOKENS_WITHOUT_COPIES = {
    ("gpt-oss-20b", "gfx906"): 2,
    ("gpt-oss-20b", "gfx90a"): 1,
    ("gpt-oss-20b", "gfx90c"): 2,
    ("gpt-oss-20b", "gfx950"): 1,
    ("gpt-oss-20b", "gfx1030"): 2,
    ("gpt-oss-20b", "gfx1100"): 1,
    ("gpt-oss-20b", "gfx1201"): 1,
    ("qwen3-30b-a3b", "gfx90a"): 2,
    ("qwen3-30b-a3b", "gfx1100"): 1,
}


@pytest.mark.parametrize(("model", "architecture"), TOKENS_WITHOUT_COPIES)
def test_how_many_tokens_need_no_copy_of_the_cache(models: Path, model: str, architecture: str) -> None:
    path = write_model(model, models)
    with Worker([card(architecture)]) as worker:
        sizes = []
        for n_ubatch in (1, 2, 3):
            params = Params(n_ctx=131072, n_ubatch=n_ubatch, type_k="q8_0", type_v="q8_0", swa_full=True)
            sizes.append(worker.measure(path, params).on("ROCm0").compute)
    # The copies are most of what the largest of them takes.
    assert sum(size < sizes[-1] / 2 for size in sizes) == TOKENS_WITHOUT_COPIES[model, architecture]
