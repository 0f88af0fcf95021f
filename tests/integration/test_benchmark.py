"""The benchmark end to end on one small case."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.results import load

ROOT = Path(__file__).resolve().parents[2]
MB = 10**6


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
