"""Work space that a device takes in use and that llama.cpp counts nowhere, as far as it follows from the plan. Bytes.

Without flash attention, ggml-cuda multiplies the weights of attention with V as matrices of 16 bits, of which it keeps
a copy in its pool of work space (``ggml_cuda_mul_mat_cublas``): half of what they take in the compute buffer.
It grows with the context and the micro batch. ``docs/explanation/real-cards.md`` has what an H100 took.
"""

from __future__ import annotations

from collections.abc import Sequence

from fitter.llama.types import Breakdown, Params
from fitter.planning.request import DeviceLimit, Request

_HALF = 2


def work_spaces(request: Request, params: Params, breakdown: Breakdown) -> dict[str, int]:
    """By device, what must be free beside a plan so that its attention can be computed; empty with flash attention."""
    if breakdown.flash_attn is not False or params.type_v == "f32" or request.facts is None:
        return {}
    n_head = max((layer.n_head for layer in request.facts.layers), default=0)
    n_kv = breakdown.n_ctx // (1 if params.kv_unified else params.n_seq_max)
    n_tokens = min(params.n_ubatch, params.n_batch, n_kv)
    size = n_kv * n_tokens * n_head * _HALF
    return {name: size + outside for name, outside in _with_attention(request.devices, params, breakdown)}


def _with_attention(devices: Sequence[DeviceLimit], params: Params, breakdown: Breakdown) -> list[tuple[str, int]]:
    """The devices that compute attention so, each with what else was measured there."""
    is_on_devices = params.offload_kqv and bool(breakdown.devices)
    return [
        (device.name, device.outside)
        for device in devices
        if is_on_devices and device.has_work_space and breakdown.on(device.name).context
    ]


def lacking(spaces: dict[str, int], request: Request, breakdown: Breakdown) -> dict[str, int]:
    """Those of the ``spaces`` that a plan which takes ``breakdown`` leaves too little for."""
    free = {device.name: device.free - breakdown.on(device.name).used for device in request.devices}
    return {name: size for name, size in spaces.items() if free[name] < size}
