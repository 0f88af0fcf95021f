"""The machine to plan for, which of its devices are chosen, and how fast they and the host are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from fitter.errors import UsageError
from fitter.llama.types import DeviceInfo
from fitter.machine import bandwidth
from fitter.machine import machine as devices
from fitter.machine.gpu import parse_gpus, virtual_devices
from fitter.machine.host import HostMemory
from fitter.machine.machine import check_main_gpu, choose, device_speeds, machine_of, speed_of_host
from fitter.machine.speed import HostSpeed, default_host
from tests.support.cases import named_cases

GIB = 2**30
VIRTUAL = parse_gpus(["24GiB"])
HERE = DeviceInfo("CUDA0", "Here", "gpu", "CUDA", 8 * GIB, 7 * GIB)
REMOTE = DeviceInfo("RPC0", "There", "gpu", "RPC", 8 * GIB, 7 * GIB)
CPU = DeviceInfo("CPU", "Processor", "cpu", "CPU", 64 * GIB, 64 * GIB)
DESCRIBED = DeviceInfo("CUDA0", "24 GiB", "gpu", "fitter", 24 * GIB, 24 * GIB, virtual=True)


@named_cases(
    ("this one", (HERE, CPU), {"virtual": (), "host": None}, ["Here"], (64 * GIB, 40 * GIB)),
    ("this one, of less memory", (HERE,), {"virtual": (), "host": GIB}, ["Here"], (64 * GIB, GIB)),
    ("one that is described", (DESCRIBED,), {"virtual": VIRTUAL, "host": None}, ["24 GiB"], (None, None)),
    ("with servers", (REMOTE, DESCRIBED), {"virtual": VIRTUAL, "host": GIB}, ["There", "24 GiB"], (GIB, GIB)),
    ("servers alone", (REMOTE, HERE), {"virtual": (), "host": None, "has_rpc": True}, ["There"], (None, None)),
    ("no GPU, and nobody is asked", None, {"virtual": (), "host": None}, [], (None, None)),
)
def test_the_machine(
    found: Sequence[DeviceInfo] | None,
    words: dict[str, Any],
    names: Sequence[str],
    host: tuple[int | None, int | None],
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(devices, "host_memory", lambda: HostMemory(64 * GIB, 40 * GIB))
    is_described = not request.node.callspec.id.startswith("this one")

    def ask() -> Sequence[DeviceInfo]:
        assert found is not None, "nothing here is part of it"
        return found

    machine = machine_of(ask, **{"has_rpc": False, "is_described": is_described, **words})
    assert [device.description for device in machine.devices] == names
    assert (machine.host_total, machine.host_free) == host
    assert machine.virtual == words["virtual"]


@named_cases(
    ("nothing is said", None, ["CUDA0", "RPC0"]),
    ("in another order", ["RPC0", "CUDA0"], ["RPC0", "CUDA0"]),
    ("one", ["RPC0"], ["RPC0"]),
    ("none", ["None"], []),
    ("none at all", [], []),
    ("none, and one", ["none", "CUDA0"], "unknown device 'none'; there are: CUDA0, RPC0"),
    ("one that there is not", ["cuda0"], "unknown device 'cuda0'; there are: CUDA0, RPC0"),
    ("one twice", ["RPC0", "RPC0"], "a device is named twice"),
)
def test_which_are_chosen(names: Sequence[str] | None, expected: Sequence[str] | str) -> None:
    if isinstance(expected, str):
        with pytest.raises(UsageError, match=expected):
            choose((HERE, REMOTE), names)
    else:
        assert [device.name for device in choose((HERE, REMOTE), names)] == expected


def test_there_is_nothing_to_choose() -> None:
    with pytest.raises(UsageError, match="unknown device 'CUDA0'; there are: none"):
        choose((), ["CUDA0"])
    check_main_gpu(1, (HERE, REMOTE))
    with pytest.raises(UsageError, match="main GPU 2 does not exist: the number of devices is 2, counted from 0"):
        check_main_gpu(2, (HERE, REMOTE))


def test_virtual_devices() -> None:
    assert virtual_devices(["24GiB"]) == virtual_devices(VIRTUAL) == VIRTUAL
    assert virtual_devices([]) == virtual_devices(["none"]) == ()
    for mixed in (["24GiB", *VIRTUAL], [*VIRTUAL, "none"]):
        with pytest.raises(UsageError, match="gpus has both strings and VirtualDevice objects: give only one kind"):
            virtual_devices(mixed)


def test_a_described_device_has_the_speed_of_its_description() -> None:
    card = parse_gpus(["rtx-4090"])
    info = DeviceInfo("CUDA0", "another name", "gpu", "fitter", 1, 1, virtual=True)
    nobody = pytest.fail
    assert device_speeds([info], [info], card, nobody)["CUDA0"].source == "catalogue: NVIDIA GeForce RTX 4090"
    assert device_speeds([info], [info], (), nobody)["CUDA0"].known is False


@named_cases(
    ("given", "60GB/s", True, HostSpeed(6e10, "given")),
    ("given, of this one", 6e10, False, HostSpeed(6e10, "given", 12)),
    ("described", None, True, default_host()),
    ("measured", None, False, HostSpeed(5e10, "measured", 12)),
)
def test_the_speed_of_the_host(
    given: float | str | None, is_described: bool, expected: HostSpeed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bandwidth, "host_speed", lambda: HostSpeed(5e10, "measured", 12))
    monkeypatch.setattr(bandwidth, "this_host", lambda: bandwidth.Host("", 12, 0))
    assert speed_of_host(given, is_described=is_described) == expected
