"""Programs on Windows: each in a job, which ends with this process."""

from __future__ import annotations

import os
import subprocess
import sys
import time

from fitter import system
from fitter.llama.processes.interpreter import from_anywhere

assert sys.platform == "win32"

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_TICK = 0.01


class SupervisedProgram:
    """As on other systems; but it cannot be asked to end, only killed."""

    def __init__(self, words: Sequence[str], environment: Mapping[str, str]) -> None:
        self._job = system.Job()
        output, written = os.pipe()
        try:
            self._process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=written,
                stderr=written,
                env=from_anywhere(environment),
                # not this process's: ggml loads backends from the current directory, too
                cwd=os.path.dirname(words[0]),
                creationflags=system.NEW_PROCESS,
            )
            self._job.adopt(self._process.pid)
        except BaseException as error:
            os.close(output)
            self._job.close()
            if isinstance(error, OSError):
                error.filename = words[0]
            raise
        finally:
            os.close(written)
        self.pid, self.output = self._process.pid, os.fdopen(output, "rb")

    def __enter__(self) -> SupervisedProgram:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    @property
    def status(self) -> int | None:
        code = self._process.poll()
        return None if code is None else system.status_of(code)

    def wait(self, seconds: float) -> int | None:
        deadline = time.monotonic() + seconds
        while self.status is None and time.monotonic() < deadline:
            # Ctrl-C ends a sleep, but no wait for a process
            time.sleep(_TICK)
        return self.status

    def end(self) -> None:
        self._job.end()
        self._process.wait()
        self._job.close()
