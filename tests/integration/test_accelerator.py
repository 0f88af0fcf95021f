"""A backend that shares the CPU's buffers, as BLAS does on every Mac: they are counted once."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fitter.llama.client import Worker
from fitter.llama.types import Breakdown, Params, VirtualDevice
from tests.support.cases import named_cases
from tools.builds.environment import with_variables
from tools.faults.cut_servers import RpcServer
from tools.models import shapes
from tools.models.tiny import TINY_DENSE

MODEL = TINY_DENSE

ROOT = Path(__file__).parents[2]
GIB = 2**30


@pytest.fixture(scope="module")
def accelerator(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The device of ``tests/accelerator``, compiled."""
    fetch = ROOT / "vendor" / "llama.cpp" / "fetch.py"
    source = subprocess.run(
        [sys.executable, str(fetch), "--headers-only"], capture_output=True, text=True, check=True
    ).stdout.strip()
    ggml = Path(source) / "ggml"
    library = tmp_path_factory.mktemp("accelerator") / "libggml-accelerator.so"
    words = ["-std=c++17", "-shared", "-fPIC", "-Wall", f"-I{ggml / 'include'}", f"-I{ggml / 'src'}"]
    compiler = os.environ.get("CXX", "c++")
    subprocess.run([compiler, *words, str(ROOT / "tests/accelerator/device.cpp"), "-o", str(library)], check=True)
    return library


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with RpcServer() as started:
        yield started.address


def host_compute(breakdown: Breakdown) -> dict[str, int]:
    return {row.buffer_type: row.compute for row in breakdown.rows if row.is_host and row.compute}


# without the host buffer type of a GPU, the CPU and the accelerator have the same one
@named_cases(
    ("on the host", Params(n_ctx=1024, devices=())),
    ("on a device without a host buffer type", Params(n_ctx=1024, n_gpu_layers=2)),
)
def test_a_real_device(params: Params, accelerator: Path, model: Path, server: str) -> None:
    with Worker(rpc=[server]) as worker:
        without = worker.measure(model, params)
    log: list[str] = []
    with with_variables({"GGML_BACKEND_PATH": str(accelerator)}), Worker(rpc=[server], on_log=log.append) as worker:
        dummy = worker.measure(model, params, reserve=True)
        said = [line for line in log if "CPU compute buffer size" in line]
        real = worker.load(model, params).breakdown
    assert len(said) == 2 and len({line.partition("=")[2] for line in said}) == 1, "llama.cpp says it twice"
    assert host_compute(dummy) == host_compute(without) == host_compute(real)
    assert [row.reserved for row in dummy.rows] == [row.compute for row in real.rows]


def test_a_mac_that_is_not_here(accelerator: Path, tmp_path: Path) -> None:
    path = shapes.write("llama-3.1-8b", tmp_path, vocab=False)
    mac = VirtualDevice("MTL0", "Apple M5", "metal", 0, 24 * GIB, 24 * GIB)
    with Worker([mac]) as worker:
        without = worker.measure(path, Params(n_ctx=8192), reserve=True)
    with with_variables({"GGML_BACKEND_PATH": str(accelerator)}), Worker([mac]) as worker:
        found = worker.measure(path, Params(n_ctx=8192), reserve=True)
    assert found.rows == without.rows
    assert host_compute(found)["CPU"] == found.host.real.compute > 0
