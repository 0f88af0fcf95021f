"""The cells of a grid: which no other one beats, which machine is named, and what is asked for in words."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from fitter.errors import UsageError
from fitter.machine.gpu import cards_of
from fitter.output.tables.exploration_table import csv_text, exploration_table
from fitter.planning.tables.exploration import (
    Exploration,
    ExploredAnswer,
    ExploredCell,
    Requirement,
    cheapest_first,
    marked,
    parse_requirement,
)
from fitter.text import printable
from tests.support.cases import cases, named_cases


def cell(machine: str, n_ctx: int | None, rate: float | None, memory: int, **more: Any) -> ExploredCell:
    asked = ExploredCell("model.gguf", None, machine, None, None, None, None)
    found = {"fits": True, "n_ctx": n_ctx, "tokens_per_second": rate, "memory": memory, "bytes": 100, **more}
    return replace(asked, **found)


GRID = {
    "long and slow": cell("long and slow", 32768, 10.0, 24),
    "short and fast": cell("short and fast", 8192, 50.0, 24),
    "beaten by both in something": cell("beaten by both in something", 8192, 10.0, 24),
    "small": cell("small", 8192, 10.0, 8),
    "does not fit": cell("does not fit", None, None, 1, fits=False),
    "no speed is known": cell("no speed is known", 99999, None, 1),
}


PRICED = [replace(GRID[name], cost=cost) for name, cost in (("long and slow", 100.0), ("small", 200.0))]


@named_cases(
    ("those that no other one beats", GRID.values(), "memory", ["long and slow", "short and fast", "small"]),
    ("two that are alike", [GRID["small"], replace(GRID["small"], machine="twin")], "memory", ["small", "twin"]),
    ("by price, where it is known", [*PRICED, GRID["short and fast"]], "price", ["long and slow"]),
)
def test_what_is_marked(cells: Iterable[ExploredCell], cost: str, best: list[str]) -> None:
    assert [each.machine for each in marked(list(cells), cost) if each.is_best] == best


def test_models_and_file_types_are_not_compared_with_each_other() -> None:
    others = [replace(GRID["small"], model="other.gguf", tokens_per_second=1.0)]
    others += [replace(GRID["small"], file_type="Q8_0", tokens_per_second=2.0)]
    assert sum(each.is_best for each in marked([GRID["small"], *others], "memory")) == 3


def test_the_cheapest_comes_first() -> None:
    cells = list(GRID.values())
    asked = Requirement(8192, 10.0)
    assert [each.machine for each in cheapest_first(cells, asked, "memory")] == [
        "small",
        "short and fast",
        "long and slow",
        "beaten by both in something",
    ]
    prices = {"small": 300.0, "long and slow": 100.0}
    priced = [replace(each, cost=prices.get(each.machine)) for each in cells]
    # those without a price come last
    assert [each.machine for each in cheapest_first(priced, asked, "price")][:3] == [
        "long and slow",
        "small",
        "short and fast",
    ]
    assert [each.machine for each in cheapest_first(cells, Requirement(prompt_tokens_per_second=1.0), "memory")] == []


def test_on_the_cheapest_machine_the_better_weights_are_taken() -> None:
    rates = {2.0: 90.0, 5.0: 40.0, 8.0: 15.0}
    cells = [cell("card", 8192, rate, 8, bits_per_weight=bits) for bits, rate in rates.items()]
    asked = Requirement(8192, 10.0)
    assert [each.tokens_per_second for each in cheapest_first(cells, asked, "memory")] == [15.0, 40.0, 90.0]
    # without a speed in the requirement, that of the default is useful
    assert [each.tokens_per_second for each in cheapest_first(cells, Requirement(8192), "memory")] == [40.0, 90.0, 15.0]


ASKED = {
    "32k context at 20 t/s": Requirement(32768, 20.0),
    "32k context": Requirement(32768),
    "20 t/s": Requirement(0, 20.0),
    "20t/s": Requirement(0, 20.0),
    "fits": Requirement(),
    "prompt 500 t/s": Requirement(0, 0.0, 500.0),
    "500 t/s prompt and 20 t/s": Requirement(0, 20.0, 500.0),
    "prompt at 500 t/s": Requirement(0, 0.0, 500.0),
    "32,768 tokens of context, generation at 7.5 tokens per second": Requirement(32768, 7.5),
    "  CONTEXT 8192   with 3 tok/s ": Requirement(8192, 3.0),
    "0.5k context": Requirement(512),
    "1M context": Requirement(2**20),
}


@pytest.mark.parametrize("text", ASKED)
def test_words_that_are_understood(text: str) -> None:
    assert parse_requirement(text) == ASKED[text]


_SAY = "say such as '32k context at 20 t/s', 'prompt 500 t/s' or 'fits'"
REFUSED = {
    "": f"--answer '': it is not understood: {_SAY}",
    "fast": f"--answer 'fast': it is not understood: {_SAY}",
    "32k contxt at 20 t/s": f"--answer '32k contxt at 20 t/s': '32k contxt' in it is not understood: {_SAY}",
    "32k context at": f"--answer '32k context at': it is not understood: {_SAY}",
    "0 t/s": "--answer '0 t/s' asks for 0: give more than 0 and 1000000000 at most",
    "-5 t/s": f"--answer '-5 t/s': it is not understood: {_SAY}",
    "1e9 t/s": f"--answer '1e9 t/s': it is not understood: {_SAY}",
    "32,76 context": f"--answer '32,76 context': it is not understood: {_SAY}",
    "0.3 context": f"--answer '0.3 context': it is not understood: {_SAY}",
    "prompt 5 t/s prompt": f"--answer 'prompt 5 t/s prompt': it is not understood: {_SAY}",
    "8k context and 16k context": "--answer '8k context and 16k context' says twice what it asks for: leave one of "
    "them out",
}


@pytest.mark.parametrize("text", REFUSED)
def test_words_that_are_not(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_requirement(text)
    assert str(caught.value) == REFUSED[text]


@cases(
    ("rtx-4090", ("rtx-4090",)),
    ("2x RTX 3090", ("rtx-3090", "rtx-3090")),
    ("rtx-3060:free=10GiB", ("rtx-3060-12gb",)),
    ("24GiB", ("24gib",)),
    ("none", ()),
)
def test_what_the_cards_of_a_machine_are_called(spec: str, cards: tuple[str, ...]) -> None:
    assert cards_of(spec) == cards


FORMULAS = ("=1+1", "+1", "-1+1", "@SUM(1)", "\t=1", "\r=1", "\n=1")


@pytest.mark.parametrize("name", FORMULAS)
def test_a_name_that_is_a_formula_is_not_one_in_csv(name: str) -> None:
    each = replace(GRID["small"], model=name, machine="a-b", arguments=("-c", "4096"), problem=name)
    (row,) = csv.DictReader(io.StringIO(csv_text(Exploration((each,), "memory")), newline=""))
    said = f"'{printable(name)}"
    assert (row["model"], row["problem"]) == (said, said)
    assert (row["machine"], row["arguments"]) == ("a-b", "-c 4096")


def table(cells: list[ExploredCell], *answers: ExploredAnswer) -> str:
    console = Console(width=200, file=io.StringIO(), force_terminal=False)
    console.print(exploration_table(Exploration(tuple(cells), "memory", answers, "fits")))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_models_whose_files_have_one_name_are_told_apart() -> None:
    cells = [replace(GRID["small"], model=name) for name in ("a/model.gguf", "b/model.gguf", "c/other.gguf")]
    text = table(cells, ExploredAnswer("b/model.gguf", cells[1]))
    assert [line.split()[0] for line in text.splitlines()[2:5]] == ["a/model.gguf", "b/model.gguf", "other.gguf"]
    assert "runs b/model.gguf: context 8192" in text
    assert "other.gguf" in table(cells[2:]) and "c/other.gguf" not in table(cells[2:])


@cases(
    (8.25, "context 8192, about 10 t/s, 8.25 with a full context", ["t/s", "t/s", "full"]),
    (10.0, "context 8192, about 10 t/s", ["t/s", "t/s", "full"]),
    (None, "context 8192, about 10 t/s", ["t/s", "t/s"]),
)
def test_the_speed_with_a_full_context(full: float | None, says: str, columns: list[str]) -> None:
    found = replace(GRID["small"], full_context_tokens_per_second=full)
    heading, _, *lines = table([found, GRID["does not fit"]], ExploredAnswer("model.gguf", found)).splitlines()[1:]
    assert heading.split()[-len(columns) :] == columns
    assert lines[-2].endswith(f"runs model.gguf: {says}")
