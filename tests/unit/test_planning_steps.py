"""Steps with several tokens, and drafts: how well the cost model does on published measurements."""

from __future__ import annotations

import csv
import itertools
import re
import statistics
from dataclasses import replace
from pathlib import Path

import pytest

from fitter.machine.gpu import virtual_devices
from fitter.machine.speed import Factor, Factors, HostSpeed, default_host, speed_of
from fitter.output.tables.plan_facts import drafting_text
from fitter.planning.plan.turns import deeper, drafting_of, expected, of_each, published
from fitter.planning.pricing.pricing import Price
from fitter.planning.speed.cost import Estimate, Workload, default, price, token_seconds
from tests.support.cases import cases
from tests.support.draft_speeds import drafted
from tests.support.step_speeds import steps

SPECULATION = Path(__file__).resolve().parents[1] / "data" / "speeds" / "speculation.csv"


def published_rows() -> list[dict[str, str]]:
    with SPECULATION.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(line for line in file if not line.startswith("#")))


def test_the_rows_that_judge_are_as_near_as_those_that_were_fitted() -> None:
    every = steps()
    for rows in (every[::2], every[1::2]):
        assert statistics.median(abs(step.estimated() / step.speed - 1) for step in rows) < 0.2
    assert len({step.series[0] for step in every}) == 7


def test_more_tokens_of_a_step_are_in_the_published_order() -> None:
    right = total = 0
    for _, group in itertools.groupby(steps(), key=lambda step: step.series):
        for few, many in itertools.combinations(group, 2):
            total += 1
            right += (few.speed < many.speed) == (few.estimated() < many.estimated())
    assert total > 400
    assert right / total > 0.9


@cases((0.73, 3, 0.851), (0.79, 2, 0.853), (0.34, 3, 0.550), (1.0, 4, 1.0), (0.0, 3, 0.0))
def test_what_llama_server_prints_of_drafts(accepted: float, depth: int, each: float) -> None:
    found = of_each(accepted, depth)
    assert found == pytest.approx(each, abs=0.001)
    assert expected(depth, found) - 1 == pytest.approx(accepted * depth, abs=1e-6)


def test_published_acceptances_are_the_medians() -> None:
    rows = [row for row in published_rows() if row["accepted"]]
    mtp = [of_each(float(row["accepted"]), int(row["depth"])) for row in rows if row["p_min"] == "0"]
    assert statistics.median(mtp) == pytest.approx(published(), abs=0.01)


def test_deeper_drafts_are_accepted_less_often() -> None:
    found = []
    for _, group in itertools.groupby(drafted(), key=lambda each: each.series):
        for few, many in itertools.pairwise(group):
            share = of_each(many.accepted, many.depth) / of_each(few.accepted, few.depth)
            found.append(share ** (1 / (many.depth - few.depth)))
    assert len(found) == 23
    assert statistics.median(found) == pytest.approx(deeper(), abs=0.001)
    one = drafting_of(priced(CHEAP), 1, 0.0, 0.8)
    assert one is not None
    tokens = [each.tokens for each in one.depths]
    assert tokens[1] == pytest.approx(1.8)
    assert tokens[8] == pytest.approx(expected(8, 0.8 * deeper() ** 7))


def test_drafts_are_as_quick_as_published() -> None:
    every = drafted()
    fitted, judging = ([abs(each.estimated / each.speed - 1) for each in rows] for rows in (every[::2], every[1::2]))
    assert (len(fitted), len(judging)) == (19, 18)
    assert statistics.median(fitted) <= 0.08
    assert statistics.median(judging) <= 0.06
    assert statistics.mean(judging) <= 0.12


@pytest.mark.parametrize(
    ("gpu", "error"),
    [("rtx-[5p]", 0.03), ("rtx-3", 0.15), ("tesla", 0.1), ("rx-|r9700|strix", 0.15), ("m3-ultra", 0.06)],
    ids=["Blackwell", "Ampere", "V100", "Vulkan", "Metal"],
)
def test_drafts_on_each_kind_of_card(gpu: str, error: float) -> None:
    found = [each for each in drafted() if re.match(gpu, each.series[1])]
    assert statistics.median(abs(each.estimated / each.speed - 1) for each in found) <= error


def test_how_many_tokens_to_draft_on_published_cards() -> None:
    """Of each card's depths, the one that is estimated to be the quickest was at most a tenth slower than the best."""
    for _, group in itertools.groupby(drafted(), key=lambda each: each.series):
        rows = list(group)
        chosen = max(rows, key=lambda each: each.estimated)
        assert chosen.speed >= 0.9 * max(each.speed for each in rows), chosen.series


