"""The profiles answer what the real backends answered: a sample of the rows of tests/data here, all in test-slow."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from fitter.llama.build.build_folder import PYTHON
from fitter.llama.build.functions import backend_rules
from fitter.llama.build.library import backend_path
from fitter.llama.processes.interpreter import LLAMA_CPP
from fitter.machine.gpu import VULKAN_DRIVERS
from tests.support.cases import named_cases
from tests.support.command import json_of_python
from tests.support.llama_builds import where
from tools.comparisons import cuda_reference
from tools.comparisons.backend_loads import METAL, VULKAN, answers, stored
from tools.comparisons.load_answers import MODELS
from tools.models import shapes
from tools.models.shapes import write
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


# --- rules of ggml-cuda that some versions lack: what each of them decides, on the pinned libllama or a newer one


ROOT = Path(__file__).resolve().parents[2]
PINNED = "0.25.3"

_MEASURED = """
import json, sys
from fitter.errors import LlamaCppError
from fitter.llama.load import backend_devices as devices
from fitter.llama.build import library as native
from fitter.llama.processes.interpreter import become_worker
rules, path, count, load = json.loads(sys.argv[1]), sys.argv[2], int(sys.argv[3]), json.loads(sys.argv[4])
become_worker()
native.backend_rules = lambda ggml: rules
native.prepare()
from fitter.llama.load.loader import Loader
from fitter.llama.types import Params, VirtualDevice, describe
cards = [VirtualDevice(f"CUDA{i}", "Card", "cuda", 890, 2**40, 2**40) for i in range(count)]
native.register_virtual(describe(cards))
try:
    found = Loader(devices.registry(virtual=True)).measure(path, Params(**load))
    print(json.dumps([[row.buffer_type, row.model, row.context, row.compute] for row in found.rows]))
except LlamaCppError as error:
    print(json.dumps(" ".join(str(error).split()[-3:])))
"""


def measured(rules: dict[str, bool], model: Path, count: int, load: dict[str, Any], **variables: str) -> Any:
    """The rows of a load on ``count`` cards with these rules, or the last words of why it fails."""
    words = [json.dumps(rules), str(model), str(count), json.dumps(load)]
    return json_of_python(_MEASURED, *words, **variables)


def changed(one: Any, other: Any) -> set[tuple[str, str]]:
    """Buffer types and kinds of bytes that differ."""
    kinds = ("model", "context", "compute")
    before, after = ({row[0]: row[1:] for row in rows} for rows in (one, other))
    return {
        (name, kind)
        for name in before.keys() | after.keys()
        for kind, a, b in zip(kinds, before.get(name, [0] * 3), after.get(name, [0] * 3), strict=True)
        if a != b
    }


ONE = {"n_ctx": 65536, "n_ubatch": 64}
DECIDED: dict[str, tuple[str, int, dict[str, Any], dict[str, str], set[tuple[str, str]]]] = {
    "gets_rows_of_super_blocks": ("qwen3-30b-a3b", 1, ONE, {}, {("CPU", "model"), ("CUDA_Host", "model")}),
    "attention_has_room": ("llama-3.1-8b", 1, ONE | {"type_k": "q8_0", "type_v": "q8_0"}, {}, {("CUDA0", "compute")}),
    "attention_of_any_types": (
        "llama-3.1-8b",
        1,
        ONE | {"type_k": "q8_0", "type_v": "q4_0"},
        {},
        {("CUDA0", "compute"), ("CUDA_Host", "compute")},
    ),
    "keeps_topk_moe": ("qwen3-30b-a3b", 1, {"n_ctx": 4096}, {}, {("CUDA0", "compute")}),
    "groups_shared_experts": ("glm45-air", 1, {"n_ctx": 4096}, {}, {("CUDA0", "compute")}),
    "branches_on_many_devices": (
        "glm45-air",
        2,
        ONE | {"n_ubatch": 1, "n_batch": 1},
        {"GGML_CUDA_GRAPH_OPT": "1"},
        {("CUDA0", "compute"), ("CUDA1", "compute")},
    ),
    "unary_of_any_strides": ("qwen3-next-80b-a3b", 1, {"n_ctx": 4096}, {}, {("CUDA0", "compute")}),
}


BUILDS = {"unary_of_any_strides": "b11739"}
"""Builds other than the pinned one, of whose graphs none depends on the rule."""


@pytest.mark.parametrize("name", DECIDED)
def test_what_a_rule_decides(name: str, tmp_path: Path) -> None:
    shape, count, load, variables, expected = DECIDED[name]
    model = write(shape, tmp_path, vocab=False)
    variables = variables | {LLAMA_CPP: where(BUILDS.get(name, PYTHON))}
    rules = backend_rules(PINNED)
    with_it, without = (
        measured(rules | {f"cuda_{name}": value}, model, count, load, **variables) for value in (True, False)
    )
    assert changed(with_it, without) == expected


def test_types_that_attention_did_not_have(tmp_path: Path) -> None:
    model = write("llama-3.1-8b", tmp_path, vocab=False)
    load = ONE | {"type_k": "q5_0", "type_v": "q5_0"}
    rules = backend_rules(PINNED)
    with_it, without = (
        measured(rules | {"cuda_attention_of_any_types": value}, model, 1, load) for value in (True, False)
    )
    assert changed(with_it, without) == {("CUDA0", "compute"), ("CUDA_Host", "compute")}


def test_one_device_branches_in_every_version(tmp_path: Path) -> None:
    model = write("glm45-air", tmp_path, vocab=False)
    load = ONE | {"n_ubatch": 1, "n_batch": 1}
    rules = backend_rules(PINNED) | {"cuda_branches_on_many_devices": False}
    with_streams, without = (measured(rules, model, 1, load, GGML_CUDA_GRAPH_OPT=value) for value in ("1", "0"))
    assert changed(with_streams, without) == {("CUDA0", "compute")}
