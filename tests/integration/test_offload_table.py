"""The rows of ``offload_table``: loads of a copy of the header, and the same bytes as loads of the file."""

from __future__ import annotations

import csv
import statistics
from pathlib import Path
from typing import Any

import pytest

import fitter
from fitter.api import gpu_layers as module
from fitter.api.gpu_layers import offload_table
from fitter.llama.client import Worker
from fitter.llama.types import Breakdown, Skeleton
from fitter.planning.tables.parameter_rows import OffloadRow
from tests.support.llama_builds import NEWEST, where
from tools.models import shapes
from tools.search.outcomes import with_links

STEPS = {"small-windows": 5, "small-experts": 5, "nemotron-h-9b": 30}
"""Models, each with the layers between two of its rows."""
MACHINES: dict[str, dict[str, Any]] = {
    "a card": {"gpus": ["9999GiB"]},
    "two cards and slots": {"gpus": ["9999GiB"] * 2, "tensor_split": [3, 1], "n_seq_max": 4},
    "a Mac": {"gpus": ["m4-max"], "type_k": "q8_0"},
    "caches on the host": {"gpus": ["vulkan:24GiB"], "offload_kqv": False, "n_ubatch": 64},
}
CARD = MACHINES["a card"]


def model(name: str, directory: Path) -> Path:
    path = directory / f"{name}.gguf"
    if not path.exists():
        shapes.write_shape(shapes.shape(name), path)
    return path


def rows_of(path: Path, step: int, **keywords: Any) -> tuple[OffloadRow, ...]:
    settings = {"program": "llama-server", "n_seq_max": 1, "load_mode": "none", "n_ctx": 2048, **keywords}
    return offload_table(path, step=step, **settings).rows


class Asked:
    """Counts loads, and the processes that make them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.layers: list[int] = []
        self.processes: set[Worker] = set()
        measure = Worker.measure

        def counted(worker: Worker, path: str | Skeleton, params: Any, *rest: Any, **more: Any) -> Breakdown:
            self.layers.append(params.n_gpu_layers)
            self.processes.add(worker)
            return measure(worker, path, params, *rest, **more)

        monkeypatch.setattr(Worker, "measure", counted)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    return Asked(monkeypatch)


@pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES)
@pytest.mark.parametrize(("name", "step"), STEPS.items())
def test_every_row_is_a_load_of_its_own(
    name: str, step: int, machine: dict[str, Any], directory: Path, asked: Asked
) -> None:
    path = model(name, directory)
    with Worker() as worker:
        rows = rows_of(path, step, worker=worker, **machine)
        assert len(asked.layers) == len(rows) > 2
        for row in rows:
            assert rows_of(path, 0, n_gpu_layers=row.n_gpu_layers, worker=worker, **machine) == (row,)


def test_two_processes_share_many_loads(directory: Path, asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    path = model("qwen3-0.6b", directory)
    monkeypatch.setattr(module, "LOADS_OF_A_WORKER", 8)
    monkeypatch.setattr(module, "processors", lambda: 2)
    rows = rows_of(path, 1, **CARD)
    assert [row.n_gpu_layers for row in rows] == list(range(30))
    assert sorted(asked.layers) == list(range(30))
    assert len(asked.processes) == 2


def test_one_process_where_others_would_cost_more(directory: Path, asked: Asked) -> None:
    assert len(rows_of(model("qwen3-0.6b", directory), 7, **CARD)) == 6
    assert len(asked.processes) == 1


def test_a_callers_worker_answers_alone(directory: Path, asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOADS_OF_A_WORKER", 8)
    with Worker() as worker:
        rows_of(model("qwen3-0.6b", directory), 1, **CARD, worker=worker)
        assert asked.processes == {worker}


# --- a cache of experts is planned where it was published to pay, and left out where it made generation slower


PAIRS = Path(__file__).parents[1] / "data" / "speeds" / "expert_cache_pairs.csv"
LANES = 16
"""Of the cards' links, by the catalogue."""


def pairs() -> list[dict[str, str]]:
    return [*csv.DictReader(line for line in PAIRS.read_text().splitlines() if not line.startswith("#"))]


@pytest.mark.parametrize("every", [6, 1])
def test_it_is_planned_where_it_was_published_to_pay(every: int) -> None:
    errors = []
    for pair in pairs()[::every]:
        published = float(pair["generation_with"]) / float(pair["generation_without"])
        with with_links(int(pair["pcie"].removeprefix("x")) / LANES):
            without, plan = (
                fitter.fit(
                    "shape://gpt-oss-120b",
                    gpus=pair["gpus"].split(),
                    n_ctx=8192,
                    objective="generation",
                    llama_cpp=where(NEWEST),
                    allow=allow,
                )
                for allow in ([], ["moe-cache"])
            )
        assert (plan.params.moe_cache_size > 0) == (published > 1), pair
        assert without.estimate and plan.estimate
        speeds = [each.generation_tokens_per_second for each in (without.estimate, plan.estimate)]
        if published > 1:
            errors.append(abs(speeds[1] / speeds[0] / published - 1))
        if pair["prompt"]:
            slower = plan.estimate.prompt_tokens_per_second / without.estimate.prompt_tokens_per_second
            low, high = map(float, pair["prompt"].split("-"))
            assert low <= slower <= high
    assert statistics.median(errors) <= 0.25
