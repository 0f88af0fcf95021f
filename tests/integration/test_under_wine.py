"""The tests that Windows' Python runs, under wine."""

from __future__ import annotations

import os
import pty
import subprocess
from pathlib import Path

import pytest

from tests.support.full_disk import VARIABLE, with_full_disk
from tests.support.wine import with_wine
from tools.wine import place

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
