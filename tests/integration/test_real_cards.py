"""What real GPUs printed is what is measured without them, but for the values that are said to differ."""

from __future__ import annotations

import pytest

from fitter.llama.types import Breakdown, Row
from tests.support import real_cards
from tests.support.real_cards import Compared, Load, Value

LOADS = real_cards.loads()


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Breakdown]:
    directory = tmp_path_factory.mktemp("models")
    return {load.name: breakdown for load, breakdown in real_cards.measured(LOADS, directory)}


@pytest.mark.parametrize("load", LOADS, ids=lambda load: load.name)
def test_a_load_is_what_a_real_card_printed(measured: dict[str, Breakdown], load: Load) -> None:
    found = real_cards.compare(load, measured[load.name])
    assert [each for each in found if not each.is_expected] == []


def test_every_value_is_of_a_load_and_every_difference_explained() -> None:
    values = [value for load in LOADS for value in load.values]
    assert len(LOADS) == 9
    assert len(values) == (real_cards.DATA / "values.csv").read_text().count("\n") - 1 == 97
    assert sum(bool(value.difference) for value in values) == 2
    assert all(bool(value.difference) == bool(value.explanation) for value in values)


def test_the_figure_of_a_dummy_load_is_another_one(measured: dict[str, Breakdown]) -> None:
    """The logs tell the two figures apart: on seven of eight cards, and on the second of two."""

    def different(name: str) -> dict[str, int]:
        rows = measured[name].rows
        return {row.buffer_type: (row.reserved or 0) - row.compute for row in rows if row.reserved != row.compute}

    assert different("qwen3.5-397b") == {f"CUDA{i}": -64 * 2**20 for i in range(1, 8)}
    assert different("qwen2.5-0.5b, two devices") == {"CUDA1": -7 * 2**20}


CHANGES: dict[str, tuple[Value, str]] = {
    "what was equal is not": (Value("CUDA0 model", "1.51", "", ""), "-0.01"),
    "a whole number is not": (Value("CUDA0 model", "2", "", ""), "-1"),
    "a difference is gone": (Value("CUDA0 model", "1.50", "+0.10", "why"), ""),
    "a difference is another one": (Value("CUDA0 context", "1.00", "+1.00", "why"), "+2.00"),
    "graph splits": (Value("graph splits", "3/2", "", ""), "2/2"),
    "a buffer type is gone": (Value("CUDA7 compute", "1.00", "", ""), "-1.00"),
}


@pytest.mark.parametrize(("value", "difference"), CHANGES.values(), ids=CHANGES)
def test_what_changes_is_found(value: Value, difference: str) -> None:
    row = Row("CUDA0", "CUDA0", False, 3 * 2**19, 3 * 2**20, 0, 2**20)
    load = Load("", "", "", "", (), "", "", 0, True, {}, {}, (value,))
    (found,) = real_cards.compare(load, Breakdown((row,), ("CUDA0",), 256, n_splits=(2, 2)))
    assert (found.difference, found.is_expected) == (difference, False)


@pytest.mark.parametrize(("is_real", "logged"), [(True, "2"), (False, "1")])
def test_a_load_is_compared_with_what_it_reserves(is_real: bool, logged: str) -> None:
    row = Row("CUDA0", "CUDA0", False, 0, 0, 2**20, 2**21)
    load = Load("", "", "", "", (), "", "", 0, is_real, {}, {}, (Value("CUDA0 compute", logged, "", ""),))
    assert real_cards.compare(load, Breakdown((row,), ("CUDA0",), 256)) == (Compared(load.values[0], logged, ""),)
