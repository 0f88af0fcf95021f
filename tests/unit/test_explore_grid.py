"""What there is to explore: nothing is made that is too much, every model has a name without secrets, and its cost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fitter.api.explore.grid import costs_of, grid_of
from fitter.errors import UsageError
from tests.support.cases import cases, named_cases

PROGRAM = {"program": "llama-server"}


def refused(*args: Any) -> str:
    with pytest.raises(UsageError) as caught:
        grid_of(*args)
    return str(caught.value)


def test_the_cells_are_counted_before_they_are_made() -> None:
    models, machines = [f"{i}.gguf" for i in range(1000)], [f"{i}GiB" for i in range(1, 1001)]
    many = {**PROGRAM, "n_ctx": list(range(256, 1256))}
    assert refused(models, machines, "Q4_0,Q8_0", many, 2000) == (
        "the grid has 2000000000 cells (1000 models × 2 file types × 1000 machines × 1000 contexts), more than 2000: "
        "name fewer of each, or raise --max-cells"
    )


def test_as_many_cells_as_there_may_be() -> None:
    # what is named twice is there once
    grid = grid_of(["a.gguf", "a.gguf"], ["8GiB", "2x  6GiB", "2x 6GiB"], "q4_0,Q4_0", {**PROGRAM, "n_ctx": [8, 8]}, 2)
    cells = grid.cells()
    assert [(cell.model, cell.file_type, cell.machine) for cell in cells] == [
        ("a.gguf", "Q4_0", "8GiB"),
        ("a.gguf", "Q4_0", "2x 6GiB"),
    ]
    assert refused(["a.gguf"], ["8GiB", "2x 6GiB"], None, PROGRAM, 1) == (
        "the grid has 2 cells (2 machines), more than 1: name fewer of each, or raise --max-cells"
    )


def test_a_comma_begins_another_machine() -> None:
    grid = grid_of(["a.gguf"], ["rtx-3060,2x rtx-3090", "rtx-4090 + rtx-3060, none"], None, PROGRAM, 9)
    assert list(grid.machines) == ["rtx-3060", "2x rtx-3090", "rtx-4090 + rtx-3060", "none"]
    assert "no GPU" in refused(["a.gguf"], ["rtx-3060,,rtx-3090"], None, PROGRAM, 9)


@named_cases(
    ("neither", {}, [(None, None)]),
    ("types of K alone", {"type_k": ["f16", "q8_0"]}, [("f16", None), ("q8_0", None)]),
    ("types of V alone", {"type_v": ["f16", "q8_0"]}, [(None, "f16"), (None, "q8_0")]),
    ("pairs", {"type_k": ["f16", "q8_0"], "type_v": ["f16", "q8_0"]}, [("f16", "f16"), ("q8_0", "q8_0")]),
    (
        "pairs with a type twice",
        {"type_k": ["f16", "q8_0", "q8_0"], "type_v": ["f16", "f16", "q8_0"]},
        [("f16", "f16"), ("q8_0", "f16"), ("q8_0", "q8_0")],
    ),
    ("a pair twice", {"type_k": ["q8_0", "q8_0"], "type_v": ["f16", "f16"]}, [("q8_0", "f16")]),
    ("one of V", {"type_k": ["f16", "q8_0"], "type_v": "q4_0"}, [("f16", "q4_0"), ("q8_0", "q4_0")]),
    ("one of K", {"type_k": "f16", "type_v": ["q8_0", "q4_0"]}, [("f16", "q8_0"), ("f16", "q4_0")]),
    (
        "crossed",
        {"type_k": ["f16", "q8_0", "f16"], "type_v": ["f16", "q4_0"], "cross_cache_types": True},
        [("f16", "f16"), ("f16", "q4_0"), ("q8_0", "f16"), ("q8_0", "q4_0")],
    ),
)
def test_types_of_the_cache_are_pairs(given: dict[str, Any], expected: list[tuple[str | None, str | None]]) -> None:
    grid = grid_of(["a.gguf"], ["8GiB"], None, {**PROGRAM, **given}, 4)
    assert [(cell.type_k, cell.type_v) for cell in grid.cells()] == expected


def test_types_that_are_no_pairs() -> None:
    given = {**PROGRAM, "type_k": ["f16", "q8_0", "q4_0"], "type_v": ["f16", "q8_0"]}
    assert refused(["a.gguf"], ["8GiB"], None, given, 9) == (
        "type_k (-ctk) has 3 types and type_v (-ctv) 2, which are no pairs: give as many of both, one of either, or "
        "--cross-cache-types for every combination"
    )
    assert refused(["a.gguf"], ["8GiB"], None, {**given, "cross_cache_types": True}, 5).startswith(
        "the grid has 6 cells (6 KV types), more than 5"
    )
    assert refused(["a.gguf"], ["8GiB"], None, {**given, "cross_cache_types": "yes"}, 9) == (
        "cross_cache_types (--cross-cache-types) is 'yes': give True or False"
    )


def test_a_directory_is_every_model_in_it(tmp_path: Path) -> None:
    for name in ("b.gguf", "a.gguf", "mmproj-a.gguf", "sub/c-00001-of-00002.gguf", "sub/c-00002-of-00002.gguf", "x.c"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    a, b, c = (str(tmp_path / name) for name in ("a.gguf", "b.gguf", "sub/c-00001-of-00002.gguf"))
    grid = grid_of([b, str(tmp_path), "other.gguf"], ["8GiB"], None, PROGRAM, 4)
    assert list(grid.models) == [b, a, c, "other.gguf"], "a model that is named too is there once"
    assert refused(tmp_path, ["8GiB"], None, PROGRAM, 2).startswith("the grid has 3 cells (3 models), more than 2")


def test_a_directory_without_models_is_left_to_who_opens_it(tmp_path: Path) -> None:
    assert list(grid_of(tmp_path, ["8GiB"], None, PROGRAM, 1).models) == [str(tmp_path)]


@cases(0, -1, True, 1.5, "9")
def test_a_most_that_is_no_number(most: object) -> None:
    assert refused(["a.gguf"], ["8GiB"], None, PROGRAM, most).startswith("max_cells (--max-cells) is ")


def test_a_model_is_called_by_its_address_without_credentials() -> None:
    url = "https://me:s3cr3t@host/m.gguf?sig=s3cr3t"
    grid = grid_of([url, "config://https://me:s3cr3t@host/config.json"], "8GiB", None, PROGRAM, 9)
    assert dict(grid.models) == {
        "https://host/m.gguf": url,
        "config://https://host/config.json": "config://https://me:s3cr3t@host/config.json",
    }
    assert not any("s3cr3t" in repr(cell) for cell in grid.cells())
    assert refused([url, "https://host/m.gguf?id=2"], "8GiB", None, PROGRAM, 9) == (
        "https://host/m.gguf is named twice, with other credentials or another query, which are not shown: explore one "
        "after the other"
    )


MACHINES = {
    "rtx-3090": ("rtx-3090",),
    "2x rtx-3090": ("2x rtx-3090",),
    "2x rtx-3090 + rtx-4090": ("2x rtx-3090", "rtx-4090"),
    "rtx-3060:free=10GiB": ("rtx-3060:free=10GiB",),
    "none": ("none",),
}


def test_a_machine_costs_what_each_of_its_cards_does() -> None:
    given = {"RTX 3090": 700, "rtx-4090": 1600.5}
    for prices, watts, name in ((given, None, "price"), (None, given, "watts")):
        found, cost = costs_of(MACHINES, prices, watts)
        assert cost == name
        # a card without a price may have any
        assert [found[text]["cost"] for text in MACHINES] == [700, 1400, 3000.5, None, 0]
    found, cost = costs_of(MACHINES, None, None)
    assert (cost, {each["cost"] for each in found.values()}) == ("memory", {None})
    assert found["2x rtx-3090"]["memory"] == 2 * found["rtx-3090"]["memory"] > 0


THERE = "no machine of --gpu has that card; they have rtx-3060-12gb, rtx-3090, rtx-4090"
PRICES: dict[str, tuple[Any, str]] = {
    "several cards": (
        {"2x rtx-3090": 1400},
        "--price 2x rtx-3090=1400: give the number of one card, which counts for each of a machine",
    ),
    "two names of one card": (
        {"rtx-3060": 1, "rtx-3060-12gb": 2},
        "--price rtx-3060-12gb=2: another name of rtx-3060-12gb is given too: leave one of them out",
    ),
    "a card that is not there": ({"rtx-5090": 1}, f"--price rtx-5090=1: {THERE}"),
    "no card": ({"none": 1}, f"--price none=1: {THERE}"),
    "a name that is none": ({"a card": 1}, f"--price a card=1: {THERE}"),
    "a name that is no text": ({7: 1}, "--price is of 7: give the name of a card"),
    "below 0": ({"rtx-3090": -1}, "--price rtx-3090=-1: give a number that is not below 0"),
    "without end": ({"rtx-3090": float("inf")}, "--price rtx-3090=inf: give a number that is not below 0"),
    "too large": ({"rtx-3090": 10**400}, "--price rtx-3090=about 1e400: give a number that is not below 0"),
    "a text": ({"rtx-3090": "7"}, "--price rtx-3090='7': give a number that is not below 0"),
    "a list": ([("rtx-3090", 7)], "prices (--price) is [('rtx-3090', 7)]: give the number of each card, by its name"),
}


@cases(PRICES)
def test_what_is_no_price_is_one_line(given: Any, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        costs_of(MACHINES, given, None)
    assert str(caught.value) == said
