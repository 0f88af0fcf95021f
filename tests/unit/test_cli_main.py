"""What comes out of the command: streams and exit status."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest

from fitter import api
from fitter.cli import main
from fitter.errors import LibraryError, LlamaCppError, ModelError, UsageError
from fitter.llama.types import Params, TensorBuftOverride
from fitter.planning.plan.plan import Plan, Problem
from fitter.planning.request.request import Progress
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
    answer(make_plan(Params(n_ctx=4096, n_gpu_layers=33)))
    assert main(["m.gguf"]) == 0
    out, err = capsys.readouterr()
    assert out == "-c 4096 -ngl 33 -np 1 -fit off\n"
    assert "CUDA0" in err
    assert "warning" not in err


def test_a_plan_that_does_not_fit_has_no_arguments(answer: Install, capsys: pytest.CaptureFixture[str]) -> None:
    answer(make_plan(host_free=GIB, problems=(PROBLEM,)))
    assert main(["m.gguf"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines()[-1] == f"fitter: does not fit: {PROBLEM.message}"


@pytest.mark.parametrize(("problems", "status"), [((), 0), ((PROBLEM,), 1)])
def test_json_comes_either_way(
    answer: Install, capsys: pytest.CaptureFixture[str], problems: tuple[Problem, ...], status: int
) -> None:
    answer(make_plan(problems=problems))
    assert main(["m.gguf", "--json"]) == status
    document = json.loads(capsys.readouterr().out)
    assert document["fits"] is (status == 0)
    assert len(document["problems"]) == status


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (UsageError("no such GPU"), 2),
        (ModelError("m.gguf is empty"), 3),
        (LibraryError("libllama is missing"), 3),
        (LlamaCppError("llama.cpp ended", ("line 1", "line 2")), 3),
        (LlamaCppError("two\nlines  of it"), 3),
    ],
)
def test_an_error_is_one_line(
    answer: Install, capsys: pytest.CaptureFixture[str], error: Exception, status: int
) -> None:
    answer(error)
    assert main(["m.gguf"]) == status
    out, err = capsys.readouterr()
    assert out == ""
    assert err == f"fitter: error: {' '.join(str(error).split())}\n"


@pytest.mark.parametrize(
    ("option", "shown"),
    [
        ([], []),
        (["-v"], ["[0 dummy loads] context 4096", "last words"]),
        (["-vv"], ["[0 dummy loads] context 4096", "a line of llama.cpp's log"]),
    ],
)
def test_verbose_shows_the_log_once(
    answer: Install, capsys: pytest.CaptureFixture[str], option: list[str], shown: list[str]
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
