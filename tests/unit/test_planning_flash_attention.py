"""A search that turns flash attention on, or off, for all layers where `auto` decides against what helps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from fitter.errors import FitterError, LlamaCppError, TimeLimitError
from fitter.llama.types import Breakdown, Params
from fitter.planning.pricing.trial import Trial
from fitter.planning.search.search_order import search
from fitter.planning.speed.explain import Choice
from tests.support.cases import cases, named_cases
from tests.support.synthetic import DENSE, MIB, SyntheticLlama, SyntheticModel, limits, priced, request

EXPERTS = SyntheticModel(experts=(200 * MIB, 200 * MIB, 250 * MIB))


@dataclass
class FlashLlama(SyntheticLlama):
    """`auto` is off as soon as something is on the host, and then compute buffers are larger by 600 MiB."""

    refusal: Exception | None = None
    computes: Callable[[Params], bool] = field(default=lambda params: True)

    def measure(self, params: Params) -> Breakdown:
        if params.flash_attn == "on" and self.refusal is not None:
            raise self.refusal
        found = super().measure(params)
        is_whole = params.n_gpu_layers < 0 or params.n_gpu_layers > self.model.n_layer
        is_auto = is_whole and not params.tensor_buft_overrides and self.computes(params)
        is_on = params.flash_attn == "on" or (params.flash_attn == "auto" and is_auto)
        more = 0 if is_on else 600 * MIB
        rows = (replace(row, compute=row.compute + more) if row.device and row.used else row for row in found.rows)
        return replace(found, rows=tuple(rows), flash_attn=is_on)


def run(llama: FlashLlama, params: Params | None = None, fixed: tuple[str, ...] = ()) -> tuple[Trial, list[Choice]]:
    said: list[Choice] = []
    asked = priced(request(llama.model, llama.limits, params=params, fixed=fixed), llama.model)
    trial = search(asked, llama.measure, llama.record, on_choice=said.append)
    assert trial.fits
    return trial, [choice for choice in said if choice.subject == "flash attention"]


@named_cases(
    ("layers on the host", DENSE, 1000, "on"),
    ("tensors on the host", EXPERTS, 1800, "on"),
    ("everything on a device", DENSE, 3000, "auto"),
)
def test_it_is_on_where_auto_would_turn_it_off(model: SyntheticModel, mib: int, expected: str) -> None:
    context: dict[str, Any] = {"params": Params(n_ctx=4096), "fixed": ("n_ctx",)}
    trial, said = run(FlashLlama(model, limits(mib)), **context)
    assert (trial.params.flash_attn, trial.breakdown.flash_attn) == (expected, True)
    if expected == "auto":
        assert said == []
        return
    (choice,) = said
    auto, _ = run(FlashLlama(model, limits(mib), refusal=LlamaCppError("no")), **context)
    assert (choice.chosen, choice.seconds) == ("on for every layer", pytest.approx(trial.seconds))
    assert (choice.runner_up, choice.runner_up_seconds) == ("auto, which turns it off", auto.seconds)


@named_cases(("llama.cpp cannot", LlamaCppError("no kernel")), ("the time is up", TimeLimitError("too late")))
def test_the_plan_stays_where_it_cannot_be(refusal: FitterError) -> None:
    trial, said = run(FlashLlama(DENSE, limits(1000), refusal=refusal))
    assert (trial.params.flash_attn, trial.breakdown.flash_attn, said) == ("auto", False, [])


@cases("auto", "off")
def test_what_the_user_says_stays(word: str) -> None:
    llama = FlashLlama(DENSE, limits(1000))
    trial, said = run(llama, Params(flash_attn=word), ("flash_attn",))
    assert (trial.params.flash_attn, said) == (word, [])
    assert {params.flash_attn for params in llama.asked} == {word}


def test_devices_that_cannot_compute_it_are_not_asked_for_it() -> None:
    llama = FlashLlama(DENSE, limits(1000), computes=lambda params: False)
    trial, said = run(llama)
    assert (trial.params.flash_attn, said) == ("auto", [])
    assert {params.flash_attn for params in llama.asked} == {"auto"}
    assert any(params.n_gpu_layers < 0 or params.n_gpu_layers > 8 for params in llama.asked), "a whole model was tried"


class Unwilling(FlashLlama):
    """A llama.cpp that cannot load the whole model on devices."""

    def measure(self, params: Params) -> Breakdown:
        if params.n_gpu_layers > self.model.n_layer and not params.tensor_buft_overrides:
            raise LlamaCppError("no")
        return super().measure(params)


def test_a_load_that_is_only_to_tell_of_it_may_fail() -> None:
    trial, said = run(Unwilling(DENSE, limits(700)))
    assert (trial.params.flash_attn, trial.breakdown.flash_attn, said) == ("auto", False, [])
