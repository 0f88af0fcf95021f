"""Nothing of the current directory is run: not by the command, and not by any process that it starts."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from fitter.llama.processes.supervisor import SupervisedProgram
from fitter.programs.facts import defaults_of
from tests.support.cases import named_cases
from tests.support.patience import SECONDS
from tools.models.tiny import TINY_DENSE, write_tiny
from tools.models.tiny_lora import write_lora

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ROOT / "build/llama/bin"
GPU = ("--gpu", "cuda:8.9:8GiB")
SERVER = str(TOOLS / "llama-server")

PACKAGES = (
    *("_cffi_backend", "cffi", "click", "distributed", "fastapi", "fitter", "gguf", "jinja2", "llama_cpp", "numpy"),
    *("pip", "platformdirs", "psutil", "pyarrow", "pygal", "rich", "sitecustomize", "starlette", "tomli", "tomli_w"),
    *("typing_extensions", "usercustomize", "uvicorn"),
)
"""Modules that are installed beside the standard library, and modules that Python itself looks for."""


# --- every start in the source goes through the one module


INTERPRETER = "fitter.llama.processes.interpreter"
STARTS = {
    "fitter.llama.processes.supervisor.posix": {
        "subprocess.Popen": "interpreter",
        "os.fork": "fork",
        "os.execv": "program",
    },
    "fitter.llama.processes.supervisor.windows": {"subprocess.Popen": "program"},
    "fitter.system.posix": {"os.posix_spawn": "worker", "os.fork": "fork"},
    "fitter.system.windows": {"subprocess.Popen": "worker"},
    "fitter.llama.processes.interpreter": {"subprocess.run": "interpreter"},
    "fitter.programs.facts": {"subprocess.run": "program"},
    "fitter.cli.listings": {"os.execve": "program"},
}
"""Every start: of an interpreter, which only ``fitter.llama.processes.interpreter`` writes the command line of, of a
worker, which is one whose command line ``fitter.llama.worker.process`` asks it for, of a program that the user named,
or a fork."""

_STARTING = frozenset(
    {
        *("subprocess.Popen", "subprocess.run", "subprocess.call", "subprocess.check_call", "subprocess.check_output"),
        *("subprocess.getoutput", "subprocess.getstatusoutput", "os.fork", "os.forkpty", "os.popen", "os.system"),
        *("os.posix_spawn", "os.posix_spawnp", "os.startfile", "pty.fork", "pty.spawn"),
        *(f"os.{kind}{end}" for kind in ("exec", "spawn") for end in ("l", "le", "lp", "lpe", "v", "ve", "vp", "vpe")),
    }
)
_STARTERS = ("multiprocessing", "asyncio.subprocess", "runpy", "pty", "concurrent.futures.ProcessPoolExecutor")
_UNLESS = frozenset({"create_subprocess_exec", "create_subprocess_shell", "ProcessPoolExecutor"})


def starts(text: str) -> Iterator[str]:
    """Yield the calls in ``text`` that start a process, and the name of ``sys.executable``."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Attribute):
            name = ast.unparse(node)
            if name in _STARTING or name == "sys.executable" or node.attr in _UNLESS:
                yield name
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names]
            if isinstance(node, ast.ImportFrom):
                names = [str(node.module), *(f"{node.module}.{name}" for name in names)]
            yield from (name for name in names if name.startswith(_STARTERS) or name in _STARTING)


def test_every_start_is_known() -> None:
    found = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts): set(starts(path.read_text(encoding="utf-8")))
        for path in (ROOT / "fitter").rglob("*.py")
    }
    assert "sys.executable" in found[INTERPRETER], "the one place that knows how an interpreter is started"
    found[INTERPRETER].remove("sys.executable")
    assert {module: names for module, names in found.items() if names} == {
        module: set(kinds) for module, kinds in STARTS.items()
    }


