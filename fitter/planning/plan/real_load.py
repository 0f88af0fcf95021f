"""The real load of a plan: how its weights are loaded, and the memory that it takes beyond the dummy load. Bytes."""

from __future__ import annotations

from dataclasses import replace

from fitter.errors import UsageError
from fitter.model.header import Model
from fitter.model.tensors import Role, role_of
from fitter.parameters.table import MAPPED, PARAMETERS
from fitter.planning.plan.plan import Plan
from fitter.planning.request.pool_margin import MAPS
from fitter.planning.request.request import Request
from fitter.planning.request.shared import HOST_NAME
from fitter.planning.speed.cost import MIN_OFFLOAD_BATCH
from fitter.text import MIB

_PINNED = "_Host"
"""End of the names of pinned host buffer types: ``CUDA_Host``, ``ROCm_Host``, ``Vulkan_Host``."""
_WORTH = 32 * MIB
"""Bytes of weights that justify another argument."""


def with_its_mode(plan: Plan, request: Request, model: Model, *, is_free: bool) -> Plan:
    """Set the load mode that ``plan`` needs, or the fastest one if the user and the build leave it open (``is_free``).

    A note says where the user's is slower.

    Raises:
        UsageError: The user's load mode maps weights that the plan has no room for.
    """
    has = plan.params.of_parameter(PARAMETERS["load_mode"])
    if has == "auto" and _pages_where_nothing_is_mapped(plan, request):
        return _with_mode(plan, "mmap")
    if plan.fits and any(pool.load_mode for pool in plan.pools):
        if has in MAPPED:
            raise UsageError(
                f"with --load-mode {has} the GPU maps what the host has of the layers as well, for which there is no "
                "room: leave it out"
            )
        return plan if has != "auto" else _with_mode(plan, "none")
    if not (is_free or has in MAPPED) or not _copies(plan, request, model):
        return plan
    note = f"with --load-mode {has} prompts are slower, since devices copy weights from the mapped file: leave it out"
    return _with_mode(plan, "none") if is_free else replace(plan, notes=(*plan.notes, note))


def _pages_where_nothing_is_mapped(plan: Plan, request: Request) -> bool:
    """Return whether weights must be paged on a machine where ``auto`` becomes ``none``.

    It does where a device other than Apple's shares the host's memory: ggml's backends have no ``mmap_support`` there
    (``load_tensors`` in ``llama-model.cpp``).
    """
    is_short = any(not pool.fits for pool in plan.pools) or not plan.host.fits
    is_read = any(pool.system != MAPS for pool in request.pools)
    return request.host.paging and is_read and plan.fits and is_short


def _with_mode(plan: Plan, mode: str) -> Plan:
    return replace(plan, params=plan.params.having({"load_mode": mode}))


def _copies(plan: Plan, request: Request, model: Model) -> bool:
    """Return whether a device copies host weights in prompts, which is faster with ``none``.

    By default llama.cpp maps host weights into pageable memory, from which a driver copies each byte twice; ``none``
    puts them into pinned memory (``select_weight_buft`` in ``llama-model-loader.cpp``). The plan's dummy load had this
    mode, so the host has room. Paging needs mapped weights.
    """
    is_long = min(plan.params.n_ubatch, request.workload.prompt) >= MIN_OFFLOAD_BATCH
    # llama.cpp's device for split mode tensor does not compute with host weights
    is_taken_over = plan.params.op_offload and plan.params.split_mode != "tensor"
    if not (plan.fits and is_taken_over and is_long) or request.host.paging:
        return False
    looked_up = sum(tensor.bytes for tensor in model.tensors if role_of(tensor.name) is Role.TOKEN_EMBEDDING)
    pinned = sum(row.model for row in plan.breakdown.rows if row.is_host and row.buffer_type.endswith(_PINNED))
    return pinned - looked_up > _WORTH


def with_real_load(plan: Plan) -> Plan:
    """Set how much larger the compute buffers of a real load of a fitting ``plan`` are (``more_in_use``)."""
    if not plan.fits:
        return plan
    dummy, most = plan.breakdown, plan.breakdown.most
    more = {use.name: most.on(use.name).compute - dummy.on(use.name).compute for use in plan.devices}
    more[HOST_NAME] = most.host.compute - dummy.host.compute
    return replace(
        plan,
        devices=tuple(replace(use, more_in_use=more[use.name]) for use in plan.devices),
        host=replace(plan.host, more_in_use=more[HOST_NAME]),
        pools=tuple(replace(pool, more_in_use=sum(more.get(name, 0) for name in pool.members)) for pool in plan.pools),
    )
