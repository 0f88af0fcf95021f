"""``fitter explore``: its cells are the plans of ``fitter.fit``, wherever they are planned, and no cell is twice."""

from __future__ import annotations

import csv
import io
import json
import multiprocessing
import os
import re
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

import fitter
from fitter.api.explore import explore_grid, plan_cell
from fitter.api.explore.explore_grid import explore
from fitter.api.explore.plan_cell import Task, figures_of
from fitter.errors import LibraryError, UsageError
from fitter.llama.client import Worker
from fitter.planning.tables.exploration import Exploration, ExploredCell
from tests.support.cases import named_cases, refused
from tests.support.command import Command
from tests.support.patience import SECONDS, TooLateError, in_time
from tests.support.ranges import serving
from tools.models.shapes import write
from tools.models.tiny import write_tiny

MODEL = "qwen3-30b-a3b"

MACHINES = ("rtx-4090 + 8GiB", "none", "2GiB")
GRID: dict[str, Any] = {"machines": MACHINES, "n_ctx": [8192, 32768], "type_k": ["f16", "q8_0"], "host_memory": "18GiB"}
CELLS = 12


@pytest.fixture(scope="module")
def explored(model: Path) -> Exploration:
    return explore(model, **GRID)


FEW = {**GRID, "n_ctx": [8192]}
"""Half of it, for what is only about how cells are planned."""


def found(exploration: Exploration) -> list[tuple[object, dict[str, Any]]]:
    """Return the figures of the cells of ``FEW``."""
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
    plan_cell.close()


def test_a_process_that_is_lost_is_said(model: Path, tmp_path: Path) -> None:
    before = set(psutil.Process().children())

    def kill(cell: ExploredCell, done: int, total: int) -> None:
        if done == 2:
            for child in set(psutil.Process().children()) - before:
                os.kill(child.pid, signal.SIGKILL)

    def attempt() -> str:
        state = tmp_path / "cells.jsonl"
        state.unlink(missing_ok=True)
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("fork")) as executor:
            try:
                explore(model, executor=executor, resume=state, on_cell=kill, **FEW)
            except LibraryError as error:
                assert len(state.read_text().splitlines()) > 2
                return str(error)
        # it had planned them all
        raise TooLateError

    said = in_time(attempt)
    assert re.fullmatch(
        r"the executor was lost \(BrokenProcessPool: .*\): start it again, and go on with --resume", said
    )


def test_a_worker_with_another_fitter_is_said(model: Path) -> None:
    class Older(ThreadPoolExecutor):
        def submit(self, run: Any, /, task: Task) -> Any:  # type: ignore[override]
            return super().submit(run, replace(task, fitter="0.0.1"))

    with Older(1) as executor, pytest.raises(LibraryError) as caught:
        explore(model, executor=executor, **FEW)
    assert str(caught.value) == (
        f"a worker of the executor has llama-fitter {fitter.__version__}, and this machine 0.0.1: install the same "
        "on both"
    )


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
        distributed.Client(cluster, set_as_default=False) as client,
    ):

        def kill(cell: ExploredCell, done: int, total: int) -> None:
            if done == 3:
                killed.append(next(iter(cluster.workers.values())).pid)
                os.kill(killed[0], signal.SIGKILL)

        whole = explore(model, executor=client.get_executor(pure=False, retries=3), on_cell=kill, **GRID)
    assert of(whole) == of(explored)
    assert killed and not psutil.pid_exists(killed[0])


class _Interrupted(BaseException):
    pass


