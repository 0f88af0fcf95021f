"""Planning with a llama.cpp that the user names: it is tried before it is trusted, and the plan says which it was."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import fitter
from fitter.errors import LibraryError, PlanError, UsageError
from fitter.llama.build import verdicts
from fitter.llama.build.build_folder import Build, find
from fitter.llama.build.library import backend_path, own_libraries
from fitter.llama.build.verdicts import asked_alone, read_answer, write_answer
from fitter.llama.client import Worker
from fitter.llama.processes import interpreter
from fitter.llama.types import VirtualDevice, describe
from tests.support.cases import cases, named_cases
from tests.support.command import run_fitter, run_python
from tests.support.llama_builds import computing, fetched

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ROOT / "build/llama/bin"
OWN = (str(backend_path()), str(backend_path().with_name("libfitter.so")))
GPU = ("--gpu", "cuda:8.9:8GiB")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache/llama-fitter/llama-cpp"


CANARY = """
import sys
from fitter.llama.build import library
from fitter.llama.load import canary
from fitter.llama.processes import interpreter
interpreter.become_worker(is_canary=True)
library.load_cells()
{change}
print(canary.problem_of_loaded())
"""


def problem(where: str, change: str = "") -> str:
    done = run_python(CANARY.format(change=change), FITTER_LLAMA_CPP=where)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


_FIELDS = """
from fitter.llama.build import layouts
known = layouts.data()["layouts"]
for name in known:
    fields = known[name]["{struct}"]
    places = list(fields)
    a, b = places.index("{a}"), places.index("{b}")
    places[a], places[b] = places[b], places[a]
    known[name]["{struct}"] = {{each: fields[each] for each in places}}
from fitter.llama.build import layouts
layouts.disagreement = lambda layout, written: None if layout is known["0.3.36"] else "another one"
"""


@named_cases(
    ("layers and the main GPU", "llama_model_params", "n_gpu_layers", "main_gpu"),
    ("devices and overrides", "llama_model_params", "devices", "tensor_buft_overrides"),
    ("the types of a cache", "llama_context_params", "type_k", "n_ctx"),
    ("where the cache is", "llama_context_params", "offload_kqv", "embeddings"),
)
def test_parameters_that_mean_something_else_are_noticed(struct: str, a: str, b: str) -> None:
    """The small models notice swapped fields even if the probe accepts every layout."""
    code = CANARY.format(change=_FIELDS.format(struct=struct, a=a, b=b))
    done = run_python(code, FITTER_LLAMA_CPP="python")
    assert done.returncode != 0 or done.stdout.splitlines()[-1]


def test_another_epoch_is_noticed() -> None:
    change = (
        "from fitter.llama.build import functions\n"
        "last = functions.epochs()[-1]\n"
        "library.epoch_of = lambda ggml: functions.Epoch(last.ggml, last.last_op, False, last.larger_alone)"
    )
    assert problem("python", change) == "graph_optimize was called with an argument for allocation dependencies"


def test_another_interface_of_backends_is_noticed() -> None:
    change = (
        "library.backend_api = lambda loaded: 3\n"
        "try: library.prepare()\n"
        "except Exception as error: print(error); raise SystemExit"
    )
    assert "has version 2 of ggml's interface of backends, which this fitter does not know" in problem("python", change)


# ---- the verdict


def test_a_verdict_is_kept_and_used(cache: Path) -> None:
    directory = fetched("v0.5.0")
    build = find(str(directory))
    assert verdicts.verdict(build, OWN) == ""
    (file,) = cache.glob("verdict-*.json")
    assert json.loads(file.read_text()) == {"problem": ""}
    file.write_text(json.dumps({"problem": "it was seen before"}))
    assert verdicts.verdict(build, OWN) == "it was seen before"
    # for other libraries of fitter's the verdict is another one
    assert verdicts.verdict(build, OWN[:1]) == ""
    for damaged in ("", "[]", "{}", '{"problem": 1}', "\0"):
        file.write_text(damaged)
        assert verdicts.verdict(build, OWN) == ""


ACCIDENTS = {
    "killed": ("os.kill(os.getpid(), signal.SIGKILL)", "it ended with signal 9"),
    "files may not grow": (
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))",
        r"OSError: \[Errno 27\] File too large",
    ),
    "no disk left": ("raise OSError(28, os.strerror(28))", r"OSError: \[Errno 28\] No space left on device"),
    "no memory left": ("raise MemoryError('none')", "MemoryError: none"),
    "no memory left for llama.cpp": (
        "os.write(2, b\"terminate called after throwing an instance of 'std::bad_alloc'\"); os.abort()",
        "it ended with signal 6",
    ),
    "a refusal for want of memory": (
        "from fitter.errors import LlamaCppError; from fitter.llama.load import canary; "
        "canary.problem_of_loaded = canary.RealLoad = refuse",
        r"fitter.errors.LlamaCppError: m.gguf: unable to allocate CPU buffer",
    ),
    "no answer": ("os._exit(7)", "it ended with status 7"),
}
"""Accidents of the process that tries a build, which say nothing about the build."""

HAPPENS = """
import os, resource, signal
# a file that may not grow is not to be one that Python keeps
sys.dont_write_bytecode = True
def refuse(*_):
    raise LlamaCppError("m.gguf: unable to allocate CPU buffer")
