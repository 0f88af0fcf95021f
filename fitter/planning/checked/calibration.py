"""Compare virtual devices with real ones, and measure the memory that llama.cpp does not count. Bytes.

Callers pass in the functions that measure, so everything here works without a device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol

from fitter.errors import LlamaCppError
from fitter.llama.header.gguf_writer import Tensor, Value, write_file
from fitter.llama.types import Breakdown, DeviceInfo, Loaded, Params, VirtualDevice
from fitter.machine import gpu_catalogue
from fitter.machine.measured import Calibrated
from fitter.parameters.values import parse_overrides
from fitter.planning.request.constraints import default_margin
from fitter.storage import read_data

PROFILES = {"CUDA": "cuda", "ROCm": "rocm"}
"""Profile of the virtual twin, by the backend of the real device."""

LOAD_PARAMS = Params(n_ctx=4096)
"""Parameters of the real loads: all layers on the device, a full micro batch of 512 tokens and single tokens."""

Measure = Callable[[Path, Params], Breakdown]
"""Makes one dummy load; raises ``LlamaCppError`` if llama.cpp refuses it."""


@dataclass(frozen=True)
class CalibrationModel:
    """A model of the data file, or the user's; ``is_loaded`` if it is also loaded for real."""

    name: str
    path: Path
    is_loaded: bool


@dataclass(frozen=True)
class Configuration:
    """Parameters to load every model with, without devices."""

    name: str
    params: Params


@dataclass(frozen=True)
class Difference:
    """A number that differs."""

    model: str
    """The loaded model."""
    configuration: str
    """Name of the parameters."""
    what: str
    """Buffer type and kind, such as ``CUDA0 compute``, or ``load``."""
    real: int | str
    """Bytes on the real device; for ``load``, ``loads`` or llama.cpp's error."""
    other: int | str
    """The same on the other side."""


@dataclass(frozen=True)
class Comparison:
    """Dummy loads on real devices, compared with another side."""

    devices: tuple[str, ...]
    """The devices."""
    between: Literal["twin", "real load"]
    """The other side: a virtual ``twin``, or a ``real load`` on the same device."""
    loads: int
    """Number of compared loads."""
    differences: tuple[Difference, ...]
    """All numbers that differ."""


@dataclass(frozen=True)
class DeviceCalibration:
    """Measurements of a real device."""

    info: DeviceInfo
    """The device."""
    twin: VirtualDevice | None
    """Its virtual twin; ``None`` if its backend has no profile."""
    context: int | None
    """Bytes that a process takes by using the device (the driver's context), as another process sees them; ``None`` if
    the device's report cannot tell.
    """
    outside: int | None
    """Bytes of a loaded and computing model beyond that and beyond llama.cpp's count; ``None`` if the device's report
    cannot tell.
    """

    @property
    def margin(self) -> int:
        """The default margin on the device."""
        return default_margin(self.outside)


@dataclass(frozen=True)
class Calibration:
    """The calibration of this machine's devices."""

    devices: tuple[DeviceCalibration, ...]
    """Measurements of each device."""
    comparisons: tuple[Comparison, ...]
    """Compared loads, with their differences."""
    stored: Path | None = None
    """The file of stored measurements; ``None`` if not stored."""

    @property
    def is_exact(self) -> bool:
        """Whether no number differs."""
        return not any(comparison.differences for comparison in self.comparisons)


class Measurer(Protocol):
    """A worker on real or virtual devices."""

    def measure(self, path: Path, params: Params) -> Breakdown:
        """Make one dummy load. Raises ``LlamaCppError`` if llama.cpp refuses it."""


class Process(Protocol):
    """A worker on the real devices."""

    def memory(self) -> tuple[DeviceInfo, ...]:
        """Return the devices with their free memory now."""

    def load(self, path: Path, params: Params) -> Loaded:
        """Load for real, compute, and keep the model."""


# --- models and configurations


def configurations() -> tuple[Configuration, ...]:
    """Read the configurations of the data file."""
    return tuple(Configuration(name, _params(entry)) for name, entry in _data()["configuration"].items())


def write_models(directory: Path) -> tuple[CalibrationModel, ...]:
    """Write the models of the data file. Raises ``OSError``."""
    return tuple(_write_model(name, entry, directory) for name, entry in _data()["model"].items())


