"""Whether an error says that this machine had too little of something just then: memory, disk, files, processes."""

from __future__ import annotations

import errno
import os
import re

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


def is_of_the_machine(text: str) -> bool:
    """Whether ``text``, a message or a log, says so."""
    return _SAYS.search(text) is not None
