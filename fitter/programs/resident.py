"""How much memory a process has, read from Linux's ``/proc``. Bytes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Resident:
    """What a process has in memory at one moment."""

    total: int
    """All pages."""
    of_files: int
    """Those of files that are mapped, as the model's is: the system drops them where it needs memory."""

    @property
    def own(self) -> int:
        """Those that are its own."""
        return self.total - self.of_files


def resident(pid: int, root: Path = Path("/")) -> Resident | None:
    """What the process ``pid`` has; ``None`` where the system does not say it, or the process has ended.

    ``root`` is the directory in which ``proc`` is mounted.
    """
    try:
        lines = (root / f"proc/{pid}/status").read_text(encoding="ascii", errors="replace").splitlines()
        sizes = dict(line.split(":", 1) for line in lines if line.startswith(("VmRSS:", "RssFile:")))
        return Resident(*(int(sizes[name].split()[0]) * 1024 for name in ("VmRSS", "RssFile")))
    except (OSError, KeyError, ValueError):
        return None
