"""Running another program so that it always ends: with the call, with an exception, and with this process.

Between the two stands a process of its own, the attendant. It is the program's parent, so the program's number stays
its own until the attendant has waited for it. A pipe ends with this process, however that ends: then the attendant ends
the program. Should the attendant be killed, Linux kills the program.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import select
import signal
import subprocess
import sys
import time

from fitter.llama.processes import interpreter

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import TracebackType
    from typing import NoReturn

_PATIENCE = 2.0
"""Seconds that a program has to end by itself once it is asked to."""
_PR_SET_PDEATHSIG = 1


class SupervisedProgram:
    """A program that runs, with no input; ``output`` is what it writes, stdout and stderr alike.

    ``words``: its path and its arguments, with paths in full, since it runs in its own directory. Raises ``OSError`` if
    it cannot be started, with the program as its file name.
    """

    def __init__(self, words: Sequence[str], environment: Mapping[str, str]) -> None:
        self._attendant = subprocess.Popen(
            interpreter.command(__name__, main.__name__, *words),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=_from_anywhere(environment),
            # not this process's: ggml loads backends from the current directory, too
            cwd=os.path.dirname(words[0]),
            # what is sent to the group of this process, as by Ctrl-C in a terminal, is for this process alone
            start_new_session=True,
        )
        assert self._attendant.stdin and self._attendant.stdout and self._attendant.stderr
        self._orders, self._answers, self.output = self._attendant.stdin, self._attendant.stdout, self._attendant.stderr
        self._status: int | None = None
        try:
            what, _, number = self._answers.readline().strip().partition(b" ")
            if not what:
                raise OSError(errno.ESRCH, "what was to start it was killed", words[0])
            if what != b"pid":
                raise OSError(int(number), os.strerror(int(number)), words[0])
            self.pid = int(number)
        except BaseException:
            self.end()
            self.output.close()
            raise

    def __enter__(self) -> SupervisedProgram:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    @property
    def status(self) -> int | None:
        """Its exit status, negative for a signal; ``None`` while it runs."""
        if self._status is None and select.select([self._answers], [], [], 0)[0]:
            self._read_status()
        return self._status

    def wait(self, seconds: float) -> int | None:
        """Its exit status as soon as it has ended; ``None`` if it still runs after so many seconds."""
        if self._status is None and select.select([self._answers], [], [], max(0.0, seconds))[0]:
            self._read_status()
        return self._status

    def end(self) -> None:
        """End it, if it has not ended: it is asked to, and killed where it does not within some seconds."""
        with contextlib.suppress(OSError):
            self._orders.close()
        try:
            self._attendant.wait(_PATIENCE + 5.0)
        except BaseException:
            self._attendant.kill()
            self._attendant.wait()
            raise
        finally:
            with contextlib.suppress(OSError, ValueError):
                self._read_status()
            self._answers.close()

    def _read_status(self) -> None:
        if self._status is None:
            line = self._answers.readline()
            # without one the attendant was killed, and the program with it
            self._status = int(line) if line.strip() else -signal.SIGKILL


_PLACES = ("LD_LIBRARY_PATH", "GGML_BACKEND_PATH")
"""Environment variables with paths that a program needs to start."""


def _from_anywhere(environment: Mapping[str, str]) -> dict[str, str]:
    """``environment`` with those paths in full, and without empty ones, which are the current directory."""
    places = {name: environment[name].split(os.pathsep) for name in _PLACES if name in environment}
    whole = {name: os.pathsep.join(os.path.abspath(each) for each in paths if each) for name, paths in places.items()}
    return {**environment, **whole}


def main(*words: str) -> NoReturn:
    """Be the attendant: run ``words``, write its process number and at the end its status, and end it with stdin."""
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    ended, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake)
    prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else None
    attendant = os.getpid()
    failed, failure = os.pipe()
    pid = os.fork()
    if pid == 0:
        _become(words, attendant, prctl, failure)
    os.close(failure)
    with contextlib.suppress(OSError):
        # on both sides, so that there is a group from here on
        os.setpgid(pid, pid)
    if error := os.read(failed, 16):
        os.waitpid(pid, 0)
        _say(f"failed {int(error)}")
        os._exit(0)
    _say(f"pid {pid}")
    # so that what reads the program's output sees its end
    os.close(2)
    if sys.stdin.fileno() in select.select([sys.stdin.fileno(), ended], [], [])[0]:
        os.killpg(pid, signal.SIGTERM)
        deadline = time.monotonic() + _PATIENCE
        while not _has_ended(pid) and time.monotonic() < deadline:
            time.sleep(0.01)
    else:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    # What it started, as a script does, ends with it; before it is waited for, since the number is its own until then.
    os.killpg(pid, signal.SIGKILL)
    _say(str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])))
    os._exit(0)


def _has_ended(pid: int) -> bool:
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None


def _become(words: tuple[str, ...], attendant: int, prctl: ctypes._NamedFuncPointer | None, failure: int) -> NoReturn:
    try:
        if prctl is not None:
            prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != attendant:
            os._exit(1)
        os.setpgid(0, 0)
        # what this interpreter and the attendant ignore, a program may not expect to be ignored
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.dup2(2, 1)
        os.execv(words[0], words)
    except OSError as error:
        os.write(failure, str(error.errno or 0).encode())
    finally:
        os._exit(127)


def _say(line: str) -> None:
    with contextlib.suppress(OSError):
        os.write(1, f"{line}\n".encode())
