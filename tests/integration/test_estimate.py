"""Prices of given parameters on real headers, measured by the real libllama; and what the command line says of them."""

from __future__ import annotations

import builtins
import itertools
import json
import math
import re
import statistics
from collections.abc import Callable, Iterable
from functools import reduce
from operator import add
from pathlib import Path
from typing import Any

import pytest

import fitter
from fitter import Price
from fitter.errors import UsageError
from fitter.llama.client import Worker
from fitter.text import speed
from tests.support.cases import cases, named_cases
from tests.support.command import run_fitter
from tools.measurements import card_users
from tools.measurements.card_users import RUNS, Turn
from tools.models import shapes

MODELS = ("llama-3.1-8b", "qwen3-30b-a3b")

HOST = "60GB/s"

Ask = Callable[..., Price]


@pytest.fixture
def price(models: dict[str, Path], worker: Worker) -> Ask:
    def ask(model: str = "llama-3.1-8b", *gpus: str, **parameters: object) -> Price:
        given = {"n_ctx": 8192, "host_bandwidth": HOST, **parameters}
        return fitter.estimate(models[model], gpus=gpus or ("rtx-4090",), worker=worker, **given)  # type: ignore[arg-type]

    return ask


def assert_falls(speeds: list[float]) -> None:
    assert all(a > b for a, b in itertools.pairwise(speeds)), speeds


def test_the_more_is_on_the_host_the_slower(price: Ask) -> None:
    prices = [price(n_gpu_layers=n) for n in (-1, 30, 20, 10, 0)]
    assert_falls([p.generation_tokens_per_second for p in prices])
    assert_falls([p.prompt_tokens_per_second for p in prices])
    # a card reads 4.4 GB of weights in about 7 ms at best, the host in 70 ms at best
    assert 80 < prices[0].generation_tokens_per_second < 230
    assert 5 < prices[-1].generation_tokens_per_second < 14


def test_spilled_ffn_weights_cost_less_than_a_cache_on_the_host(price: Ask) -> None:
    deep = {"n_ctx": 32768, "live_tokens": 30000}
    everything = price(**deep)
    spilled = price(**deep, override_tensor=[r"blk\.[0-7]\.ffn_(up|down|gate)=CPU"])
    cache = price(**deep, offload_kqv=False)
    assert_falls([p.generation_tokens_per_second for p in (everything, spilled, cache)])
    shallow = price(n_ctx=32768, live_tokens=0, offload_kqv=False)
    assert shallow.generation_tokens_per_second > 3 * cache.generation_tokens_per_second


@named_cases(
    ("one device", {}),
    ("tensors split", {"gpus": ["2x rtx-4090"], "split_mode": "tensor"}),
    ("users and host", {"n_seq_max": 4, "users": 4, "n_ctx": 4 * 8192, "n_gpu_layers": 20}),
)
def test_several_depths_are_as_many_calls(given: dict[str, Any], models: dict[str, Path], worker: Worker) -> None:
    def ask(live_tokens: int | list[int] | None = None) -> Price:
        words = {"n_ctx": 8192, "host_bandwidth": HOST, "gpus": ["rtx-4090"], **given}
        return fitter.estimate(models["llama-3.1-8b"], live_tokens=live_tokens, worker=worker, **words)

    depths = [8192, 0, 3000]
    several, alone, usual = ask(depths), [ask(depth) for depth in depths], ask()
    assert [each.live_tokens for each in several.depths] == depths
    assert [each.generation_seconds for each in several.depths] == [
        price.estimate.generation_seconds for price in alone
    ]
    assert (several.estimate, several.live_tokens, usual.depths) == (usual.estimate, usual.live_tokens, ())


def test_experts_on_the_host(price: Ask) -> None:
    ways: list[dict[str, object]] = [{}, {"n_cpu_moe": 10}, {"n_cpu_moe": 30}, {"cpu_moe": True}]
    prices = [price("qwen3-30b-a3b", **way) for way in ways]
    assert_falls([p.generation_tokens_per_second for p in prices])
    assert_falls([p.prompt_tokens_per_second for p in prices])
    by_pattern = price("qwen3-30b-a3b", override_tensor=["ffn_.*_exps=CPU"])
    assert by_pattern.estimate == prices[-1].estimate
    kept = price("qwen3-30b-a3b", cpu_moe=True, op_offload=False)
    assert kept.prompt_tokens_per_second < prices[-1].prompt_tokens_per_second


def test_two_devices(price: Ask) -> None:
    one, two = price(), price("llama-3.1-8b", "2x rtx-4090")
    assert two.breakdown.devices == ("CUDA0", "CUDA1")
    assert two.generation_tokens_per_second < one.generation_tokens_per_second, "layers come one after the other"
    slower = price("llama-3.1-8b", "rtx-4090", "rtx-3060-12gb", tensor_split=[1, 1])
    mostly = price("llama-3.1-8b", "rtx-4090", "rtx-3060-12gb", tensor_split=[10, 1])
    alone = price("llama-3.1-8b", "rtx-4090", "rtx-3060-12gb", devices=["CUDA1"])
    assert_falls([p.generation_tokens_per_second for p in (two, mostly, slower, alone)])
    assert [source.device for source in alone.sources] == ["CUDA1"]
    only = price("llama-3.1-8b", "rtx-4090", "rtx-3060-12gb", split_mode="none", main_gpu=1)
    assert only.generation_tokens_per_second == alone.generation_tokens_per_second


