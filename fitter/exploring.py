"""``fitter.explore``: a grid of models, machines and parameters, each cell a plan that llama.cpp measured. Bytes."""

from __future__ import annotations

import itertools
import math
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import BrokenExecutor, Executor, Future, ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fitter import api, exploring_cells, programs
from fitter.asking import fetch
from fitter.door import naming_addresses
from fitter.errors import FitterError, LibraryError, LlamaCppError, TimeLimitError, UsageError
from fitter.executors import executor_of
from fitter.exploring_cells import CellHeader, Task, figures_of
from fitter.exploring_state import State
from fitter.llama import process
from fitter.llama.client import Worker
from fitter.llama.types import Skeleton
from fitter.machine.gpu import cards_of, parse_gpus
from fitter.model.header import Model, open_model
from fitter.output.exploration import to_dict
from fitter.output.exploration_page import exploration_fragment
from fitter.parameters import PARAMETERS, AnyPath, Fitting, taken_by
from fitter.planning.ask import Ask
from fitter.planning.explored import (
    Exploration,
    ExploredAnswer,
    ExploredCell,
    Requirement,
    cheapest_first,
    marked,
    parse_requirement,
    register,
)
from fitter.planning.quantizations import check_source, quantization
from fitter.values import shown

register(to_dict, exploration_fragment)

MAX_CELLS = 2000
"""The most cells of a grid, unless another number is given."""

OnCell = Callable[[ExploredCell, int, int], None]
"""Is told of each cell that is done, how many are, and of how many."""

_AXES = {"n_ctx": "asked_context", "type_k": "type_k", "type_v": "type_v", "n_ubatch": "n_ubatch"}
"""Parameters that a grid has several values of, with the attribute of a cell that has its own."""

_NOT_OF_A_CELL = frozenset({"gpus", "devices", "rpc", "rpc_bandwidth", "skeleton", "model_draft", "mmproj"})
"""Keywords of ``fit`` that a grid says itself, or that are about this machine or files of it."""


def explore(
    models: AnyPath | Sequence[AnyPath],
    machines: str | Sequence[str],
    *,
    types: str | Sequence[str] | None = None,
    prices: Mapping[str, float] | None = None,
    watts: Mapping[str, float] | None = None,
    answer: str | None = None,
    resume: AnyPath | None = None,
    executor: Executor | str | None = None,
    jobs: int | None = None,
    max_cells: int = MAX_CELLS,
    on_cell: OnCell | None = None,
    **parameters: Any,
) -> Exploration:
    """Plan every model on every machine with every context, KV type, micro batch and file type that is named.

    Each of ``machines`` is one machine: ``rtx-4090``, ``2x rtx-3090``, ``rtx-4090 + rtx-3060-12gb``, or ``none`` for
    one without a GPU. ``parameters`` are keywords of ``fit``, of which ``n_ctx``, ``type_k``, ``type_v`` and
    ``n_ubatch`` may be a list of values. ``types`` names file types of llama-quantize to plan each model in, by
    llama.cpp's own rule. The cells are planned on the model's header; one that cannot be planned has its ``problem``.

    ``prices`` (in any currency) or ``watts`` are those of one card, by its name. ``answer`` asks for a machine, such as
    ``32k context at 20 t/s``: the cheapest one that does it, or the one with the least memory where no prices or watts
    are given, is confirmed on the model itself.

    ``resume`` names a file that gets a line for each cell that is done, and whose cells are not planned again.
    ``executor`` plans the cells: any of ``concurrent.futures``, or ``dask://HOST:PORT`` for the scheduler of a Dask
    cluster; by default ``jobs`` threads, each with a process of llama.cpp, one for each processor. ``on_cell`` is
    called with each cell that is done, how many are done, and how many there are.

    Raises ``UsageError`` where there is no cell, or more than ``max_cells``, and for what makes no sense; what ``fit``
    raises for a model that cannot be read; ``LibraryError`` where the executor cannot be reached or is lost.
    """
    started = time.monotonic()
    asked = None if answer is None else parse_requirement(_text("answer (--answer)", answer))
    if asked is not None and asked.context and "n_ctx" not in parameters:
        parameters["n_ctx"] = asked.context
    parameters = {name: value for name, value in parameters.items() if value is not None}
    parameters.setdefault("program", programs.chosen("llama-cpp-python"))
    grid = _grid(models, machines, types, parameters)
    costs, cost = _costs(grid.machines, prices, watts)
    check_cells(grid, max_cells)
    with naming_addresses(), _opened(grid) as headers, State.opened(resume) as state:
        cells = [replace(headers.noted(cell), **costs[cell.machine]) for cell in grid.cells]
        keys = {cell.asked: headers.key(cell) for cell in cells}
        state.check({header.digest for header in headers.of.values() if isinstance(header, CellHeader)})
        known = {cell.asked: found for cell in cells if (found := state.known(cell, keys[cell.asked])) is not None}
        done = _Done(len(cells), on_cell)
        for found in known.values():
            done.tell(found)
        waiting = [cell for cell in cells if cell.asked not in known]
        for found, is_lasting in _planned(waiting, headers, executor, jobs):
            if is_lasting:
                state.add(found, keys[found.asked])
            known[found.asked] = found
            done.tell(found)
        every = marked([known[cell.asked] for cell in cells], cost)
        answers = () if asked is None else tuple(_answers(every, asked, cost, headers))
    return Exploration(every, cost, answers, answer, state.used, time.monotonic() - started)


