"""Host memory, in a container and out of one, and the machine a plan is for."""

from __future__ import annotations

from pathlib import Path

import psutil

from fitter.llama.types import DeviceInfo
from fitter.machine.gpu import parse_gpus
from fitter.machine.host import HostMemory, cgroup_limits, host_memory
from fitter.machine.machine import Machine, real_machine, virtual_machine
from tests.support.cases import cases, named_cases

GIB = 2**30
V2 = "sys/fs/cgroup"
V1 = "sys/fs/cgroup/memory"


def _v2(path: str, most: str, used: int, cache: int = 0) -> dict[str, str]:
    return {
        f"{path}/memory.max": f"{most}\n",
        f"{path}/memory.current": f"{used}\n",
        f"{path}/memory.stat": f"file {cache}\ninactive_file {cache // 2}\nactive_file {cache // 2}\n",
    }


def _v1(path: str, most: int, used: int, cache: int = 0) -> dict[str, str]:
    return {
        f"{path}/memory.limit_in_bytes": f"{most}\n",
        f"{path}/memory.usage_in_bytes": f"{used}\n",
        f"{path}/memory.stat": f"cache {cache}\ntotal_inactive_file {cache // 2}\ntotal_active_file {cache // 2}\n",
    }


OF_VERSION_1 = "5:cpu,cpuacct:/x\n4:memory:/x\n1:name=systemd:/x\n0::/x\n"


@named_cases(
    ("no Linux", None, {}, ()),
    ("the root group has no limit", "0::/\n", {}, ()),
    ("max", "0::/a\n", _v2(f"{V2}/a", "max", GIB), ()),
    # in GiB, all of it and what is free
    ("a container of its own", "0::/\n", _v2(V2, str(8 * GIB), 3 * GIB), ((8, 5),)),
    ("file cache can be dropped", "0::/a\n", _v2(f"{V2}/a", str(8 * GIB), 3 * GIB, cache=2 * GIB), ((8, 7),)),
    (
        *("the group above has a limit too", "0::/a/b\n"),
        _v2(f"{V2}/a/b", str(8 * GIB), GIB) | _v2(f"{V2}/a", str(4 * GIB), 2 * GIB),
        ((8, 7), (4, 2)),
    ),
    ("the host's path, seen in a container", "0::/docker/of-the-host\n", _v2(V2, str(GIB), 0), ((1, 1),)),
    ("over its limit", "0::/a\n", _v2(f"{V2}/a", str(GIB), 2 * GIB), ((1, 0),)),
    ("never more than the limit", "0::/a\n", _v2(f"{V2}/a", str(GIB), 0, cache=GIB), ((1, 1),)),
    ("unreadable", "0::/a\n", {f"{V2}/a/memory.max": "nonsense"}, ()),
    ("version 1", OF_VERSION_1, _v1(f"{V1}/x", 8 * GIB, 3 * GIB, cache=GIB), ((8, 6),)),
    ("version 1 without a limit", "4:memory:/x\n", _v1(f"{V1}/x", 9223372036854771712, GIB), ()),
)
def test_limits(cgroup: str | None, files: dict[str, str], limits: tuple[tuple[int, int], ...], tmp_path: Path) -> None:
    if cgroup is not None:
        files = {"proc/self/cgroup": cgroup, **files}
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert cgroup_limits(tmp_path) == tuple(HostMemory(total * GIB, free * GIB) for total, free in limits)


def test_host_memory_is_what_the_machine_says(tmp_path: Path) -> None:
    memory = host_memory(tmp_path)
    assert memory.total == psutil.virtual_memory().total
    assert 0 < memory.available <= memory.total


def test_host_memory_is_what_the_container_may_have(tmp_path: Path) -> None:
    for name, text in {"proc/self/cgroup": "0::/\n", **_v2(V2, str(1000), 400)}.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert host_memory(tmp_path) == HostMemory(1000, 600)


CPU = DeviceInfo("CPU", "a processor", "cpu", "CPU", 64 * GIB, 64 * GIB)
BLAS = DeviceInfo("BLAS", "a library", "accel", "BLAS", 0, 0)
GPU = DeviceInfo("CUDA0", "a card", "gpu", "CUDA", 24 * GIB, 23 * GIB)


@cases((None, 64 * GIB, 40 * GIB), (8 * GIB, 64 * GIB, 8 * GIB), (99 * GIB, 99 * GIB, 99 * GIB))
def test_real_machine(host: int | None, total: int, free: int) -> None:
    machine = real_machine([GPU, BLAS, CPU], HostMemory(64 * GIB, 40 * GIB), host)
    assert machine == Machine((GPU,), (), total, free)


@cases(None, 8 * GIB)
def test_virtual_machine(host: int | None) -> None:
    virtual = parse_gpus(["24GiB:free=23GiB", "rtx-4090"])
    machine = virtual_machine(virtual, host)
    assert (machine.host_total, machine.host_free) == (host, host)
    assert machine.virtual == virtual
    assert [(d.name, d.type, d.total, d.free, d.virtual) for d in machine.devices] == [
        (v.name, "gpu", v.total, v.free, True) for v in virtual
    ]
