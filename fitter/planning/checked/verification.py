"""A plan loaded for real: what llama.cpp said that it would take, beside what it takes. Bytes.

What loads is handed in, so that everything here works without a device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from fitter import programs
from fitter.errors import PlanError, UsageError
from fitter.llama.types import Breakdown, DeviceInfo, Row
from fitter.planning.checked.calibration import Process
from fitter.planning.plan.plan import Plan, check_can_run, resolved
from fitter.planning.plan.verified import MemoryUse, Verification, VerifiedRow
from fitter.planning.request.summary import DeviceUse, HostUse, ModelSummary, PoolUse, Problem
from fitter.programs.finding import NAME as SERVER


def loaded_by(program: str | None, server: object | None, prompts: int | None) -> str:
    """The program that is to load the plan. Raises ``UsageError`` for one that cannot be verified with."""
    chosen = SERVER if program is None and server is not None else program or programs.chosen("llama-cpp-python")
    if chosen in ("llama-cli", "llama-bench"):
        raise UsageError(
            f"fitter verify cannot start {chosen}: use --for {SERVER}, or --for any to load with llama.cpp's library"
        )
    for option, value in (("--server", server), ("--prompts", prompts)):
        if value is not None and chosen != SERVER:
            raise UsageError(f"{option} is for --for {SERVER}: give that, or leave {option} out")
    return chosen


def check_same_model(planned: ModelSummary, found: ModelSummary) -> None:
    """Raise ``UsageError`` where a plan is of another model than the one that was found."""
    for what in ("architecture", "name", "bytes"):
        wanted, here = getattr(planned, what), getattr(found, what)
        if wanted != here:
            raise UsageError(f"the plan is for another model than {found.path}: its {what} is {wanted}, not {here}")


def verify(plan: Plan, path: Path, loader: Process, host_free: Callable[[], int], tolerance: int) -> Verification:
    """Load ``path`` in ``loader``, a fresh process on the real devices, as ``plan`` says, and compare.

    ``host_free`` says what the host has available. A plan that does not fit, or not any more, is not loaded. Raises
    ``PlanError`` where a device of the plan is not here, or its devices are virtual.
    """
    check_can_run(plan)
    params = resolved(plan)
    answer = Verification(plan.model, params, tolerance, shared=plan.shared)
    if plan.problems:
        return replace(answer, problems=plan.problems)
    # what has nothing of the model need not be here
    uses = tuple(use for use in plan.devices if use.name in (params.devices or ()))
    # The process uses the devices from this question on: what it takes of them for itself is gone before and after.
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
    """Every buffer type that either side has, in the order of the real load."""
    expected = {(row.buffer_type, row.device): row.real for row in predicted}
    found = {(row.buffer_type, row.device): row for row in real.rows}
    return tuple(
        VerifiedRow(expected.get(key) or _empty(found[key]), found.get(key) or _empty(expected[key]))
        for key in dict.fromkeys([*found, *expected])
    )


def _empty(row: Row) -> Row:
    return replace(row, model=0, context=0, compute=0)


def check_devices(uses: Sequence[DeviceUse], here: Sequence[DeviceInfo]) -> None:
    """Raise ``PlanError`` where a device of the plan is not here, or is another one."""
    known = {device.name: device.description for device in here}
    names = ", ".join(known) or "no device"
    for use in uses:
        if use.name not in known:
            raise PlanError(
                f"the plan is for {use.name} ({use.description}), but llama.cpp has {names} here: fit again"
            )
        if use.description != known[use.name]:
            raise PlanError(
                f"the plan's {use.name} is '{use.description}', but here it is '{known[use.name]}': fit again"
            )


def problems_now(
    uses: Sequence[DeviceUse],
    host: HostUse,
    here: Sequence[DeviceInfo],
    host_free: int,
    pools: Sequence[PoolUse] = (),
) -> Iterator[Problem]:
    """What the plan needs and is not free at this moment: loading it would take others' memory, or fail."""
    limits = [(use.name, use.used - use.shared, free_of(here, use.name)) for use in uses]
    limits.append(("host", host.used - host.shared, host_free))
    for pool in pools:
        # what is not free of it any more is what the host lost meanwhile
        beside = host.shared + sum(use.shared for use in uses if use.name in pool.members)
        limits.append((pool.name, pool.used - beside, pool.free - max(0, (host.free or 0) - host_free)))
    for name, needed, free in limits:
        if needed > free:
            message = f"the plan takes {needed} bytes on {name}, but only {free} are free there now: fit again"
            yield Problem(name, needed - free, message)


def free_of(devices: Sequence[DeviceInfo], name: str) -> int:
    """Free bytes of one of ``devices``."""
    return next(device.free for device in devices if device.name == name)
