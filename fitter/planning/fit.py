"""From a request to a plan: count the loads, run the search, and say what the winner takes. Bytes."""

from __future__ import annotations

import time
from collections.abc import Callable

from fitter.llama.types import Breakdown, Layout, Params
from fitter.planning.plan import DeviceUse, HostUse, ModelSummary, PlanData, Problem, Search
from fitter.planning.request import MIB, Measure, Progress, Record, Request
from fitter.planning.search import Trial, search

OnProgress = Callable[[Progress], None]


def fit(
    request: Request, summary: ModelSummary, measure: Measure, record: Record, on_progress: OnProgress, virtual: bool
) -> PlanData:
    """The plan for ``request``. Raises what ``measure`` and ``record`` raise."""
    started = time.monotonic()
    loads = 0

    def counted_measure(params: Params) -> Breakdown:
        nonlocal loads
        on_progress(Progress(loads, _attempt(params, request)))
        loads += 1
        return measure(params)

    def counted_record(params: Params) -> Layout:
        nonlocal loads
        on_progress(Progress(loads, f"sizes of all tensors at a context of {params.n_ctx}"))
        loads += 1
        return record(params)

    trial = search(request, counted_measure, counted_record)
    on_progress(Progress(loads, "done"))
    return PlanData(
        model=summary,
        params=trial.params,
        breakdown=trial.breakdown,
        devices=_device_uses(request, trial.breakdown),
        host=_host_use(request, trial.breakdown),
        search=Search(loads, time.monotonic() - started),
        problems=_problems(request, trial),
        n_layer=request.n_layer,
        virtual=virtual,
    )


def _attempt(params: Params, request: Request) -> str:
    if not params.devices:
        return f"context {params.n_ctx}, all on the host"
    n_gpu_layers = params.n_gpu_layers if params.n_gpu_layers >= 0 else request.n_layer + 1
    return f"context {params.n_ctx}, {n_gpu_layers} of {request.n_layer + 1} layers on {', '.join(params.devices)}"


def _device_uses(request: Request, breakdown: Breakdown) -> tuple[DeviceUse, ...]:
    uses = []
    for device in request.devices:
        row = breakdown.on(device.name)
        uses.append(
            DeviceUse(
                device.name,
                device.description,
                device.total,
                device.free,
                device.margin,
                row.model,
                row.context,
                row.compute,
            )
        )
    return tuple(uses)


def _host_use(request: Request, breakdown: Breakdown) -> HostUse:
    host, row = request.host, breakdown.host
    return HostUse(host.total, host.free, host.margin, row.model, row.context, row.compute)


def _problems(request: Request, trial: Trial) -> tuple[Problem, ...]:
    problems = []
    for name, missing in trial.missing:
        if name == "host":
            remedy = "free host memory or leave more of the model on devices"
            if "n_ctx" in request.fixed and trial.params.n_ctx > request.n_ctx_min:
                remedy = "ask for a smaller -c, " + remedy
            if not request.host.paging:
                remedy += ", or let weights be paged from disk with --allow paging"
            used, free, margin = trial.breakdown.host.used, request.host.free or 0, request.host.margin
            where = "the host"
        else:
            device = next(device for device in request.devices if device.name == name)
            used, free, margin = trial.breakdown.on(name).used, device.free, device.margin
            where = name
            freed = [
                f"{flag} free"
                for flag, field in (("-ngl", "n_gpu_layers"), ("-ts", "tensor_split"), ("-c", "n_ctx"))
                if field in request.fixed
            ]
            if request.params.tensor_buft_overrides:
                freed.append("fewer tensors to it with -ot")
            remedy = " or ".join([*(f"leave {flag}" for flag in freed), "use a smaller margin with --fit-target"])
        problems.append(
            Problem(
                name,
                missing,
                f"{where} lacks {_mib_up(missing)} MiB: {_mib_up(used)} MiB are needed beside a margin of "
                f"{margin // MIB} MiB, and {free // MIB} MiB are free; {remedy}",
            )
        )
    return tuple(problems)


def _mib_up(size: int) -> int:
    return -(-size // MIB)
