"""What fitter keeps: where only its user may write, whole or not at all, and no longer than it is needed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from fitter.llama.build.verdicts import answer_path, answers_folder, asked_alone, read_answer, write_answer
from fitter.machine import bandwidth
from fitter.storage import (
    TemporaryDirectory,
    cache_folder,
    is_lasting,
    locked,
    make_private,
    read_regular,
    remove_temporary,
    replacing,
)
from tests.support.cases import cases, named_cases

# --- files


def test_a_file_is_whole_or_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with replacing(path) as file:
        file.write(b"old")
    with pytest.raises(RuntimeError, match="in the middle"), replacing(path) as file:
        file.write(b"new")
        raise RuntimeError("in the middle")
    assert read_regular(path) == b"old"
    with replacing(path) as file:
        file.write(b"new")
        (name,) = {*os.listdir(tmp_path)} - {"file"}
    assert read_regular(path) == b"new"
    assert os.listdir(tmp_path) == ["file"]
    with replacing(path) as file:
        assert name not in os.listdir(tmp_path), "nobody can guess the next name"


def test_what_takes_the_place_of_a_link_is_no_link(tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_text("of somebody else")
    link.symlink_to(target)
    with replacing(link) as file:
        file.write(b"new")
    assert (link.is_symlink(), link.read_text(), target.read_text()) == (False, "new", "of somebody else")


NO_FILES: dict[str, Callable[[Path], object]] = {
    "a link": lambda path: path.symlink_to(__file__),
    "a pipe, which nobody writes into": os.mkfifo,
    "a directory": os.mkdir,
    "a device": lambda path: path.symlink_to("/dev/zero"),
}


@cases(NO_FILES)
def test_only_a_file_itself_is_read(make: Callable[[Path], object], tmp_path: Path) -> None:
    make(tmp_path / "file")
    with pytest.raises(OSError, match=r"symbolic links|not a regular file|directory"):
        read_regular(tmp_path / "file")


@cases(NO_FILES)
def test_whatever_is_in_the_cache_nobody_waits(
    make: Callable[[Path], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    make_private(answers_folder())
    make(answer_path("name"))
    make(answers_folder() / "lock")
    make(bandwidth.cache_path())
    assert read_answer("name") is None
    with asked_alone():
        write_answer("name", {"a": 1})
    assert (read_answer("name") is None) == (make is os.mkdir)
    assert bandwidth.host_speed(lambda cores: 50e9).source == "measured"


def test_a_file_is_locked_by_one_at_a_time(tmp_path: Path) -> None:
    order: list[str] = []

    def second() -> None:
        with locked(tmp_path / "lock"):
            order.append("second")

    with locked(tmp_path / "lock"):
        other = threading.Thread(target=second)
        other.start()
        other.join(0.2)
        order.append("first")
    other.join()
    assert order == ["first", "second"]


# --- the cache


def of_somebody_else(path: Path) -> None:
    path.mkdir(parents=True)
    if os.geteuid():
        pytest.skip("only root can give a directory away")
    os.chown(path, 12345, 12345)


def link_of_somebody_else(path: Path) -> None:
    (path.parent / "own").mkdir(parents=True)
    path.symlink_to("own")
    if os.geteuid():
        pytest.skip("only root can give a link away")
    os.lchown(path, 12345, 12345)


def writable(mode: int) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        path.mkdir(parents=True)
        path.chmod(mode)

    return make


def below_one_that_is_writable(path: Path) -> None:
    path.mkdir(parents=True)
    path.parent.chmod(0o777)


OTHERS = "so nothing is kept there: set XDG_CACHE_HOME to a directory of your own"
OWN = "{place} may be written by others, so nothing is kept there: chmod 700 {place}"


@named_cases(
    ("of somebody else", of_somebody_else, "{place} belongs to somebody else, " + OTHERS),
    ("a link of somebody else", link_of_somebody_else, "{place} belongs to somebody else, " + OTHERS),
    ("writable for all", writable(0o777), OWN),
    ("writable, and sticky", writable(0o1777), OWN),
    ("writable for the group", writable(0o770), OWN),
    ("below one that is writable", below_one_that_is_writable, "{place.parent} may be written by others, " + OTHERS),
)
def test_a_cache_that_others_may_write_is_not_used(
    make: Callable[[Path], None], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    place = tmp_path / "cache/llama-fitter"
    make(place)
    with pytest.warns(UserWarning) as said:
        write_answer("name", {"a": 1})
    assert [str(each.message) for each in said] == [message.format(place=place)]
    with warnings.catch_warnings():
        # it is said once
        warnings.simplefilter("error")
        assert read_answer("name") == {"a": 1}, "the rest of this process has it"
        assert not is_lasting()
    assert not [*place.iterdir()]
    remove_temporary()


def test_a_cache_is_made_for_its_user_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "a" / "cache"))
    os.umask(before := os.umask(0))
    try:
        os.umask(0o002)
        write_answer("name", {"a": 1})
    finally:
        os.umask(before)
    for path in (tmp_path / "a", tmp_path / "a/cache", cache_folder(), answers_folder()):
        assert path.stat().st_mode & 0o777 == 0o700
    assert is_lasting()


@cases(0o700, 0o755)
def test_a_cache_that_others_may_read_is_used(mode: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "llama-fitter").symlink_to("own")
    (tmp_path / "own").chmod(mode)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    write_answer("name", {"a": 1})
    assert [*(tmp_path / "own/llama-cpp").iterdir()] == [answer_path("name").resolve()]


# --- directories that do not last


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def test_a_directory_is_private_and_goes(place: Path) -> None:
    with TemporaryDirectory() as first, TemporaryDirectory() as second:
        (own,) = place.iterdir()
        assert {Path(first).parent, Path(second).parent} == {own}
        assert [path.stat().st_mode & 0o777 for path in (own, Path(first))] == [0o700, 0o700]
        (Path(first) / "file").write_text("")
    assert not [*place.iterdir()]


KILLED = """
import os, signal, tempfile
tempfile.tempdir = {place!r}
from fitter.storage import TemporaryDirectory
left = TemporaryDirectory()
open(left.name + "/file", "w").close()
if {is_forked} and os.fork():
    os._exit(0)
