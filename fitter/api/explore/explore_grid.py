"""``fitter.explore``: plan a grid of models, machines and parameters; llama.cpp measures each cell. Bytes."""

from __future__ import annotations

import math
import queue
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fitter import api, programs, system
from fitter.api.call_worker import fetch
from fitter.api.checked_call import naming_addresses
from fitter.api.explore import plan_cell
from fitter.api.explore.grid import Grid, costs_of, grid_of
from fitter.api.explore.plan_cell import CellHeader, Task, figures_of
from fitter.api.explore.stored_cells import Key, State
from fitter.errors import CancelledError, FitterError, LibraryError, LlamaCppError, TimeLimitError, UsageError
from fitter.llama.client import DEFAULT_TIMEOUT, Worker
from fitter.llama.types import LlamaCpp
from fitter.model.files import header_cache
from fitter.model.files.source import with_addresses
from fitter.model.header import Model, open_model
from fitter.model.shapes.catalogue import unknown_type
from fitter.parameters.table import AnyPath
from fitter.parameters.values import shown
from fitter.planning.tables.exploration import (
    Exploration,
    ExploredAnswer,
    ExploredCell,
    Requirement,
    cheapest_first,
    marked,
    parse_requirement,
)
from fitter.planning.tables.quantization_rows import check_source, quantization
from fitter.storage import TemporaryDirectory
from fitter.text import LONGEST_NAME, printable

MAX_CELLS = 2000
"""Default limit of the cells in a grid."""

OnCell = Callable[[ExploredCell, int, int], None]
"""Called with each finished cell, the number of finished cells, and the number of all cells."""

_LOOK_SECONDS = 1.0
"""Seconds of one wait for a cell."""
_LAST_SECONDS = 30.0
"""Seconds to wait for running cells when an exploration ends early."""


def explore(
    models: AnyPath | Sequence[AnyPath],
    machines: str | Sequence[str],
    *,
    types: str | Sequence[str] | None = None,
    prices: Mapping[str, float] | None = None,
    watts: Mapping[str, float] | None = None,
    answer: str | None = None,
    resume: AnyPath | None = None,
    executor: Executor | None = None,
    jobs: int | None = None,
    max_cells: int = MAX_CELLS,
    on_cell: OnCell | None = None,
    **parameters: Any,
) -> Exploration:
    """Plan every model on every machine with every combination of the given parameters.

    Cells are planned on the model's header. A cell without a plan has its ``problem``; so do the cells of a model that
    cannot be read, if there are other models.

    Args:
        models: Paths or addresses; of a directory or repository, every model in it.
        machines: Machines, each with all its GPUs: ``rtx-4090``, ``2x rtx-3090``, ``rtx-4090 + rtx-3060-12gb``, or
            ``none`` for a machine without a GPU. Several may stand in one text, with commas between them.
        types: File types of llama-quantize in which to plan each model, by llama.cpp's own rule.
        prices: Price of one card by its name, in any currency.
        watts: Power of one card by its name, in place of prices.
        answer: A requirement such as ``32k context at 20 t/s``. The cheapest machine that meets it (by price, watts, or
            else memory) is confirmed on the model itself.
        resume: File that stores finished cells, one per line; stored cells are not planned again.
        executor: Plans the cells, here or on a cluster. By default, threads with a process of llama.cpp each.
        jobs: Number of those threads; one for each processor by default.
        max_cells: Limit of the cells in the grid.
        on_cell: Called after each cell.
        parameters: Keywords of ``fit``; ``n_ctx``, ``type_k``, ``type_v`` and ``n_ubatch`` may be lists. Types of K and
            V are pairs, in their order; with ``cross_cache_types=True`` each type of K is combined with each of V.

    Raises:
        UsageError: The grid is empty or too large, or a parameter makes no sense.
        LibraryError: The executor was lost.
        FitterError: As ``fit`` raises it, where no model can be read.
    """
    started = time.monotonic()
    asked = None if answer is None else parse_requirement(_text("answer (--answer)", answer))
    parameters = {name: value for name, value in parameters.items() if value is not None}
    if asked is not None and asked.context:
        parameters.setdefault("n_ctx", asked.context)
    parameters.setdefault("program", programs.chosen("llama-cpp-python"))
    grid = grid_of(models, machines, types, parameters, max_cells)
    costs, cost = costs_of(grid.machines, prices, watts)
    _check_how(executor, jobs, on_cell)
    with header_cache.reading(), naming_addresses():
        sources = _sources(grid)
        with State.opened(resume) as state:
            state.check({each.header.digest for each in sources.values() if each.header is not None})
            exploring = _Exploring(grid, sources, state, on_cell)
            cells = [replace(cell, **exploring.source(cell).facts, **costs[cell.machine]) for cell in grid.cells()]
            exploring.count = len(cells)
            for cell in cells:
                if (stored := state.known(cell, exploring.key(cell))) is not None:
                    exploring.tell(stored)
            exploring.plan([cell for cell in cells if cell.asked not in exploring.found], executor, jobs)
            every = marked([exploring.found[cell.asked] for cell in cells], cost)
            answers = () if asked is None else tuple(exploring.answers(every, asked, cost))
    return Exploration(every, cost, answers, answer, state.used, time.monotonic() - started)


