"""An explored grid of models, machines and parameters: cells, best trade-offs, and the answer to a requirement."""

from __future__ import annotations

import math
import re
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fitter.errors import UsageError
from fitter.llama.processes import wire
from fitter.parameters.table import USEFUL_CONTEXT
from fitter.parameters.values import parse_tokens, shown
from fitter.planning.plan.plan import Plan
from fitter.planning.tables.file_rows import Plans, TypeFigures, best_type


@dataclass(frozen=True)
class ExploredCell:
    """One cell of a grid, and the figures of its plan.

    Parameters are ``None`` if the fit chooses them, figures if they are unknown.
    """

    model: str
    """The model, as the user named it."""
    file_type: str | None
    """The file type of llama-quantize to plan; ``None`` for the file's own."""
    machine: str
    """The machine, as the user named it."""
    asked_context: int | None
    """The user's context, in tokens."""
    type_k: str | None
    """The user's type of K in the KV cache."""
    type_v: str | None
    """The user's type of V in the KV cache."""
    n_ubatch: int | None
    """The user's micro batch, in tokens."""
    fits: bool | None = None
    """Whether the plan fits; ``None`` without a plan."""
    n_ctx: int | None = None
    """Context of the plan, in tokens."""
    bytes: int | None = None
    """Bytes of all tensors of the model."""
    used: int | None = None
    """Bytes of the plan on all devices."""
    host_weights: int | None = None
    """Bytes of weights in host memory."""
    prompt_tokens_per_second: float | None = None
    """Estimated speed of prompts."""
    tokens_per_second: float | None = None
    """Estimated speed of generation."""
    full_context_tokens_per_second: float | None = None
    """Estimated speed of generation when the context of a user is full; ``None`` for a model that generates nothing."""
    arguments: tuple[str, ...] | None = None
    """llama.cpp's command-line arguments; ``None`` if the plan does not fit."""
    problem: str | None = None
    """Why there is no plan, or why it does not fit."""
    bits_per_weight: float | None = None
    """Bits of all tensors per weight; ``None`` if the header cannot be read."""
    needs_imatrix: bool = False
    """Whether llama-quantize needs an importance matrix for this type."""
    memory: int = 0
    """Bytes of memory of all the machine's devices."""
    cost: float | None = None
    """Price or watts of the machine; ``None`` unless all its cards have one."""
    is_best: bool = False
    """Whether the cell is a best trade-off: no other fitting cell of its model and file type is at least as good in
    context, speed and cost, and better in one. Without prices or watts, the machine's memory is its cost.
    """

    @property
    def asked(self) -> tuple[object, ...]:
        """The model, machine and parameters of the cell."""
        return tuple(getattr(self, name) for name in ASKED)

    def figures(self) -> dict[str, Any]:
        """Return the plan's figures, for JSON."""
        return {name: getattr(self, name) for name in FOUND}

    def having(self, figures: Mapping[str, Any]) -> ExploredCell:
        """Return the cell with ``figures`` from JSON. Raises ``ValueError`` if they are not valid."""
        hints = typing.get_type_hints(ExploredCell)
        try:
            if not set(FOUND) - _LATER <= set(figures) <= set(FOUND):
                raise TypeError
            found = {name: wire.decode(hints[name], value) for name, value in figures.items()}
        except (TypeError, OverflowError):
            raise ValueError("these are not the figures of a cell") from None
        if not all(0 <= value < math.inf for value in found.values() if isinstance(value, (int, float))):
            raise ValueError("a figure of a cell is below 0, or no number")
        return replace(self, **found)


ASKED = ("model", "file_type", "machine", "asked_context", "type_k", "type_v", "n_ubatch")
"""The attributes that identify a cell."""

FOUND = (
    *("fits", "n_ctx", "bytes", "used", "host_weights", "prompt_tokens_per_second", "tokens_per_second"),
    *("full_context_tokens_per_second", "arguments", "problem"),
)
"""The attributes that are figures of the plan."""