def test_what_was_interrupted_goes_on_without_a_cell_twice(
    model: Path, explored: Exploration, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = tmp_path / "cells.jsonl"
    planned: list[Task] = []
    is_interrupted = threading.Event()

    def run(task: Task) -> tuple[dict[str, Any], bool]:
        planned.append(task)
        if len(planned) == CELLS - 1:
            assert is_interrupted.wait(SECONDS)
        return plan_cell.run(task)

    monkeypatch.setattr(explore_grid, "plan_cell", SimpleNamespace(run=run, close=plan_cell.close))

    def interrupt(cell: ExploredCell, done: int, total: int) -> None:
        if done >= 5:
            is_interrupted.set()
            raise _Interrupted

    before = set(psutil.Process().children())
    with pytest.raises(_Interrupted):
        # the last one but one waits for it, and so no other has begun, on however many processors
        explore(model, resume=state, on_cell=interrupt, jobs=2, **GRID)
    assert set(psutil.Process().children()) <= before
    lines = state.read_text().splitlines()
    # those that were being planned then are kept, too
    assert 5 <= len(lines) - 1 == len(planned) < CELLS
    # as if it had been ended while it wrote
    state.write_text("\n".join(lines) + '\n{"key": "abc', encoding="utf-8")
    whole = explore(model, resume=state, **GRID)
    assert of(whole) == of(explored) and whole.kept == len(lines) - 1
    with Worker() as worker:
        build = worker.build()
    assert json.loads(lines[1])["llama_cpp"] == f"{build.version} {build.key}"
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


def test_a_model_longer_than_a_file_may_be_does_not_end_the_others(model: Path, tmp_path: Path) -> None:
    """Its header is written to a file of its length, and file systems have a limit for that."""
    tiny, before = write_tiny(tmp_path / "tiny.gguf"), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10**9, before[1]))
    try:
        long, short = explore([model, tiny], "24GiB", n_ctx=4096, jobs=1).cells
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert (long.fits, short.fits) == (None, True)
    assert re.fullmatch(
        r"a model's header cannot be written to \S+ \(File too large\): set TMPDIR to a directory that takes files as "
        "long as the model",
        long.problem or "",
    )


def test_one_bad_model_does_not_end_the_others(model: Path, tmp_path: Path, command: Command) -> None:
    cut, missing, strange = (tmp_path / f"{name}.gguf" for name in ("cut", "missing", "strange"))
    with model.open("rb") as file:
        cut.write_bytes(file.read(1000))
    write_tiny(strange)
    strange.write_bytes(strange.read_bytes().replace(b"qwen3moe", b"nonesuch"))
    words = ["--gpu", "24GiB", "-c", "4096"]
    cells = command("explore", cut, model, missing, strange, *words, "--json").document["cells"]
    assert [cell["fits"] for cell in cells] == [None, True, None, None]
    assert "cut.gguf" in cells[0]["problem"] and "nonesuch" in cells[3]["problem"]
    assert cells[2]["problem"] == f"{missing}: no such file; check the path of the model"
    status, out, err = command("explore", cut, missing, *words)
    assert (status, out, err.count("\n")) == (3, "", 1) and "cut.gguf" in err