def priced(checks: tuple[float, ...]) -> Price:
    return Price(Estimate(0.0, checks[0], 1.0), Workload(), 0.0, (), None, checks=((1, checks),))  # type: ignore[arg-type]


CHEAP, DEAR = tuple(0.02 + 0.001 * n for n in range(9)), tuple(0.02 * (1 + n) for n in range(9))


def test_drafts_pay_where_checks_are_cheap_and_tokens_are_accepted() -> None:
    good = drafting_of(priced(CHEAP), 3, 0.001, 0.8)
    assert good is not None
    assert good.planned.each > 2 * good.off.each
    assert good.best.depth > 3
    for checks, draft, accepted in ((DEAR, 0.001, 0.8), (CHEAP, 0.02, 0.4)):
        bad = drafting_of(priced(checks), 3, draft, accepted)
        assert bad is not None
        assert bad.best.depth == 0
        assert bad.planned.each < bad.off.each


def test_speed_with_a_draft_by_hand() -> None:
    found = drafting_of(priced((0.02, 0.022, 0.024)), 2, 0.003, 0.75)
    assert found is not None
    # two tokens at 0.5 + 0.5^2 of them each are 0.75 of both, and one more
    each = of_each(0.75, 2)
    assert found.acceptance == pytest.approx(each)
    assert found.planned.tokens == pytest.approx(1 + each + each**2)
    assert found.planned.each == pytest.approx((1 + each + each**2) / (0.024 + 2 * 0.003))
    assert found.off.each == pytest.approx(50)
    assert found.accepted == pytest.approx(0.75), "as the user counts"
    assert "(75% of drafted tokens accepted)" in drafting_text(found)


def test_what_each_drafted_token_takes_by_hand() -> None:
    # for two users, a processor that chooses each token in 1 ms, and drafts that are twice as slow
    price = replace(priced((0.02, 0.022)), checks=((2, (0.02, 0.022)),))
    found = drafting_of(price, 1, 0.003, 0.5, 0.001, 2.0)
    assert found is not None
    assert found.off.each == pytest.approx(50)
    assert found.planned.each == pytest.approx(1.5 / (0.02 + 2 * (0.002 + 0.003 + 2 * 0.001)))


def test_a_token_through_layers_by_hand() -> None:
    card = speed_of(virtual_devices(["rtx-4090"])[0])
    family = default().families["cuda"]
    read = 1e9 / (family.bandwidth * card.bandwidth)
    assert token_seconds(1e9, 10, card) == pytest.approx(read + 10 * family.layer)
    tuned = replace(card, factors=Factors(weights=Factor(1, 2), layers=Factor(1, 3)))
    assert token_seconds(1e9, 10, tuned) == pytest.approx(2 * read + 3 * 10 * family.layer)
    host = HostSpeed(60e9, "test", 8)
    costs = default().host
    expected_seconds = 1e9 / (costs.bandwidth * 60e9) + 10 * 2 * costs.sync * 8
    assert token_seconds(1e9, 10, host) == pytest.approx(expected_seconds)


def test_without_a_drafter_there_is_nothing_to_say() -> None:
    assert drafting_of(Price(Estimate(0, 0.1, 1), Workload(), 0, (), None), 3, 0.1, None) is None  # type: ignore[arg-type]


def test_few_tokens_for_each_expert_are_slow_on_datacenter_cards() -> None:
    rows = [step for step in steps()[1::2] if step.series[0] == "h200" and step.work.n_expert]
    assert [step.tokens for step in rows] == [2, 8, 32] * 2
    assert all(0.7 < step.estimated() / step.speed < 1.2 for step in rows)


def test_one_cache_of_all_users_is_attended_to_by_each() -> None:
    """An H200 took 10.7 ms for a step of 32 users with caches of their own, and 13.56 with one cache of all."""
    step = next(each for each in steps() if each.series[:2] == ("h200", "llama 8B Q4_K_M") and each.tokens == 32)
    own, shared = (
        price(step.work, [step.device], default_host(), replace(step.workload, is_unified=is_unified))
        for is_unified in (False, True)
    )
    assert shared.generation_seconds - own.generation_seconds == pytest.approx(13.56e-3 - 10.7e-3, rel=0.3)
    alone = replace(step.workload, users=1)
    assert price(step.work, [step.device], default_host(), replace(alone, is_unified=True)) == price(
        step.work, [step.device], default_host(), alone
    )