def _params(entry: dict[str, Any]) -> Params:
    overrides = parse_overrides(entry.get("override_tensor", ()))
    given = {name: value for name, value in entry.items() if name != "override_tensor"}
    return Params(tensor_buft_overrides=overrides, **given)


def _write_model(name: str, entry: dict[str, Any], directory: Path) -> CalibrationModel:
    architecture = entry["architecture"]
    metadata: dict[str, Value] = {
        "general.architecture": architecture,
        "general.name": name,
        "tokenizer.ggml.model": "no_vocab",
    }
    for key, value in entry["metadata"].items():
        metadata[architecture + key if key.startswith(".") else key] = value
    layers = range(entry["metadata"][".block_count"])
    tensors = [
        Tensor(filled, tuple(shape), kind)
        for tensor, (shape, kind) in entry["tensors"].items()
        for filled in ([tensor.replace("{i}", str(i)) for i in layers] if "{i}" in tensor else [tensor])
    ]
    return CalibrationModel(name, write_file(directory / f"{name}.gguf", metadata, tensors), entry.get("load", False))


@functools.cache
def _data() -> dict[str, Any]:
    return read_data(__file__)


# --- bytes


def twin_of(info: DeviceInfo, compute_capability: int | None, profile: str | None = None) -> VirtualDevice | None:
    """Describe the virtual twin of ``info``.

    Args:
        info: The real device.
        compute_capability: Its compute capability; ``None`` for the one of the catalogue's card of this name.
        profile: The twin's profile; ``None`` for the one of its backend.

    Returns:
        The twin; ``None`` if its profile or its compute capability is unknown.
    """
    profile = profile or PROFILES.get(info.backend)
    if compute_capability is None and (card := gpu_catalogue.find(info.description)):
        compute_capability = card.compute_capability
    if profile is None or (profile in ("cuda", "rocm") and compute_capability is None):
        return None
    return VirtualDevice(info.name, info.description, profile, compute_capability or 0, info.total, info.free)


def compare(
    real: Measure,
    other: Measure,
    devices: Sequence[DeviceInfo],
    models: Iterable[CalibrationModel],
    wanted: Iterable[Configuration],
    on_step: Callable[[str], None] = lambda _: None,
) -> Comparison:
    """Load every model with every configuration on both sides, and collect the differences."""
    names = tuple(device.name for device in devices)
    loads, differences = 0, []
    for model in models:
        for configuration in wanted:
            on_step(f"{','.join(names)}: {model.name}, {configuration.name}")
            params = replace(configuration.params, devices=names)
            both = [_numbers(side, model.path, params, devices) for side in (real, other)]
            loads += 1
            differences += [
                Difference(model.name, configuration.name, what, *numbers) for what, *numbers in _differences(*both)
            ]
    return Comparison(names, "twin", loads, tuple(differences))


def compare_twins(
    real: Measure,
    start: Callable[[Sequence[VirtualDevice]], AbstractContextManager[Measurer]],
    devices: Sequence[DeviceInfo],
    twins: Mapping[str, VirtualDevice | None],
    models: Sequence[CalibrationModel],
    on_step: Callable[[str], None] = lambda _: None,
) -> tuple[Comparison, ...]:
    """Compare each device with its twin, and all devices together with all twins.

    Args:
        real: Makes dummy loads on the real devices.
        start: Starts a process with virtual devices.
        devices: The real devices; those without a twin are skipped.
        twins: Twins by device name.
        models: Models to load.
        on_step: Called before each load.
    """
    comparisons = []
    for group in [*((info,) for info in devices), *([tuple(devices)] if len(devices) > 1 else [])]:
        virtual = [device for info in group if (device := twins[info.name])]
        if len(virtual) == len(group):
            with start(virtual) as other:
                comparisons.append(compare(real, other.measure, group, models, configurations(), on_step))
    return tuple(comparisons)


def compare_loads(measure: Measure, loads: Iterable[MeasuredLoad], info: DeviceInfo) -> Comparison:
    """Compare real loads on a device with dummy loads that reserve."""
    count, differences = 0, []
    for load in loads:
        dummy = _numbers(measure, load.model.path, replace(LOAD_PARAMS, devices=(info.name,)), [info])
        count += 1
        differences += [
            Difference(load.model.name, "loaded", what, *numbers)
            for what, *numbers in _differences(numbers_of(load.loaded.breakdown, [info]), dummy)
        ]
    return Comparison((info.name,), "real load", count, tuple(differences))