def test_a_directory_is_every_model_in_it(tmp_path: Path, command: Command) -> None:
    for name in ("a.gguf", "sub/b.gguf"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write_tiny(tmp_path / name)
    words = ["--gpu", "24GB", "-c", "1k", "-ctk", "f16,q8_0", "-ctv", "f16,q8_0"]
    cells = command("explore", tmp_path, *words, "--json").document["cells"]
    assert [(cell["model"], cell["type_k"], cell["type_v"], cell["n_ctx"], cell["fits"]) for cell in cells] == [
        (str(tmp_path / name), kind, kind, 1024, True) for name in ("a.gguf", "sub/b.gguf") for kind in ("f16", "q8_0")
    ]
    (tmp_path / "none").mkdir()
    status, _, err = command("explore", tmp_path / "none", *words)
    assert status == 3 and "there is no GGUF file in it" in err


SECRET = "s3cr3t"


def test_credentials_are_not_shown_and_not_kept(
    tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "served").mkdir()
    write_tiny(tmp_path / "served" / "tiny.gguf")
    monkeypatch.chdir(tmp_path)
    with serving(tmp_path / "served") as server:
        shown = f"{server.url}/tiny.gguf"
        url = shown.replace("//", f"//me-{SECRET}:{SECRET}@") + f"?token={SECRET}"
        words = ["explore", url, "missing.gguf", "--gpu", "24GiB", "--answer", "fits", "--resume", "cells.jsonl"]
        options = (["-v", "-o", "grid.csv"], ["-o", "grid.parquet"], ["--json", "-o", "grid.json"])
        said = [command(*words, *more) for more in options]
        files = b"".join(path.read_bytes() for path in tmp_path.iterdir() if path.is_file())
        assert [each.status for each in said] == [0, 0, 0]
        assert SECRET not in "".join(each.out for each in said) and SECRET.encode() not in files
        document = said[-1].document
        assert document["cells"][0]["model"] == document["answers"][0]["model"] == shown
        # they were asked for with it
        assert {path for _, path, _ in server.requests} == {f"/tiny.gguf?token={SECRET}"}
        missing = command(*words[:1], url.replace("tiny", "none"), *words[3:])
        assert missing.status == 3 and SECRET not in missing.out + missing.err


@named_cases(
    ("no machine", {"machines": []}, "machines (--gpu) is empty, so there is no cell to plan: name one"),
    ("no model", {"models": []}, "models is empty, so there is no cell to plan: name one"),
    ("no context", {"n_ctx": []}, "n_ctx is empty, so there is no cell to plan: give a value, or leave it out"),
    ("a keyword that is none", {"n_cxt": 1}, "explore has no keyword n_cxt: see help(fitter.explore)"),
    (
        "prices and watts",
        {"prices": {"rtx-4090": 1}, "watts": {"rtx-4090": 1}},
        "prices (--price) and watts (--watts) are both given: one of them says what a machine costs",
    ),
    ("jobs", {"jobs": 0}, "jobs (--jobs) is 0: give a whole number above 0"),
    (
        "jobs of an executor",
        {"jobs": 2, "executor": ThreadPoolExecutor(1)},
        "jobs (--jobs) are of this machine, and executor plans elsewhere: leave one out",
    ),
    ("a function that is none", {"on_cell": 7}, "on_cell is 7: give a function"),
    ("an executor that is none", {"executor": "ray://h"}, "executor is 'ray://h': give a concurrent.futures.Executor"),
)
def test_what_makes_no_sense_is_one_line(given: dict[str, Any], message: str, model: Path) -> None:
    with refused(UsageError, message):
        explore(**{"models": model, "machines": "rtx-4090", **given})


def test_the_command_prints_and_writes_what_was_explored(model: Path, tmp_path: Path, command: Command) -> None:
    words = ["explore", str(model), "--gpu", "rtx-3060", "--gpu", "2GiB", "-c", "8192,32768", "--host-memory", "18GiB"]
    output = tmp_path / "grid.csv"
    document = command(*words, "--json", "-o", output).document
    assert [cell["fits"] for cell in document["cells"]] == [True, True, False, False]
    rows = list(csv.DictReader(io.StringIO(output.read_text())))
    assert [row["machine"] for row in rows] == [cell["machine"] for cell in document["cells"]]
    assert rows[0]["arguments"].startswith("-c 8192 ") and rows[3]["arguments"] == ""
    assert [path.name for path in tmp_path.iterdir()] == ["grid.csv"]
    status, out, _ = command(*words, "--answer", "8k context at 9999 t/s")
    assert status == 1 and "no machine does 8k context at 9999 t/s" in out


def test_parquet_has_the_rows_of_json(model: Path, tmp_path: Path, command: Command) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    output = tmp_path / "grid.parquet"
    said = command("explore", model, "--gpu", "rtx-3060", "-c", "8192", "--json", "-o", output)
    (cell,) = said.document["cells"]
    (row,) = parquet.read_table(output).to_pylist()
    assert {**row, "arguments": None} == {**cell, "arguments": None}


def test_ctrl_c_says_what_is_kept(model: Path, tmp_path: Path) -> None:
    state = tmp_path / "cells.jsonl"
    contexts = ",".join(str(512 * each) for each in range(4, 80))
    words = ["explore", str(model), "--gpu", "rtx-3060", "--gpu", "8GiB", "-c", contexts, "--resume", str(state)]
    process = subprocess.Popen(
        [sys.executable, "-m", "fitter", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    while not state.exists() or len(state.read_text().splitlines()) < 3:
        assert process.poll() is None, process.communicate()
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=SECONDS)
    done = len(state.read_text().splitlines()) - 1
    assert process.returncode == 130 and out == ""
    assert err == f"fitter: interrupted, {done} of 152 cells are in {state}: the same command plans the rest\n"
