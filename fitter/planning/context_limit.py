"""The largest context whose cache each device takes. Bytes.

The keys, or the values, of a layer for all sequences are one tensor, and some devices (Vulkan's) compute with tensors
up to a certain size only. llama.cpp ends its process where one is larger, so the search must not ask for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache

from fitter.errors import LlamaCppError
from fitter.llama.types import LAYOUT_DEVICE, LayoutEntry
from fitter.planning.memory import cache_layer, is_state
from fitter.planning.request import MIB, DeviceLimit, Record, Request

_INTERPOLATED = 8
"""Guesses by a straight line, which most caches are, before it is halves."""


@dataclass(frozen=True)
class Excess:
    """What makes a context too large for ``device``, which takes one of ``n_ctx``: a ``tensor`` of ``bytes``."""

    device: str
    n_ctx: int
    asked: int
    tensor: str
    bytes: int
    most: int

    @property
    def missing(self) -> int:
        """Bytes by which the tensor is too large."""
        return self.bytes - self.most

    @property
    def message(self) -> str:
        """What is wrong, and what to do about it."""
        what = "recurrent state" if is_state(self.tensor) else "KV cache"
        said = (
            f"{self.device} takes no tensor of more than {self.most // MIB} MiB, and at a context of {self.asked} the "
            f"{what} of a layer ({self.tensor}) would be one of {-(-self.bytes // MIB)} MiB; "
        )
        remedies = ["fewer sequences (-np)", "-nkvo, which keeps it in host memory"]
        if not is_state(self.tensor):
            remedies.insert(1, "a smaller -ctk and -ctv")
        if self.n_ctx:
            remedies.insert(0, f"-c {self.n_ctx} or less")
        return said + "give " + ", or ".join(remedies)


def limited(request: Request, record: Record) -> tuple[Request, Excess | None]:
    """``request`` with the largest context that each device takes (``context_limits``), where that is less than asked.

    Where no device takes a context that is worth having, the request is for the largest that one does, and the other
    result says what was in the way. Raises ``LlamaCppError`` where there is no such context at all.
    """
    mosts = {device.name: device.largest_tensor for device in request.devices if device.largest_tensor is not None}
    if not mosts or not request.params.offload_kqv or request.params.n_gpu_layers == 0:
        return request, None

    @cache
    def largest(n_ctx: int) -> LayoutEntry | None:
        """The largest tensor of the caches that may be on a device."""
        layout = record(replace(request.params, n_ctx=n_ctx, tensor_buft_overrides=()))
        caches = [entry for entry in layout.entries if entry.kind == "context" and entry.buffer_type == LAYOUT_DEVICE]
        on_devices = [entry for entry in caches if cache_layer(entry.name, request.n_layer) >= _first(request)]
        return max(on_devices, key=lambda entry: entry.bytes, default=None)

    is_fixed = "n_ctx" in request.fixed
    top = request.params.n_ctx if is_fixed else request.n_ctx_max
    needed = top if is_fixed else request.n_ctx_min
    found = largest(top)
    limits: dict[str, int] = {}
    for name, most in mosts.items():
        if found is not None and found.bytes > most:
            limits[name] = _widest(lambda n_ctx: _bytes(largest(n_ctx)), request.alignment, top, most)
    limited = replace(request, context_limits=limits)
    if usable(limited, request.devices) or not request.devices:
        return limited, None
    # the device that takes the most of it, and what it would need for the least
    device = max(limits, key=lambda name: limits[name])
    tensor = largest(needed)
    assert tensor is not None
    excess = Excess(device, limits[device], needed, tensor.name, tensor.bytes, mosts[device])
    if not excess.n_ctx:
        raise LlamaCppError(excess.message)
    params = replace(request.params, n_ctx=excess.n_ctx)
    return replace(limited, params=params, fixed=request.fixed | {"n_ctx"}), excess


def usable(request: Request, devices: Sequence[DeviceLimit]) -> tuple[DeviceLimit, ...]:
    """Those of ``devices`` that take a context that is worth having; all or none where the user has chosen them."""
    needed = request.params.n_ctx if "n_ctx" in request.fixed else request.n_ctx_min
    taking = tuple(device for device in devices if request.context_limits.get(device.name, needed) >= needed)
    if request.fixed & {"devices", "tensor_split"} and len(taking) < len(devices):
        return ()
    return taking


def within(request: Request, devices: Sequence[DeviceLimit]) -> Request:
    """``request`` with no more context than all of ``devices`` take."""
    most = min((request.context_limits[device.name] for device in devices if device.name in request.context_limits), default=None)
    return request if most is None else replace(request, n_ctx_cap=most)


def _first(request: Request) -> int:
    """The first layer that may be on a device."""
    asked = request.params.n_gpu_layers
    return max(0, request.n_layer + 1 - asked) if "n_gpu_layers" in request.fixed and asked >= 0 else 0


def _bytes(entry: LayoutEntry | None) -> int:
    return 0 if entry is None else entry.bytes


def _widest(size: Callable[[int], int], step: int, top: int, most: int) -> int:
    """The largest multiple of ``step`` below ``top``, which is too large, with a ``size`` of ``most``; 0 without one."""
    low, high = step, -(-top // step) * step
    if low >= high or size(low) > most:
        return 0
    for tries in range(2 * _INTERPOLATED + high.bit_length()):
        if high - low <= step:
            break
        small, large = size(low), size(min(high, top))
        share = (most - small) / (large - small) if tries < _INTERPOLATED else 0.5
        guess = (low + int((high - low) * share)) // step * step
        guess = min(max(guess, low + step), high - step)
        if size(guess) <= most:
            low = guess
        else:
            high = guess
    return low
