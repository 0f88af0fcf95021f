"""Find the layout of a libllama's parameter structs: by its header, among the known ones, or from its defaults alone.

Without a header, the defaults of a newer libllama are aligned with the fields of the newest known layout, with as few
fields new or gone as possible. A layout follows only if all ways to do so have each field that fitter writes at one
place. What no default tells, the small models of ``fitter.llama.load.canary`` do.
"""

from __future__ import annotations

from fitter.errors import LibraryError
from fitter.llama.build.layouts import (
    READ_WHOLE,
    SIZES,
    aligned,
    disagreement,
    disagreement_of_field,
    layouts,
    read_header,
    written_by,
)
from fitter.parameters.table import of_a_struct

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from typing import TypeAlias

    from fitter.llama.build.layouts import Layout, Probe, Written
    from fitter.llama.build.llama_h import Fields

    Placed: TypeAlias = "tuple[tuple[str, str, int], ...]"
    """Name, kind and end of each field."""

HEADER = "llama.h"
"""Name of a layout that was read from a header beside libllama."""

UNKNOWN = "unknown"
"""Name of a layout that followed from the defaults alone."""

_MOST_CHANGES = 2
"""Most fields of a struct that may be new or gone, as from 0.3.25 to 0.3.30 and from 0.3.36 to b11549."""
_NEW_KINDS = ("bool", "int32_t", "size_t")
"""A kind of each size. Nothing writes to a new field: llama.cpp's default stays in it."""
_NEW = "unknown_"
WRITTEN = frozenset(
    (*READ_WHOLE, "no_alloc", *(each.field for struct in ("model", "context") for each in of_a_struct(struct)))
)
"""Fields that fitter writes."""


def layout_of(
    probe: Probe, headers: Iterable[str] = (), known: Mapping[str, Layout] | None = None
) -> tuple[str, Layout]:
    """Return name and layout of the libllama that ``probe`` calls.

    The name is ``HEADER`` if a ``llama.h`` among ``headers`` agrees that is of no known version, and ``UNKNOWN`` if
    neither a header nor a known layout agrees and one follows from the newest known. Raises ``LibraryError``, whose
    message is the end of a sentence.
    """
    known = layouts() if known is None else known
    written = written_by(probe)
    reasons = []
    # first: defaults alone cannot tell apart fields of equal value
    for path in headers:
        try:
            layout = read_header(path)
        except (OSError, ValueError) as unreadable:
            reasons.append(f"{path} {_reason_of(unreadable)}")
            continue
        wrong = disagreement(layout, written)
        if wrong is None:
            return next((name for name, each in known.items() if each == layout), HEADER), layout
        reasons.append(f"{path} belongs to another version ({wrong})")
    agreeing = [name for name, layout in known.items() if disagreement(layout, written) is None]
    if len(agreeing) == 1:
        return agreeing[0], known[agreeing[0]]
    if agreeing:
        reason = f"its parameters could be laid out as in several versions that fitter knows: {', '.join(agreeing)}"
        raise LibraryError(reason)
    if known and (unknown := layout_without_header(list(known.values())[-1], written)):
        return UNKNOWN, unknown
    raise LibraryError(", and ".join(("its parameters are laid out as in no version that fitter knows", *reasons)))


def layout_without_header(known: Layout, written: Mapping[str, Written]) -> Layout | None:
    """Return the layout that follows from the written defaults; ``None`` if none or several do.

    Args:
        known: The newest known layout.
        written: What the functions for default parameters wrote (``layouts.written_by``).
    """
    layout = {}
    for name, fields in known.items():
        found = _fields_of(name, fields, written[name])
        if found is None:
            return None
        layout[name] = found
    return layout


def _fields_of(name: str, known: Fields, written: Written) -> Fields | None:
    for changes in range(_MOST_CHANGES + 1):
        ways = list(_ways(name, tuple(known.items()), 0, written, changes))
        if ways:
            places = {frozenset(each for each in way if each[0] in WRITTEN) for way in ways}
            return {field: kind for field, kind, _ in ways[0]} if len(places) == 1 else None
    return None


def _ways(name: str, known: tuple[tuple[str, str], ...], end: int, written: Written, changes: int) -> Iterator[Placed]:
    """Yield every sequence of fields behind ``end`` that fits the written bytes: the ``known`` ones in order, with
    exactly ``changes`` fields new or gone.
    """
    if not known and not changes and not _is_written(written, end, len(written[0])):
        yield ()
    if known:
        yield from _ways_with(name, *known[0], known[1:], end, written, changes)
    if known and changes:
        yield from _ways(name, known[1:], end, written, changes - 1)
    if changes:
        for kind in _NEW_KINDS:
            new = f"{_NEW}{len(known)}_{changes}"
            yield from _ways_with(name, new, kind, known, end, written, changes - 1)


def _ways_with(
    name: str, field: str, kind: str, known: tuple[tuple[str, str], ...], end: int, written: Written, changes: int
) -> Iterator[Placed]:
    """Yield the sequences that begin with ``field``."""
    start = aligned(end, SIZES[kind])
    next_end = start + SIZES[kind]
    if not _is_written(written, end, start) and not disagreement_of_field(name, field, kind, next_end, written):
        for way in _ways(name, known, next_end, written, changes):
            yield ((field, kind, next_end), *way)


def _is_written(written: Written, start: int, end: int) -> bool:
    """Return whether any byte was written there: compilers leave out what belongs to no field."""
    return any(a == b for a, b in zip(*(memory[start:end] for memory in written), strict=True))


def _reason_of(error: Exception) -> str:
    return f"cannot be read ({error.strerror})" if isinstance(error, OSError) else str(error)
