"""Propose, measure, correct: what is proposed from, and what is measured again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest

from fitter.errors import LlamaCppCrashError, LlamaCppError
from fitter.llama.types import Breakdown, Params
from fitter.machine.speed import DeviceSpeed
from fitter.planning.placing.layer_sizes import HOST
from fitter.planning.placing.placement import Placement
from fitter.planning.search.corrections import settle, settle_partial, settle_whole
from fitter.planning.search.proposals import Situation
from fitter.planning.search.room import Room
from fitter.planning.search.search_state import Callbacks, SearchState
from fitter.planning.speed.explain import Choice
from tests.support.cases import cases, named_cases
from tests.support.synthetic import CARD, MIB, SLOW_CARD, SyntheticLlama, SyntheticModel, limits, priced, request

MODEL = SyntheticModel()
N_CTX = 4096
ON_ALL = Placement(0, (9,))
ON_BOTH, ON_THE_FIRST, ON_THE_SECOND = Placement(0, (5, 4)), Placement(0, (9, 0)), Placement(0, (0, 9))


def known(
    *mib: int,
    speeds: tuple[DeviceSpeed, ...] = (CARD,),
    is_priced: bool = True,
    host_mib: int | None = None,
    model: SyntheticModel = MODEL,
) -> tuple[SearchState, SyntheticLlama]:
    devices = limits(*mib)
    llama = SyntheticLlama(model, devices)
    asked = request(model, devices, host_mib=host_mib)
    asked = priced(asked, model, *speeds) if is_priced else asked
    found = SearchState(asked, devices, Callbacks(llama.measure, llama.record))
    found.units(N_CTX)
    return found, llama


def proposing(*placements: Placement | None) -> Callable[[Situation], Placement | None]:
    each = iter(placements)
    return lambda at: next(each, None)


@cases(True, False)
def test_what_is_proposed_from(is_whole: bool) -> None:
    """The buffers of placements of this kind; where nothing comes of that, not those of the other kind."""
    found, _ = known(3000, 3000)
    found.trial(ON_BOTH, N_CTX)
    rooms: list[Room] = []

    def propose(at: Situation) -> None:
        rooms.append(at.room)

    assert settle(found, N_CTX, is_whole, propose) is None
    assert rooms == [found.room(N_CTX, is_whole, optimistic) for optimistic in (False, True)]
    assert (rooms[0] == rooms[1]) is is_whole


@named_cases(
    ("a-faster-one", True, (ON_BOTH, None, ON_THE_FIRST), ON_THE_FIRST, 2),
    ("one-that-is-no-faster", True, (ON_THE_FIRST, None, ON_THE_SECOND), ON_THE_FIRST, 1),
    ("the-same-again", True, (ON_BOTH, None, ON_BOTH), ON_BOTH, 1),
    ("a-faster-one-at-once", True, (ON_BOTH, ON_THE_FIRST), ON_THE_FIRST, 2),
    ("one-that-is-no-faster-at-once", True, (ON_THE_FIRST, ON_THE_SECOND), ON_THE_FIRST, 1),
    ("the-same-at-once", True, (ON_THE_FIRST, ON_THE_FIRST), ON_THE_FIRST, 1),
    ("nothing-is-priced", False, (ON_BOTH, None, ON_THE_FIRST), ON_BOTH, 1),
)
def test_a_plan_is_refined_in_the_room_that_it_leaves(
    is_priced: bool, proposed: tuple[Placement | None, ...], placement: Placement, loads: int
) -> None:
    found, llama = known(3000, 3000, is_priced=is_priced)
    trial = settle(found, N_CTX, True, proposing(*proposed))
    assert trial is not None and (trial.placement, len(llama.asked)) == (placement, loads)


@named_cases(
    ("kept-at-once", 3000, (ON_BOTH, ON_THE_FIRST), 1.5, ON_BOTH, 1),
    ("kept-by-a-correction", 3000, (ON_BOTH, ON_THE_FIRST), 1.0, ON_THE_FIRST, 2),
    ("corrected-until-it-fits", 1000, (ON_THE_FIRST, ON_BOTH), 1.5, ON_BOTH, 2),
    ("out-of-reach", 1000, (ON_THE_FIRST, ON_BOTH), 0.95, None, 1),
)
def test_where_a_limit_is_set_only_whether_it_is_kept_is_asked(
    mib: int, proposed: tuple[Placement, ...], times: float, placement: Placement | None, loads: int
) -> None:
    """``times``: the limit, by the time of the faster placement."""
    found, llama = known(mib, 3000)
    limit = times * found.seconds(ON_THE_FIRST)
    trial = settle(found, N_CTX, True, proposing(*proposed), limit)
    assert (trial and trial.placement, len(llama.asked)) == (placement, loads)


def test_what_does_not_fit_refines_nothing() -> None:
    found, llama = known(1000, 3000)
    trial = settle(found, N_CTX, True, proposing(ON_BOTH, None, ON_THE_FIRST))
    assert trial is not None and (trial.placement, len(llama.asked)) == (ON_BOTH, 2)


def test_what_is_measured_slower_than_expected_refines_nothing() -> None:
    found, llama = known(3000, 3000)

    def measure(params: Params) -> Breakdown:
        # the second load is of the placement without a hop
        return replace(llama.measure(params), n_splits=(2, 2) if len(llama.asked) == 1 else (9000, 9000))

    callbacks = replace(found.callbacks, measure=measure)
    found = SearchState(found.original_request, found.devices, callbacks, found)
    trial = settle(found, N_CTX, True, proposing(ON_BOTH, None, ON_THE_FIRST))
    assert trial is not None and (trial.placement, len(llama.asked)) == (ON_BOTH, 2)


def test_which_devices_have_the_layers_is_said() -> None:
    said: list[Choice] = []
    found, _ = known(3000, 3000, speeds=(SLOW_CARD, CARD))
    found = SearchState(found.original_request, found.devices, replace(found.callbacks, on_choice=said.append), found)
    trial = settle_whole(found, N_CTX)
    assert trial is not None and trial.placement == ON_THE_SECOND
    assert [(choice.subject, choice.chosen) for choice in said] == [("which devices have the layers", "9 on CUDA1")]


def test_buffers_of_a_part_of_the_model_are_not_those_of_all_of_it() -> None:
    """All of it takes 1267 MiB; where a tensor of 40 is on the host the buffer is so much larger."""
    found, _ = known(1270)
    large = next(item for item in found.units(N_CTX)[7].items if item.bytes == 40 * MIB)
    assert found.trial(Placement(0, (9,), ((large, HOST),)), N_CTX).fits
    trial = settle_whole(found, N_CTX)
    assert trial is not None and trial.fits and trial.placement == ON_ALL


@dataclass
class Refusing(SyntheticLlama):
    """A llama.cpp that cannot load placements with a tensor of their own place."""

    error: LlamaCppError = field(default_factory=lambda: LlamaCppError("no"))

    def measure(self, params: Params) -> Breakdown:
        if params.tensor_buft_overrides:
            raise self.error
        return super().measure(params)


@named_cases(
    ("refused", LlamaCppError("no"), False, False),
    ("refused-though-plain", LlamaCppError("no"), True, True),
    ("a-crash", LlamaCppCrashError("SIGABRT"), False, False),
    ("a-crash-though-plain", LlamaCppCrashError("SIGABRT"), True, False),
)
def test_what_llama_cpp_refuses_is_plain_from_then_on(error: LlamaCppError, is_plain: bool, is_raised: bool) -> None:
    found, _ = known(3000, 3000)
    llama = Refusing(MODEL, found.devices, error=error)
    refused = SearchState(found.original_request, found.devices, Callbacks(llama.measure, llama.record), found)
    if is_plain:
        refused.be_plain()
    item = refused.units(N_CTX)[0].items[0]
    propose = proposing(Placement(0, (9, 0), ((item, HOST),)), ON_THE_FIRST)
    if is_raised:
        with pytest.raises(LlamaCppError, match=r"^no$"):
            settle(refused, N_CTX, False, propose)
        return
    trial = settle(refused, N_CTX, False, propose)
    assert trial is not None and trial.placement == ON_THE_FIRST and refused.is_plain


@cases((100, True), (1000, False))
def test_where_the_host_lacks_memory_placements_are_plain_from_then_on(host_mib: int, is_plain: bool) -> None:
    found, _ = known(3000, host_mib=host_mib)
    brought = Placement(4, (5,), ((found.units(N_CTX)[3].items[0], 0),))
    assert (settle(found, N_CTX, False, proposing(brought)) is None) is is_plain
    assert found.is_plain is is_plain


def test_where_the_weights_go_is_said_with_the_other_way() -> None:
    said: list[Choice] = []
    found, _ = known(900, model=replace(MODEL, cache=256))
    found = SearchState(found.original_request, found.devices, replace(found.callbacks, on_choice=said.append), found)
    trial = settle_partial(found, N_CTX)
    (choice,) = said
    assert trial is not None and (choice.subject, choice.seconds) == ("where the weights go", trial.seconds)
    assert choice.chosen.startswith("single feed-forward tensors on the host")
    assert choice.runner_up == "whole layers on the host with their KV cache"
    assert choice.runner_up_seconds is not None and choice.runner_up_seconds > choice.seconds