_LATER = frozenset({"full_context_tokens_per_second"})
"""Figures that the first stored cells did not have."""


@dataclass(frozen=True)
class Requirement:
    """A requirement for a machine."""

    context: int = 0
    """Least tokens of context."""
    tokens_per_second: float = 0.0
    """Least speed of generation."""
    prompt_tokens_per_second: float = 0.0
    """Least speed of prompts."""

    def is_met_by(self, cell: ExploredCell) -> bool:
        """Return whether ``cell`` fits and meets all of it; unknown figures do not."""
        return bool(cell.fits) and all(
            (figure or 0) >= least
            for figure, least in (
                (cell.n_ctx, self.context),
                (cell.tokens_per_second, self.tokens_per_second),
                (cell.prompt_tokens_per_second, self.prompt_tokens_per_second),
            )
        )


@dataclass(frozen=True)
class ExploredAnswer:
    """The cheapest machine that meets the requirement for a model, confirmed on the model itself."""

    model: str
    """The model, as the user named it."""
    cell: ExploredCell | None
    """Its cell with the confirmed figures; ``None`` if no machine meets the requirement."""
    plan: Plan | None = None
    """The confirmed plan."""
    is_of_header: bool = False
    """Whether the plan was confirmed on the header that llama-quantize would write, because the file does not exist."""
    refused: int = 0
    """Number of cheaper cells that the model itself did not confirm."""


@dataclass(frozen=True)
class Exploration(Plans):
    """An explored grid."""

    cells: tuple[ExploredCell, ...]
    """Its cells, in the order of the grid."""
    cost: str
    """The cost of a machine: its ``price``, its ``watts``, or else its ``memory``."""
    answers: tuple[ExploredAnswer, ...] = ()
    """For each model, the cheapest machine that meets the requirement."""
    asked: str | None = None
    """The requirement, in the user's words."""
    kept: int = 0
    """Number of cells that an earlier exploration had stored."""
    seconds: float = 0.0
    """Duration in seconds."""

    @property
    def fits(self) -> bool:
        """Whether a cell fits or, with a requirement, whether a machine meets it."""
        if self.asked is not None:
            return any(answer.cell is not None for answer in self.answers)
        return any(cell.fits for cell in self.cells)

    def __repr__(self) -> str:
        return f"<Exploration: {len(self.cells)} plans, {sum(bool(cell.fits) for cell in self.cells)} fit>"

    def _repr_html_(self) -> str:
        """Write the grid as a sortable table for a notebook."""
        from fitter.api import result_methods

        return result_methods.exploration_html(self)


def marked(cells: Sequence[ExploredCell], cost: str) -> tuple[ExploredCell, ...]:
    """Mark the cells that are best trade-offs."""
    groups: dict[tuple[object, ...], list[tuple[float, ...]]] = {}
    for cell in cells:
        if (point := _figures_of(cell, cost)) is not None:
            groups.setdefault((cell.model, cell.file_type), []).append(point)

    def is_best(cell: ExploredCell) -> bool:
        point = _figures_of(cell, cost)
        rivals = groups.get((cell.model, cell.file_type), ())
        return point is not None and not any(_beats(rival, point) for rival in rivals)

    return tuple(replace(cell, is_best=is_best(cell)) for cell in cells)


def _figures_of(cell: ExploredCell, cost: str) -> tuple[float, ...] | None:
    """Return the figures to compare (more is better); ``None`` if one is unknown."""
    price = cell.memory if cost == "memory" else cell.cost
    if not cell.fits or price is None or cell.tokens_per_second is None or cell.n_ctx is None:
        return None
    return float(cell.n_ctx), cell.tokens_per_second, -float(price)


def _beats(one: Sequence[float], other: Sequence[float]) -> bool:
    return one != other and all(a >= b for a, b in zip(one, other, strict=True))