@dataclass(frozen=True)
class Grid:
    """What there is to explore: cells, ``machines`` with the descriptions of their GPUs, and what holds for all."""

    cells: tuple[ExploredCell, ...]
    machines: Mapping[str, tuple[str, ...]]
    fixed: Mapping[str, Any]
    sizes: str


def _grid(models: Any, machines: Any, types: Any, parameters: Mapping[str, Any]) -> Grid:
    """Raises ``UsageError`` for an empty grid, and for what makes no sense in one."""
    known = {each.name for each in taken_by(Fitting)}
    for name in parameters:
        if name not in known or name in _NOT_OF_A_CELL:
            raise UsageError(f"explore has no keyword {name}: see help(fitter.explore)")
    names: list[str] = [os.fsdecode(each) for each in _several("models", models, (bytes, os.PathLike))]
    described = {text: tuple(split_machine(text)) for text in map(_machine, _several("machines (--gpu)", machines))}
    named = types.split(",") if isinstance(types, str) else types
    file_types = [each.strip().upper() for each in _several("types (--type)", named)] if types is not None else [None]
    axes = {name: _values(name, parameters.get(name)) for name in _AXES}
    fixed = {name: value for name, value in parameters.items() if name not in _AXES}
    fixed = {name: PARAMETERS[name].check(value) for name, value in fixed.items()}
    for text, gpus in described.items():
        try:
            Ask.of(Fitting(gpus=gpus, **fixed))  # type: ignore[typeddict-item]
        except UsageError as error:
            raise UsageError(str(error).replace("--gpu 'none'", f"--gpu {text!r}")) from None
    cells = tuple(
        ExploredCell(model, file_type, machine, **dict(zip(_AXES.values(), values, strict=True)))
        for model, file_type, machine in itertools.product(dict.fromkeys(names), dict.fromkeys(file_types), described)
        for values in itertools.product(*axes.values())
    )
    counts = {"model": len(set(names)), "file type": len(set(file_types)), "machine": len(described)}
    counts |= {"context": len(axes["n_ctx"]), "KV type": len(axes["type_k"]) * len(axes["type_v"])}
    counts["micro batch"] = len(axes["n_ubatch"])
    sizes = " × ".join(f"{n} {word}{'es' if word.endswith('ch') else 's'}" for word, n in counts.items() if n > 1)
    return Grid(cells, described, fixed, sizes)


