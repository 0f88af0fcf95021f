"""Memory with several names in the search: kept within its margin, used to the last token, and what is said of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fitter.errors import UsageError
from fitter.llama.types import Breakdown, Params, Row, TensorInfo
from fitter.planning.placing.placement import Placement
from fitter.planning.plan.pool_use import check_pools, left_for_host, pool_problem, pool_uses, with_host
from fitter.planning.pricing.trial import Trial, missing_of
from fitter.planning.request.pool_margin import (
    beside_host,
    is_unmapped,
    less,
    mapped_between,
    mapped_twice,
    used_of,
    with_what_they_map,
    within_pools,
)
from fitter.planning.request.request import DeviceLimit, PoolLimit, Request
from fitter.planning.request.shared import lacking, lowered
from fitter.planning.request.summary import DeviceUse, HostUse, PoolUse, SharedUse
from fitter.planning.search.load_reserve import reserve_for, with_reserve
from fitter.planning.search.search_order import search
from tests.support.cases import cases, named_cases, stored
from tests.support.synthetic import CARD, DENSE, MIB, SyntheticLlama, SyntheticModel, limits, priced, request
from tests.support.synthetic import MOE_AFTER_DENSE as MOE


def pool(free: int, margin: int = 0, system: str = "cuda", *names: str, carved: int = 0) -> PoolLimit:
    """A pool of ``CUDA0`` and the host with so many MiB."""
    devices = names or ("CUDA0",)
    return PoolLimit(
        "+".join((*devices, "host")), devices, 2 * free * MIB, free * MIB, margin * MIB, carved, system, 100 * MIB
    )


def asked(model: SyntheticModel, device: int, shared: PoolLimit, **keywords: object) -> Request:
    devices = limits(device)
    # the host's memory is that of the pool
    found = request(model, devices, shared.free // MIB, **keywords)  # type: ignore[arg-type]
    return priced(replace(found, pools=(shared,)), model, CARD)


def run(asked: Request, model: SyntheticModel) -> Trial:
    llama = SyntheticLlama(model, asked.devices)
    return search(within_pools(asked), llama.measure, llama.record)


def sum_of(trial: Trial) -> int:
    return sum(row.used for row in trial.breakdown.rows)


@pytest.mark.parametrize("mib", [1500, 1600, 1900, 2100])
@pytest.mark.parametrize("device", [8000, 1900])
def test_the_context_is_as_long_as_the_pool_allows(mib: int, device: int) -> None:
    shared = pool(mib, 50)
    trial = run(asked(DENSE, device, shared), DENSE)
    assert trial.fits and sum_of(trial) <= shared.target
    larger = replace(trial.params, n_ctx=trial.params.n_ctx + 256)
    found = SyntheticLlama(DENSE, trial.devices).measure(larger)
    used = [found.on("CUDA0").used, sum(row.used for row in found.rows)]
    assert used[0] > device * MIB or used[1] > shared.target, "a larger context would have fitted"


def test_weights_do_not_leave_a_device_for_the_same_memory() -> None:
    trial = run(asked(DENSE, 8000, pool(1150)), DENSE)
    assert not trial.fits
    assert dict(trial.missing)["CUDA0+host"] > 0


def test_weights_leave_a_device_that_may_use_too_little() -> None:
    shared = pool(2500)
    trial = run(asked(DENSE, 900, shared), DENSE)
    assert trial.fits and 0 < trial.breakdown.on("CUDA0").model < 900 * MIB
    assert sum_of(trial) <= shared.target


@settings(deadline=None, max_examples=150)
@given(
    st.sampled_from([DENSE, MOE]),
    st.integers(300, 9000),
    st.integers(300, 9000),
    st.integers(0, 600),
    st.sampled_from([{}, {"fixed": ("n_ctx",), "params": Params(n_ctx=8192)}, {"paging": True}]),
    st.sampled_from(["cuda", "metal"]),
)
def test_no_plan_is_beyond_its_pool(
    model: SyntheticModel, device: int, free: int, margin: int, keywords: dict[str, object], system: str
) -> None:
    shared = pool(free, margin, system)
    wanted = asked(model, device, shared, **keywords)
    if shared.target <= 0:
        return
    trial = run(wanted, model)
    simple = replace(wanted.params, n_ctx=(keywords and 8192) or 4096, n_gpu_layers=99, devices=("CUDA0",))
    found = SyntheticLlama(model, wanted.devices).measure(simple)
    host = found.host.used <= free * MIB
    if found.on("CUDA0").used <= device * MIB and sum(row.used for row in found.rows) <= shared.target and host:
        assert trial.fits, "everything on the device fits"
    if trial.fits:
        host_weights = trial.breakdown.host.model if wanted.host.paging and system == "cuda" else 0
        assert sum_of(trial) - host_weights <= shared.target
        assert trial.breakdown.on("CUDA0").used <= device * MIB


def rows(*sizes: tuple[str, str | None, int, int, int]) -> Breakdown:
    found = tuple(
        Row(buffer_type, name, name is None, model * MIB, context * MIB, compute * MIB)
        for buffer_type, name, model, context, compute in sizes
    )
    return Breakdown(found, ("CUDA0",), 4096, True)


WHOLE = rows(("CUDA0", "CUDA0", 900, 50, 20), ("CPU", None, 100, 0, 5))
PARTLY = rows(("CUDA0", "CUDA0", 600, 50, 20), ("CPU", None, 400, 0, 5))
REPACKED = rows(("CUDA0", "CUDA0", 900, 50, 20), ("CPU", None, 20, 0, 5), ("CPU_REPACK", None, 80, 0, 0))


@named_cases(
    # system, measurement, bytes of the file, MiB that are used, mapped twice, whether the file must not be mapped
    ("each once", "metal", WHOLE, 1000, (1075, 0, False)),
    ("embeddings of both sides", "metal", WHOLE, 930, (1005, 70, False)),
    ("a copy where nothing is mapped", "cuda", WHOLE, 930, (1075, 0, False)),
    ("layers on the host", "metal", PARTLY, 930, (1075, 0, True)),
    ("layers on the host without a map", "cuda", PARTLY, 930, (1075, 0, False)),
    ("what was repacked is a copy", "metal", REPACKED, 900, (1055, 20, False)),
    ("more in the file than was loaded", "metal", WHOLE, 2000, (1075, 0, False)),
)
def test_what_is_used_of_a_pool(system: str, found: Breakdown, size: int, expected: tuple[int, int, bool]) -> None:
    shared = pool(2000, 0, system)
    assert (
        used_of(shared, found, size * MIB) // MIB,
        mapped_twice(shared, found, size * MIB) // MIB,
        is_unmapped(shared, found),
    ) == expected


def test_paging_does_not_count_what_is_read_again() -> None:
    assert used_of(pool(2000), PARTLY, 1000 * MIB, paging=True) == 675 * MIB
    assert used_of(pool(2000, 0, "metal"), PARTLY, 1000 * MIB, paging=True) == 1075 * MIB, "a Mac maps all of it"


def test_a_device_counts_on_no_more_than_its_pool() -> None:
    wanted = asked(DENSE, 8000, pool(3000, 100))
    (device,) = within_pools(wanted).devices
    assert (device.target, wanted.devices[0].target) == (2900 * MIB, 8000 * MIB)
    assert within_pools(replace(wanted, pools=())).devices == wanted.devices
    small = asked(DENSE, 1000, pool(3000, 100))
    assert within_pools(small).devices == small.devices


def test_a_device_has_what_the_host_leaves() -> None:
    devices = limits(8000, 5000, 900)
    shared = pool(3000, 100, "cuda", "CUDA0", "CUDA2")
    found = beside_host(devices, [(shared, 450 * MIB)])
    assert [device.target // MIB for device in found] == [2450 * 8000 // 8900, 5000, 2450 * 900 // 8900]
    assert beside_host(devices, [(shared, None)]) == devices
    assert [each.target // MIB for each in beside_host(limits(8000), [(pool(300), 400 * MIB)])] == [-100]


def test_what_is_known_beside_the_model_is_gone_of_the_pool() -> None:
    wanted = asked(DENSE, 8000, pool(3000, 100))
    draft = SharedUse(
        "draft", "draft.gguf", (Row("CUDA0", "CUDA0", False, 300 * MIB, 0, 0), Row("Host", None, True, 50 * MIB, 0, 0))
    )
    (left,) = lowered(wanted, [draft], ()).pools
    assert left.target == 2550 * MIB
    assert lacking([draft], wanted.devices, wanted.host, (pool(400, 100),)) == 50 * MIB
    assert (less(pool(300, 100), 250 * MIB).free, less(pool(300, 100), 400 * MIB).target) == (50 * MIB, -200 * MIB)


def test_a_real_load_has_room_in_the_pool() -> None:
    wanted = asked(DENSE, 8000, pool(1080, 2))
    real = replace(
        WHOLE, rows=tuple(replace(row, reserved=row.compute + (0 if row.is_host else 10 * MIB)) for row in WHOLE.rows)
    )
    assert missing_of(wanted, real, wanted.devices) == ()
    room = reserve_for(wanted, real, Params(n_ctx=4096))
    assert room["CUDA0+host"] == 10 * MIB
    assert with_reserve(wanted, room).pools[0].margin == 10 * MIB


def trial_of(found: Breakdown, missing: tuple[tuple[str, int], ...] = (), n_ctx: int = 4096) -> Trial:
    return Trial(Placement(0, (9,)), limits(1000), Params(n_ctx=n_ctx, devices=("CUDA0",)), found, missing)


def uses(found: Breakdown, total: int = 1000) -> tuple[tuple[DeviceUse, ...], HostUse]:
    row, host = found.on("CUDA0"), found.host
    device = DeviceUse("CUDA0", "", total * MIB, total * MIB, 20 * MIB, row.model, row.context, row.compute)
    return (device,), HostUse(4000 * MIB, 3000 * MIB, 10 * MIB, host.model, host.context, host.compute)


@named_cases(
    # system, measurement, what lacks, fixed, MiB of the limit and what would be better
    ("layers on the host", "metal", PARTLY, (), ("n_ctx",), (1502, "more of the model can be on the GPU")),
    ("a longer context", "metal", WHOLE, (), (), (1852, "the context can be longer")),
    ("it does not fit", "metal", PARTLY, (("CUDA0", MIB),), ("n_ctx",), (1502, "the model may fit")),
    ("all that there may be", "metal", WHOLE, (), ("n_ctx",), None),
    ("as many layers as were asked for", "metal", PARTLY, (), ("n_gpu_layers", "n_ctx"), None),
    ("the memory is full", "metal", WHOLE, (("CUDA0+host", MIB),), (), None),
    ("it is the host", "metal", WHOLE, (("host", MIB),), (), None),
    ("there is none", "cuda", PARTLY, (), (), None),
)
def test_a_setting_that_would_help(
    system: str,
    found: Breakdown,
    missing: tuple[tuple[str, int], ...],
    fixed: tuple[str, ...],
    expected: tuple[int, str] | None,
) -> None:
    wanted = asked(DENSE, 1000, pool(3000, 10, system), fixed=fixed)
    (use,) = pool_uses(wanted, trial_of(found, missing), found, *uses(found))
    if expected is None:
        assert use.setting is None
        return
    size, better = expected
    assert use.setting is not None
    assert (use.setting.bytes // MIB, use.setting.command) == (size, f"sudo sysctl iogpu.wired_limit_mb={size}")
    assert use.setting.message == (
        f"{better} where CUDA0 may use {size} MiB instead of 1000: sudo sysctl iogpu.wired_limit_mb={size} (until the "
        "next reboot; where macOS and other programs need more than is left, the Mac swaps or stops)"
    )


def test_a_setting_leaves_the_pool_its_margin() -> None:
    wanted = asked(DENSE, 1000, pool(1700, 10, "metal"))
    (use,) = pool_uses(wanted, trial_of(WHOLE), WHOLE, *uses(WHOLE))
    assert use.setting is not None and use.setting.bytes == (1700 - 10 - 105 + 20) * MIB
    wanted = asked(DENSE, 1000, pool(1300, 10, "metal"))
    assert pool_uses(wanted, trial_of(WHOLE), WHOLE, *uses(WHOLE))[0].setting is None, "too little to be worth it"


def test_linux_lends_what_is_not_set_aside() -> None:
    wanted = asked(DENSE, 1000, pool(3000, 10, "amdgpu", carved=500 * MIB))
    (use,) = pool_uses(wanted, trial_of(WHOLE), WHOLE, *uses(WHOLE))
    assert use.setting is not None and use.setting.bytes == 1852 * MIB
    pages = 1352 * 256
    assert use.setting.command == f"ttm.pages_limit={pages} ttm.page_pool_size={pages} on the kernel's command line"


def test_what_the_host_may_take_later() -> None:
    _, host = uses(WHOLE)
    # the file is counted in full where nothing is mapped twice
    (use,) = pool_uses(asked(DENSE, 1000, pool(3000, 10)), trial_of(WHOLE), WHOLE, *uses(WHOLE))
    assert use.used == 1075 * MIB and left_for_host((use,), host) == (3000 - 1075 - 10) * MIB
    assert left_for_host((), host) == (3000 - 105 - 10) * MIB
    assert left_for_host((use,), replace(host, free=None)) is None
    (fuller,) = with_host((use,), host, replace(host, later=100 * MIB))
    assert (fuller.used, fuller.left, fuller.fits) == (1175 * MIB, 1825 * MIB, True)
    assert not replace(fuller, used=2991 * MIB).fits


def test_what_a_pool_lacks() -> None:
    use = PoolUse("CUDA0+host", 2000 * MIB, 1500 * MIB, 20 * MIB, 1590 * MIB, ("CUDA0", "host"))
    beside = SharedUse("reserve", "reserved", (Row("Host", None, True, 0, 0, 30 * MIB),))
    problem = pool_problem(use, 110 * MIB, (beside,), "use a smaller -c")
    assert (problem.device, problem.missing) == ("CUDA0+host", 110 * MIB)
    assert problem.message == (
        "CUDA0 and host lack 110 MiB of the memory that they share: 1590 MiB are needed (30 MiB of them beside the "
        "model) plus a margin of 20 MiB, but 1500 MiB are available; use a smaller -c"
    )


def test_a_pool_smaller_than_its_margin() -> None:
    check_pools((pool(101, 100),))
    with pytest.raises(UsageError) as caught:
        check_pools((pool(100, 100),))
    assert str(caught.value) == (
        "CUDA0+host has 100 MiB of shared memory available, and the margin of the host is 100 MiB, so nothing can be "
        "placed: use a smaller --host-margin, or a machine with more memory (available=SIZE in --gpu says what there "
        "is)"
    )


def test_a_pool_is_missed_beside_its_devices() -> None:
    device = DeviceLimit("CUDA0", "", 1000 * MIB, 1000 * MIB, 20 * MIB, "CUDA0")
    wanted = replace(asked(DENSE, 1000, pool(1080, 10)), devices=(device,))
    assert missing_of(wanted, WHOLE, (device,)) == (("CUDA0+host", 5 * MIB),)


@cases(stored("planning_pool_use", "what_a_device_maps_of_the_host"))
def test_what_a_device_maps_of_the_host(tensors: list[tuple[str, int, int]], expected: int) -> None:
    infos = [TensorInfo(f"{name}.weight", "f16", (1,), size, split) for name, size, split in tensors]
    assert mapped_between(infos) == expected


def test_what_a_device_maps_is_in_its_margin() -> None:
    devices = limits(1000, 2000, margin=20)
    found = with_what_they_map(devices, (replace(pool(3000), between=300 * MIB),))
    assert [device.margin // MIB for device in found] == [556, 20]
    found = with_what_they_map(limits(1000, margin=1024), (replace(pool(3000), between=300 * MIB),))
    assert [device.margin // MIB for device in found] == [1024]