ASKING = [module for module, kinds in STARTS.items() if "interpreter" in kinds.values()]


@pytest.mark.parametrize("module", [*ASKING, "fitter.llama.worker.process"])
def test_an_interpreter_is_started_in_one_way(module: str) -> None:
    text = (ROOT / module.replace(".", "/")).with_suffix(".py").read_text(encoding="utf-8")
    assert re.search(r"\b(?:interpreter\.)?command\(", text)


# --- every command, in a directory of hostile modules


class Hostile:
    """A directory whose modules and programs each leave a mark when they are run."""

    def __init__(self, path: Path) -> None:
        self.path = path / "hostile"
        self.marks = path / "marks"
        self.marks.mkdir(parents=True)
        self.path.mkdir()

    def write(self, names: Iterator[str] | frozenset[str] | set[str]) -> None:
        """Have it be hostile with modules of these names."""
        for name in names:
            (self.path / f"{name}.py").write_text(f"open({str(self.marks / name)!r}, 'w').close()\n")
        for name in ("llama-server", "python", "python3", "pip", "git"):
            program = self.path / name
            program.write_text(f"#!/bin/sh\n: >'{self.marks}/program {name}'\n")
            program.chmod(0o755)

    @property
    def has_run(self) -> list[str]:
        """Return the names of the modules and programs that were run."""
        return sorted(os.listdir(self.marks))


EVERY = (sys.stdlib_module_names - {"__main__", "sys", "builtins"}) | {*PACKAGES}


@pytest.fixture(scope="module")
def of_python(tmp_path_factory: pytest.TempPathFactory) -> frozenset[str]:
    """Return the modules that ``python -m`` imports before any module begins: from the current directory, too."""
    package = tmp_path_factory.mktemp("any") / "anyone"
    package.mkdir()
    for name in ("__init__", "__main__"):
        (package / f"{name}.py").write_text("from __future__ import annotations\n")
    (package / "__main__.py").write_text("import sys\nprint(*sys.modules)\n")
    done = subprocess.run(
        [sys.executable, "-m", "anyone"], cwd=package.parent, capture_output=True, text=True, check=True
    )
    return frozenset(name.partition(".")[0] for name in done.stdout.split()) | {"__future__", "fitter"}


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    return {**os.environ, "PATH": f"{TOOLS}{os.pathsep}{os.environ['PATH']}", "XDG_CACHE_HOME": str(tmp_path / "cache")}


SERVED = ("--device", "none", "-c", "512")
COMMANDS = {
    "fit": ("model.gguf", *GPU),
    "fit for a server": ("model.gguf", *GPU, "--for", "llama-server", "--llama-cpp", SERVER),
    "fit, by that on the PATH": ("model.gguf", *GPU, "--llama-cpp", "llama-server"),
    "a directory": (".", *GPU),
    "llama-cpp": ("llama-cpp",),
    "inspect": ("inspect", "model.gguf"),
    "devices": ("devices",),
    "lock": ("lock",),
    "check": ("check",),
    "diff": ("diff", "model.gguf", *GPU, "--llama-cpp", "python", "--llama-cpp", str(TOOLS)),
    "history": ("history", "--cases", "fitter.toml", "--llama-cpp", "python", "--llama-cpp", str(TOOLS)),
    "explore": ("explore", "model.gguf", *GPU, "-c", "1024,2048"),
    "quants": ("quants", "model.gguf", *GPU),
    "report": ("report", "model.gguf", *GPU, "-o", "report.html"),
    "shapes": ("shapes",),
    "verify": ("verify", "model.gguf", *SERVED),
    "verify with a server": ("verify", "model.gguf", *SERVED, "--server", SERVER, "--lora", "adapter.gguf"),
    "verify with that on the PATH": ("verify", "model.gguf", *SERVED, "--server", "llama-server"),
}
SCRIPT = (str(Path(sys.executable).with_name("fitter")),)
MODULE = (sys.executable, "-m", "fitter")
SAMPLE = ("fit", "llama-cpp", "check", "verify with a server")
"""Of ``python -m fitter``, in `make test`: each way in which a process is started."""


