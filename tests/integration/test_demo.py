"""The demo as a newcomer sees it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from examples import demo
from tests.support.cases import named_cases

HEADINGS = ["1. A model", "2. Two GPUs that are not here", "3. This machine", "4. The proof"]


def run(folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(demo.ROOT / "examples" / "demo.py"), str(folder)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry), "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("demo") / "not yet there"


@pytest.fixture(scope="module")
def done(folder: Path) -> subprocess.CompletedProcess[str]:
    return run(folder)


def test_it_succeeds_and_llama_cpp_is_quiet(done: subprocess.CompletedProcess[str]) -> None:
    assert (done.returncode, done.stderr) == (0, "")
    assert [line for line in done.stdout.splitlines() if re.match(r"\d\. ", line)] == HEADINGS
    assert not re.findall(r"^(?:llama_|ggml_|load_|print_info|sched_|graph_).*", done.stdout, re.MULTILINE)
    assert max(map(len, done.stdout.splitlines())) < 300


def test_the_virtual_gpus_are_unequal_and_spill_experts(done: subprocess.CompletedProcess[str]) -> None:
    part = done.stdout.split(HEADINGS[1])[1].split(HEADINGS[2])[0]
    totals = dict(re.findall(r"^ *(CUDA\d)\s+(\d+)", part, re.MULTILINE))
    assert set(totals) == {"CUDA0", "CUDA1"}
    assert len(set(totals.values())) == 2
    assert sum(map(int, totals.values())) * 2**20 < 1.5 * 130e6
    arguments = part.strip().splitlines()[-1].split()
    assert "-dev" not in arguments, "llama.cpp uses both by itself"
    # the experts of the first layers, and perhaps a part of one more
    assert 0 < int(arguments[arguments.index("-ncmoe") + 1]) < 12
    if "-ot" in arguments:
        pattern, _, buffer_type = arguments[arguments.index("-ot") + 1].rpartition("=")
        assert buffer_type == "CPU" and not re.search(pattern, "blk.11.attn_q.weight")


def test_the_command_that_is_shown_gives_what_is_shown(done: subprocess.CompletedProcess[str], folder: Path) -> None:
    part = done.stdout.split(HEADINGS[1])[1].split(HEADINGS[2])[0]
    (command,) = re.findall(r"^\$ (.*)$", part, re.MULTILINE)
    again = subprocess.run(command, shell=True, cwd=demo.ROOT, capture_output=True, text=True, check=True)
    assert part.strip().splitlines()[-1] == again.stdout.strip()


def test_it_generates_and_compares(done: subprocess.CompletedProcess[str]) -> None:
    part = done.stdout.split(HEADINGS[3])[1]
    assert f"({demo.MAX_TOKENS} tokens)" in part
    rows = re.findall(r"^(\w+) +(model|context|compute) +([\d,]+) +([\d,]+)$", part, re.MULTILINE)
    assert {kind for _, kind, _, _ in rows} == {"model", "context", "compute"}
    assert all(predicted == real for _, _, predicted, real in rows)
    assert part.strip().endswith("Equal, to the byte.")


def test_the_second_time_the_model_is_there(done: subprocess.CompletedProcess[str], folder: Path) -> None:
    before = (folder / "tiny-moe.gguf").stat()
    again = run(folder)
    after = (folder / "tiny-moe.gguf").stat()
    assert again.returncode == 0
    assert "tiny-moe.gguf is there from the last time." in again.stdout
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    failed = run(tmp_path / "file")
    assert failed.returncode == 3
    assert failed.stderr.count("\n") == 1
    assert "Traceback" not in failed.stderr + failed.stdout


CPU, REPACK = ("CPU", "model"), ("CPU_REPACK", "model")


@named_cases(
    ("equal", {CPU: 1000, REPACK: 5}, {CPU: 1000, REPACK: 5}, 0, "Equal, to the byte."),
    ("more", {CPU: 1000, REPACK: 5}, {CPU: 1001, REPACK: 5}, 1, "+1 in reality"),
    ("elsewhere", {CPU: 1000, REPACK: 5}, {CPU: 1005}, 1, "-5 in reality"),
    ("another buffer type", {CPU: 1000}, {CPU: 1000, REPACK: 7}, 1, "+7 in reality"),
)
def test_what_differs_is_said(
    predicted: dict[tuple[str, str], int],
    real: dict[tuple[str, str], int],
    status: int,
    said: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert demo.compare(Counter(predicted), Counter(real)) == status
    assert said in capsys.readouterr().out
