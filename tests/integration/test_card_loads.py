"""Loads that an H100 and an H200 made are measured on virtual cards, byte for byte."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tools import card_loads

CARDS = card_loads.cards()
LOADS = card_loads.loads()


@pytest.mark.parametrize("key", CARDS)
def test_a_virtual_card_answers_as_the_real_one_did(key: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    own = [load for load in LOADS if key in load.cards]
    assert len(own) == {"h100": 144, "h200": 150}[key]
    assert list(card_loads.wrong(own, CARDS[key], tmp_path_factory.mktemp("models"))) == []


def test_every_load_that_would_be_made_is_stored() -> None:
    """Or the table has fewer rows than a card would be asked for today."""
    wanted = [(model, settings) for model, names in card_loads.LOADS.items() for settings in names]
    assert [(load.model, load.settings) for load in LOADS] == wanted


def test_what_differs_is_found(tmp_path_factory: pytest.TempPathFactory) -> None:
    load = LOADS[0]
    changed = {
        "a byte more": replace(load, bytes=load.bytes.replace("CUDA0=6", "CUDA0=7")),
        "other splits": replace(load, splits="3/2"),
        "other settings": replace(load, settings="ub4096"),
    }
    directory = tmp_path_factory.mktemp("models")
    for what, each in changed.items():
        assert len(list(card_loads.wrong([load, each], CARDS["h100"], directory))) == 1, what
