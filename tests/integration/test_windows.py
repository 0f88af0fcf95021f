"""fitter for Windows under wine: equal bytes to Linux with the same llama.cpp, and llama.cpp that gives up.

And what needs no wine: that builds for Windows have every function that fitter's libraries look up.
"""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fitter.llama.build import pe
from tests.support.cases import cases
from tests.support.full_disk import VARIABLE, with_full_disk
from tests.support.wine import with_wine
from tools.builds import llama_builds
from tools.comparisons.cases import CASES, MIXED
from tools.models.tiny import write_tiny
from tools.models.tiny_kinds import write_hybrid, write_swa
from tools.models.tiny_lora import write_lora
from tools.models.tiny_projector import write_projector
from tools.wine import compare, place, questions

BINDINGS = Path(__file__).resolve().parents[2] / "bindings"
N_LOADS = 24
"""Of the 200 that ``python -m tools.wine.compare`` draws."""
PLANS = {
    *("llama-3.1-8b/6GiB+3GiB", "llama-3.1-70b/m2-ultra", "kimi-k2/rocm:gfx1151:96GiB", "gpt-oss-20b/8GiB"),
    *("qwen3-30b-a3b/12GiB", "nemotron-h-9b/4GiB+3GiB"),
}
"""Of the 66 that ``--pairs`` compares."""

ABORTING = """
import sys, tempfile
from pathlib import Path
from fitter.errors import FitterError
from fitter.llama.client import Worker
from fitter.llama.header.gguf_writer import Tensor, write_file
from fitter.llama.types import Params, VirtualDevice

sizes = {"block_count": 1000, "context_length": 4096, "embedding_length": 512, "feed_forward_length": 512}
sizes |= {"attention.head_count": 8, "attention.layer_norm_rms_epsilon": 1e-5, "vocab_size": 512}
values = {f"llama.{name}": value for name, value in sizes.items()}
values |= {"general.architecture": "llama", "tokenizer.ggml.model": "no_vocab"}
with tempfile.TemporaryDirectory() as folder:
    path = write_file(Path(folder, "model.gguf"), values, [Tensor("token_embd.weight", (512, 512), "f16")])
    with Worker([VirtualDevice("CUDA0", "a card", "cuda", 890, 1 << 34, 1 << 34)], llama_cpp=sys.argv[1]) as worker:
        try:
            worker.measure(str(path), Params(n_ctx=512, devices=("CUDA0",)))
        except FitterError as error:
            print(error)
        print([device.name for device in worker.devices()])
"""
"""A model with more layers than llama.cpp has room for, and another question to the worker that follows."""


@with_wine
@pytest.mark.timeout(600)
@pytest.mark.parametrize("build", place.BUILDS)
def test_loads_are_equal_to_linux(build: str, tmp_path: Path) -> None:
    # the first build tells of its contexts what fitter asks, the others are as llama.cpp's own releases are
    found = compare.drawn(N_LOADS if build == "v0.4.0" else 4, seed=33)
    linux = compare.answers_of_linux(build, found, tmp_path)
    assert compare.answers_of_windows(build, found, tmp_path) == linux
    assert sum(isinstance(answer, dict) for answer in linux) >= len(found) / 2


@with_wine
@pytest.mark.timeout(600)
def test_plans_are_equal_to_linux(tmp_path: Path) -> None:
    cases = [case for case in (*CASES, *MIXED) if case.name in PLANS]
    linux = compare.plans_of_linux("v0.4.0", cases, tmp_path, {})
    assert compare.plans_of_windows("v0.4.0", cases, tmp_path, {}) == linux
    assert [isinstance(plan, list) for plan in linux] == [True] * len(PLANS)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    write_lora(folder / "moe.lora", write_tiny(folder / "moe.gguf"))
    write_projector(folder / "moe.mmproj")
    write_swa(folder / "swa.gguf")
    write_hybrid(folder / "hybrid.gguf")
    return folder