def _numbers(measure: Measure, path: Path, params: Params, devices: Sequence[DeviceInfo]) -> dict[str, int | str]:
    try:
        breakdown = measure(path, params)
    except LlamaCppError as error:
        return {"load": str(error).removeprefix(f"{path}: ")}
    return numbers_of(breakdown.real, devices)


def numbers_of(breakdown: Breakdown, devices: Sequence[DeviceInfo]) -> dict[str, int | str]:
    """Return bytes by buffer type and kind, without zeros; a device's own buffer type has the device's name."""
    device_of = {device.buffer_type: device.name for device in devices if device.buffer_type}
    numbers: dict[str, int | str] = {"load": "loads"}
    for row in breakdown.rows:
        name = device_of.get(row.buffer_type, row.buffer_type)
        for kind, size in (("model", row.model), ("context", row.context), ("compute", row.compute)):
            if size:
                numbers[f"{name} {kind}"] = size
    return numbers


def _differences(
    real: Mapping[str, int | str], other: Mapping[str, int | str]
) -> Iterator[tuple[str, int | str, int | str]]:
    if real["load"] != other["load"]:
        # the bytes of the side that loads are no further difference
        yield "load", real["load"], other["load"]
        return
    for what in dict.fromkeys([*real, *other]):
        if real.get(what, 0) != other.get(what, 0):
            yield what, real.get(what, 0), other.get(what, 0)


# --- what llama.cpp does not count


@dataclass(frozen=True)
class MeasuredLoad:
    """A real load; ``context`` and ``outside`` as in ``DeviceCalibration``, measured by this load."""

    model: CalibrationModel
    loaded: Loaded
    context: int | None
    outside: int | None


def measure_load(observer: Process, loader: Process, info: DeviceInfo, model: CalibrationModel) -> MeasuredLoad:
    """Load ``model`` on a device in ``loader``, a fresh process, while the process ``observer`` watches.

    Both use the device before they report free memory, so their own memory is the same before and after.
    """
    idle = _free(observer.memory(), info)
    before = _free(loader.memory(), info)
    started = _free(observer.memory(), info)
    loaded = loader.load(model.path, replace(LOAD_PARAMS, devices=(info.name,)))
    counted = loaded.breakdown.on(info.name).used
    outside = before - _free(loaded.devices, info) - counted
    # less than llama.cpp's count: the report does not change (a CPU behind RPC), or another program freed memory
    return MeasuredLoad(model, loaded, idle - started if idle >= started else None, outside if outside >= 0 else None)


def load_each(
    observer: Process,
    start: Callable[[], AbstractContextManager[Process]],
    info: DeviceInfo,
    models: Iterable[CalibrationModel],
    on_step: Callable[[str], None] = lambda _: None,
) -> tuple[MeasuredLoad, ...]:
    """Load each model that is loaded for real on one device, each in its own process."""
    loads = []
    for model in models:
        if model.is_loaded:
            on_step(f"{info.name}: loading {model.name}")
            with start() as loader:
                loads.append(measure_load(observer, loader, info, model))
    return tuple(loads)


def device_calibration(
    info: DeviceInfo, twin: VirtualDevice | None, loads: Sequence[MeasuredLoad]
) -> DeviceCalibration:
    """Take the most bytes of all loads."""
    return DeviceCalibration(
        info, twin, _largest(load.context for load in loads), _largest(load.outside for load in loads)
    )


def records(devices: Iterable[DeviceCalibration]) -> tuple[Calibrated, ...]:
    """Return the measurements to store."""
    return tuple(
        Calibrated(device.info.backend, device.info.description, device.info.total, device.outside, device.context)
        for device in devices
        if device.outside is not None
    )


def _free(devices: Iterable[DeviceInfo], info: DeviceInfo) -> int:
    return next(device.free for device in devices if device.name == info.name)


def _largest(sizes: Iterable[int | None]) -> int | None:
    return max((size for size in sizes if size is not None), default=None)
