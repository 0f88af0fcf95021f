"""What stands on a terminal that is too narrow for all of a table."""

from __future__ import annotations

import io
import itertools
import re
from dataclasses import replace
from typing import Any

import pytest

from fitter.llama.types import DeviceInfo
from fitter.output.tables import exploration_table, file_tables, plan_table
from fitter.output.tables.checked_tables import calibration_table
from fitter.output.tables.narrow import short_name
from fitter.planning.plan.plan import Plan
from fitter.planning.tables.exploration import Exploration, ExploredCell
from fitter.planning.tables.file_rows import Repository, RepositoryFile
from fitter.planning.tables.quantization_rows import Quantization, Quantizations
from fitter.regression import check_report
from fitter.regression.compare import Move
from tests.support.answers import CALIBRATION, INSPECTION, Terminal
from tests.support.cases import cases, stored_rows
from tests.support.plans import MIB, make_plan

CARDS = ("NVIDIA GeForce RTX 3090", "NVIDIA GeForce RTX 4090", "AMD Radeon RX 7900 XTX (RADV NAVI31)")
HOST = DeviceInfo("CPU", "AMD EPYC 7763 64-Core Processor", "cpu", "CPU", 2**35, 2**34)
MOVES = (Move("CUDA0 compute", 100 * MIB, 300 * MIB, "bytes", "beyond max_growth of 1 %", failure=True),)


