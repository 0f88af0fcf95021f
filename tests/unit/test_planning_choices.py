"""What is said of the choices that a search makes."""

from __future__ import annotations

from dataclasses import replace

from fitter.llama.types import Breakdown, Params
from fitter.planning.placing.layer_sizes import HOST, Item
from fitter.planning.placing.placement import Placement
from fitter.planning.pricing.trial import Trial
from fitter.planning.search import choices
from tests.support.cases import named_cases
from tests.support.synthetic import SyntheticModel, limits, request

DEVICES = limits(1000, 2000)
REQUEST = request(SyntheticModel(), DEVICES)
UP, UP_TOO = (Item(layer, f"blk.{layer}.ffn_up", ("weight",), 10) for layer in (3, 4))
QUERY = Item(2, "blk.2.attn_q", ("weight",), 10)
LAYERS = Placement(4, (3, 2))
TENSORS = Placement(0, (5, 4), ((UP, HOST), (UP_TOO, HOST)))


def trial(placement: Placement = LAYERS, seconds: float | None = 2.0, n_ctx: int = 4096, missing: int = 0) -> Trial:
    lacks = (("CUDA0", missing),) if missing else ()
    params = Params(n_ctx=n_ctx, devices=("CUDA0", "CUDA1"))
    return Trial(placement, DEVICES, params, Breakdown((), (), n_ctx, True), lacks, seconds)


@named_cases(
    ("layers", LAYERS, "whole layers on the host with"),
    ("and-a-part-of-one", Placement(4, (3, 2), ((UP, HOST),)), "whole layers on the host with"),
    ("tensors", TENSORS, "single feed-forward tensors on the host"),
    ("bare-caches", Placement(0, (9, 0), ((QUERY, HOST),)), "the weights of some layers on the host"),
    ("a-part-is-on-another-device", Placement(3, (4, 2), ((UP, HOST), (UP_TOO, 1))), "whole layers"),
    ("caches-on-the-host", Placement(4, (5, 0), ((UP, 0),)), "the KV cache of some layers on the host"),
)
def test_style(placement: Placement, words: str) -> None:
    assert choices.style(REQUEST, placement).startswith(words)


@named_cases(
    ("another-way", trial(), TENSORS, 5.0),
    ("the-same-way", trial(), Placement(5, (3, 1)), None),
    ("no-other", trial(), None, None),
)
def test_where_weights_go(best: Trial, other: Placement | None, seconds: float | None) -> None:
    choice = choices.where_weights_go(REQUEST, best, other, lambda placement: 5.0)
    assert choice is not None and choice.seconds == 2.0 and choice.runner_up_seconds == seconds
    assert (choice.runner_up is None) is (seconds is None)
    assert choices.where_weights_go(REQUEST, replace(best, seconds=None), other, lambda placement: 5.0) is None


def test_which_devices_have_layers() -> None:
    choice = choices.which_devices_have_layers(trial(), Placement(0, (5, 4)), lambda placement: 5.0)
    assert choice is not None and (choice.chosen, choice.runner_up_seconds) == ("3 on CUDA0, 2 on CUDA1", 5.0)
    assert choices.which_devices_have_layers(trial(), LAYERS, lambda placement: 5.0) is None
    assert choices.which_devices_have_layers(trial(seconds=None), TENSORS, lambda placement: 5.0) is None


def test_which_devices_take_part() -> None:
    fewer = replace(trial(seconds=1.0), params=Params(n_ctx=2048, devices=()))
    choice = choices.which_devices_take_part(fewer, trial())
    assert choice is not None and choice.chosen == "none, context 2048"
    assert (choice.runner_up, choice.excess) == ("CUDA0, CUDA1, context 4096", 1.0)
    assert choices.which_devices_take_part(fewer, trial(missing=1)) is None


@named_cases(
    ("same-context", 4096, ["without CUDA1", "with CUDA1"]),
    ("another-context", 2048, ["without CUDA1, context 2048", "with CUDA1, context 4096"]),
)
def test_are_remotes_worth_it(n_ctx: int, expected: list[str]) -> None:
    here = replace(trial(Placement(4, (5,)), seconds=1.0, n_ctx=n_ctx), devices=DEVICES[:1])
    choice = choices.are_remotes_worth_it(DEVICES[1:], here, trial())
    assert choice is not None and [choice.chosen, choice.runner_up] == expected


def test_which_device_is_first() -> None:
    choice = choices.which_device_is_first(DEVICES[1], 1.0, DEVICES[0], 3.0)
    assert (
        choice.chosen.startswith("CUDA1") and choice.runner_up == "CUDA0, in the given order" and choice.excess == 2.0
    )
