"""A verification as an HTML page: the bytes of a real load beside the predicted ones."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fitter.output.documents.checked_documents import VERIFICATION
from fitter.output.pages.page import page
from fitter.output.tables.checked_tables import LATER, taken_text, verdict
from fitter.planning.plan.verified import KINDS, Verification


@dataclass(frozen=True)
class _Taken:
    """A predicted number, and the real one."""

    name: str
    kind: str
    predicted: int
    real: str
    difference: str
    is_more: bool


@dataclass(frozen=True)
class _LaterRow:
    """Memory that a llama-server took after the load."""

    name: str
    predicted: int | None
    real: str
    most: int | None
    is_more: bool


def verification_page(verification: Verification) -> str:
    """Draw the page of a verification. Raises ``LibraryError`` if a package is missing."""
    return page(
        "verification.html",
        title=verification.model.name,
        documents=[("verification", VERIFICATION.write(verification))],
        verdict=verdict(verification).plain if verification.fits else "does not fit: it was not loaded",
        found=verification,
        taken=list(_taken(verification)),
        kept=list(_later_rows(verification)),
    )


def _taken(verification: Verification) -> Iterator[_Taken]:
    exceeding = set(verification.exceeding)
    for row in verification.rows:
        differing = {each.kind: each for each in row.differences}
        for kind in KINDS:
            predicted, real = getattr(row.predicted, kind), getattr(row.real, kind)
            if predicted or real:
                each = differing.get(kind)
                more = "not known" if kind in row.unsaid else "none" if each is None else f"{each.more:+,}"
                yield _Taken(row.real.buffer_type, kind, predicted, taken_text(row, kind), more, each in exceeding)


def _later_rows(verification: Verification) -> Iterator[_LaterRow]:
    exceeding = verification.exceeding_later
    for each in () if verification.server is None else verification.server.later:
        name = LATER[each.kind] + ("" if each.tokens is None else f" of {each.tokens:,} tokens")
        name += f" ({each.count} prompts)" if each.kind == "prompt cache" else ""
        real = "none said" if each.real is None else f"{each.real:,} ± {each.rounding:,}"
        yield _LaterRow(name, each.predicted, real, each.most, each in exceeding)