def check_cells(grid: Grid, most: object) -> None:
    """Raise ``UsageError`` where there are more cells than ``most``."""
    if not isinstance(most, int) or isinstance(most, bool) or most < 1:
        raise UsageError(f"max_cells (--max-cells) is {shown(most)}: give a whole number above 0")
    if len(grid.cells) > most:
        raise UsageError(
            f"the grid has {len(grid.cells)} cells ({grid.sizes}), more than {most}: name fewer of each, or raise "
            "--max-cells"
        )


def split_machine(text: str) -> list[str]:
    """The GPUs of a machine, as ``--gpu`` of ``fit`` takes them: ``rtx-4090 + 2x rtx-3090`` has two descriptions."""
    parts = [part.strip() for part in text.split("+")]
    if not all(parts):
        raise UsageError(f"--gpu {text!r}: name a GPU on both sides of each +, such as 'rtx-4090 + rtx-3060-12gb'")
    return parts


def _machine(text: str) -> str:
    return " + ".join(" ".join(part.split()) for part in split_machine(text))


def _several(called: str, given: Any, kinds: tuple[Any, ...] = ()) -> list[Any]:
    """A list of texts, each once. Raises ``UsageError`` for anything else, and where there is none."""
    values = [given] if isinstance(given, (str, *kinds)) else given
    if isinstance(values, Iterable) and not isinstance(values, (str, bytes, Mapping)):
        found: list[Any] = list(dict.fromkeys(values))
        if all(isinstance(each, (str, *kinds)) and each for each in found):
            if found:
                return found
            raise UsageError(f"{called} is empty, so there is no cell to plan: name one")
    raise UsageError(f"{called} is {shown(given)}: give a text, or a list of texts that are not empty")


def _values(name: str, given: Any) -> list[Any]:
    """The values of one axis, each once and checked."""
    values = list(given) if isinstance(given, (list, tuple)) else [given]
    if not values:
        raise UsageError(f"{name} is empty, so there is no cell to plan: give a value, or leave it out")
    return list(dict.fromkeys(None if value is None else PARAMETERS[name].check(value) for value in values))


def _text(called: str, value: object) -> str:
    if not isinstance(value, str):
        raise UsageError(f"{called} is {shown(value)}: give a text")
    return value


def _costs(
    machines: Mapping[str, tuple[str, ...]], prices: Mapping[str, float] | None, watts: Mapping[str, float] | None
) -> tuple[dict[str, dict[str, Any]], str]:
    """The memory of each machine, and its cost where each of its cards has one; what is meant by cost."""
    if prices and watts:
        raise UsageError("prices (--price) and watts (--watts) are both given: one of them says what a machine costs")
    of_cards = _checked_costs(prices or watts or {}, "--price" if prices else "--watts", machines)
    found = {}
    for text, gpus in machines.items():
        cards = [card for gpu in gpus for card in cards_of(gpu)]
        known = [of_cards.get(card) for card in cards]
        total = None if not of_cards or None in known else math.fsum(each for each in known if each is not None)
        found[text] = {"memory": sum(device.total for device in parse_gpus(gpus)), "cost": total}
    return found, "price" if prices else "watts" if watts else "memory"


def _checked_costs(
    given: Mapping[str, float], option: str, machines: Mapping[str, tuple[str, ...]]
) -> dict[str, float]:
    there = {card for gpus in machines.values() for gpu in gpus for card in cards_of(gpu)}
    found: dict[str, float] = {}
    for name, value in given.items():
        card = _card(_text(option, name))
        if card not in there:
            raise UsageError(
                f"{option} {name}={shown(value)}: no machine of --gpu has that card; they have "
                f"{', '.join(sorted(there)) or 'none'}"
            )
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value) or value < 0:
            raise UsageError(f"{option} {name}={shown(value)}: give a number that is not below 0")
        found[card] = float(value)
    return found


def _card(name: str) -> str:
    """What a card is called; its ``name`` where that is none."""
    try:
        return next(iter(cards_of(name)), name)
    except UsageError:
        return name


# --- headers


