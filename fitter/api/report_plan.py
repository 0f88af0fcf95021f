"""``fitter.report``: the HTML report of a plan, with a map of its layers and plans for other contexts."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from fitter import api
from fitter.api.call_worker import fetch
from fitter.api.checked_call import checked_call
from fitter.errors import FitterError, TimeLimitError
from fitter.llama.client import DEFAULT_TIMEOUT, Worker
from fitter.machine.gpu import virtual_devices
from fitter.model.header import Model, open_model
from fitter.parameters.table import DEFAULTS, AnyPath
from fitter.planning.checked.verification import check_same_model
from fitter.planning.plan.layer_map import LayerMap, map_of, overridden
from fitter.planning.plan.plan import Plan, resolved
from fitter.planning.request.constraints import context_of_a_sequence
from fitter.planning.request.request import Progress
from fitter.planning.request.summary import ModelSummary
from fitter.planning.tables.parameter_rows import ContextPoint, contexts_to_try, point_of

SECONDS = 20.0
"""Seconds after which no further context is planned."""
_OWN = ("on_progress", "on_log", "timeout", "n_ctx", "time_limit")


@dataclass(frozen=True)
class ReportExtras:
    """The parts of a report that a plan itself does not have."""

    layer_map: LayerMap | None = None
    """The device of each layer; ``None`` if unknown."""
    contexts: tuple[ContextPoint, ...] = ()
    """Plans for other contexts and the plan itself, by context; empty if not requested."""
    notes: tuple[str, ...] = ()
    """Sentences that name each missing part and its reason."""


def beside(
    plan: Plan,
    model: AnyPath | None = None,
    *,
    with_contexts: bool = True,
    seconds: float = SECONDS,
    on_progress: Callable[[Progress], None] | None = None,
) -> ReportExtras:
    """Ask llama.cpp for the layer map of ``plan``, and plan other contexts.

    The map takes one dummy load. Other contexts are planned with the keywords of ``plan``; a plan from a file has none,
    so its report has no curve. A model that is gone or does not load becomes a note.

    Args:
        plan: The plan.
        model: Its file, if not at the plan's path.
        with_contexts: Whether to plan other contexts.
        seconds: Time after which no further context is planned.
        on_progress: Called for each context.
    """
    words = plan.fit_keywords
    where = os.fsdecode(plan.model.path if model is None else model)
    timeout = words.get("timeout") or DEFAULT_TIMEOUT
    say = on_progress or (lambda _: None)
    try:
        fetch(where, timeout)
        with Worker(
            virtual_devices(words.get("gpus") or ()), timeout=timeout, llama_cpp=words.get("llama_cpp")
        ) as worker:
            opened = open_model(where, worker.header)
            check_same_model(plan.model, ModelSummary.of(opened))
            layers = layer_map(plan, opened, worker)
            contexts, notes = (_contexts(plan, where, opened, worker, seconds, say)) if with_contexts else ((), ())
    except FitterError as error:
        return ReportExtras(notes=(f"where each layer is cannot be shown: {error}",))
    if layers is None:
        notes = (_why_no_map(plan), *notes)
    return ReportExtras(layers, contexts, notes)


@checked_call()
def report(
    plan: Plan,
    model: AnyPath | None = None,
    *,
    contexts: bool = True,
    on_progress: Callable[[Progress], None] | None = None,
) -> str:
    """Write the report of a plan: one HTML page that needs no network.

    It shows each device's memory, the device of each layer, the rejected alternatives, and the arguments for each
    program. llama.cpp is asked again; what it cannot answer is missing, and the page says so.

    Args:
        plan: The plan.
        model: Its file, if not at the plan's path.
        contexts: Whether to plan other contexts too, for 20 seconds at most.
        on_progress: Called for each context.

    Raises:
        LibraryError: A package of the extra ``report`` is missing.
    """
    from fitter.output.pages.page import check_installed
    from fitter.output.pages.report_page import plan_page

    check_installed()
    extras = beside(plan, model, with_contexts=contexts, on_progress=on_progress)
    return plan_page(plan, extras.layer_map, extras.contexts, extras.notes)


def layer_map(plan: Plan, model: Model, worker: Worker) -> LayerMap | None:
    """Map the layers of ``plan`` to devices.

    Args:
        plan: The plan.
        model: Its model.
        worker: The worker that makes the dummy load.

    Returns:
        The map; ``None`` where several devices share a tensor.

    Raises:
        FitterError: As ``Worker.layout`` raises it.
    """
    matches = worker.match(overridden(plan), [tensor.name for tensor in model.tensors])
    layout = worker.layout(model.skeleton, resolved(plan))
    return map_of(plan, model, layout, matches)


def _why_no_map(plan: Plan) -> str:
    if plan.params.split_mode in ("layer", "none"):
        return "where each layer is cannot be shown: the model's tensors do not add up to what llama.cpp measured"
    return f"with -sm {plan.params.split_mode} every layer is on several devices, so there is no map of the layers"


def _contexts(
    plan: Plan, where: str, model: Model, worker: Worker, seconds: float, say: Callable[[Progress], None]
) -> tuple[tuple[ContextPoint, ...], tuple[str, ...]]:
    """Plan other contexts; return all points with the plan's own, and notes."""
    if not plan.fit_keywords:
        return (), ("other contexts are not shown: the plan is from a file, which does not say what was asked for",)
    words = {name: value for name, value in plan.fit_keywords.items() if name not in _OWN and value is not None}
    own_point = point_of(plan)
    streams = 1 if plan.params.kv_unified else plan.params.n_seq_max
    smallest = words.get("fit_ctx") or DEFAULTS["fit_ctx"]
    if plan.turns is not None:
        smallest = max(smallest, plan.turns.session.longest)
    wanted = contexts_to_try(model.n_ctx_train, streams, smallest, own_point.n_ctx)
    points = [own_point]
    notes = []
    end = time.monotonic() + seconds
    for number, n_ctx in enumerate(wanted, 1):
        if (rest := end - time.monotonic()) < 1:
            notes.append(f"{len(wanted) - number + 1} larger contexts were not planned, for want of time")
            break
        say(Progress(worker.dummy_loads, f"planning with a context of {n_ctx}, {number} of {len(wanted)}"))
        request = _request(plan, n_ctx)
        points.append(_plan_context(where, n_ctx, {**request, **words, "worker": worker, "time_limit": rest}))
    return tuple(sorted(points, key=lambda point: point.n_ctx)), tuple(notes)


def _request(plan: Plan, n_ctx: int) -> dict[str, int | None]:
    """Return the keywords for the request of a plan whose context the fit chose, if ``n_ctx`` tokens hold it.

    A context that is set would be compared at a request of its own.
    """
    is_open = all(plan.fit_keywords.get(name) is None for name in ("n_ctx", "workload", "users"))
    if not is_open or plan.estimate is None:
        return {}
    workload = plan.estimate.workload
    fits = workload.prompt + workload.generate <= context_of_a_sequence(replace(plan.params, n_ctx=n_ctx), n_ctx)
    # a model that only reads generates nothing
    return {"prompt": workload.prompt, "generate": workload.generate or None} if fits else {}


def _plan_context(where: str, n_ctx: int, words: Mapping[str, Any]) -> ContextPoint:
    try:
        point = point_of(api.fit(where, n_ctx=n_ctx, **words))
        if point.n_ctx >= n_ctx:
            return replace(point, n_ctx=n_ctx)
        # a concession made the context smaller than this point's
        message = f"only {point.n_ctx} tokens do"
    except TimeLimitError:
        message = "nothing that fits was found in time"
    except FitterError as error:
        message = str(error)
    return ContextPoint(n_ctx, False, 0, 0, 0, None, None, message)
