"""A grid of models, machines and parameters: its cells, which of them no other one beats, and what is asked of them.

Memory is in bytes.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fitter.errors import UsageError
from fitter.parameters.values import shown
from fitter.planning.plan.plan import Plan
from fitter.planning.plan.result_methods import methods_of


@dataclass(frozen=True)
class ExploredCell:
    """One cell of a grid, and the plan that was found for it.

    What is asked is ``None`` where a fit chooses it, what is found where it is not known.
    """

    model: str
    """The model, as it was named."""
    file_type: str | None
    """The file type of llama-quantize that the model is planned in; ``None`` for the file as it is."""
    machine: str
    """The machine, as it was named."""
    asked_context: int | None
    """The context in tokens that was asked for."""
    type_k: str | None
    """The type of the keys in the KV cache that was asked for."""
    type_v: str | None
    """The type of the values in the KV cache that was asked for."""
    n_ubatch: int | None
    """The micro batch in tokens that was asked for."""
    fits: bool | None = None
    """Whether it fits; ``None`` where there is no plan."""
    n_ctx: int | None = None
    """The context of the plan in tokens."""
    bytes: int | None = None
    """Bytes of all tensors of the model."""
    used: int | None = None
    """Bytes that the plan takes on all devices together."""
    host_weights: int | None = None
    """Bytes of weights in host memory."""
    prompt_tokens_per_second: float | None = None
    """Estimated tokens of a prompt per second."""
    tokens_per_second: float | None = None
    """Estimated tokens per second of generation."""
    arguments: tuple[str, ...] | None = None
    """llama.cpp's command-line arguments for the plan; ``None`` where it does not fit."""
    problem: str | None = None
    """Why there is no plan, or why it does not fit."""
    needs_imatrix: bool = False
    """Whether llama-quantize makes a file of that type only with an importance matrix."""
    memory: int = 0
    """Memory of all devices of the machine."""
    cost: float | None = None
    """The price of the machine, or its watts; ``None`` where that was not given for each of its cards."""
    is_best: bool = False
    """Whether no other cell of the same model and file type that fits has as long a context, generates as fast, and
    costs as little, and is better in one of them. Without prices or watts, its machine's memory is what it costs.
    """

    @property
    def asked(self) -> tuple[object, ...]:
        """What the cell is about."""
        return (
            self.model,
            self.file_type,
            self.machine,
            self.asked_context,
            self.type_k,
            self.type_v,
            self.n_ubatch,
        )

    def figures(self) -> dict[str, Any]:
        """What was found, as JSON has it."""
        return {name: getattr(self, name) for name in FOUND}

    def having(self, figures: Mapping[str, Any]) -> ExploredCell:
        """The same with what was found, as ``figures`` says it. Raises ``ValueError`` for anything else."""
        if set(figures) != set(FOUND) or not all(_IS[name](value) for name, value in figures.items()):
            raise ValueError("these are not the figures of a cell")
        arguments = figures["arguments"]
        return replace(self, **{**figures, "arguments": None if arguments is None else tuple(arguments)})


def _is_count(value: object) -> bool:
    return value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= 0)


def _is_rate(value: object) -> bool:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return value is None or (is_number and 0 <= value <= sys.float_info.max)  # type: ignore[operator]


def _is_text(value: object) -> bool:
    return value is None or isinstance(value, str)


def _are_texts(value: object) -> bool:
    return value is None or (isinstance(value, (list, tuple)) and all(isinstance(each, str) for each in value))


_IS: dict[str, Callable[[object], bool]] = {
    "fits": lambda value: value is None or isinstance(value, bool),
    **dict.fromkeys(("n_ctx", "bytes", "used", "host_weights"), _is_count),
    **dict.fromkeys(("prompt_tokens_per_second", "tokens_per_second"), _is_rate),
    "arguments": _are_texts,
    "problem": _is_text,
}
"""Whether a value may be what is found of a cell, by its attribute."""

FOUND = tuple(_IS)
"""The attributes of a cell that are found."""


@dataclass(frozen=True)
class Requirement:
    """What a machine has to do."""

    context: int = 0
    """Tokens of context at least."""
    tokens_per_second: float = 0.0
    """Tokens per second of generation at least."""
    prompt_tokens_per_second: float = 0.0
    """Tokens of a prompt per second at least."""

    def is_met_by(self, cell: ExploredCell) -> bool:
        """Whether ``cell`` fits and does all of it; what is not known does not."""
        return bool(cell.fits) and all(
            (found or 0) >= least
            for found, least in (
                (cell.n_ctx, self.context),
                (cell.tokens_per_second, self.tokens_per_second),
                (cell.prompt_tokens_per_second, self.prompt_tokens_per_second),
            )
        )


@dataclass(frozen=True)
class ExploredAnswer:
    """The cheapest machine for a model that does what was asked for, confirmed on the model itself."""

    model: str
    """The model, as it was named."""
    cell: ExploredCell | None
    """The cell, with the figures that were confirmed; ``None`` where no machine does it."""
    plan: Plan | None = None
    """The plan that was confirmed."""
    is_of_header: bool = False
    """Whether a file of that type is not here, so that the plan was confirmed on the header that llama-quantize would
    write."""
    refused: int = 0
    """How many cells came before it that the model itself did not confirm."""


