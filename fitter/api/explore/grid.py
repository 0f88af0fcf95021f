"""What there is to explore: the cells of a grid, counted before any is made, and what its machines cost."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fitter.errors import UsageError
from fitter.machine.gpu import cards_of, parse_gpus
from fitter.model.location import called
from fitter.parameters.table import PARAMETERS, Fitting, taken_by
from fitter.parameters.values import shown
from fitter.planning.request.ask import Ask
from fitter.planning.tables.exploration import ExploredCell

AXES = {"n_ctx": "asked_context", "type_k": "type_k", "type_v": "type_v", "n_ubatch": "n_ubatch"}
"""Parameters that a grid has several values of, with the attribute of a cell that has its own."""

_NOT_OF_A_CELL = frozenset({"gpus", "devices", "rpc", "rpc_bandwidth", "skeleton", "model_draft", "mmproj"})
"""Keywords of ``fit`` that a grid says itself, or that are about this machine or files of it."""


@dataclass(frozen=True)
class Grid:
    """What there is to explore, and what holds for all of it.

    ``models`` are what each is called, which has no credentials, with what was named; ``machines`` have the
    descriptions of their GPUs, ``axes`` the values of each parameter that has several.
    """

    models: Mapping[str, str]
    file_types: tuple[str | None, ...]
    machines: Mapping[str, tuple[str, ...]]
    axes: Mapping[str, tuple[Any, ...]]
    fixed: Mapping[str, Any]

    def cells(self) -> tuple[ExploredCell, ...]:
        """Every cell, in the order of the grid."""
        return tuple(
            ExploredCell(model, file_type, machine, **dict(zip(AXES.values(), values, strict=True)))
            for model, file_type, machine in itertools.product(self.models, self.file_types, self.machines)
            for values in itertools.product(*self.axes.values())
        )


def grid_of(models: Any, machines: Any, types: Any, parameters: Mapping[str, Any], most: object) -> Grid:
    """The grid of what is named. Raises ``UsageError`` for an empty one, and for one of more cells than ``most``."""
    if not isinstance(most, int) or isinstance(most, bool) or most < 1:
        raise UsageError(f"max_cells (--max-cells) is {shown(most)}: give a whole number above 0")
    known = {each.name for each in taken_by(Fitting)}
    for name in parameters:
        if name not in known or name in _NOT_OF_A_CELL:
            raise UsageError(f"explore has no keyword {name}: see help(fitter.explore)")
    names: list[str] = [os.fsdecode(each) for each in _several("models", models, (bytes, os.PathLike))]
    places = tuple(dict.fromkeys(map(_machine, _several("machines (--gpu)", machines))))
    named = types.split(",") if isinstance(types, str) else types
    each_type = [None] if types is None else [each.strip().upper() for each in _several("types (--type)", named)]
    file_types = tuple(dict.fromkeys(each_type))
    axes = {name: _values(name, parameters.get(name)) for name in AXES}
    _check_count(names, places, file_types, axes, most)
    described = {text: tuple(split_machine(text)) for text in places}
    fixed = {name: PARAMETERS[name].check(value) for name, value in parameters.items() if name not in AXES}
    for text, gpus in described.items():
        try:
            Ask.of(Fitting(gpus=gpus, **fixed))  # type: ignore[typeddict-item]
        except UsageError as error:
            raise UsageError(str(error).replace("--gpu 'none'", f"--gpu {text!r}")) from None
    return Grid(_called(names), file_types, described, axes, fixed)


def _check_count(
    names: Sequence[str], machines: Sequence[str], types: Sequence[Any], axes: Mapping[str, tuple[Any, ...]], most: int
) -> None:
    """Raise ``UsageError`` where there are more cells than ``most``."""
    counts = {"model": len(names), "file type": len(types), "machine": len(machines), "context": len(axes["n_ctx"])}
    counts |= {"KV type": len(axes["type_k"]) * len(axes["type_v"]), "micro batch": len(axes["n_ubatch"])}
    if (count := math.prod(counts.values())) <= most:
        return
    sizes = " × ".join(f"{n} {word}{'es' if word.endswith('ch') else 's'}" for word, n in counts.items() if n > 1)
    raise UsageError(
        f"the grid has {count} cells ({sizes}), more than {most}: name fewer of each, or raise --max-cells"
    )


def _called(names: list[str]) -> dict[str, str]:
    """What each model is called, with its name. Raises ``UsageError`` for two that are called the same."""
    found: dict[str, str] = {}
    for name in names:
        if found.setdefault(called(name), name) != name:
            raise UsageError(
                f"{called(name)} is named twice, with other credentials or another query, which are not shown: "
                "explore one after the other"
            )
    return found


def split_machine(text: str) -> list[str]:
    """The GPUs of a machine, as ``--gpu`` of ``fit`` takes them: ``rtx-4090 + 2x rtx-3090`` has two descriptions."""
    parts = [part.strip() for part in text.split("+")]
    if not all(parts):
        raise UsageError(f"--gpu {text!r}: name a GPU on both sides of each +, such as 'rtx-4090 + rtx-3060-12gb'")
    return parts


def _machine(text: str) -> str:
    return " + ".join(" ".join(part.split()) for part in split_machine(text))


def _several(called: str, given: Any, kinds: tuple[Any, ...] = ()) -> list[Any]:
    """A list of texts, each once. Raises ``UsageError`` for anything else, and where there is none."""
    values = [given] if isinstance(given, (str, *kinds)) else given
    if isinstance(values, Iterable) and not isinstance(values, (str, bytes, Mapping)):
        every: list[Any] = list(values)
        if all(isinstance(each, (str, *kinds)) and each for each in every):
            if every:
                return list(dict.fromkeys(every))
            raise UsageError(f"{called} is empty, so there is no cell to plan: name one")
    raise UsageError(f"{called} is {shown(given)}: give a text, or a list of texts that are not empty")


def _values(name: str, given: Any) -> tuple[Any, ...]:
    """The values of one axis, each once and checked."""
    values = list(given) if isinstance(given, (list, tuple)) else [given]
    if not values:
        raise UsageError(f"{name} is empty, so there is no cell to plan: give a value, or leave it out")
    return tuple(dict.fromkeys(None if value is None else PARAMETERS[name].check(value) for value in values))


# --- costs


def costs_of(machines: Mapping[str, tuple[str, ...]], prices: Any, watts: Any) -> tuple[dict[str, dict[str, Any]], str]:
    """The memory of each machine, and its cost where each of its cards has one; what is meant by cost.

    Raises ``UsageError`` for a cost of something that is no card of theirs, and for one that is none.
    """
    if prices and watts:
        raise UsageError("prices (--price) and watts (--watts) are both given: one of them says what a machine costs")
    option = "--price" if prices else "--watts"
    of_cards = _checked(prices or watts or {}, option, machines)
    found = {}
    for text, gpus in machines.items():
        cards = [card for gpu in gpus for card in cards_of(gpu)]
        known = [of_cards.get(card) for card in cards]
        total = None if not of_cards or None in known else math.fsum(each for each in known if each is not None)
        found[text] = {"memory": sum(device.total for device in parse_gpus(gpus)), "cost": total}
    return found, "price" if prices else "watts" if watts else "memory"


def _checked(given: Any, option: str, machines: Mapping[str, tuple[str, ...]]) -> dict[str, float]:
    """The cost of one card of each name."""
    if not isinstance(given, Mapping):
        name = {"--price": "prices", "--watts": "watts"}[option]
        raise UsageError(f"{name} ({option}) is {shown(given)}: give the number of each card, by its name")
    there = {card for gpus in machines.values() for gpu in gpus for card in cards_of(gpu)}
    found: dict[str, float] = {}
    for name, value in given.items():
        if not isinstance(name, str):
            raise UsageError(f"{option} is of {shown(name)}: give the name of a card")
        said = f"{option} {name}={shown(value)}"
        cards = _cards(name)
        if len(cards) > 1:
            raise UsageError(f"{said}: give the number of one card, which counts for each of a machine")
        if not cards or cards[0] not in there:
            raise UsageError(
                f"{said}: no machine of --gpu has that card; they have {', '.join(sorted(there)) or 'none'}"
            )
        if cards[0] in found:
            raise UsageError(f"{said}: another name of {cards[0]} is given too: leave one of them out")
        number = _number(value)
        if number is None:
            raise UsageError(f"{said}: give a number that is not below 0")
        found[cards[0]] = number
    return found


def _number(value: object) -> float | None:
    """A cost; ``None`` for what is none."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) and number >= 0 else None


def _cards(name: str) -> tuple[str, ...]:
    """What the cards of a description are called; none where it is not one."""
    try:
        return cards_of(name)
    except UsageError:
        return ()
