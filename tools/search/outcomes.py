"""What a fit answers for a machine, and when one answer is worse than another."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import fitter
from fitter.errors import FitterError
from fitter.llama.client import Worker
from fitter.llama.types import RPC, DeviceInfo, VirtualDevice
from fitter.machine import bandwidth
from fitter.machine.machine import device_speeds
from fitter.machine.speed import REMOTE, DeviceSpeed
from fitter.planning.pricing.objective import GAIN
from fitter.planning.request.request import DEFAULT_HOST_MARGIN, DEFAULT_MARGIN
from fitter.planning.speed.cost import Workload
from tools.comparisons import upstream
from tools.models import shapes
from tools.search.machines import MIB, Machine

SAME = GAIN
"""The share of an estimated time that counts as none: less is within what an estimate tells."""


@dataclass(frozen=True)
class Outcome:
    """A plan in figures; ``error`` where there is none.

    ``on_devices`` and ``compute``: bytes of weights and of compute buffers there. ``pins``: keywords of ``fitter.fit``
    that set all that the plan chose, but for its ``batches``. ``is_pipelined``: several devices hold the whole model,
    and a batch has several micro batches.
    """

    error: str = ""
    fits: bool = False
    n_ctx: int = 0
    seconds: float | None = None
    bound: float | None = None
    n_gpu_layers: int = 0
    on_devices: int = 0
    compute: int = 0
    placement: tuple[Any, ...] = ()
    arguments: tuple[str, ...] = ()
    pins: dict[str, Any] = field(default_factory=dict)
    batches: dict[str, int] = field(default_factory=dict)
    is_pipelined: bool = False
    reasons: tuple[str, ...] = ()
    loads: int = 0
    wall: float = 0.0

    @property
    def distance(self) -> float | None:
        """How many times the bound the estimate is."""
        if self.seconds is None or not self.bound:
            return None
        return self.seconds / self.bound


SERVER = DeviceSpeed(400e9, 60e12, 1.25e9, REMOTE, "", "drawn", known=True, round_trip=2e-4)
"""An rpc-server's device: a middle card at the end of 10 Gbit/s."""


class Asking:
    """Fits machines, one after the other, with a worker that stays.

    ``rpc``: the address of an rpc-server, for machines that have one.
    """

    def __init__(self, directory: Path, worker: Worker, rpc: str = "") -> None:
        self._directory = directory
        self._worker = worker
        self._rpc = rpc

    def path(self, shape: str) -> Path:
        """The model's file; without tokens, which take most of a load's time and no memory."""
        return shapes.write(shape, self._directory, vocab=False)

    def _words(self, options: Mapping[str, Any]) -> dict[str, Any]:
        draft = options.get("model_draft")
        return {**options, **({"model_draft": str(self.path(draft))} if draft else {})}

    def fit(self, machine: Machine, gpus: Sequence[VirtualDevice] | None = None, **more: Any) -> Outcome:
        """What ``fitter.fit`` answers."""
        started = time.monotonic()
        options = self._words({**machine.options, **more})
        try:
            with with_links(machine.link), with_server(machine.server):
                rpc = self._rpc if machine.server else None
                path, gpus = self.path(machine.shape), gpus or machine.gpus
                plan = fitter.fit(path, gpus=gpus, worker=self._worker, rpc=rpc, **options)
        except FitterError as error:
            return Outcome(error=f"{type(error).__name__}: {error}", wall=time.monotonic() - started)
        params, names = plan.params, plan.params.devices or ()
        arguments = tuple(plan.arguments()) if plan.fits else ()
        # devices that the user sets are the draft model's, too
        draft = arguments[arguments.index("-devd") + 1].split(",") if "model_draft" in options and arguments else None
        split = params.tensor_split or (1.0,) * len(names)
        return Outcome(
            fits=plan.fits,
            n_ctx=plan.params.n_ctx,
            seconds=plan.estimate.seconds if plan.estimate else None,
            bound=plan.bound.seconds if plan.bound else None,
            n_gpu_layers=plan.params.n_gpu_layers,
            on_devices=sum(device.model for device in plan.devices),
            compute=sum(device.compute for device in plan.devices),
            placement=(plan.params.n_gpu_layers, tuple(split), len(plan.params.tensor_buft_overrides)),
            arguments=arguments,
            pins={
                "devices_draft": draft,
                "n_ctx": params.n_ctx,
                "flash_attn": params.flash_attn,
                "offload_kqv": params.offload_kqv,
                "devices": list(names),
                "n_gpu_layers": params.n_gpu_layers,
                "tensor_split": params.tensor_split,
                "override_tensor": [f"{each.pattern}={each.buffer_type}" for each in params.tensor_buft_overrides],
            },
            batches={"n_batch": params.n_batch, "n_ubatch": params.n_ubatch},
            is_pipelined=sum(map(bool, split)) > 1
            and params.n_gpu_layers > plan.n_layer
            and params.n_ubatch < params.n_batch
            and not params.tensor_buft_overrides,
            reasons=tuple(reason.kind for reason in plan.bound.reasons) if plan.bound else (),
            loads=plan.search.dummy_loads,
            wall=time.monotonic() - started,
        )

    def at_depths(self, machine: Machine, plan: Outcome, depths: Sequence[int]) -> list[float]:
        """Estimate the seconds of a request of ``plan`` that fills the cache to each of ``depths``, for each token."""
        # a plan without devices has none, not all of the machine's
        pins = plan.pins | {"devices": plan.pins["devices"] or ["none"]}
        placed = {name: value for name, value in pins.items() if value not in (None, [])}
        options = {name: value for name, value in machine.options.items() if name not in ("host_memory", "margin")}
        words = {**self._words(options), **placed, **plan.batches, "gpus": machine.gpus, "worker": self._worker}
        requests = [(max(1, depth - Workload.generate), min(Workload.generate, depth - 1)) for depth in depths]
        prices = (fitter.estimate(self.path(machine.shape), prompt=p, generate=g, **words) for p, g in requests)
        return [price.seconds / depth for price, depth in zip(prices, depths, strict=True)]

    def upstream(self, machine: Machine) -> Outcome | None:
        """What upstream's own fit chooses there, priced by fitter.

        ``None`` where it gives up, keeps no margin, or takes more than ten minutes (15 cards and 64 slots).
        """
        path, gpus = self.path(machine.shape), machine.gpus
        try:
            done = upstream.run(upstream.fit_command(path, gpus, _upstream_options(machine)), gpus)
        except subprocess.TimeoutExpired:
            return None
        plan = upstream.plan_of(done)
        if plan is None:
            return None
        shared = {
            name: machine.options[name]
            for name in ("n_seq_max", "type_k", "type_v", "prompt")
            if name in machine.options
        }
        price = fitter.estimate(
            path,
            gpus=gpus,
            worker=self._worker,
            devices=[gpu.name for gpu in gpus],
            **plan.keywords,
            **shared,
        )
        margin = machine.options.get("margin", DEFAULT_MARGIN)
        rows = {gpu: price.breakdown.on(gpu.name) for gpu in gpus}
        if any(row.used > gpu.free - margin for gpu, row in rows.items() if row.used):
            return None
        memory = machine.options.get("host_memory")
        if memory is not None and price.breakdown.host.used > memory - DEFAULT_HOST_MARGIN:
            return None
        return Outcome(
            fits=True,
            n_ctx=plan.n_ctx,
            seconds=price.seconds,
            n_gpu_layers=plan.n_gpu_layers,
            on_devices=sum(row.model for row in rows.values()),
            arguments=plan.arguments,
        )


