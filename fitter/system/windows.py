"""Windows."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hashlib
import msvcrt
import os
import queue
import signal
import stat
import sys
import threading
import time
from ctypes import wintypes

assert sys.platform == "win32"

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path
    from typing import IO

CAN_FORK = False
ENDING = (signal.SIGTERM, signal.SIGBREAK)
CRASHES = frozenset({signal.SIGABRT, signal.SIGFPE, signal.SIGILL, signal.SIGSEGV})
PRELOAD = ""
KILLED = -9
# a write to a pipe without a reader fails with the second one
BROKEN_PIPE = frozenset({errno.EPIPE, errno.EINVAL})
HAS_OWNERS = False
NO_WAIT = 0
ITSELF = os.O_BINARY | os.O_NOINHERIT
DESCRIPTORS = ""
DRIVERS_SPILL = True

NEW_PROCESS = 0x0800_0004
"""Flags of a new process: no console, so no window and no Ctrl-C, and suspended until it is in its job."""

_KILLED_CODE = 0xE000_0009
"""Exit code that ``Job.end`` gives: no status of Windows, so that others' are told apart."""
_STATUSES = {
    _KILLED_CODE: KILLED,
    3: -signal.SIGABRT,  # abort() of the C library
    0xC000_0005: -signal.SIGSEGV,
    0xC000_00FD: -signal.SIGSEGV,  # the end of the stack
    0xC000_001D: -signal.SIGILL,
    0xC000_0094: -signal.SIGFPE,
    0xC000_013A: -signal.SIGINT,
    0xC000_0409: -signal.SIGABRT,  # __fastfail
    0xE06D_7363: -signal.SIGABRT,  # a C++ exception that nobody caught
}

_TICK = 0.05
"""Seconds between two looks at something that no wait of Windows tells, and longest wait without a look at Ctrl-C."""
_LEAVE_SECONDS = 5.0
"""Seconds after Ctrl-C in which the main thread may end by itself."""
_KEPT_OUTPUT = 1 << 16
_FAR = 1 << 62
"""The byte to lock: beyond any content, because others cannot read a locked byte."""
_LOCKED = 33
"""ERROR_LOCK_VIOLATION"""

_kernel = ctypes.WinDLL("kernel32", use_last_error=True)
_kernel.OpenProcess.restype = _kernel.CreateJobObjectW.restype = _kernel.GetCurrentProcess.restype = wintypes.HANDLE
_kernel.OpenProcess.argtypes = (wintypes.DWORD, wintypes.BOOL, wintypes.DWORD)
_kernel.AssignProcessToJobObject.argtypes = (wintypes.HANDLE, wintypes.HANDLE)
_kernel.TerminateJobObject.argtypes = (wintypes.HANDLE, wintypes.UINT)
_kernel.CloseHandle.argtypes = (wintypes.HANDLE,)
_kernel.SetInformationJobObject.argtypes = (wintypes.HANDLE, ctypes.c_int, ctypes.c_void_p, wintypes.DWORD)
_kernel.GetFinalPathNameByHandleW.argtypes = (wintypes.HANDLE, wintypes.LPWSTR, wintypes.DWORD, wintypes.DWORD)
_kernel.LockFileEx.argtypes = (wintypes.HANDLE, *(wintypes.DWORD,) * 4, ctypes.c_void_p)
for _function in (_kernel.GetFileInformationByHandleEx, _kernel.SetFileInformationByHandle):
    _function.argtypes = (wintypes.HANDLE, ctypes.c_int, ctypes.c_void_p, wintypes.DWORD)
_kernel.DeviceIoControl.argtypes = (
    *(wintypes.HANDLE, wintypes.DWORD, ctypes.c_void_p, wintypes.DWORD, ctypes.c_void_p, wintypes.DWORD),
    *(ctypes.c_void_p, ctypes.c_void_p),
)

# --- worker processes


