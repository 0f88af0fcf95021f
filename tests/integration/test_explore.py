"""``fitter explore``: its cells are the plans of ``fitter.fit``, wherever they are planned, and no cell is twice."""

from __future__ import annotations

import csv
import io
import json
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import psutil
import pytest
from gguf import GGUFWriter

import fitter
from fitter import exploring, exploring_cells
from fitter.cli import main
from fitter.errors import LibraryError, UsageError
from fitter.exploring import explore
from fitter.exploring_cells import Task, figures_of
from fitter.planning.explored import Exploration, ExploredCell
from tools.shapes import write

MACHINES = ("rtx-4090 + 8GiB", "none", "2GiB")
GRID: dict[str, Any] = {
    "machines": MACHINES,
    "n_ctx": [8192, 32768],
    "type_k": ["f16", "q8_0"],
    "host_memory": "18GiB",
}
CELLS = 12


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write("qwen3-30b-a3b", tmp_path_factory.mktemp("models"), vocab=False)


@pytest.fixture(scope="module")
def explored(model: Path) -> Exploration:
    return explore(model, **GRID)


FEW = {**GRID, "n_ctx": [8192]}
"""Half of it, for what is only about how cells are planned."""


def found(exploration: Exploration) -> list[tuple[object, dict[str, Any]]]:
    """What was found for the cells of ``FEW``."""
    return [(cell.asked, cell.figures()) for cell in exploration.cells if cell.asked_context == 8192]


def of(exploration: Exploration) -> list[ExploredCell]:
    return list(exploration.cells)


def keywords(cell: ExploredCell) -> dict[str, Any]:
    gpus = [part.strip() for part in cell.machine.split("+")]
    return {"gpus": gpus, "n_ctx": cell.asked_context, "type_k": cell.type_k, "host_memory": "18GiB"}


def test_a_cell_is_what_fit_plans(model: Path, explored: Exploration) -> None:
    assert len(explored.cells) == CELLS
    for cell in explored.cells[:: CELLS // 5]:
        plan = fitter.fit(model, **keywords(cell))
        assert cell.figures() == figures_of(plan) | {"bytes": plan.model.bytes}, cell.asked
    assert {cell.fits for cell in explored.cells} == {True, False}
    assert all(bool(cell.problem) != bool(cell.fits) for cell in explored.cells)
    assert any(cell.is_best for cell in explored.cells) and explored.fits


EXECUTORS: dict[str, Callable[[], Executor]] = {
    "threads": lambda: ThreadPoolExecutor(2),
    "processes, spawned": lambda: ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")),
    "processes, forked": lambda: ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("fork")),
}


@pytest.mark.parametrize("name", EXECUTORS)
def test_any_executor_plans_the_same(model: Path, explored: Exploration, name: str) -> None:
    with EXECUTORS[name]() as executor:
        assert found(explore(model, executor=executor, **FEW)) == found(explored)
    exploring_cells.close()


def test_a_process_that_is_lost_is_said(model: Path, tmp_path: Path) -> None:
    state = tmp_path / "cells.jsonl"

    before = set(psutil.Process().children())

    def kill(cell: ExploredCell, done: int, total: int) -> None:
        if done == 2:
            for child in set(psutil.Process().children()) - before:
                os.kill(child.pid, signal.SIGKILL)

    with (
        ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("fork")) as executor,
        pytest.raises(LibraryError, match=r"^the executor was lost \(BrokenProcessPool: .*: start it again, and go on"),
    ):
        explore(model, executor=executor, resume=state, on_cell=kill, **FEW)
    assert len(state.read_text().splitlines()) > 2


@pytest.mark.slow
def test_a_dask_cluster_plans_the_same_though_one_of_its_processes_is_killed(
    model: Path, explored: Exploration
) -> None:
    distributed = pytest.importorskip("distributed")
    dask = pytest.importorskip("dask")
    killed: list[int] = []
    with (
        # how long it looks for the process that is gone
        dask.config.set({"distributed.comm.timeouts.connect": "3s"}),
        distributed.LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster,
    ):

        def kill(cell: ExploredCell, done: int, total: int) -> None:
            if done == 3:
                killed.append(next(iter(cluster.workers.values())).pid)
                os.kill(killed[0], signal.SIGKILL)

        address = cluster.scheduler_address.removeprefix("tcp://")
        whole = explore(model, executor=f"dask://{address}", on_cell=kill, **GRID)
    assert of(whole) == of(explored)
    assert killed and not psutil.pid_exists(killed[0])


