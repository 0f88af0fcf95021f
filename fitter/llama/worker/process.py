"""Start and end worker processes, also ahead of their use. Imports little, so that this can happen early."""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import sys
import time

from fitter import system
from fitter.llama.processes import interpreter

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from fitter.storage import TemporaryDirectory

_CLOSE_SECONDS = 5.0
_WORD = b"\n"
"""Wakes a process: one byte, because the requests after it must stay in the pipe."""


class Process:
    """A running worker process; ``answers`` is the parent's end of a pipe.

    It belongs to the process that started it; a fork of that has copies of the pipes, and ends nothing.

    Args:
        variables: Environment variables to add.
        is_fork: Whether the worker is a fork of this process, which must have just started and have one thread.
        is_asleep: Whether a fork waits for ``wake`` before it imports anything.
        like: A worker whose environment to inherit.

    Raises:
        OSError: It cannot be started.
    """

    def __init__(
        self,
        variables: Mapping[str, str],
        *,
        is_fork: bool = False,
        is_asleep: bool = False,
        like: Process | None = None,
    ) -> None:
        interpreter.check_stack()
        path, environment = self._environment = _environment(variables, like)
        self._parent = os.getpid()
        self._is_dismissed = False
        self._is_awake = not (is_fork and is_asleep)
        self._files: TemporaryDirectory | None = None
        if is_fork:
            parent, is_awake = self._parent, self._is_awake
            self._child = system.Child(lambda: _become_worker(path, environment, parent, is_awake), environment)
        else:
            command = interpreter.command(__name__, main.__name__, str(self._parent))
            self._files, variables = _folder_for_files()
            self._child = system.Child(command, {**environment, **variables})
        self.pid, self.answers = self._child.pid, self._child.answers
        _running.add(self)

    @property
    def is_own(self) -> bool:
        """Whether this process started it, not the parent of a fork."""
        return self._parent == os.getpid()

    def leave(self) -> None:
        """Close a fork's copies of the pipes."""
        if not self._is_dismissed:
            self._is_dismissed = True
            self._child.close_requests()
        self._child.close()

    def fits(self, variables: Mapping[str, str], like: Process | None) -> bool:
        """Return whether a process started now with ``variables`` would have the same environment."""
        return self._environment == _environment(variables, like)

    def send(self, data: bytes, deadline: float) -> bool:
        """Write to its input; return whether it took all before ``deadline`` (on the monotonic clock), or is gone."""
        return self._child.send(data, deadline)

    def wake(self) -> None:
        """Let a process that is asleep continue, once."""
        if not self._is_awake:
            self._is_awake = True
            with contextlib.suppress(OSError):
                self._child.send(_WORD, time.monotonic() + _CLOSE_SECONDS)

    def wait(self) -> int:
        """Wait for its end, and kill it after some seconds. Returns the exit status, negative for a signal."""
        if self._child.status is None:
            try:
                # the pipe closes with the process, but may still contain an unread answer
                while self.answers.is_ready(_CLOSE_SECONDS) and self.answers.read():
                    pass
                if not self.answers.is_ready(_CLOSE_SECONDS):
                    self._child.kill()
                self._reap()
            except BaseException:
                self._child.kill()
                self._reap()
                raise
        assert self._child.status is not None
        return self._child.status

    def dismiss(self, at_once: bool = False) -> None:
        """Tell it to end, or kill it ``at_once``, without waiting."""
        if not self.is_own:
            return
        if at_once:
            self._child.kill()
        if not self._is_dismissed:
            self._is_dismissed = True
            self._child.close_requests()

    def close(self) -> None:
        """Tell it to end, and kill it if it does not."""
        if not self.is_own:
            self.leave()
            return
        self.dismiss()
        try:
            self.wait()
        finally:
            self._close()

    def kill(self, patience: float = 0.0) -> bytes:
        """Kill it, ``patience`` seconds after telling it to end; return the end of its output."""
        if not self.is_own:
            self.leave()
            return b""
        if self._child.status is None:
            if patience:
                self.dismiss()
                self._await_end(patience)
            self._child.kill()
            self._reap()
        self.dismiss()
        text = self._child.output()
        self._close()
        return text

    def _close(self) -> None:
        self._child.close()
        if self._files is not None:
            self._files.cleanup()

    def _await_end(self, seconds: float) -> None:
        """Wait up to ``seconds`` for its end."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0 and self.answers.is_ready(left):
            if not self.answers.read():
                return

    def interrupt(self) -> None:
        """Kill it, from any thread; a reader of its answers sees its end."""
        if self.is_own:
            self._child.interrupt()

    def _reap(self) -> None:
        self._child.wait()
        _running.discard(self)


_running: set[Process] = set()
"""Worker processes that were started and not waited for."""

_early: list[Process] = []
"""Early processes that are not used yet; valid only in the process that started them."""

_owner = 0

_meanwhile: dict[Callable[[], object], None] = {}
"""Functions to call during a wait, the last one first."""


def prestart(variables: Mapping[str, str] | None = None, *, is_asleep: bool = False) -> None:
    """Start a worker process early; ``take`` returns the first one first.

    The worker is a fork, so call this only in a process that has just started. Without forks it is a plain worker,
    whose start alone is ahead. An unused worker ends with this process.

    Args:
        variables: Environment variables to add to this process's.
        is_asleep: Whether it waits until it is taken. Without forks there is none then.
    """
    global _owner
    if _owner != os.getpid():
        _owner = os.getpid()
        atexit.register(end_early)
    if system.CAN_FORK or not is_asleep:
        # starting a worker on demand will raise the error
        with contextlib.suppress(OSError):
            _early.append(Process(variables or {}, is_fork=system.CAN_FORK, is_asleep=is_asleep))


def take(variables: Mapping[str, str], like: Process | None = None) -> Process:
    """Return an early worker process with the right environment, or a new one.

    Args:
        variables: Environment variables to add.
        like: A worker whose environment to inherit instead of this process's.

    Raises:
        OSError: It cannot be started.
    """
    for process in tuple(_early) if os.getpid() == _owner else ():
        if process.fits(variables, like):
            try:
                _early.remove(process)
            except ValueError:
                # another thread was quicker
                continue
            process.wake()
            return process
    return Process(variables, like=like)


def meanwhile(function: Callable[[], object]) -> None:
    """Call ``function`` during a wait for an answer; for imports and data files that are needed later."""
    _meanwhile[function] = None


def use_wait(answers: system.Reader) -> None:
    """Call the functions for a wait, until there is something to read in ``answers``."""
    while _meanwhile and not answers.is_ready(0.0):
        try:
            function, _ = _meanwhile.popitem()
        except KeyError:
            # another thread was quicker
            break
        function()


def interrupt_all() -> None:
    """Kill every worker process of this process."""
    for process in tuple(_running):
        process.interrupt()


def end_early() -> None:
    """End the unused early processes."""
    while _early and os.getpid() == _owner:
        _early.pop().kill()


def _environment(variables: Mapping[str, str], like: Process | None) -> tuple[list[str], dict[str, str]]:
    """Return search path and variables of a new worker, inherited from this process or ``like``."""
    inherited = like._environment[1] if like else os.environ
    environment = {name: value for name, value in inherited.items() if name != "FITTER_DEVICES"}
    environment["GGML_NO_BACKTRACE"] = "1"
    environment.update(variables)
    if "FITTER_CUDART_DEVICES" in variables:
        # the library is then the only backend to load
        environment.pop("GGML_BACKEND_PATH", None)
    return interpreter.search_path(), environment


def _folder_for_files() -> tuple[TemporaryDirectory | None, dict[str, str]]:
    """Return a folder for a worker's temporary files where those have names, and variables that name it."""
    if system.DESCRIPTORS:
        return None, {}
    from fitter.storage import TemporaryDirectory

    folder = TemporaryDirectory()
    return folder, dict.fromkeys(("TMPDIR", "TEMP", "TMP"), folder.name)


def _become_worker(path: Sequence[str], environment: Mapping[str, str], parent: int, is_awake: bool) -> None:
    become_worker()
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    os.environ.update(environment)
    sys.path[:] = path
    requests, answers = system.worker_pipes()
    if not is_awake:
        _await_word(requests, parent)
    from fitter.llama.worker.worker import main

    gc.freeze()
    gc.enable()
    main(requests, answers, parent)


def _await_word(requests: int, parent: int) -> None:
    pipe = system.Reader(requests)
    while not pipe.is_ready(1.0):
        if os.getppid() != parent:
            os._exit(0)
    if os.read(requests, len(_WORD)) != _WORD:
        os._exit(0)


def main(parent: str) -> None:
    """Be a worker of the process with the number ``parent``."""
    become_worker()
    from fitter.llama.worker.worker import main as answer

    answer(*system.worker_pipes(), int(parent))


def become_worker() -> None:
    """Mark this process as a worker, and close files that it inherited by accident, such as others' pipes."""
    interpreter.become_worker()
    system.close_inherited()
