"""Several questions of a fit: which plan is chosen, and what is said of the others."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import pytest

from fitter.api.fits.questions import PlanAnswer, Questions
from fitter.errors import FitterError, LibraryError, LlamaCppError, ModelError, RemoteError, TimeLimitError, UsageError
from fitter.llama.types import Breakdown, Params
from fitter.parameters.table import SplitMode
from fitter.planning.plan.plan import Plan, Problem
from fitter.planning.pricing.pricing import Price
from fitter.planning.request.ask import Ask
from fitter.planning.speed.cost import Estimate, Workload
from fitter.programs import Attempt
from tests.support.cases import cases, named_cases
from tests.support.plans import make_plan


@named_cases(
    ("tensor is clearly faster", ("tensor", 10.0, 4096, True), ("layer", 12.0, 4096, True), "tensor"),
    ("tensor is hardly faster", ("tensor", 10.0, 4096, True), ("layer", 10.1, 4096, True), "layer"),
    ("tensor has far less context", ("tensor", 10.0, 4096, True), ("layer", 11.1, 16384, True), "layer"),
    ("more context takes too long", ("tensor", 10.0, 4096, True), ("layer", 12.0, 16384, True), "tensor"),
    ("only tensor fits", ("tensor", 10.0, 4096, True), ("layer", 1.0, 4096, False), "tensor"),
    ("only layer fits", ("tensor", 1.0, 4096, False), ("layer", 10.0, 4096, True), "layer"),
)
def test_which_split_mode_is_chosen(
    tensor: tuple[SplitMode, float, int, bool], layer: tuple[SplitMode, float, int, bool], expected: str
) -> None:
    plans = {mode: _plan(mode, seconds, n_ctx, fits) for mode, seconds, n_ctx, fits in (tensor, layer)}
    chosen = _chosen(plans)
    assert chosen.params.split_mode == expected
    assert bool(chosen.choices) == (tensor[3] and layer[3]), "what was compared is said"


def test_with_the_most_context_as_objective_time_decides_between_equals() -> None:
    def chosen(tensor: int, layer: int) -> str:
        plans = {"tensor": _plan("tensor", 10.0, tensor, True), "layer": _plan("layer", 20.0, layer, True)}
        return _chosen(plans, objective="context").params.split_mode

    assert [chosen(4096, 4096), chosen(4096, 4352), chosen(4352, 4096)] == ["tensor", "layer", "tensor"]


def test_a_request_without_a_prompt_can_be_fast_at_prompts() -> None:
    plans = {mode: _plan(mode, 0.0, n_ctx, True) for mode, n_ctx in (("layer", 512), ("tensor", 4096))}
    assert _chosen(plans, objective="prompt").params.split_mode == "tensor"


@named_cases(
    (
        "one device",
        UsageError("split mode 'tensor' needs two devices or more, and there is only CUDA0: use --split-mode layer"),
        "split mode 'tensor' needs two devices or more, and there is only CUDA0",
    ),
    ("a build", LibraryError("planned for ggml 1 only: use --split-mode layer, or more"), "planned for ggml 1 only"),
    ("a crash", LlamaCppError("llama.cpp was ended by SIGSEGV"), "llama.cpp was ended by SIGSEGV"),
    ("no time", TimeLimitError("no plan was found in time: raise it"), "no plan was found in time: raise it"),
)
def test_why_there_is_no_plan_with_tensor_is_said(error: FitterError, said: str) -> None:
    plan = _chosen({"layer": _plan("layer", 10.0, 4096, True), "tensor": error})
    assert plan.params.split_mode == "layer" and not plan.choices
    assert plan.notes == (f"planned with split mode 'layer' alone: {said}",)


@named_cases(
    ("layer fails", {"layer": ModelError("no such file"), "tensor": None}),
    ("a server is gone", {"layer": None, "tensor": RemoteError("the server is gone")}),
)
def test_what_ends_a_fit_is_raised(answers: dict[str, Any]) -> None:
    with pytest.raises((ModelError, RemoteError)):
        _chosen({mode: answer or _plan("layer", 10.0, 4096, True) for mode, answer in answers.items()})


def test_a_time_limit_that_ends_one_search_is_said() -> None:
    plans = {mode: _plan(mode, 10.0, 4096, True) for mode in ("layer", "tensor")}
    assert not _chosen(plans).search.is_cut_short
    assert _chosen({**plans, "tensor": TimeLimitError("no time")}).search.is_cut_short
    late = _chosen(plans, deadline=time.monotonic())
    assert late.search.is_cut_short
    assert late.notes == ("planned with split mode 'layer' alone: the time limit was over",)


def _chosen(answers: dict[Any, Any], deadline: float | None = None, **words: Any) -> Plan:
    """The plan of split mode ``auto``, where these are the answers, or errors, with each split mode."""

    def answer(changed: Mapping[str, Any]) -> PlanAnswer:
        result = answers[changed["split_mode"]]
        if isinstance(result, FitterError):
            raise result
        return PlanAnswer(result)

    questions = Questions(Ask.of({**words}), answer, {"split_mode": "layer"}, deadline)
    questions.ask_of_modes()
    assert questions.words["split_mode"] == questions.plan.params.split_mode
    return questions.plan


def _plan(mode: SplitMode, seconds: float, n_ctx: int, fits: bool) -> Plan:
    estimate = Estimate(0.0, seconds / 512, seconds)
    price = Price(estimate, Workload(0, 512), 0.0, (), Breakdown((), (), n_ctx))
    problems = () if fits else (Problem("CUDA0", 1, "lacks"),)
    return make_plan(Params(n_ctx=n_ctx, split_mode=mode), problems=problems, estimate=price)


# --- plans that a program can be told


def _lacking(size: int) -> Plan:
    return make_plan(problems=(Problem("CUDA0", size, "CUDA0 lacks some"),))


FAST, USUAL, NEARLY, SLOW = (_plan("layer", seconds, 4096, True) for seconds in (1.0, 10.0, 10.1, 12.0))
NO_ROOM = _plan("layer", 1.0, 4096, False)
ONE, TWO, THREE = (Attempt({"a": number}) for number in (1, 2, 3))
ON_THE_HOST = Attempt({"a": 1}, {0})

OF_PROGRAMS: dict[str, tuple[list[list[Attempt]], dict[str, Plan | None], str]] = {
    "the first that fits": ([[ONE, TWO]], {"1": USUAL, "2": FAST}, "1"),
    "the next where it does not fit": ([[ONE, TWO]], {"1": NO_ROOM, "2": USUAL}, "2"),
    "the next where it cannot be told": ([[ON_THE_HOST, Attempt({"a": 2}, {0, 33})]], {"1": FAST, "2": USUAL}, "2"),
    "a refusal in between is passed over": ([[ON_THE_HOST, TWO, THREE]], {"1": FAST, "2": None, "3": USUAL}, "3"),
    "the group that is clearly faster": ([[ONE], [TWO]], {"1": SLOW, "2": USUAL}, "2"),
    "the first of groups that are as fast": ([[ONE], [TWO]], {"1": NEARLY, "2": USUAL}, "1"),
    "what lacks least": ([[ONE], [TWO]], {"1": _lacking(2), "2": _lacking(1)}, "2"),
}


@cases(OF_PROGRAMS)
def test_which_plan_it_is_told(groups: list[list[Attempt]], plans: dict[str, Plan | None], expected: str) -> None:
    def answer(words: Mapping[str, Any]) -> PlanAnswer:
        plan = plans[str(words["a"])]
        if plan is None:
            raise LlamaCppError("llama.cpp refused it")
        return PlanAnswer(plan)

    questions = Questions(Ask(), answer, {"b": 0, **groups[0][0].words})
    questions.ask_of_program(groups, {"b": 0})
    assert questions.plan == plans[expected]
    assert questions.words == {"b": 0, "a": int(expected)}
