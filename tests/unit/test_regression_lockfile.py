"""``fitter.lock``: read as written, never half written, and one clear line where it cannot be read."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from fitter.errors import AnswerError, UsageError
from fitter.llama.types import Params, TensorInfo
from fitter.regression import lockfile
from fitter.regression.lockfile import Lock, LockedPool, alone, dumps, read_lock, write_lock
from fitter.storage import replace_document
from tests.support.cases import cases, named_cases
from tests.support.snapshots import SNAPSHOT

NOT_FITTING = replace(SNAPSHOT, fits=False, estimate=None, params=Params(devices=()), devices={})
SERVED = replace(
    SNAPSHOT,
    params=replace(SNAPSHOT.params, n_outputs_max=4, more=(("cache_ram", 512), ("cache_idle_slots", False))),
    host=replace(SNAPSHOT.host, later=512 << 20),
)
POOLED = replace(SNAPSHOT, pools={"CUDA0+host": LockedPool(64 << 30, 60 << 30, 1 << 30, 50 << 30)})
LOCK = Lock({"b": SNAPSHOT, "a/x.y": NOT_FITTING, "served": SERVED, "pooled": POOLED})


def test_read_as_written(tmp_path: Path) -> None:
    path = tmp_path / "fitter.lock"
    write_lock(path, LOCK)
    assert read_lock(path) == LOCK
    text = path.read_text()
    assert text.endswith("\n")
    assert text.count("later") == text.count(".pools.") == 1, "a lock says nothing of what is nothing"
    assert text.index('[cases."a/x.y"]') < text.index("[cases.b]")
    assert dumps(Lock(dict(reversed(list(LOCK.cases.items()))))) == text, "the order of cases is no matter"
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~_umask()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


TEXT = dumps(Lock({"b": SNAPSHOT}))


@named_cases(
    ("missing", None, "fitter.lock does not exist: run 'fitter lock' to make it"),
    (
        "of a later one",
        "schema = 2\nmore = 1\n",
        "has schema 2, but this fitter reads schema 1: install a newer fitter",
    ),
    ("no lock", "a = 1\n", "is not a lock that fitter wrote: run 'fitter lock' to make one"),
    ("a schema that is none", "schema = true\n", "is not a lock that fitter wrote"),
    ("a schema below 1", "schema = 0\n", "is damaged: run 'fitter lock'"),
    (
        "conflict",
        "schema = 1\n<<<<<<< HEAD\na = 1\n=======\na = 2\n>>>>>>> main\n",
        "has a merge conflict in line 2: resolve it in fitter.toml, then run 'fitter lock'",
    ),
    ("no TOML", "schema 1", "is not valid TOML"),
    ("no text", b"\xff\xfe\x00", "is not UTF-8 text"),
    ("cut off", TEXT[: TEXT.index("[cases.b.params]")], "the case 'b' is damaged .*: run 'fitter lock --update b'"),
    ("another type", TEXT.replace("n_ctx = 8192", 'n_ctx = "8192"', 1), "the case 'b' is damaged"),
    ("an unknown key", TEXT.replace("fits = true", "fits = true\nfit = 1"), "the case 'b' is damaged .*has no fit"),
    ("no table", "schema = 1\n[cases]\nb = 1\n", "the case 'b' is damaged"),
    ("tables that are lists", "schema = 1\ncases = []\n", "is damaged"),
)
def test_one_clear_line(content: str | bytes | None, says: str, tmp_path: Path) -> None:
    path = tmp_path / "fitter.lock"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UsageError, match=says) as caught:
        read_lock(path)
    assert "\n" not in str(caught.value)


def test_a_model_in_its_place(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    with path.open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(UsageError, match="is not UTF-8 text, so it is not a TOML file"):
        read_lock(path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_that_is_not_ours(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(AnswerError, match="cannot be written"):
        write_lock(tmp_path / "fitter.lock", LOCK)


def test_a_directory_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(AnswerError, match=r"nowhere/fitter\.lock cannot be written: No such file"):
        write_lock(tmp_path / "nowhere" / "fitter.lock", LOCK)


# --- never half written

KILLED = """
import os, signal, sys
from pathlib import Path
from fitter.storage import replace_document
Path.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
replace_document(Path(sys.argv[1]), b"new" * 1000000)
"""


def test_killed_before_the_rename(tmp_path: Path) -> None:
    path = tmp_path / "fitter.lock"
    path.write_bytes(b"old")
    done = subprocess.run([sys.executable, "-c", KILLED, str(path)], check=False)
    assert done.returncode == -signal.SIGKILL
    assert path.read_bytes() == b"old"
    left = [each for each in tmp_path.iterdir() if each != path]
    assert len(left) == 1
    replace_document(path, b"newer")
    assert left[0].exists(), "it could be another writer's"
    os.utime(left[0], (time.time() - 61, time.time() - 61))
    replace_document(path, b"newest")
    assert [each.name for each in tmp_path.iterdir()] == ["fitter.lock"]
    assert path.read_bytes() == b"newest"


WRITING = """
import sys
from pathlib import Path
from fitter.storage import replace_document
print("ready", flush=True)
while True:
    for sign in (b"a", b"b"):
        replace_document(Path(sys.argv[1]), sign * 3000000)