@with_wine
@pytest.mark.timeout(600)
@cases(("v0.4.0", "a projector"), ("b11548", "an adapter"))
def test_all_answers_are_equal_to_linux(build: str, lacks: str, models: Path, tmp_path: Path) -> None:
    """A build without a libmtmd says so on both; adapters need a function that few builds for Windows have."""
    linux, windows = tmp_path / "linux.json", tmp_path / "windows.json"
    here = llama_builds.fetched(llama_builds.packaged()[build])
    subprocess.run([sys.executable, questions.__file__, str(here), str(models), str(linux)], check=True)
    words = (questions.__file__, place.build(build), models, windows)
    done = place.run([place.windows_path(word) for word in words])
    assert done.returncode == 0, done.stderr
    expected, found = (json.loads(path.read_text(encoding="utf-8")) for path in (linux, windows))
    without = {name for name in expected if lacks in name}
    assert {name: found[name] for name in expected if name not in without} == {
        name: answer for name, answer in expected.items() if name not in without
    }
    assert without and all("libmtmd" in found[name] or "LoRA" in found[name] for name in without)


@with_wine
@pytest.mark.timeout(600)
def test_a_load_that_llama_cpp_gives_up_on(tmp_path: Path) -> None:
    script = tmp_path / "aborting.py"
    script.write_text(ABORTING, encoding="utf-8")
    done = place.run([place.windows_path(script), place.windows_path(place.build("v0.4.0"))])
    why, devices = done.stdout.splitlines()[-2:]
    assert re.match(r"llama\.cpp was ended by SIGABRT during 'measure': .*GGML_ASSERT\(hparams\.n_layer", why), (
        done.stderr
    )
    assert devices == "['CUDA0']"


@pytest.mark.parametrize("build", place.BUILDS)
def test_builds_for_windows_have_what_is_looked_up(build: str) -> None:
    files = [path for path in place.build(build).iterdir() if path.suffix == ".dll"]
    there = frozenset[str]().union(*(pe.read(path).defined for path in files))
    names = (BINDINGS / "platform" / "msvc_names.inc").read_text(encoding="utf-8")
    functions = {
        msvc for usual, msvc in re.findall(r'^\{"(\w+)", "(\?[^"]+)"\}', names, re.M) if "llama_context" not in usual
    }
    assert functions and functions <= there
    assert any(name.startswith("?llama_get_memory_breakdown@@YA?AV?$map@") for name in there)


# --- the tests that Windows' Python runs, under wine


UNIT = ("test_system", "test_machine_spilling", "test_cli_main", "test_text", "test_llama_wire")
TESTS = (*(f"tests/unit/{name}.py" for name in UNIT), "tests/integration/test_every_system.py")

EVERY_MODULE = """\
import importlib, pkgutil, sys, fitter
OTHERS = ("fitter.llama.build.macho", "fitter.llama.this_process.plan_load")
for module in pkgutil.walk_packages(fitter.__path__, "fitter."):
    if not module.name.endswith(".posix") and module.name not in OTHERS:
        importlib.import_module(module.name)
print(len([name for name in sys.modules if name.startswith("fitter.")]))
"""
"""Imports every module but those of other systems, and the one that needs llama-cpp-python."""


@with_wine
def test_every_module_is_imported() -> None:
    done = place.run(["-c", EVERY_MODULE])
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout) > 250


@with_wine
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_windows_python_runs_its_tests(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    words = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "--junitxml", place.windows_path(report), *TESTS]
    disk = tmp_path / "disk"
    within = with_full_disk(disk)
    more = {"FITTER_LLAMA_CPP": place.windows_path(place.build("v0.4.0"))}
    more |= {VARIABLE: place.windows_path(disk)} if within else {}
    # a terminal, so that there is a Ctrl-C
    terminal, end = pty.openpty()
    command = [*within, *place.command(*words)]
    process = subprocess.Popen(command, env=place.environment(more), stdin=end, stdout=end, stderr=end)
    os.close(end)
    said = b""
    try:
        while piece := os.read(terminal, 1 << 16):
            said += piece
    except OSError:
        # the end of a terminal
        pass
    os.close(terminal)
    text = report.read_text(encoding="utf-8") if report.exists() else said.decode(errors="replace")
    assert process.wait() == 0, text[-6000:]
