"""Start and end worker processes, also ahead of their use. Imports little, so that this can happen early."""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import gc
import os
import select
import signal
import sys
import threading
import time

from fitter.llama.processes import interpreter, worker_environment

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from typing import NoReturn

    from fitter.llama.worker.worker import Session

    Then = Callable[[Session], object]
    First = Callable[[Callable[[], str]], Then | None]

_REQUESTS, _ANSWERS = 3, 4
"""The file descriptors of the child's ends of its pipes."""

_CLOSE_SECONDS = 5.0
_MOST_FILES = 1 << 14
_ENDING = (signal.SIGTERM, signal.SIGHUP)


class Process:
    """A running worker process; ``requests`` and ``answers`` are the parent's ends of its pipes.

    It belongs to the process that started it; a fork of that has copies of the pipes, and ends nothing.

    Args:
        variables: Environment variables to add.
        first: Makes the worker a fork of this process, which must have just started and have one thread; see
            ``prestart``.
        like: A worker whose environment to inherit.

    Raises:
        OSError: It cannot be started.
    """

    def __init__(
        self, variables: Mapping[str, str], *, first: First | None = None, like: Process | None = None
    ) -> None:
        interpreter.check_stack()
        self._environment = _environment(variables, like)
        self._status: int | None = None
        self._parent = os.getpid()
        self._is_dismissed = False
        self._is_awake = first is None
        self._reaping = threading.Lock()
        opened: list[int] = []
        try:
            self._output = _temporary_file()
            opened.append(self._output)
            child_requests, self.requests = os.pipe()
            opened += (child_requests, self.requests)
            self.answers, child_answers = os.pipe()
            opened += (self.answers, child_answers)
            # above the child's numbers, so that none is overwritten before it is copied
            ends = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _ANSWERS + 1) for fd in (child_requests, child_answers)]
            opened += ends
            files = (*ends, fcntl.fcntl(self._output, fcntl.F_DUPFD_CLOEXEC, _ANSWERS + 1))
            opened.append(files[2])
            self.pid = _fork(*self._environment, files, first) if first else _spawn(self._environment[1], files)
        except BaseException:
            for fd in opened:
                os.close(fd)
            raise
        for fd in (child_requests, child_answers, *files):
            os.close(fd)
        os.set_blocking(self.requests, False)
        _running.add(self)

    @property
    def is_own(self) -> bool:
        """Whether this process started it, not the parent of a fork."""
        return self._parent == os.getpid()

    def leave(self) -> None:
        """Close a fork's copies of the pipes."""
        if not self._is_dismissed:
            self._is_dismissed = True
            os.close(self.requests)
        os.close(self.answers)
        os.close(self._output)

    def fits(self, variables: Mapping[str, str], like: Process | None) -> bool:
        """Return whether a process started now with ``variables`` would have the same environment."""
        return self._environment == _environment(variables, like)

    def wake(self, word: str = "") -> None:
        """Let an early process continue, once, with ``word`` (one line)."""
        if not self._is_awake:
            self._is_awake = True
            with contextlib.suppress(OSError):
                os.write(self.requests, os.fsencode(word + "\n"))

    def wait(self) -> int:
        """Wait for its end, and kill it after some seconds. Returns the exit status, negative for a signal."""
        if self._status is None:
            try:
                # the pipe closes with the process, but may still contain an unread answer
                while self._is_readable() and os.read(self.answers, 1 << 16):
                    pass
                if not self._is_readable():
                    self._signal()
                self._reap()
            except BaseException:
                self._signal()
                self._reap()
                raise
        assert self._status is not None
        return self._status

    def dismiss(self, at_once: bool = False) -> None:
        """Tell it to end, or kill it ``at_once``, without waiting."""
        if not self.is_own:
            return
        if at_once and self._status is None:
            self._signal()
        if not self._is_dismissed:
            self._is_dismissed = True
            os.close(self.requests)

    def close(self) -> None:
        """Tell it to end, and kill it if it does not."""
        if not self.is_own:
            self.leave()
            return
        self.dismiss()
        try:
            self.wait()
        finally:
            os.close(self.answers)
            os.close(self._output)

    def kill(self, patience: float = 0.0) -> bytes:
        """Kill it, ``patience`` seconds after telling it to end; return the end of its output."""
        if not self.is_own:
            self.leave()
            return b""
        if self._status is None:
            if patience:
                self.dismiss()
                self._await_end(patience)
            self._signal()
            self._reap()
        self.dismiss()
        os.close(self.answers)
        size = os.lseek(self._output, 0, os.SEEK_END)
        text = os.pread(self._output, 1 << 16, max(0, size - (1 << 16)))
        os.close(self._output)
        return text

    def _await_end(self, seconds: float) -> None:
        """Wait up to ``seconds`` for its end."""
        deadline = time.monotonic() + seconds
        poll = select.poll()
        poll.register(self.answers, select.POLLIN)
        while (left := deadline - time.monotonic()) > 0 and poll.poll(left * 1000):
            if not os.read(self.answers, 1 << 16):
                return

    def _is_readable(self) -> bool:
        poll = select.poll()
        poll.register(self.answers, select.POLLIN)
        return bool(poll.poll(_CLOSE_SECONDS * 1000))

    def interrupt(self) -> None:
        """Kill it, from any thread; a reader of its answers sees its end."""
        with self._reaping:
            # its number stays valid until it is reaped
            if self.is_own and self._status is None:
                self._signal()

    def _signal(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def _reap(self) -> None:
        try:
            if hasattr(os, "waitid"):
                os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
            with self._reaping:
                self._status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        except ChildProcessError:
            # this process ignores its children, or another part of it has waited for this one
            self._status = 0
        _running.discard(self)


_running: set[Process] = set()
"""Worker processes that were started and not waited for."""

_early: list[Process] = []
"""Early processes that are not used yet; valid only in the process that started them."""

_owner = 0

_meanwhile: dict[bool, list[Callable[[], object]]] = {False: [], True: []}
"""Functions to call during any wait (``False``), and during a long one (``True``)."""


def prestart(first: First, variables: Mapping[str, str] | None = None) -> Process | None:
    """Start a worker process early; ``take`` returns the last one first.

    The worker is a fork, so call this only in a process that has just started. An unused worker ends with this process.

    Args:
        first: Called in the worker before it imports anything, with a function that waits for the word of
            ``Process.wake``. The word is empty once the process is taken, or once this process waits for another
            worker. The function that ``first`` returns is called before the first request.
        variables: Environment variables to add to this process's.

    Returns:
        The process; ``None`` if it cannot be started.
    """
    global _owner
    if _owner != os.getpid():
        _owner = os.getpid()
        atexit.register(end_early)
    try:
        process = Process(variables or {}, first=first)
    except OSError:
        # starting a worker on demand will raise the error
        return None
    _early.insert(0, process)
    return process


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


def meanwhile(function: Callable[[], object], *, is_long: bool = False) -> None:
    """Call ``function`` during the next wait for an answer; for imports that the answer will need.

    Args:
        function: The function.
        is_long: Whether to wait for a load of the model's own file. Before that, two workers may keep two processors
            busy.
    """
    _meanwhile[is_long].append(function)


def use_wait(is_long: bool) -> None:
    """Call the functions for a wait, and wake the other early processes."""
    for functions in (_meanwhile[False], _meanwhile[True] if is_long else []):
        while functions:
            try:
                function = functions.pop()
            except IndexError:
                # another thread was quicker
                break
            function()
    if _owner == os.getpid():
        for process in _early:
            process.wake()


def interrupt_all() -> None:
    """Kill every worker process of this process."""
    for process in tuple(_running):
        process.interrupt()


def processors() -> int:
    """Return the number of processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


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


def _temporary_file() -> int:
    if sys.platform == "linux":
        return os.memfd_create("fitter-worker")
    import tempfile

    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _spawn(environment: Mapping[str, str], files: Sequence[int]) -> int:
    requests, answers, output = files
    command = interpreter.command(__name__, main.__name__, str(os.getpid()))
    actions = [
        (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
        (os.POSIX_SPAWN_DUP2, output, 1),
        (os.POSIX_SPAWN_DUP2, output, 2),
        (os.POSIX_SPAWN_DUP2, requests, _REQUESTS),
        (os.POSIX_SPAWN_DUP2, answers, _ANSWERS),
    ]
    return os.posix_spawn(
        command[0],
        command,
        environment,
        file_actions=actions,
        # only the parent handles Ctrl-C, from the start
        setsigmask=[signal.SIGINT],
    )


def _fork(path: Sequence[str], environment: Mapping[str, str], files: Sequence[int], first: First) -> int:
    parent = os.getpid()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT, *_ENDING])
    try:
        pid = os.fork()
        if pid == 0:
            _become_worker(path, environment, files, parent, first)
        return pid
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _become_worker(
    path: Sequence[str], environment: Mapping[str, str], files: Sequence[int], parent: int, first: First
) -> NoReturn:
    try:
        requests, answers, output = files
        nothing = os.open(os.devnull, os.O_RDONLY)
        for fd, number in ((nothing, 0), (output, 1), (output, 2), (requests, _REQUESTS), (answers, _ANSWERS)):
            os.dup2(fd, number)
        become_worker()
        for number in _ENDING:
            # signal handlers belong to the command alone
            if callable(signal.getsignal(number)):
                signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDING)
        for name in os.environ.keys() - environment.keys():
            del os.environ[name]
        os.environ.update(environment)
        sys.path[:] = path
        then = first(lambda: _word(parent))
        from fitter.llama.worker.worker import main

        gc.freeze()
        gc.enable()
        main(_REQUESTS, _ANSWERS, parent, then)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        # never return to the parent's code
        os._exit(1)


def _word(parent: int) -> str:
    """Read the word that wakes this worker, byte by byte, because the requests after it must stay in the pipe."""
    word = b""
    while not word.endswith(b"\n"):
        if select.select([_REQUESTS], [], [], 1.0)[0]:
            byte = os.read(_REQUESTS, 1)
            if not byte:
                os._exit(0)
            word += byte
        elif os.getppid() != parent:
            os._exit(0)
    return os.fsdecode(word[:-1])


def main(parent: str) -> None:
    """Be a worker of the process with the number ``parent``."""
    become_worker()
    from fitter.llama.worker.worker import main as answer

    answer(_REQUESTS, _ANSWERS, int(parent))


def become_worker() -> None:
    """Mark this process as a worker, and close files that it inherited by accident, such as others' pipes."""
    worker_environment.become_worker()
    for number in open_files():
        if number > _ANSWERS:
            with contextlib.suppress(OSError):
                os.close(number)


def open_files() -> Iterable[int]:
    """Return the numbers of this process's open files, or of all possible ones if the system does not tell."""
    try:
        return [int(name) for name in os.listdir("/dev/fd")]
    except OSError:
        # without /proc
        return range(_MOST_FILES)