@dataclass
class _Headers:
    """The header of each model in each file type, or why there is none, and what holds for all cells."""

    of: dict[tuple[str, str | None], CellHeader | str]
    opened: dict[str, Model]
    machines: Mapping[str, tuple[str, ...]]
    fixed: Mapping[str, Any]
    version: str
    needing_imatrix: frozenset[tuple[str, str | None]] = frozenset()

    def keywords(self, cell: ExploredCell) -> dict[str, Any]:
        """The keywords of ``fit`` for a cell."""
        own = {name: getattr(cell, attribute) for name, attribute in _AXES.items()}
        own = {name: value for name, value in own.items() if value is not None}
        return {**self.fixed, **own, "gpus": self.machines[cell.machine]}

    def header(self, cell: ExploredCell) -> CellHeader | str:
        return self.of[cell.model, cell.file_type]

    def noted(self, cell: ExploredCell) -> ExploredCell:
        """``cell`` with what is known of its file type."""
        return replace(cell, needs_imatrix=(cell.model, cell.file_type) in self.needing_imatrix)

    def called(self, cell: ExploredCell) -> str:
        name = Path(self.opened[cell.model].called).name
        return name if cell.file_type is None else f"{name} as {cell.file_type}"

    def key(self, cell: ExploredCell) -> tuple[str, str, dict[str, Any]]:
        """What a cell is known by in a file: the header, the build of llama.cpp, and the keywords."""
        header = self.header(cell)
        return header.digest if isinstance(header, CellHeader) else "", self.version, self.keywords(cell)


@contextmanager
def _opened(grid: Grid) -> Iterator[_Headers]:
    """Every model's header, read once."""
    timeout, llama_cpp = grid.fixed.get("timeout"), grid.fixed.get("llama_cpp")
    known = {} if timeout is None else {"timeout": timeout}
    models = list(dict.fromkeys(cell.model for cell in grid.cells))
    types = list(dict.fromkeys(cell.file_type for cell in grid.cells))
    found: dict[tuple[str, str | None], CellHeader | str] = {}
    needing: set[tuple[str, str | None]] = set()
    opened: dict[str, Model] = {}
    with Worker(llama_cpp=llama_cpp, **known) as worker:
        for model in models:
            fetch(model, worker.timeout)
            opened[model] = open_model(model, worker.header)
            for name, (header, needs_imatrix) in _headers_of(opened[model], types, worker).items():
                found[model, name] = header
                needing |= {(model, name)} if needs_imatrix else set()
        version = worker.build().version
    yield _Headers(found, opened, grid.machines, grid.fixed, version, frozenset(needing))


def _headers_of(
    model: Model, types: Sequence[str | None], worker: Worker
) -> dict[str | None, tuple[CellHeader | str, bool]]:
    """The header of ``model`` in each of the file types, or why there is none; and if it needs an importance matrix."""
    with tempfile.TemporaryDirectory(prefix="fitter-") as directory:
        if types == [None]:
            path = Path(directory) / "skeleton.gguf"
            try:
                worker.write_skeleton(Skeleton(tuple(map(str, model.files))), path)
            except LlamaCppError as error:
                if len(model.files) > 1:
                    return {None: (str(error), False)}
                # with its tokenizer it takes longer, and is planned all the same
                path = Path(model.files[0])
            return {None: (CellHeader.of(path, worker.header(path).data_offset), False)}
        check_source(model)
        try:
            known = worker.file_types(model.files, directory)
        except LlamaCppError as error:
            return dict.fromkeys(types, (str(error), False))
        by_name = {each.name: each for each in known.found}
        found: dict[str | None, tuple[CellHeader | str, bool]] = {}
        for name in types:
            if name not in by_name:
                raise UsageError(f"this llama.cpp has no file type {shown(name)}: it has {', '.join(by_name)}")
            planned = quantization(model, known, by_name[name])
            path = Path(directory) / f"{name}.gguf"
            header = planned.problem or CellHeader.of(path, worker.header(path).data_offset)
            found[name] = header, planned.needs_imatrix
        return found