def cheapest_first(cells: Sequence[ExploredCell], requirement: Requirement, cost: str) -> list[ExploredCell]:
    """Return the cells that meet the requirement: the cheapest machine first, then the best file type.

    Of one file type, the fastest cell comes first. A machine without a known cost comes last.
    """
    machines: dict[tuple[float, int], list[ExploredCell]] = {}
    for cell in cells:
        if requirement.is_met_by(cell):
            price = cell.memory if cost == "memory" else cell.cost
            # an unknown price may be any price
            machines.setdefault((float("inf") if price is None else float(price), cell.memory), []).append(cell)
    return [cell for key in sorted(machines) for cell in _best_first(machines[key], requirement)]


def _best_first(cells: Sequence[ExploredCell], requirement: Requirement) -> Iterator[ExploredCell]:
    """Yield the cells of equal machines: the one with the best file type first, then the best of the others."""
    left = list(cells)
    while (best := best_type(left, _type_figures, requirement.tokens_per_second or None)) is not None:
        yield best
        left.remove(best)
    yield from left


def _type_figures(cell: ExploredCell) -> TypeFigures:
    rate = cell.tokens_per_second
    least = 0 if cell.asked_context else USEFUL_CONTEXT
    return TypeFigures(
        cell.file_type or "", cell.bytes, cell.bits_per_weight, rate, cell.needs_imatrix, cell.n_ctx, least
    )


_CONTEXT = re.compile(
    r"(?:(?P<first>[\d.,]+[km]?)(?: tokens?)?(?: of)? (?:context|ctx)|(?:context|ctx) (?:of )?(?P<last>[\d.,]+[km]?))"
)
_RATE = re.compile(
    r"(?:(?P<kind>prompt|generation) (?:at )?)?(?P<rate>\d+(?:\.\d+)?) ?(?:t/s|tok/s|tokens/s|tokens per second)"
    r"(?: of)?(?: (?P<after>prompt|generation))?"
)
_JOINED = re.compile(r"\s*(?:,(?!\d)|\bat\b|\band\b|\bwith\b|\+)\s*")
_SAY = "say such as '32k context at 20 t/s', 'prompt 500 t/s' or 'fits'"
_LARGEST = 10**9
"""Limit of a figure in a requirement, far beyond any machine."""


def parse_requirement(text: str) -> Requirement:
    """Parse a requirement such as ``32k context at 20 t/s``, or ``fits``. Raises ``UsageError``."""
    figures: dict[str, float] = {}
    # "prompt at 500 t/s" is one clause
    words = re.sub(r"\b(prompt|generation) at ", r"\1 ", " ".join(text.lower().split()))
    for clause in _JOINED.split(words):
        name, value = _clause(text, clause)
        if name in figures:
            raise UsageError(f"--answer {shown(text)} says twice what it asks for: leave one of them out")
        figures[name] = value
    return Requirement(int(figures.get("context", 0)), figures.get("generation", 0.0), figures.get("prompt", 0.0))


def _clause(text: str, clause: str) -> tuple[str, float]:
    if clause == "fits":
        return "fits", 1.0
    number: float | None = None
    name = ""
    if match := _CONTEXT.fullmatch(clause):
        name, number = "context", _tokens(match["first"] or match["last"])
    elif (match := _RATE.fullmatch(clause)) and not (match["kind"] and match["after"]):
        name, number = match["kind"] or match["after"] or "generation", float(match["rate"])
    if number is None:
        what = f"{shown(clause)} in it" if clause and clause != text.lower() else "it"
        raise UsageError(f"--answer {shown(text)}: {what} is not understood: {_SAY}")
    if not 0 < number <= _LARGEST:
        raise UsageError(f"--answer {shown(text)} asks for {number:g}: give more than 0 and {_LARGEST} at most")
    return name, number


def _tokens(text: str) -> float | None:
    """Parse ``32k``, ``32768`` or ``32,768``."""
    if "," in text and not re.fullmatch(r"\d{1,3}(,\d{3})+", text):
        return None
    try:
        return float(parse_tokens(text.replace(",", "")))
    except OverflowError:
        return math.inf
    except UsageError:
        return None