def test_a_machine_without_a_gpu(price: Ask) -> None:
    found = price("llama-3.1-8b", "none", live_tokens=1000)
    assert [source.device for source in found.sources] == ["host"]
    faster = price("llama-3.1-8b", "none", live_tokens=1000, host_bandwidth=120e9)
    assert faster.generation_tokens_per_second > 1.5 * found.generation_tokens_per_second


def test_sources_say_what_they_are(price: Ask) -> None:
    known = price(n_gpu_layers=20)
    assert [(s.device, s.is_default) for s in known.sources] == [("CUDA0", False), ("host", False)]
    unknown = price("llama-3.1-8b", "24GiB", n_gpu_layers=20, host_bandwidth=None)
    assert [(s.device, s.is_default, s.text[:8]) for s in unknown.sources] == [
        ("CUDA0", True, "default:"),
        ("host", True, "40 GB/s,"),
    ]


@cases(
    ({"prompt": 8000, "generate": 193}, "more than the context of 8192"),
    ({"live_tokens": 8193}, "8193 live tokens do not fit in a context of 8192"),
    ({"live_tokens": [0, 8193]}, "8193 live tokens do not fit in a context of 8192"),
    ({"live_tokens": []}, "live_tokens is an empty list: give a number of tokens, or a list of them"),
    ({"prompt": 0}, "prompt .--prompt. is 0"),
    ({"host_bandwidth": float("nan")}, "is not a bandwidth"),
    ({"host_bandwidth": "fast"}, "is not a bandwidth"),
    ({"split_mode": "row"}, "split mode 'row'"),
    ({"n_ubatch": 0}, "n_ubatch .-ub. is 0"),
)
def test_bad_input(given: dict[str, object], says: str, price: Ask) -> None:
    with pytest.raises(UsageError, match=says):
        price(**given)


@named_cases(
    ("everything on the device", "llama-3.1-8b", {"n_ctx": 8192}),
    ("experts on the host", "qwen3-30b-a3b", {"n_ctx": 8192, "gpus": ["12GiB"]}),
    ("two devices", "qwen3-30b-a3b", {"n_ctx": 8192, "gpus": ["8GiB", "6GiB"]}),
    ("the user's override", "llama-3.1-8b", {"n_ctx": 8192, "override_tensor": ["ffn_up=CPU"]}),
    ("no device", "llama-3.1-8b", {"n_ctx": 4096, "gpus": ["none"]}),
)
def test_a_plan_is_priced_as_its_parameters_are(
    model: str, options: dict[str, object], models: dict[str, Path]
) -> None:
    given = {"gpus": ["rtx-4090"], "host_bandwidth": HOST, **options}
    plan = fitter.fit(models[model], **given)  # type: ignore[arg-type]
    assert plan.fits and plan.estimate is not None
    params = plan.params
    same = fitter.estimate(
        models[model],
        gpus=given["gpus"],  # type: ignore[arg-type]
        host_bandwidth=HOST,
        n_ctx=params.n_ctx,
        n_gpu_layers=params.n_gpu_layers,
        tensor_split=params.tensor_split,
        override_tensor=[f"{o.pattern}={o.buffer_type}" for o in params.tensor_buft_overrides],
        devices=params.devices,
        n_batch=params.n_batch,
        n_ubatch=params.n_ubatch,
        live_tokens=[params.n_ctx],
    )
    assert same.estimate == plan.estimate.estimate
    assert plan.estimate.depths == same.depths == (plan.estimate.full_context,)
    assert same.sources == plan.estimate.sources


def test_a_context_is_chosen_that_holds_the_request(models: dict[str, Path]) -> None:
    given = {"gpus": ["6GiB"], "margin": 0, "host_bandwidth": HOST}
    usual = fitter.fit(models["llama-3.1-8b"], **given)  # type: ignore[arg-type]
    assert usual.params.n_ctx < 20000
    longer = fitter.fit(models["llama-3.1-8b"], prompt=20000, generate=1000, **given)  # type: ignore[arg-type]
    assert longer.fits and longer.params.n_ctx >= 21000
    assert longer.estimate is not None
    assert (longer.estimate.workload.prompt, longer.estimate.workload.generate) == (20000, 1000)


