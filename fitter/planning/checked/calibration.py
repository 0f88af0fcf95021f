"""How well virtual devices answer for the real ones, and what a loaded model takes that llama.cpp does not count.

Bytes. What measures is handed in, so that everything here works without a device.
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
from fitter.machine.calibrated import Calibrated
from fitter.parameters.values import parse_overrides
from fitter.planning.request.constraints import default_margin
from fitter.storage.data_files import read_data

PROFILES = {"CUDA": "cuda", "ROCm": "rocm"}
"""The profile of the virtual twin, by the backend of the real device."""

LOAD_PARAMS = Params(n_ctx=4096)
"""What is loaded for real: all layers on the device, a full micro batch of 512 tokens and single ones."""

Measure = Callable[[Path, Params], Breakdown]
"""One dummy load; raises ``LlamaCppError`` where llama.cpp cannot make it."""


@dataclass(frozen=True)
class CalibrationModel:
    """A model of the data file, or the user's; ``is_loaded`` says whether it is loaded for real as well."""

    name: str
    path: Path
    is_loaded: bool


@dataclass(frozen=True)
class Configuration:
    """Parameters to load every model with; they name no device."""

    name: str
    params: Params


@dataclass(frozen=True)
class Difference:
    """One number that differs."""

    model: str
    """The model that was loaded."""
    configuration: str
    """The parameters that it was loaded with, by their name."""
    what: str
    """A buffer type and a kind, such as ``CUDA0 compute``, or ``load``."""
    real: int | str
    """Bytes of the real device; of ``load`` either ``loads`` or llama.cpp's error."""
    other: int | str
    """The same of what it is compared with."""


@dataclass(frozen=True)
class Comparison:
    """Dummy loads on real devices against something else."""

    devices: tuple[str, ...]
    """The devices."""
    between: Literal["twin", "real load"]
    """What they are compared with: their virtual ``twin``, or a ``real load`` on the same device."""
    loads: int
    """How many loads were compared."""
    differences: tuple[Difference, ...]
    """Every number that differs."""


@dataclass(frozen=True)
class DeviceCalibration:
    """What was measured of a real device."""

    info: DeviceInfo
    """The device."""
    twin: VirtualDevice | None
    """Its virtual twin; ``None`` where its backend has no profile."""
    context: int | None
    """Bytes that a process takes by merely using the device (the driver's context), as another one sees it; ``None``
    where the device's report of its memory cannot tell.
    """
    outside: int | None
    """Bytes that a loaded and computing model takes beyond that and beyond llama.cpp's own count; ``None`` where the
    device's report of its memory cannot tell.
    """

    @property
    def margin(self) -> int:
        """The margin that a fit leaves on the device by default."""
        return default_margin(self.outside)


@dataclass(frozen=True)
class Calibration:
    """How far virtual devices can be trusted here, and what default margins come of it."""

    devices: tuple[DeviceCalibration, ...]
    """What was measured of each device."""
    comparisons: tuple[Comparison, ...]
    """Loads that were compared, and what differs."""
    stored: Path | None = None
    """The file that keeps what was measured; ``None`` where nothing was to be stored."""

    @property
    def is_exact(self) -> bool:
        """Whether no number differs."""
        return not any(comparison.differences for comparison in self.comparisons)


class Measurer(Protocol):
    """A worker process on real or virtual devices, as far as dummy loads go."""

    def measure(self, path: Path, params: Params) -> Breakdown:
        """One dummy load; raises ``LlamaCppError`` where llama.cpp cannot make it."""


class Process(Protocol):
    """A worker process on the real devices."""

    def memory(self) -> tuple[DeviceInfo, ...]:
        """The devices with what is free now."""

    def load(self, path: Path, params: Params) -> Loaded:
        """Load for real, compute, and keep it."""


# --- models and configurations