"""


def test_killed_at_any_moment(tmp_path: Path) -> None:
    path = tmp_path / "fitter.lock"
    path.write_bytes(b"a" * 3000000)
    for run in range(8):
        with subprocess.Popen([sys.executable, "-c", WRITING, str(path)], stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            time.sleep(0.003 * run)
            process.kill()
        content = path.read_bytes()
        assert (len(content), len(set(content))) == (3000000, 1)


def test_an_error_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "fitter.lock"
    path.write_bytes(b"old")

    def fail(*_: object) -> None:
        raise OSError("no")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(AnswerError, match="cannot be written: no"):
        replace_document(path, b"new")
    assert [(each.name, each.read_bytes()) for each in tmp_path.iterdir()] == [("fitter.lock", b"old")]


def test_permissions_and_links_stay(tmp_path: Path) -> None:
    target = tmp_path / "real.lock"
    target.write_bytes(b"old")
    target.chmod(0o640)
    link = tmp_path / "fitter.lock"
    link.symlink_to(target)
    replace_document(link, b"new")
    assert (link.is_symlink(), target.read_bytes(), stat.S_IMODE(target.stat().st_mode)) == (True, b"new", 0o640)


def test_a_pipe_stays_one(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    with subprocess.Popen(["cat", str(path)], stdout=subprocess.PIPE) as process:
        replace_document(path, b"new")
        assert process.communicate(timeout=120)[0] == b"new"
    assert stat.S_ISFIFO(path.stat().st_mode)


# --- one at a time

COUNTING = """
import sys
from pathlib import Path
from fitter.regression.lockfile import alone
from fitter.storage import replace_document
path = Path(sys.argv[1])
for _ in range(25):
    with alone(path):
        replace_document(path, b"%d" % (int(path.read_bytes()) + 1))
"""

HOLDING = """
import sys, time
from pathlib import Path
from fitter.regression.lockfile import alone
with alone(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_no_change_is_lost(tmp_path: Path) -> None:
    path = tmp_path / "fitter.lock"
    path.write_bytes(b"0")
    processes = [subprocess.Popen([sys.executable, "-c", COUNTING, str(path)]) for _ in range(4)]
    assert [process.wait(120) for process in processes] == [0] * 4
    assert path.read_bytes() == b"100"
    assert [each.name for each in tmp_path.iterdir()] == ["fitter.lock"]


def test_who_holds_it_for_long_is_not_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "sub" / "fitter.lock"
    path.parent.mkdir()
    (tmp_path / "link.lock").symlink_to(path)
    command = [sys.executable, "-c", HOLDING, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin and process.stdout and process.stdout.readline() == b"held\n"
        said = r"link\.lock cannot be written: another process has locked its directory for 0 seconds: end that process"
        with pytest.raises(AnswerError, match=said), alone(tmp_path / "link.lock", 0.2):
            pytest.fail("somebody else has it")
        with alone(tmp_path / "fitter.lock"):
            write_lock(tmp_path / "fitter.lock", LOCK)
        process.stdin.close()
        process.wait(120)
    with alone(path):
        write_lock(path, LOCK)
    with alone(path):
        assert read_lock(path) == LOCK
    assert [each.name for each in path.parent.iterdir()] == ["fitter.lock"]


def test_a_place_that_is_none_is_left_to_who_writes(tmp_path: Path) -> None:
    path = tmp_path / "no" / "fitter.lock"
    said = r"no/fitter\.lock cannot be written: No such file or directory"
    with pytest.raises(AnswerError, match=said), alone(path):
        write_lock(path, LOCK)


@cases("directory", "pipe", "device")
def test_something_else_in_its_place(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "fitter.lock"
    if kind == "directory":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(os.devnull)
    with pytest.raises(AnswerError, match=f"fitter.lock cannot be written: it is a {kind}, but a lock must be a file"):
        write_lock(path, LOCK)
    with pytest.raises(UsageError, match=f"fitter.lock is a {kind}, but a lock must be a file"):
        read_lock(path)


# --- headers


def test_types_of_tensors() -> None:
    types = {f"blk.{i}.ffn_up.weight": "q4_K" for i in (0, 1, 2, 4, 5, 31)} | {"blk.3.ffn_up.weight": "q8_0"}
    types |= {"output.weight": "q6_K", "enc.blk.0.a": "f32", "enc.blk.1.a": "f32"}
    summary = lockfile.summarize_types(TensorInfo(name, kind, (1,), 1) for name, kind in types.items())
    assert summary == {
        "blk.*.ffn_up.weight": "q4_K 0-2,4-5,31; q8_0 3",
        "enc.blk.*.a": "f32 0-1",
        "output.weight": "q6_K",
    }
    assert lockfile.expand_types(summary) == types


def test_a_digest_is_of_the_header_alone(tmp_path: Path) -> None:
    files = [tmp_path / "a", tmp_path / "b"]
    files[0].write_bytes(b"header" + b"weights")
    files[1].write_bytes(b"second")
    digest = lockfile.header_digest(files, (6, 6))
    files[0].write_bytes(b"header" + b"others.")
    assert lockfile.header_digest(files, (6, 6)) == digest
    files[1].write_bytes(b"sec0nd")
    assert lockfile.header_digest(files, (6, 6)) != digest
