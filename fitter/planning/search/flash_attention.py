"""Flash attention where ``auto`` decides against what the plan would gain by. No quality is given up for it.

With ``auto`` llama.cpp turns it off for all layers as soon as one is computed on another device than the one with its
cache (``llama_context``). So it is where weights of a host layer are on a device, and with 32 slots or more wherever a
layer is on the host, whose weights a device then borrows. Without it compute buffers are gigabytes larger. On the other
hand, where a device computes attention next to a cache on the host, it copies that for every token; without flash
attention the host computes it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace

from fitter.planning.pricing.objective import GAIN
from fitter.planning.pricing.trial import Trial
from fitter.planning.request.request import Request
from fitter.planning.speed.explain import FAR, Choice

_FLOATS = ("f32", "f16", "bf16")


def is_open(request: Request) -> bool:
    """Whether it is for the search to decide."""
    return request.params.flash_attn == "auto" and "flash_attn" not in request.fixed


def alternatives(request: Request, best: Trial, distance: float, seen: Collection[bool | None]) -> Iterator[Request]:
    """``request`` with flash attention decided in the ways that may be better than ``best``.

    ``distance`` is how many times its bound that takes. ``seen`` has what ``auto`` came to in every trial: where it was
    on once, the devices can compute it.
    """
    is_short = "n_ctx" not in request.fixed and best.params.n_ctx < request.n_ctx_max
    if {True, False} <= set(seen) and (is_short or distance > 1 + GAIN):
        yield replace(request, params=replace(request.params, flash_attn="on"))
    has_host_caches = best.placement.first > 0 and best.placement.n_gpu_layers > 0
    # llama.cpp has no quantized V cache without it
    if distance > FAR and best.breakdown.flash_attn and has_host_caches and request.params.type_v in _FLOATS:
        yield replace(request, params=replace(request.params, flash_attn="off"))


def choice_of(chosen: Trial, other: Trial) -> Choice | None:
    """The choice between flash attention as in ``chosen`` and as ``auto`` decides, in words."""
    if chosen.seconds is None:
        return None
    said = "on for every layer" if chosen.breakdown.flash_attn else "off"
    auto = "on" if other.breakdown.flash_attn else "off"
    return Choice("flash attention", said, chosen.seconds, f"auto, which turns it {auto}", other.seconds)
