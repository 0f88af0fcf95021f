"""Descriptions of the choices that a search makes by price: the chosen way, the rejected way, and their seconds.

The plan shows them. Each function makes one ``Choice``, or ``None`` where nothing was chosen by price.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fitter.planning.placing.layer_sizes import HOST
from fitter.planning.placing.placement import Placement
from fitter.planning.pricing.trial import Trial
from fitter.planning.request.request import DeviceLimit, Request
from fitter.planning.speed.explain import Choice

Seconds = Callable[[Placement], float]
"""Estimated seconds of a placement."""

WEIGHTS = "where the weights go"
"""The subject of ``where_weights_go``."""

_TENSORS = "single feed-forward tensors on the host, as many layers with their KV cache on devices as fit"
_LAYERS = "whole layers on the host with their KV cache"
_CACHES = "the weights of some layers on the host, their KV cache on devices"
_CACHES_ON_HOST = "the KV cache of some layers on the host, as many of their weights on devices as fit"


def where_weights_go(request: Request, best: Trial, other: Placement | None, seconds: Seconds) -> Choice | None:
    """Describe the choice between a plan and the ``other`` way to place weights."""
    if best.seconds is None or not best.placement.is_spilled:
        return None
    chosen = style(request, best.placement)
    if other is None or style(request, other) == chosen:
        return Choice(WEIGHTS, chosen, best.seconds)
    return Choice(WEIGHTS, chosen, best.seconds, style(request, other), seconds(other))


def style(request: Request, placement: Placement) -> str:
    """Say where ``placement`` has weights and caches."""
    spilled = [item for item, target in placement.moved if target == HOST]
    if len(spilled) < len(placement.moved) and any(item.layer < placement.first for item, _ in placement.moved):
        return _CACHES_ON_HOST
    if any(not request.is_movable(f"{item.stem}.{item.suffixes[0]}") for item in spilled):
        return _CACHES
    return _TENSORS if len({item.layer for item in spilled}) > 1 else _LAYERS


def which_devices_have_layers(trial: Trial, default: Placement, seconds: Seconds) -> Choice | None:
    """Describe the choice between a plan with the whole model on devices and llama.cpp's own split."""
    if trial.seconds is None or trial.placement == default:
        return None
    names = ", ".join(f"{count} on {trial.devices[d].name}" for d, count in enumerate(trial.placement.counts) if count)
    return Choice(
        "which devices have the layers",
        names,
        trial.seconds,
        "all devices, split by free memory as llama.cpp does",
        seconds(default),
    )


def which_device_is_first(chosen: DeviceLimit, seconds: float, other: DeviceLimit, other_seconds: float) -> Choice:
    """Describe the choice of the device that computes with the host's weights over ``other``, the user's first one."""
    text = f"{chosen.name}, which is fastest with weights on the host in a prompt"
    return Choice("which device is the first", text, seconds, f"{other.name}, in the given order", other_seconds)


def which_devices_take_part(chosen: Trial, other: Trial) -> Choice | None:
    """Describe the choice between plans on different devices, where both fit."""
    if chosen.seconds is None or not other.fits:
        return None
    texts = [
        f"{', '.join(trial.params.devices or ()) or 'none'}, context {trial.params.n_ctx}" for trial in (chosen, other)
    ]
    return Choice("which devices take part", texts[0], chosen.seconds, texts[1], other.seconds)


def are_remotes_worth_it(remote: Sequence[DeviceLimit], chosen: Trial, other: Trial) -> Choice | None:
    """Describe the choice between a plan with remote devices and one without them, where both fit."""
    if chosen.seconds is None or not other.fits:
        return None
    names = " and ".join(device.name for device in remote)
    texts = [f"{'with' if remote[0] in trial.devices else 'without'} {names}" for trial in (chosen, other)]
    if chosen.params.n_ctx != other.params.n_ctx:
        texts = [f"{text}, context {trial.params.n_ctx}" for text, trial in zip(texts, (chosen, other), strict=True)]
    return Choice("whether remote devices are worth their network", texts[0], chosen.seconds, texts[1], other.seconds)