@dataclass(frozen=True)
class Exploration:
    """A grid that was explored."""

    cells: tuple[ExploredCell, ...]
    """Its cells, in the order of the grid."""
    cost: str
    """What a machine costs: ``price``, ``watts``, or its ``memory`` where neither was given."""
    answers: tuple[ExploredAnswer, ...] = ()
    """For each model the cheapest machine that does what was asked for."""
    asked: str | None = None
    """What was asked for, in the words of the question."""
    kept: int = 0
    """How many cells were known from a file of an earlier exploration."""
    seconds: float = 0.0
    """Seconds that it took."""

    @property
    def fits(self) -> bool:
        """Whether any cell fits, or where something was asked for, whether any machine does it."""
        if self.asked is not None:
            return any(answer.cell is not None for answer in self.answers)
        return any(cell.fits for cell in self.cells)

    def __bool__(self) -> bool:
        return self.fits

    def to_dict(self) -> dict[str, Any]:
        """The document of ``fitter explore --json``."""
        document: dict[str, Any] = methods_of(self).to_dict(self)
        return document

    def _repr_html_(self) -> str:
        """The grid as a table that sorts, which a notebook shows."""
        return str(methods_of(self).to_html(self.to_dict()))


def marked(cells: Sequence[ExploredCell], cost: str) -> tuple[ExploredCell, ...]:
    """``cells`` with those marked that no other one beats."""
    groups: dict[tuple[object, ...], list[tuple[float, ...]]] = {}
    for cell in cells:
        if (point := _point(cell, cost)) is not None:
            groups.setdefault((cell.model, cell.file_type), []).append(point)

    def is_best(cell: ExploredCell) -> bool:
        point = _point(cell, cost)
        rivals = groups.get((cell.model, cell.file_type), ())
        return point is not None and not any(_beats(rival, point) for rival in rivals)

    return tuple(replace(cell, is_best=is_best(cell)) for cell in cells)


def _point(cell: ExploredCell, cost: str) -> tuple[float, ...] | None:
    """What of a cell is compared, more is better; ``None`` where something of it is not known."""
    price = cell.memory if cost == "memory" else cell.cost
    if not cell.fits or price is None or cell.tokens_per_second is None or cell.n_ctx is None:
        return None
    return float(cell.n_ctx), cell.tokens_per_second, -float(price)


def _beats(one: Sequence[float], other: Sequence[float]) -> bool:
    return one != other and all(a >= b for a, b in zip(one, other, strict=True))


def cheapest_first(cells: Sequence[ExploredCell], requirement: Requirement, cost: str) -> list[ExploredCell]:
    """The cells that do what is required: the cheapest machine first, and on that the best weights, then the fastest.

    A machine whose cost is not known comes after all others.
    """

    def order(cell: ExploredCell) -> tuple[float, int, int, float]:
        price = cell.memory if cost == "memory" else cell.cost
        # an unknown price may be any price
        known = float("inf") if price is None else float(price)
        return known, cell.memory, -(cell.bytes or 0), -(cell.tokens_per_second or 0.0)

    return sorted((cell for cell in cells if requirement.is_met_by(cell)), key=order)


_CONTEXT = re.compile(
    r"(?:(?P<first>[\d.,]+k?)(?: tokens?)?(?: of)? (?:context|ctx)|(?:context|ctx) (?:of )?(?P<last>[\d.,]+k?))"
)
_RATE = re.compile(
    r"(?:(?P<kind>prompt|generation) (?:at )?)?(?P<rate>[\d.]+) ?(?:t/s|tok/s|tokens/s|tokens per second)(?: of)?"
    r"(?: (?P<after>prompt|generation))?"
)
_JOINED = re.compile(r"\s*(?:,(?!\d)|\bat\b|\band\b|\bwith\b|\+)\s*")
_SAY = "say such as '32k context at 20 t/s', 'prompt 500 t/s' or 'fits'"
_LARGEST = 10**9
"""The largest figure that may be asked for, far beyond all that there are."""


def parse_requirement(text: str) -> Requirement:
    """What ``32k context at 20 t/s`` asks for. ``fits`` asks for no more than that. Raises ``UsageError``."""
    found: dict[str, float] = {}
    # "prompt at 500 t/s" is one clause
    words = re.sub(r"\b(prompt|generation) at ", r"\1 ", " ".join(text.lower().split()))
    for clause in _JOINED.split(words):
        name, value = _clause(text, clause)
        if name in found:
            raise UsageError(f"--answer {shown(text)} says twice what it asks for: leave one of them out")
        found[name] = value
    return Requirement(int(found.get("context", 0)), found.get("generation", 0.0), found.get("prompt", 0.0))


def _clause(text: str, clause: str) -> tuple[str, float]:
    if clause == "fits":
        return "fits", 1.0
    number: float | None = None
    name = ""
    if match := _CONTEXT.fullmatch(clause):
        name, number = "context", _tokens(match["first"] or match["last"])
    elif (match := _RATE.fullmatch(clause)) and not (match["kind"] and match["after"]):
        name, number = match["kind"] or match["after"] or "generation", _number(match["rate"])
    if number is None:
        what = f"{shown(clause)} in it" if clause and clause != text.lower() else "it"
        raise UsageError(f"--answer {shown(text)}: {what} is not understood: {_SAY}")
    if not 0 < number <= _LARGEST:
        raise UsageError(f"--answer {shown(text)} asks for {number:g}: give more than 0 and {_LARGEST} at most")
    return name, number


def _tokens(text: str) -> float | None:
    """``32k``, ``32768``, ``32,768``: a k is 1024, as the lengths of contexts are said."""
    number = text.removesuffix("k").replace(",", "")
    value = _number(number)
    if value is None or ("," in text and not re.fullmatch(r"\d{1,3}(,\d{3})+", text)):
        return None
    value *= 1024 if text.endswith("k") else 1
    return value if value == int(value) else None


def _number(text: str) -> float | None:
    try:
        return float(text) if re.fullmatch(r"\d+(\.\d+)?", text) else None
    except ValueError:
        return None
