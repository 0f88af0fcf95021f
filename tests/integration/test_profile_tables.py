"""The profiles answer what the real backends answered: a sample of the rows of tests/data here, all in test-slow."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from fitter.llama.build.library import backend_path
from fitter.machine.gpu import VULKAN_DRIVERS
from tests.support.cases import named_cases
from tools.comparisons import cuda_reference
from tools.comparisons.backend_loads import METAL, VULKAN, answers, stored
from tools.comparisons.load_answers import MODELS
from tools.models import shapes
from tools.oracle import operations


@dataclass(frozen=True)
class Table:
    """``count`` rows or more, whose loads ``different`` makes; every ``step``-th is in the sample.

    ``of`` counts what a sample must have some of: models, environments, drivers.
    """

    rows: Callable[[], Iterable[object]]
    different: Callable[[Iterable[object], Path], list[str]]
    step: int
    count: int
    of: Callable[[object], object]


def different_on_cuda(loads: Iterable[object], directory: Path) -> list[str]:
    """On the devices of ``cuda`` or ``rocm``: bytes of every kind, and graph splits."""
    with cuda_reference.Workers() as workers:
        return [said for load in loads if (said := workers.difference(directory, load))]  # type: ignore[arg-type]


def different_on_backend(rows: Iterable[object], directory: Path) -> list[str]:
    """On the devices of ``vulkan`` or ``metal``."""
    stored = list(rows)
    actual = answers(
        [load for load, _ in stored],  # type: ignore[misc]
        lambda load: shapes.write(load.model, directory, vocab=False),
    )
    return [
        f"{load}\n  expected {expected}\n  found    {answer}"
        for (load, expected), answer in zip(stored, actual, strict=True)  # type: ignore[misc]
        if answer != expected
    ]


def of_cuda(table: str, step: int, count: int) -> Table:
    return Table(
        lambda: cuda_reference.loads(table),
        different_on_cuda,
        step,
        count,
        lambda load: (load.model, load.rows is None),  # type: ignore[attr-defined]
    )


TABLES: Mapping[str, Table] = {
    **{f"cuda {name}": of_cuda(name, 8 if name == "drawn" else 30, 1) for name in cuda_reference.TABLES},
    "rocm": of_cuda("rocm", 12, 600),
    "vulkan": Table(
        lambda: stored(VULKAN),
        different_on_backend,
        7,
        200,
        lambda row: (row[0].driver, row[0].environment),  # type: ignore[index]
    ),
    "metal": Table(
        lambda: stored(METAL),
        different_on_backend,
        8,
        400,
        lambda row: (row[0].model, row[0].environment),  # type: ignore[index]
    ),
}


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_a_sample_is_what_the_real_backend_says(table: Table, tmp_path: Path) -> None:
    sample = list(table.rows())[:: table.step]
    assert len(sample) >= 50 and len(set(map(table.of, sample))) >= 6
    assert table.different(sample, tmp_path) == []


@pytest.mark.slow
@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_every_row_is_what_the_real_backend_says(table: Table, tmp_path: Path) -> None:
    rows = list(table.rows())
    assert len(rows) >= table.count
    assert table.different(rows, tmp_path) == []


def test_the_samples_of_vulkan_and_metal_have_some_of_everything() -> None:
    rows = [load for load, _ in stored(VULKAN)[:: TABLES["vulkan"].step]]
    assert {load.driver for load in rows} == set(VULKAN_DRIVERS)
    assert {load.model for load in rows} >= set(MODELS)
    assert {load.environment for load in rows} >= {"", *VULKAN.environments}
    others = [load for load, _ in stored(METAL)[:: TABLES["metal"].step]]
    assert {load.model for load in others} == set(MODELS)
    assert {load.environment for load in others} == {"", *METAL.environments}


@pytest.fixture(scope="module")
def ops(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The program that asks a backend about random operations."""
    fetch = Path(__file__).parents[2] / "vendor" / "llama.cpp" / "fetch.py"
    command = [sys.executable, str(fetch), "--headers-only"]
    source = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    yield operations.build_ops(Path(source) / "ggml" / "include", tmp_path_factory.mktemp("ops"))


@named_cases(
    ("cuda", operations.CUDA_CARDS, operations.ANSWERS), ("rocm", operations.ROCM_CARDS, operations.ROCM_ANSWERS)
)
def test_what_is_supported_is_what_the_real_backend_supports(
    cards: tuple[object, ...], answers: Path, ops: Path
) -> None:
    expected = answers.read_text().splitlines()
    assert len(expected) >= 100
    assert operations.answers(ops, backend_path(), cards).splitlines() == expected  # type: ignore[arg-type]