def configurations() -> tuple[Configuration, ...]:
    """Those of the data file."""
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
    """The virtual device that should answer as ``info`` does; ``None`` where nothing says which profile that has.

    Without a ``compute_capability`` it is that of the catalogue's card of the same name, which a CUDA or ROCm device
    must have; ``profile`` takes the place of the backend's own.
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
    """Load every model with every configuration on ``devices`` on both sides, and note every number that differs."""
    names = tuple(device.name for device in devices)
    loads, differences = 0, []
    for model in models:
        for configuration in wanted:
            on_step(f"{','.join(names)}: {model.name}, {configuration.name}")
            params = replace(configuration.params, devices=names)
            found = [_numbers(side, model.path, params, devices) for side in (real, other)]
            loads += 1
            differences += [
                Difference(model.name, configuration.name, what, *numbers) for what, *numbers in _different(*found)
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
    """Dummy loads of every model on each of ``devices`` against its twin, and on all of them together.

    ``start`` begins a process with virtual devices. Devices without a twin are left out.
    """
    found = []
    for group in [*((info,) for info in devices), *([tuple(devices)] if len(devices) > 1 else [])]:
        virtual = [device for info in group if (device := twins[info.name])]
        if len(virtual) == len(group):
            with start(virtual) as other:
                found.append(compare(real, other.measure, group, models, configurations(), on_step))
    return tuple(found)


def compare_loads(measure: Measure, loads: Iterable[MeasuredLoad], info: DeviceInfo) -> Comparison:
    """What real ``loads`` on the device took against what dummy loads that reserve (``measure``) say of them."""
    count, differences = 0, []
    for load in loads:
        dummy = _numbers(measure, load.model.path, replace(LOAD_PARAMS, devices=(info.name,)), [info])
        count += 1
        differences += [
            Difference(load.model.name, "loaded", what, *numbers)
            for what, *numbers in _different(numbers_of(load.loaded.breakdown, [info]), dummy)
        ]
    return Comparison((info.name,), "real load", count, tuple(differences))


def _numbers(measure: Measure, path: Path, params: Params, devices: Sequence[DeviceInfo]) -> dict[str, int | str]:
    try:
        breakdown = measure(path, params)
    except LlamaCppError as error:
        return {"load": str(error).removeprefix(f"{path}: ")}
    return numbers_of(breakdown.real, devices)


def numbers_of(breakdown: Breakdown, devices: Sequence[DeviceInfo]) -> dict[str, int | str]:
    """Bytes by buffer type and kind, zeros left out; a device's own buffer type has the device's name."""
    own = {device.buffer_type: device.name for device in devices if device.buffer_type}
    numbers: dict[str, int | str] = {"load": "loads"}
    for row in breakdown.rows:
        name = own.get(row.buffer_type, row.buffer_type)
        for kind, size in (("model", row.model), ("context", row.context), ("compute", row.compute)):
            if size:
                numbers[f"{name} {kind}"] = size
    return numbers


def _different(
    real: Mapping[str, int | str], other: Mapping[str, int | str]
) -> Iterator[tuple[str, int | str, int | str]]:
    if real["load"] != other["load"]:
        # what the side that loads takes is no difference of its own
        yield "load", real["load"], other["load"]
        return
    for what in dict.fromkeys([*real, *other]):
        if real.get(what, 0) != other.get(what, 0):
            yield what, real.get(what, 0), other.get(what, 0)


# --- what llama.cpp does not count


@dataclass(frozen=True)
class MeasuredLoad:
    """A real load; ``context`` and ``outside`` as in ``DeviceCalibration``, as far as this load tells."""

    model: CalibrationModel
    loaded: Loaded
    context: int | None
    outside: int | None


def measure_load(observer: Process, loader: Process, info: DeviceInfo, model: CalibrationModel) -> MeasuredLoad:
    """Load ``model`` on the device in ``loader``, a fresh process, while another one, ``observer``, watches.

    Both use the device already when they are asked what is free, so that what they take themselves is the same
    before and after.
    """
    idle = _free(observer.memory(), info)
    before = _free(loader.memory(), info)
    started = _free(observer.memory(), info)
    loaded = loader.load(model.path, replace(LOAD_PARAMS, devices=(info.name,)))
    own = loaded.breakdown.on(info.name).used
    outside = before - _free(loaded.devices, info) - own
    # Where less went than llama.cpp counts, the report stands still (a CPU behind RPC), or somebody freed memory.
    return MeasuredLoad(model, loaded, idle - started if idle >= started else None, outside if outside >= 0 else None)


def load_each(
    observer: Process,
    start: Callable[[], AbstractContextManager[Process]],
    info: DeviceInfo,
    models: Iterable[CalibrationModel],
    on_step: Callable[[str], None] = lambda _: None,
) -> tuple[MeasuredLoad, ...]:
    """Real loads on one device, of those of ``models`` that are for that, each in a process of its own."""
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
    """The most that any of the loads took."""
    return DeviceCalibration(
        info, twin, _largest(load.context for load in loads), _largest(load.outside for load in loads)
    )


def records(devices: Iterable[DeviceCalibration]) -> tuple[Calibrated, ...]:
    """What there is to store of ``devices``."""
    return tuple(
        Calibrated(device.info.backend, device.info.description, device.info.total, device.outside, device.context)
        for device in devices
        if device.outside is not None
    )


def _free(devices: Iterable[DeviceInfo], info: DeviceInfo) -> int:
    return next(device.free for device in devices if device.name == info.name)


def _largest(sizes: Iterable[int | None]) -> int | None:
    return max((size for size in sizes if size is not None), default=None)
