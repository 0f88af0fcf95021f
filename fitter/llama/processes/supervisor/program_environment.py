"""The environment of a program that runs in another directory."""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

_PLACES = ("LD_LIBRARY_PATH", "GGML_BACKEND_PATH")
"""Environment variables with paths that a program needs to start."""


def from_anywhere(environment: Mapping[str, str]) -> dict[str, str]:
    """Make those paths absolute, and remove empty ones, which mean the current directory."""
    places = {name: environment[name].split(os.pathsep) for name in _PLACES if name in environment}
    whole = {name: os.pathsep.join(os.path.abspath(each) for each in paths if each) for name, paths in places.items()}
    return {**environment, **whole}
