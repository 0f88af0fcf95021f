"""Problems of a plan that does not fit: the lack on each device and the host, and its remedies. Bytes.

A remedy is named only where it is enough: alone, or together with the others that are named.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from fitter.errors import Message, Remedy
from fitter.llama.types import Layout
from fitter.model.tensors import least_share
from fitter.parameters.table import PARAMETERS
from fitter.planning.placing.layer_sizes import HOST
from fitter.planning.plan.pool_use import pool_problem
from fitter.planning.pricing.trial import Trial
from fitter.planning.request.context_limit import Excess
from fitter.planning.request.request import Request
from fitter.planning.request.shared import later_of
from fitter.planning.request.summary import DeviceUse, HostUse, ModelSummary, PoolUse, Problem, SharedUse
from fitter.planning.speed.work import resized_layout
from fitter.text import mib, mib_up

_PROGRAM_LIMITS = {"cache_ram": "-cram", "ctx_checkpoints": "-ctxcp"}
"""Parameters that limit the memory of a running program, and their options."""

_PAGING = Remedy("let weights be read from disk again and again with --allow paging", "allow")
_CONTEXT = Remedy("use a smaller -c", "n_ctx", "lower")
_MARGIN = Remedy("use a smaller margin with --fit-target", "margin", "lower")
_HOST_MARGIN = Remedy("use a smaller margin with --host-margin", "host_margin", "lower")
_N_GPU_LAYERS = Remedy("leave -ngl out", "n_gpu_layers", "omit")
_TENSOR_SPLIT = Remedy("leave -ts out", "tensor_split", "omit")
_OFFLOAD_KQV = Remedy("leave -nkvo out", "offload_kqv", "omit")


def problems_of(
    request: Request,
    trial: Trial,
    devices: Sequence[DeviceUse],
    host: HostUse,
    excess: Excess | None,
    reserve: Mapping[str, int],
    uses: Sequence[SharedUse] = (),
    pools: Sequence[PoolUse] = (),
    model: ModelSummary | None = None,
    layout: Layout | None = None,
) -> tuple[Problem, ...]:
    """Say what ``trial`` lacks where, and what would make it fit; empty if it fits.

    Args:
        excess: A cache beyond a device's limit for one tensor.
        reserve: Bytes that a real load needs beyond a dummy load, by place.
        uses: Memory beside the model.
        model: The model, for a smaller quantization.
        layout: Recorded sizes, for a smaller context.
    """
    problems = []
    if excess is not None:
        return (Problem(excess.device, excess.missing, excess.message),)
    remedies = _Remedies(request, trial, devices, host, reserve, later_of(uses), model, layout)
    lacking_pools = {pool.name: pool for pool in pools if pool.name in dict(trial.missing)}
    for name, missing in trial.missing:
        if name in lacking_pools:
            pool = lacking_pools[name]
            problems.append(pool_problem(pool, missing, uses, remedies.of_pool(pool, missing)))
            continue
        if any(name in pool.members and _is_limited_by(pool, name, devices, host) for pool in lacking_pools.values()):
            # the pool's problem says it
            continue
        if name == "host":
            used, shared, free, margin = host.used, host.shared, host.free or 0, host.margin
            where, remedy = "the host", remedies.of_host(missing)
        else:
            device = next(device for device in devices if device.name == name)
            used, shared, free, margin = device.used, device.shared, device.free, device.margin
            where, remedy = name, remedies.of_device(device, missing)
        on_host = later_of(uses) if name == "host" else 0
        parts = ((shared - on_host, "beside the model"), (on_host, "for what the program keeps later"))
        named = " and ".join(f"{mib_up(size)} MiB of them {what}" for size, what in parts if size)
        needed = f"{mib_up(used)} MiB are needed" + (f" ({named})" if named else "")
        extra = f"a margin of {mib(margin)} MiB"
        if reserve.get(name, 0) > margin:
            extra = f"up to {mib_up(reserve[name])} MiB more in use"
        problems.append(
            Problem(
                name,
                missing,
                f"{where} lacks {mib_up(missing)} MiB: {needed} plus {extra}, but {mib(free)} MiB are free; " + remedy,
            )
        )
    return tuple(problems)


@dataclass(frozen=True)
class _Remedies:
    """What frees how many bytes, by the measured breakdown of a trial that does not fit."""

    request: Request
    trial: Trial
    devices: Sequence[DeviceUse]
    host: HostUse
    reserve: Mapping[str, int]
    later: int
    model: ModelSummary | None
    layout: Layout | None

    def of_host(self, missing: int) -> Message:
        """Name what frees the ``missing`` bytes of the host; a byte freed on a device has room for a layer's there."""
        fixed, host, facts = self.request.fixed, self.host, self.request.facts
        layers = max(0, host.model - max(0, self.request.model_bytes - sum(each.bytes for each in facts.tensors)))
        # weights that are paged lack nothing
        layers = 0 if self.request.host.paging else layers
        room = min(self._room(), layers + host.context)
        movable: Sequence[DeviceUse] = () if fixed & {"n_gpu_layers", "tensor_split"} else self.devices
        limits = [option for name, option in _PROGRAM_LIMITS.items() if dict(self.request.params.more).get(name)]
        margins = sum(max(0, each.margin - self.reserve.get(each.name, 0)) for each in movable)
        found = [
            (f"use a smaller {' or '.join(limits)}", self.later if limits else 0),
            (_CONTEXT, self._of_context((host,)) + min(layers, self._of_context(movable))),
            (_N_GPU_LAYERS, room if "n_gpu_layers" in fixed else 0),
            (_TENSOR_SPLIT, room if "tensor_split" in fixed else 0),
            (_OFFLOAD_KQV, 0 if self.request.params.offload_kqv else min(room, host.context)),
            ("keep fewer tensors there (-ot, -cmoe, -ncmoe, -ncffn)", min(room, self._pinned_to(HOST))),
            (_MARGIN, min(layers, margins)),
            (_HOST_MARGIN, max(0, host.margin - self.reserve.get("host", 0))),
            (f"free {mib_up(missing)} MiB of host memory", (host.total or 0) - (host.free or 0)),
        ]
        mode = self.trial.params.of_parameter(PARAMETERS["load_mode"])
        is_paged = self.request.host.paging or mode not in ("auto", "mmap")
        return self._enough(missing, found, min(layers, self._of_weights()), 0 if is_paged else host.model)

    def of_device(self, device: DeviceUse, missing: int) -> Message:
        """Name what frees the ``missing`` bytes of a device."""
        fixed, params = self.request.fixed, self.request.params
        elsewhere = self._room(device) + (math.inf if self.host.left is None else self.host.left - self.host.margin)
        names = [each.name for each in self.request.devices]
        pinned = self._pinned_to(names.index(device.name)) if device.name in names else 0
        # a device that holds nothing computes nothing
        layers = min(elsewhere, device.model + device.context + (0 if pinned else device.compute) - pinned)
        found = [
            (_N_GPU_LAYERS, layers if "n_gpu_layers" in fixed else 0),
            (_TENSOR_SPLIT, layers if "tensor_split" in fixed else 0),
            (Remedy("leave -c out", "n_ctx", "omit"), self._of_context((device,))),
            ("put fewer tensors there with -ot", min(elsewhere, pinned) if params.tensor_buft_overrides else 0),
            (_MARGIN, max(0, device.margin - self.reserve.get(device.name, 0))),
        ]
        return self._enough(missing, found, self._of_weights())

    def of_pool(self, pool: PoolUse, missing: int) -> Message:
        """Name what frees the ``missing`` bytes of a pool."""
        of_devices: Sequence[DeviceUse] = [each for each in self.devices if each.name in pool.members]
        found = [
            (_CONTEXT, self._of_context((self.host, *of_devices))),
            (_HOST_MARGIN, max(0, pool.margin - self.reserve.get(pool.name, 0))),
        ]
        return self._enough(missing, found, self._of_weights())

    def _room(self, but: DeviceUse | None = None) -> int:
        return sum(max(0, each.left - each.margin) for each in self.devices if each is not but)

    def _pinned_to(self, place: int) -> int:
        return sum(each.bytes for each in self.request.facts.tensors if self.request.pinned.get(each.name) == place)

    def _of_context(self, places: Sequence[DeviceUse | HostUse]) -> int:
        """Compute the bytes of caches that the smallest context saves; 0 where the plan has it."""
        now, least = self.trial.params.n_ctx, self.request.n_ctx_min
        if "n_ctx" not in self.request.fixed or now <= least:
            return 0
        share = 1 - least / now
        if self.layout is not None:
            # caches of sliding windows stay
            before, after = (replace(self.request.params, n_ctx=n_ctx) for n_ctx in (self.layout.n_ctx, least))
            small = resized_layout(self.request.facts, self.layout, before, after)
            sizes = [sum(each.bytes for each in one.entries if each.kind == "context") for one in (small, self.layout)]
            share = 1 - sizes[0] / max(1, sizes[1])
        return int(share * sum(place.context for place in places))

    def _of_weights(self) -> int:
        """Compute the bytes that the smallest usable quantization saves."""
        bits = self.request.facts.bits_per_weight
        share = 1.0 if self.model is None else least_share(self.model.architecture, bits)
        return int(self.request.model_bytes * (1 - share))

    def _enough(self, missing: int, found: Sequence[tuple[str, float]], saved: int, paged: int = 0) -> Message:
        """Name each remedy that frees ``missing`` bytes alone; else the fewest that do so together.

        Args:
            found: Remedies, with the bytes that each frees.
            saved: Bytes that a smaller quantization saves.
            paged: Bytes of weights that may be paged.
        """

        def smaller(size: float) -> str:
            return f"use a quantization of {mib(max(0, self.request.model_bytes - math.ceil(size)))} MiB or less"

        machine = f"use a machine with {mib_up(missing)} MiB more"
        nothing = f"no option is enough for this model: {machine}"
        enough = [words for words, size in (*found, (smaller(missing), saved), (_PAGING, paged)) if size >= missing]
        if enough:
            return Message("", *enough, *([machine] if enough == [_PAGING] else ()), otherwise=machine)
        # the same weights are not saved twice
        for of_weights in (("", saved), (_PAGING, paged)):
            together, freed = list[tuple[str, float]](), 0.0
            for words, size in sorted((*found, of_weights), key=lambda each: -each[1]):
                if size <= 0:
                    break
                together.append((words, size))
                freed += size
                if freed >= missing:
                    named = [words or smaller(missing - freed + size) for words, size in together]
                    return Message("", *named, joined=" and ", end=": only together they are enough", otherwise=nothing)
        return Message(nothing)


def _is_limited_by(pool: PoolUse, name: str, devices: Sequence[DeviceUse], host: HostUse) -> bool:
    """Whether a device or the host lacks memory only because its pool does."""
    return next((device.fits for device in devices if device.name == name), host.free == pool.free or host.fits)
