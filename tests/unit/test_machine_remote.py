"""The speed of remote devices: measured, kept for a day, given, or a stated default."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from fitter.errors import LlamaCppError, RemoteError, UsageError
from fitter.llama.types import DeviceInfo, MeasuredSpeed
from fitter.machine import bandwidth, gpu_catalogue
from fitter.machine.bandwidth import parse_bandwidths, remote_speeds
from tests.support.cases import cases, named_cases

GIB = 2**30
SPEED = MeasuredSpeed(round_trip=2e-4, link=1e9, bandwidth=500e9, compute=40e12)


def device(number: int, server: str, total: int = 24 * GIB) -> DeviceInfo:
    return DeviceInfo(f"RPC{number}", server, "gpu", "RPC", total, total)


ONE, OTHER = device(0, "a:1"), device(1, "a:1")
LOCAL = DeviceInfo("CUDA0", "NVIDIA GeForce RTX 4090", "gpu", "CUDA", 24 * GIB, 24 * GIB)


class Measured:
    """Answers with one speed, or raises one error, and remembers of what."""

    def __init__(self, answer: MeasuredSpeed | Exception = SPEED) -> None:
        self.answer = answer
        self.asked: list[tuple[str, int]] = []

    def __call__(self, name: str, memory: int, seconds: float) -> MeasuredSpeed:
        assert 0 < seconds < 1
        self.asked.append((name, memory))
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "llama-fitter" / "remote.json"
    monkeypatch.setattr(bandwidth, "remote_cache_path", lambda: path)
    return path


def test_what_is_measured_is_kept() -> None:
    measured = Measured()
    first = remote_speeds([ONE, LOCAL], [ONE, LOCAL], measured)
    second = remote_speeds([ONE], [ONE], measured)
    assert list(first) == list(second) == ["RPC0"]
    speed = first["RPC0"]
    assert (speed.bandwidth, speed.compute, speed.pcie, speed.round_trip) == (500e9, 40e12, 1e9, 2e-4)
    assert (speed.is_remote, speed.known) == (True, True)
    assert speed.source == "measured; reads 500 GB/s; network: 1 GB/s, 0.2 ms round trip"
    assert second["RPC0"].source == speed.source.replace("measured;", "measured earlier;")
    assert [name for name, _ in measured.asked] == ["RPC0"]


@named_cases(
    ("another server", device(0, "b:1")),
    ("another device of the server", OTHER),
    ("another size", device(0, "a:1", 16 * GIB)),
)
def test_another_device_is_measured_on_its_own(other: DeviceInfo) -> None:
    every = [ONE, OTHER] if other is OTHER else [other]
    measured = Measured()
    remote_speeds([ONE], [ONE], measured)
    remote_speeds([other], every, measured)
    assert [name for name, _ in measured.asked] == ["RPC0", other.name]


@cases((3600, 1), (23 * 3600, 1), (25 * 3600, 2), (-3600, 2))
def test_it_is_kept_for_a_day(age: int, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = Measured()
    remote_speeds([ONE], [ONE], measured)
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + age)
    remote_speeds([ONE], [ONE], measured)
    assert len(measured.asked) == count


def test_what_is_too_old_is_forgotten(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    remote_speeds([ONE], [ONE], Measured())
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 25 * 3600)
    remote_speeds([device(0, "b:1")], [device(0, "b:1")], Measured())
    assert list(json.loads(cache.read_text())["devices"]) == ["b:1, device 0, 24576 MiB"]


@cases(
    "",
    "{",
    "[]",
    '{"schema": 2, "devices": {}}',
    '{"schema": 1, "devices": {"a:1, device 0, 24576 MiB": {"time": 1}}}',
    '{"schema": 1, "devices": {"a:1, device 0, 24576 MiB": 7}}',
)
def test_a_file_that_is_none_is_measured_again(text: str, cache: Path) -> None:
    cache.parent.mkdir()
    cache.write_text(text)
    measured = Measured()
    remote_speeds([ONE], [ONE], measured)
    remote_speeds([ONE], [ONE], measured)
    assert len(measured.asked) == 1


def test_only_a_part_of_what_is_free_is_used() -> None:
    measured = Measured()
    small = device(0, "c:1", GIB)
    remote_speeds([ONE], [ONE], measured)
    remote_speeds([small], [small], measured)
    assert [memory for _, memory in measured.asked] == [320 * 2**20, GIB // 4]


def test_what_cannot_be_measured_has_defaults(cache: Path) -> None:
    (speed,) = remote_speeds([ONE], [ONE], Measured(LlamaCppError("too little free memory"))).values()
    default = gpu_catalogue.default()
    assert (speed.pcie, speed.round_trip, speed.known) == (default.remote_link, default.remote_round_trip, False)
    assert speed.source.startswith("default: as NVIDIA GeForce RTX 4090, which has the most similar memory")
    assert speed.source.endswith("assumed network: 0.118 GB/s, 0.3 ms round trip")
    assert not cache.exists()


def test_a_part_that_was_not_told_has_a_default() -> None:
    (speed,) = remote_speeds([ONE], [ONE], Measured(MeasuredSpeed(2e-4, 1e9, 100e9, 0.0))).values()
    assert (speed.bandwidth, speed.known) == (100e9, True)
    assert "compute estimated from its bandwidth" in speed.source
    assert 1e12 < speed.compute < 1e14


def test_a_network_that_was_not_told_is_measured_again(cache: Path) -> None:
    measured = Measured(MeasuredSpeed(2e-4, 0.0, 100e9, 40e12))
    (speed,) = remote_speeds([ONE], [ONE], measured).values()
    assert len(measured.asked) == 2 and not cache.exists()
    assert speed.source == "measured; reads 100 GB/s; assumed network: 0.118 GB/s, 0.3 ms round trip"


def test_a_server_that_is_lost_is_an_error() -> None:
    with pytest.raises(RemoteError, match="gone"):
        remote_speeds([ONE], [ONE], Measured(RemoteError("gone")))


@cases(((7e9,), (7e9, 7e9)), ((7e9, 8e9), (7e9, 8e9)))
def test_given_bandwidths(given: Sequence[float], expected: Sequence[float]) -> None:
    speeds = remote_speeds([ONE, OTHER], [ONE, OTHER], Measured(), given)
    assert tuple(speed.bandwidth for speed in speeds.values()) == tuple(expected)
    assert all(speed.source.startswith("given; reads ") for speed in speeds.values())
    # the rest is measured
    assert {(speed.compute, speed.pcie) for speed in speeds.values()} == {(40e12, 1e9)}


def test_a_given_bandwidth_is_that_of_its_device() -> None:
    speeds = remote_speeds([OTHER], [ONE, OTHER], Measured(), (7e9, 8e9))
    assert [(name, speed.bandwidth) for name, speed in speeds.items()] == [("RPC1", 8e9)]


def test_too_many_bandwidths() -> None:
    with pytest.raises(UsageError, match="has 3 values, but there are 2 remote devices"):
        remote_speeds([ONE, OTHER], [ONE, OTHER], Measured(), (1e9, 2e9, 3e9))


@cases(("900GB/s", (900e9,)), ("900GB/s,1TB/s", (900e9, 1e12)), (50e9, (50e9,)), (["1TB/s", 2e11], (1e12, 2e11)))
def test_bandwidths(given: float | str | Sequence[float | str], expected: tuple[float, ...]) -> None:
    assert parse_bandwidths(given) == expected


@pytest.mark.parametrize(
    ("given", "said"),
    [
        *((given, f"'{given}' is not a bandwidth: write a number and a unit") for given in ("", "-1GB/s", "fast")),
        ("1GB/s,", "'' is not a bandwidth: write a number and a unit"),
        *((given, "'0' is not a bandwidth that memory can have") for given in ("0", 0)),
        (-5e9, "'-5000000000' is not a bandwidth: "),
        *((given, f"'{given}' is not a bandwidth: ") for given in (float("nan"), float("inf"))),
        ([], "the list of bandwidths of remote devices is empty"),
    ],
)
def test_what_is_no_bandwidth(given: float | str | Sequence[float | str], said: str) -> None:
    with pytest.raises(UsageError, match=f"^{said}"):
        parse_bandwidths(given)
