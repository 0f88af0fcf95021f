"""The benchmark end to end on one small case, and how it looks at the memory of several processes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import measuring
from benchmarks.measuring import watch
from benchmarks.results import load

ROOT = Path(__file__).resolve().parents[2]
MB = 10**6

# Both processes hold what they have until they have been looked at.
HOLD = """
import os, sys, time
def hold():
    open(sys.argv[1], "w").close()
    while not os.path.exists(sys.argv[2]):
        time.sleep(0.01)
"""
SHARED = """
import mmap
pages = mmap.mmap(-1, {size})
for _ in range({size} // 1000000):
    pages.write(b"a" * 1000000)
if os.fork() == 0:
    pages.seek(0)
    for _ in range({size} // 1000000):
        pages.read(1000000)
    hold()
    os._exit(0)
os.wait()
"""
PRIVATE = """
data = bytearray(b"a") * {size}
if len(sys.argv) == 3:
    import subprocess
    subprocess.run([*sys.orig_argv, "again"])
else:
    hold()
"""


@pytest.mark.parametrize(
    ("program", "peak", "at_most"), [(SHARED, 100, 200), (PRIVATE, 200, 200)], ids=["shared once", "private each"]
)
def test_memory_of_two_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, peak: int, at_most: int
) -> None:
    ready, seen = tmp_path / "ready", tmp_path / "seen"
    looks = 0

    def sleep(seconds: float) -> None:
        nonlocal looks
        looks += ready.exists()
        if looks == 3:
            seen.touch()
        time.sleep(seconds)

    monkeypatch.setattr(measuring, "time", SimpleNamespace(sleep=sleep))
    code = HOLD + program.format(size=100 * MB)
    done, memory = watch([sys.executable, "-c", code, str(ready), str(seen)], dict(os.environ))
    assert done.returncode == 0, done.stderr
    assert memory.processes == 2
    assert peak * MB <= memory.peak <= (peak + 40) * MB
    assert at_most * MB <= memory.at_most <= (at_most + 60) * MB


def test_one_case(tmp_path: Path) -> None:
    raw, tables = tmp_path / "raw.json", tmp_path / "RESULTS.md"
    command = [sys.executable, "-m", "benchmarks.compare", "--results", str(tables)]
    measure = ["--only", "llama-3.1-8b/8GiB", "--runs", "1", "--output", str(raw)]
    done = subprocess.run([*command, *measure], cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    assert "[1/1] llama-3.1-8b/8GiB: " in done.stderr

    results = load(raw)
    (case,) = results.comparisons
    assert (results.failed, results.devices, results.layers) == ((), (), ())
    assert (case.name, case.n_devices, case.n_vocab) == ("llama-3.1-8b/8GiB", 1, 128256)
    assert case.n_params == pytest.approx(8.03e9, rel=1e-3)
    assert case.fitter.memory.processes >= 2 and case.upstream.memory.processes == 1
    for program in (case.fitter, case.upstream):
        assert len(program.seconds) == 1 and program.seconds[0] > 0.05
        assert program.loads >= 1
        assert 20 * MB < program.memory.peak <= program.memory.at_most * 1.1 < 1000 * MB
        assert program.chosen is not None and not program.chosen.over
        assert program.chosen.n_ctx >= 4096 and program.chosen.left >= 0
        assert program.chosen.weights > 4 * 10**9

    written = tables.read_text()
    assert str(tmp_path) not in written
    assert f"| {case.name} | 1 | 128256 | " in written
    again = subprocess.run([*command, "--from", str(raw)], cwd=ROOT, capture_output=True, text=True, check=False)
    assert again.returncode == 0, again.stderr
    assert tables.read_text() == written
