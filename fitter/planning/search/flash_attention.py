"""Flash attention on or off, where ``auto`` decides badly. It costs no quality. The search's last step.

With ``auto`` llama.cpp turns it off for all layers as soon as one is computed on another device than its cache
(``llama_context``). That happens where weights of a host layer are on a device, and with 32 slots or more wherever a
layer is on the host, since a device then borrows its weights. Without flash attention compute buffers are gigabytes
larger. On the other hand, a device that computes attention with a cache on the host copies the cache for every token;
without flash attention the host computes it.
"""

from __future__ import annotations

from collections.abc import Collection

from fitter.planning.pricing.objective import GAIN
from fitter.planning.pricing.trial import Trial
from fitter.planning.request.given import usable_devices
from fitter.planning.request.request import Request
from fitter.planning.search.variants import Kind
from fitter.planning.speed.explain import FAR, Choice

_FLOATS = ("f32", "f16", "bf16")
"""Types of a V cache that llama.cpp has without flash attention."""


def is_open(request: Request) -> bool:
    """Whether the search decides on flash attention, not the user."""
    return request.params.flash_attn == "auto" and "flash_attn" not in request.fixed


def may_be_off(request: Request) -> bool:
    """Whether a plan may do without it."""
    return is_open(request) and request.params.type_v in _FLOATS


def kinds(
    request: Request, best: Trial, distance: float, seen: Collection[bool | None], *, is_last: bool = True
) -> list[Kind]:
    """List kinds of attention that may be better than as the request has it, for ``best``.

    Args:
        distance: the time of ``best``, as a multiple of its bound.
        seen: the results of ``auto`` in all trials. Where it was on once, the devices can compute it.
        is_last: whether the context is decided. Before, only plans count that have caches on the host anyway: with all
            of them, Llama 3.1 8B on 4 GiB takes 34 loads instead of 6.
    """
    placement, flash = best.placement, [request.params.flash_attn]
    is_short = "n_ctx" not in request.fixed and best.params.n_ctx < request.n_ctx_max
    if is_open(request):
        # without this gpt-oss-20b on two 4090 at 2 Mi tokens is 29 % slower
        if {True, False} <= set(seen) and (is_short or distance > 1 + GAIN):
            flash.append("on")
        is_far = placement.first > 0 and placement.n_gpu_layers > 0 and distance > FAR
        # without devices it stays as llama.cpp decides: how processors compare was measured on one (host_attention.csv)
        is_spilled = placement.is_spilled and bool(best.devices)
        if (is_spilled if is_last else is_far) and True in seen and may_be_off(request):
            flash.append("off")
    # caches of layers on devices, too, are on the host, which leaves room for their weights
    is_worth = is_last and placement.is_spilled and usable_devices(request)
    offload = [True, False] if is_worth and "offload_kqv" not in request.fixed else [request.params.offload_kqv]
    return [Kind(each, is_there) for is_there in offload for each in flash]


def choice_of(chosen: Trial, other: Trial) -> Choice | None:
    """Describe the choice between flash attention as in ``chosen`` and as ``auto`` decides."""
    if chosen.seconds is None:
        return None
    text = "on for every layer" if chosen.breakdown.flash_attn else "off"
    turned = ", which turns it " + ("on" if other.breakdown.flash_attn else "off")
    is_same = chosen.breakdown.flash_attn == other.breakdown.flash_attn
    return Choice("flash attention", text, chosen.seconds, "auto" + ("" if is_same else turned), other.seconds)
