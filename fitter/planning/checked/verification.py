"""Load a plan for real, and compare llama.cpp's prediction with the real load. Bytes.

Callers pass in the process that loads, so everything here works without a device.
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
