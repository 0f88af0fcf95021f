"""Levers: what a fit may give up, where the user lets it, so that a model fits or is faster.

Each lever allows some changes of the request. They are tried one after the other, each on top of what has won so far,
those first that cost nothing in quality; a change stays where the plan that llama.cpp then measures is better, and in
the end where it is not as good without it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fitter.llama.types import Params
from fitter.planning.placing.layer_sizes import HOST
from fitter.planning.pricing.objective import does_as_well, justifies_concession, objective_seconds
from fitter.planning.pricing.pricing import Price
from fitter.planning.pricing.trial import Trial, missing_of
from fitter.planning.request.context_limit import Excess
from fitter.planning.request.request import Request
from fitter.planning.speed.explain import Bound, Choice

MIN_UBATCH = 64
"""The smallest micro batch that is tried: with less than 32 tokens no device computes with weights of the host."""


@dataclass(frozen=True)
class Change:
    """What one lever makes of a request; of changes with the same ``kind`` only one is made.

    ``params`` pairs fields of ``Params`` with their new value. Without any the context that the user fixed may shrink.
    """

    kind: str
    params: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True)
class Candidate:
    """The best trial of a changed request, and what it takes in time where that is known, with why it was chosen.

    ``excess`` is what makes the context too large that the request asks for, where the trial has the largest there is.
    ``notes`` are to be said of the plan.
    """

    request: Request
    trial: Trial
    price: Price | None = None
    choices: tuple[Choice, ...] = ()
    bound: Bound | None = None
    excess: Excess | None = None
    notes: tuple[str, ...] = ()

    @property
    def seconds(self) -> float | None:
        """The objective, ``None`` where nothing is priced."""
        return None if self.price is None else objective_seconds(self.request, self.price.estimate)

    @property
    def priced(self) -> Trial:
        """The trial at the price of the plan, to compare it by."""
        return replace(self.trial, seconds=self.seconds)


def changes(request: Request) -> tuple[Change, ...]:
    """The changes that the levers of ``request.allow`` stand for, in the order in which to try them.

    What the user set (``request.fixed``) is left alone, but for a context with the lever ``context``. A KV cache is
    changed only if K and V are then of one type, which is what kernels of flash attention are for.
    """
    params, allow = request.params, request.allow
    found = []
    if "ubatch" in allow and "n_ubatch" not in request.fixed:
        size = min(params.n_ubatch, params.n_batch) // 2
        while size >= MIN_UBATCH:
            found.append(Change("n_ubatch", (("n_ubatch", size),)))
            size //= 2
    if "no-op-offload" in allow and "op_offload" not in request.fixed and params.op_offload and request.devices:
        found.append(Change("op_offload", (("op_offload", False),)))
    for name in ("q8_0", "q4_0"):
        fields = [field for field in ("type_k", "type_v") if field not in request.fixed]
        types = {name if field in fields else getattr(params, field) for field in ("type_k", "type_v")}
        if f"kv-{name}" in allow and fields and types == {name} and params.flash_attn != "off":
            found.append(Change("cache", tuple((field, name) for field in fields)))
    if "context" in allow and "n_ctx" in request.fixed and _smallest_context(request) < params.n_ctx:
        found.append(Change("n_ctx"))
    return tuple(found)


def apply(request: Request, made: tuple[Change, ...]) -> Request:
    """``request`` with changes made to it."""
    for change in made:
        if change.kind == "n_ctx":
            # what is asked for is the most that there may be, and the least still holds the workload
            request = replace(
                request,
                fixed=request.fixed - {"n_ctx"},
                n_ctx_train=request.params.n_ctx // request.n_streams,
                fit_ctx=_smallest_context(request) // request.n_streams,
            )
        else:
            request = replace(request, params=replace(request.params, **dict(change.params)))
    return request


def _smallest_context(request: Request) -> int:
    workload = request.workload
    return max(request.fit_ctx, workload.cached + workload.prompt + workload.generate) * request.n_streams


def improve(
    first: Candidate, attempt: Callable[[Request], Candidate | None], on_better: Callable[[Candidate], None]
) -> Candidate:
    """The best that the allowed levers make of ``first``, which is what is found without them.

    ``attempt`` searches for a changed request, and gives ``None`` where llama.cpp refuses it; ``on_better`` is told of
    what has taken the place of the best so far.
    """
    request, best = first.request, first
    made: tuple[Change, ...] = ()
    others = [first]

    def attempted(tried: tuple[Change, ...]) -> Candidate | None:
        found = attempt(apply(request, tried))
        is_cached = any(change.kind == "cache" for change in tried)
        # a V cache that is quantized needs flash attention, and a K cache is only fast with it
        if found is None or (is_cached and found.trial.breakdown.flash_attn is not True):
            return None
        others.append(found)
        return found

    for change in changes(request):
        if _is_idle(change, best):
            continue
        tried = (*_without(made, change), change)
        found = attempted(tried)
        if found is not None and justifies_concession(
            found.request, found.priced, best.priced, gives_context=change.kind == "n_ctx"
        ):
            made, best = tried, found
            on_better(best)
    for change in made[:-1] if best.trial.fits else ():
        # what a later one makes superfluous is not given up
        fewer = _without(made, change)
        found = attempted(fewer)
        if found is not None and does_as_well(found.priced, best.priced):
            made, best = fewer, found
            on_better(best)
    chosen = _chosen(request, best, others)
    return best if chosen is None else replace(best, choices=(*best.choices, chosen))


def _chosen(request: Request, best: Candidate, others: Sequence[Candidate]) -> Choice | None:
    """What is said of the choice between what was tried, ``None`` where there was nothing else or nothing is priced."""
    said = _said(request, best)
    compared = [found for found in others if _said(request, found) != said]
    if best.seconds is None or not compared:
        return None
    runner_up = min(compared, key=lambda found: math.inf if found.seconds is None else found.seconds)
    return Choice("what is given up", said, best.seconds, _said(request, runner_up), runner_up.seconds)


def _said(request: Request, found: Candidate) -> str:
    return ", ".join(used(request, found)) or "nothing"


def _without(made: tuple[Change, ...], change: Change) -> tuple[Change, ...]:
    return tuple(each for each in made if each.kind != change.kind)


def _is_idle(change: Change, best: Candidate) -> bool:
    """Whether a change cannot make ``best`` any better.

    All but that of the cache make no plan faster that has the whole model on the only device: they leave more memory,
    and it is not in want of it.
    """
    trial, request = best.trial, best.request
    on_host = HOST in (*(target for _, target in trial.placement.moved), *request.pinned.values())
    is_whole = trial.devices and trial.placement.first == 0 and not on_host and trial.params.offload_kqv
    if not trial.fits or not is_whole or change.kind == "cache":
        return False
    if change.kind == "op_offload":
        return True
    is_widest = trial.params.n_ctx >= request.n_ctx_max or "n_ctx" in request.fixed
    return len(request.devices) == 1 and (is_widest or request.objective != "context")


def used(request: Request, found: Candidate) -> tuple[str, ...]:
    """What was given up of ``request`` for ``found``, a short sentence each."""
    asked, trial = request.params, found.trial
    said = [*pulled(request, trial.params)]
    if "n_ctx" in request.fixed and found.excess is None and trial.params.n_ctx != asked.n_ctx:
        said.append(f"context {trial.params.n_ctx} instead of {asked.n_ctx}")
    unpaged = replace(request, host=replace(request.host, paging=False))
    if trial.fits and missing_of(unpaged, trial.breakdown, trial.devices):
        said.append("weights on the host paged from disk")
    return tuple(said)


def pulled(request: Request, params: Params) -> tuple[str, ...]:
    """What ``params`` say, beside the context, in place of what ``request`` asks for."""
    asked = request.params
    said = []
    if params.n_ubatch != asked.n_ubatch:
        said.append(f"n_ubatch {params.n_ubatch} instead of {min(asked.n_ubatch, asked.n_batch)}")
    if not params.op_offload and asked.op_offload:
        said.append("no op_offload")
    if (params.type_k, params.type_v) != (asked.type_k, asked.type_v):
        said.append(f"KV cache {params.type_k}/{params.type_v} instead of {asked.type_k}/{asked.type_v}")
    return tuple(said)
