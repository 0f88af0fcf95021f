"""Programs on Linux, macOS and other POSIX systems.

A process between the two, the attendant, is the program's parent, so the program's number stays valid until the
attendant has waited for it. A pipe closes when this process ends, in whatever way; the attendant then ends the program.
If the attendant is killed, Linux kills the program.
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
from fitter.llama.processes.interpreter import from_anywhere

assert sys.platform != "win32"

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import NoReturn

_PATIENCE = 2.0
"""Seconds for a program to end itself when asked."""
_PR_SET_PDEATHSIG = 1


class SupervisedProgram:
    """A running program without input; ``output`` has its stdout and stderr.

    Args:
        words: Its path and arguments, with absolute paths, because it runs in its own directory.
        environment: Its environment.

    Raises:
        OSError: It cannot be started; the error's file name is the program.
    """

    def __init__(self, words: Sequence[str], environment: Mapping[str, str]) -> None:
        self._attendant = subprocess.Popen(
            interpreter.command(__name__, main.__name__, *words),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=from_anywhere(environment),
            # not this process's: ggml loads backends from the current directory, too
            cwd=os.path.dirname(words[0]),
            # signals to this process's group, such as Ctrl-C in a terminal, are for this process alone
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

    def __exit__(self, *_: object) -> None:
        self.end()

    @property
    def status(self) -> int | None:
        """Its exit status, negative for a signal; ``None`` while it runs."""
        if self._status is None and select.select([self._answers], [], [], 0)[0]:
            self._read_status()
        return self._status

    def wait(self, seconds: float) -> int | None:
        """Wait up to ``seconds`` for its end; return its exit status, ``None`` if it still runs."""
        if self._status is None and select.select([self._answers], [], [], max(0.0, seconds))[0]:
            self._read_status()
        return self._status

    def end(self) -> None:
        """End it: ask it to end, and kill it after some seconds."""
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
            # without a status, the attendant was killed, and the program with it
            self._status = int(line) if line.strip() else -signal.SIGKILL


def main(*words: str) -> NoReturn:
    """Be the attendant: run ``words``, write its process number and later its status, and end it when stdin closes."""
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
        # parent and child both do this, so that the group exists from here on
        os.setpgid(pid, pid)
    if error := os.read(failed, 16):
        os.waitpid(pid, 0)
        _say(f"failed {int(error)}")
        os._exit(0)
    _say(f"pid {pid}")
    # so that the reader of the program's output sees its end
    os.close(2)
    if sys.stdin.fileno() in select.select([sys.stdin.fileno(), ended], [], [])[0]:
        os.killpg(pid, signal.SIGTERM)
        deadline = time.monotonic() + _PATIENCE
        while not _has_ended(pid) and time.monotonic() < deadline:
            time.sleep(0.01)
    else:
        _has_ended(pid, waits=True)
    # end its children too (a script has some), before waiting for it: until then its number is valid
    os.killpg(pid, signal.SIGKILL)
    _say(str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])))
    os._exit(0)


def _has_ended(pid: int, *, waits: bool = False) -> bool:
    if sys.platform == "darwin":
        # most Pythons have no waitid there
        end = select.kevent(pid, select.KQ_FILTER_PROC, select.KQ_EV_ADD, select.KQ_NOTE_EXIT)
        try:
            return bool(select.kqueue().control([end], 1, None if waits else 0))
        except ProcessLookupError:
            return True
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | (0 if waits else os.WNOHANG)) is not None


def _become(words: tuple[str, ...], attendant: int, prctl: ctypes._NamedFuncPointer | None, failure: int) -> NoReturn:
    try:
        if prctl is not None:
            prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != attendant:
            os._exit(1)
        os.setpgid(0, 0)
        # reset the signals that the interpreter and the attendant ignore
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