@contextmanager
def with_links(times: float) -> Iterator[None]:
    """Plan in the block with links to the host that are so many times as fast: no option sets their speed."""

    def faster(*args: Any) -> dict[str, DeviceSpeed]:
        speeds = device_speeds(*args)
        return {name: replace(speed, pcie=times * speed.pcie) for name, speed in speeds.items()}

    with mock.patch("fitter.api.call_worker.device_speeds", faster):
        yield


@contextmanager
def with_server(free: int) -> Iterator[None]:
    """Plan in the block as if an rpc-server's device had so many bytes, and the speed of ``SERVER``."""

    def described(worker: Worker) -> tuple[DeviceInfo, ...]:
        return tuple(replace(each, total=free, free=free) if each.backend == RPC else each for each in devices(worker))

    def speeds(infos: Sequence[DeviceInfo], *more: object) -> dict[str, DeviceSpeed]:
        return {info.name: SERVER for info in infos if info.backend == RPC}

    devices = Worker.devices
    with mock.patch.object(Worker, "devices", described), mock.patch.object(bandwidth, "remote_speeds", speeds):
        yield


def _upstream_options(machine: Machine) -> list[str]:
    names = {"n_seq_max": "-np", "n_ctx": "-c", "type_k": "-ctk", "type_v": "-ctv"}
    words = [word for name, value in machine.options.items() if name in names for word in (names[name], str(value))]
    if "margin" in machine.options:
        words += ["--fit-target", str(machine.options["margin"] // MIB)]
    return words


def worse(after: Outcome, before: Outcome, *, same: float = SAME) -> str:
    """Why ``after`` is worse than ``before``; empty where it is not.

    It is worse if it takes more time without more context, or has less context without less time.
    """
    if not before.fits:
        return ""
    if not after.fits:
        return after.error or "does not fit any more"
    a, b = after.seconds or 0.0, before.seconds or 0.0
    is_slower = a > b * (1 + same) and after.n_ctx <= before.n_ctx
    is_shorter = after.n_ctx < before.n_ctx * (1 - same) and a >= b
    return f"context {before.n_ctx} -> {after.n_ctx}, {b:.3f} -> {a:.3f} s" if is_slower or is_shorter else ""
