"""The differences between systems in libraries: their names, their files, how they are found, opened and closed.

``posix`` and ``windows`` offer the same names; nothing else in fitter asks which system it is about libraries.
"""

from __future__ import annotations

import os
import sys

if sys.platform == "win32":
    from fitter.llama.build.linking.windows import *  # noqa: F403
    from fitter.llama.build.linking.windows import LIBRARY, OWN_LIBRARY, part_of
else:
    from fitter.llama.build.linking.posix import *  # noqa: F403
    from fitter.llama.build.linking.posix import LIBRARY, OWN_LIBRARY, part_of


LIBLLAMA = LIBRARY.format("llama")
"""The usual name of libllama's file."""


def own_name(name: str) -> str:
    """Return the file name of one of fitter's libraries."""
    return OWN_LIBRARY.format(name)


def is_library(path: str, beginnings: tuple[str, ...]) -> bool:
    """Return whether a path is a library of this system whose name begins so, without what all names begin with.

    ``llama.`` is the beginning of libllama.so, libllama.so.0 and libllama.v0.5.0.so, and of llama.dll.
    """
    return f"{part_of(os.path.basename(path))}.".startswith(beginnings)
