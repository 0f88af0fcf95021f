"""The exit of a worker's process: was it the load that was asked for, or a lack of memory, disk space or files?"""

from __future__ import annotations

import errno
import os
import re
import signal
from collections.abc import Iterable
from dataclasses import dataclass

from fitter import system
from fitter.errors import FitterError

OUT_OF_MEMORY_STATUS = errno.ENOMEM
"""Exit status of a worker that has run out of memory."""

_FAULT = "fitter: fault of process "

_SCARCE = (
    *(errno.EAGAIN, errno.EDQUOT, errno.EFBIG, errno.EINTR, errno.EIO, errno.EMFILE, errno.ENFILE, errno.ENOMEM),
    errno.ENOSPC,
)
_WORDS = "|".join(re.escape(os.strerror(number)) for number in _SCARCE)
_SAYS = re.compile(
    rf"bad_alloc|MemoryError|out of memory|failed to map segment|{_WORDS}"
    r"|(?:fail|unable|cannot|could not|not enough)[^\n]*(?:\balloc|memory)",
    re.IGNORECASE,
)

_OUT_OF_MEMORY = ("std::bad_alloc", "insufficient memory", "Cannot allocate memory", "cannot allocate memory")
"""Messages of C++, ggml (``ggml_aligned_malloc``) and the C library without host memory."""
_OUT_OF_ADDRESSES = ("failed to allocate", "unable to allocate")
"""Messages of llama.cpp without a buffer: a refusal, unless this process's addresses are limited."""


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


def is_resource_error(said: str | FitterError) -> bool:
    """Return whether an error, its log or a program's output means that the machine lacked a resource."""
    lines = said if isinstance(said, str) else "\n".join((str(said), *getattr(said, "log", ())))
    return _SAYS.search(lines) is not None


def is_out_of_memory(lines: Iterable[str]) -> bool:
    """Return whether a line means that the host's memory ran out."""
    says = (*_OUT_OF_MEMORY, *(_OUT_OF_ADDRESSES if system.is_address_space_limited() else ()))
    return any(words in line for line in lines for words in says)
