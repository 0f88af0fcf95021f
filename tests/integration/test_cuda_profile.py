"""The profile ``cuda`` answers as the real ggml-cuda backend does: bytes of every kind, and graph splits."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from fitter.llama.client import Worker
from fitter.llama.library import backend_path
from fitter.llama.types import Params, VirtualDevice
from tools.cuda_reference import MEMORY, TABLES, Load, Workers, loads, spread, write_model
from tools.oracle import operations

SAMPLE = [*spread(loads("published"), 12), *spread(loads("drawn"), 2)]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    with Workers() as started:
        yield started


@pytest.mark.parametrize("load", SAMPLE, ids=lambda load: load.name)
def test_a_load_is_what_it_is_on_real_cuda(workers: Workers, models: Path, load: Load) -> None:
    assert not workers.difference(models, load)


@pytest.mark.slow
@pytest.mark.parametrize("table", TABLES)
def test_every_load_is_what_it_is_on_real_cuda(workers: Workers, models: Path, table: str) -> None:
    different = [said for load in loads(table) if (said := workers.difference(models, load))]
    assert not different, f"{len(different)} of {len(loads(table))}: {different[:10]}"


def test_the_tables_are_what_they_are_said_to_be() -> None:
    published, drawn = loads("published"), loads("drawn")
    assert len(published) == 3824
    assert sum(load.rows is None for load in published) == 1169
    capabilities = {device.compute_capability for load in drawn for device in load.devices}
    assert {600, 610, 700, 720, 750, 800, 860, 890, 900, 1000, 1200, 1210} <= capabilities
    assert len({load.model for load in drawn}) == 12
    assert Counter(bool(load.environment) for load in drawn)[True] > 100


def test_what_is_supported_is_what_real_cuda_supports(tmp_path: Path) -> None:
    fetch = Path(__file__).parents[2] / "vendor" / "llama.cpp" / "fetch.py"
    source = subprocess.run(
        [sys.executable, str(fetch), "--headers-only"], capture_output=True, text=True, check=True
    ).stdout.strip()
    ops = operations.build_ops(Path(source) / "ggml" / "include", tmp_path)
    assert operations.answers(ops, backend_path()).splitlines() == operations.ANSWERS.read_text().splitlines()


def card(compute_capability: int) -> VirtualDevice:
    return VirtualDevice("CUDA0", "Card", "cuda", compute_capability, MEMORY, MEMORY)


# What generation with a quantized KV cache reserves depends on the kernel: the vector kernel reads it as it is, the
# others want it in f16.
TOKENS_WITHOUT_COPIES = {610: 2, 700: 0, 750: 1, 860: 1, 890: 2, 900: 2, 1200: 2}


@pytest.mark.parametrize(("capability", "most"), TOKENS_WITHOUT_COPIES.items())
def test_how_many_tokens_need_no_copy_of_the_cache(models: Path, capability: int, most: int) -> None:
    path = write_model("llama31-8b", models)
    copies = 2 * 32768 * 1024 * 2
    with Worker([card(capability)]) as worker:
        for n_ubatch in (1, 2, 3):
            params = Params(n_ctx=32768, n_ubatch=n_ubatch, type_k="q8_0", type_v="q8_0")
            compute = worker.measure(path, params).on("CUDA0").compute
            assert (compute < copies) == (n_ubatch <= most), n_ubatch
