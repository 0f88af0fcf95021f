"""The exit of a worker's process, and whether the load that it was asked for caused it."""

from __future__ import annotations

import errno
import signal
from dataclasses import dataclass

from fitter.llama.processes.resource_errors import is_out_of_memory

OUT_OF_MEMORY_STATUS = errno.ENOMEM
"""Exit status of a worker that has run out of memory."""

_FAULT = "fitter: fault of process "


@dataclass(frozen=True)
class WorkerExit:
    """The end of a worker's process ``pid``.

    Attributes:
        status: its exit status, negative for a signal.
        log: the last lines that it wrote.
    """

    pid: int
    status: int
    log: tuple[str, ...]

    @property
    def has_run_out(self) -> bool:
        """Whether it ended because memory ran out."""
        return self.status == OUT_OF_MEMORY_STATUS or is_out_of_memory(self.log)

    @property
    def is_own_fault(self) -> bool:
        """Whether llama.cpp ended it by an abort or fault, not another program by a signal (``fitter_say_faults``)."""
        return self.status < 0 and not self.has_run_out and f"{_FAULT}{self.pid}" in self.log

    def is_same_as(self, other: WorkerExit) -> bool:
        """Return whether llama.cpp ended both processes in the same way."""
        return self.is_own_fault and other.is_own_fault and self.status == other.status

    @property
    def how(self) -> str:
        """The end of a sentence that begins with the process."""
        if self.status >= 0:
            return f"ended with status {self.status}"
        try:
            return f"was ended by {signal.Signals(-self.status).name}"
        except ValueError:
            return f"was ended by signal {-self.status}"

    @property
    def last_words(self) -> str:
        """The line that tells most about its end, such as why memory ran out; '' without any."""
        # GGML_ASSERT and GGML_ABORT write to stderr, not to the log; the lines after them are less useful.
        lines = [line.strip() for line in self.log if line.strip() and not line.startswith(_FAULT)]
        if self.status == OUT_OF_MEMORY_STATUS:
            return lines[-1]
        errors = [line for line in lines if "GGML_ASSERT" in line or "error" in line.lower()]
        return (errors or lines or [""])[-1]
