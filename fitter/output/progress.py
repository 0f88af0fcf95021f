"""Show progress on a terminal."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING

from fitter.text import dummy_loads, printable

if TYPE_CHECKING:
    from rich.console import RenderableType

    from fitter.planning.request.request import Progress

_BAR = 24
"""Characters of a bar."""
_WORTH_COUNTING = 2
"""Seconds after which a step shows its duration."""


_NOW_AND_THEN = 15
"""Seconds between two lines where there is no terminal."""


@contextmanager
def progress(
    stream: IO[str], *, every_step: bool = False, is_long: bool = False
) -> Iterator[Callable[[Progress], None] | None]:
    """Yield a function to call with each step, or ``None`` if nothing is shown.

    On a terminal it updates one line, which is removed at the end; with ``every_step`` each step gets a line. Elsewhere
    a call that takes minutes (``is_long``) writes a line now and then.
    """
    if every_step:
        yield lambda step: None if _is_on_its_way(step) else print(_text(step), file=stream, flush=True)
    elif stream.isatty():
        from rich.console import Console

        with Console(file=stream, highlight=False, markup=False).status(Step("reading the model")) as status:
            yield lambda step: status.update(Step(_text(step), step.part))
    elif is_long:
        began = time.monotonic()

        def say(step: Progress) -> None:
            nonlocal began
            if time.monotonic() - began >= _NOW_AND_THEN:
                began = time.monotonic()
                print(_text(step), file=stream, flush=True)

        yield say
    else:
        yield None


@contextmanager
def counted(stream: IO[str], doing: str) -> Iterator[Callable[[int, int, str], None] | None]:
    """Yield a function to call with the number done, the number of all, and the last name; ``None`` if nothing is
    shown.

    On a terminal it draws a bar, which is removed at the end.
    """
    if not stream.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
    from rich.progress import Progress as Bars

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[last]}", markup=False),
    )
    console = Console(file=stream, highlight=False, markup=False)
    with Bars(*columns, console=console, transient=True) as bars:
        task = bars.add_task(doing, last="")
        yield lambda done, total, last: bars.update(task, completed=done, total=total, last=last)


class Step:
    """The text of a step, with its seconds if it is slow, and a bar if its ``part`` is known."""

    def __init__(self, text: str, part: float | None = None) -> None:
        self._text = text
        self._part = part
        self._began = time.monotonic()

    def __rich__(self) -> RenderableType:
        from rich.text import Text

        seconds = int(time.monotonic() - self._began)
        text = Text(f"{self._text} ({seconds} s)" if seconds >= _WORTH_COUNTING else self._text)
        if self._part is None:
            return text
        from rich.columns import Columns
        from rich.progress_bar import ProgressBar

        return Columns([ProgressBar(total=1.0, completed=self._part, width=_BAR), text])


def _is_on_its_way(step: Progress) -> bool:
    """Return whether a step is reported repeatedly until it is done."""
    return step.part is not None and step.part < 1


def _text(step: Progress) -> str:
    if step.part is not None:
        return printable(step.text)
    return f"[{dummy_loads(step.dummy_loads)}] {printable(step.text)}"
