"""What split mode tensor takes in time, against what was published and against itself."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fitter.machine.speed import DeviceSpeed, default_host
from fitter.planning.placing.layer_sizes import HOST
from fitter.planning.pricing.split_price import Share, SumCosts, default_sums, pipelined, split_estimate
from fitter.planning.speed.cost import Estimate, Layer, Part, Weights, Work, Workload
from tests.support.split_speeds import in_order, pairs

CARD = DeviceSpeed(1e12, 1e14, 3e10, "cuda", "8.6", "test", True)
SLOW = replace(CARD, bandwidth=5e11)
FREE = SumCosts(0.0, 0.0, 1.0, 0.0, 1.0)
WORK = Work((*[Layer(0, (Weights(0, 5e8, 1e9),))] * 32, Layer(0, (Weights(0, 5e8, 1e9),))), 8192)
REQUEST = Workload(2048, 512)


def estimate(devices: list[DeviceSpeed], shares: list[float], sums: SumCosts = FREE) -> Estimate:
    return split_estimate(WORK, devices, [Share(share, share) for share in shares], default_host(), REQUEST, sums)


def weights_of(found: Estimate) -> Part:
    (part,) = [part for part in found.parts if part.name.endswith("weights")]
    return part


def test_each_device_reads_its_part() -> None:
    one, two = estimate([CARD], [1.0]), estimate([CARD, CARD], [0.5, 0.5])
    assert weights_of(two).generation == pytest.approx(weights_of(one).generation / 2)


def test_the_slowest_device_decides() -> None:
    assert weights_of(estimate([CARD, SLOW], [0.5, 0.5])).name == "device 1: weights"
    assert weights_of(estimate([CARD, SLOW], [0.8, 0.2])).name == "device 0: weights"


def test_sums_take_two_waits_in_a_layer() -> None:
    waiting = estimate([CARD, CARD], [0.5, 0.5], replace(FREE, wait=1e-4))
    assert waiting.generation_seconds - estimate([CARD, CARD], [0.5, 0.5]).generation_seconds == pytest.approx(64e-4)


def test_more_devices_take_more_steps() -> None:
    four = estimate([CARD] * 4, [0.25] * 4, replace(FREE, wait=1e-4, wait_more=1e-4))
    assert four.generation_seconds - estimate([CARD] * 4, [0.25] * 4).generation_seconds == pytest.approx(128e-4)


def test_sums_go_over_nvlink_where_every_card_has_it() -> None:
    sent, linked = replace(FREE, width=4.0), replace(CARD, nvlink=10 * CARD.pcie)
    slow, one, fast = (estimate(cards, [0.5, 0.5], sent) for cards in ([CARD] * 2, [CARD, linked], [linked] * 2))
    free = estimate([CARD] * 2, [0.5, 0.5]).prompt_seconds
    assert one == slow
    assert slow.prompt_seconds - free == pytest.approx(10 * (fast.prompt_seconds - free))


PARTED = Layer(0, (Weights(0, 1e8, 2e8), Weights(HOST, 4e8, 8e8)))


def test_the_host_computes_with_its_weights_in_prompts_too() -> None:
    """Of the devices that split every tensor, none takes an operation over."""
    work, share = replace(WORK, layers=(PARTED,) * 32), [Share(0.5, 0.5)] * 2
    found, alone = (
        split_estimate(replace(work, op_offload=offload), [CARD] * 2, share, default_host(), REQUEST, FREE)
        for offload in (True, False)
    )
    assert found == alone
    parts = {part.name: part for part in found.parts}
    assert parts["host: weights"].prompt > 10 * parts["device 0: weights"].prompt


def test_what_the_host_has_computed_is_not_summed_up() -> None:
    work, share = replace(WORK, layers=(PARTED, *WORK.layers[1:])), [Share(0.5, 0.5)] * 2
    waiting, free = (
        split_estimate(work, [CARD] * 2, share, default_host(), REQUEST, sums)
        for sums in (replace(FREE, wait=1e-4), FREE)
    )
    assert waiting.generation_seconds - free.generation_seconds == pytest.approx(63e-4)


def test_a_prompt_of_one_micro_batch_is_not_pipelined() -> None:
    one = Estimate(2.0, 1.0, 5.0)
    assert pipelined(one, 2, Workload(512, 1), 512).prompt_seconds == 2.0
    assert pipelined(one, 2, Workload(2048, 1), 512).prompt_seconds == pytest.approx(2.0 * 5 / 8)


def test_published_pairs_are_in_the_measured_order() -> None:
    every = pairs()
    apart = every[1::2]
    assert len(every) == 25 and len(apart) == 12
    assert in_order(apart, default_sums()) >= 0.8 * len(apart)
    assert in_order(every[::2], default_sums()) >= 0.8 * len(every[::2])


def test_free_sums_would_not_be_in_that_order() -> None:
    apart = pairs()[1::2]
    assert in_order(apart, FREE) < 0.8 * len(apart)
