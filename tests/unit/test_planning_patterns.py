"""Patterns for tensors: short by hand, and of these tensors and no others by brute force."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from hypothesis import given
from hypothesis import strategies as st

from fitter.planning.placing.layer_sizes import HOST, Item
from fitter.planning.placing.placement import Placement, overrides_of, pattern_for
from tests.support.cases import named_cases

GATE, UP, DOWN, FOUR = "ffn_gate", "ffn_up", "ffn_down", range(4)


@named_cases(
    ("one", {UP: [7]}, "^blk.7.ffn_up.weight$"),
    ("a longer name", {"indexer.attn_k": [3]}, "^blk.3.indexer.attn_k.weight$"),
    ("two of a layer", {UP: [3], GATE: [3]}, "^blk.3.ffn_(gate|up).weight$"),
    ("nothing in common", {GATE: [0], UP: [1]}, "^blk.(0.ffn_gate|1.ffn_up).weight$"),
    ("a name that goes on", {UP: [3], f"{UP}_exps": [3]}, "^blk.3.ffn_(up|up_exps).weight$"),
    ("every layer has all", {GATE: FOUR, UP: FOUR}, "^blk.(0|1|2|3).ffn_(gate|up).weight$"),
    ("by layer", {GATE: [1], UP: [1, 2], DOWN: [2]}, "^blk.(2.ffn_(down|up)|1.ffn_(gate|up)).weight$"),
    ("some have all", {GATE: [1, 2], UP: [1, 2, 3]}, "^blk.((1|2).ffn_(gate|up)|3.ffn_up).weight$"),
    ("two of a ten", {UP: [37, 39]}, "^blk.3(7|9).ffn_up.weight$"),
    ("a whole ten", {UP: range(40, 50)}, "^blk.4..ffn_up.weight$"),
    ("the first ten", {UP: range(10)}, "^blk...ffn_up.weight$"),
    ("one short of a ten", {UP: range(41, 50)}, "^blk.4(1|2|3|4|5|6|7|8|9).ffn_up.weight$"),
    ("beyond a hundred", {UP: [*range(100, 110), 112]}, "^blk.(10.|112).ffn_up.weight$"),
)
def test_patterns_are_short(tensors: dict[str, Sequence[int]], pattern: str) -> None:
    items = [Item(n, f"blk.{n}.{name}", ("weight",), 1) for name, layers in tensors.items() for n in layers]
    assert pattern_for(items) == pattern
    every = [f"blk.{n}.{name}.weight" for n in range(140) for name in (GATE, UP, DOWN, f"{UP}_exps", "indexer.attn_k")]
    assert {name for name in every if re.search(pattern, name)} == {f"{item.stem}.weight" for item in items}


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
def test_layers_moved_whole_are_said_without_their_tensors(whole: set[int], parts: dict[int, set[str]]) -> None:
    items = [item for layer in sorted(whole) for item in layer_of(layer)]
    items += [item for layer, stems in parts.items() if layer not in whole for item in layer_of(layer, sorted(stems))]
    pattern = pattern_for(items, [*ALL, "output.weight", "token_embd.weight"])
    assert {name for name in ALL if re.search(pattern, name)} == {name for item in items for name in item.names}
    assert pattern.startswith("^blk.") and pattern.split("|^")[0].endswith(".(attn|exp|ffn|nextn|post)")


def test_a_layer_that_keeps_a_tensor_is_not_whole() -> None:
    items = [*layer_of(3), *layer_of(4)[1:]]
    assert pattern_for(items, ALL).startswith("^blk.3.(attn|exp|ffn|nextn|post)|^blk.4.")


def test_words_of_which_a_layer_has_all_are_said_without_their_tensors() -> None:
    stems = ("attn_q", "attn_norm", "ffn_up", "post_attention_norm")
    items = [*layer_of(4, stems), *layer_of(5, stems)]
    assert pattern_for(items, ALL) == "^blk.(4|5).(attn|post)|^blk.(4|5).ffn_up.weight$"


def test_one_override_per_target() -> None:
    a, b, c = (Item(n, f"blk.{n}.ffn_up", ("weight",), 1) for n in range(3))
    overrides = overrides_of(Placement(0, (2, 2), ((a, HOST), (b, 1), (c, HOST))), ["CUDA0", "CUDA1"])
    assert [(o.pattern, o.buffer_type) for o in overrides] == [
        ("^blk.(0|2).ffn_up.weight$", "CPU"),
        ("^blk.1.ffn_up.weight$", "CUDA1"),
    ]