print(left.name, flush=True)
{end}
"""


def left_by(place: Path, end: str, is_forked: bool = False) -> subprocess.Popen[str]:
    code = KILLED.format(place=str(place), end=end, is_forked=is_forked)
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True)


def test_what_a_killed_process_has_left_is_swept(place: Path) -> None:
    with left_by(place, "os.kill(os.getpid(), signal.SIGKILL)") as killed:
        assert killed.stdout is not None
        left = Path(killed.stdout.readline().strip())
    assert killed.returncode == -signal.SIGKILL and left.is_dir()
    with TemporaryDirectory() as own:
        assert [*place.glob("*/*")] == [Path(own)]
    assert not [*place.iterdir()]


def test_what_somebody_uses_stays(place: Path) -> None:
    with left_by(place, "input()") as process:
        assert process.stdout is not None and process.stdin is not None
        used = Path(process.stdout.readline().strip())
        with TemporaryDirectory():
            assert (used / "file").is_file()
        process.stdin.close()
    assert not used.exists(), "it ends with an error, and its directory with it"


def test_a_fork_removes_nothing(place: Path) -> None:
    with TemporaryDirectory() as own:
        if not (pid := os.fork()):
            remove_temporary()
            os._exit(0)
        os.waitpid(pid, 0)
        assert Path(own).is_dir()


@named_cases(
    ("a link", lambda path: path.symlink_to(path.parent)),
    ("a file", lambda path: path.write_text("")),
    ("writable for others", writable(0o777)),
    ("of somebody else", of_somebody_else),
)
def test_a_name_that_somebody_else_has(make: Callable[[Path], object], place: Path) -> None:
    taken = place / f"fitter-{os.geteuid()}"
    make(taken)
    with TemporaryDirectory() as own:
        assert Path(own).parent == place
        assert Path(own).stat().st_mode & 0o777 == 0o700
    assert [*place.iterdir()] == [taken]


def test_many_make_and_sweep_at_once(place: Path) -> None:
    """Each has its own until it is done, though all of them remove what is above them."""
    code = KILLED.partition("left =")[0].format(place=str(place)) + (
        "for _ in range(200):\n"
        "    with TemporaryDirectory() as own:\n"
        "        open(own + '/file', 'x').close()\n"
        "        assert os.listdir(own) == ['file']\n"
    )
    processes = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(3)]
    assert [process.wait() for process in processes] == [0, 0, 0]
    assert not [*place.iterdir()]
