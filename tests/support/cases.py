"""Cases of a test as rows: their values are the first parameters of the test, and fixtures come after them.

``refused`` checks the error of a case.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import pytest

from fitter.storage.data_files import parse_toml

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
