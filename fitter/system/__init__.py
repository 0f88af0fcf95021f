"""The differences between systems: processes and their pipes, signals, files, locks, and the machine's memory.

``posix`` and ``windows`` offer the same names; nothing else in fitter asks which system it is. Imports little, so that
it can be early.
"""

from __future__ import annotations

import sys

if sys.platform == "win32":
    from fitter.system.windows import *  # noqa: F403
else:
    from fitter.system.posix import *  # noqa: F403
