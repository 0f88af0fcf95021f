"""What is going on, for someone who watches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO

from fitter.output.units import dummy_loads
from fitter.planning.request import Progress


@contextmanager
def progress(stream: IO[str], *, every_step: bool = False) -> Iterator[Callable[[Progress], None] | None]:
    """A function to call with each step, or ``None`` where nobody watches.

    On a terminal one line is rewritten and gone at the end; with ``every_step`` each step is a line that stays.
    """
    if every_step:
        yield lambda step: print(_text(step), file=stream, flush=True)
    elif stream.isatty():
        from rich.console import Console

        with Console(file=stream, highlight=False, markup=False).status("reading the model") as status:
            yield lambda step: status.update(_text(step))
    else:
        yield None


def _text(step: Progress) -> str:
    return f"[{dummy_loads(step.dummy_loads)}] {step.text}"