def test_the_command_line_says_how_fast(models: dict[str, Path]) -> None:
    words = [str(models["llama-3.1-8b"]), "--gpu", "24GiB", "--prompt", "1000", "--generate", "200", "--json"]
    done = run_fitter(*words, "--host-bandwidth", "55.9GiB/s", "-v")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    estimate = document["estimate"]
    of_inputs = {"inputs_per_second", "input_tokens"}
    assert set(estimate) == {"prompt_tokens_per_second", "generation_tokens_per_second", "full_context"} | of_inputs
    assert all(estimate[name] is None for name in of_inputs)
    full = estimate["full_context"]
    assert full["tokens"] == document["params"]["n_ctx"] > 1200
    assert full["generation_tokens_per_second"] < estimate["generation_tokens_per_second"]
    seconds = 1000 / estimate["prompt_tokens_per_second"] + 200 / estimate["generation_tokens_per_second"]
    assert f"(1000 + 200 tokens: {seconds:.1f} s)" in done.stderr
    rate = speed(full["generation_tokens_per_second"])
    assert f"  with a full context ({full['tokens']} tokens): {rate} t/s generation\n" in done.stderr
    assert "speed of CUDA0: default: as " in done.stderr
    assert "t/s prompt (CUDA0: default: as " in run_fitter(*words).stderr


def test_verbose_says_why(models: dict[str, Path]) -> None:
    path = str(models["llama-3.1-8b"])
    done = run_fitter(path, "--gpu", "6GiB", "-c", "32768", "--host-bandwidth", HOST, "-v", "--json")
    assert done.returncode == 0, done.stderr
    plan = fitter.fit(path, gpus=["6GiB"], n_ctx=32768, host_bandwidth=HOST)
    lines = plan.explain().splitlines()
    assert re.match(r"prompt: [\d.]+ m?s \(\w.* \d+ %\)$", lines[0])
    assert re.match(r"generation: [\d.]+ s \(\w+: \w+ \d+ %, .*\)$", lines[1])
    assert lines[-1].startswith("speed of CUDA0: default: as ")
    said = " ".join(done.stderr.split())
    assert all(line in said for line in lines)
    document = json.loads(done.stdout)["explanation"]
    assert document == plan.to_dict()["explanation"]
    assert len(document["choices"]) == len(plan.choices)
    assert (document["bound"] is None) == (plan.bound is None)


def test_what_does_not_fit_has_no_estimate(models: dict[str, Path]) -> None:
    done = run_fitter(str(models["llama-3.1-8b"]), "--gpu", "2GiB", "-ngl", "33", "-c", "131072", "--json")
    assert done.returncode == 1, done.stderr
    assert json.loads(done.stdout)["estimate"] is None


# --- a plan is the same whichever way Python adds: from 3.12 on its ``sum`` rounds floating-point numbers otherwise


GPUS = ("4GiB", "3GiB")
"""Two places of the same price for a tensor, one of which is a rounding cheaper."""


@named_cases(("exact, in order", (math.fsum, lambda numbers: reduce(add, numbers, 0.0))))
def test_a_plan_is_the_same(ways: tuple[Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = shapes.write("nemotron-h-9b", tmp_path, vocab=False)
    plain = builtins.sum
    plans = []
    for way in ways:

        def added(numbers: Iterable[Any], start: Any = 0, way: Any = way) -> Any:
            found = list(numbers)
            is_real = start == 0 and any(type(each) is float for each in found)
            return way(found) if is_real else plain(found, start)

        monkeypatch.setattr(builtins, "sum", added)
        plan = fitter.fit(model, gpus=GPUS, program="llama-server")
        plans.append((plan.params, plan.arguments(), plan.estimate))
    assert plans[0] == plans[1]


# --- turns of 1 to 32 users that a card took (``tests/data/speeds/card_users.csv``), beside estimates without a card


@pytest.fixture(scope="module")
def every(tmp_path_factory: pytest.TempPathFactory) -> list[Turn]:
    return list(card_users.turns(tmp_path_factory.mktemp("models")))


def test_every_row_is_estimated(every: list[Turn]) -> None:
    assert len(every) == 35
    assert {turn.run for turn in every} == set(RUNS)


def test_how_far_off_turns_are(every: list[Turn]) -> None:
    """The guide on users states these errors."""
    off = [abs(turn.estimated / turn.measured - 1) for turn in every]
    assert statistics.median(off) < 0.18
    assert sum(each < 0.5 for each in off) >= 33


def test_the_order(every: list[Turn]) -> None:
    """More users, other settings, and other work: slower where it was slower by a tenth."""
    pairs = [
        (one.measured < other.measured) == (one.estimated < other.estimated)
        for one, other in itertools.combinations(every, 2)
        if one.run.model == other.run.model
        and one.run.placement == other.run.placement
        and max(one.measured, other.measured) > 1.1 * min(one.measured, other.measured)
    ]
    assert len(pairs) > 200
    assert sum(pairs) / len(pairs) > 0.9


def test_what_saving_idle_slots_costs(every: list[Turn]) -> None:
    def turn(settings: str, slots: int, users: int) -> Turn:
        return next(
            each
            for each in every
            if each.run.model == "llama-3.1-8b"
            and (each.run.work, each.run.settings, each.run.slots) == ("conversation", settings, slots)
            and each.users == users
        )

    for users in (8, 32):
        saved, stayed = (turn(settings, 32, users) for settings in (card_users.SAVED, card_users.STAY))
        assert saved.measured > 1.9 * stayed.measured
        assert saved.estimated > 1.9 * stayed.estimated
