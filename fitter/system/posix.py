"""Linux, macOS and other POSIX systems."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import select
import signal
import stat
import sys
import threading
import time

assert sys.platform != "win32"

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path
    from typing import IO, NoReturn

CAN_FORK = True
"""Whether a worker can be a fork of this process."""

ENDING = (signal.SIGTERM, signal.SIGHUP)
"""Signals beside SIGINT that ask a process to end."""

CRASHES = frozenset({signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSEGV})
"""Signals that a program causes itself; any other comes from outside."""

PRELOAD = "LD_PRELOAD" if sys.platform == "linux" else ""
"""The variable with libraries that a program loads before all else; empty if this system has none."""

KILLED = -signal.SIGKILL
"""Exit status of a killed process."""

BROKEN_PIPE = frozenset({errno.EPIPE})
"""Errors of a write whose reader is gone."""

HAS_OWNERS = True
"""Whether the status of a file says who may write it."""

NO_WAIT = os.O_NONBLOCK
"""Do not wait for the other end of a pipe, nor for data that is not there yet."""

ITSELF = os.O_CLOEXEC | os.O_NOFOLLOW | NO_WAIT
"""Open the file itself, not the target of a link, and do not wait for the other end of a pipe."""

DESCRIPTORS = "/proc/self/fd" if sys.platform == "linux" else "/dev/fd"
"""Folder in which open files have paths."""

DRIVERS_SPILL = False
"""Whether drivers of cards use the host's memory without an error where a card's own ends."""

_STATM = "/proc/self/statm"

_REQUESTS, _ANSWERS = 3, 4
"""The file descriptors of a worker's ends of its pipes."""

_MOST_FILES = 1 << 14

# --- worker processes


class Reader:
    """The reading end of a pipe. Another thread may close it, which ends the pipe for a thread that reads."""

    def __init__(self, fd: int) -> None:
        self._fd, self._is_closed = fd, False
        self._using = threading.Lock()

    def is_ready(self, seconds: float) -> bool:
        """Wait up to ``seconds`` for bytes, or for the end; return whether ``read`` would return at once."""
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        return self._is_closed or bool(poll.poll(seconds * 1000))

    def read(self) -> bytes:
        """Wait for bytes; none are the end."""
        # the number of a closed file may be the one of a new file
        with self._using:
            return b"" if self._is_closed else os.read(self._fd, 1 << 16)

    def close(self) -> None:
        """Close it."""
        with self._using:
            self._is_closed = True
            os.close(self._fd)


class Child:
    """A worker process: its number ``pid``, the reading end ``answers`` of a pipe, its input, and what it prints.

    Args:
        start: Its command line; or a function that a fork of this process calls, and then ends.
        environment: Its environment, if it has a command line.

    Raises:
        OSError: It cannot be started.
    """

    def __init__(self, start: Sequence[str] | Callable[[], object], environment: Mapping[str, str]) -> None:
        self.status: int | None = None
        self._reaping = threading.Lock()
        opened: list[int] = []
        try:
            self._output = _temporary_file()
            opened.append(self._output)
            child_requests, self._requests = os.pipe()
            opened += (child_requests, self._requests)
            answers, child_answers = os.pipe()
            opened += (answers, child_answers)
            # above the child's numbers, so that none is overwritten before it is copied
            ends = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _ANSWERS + 1) for fd in (child_requests, child_answers)]
            opened += ends
            files = (*ends, fcntl.fcntl(self._output, fcntl.F_DUPFD_CLOEXEC, _ANSWERS + 1))
            opened.append(files[2])
            self.pid = _fork(files, start) if callable(start) else _spawn(list(start), environment, files)
        except BaseException:
            for fd in opened:
                os.close(fd)
            raise
        for fd in (child_requests, child_answers, *files):
            os.close(fd)
        os.set_blocking(self._requests, False)
        self.answers = Reader(answers)

    def send(self, data: bytes, deadline: float) -> bool:
        """Write to its input; return whether it took all before ``deadline`` (on the monotonic clock), or is gone."""
        view = memoryview(data)
        while view:
            poll = select.poll()
            poll.register(self._requests, select.POLLOUT)
            left = deadline - time.monotonic()
            if left <= 0 or not poll.poll(left * 1000):
                return False
            try:
                view = view[os.write(self._requests, view) :]
            except BlockingIOError:
                continue
            except BrokenPipeError:
                break
        return True

    def close_requests(self) -> None:
        """Close its input."""
        os.close(self._requests)

    def kill(self) -> None:
        """Kill it, from any thread, unless it was waited for: its number stays valid until then."""
        if self.status is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> int:
        """Wait for its end; return its exit status, negative for a signal."""
        try:
            if hasattr(os, "waitid"):
                os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
            with self._reaping:
                self.status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        except ChildProcessError:
            # this process ignores its children, or another part of it has waited for this one
            self.status = 0
        return self.status

    def interrupt(self) -> None:
        """Kill it, from any thread."""
        with self._reaping:
            self.kill()

    def output(self) -> bytes:
        """Return the end of its output."""
        size = os.lseek(self._output, 0, os.SEEK_END)
        return os.pread(self._output, 1 << 16, max(0, size - (1 << 16)))

    def close(self) -> None:
        """Close everything but its input."""
        self.answers.close()
        os.close(self._output)


def quiet_crashes() -> None:
    """Let a crash of this process open no window."""


def worker_pipes() -> tuple[int, int]:
    """Return the descriptors of this worker's requests and answers."""
    return _REQUESTS, _ANSWERS


def close_inherited() -> None:
    """Close files that this worker inherited by accident, such as others' pipes."""
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


def status_of(code: int) -> int:
    """Return the exit status in the code that the system reports, negative for a signal."""
    return code


