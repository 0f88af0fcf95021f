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
from fitter.llama.types import Params, Skeleton, describe
from fitter.llama.worker import process
from fitter.machine.gpu import parse_gpus
from tests.support.command import run_python
from tests.support.patience import SECONDS, TooLateError, in_time
from tools.cuda_reference import write_model

MAIN = [sys.executable, "-m", "fitter"]
HEAVY = {"llama_cpp", "numpy", "cffi", "jinja2"}
SLOW = {"rich", "subprocess", "tempfile", "psutil", "platformdirs", "tomllib", "tomli", "importlib.resources", "ctypes"}

# As `python -m fitter` would, and then something else.
EARLY = (
    "from fitter.llama.worker import process\n"
    "for _ in range({count}): process.prestart(lambda word: word() and None)\n"
    "from fitter.llama.client import Worker\n"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model("llama31-8b", tmp_path_factory.mktemp("models"))


IMPORTS = {
    "import fitter": ("import fitter", HEAVY | SLOW | {"typing", "dataclasses", "click"}),
    "a worker's process": ("import fitter.llama.worker.process", HEAVY | SLOW | {"typing", "dataclasses", "click"}),
    "--help": ("from fitter import cli; cli.main(['--help'])", HEAVY | SLOW | {"dataclasses", "fitter.cli.fit"}),
    # the table of parameters is made of dataclasses
    "fit --help": ("from fitter import cli; cli.main(['fit', '--help'])", HEAVY | SLOW),
    "import fitter.api": ("import fitter.api", HEAVY | SLOW | {"click"}),
}


@pytest.mark.parametrize(("code", "unwanted"), IMPORTS.values(), ids=IMPORTS)
def test_what_is_not_imported(code: str, unwanted: set[str]) -> None:
    # What the interpreter itself has imported at its start, such as for an editable install, is not of the code.
    script = (
        f"import sys; before = set(sys.modules)\n{code}\nimport json; print(json.dumps([*set(sys.modules) - before]))"
    )
    done = run_python(script)
    assert not unwanted & set(json.loads(done.stdout.splitlines()[-1])), done.stderr


@pytest.mark.parametrize("early", [0, 1], ids=["new interpreter", "early"])
def test_a_worker_has_only_the_bindings(early: int) -> None:
    code = EARLY.format(count=early) + (
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
        "atexit.register(lambda: print(children()))\n" + EARLY.format(count=2) + "early = children()\n"
        "first, second, third = Worker(), Worker(), Worker()\n"
        "for worker in (first, second, third): worker.devices()\n"
        "pids = [str(worker.pid) for worker in (first, second, third)]\n"
        "assert len(early) == 2 and pids[:2] == early[::-1] and pids[2] not in early, (early, pids)\n"
        "first.close(), second.close(), third.close()\n"
        "for _ in range(3): process.prestart(lambda word: None)\n"
        "assert len(children()) == 3\n"
    )
    done = run_python(code)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[]\n", "")


OTHERS = {
    "environment": "import os; os.environ['GGML_BACKEND_PATH'] = '/nowhere'",
    "search path": "import sys; sys.path.append('/nowhere')",
    "another process": "import os; pid = os.fork()\nif pid: os.waitpid(pid, 0); os._exit(0)",
}


@pytest.mark.parametrize("change", OTHERS.values(), ids=OTHERS)
def test_an_early_worker_that_does_not_suit_is_left(change: str) -> None:
    code = EARLY.format(count=1) + (
        "import psutil\nearly, = psutil.Process().children()\n"
        f"{change}\n"
        "worker = Worker(); worker.devices(); print(worker.pid == early.pid); worker.close()\n"
    )
    done = run_python(code)
    assert (done.stdout, done.stderr) == ("False\n", "")


WORKERS = {
    "nothing": ([], 0),
    "help": (["--help"], 0),
    "version": (["--version"], 0),
    "a model": (["model.gguf", "--gpu", "24GiB"], 2),
    "real devices, for one process only": (["fit", "model.gguf"], 1),
    "an rpc-server, which talks to one process": (["model.gguf", "--gpu", "24GiB", "--rpc", "host:1"], 1),
    "inspect": (["inspect", "model.gguf"], 1),
    "devices": (["devices"], 1),
    "backend": (["backend", "--gpu", "24GiB"], 0),
    "library": (["model.gguf", "--profile=library"], 0),
    "fitter's rules": (["model.gguf", "--gpu", "24GiB", "--profile", "cuda"], 2),
}


@pytest.mark.parametrize(("args", "count"), WORKERS.values(), ids=WORKERS)
def test_how_many_workers_begin_early(monkeypatch: pytest.MonkeyPatch, args: list[str], count: int) -> None:
    begun: list[object] = []
    monkeypatch.setattr(process, "prestart", lambda first, variables: begun.append(first))
    assert early_start.begin(args) == bool(count)
    assert len(begun) == count


@pytest.mark.parametrize(
    ("more", "count"),
    [([], 0), (["--profile", "cuda"], 2), (["--llama-cpp", "python"], 2)],
    ids=["its own", "rules", "not it"],
)
def test_none_begins_where_a_cuda_backend_will_answer(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, more: list[str], count: int
) -> None:
    (tmp_path / "libggml-cuda.so").touch()
    begun: list[object] = []
    monkeypatch.setattr(process, "prestart", lambda first, variables: begun.append(first))
    early_start.begin(["model.gguf", "--gpu", "24GiB", "--llama-cpp", str(tmp_path), *more])
    assert len(begun) == count


GUESSES = {
    "one that holds the model": (["--gpu", "24GiB"], "CUDA0,"),
    "one that does not": (["--gpu", "2GiB"], "held CUDA0,"),
    "two": (["--gpu", "24GiB", "--gpu", "24GiB"], ""),
    "fewer layers": (["--gpu", "24GiB", "-ngl", "4"], ""),
    "a tensor elsewhere": (["--gpu", "2GiB", "-ot", "ffn_up=CPU"], ""),
    "its prediction layers too": (["--gpu", "24GiB", "--mtp"], ""),
    "no such GPU": (["--gpu", "nonsense"], ""),
}


@pytest.mark.parametrize(("args", "word"), GUESSES.values(), ids=GUESSES)
def test_a_model_is_loaded_at_once_where_it_is_clear_how(
    monkeypatch: pytest.MonkeyPatch, model: Path, args: list[str], word: str
) -> None:
    words: list[str] = []
    monkeypatch.setattr(process, "prestart", lambda first, variables: Woken(words))
    early_start.begin([str(model), *args])
    assert [said.partition(",")[0] for said in words if said] == [part for part in [word.rstrip(",")] if part]


def test_a_draft_model_is_not_taken_for_the_model(monkeypatch: pytest.MonkeyPatch, model: Path) -> None:
    words: list[str] = []
    monkeypatch.setattr(process, "prestart", lambda first, variables: Woken(words))
    early_start.begin(["--gpu", "24GiB", "-md", str(model), "nowhere.gguf"])
    assert words == []
    early_start.begin(["--gpu", "24GiB", "-md", "nowhere.gguf", str(model)])
    assert [said.partition(",")[0] for said in words] == ["CUDA0"]


class Woken:
    """Stands for the process of an early worker."""

    def __init__(self, words: list[str]) -> None:
        self._words = words

    def wake(self, word: str = "") -> None:
        self._words.append(word)


DEVICE, OTHER = (describe(parse_gpus([size])) for size in ("24GiB", "12GiB"))

WORDS = {
    "the device that is asked for": (DEVICE, "{model}", [1, 1]),
    "another device": (OTHER, "{model}", [1, 2]),
    "no guess": ("", "{model}", [0, 1]),
    "no device": ("nonsense", "{model}", [0, 1]),
    "no model": (DEVICE, "/nowhere.gguf", [0, 1]),
}


@pytest.mark.parametrize(("word", "path", "loads"), WORDS.values(), ids=WORDS)
def test_a_load_that_begins_early_is_not_repeated(model: Path, word: str, path: str, loads: list[int]) -> None:
    code = (
        "from fitter import early_start\n"
        "from fitter.llama.worker import process\n"
        f"process.prestart(lambda wait: early_start.load({path.format(model=model)!r}, wait)).wake({word!r})\n"
        "from fitter.llama.client import Worker\n"
        "from fitter.llama.types import Params\n"
        "from fitter.machine.gpu import parse_gpus\n"
        "worker = Worker(parse_gpus(['24GiB']))\n"
        "loads = [(worker.devices(), worker.dummy_loads)[1]]\n"
        f"found = worker.measure({str(model)!r}, Params(n_ctx=4096, devices=('CUDA0',)))\n"
        "print(found.on('CUDA0').used, [*loads, worker.dummy_loads])\n"
        "worker.close()\n"
    )
    with Worker(parse_gpus(["24GiB"])) as worker:
        used = worker.measure(model, Params(n_ctx=4096, devices=("CUDA0",))).on("CUDA0").used
    done = run_python(code)
    assert (done.stdout, done.stderr) == (f"{used} {loads}\n", "")


def test_two_threads_do_not_take_one_early_worker() -> None:
    code = (
        EARLY.format(count=1) + "import threading\n"
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


@pytest.mark.parametrize("changes", [False, True], ids=["as it was", "changed"])
def test_a_model_that_changes_while_it_is_loaded_early_is_not_used(tmp_path: Path, changes: bool) -> None:
    # a file of its own, which is sparse: a copy would write all of it
    path = write_model("llama31-8b", tmp_path)
    code = (
        "import os\n"
        "from fitter.llama.load.first_load import Ahead\n"
        f"ahead = Ahead({str(path)!r}, {DEVICE!r})\n"
        f"if {changes}: os.utime({str(path)!r}, (1, 1))\n"
        "print(ahead.take() is None)\n"
    )
    done = run_python(code)
    assert done.stdout == f"{changes}\n", done.stderr


def test_what_is_done_during_a_wait(model: Path) -> None:
    done: list[str] = []
    process.meanwhile(lambda: done.append("long"), is_long=True)
    process.meanwhile(lambda: done.append("any"))
    params = Params(n_ctx=4096, devices=("CUDA0",))
    with Worker(parse_gpus(["24GiB"])) as worker:
        worker.header(model)
        worker.measure(Skeleton((str(model),)), params)
        assert done == ["any"]
        worker.begin_measure(model, params)
        assert done == ["any"]
        worker.finish_measure()
        assert done == ["any", "long"]


def test_what_was_begun_early_is_used_and_counted(model: Path) -> None:
    words = [*MAIN, str(model), "--gpu", "24GiB", "--json"]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    plan = json.loads(done.stdout)
    # Two on the copy of the header, one of them for sizes, and one on the model itself.
    assert (plan["fits"], plan["search"]["dummy_loads"]) == (True, 3)
    with_copy_only = subprocess.run([*words, "-ngl", "33"], capture_output=True, text=True, check=True)
    other = json.loads(with_copy_only.stdout)
    assert {**plan, "search": None} == {**other, "search": None}


ENDS = {
    "success": (["devices", "--gpu", "24GiB"], 0),
    "usage": (["model.gguf", "--nonsense"], 2),
    "no model": (["missing.gguf"], 3),
}


@pytest.mark.parametrize(("words", "status"), ENDS.values(), ids=ENDS)
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
