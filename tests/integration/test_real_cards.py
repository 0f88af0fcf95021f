"""What real GPUs printed, and the loads that they made, are measured without them, byte for byte."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fitter.llama.types import Breakdown
from tests.support import real_cards
from tests.support.real_cards import Load
from tools.measurements import card_loads

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
    assert len(LOADS) == 18
    assert len(values) == (real_cards.DATA / "values.csv").read_text().count("\n") - 1 == 120
    assert sum(bool(value.difference) for value in values) == 13
    assert all(bool(value.difference) == bool(value.explanation) for value in values)


def test_the_figure_of_a_dummy_load_is_another_one(measured: dict[str, Breakdown]) -> None:
    """The logs tell the two figures apart: on seven of eight cards, and on the second of two."""

    def different(name: str) -> dict[str, int]:
        rows = measured[name].rows
        return {row.buffer_type: (row.reserved or 0) - row.compute for row in rows if row.reserved != row.compute}

    assert different("qwen3.5-397b") == {f"CUDA{i}": -64 * 2**20 for i in range(1, 8)}
    assert different("qwen2.5-0.5b, two devices") == {"CUDA1": -7 * 2**20}


CARDS = card_loads.cards()
CARD_LOADS = card_loads.loads()


@pytest.mark.parametrize("key", CARDS)
def test_a_virtual_card_answers_as_the_real_one_did(key: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    own = [load for load in CARD_LOADS if key in load.cards]
    assert len(own) == {"h100": 144, "h200": 150}[key]
    assert list(card_loads.wrong(own, CARDS[key], tmp_path_factory.mktemp("models"))) == []


def test_every_load_that_would_be_made_is_stored() -> None:
    """Or the table has fewer rows than a card would be asked for today."""
    wanted = [(model, settings) for model, names in card_loads.LOADS.items() for settings in names]
    assert [(load.model, load.settings) for load in CARD_LOADS] == wanted


def test_what_differs_is_found(tmp_path_factory: pytest.TempPathFactory) -> None:
    load = CARD_LOADS[0]
    changed = {
        "a byte more": replace(load, bytes=load.bytes.replace("CUDA0=6", "CUDA0=7")),
        "other splits": replace(load, splits="3/2"),
        "other settings": replace(load, settings="ub4096"),
    }
    directory = tmp_path_factory.mktemp("models")
    for what, each in changed.items():
        assert len(list(card_loads.wrong([load, each], CARDS["h100"], directory))) == 1, what
