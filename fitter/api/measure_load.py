"""``fitter.measure`` and ``fitter.estimate``: the memory and the time of one load with exact parameters."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from fitter.api.call_worker import one_load
from fitter.api.checked_call import checked_worker_call
from fitter.llama.client import Worker
from fitter.llama.types import Breakdown
from fitter.machine.machine import choose, device_speeds, speed_of_host
from fitter.machine.measured import corrected
from fitter.parameters.table import AnyPath as Path
from fitter.parameters.table import Estimating, Measuring
from fitter.planning.plan.request_of_machine import pinned_by
from fitter.planning.pricing.pricing import Price, Speeds
from fitter.planning.pricing.split_price import price_any_split
from fitter.planning.request.ask import Ask
from fitter.planning.request.constraints import check_live_tokens, check_split_mode, context_of_a_sequence, workload_of
from fitter.planning.speed.cost import Workload
from fitter.planning.speed.model_facts import facts_of

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
    """Measure the memory that llama.cpp takes with exactly these parameters, by one dummy load.

    A row's ``compute`` is the compute buffer of the dummy load, as in llama-fit-params and in plans; its ``reserved``
    is the buffer that a real load reserves. ``Breakdown.real`` has all rows with the real buffers.

    Args:
        model: Path or address of a GGUF file.
        on_log: Called with every line of llama.cpp's log.
        worker: A worker to use for many calls; it stays open, and takes the devices of each call.
        parameters: llama.cpp's own parameters among those of ``fit``, with llama.cpp's defaults (``n_ctx`` 0: the
            model's own; ``n_gpu_layers`` -1: all), and ``load_mtp``, ``n_rs_seq`` and ``n_outputs_max``.

    Returns:
        Bytes by buffer type.

    Raises:
        FitterError: As ``fit`` raises it.
    """
    with one_load(Ask.of_a_load(parameters), os.fsdecode(model), worker, on_log) as load:
        return load.worker.measure(load.model.skeleton, load.params, reserve=True)


@checked_worker_call(Estimating)
def estimate(
    model: Path,
    *,
    live_tokens: int | Sequence[int] | None = None,
    on_log: Callable[[str], None] | None = None,
    worker: Worker | None = None,
    **parameters: Unpack[Estimating],
) -> Price:
    """Estimate the time of a request with exactly these parameters, and measure their memory.

    Args:
        model: Path or address of a GGUF file.
        live_tokens: Tokens in the cache while a token is generated; by default the request's average. A list of them
            leaves the average, and gives ``Price.depths`` a speed for each.
        on_log: Called with every line of llama.cpp's log.
        worker: A worker to use for many calls; it stays open, and takes the devices of each call.
        parameters: As for ``measure``, with the request's ``prompt`` (2048, or with ``n_ctx`` the geometric mean of
            2048 and the context, at most a quarter of it) and ``generate`` (512) tokens, or what the context holds, the
            number of ``users`` who send one at once, and the bandwidths of host and remote devices. ``load_mode`` is
            ``none`` by default, as in plans.

    Returns:
        Seconds and bytes; ``Price.sources`` says where each speed comes from.

    Raises:
        FitterError: As ``fit`` raises it.
    """
    ask = Ask.of_a_load(parameters)
    check_split_mode(ask.load.split_mode)
    with one_load(ask, os.fsdecode(model), worker, on_log) as load:
        context = context_of_a_sequence(load.params, load.model.n_ctx_train or Workload.prompt + Workload.generate)
        is_set = bool(load.params.n_ctx)
        is_deep = is_set and ask.users is None
        one = workload_of(ask.prompt, ask.generate, context, is_set=is_set, is_deep=is_deep)
        workload = replace(one, users=ask.users or 1)
        depths = () if live_tokens is None or isinstance(live_tokens, int) else tuple(live_tokens)
        average = live_tokens if isinstance(live_tokens, int) else None
        for each in (average, *depths):
            check_live_tokens(each, context)
        breakdown, layout = load.measured()
        every = load.worker.devices() if breakdown.devices else ()
        infos = choose(every, breakdown.devices)
        speeds = device_speeds(infos, every, ask.virtual, load.worker.speed, ask.remote_bandwidths)
        host = speed_of_host(ask.host_bandwidth, is_described=ask.is_described, virtual=ask.virtual)
        if not ask.is_described:
            speeds, host = corrected(speeds, host, infos, load.worker.build().key)
        return price_any_split(
            facts_of(load.model),
            layout,
            load.params,
            breakdown,
            Speeds(
                breakdown.devices,
                tuple(speeds[info.name] for info in infos),
                tuple(info.free for info in infos),
                host,
                tuple(info.largest_tensor for info in infos),
            ),
            pinned_by(load.params, load.model, infos, every, load.worker.match),
            workload,
            average,
            depths,
        )