def _check_how(executor: object, jobs: object, on_cell: object) -> None:
    """Check the executor, the number of jobs and the callback. Raises ``UsageError``."""
    if executor is not None and not isinstance(executor, Executor):
        raise UsageError(f"executor is {shown(executor)}: give a concurrent.futures.Executor")
    if jobs is not None and (not isinstance(jobs, int) or isinstance(jobs, bool) or jobs < 1):
        raise UsageError(f"jobs (--jobs) is {shown(jobs)}: give a whole number above 0")
    if jobs is not None and executor is not None:
        raise UsageError("jobs (--jobs) are of this machine, and executor plans elsewhere: leave one out")
    if on_cell is not None and not callable(on_cell):
        raise UsageError(f"on_cell is {shown(on_cell)}: give a function")


def _text(called: str, value: object) -> str:
    if not isinstance(value, str):
        raise UsageError(f"{called} is {shown(value)}: give a text")
    return value


# --- headers


@dataclass(frozen=True)
class _Source:
    """A model in a file type: its header, or the ``problem`` with it; ``facts`` are figures of its cells."""

    build: LlamaCpp
    model: str = ""
    called: str = ""
    header: CellHeader | None = None
    problem: str | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)


def _sources(grid: Grid) -> dict[tuple[str, str | None], _Source]:
    """Read the header of every model once, for each file type. Raises the first model's error where none can be read.

    Returns:
        The headers by model and file type.
    """
    found: dict[tuple[str, str | None], _Source] = {}
    failed: list[FitterError] = []
    timeout = grid.fixed.get("timeout", DEFAULT_TIMEOUT)
    with Worker(llama_cpp=grid.fixed.get("llama_cpp"), timeout=timeout) as worker:
        source = _Source(worker.build())
        for called, model in grid.models.items():
            try:
                fetch(model, worker.timeout)
                opened = open_model(model, worker.header)
                name = Path(opened.called).name
                of_types = dict(_in_types(opened, grid.file_types, worker, replace(source, model=name, called=name)))
            except (UsageError, LibraryError, CancelledError):
                raise
            except FitterError as error:
                failed.append(error)
                of_types = dict.fromkeys(grid.file_types, replace(source, problem=with_addresses(str(error))))
            found |= {(called, file_type): each for file_type, each in of_types.items()}
    if len(failed) == len(grid.models):
        raise failed[0]
    return found


def _in_types(
    model: Model, types: Sequence[str | None], worker: Worker, source: _Source
) -> Iterator[tuple[str | None, _Source]]:
    """Yield ``model`` in each file type."""
    with TemporaryDirectory() as directory:
        if types == (None,):
            weights = sum(math.prod(tensor.shape) for tensor in model.tensors)
            source = replace(source, facts={"bits_per_weight": 8 * model.bytes / weights if weights else None})
            path = Path(directory) / "skeleton.gguf"
            try:
                worker.write_skeleton(model.skeleton, path)
            except LlamaCppError as error:
                if len(model.files) > 1:
                    yield None, replace(source, problem=str(error))
                    return
                # the whole header works too, only slower
                path = Path(model.files[0])
            yield None, replace(source, header=CellHeader.of(path, worker.header(path).data_offset))
            return
        check_source(model)
        try:
            file_types = worker.file_types(model.files, directory)
        except LlamaCppError as error:
            yield from ((name, replace(source, problem=str(error))) for name in types)
            return
        by_name = {each.name: each for each in file_types.found}
        for name in types:
            if name not in by_name:
                raise unknown_type(name or "", list(by_name))
            planned = quantization(model, file_types, by_name[name])
            path = Path(directory) / f"{name}.gguf"
            header = None if planned.problem else CellHeader.of(path, worker.header(path).data_offset)
            facts = {"bits_per_weight": planned.bits_per_weight, "needs_imatrix": planned.needs_imatrix}
            called = f"{source.model} as {name}"
            yield name, replace(source, called=called, header=header, problem=planned.problem, facts=facts)


# --- cells

_Answer = tuple[dict[str, Any], bool]
"""The result of ``plan_cell.run``."""


