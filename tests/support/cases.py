"""Cases of a test as rows: their values are the first parameters of the test, and fixtures come after them.

``refused`` checks the error of a case.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import pytest

from fitter.storage import parse_toml

STORED = Path(__file__).parents[1] / "data" / "cases"

_Test = TypeVar("_Test", bound=Callable[..., None])


def cases(*rows: Any) -> Callable[[_Test], _Test]:
    """Run a test with each row, a tuple of values or a single one that is no tuple; a table has their names."""
    if len(rows) == 1 and isinstance(rows[0], Mapping):
        return _marked(list(rows[0].values()), list(rows[0]))
    return _marked(rows, None)


def named_cases(*rows: tuple[Any, ...]) -> Callable[[_Test], _Test]:
    """Run a test with each row, which has its name in front of the values."""
    return _marked([row[1:] for row in rows], [row[0] for row in rows])


def outcomes(table: Mapping[Any, Sequence[Any]]) -> Callable[[_Test], _Test]:
    """Run a test with every value and its outcome; the table has the values of each outcome."""
    return cases(*((value, outcome) for outcome, values in table.items() for value in values))


def stored(file: str, table: str) -> dict[str, tuple[Any, ...]]:
    """Return the rows of a table in ``tests/data/cases``, one a line there: each a list of values, by its name."""
    return {name: tuple(values) for name, values in _tables(file)[table].items()}


def stored_rows(file: str, table: str) -> list[tuple[Any, ...]]:
    """Return the rows of a table there that need no names: each a list of values."""
    return [tuple(values) for values in _tables(file)[table]]


@cache
def _tables(file: str) -> dict[str, Any]:
    return parse_toml((STORED / f"{file}.toml").read_text(encoding="utf-8"))


def document(name: str) -> Any:
    """Return a whole document as a test expects it, from ``tests/data/cases/documents.json``."""
    return json.loads((STORED / "documents.json").read_text(encoding="utf-8"))[name]


@contextmanager
def refused(kind: type[Exception], said: str) -> Iterator[None]:
    """Check that the block raises an error of this kind whose whole text is ``said``."""
    with pytest.raises(kind) as caught:
        yield
    assert str(caught.value) == said


def _marked(rows: Sequence[Any], names: Sequence[str] | None) -> Callable[[_Test], _Test]:
    values = [row if isinstance(row, tuple) else (row,) for row in rows]

    def mark(test: _Test) -> _Test:
        parameters = list(inspect.signature(test).parameters)[: len(values[0])]
        return pytest.mark.parametrize(parameters, values, ids=names)(test)

    return mark
