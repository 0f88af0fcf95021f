"""The cells of a grid, counted before any is made, and the costs of its machines."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fitter.errors import UsageError
from fitter.machine.gpu import cards_of, parse_gpus, split_gpus
from fitter.model import repository_models
from fitter.model.location import called, is_repository
from fitter.model.shapes.catalogue import type_name
from fitter.parameters.kinds import Flag
from fitter.parameters.table import PARAMETERS, Fitting, taken_by
from fitter.parameters.values import shown
from fitter.planning.request.ask import Ask
from fitter.planning.tables.exploration import ExploredCell

AXES = {"n_ctx": "asked_context", "type_k": "type_k", "type_v": "type_v", "n_ubatch": "n_ubatch"}
"""Parameters with several values in a grid, and the attribute of a cell that holds the value."""

CROSS = "cross_cache_types"
"""The keyword that combines each type of K with each type of V."""

_NOT_OF_A_CELL = frozenset({"gpus", "devices", "rpc", "rpc_bandwidth", "skeleton", "model_draft", "mmproj"})
"""Keywords of ``fit`` that a grid sets itself, or that depend on this machine or its files."""


@dataclass(frozen=True)
class Grid:
    """The grid to explore.

    Attributes:
        models: Paths or addresses, by name without credentials.
        file_types: File types to plan; ``None`` is the file's own.
        machines: Descriptions of each machine's GPUs, by the machine's text.
        contexts: Contexts in tokens; ``None`` is chosen by the fit.
        cache_types: Types of K and V; ``None`` is the default.
        micro_batches: Micro batches in tokens; ``None`` is the program's.
        fixed: Keywords of ``fit`` for all cells.
    """

    models: Mapping[str, str]
    file_types: tuple[str | None, ...]
    machines: Mapping[str, tuple[str, ...]]
    contexts: tuple[int | None, ...]
    cache_types: tuple[tuple[str | None, str | None], ...]
    micro_batches: tuple[int | None, ...]
    fixed: Mapping[str, Any]

    def keywords(self, cell: ExploredCell) -> dict[str, Any]:
        """Return the keywords of ``fit`` for a cell."""
        of_axes = {name: getattr(cell, attribute) for name, attribute in AXES.items()}
        set_axes = {name: value for name, value in of_axes.items() if value is not None}
        return {**self.fixed, **set_axes, "gpus": self.machines[cell.machine]}

    def cells(self) -> tuple[ExploredCell, ...]:
        """List every cell, in the order of the grid."""
        return tuple(
            ExploredCell(model, file_type, machine, context, type_k, type_v, n_ubatch)
            for model, file_type, machine in itertools.product(self.models, self.file_types, self.machines)
            for context, (type_k, type_v), n_ubatch in itertools.product(
                self.contexts, self.cache_types, self.micro_batches
            )
        )


def grid_of(models: Any, machines: Any, types: Any, parameters: Mapping[str, Any], most: object) -> Grid:
    """Check the parameters of ``explore``, and make the grid.

    Raises:
        UsageError: The grid is empty, has more than ``most`` cells, or a value makes no sense.
    """
    if not isinstance(most, int) or isinstance(most, bool) or most < 1:
        raise UsageError(f"max_cells (--max-cells) is {shown(most)}: give a whole number above 0")
    keywords = {each.name for each in taken_by(Fitting)}
    for name in parameters:
        if name not in {*keywords, CROSS} or name in _NOT_OF_A_CELL:
            raise UsageError(f"explore has no keyword {name}: see help(fitter.explore)")
    fixed = {name: PARAMETERS[name].check(value) for name, value in parameters.items() if name not in {*AXES, CROSS}}
    given = [os.fsdecode(each) for each in _several("models", models, (bytes, os.PathLike))]
    timeout = fixed.get("timeout", PARAMETERS["timeout"].default)
    names = list(dict.fromkeys(path for each in given for path in _models_of(each, timeout)))
    listed = (machine for text in _several("machines (--gpu)", machines) for machine in text.split(","))
    places = tuple(dict.fromkeys(map(_machine, listed)))
    named = types.split(",") if isinstance(types, str) else types
    each_type = [None] if types is None else [type_name(each) for each in _several("types (--type)", named)]
    file_types = tuple(dict.fromkeys(each_type))
    axes = {name: _values(name, parameters.get(name)) for name in AXES}
    contexts, micro_batches = tuple(dict.fromkeys(axes["n_ctx"])), tuple(dict.fromkeys(axes["n_ubatch"]))
    is_crossed = Flag().check(f"{CROSS} (--cross-cache-types)", parameters.get(CROSS, False))
    cache_types = _cache_types(axes["type_k"], axes["type_v"], is_crossed)
    counts = {"model": len(names), "file type": len(file_types), "machine": len(places), "context": len(contexts)}
    _check_count({**counts, "KV type": len(cache_types), "micro batch": len(micro_batches)}, most)
    described = {text: tuple(split_gpus(text)) for text in places}
    for text, gpus in described.items():
        try:
            Ask.of(Fitting(gpus=gpus, **fixed))  # type: ignore[typeddict-item]
        except UsageError as error:
            raise UsageError(str(error).replace("--gpu 'none'", f"--gpu {text!r}")) from None
    return Grid(_called(names), file_types, described, contexts, cache_types, micro_batches, fixed)


def _models_of(path: str, timeout: float) -> tuple[str, ...]:
    """List the models of a directory or repository; any other path is one model. Raises ``ModelError``."""
    if not is_repository(path):
        return (path,)
    return tuple(each.path for each in repository_models.listing(path, timeout).models)


def _cache_types(
    types_k: Sequence[str | None], types_v: Sequence[str | None], is_crossed: bool
) -> tuple[tuple[str | None, str | None], ...]:
    """Pair the types of K and V one by one; a single one goes with all others.

    Raises:
        UsageError: There are more of one than of the other.
    """
    if is_crossed:
        return tuple(dict.fromkeys(itertools.product(types_k, types_v)))
    if len(types_k) != len(types_v) and 1 not in (len(types_k), len(types_v)):
        raise UsageError(
            f"type_k (-ctk) has {len(types_k)} types and type_v (-ctv) {len(types_v)}, which are no pairs: give as "
            "many of both, one of either, or --cross-cache-types for every combination"
        )
    count = max(len(types_k), len(types_v))
    pairs = zip(itertools.cycle(types_k), itertools.cycle(types_v), strict=False)
    return tuple(dict.fromkeys(itertools.islice(pairs, count)))


def _check_count(counts: Mapping[str, int], most: int) -> None:
    """Raise ``UsageError`` if there are more than ``most`` cells."""
    if (count := math.prod(counts.values())) <= most:
        return
    sizes = " × ".join(f"{n} {word}{'es' if word.endswith('ch') else 's'}" for word, n in counts.items() if n > 1)
    raise UsageError(
        f"the grid has {count} cells ({sizes}), more than {most}: name fewer of each, or raise --max-cells"
    )


def _called(names: list[str]) -> dict[str, str]:
    """Map each model's name without credentials to its address. Raises ``UsageError`` where two have the same name."""
    names_of: dict[str, str] = {}
    for name in names:
        if names_of.setdefault(called(name), name) != name:
            raise UsageError(
                f"{called(name)} is named twice, with other credentials or another query, which are not shown: "
                "explore one after the other"
            )
    return names_of


