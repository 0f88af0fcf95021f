"""The seam between fitter and the system, on each system that runs these tests."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from fitter import system
from fitter.llama.processes.supervisor import SupervisedProgram
from tests.support.cases import cases

START = "import os, sys; from fitter import system; system.close_inherited(); pipes = system.worker_pipes()\n"
"""Code with which a worker process begins."""
ECHO = "while piece := os.read(pipes[0], 1 << 16): os.write(pipes[1], piece)"
SLEEP = "import time; time.sleep(60)"
FAULT = """\
import ctypes, time
# ctypes makes an exception of a fault of this thread on Windows
system.CAN_FORK or ctypes.WinDLL("kernel32").CreateThread(None, 0, None, None, 0, None) and time.sleep(60)
ctypes.string_at(0)
"""
PATIENCE = 60.0


def command(code: str) -> list[str]:
    return [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}\n{code}"]


def child(code: str) -> system.Child:
    return system.Child(command(START + code), os.environ)


def answer(of: system.Child) -> bytes:
    """Everything until the end of its answers."""
    text = b""
    while piece := of.answers.read():
        text += piece
    return text


def closed(of: system.Child) -> int:
    """Its exit status; everything of it is closed."""
    of.close_requests()
    status = of.wait()
    of.close()
    return status


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def end_of(pid: int) -> bool:
    """Whether a process ends soon."""
    until = time.monotonic() + PATIENCE
    while is_running(pid) and time.monotonic() < until:
        time.sleep(0.05)
    return not is_running(pid)


@pytest.mark.skipif(sys.platform == "win32", reason="a thread of its own closes the pipe there")
def test_a_pipe_that_another_thread_closes_is_at_its_end() -> None:
    reading, writing = os.pipe()
    reader = system.Reader(reading)
    reader.close()
    other = os.open(__file__, os.O_RDONLY)
    assert other == reading, "a new file has the number"
    assert reader.is_ready(0.0) and reader.read() == b""
    os.close(other)
    os.close(writing)


def test_a_child_answers_what_it_is_asked() -> None:
    echo, asked = child(ECHO), bytes(range(256)) * 100 + b"\r\n\x1a\n"
    assert echo.send(asked, time.monotonic() + PATIENCE)
    text = b""
    while len(text) < len(asked):
        text += echo.answers.read()
    assert text == asked and not echo.answers.is_ready(0)
    echo.close_requests()
    assert answer(echo) == b"" and echo.answers.read() == b"", "the end stays"
    assert (echo.wait(), echo.status) == (0, 0)
    echo.close()


def test_a_wait_for_an_answer_has_an_end() -> None:
    silent = child(SLEEP)
    start = time.monotonic()
    assert not silent.answers.is_ready(0.2) and time.monotonic() - start >= 0.2
    silent.kill()
    assert answer(silent) == b"" and closed(silent) == system.KILLED


def test_what_a_child_prints_is_no_answer() -> None:
    printing = child("print('on stdout', flush=True); os.write(2, b'x' * 200000); os.write(1, b'at the end')")
    assert answer(printing) == b"" and closed(printing) == 0


def test_the_end_of_what_it_printed_is_kept() -> None:
    printing = child("os.write(2, b'x' * 200000); os.write(1, b'at the end')")
    printing.close_requests()
    assert answer(printing) == b"" and printing.wait() == 0
    text = printing.output()
    assert len(text) == 1 << 16 and text.endswith(b"xxat the end")
    printing.close()


@cases(("sys.exit(7)", 7), (FAULT, -signal.SIGSEGV), ("os.abort()", -signal.SIGABRT))
def test_a_crash_has_the_number_of_a_signal(code: str, status: int) -> None:
    crashing = child(code)
    assert answer(crashing) == b"" and closed(crashing) == status
    assert status > 0 or -status in system.CRASHES


def test_a_child_that_is_gone_takes_everything() -> None:
    gone = child("os._exit(0)")
    assert answer(gone) == b""
    assert gone.send(b"x" * (1 << 20), time.monotonic() + PATIENCE) and closed(gone) == 0


def test_a_child_reads_nothing_and_prints_nothing_to_the_terminal() -> None:
    reading = child("os.write(pipes[1], repr(os.read(0, 1)).encode())")
    assert reading.send(b"for the pipe alone", time.monotonic() + PATIENCE)
    assert answer(reading) == b"b''" and closed(reading) == 0


def test_a_child_ends_with_a_parent_that_is_killed() -> None:
    code = f"import os, time; from fitter import system\nchild = system.Child({command(START + ECHO)!r}, os.environ)\n"
    parent = subprocess.Popen(command(code + "print(child.pid, flush=True); time.sleep(60)"), stdout=subprocess.PIPE)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    assert is_running(pid)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert end_of(pid)


def test_a_program_that_is_missing_is_named() -> None:
    with pytest.raises(FileNotFoundError) as caught:
        SupervisedProgram([os.path.abspath("nowhere.exe")], os.environ)
    assert os.path.basename(str(caught.value.filename)) == "nowhere.exe"


def test_a_program_ends_with_all_that_it_started() -> None:
    code = f"import subprocess; print(subprocess.Popen({command(SLEEP)!r}).pid, flush=True); {SLEEP}"
    with SupervisedProgram(command(code), os.environ) as program:
        pid = int(program.output.readline())
        assert (is_running(pid), program.status, program.wait(0.01)) == (True, None, None)
    assert end_of(pid) and end_of(program.pid) and program.status is not None
    program.output.close()


def test_a_program_says_how_it_ended() -> None:
    with SupervisedProgram(command("print('done'); raise SystemExit(7)"), os.environ) as program:
        assert (program.output.read().split(), program.wait(PATIENCE)) == ([b"done"], 7)
    assert program.status == 7
    program.output.close()


def test_locks_of_folders_exclude_each_other(tmp_path: Path) -> None:
    shared, other, third = (system.Folder(tmp_path) for _ in range(3))
    shared.lock(is_shared=True)
    other.lock(is_shared=True)
    with pytest.raises(BlockingIOError):
        third.lock()
    shared.close()
    other.close()
    third.lock()
    assert third.is_at(tmp_path)
    fourth = system.Folder(tmp_path)
    with pytest.raises(BlockingIOError):
        fourth.lock(is_shared=True)
    third.close()
    fourth.lock(waits=True)
    fourth.close()


def test_a_folder_that_is_locked_can_be_moved_and_removed(tmp_path: Path) -> None:
    path = tmp_path / "ä folder"
    path.mkdir()
    folder = system.Folder(path)
    folder.lock()
    path.rename(tmp_path / "moved")
    (tmp_path / "moved").rmdir()
    folder.close()
    assert not list(tmp_path.iterdir())
    for wrong in (path, Path(__file__)):
        with pytest.raises(OSError, match=r"."):
            system.Folder(wrong)


def test_a_lock_ends_with_its_process(tmp_path: Path) -> None:
    holding = child(f"folder = system.Folder({str(tmp_path)!r}); folder.lock(); os.write(pipes[1], b'.'); {SLEEP}")
    assert holding.answers.read() == b"."
    folder = system.Folder(tmp_path)
    with pytest.raises(BlockingIOError):
        folder.lock()
    holding.kill()
    assert closed(holding) == system.KILLED
    folder.lock()
    folder.close()


def test_a_locked_file_is_read_and_written_by_its_owner(tmp_path: Path) -> None:
    path = tmp_path / "a"
    with open(path, "ab+", buffering=0) as file, open(path, "rb") as other:
        system.lock_file(file, waits=False)
        file.write(b"content")
        assert other.read() == b"content"
        with open(path, "ab") as second, pytest.raises(BlockingIOError):
            system.lock_file(second, waits=False)
    with open(path, "ab") as second:
        system.lock_file(second, waits=True)


def test_a_file_that_is_read_for_a_moment_is_replaced(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    old.write_bytes(b"old")
    new.write_bytes(b"new")
    reading = child(f"file = open({str(old)!r}); os.write(pipes[1], b'.'); import time; time.sleep(0.3)")
    assert reading.answers.read() == b"."
    system.replace(new, old)
    assert (old.read_bytes(), closed(reading)) == (b"new", 0)


def test_an_open_file_has_a_path(tmp_path: Path) -> None:
    path = tmp_path / "ä b"
    with open(path, "wb") as file:
        file.write(b"content")
    descriptor = os.open(path, os.O_RDONLY | system.ITSELF)
    with open(system.path_of(descriptor), "rb") as again:
        assert again.read() == b"content"
    system.close_file(descriptor)
    with pytest.raises(OSError, match=r"."):
        os.fstat(descriptor)


def test_bytes_on_the_disk(tmp_path: Path) -> None:
    path = tmp_path / "a"
    with path.open("wb") as file:
        file.write(b"x" * 100_000)
        system.extend(file, 1 << 40)
        assert file.tell() == 100_000
    assert path.stat().st_size == 1 << 40
    assert 100_000 <= system.disk_bytes(path) < 200_000


def test_the_machine() -> None:
    before, filled = system.own_memory(), bytearray(os.urandom(1)) * (256 << 20)
    assert 200 << 20 < system.own_memory() - before < 300 << 20 or not before
    assert system.physical_memory() == pytest.approx(psutil.virtual_memory().total, rel=0.01) and filled
    assert system.processors() >= 1


def test_a_write_without_a_reader() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with pytest.raises(OSError, match=r".") as caught:
        os.write(writing, b"x")
    os.close(writing)
    assert caught.value.errno in system.BROKEN_PIPE
