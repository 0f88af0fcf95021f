from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from fitter.errors import PlanError
from fitter.llama.types import Breakdown, DeviceInfo, Loaded, Params, Row
from fitter.output.documents.checked_documents import VERIFICATION
from fitter.planning.checked.verification import compare, verify
from fitter.planning.plan.plan import Plan, Problem
from fitter.planning.plan.verified import MemoryUse, Verification
from fitter.planning.request.summary import PoolUse
from tests.support.cases import cases
from tests.support.plans import GIB, MIB, make_plan, shared_use

PLAN = make_plan(Params(n_ctx=4096, devices=("CUDA0",)), devices=["CUDA0"], virtual=False)
USED = (2048 + 256 + 100) * MIB
HOST_USED = 320 * MIB


def device(free: int = 8 * GIB, name: str = "CUDA0", description: str = "Card of CUDA0") -> DeviceInfo:
    return DeviceInfo(name, description, "gpu", "CUDA", 8 * GIB, free)


class Loader:
    """Takes what was predicted and so much more, of devices that are as full as they are said to be."""

    def __init__(self, *before: DeviceInfo, after: int = 0, compute: int = 0, model: int = 0) -> None:
        self.before, self.after = before or (device(),), after
        cuda, cpu = PLAN.breakdown.rows
        self.rows = (replace(cuda, compute=cuda.compute + compute, model=cuda.model + model), cpu)
        self.loaded: list[tuple[Path, Params]] = []

    def memory(self) -> tuple[DeviceInfo, ...]:
        return self.before

    def load(self, path: Path, params: Params) -> Loaded:
        self.loaded.append((path, params))
        return Loaded(Breakdown(self.rows, ("CUDA0",), 4096), (device(self.after),))


def run(loader: Loader, tolerance: int = 0, plan: Plan = PLAN, host: int = 64 * GIB) -> Verification:
    return verify(plan, Path("model.gguf"), loader, lambda: host, tolerance)


def test_every_byte_as_predicted() -> None:
    loader = Loader(after=8 * GIB - USED - 300 * MIB)
    found = run(loader)
    assert loader.loaded == [(Path("model.gguf"), PLAN.params)]
    assert found.holds and found.fits and not found.differences
    assert found.memory == (
        MemoryUse("CUDA0", 8 * GIB, 8 * GIB - USED - 300 * MIB, USED),
        MemoryUse("host", 64 * GIB, 64 * GIB, HOST_USED),
    )
    assert [use.unaccounted for use in found.memory] == [300 * MIB, None]


@pytest.mark.parametrize(
    ("more", "tolerance", "holds"),
    [(1, 0, False), (1, 1, True), (2, 1, False), (0, 0, True), (-1, 0, True), (-MIB, 0, True)],
)
@pytest.mark.parametrize("kind", ["model", "compute"])
def test_the_tolerance_is_for_what_is_more(kind: str, more: int, tolerance: int, holds: bool) -> None:
    found = run(Loader(**{kind: more}), tolerance)
    assert found.holds is holds
    assert [(each.buffer_type, each.kind, each.more) for each in found.differences] == (
        [("CUDA0", kind, more)] if more else []
    )
    assert bool(found.exceeding) is not holds


def test_a_buffer_type_that_one_side_lacks() -> None:
    repack = Row("CPU_REPACK", "CPU", True, 7, 0, 0)
    cpu = Row("CPU", None, True, 1, 2, 3)
    rows = compare([cpu], Breakdown((repack,), (), 4096))
    assert [(each.buffer_type, each.kind, each.predicted, each.real) for row in rows for each in row.differences] == [
        ("CPU_REPACK", "model", 0, 7),
        ("CPU", "model", 1, 0),
        ("CPU", "context", 2, 0),
        ("CPU", "compute", 3, 0),
    ]


def test_a_plan_that_does_not_fit_is_not_loaded() -> None:
    problem = Problem("CUDA0", 5, "too little")
    loader = Loader()
    found = run(loader, plan=replace(PLAN, problems=(problem,)))
    assert not loader.loaded
    assert (found.fits, found.holds, found.problems) == (False, False, (problem,))
    document = VERIFICATION.write(found)
    assert (document["fits"], document["holds"], document["host"]) == (False, None, None)


@cases(
    (USED, HOST_USED, []),
    (USED - 1, HOST_USED, [("CUDA0", 1)]),
    (USED, HOST_USED - 3, [("host", 3)]),
    (0, 0, [("CUDA0", USED), ("host", HOST_USED)]),
)
def test_a_plan_that_fits_no_more_is_not_loaded(free: int, host: int, missing: list[tuple[str, int]]) -> None:
    loader = Loader(device(free))
    found = run(loader, host=host)
    assert [(problem.device, problem.missing) for problem in found.problems] == missing
    assert bool(loader.loaded) is not bool(missing)
    assert found.holds is not bool(missing)


@cases((0, []), (GIB, []), (GIB + 1, [("CUDA0+host", 1)]))
def test_a_plan_that_its_pool_has_no_room_for_any_more(lost: int, missing: list[tuple[str, int]]) -> None:
    used = USED + HOST_USED
    pool = PoolUse("CUDA0+host", 8 * GIB, used + GIB, GIB, used, ("CUDA0", "host"))
    plan = replace(PLAN, host=replace(PLAN.host, free=4 * GIB), pools=(pool,))
    found = run(Loader(), plan=plan, host=4 * GIB - lost)
    assert [(problem.device, problem.missing) for problem in found.problems] == missing


def test_what_shares_the_memory_is_neither_loaded_nor_needed() -> None:
    plan = replace(PLAN, devices=(replace(PLAN.devices[0], shared=GIB),), shared=(shared_use(CUDA0=1024),))
    found = run(Loader(device(USED)), plan=plan)
    assert found.holds and found.shared == plan.shared


def test_what_shares_the_host_is_not_needed_there_either() -> None:
    plan = replace(PLAN, host=replace(PLAN.host, shared=GIB))
    assert run(Loader(), plan=plan, host=HOST_USED).holds
    (problem,) = run(Loader(), plan=plan, host=HOST_USED - 1).problems
    assert (problem.device, problem.missing) == ("host", 1)


@cases(
    ([device(name="CUDA1")], r"for CUDA0 \(Card of CUDA0\), but llama.cpp has CUDA1 here"),
    ([device(description="RTX 5090")], "the plan's CUDA0 is 'Card of CUDA0', but here it is 'RTX 5090'"),
)
def test_devices_that_are_not_here(here: list[DeviceInfo], message: str) -> None:
    loader = Loader(*here)
    with pytest.raises(PlanError, match=message):
        run(loader)
    assert not loader.loaded
