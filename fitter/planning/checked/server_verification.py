"""Compare the log and the memory of a llama-server with the plan that it runs, and its growth. Bytes; seconds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from fitter.llama.types import Row
from fitter.planning.plan.plan import Plan
from fitter.planning.plan.verified import KINDS, Kind, LaterUse, MemoryGrowth, ServerUse, VerifiedRow
from fitter.programs.finding import ServerProgram
from fitter.programs.prompts import Fed
from fitter.programs.resident import Resident
from fitter.programs.server_log import Buffer, CachedPrompt, Figure, Said, is_host, total

DRAFTS = ("draft", "mtp")
"""Kinds of draft models, which have a context of their own in the same server."""


@dataclass(frozen=True)
class Sizes:
    """Functions from tokens of a sequence to bytes that llama.cpp writes; ``None`` if unknown.

    Attributes:
        prompt: The whole state, as in the prompt cache.
        checkpoint: The part that cannot be rolled back.
    """

    prompt: Callable[[int], int] | None = None
    checkpoint: Callable[[int], int] | None = None


def compare_rows(plan: Plan, said: Said) -> tuple[VerifiedRow, ...]:
    """Compare every buffer type of plan and log, and draft models by device.

    Kinds that the log has for no buffer type are ``unsaid`` for all. For mapped weights the log has the mapped part of
    the file, which may include other weights.
    """
    buffers = [buffer for buffer in said.buffers if buffer.context == 0 and buffer.kind in KINDS]
    expected = {row.buffer_type: row.real for row in plan.breakdown.rows}
    kinds = {buffer.kind for buffer in buffers}
    unsaid = tuple(kind for kind in KINDS if kind not in kinds)
    names = dict.fromkeys([*expected, *(buffer.buffer_type for buffer in buffers)])
    rows = [
        _row(name, expected.get(name), [each for each in buffers if each.buffer_type == name], unsaid) for name in names
    ]
    return tuple(row for row in (*rows, *_companion_rows(plan, said)) if row.predicted.used or row.real.used)


def _row(name: str, expected: Row | None, buffers: Sequence[Buffer], unsaid: tuple[Kind, ...]) -> VerifiedRow:
    empty = Row(name, None if is_host(name) else name, is_host(name), 0, 0, 0)
    predicted = expected or empty
    mapped = any(each.is_mapped for each in buffers)
    model, context, compute = (total(each.size for each in buffers if each.kind == kind) for kind in KINDS)
    real = replace(predicted, model=model.bytes, context=context.bytes, compute=compute.bytes, reserved=None)
    rounding = replace(empty, model=model.rounding, context=context.rounding, compute=compute.rounding)
    unsaid = tuple(dict.fromkeys((*unsaid, *(("model",) if mapped else ()))))
    return VerifiedRow(predicted, real, rounding, unsaid)


def _companion_rows(plan: Plan, said: Said) -> Iterator[VerifiedRow]:
    """Compare the second context and its weights, by device."""
    drafts = [use for use in plan.shared if use.kind in DRAFTS]
    drafting = [each for each in said.buffers if each.context > 0 and each.kind in KINDS]
    if not drafts:
        return
    kind = drafts[0].kind
    on = {row.buffer_type: row.device for row in plan.breakdown.rows if not row.is_host}
    expected = {row.device: row for use in drafts for row in use.rows}
    places = dict.fromkeys([*expected, *(on.get(each.buffer_type) for each in drafting)])
    for place in places:
        name = f"{kind} on {place or 'host'}"
        row = replace(expected.get(place) or Row(name, place, place is None, 0, 0, 0), buffer_type=name)
        mine = [replace(each, buffer_type=name) for each in drafting if on.get(each.buffer_type) == place]
        yield _row(name, row, mine, tuple(kind for kind in KINDS if not any(each.kind == kind for each in drafting)))


def server_use(
    plan: Plan,
    server: ServerProgram,
    said: Said,
    fed: Fed,
    most: Resident | None,
    sizes: Sizes,
    growth: tuple[MemoryGrowth, ...] = (),
) -> ServerUse:
    """Collect the memory of ``server`` after the load, and of its process."""
    later = tuple(_later_uses(plan, said, sizes))
    mapped = sum(_mapped(plan, said))
    # a real load may reserve more than the plan's dummy load
    reserved = max(0, plan.breakdown.real.host.used - plan.breakdown.host.used)
    load = plan.host.used - plan.host.later - mapped + reserved
    is_limited = all(each.bytes is not None for each in plan.later)
    cache = said.cache.size.bytes if said.cache else 0
    return ServerUse(
        server.path,
        server.version,
        fed.prompts,
        fed.answered,
        fed.tokens,
        fed.slots,
        fed.refused,
        later,
        resident=None if most is None else most.total,
        of_files=0 if most is None else most.of_files,
        counted=load + cache + said.held.bytes,
        planned=load + plan.host.later if is_limited else None,
        margin=plan.host.margin,
        growth=growth,
        expert_hits=said.lookups.hits if said.lookups else 0,
        expert_misses=said.lookups.misses if said.lookups else 0,
        reallocations=said.reallocations,
    )


def _mapped(plan: Plan, said: Said) -> Iterator[int]:
    """Yield bytes of weights that the plan counts as host memory and the server mapped from a file."""
    mapped = {(min(each.context, 1), each.buffer_type) for each in said.buffers if each.is_mapped}
    for row in plan.breakdown.rows:
        if row.is_host and (0, row.buffer_type) in mapped:
            yield row.model
    if any(context and is_host(name) for context, name in mapped):
        yield sum(row.model for use in plan.shared if use.kind in DRAFTS for row in use.rows if row.device is None)


def _later_uses(plan: Plan, said: Said, sizes: Sizes) -> Iterator[LaterUse]:
    limits = {each.kind: each for each in plan.later}
    if checkpoints := limits.get("checkpoints"):
        one = max(said.checkpoints, key=lambda each: each.size.bytes, default=None)
        tokens = None if one is None else one.tokens
        predicted = None if tokens is None or sizes.checkpoint is None else sizes.checkpoint(tokens)
        size = None if one is None else one.size
        yield _use("checkpoint", said.n_checkpoints, tokens, predicted, size, checkpoints.each)
    if cache := limits.get("prompt cache"):
        largest = max(said.cached, key=lambda each: each.size.bytes, default=None)
        if largest is not None:
            predicted = _predicted(largest, sizes)
            yield _use("prompt", len(said.cached), largest.tokens, predicted, largest.size, cache.bytes)
        prompt_cache = said.cache
        yield _use(
            "prompt cache",
            prompt_cache.prompts if prompt_cache else 0,
            None,
            None,
            prompt_cache.size if prompt_cache else None,
            cache.bytes,
        )


def _predicted(prompt: CachedPrompt, sizes: Sizes) -> int | None:
    """Predict the bytes of ``prompt`` in the cache, with checkpoints as large as one of all its tokens."""
    if sizes.prompt is None or (prompt.checkpoints and sizes.checkpoint is None):
        return None
    one = sizes.checkpoint(prompt.tokens) if sizes.checkpoint else 0
    return sizes.prompt(prompt.tokens) + prompt.checkpoints * one


def _use(
    kind: str, count: int, tokens: int | None, predicted: int | None, size: Figure | None, most: int | None
) -> LaterUse:
    rounding = 0 if size is None else size.rounding
    return LaterUse(kind, count, tokens, predicted, None if size is None else size.bytes, rounding, most)


@dataclass(frozen=True)
class Reading:
    """What was in use at a moment: by device, and ``host`` for the process without what it keeps of prompts.

    ``answered``: prompts with an answer until then.
    """

    answered: int
    at: float
    used: Mapping[str, int]


def growth_of(readings: Sequence[Reading], idle: Reading | None = None) -> tuple[MemoryGrowth, ...]:
    """Compare readings: the first half of the prompts, the second half, and a wait after them.

    A server allocates some memory with its first prompts, and then no more; what grows with every prompt shows in the
    second half.

    Args:
        readings: In order; the first one before any prompt. Without a prompt there is no growth to tell.
        idle: A reading after a wait without prompts.
    """
    if not readings or not readings[-1].answered:
        return ()
    first, last = readings[0], readings[-1]
    middle = next(each for each in readings if each.answered * 2 >= last.answered)
    after = idle or last
    return tuple(
        MemoryGrowth(
            name,
            middle.used[name] - used,
            last.used[name] - middle.used[name],
            last.answered - middle.answered,
            after.used[name] - last.used[name],
            after.at - last.at,
        )
        for name, used in first.used.items()
        if all(name in each.used for each in (middle, last, after))
    )
