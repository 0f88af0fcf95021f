"""``fitter.measure`` has both figures of a compute buffer: a dummy load's, and what a real load prints."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

import fitter
from fitter.llama.client import Worker
from fitter.planning.request.ask import Ask
from tests.support.cases import named_cases
from tools.faults.cut_servers import RpcServer
from tools.models import shapes
from tools.models.tiny import TINY_DENSE, write_tiny

MIB = 2**20
_PRINTED = re.compile(r"sched_reserve: +(\S+) compute buffer size = +([0-9.]+) MiB")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {"moe": write_tiny(folder / "moe.gguf"), "dense": write_tiny(folder / "dense.gguf", TINY_DENSE)}


@pytest.fixture(scope="module")
def servers() -> Iterator[list[str]]:
    with RpcServer() as first, RpcServer() as second:
        yield [first.address, second.address]


# model, rpc-servers, parameters, whether the real figure is another one than the dummy's
@named_cases(
    ("on the host", "dense", 0, {"n_ctx": 1024}, False),
    ("sequences, on the host", "moe", 0, {"n_ctx": 4096, "n_seq_max": 4}, False),
    (
        "generation takes more than a prompt",
        "dense",
        0,
        {"n_ctx": 16384, "n_ubatch": 4, "n_seq_max": 16, "flash_attn": "off"},
        True,
    ),
    ("on a device", "dense", 1, {"n_ctx": 1024}, False),
    ("partly on a device", "moe", 1, {"n_ctx": 2048, "n_gpu_layers": 2}, False),
    ("on two devices", "moe", 2, {"n_ctx": 2048, "tensor_split": (1, 1)}, True),
    ("partly on two devices", "dense", 2, {"n_ctx": 2048, "tensor_split": (1, 1), "n_gpu_layers": 3}, False),
)
def test_the_figure_of_a_real_load(
    name: str, n_servers: int, parameters: dict[str, Any], differs: bool, models: Mapping[str, Path], servers: list[str]
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
