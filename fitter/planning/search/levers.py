"""Levers: concessions that a fit may make, where the user allows them, so that a model fits or is faster.

Each lever allows some changes of the request. They are tried one after the other, each on top of those that have won so
far; changes that cost no quality come first. A change stays if the plan that llama.cpp then measures is better, and if
in the end the plan without it is not as good.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fitter.llama.types import Layout, Params
from fitter.planning.placing.layer_sizes import HOST
from fitter.planning.pricing.objective import best_of, does_as_well, justifies_concession, objective_seconds
from fitter.planning.pricing.pricing import Price
from fitter.planning.pricing.trial import Trial, missing_of
from fitter.planning.request.context_limit import Excess
from fitter.planning.request.request import Request
from fitter.planning.request.shared import HOST_NAME
from fitter.planning.speed.caches import least_size, pays_on
from fitter.planning.speed.explain import Bound, Choice
from fitter.text import MIB, human

_CACHE_SHARES = (1.0, 0.75, 0.5, 0.25, 0.125)
"""Sizes of a cache of experts, as shares of the room that devices have for experts: smaller ones while they are faster.

Half of it is best for Qwen3 30B-A3B on a 3060, with prompts of 4000 tokens and answers of 256; an eighth for gpt-oss
120B on two RTX 3090."""


@dataclass(frozen=True)
class Change:
    """A change that one lever makes to a request. Only one change of each ``kind`` is made.

    ``params`` pairs fields of ``Params`` with their new values. Without any, the user's context may shrink.
    """

    kind: str
    params: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True)
class Candidate:
    """The best trial of a request, with its price, choices and bound where they are known.

    Attributes:
        excess: why the request's context is too large. The trial then has the largest possible one.
        notes: notes for the plan.
        layout: the sizes that were recorded with the request's parameters, at the smallest context.
    """

    request: Request
    trial: Trial
    price: Price | None = None
    choices: tuple[Choice, ...] = ()
    bound: Bound | None = None
    excess: Excess | None = None
    notes: tuple[str, ...] = ()
    layout: Layout | None = None

    @property
    def seconds(self) -> float | None:
        """The objective, ``None`` where nothing is priced."""
        return None if self.price is None else objective_seconds(self.request, self.price.estimate)

    @property
    def priced(self) -> Trial:
        """The trial with the plan's price, for comparisons."""
        return replace(self.trial, seconds=self.seconds)


def changes(request: Request) -> tuple[Change, ...]:
    """List the changes that ``request.allow`` allows, in the order in which they are tried.

    Parameters that the user set (``request.fixed``) stay, except a context with the lever ``context``. A KV cache is
    changed only if K and V then have one type: kernels of flash attention need that.
    """
    params, allow = request.params, request.allow
    allowed = []
    if "no-op-offload" in allow and "op_offload" not in request.fixed and params.op_offload and request.devices:
        allowed.append(Change("op_offload", (("op_offload", False),)))
    for name in ("q8_0", "q4_0"):
        fields = [field for field in ("type_k", "type_v") if field not in request.fixed]
        types = {name if field in fields else getattr(params, field) for field in ("type_k", "type_v")}
        if f"kv-{name}" in allow and fields and types == {name} and params.flash_attn != "off":
            allowed.append(Change("cache", tuple((field, name) for field in fields)))
    if "context" in allow and "n_ctx" in request.fixed and _smallest_context(request) < params.n_ctx:
        allowed.append(Change("n_ctx"))
    return tuple(allowed)