# --- cells


class _Done:
    """Counts cells that are done."""

    def __init__(self, total: int, on_cell: OnCell | None) -> None:
        self._total = total
        self._on_cell = on_cell
        self._count = 0

    def tell(self, cell: ExploredCell) -> None:
        self._count += 1
        if self._on_cell is not None:
            self._on_cell(cell, self._count, self._total)


def _planned(
    cells: Sequence[ExploredCell], headers: _Headers, executor: Executor | str | None, jobs: int | None
) -> Iterator[tuple[ExploredCell, bool]]:
    """Each of ``cells`` with what was found for it, as soon as it is, and whether that would be found again."""
    waiting = []
    for cell in cells:
        header = headers.header(cell)
        if isinstance(header, str):
            yield replace(cell, problem=header), False
        else:
            waiting.append((cell, Task(header, headers.called(cell), headers.keywords(cell), headers.version)))
    if not waiting:
        return
    with _executor(executor, jobs, len(waiting)) as own:
        futures: dict[Future[tuple[dict[str, Any], bool]], ExploredCell] = {}
        try:
            for cell, task in waiting:
                futures[own.submit(exploring_cells.run, task)] = cell
            for future in as_completed(futures):
                found, is_lasting = future.result()
                yield futures[future].having(found), is_lasting
        except FitterError:
            raise
        except (BrokenExecutor, OSError, RuntimeError) as error:
            raise LibraryError(
                f"the executor was lost ({type(error).__name__}: {error}): start it again, and go on with --resume"
            ) from None
        finally:
            for future in futures:
                future.cancel()


@contextmanager
def _executor(given: Executor | str | None, jobs: int | None, most: int) -> Iterator[Executor]:
    if isinstance(given, str):
        with executor_of(given) as executor:
            yield executor
        return
    if given is not None:
        if not isinstance(given, Executor):
            raise UsageError(
                f"executor is {shown(given)}: give a concurrent.futures.Executor, or a text such as dask://host:8786"
            )
        yield given
        return
    if jobs is not None and (not isinstance(jobs, int) or isinstance(jobs, bool) or jobs < 1):
        raise UsageError(f"jobs (--jobs) is {shown(jobs)}: give a whole number above 0")
    try:
        with ThreadPoolExecutor(min(jobs or process.processors(), most)) as own:
            try:
                yield own
            finally:
                own.shutdown(cancel_futures=True)
    finally:
        exploring_cells.close()


def _answers(
    cells: Sequence[ExploredCell], asked: Requirement, cost: str, headers: _Headers
) -> Iterator[ExploredAnswer]:
    """For each model the first of its cells that the model itself confirms."""
    for model in dict.fromkeys(cell.model for cell in cells):
        own = [cell for cell in cells if cell.model == model]
        yield _confirmed(model, cheapest_first(own, asked, cost), asked, headers)


def _confirmed(model: str, ordered: Sequence[ExploredCell], asked: Requirement, headers: _Headers) -> ExploredAnswer:
    for refused, cell in enumerate(ordered):
        keywords = headers.keywords(cell)
        try:
            if cell.file_type is None:
                plan = api.fit(model, **keywords)
            else:
                header = headers.header(cell)
                assert isinstance(header, CellHeader)
                with tempfile.TemporaryDirectory(prefix="fitter-") as directory:
                    path = Path(directory) / "model.gguf"
                    header.write(path)
                    plan = api.fit(path, **{**keywords, "skeleton": False})
                plan = replace(plan, model=replace(plan.model, path=headers.called(cell)), files=())
        except (LlamaCppError, TimeLimitError):
            continue
        confirmed = cell.having({**figures_of(plan), "bytes": plan.model.bytes})
        if asked.is_met_by(confirmed):
            return ExploredAnswer(model, confirmed, plan, cell.file_type is not None, refused)
    return ExploredAnswer(model, None, refused=len(ordered))


__all__ = ["Exploration", "ExploredAnswer", "ExploredCell", "explore"]
