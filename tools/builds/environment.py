"""The environment that a worker's process starts with."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from threading import Lock

_changing = Lock()


@contextlib.contextmanager
def with_variables(variables: Mapping[str, str]) -> Iterator[None]:
    """Have this process's environment, from which a worker's is taken, with ``variables`` and none other of ggml's.

    For one thread at a time; others wait.
    """
    with _changing:
        before = dict(os.environ)
        try:
            for name in [name for name in before if name.startswith("GGML_")]:
                del os.environ[name]
            os.environ.update(variables)
            yield
        finally:
            os.environ.clear()
            os.environ.update(before)
