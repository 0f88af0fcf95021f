"""The limit of memory for planning: a command, a worker and a real load, each on both sides of it."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from fitter.errors import UsageError
from fitter.llama.client import Worker
from fitter.llama.processes import memory_limit
from fitter.llama.types import Params
from tests.support.cases import named_cases
from tests.support.command import run_fitter
from tools.models import shapes
from tools.models.tiny import TINY_DENSE, write_tiny

MIB = 1 << 20


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shapes.write("llama-3.1-8b", tmp_path_factory.mktemp("models"))


def plan(model: Path, limit: str | None, **more: str) -> subprocess.CompletedProcess[str]:
    return run_fitter(model, "--gpu", "24GiB", **{memory_limit.VARIABLE: limit, **more})


@named_cases(("the command", "1MiB"), ("a worker of it", "40MiB"))
def test_a_command_that_takes_too_much_ends_in_one_line(limit: str, model: Path, tmp_path: Path) -> None:
    # the tokenizer, which takes most, is read where it is not known
    done = plan(model, limit, XDG_CACHE_HOME=str(tmp_path))
    assert (done.returncode, done.stdout) == (3, "")
    assert re.fullmatch(
        rf"fitter: error: planning takes more than {limit[:-3]} MiB of memory \(\d+ MiB\): check the model's file, or "
        r"allow more with FITTER_MEMORY_LIMIT\n",
        done.stderr,
    )


def test_a_limit_that_is_enough_changes_nothing(model: Path) -> None:
    assert plan(model, "1GiB").stdout == plan(model, None).stdout != ""


def test_a_limit_that_is_no_size(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    message = "FITTER_MEMORY_LIMIT: '40' has no unit: write 40MiB or 40GiB"
    done = plan(model, "40")
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"fitter: error: {message}\n")
    monkeypatch.setenv(memory_limit.VARIABLE, "40")
    with Worker() as worker, pytest.raises(UsageError, match=f"^{re.escape(message)}$"):
        worker.devices()


def test_a_real_load_has_no_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_tiny(tmp_path / "tiny.gguf", TINY_DENSE)
    params = Params(n_ctx=1 << 18, n_seq_max=1, devices=(), flash_attn="off")
    monkeypatch.setenv(memory_limit.VARIABLE, "100MiB")
    with Worker() as worker:
        takes = sum(row.context for row in worker.measure(path, params).rows)
        assert takes > 200 * MIB
        assert worker.load(path, params).breakdown.rows
        worker.unload()


@named_cases(
    ("no more than alone", 24 << 30, 2, "4294967296B"),
    ("half of the machine for all", 24 << 30, 8, "1610612736B"),
    ("enough for any plan", 2 << 30, 8, "536870912B"),
)
def test_processes_that_share_a_machine(
    physical: int, processes: int, each: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(memory_limit.VARIABLE, raising=False)
    monkeypatch.setattr(os, "sysconf", {"SC_PHYS_PAGES": physical >> 12, "SC_PAGE_SIZE": 1 << 12}.__getitem__)
    memory_limit.divide(processes)
    assert os.environ[memory_limit.VARIABLE] == each
    memory_limit.divide(1)
    assert os.environ[memory_limit.VARIABLE] == each, "what somebody has set stays"
