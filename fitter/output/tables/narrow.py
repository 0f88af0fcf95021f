"""Tables for terminals of any width: first with shorter names of cards, then with fewer columns, then none at all."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

LEAST_WIDTH = 40
"""The narrowest terminal, in columns, on which every table is readable."""

_PADDING = 2
_UNFOLDED = 10_000
_LONGEST_SHORT_NAME = 24
_MAKER = re.compile(
    r"\b(?:NVIDIA|GeForce|Quadro|AMD|Radeon|Intel|Ada Generation|Graphics|\d+-Core Processor|Processor|CPU)\b"
    r"|\((?:R|TM)\)|\s@.*|\s\([^()]{3,}\)",
    re.IGNORECASE,
)
"""Parts of a card's or processor's name that do not identify it."""


def short_name(description: str) -> str:
    """Shorten ``NVIDIA GeForce RTX 3090`` to ``RTX 3090``; at most 24 characters."""
    short = " ".join(_MAKER.sub(" ", description).split()) or description
    return short if len(short) <= _LONGEST_SHORT_NAME else short[: _LONGEST_SHORT_NAME - 1] + "…"


def too_narrow(width: int) -> str:
    """Return the message instead of a table on a terminal of ``width`` columns; empty if it is wide enough."""
    if width >= LEAST_WIDTH:
        return ""
    return f"fitter: the table needs {LEAST_WIDTH} columns, but this terminal has {width}: widen it, or use --json"


@dataclass(frozen=True)
class Indented:
    """Something to draw two columns to the right."""

    renderable: RenderableType

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        inside = options.update_width(options.max_width - _PADDING)
        for line in console.render_lines(self.renderable, inside, pad=False):
            yield Segment(" " * _PADDING)
            yield from line
            yield Segment.line()


@dataclass(frozen=True)
class _Shape:
    """A way to show a table: with short names or not, without some columns, with the first ones as headings."""

    is_short: bool
    hidden: frozenset[str]
    n_headings: int = 0


class NarrowTable(Table):
    """A table with shorter names on a narrow terminal, and fewer columns on a narrower one.

    Anything but a terminal gets the whole table.

    Args:
        spare: Headers of columns that may be hidden, the least important first; those in a tuple are hidden together.
        names: Header of a column with long names; if it is hidden, lines below the table list the names.
        shorten: Shortens these names.
        fold: Width to which long cells are folded before a column is hidden.
        headings: Number of first columns that may become headings above the rows that share them.
    """

    def __init__(
        self,
        *,
        spare: Sequence[str | tuple[str, ...]] = (),
        names: str | None = None,
        shorten: Callable[[str], str] = short_name,
        fold: int = _UNFOLDED,
        headings: int = 0,
    ) -> None:
        super().__init__(box=None, padding=(0, _PADDING, 0, 0), header_style="dim")
        self._spare = tuple((group,) if isinstance(group, str) else group for group in spare)
        self._names = names
        self._shorten = shorten
        self._fold = fold
        self._headings = headings

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if not options.is_terminal:
            yield from super().__rich_console__(console, options)
            return
        shapes = tuple(self._shapes())
        fitting = (shape for shape in shapes if self._width(console, options, shape) <= options.max_width)
        shape = next(fitting, None)
        table = self._in_shape(shape or shapes[-1], can_fold=shape is None)
        if shape is not None and shape.n_headings:
            yield from self._with_headings(table, shape.n_headings, console, options)
        else:
            yield from table.__rich_console__(console, options)
        if self._names in (shape or shapes[-1]).hidden:
            yield Text("\n".join(self._legend()), style="dim", overflow="fold")

    def _shapes(self) -> Iterator[_Shape]:
        yield _Shape(False, frozenset())
        for n_headings in range(self._headings + 1):
            for count in range(len(self._spare) + 1):
                hidden = frozenset(header for group in self._spare[:count] for header in group)
                yield _Shape(True, hidden, n_headings)

    def _with_headings(self, table: Table, n_headings: int, console: Console, options: ConsoleOptions) -> RenderResult:
        """Render ``table``, whose rows have a line each, with a heading wherever the first columns change."""
        lines = console.render_lines(table, options, pad=False, new_lines=True)
        groups = zip(*(column.cells for column in self.columns[:n_headings]), strict=True)
        yield from lines[0]
        before: tuple[str, ...] = ()
        for line, group in zip(lines[1:], groups, strict=True):
            heading = tuple(map(str, group))
            if heading != before:
                yield Text(", ".join(heading), style="bold", overflow="fold")
            before = heading
            yield from line

    def _width(self, console: Console, options: ConsoleOptions, shape: _Shape) -> int:
        """Return the width of the table in this shape."""
        widths = []
        for column in self._in_shape(shape).columns:
            wide = options.update(max_width=_UNFOLDED)
            cells = [console.measure(cell, options=wide).maximum for cell in (column.header, *column.cells)]
            widths.append(max(cells) if column.no_wrap else min(max(cells), self._fold))
        return sum(widths) + _PADDING * (len(widths) - 1)

    def _in_shape(self, shape: _Shape, *, can_fold: bool = False) -> Table:
        """Return the table in this shape; ``can_fold``: fold the first column too."""
        table = Table(box=None, padding=(0, _PADDING, 0, 0), pad_edge=False, header_style=self.header_style)
        columns = [column for column in self.columns[shape.n_headings :] if str(column.header) not in shape.hidden]
        for index, column in enumerate(columns):
            table.add_column(
                column.header,
                justify=column.justify,
                style=column.style,
                no_wrap=column.no_wrap and not (can_fold and index == 0),
                overflow="fold" if can_fold and index == 0 else column.overflow,
            )
        cells = [
            [
                self._shorten(cell)
                if shape.is_short and column.header == self._names and isinstance(cell, str)
                else cell
                for cell in column.cells
            ]
            for column in columns
        ]
        for row, values in zip(self.rows, zip(*cells, strict=True), strict=True):
            table.add_row(*values, style=row.style)
        return table

    def _legend(self) -> Iterator[str]:
        """Yield a line for each description, with its devices."""
        owners: dict[str, list[str]] = {}
        described = next(column for column in self.columns if column.header == self._names)
        for owner, description in zip(self.columns[0].cells, described.cells, strict=True):
            if description:
                owners.setdefault(self._shorten(str(description)), []).append(str(owner).strip())
        for description, names in owners.items():
            yield f"{', '.join(names)}: {description}"


def table_of(
    first: str,
    *others: str,
    texts: Sequence[str] = (),
    spare: Sequence[str | tuple[str, ...]] = (),
    names: str | None = None,
    fold: int = _UNFOLDED,
) -> NarrowTable:
    """Make a table with a column of names, then columns of numbers but for ``texts``; see ``NarrowTable``."""
    table = NarrowTable(spare=spare, names=names, fold=fold)
    for column in (first, *others):
        table.add_column(column, justify="left" if column in (first, *texts) else "right", no_wrap=True)
    return table
