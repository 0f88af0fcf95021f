"""How fast files are read: what can be measured, and what is taken where nothing can."""

from __future__ import annotations

from pathlib import Path

from fitter.machine.host import default_disk_bandwidth, disk_bandwidth
from tests.support.cases import named_cases

MIB = 1024**2


def test_a_long_file_is_measured(tmp_path: Path) -> None:
    path = tmp_path / "long.gguf"
    path.write_bytes(bytes(range(256)) * (130 * MIB // 256))
    measured = disk_bandwidth(path)
    assert measured is not None
    # between a slow network and the fastest memory
    assert 1e6 < measured < 1e12


@named_cases(("short", 100 * MIB, True), ("sparse", 1024 * MIB, False))
def test_what_cannot_be_measured_is_not(size: int, is_written: bool, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    with path.open("wb") as file:
        if is_written:
            file.write(bytes([7]) * size)
        else:
            file.truncate(size)
    assert disk_bandwidth(path) is None


def test_a_file_that_is_gone_is_not_measured(tmp_path: Path) -> None:
    assert disk_bandwidth(tmp_path / "gone.gguf") is None


def test_the_default_is_that_of_a_common_disk_and_says_so() -> None:
    bandwidth, source = default_disk_bandwidth()
    assert bandwidth == 3.4e9
    assert source.startswith("not measured: ")
