"""``fitter.devices`` and ``fitter.calibrate``: list devices, and compare them with their virtual twins.

``fitter backend -- PROGRAM`` shows virtual devices to a program of llama.cpp, which computes on them.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path as FilePath
from typing import TYPE_CHECKING

from fitter import system
from fitter.api.checked_call import checked_call
from fitter.errors import FitterError, LibraryError, UsageError
from fitter.llama.build import build_folder, elf, library, linking
from fitter.llama.build.build_folder import find, named
from fitter.llama.build.functions import backend_rules, epoch_of
from fitter.llama.client import DEFAULT_TIMEOUT, Worker
from fitter.llama.types import DeviceInfo, VirtualDevice, describe
from fitter.machine.gpu import parse_twin, virtual_devices
from fitter.machine.host import host_memory, unused_gpus
from fitter.machine.machine import choose, described
from fitter.machine.measured import store_calibrated
from fitter.model.header import open_model
from fitter.parameters.table import AnyPath as Path
from fitter.parameters.values import shown
from fitter.planning.request.request import Progress
from fitter.storage import TemporaryDirectory

if TYPE_CHECKING:
    from fitter.planning.checked.calibration import Calibration


@checked_call()
def devices(
    gpus: str | VirtualDevice | Sequence[str | VirtualDevice] = (),
    *,
    rpc: str | Sequence[str] = (),
    llama_cpp: Path | None = None,
    timeout: float = DEFAULT_TIMEOUT,
) -> tuple[tuple[DeviceInfo, ...], DeviceInfo]:
    """List the devices that llama.cpp offloads to by default, and the host with its available memory.

    Args:
        gpus: Descriptions of virtual devices, in place of this machine's.
        rpc: Addresses of rpc-servers whose devices are listed too.
        llama_cpp: The llama.cpp to use, as in ``fit``.
        timeout: Seconds for one answer of llama.cpp.

    Returns:
        The devices, and the host; memory in bytes.
    """
    virtual = virtual_devices(gpus)
    with Worker(virtual, timeout=timeout, rpc=rpc, llama_cpp=llama_cpp) as worker:
        infos = worker.devices() if virtual or rpc or not gpus else ()
        memory, shown = host_memory(), described(infos, virtual) if gpus else infos
        return shown, replace(worker.host(), total=memory.total, free=memory.available)


def why_no_gpu(devices: Sequence[DeviceInfo], llama_cpp: Path | None = None) -> str:
    """Say why this machine's GPU is no device of llama.cpp; empty if a device is one, or there is no GPU.

    Args:
        devices: This machine's devices, as llama.cpp lists them.
        llama_cpp: The llama.cpp, as in ``fit``.
    """
    where = named(None if llama_cpp is None else os.fsdecode(llama_cpp))
    with suppress(FitterError):
        return unused_gpus(devices, lambda: find(where).backends)
    return ""


@checked_call()
def calibrate(
    model: Path | None = None,
    *,
    devices: Sequence[str] | None = None,
    rpc: str | Sequence[str] = (),
    twin: str | None = None,
    store: bool = True,
    llama_cpp: Path | None = None,
    timeout: float = DEFAULT_TIMEOUT,
    on_progress: Callable[[Progress], None] | None = None,
    on_log: Callable[[str], None] | None = None,
) -> Calibration:
    """Compare this machine's devices with their virtual twins, and measure the memory that llama.cpp does not count.

    Dummy loads of ``model`` (without it: of several small models) run on each device, on its twin, and on all devices
    together. Then the small models are loaded for real. The bytes that a real load takes beyond llama.cpp's own count
    become the device's default margin.

    Args:
        model: A GGUF file to compare in place of the small models.
        devices: Names of the devices to calibrate; all by default.
        rpc: Addresses of rpc-servers (``host:port``) whose devices are calibrated too.
        twin: Profile of every twin, such as ``cuda:8.6``, in place of each device's own.
        store: Whether to store the measured bytes for the default margin.
        llama_cpp: The llama.cpp to use, as in ``fit``.
        timeout: Seconds for one answer of llama.cpp.
        on_progress: Called at each step.
        on_log: Called with every line of llama.cpp's log.

    Raises:
        LibraryError: llama.cpp has no device here.
        AnswerError: The measured bytes cannot be stored.
        FitterError: As ``fit`` raises them.
    """
    from fitter.planning.checked import calibration
    from fitter.planning.checked.calibration import Calibration, twin_of

    profile, capability = parse_twin(twin) if twin else (None, None)

    def start(virtual: Sequence[VirtualDevice] = ()) -> Worker:
        rpc_of_it = () if virtual else rpc
        return Worker(virtual, timeout=timeout, on_log=on_log, rpc=rpc_of_it, llama_cpp=llama_cpp)

    with start() as real, TemporaryDirectory() as directory:
        chosen = choose(real.devices(), devices)
        if not chosen:
            raise LibraryError(
                "llama.cpp has no GPU here to calibrate: run this on a machine with one, and install llama-cpp-python "
                'with its backend, such as CMAKE_ARGS="-DGGML_CUDA=on"'
            )

        def report(text: str) -> None:
            if on_progress:
                on_progress(Progress(real.dummy_loads, text))

        capabilities = dict(real.compute_capabilities())
        twins = {info.name: twin_of(info, capability or capabilities.get(info.name), profile) for info in chosen}
        small = calibration.write_models(FilePath(directory))
        compared = small
        if model is not None:
            path = open_model(os.fsdecode(model), real.header).path
            compared = (calibration.CalibrationModel(path.name, path, False),)
        comparisons = [*calibration.compare_twins(real.measure, start, chosen, twins, compared, report)]
        measured = []
        for info in chosen:
            loads = calibration.load_each(real, start, info, small, report)
            comparisons.append(calibration.compare_loads(partial(real.measure, reserve=True), loads, info))
            measured.append(calibration.device_calibration(info, twins[info.name], loads))
    records = calibration.records(measured)
    stored = store_calibrated(records) if store and records else None
    return Calibration(tuple(measured), tuple(comparisons), stored)


_OF_GGML = b"ggml_backend_dev_"
"""A part of the names of ggml's functions, which a program has inside if llama.cpp is built into it."""