class Reader:
    """The reading end of a pipe. A thread reads it, because a wait for a pipe has no time limit."""

    def __init__(self, fd: int) -> None:
        self._pieces: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._next: bytes | None = None
        threading.Thread(target=_read_all, args=(fd, self._pieces.put), daemon=True).start()

    def is_ready(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while self._next is None:
            left = deadline - time.monotonic()
            try:
                # in short waits, because Ctrl-C does not end one
                self._next = self._pieces.get(timeout=min(left, _TICK)) if left > 0 else self._pieces.get_nowait()
            except queue.Empty:
                if left <= 0:
                    return False
        return True

    def read(self) -> bytes:
        while not self.is_ready(1.0):
            pass
        piece, self._next = self._next or b"", None
        if not piece:
            # the end stays
            self._next = b""
        return piece

    def close(self) -> None:
        """The thread closes the pipe at its end, which comes with the process."""


def _read_all(fd: int, put: Callable[[bytes], object]) -> None:
    try:
        while piece := os.read(fd, 1 << 16):
            put(piece)
    except OSError:
        # Python's word for the end of some pipes
        pass
    put(b"")
    os.close(fd)


class Job:
    """Processes that end together: with ``end``, and with the process that made the job."""

    def __init__(self) -> None:
        self._handle = _kernel.CreateJobObjectW(None, None)
        # JOBOBJECT_EXTENDED_LIMIT_INFORMATION with JOB_OBJECT_LIMIT_KILL_ON_JOB_CLOSE
        limits = (ctypes.c_uint32 * 36)()
        limits[4] = 0x2000
        if not _kernel.SetInformationJobObject(self._handle, 9, limits, ctypes.sizeof(limits)):
            raise ctypes.WinError(ctypes.get_last_error())

    def adopt(self, pid: int) -> None:
        """Take in a new process, which is suspended, and let it run."""
        process = _kernel.OpenProcess(0x0901, False, pid)  # terminate, set quota, suspend and resume
        try:
            if not process or not _kernel.AssignProcessToJobObject(self._handle, process):
                raise ctypes.WinError(ctypes.get_last_error())
            ctypes.WinDLL("ntdll").NtResumeProcess(wintypes.HANDLE(process))
        finally:
            _kernel.CloseHandle(process)

    def end(self) -> None:
        """Kill all of them, from any thread."""
        _kernel.TerminateJobObject(self._handle, _KILLED_CODE)

    def close(self) -> None:
        """Kill all of them, and forget the job."""
        handle, self._handle = self._handle, None
        if handle:
            _kernel.CloseHandle(handle)


class Child:
    """A worker process. Its standard streams are its pipes, which it moves away first: see ``worker_pipes``."""

    def __init__(self, start: Sequence[str] | Callable[[], object], environment: Mapping[str, str]) -> None:
        import subprocess

        assert not callable(start), "no worker can be a fork"
        self.status: int | None = None
        self._printed = b""
        self._requests: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._job = Job()
        opened: list[int] = []
        try:
            for _ in range(3):
                opened += os.pipe()
            requests, to_child, answers, from_child, printed, output = opened
            self._process = subprocess.Popen(
                start,
                stdin=requests,
                stdout=from_child,
                stderr=output,
                env=environment,
                creationflags=NEW_PROCESS,
            )
            self.pid = self._process.pid
            try:
                self._job.adopt(self.pid)
            except BaseException:
                self._process.kill()
                raise
        except BaseException:
            for fd in opened:
                os.close(fd)
            self._job.close()
            raise
        for fd in (requests, from_child, output):
            os.close(fd)
        self.answers = Reader(answers)
        self._printing = threading.Thread(target=_read_all, args=(printed, self._keep), daemon=True)
        self._printing.start()
        threading.Thread(target=_write_all, args=(to_child, self._requests.get), daemon=True).start()

    def _keep(self, piece: bytes) -> None:
        self._printed = (self._printed + piece)[-_KEPT_OUTPUT:]

    def send(self, data: bytes, deadline: float) -> bool:
        self._requests.put(data)
        return True

    def close_requests(self) -> None:
        self._requests.put(b"")

    def kill(self) -> None:
        if self.status is None:
            self._job.end()

    interrupt = kill

    def wait(self) -> int:
        while self._process.poll() is None:
            # in short waits, because Ctrl-C does not end one
            time.sleep(_TICK / 10)
        self.status = status_of(self._process.returncode)
        return self.status

    def output(self) -> bytes:
        self._printing.join(1.0)
        return self._printed

    def close(self) -> None:
        self._job.close()


def _write_all(fd: int, take: Callable[[], bytes]) -> None:
    try:
        while piece := take():
            while piece:
                piece = piece[os.write(fd, piece) :]
    except OSError:
        # the process is gone, which the reader of its answers sees
        pass
    os.close(fd)


def quiet_crashes() -> None:
    # SEM_FAILCRITICALERRORS, SEM_NOGPFAULTERRORBOX
    _kernel.SetErrorMode(3)


def worker_pipes() -> tuple[int, int]:
    quiet_crashes()
    pipes = os.dup(0), os.dup(1)
    # what llama.cpp prints is no answer
    os.dup2(2, 1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    return pipes


def close_inherited() -> None:
    """A process inherits nothing by accident."""


def open_files() -> Iterable[int]:
    # there is no list of them
    return ()


def status_of(code: int) -> int:
    return _STATUSES.get(code, code)


# --- files


class Folder:
    """A folder with a lock: a file elsewhere, because a folder here can be neither opened nor removed while it is."""

    def __init__(self, path: str | Path) -> None:
        if not os.path.isdir(path) or os.path.islink(path):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), os.fspath(path))
        place = os.path.join(os.environ.get("LOCALAPPDATA") or os.path.expanduser("~"), "llama-fitter", "locks")
        os.makedirs(place, exist_ok=True)
        name = os.path.normcase(os.path.realpath(path))
        self._path = os.path.join(place, hashlib.sha256(os.fsencode(name)).hexdigest())
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | ITSELF)

    def lock(self, *, is_shared: bool = False, waits: bool = False) -> None:
        _lock(self._fd, is_shared, waits)

    def is_at(self, path: str | Path) -> bool:
        return os.path.isdir(path)

    def close(self) -> None:
        os.close(self._fd)
        with contextlib.suppress(OSError):
            # unless others have it open
            os.unlink(self._path)


