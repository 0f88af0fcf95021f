"""Commands and their unhappy paths, on each system that runs these tests: Windows' Python runs them under wine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from fitter import system
from fitter.cli import main
from fitter.errors import LlamaCppCrashError, WorkerError
from fitter.llama.client import Worker
from fitter.machine.gpu import parse_gpus
from tests.support import full_disk as full_disk_support
from tests.support.cases import cases, named_cases
from tests.support.patience import with_more_time
from tools.models.tiny import write_tiny

GPU = ("--gpu", "1GiB", "--fit-target", "64")
PATIENCE = 120.0
ANSWER_SECONDS = 15
"""More than a worker takes to start."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model; names with a space, an umlaut and more than some systems' usual 260 characters."""
    folder = tmp_path_factory.mktemp("ä b") / ("long name " * 10).strip() / ("ö" * 100)
    os.makedirs(folder)
    write_tiny(folder / "modèl 1.gguf")
    return folder


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for temporary files, alone with this test."""
    for name in ("TMPDIR", "TEMP", "TMP"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


def started(*words: object) -> subprocess.Popen[bytes]:
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [sys.executable, "-m", "fitter", *map(str, words)], stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe
    )


def fitter(*words: object) -> tuple[int, str, str]:
    """Run the command; return its status, stdout and stderr."""
    process = started(*words)
    out, err = process.communicate(timeout=PATIENCE)
    return process.returncode, out.decode(errors="replace"), err.decode(errors="replace")


def one_line(said: str) -> str:
    """Return the only line of an error."""
    (line,) = said.splitlines()
    assert line.startswith("fitter: error: ")
    return line


@contextmanager
def nothing_left(place: Path) -> Iterator[None]:
    """Check that the block leaves no process and no temporary file."""
    with no_process_left():
        yield
    assert [str(path) for path in place.rglob("*")] == []


@contextmanager
def no_process_left() -> Iterator[None]:
    """Check that the block leaves no process."""
    before = {each.pid for each in psutil.Process().children(recursive=True)}
    yield
    until = time.monotonic() + PATIENCE
    while left := {each.pid for each in psutil.Process().children(recursive=True)} - before:
        assert time.monotonic() < until, left
        time.sleep(0.05)


def test_a_plan(folder: Path, place: Path) -> None:
    with nothing_left(place):
        status, out, err = fitter(folder / "modèl 1.gguf", *GPU, "--json")
    assert status == 0, err
    plan = json.loads(out)
    assert plan["fits"] and plan["model"]["path"] == str(folder / "modèl 1.gguf")
    assert plan["params"]["n_gpu_layers"] == 5


def test_a_plan_by_an_address(folder: Path) -> None:
    status, out, err = fitter((folder / "modèl 1.gguf").as_uri(), *GPU)
    assert (status, "-ngl 5" in out) == (0, True), err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("inspect", "MODEL"), "tiny moe"),
        (("quants", "MODEL", *GPU), "Q4_K_M"),
        (("explore", "MODEL", *GPU, "-c", "1024,2048", "-j", "2"), "2 plans: 2 fit"),
        (("devices",), "host"),
        (("--shape", "qwen3-0.6b", *GPU), "-c "),
    ],
    ids=lambda words: words[0] if isinstance(words, tuple) else "",
)
def test_a_command(words: tuple[str, ...], said: str, folder: Path, place: Path) -> None:
    with nothing_left(place):
        status, out, err = fitter(*(str(folder / "modèl 1.gguf") if word == "MODEL" else word for word in words))
    assert (status, said in out) == (0, True), out + err


def test_a_report(folder: Path, tmp_path: Path) -> None:
    report = tmp_path / "ä report.html"
    assert fitter("report", folder / "modèl 1.gguf", *GPU, "-o", report)[0] == 0
    assert b"tiny moe" in report.read_bytes()


def test_a_lock(folder: Path) -> None:
    (folder / "fitter.toml").write_bytes('[cases.one]\nmodel = "modèl 1.gguf"\ngpu = ["1GiB"]\nn_ctx = 512\n'.encode())
    assert fitter("lock", "--cases", folder / "fitter.toml")[0] == 0
    lock = (folder / "fitter.lock").read_bytes()
    assert b"\r" not in lock, "the same bytes on every system"
    status, out, err = fitter("check", "--cases", folder / "fitter.toml")
    assert (status, "1 unchanged" in out + err) == (0, True)
    # more context than was accepted
    (folder / "fitter.toml").write_bytes((folder / "fitter.toml").read_bytes().replace(b"= 512", b"= 8192"))
    assert fitter("check", "--cases", folder / "fitter.toml")[0] == 4


def test_the_server(folder: Path, place: Path) -> None:
    with no_process_left():
        server = started("serve", "--port", "0", "--root", folder)
        assert server.stdout is not None and server.stderr is not None
        try:
            said = server.stderr.readline().decode()
            address = said.partition("at ")[2].split()[0]
            body = json.dumps({"model": "modèl 1.gguf", "gpus": ["1GiB"]}).encode()
            request = urllib.request.Request(f"{address}api/v1/plan", body, {"Content-Type": "application/json"})
            with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
                assert json.load(answer)["model"]["name"] == "tiny moe"
        finally:
            server.terminate()
            server.communicate(timeout=PATIENCE)
    # without signals to end, its files wait for the next command
    assert fitter(folder / "modèl 1.gguf", *GPU)[0] == 0
    assert [str(path) for path in place.rglob("*")] == []


# --- names


SPELLINGS: dict[str, Callable[[Path], str]] = {
    "relative": lambda path: path.name,
    "from here": lambda path: os.path.join(".", path.name),
    "slashes": Path.as_posix,
    "an address": Path.as_uri,
}
if sys.platform == "win32":
    SPELLINGS |= {
        "a small drive letter": lambda path: path.drive.lower() + str(path)[len(path.drive) :],
        "of the drive's folder": lambda path: path.drive + path.name,
        "of the current drive": lambda path: str(path)[len(path.drive) :],
        "without rules": lambda path: rf"\\?\{path}",
    }


@pytest.fixture
def short_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory, whose name has at most 260 characters on Windows; it has a model."""
    short = folder.parents[1]
    if not (short / "ein mödel.gguf").exists():
        write_tiny(short / "ein mödel.gguf")
    monkeypatch.chdir(short)
    return short