def path_of_program(name: str) -> str:
    """Return the path of a program by its name on the PATH, or by a path.

    Raises:
        UsageError: There is none.
        LibraryError: llama.cpp is built into it, so that no backend can be added.
    """
    path = build_folder.on_path(name) or os.path.abspath(os.path.expanduser(name))
    if not os.path.isfile(path) or not os.access(path, os.X_OK):
        raise UsageError(f"{shown(name)} is no program: name one on the PATH, or give its path")
    if elf.is_binary(path) and not _is_linked(path) and _has_inside(path, _OF_GGML):
        raise LibraryError(
            f"{path} has llama.cpp built into it, so it sees no other devices: take one with libggml beside it"
        )
    return path


def environment_of(program: str, devices: Sequence[VirtualDevice]) -> dict[str, str]:
    """Return the variables with which ``program``, and all that it starts, see ``devices`` and compute on them.

    Raises:
        UsageError: This system cannot load a library into a program.
        LibraryError: The program's llama.cpp is none that fitter can use.
    """
    if not system.PRELOAD:
        raise UsageError("a program can be shown virtual devices on Linux alone: plan for them with --gpu here")
    preload = [library.preload_path(), *filter(None, os.environ.get(system.PRELOAD, "").split(":"))]
    variables = {
        "FITTER_BACKEND": str(library.backend_path()),
        "FITTER_DEVICES": describe(devices),
        "FITTER_COMPUTES": "1",
        system.PRELOAD: ":".join(map(str, preload)),
    }
    if elf.is_binary(program) and _is_linked(program):
        with Worker(llama_cpp=program) as worker:
            variables["FITTER_BUILD"] = _build_words(worker.build().ggml)
    return variables


def _build_words(ggml: str) -> str:
    """Describe a build by its version of ggml, for ``FITTER_BUILD``."""
    epoch = epoch_of(ggml)
    has_params = -1 if epoch.graph_optimize_has_params is None else int(epoch.graph_optimize_has_params)
    rules = ",".join(name for name, has in backend_rules(ggml).items() if has)
    return ";".join([ggml, epoch.last_op, str(has_params), epoch.larger_alone_text, rules])


def _is_linked(program: str) -> bool:
    return any(name.startswith(("libggml", "libllama")) for name in linking.linked(program))


def _has_inside(program: str, words: bytes) -> bool:
    with FilePath(program).open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return content.find(words) >= 0
