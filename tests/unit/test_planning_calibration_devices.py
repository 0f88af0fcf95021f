"""What a calibration puts together: groups of devices and their twins, loads counted, what is stored."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from fitter.llama.types import Breakdown, DeviceInfo, Loaded, Params, Row, VirtualDevice
from fitter.machine.measured import Calibrated
from fitter.planning.checked import calibration
from fitter.planning.checked.calibration import (
    CalibrationModel,
    DeviceCalibration,
    MeasuredLoad,
    configurations,
    twin_of,
)
from tests.support.cases import cases, named_cases

CARD = DeviceInfo("CUDA0", "NVIDIA GeForce RTX 4090", "gpu", "CUDA", 24 * 2**30, 23 * 2**30, buffer_type="CUDA0")
SECOND = replace(CARD, name="CUDA1", buffer_type="CUDA1")
MODELS = tuple(
    CalibrationModel(name, Path(f"{name}.gguf"), is_loaded)
    for name, is_loaded in (("a", True), ("b", False), ("c", True))
)


def rows(*sizes: int) -> Breakdown:
    return Breakdown((Row("CUDA0", "CUDA0", False, *sizes),), ("CUDA0",), 512)


ONE = rows(1, 2, 3)


def twin(info: DeviceInfo) -> VirtualDevice:
    return VirtualDevice(info.name, info.description, "cuda", 890, info.total, info.free)


@dataclass
class Starter:
    """Begins processes with virtual devices that answer with `ONE`, and remembers with which."""

    began: list[tuple[str, ...]] = field(default_factory=list)
    ended: int = 0

    @contextmanager
    def __call__(self, devices: Sequence[VirtualDevice]) -> Iterator[Starter]:
        self.began.append(tuple(device.name for device in devices))
        yield self
        self.ended += 1

    def measure(self, path: Path, params: Params) -> Breakdown:
        return ONE


BOTH = {"CUDA0": twin(CARD), "CUDA1": twin(SECOND)}


@named_cases(
    ("no device", [], {}, []),
    ("one", [CARD], BOTH, [("CUDA0",)]),
    ("two, and both together", [CARD, SECOND], BOTH, [("CUDA0",), ("CUDA1",), ("CUDA0", "CUDA1")]),
    ("one has no twin", [CARD, SECOND], {**BOTH, "CUDA0": None}, [("CUDA1",)]),
    ("none has one", [CARD], {"CUDA0": None}, []),
)
def test_devices_are_compared_alone_and_together(
    devices: list[DeviceInfo], twins: Mapping[str, VirtualDevice | None], groups: list[tuple[str, ...]]
) -> None:
    start, steps = Starter(), list[str]()
    found = calibration.compare_twins(lambda path, params: ONE, start, devices, twins, MODELS, steps.append)
    assert (start.began, start.ended) == (groups, len(groups))
    assert [comparison.devices for comparison in found] == groups
    each = len(MODELS) * len(configurations())
    assert [comparison.loads for comparison in found] == [each] * len(groups)
    assert len(steps) == each * len(groups)


def test_loads_and_what_differs_are_counted_over_all_models() -> None:
    loads = [MeasuredLoad(model, Loaded(rows(1, 2, 4), ()), None, None) for model in MODELS]
    found = calibration.compare_loads(lambda path, params: ONE, loads, CARD)
    assert (found.devices, found.between, found.loads) == (("CUDA0",), "real load", 3)
    assert [(each.model, each.configuration, each.what, each.real, each.other) for each in found.differences] == [
        (name, "loaded", "CUDA0 compute", 4, 3) for name in "abc"
    ]


def test_only_models_that_are_for_it_are_loaded() -> None:
    loaded: list[Path] = []
    started: list[int] = []

    class Process:
        def memory(self) -> tuple[DeviceInfo, ...]:
            return (CARD,)

        def load(self, path: Path, params: Params) -> Loaded:
            loaded.append(path)
            return Loaded(ONE, (replace(CARD, free=CARD.free - 6),))

    @contextmanager
    def start() -> Iterator[Process]:
        started.append(len(loaded))
        yield Process()

    steps: list[str] = []
    found = calibration.load_each(Process(), start, CARD, MODELS, steps.append)
    assert [(load.model.name, load.context, load.outside) for load in found] == [("a", 0, 0), ("c", 0, 0)]
    assert loaded == [Path("a.gguf"), Path("c.gguf")] and started == [0, 1], "each in a process of its own"
    assert steps == ["CUDA0: loading a", "CUDA0: loading c"]


def test_what_is_stored() -> None:
    devices = [DeviceCalibration(CARD, twin(CARD), 5, 7), DeviceCalibration(SECOND, None, 5, None)]
    assert calibration.records(devices) == (Calibrated("CUDA", CARD.description, CARD.total, 7, 5),)
    found = calibration.device_calibration(CARD, twin(CARD), [])
    assert found == DeviceCalibration(CARD, twin(CARD), None, None)


@cases("CUDA", "ROCm")
def test_a_card_that_nobody_knows_has_no_twin(backend: str) -> None:
    unknown = replace(CARD, backend=backend, description="a card")
    assert twin_of(unknown, None) is None
    found = twin_of(unknown, 900)
    assert found is not None and (found.profile, found.compute_capability) == (backend.lower(), 900)
