"""An explored grid as table, JSON, CSV and Parquet. No native code, no decisions."""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.text import Text

from fitter.errors import LibraryError, UsageError
from fitter.output.arguments import command_line
from fitter.output.documents.document import dumps
from fitter.output.documents.many_plans import CELL, EXPLORATION
from fitter.output.tables.narrow import NarrowTable
from fitter.planning.tables.exploration import ASKED
from fitter.storage import replace_document
from fitter.text import human, mib, printable, speed

if TYPE_CHECKING:
    from fitter.planning.tables.exploration import Exploration, ExploredAnswer, ExploredCell

_BEST = "bold green"

_AXES = dict(zip(("model", "type", "machine", "-c", "-ctk", "-ctv", "-ub"), ASKED, strict=True))
"""Attributes that identify a cell, by title of column. A value that all cells share stands once above the table."""

_FULL = "full_context_tokens_per_second"
_RATES = {"prompt_tokens_per_second": "prompt t/s", "tokens_per_second": "t/s", _FULL: "t/s full"}
"""Titles of the columns with speeds, by attribute; without a full context's where no cell has it."""

_COSTS = {"price": "price", "watts": "W", "memory": "MiB of devices"}


def csv_text(exploration: Exploration) -> str:
    """Write a line for each cell, under the names of JSON; arguments are one text, and an unknown value is empty."""
    out = io.StringIO()
    rows = [_flat(cell) for cell in exploration.cells]
    writer = csv.DictWriter(out, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: _field(name, value) for name, value in row.items()} for row in rows)
    return out.getvalue()


def _flat(cell: ExploredCell) -> dict[str, Any]:
    row = CELL.write(cell)
    words = row["arguments"]
    return {**row, "arguments": None if words is None else command_line(words, quoted=True)}


def _field(name: str, value: Any) -> Any:
    if isinstance(value, bool):
        return str(value).lower()
    if not isinstance(value, str) or name == "arguments":
        # arguments are for a shell, and fitter's own
        return value
    text = printable(value)
    # a spreadsheet would read such a text as a formula
    return f"'{text}" if text.lstrip().startswith(("=", "+", "-", "@")) else text


def _parquet(exploration: Exploration) -> bytes:
    try:
        import pyarrow as pa  # type: ignore[import-not-found,import-untyped,unused-ignore]
        import pyarrow.parquet as pq  # type: ignore[import-not-found,import-untyped,unused-ignore]
    except ImportError:
        raise LibraryError("Parquet needs the package pyarrow: pip install pyarrow, or name a .csv file") from None
    kinds = {
        **dict.fromkeys(("asked_context", "n_ubatch", "n_ctx", "bytes", "used", "host_weights", "memory"), pa.int64()),
        **dict.fromkeys((*_RATES, "cost", "bits_per_weight"), pa.float64()),
        **dict.fromkeys(("fits", "is_best", "needs_imatrix"), pa.bool_()),
    }
    rows = [_flat(cell) for cell in exploration.cells]
    schema = pa.schema([(name, kinds.get(name, pa.string())) for name in rows[0]])
    out = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), out)
    return out.getvalue()


_WRITERS: dict[str, Callable[[Exploration], bytes]] = {
    ".csv": lambda found: csv_text(found).encode(),
    ".json": lambda found: (dumps(EXPLORATION.write(found)) + "\n").encode(),
    ".parquet": _parquet,
}


def check_output(path: Path) -> None:
    """Raise ``UsageError`` for the ending of ``path``, ``LibraryError`` if the package for its format is missing."""
    if path.suffix.lower() not in _WRITERS:
        raise UsageError(f"-o {path}: give the file one of the endings {', '.join(_WRITERS)}")
    if path.suffix.lower() == ".parquet":
        from importlib.util import find_spec

        if find_spec("pyarrow") is None:
            raise LibraryError("Parquet needs the package pyarrow: pip install pyarrow, or name a .csv file")


def write(exploration: Exploration, path: Path) -> None:
    """Write a grid in the format of the file's ending. Raises ``AnswerError``."""
    replace_document(path, _WRITERS[path.suffix.lower()](exploration))


def exploration_table(exploration: Exploration, *, verbose: bool = False) -> RenderableType:
    """Draw a row for each cell that fits, the others below, and the answer; ``verbose``: a row for every cell."""
    # name every model by its file, if these names differ
    named = file_names(cell.model for cell in exploration.cells)
    cells = tuple(replace(cell, model=named[cell.model]) for cell in exploration.cells)
    varied = [name for name, attribute in _AXES.items() if len({getattr(cell, attribute) for cell in cells}) > 1]
    common = [name for name in _AXES if name not in varied and _axis(cells[0], name) != "-"]
    shown = [cell for cell in cells if cell.fits or verbose or len(cells) <= _FEW]
    # the plan's context repeats -c, and says nothing more
    spare = ["context"] if "-c" in varied and all(cell.n_ctx in (None, cell.asked_context) for cell in shown) else []
    spare += ["host MiB", "t/s full", "prompt t/s", *(["fits"] if all(cell.fits for cell in shown) else [])]
    table = NarrowTable(spare=spare, headings=sum(name in ("model", "type", "machine") for name in varied))
    for name in varied:
        table.add_column(name, justify="right" if name in ("-c", "-ub") else "left", no_wrap=True)
    rates = [name for name in _RATES if name != _FULL or any(getattr(cell, _FULL) is not None for cell in shown)]
    columns = ["fits", "context", "host MiB", *(_RATES[name] for name in rates)]
    has_cost = any(cell.cost is not None for cell in cells)
    for column in [*columns, *([_COSTS[exploration.cost]] if has_cost else [])]:
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("", style="dim", no_wrap=True)
    for cell in shown:
        table.add_row(*_row(cell, varied, rates, has_cost))
    above = Text(_name(cells[0], common), style="bold", overflow="fold")
    parts: list[RenderableType] = [above] if common else []
    parts += [table] if shown else []
    parts += [Text(line, overflow="fold") for line in _lines_below(exploration, cells, len(cells) - len(shown), varied)]
    return Group(*parts)


