"""``fitter tune``: a real llama-server runs a small plan and changes of it, and what goes wrong."""

from __future__ import annotations

import json
import math
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

import fitter
from fitter.api.real_runs.tune_plan import tune
from fitter.cli import main
from fitter.errors import LlamaCppError, UsageError
from tests.support.cases import named_cases
from tests.support.command import run_fitter
from tests.support.patience import until
from tools.comparisons import upstream
from tools.models.tiny_kinds import write_bert

SERVER = "llama-server"
ASKED: dict[str, Any] = {"n_ctx": 1024, "prompt": 100, "generate": 8, "cache_ram": 64, "n_seq_max": 2}


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return tmp_path / "config" / "llama-fitter" / "tuned.json"


@pytest.fixture
def undisturbed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever else runs here decides nothing."""
    for limit in ("BUSY", "NOISY"):
        monkeypatch.setattr(f"fitter.planning.checked.tuning.{limit}", math.inf)


@pytest.fixture(scope="module")
def server() -> Path:
    return upstream.tool(SERVER)


def servers(model: Path) -> list[psutil.Process]:
    """The llama-servers with this model; other tests have others."""
    every = psutil.process_iter(["name", "cmdline"])
    return [each for each in every if each.info["name"] == SERVER and str(model) in (each.info["cmdline"] or ())]


@pytest.mark.usefixtures("undisturbed")
def test_later_plans_know_what_was_measured(model: Path, server: Path, home: Path) -> None:
    before = fitter.fit(model, program=SERVER, **ASKED)
    tuning = tune(model, server=server, minutes=0.5, **ASKED)
    assert [run.problem for run in tuning.runs] == [""] * len(tuning.runs)
    assert tuning.runs[0].changes == ()
    assert tuning.stored == str(home)
    after = fitter.fit(model, program=SERVER, **ASKED)
    assert before.arguments() == after.arguments()
    assert before.estimate is not None
    assert after.estimate is not None
    assert tuning.tuned == pytest.approx(after.estimate.seconds, rel=1e-6)
    # the plan's own run says what the estimate should be; one that was right by luck may become a little worse
    own = tuning.runs[0]
    measured = ASKED["prompt"] * own.prompt + ASKED["generate"] * own.step
    errors = [abs(plan.estimate.seconds / measured - 1) for plan in (before, after) if plan.estimate is not None]
    assert errors[1] <= max(errors[0], 0.3)
    assert [source.is_tuned for source in after.estimate.sources] == [True]
    assert "(host: tuned)" in str(after) and "tuned" not in str(before)
    price = fitter.estimate(
        model, program=SERVER, devices=["none"], **{k: ASKED[k] for k in ("n_ctx", "prompt", "generate")}
    )
    assert price.sources[0].text.endswith(", tuned")
    # another machine's plans do not
    virtual = fitter.fit(model, gpus="none", program=SERVER, **ASKED)
    assert virtual.estimate is not None
    assert not virtual.estimate.sources[0].is_tuned
    assert not servers(model)


@pytest.mark.usefixtures("undisturbed")
def test_the_command(model: Path, server: Path, home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--server", str(server), "-c", "1024", "-np", "2", "-cram", "64", "--users", "2", "--generate", "8"]
    words += ["--prompt", "64", "--minutes", "0.01", "--export", str(tmp_path / "r")]
    assert main(["tune", str(model), *words]) == 0
    out = capsys.readouterr().out
    assert "the plan" in out
    assert "not tried, for want of time (--minutes): -t" in out
    line = out.splitlines()[-2]
    assert line.startswith(f"llama-server -m {model}")
    home.unlink()
    again = run_fitter("tune", "--import", str(tmp_path / "r"))
    assert (again.returncode, home.is_file()) == (0, True)
    assert again.stdout.startswith("runs read into ")


def test_what_others_decide_is_not_stored(
    model: Path, server: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fitter.planning.checked.tuning.BUSY", -1.0)
    tuning = tune(model, server=server, minutes=0.01, **ASKED)
    assert not home.exists() and not tuning.stored
    assert tuning.runs[0].doubt.startswith("other programs used ")


def test_turns_are_cut_so_that_several_runs_have_time(model: Path, server: Path) -> None:
    words = {**ASKED, "n_ctx": 4096, "prompt": 1000, "generate": 1000}
    tuning = tune(model, server=server, minutes=0.05, store=False, **words)
    assert " tokens for each user, not 5 of 1000 + 1000, so that several runs have time" in tuning.cut
    whole = tune(model, server=server, minutes=5, store=False, load_mode="none", n_ubatch=512, **ASKED)
    assert whole.cut == ""


def wrapper(path: Path, server: Path, condition: str, then: str) -> Path:
    """A llama-server that does something else where its arguments meet a condition of the shell."""
    path.write_text(f'#!/bin/sh\nif {condition}; then {then}; fi\nexec {server} "$@"\n', encoding="utf-8")
    path.chmod(path.stat().st_mode | stat.S_IEXEC)
    return path


def test_a_change_that_crashes_is_passed_over(model: Path, server: Path, tmp_path: Path) -> None:
    bad = wrapper(tmp_path / SERVER, server, 'echo "$*" | grep -q -- "-t "', "echo no such threads >&2; exit 1")
    tuning = tune(model, server=bad, minutes=0.5, store=False, **ASKED)
    failed = [run for run in tuning.runs if run.problem]
    assert failed
    assert all("no such threads" in run.problem and run.words[:1] == ("-t",) for run in failed)
    assert not tuning.best.words
    assert tuning.stored == ""


def test_the_best_and_the_plan_are_started_twice(model: Path, server: Path, tmp_path: Path) -> None:
    log = tmp_path / "starts"
    counted = wrapper(tmp_path / SERVER, server, 'echo "$*" | grep -q -- "--port"', f'echo "$*" >>{log}')
    tuning = tune(model, server=counted, minutes=5, store=False, load_mode="none", n_ubatch=512, **ASKED)
    assert not any(run.problem for run in tuning.runs)
    starts = log.read_text(encoding="utf-8").splitlines()
    again = len(starts) - len(tuning.runs)
    # the best until then may turn out not to be the best
    assert again == 2 or (again == 1 and tuning.best is tuning.runs[0])


def test_a_plan_that_crashes_is_an_error(model: Path, server: Path, home: Path, tmp_path: Path) -> None:
    bad = wrapper(tmp_path / SERVER, server, 'echo "$*" | grep -q -- "--port"', "echo no luck >&2; exit 1")
    with pytest.raises(LlamaCppError, match="no luck"):
        tune(model, server=bad, minutes=0.5, **ASKED)
    assert not home.exists()
    assert not servers(model)


def test_an_interrupt_leaves_nothing(model: Path, server: Path, home: Path) -> None:
    words = [sys.executable, "-m", "fitter", "tune", str(model), "--server", str(server), "-c", "4096", "-np", "2"]
    command = subprocess.Popen(
        [*words, "-cram", "64", "--generate", "200", "--prompt", "500"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ,
    )
    until(lambda: bool(servers(model)) or command.poll() is not None, "no llama-server started")
    command.send_signal(signal.SIGINT)
    _, said = command.communicate(timeout=60)
    assert command.returncode == 130, said
    until(lambda: not servers(model), "a llama-server is left")
    assert not home.exists()


@named_cases(
    ("virtual devices", {"gpus": "rtx-4090"}, "virtual devices cannot run a model"),
    ("no time", {"minutes": 0}, "minutes is 0"),
    ("another program", {"program": "llama-bench"}, "only a llama-server can be tuned"),
    ("another server", {"server": "/nowhere"}, "there is no llama-server at /nowhere"),
)
def test_what_is_refused(words: dict[str, Any], why: str, model: Path) -> None:
    with pytest.raises(UsageError, match=why):
        tune(model, **words)


def test_an_embedder_is_not_run(server: Path, tmp_path: Path, home: Path) -> None:
    done = run_fitter("tune", str(write_bert(tmp_path / "bert.gguf")), "--server", str(server))
    assert (done.returncode, done.stdout) == (2, "")
    said = done.stderr.splitlines()[-1]
    assert said.startswith("fitter: error: only a model that answers can be tuned") and "llama-bench -embd 1" in said
    assert not home.exists()


def test_a_plan_that_does_not_fit_is_not_run(model: Path, server: Path, home: Path) -> None:
    words = ["--server", str(server), "--host-memory", "8MiB", "-c", "1024", "-cram", "0"]
    done = run_fitter("tune", str(model), *words)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.splitlines()[-1].startswith("fitter: does not fit: the host lacks ")
    assert not home.exists()


def test_rows_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "runs.json").write_text(json.dumps({"schema": 1}), encoding="utf-8")
    done = run_fitter("tune", "--import", str(tmp_path / "runs.json"))
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "has no runs that fitter tune --export wrote" in done.stderr
    assert run_fitter("tune").returncode == 2
    assert run_fitter("tune", "--export", str(tmp_path / "e.json")).returncode == 2