def _temporary_file() -> int:
    if sys.platform == "linux":
        return os.memfd_create("fitter-worker")
    import tempfile

    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _spawn(command: list[str], environment: Mapping[str, str], files: Sequence[int]) -> int:
    requests, answers, output = files
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


def _fork(files: Sequence[int], become: Callable[[], object]) -> int:
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT, *ENDING])
    try:
        pid = os.fork()
        if pid == 0:
            _become_child(files, become)
        return pid
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _become_child(files: Sequence[int], become: Callable[[], object]) -> NoReturn:
    try:
        requests, answers, output = files
        # output first: errors belong there
        for fd, number in ((output, 1), (output, 2), (requests, _REQUESTS), (answers, _ANSWERS)):
            os.dup2(fd, number)
        os.close(0)
        # opens as 0, the lowest free number: no other may be left
        os.open(os.devnull, os.O_RDONLY)
        os.set_inheritable(0, True)
        for number in ENDING:
            # signal handlers belong to the command alone
            if callable(signal.getsignal(number)):
                signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)
        become()
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        # never return to the parent's code
        os._exit(1)


# --- files


class Folder:
    """An open folder, which can be locked until ``close``. Raises ``OSError`` if there is none, or a link."""

    def __init__(self, path: str | Path) -> None:
        self._fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)

    def lock(self, *, is_shared: bool = False, waits: bool = False) -> None:
        """Lock it.

        Args:
            is_shared: Whether others may have shared locks too.
            waits: Whether to wait for others.

        Raises:
            BlockingIOError: Others have locked it.
            OSError: The file system has no locks.
        """
        fcntl.flock(self._fd, (fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX) | (0 if waits else fcntl.LOCK_NB))

    def is_at(self, path: str | Path) -> bool:
        """Return whether this folder is still at ``path``. Raises ``OSError`` if nothing is."""
        return os.path.samestat(os.fstat(self._fd), os.stat(path))

    def close(self) -> None:
        """Close it, and give up its lock."""
        os.close(self._fd)


def lock_file(file: IO[bytes], *, waits: bool) -> None:
    """Lock an open file until it is closed. Raises as ``Folder.lock``."""
    fcntl.flock(file, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))


def replace(source: Path, target: Path) -> None:
    """Move a file, in place of another one. Raises ``OSError``."""
    source.replace(target)


def copy_mode(source: Path, descriptor: int) -> None:
    """Give an open file the permissions of another one. Raises ``OSError``."""
    os.fchmod(descriptor, stat.S_IMODE(source.stat().st_mode))


def sync_folder(path: Path) -> None:
    """Write a folder's names to the disk, if the file system can. Raises ``OSError``."""
    folder = os.open(path, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            os.fsync(folder)
    finally:
        os.close(folder)


def path_of(descriptor: int) -> str:
    """Return a path of an open file in this process."""
    return f"{DESCRIPTORS}/{descriptor}"


def path_of_url(path: str) -> str:
    """Return the file's path that the path of a ``file:`` URL names."""
    from urllib.parse import unquote

    return unquote(path)


def close_file(descriptor: int) -> None:
    """Close a file that only ``path_of`` names; nothing of it is left."""
    os.close(descriptor)


def disk_bytes(path: str | os.PathLike[str]) -> int:
    """Return the bytes that a file, not the target of a link, takes on the disk. Raises ``OSError``."""
    # blocks of 512 bytes on every file system
    return 512 * os.lstat(path).st_blocks


def extend(file: IO[bytes], size: int) -> None:
    """Make a file so long without writing the rest. Raises ``OSError``."""
    file.truncate(size)


def drop_cached(descriptor: int, begin: int, size: int) -> bool:
    """Let the system forget a part of a file in memory; return whether it can. Raises ``OSError``."""
    if sys.platform == "darwin":
        return False
    os.posix_fadvise(descriptor, begin, size, os.POSIX_FADV_DONTNEED)
    return True


def user() -> int:
    """Return the number of this process's user."""
    return os.geteuid()


def is_private(status: os.stat_result) -> bool:
    """Return whether a folder belongs to this user, and nobody else may use it."""
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o077


# --- the terminal


def is_console(number: int) -> bool:
    """Return whether only Python's own stream can write to this descriptor."""
    return False


def wait_writable(number: int) -> None:
    """Wait until a non-blocking descriptor takes bytes."""
    select.select([], [number], [])


def watch_interrupts(leave: Callable[[int, object], object]) -> None:
    """Let ``leave`` handle a signal that the main thread cannot answer, because its wait does not end."""


def has_display() -> bool:
    """Return whether programs can have windows."""
    return sys.platform == "darwin" or "DISPLAY" in os.environ or "WAYLAND_DISPLAY" in os.environ


# --- the machine


def processor() -> str:
    """Return the name of the processor, or of its architecture."""
    import platform

    return platform.processor() or platform.machine()


def processors() -> int:
    """Return the number of processors that this process may use."""
    if sys.platform == "darwin":
        return os.cpu_count() or 1
    return len(os.sched_getaffinity(0))


def physical_memory() -> int:
    """Return the bytes of the machine's memory."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def free_memory() -> int:
    """Return the bytes of memory that nothing uses, not even the page cache."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")


def own_memory() -> int:
    """Return the bytes of this process's own memory, without mapped files; 0 if the system does not say."""
    try:
        with open(_STATM, "rb") as file:
            _, resident, shared, *_ = file.read().split()
    except (OSError, ValueError):
        return 0
    return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")


def stack_limit() -> int:
    """Return the most bytes of a new process's stack; -1 without a limit."""
    # imported here, since most commands need it once
    import resource

    return resource.getrlimit(resource.RLIMIT_STACK)[0]


def is_address_space_limited() -> bool:
    """Return whether this process may have only so many addresses."""
    import resource

    return resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY
