"""Run another program so that it always ends: with the call, with an exception, and with this process."""

from __future__ import annotations

import sys

if sys.platform == "win32":
    from fitter.llama.processes.supervisor.windows import SupervisedProgram
else:
    from fitter.llama.processes.supervisor.posix import SupervisedProgram

__all__ = ["SupervisedProgram"]