@pytest.fixture
def hostile(tmp_path: Path) -> Hostile:
    made = Hostile(tmp_path)
    model = write_tiny(made.path / "model.gguf", TINY_DENSE)
    write_lora(made.path / "adapter.gguf", model)
    (made.path / "fitter.toml").write_text('[cases.a]\nmodel = "model.gguf"\ngpu = "cuda:8.9:8GiB"\n')
    return made


def run(words: tuple[str, ...], where: Hostile, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        words, cwd=where.path, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False
    )


def names_for(words: tuple[str, ...], of_python: frozenset[str]) -> frozenset[str]:
    """Modules that Python itself imports from the current directory are not fitter's to keep it from."""
    return EVERY - of_python if words == MODULE else EVERY


@pytest.mark.parametrize(
    ("words", "name"),
    [
        *((SCRIPT, name) for name in COMMANDS),
        *(pytest.param(MODULE, name, marks=() if name in SAMPLE else pytest.mark.slow) for name in COMMANDS),
    ],
    ids=lambda value: value if isinstance(value, str) else Path(value[-1]).name,
)
def test_nothing_of_the_current_directory_is_run(
    words: tuple[str, ...], name: str, hostile: Hostile, environment: dict[str, str], of_python: frozenset[str]
) -> None:
    args = COMMANDS[name]
    if "PATH" in name:
        # an empty entry is the current directory, too
        environment["PATH"] = os.pathsep.join(("", ".", environment["PATH"]))
    if "check" in args:
        run((*words, "lock"), hostile, environment)
    hostile.write(names_for(words, of_python))
    done = run((*words, *args), hostile, environment)
    assert hostile.has_run == [], done.stderr
    assert done.returncode == 0, done.stderr


WHERE = """#!/bin/sh
pwd
echo "$LD_LIBRARY_PATH $GGML_BACKEND_PATH"
"""


def test_a_program_runs_in_its_own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ggml loads backends from the current directory, whichever program it is in: libggml-cuda.so, for one."""
    own, here = tmp_path / "own", tmp_path / "here"
    own.mkdir()
    here.mkdir()
    monkeypatch.chdir(here)
    program = own / "llama-server"
    program.write_text(WHERE)
    program.chmod(0o755)
    with SupervisedProgram(
        [str(program)], {"LD_LIBRARY_PATH": ":lib::/usr/lib", "GGML_BACKEND_PATH": "libggml-x.so"}
    ) as run:
        said = run.output.read().decode().splitlines()
    assert said == [str(own), f"{here}/lib:/usr/lib {here}/libggml-x.so"]
    program.write_text('#!/bin/sh\necho "--ubatch-size N  x (default: $(pwd | wc -c))"\n')
    assert defaults_of(str(program)) == {"n_ubatch": len(f"{own}\n")}


@named_cases(("fitter", SCRIPT))
def test_nothing_of_the_current_directory_is_run_by_the_server(
    words: tuple[str, ...], hostile: Hostile, environment: dict[str, str], of_python: frozenset[str]
) -> None:
    hostile.write(names_for(words, of_python))
    with subprocess.Popen(
        [*words, "serve", "--port", "0", "--root", "."],
        cwd=hostile.path,
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        try:
            address = next(word for word in process.stderr.readline().split() if word.startswith("http"))
            question = json.dumps({"model": "model.gguf", "gpus": ["8GiB"]}).encode()
            asked = urllib.request.Request(f"{address}api/v1/plan", question, {"Content-Type": "application/json"})
            with urllib.request.urlopen(asked, timeout=SECONDS) as answer:
                assert answer.status == 200
        finally:
            process.terminate()
        said = process.stderr.read()
    assert hostile.has_run == [], said
