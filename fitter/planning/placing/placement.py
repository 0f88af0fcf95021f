"""Placements of layers and single tensors, and the ``-ot`` patterns that give them to llama.cpp.

Every proposal of the search is a ``Placement``; ``planning.request.given`` turns it into parameters.
"""

from __future__ import annotations

import re
import struct
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import add, sub

from fitter.llama.types import TensorBuftOverride
from fitter.planning.placing.layer_sizes import HOST, Item, Unit, layer_index

_FIRST_WORD = re.compile("[._]")


@dataclass(frozen=True)
class Placement:
    """Contiguous ranges of units on devices, and single tensors elsewhere. The last unit is the output.

    Attributes:
        first: the first unit on a device; those before it are on the host.
        counts: for each device, in order, how many units it has.
        moved: items apart from their layer, each with its target: a device's index, or ``HOST``.
    """

    first: int
    counts: tuple[int, ...]
    moved: tuple[tuple[Item, int], ...] = ()

    @property
    def n_gpu_layers(self) -> int:
        """Units on devices."""
        return sum(self.counts)

    @property
    def homes(self) -> list[int]:
        """Place of each unit, in order: a device's index, or ``HOST``."""
        homes = [HOST] * self.first
        for device, count in enumerate(self.counts):
            homes += [device] * count
        return homes

    def ranges(self) -> list[tuple[int, int]]:
        """Return the first unit of each device, and one past its last."""
        ranges = []
        start = self.first
        for count in self.counts:
            ranges.append((start, start + count))
            start += count
        return ranges

    def on(self, devices: Sequence[int]) -> Placement:
        """Leave out all devices but these indices. The others must hold nothing."""
        index_of = {d: i for i, d in enumerate(devices)}
        moved = tuple([(item, index_of.get(target, HOST)) for item, target in self.moved])
        return Placement(self.first, tuple(self.counts[d] for d in devices), moved)

    @property
    def is_spilled(self) -> bool:
        """Whether layers or single tensors are on the host."""
        return self.first > 0 or any(target == HOST for _, target in self.moved)

    @property
    def idle(self) -> tuple[int, ...]:
        """Indices of devices that have neither a layer nor a tensor."""
        targets = {target for _, target in self.moved}
        return tuple(d for d, count in enumerate(self.counts) if count == 0 and d not in targets)


def weights_on(units: Sequence[Unit], placement: Placement) -> list[int]:
    """Add up the weights on each device, in bytes."""
    totals = [sum([unit.weights for unit in units[start:stop]]) for start, stop in placement.ranges()]
    homes = placement.homes
    for item, target in placement.moved:
        if homes[item.layer] != HOST:
            totals[homes[item.layer]] -= item.bytes
        if target != HOST:
            totals[target] += item.bytes
    return totals


def caches_on(units: Sequence[Unit], placement: Placement) -> list[int]:
    """Add up the caches on each device, in bytes."""
    return [sum([unit.cache for unit in units[start:stop]]) for start, stop in placement.ranges()]


def held_on(units: Sequence[Unit], placement: Placement) -> list[int]:
    """Add up weights and caches on each device, in bytes."""
    return list(map(add, weights_on(units, placement), caches_on(units, placement)))


def gaps_of(units: Sequence[Unit], budgets: Sequence[int], placement: Placement) -> list[int]:
    """Return the bytes that ``placement`` leaves of each device's budget; below 0 where it lacks some."""
    return list(map(sub, budgets, held_on(units, placement)))


def on_host(units: Sequence[Unit], placement: Placement) -> int:
    """Add up the weights and caches of layers on the host, in bytes."""
    return sum([unit.weights + unit.cache for unit in units]) - sum(held_on(units, placement))


def overrides_of(
    placement: Placement, buffer_types: Sequence[str], names: Sequence[str] = ()
) -> tuple[TensorBuftOverride, ...]:
    """Write the moved items as overrides, one for each target.

    llama.cpp compiles every pattern again for every tensor, so few patterns load faster than many.

    Args:
        buffer_types: name of each device's buffer type. The host's is ``CPU``.
        names: names of all tensors that are loaded, to write a layer of which all are moved without them.
    """
    targets: dict[int, list[Item]] = {}
    for item, target in placement.moved:
        targets.setdefault(target, []).append(item)
    return tuple(
        TensorBuftOverride(pattern_for(items, names), "CPU" if target == HOST else buffer_types[target])
        for target, items in sorted(targets.items())
    )


def pattern_for(items: Sequence[Item], names: Sequence[str] = ()) -> str:
    """Write a regular expression that matches exactly the tensors of ``items``, among ``names`` if these are given.

    It has only characters that neither a shell's word splitting nor ``xargs`` changes: no backslash, quote, space,
    comma, ``*``, ``?`` or ``[``. A dot matches any character, so names are anchored at the start and spelled to the
    end.
    """
    layers_of_words = _whole_words(items, names)
    words = {(layer, word) for each, layers in layers_of_words.items() for layer in layers for word in each}
    tails: dict[tuple[str, ...], dict[str, set[int]]] = {}
    for item in items:
        tail = item.stem.split(".", 2)[2]
        if (item.layer, _first_word(tail)) not in words:
            tails.setdefault(tuple(sorted(item.suffixes)), {}).setdefault(tail, set()).add(item.layer)
    # a word after the number, since a dot matches another digit, or the letter after it
    groups = sorted(layers_of_words.items(), key=lambda pair: (-len(pair[0]), pair))
    whole = [f"^blk.{_any_of(_numbers(layers))}.{_any_of(each)}" for each, layers in groups]
    parts = [
        f"^blk.{_any_of([_tensors(*group) for group in _groups(layers_of)])}.{_any_of(suffixes)}$"
        for suffixes, layers_of in sorted(tails.items())
    ]
    return "|".join((*whole, *parts))


