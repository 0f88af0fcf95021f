"""Measure or price one load with exactly the parameters that are given. Bytes and seconds."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from fitter.api.call_worker import one_load
from fitter.api.checked_call import checked_worker_call
from fitter.llama.client import Worker
from fitter.llama.types import Breakdown
from fitter.machine.machine import choose, device_speeds, speed_of_host
from fitter.parameters.table import AnyPath as Path
from fitter.parameters.table import Estimating, Measuring
from fitter.planning.plan.request_of_machine import pinned_by
from fitter.planning.pricing.pricing import Price, Speeds
from fitter.planning.pricing.split_price import price_any_split
from fitter.planning.request.ask import Ask
from fitter.planning.request.constraints import check_live_tokens, check_split_mode, context_of_a_sequence, workload_of
from fitter.planning.speed.cost import Workload
from fitter.planning.speed.work import facts_of

if TYPE_CHECKING:
    from typing_extensions import Unpack


@checked_worker_call(Measuring)
def measure(
    model: Path,
    *,
    on_log: Callable[[str], None] | None = None,
    worker: Worker | None = None,
    **parameters: Unpack[Measuring],
) -> Breakdown:
    """Memory that llama.cpp would take with exactly these parameters: one dummy load, rows per buffer type in bytes.

    Each row has both figures for its compute buffer: ``compute`` is the dummy load's, as llama-fit-params and a plan
    say, ``reserved`` what a real load of llama.cpp reserves, more or less. ``.real`` has all rows as of a real load.

    ``parameters`` are those of ``fit`` that llama.cpp has too, none of them fitted, each with llama.cpp's own default
    (``n_ctx`` 0, the model's own; ``n_gpu_layers`` -1, all), and ``load_mtp``, ``n_rs_seq`` and ``n_outputs_max``. A
    ``worker`` that is given is used and stays open, for many measurements in a row; it is told of ``gpus`` and ``rpc``
    anew.

    Raises what ``fit`` raises.
    """
    with one_load(Ask.of_a_load(parameters), os.fsdecode(model), worker, on_log) as load:
        return load.worker.measure(str(load.model.path), load.params, reserve=True)


@checked_worker_call(Estimating)
def estimate(
    model: Path,
    *,
    live_tokens: int | None = None,
    on_log: Callable[[str], None] | None = None,
    worker: Worker | None = None,
    **parameters: Unpack[Estimating],
) -> Price:
    """The time that a request is estimated to take with exactly these parameters, and the memory that they take.

    ``parameters`` and ``worker`` are those of ``measure``. The request is one of ``prompt`` tokens and ``generate``
    more, by default 2048 and 512, or what the context holds. ``live_tokens``: tokens in the cache when generation is
    priced, by default what the request has there on average. ``load_mode`` is ``none`` unless it is set, as in plans.
    ``host_bandwidth``: bytes per second, or ``60GB/s``, in place of what this machine was measured to read, or of the
    default for a described one; ``rpc_bandwidth`` the same of remote devices. Its ``sources`` say where each is from.

    Raises what ``fit`` raises.
    """
    ask = Ask.of_a_load(parameters)
    check_split_mode(ask.load.split_mode)
    with one_load(ask, os.fsdecode(model), worker, on_log) as load:
        context = context_of_a_sequence(load.params, load.model.n_ctx_train or Workload.prompt + Workload.generate)
        workload = workload_of(ask.prompt, ask.generate, context, is_set=bool(load.params.n_ctx))
        check_live_tokens(live_tokens, context)
        breakdown, layout = load.measured()
        every = load.worker.devices() if breakdown.devices else ()
        infos = choose(every, breakdown.devices)
        speeds = device_speeds(infos, every, ask.virtual, load.worker.speed, ask.remote_bandwidths)
        return price_any_split(
            facts_of(load.model),
            layout,
            load.params,
            breakdown,
            Speeds(
                breakdown.devices,
                tuple(speeds[info.name] for info in infos),
                tuple(info.free for info in infos),
                speed_of_host(ask.host_bandwidth, is_described=ask.is_described, virtual=ask.virtual),
                tuple(info.largest_tensor for info in infos),
            ),
            pinned_by(load.params, load.model, infos, every, load.worker.match),
            workload,
            live_tokens,
        )
