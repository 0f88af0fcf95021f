"""A quick start: what a command does not import, and the workers that begin before it does."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from fitter import early_start
from fitter.errors import LibraryError
from fitter.llama.build import library
from fitter.llama.client import Worker
from fitter.llama.worker import process
from fitter.machine.gpu import parse_gpus
from tests.support.cases import cases, named_cases, stored
from tests.support.command import run_python
from tests.support.patience import SECONDS, TooLateError, in_time
from tools.comparisons.cuda_reference import write_model
from tools.models.shapes import SHAPES, write_shape

MAIN = [sys.executable, "-m", "fitter"]
HEAVY = {"llama_cpp", "numpy", "cffi", "jinja2"}
SLOW = {"rich", "subprocess", "tempfile", "psutil", "platformdirs", "tomllib", "tomli", "importlib.resources", "ctypes"}

# As `python -m fitter` would, and then something else.
EARLY = (
    "from fitter.llama.worker import process\n"
    "for _ in range({count}): process.prestart(is_asleep={asleep})\n"
    "from fitter.llama.client import Worker\n"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model("llama31-8b", tmp_path_factory.mktemp("models"))


@named_cases(
    ("import fitter", "import fitter", HEAVY | SLOW | {"typing", "dataclasses", "click"}),
    ("a worker's process", "import fitter.llama.worker.process", HEAVY | SLOW | {"typing", "dataclasses", "click"}),
    ("--help", "from fitter import cli; cli.main(['--help'])", HEAVY | SLOW | {"dataclasses", "fitter.cli.fit"}),
    # the table of parameters is made of dataclasses
    ("fit --help", "from fitter import cli; cli.main(['fit', '--help'])", HEAVY | SLOW),
    ("import fitter.api", "import fitter.api", HEAVY | SLOW | {"click"}),
)
def test_what_is_not_imported(code: str, unwanted: set[str]) -> None:
    # What the interpreter itself has imported at its start, such as for an editable install, is not of the code.
    script = (
        f"import sys; before = set(sys.modules)\n{code}\nimport json; print(json.dumps([*set(sys.modules) - before]))"
    )
    done = run_python(script)
    assert not unwanted & set(json.loads(done.stdout.splitlines()[-1])), done.stderr


@named_cases(("new", 0, False), ("early", 1, False), ("asleep", 1, True))
def test_a_worker_has_only_the_bindings(early: int, asleep: bool) -> None:
    code = EARLY.format(count=early, asleep=asleep) + (
        "with Worker() as worker:\n    worker.devices()\n    print(open(f'/proc/{worker.pid}/maps').read())\n"
    )
    maps = run_python(code).stdout
    assert "libllama.so" in maps
    assert "libggml-fitter.so" in maps
    assert "numpy" not in maps


def test_the_library_is_found_without_importing_the_package(tmp_path: Path) -> None:
    (tmp_path / "llama_cpp").mkdir()
    (tmp_path / "llama_cpp/__init__.py").write_text("raise SystemExit\n")
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\nfrom fitter.llama.client import Worker\nWorker().devices()"
    )
    error = run_python(code).stderr.splitlines()[-1]
    assert error == (
        f"fitter.errors.LibraryError: {tmp_path}/llama_cpp/lib/libllama.so cannot be read: No such file or directory"
    )


def test_early_workers_are_used_and_the_rest_is_ended() -> None:
    code = (
        "import atexit, os\n"
        "def children(): return open(f'/proc/self/task/{os.getpid()}/children').read().split()\n"
        "atexit.register(lambda: print(children()))\n" + EARLY.format(count=2, asleep=True) + "early = children()\n"
        "first, second, third = Worker(), Worker(), Worker()\n"
        "for worker in (first, second, third): worker.devices()\n"
        "pids = [str(worker.pid) for worker in (first, second, third)]\n"
        "assert len(early) == 2 and pids[:2] == early and pids[2] not in early, (early, pids)\n"
        "first.close(), second.close(), third.close()\n"
        "for _ in range(3): process.prestart()\n"
        "assert len(children()) == 3\n"
    )
    done = run_python(code)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[]\n", "")


@named_cases(
    ("environment", "import os; os.environ['GGML_BACKEND_PATH'] = '/nowhere'"),
    ("search path", "import sys; sys.path.append('/nowhere')"),
    ("another process", "import os; pid = os.fork()\nif pid: os.waitpid(pid, 0); os._exit(0)"),
)
def test_an_early_worker_that_does_not_suit_is_left(change: str) -> None:
    code = EARLY.format(count=1, asleep=False) + (
        "import psutil\nearly, = psutil.Process().children()\n"
        f"{change}\n"
        "worker = Worker(); worker.devices(); print(worker.pid == early.pid); worker.close()\n"
    )
    done = run_python(code)
    assert (done.stdout, done.stderr) == ("False\n", "")


@cases(stored("start", "how_many_workers_begin_early"))
def test_how_many_workers_begin_early(args: list[str], count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[bool] = []
    monkeypatch.setattr(process, "prestart", lambda is_asleep=False: begun.append(is_asleep))
    assert early_start.begin(args) == bool(count)
    assert begun == [False, True][:count], "the other one waits for a tokenizer"


def test_two_threads_do_not_take_one_early_worker() -> None:
    code = (
        EARLY.format(count=1, asleep=False) + "import threading\n"
        "both, fits = threading.Barrier(2), process.Process.fits\n"
        "def fits_for_both(*words):\n"
        "    answer = fits(*words)\n"
        "    both.wait(60)\n"
        "    return answer\n"
        "process.Process.fits = fits_for_both\n"
        "taken = []\n"
        "threads = [threading.Thread(target=lambda: taken.append(process.take({}))) for _ in range(2)]\n"
        "for thread in threads: thread.start()\n"
        "for thread in threads: thread.join()\n"
        "print(len(set(taken)))\n"
        "for each in taken: each.kill()\n"
    )
    done = run_python(code)
    assert (done.stdout, done.stderr) == ("2\n", "")


def test_what_is_done_during_a_wait(model: Path) -> None:
    done: list[str] = []
    process.meanwhile(lambda: done.append("any"))
    with Worker(parse_gpus(["24GiB"])) as worker:
        assert done == []
        worker.header(model)
        assert done == ["any"]


def test_the_sleeping_worker_reads_the_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "model.gguf"
    write_shape(SHAPES["llama-3.1-8b"], path)
    words = [*MAIN, str(path), "--gpu", "24GiB", "--json"]
    plans = [json.loads(subprocess.run(words, capture_output=True, text=True, check=True).stdout) for _ in range(2)]
    assert len([*(tmp_path / "cache").glob("*/*/tokenizer-*.json")]) == 1
    assert [plan["search"].pop("seconds") > 0 for plan in plans] == [True, True] and plans[0] == plans[1]
    # one of them records sizes
    assert (plans[0]["fits"], plans[0]["search"]["dummy_loads"]) == (True, 2)


@named_cases(
    ("success", ["devices", "--gpu", "24GiB"], 0),
    ("usage", ["model.gguf", "--nonsense"], 2),
    ("no model", ["missing.gguf"], 3),
)
def test_nothing_is_left_behind(words: list[str], status: int) -> None:
    with subprocess.Popen(
        [*MAIN, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as command:
        _, err = command.communicate(timeout=SECONDS)
    assert command.returncode == status, err
    assert "Traceback" not in err
    # None of its group: all have been waited for.
    with pytest.raises(ProcessLookupError):
        os.killpg(command.pid, 0)


def interrupted(model: Path, milliseconds: int) -> tuple[int, str]:
    """Status and stderr of a fit that is interrupted so long after it has its first worker."""
    with subprocess.Popen(
        [*MAIN, str(model), "--gpu", "24GiB"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as command:
        parent = psutil.Process(command.pid)
        # The interpreter's own start is not ours.
        while command.poll() is None and not parent.children():
            time.sleep(0.001)
        time.sleep(milliseconds / 1000)
        os.killpg(command.pid, signal.SIGINT)
        out, err = command.communicate(timeout=SECONDS)
    if out or " fits\n" in err:
        raise TooLateError
    return command.returncode, err


def test_an_interrupt_at_any_moment_of_the_start_is_quiet(model: Path) -> None:
    for milliseconds in range(0, 160, 20):
        assert in_time(lambda after=milliseconds: interrupted(model, after)) == (130, ""), milliseconds  # type: ignore[misc]


def test_a_worker_that_cannot_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process.sys, "executable", "/nowhere/python")
    before = set(os.listdir("/proc/self/fd"))
    with Worker() as worker, pytest.raises(Exception, match=r"the worker cannot be started: .*No such file"):
        worker.devices()
    assert set(os.listdir("/proc/self/fd")) <= before


def test_a_load_that_cannot_begin_leaves_the_error_to_the_first_request(tmp_path: Path, model: Path) -> None:
    (tmp_path / "llama_cpp").mkdir()
    (tmp_path / "llama_cpp/__init__.py").write_text('raise ModuleNotFoundError("none", name="llama_cpp")\n')
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    card = ("--gpu", "rtx-4090")
    said = [
        subprocess.run([*MAIN, *words, *card], env=env, capture_output=True, text=True, check=False)
        for words in (["devices"], [model], [model, "-ngl", "9"])
    ]
    assert [done.returncode for done in said] == [3, 3, 3]
    assert said[0].stderr.startswith("fitter: error: ") and said[0].stderr.count("\n") == 1
    assert {done.stderr for done in said} == {said[0].stderr}


def test_files_of_the_parent_do_not_reach_a_worker() -> None:
    reader, writer = os.pipe()
    os.set_inheritable(writer, True)
    with Worker() as worker:
        worker.devices()
        assert worker.pid is not None
        os.close(writer)
        assert os.read(reader, 1) == b""
    os.close(reader)


def test_a_missing_declarations_module_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "DECLARATIONS", "fitter.llama.nowhere")
    with pytest.raises(LibraryError, match=r"_declarations.py is missing .* reinstall llama-fitter"):
        library.declarations()
