"""The host's memory bandwidth: what is read, what is kept, and what is not."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fitter.errors import UsageError
from fitter.machine import bandwidth
from fitter.machine.bandwidth import Host, buffer_bytes, host_speed, parse_bandwidth
from fitter.machine.speed import default_host
from tests.support.cases import cases, named_cases, outcomes

MIB = 2**20
HOST = Host("Processor", 8, 64 * 2**30)


@cases(
    ("60GB/s", 60e9),
    (" 60 gb/s ", 60e9),
    ("60GB / s", 60e9),
    ("51.2GB/s", 51.2e9),
    ("56GiB/s", 56 * 2**30),
    ("800MB/s", 8e8),
    ("3.35TB/s", 3.35e12),
    ("60000000000", 60e9),
    ("0.1GB/s", 1e8),
    ("100TB/s", 1e14),
)
def test_a_bandwidth(text: str, value: float) -> None:
    assert parse_bandwidth(text) == pytest.approx(value)
    assert bandwidth.given_speed(text).bandwidth == parse_bandwidth(text)
    assert bandwidth.given_speed(text).source == "given"


@outcomes(
    {
        "not a bandwidth that memory can have": ["0", "0GB/s", "60", "0.09GB/s", "100.1TB/s"],
        "is not a bandwidth: write a number and a unit": [
            *("", "9" * 30, "-60GB/s", "60GB", "60Gb/h", "60 /s", "60foo/s", "fast", "inf", "nan GB/s", "1e9"),
            *("60,5GB/s", "٦٠GB/s"),
        ],
    }
)
def test_no_bandwidth(text: str, says: str) -> None:
    with pytest.raises(UsageError, match=says) as caught:
        parse_bandwidth(text)
    assert repr(text) in str(caught.value) and "\n" not in str(caught.value)


def test_what_is_no_bandwidth_is_shortened() -> None:
    with pytest.raises(UsageError) as caught:
        parse_bandwidth("9" * 300)
    assert str(caught.value).startswith(f"'{'9' * 36}... is not a bandwidth: ")


@given(st.text())
def test_a_bandwidth_is_read_or_refused(text: str) -> None:
    try:
        value = parse_bandwidth(text)
    except UsageError as error:
        assert len(str(error).splitlines()) == 1
    else:
        assert 1e8 <= value <= 1e14


@named_cases(
    # cores, bytes of caches, bytes available: bytes for each core
    ("small caches", 2, 4 * MIB, 2**35, 32 * MIB),
    ("caches as large", 2, 2 * 32 * MIB // 3, 2**35, 32 * MIB),
    ("larger caches", 2, 64 * MIB, 2**35, 96 * MIB),
    ("many cores", 64, 256 * MIB, 2**39, 32 * MIB),
    ("just enough memory", 2, 4 * MIB, 512 * MIB, 32 * MIB),
    ("too little memory", 2, 4 * MIB, 512 * MIB - 1, 32 * MIB - 4096),
    ("none", 2, 4 * MIB, 0, 4096),
)
def test_what_is_read(cores: int, caches: int, available: int, size: int) -> None:
    assert buffer_bytes(cores, caches, available) == size


def test_this_machine_can_be_measured() -> None:
    assert 1e8 < bandwidth.read_bandwidth(2) < 1e13


def test_this_machine_is_someone() -> None:
    host = bandwidth.this_host()
    assert host.processor and host.cores >= 1 and host.memory > 2**20
    assert host == bandwidth.this_host()


@named_cases(
    ("one for all", [("0-3", "32768K")] * 4, 32 * MIB),
    ("one for two", [("0-1", "16384K"), ("0-1", "16384K"), ("2-3", "16384K"), ("2-3", "16384K")], 32 * MIB),
    ("unreadable", [("0", "many")], 32 * MIB),
    ("none", [], 32 * MIB),
    ("large", [("0-7", "98304K"), ("8-15", "32768K")], 128 * MIB),
)
def test_caches_are_counted_once(caches: list[tuple[str, str]], total: int, tmp_path: Path) -> None:
    for cpu, (shared, size) in enumerate(caches):
        for index, level in enumerate(("1", "1", "2", "3")):
            directory = tmp_path / f"sys/devices/system/cpu/cpu{cpu}/cache/index{index}"
            directory.mkdir(parents=True)
            (directory / "level").write_text(f"{level}\n")
            (directory / "size").write_text(f"{size if level == '3' else '32K'}\n")
            (directory / "shared_cpu_list").write_text(f"{shared}\n")
    assert bandwidth.cache_bytes(tmp_path) == total


# --- what is kept


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "cache/llama-fitter/bandwidth.json"
    monkeypatch.setattr(bandwidth, "cache_path", lambda: path)
    monkeypatch.setattr(bandwidth, "this_host", lambda: HOST)
    return path


class _Measure:
    """Counts what it is asked for, and answers with one speed after another."""

    def __init__(self, *speeds: float) -> None:
        self.speeds = list(speeds)
        self.cores: list[int] = []

    def __call__(self, cores: int) -> float:
        self.cores.append(cores)
        return self.speeds.pop(0)


def test_the_cache_is_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = bandwidth.cache_path()
    assert (path.name, path.parent.name) == ("bandwidth.json", "llama-fitter")
    assert sys.platform != "linux" or path.parent.parent == tmp_path


def test_a_machine_is_measured_once(cache: Path) -> None:
    measure = _Measure(60e9)
    assert (host_speed(measure).bandwidth, host_speed(measure).bandwidth) == (60e9, 60e9)
    assert measure.cores == [8]
    assert [path.name for path in cache.parent.iterdir()] == ["bandwidth.json"], "nothing half written is left"


@named_cases(
    ("processor", replace(HOST, processor="Other")),
    ("cores", replace(HOST, cores=4)),
    ("memory", replace(HOST, memory=32 * 2**30)),
)
def test_another_machine_is_measured_on_its_own(other: Host, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measure = _Measure(60e9, 30e9)
    assert host_speed(measure).bandwidth == 60e9
    monkeypatch.setattr(bandwidth, "this_host", lambda: other)
    assert (host_speed(measure).bandwidth, host_speed(measure).bandwidth) == (30e9, 30e9)
    monkeypatch.setattr(bandwidth, "this_host", lambda: HOST)
    assert host_speed(measure).bandwidth == 60e9, "both are kept"


KEY = bandwidth.key_of(HOST)


BROKEN = ("", "{", "[]", "null", "1", "\udcff\udcfe\x00", '{"schema": 1}', f'{{"schema": 1, "hosts": ["{KEY}"]}}')
OLDER = json.dumps({"schema": 0, "hosts": {KEY: 5e9}})


@cases(*BROKEN, OLDER, "[" * 100_000, "fast", None, 0, -5e9, float("inf"), float("nan"), 10**400)
def test_a_broken_cache_is_measured_again_and_mended(content: Any, cache: Path) -> None:
    """A file that is none, or one with a speed that is none."""
    is_file = isinstance(content, str) and content != "fast"
    text = content if is_file else json.dumps({"schema": 1, "hosts": {KEY: content}})
    cache.parent.mkdir(parents=True)
    cache.write_text(text, errors="surrogateescape")
    measure = _Measure(60e9)
    assert (host_speed(measure).bandwidth, host_speed(measure).bandwidth) == (60e9, 60e9)
    assert measure.cores == [8]


def test_a_cache_that_cannot_be_written_is_no_error(cache: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where the directory would be")
    measure = _Measure(60e9, 70e9)
    assert (host_speed(measure).bandwidth, host_speed(measure).bandwidth) == (60e9, 70e9)


def test_a_directory_in_its_place_is_no_error(cache: Path) -> None:
    cache.mkdir(parents=True)
    assert host_speed(_Measure(60e9)).bandwidth == 60e9
    assert [path.name for path in cache.parent.iterdir()] == ["bandwidth.json"]


@cases(ImportError("no numpy"), MemoryError(), OSError(), RuntimeError("no thread"))
def test_a_machine_that_cannot_be_measured_has_a_default(error: Exception, cache: Path) -> None:
    def fail(cores: int) -> float:
        raise error

    assert replace(host_speed(fail), threads=0) == default_host()
    assert not default_host().known
    assert "assumed" in default_host().source
    assert not cache.exists()


@cases(0.0, -1.0, 1e7, 1e15, float("inf"), float("nan"))
def test_nonsense_is_not_kept(nonsense: float, cache: Path) -> None:
    assert replace(host_speed(_Measure(nonsense)), threads=0) == default_host()
    assert not cache.exists()


def test_sources(cache: Path) -> None:
    measure = _Measure(60e9)
    assert host_speed(measure).source == "measured"
    assert host_speed(measure).source == "measured earlier"