@dataclass
class _Exploring:
    """An exploration: its grid, the headers of its models, and the finished cells by ``ExploredCell.asked``."""

    grid: Grid
    sources: Mapping[tuple[str, str | None], _Source]
    state: State
    on_cell: OnCell | None
    count: int = 0
    found: dict[tuple[object, ...], ExploredCell] = field(default_factory=dict)

    def source(self, cell: ExploredCell) -> _Source:
        return self.sources[cell.model, cell.file_type]

    def key(self, cell: ExploredCell) -> Key:
        """Return the key of a cell in the file of finished cells."""
        source = self.source(cell)
        digest = "" if source.header is None else source.header.digest
        return Key(digest, f"{source.build.version} {source.build.key}", source.model, self.grid.keywords(cell))

    def tell(self, cell: ExploredCell) -> None:
        """Count a finished cell, and call ``on_cell``."""
        self.found[cell.asked] = cell
        if self.on_cell is not None:
            self.on_cell(cell, len(self.found), self.count)

    def kept(self, cell: ExploredCell, planned: Future[_Answer]) -> ExploredCell:
        """Return the finished cell; store it first unless another run could find something else."""
        with _naming_loss():
            figures, is_lasting = planned.result()
        cell = replace(cell, **figures)
        if is_lasting:
            self.state.add(cell, self.key(cell))
        return cell

    def plan(self, cells: Sequence[ExploredCell], executor: Executor | None, jobs: int | None) -> None:
        """Plan ``cells``, and tell each as soon as it is finished."""
        waiting = []
        for cell in cells:
            source = self.source(cell)
            if source.header is None:
                self.tell(replace(cell, problem=source.problem))
            else:
                task = Task(source.header, source.called, self.grid.keywords(cell), source.build.version)
                waiting.append((cell, task))
        if not waiting:
            return
        with _executor(executor, jobs, len(waiting)) as pool:
            futures: dict[Future[_Answer], ExploredCell] = {}
            ready: queue.SimpleQueue[Future[_Answer]] = queue.SimpleQueue()
            try:
                for cell, task in waiting:
                    with _naming_loss():
                        future = pool.submit(plan_cell.run, task)
                    futures[future] = cell
                    future.add_done_callback(ready.put)
                while futures:
                    try:
                        # a wait without an end could not be interrupted on Windows
                        future = ready.get(timeout=_LOOK_SECONDS)
                    except queue.Empty:
                        continue
                    self.tell(self.kept(futures[future], future))
                    # last: an interrupt before this line has the cell told again, and none goes uncounted
                    del futures[future]
            except BaseException:
                self._keep_last(futures)
                raise

    def _keep_last(self, futures: Mapping[Future[_Answer], ExploredCell]) -> None:
        """Store finished and running cells when an exploration ends early.

        Errors in here are dropped: the error that ended the exploration is the one to report.
        """
        begun = [future for future in futures if not future.cancel()]
        wait(begun, timeout=_LAST_SECONDS)
        cells = []
        for future in begun:
            if future.done() and not future.cancelled() and future.exception() is None:
                with suppress(FitterError):
                    cells.append(self.kept(futures[future], future))
        with suppress(BaseException):
            for cell in cells:
                self.tell(cell)

    def answers(self, cells: Sequence[ExploredCell], asked: Requirement, cost: str) -> Iterator[ExploredAnswer]:
        """For each model, find the cheapest cell that the model itself confirms."""
        for model in dict.fromkeys(cell.model for cell in cells):
            of_model = [cell for cell in cells if cell.model == model]
            yield self._confirm_first(model, cheapest_first(of_model, asked, cost), asked)

    def _confirm_first(self, model: str, ordered: Sequence[ExploredCell], asked: Requirement) -> ExploredAnswer:
        for refused, cell in enumerate(ordered):
            keywords, source = self.grid.keywords(cell), self.source(cell)
            try:
                if cell.file_type is None:
                    plan = api.fit(self.grid.models[model], **keywords)
                else:
                    assert source.header is not None
                    with TemporaryDirectory() as directory:
                        path = Path(directory) / "model.gguf"
                        source.header.write(path)
                        plan = api.fit(path, **{**keywords, "skeleton": False})
                    plan = replace(plan, model=replace(plan.model, path=source.called), files=())
            except (LlamaCppError, TimeLimitError):
                continue
            confirmed = replace(cell, **figures_of(plan))
            if asked.is_met_by(confirmed):
                return ExploredAnswer(model, confirmed, plan, cell.file_type is not None, refused)
        return ExploredAnswer(model, None, refused=len(ordered))


@contextmanager
def _naming_loss() -> Iterator[None]:
    """Turn every error of an executor itself into a ``LibraryError``."""
    try:
        yield
    except FitterError:
        raise
    except Exception as error:
        # executors have their own classes of errors
        said = f"{type(error).__name__}: {printable(' '.join(str(error).split()), LONGEST_NAME)}".removesuffix(": ")
        raise LibraryError(f"the executor was lost ({said}): start it again, and go on with --resume") from error


@contextmanager
def _executor(given: Executor | None, jobs: int | None, most: int) -> Iterator[Executor]:
    """Return the executor of the cells."""
    if given is not None:
        yield given
        return
    try:
        with ThreadPoolExecutor(min(jobs or system.processors(), most)) as pool:
            try:
                yield pool
            finally:
                pool.shutdown(cancel_futures=True)
    finally:
        plan_cell.close()


__all__ = ["Exploration", "ExploredAnswer", "ExploredCell", "explore"]