def _machine(text: str) -> str:
    return " + ".join(" ".join(part.split()) for part in split_gpus(text))


def _several(called: str, given: Any, kinds: tuple[Any, ...] = ()) -> list[Any]:
    """Return the distinct texts of a list or of one text. Raises ``UsageError`` for anything else or nothing."""
    values = [given] if isinstance(given, (str, *kinds)) else given
    if isinstance(values, Iterable) and not isinstance(values, (str, bytes, Mapping)):
        every: list[Any] = list(values)
        if all(isinstance(each, (str, *kinds)) and each for each in every):
            if every:
                return list(dict.fromkeys(every))
            raise UsageError(f"{called} is empty, so there is no cell to plan: name one")
    raise UsageError(f"{called} is {shown(given)}: give a text, or a list of texts that are not empty")


def _values(name: str, given: Any) -> tuple[Any, ...]:
    """Check the values of one axis."""
    values = list(given) if isinstance(given, (list, tuple)) else [given]
    if not values:
        raise UsageError(f"{name} is empty, so there is no cell to plan: give a value, or leave it out")
    return tuple(None if value is None else PARAMETERS[name].check(value) for value in values)


# --- costs


def costs_of(machines: Mapping[str, tuple[str, ...]], prices: Any, watts: Any) -> tuple[dict[str, dict[str, Any]], str]:
    """Compute the memory and the cost of each machine.

    Returns:
        By machine, ``memory`` in bytes and ``cost`` (``None`` unless each card has one); and what a cost means:
            ``price``, ``watts`` or ``memory``.

    Raises:
        UsageError: A cost is not a number, or its card is in no machine.
    """
    if prices and watts:
        raise UsageError("prices (--price) and watts (--watts) are both given: one of them says what a machine costs")
    option = "--price" if prices else "--watts"
    of_cards = _card_costs(prices or watts or {}, option, machines)
    costs = {}
    for text, gpus in machines.items():
        cards = [card for gpu in gpus for card in cards_of(gpu)]
        card_costs = [of_cards.get(card) for card in cards]
        total = (
            None if not of_cards or None in card_costs else math.fsum(each for each in card_costs if each is not None)
        )
        costs[text] = {"memory": sum(device.total for device in parse_gpus(gpus)), "cost": total}
    return costs, "price" if prices else "watts" if watts else "memory"


def _card_costs(given: Any, option: str, machines: Mapping[str, tuple[str, ...]]) -> dict[str, float]:
    """Return the cost of one card, by the card's name."""
    if not isinstance(given, Mapping):
        name = {"--price": "prices", "--watts": "watts"}[option]
        raise UsageError(f"{name} ({option}) is {shown(given)}: give the number of each card, by its name")
    there = {card for gpus in machines.values() for gpu in gpus for card in cards_of(gpu)}
    cost_of: dict[str, float] = {}
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
        if cards[0] in cost_of:
            raise UsageError(f"{said}: another name of {cards[0]} is given too: leave one of them out")
        number = _number(value)
        if number is None:
            raise UsageError(f"{said}: give a number that is not below 0")
        cost_of[cards[0]] = number
    return cost_of


def _number(value: object) -> float | None:
    """Return a cost as a number; ``None`` if it is not valid."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) and number >= 0 else None


def _cards(name: str) -> tuple[str, ...]:
    """Return the names of the cards in a description; none where it is not valid."""
    try:
        return cards_of(name)
    except UsageError:
        return ()