@cases(SPELLINGS)
def test_a_model_named_otherwise(spelling: Callable[[Path], str], short_folder: Path) -> None:
    status, out, err = fitter("inspect", spelling(short_folder / "ein mödel.gguf"))
    assert (status, "tiny moe" in out) == (0, True), err


NAMES = {
    "spaces": "a b c",
    "umlauts": "ÄÖÜ ß",
    "other scripts": "模型 модель",
    "signs": "it's %TEMP% & $HOME; #1",
    "300 characters": "x" * 300,
}
NOWHERE = dict(NAMES)
if sys.platform == "win32":
    NOWHERE |= {
        "no drive": "Q:\\a",
        "no drive's folder": "Q:a",
        "no host": r"\\nowhere\share\a",
        "a stream": "a:b",
        "no name": "a?*",
        "a control": "abc\td",
    }


@pytest.mark.parametrize("name", NOWHERE.values(), ids=NOWHERE)
def test_no_model_of_a_name_is_one_line(
    name: str, place: Path, short_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with nothing_left(place):
        # in this process, which is quicker than a command for each
        status = main(["inspect", f"{name}.gguf"])
    out, err = capsys.readouterr()
    assert (status, out) == (3, "") and name[:3] in one_line(err)


@cases(NAMES)
def test_a_result_of_a_name(name: str, place: Path, short_folder: Path) -> None:
    with nothing_left(place):
        status, out, err = fitter("explore", "ein mödel.gguf", *GPU, "-c", "1024", "-o", f"{name}.csv")
    written = short_folder / f"{name}.csv"
    if len(name) > 255:
        assert (status, out, len(one_line(err)) > 300) == (5, "", True)
        return
    assert (status, written.read_text(encoding="utf-8").count("\n")) == (0, 2), err


# --- a full disk, where tests/support/full_disk.py has made one


@pytest.fixture
def full_disk() -> Iterator[Path]:
    """A disk without room, on which nothing may be left."""
    if full_disk_support.VARIABLE not in os.environ:
        pytest.skip("there is no full disk")
    disk = Path(os.environ[full_disk_support.VARIABLE])
    yield disk
    assert [path.name for path in disk.rglob("*") if path.is_file()] == ["filler"]


@named_cases(
    ("fit", ("MODEL", *GPU), "-ngl 5"),
    ("explore", ("explore", "MODEL", *GPU, "-c", "1024", "-j", "2"), "1 plan: 1 fit"),
)
def test_full_disk_for_files_in_between(
    words: tuple[str, ...], said: str, full_disk: Path, short_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("TMPDIR", "TEMP", "TMP", "XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.setenv(name, str(full_disk))
    status, out, err = fitter(*("ein mödel.gguf" if word == "MODEL" else word for word in words))
    assert (status, said in out) == (0, True), out + err


@pytest.mark.parametrize(
    "words",
    [
        ("report", "ein mödel.gguf", *GPU, "-o", "DISK/a.html"),
        ("explore", "ein mödel.gguf", *GPU, "-c", "1024", "-o", "DISK/a.csv"),
        ("lock", "--lock", "DISK/a.lock"),
        ("check", "--junit", "DISK/a.xml"),
    ],
    ids=lambda words: words[-1][-4:],
)
def test_full_disk_for_a_result(words: tuple[str, ...], full_disk: Path, short_folder: Path, place: Path) -> None:
    cases = '[cases.one]\nmodel = "ein mödel.gguf"\ngpu = ["1GiB"]\nn_ctx = 512\n'
    (short_folder / "fitter.toml").write_text(cases, encoding="utf-8")
    if words[0] == "check":
        assert fitter("lock")[0] == 0
    with nothing_left(place):
        status, out, err = fitter(*(word.replace("DISK", str(full_disk)) for word in words))
    assert (status, "1 unchanged" in out) == (5, words[0] == "check") and "No space left on device" in one_line(err)


@named_cases(("fit", ("MODEL", *GPU)), ("inspect", ("inspect", "MODEL")))
def test_no_model_is_one_line(words: tuple[str, ...], folder: Path, place: Path) -> None:
    with nothing_left(place):
        status, out, err = fitter(*(str(folder / "no mödel.gguf") if word == "MODEL" else word for word in words))
    assert (status, out) == (3, "") and "no mödel.gguf" in one_line(err)


def test_a_result_that_cannot_be_written_is_one_line(folder: Path, place: Path) -> None:
    with nothing_left(place):
        status, out, err = fitter("report", folder / "modèl 1.gguf", *GPU, "-o", folder / "nowhere" / "a.html")
    assert (status, out) == (5, "") and "cannot be written" in one_line(err)


def test_a_reader_that_is_gone(folder: Path) -> None:
    process = started(folder / "modèl 1.gguf", *GPU, "--json")
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert (process.wait(PATIENCE), b"rror" in process.stderr.read()) == (141, False)
    process.stderr.close()


# --- workers


@pytest.mark.usefixtures("sabotage")
@named_cases(
    ("abort", "os.abort()", LlamaCppCrashError, "llama.cpp was ended by SIGABRT during 'host'"),
    ("end", "os._exit(7)", WorkerError, "ended with status 7 during 'host', and so did a new one"),
)
def test_a_worker_that_ends(
    code: str, error: type[Exception], said: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SABOTAGE", code)
    with nothing_left(place), Worker(parse_gpus(["1GiB"]), timeout=ANSWER_SECONDS) as worker:
        with pytest.raises(error, match=said):
            worker.host()
        monkeypatch.delenv("SABOTAGE")
        assert worker.host().total > 0


def test_a_worker_that_is_killed_is_replaced(folder: Path, place: Path) -> None:
    with nothing_left(place), Worker(parse_gpus(["1GiB"])) as worker:
        before = worker.header(folder / "modèl 1.gguf")
        assert worker.pid is not None
        psutil.Process(worker.pid).kill()
        assert worker.header(folder / "modèl 1.gguf") == before


@pytest.mark.usefixtures("sabotage")
def test_workers_that_hang_or_are_stopped_are_given_up(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def attempt(seconds: float) -> None:
        monkeypatch.delenv("SABOTAGE", raising=False)
        hanging, stopped = (Worker(parse_gpus(["1GiB"]), timeout=seconds) for _ in range(2))
        with nothing_left(place), hanging, stopped:
            stopped.host()
            assert stopped.pid is not None
            psutil.Process(stopped.pid).suspend()
            monkeypatch.setenv("SABOTAGE", "time.sleep(600)")
            # at the same time, since each is waited for as long as a worker may take
            with ThreadPoolExecutor() as threads:
                answers = [threads.submit(worker.host) for worker in (hanging, stopped)]
            for answer in answers:
                with pytest.raises(WorkerError, match=f"did not answer 'host' within {seconds:g} seconds"):
                    answer.result()
            monkeypatch.delenv("SABOTAGE")
            assert hanging.host().total > 0

    # on Windows a worker takes longer to start
    with_more_time(attempt, *([] if sys.platform == "win32" else [4]), ANSWER_SECONDS)


def long_work(folder: Path) -> tuple[Any, ...]:
    cells = ("-c", ",".join(str(256 * n) for n in range(1, 481)), "-ctk", "f16,q8_0", "-j", "2")
    return ("explore", folder / "modèl 1.gguf", *GPU, "--gpu", "2GiB", *cells)


def workers_of(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """Wait until it has workers."""
    until = time.monotonic() + PATIENCE
    while len(found := psutil.Process(process.pid).children(recursive=True)) < 2:
        assert time.monotonic() < until and process.poll() is None
        time.sleep(0.05)
    return found


def test_a_command_that_is_killed_leaves_no_worker(folder: Path, place: Path) -> None:
    process = started(*long_work(folder))
    workers = workers_of(process)
    process.kill()
    process.communicate()
    gone, alive = psutil.wait_procs(workers, PATIENCE)
    assert gone and not alive
    # and the next command removes its files
    assert fitter(folder / "modèl 1.gguf", *GPU)[0] == 0
    assert [str(path) for path in place.rglob("*")] == []


def has_console() -> bool:
    if system.CAN_FORK:
        return True
    import ctypes

    return bool(ctypes.WinDLL("kernel32").GetConsoleCP())


@pytest.mark.skipif(not has_console(), reason="without a console there is no Ctrl-C")
def test_ctrl_c(folder: Path, place: Path) -> None:
    # a group of processes begins without Ctrl-C on Windows
    code = (
        "import ctypes, runpy, sys; from fitter import system\n"
        "system.CAN_FORK or ctypes.WinDLL('kernel32').SetConsoleCtrlHandler(None, False)\n"
        "sys.argv[0] = 'fitter'; runpy.run_module('fitter', run_name='__main__')"
    )
    pipe, group = subprocess.PIPE, getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0)
    words = [sys.executable, "-c", code, *map(str, long_work(folder))]
    with nothing_left(place):
        process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, creationflags=group)
        workers_of(process)
        time.sleep(1.0)
        os.kill(process.pid, getattr(signal, "CTRL_C_EVENT", signal.SIGINT))
        start = time.monotonic()
        out, err = process.communicate(timeout=PATIENCE)
        assert (process.returncode, out) == (130, b"")
        # one line of what is lost, if there is something
        assert [line.startswith(b"fitter: interrupted") for line in err.splitlines()] in ([], [True])
        assert time.monotonic() - start < 10