def plan_on(count: int) -> Plan:
    """A plan on ``count`` cards of three kinds, beside a host with a terabyte."""
    plan = make_plan(devices=[f"CUDA{index}" for index in range(count)])
    devices = tuple(
        replace(device, description=CARDS[index * 3 // count], total=24268 * MIB, free=23900 * MIB, model=20111 * MIB)
        for index, device in enumerate(plan.devices)
    )
    return replace(plan, devices=devices, host=replace(plan.host, total=1031234 * MIB, free=1012345 * MIB))


def shown(what: object, width: int, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setenv("COLUMNS", str(width))
    out = Terminal()
    plan_table.print_to(out, what)  # type: ignore[arg-type]
    return re.sub(r"\x1b\[[\d;]*m", "", out.getvalue()).splitlines()


@cases(
    ("NVIDIA GeForce RTX 3090", "RTX 3090"),
    ("NVIDIA RTX 6000 Ada Generation", "RTX 6000"),
    ("NVIDIA H100 80GB HBM3", "H100 80GB HBM3"),
    ("NVIDIA A100-SXM4-80GB", "A100-SXM4-80GB"),
    ("AMD Radeon RX 7900 XTX (RADV NAVI31)", "RX 7900 XTX"),
    ("AMD Radeon Graphics", "AMD Radeon Graphics"),
    ("Intel(R) Arc(TM) A770 Graphics (DG2)", "Arc A770"),
    ("Intel(R) Core(TM) i7-9700 CPU @ 3.00GHz", "Core i7-9700"),
    ("AMD EPYC 7763 64-Core Processor", "EPYC 7763"),
    ("virtual CUDA GPU", "virtual CUDA GPU"),
    ("10.0.0.1:50052", "10.0.0.1:50052"),
    ("", ""),
    ("x" * 30, "x" * 23 + "…"),
)
def test_short_names(description: str, short: str) -> None:
    assert short_name(description) == short


@cases(*stored_rows("output_narrow", "one_device"))
def test_one_device(width: int, header: str, row: str, described: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [line.strip() for line in shown(plan_table.plan_table(plan_on(1)), width, monkeypatch)]
    assert lines[lines.index(header) + 1] == row
    assert ("CUDA0: RTX 3090" in lines) is described


def test_the_cards_are_said_below_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [line.strip() for line in shown(plan_table.plan_table(plan_on(15)), 70, monkeypatch)]
    assert lines[lines.index("CUDA0, CUDA1, CUDA2, CUDA3, CUDA4: RTX 3090") :][:3] == [
        "CUDA0, CUDA1, CUDA2, CUDA3, CUDA4: RTX 3090",
        "CUDA5, CUDA6, CUDA7, CUDA8, CUDA9: RTX 4090",
        "CUDA10, CUDA11, CUDA12, CUDA13, CUDA14: RX 7900 XTX",
    ]


@pytest.mark.parametrize("width", [40, 45, 50, 60, 70, 80, 100, 200])
@pytest.mark.parametrize(
    "what",
    [
        pytest.param(plan_table.plan_table(plan_on(1)), id="plan"),
        pytest.param(plan_table.plan_table(plan_on(8), verbose=True), id="plan on 8"),
        pytest.param(plan_table.plan_table(plan_on(15)), id="plan on 15"),
        pytest.param(
            plan_table.devices_table((DeviceInfo("CUDA0", CARDS[0], "gpu", "CUDA", 2**34, 2**34),), HOST), id="devices"
        ),
        pytest.param(calibration_table(CALIBRATION), id="calibration"),
        pytest.param(plan_table.inspection_table(INSPECTION), id="inspection"),
        pytest.param(check_report.moves_table(MOVES), id="moves"),
    ],
)
def test_no_line_is_longer_and_no_number_is_cut(what: object, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = shown(what, width, monkeypatch)
    assert max(map(len, lines)) <= width
    assert not [line for line in lines if "…" in line]


def test_what_a_move_means_is_never_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    for width in (40, 50, 60, 80, 120):
        words = " ".join(shown(check_report.moves_table(MOVES), width, monkeypatch)).split()
        assert " ".join(words).endswith("beyond max_growth of 1 %")


@cases(39, 20, 1)
def test_below_40_columns_one_line_says_so(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert shown(plan_table.plan_table(plan_on(8)), width, monkeypatch) == [
        f"fitter: the table needs 40 columns, but this terminal has {width}: widen it, or use --json"
    ]


def test_a_file_gets_all_of_it_whatever_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    out = io.StringIO()
    plan_table.print_to(out, plan_table.plan_table(plan_on(1)))
    assert "100  20467     3433    1024  NVIDIA GeForce RTX 3090\n" in out.getvalue()


MODELS = ("deepseek-r1-distill-llama-70b", "qwen3-30b-a3b")
MACHINES = ("rtx-4090", "rtx-4090 + rtx-3060-12gb + rtx-pro-6000-blackwell")
AXES: dict[str, dict[str, tuple[Any, ...]]] = {
    "contexts": {"asked_context": (8192, 131072)},
    "contexts and types": {"asked_context": (8192, 131072), "file_type": ("Q4_K_M", "IQ2_XXS")},
    "every axis": {
        "asked_context": (8192, 131072),
        "file_type": ("Q4_K_M", "IQ2_XXS"),
        "n_ubatch": (512, 2048),
        "type_k": ("f16", "q8_0"),
        "type_v": ("f16", "q8_0"),
    },
}


def grid(axes: dict[str, tuple[Any, ...]]) -> Exploration:
    """Every combination, in the order of ``fitter explore``."""
    order = ("model", "file_type", "machine", "asked_context", "type_k", "type_v", "n_ubatch")
    values = {"model": MODELS, "machine": MACHINES, **axes}
    cells = [
        replace(
            ExploredCell(*each),
            fits=True,
            n_ctx=each[3] or 4096,
            host_weights=20 * 1024 * MIB,
            needs_imatrix=True,
            prompt_tokens_per_second=1234.0,
            tokens_per_second=1.27,
            full_context_tokens_per_second=0.98,
            cost=1600.0,
            is_best=True,
        )
        for each in itertools.product(*(values.get(name, (None,)) for name in order))
    ]
    return Exploration(tuple(cells), "price")


@pytest.mark.parametrize("width", [80, 60, 48])
@pytest.mark.parametrize("axes", AXES.values(), ids=AXES)
def test_no_name_of_a_grid_is_broken(axes: dict[str, Any], width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    explored = grid(axes)
    lines = shown(exploration_table.exploration_table(explored), width, monkeypatch)
    assert max(map(len, lines)) <= width
    words = " ".join(lines).replace(",", " ").split()
    for cell in explored.cells:
        for name in (cell.model, *cell.machine.split(), *([cell.file_type] if cell.file_type else [])):
            assert name in words
    # every plan has a line of its own with its figures
    assert sum(line.rstrip().endswith("best") and "1.27" in line for line in lines) == len(explored.cells)


def test_what_many_rows_share_becomes_a_heading(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = shown(exploration_table.exploration_table(grid(AXES["contexts"])), 60, monkeypatch)
    assert [line.rstrip() for line in lines[:9]] == [
        "    -c  fits  prompt t/s   t/s  t/s full  price",
        "deepseek-r1-distill-llama-70b, rtx-4090",
        "  8192   yes       1,230  1.27      0.98   1600  best",
        "131072   yes       1,230  1.27      0.98   1600  best",
        "deepseek-r1-distill-llama-70b, rtx-4090 + rtx-3060-12gb +",
        "rtx-pro-6000-blackwell",
        "  8192   yes       1,230  1.27      0.98   1600  best",
        "131072   yes       1,230  1.27      0.98   1600  best",
        "qwen3-30b-a3b, rtx-4090",
    ]
    narrower = shown(exploration_table.exploration_table(grid(AXES["contexts"])), 48, monkeypatch)
    assert narrower[0].split() == ["-c", "fits", "prompt", "t/s", "t/s", "price"]
    whole = shown(exploration_table.exploration_table(grid(AXES["contexts"])), 140, monkeypatch)
    assert whole[1].split()[:2] == ["deepseek-r1-distill-llama-70b", "rtx-4090"]


@cases(80, 60)
def test_no_file_type_is_broken(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = make_plan()
    names = ("Q2_K_S", "MXFP4_MOE", "IQ3_XXS")
    rows = tuple(Quantization(name, 123456 * MIB, 16.01, {}, True, plan=plan, longest_context=131072) for name in names)
    table = file_tables.quantizations_table(Quantizations(plan.model, "bf16", rows, rows[0]))
    words = " ".join(shown(table, width, monkeypatch)).split()
    assert set(names) <= set(words) and words.count("123456") == words.count("131072") == 3


@cases(80, 60)
def test_no_file_of_a_repository_is_broken(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = make_plan()
    names = ("a.gguf", "sub/Meta-Llama-3.1-8B-Instruct-abliterated-Q4_K_M.gguf")
    files = tuple(
        RepositoryFile(name, (name,), 123456 * MIB, "", name, 1, 4.5, plan, longest_context=131072) for name in names
    )
    lines = shown(file_tables.repository_table(Repository("repo", files, (), files[1])), width, monkeypatch)
    words = " ".join(lines).split()
    assert set(names) <= set(words) and words.count("131072") == 2 and max(map(len, lines)) <= width