def _first_word(tail: str) -> str:
    return _FIRST_WORD.split(tail, 1)[0]


def _whole_words(items: Sequence[Item], names: Sequence[str]) -> dict[tuple[str, ...], list[int]]:
    """List layers by the first words (``attn``, ``ffn``) of their tensors of which ``items`` have all."""
    moved = {name for item in items for name in item.names}
    kept: dict[int, list[str]] = {}
    words: dict[int, set[str]] = {}
    for name in names:
        if (layer := layer_index(name)) is not None:
            tail = name.split(".", 2)[2]
            if name in moved:
                words.setdefault(layer, set()).add(_first_word(tail))
            else:
                kept.setdefault(layer, []).append(tail)
    found: dict[tuple[str, ...], list[int]] = {}
    for layer, of_layer in sorted(words.items()):
        whole = tuple(word for word in sorted(of_layer) if not any(t.startswith(word) for t in kept.get(layer, ())))
        if whole:
            found.setdefault(whole, []).append(layer)
    return found


def _tensors(layers: Sequence[int], names: Sequence[str]) -> str:
    """Write a pattern for all ``names`` in all ``layers``. The common start and end of the names are written once."""
    start = _common_start(names)
    end = _common_start([name[len(start) :][::-1] for name in names])[::-1]
    middles = [name[len(start) : len(name) - len(end)] for name in names]
    return f"{_any_of(_numbers(layers))}.{start}{_any_of(middles)}{end}"


def _common_start(names: Sequence[str]) -> str:
    """Return the whole words with which all ``names`` start."""
    # all names between the first and the last share the start that these two share
    first, last = min(names), max(names)
    same = next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), min(len(first), len(last)))
    return first[: first.rfind("_", 0, same) + 1]


def _groups(layers_of: Mapping[str, set[int]]) -> list[tuple[list[int], list[str]]]:
    """Group layers and names so that every pair of both is in one group, and few numbers are written.

    Layers with all names come first. The others are grouped by name, or by layer where that is shorter.
    """
    common = set.intersection(*layers_of.values())
    names_of: dict[int, list[str]] = {}
    rest: dict[tuple[int, ...], list[str]] = {}
    for name, layers in sorted(layers_of.items()):
        if others := tuple(sorted(layers - common)):
            rest.setdefault(others, []).append(name)
        for layer in others:
            names_of.setdefault(layer, []).append(name)
    alike: dict[tuple[str, ...], list[int]] = {}
    for layer, names in sorted(names_of.items()):
        alike.setdefault(tuple(names), []).append(layer)
    by_name = [(list(layers), names) for layers, names in sorted(rest.items())]
    by_layer = [(layers, list(names)) for names, layers in sorted(alike.items())]
    first = [(sorted(common), sorted(layers_of))] if common else []
    return first + min(by_name, by_layer, key=lambda groups: len(str(groups)))


def _numbers(layers: Sequence[int]) -> list[str]:
    """Write numbers as few short expressions, such as ``3(7|8|9)`` and ``4.``.

    A dot stands for all ten digits: the text after the number is spelled out, so the dot matches nothing else.
    """
    tens: dict[int, list[int]] = {}
    for layer in layers:
        tens.setdefault(layer // 10, []).append(layer % 10)
    return [(str(ten) if ten else "") + ("." if len(digits) == 10 else _any_of(digits)) for ten, digits in tens.items()]


def _any_of(choices: Sequence[object]) -> str:
    return str(choices[0]) if len(choices) == 1 else "(" + "|".join(map(str, choices)) + ")"


def llama_placement(
    n_units: int, n_gpu_layers: int, tensor_split: Sequence[float] | None, free: Sequence[int]
) -> Placement:
    """Place units as llama.cpp does by itself.

    Args:
        n_units: how many layers there are, with the output as one more.
        n_gpu_layers: how many of them are on devices. Below 0 means all.
        tensor_split: share of each device. ``None`` or all 0 means the shares of ``free``.
        free: free bytes of each device.
    """
    if not free:
        return Placement(n_units, ())
    on_devices = n_units if n_gpu_layers < 0 else min(n_gpu_layers, n_units)
    shares = tensor_split if tensor_split and any(tensor_split) else [float(size) for size in free]
    counts = counts_for_split(on_devices, (*shares, *[0.0] * len(free))[: len(free)])
    return Placement(n_units - sum(counts), counts)


def counts_for_split(n_gpu_layers: int, tensor_split: Sequence[float]) -> tuple[int, ...]:
    """Count the units on each device by a ``tensor_split``, in single precision as llama.cpp does.

    Mirrors the split points of ``llama_model_base::load_tensors``.
    """
    splits: list[float] = []
    total = 0.0
    for share in tensor_split:
        total = _float32(total + _float32(share))
        splits.append(total)
    if total <= 0:
        return tuple(n_gpu_layers if d == 0 else 0 for d in range(len(tensor_split)))
    splits = [_float32(split / total) for split in splits]
    counts = [0] * len(splits)
    for index in range(n_gpu_layers):
        position = _float32(index / n_gpu_layers)
        counts[min(bisect_right(splits, position), len(splits) - 1)] += 1
    return tuple(counts)


def _float32(value: float) -> float:
    result: float = struct.unpack("f", struct.pack("f", value))[0]
    return result
