"""Compare a plan with a real load, by llama.cpp's library or by a llama-server, whose memory may grow. Bytes; seconds.

Callers pass in the process that loads, so everything here works without a device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fitter import programs
from fitter.errors import PlanError, UsageError
from fitter.llama.types import Breakdown, DeviceInfo, Row
from fitter.planning.checked.calibration import Process
from fitter.planning.plan.plan import Plan, check_can_run, resolved
from fitter.planning.plan.verified import (
    KINDS,
    Kind,
    LaterUse,
    MemoryGrowth,
    MemoryUse,
    ServerUse,
    Verification,
    VerifiedRow,
)
from fitter.planning.request.summary import DeviceUse, HostUse, ModelSummary, PoolUse, Problem
from fitter.programs.finding import NAME as SERVER
from fitter.programs.server_log import Buffer, CachedPrompt, Figure, Said, is_host, total

TYPE_CHECKING = False
if TYPE_CHECKING:
    # a report needs no running server
    from fitter.programs.finding import ServerProgram
    from fitter.programs.running_server import Resident
    from fitter.programs.server_requests import Fed


def loaded_by(program: str | None, server: object | None, prompts: int | None) -> str:
    """Choose the program that loads the plan. Raises ``UsageError`` for a program that cannot be verified."""
    chosen = SERVER if program is None and server is not None else program or programs.chosen("llama-cpp-python")
    if chosen in ("llama-cli", "llama-bench") or programs.PROGRAMS[chosen].title:
        raise UsageError(
            f"fitter verify cannot start {chosen}: use --for {SERVER}, or --for any to load with llama.cpp's library"
        )
    for option, value in (("--server", server), ("--prompts", prompts)):
        if value is not None and chosen != SERVER:
            raise UsageError(f"{option} is for --for {SERVER}: give that, or leave {option} out")
    return chosen


def check_same_model(planned: ModelSummary, opened: ModelSummary) -> None:
    """Raise ``UsageError`` if the plan is for another model."""
    for what in ("architecture", "name", "bytes"):
        wanted, here = getattr(planned, what), getattr(opened, what)
        if wanted != here:
            raise UsageError(f"the plan is for another model than {opened.path}: its {what} is {wanted}, not {here}")


def verify(plan: Plan, path: Path, loader: Process, host_free: Callable[[], int], tolerance: int) -> Verification:
    """Load a plan for real, and compare.

    Args:
        plan: The plan; one that does not fit, or no longer fits, is not loaded.
        path: Its model.
        loader: A fresh process on the real devices.
        host_free: Returns the host's available bytes.
        tolerance: Bytes by which a number may exceed its prediction.

    Raises:
        PlanError: A device of the plan is missing or virtual.
    """
    check_can_run(plan)
    params = resolved(plan)
    answer = Verification(plan.model, params, tolerance, shared=plan.shared)
    if plan.problems:
        return replace(answer, problems=plan.problems)
    # devices without a part of the model may be missing
    uses = tuple(use for use in plan.devices if use.name in (params.devices or ()))
    # from this question on the process uses the devices, so its own memory counts before and after
    before = loader.memory()
    check_devices(uses, before)
    host_before = host_free()
    if problems := tuple(problems_now(uses, plan.host, before, host_before, plan.pools)):
        return replace(answer, problems=problems)
    loaded = loader.load(path, params)
    host_after = host_free()
    real = loaded.breakdown
    memory = [
        MemoryUse(use.name, free_of(before, use.name), free_of(loaded.devices, use.name), real.on(use.name).used)
        for use in uses
    ]
    memory.append(MemoryUse("host", host_before, host_after, real.host.used))
    return replace(answer, rows=compare(plan.breakdown.rows, real), memory=tuple(memory))


def compare(predicted: Sequence[Row], real: Breakdown) -> tuple[VerifiedRow, ...]:
    """Compare every buffer type of both sides, in the order of the real load."""
    expected = {(row.buffer_type, row.device): row.real for row in predicted}
    loaded = {(row.buffer_type, row.device): row for row in real.rows}
    return tuple(
        VerifiedRow(expected.get(key) or _empty(loaded[key]), loaded.get(key) or _empty(expected[key]))
        for key in dict.fromkeys([*loaded, *expected])
    )


def _empty(row: Row) -> Row:
    return replace(row, model=0, context=0, compute=0)


def check_devices(uses: Sequence[DeviceUse], here: Sequence[DeviceInfo]) -> None:
    """Raise ``PlanError`` if a device of the plan is missing, or is another device."""
    descriptions = {device.name: device.description for device in here}
    names = ", ".join(descriptions) or "no device"
    for use in uses:
        if use.name not in descriptions:
            raise PlanError(
                f"the plan is for {use.name} ({use.description}), but llama.cpp has {names} here: fit again"
            )
        if use.description != descriptions[use.name]:
            raise PlanError(
                f"the plan's {use.name} is '{use.description}', but here it is '{descriptions[use.name]}': fit again"
            )


def problems_now(
    uses: Sequence[DeviceUse],
    host: HostUse,
    here: Sequence[DeviceInfo],
    host_free: int,
    pools: Sequence[PoolUse] = (),
) -> Iterator[Problem]:
    """Yield the devices and pools with less free memory now than the plan needs."""
    limits = [(use.name, use.used - use.shared, free_of(here, use.name)) for use in uses]
    limits.append(("host", host.used - host.shared, host_free))
    for pool in pools:
        # the pool has lost the memory that the host has lost meanwhile
        beside = host.shared + sum(use.shared for use in uses if use.name in pool.members)
        limits.append((pool.name, pool.used - beside, pool.free - max(0, (host.free or 0) - host_free)))
    for name, needed, free in limits:
        if needed > free:
            message = f"the plan takes {needed} bytes on {name}, but only {free} are free there now: fit again"
            yield Problem(name, needed - free, message)


def free_of(devices: Sequence[DeviceInfo], name: str) -> int:
    """Return the free bytes of a device."""
    return next(device.free for device in devices if device.name == name)


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
