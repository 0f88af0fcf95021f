"""The largest context that is worth a dummy load. Bytes.

The keys, or the values, of a layer are one tensor for all sequences, and some devices (Vulkan's) limit the size of a
tensor: llama.cpp ends its process beyond it. A load at a context that no memory can hold takes seconds, and gigabytes
for llama.cpp's list of the cache's cells.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

from fitter.errors import LlamaCppError
from fitter.llama.types import LAYOUT_DEVICE
from fitter.planning.placing.layer_sizes import cache_layer, is_state
from fitter.planning.request.given import pinned_devices
from fitter.planning.request.request import DeviceLimit, Record, Request
from fitter.text import mib, mib_up

EXPENSIVE = 1 << 20
"""From this context, in tokens, a load takes longer than finding out whether it can fit."""


@dataclass(frozen=True)
class Excess:
    """Why a context of ``requested`` tokens is too large for ``device``.

    Attributes:
        device: Name of the device.
        n_ctx: The largest context that it accepts; 0 if there is none.
        requested: The context.
        tensor: Name of the tensor that is too large.
        bytes: Its bytes.
        most: The device's limit for one tensor.
        n_seq_max: Number of sequences.
    """

    device: str
    n_ctx: int
    requested: int
    tensor: str
    bytes: int
    most: int
    n_seq_max: int = 1

    @property
    def missing(self) -> int:
        """Bytes above the limit."""
        return self.bytes - self.most

    @property
    def message(self) -> str:
        """The problem and its remedies."""
        what = "recurrent state" if is_state(self.tensor) else "KV cache"
        remedies = [
            *([f"-c {self.n_ctx} or less"] if self.n_ctx else []),
            *(["fewer sequences (-np)"] if self.n_seq_max > 1 else []),
            *([] if is_state(self.tensor) else ["a smaller cache type (-ctk, -ctv)"]),
            "-nkvo, which keeps it in host memory",
        ]
        return (
            f"{self.device} cannot use a tensor of more than {mib(self.most)} MiB, but at a context of "
            f"{self.requested} the {what} of a layer ({self.tensor}) has {mib_up(self.bytes)} MiB: use "
            f"{', or '.join(remedies)}"
        )


def limited(request: Request, record: Record) -> tuple[Request, Excess | None]:
    """Limit the contexts of ``request`` to those that devices accept and memory can hold.

    Returns:
        The request with ``context_limits`` and ``n_ctx_cap``. If no device accepts the smallest useful context, the
        request is for the largest accepted one, and the second result names the tensor in the way.

    Raises:
        LlamaCppError: No context is possible.
    """
    if not request.devices or not request.params.offload_kqv or request.params.n_gpu_layers == 0:
        return request, None
    sizes = _sizes(request, record)
    mosts = {device.name: device.largest_tensor for device in request.devices if device.largest_tensor is not None}
    # apply the stricter limit first: the other then needs no load at a larger context
    request = _without_hopeless(request, sizes, min(mosts.values(), default=None))
    is_fixed = "n_ctx" in request.fixed
    top = request.params.n_ctx if is_fixed else request.n_ctx_max
    needed = top if is_fixed else request.n_ctx_min
    limits = {}
    for name, most in mosts.items():
        expected = _largest(_estimated_sizes(request, sizes, top))
        if expected > most:
            limits[name] = widest(lambda n_ctx: _largest(sizes(n_ctx)), request.alignment, top, expected, most)
    narrowed = replace(request, context_limits=limits)
    if usable(narrowed, request.devices):
        return _without_hopeless(narrowed, sizes) if limits else narrowed, None
    in_way = [name for name in _needed(narrowed, narrowed.devices) if limits.get(name, needed) < needed]
    device = min(in_way, key=lambda name: limits[name]) if in_way else max(limits, key=lambda name: limits[name])
    tensor, size = max(sizes(needed).items(), key=lambda item: item[1])
    excess = Excess(device, limits[device], needed, tensor, size, mosts[device], request.params.n_seq_max)
    if not excess.n_ctx:
        raise LlamaCppError(excess.message)
    params = replace(request.params, n_ctx=excess.n_ctx)
    return replace(narrowed, params=params, fixed=request.fixed | {"n_ctx"}), excess


def usable(request: Request, devices: Sequence[DeviceLimit]) -> tuple[DeviceLimit, ...]:
    """Return the devices that accept a useful context; none if the user also needs another device."""
    needed = request.params.n_ctx if "n_ctx" in request.fixed else request.n_ctx_min
    taking = tuple(device for device in devices if request.context_limits.get(device.name, needed) >= needed)
    return taking if _needed(request, devices) <= {device.name for device in taking} else ()


def _needed(request: Request, devices: Sequence[DeviceLimit]) -> set[str]:
    """Return the names of devices that the user chose, or put tensors on."""
    is_chosen = bool(request.fixed & {"devices", "tensor_split"})
    return {device.name for device in (devices if is_chosen else pinned_devices(request) & set(devices))}


def within(request: Request, devices: Sequence[DeviceLimit]) -> Request:
    """Limit ``request`` to contexts that all ``devices`` accept; without devices, only the host limits it."""
    if not devices:
        return replace(request, n_ctx_cap=None)
    limits = [request.context_limits[device.name] for device in devices if device.name in request.context_limits]
    return replace(request, n_ctx_cap=min(limits, default=request.n_ctx_cap))


_Sizes = Callable[[int], Mapping[str, int]]
"""For a context, the bytes of every cache tensor that may be on a device, by name."""


def _sizes(request: Request, record: Record) -> _Sizes:
    asked = request.params.n_gpu_layers
    # devices have the last layers
    first = max(0, request.n_layer + 1 - asked) if "n_gpu_layers" in request.fixed and asked >= 0 else 0

    @cache
    def sizes(n_ctx: int) -> dict[str, int]:
        layout = record(replace(request.params, n_ctx=n_ctx, tensor_buft_overrides=()))
        return {
            entry.name: entry.bytes
            for entry in layout.entries
            if entry.kind == "context"
            and entry.buffer_type == LAYOUT_DEVICE
            and cache_layer(entry.name, request.n_layer) >= first
        }

    return sizes


def _largest(sizes: Mapping[str, int]) -> int:
    return max(sizes.values(), default=0)


def _estimated_sizes(request: Request, sizes: _Sizes, n_ctx: int) -> Mapping[str, int]:
    """Estimate sizes at a large context from two small ones; never too low, since a window's cache stops growing."""
    low = request.n_ctx_min
    high = 2 * low
    if "n_ctx" in request.fixed or n_ctx <= high:
        return sizes(n_ctx)
    a, b = sizes(low), sizes(high)
    return {name: a[name] + (b[name] - a[name]) * (n_ctx - low) // (high - low) for name in a}


def _without_hopeless(request: Request, sizes: _Sizes, most: int | None = None) -> Request:
    """Cap the contexts of ``request`` where caches alone exceed all devices, but not below ``EXPENSIVE``.

    A plan with such a context is mostly far slower than with a smaller one. A tensor above ``most`` stops the cap,
    because it comes first.
    """
    low = request.n_ctx_min
    top = max(min(request.n_ctx_max, request.context_limits.get(d.name, request.n_ctx_max)) for d in request.devices)
    if request.fixed & {"n_ctx", "n_gpu_layers"} or request.is_for_most_context or top <= max(EXPENSIVE, 2 * low):
        return request
    target = sum(device.target for device in request.devices)
    expected, least = (sum(_estimated_sizes(request, sizes, n_ctx).values()) for n_ctx in (top, low))
    if expected <= target or least >= expected:
        return request
    n_ctx = low + (top - low) * max(0, target - least) // (expected - least)
    n_ctx = (max(n_ctx, EXPENSIVE) // request.alignment + 1) * request.alignment
    if n_ctx >= top or (most is not None and _largest(_estimated_sizes(request, sizes, n_ctx)) > most):
        return request
    if sum(sizes(n_ctx).values()) <= target:
        # the cache of a sliding window has stopped growing
        return request
    return replace(request, n_ctx_cap=n_ctx)


def widest(size: Callable[[int], int], step: int, top: int, expected: int, most: int) -> int:
    """Find the largest multiple of ``step`` below ``top`` with a ``size`` of at most ``most``; 0 if none.

    Most caches grow in proportion to the context, so two questions are usually enough.

    Args:
        size: Bytes at a context.
        step: Alignment of contexts.
        top: A context that is too large.
        expected: Bytes at ``top``.
        most: Limit in bytes.
    """
    low, high = 0, -(-top // step) * step
    in_proportion = top * most // expected // step * step
    guesses = [in_proportion, in_proportion + step]
    while high - low > step:
        guess = guesses.pop(0) if guesses else (low + high) // 2 // step * step
        guess = min(max(guess, low + step), high - step)
        low, high = (guess, high) if size(guess) <= most else (low, guess)
    return low
