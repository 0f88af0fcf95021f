"""Whether an error says that this machine had too little of something just then: memory, disk, files, processes."""

from __future__ import annotations

import errno
import os
import re

from fitter.errors import FitterError

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


def is_of_the_machine(said: str | FitterError) -> bool:
    """Whether an error says so, or the log that it has, or what a process has written."""
    lines = said if isinstance(said, str) else "\n".join((str(said), *getattr(said, "log", ())))
    return _SAYS.search(lines) is not None
