"""Errors that mean a lack of memory, disk space, files or processes."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterable

from fitter import system
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

_OUT_OF_MEMORY = ("std::bad_alloc", "insufficient memory", "Cannot allocate memory", "cannot allocate memory")
"""Messages of C++, ggml (``ggml_aligned_malloc``) and the C library without host memory."""
_OUT_OF_ADDRESSES = ("failed to allocate", "unable to allocate")
"""Messages of llama.cpp without a buffer: a refusal, unless this process's addresses are limited."""


def is_resource_error(said: str | FitterError) -> bool:
    """Return whether an error, its log or a program's output means that the machine lacked a resource."""
    lines = said if isinstance(said, str) else "\n".join((str(said), *getattr(said, "log", ())))
    return _SAYS.search(lines) is not None


def is_out_of_memory(lines: Iterable[str]) -> bool:
    """Return whether a line means that the host's memory ran out."""
    says = (*_OUT_OF_MEMORY, *(_OUT_OF_ADDRESSES if system.is_address_space_limited() else ()))
    return any(words in line for line in lines for words in says)
