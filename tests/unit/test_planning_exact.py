"""What is said to be exact: the fastest devices, and the shortest patterns, each against brute force."""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import product

from hypothesis import given, settings
from hypothesis import strategies as st

from fitter.planning.placing.layer_sizes import Item, Unit
from fitter.planning.placing.packing import pack_fastest
from fitter.planning.placing.placement import Placement, caches_on, pattern_for, weights_on
from fitter.planning.search.compute_buffers import LearnedCompute
from tests.support.cases import named_cases


def fits(units: list[Unit], placement: Placement, budgets: list[int]) -> bool:
    used = zip(weights_on(units, placement), caches_on(units, placement), budgets, strict=True)
    return all(weights + cache <= max(budget, 0) for weights, cache, budget in used)


def time_of(placement: Placement, seconds: list[list[float]], hop: float) -> float:
    ranges = [(d, start, stop) for d, (start, stop) in enumerate(placement.ranges()) if start < stop]
    spent = sum(sum(seconds[d][start:stop]) for d, start, stop in ranges)
    return spent + hop * max(0, len(ranges) - 1)


@settings(deadline=None)
@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=5),
    budgets=st.lists(st.integers(0, 30), min_size=1, max_size=3),
    speeds=st.lists(st.integers(1, 5), min_size=3, max_size=3),
    hop=st.integers(0, 4),
)
def test_the_fastest_devices_are_chosen(sizes: list[int], budgets: list[int], speeds: list[int], hop: int) -> None:
    units = [Unit(i, size, 0) for i, size in enumerate(sizes)]
    seconds = [[float(unit.weights * speed) for unit in units] for speed in speeds[: len(budgets)]]
    found = pack_fastest(units, budgets, seconds, float(hop))
    every = [
        placement
        for counts in product(range(len(units) + 1), repeat=len(budgets))
        if sum(counts) == len(units) and fits(units, placement := Placement(0, counts), budgets)
    ]
    if found is None:
        assert not every
    else:
        assert fits(units, found, budgets)
        assert time_of(found, seconds, hop) == min(time_of(placement, seconds, hop) for placement in every)


@named_cases(
    ("one is enough, and the faster one is taken", [100, 100], (1.0, 2.0), (3, 0)),
    ("wherever it is", [100, 100], (2.0, 1.0), (0, 3)),
    ("equal ones: one alone", [100, 100], (1.0, 1.0), (3, 0)),
    ("both are needed, and the faster one is filled", [25, 100], (1.0, 2.0), (2, 1)),
    ("a byte short", [19, 100], (1.0, 2.0), (1, 2)),
    ("nothing holds it", [19, 9], (1.0, 2.0), None),
)
def test_fastest_cases(budgets: list[int], speeds: tuple[float, ...], counts: tuple[int, ...] | None) -> None:
    units = [Unit(i, 10, 0) for i in range(3)]
    found = pack_fastest(units, budgets, [[speed * 10] * 3 for speed in speeds], 1.0)
    assert (found.counts if found else None) == counts


@given(st.dictionaries(st.integers(0, 130), st.sets(st.sampled_from(["gate", "up", "down"]), min_size=1), min_size=1))
def test_a_pattern_finds_its_tensors_and_no_others(choice: dict[int, set[str]]) -> None:
    items = [Item(i, f"blk.{i}.ffn_{kind}_exps", ("weight",), 1) for i, kinds in choice.items() for kind in kinds]
    pattern = re.compile(pattern_for(items))
    for index in range(140):
        for kind in ("gate", "up", "down"):
            name = f"blk.{index}.ffn_{kind}_exps.weight"
            assert bool(pattern.search(name)) == (kind in choice.get(index, set())), name
    assert not set(pattern.pattern) & set("\\'\" ,*?[")


LAYER = {
    "attn_q": ("weight", "bias"),
    "attn_norm": ("weight",),
    "ffn_up": ("weight",),
    "ffn_up_exps": ("bias", "weight"),
    "exp_probs_b": ("bias",),
    "post_attention_norm": ("weight",),
    "nextn.eh_proj": ("weight",),
}
LAYERS = 123
ALL = [f"blk.{layer}.{stem}.{end}" for layer in range(LAYERS) for stem, ends in LAYER.items() for end in ends]


def layer_of(layer: int, stems: Iterable[str] = LAYER) -> list[Item]:
    return [Item(layer, f"blk.{layer}.{stem}", LAYER[stem], 1) for stem in stems]


@given(
    whole=st.sets(st.integers(0, LAYERS - 1), min_size=1),
    parts=st.dictionaries(st.integers(0, LAYERS - 1), st.sets(st.sampled_from(sorted(LAYER)), min_size=1)),
)
def test_layers_that_are_moved_whole_are_said_without_their_tensors(
    whole: set[int], parts: dict[int, set[str]]
) -> None:
    items = [item for layer in sorted(whole) for item in layer_of(layer)]
    items += [item for layer, stems in parts.items() if layer not in whole for item in layer_of(layer, sorted(stems))]
    pattern = pattern_for(items, [*ALL, "output.weight", "token_embd.weight"])
    assert {name for name in ALL if re.search(pattern, name)} == {name for item in items for name in item.names}
    assert pattern.startswith("^blk.") and pattern.split("|^")[0].endswith(".(attn|exp|ffn|nextn|post)")


def test_a_layer_that_keeps_a_tensor_is_not_whole() -> None:
    items = [*layer_of(3), *layer_of(4)[1:]]
    assert pattern_for(items, ALL).startswith("^blk.3.(attn|exp|ffn|nextn|post)|^blk.4.")


@named_cases(
    ("one", [7], "7"),
    ("two of a ten", [37, 39], "3(7|9)"),
    ("a whole ten", list(range(40, 50)), "4."),
    ("the first ten", list(range(10)), "."),
    ("one short of a ten", list(range(41, 50)), "4(1|2|3|4|5|6|7|8|9)"),
    ("beyond a hundred", [*range(100, 110), 112], "(10.|112)"),
)
def test_layers_are_said_in_short(layers: list[int], said: str) -> None:
    assert pattern_for([Item(i, f"blk.{i}.ffn_up", ("weight",), 1) for i in layers]) == f"^blk.{said}.ffn_up.weight$"


def test_the_largest_compute_buffer_counts_once_corrected() -> None:
    learned = LearnedCompute()
    for measured, expected in ((500, 500), (300, 300), (280, 300), (320, 320), (310, 320)):
        learned.learn("CUDA0", 4096, measured)
        assert learned.at("CUDA0", 4096) == expected
    learned.learn("CUDA0", 8192, 100)
    assert learned.at("CUDA0", 8192) == 100, "another context is not corrected yet"
