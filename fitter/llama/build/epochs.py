"""Differences between builds of llama.cpp that no build tells itself.

``layouts.json`` has them, by a build's version of ggml.
"""

from __future__ import annotations

import functools
import re
from typing import NamedTuple

from fitter.errors import LibraryError
from fitter.llama.build.layouts import data
from fitter.version import numbers_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

_MOST_OPERATIONS = 256


class Epoch(NamedTuple):
    """Builds from one version of ggml on.

    Attributes:
        ggml: The first version of ggml.
        last_op: ``ggml_op_name`` of the last operation.
        graph_optimize_has_params: Whether a backend's ``graph_optimize`` can say which tensors stay allocated; ``None``
            if that changed within this version.
        larger_alone: Architectures whose last graph is reserved with one sequence, however many there are.
    """

    ggml: str
    last_op: str
    graph_optimize_has_params: bool | None
    larger_alone: tuple[str, ...]

    @property
    def larger_alone_text(self) -> str:
        """``larger_alone`` for libfitter."""
        return "".join(f"{each} " for each in self.larger_alone)

    def n_operations(self, name_of: Callable[[int], str]) -> int:
        """Count ggml's operations by their names (``name_of``). Raises ``LibraryError`` if the count is unclear."""
        for i in range(_MOST_OPERATIONS):
            name = name_of(i)
            if name == self.last_op:
                return i + 1
            if not re.fullmatch("[A-Z0-9_]+", name):
                break
        raise LibraryError(
            f"ggml's operations do not end with {self.last_op}, as those of every version that fitter knows"
        )


@functools.cache
def epochs() -> tuple[Epoch, ...]:
    """Return all known epochs, the oldest first."""
    return tuple(Epoch(**{**each, "larger_alone": tuple(each["larger_alone"])}) for each in data()["epochs"])


def epoch_of(ggml: str) -> Epoch:
    """Return the epoch of a version of ggml. Raises ``LibraryError`` if it is too old, or no version."""
    version = numbers_of(ggml)
    older = [each for each in epochs() if numbers_of(each.ggml) <= version]
    if not version or not older:
        raise LibraryError(
            f"its ggml is {ggml or 'of no version'}, and {epochs()[0].ggml} is needed: take llama.cpp b9842 or newer, "
            "or llama-cpp-python 0.3.25 or newer"
        )
    return older[-1]


def backend_rules(ggml: str) -> dict[str, bool]:
    """Return the rules of ggml-cuda and ggml-metal in this version, of those that some versions lack, by their names in
    ``fitter_build_t``.
    """
    version = numbers_of(ggml)
    return {
        f"{backend}_{name}": version >= numbers_of(since)
        for backend in ("cuda", "metal")
        for name, since in data()[backend].items()
    }


def position_bytes(ggml: str) -> int:
    """Return the further bytes of a cell in a state if positions have several dimensions (``llama_kv_cell_ext``)."""
    version, sizes = numbers_of(ggml), data()["states"]["position_bytes"]
    return int(next((sizes[since] for since in reversed(sizes) if version >= numbers_of(since)), 0))


def leaves_out_what_is_masked(ggml: str) -> bool:
    """Return whether a sequence's state has only the cells that sliding-window attention still sees."""
    return numbers_of(ggml) >= numbers_of(data()["states"]["leaves_out_what_is_masked"])
