"""Which cards of the catalogue a fit uses: one alone that holds everything, else the fastest first, in any order."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

import fitter
from fitter import Plan
from fitter.llama.client import Worker
from tests.support.cases import cases, named_cases
from tools.models import shapes

HOST = "60GB/s"


@dataclass(frozen=True)
class Models:
    """The directory of the models, and one worker for all of them."""

    directory: Path
    worker: Worker


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Models]:
    with Worker() as worker:
        yield Models(tmp_path_factory.mktemp("shapes"), worker)


@dataclass(frozen=True)
class Machine:
    """``cards`` in any order, a model at a context, and the cards that are to have all of it: ``used``, by their names.

    Those of ``full`` have no room for another layer.
    """

    model: str
    n_ctx: int
    cards: tuple[str, ...]
    used: tuple[str, ...]
    full: tuple[str, ...] = ()


def fit(models: Models, machine: Machine, cards: Sequence[str], devices: Sequence[str] | None = None) -> Plan:
    model = shapes.write(machine.model, models.directory, vocab=False)
    plan = fitter.fit(
        model, gpus=cards, n_ctx=machine.n_ctx, devices=devices, host_bandwidth=HOST, worker=models.worker
    )
    assert plan.fits and plan.estimate is not None
    return plan


def used_of(plan: Plan, cards: Sequence[str]) -> list[str]:
    """The cards that the plan names, each of which has something."""
    names = plan.params.devices or ()
    assert ("-dev" in plan.arguments()) == (names != tuple(device.name for device in plan.devices))
    assert sorted(names) == [device.name for device in plan.devices if device.used]
    return [cards[[device.name for device in plan.devices].index(name)] for name in names]


def largest_layer(models: Models, machine: Machine) -> int:
    """Bytes of the largest repeating layer, weights and cache."""
    return _largest_layer(shapes.write(machine.model, models.directory, vocab=False), machine.n_ctx)


@functools.cache
def _largest_layer(path: Path, n_ctx: int) -> int:
    found = fitter.inspect(path, n_ctx=n_ctx)
    return max(layer.bytes + layer.context for layer in found.layers if layer.index is not None)


def orders(machines: Sequence[Machine]) -> list[object]:
    """Every machine with its cards in every order."""
    rows: dict[str, object] = {}
    for machine in machines:
        for cards in itertools.permutations(machine.cards):
            name = f"{machine.model}/{machine.n_ctx}/{'+'.join(cards)}"
            rows[name] = pytest.param(machine, cards, id=name)
    return list(rows.values())


ONE = (
    Machine("llama-3.1-8b", 8192, ("rtx-3090", "rtx-4090", "rtx-3060-12gb"), ("rtx-4090",)),
    Machine("llama-3.1-8b", 8192, ("rtx-3060-12gb", "rtx-4060-ti-16gb"), ("rtx-3060-12gb",)),
    Machine("llama-3.1-8b", 8192, ("rx-6600", "rx-7900-xtx"), ("rx-7900-xtx",)),
    Machine("llama-3.1-8b", 8192, ("rtx-3090", "rtx-3090", "gtx-1060-6gb"), ("rtx-3090",)),
    Machine("qwen3-30b-a3b", 16384, ("rtx-5090", "gtx-1080-ti"), ("rtx-5090",)),
)


@pytest.mark.parametrize(("machine", "cards"), orders(ONE))
def test_one_card_that_holds_everything_is_alone(models: Models, machine: Machine, cards: tuple[str, ...]) -> None:
    plan = fit(models, machine, cards)
    assert used_of(plan, cards) == list(machine.used)
    assert not plan.params.tensor_buft_overrides
    assert plan.estimate is not None
    both = fitter.estimate(
        plan.model.path,
        gpus=cards,
        n_ctx=machine.n_ctx,
        tensor_split=[1.0] * len(cards),
        host_bandwidth=HOST,
        worker=models.worker,
    )
    assert plan.estimate.seconds < both.seconds, "the premise: all of them are slower"


SEVERAL = (
    Machine("qwen3-32b", 32768, ("rtx-4090", "rtx-3060-12gb"), ("rtx-4090", "rtx-3060-12gb"), ("rtx-4090",)),
    Machine("qwen3-30b-a3b", 16384, ("rtx-4070", "rtx-3060-12gb"), ("rtx-4070", "rtx-3060-12gb"), ("rtx-4070",)),
    # the third is left out
    Machine("qwen3-32b", 32768, ("rtx-4090", "rtx-3090", "rtx-3060-12gb"), ("rtx-4090", "rtx-3090"), ("rtx-4090",)),
    # all three are needed
    Machine(
        "llama-3.1-70b",
        8192,
        ("rtx-4090", "rtx-3080", "rtx-4060-ti-16gb"),
        ("rtx-4090", "rtx-3080", "rtx-4060-ti-16gb"),
        ("rtx-4090", "rtx-3080"),
    ),
)


@pytest.mark.parametrize(("machine", "cards"), orders(SEVERAL))
def test_the_fastest_are_filled_first(models: Models, machine: Machine, cards: tuple[str, ...]) -> None:
    plan = fit(models, machine, cards)
    assert sorted(used_of(plan, cards)) == sorted(machine.used)
    assert not plan.params.tensor_buft_overrides, "everything is on cards, in whole layers"
    layer = largest_layer(models, machine)
    room = {card: device.left - device.margin for card, device in zip(cards, plan.devices, strict=True)}
    for card in machine.full:
        assert 0 <= room[card] < layer, (card, room)


LARGE_AND_SLOW = (
    Machine("qwen3-30b-a3b", 8192, ("tesla-p40", "rtx-5070"), ("tesla-p40", "rtx-5070"), ("rtx-5070",)),
    Machine("gemma3-12b", 8192, ("tesla-m40-24gb", "rtx-4060"), ("tesla-m40-24gb", "rtx-4060"), ("rtx-4060",)),
)


@pytest.mark.parametrize(("machine", "cards"), orders(LARGE_AND_SLOW))
def test_two_that_are_faster_than_the_one_that_holds_everything(
    models: Models, machine: Machine, cards: tuple[str, ...]
) -> None:
    plan = fit(models, machine, cards)
    alone = fit(models, machine, cards, [plan.devices[cards.index(machine.cards[0])].name])
    assert alone.params.n_gpu_layers == alone.n_layer + 1, "the premise: one would hold everything"
    assert not alone.params.tensor_buft_overrides
    assert plan.estimate is not None and alone.estimate is not None
    assert plan.estimate.seconds < alone.estimate.seconds
    assert sorted(used_of(plan, cards)) == sorted(machine.used)
    room = {card: device.left - device.margin for card, device in zip(cards, plan.devices, strict=True)}
    for card in machine.full:
        assert 0 <= room[card] < largest_layer(models, machine), (card, room)


_FFN = ("up", "down", "gate")


@named_cases(
    ("the slower link first", ("gtx-1080-ti", "rtx-5090")), ("the faster link first", ("rtx-5090", "gtx-1080-ti"))
)
def test_host_weights_reach_the_first_device_by_the_fastest_link(gpus: tuple[str, str], tmp_path: Path) -> None:
    model = shapes.write("qwen3-235b-a22b", tmp_path, vocab=False)
    names = [f"CUDA{d}" for d in range(2)]
    plan = fitter.fit(model, gpus=gpus, n_ctx=4096)
    assert plan.fits and plan.estimate is not None
    assert plan.params.devices is not None and plan.params.devices[0] == names[gpus.index("rtx-5090")]
    given = fitter.fit(model, gpus=gpus, n_ctx=4096, devices=names)
    assert given.estimate is not None and plan.estimate.seconds <= given.estimate.seconds * 1.001
    said = [choice for choice in plan.choices if choice.subject == "which device is the first"]
    assert len(said) == (gpus[0] != "rtx-5090")


@cases((16, "8GiB"), (30000, "8GiB"), (30000, "rtx-4060"), (None, "4GiB"))
def test_what_is_said_of_the_weights_is_what_was_done(prompt: int | None, gpu: str, tmp_path: Path) -> None:
    plan = fitter.fit(shapes.write("qwen3-32b", tmp_path, vocab=False), gpus=[gpu], prompt=prompt)
    (choice,) = [choice for choice in plan.choices if choice.subject == "where the weights go"]
    patterns = [override.pattern for override in plan.params.tensor_buft_overrides]
    names = {i: [f"blk.{i}.ffn_{kind}.weight" for kind in _FFN] for i in range(plan.n_layer)}
    apart = [i for i in names if any(re.search(pattern, name) for pattern in patterns for name in names[i])]
    # a cache on the host whose layer's weights are on a device, or else single tensors; beside whole layers one may be
    # in two places
    brought = [i for i in apart if i <= plan.n_layer - plan.params.n_gpu_layers]
    assert choice.chosen.startswith("the KV cache") == bool(brought)
    assert choice.chosen.startswith("whole layers") == (len(apart) <= 1 and not brought)
