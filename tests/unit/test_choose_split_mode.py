"""--split-mode auto: which of two plans is chosen, and what is said of both."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from fitter.api.choose_split_mode import either
from fitter.errors import FitterError, LibraryError, LlamaCppError, ModelError, RemoteError, TimeLimitError, UsageError
from fitter.llama.types import Breakdown, Params
from fitter.parameters.table import SplitMode
from fitter.planning.plan.plan import Plan, Problem
from fitter.planning.pricing.pricing import Price
from fitter.planning.request.request import Progress
from fitter.planning.request.summary import Search
from fitter.planning.speed.cost import Estimate, Workload
from tests.support.plans import make_plan

CHOICES = {
    "tensor is clearly faster": (("tensor", 10.0, 4096, True), ("layer", 12.0, 4096, True), "tensor"),
    "tensor is hardly faster": (("tensor", 10.0, 4096, True), ("layer", 10.1, 4096, True), "layer"),
    "tensor has far less context": (("tensor", 10.0, 4096, True), ("layer", 11.1, 16384, True), "layer"),
    "more context takes too long": (("tensor", 10.0, 4096, True), ("layer", 12.0, 16384, True), "tensor"),
    "only tensor fits": (("tensor", 10.0, 4096, True), ("layer", 1.0, 4096, False), "tensor"),
    "only layer fits": (("tensor", 1.0, 4096, False), ("layer", 10.0, 4096, True), "layer"),
}


@pytest.mark.parametrize(("tensor", "layer", "expected"), CHOICES.values(), ids=CHOICES)
def test_which_split_mode_is_chosen(
    tensor: tuple[SplitMode, float, int, bool], layer: tuple[SplitMode, float, int, bool], expected: str
) -> None:
    plans = {mode: _plan(mode, seconds, n_ctx, fits) for mode, seconds, n_ctx, fits in (tensor, layer)}
    chosen = either(_of(plans), "model.gguf", {"split_mode": "auto"})
    assert chosen.params.split_mode == expected
    assert bool(chosen.choices) == (tensor[3] and layer[3]), "what was compared is said"


def test_with_the_most_context_as_objective_time_decides_between_equals() -> None:
    def chosen(tensor: int, layer: int) -> str:
        plans = {"tensor": _plan("tensor", 10.0, tensor, True), "layer": _plan("layer", 20.0, layer, True)}
        return either(_of(plans), "model.gguf", {"split_mode": "auto", "objective": "context"}).params.split_mode

    assert [chosen(4096, 4096), chosen(4096, 4352), chosen(4352, 4096)] == ["tensor", "layer", "tensor"]


def test_a_request_without_a_prompt_can_be_fast_at_prompts() -> None:
    plans = {mode: _plan(mode, 0.0, n_ctx, True) for mode, n_ctx in (("layer", 512), ("tensor", 4096))}
    assert either(_of(plans), "model.gguf", {"objective": "prompt"}).params.split_mode == "tensor"


REFUSALS: dict[str, tuple[FitterError, str]] = {
    "one device": (
        UsageError("split mode 'tensor' needs two devices or more, and there is only CUDA0: use --split-mode layer"),
        "split mode 'tensor' needs two devices or more, and there is only CUDA0",
    ),
    "another build": (
        LibraryError("planned for ggml 1 only: use --split-mode layer, or more"),
        "planned for ggml 1 only",
    ),
    "a crash": (LlamaCppError("llama.cpp was ended by SIGSEGV"), "llama.cpp was ended by SIGSEGV"),
    "no time": (TimeLimitError("no plan was found in time: raise it"), "no plan was found in time: raise it"),
}


@pytest.mark.parametrize(("error", "said"), REFUSALS.values(), ids=REFUSALS)
def test_why_there_is_no_plan_with_tensor_is_said(error: FitterError, said: str) -> None:
    plan = either(_of({"layer": _plan("layer", 10.0, 4096, True), "tensor": error}), "model.gguf", {})
    assert plan.params.split_mode == "layer" and not plan.choices
    assert plan.notes == (f"planned with split mode 'layer' alone: {said}",)


@pytest.mark.parametrize(
    "answers",
    [
        {"layer": ModelError("no such file"), "tensor": None},
        {"layer": None, "tensor": RemoteError("the server is gone")},
    ],
    ids=["layer fails", "a server is gone"],
)
def test_what_ends_a_fit_is_raised(answers: dict[str, Any]) -> None:
    with pytest.raises((ModelError, RemoteError)):
        either(
            _of({mode: answer or _plan("layer", 10.0, 4096, True) for mode, answer in answers.items()}),
            "model.gguf",
            {},
        )


def test_both_searches_are_counted_and_told_of() -> None:
    told: list[Progress] = []
    plans = {mode: _plan(mode, 10.0, 4096, True) for mode in ("layer", "tensor")}
    plan = either(_of(plans, progress=True), "model.gguf", {}, on_progress=told.append)
    assert (plan.search.dummy_loads, plan.search.shared_loads, plan.search.is_cut_short) == (6, 2, True)
    assert [(step.dummy_loads, step.text) for step in told] == [(1, "layer"), (4, "tensor"), (6, "done")]


def test_the_time_limit_is_for_both(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    limits = []

    def fit(model: str, split_mode: SplitMode, **words: Any) -> Plan:
        limits.append((split_mode, words["time_limit"]))
        clock[0] += 4
        return replace(_plan(split_mode, 10.0, 4096, True), fit_keywords={"time_limit": words["time_limit"]})

    for limit in (10.0, 4.0):
        plan = either(fit, "model.gguf", {"time_limit": limit})
        assert plan.fit_keywords["time_limit"] == limit, "a later fit has all of it again"
    assert limits == [("layer", 10.0), ("tensor", 6.0), ("layer", 4.0)]
    assert plan.notes == ("planned with split mode 'layer' alone: the time limit was over",)


def _of(answers: dict[Any, Any], *, progress: bool = False) -> Callable[..., Plan]:
    """A fit that answers with a plan, or raises an error, for each split mode."""

    def fit(model: str, split_mode: SplitMode, **words: Any) -> Plan:
        if progress:
            words["on_progress"](Progress(1, split_mode))
            words["on_progress"](Progress(3, "done"))
        answer = answers[split_mode]
        if isinstance(answer, FitterError):
            raise answer
        return replace(answer, search=Search(3, 0.5, 1, split_mode == "tensor"))

    return fit


def _plan(mode: SplitMode, seconds: float, n_ctx: int, fits: bool) -> Plan:
    estimate = Estimate(0.0, seconds / 512, seconds)
    price = Price(estimate, Workload(0, 512), 0.0, (), Breakdown((), (), n_ctx))
    problems = () if fits else (Problem("CUDA0", 1, "lacks"),)
    return make_plan(Params(n_ctx=n_ctx, split_mode=mode), problems=problems, estimate=price)
