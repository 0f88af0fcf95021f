"""llama.cpp's flags that keep weights on the host, ``-cmoe``, ``-ncmoe`` and ``-ncffn``, as tensor overrides."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Sequence
from functools import lru_cache

from fitter.llama.types import TensorBuftOverride
from fitter.model.tensors import layer_of
from fitter.parameters.table import PARAMETERS
from fitter.planning.placing.layer_sizes import HOST, Item
from fitter.planning.placing.placement import Placement

_BACK_REFERENCE = re.compile(r"\\[1-9]")

_EXPERTS = ".ffn_(up|down|gate|gate_up)_(ch|)exps"
"""Tensors that ``--cpu-moe`` moves (``LLM_FFN_EXPS_REGEX`` upstream), without the backslash that a shell changes."""

_DENSE = ".ffn_(up|down|gate).(weight|bias|scale)$"
"""The same for ``--n-cpu-ffn`` (``LLM_FFN_DENSE_REGEX``)."""

_OF_FIRST_LAYERS = {"n_cpu_moe": _EXPERTS, "n_cpu_ffn": _DENSE}


def host_overrides(
    cpu_moe: bool, n_cpu_moe: int | None, n_cpu_ffn: int | None, names: Sequence[str]
) -> tuple[TensorBuftOverride, ...]:
    """Build the overrides of ``-cmoe``, ``-ncmoe`` and ``-ncffn`` for a model with these tensors.

    Layers beyond the model's are ignored. Raises ``UsageError`` for a negative number.
    """
    counts = {"n_cpu_moe": n_cpu_moe, "n_cpu_ffn": n_cpu_ffn}
    n_experts, n_dense = (PARAMETERS[name].check(n) if n is not None else 0 for name, n in counts.items())
    experts = (TensorBuftOverride(_EXPERTS, "CPU"),) if cpu_moe else _of_first_layers(_EXPERTS, n_experts, names)
    return (*experts, *_of_first_layers(_DENSE, n_dense, names))


def _of_first_layers(pattern: str, count: int, names: Sequence[str]) -> tuple[TensorBuftOverride, ...]:
    there = _layers(tuple(names)) if count else ()
    layers = "|".join([str(layer) for layer in there if layer < count])
    return (TensorBuftOverride(f"^blk.({layers}){pattern}", "CPU"),) if layers else ()


@lru_cache(maxsize=8)
def _layers(names: tuple[str, ...]) -> list[int]:
    return sorted({layer for name in names if (layer := layer_of(name)) is not None})


def override_like(
    placement: Placement, names: Sequence[str], pinned: Collection[str], *, all_layers: bool = True
) -> tuple[TensorBuftOverride | None, tuple[Item, ...]]:
    """Return a flag's override that places every tensor like ``placement``, but for items of one more layer, and these.

    ``None`` and all items that are apart from their layers if no flag does.

    Args:
        placement: The placement.
        names: Names of all tensors that are loaded.
        pinned: Names of tensors that the user's overrides place.
        all_layers: Whether ``-cmoe`` may be the flag.
    """
    items = tuple(item for item, _ in placement.moved)
    last = max((item.layer for item in items), default=0)
    if not items or any(target != HOST for _, target in placement.moved):
        return None, items
    for count, is_all in ((last + 1, all_layers), (last, False)):
        moved = {name for item in items if item.layer < count for name in item.names}
        flags = (is_all, None, None), (False, count, None), (False, None, count)
        for cpu_moe, n_cpu_moe, n_cpu_ffn in flags if moved else ():
            for override in host_overrides(cpu_moe, n_cpu_moe, n_cpu_ffn, names):
                pattern = re.compile(override.pattern)
                if not all(map(pattern.search, moved)):
                    continue
                others = {name for name in names if pattern.search(name)} - moved - set(pinned)
                if all((layer_of(name) or 0) < placement.first for name in others):
                    return override, tuple(item for item in items if item.layer >= count)
    return None, items


def flags_among(overrides: Sequence[TensorBuftOverride]) -> dict[TensorBuftOverride, tuple[str, int]]:
    """Find the overrides that are a flag's; return the keyword and value of each, a larger one after a smaller one.

    There are none beside overrides to devices: the first match decides, and a preset does not keep options in order.
    """
    if any(override.buffer_type != "CPU" for override in overrides):
        return {}
    flags = {override: flag for override in overrides if (flag := _flag_of(override.pattern))}
    return dict(sorted(flags.items(), key=lambda pair: math.inf if pair[1][0] == "cpu_moe" else pair[1][1]))


def merge_overrides(overrides: Sequence[TensorBuftOverride]) -> tuple[TensorBuftOverride, ...]:
    """Join neighbours with one target into one pattern of alternatives; of flags, keep the largest and apart.

    llama.cpp takes the first pattern that matches, so only neighbours can be joined. A pattern with a back reference
    counts groups from its own start, so it is not joined.
    """
    flags = flags_among(overrides)
    result: list[TensorBuftOverride] = []
    for override in overrides:
        if override in flags:
            continue
        if (
            result
            and result[-1].buffer_type == override.buffer_type
            and not any(_BACK_REFERENCE.search(side.pattern) for side in (result[-1], override))
        ):
            result[-1] = TensorBuftOverride(f"{result[-1].pattern}|{override.pattern}", override.buffer_type)
        else:
            result.append(override)
    largest = {name.removeprefix("n_"): override for override, (name, _) in flags.items()}
    return (*result, *largest.values())


def _flag_of(pattern: str) -> tuple[str, int] | None:
    if pattern == _EXPERTS:
        return "cpu_moe", True
    for name, tensors in _OF_FIRST_LAYERS.items():
        layers = pattern.removeprefix("^blk.(").removesuffix(f"){tensors}").split("|")
        if pattern == f"^blk.({'|'.join(map(str, range(len(layers))))}){tensors}":
            return name, len(layers)
    return None
