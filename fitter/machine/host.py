"""How much memory the host has, and how much of it a new process can have."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

_V1_UNLIMITED = 2**60
"""cgroup v1 says "no limit" with a number near 2**63."""


@dataclass(frozen=True)
class HostMemory:
    """Bytes of host memory; ``available`` can be had without swapping, page cache that can be dropped counted in."""

    total: int
    available: int


def host_memory(root: Path = Path("/")) -> HostMemory:
    """Memory of this machine, or of the container that this process runs in where that has less.

    ``root`` is where ``proc`` and ``sys`` are mounted.
    """
    memory = _machine_memory()
    limits = cgroup_limits(root)
    return HostMemory(
        min([memory.total, *(limit.total for limit in limits)]),
        min([memory.available, *(limit.available for limit in limits)]),
    )


def _machine_memory() -> HostMemory:
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            sizes = dict(line.split(":", 1) for line in file)
        return HostMemory(*(int(sizes[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable")))
    except (OSError, KeyError, ValueError):
        # Not Linux, or a /proc that hides it. Imported here: it takes longer than what it is asked for.
        import psutil

        memory = psutil.virtual_memory()
        return HostMemory(memory.total, memory.available)


def cgroup_limits(root: Path = Path("/")) -> tuple[HostMemory, ...]:
    """A limit for every control group above this process that has one (Linux, version 1 or 2); ``()`` elsewhere.

    ``available`` is the limit less what the group uses, file cache aside: the kernel drops that before it refuses
    memory.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return ()
    limits = []
    for line in lines:
        hierarchy, controllers, path = line.split(":", 2)
        if hierarchy == "0" and not controllers:
            found = [_limit_v2(group) for group in _groups(root / "sys/fs/cgroup", path)]
        elif "memory" in controllers.split(","):
            found = [_limit_v1(group) for group in _groups(root / "sys/fs/cgroup/memory", path)]
        else:
            continue
        limits += [limit for limit in found if limit]
    return tuple(limits)


def _groups(mount: Path, path: str) -> list[Path]:
    """Directories of the group and of all above it.

    In a container whose ``/proc`` tells the host's path, only the mount point itself is there, and is the group.
    """
    group = mount / path.lstrip("/")
    return [group, *(parent for parent in group.parents if parent.is_relative_to(mount))] if group != mount else [mount]


def _limit_v2(group: Path) -> HostMemory | None:
    return _limit(
        group / "memory.max", group / "memory.current", group / "memory.stat", ("inactive_file", "active_file")
    )


def _limit_v1(group: Path) -> HostMemory | None:
    return _limit(
        group / "memory.limit_in_bytes",
        group / "memory.usage_in_bytes",
        group / "memory.stat",
        ("total_inactive_file", "total_active_file"),
    )


def _limit(limit: Path, usage: Path, stat: Path, cache: tuple[str, ...]) -> HostMemory | None:
    try:
        # "max" where there is no limit; a group that this process may not look into has no files
        most = int(limit.read_text())
        used = int(usage.read_text())
        stats = dict(line.split(maxsplit=1) for line in stat.read_text().splitlines())
    except (OSError, ValueError):
        return None
    if most >= _V1_UNLIMITED:
        return None
    reclaimable = sum(int(stats.get(key, 0)) for key in cache)
    return HostMemory(most, max(0, min(most, most - used + reclaimable)))