def lock_file(file: IO[bytes], *, waits: bool) -> None:
    _lock(file.fileno(), False, waits)


def _lock(fd: int, is_shared: bool, waits: bool) -> None:
    place = (ctypes.c_uint64 * 4)(0, 0, _FAR)  # OVERLAPPED
    flags = 1 if is_shared else 3  # LOCKFILE_FAIL_IMMEDIATELY, LOCKFILE_EXCLUSIVE_LOCK
    while not _kernel.LockFileEx(msvcrt.get_osfhandle(fd), flags, 0, 1, 0, place):
        if (code := ctypes.get_last_error()) != _LOCKED:
            raise ctypes.WinError(code)
        if not waits:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        # in short waits, because Ctrl-C does not end one
        time.sleep(_TICK)


def replace(source: Path, target: Path) -> None:
    for left in range(20, -1, -1):
        try:
            source.replace(target)
            return
        except PermissionError:
            # while others read the target
            if not left or target.is_dir():
                raise
            time.sleep(_TICK)


def copy_mode(source: Path, descriptor: int) -> None:
    """Permissions belong to folders."""


def sync_folder(path: Path) -> None:
    """Windows writes names by itself."""


def path_of(descriptor: int) -> str:
    buffer = ctypes.create_unicode_buffer(1 << 15)
    if not _kernel.GetFinalPathNameByHandleW(msvcrt.get_osfhandle(descriptor), buffer, len(buffer), 0):
        raise ctypes.WinError(ctypes.get_last_error())
    # a plain path, if it may be one
    return buffer.value[4:] if len(buffer.value) < 260 and buffer.value[5:6] == ":" else buffer.value


def path_of_url(path: str) -> str:
    from urllib.request import url2pathname

    return url2pathname(path)


def close_file(descriptor: int) -> None:
    path = path_of(descriptor)
    os.close(descriptor)
    with contextlib.suppress(OSError):
        # unless it is still open elsewhere: then it is removed with the worker's folder
        os.unlink(path)


def disk_bytes(path: str | os.PathLike[str]) -> int:
    if not os.path.isfile(path):
        return 0
    descriptor = os.open(path, os.O_RDONLY | ITSELF)
    try:
        information = (ctypes.c_int64 * 3)()  # FILE_STANDARD_INFO
        if not _kernel.GetFileInformationByHandleEx(msvcrt.get_osfhandle(descriptor), 1, information, 24):
            raise ctypes.WinError(ctypes.get_last_error())
        return information[0]
    finally:
        os.close(descriptor)


def extend(file: IO[bytes], size: int) -> None:
    file.flush()
    handle, returned = msvcrt.get_osfhandle(file.fileno()), wintypes.DWORD()
    # without it the rest is written: FSCTL_SET_SPARSE, which not every file system knows
    _kernel.DeviceIoControl(handle, 0x900C4, None, 0, None, 0, ctypes.byref(returned), None)
    # FileEndOfFileInfo
    if not _kernel.SetFileInformationByHandle(handle, 6, ctypes.byref(ctypes.c_int64(size)), 8):
        raise ctypes.WinError(ctypes.get_last_error())


def drop_cached(descriptor: int, begin: int, size: int) -> bool:
    return False


def user() -> int:
    # the folder for temporary files is the user's own
    return 0


def is_private(status: os.stat_result) -> bool:
    return stat.S_ISDIR(status.st_mode)


# --- the terminal


def is_console(number: int) -> bool:
    return os.isatty(number)


def wait_writable(number: int) -> None:
    time.sleep(_TICK)


def watch_interrupts(leave: Callable[[int, object], object]) -> None:
    # Ctrl-C ends no wait of the main thread for a lock
    signals, wake = os.pipe()
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)

    def watch() -> None:
        number = os.read(signals, 1)[0]
        time.sleep(_LEAVE_SECONDS)
        leave(number, None)

    threading.Thread(target=watch, daemon=True).start()


def has_display() -> bool:
    return True


# --- the machine


def processor() -> str:
    # not platform's, which asks a service
    import winreg

    with winreg.OpenKey(winreg.HKEY_LOCAL_MACHINE, r"HARDWARE\DESCRIPTION\System\CentralProcessor\0") as key:
        return str(winreg.QueryValueEx(key, "ProcessorNameString")[0]).strip()


def processors() -> int:
    return os.cpu_count() or 1


def physical_memory() -> int:
    return _memory()[1]


def free_memory() -> int:
    return _memory()[2]


def _memory() -> Sequence[int]:
    status = (ctypes.c_uint64 * 8)(64)  # MEMORYSTATUSEX
    _kernel.GlobalMemoryStatusEx(status)
    return status[:]


def own_memory() -> int:
    counters = (ctypes.c_size_t * 10)(80)  # PROCESS_MEMORY_COUNTERS_EX
    _kernel.K32GetProcessMemoryInfo(wintypes.HANDLE(_kernel.GetCurrentProcess()), counters, 80)
    # committed bytes that were not used do not count, nor do used ones of files
    return min(counters[2], counters[9])


def stack_limit() -> int:
    return -1


def is_address_space_limited() -> bool:
    return False
