"""What is kept of a calibration, and what is not believed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from fitter.errors import AnswerError
from fitter.llama.types import DeviceInfo
from fitter.machine.measured import Calibrated, calibrated_path, outside_of, read_calibrated, store_calibrated
from tests.support.cases import named_cases

MIB = 2**20
CARD = DeviceInfo("CUDA0", "Card", "gpu", "CUDA", 8192 * MIB, 8000 * MIB, buffer_type="CUDA0")
KEPT = Calibrated("CUDA", "Card", 8192 * MIB, 700 * MIB, 400 * MIB)


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    return tmp_path


def test_nothing_is_known_at_first() -> None:
    assert read_calibrated() == ()
    assert outside_of(CARD, read_calibrated()) is None


def test_what_is_stored_is_read(place: Path) -> None:
    path = store_calibrated([KEPT])
    assert path == place / "llama-fitter" / "calibration.json"
    assert read_calibrated() == (KEPT,)
    assert [entry.name for entry in path.parent.iterdir()] == ["calibration.json"]


def test_a_device_is_replaced_and_others_stay() -> None:
    other = replace(KEPT, description="Other card", context=None)
    store_calibrated([KEPT, other])
    store_calibrated([replace(KEPT, outside=5)])
    assert read_calibrated() == (replace(KEPT, outside=5), other)


@named_cases(
    ("the device", CARD, 700 * MIB),
    ("the same at another place", replace(CARD, name="CUDA3", free=1), 700 * MIB),
    ("other memory", replace(CARD, total=CARD.total + 1), None),
    ("another card", replace(CARD, description="Card Ti"), None),
    ("another backend", replace(CARD, backend="Vulkan"), None),
    ("a virtual one", replace(CARD, virtual=True), None),
)
def test_it_is_for_that_kind_of_device(device: DeviceInfo, outside: int | None) -> None:
    assert outside_of(device, [KEPT]) == outside


ENTRY = {"backend": "CUDA", "description": "Card", "total": 1, "outside": 1, "context": None}


@named_cases(
    ("no JSON", "{"),
    ("another schema", json.dumps({"schema": 2, "devices": [ENTRY]})),
    ("no list", json.dumps({"schema": 1, "devices": 5})),
    ("no document", "[]"),
    ("a field is missing", json.dumps({"schema": 1, "devices": [{"backend": "CUDA"}]})),
    ("a text for a number", json.dumps({"schema": 1, "devices": [{**ENTRY, "outside": "1"}]})),
    ("a list for a name", json.dumps({"schema": 1, "devices": [{**ENTRY, "backend": []}]})),
    ("a list for memory", json.dumps({"schema": 1, "devices": [{**ENTRY, "total": []}]})),
    ("a text for what a process takes", json.dumps({"schema": 1, "devices": [{**ENTRY, "context": "1"}]})),
    ("too deep", "[" * 100_000),
    ("less than nothing", json.dumps({"schema": 1, "devices": [{**ENTRY, "outside": -1}]})),
)
def test_a_damaged_file_is_none_and_is_written_anew(text: str) -> None:
    path = calibrated_path()
    path.parent.mkdir()
    path.write_text(text)
    assert read_calibrated() == ()
    store_calibrated([KEPT])
    assert read_calibrated() == (KEPT,)


def test_a_place_that_cannot_be_written(place: Path) -> None:
    (place / "llama-fitter").write_text("a file where the directory should be")
    with pytest.raises(AnswerError, match=r"calibration\.json cannot be written .*--no-store"):
        store_calibrated([KEPT])