class _Interrupted(BaseException):
    pass


def test_what_was_interrupted_goes_on_without_a_cell_twice(
    model: Path, explored: Exploration, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = tmp_path / "cells.jsonl"
    planned: list[Task] = []

    def run(task: Task) -> tuple[dict[str, Any], bool]:
        planned.append(task)
        return exploring_cells.run(task)

    monkeypatch.setattr(exploring, "exploring_cells", SimpleNamespace(run=run, close=exploring_cells.close))

    def interrupt(cell: ExploredCell, done: int, total: int) -> None:
        if done >= 5:
            raise _Interrupted

    before = set(psutil.Process().children())
    with pytest.raises(_Interrupted):
        explore(model, resume=state, on_cell=interrupt, **GRID)
    assert set(psutil.Process().children()) <= before
    lines = state.read_text().splitlines()
    # those that were being planned then are kept, too
    assert 5 <= len(lines) - 1 == len(planned) < CELLS
    # as if it had been ended while it wrote
    state.write_text("\n".join(lines) + '\n{"key": "abc', encoding="utf-8")
    whole = explore(model, resume=state, **GRID)
    assert of(whole) == of(explored) and whole.kept == len(lines) - 1
    assert len(planned) == CELLS
    kept = [json.loads(line)["key"] for line in state.read_text().splitlines()[1:]]
    assert len(kept) == len(set(kept)) == CELLS
    again = explore(model, resume=state, **GRID)
    assert of(again) == of(explored) and again.kept == CELLS
    # another question has other cells, and those that are the same are known
    more = explore(model, resume=state, **{**GRID, "n_ctx": [8192, 16384]})
    assert more.kept == CELLS // 2


def test_cells_of_another_model_are_not_taken(model: Path, tmp_path: Path) -> None:
    state = tmp_path / "cells.jsonl"
    path = tmp_path / "model.gguf"
    os.link(model, path)
    explore(path, "24GiB", resume=state)
    write("llama-3.1-8b", tmp_path, vocab=False).replace(path)
    with pytest.raises(UsageError) as caught:
        explore(path, "24GiB", resume=state)
    assert str(caught.value) == (
        f"{state} has cells of another model, or of a file that has changed since: name another file with --resume, or "
        "delete it"
    )


def test_the_answer_is_the_cheapest_and_is_a_plan_of_the_model_itself(model: Path) -> None:
    prices = {"rtx-3060": 280, "rtx-4090": 1600, "8GiB": 100}
    machines = ("rtx-3060-12gb", "rtx-4090 + 8GiB")
    whole = explore(model, machines, prices=prices, answer="32k context at 20 t/s")
    (answer,) = whole.answers
    assert answer.cell is not None and answer.plan is not None
    assert (answer.cell.machine, answer.cell.cost, answer.is_of_header) == ("rtx-3060-12gb", 280, False)
    expected = fitter.fit(model, gpus=["rtx-3060-12gb"], n_ctx=32768)
    assert (answer.plan.params, answer.plan.breakdown) == (expected.params, expected.breakdown)
    assert answer.plan.files == expected.files
    faster = explore(model, machines, prices=prices, answer="32k context at 100 t/s").answers[0]
    assert faster.cell is not None and faster.cell.machine == "rtx-4090 + 8GiB"
    none = explore(model, machines, answer="32k context at 1000 t/s")
    assert none.answers[0].cell is None and not none.fits


def test_file_types_are_cells_of_one_header(model: Path) -> None:
    whole = explore(model, "rtx-3060", types="Q4_0,IQ2_XXS", n_ctx=4096, answer="fits")
    one, other = whole.cells
    assert (one.file_type, other.file_type) == ("Q4_0", "IQ2_XXS")
    assert not one.needs_imatrix and other.needs_imatrix
    planned = fitter.quants(model, gpus=["rtx-3060"], types=["Q4_0"], n_ctx=4096).found[0]
    assert (one.bytes, one.n_ctx, one.tokens_per_second) == (
        planned.plan and planned.plan.model.bytes,
        planned.n_ctx,
        planned.tokens_per_second,
    )
    assert whole.answers[0].is_of_header


def test_a_model_that_llama_cpp_does_not_know_is_unknown_and_the_others_are_planned(
    model: Path, tmp_path: Path
) -> None:
    path = tmp_path / "strange.gguf"
    writer = GGUFWriter(path, "nonesuch")
    writer.add_block_count(1)
    writer.add_tensor("blk.0.attn_norm.weight", numpy.ones(32, dtype=numpy.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    whole = explore([path, model], "24GiB", n_ctx=4096)
    strange, known = whole.cells
    assert strange.fits is None and "nonesuch" in (strange.problem or "") and known.fits


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no machine": ({"machines": []}, "machines (--gpu) is empty, so there is no cell to plan: name one"),
    "no model": ({"models": []}, "models is empty, so there is no cell to plan: name one"),
    "no context": ({"n_ctx": []}, "n_ctx is empty, so there is no cell to plan: give a value, or leave it out"),
    "a keyword that is none": ({"n_cxt": 1}, "explore has no keyword n_cxt: see help(fitter.explore)"),
    "a price of another card": (
        {"prices": {"rtx-3090": 1}},
        "--price rtx-3090=1: no machine of --gpu has that card; they have rtx-4090",
    ),
    "a price that is none": (
        {"prices": {"rtx-4090": float("nan")}},
        "--price rtx-4090=nan: give a number that is not below 0",
    ),
    "prices and watts": (
        {"prices": {"rtx-4090": 1}, "watts": {"rtx-4090": 1}},
        "prices (--price) and watts (--watts) are both given: one of them says what a machine costs",
    ),
    "too many cells": (
        {"n_ctx": [1024, 2048], "type_k": ["f16", "q8_0"], "max_cells": 3},
        "the grid has 4 cells (2 contexts × 2 KV types), more than 3: name fewer of each, or raise --max-cells",
    ),
    "jobs": ({"jobs": 0}, "jobs (--jobs) is 0: give a whole number above 0"),
    "an executor that is none": (
        {"executor": 7},
        "executor is 7: give a concurrent.futures.Executor, or a text such as dask://host:8786",
    ),
    "an executor of another kind": (
        {"executor": "ray://host:1"},
        "--executor 'ray://host:1': name the scheduler of a Dask cluster, such as dask://host:8786",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_makes_no_sense_is_one_line(model: Path, name: str) -> None:
    given, message = WRONG[name]
    with pytest.raises(UsageError) as caught:
        explore(**{"models": model, "machines": "rtx-4090", **given})
    assert str(caught.value) == message


def test_the_command_prints_and_writes_what_was_explored(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["explore", str(model), "--gpu", "rtx-3060", "--gpu", "2GiB", "-c", "8192,32768", "--host-memory", "18GiB"]
    output = tmp_path / "grid.csv"
    assert main([*words, "--json", "-o", str(output)]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [cell["fits"] for cell in document["cells"]] == [True, True, False, False]
    rows = list(csv.DictReader(io.StringIO(output.read_text())))
    assert [row["machine"] for row in rows] == [cell["machine"] for cell in document["cells"]]
    assert rows[0]["arguments"].startswith("-c 8192 ") and rows[3]["arguments"] == ""
    assert [path.name for path in tmp_path.iterdir()] == ["grid.csv"]
    assert main([*words, "--answer", "1m context"]) == 2
    assert "'1m context': it is not understood" in capsys.readouterr().err
    assert main([*words, "--answer", "8k context at 9999 t/s"]) == 1
    assert "no machine does 8k context at 9999 t/s" in capsys.readouterr().out


def test_parquet_has_the_rows_of_json(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    output = tmp_path / "grid.parquet"
    assert main(["explore", str(model), "--gpu", "rtx-3060", "-c", "8192", "--json", "-o", str(output)]) == 0
    (cell,) = json.loads(capsys.readouterr().out)["cells"]
    (row,) = parquet.read_table(output).to_pylist()
    assert {**row, "arguments": None} == {**cell, "arguments": None}


def test_ctrl_c_says_what_is_kept(model: Path, tmp_path: Path) -> None:
    state = tmp_path / "cells.jsonl"
    contexts = ",".join(str(1024 * each) for each in range(4, 36))
    words = ["explore", str(model), "--gpu", "rtx-3060", "--gpu", "8GiB", "-c", contexts, "--resume", str(state)]
    process = subprocess.Popen(
        [sys.executable, "-m", "fitter", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    while not state.exists() or len(state.read_text().splitlines()) < 3:
        assert process.poll() is None, process.communicate()
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    done = len(state.read_text().splitlines()) - 1
    assert process.returncode == 130 and out == ""
    assert err == f"fitter: interrupted, {done} of 64 cells are in {state}: the same command plans the rest\n"