if {when}:
    {what}
from {{module}}"""


def happens(monkeypatch: pytest.MonkeyPatch, what: str, once: Path | None = None) -> None:
    """Have it happen in every process that is started, or only in the first one, which makes a file."""
    when = "True" if once is None else f"not os.path.exists({str(once)!r}) and not open({str(once)!r}, 'w').close()"
    boot = interpreter.BOOT.replace("from {module}", HAPPENS.format(when=when, what=what))
    monkeypatch.setattr(interpreter, "BOOT", boot)


@pytest.mark.parametrize("ask", [verdicts.verdict, verdicts.problem_of_computing])
@pytest.mark.parametrize(("what", "said"), ACCIDENTS.values(), ids=ACCIDENTS)
def test_an_accident_is_no_verdict(
    ask: Callable[[Build, tuple[str, ...]], str], what: str, said: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = find()
    with monkeypatch.context() as patch:
        happens(patch, what)
        message = rf"^{re.escape(build.libllama)} cannot be tried with a small model \({said}\): try again$"
        with pytest.raises(LibraryError, match=message):
            ask(build, OWN)
    assert not [*cache.glob("*.json")]
    assert ask(build, OWN) == ""
    assert [json.loads(file.read_text()) for file in cache.glob("*.json")] == [{"problem": ""}]


CRASH = "os.kill(os.getpid(), signal.SIGSEGV)"


@cases((CRASH,), (ACCIDENTS["killed"][0],))
def test_an_accident_that_does_not_come_again_is_none(
    what: str, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    happens(monkeypatch, what, tmp_path / "once")
    assert verdicts.verdict(find(), OWN) == ""


def test_a_crash_and_then_another_one_is_no_verdict(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    happens(monkeypatch, CRASH, tmp_path / "once")
    monkeypatch.setattr(
        interpreter, "BOOT", interpreter.BOOT.replace("\nfrom {module}", "\nelse:\n    os.abort()\nfrom {module}")
    )
    with pytest.raises(
        LibraryError, match=r"cannot be tried with a small model \(it ended with signal 6\): try again$"
    ):
        verdicts.verdict(find(), OWN)
    assert not [*cache.glob("*.json")]


def test_a_crash_that_comes_again_is_kept_in_a_file_that_is_named(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build, own = find(), own_libraries()
    with monkeypatch.context() as patch:
        happens(patch, CRASH)
        assert verdicts.verdict(build, own) == "it ended with signal 11 when a small model was loaded"
    (file,) = cache.glob("verdict-*.json")
    with pytest.raises(LibraryError) as caught:
        verdicts.check(build, own, "0123abc")
    assert str(caught.value) == (
        f"{build.libllama} (commit 0123abc) is not a llama.cpp that fitter can use: it ended with signal 11 when a "
        "small model was loaded; name another one with --llama-cpp, or reinstall llama-fitter with "
        f"LLAMA_CPP_SOURCE_DIR set to its source; delete {file} to have it tried again"
    )
    looks = json.loads(run_fitter("llama-cpp", "--json").stdout)["builds"]
    assert looks[0]["problem"] == (
        f"{build.libllama}: it ended with signal 11 when a small model was loaded; delete {file} to have it tried again"
    )
    file.unlink()
    verdicts.check(build, own, "0123abc")


def test_a_build_that_is_not_trusted_gives_no_plan(cache: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = fetched("v0.5.0")
    monkeypatch.setattr(verdicts, "ask", lambda build, entry: "it is a test")
    verdicts.verdict(find(str(directory)), (OWN[1], OWN[0]))
    for _ in range(2):
        with pytest.raises(
            LibraryError, match=r"\(commit 0ad4a86\) is not a llama.cpp that fitter can use: it is a test"
        ):
            fitter.fit(model, gpus="cuda:8.9:8GiB", llama_cpp=directory)
    done = run_fitter(str(model), *GPU, "--llama-cpp", str(directory))
    assert (done.returncode, done.stdout) == (3, "")
    assert [line.startswith("fitter: error: ") for line in done.stderr.splitlines()] == [True]


def test_where_nothing_can_be_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    write_answer("name", {"a": 1})
    assert read_answer("name") is None
    with asked_alone():
        pass


# ---- what is planned with it


@cases("keyword", "path", "environment", "worker")
def test_the_plan_says_its_llama_cpp(how: str, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = fetched("v0.5.0")
    options: dict[str, Any] = {"gpus": "cuda:8.9:8GiB"}
    if how == "environment":
        monkeypatch.setenv("FITTER_LLAMA_CPP", str(directory))
    elif how != "worker":
        options["llama_cpp"] = directory if how == "path" else str(directory)
    if how == "worker":
        with Worker(llama_cpp=directory) as worker:
            plan = fitter.fit(model, worker=worker, **options)
            again = fitter.fit(model, worker=worker, llama_cpp="python", **options)
        assert again.llama_cpp is not None
        assert again.llama_cpp.version.startswith("0.5.0 (ggml 0.25.3, ")
    else:
        plan = fitter.fit(model, **options)
    assert plan.llama_cpp is not None
    assert plan.llama_cpp.version == "0.5.0-dev (ggml 0.25.1, commit 0ad4a86)"
    assert plan.llama_cpp.key == find(str(directory)).key
    assert plan.llama_cpp.cpu.startswith("libggml-cpu-")


def test_a_plan_of_another_llama_cpp_is_not_loaded(model: Path) -> None:
    plan = fitter.fit(model, devices="none", n_ctx=256, llama_cpp=fetched("v0.5.0"))
    with pytest.raises(
        PlanError, match=r"made with llama.cpp 0.5.0-dev \(ggml 0.25.1, commit 0ad4a86\), and .* is 0.5.0"
    ):
        plan.load()
    with pytest.raises(PlanError, match="verify it with the one that it was made with"):
        fitter.verify(plan=plan)
    unknown = replace(plan, llama_cpp=None)
    unknown.load(verbose=False).close()


@pytest.mark.slow
def test_a_plan_is_verified_with_its_llama_cpp(model: Path) -> None:
    plan = fitter.fit(model, devices="none", n_ctx=256, llama_cpp=fetched("v0.5.0"))
    assert fitter.verify(plan=plan, llama_cpp=fetched("v0.5.0")).holds


def test_llama_is_fitted_with_the_library_that_loads_it(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FITTER_LLAMA_CPP", "no/such/place")
    loaded = fitter.Llama(model, devices="none", n_ctx=256, verbose=False)
    assert loaded.plan.llama_cpp is not None
    assert loaded.plan.llama_cpp.version.startswith("0.5.0 (ggml 0.25.3, ")
    loaded.close()
    with pytest.raises(UsageError, match="no/such/place' is not there"):
        fitter.fit(model, devices="none", n_ctx=256)


def test_other_calls_take_it_too(model: Path) -> None:
    directory = computing("b10434")
    server = directory / "llama-server"
    assert fitter.inspect(model, llama_cpp=server).model.path == str(model)
    assert fitter.measure(model, llama_cpp=server, n_ctx=512, devices="none").n_ctx == 512
    assert fitter.devices(llama_cpp=server)[1].total > 0
    for words in (("inspect", str(model)), ("devices",)):
        assert run_fitter(*words, "--llama-cpp", str(directory / "llama-server")).returncode == 0


# ---- the devices in programs of llama.cpp's, which nothing configures


def test_a_program_of_another_build_has_no_virtual_devices() -> None:
    server = fetched("b10434") / "llama-server"
    environment = {
        **os.environ,
        "GGML_BACKEND_PATH": str(backend_path()),
        "FITTER_DEVICES": describe([VirtualDevice("CUDA0", "a card", "cuda", 890, 1 << 33, 1 << 33)]),
    }
    done = subprocess.run(
        [server, "--list-devices"], capture_output=True, text=True, env=environment, timeout=60, check=False
    )
    assert "a card" not in done.stdout + done.stderr
    assert "fitter: this is not the build of llama.cpp that fitter was compiled for" in done.stderr


# ---- the llama-server on the PATH


def test_a_server_of_another_build_is_warned_of(model: Path, cache: Path) -> None:
    directory = fetched("b10434")
    path = f"{directory}:{os.environ['PATH']}"
    for _ in range(2):
        done = run_fitter(str(model), *GPU, PATH=path)
        assert done.returncode == 0
        warning = done.stderr.splitlines()[-1]
        server = directory / "llama-server"
        assert warning.startswith(
            f"fitter: warning: {server} is llama.cpp 0.1.0-dev (ggml 0.20.0, commit 7e4c0a9), which may take other "
        )
        assert warning.endswith(f"to plan with it, add --llama-cpp {server}")
    assert [*cache.glob("look-*.json")]
    quiet = [("--json",), ("--format", "python"), ("--llama-cpp", "llama-server")]
    for words in quiet:
        assert "warning" not in run_fitter(str(model), *GPU, *words, PATH=path).stderr


def test_a_server_of_the_same_source_is_not(model: Path) -> None:
    if not (TOOLS / "llama-server").exists():
        pytest.skip("needs make tools")
    assert "warning" not in run_fitter(str(model), *GPU, PATH=f"{TOOLS}:{os.environ['PATH']}").stderr
