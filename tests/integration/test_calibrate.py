"""``fitter calibrate`` on a real device that any machine can have (rpc-server), and on virtual cards."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fitter import api
from fitter.api import call_worker, device_calls
from fitter.errors import LlamaCppError, UsageError
from fitter.llama.client import Worker
from fitter.llama.types import Breakdown, DeviceInfo, Loaded, Params, VirtualDevice
from fitter.machine.gpu import parse_gpus
from fitter.machine.measured import calibrated_path, read_calibrated
from fitter.planning.checked import calibration
from tests.support.command import run_fitter
from tools.loopback import rpc_servers
from tools.models.tiny import TINY_DENSE, write_tiny

MIB = 2**20


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """An rpc-server on loopback: real buffers, real decoding, no GPU."""
    with rpc_servers.servers(1) as endpoints:
        yield endpoints[0]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[calibration.CalibrationModel, ...]:
    return calibration.write_models(tmp_path_factory.mktemp("models"))


# --- a real device


def test_dummy_loads_of_a_real_device_are_exact(server: str) -> None:
    found = api.calibrate(rpc=[server], store=False)
    (device,) = found.devices
    assert (device.info.name, device.info.backend, device.twin) == ("RPC0", "RPC", None)
    # the CPU behind it always says that all of its memory is free
    assert (device.outside, device.margin) == (None, 1024 * MIB)
    (comparison,) = found.comparisons
    assert (comparison.between, comparison.devices, comparison.loads) == ("real load", ("RPC0",), 2)
    assert comparison.differences == ()
    assert found.is_exact


def test_the_wrong_twin_is_caught(server: str, tmp_path: Path) -> None:
    """The server computes on the CPU, so a twin of CUDA differs with a model of the user, too."""
    path = write_tiny(tmp_path / "mine.gguf", TINY_DENSE)
    done = run_fitter("calibrate", str(path), "--rpc", server, "--twin", "cuda:8.6", "--no-store", "--json")
    assert done.returncode == 4, done.stderr
    document = json.loads(done.stdout)
    assert document["exact"] is False
    assert document["stored"] is None
    assert document["devices"][0]["twin"] == {"profile": "cuda", "compute_capability": "8.6"}
    twin, real_load = document["comparisons"]
    loads = len(calibration.configurations())
    assert (twin["between"], twin["loads"], real_load["differences"]) == ("twin", loads, [])
    differing = {(each["model"], each["configuration"]) for each in twin["differences"]}
    assert ("mine.gguf", "defaults") in differing
    assert not [each for each in twin["differences"] if each["real"] == each["other"]]


def test_the_table(server: str) -> None:
    done = run_fitter("calibrate", "--rpc", server, "--no-store")
    assert done.returncode == 0, done.stderr
    assert "RPC0, loaded for real and as a dummy: 2 loads, no byte differs\n" in done.stdout
    assert done.stderr.startswith("fitter: warning: RPC0 cannot be compared: ")
    assert done.stderr.count("\n") == 1


def test_a_real_load_holds_its_memory_until_it_is_let_go(
    server: str, models: Sequence[calibration.CalibrationModel]
) -> None:
    with Worker(rpc=[server]) as worker:
        params = Params(n_ctx=512, devices=("RPC0",))
        first = worker.load(models[0].path, params)
        again = worker.load(models[0].path, params)
        assert first.breakdown.rows == again.breakdown.rows == worker.measure(models[0].path, params).rows
        worker.unload()
        worker.unload()
        with pytest.raises(LlamaCppError, match=r"No such file|failed to open"):
            worker.load("nowhere.gguf", params)
        with pytest.raises(UsageError, match="unknown device"):
            worker.load(models[0].path, replace(params, devices=("CUDA0",)))
        assert worker.load(models[1].path, params).breakdown.on("RPC0").used > 0


# --- virtual devices in the place of real ones

CARDS = parse_gpus(["rtx-4090", "rtx-3090"])
OUTSIDE = {"CUDA0": 300 * MIB, "CUDA1": 700 * MIB}
CONTEXT = 470 * MIB


class StandIn(Worker):
    """A worker whose virtual cards pass for real ones.

    A load takes its bytes and ``OUTSIDE``, each process ``CONTEXT`` from when it first asks what is free.
    """

    processes = 0
    broken: dict[str, Any] | None = None

    def __init__(self, virtual: Sequence[VirtualDevice] = (), *, rpc: Sequence[str] = (), **settings: Any) -> None:
        super().__init__(virtual or CARDS, **settings)
        self.is_real = not virtual
        self.is_counted = False

    def close(self) -> None:
        StandIn.processes -= self.is_counted
        self.is_counted = False
        super().close()

    def devices(self) -> tuple[DeviceInfo, ...]:
        infos = super().devices()
        return tuple(replace(info, backend="CUDA", virtual=False) for info in infos) if self.is_real else infos

    def memory(self) -> tuple[DeviceInfo, ...]:
        StandIn.processes += self.is_real and not self.is_counted
        self.is_counted = self.is_real
        return tuple(replace(info, free=info.free - self.processes * CONTEXT) for info in self.devices())

    def load(self, path: Any, params: Params) -> Loaded:
        breakdown = self.measure(path, params)
        names = params.devices or ()
        return Loaded(
            breakdown,
            tuple(
                replace(info, free=info.free - breakdown.on(info.name).used - OUTSIDE[info.name] * (info.name in names))
                for info in self.memory()
            ),
        )

    def measure(self, path: Any, params: Params, **_: Any) -> Breakdown:
        found = super().measure(path, params)
        if self.is_real and self.broken and self.broken["n_ctx"] == params.n_ctx:
            rows = [replace(row, compute=row.compute + (row.buffer_type == "CUDA1")) for row in found.rows]
            return replace(found, rows=tuple(rows))
        return found


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> type[StandIn]:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    for module in (device_calls, call_worker):
        monkeypatch.setattr(module, "Worker", StandIn)
    monkeypatch.setattr(StandIn, "processes", 0)
    return StandIn


def test_cards_and_their_twins(stand_in: type[StandIn]) -> None:
    steps: list[str] = []
    found = api.calibrate(on_progress=lambda step: steps.append(step.text))
    assert found.is_exact
    assert [each.devices for each in found.comparisons if each.between == "twin"] == [
        ("CUDA0",),
        ("CUDA1",),
        ("CUDA0", "CUDA1"),
    ]
    capabilities = [device.twin and device.twin.compute_capability for device in found.devices]
    assert capabilities == [890, 860], "the catalogue knows them by what the driver calls them"
    assert [device.context for device in found.devices] == [CONTEXT, CONTEXT]
    assert [device.outside for device in found.devices] == [300 * MIB, 700 * MIB]
    assert [device.margin for device in found.devices] == [1024 * MIB, (700 + 512) * MIB]
    assert found.stored == calibrated_path()
    assert "CUDA0,CUDA1: dense, defaults" in steps
    assert "CUDA1: loading experts" in steps


def test_a_fit_leaves_what_was_measured(stand_in: type[StandIn], tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "tiny.gguf")
    assert [device.margin for device in api.fit(path).devices] == [1024 * MIB] * 2
    api.calibrate(devices=["CUDA1"])
    assert [device.margin for device in api.fit(path).devices] == [1024 * MIB, 1212 * MIB]
    assert [device.margin for device in api.fit(path, margin=100 * MIB).devices] == [100 * MIB] * 2


def test_one_byte_in_one_configuration_is_caught(stand_in: type[StandIn], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stand_in, "broken", {"n_ctx": 65536})
    found = api.calibrate(store=False)
    assert (found.is_exact, found.stored, read_calibrated()) == (False, None, ())
    differing = [(each.devices, difference) for each in found.comparisons for difference in each.differences]
    assert {devices for devices, _ in differing} == {("CUDA1",), ("CUDA0", "CUDA1")}
    for _, difference in differing:
        assert (difference.configuration, difference.what) == ("long context", "CUDA1 compute")
        assert isinstance(difference.real, int)
        assert difference.other == difference.real - 1
