"""What comes out of the command: streams and exit status."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest

from fitter import api
from fitter.cli import main
from fitter.errors import LibraryError, LlamaCppError, ModelError, PlanError, UsageError
from fitter.llama.types import Params, TensorBuftOverride
from fitter.planning.plan.plan import Plan, Problem
from fitter.planning.request.request import Progress
from tests.support.answers import Terminal
from tests.support.cases import cases, stored
from tests.support.plans import GIB, MIB, make_plan

Install = Callable[[Plan | BaseException], None]
PROBLEM = Problem("host", 244 * MIB, "the host is 244 MiB short: free host memory")


@pytest.fixture
def answer(monkeypatch: pytest.MonkeyPatch) -> Install:
    """Make ``api.fit`` return a plan or raise an error."""

    def install(what: Plan | BaseException) -> None:
        def fit(model: str, *, on_progress: Any, on_log: Any, **given: Any) -> api.Plan:
            if on_progress:
                on_progress(Progress(0, "context 4096"))
            if on_log:
                on_log("a line of llama.cpp's log")
            if isinstance(what, BaseException):
                raise what
            return api.Plan(**{field.name: getattr(what, field.name) for field in fields(what)})

        monkeypatch.setattr(api, "fit", fit)

    return install


def test_a_plan_that_fits(answer: Install, capsys: pytest.CaptureFixture[str]) -> None:
    answer(replace(make_plan(Params(n_ctx=4096, n_gpu_layers=33)), program="llama-server"))
    assert main(["m.gguf"]) == 0
    out, err = capsys.readouterr()
    assert out == "-c 4096 -ngl 33 -np 1 -fit off\n"
    assert "CUDA0" in err
    assert "warning" not in err and "run it" not in err and "llama-server" not in err


def test_a_plan_that_does_not_fit_has_no_arguments(answer: Install, capsys: pytest.CaptureFixture[str]) -> None:
    answer(make_plan(host_free=GIB, problems=(PROBLEM,)))
    assert main(["m.gguf"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines()[-1] == f"fitter: does not fit: {PROBLEM.message}"


@cases(((), 0), ((PROBLEM,), 1))
def test_json_comes_either_way(
    problems: tuple[Problem, ...], status: int, answer: Install, capsys: pytest.CaptureFixture[str]
) -> None:
    answer(make_plan(problems=problems))
    assert main(["m.gguf", "--json"]) == status
    document = json.loads(capsys.readouterr().out)
    assert document["fits"] is (status == 0)
    assert len(document["problems"]) == status


@cases(
    (UsageError("no such GPU"), 2),
    (ModelError("m.gguf is empty"), 3),
    (LibraryError("libllama is missing"), 3),
    (LlamaCppError("llama.cpp ended", ("line 1", "line 2")), 3),
    (LlamaCppError("two\nlines  of it"), 3),
)
def test_an_error_is_a_line(error: Exception, status: int, answer: Install, capsys: pytest.CaptureFixture[str]) -> None:
    answer(error)
    assert main(["m.gguf"]) == status
    out, err = capsys.readouterr()
    assert out == ""
    assert err == f"fitter: error: {' '.join(str(error).split())}\n"


@cases(
    ([], []),
    (["-v"], ["[0 dummy loads] context 4096", "last words"]),
    (["-vv"], ["[0 dummy loads] context 4096", "a line of llama.cpp's log"]),
)
def test_verbose_shows_the_log_once(
    option: list[str], shown: list[str], answer: Install, capsys: pytest.CaptureFixture[str]
) -> None:
    answer(LlamaCppError("llama.cpp ended", ("last words",)))
    main(["m.gguf", *option])
    assert capsys.readouterr().err.splitlines() == [*shown, "fitter: error: llama.cpp ended"]


def test_an_interrupt_is_quiet(answer: Install, capsys: pytest.CaptureFixture[str]) -> None:
    answer(KeyboardInterrupt())
    assert main(["m.gguf"]) == 130
    out, err = capsys.readouterr()
    assert out == ""
    assert err == ""


def test_a_pattern_that_a_pipe_would_change_is_warned_of(answer: Install, capsys: pytest.CaptureFixture[str]) -> None:
    answer(make_plan(Params(n_ctx=512, tensor_buft_overrides=(TensorBuftOverride(r"a\b", "CPU"),))))
    assert main(["m.gguf"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("-c 512 ")
    assert r"fitter: warning: a shell or xargs may change 'a\b=CPU'" in err


OVERRIDE = TensorBuftOverride("a(b|c)", "CPU")
RUN = "-c 4096 -ngl 33 -ot 'a(b|c)=CPU' -np 1 -fit off"
FILES = {
    "my model.gguf": "'my model.gguf'",
    "shape://llama-3.1-8b:Q8_0": "llama-3.1-8b-Q8_0.gguf",
    "https://host/a/model.gguf": "model.gguf",
}


@cases(stored("cli_main", "on_a_terminal"))
def test_a_terminal_gets_the_command(
    model: str, program: str, words: str, hint: str, line: str, answer: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = make_plan(Params(n_ctx=4096, n_gpu_layers=33, tensor_buft_overrides=(OVERRIDE,)))
    answer(replace(plan, program=program, model=replace(plan.model, path=model)))
    out, err = Terminal(), io.StringIO()
    monkeypatch.setattr("sys.stdout", out)
    monkeypatch.setattr("sys.stderr", err)
    assert main(["m.gguf", *words.split()]) == 0
    assert out.getvalue() == line.format(model=FILES.get(model, model), run=RUN) + "\n"
    if hint == "quiet":
        assert err.getvalue() == ""
    else:
        table, _, last = err.getvalue().partition("  KV cache  512.0 MiB of f16\n")
        assert table.startswith("Model 8B (llama, 4.0 GiB of weights) fits\n")
        assert last == (f"{hint}\n" if hint else "")


def test_no_control_characters_reach_a_terminal(answer: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = make_plan(Params(n_ctx=4096, tensor_buft_overrides=(TensorBuftOverride("a\x1b[2J", "CPU"),)))
    answer(replace(plan, program="llama-server"))
    out, err = Terminal(), io.StringIO()
    monkeypatch.setattr("sys.stdout", out)
    monkeypatch.setattr("sys.stderr", err)
    assert main(["m.gguf"]) == PlanError.exit_code
    assert out.getvalue() == "" and "\x1b" not in err.getvalue()
    assert "has control characters, which a command line cannot contain" in err.getvalue()


def test_a_quiet_pipe_gets_the_answer_alone(answer: Install, capsys: pytest.CaptureFixture[str]) -> None:
    answer(make_plan(Params(n_ctx=4096, n_gpu_layers=33)))
    assert main(["-q", "m.gguf"]) == 0
    assert tuple(capsys.readouterr()) == ("-c 4096 -ngl 33 -np 1 -fit off\n", "")
    answer(make_plan(host_free=GIB, problems=(PROBLEM,)))
    assert main(["m.gguf", "--quiet"]) == 1
    assert tuple(capsys.readouterr()) == ("", f"fitter: does not fit: {PROBLEM.message}\n")
    answer(ModelError("m.gguf is empty"))
    assert main(["m.gguf", "-q"]) == 3
    assert tuple(capsys.readouterr()) == ("", "fitter: error: m.gguf is empty\n")


@cases("-q -v", "-vv --quiet")
def test_quiet_and_verbose_exclude_each_other(words: str, answer: Install, capsys: pytest.CaptureFixture[str]) -> None:
    answer(make_plan())
    assert main(["m.gguf", *words.split()]) == 2
    assert tuple(capsys.readouterr()) == (
        "",
        "fitter: error: -q prints less and -v more: give one of them (see fitter fit --help)\n",
    )


def test_what_does_not_fit_is_folded_on_a_terminal(answer: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem("host", MIB, " ".join(["word"] * 30))
    answer(make_plan(problems=(problem,)))
    err = Terminal()
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("sys.stderr", err)
    assert main(["m.gguf", "-q"]) == 1
    lines = err.getvalue().splitlines()
    assert len(lines) > 1 and max(map(len, lines)) <= 80
    assert " ".join(err.getvalue().split()) == f"fitter: does not fit: {problem.message}"
