"""Where layers and single tensors go, and how that is said to llama.cpp."""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fitter.llama.types import TensorBuftOverride
from fitter.planning.placing.layer_sizes import HOST, Item, Unit

_BACK_REFERENCE = re.compile(r"\\[1-9]")


@dataclass(frozen=True)
class Placement:
    """Contiguous ranges of layers on devices, and single tensors elsewhere.

    Units before ``first`` are on the host; device ``d`` has the next ``counts[d]``; the last unit is the output.
    ``moved`` pairs items with the target they have apart from their layer: a device's index, or ``HOST``.
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
        """The place of each unit, in order: a device's index, or ``HOST``."""
        return [HOST] * self.first + [device for device, count in enumerate(self.counts) for _ in range(count)]

    def ranges(self) -> list[tuple[int, int]]:
        """First and one past the last unit of each device."""
        ranges = []
        start = self.first
        for count in self.counts:
            ranges.append((start, start + count))
            start += count
        return ranges

    def on(self, kept: Sequence[int]) -> Placement:
        """The same on the devices with these indices alone, which have all that is on any."""
        index_of = {d: i for i, d in enumerate(kept)}
        moved = tuple((item, index_of.get(target, HOST)) for item, target in self.moved)
        return Placement(self.first, tuple(self.counts[d] for d in kept), moved)

    @property
    def idle(self) -> tuple[int, ...]:
        """Indices of devices that get neither a layer nor a tensor."""
        targets = {target for _, target in self.moved}
        return tuple(d for d, count in enumerate(self.counts) if count == 0 and d not in targets)


def weights_on(units: Sequence[Unit], placement: Placement) -> list[int]:
    """Weight bytes per device."""
    totals = [sum(unit.weights for unit in units[start:stop]) for start, stop in placement.ranges()]
    home = placement.homes
    for item, target in placement.moved:
        if home[item.layer] != HOST:
            totals[home[item.layer]] -= item.bytes
        if target != HOST:
            totals[target] += item.bytes
    return totals


def caches_on(units: Sequence[Unit], placement: Placement) -> list[int]:
    """Cache bytes per device."""
    return [sum(unit.cache for unit in units[start:stop]) for start, stop in placement.ranges()]


def overrides_of(placement: Placement, buffer_types: Sequence[str]) -> tuple[TensorBuftOverride, ...]:
    """One override per target buffer type; ``buffer_types`` has a name per device, the host's is ``CPU``.

    llama.cpp compiles every pattern again for every tensor, so few patterns load faster than many.
    """
    targets: dict[int, list[Item]] = {}
    for item, target in placement.moved:
        targets.setdefault(target, []).append(item)
    return tuple(
        TensorBuftOverride(pattern_for(items), "CPU" if target == HOST else buffer_types[target])
        for target, items in sorted(targets.items())
    )


def merged(overrides: Sequence[TensorBuftOverride]) -> tuple[TensorBuftOverride, ...]:
    """The same overrides in as few patterns as their order allows: neighbours with one target become alternatives.

    llama.cpp takes the first pattern that matches, so only neighbours can be joined; a pattern with a back reference
    counts groups from its own start, and stays as it is.
    """
    result: list[TensorBuftOverride] = []
    for override in overrides:
        if (
            result
            and result[-1].buffer_type == override.buffer_type
            and not any(_BACK_REFERENCE.search(side.pattern) for side in (result[-1], override))
        ):
            result[-1] = TensorBuftOverride(f"{result[-1].pattern}|{override.pattern}", override.buffer_type)
        else:
            result.append(override)
    return tuple(result)


def pattern_for(items: Sequence[Item]) -> str:
    """A regular expression that finds exactly the tensors of ``items``.

    It keeps to characters that neither a shell's word splitting nor ``xargs`` changes: no backslash, quote, space,
    comma, ``*``, ``?`` or ``[``. A dot stands for itself or any other character, so names are anchored at the start and
    spelled to the end.
    """
    tails: dict[tuple[str, ...], dict[str, set[int]]] = {}
    for item in items:
        tail = item.stem.split(".", 2)[2]
        tails.setdefault(tuple(sorted(item.suffixes)), {}).setdefault(tail, set()).add(item.layer)
    return "|".join(
        f"^blk.{_any_of([_tensors(*group) for group in _groups(layers_of)])}.{_any_of(suffixes)}$"
        for suffixes, layers_of in sorted(tails.items())
    )


def _tensors(layers: Sequence[int], names: Sequence[str]) -> str:
    """Every one of ``names`` in every one of ``layers``; what the names begin and end with is written once."""
    start = _common_start(names)
    end = _common_start([name[len(start) :][::-1] for name in names])[::-1]
    middles = [name[len(start) : len(name) - len(end)] for name in names]
    return f"{_any_of(_numbers(layers))}.{start}{_any_of(middles)}{end}"


def _common_start(names: Sequence[str]) -> str:
    # the names between the first and the last one begin with what those two have in common
    first, last = min(names), max(names)
    same = next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), min(len(first), len(last)))
    return first[:same]


def _groups(layers_of: Mapping[str, set[int]]) -> list[tuple[list[int], list[str]]]:
    """Layers with the names that each of them has, every pair of both in one group, so that few numbers are written.

    Those that have all names come first; the others are grouped by name, or by layer where that is shorter.
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
    """Numbers as few short expressions, since llama.cpp compiles the pattern for every tensor: ``3(7|8|9)`` and ``4.``.

    A whole ten is a dot, which stands for one digit there: what follows the number is spelled out.
    """
    tens: dict[int, list[int]] = {}
    for layer in layers:
        tens.setdefault(layer // 10, []).append(layer % 10)
    return [(str(ten) if ten else "") + ("." if len(digits) == 10 else _any_of(digits)) for ten, digits in tens.items()]


def _any_of(choices: Sequence[object]) -> str:
    return str(choices[0]) if len(choices) == 1 else "(" + "|".join(map(str, choices)) + ")"


def split_by(n_units: int, n_gpu_layers: int, tensor_split: Sequence[float] | None, free: Sequence[int]) -> Placement:
    """Where llama.cpp puts ``n_units`` layers, the output counted as one, with so many of them on devices.

    ``n_gpu_layers`` below 0 are all. Without a ``tensor_split`` that is not all 0 they are shared out by the ``free``
    bytes of the devices.
    """
    if not free:
        return Placement(n_units, ())
    on_devices = n_units if n_gpu_layers < 0 else min(n_gpu_layers, n_units)
    shares = tensor_split if tensor_split and any(tensor_split) else [float(size) for size in free]
    counts = counts_for_split(on_devices, (*shares, *[0.0] * len(free))[: len(free)])
    return Placement(n_units - sum(counts), counts)


def counts_for_split(n_gpu_layers: int, tensor_split: Sequence[float]) -> tuple[int, ...]:
    """Units per device that llama.cpp makes of a ``tensor_split``, in its own single precision.

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
        counts[next((d for d, split in enumerate(splits) if split > position), len(splits) - 1)] += 1
    return tuple(counts)


def _float32(value: float) -> float:
    result: float = struct.unpack("f", struct.pack("f", value))[0]
    return result
