"""The share of this machine's processors that other programs use. Seconds."""

from __future__ import annotations

import contextlib
import os
import time


class OtherPrograms:
    """Counts the processor time of all programs but this process and ``pid``, from now on."""

    def __init__(self, pid: int) -> None:
        self._pids = (pid, os.getpid())
        self._began, self._used = time.monotonic(), self._now()

    def share(self) -> float | None:
        """Return their share of all processors until now, from 0 to 1; ``None`` if the system does not say."""
        import psutil

        passed, now = time.monotonic() - self._began, self._now()
        if self._used is None or now is None or passed <= 0:
            return None
        return min(1.0, max(0.0, (now - self._used) / passed / (psutil.cpu_count() or 1)))

    def _now(self) -> float | None:
        # imported here, since that is slow
        import psutil

        with contextlib.suppress(psutil.Error, OSError):
            every = psutil.cpu_times()
            # a guest's time is in that of user programs
            idle = (every.idle, *(getattr(every, name, 0.0) for name in ("iowait", "guest", "guest_nice")))
            own = (psutil.Process(pid).cpu_times() for pid in self._pids)
            return float(sum(every) - sum(idle) - sum(each.user + each.system for each in own))
        return None