_FEW = 40
"""Grids of at most this many cells show a row for each, whether it fits or not."""
_MOST_REASONS = 5


def _row(cell: ExploredCell, varied: list[str], rates: list[str], has_cost: bool) -> tuple[str | Text, ...]:
    style = _BEST if cell.is_best else ""
    fits = "unknown" if cell.fits is None else "yes" if cell.fits else "no"
    figures = [fits, "-" if cell.n_ctx is None else str(cell.n_ctx), mib(cell.host_weights if cell.fits else None)]
    figures += ["-" if (rate := getattr(cell, name)) is None else speed(rate) for name in rates]
    if has_cost:
        figures.append("unknown" if cell.cost is None else f"{cell.cost:g}")
    about = (printable(_axis(cell, name)) for name in varied)
    return (*(Text(each, style=style) for each in (*about, *figures)), "best" if cell.is_best else "")


def file_names(models: Iterable[str]) -> dict[str, str]:
    """Name each model for a table: by its file, or by its whole path where two files have one name."""
    names = {model: Path(model).name or model for model in dict.fromkeys(models)}
    count = Counter(names.values())
    return {model: name if count[name] == 1 else model for model, name in names.items()}


def _lines_below(
    exploration: Exploration, cells: Sequence[ExploredCell], hidden: int, varied: list[str]
) -> Iterator[str]:
    fitting = sum(bool(cell.fits) for cell in cells)
    stored = f", {exploration.kept} of them made before" if exploration.kept else ""
    yield f"{len(cells)} plan{'s' if len(cells) > 1 else ''}{stored}: {fitting} fit" + (
        f"; -v shows the {hidden} that do not" if hidden else ""
    )
    if any(cell.is_best for cell in cells):
        what = {"memory": "device memory"}.get(exploration.cost, exploration.cost)
        yield f"best: the best trade-offs of context, speed and {what} for each model and type"
    if needing := dict.fromkeys(cell.file_type or "" for cell in cells if cell.needs_imatrix):
        yield f"llama-quantize makes {printable(', '.join(needing))} only with an importance matrix"
    reasons: dict[str, list[ExploredCell]] = {}
    for cell in cells:
        if cell.fits is None and cell.problem:
            reasons.setdefault(cell.problem, []).append(cell)
    for problem, those in list(reasons.items())[:_MOST_REASONS]:
        count = f" and {len(those) - 1} more" if len(those) > 1 else ""
        yield f"{_name(those[0], varied)}{count}: {printable(problem)}"
    if len(reasons) > _MOST_REASONS:
        yield f"and {len(reasons) - _MOST_REASONS} more reasons, in --json"
    if not fitting:
        lacking = [cell for cell in cells if cell.fits is False and cell.problem]
        for cell in sorted(lacking, key=lambda cell: (cell.bytes or 0, -cell.memory))[:1]:
            yield f"none fits; {_name(cell, varied)}: {printable(cell.problem or '')}"
    for answer in exploration.answers:
        yield from _answer_lines(exploration, answer)


def _axis(cell: ExploredCell, name: str) -> str:
    value = getattr(cell, _AXES[name])
    return "-" if value is None else str(value)


def _name(cell: ExploredCell, varied: list[str]) -> str:
    words = (f"{name} {_axis(cell, name)}" if name.startswith("-") else _axis(cell, name) for name in varied)
    return printable(", ".join(words)) or printable(cell.machine)


def _answer_lines(exploration: Exploration, answer: ExploredAnswer) -> Iterator[str]:
    name = printable(file_names(each.model for each in exploration.cells)[answer.model])
    cell = answer.cell
    if cell is None:
        yield f"{name}: no machine does {printable(exploration.asked or '')}" + _refused(answer.refused)
        return
    costs = {"price": "the cheapest", "watts": "the one with the fewest watts"}
    if exploration.cost == "memory":
        why = "the one with the least memory, since no prices are given"
    elif cell.cost is None:
        why = f"the first whose {exploration.cost} is unknown; none with a known one does it"
    else:
        why = f"{costs[exploration.cost]}, {cell.cost:g}"
    kind = "" if cell.file_type is None else f" as {cell.file_type}"
    figures = f"context {cell.n_ctx}"
    if cell.tokens_per_second is not None:
        usual, full = speed(cell.tokens_per_second), cell.full_context_tokens_per_second
        at_full = "" if full is None or speed(full) == usual else f", {speed(full)} with a full context"
        figures += f", about {usual} t/s{at_full}"
    if cell.prompt_tokens_per_second is not None:
        figures += f" (prompt {speed(cell.prompt_tokens_per_second)} t/s)"
    yield f"{printable(exploration.asked or '')}: {printable(cell.machine)} ({why}) runs {name}{kind}: {figures}"
    how = "confirmed on the model itself"
    if answer.is_of_header:
        how = f"confirmed on the header that llama-quantize would write: a file of type {cell.file_type} is not here"
        how += ", and is only made with an importance matrix" if cell.needs_imatrix else ""
    on_host = f", {human(cell.host_weights)} of weights on the host" if cell.host_weights else ""
    yield f"{how}{on_host}; with {printable(command_line(list(cell.arguments or ()), quoted=True))}"


def _refused(count: int) -> str:
    return f" ({count} did by their header, and not when the model itself was measured)" if count else ""


__all__ = ["check_output", "csv_text", "exploration_table", "file_names", "write"]