def expert_caches(request: Request, trial: Trial) -> tuple[Change, ...]:
    """List caches of experts to try, the largest first: for experts that ``trial`` has on the host.

    The largest has the room of all experts on devices, and what is left there. None where nothing was published of such
    devices that a cache makes faster.
    """
    params, facts = request.params, request.facts
    if "moe-cache" not in request.allow or "moe_cache_size" in request.fixed or not trial.placement.n_gpu_layers:
        return ()
    if not pays_on({request.speeds[device.name].kind for device in trial.devices if device.name in request.speeds}):
        return ()
    homes = trial.placement.homes
    moved = {
        f"{item.stem}.{suffix}": target for item, target in trial.placement.moved for suffix in item.suffixes
    } | request.pinned
    sizes = {True: 0, False: 0}
    for layer, home in zip(facts.layers, homes, strict=False):
        for tensor in layer.tensors:
            if tensor.experts:
                sizes[moved.get(tensor.name, home) != HOST] += tensor.bytes
    left = sum(max(0, device.target - trial.breakdown.on(device.name).used) for device in trial.devices)
    room = min(sizes[True] + left, sizes[True] + sizes[False]) if sizes[False] and params.split_mode != "tensor" else 0
    able = (int(share * room) // MIB * MIB for share in _CACHE_SHARES)
    context = ("n_ctx", trial.params.n_ctx)
    return tuple(Change("moe_cache_size", (("moe_cache_size", n), context)) for n in able if n >= least_size(facts) > 0)


def apply(request: Request, made: tuple[Change, ...]) -> Request:
    """Make the changes to ``request``."""
    for change in made:
        if change.kind == "n_ctx":
            # from the context that the workload needs, up to the user's
            request = replace(
                request,
                fixed=request.fixed - {"n_ctx"},
                n_ctx_train=request.params.n_ctx // request.n_streams,
                fit_ctx=_smallest_context(request) // request.n_streams,
            )
        else:
            fixed = request.fixed | {"n_ctx"} if "n_ctx" in dict(change.params) else request.fixed
            request = replace(request, params=replace(request.params, **dict(change.params)), fixed=fixed)
    return request


def _smallest_context(request: Request) -> int:
    workload = request.workload
    return max(request.fit_ctx, workload.cached + workload.prompt + workload.generate) * request.n_streams


def improve(first: Candidate, attempt: Callable[[Request], Candidate | None]) -> Candidate:
    """Improve ``first``, the plan without concessions, by the allowed levers.

    Args:
        attempt: searches for a changed request; returns ``None`` where llama.cpp refuses it.
    """
    request, best = first.request, first
    made: tuple[Change, ...] = ()
    others = [first]

    def attempted(trial_changes: tuple[Change, ...]) -> Candidate | None:
        candidate = attempt(apply(request, trial_changes))
        has_cache = any(change.kind == "cache" for change in trial_changes)
        # a quantized V cache needs flash attention, and a quantized K cache is only fast with it
        if candidate is None or (has_cache and candidate.trial.breakdown.flash_attn is not True):
            return None
        others.append(candidate)
        return candidate

    def tried(change: Change, *, for_context: bool = False) -> Candidate | None:
        nonlocal best, made
        if _is_idle(change, best):
            return None
        more = (*_without_change(made, change), change)
        candidate = attempted(more)
        if candidate is None:
            return None
        if for_context:
            is_better = _has_better_context(candidate, best)
        else:
            is_context = change.kind == "n_ctx"
            is_better = justifies_concession(candidate.request, candidate.priced, best.priced, gives_context=is_context)
        if is_better:
            made, best = more, candidate
        return candidate

    latest = math.inf
    for change in expert_caches(request, first.trial):
        candidate = tried(change)
        seconds = math.inf if candidate is None or candidate.seconds is None else candidate.seconds
        if candidate is None or seconds > latest:
            # llama.cpp has none, or a smaller one is slower still
            break
        latest = seconds
    if made and "n_ctx" not in request.fixed:
        # with a cache, a longer context may cost little
        tried(replace(made[0], params=made[0].params[:1]), for_context=True)
    for change in changes(request):
        tried(change)
    for change in made[:-1] if best.trial.fits else ():
        # a later change can make an earlier one superfluous
        fewer = _without_change(made, change)
        candidate = attempted(fewer)
        if candidate is not None and does_as_well(candidate.priced, best.priced):
            made, best = fewer, candidate
    chosen = _describe_choice(request, best, others)
    return best if chosen is None else replace(best, choices=(*best.choices, chosen))


def _has_better_context(candidate: Candidate, than: Candidate) -> bool:
    """Whether ``candidate`` has more context than a plan with the same concessions, and takes little longer."""
    is_larger = candidate.trial.params.n_ctx > than.trial.params.n_ctx
    return is_larger and best_of((than.priced, candidate.priced), candidate.request).params == candidate.trial.params


def _describe_choice(request: Request, best: Candidate, others: Sequence[Candidate]) -> Choice | None:
    """Describe the choice of concessions; ``None`` without other candidates or without prices."""

    def text(candidate: Candidate) -> str:
        return ", ".join(concessions(request, candidate)) or "nothing"

    compared = [candidate for candidate in others if text(candidate) != text(best)]
    if best.seconds is None or not compared:
        return None
    runner_up = min(compared, key=lambda other: math.inf if other.seconds is None else other.seconds)
    return Choice("what is given up", text(best), best.seconds, text(runner_up), runner_up.seconds)


def _without_change(made: tuple[Change, ...], change: Change) -> tuple[Change, ...]:
    return tuple(other for other in made if other.kind != change.kind)


def _is_idle(change: Change, best: Candidate) -> bool:
    """Whether a change cannot improve ``best``.

    With the whole model on the only device, only a change of the cache makes a plan faster: the others save memory that
    it does not need.
    """
    trial, request = best.trial, best.request
    on_host = HOST in (*(target for _, target in trial.placement.moved), *request.pinned.values())
    is_whole = trial.devices and trial.placement.first == 0 and not on_host and trial.params.offload_kqv
    if not trial.fits or not is_whole or change.kind == "cache":
        return False
    if change.kind == "op_offload":
        return True
    is_widest = trial.params.n_ctx >= request.n_ctx_max or "n_ctx" in request.fixed
    return len(request.devices) == 1 and (is_widest or not request.is_for_most_context)


def concessions(request: Request, candidate: Candidate) -> tuple[str, ...]:
    """List the concessions of ``candidate`` against ``request``, in words."""
    asked, trial = request.params, candidate.trial
    texts = [*changed_params(request, trial.params)]
    if "n_ctx" in request.fixed and candidate.excess is None and trial.params.n_ctx != asked.n_ctx:
        texts.append(f"context {trial.params.n_ctx} instead of {asked.n_ctx}")
    unpaged = replace(request, host=replace(request.host, paging=False))
    beyond = dict(missing_of(unpaged, trial.breakdown, trial.devices))
    if trial.fits and beyond:
        size = f"{human(beyond[HOST_NAME])} of " if HOST_NAME in beyond else ""
        texts.append(f"{size}weights on the host read from disk for every token that needs them")
    return tuple(texts)


def changed_params(request: Request, params: Params) -> tuple[str, ...]:
    """List the parameters that levers have changed, other than the context, in words."""
    asked = request.params
    texts = []
    if params.moe_cache_size != asked.moe_cache_size:
        texts.append(f"a cache of {params.moe_cache_size // MIB} MiB for experts")
    if not params.op_offload and asked.op_offload:
        texts.append("no op_offload")
    if (params.type_k, params.type_v) != (asked.type_k, asked.type_v):
        texts.append(f"KV cache {params.type_k}/{params.type_v} instead of {asked.type_k}/{asked.type_v}")
    return tuple(texts)
