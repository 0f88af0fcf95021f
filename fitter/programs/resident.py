"""Resident memory of a process, from Linux's ``/proc``. Bytes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Resident:
    """Resident memory of a process at one moment."""

    total: int
    """All pages."""
    of_files: int
    """Pages of mapped files, such as the model's, which the system can drop."""

    @property
    def own(self) -> int:
        """Its own pages."""
        return self.total - self.of_files


def resident(pid: int, root: Path = Path("/")) -> Resident | None:
    """Return the memory of the process ``pid``; ``None`` if the system does not say, or the process has ended.

    Args:
        pid: The process.
        root: Directory of ``proc``.
    """
    try:
        lines = (root / f"proc/{pid}/status").read_text(encoding="ascii", errors="replace").splitlines()
        sizes = dict(line.split(":", 1) for line in lines if line.startswith(("VmRSS:", "RssFile:")))
        return Resident(*(int(sizes[name].split()[0]) * 1024 for name in ("VmRSS", "RssFile")))
    except (OSError, KeyError, ValueError):
        return None
