"""Measures cases, in workers that each measure many of them. Sizes in bytes.

A case that may be unchanged is measured with its locked parameters, which takes one dummy load; any other is fitted.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol, TypeVar

import fitter
from fitter.api.call_worker import answering, ask_in_threads
from fitter.errors import FitterError, LlamaCppError, UsageError
from fitter.llama.client import DEFAULT_TIMEOUT, Worker
from fitter.llama.types import Row, Skeleton, VirtualDevice
from fitter.machine.device_memory import described_pools
from fitter.machine.gpu import parse_gpus
from fitter.model.files import header_cache
from fitter.model.location import model_files
from fitter.output.documents.document import four_digits
from fitter.regression.cases import DEFAULT_PROGRAM, Case
from fitter.regression.lockfile import (
    LockedDevice,
    LockedHost,
    LockedModel,
    LockedPool,
    LockedSpeed,
    Memory,
    Snapshot,
    header_digest,
    summarize_types,
)
from fitter.system import processors
from fitter.text import printable

if TYPE_CHECKING:
    from fitter.planning.plan.plan import Plan

_MOST_HEADER = 2**30
"""Larger than any header: a lock with a larger number is damaged."""


@dataclass(frozen=True)
class Measured:
    """A case with its memory; ``snapshot`` is ``None``, and ``error`` says why, if it could not be measured."""

    case: Case
    snapshot: Snapshot | None
    error: FitterError | None = None


class _HasName(Protocol):
    @property
    def name(self) -> str: ...


_Named = TypeVar("_Named", bound=_HasName)
_Result = TypeVar("_Result")

OnDone = Callable[[int, int, str], None]
"""Called with the number of cases done, the number of all, and the name of the last one (at first 0 and no name)."""


def measure_cases(
    cases: Sequence[Case],
    locked: Mapping[str, Snapshot],
    *,
    jobs: int | None = None,
    timeout: float = DEFAULT_TIMEOUT,
    on_done: OnDone | None = None,
) -> tuple[Measured, ...]:
    """Measure every case, in the order of ``cases``, by ``jobs`` workers (by default one per processor).

    A case whose settings are those ``locked`` for it is measured with the locked parameters, and fitted only if that
    shows a difference. ``on_done`` is called after every case, by one thread at a time. If one case fails, its
    ``error`` says why. Raises ``LibraryError`` if there is no libllama.
    """
    # Cases of the same build and model one after the other: a process has one libllama, and a worker makes another
    # context of the loaded model.
    ordered = sorted(cases, key=lambda case: (case.llama_cpp or "", str(case.model), case.gpus, case.name))
    is_one_build = len({case.llama_cpp for case in cases}) == 1

    def begin(worker: Worker, stopped: threading.Event) -> Callable[[Case], Measured]:
        versions = _Versions(worker)
        if is_one_build:
            # An unusable build is reported once, not for every case.
            versions.of(cases[0])
        return lambda case: _measure(case, locked.get(case.name), versions, stopped)

    first = ordered[0].llama_cpp if ordered else None
    results = in_workers(ordered, begin, jobs=jobs, timeout=timeout, on_done=on_done, llama_cpp=first)
    return tuple(results[case.name] for case in cases)


def in_workers(
    items: Sequence[_Named],
    begin: Callable[[Worker, threading.Event], Callable[[_Named], _Result]],
    *,
    jobs: int | None,
    timeout: float,
    on_done: OnDone | None,
    llama_cpp: str | None,
) -> dict[str, _Result]:
    """Work on all ``items`` in their order, and return the results by name.

    ``begin`` is called for each of the ``jobs`` workers, and returns the function that works on an item with that
    worker; the event is set when no more results are needed. ``llama_cpp``: the build that workers start with.
    """
    say: OnDone = on_done or (lambda done, total, name: None)
    say(0, len(items), "")
    results: dict[str, _Result] = {}
    stopped = threading.Event()
    works: dict[Worker, Callable[[_Named], _Result]] = {}

    def ask(item: _Named, worker: Worker) -> _Result:
        if worker not in works:
            works[worker] = begin(worker, stopped)
        return works[worker](item)

    def tell(item: _Named, result: _Result, worker: Worker) -> None:
        results[item.name] = result
        say(len(results), len(items), item.name)

    with ExitStack() as stack:
        # Started here, since a process that was started early may only be taken by one thread at a time.
        count = max(1, min(jobs or processors(), len(items)))
        workers = [stack.enter_context(Worker(timeout=timeout)) for _ in range(count)]
        for worker in workers:
            worker.configure((), llama_cpp=llama_cpp)
            worker.start()
        ask_in_threads(workers, items, ask, tell, stop=stopped.set)
    return results


def measure_case(case: Case, locked: Snapshot | None, worker: Worker) -> Snapshot:
    """Measure ``case``: return the locked snapshot if it still holds, else the snapshot of a fit.

    Raises what ``fitter.fit`` raises.
    """
    return _snapshot(case, locked, _Versions(worker), threading.Event())


class _Versions:
    """A worker, and the versions of the builds that it has been asked about."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self._known: dict[str | None, str] = {}

    def of(self, case: Case) -> str:
        """Return the version of the llama.cpp that ``case`` is measured with."""
        if case.llama_cpp not in self._known:
            self.worker.configure((), llama_cpp=case.llama_cpp)
            self._known[case.llama_cpp] = self.worker.llama_cpp()
        return self._known[case.llama_cpp]


def _measure(case: Case, locked: Snapshot | None, versions: _Versions, stopped: threading.Event) -> Measured:
    try:
        return Measured(case, _snapshot(case, locked, versions, stopped))
    except FitterError as error:
        return Measured(case, None, error)


def _snapshot(case: Case, locked: Snapshot | None, versions: _Versions, stopped: threading.Event) -> Snapshot:
    go_on(stopped)
    # Which of a build's CPU backends is the best one depends on the machine, and so may what weights take.
    versions.worker.use_cpu(locked.cpu if locked else "")
    version, worker = versions.of(case), versions.worker
    with header_cache.reading():
        if locked is not None and _may_hold(case, locked, version) and (same := _measure_locked(case, locked, worker)):
            return same
        return _fit_snapshot(case, worker, version, stopped)


class _StoppedError(Exception):
    """The check was stopped, so the case is no longer needed."""


def go_on(stopped: threading.Event) -> None:
    """End the work of this thread if no more results are needed."""
    if stopped.is_set():
        raise _StoppedError


# --- measured as it was locked


def _may_hold(case: Case, locked: Snapshot, version: str) -> bool:
    """Whether a fit now would get exactly the input that the locked one had, so that its result would be the same."""
    model = locked.model
    if (locked.fitter, locked.llama_cpp) != (fitter.__version__, version) or not locked.fits:
        return False
    files = model_files(case.model)
    if dict(locked.settings) != dict(case.settings) or printable(files[0].name) != model.file:
        return False
    keywords = case.keywords()
    if keywords["program"] != DEFAULT_PROGRAM:
        # The settings of a program and its later memory depend on its version.
        return False
    by = answering(parse_gpus(case.gpus), keywords.get("profile"), keywords.get("llama_cpp"))
    if by is not None and by.library is not None:
        # Cards of a CUDA library are measured anew each time.
        return False
    if locked.host.shared or any(device.shared for device in locked.devices.values()):
        # A lock does not record draft models, vision and LoRA.
        return False
    sizes = tuple(file.stat().st_size for file in files)
    is_sound = len(model.header_bytes) == len(files) and all(0 < n <= _MOST_HEADER for n in model.header_bytes)
    # If the headers are unchanged, their lengths are too: a header contains its own length.
    return sizes == model.file_bytes and is_sound and header_digest(files, model.header_bytes) == model.header


def _measure_locked(case: Case, locked: Snapshot, worker: Worker) -> Snapshot | None:
    """The snapshot if llama.cpp measures the same with the locked parameters; one dummy load, without tokenizer."""
    virtual = parse_gpus(case.gpus)
    if not _same_devices(virtual, locked):
        return None
    worker.configure(virtual, llama_cpp=case.llama_cpp)
    try:
        breakdown = worker.measure(Skeleton(tuple(map(str, model_files(case.model)))), locked.params)
    except (LlamaCppError, UsageError):
        # The fit will say why.
        return None
    uses = {name: device.memory for name, device in locked.devices.items() if device.memory}
    is_same = breakdown.n_ctx == locked.n_ctx and memory_of(breakdown.rows) == (uses, locked.host.memory)
    return locked if is_same else None


def _same_devices(virtual: Sequence[VirtualDevice], locked: Snapshot) -> bool:
    described = {device.name: (device.description, device.total, device.free) for device in virtual}
    pools = {pool.name: (pool.memory.total, pool.memory.free) for pool in described_pools(virtual)}
    return pools == {name: (pool.total, pool.free) for name, pool in locked.pools.items()} and all(
        described.get(name) == (device.description, device.total, device.free)
        for name, device in locked.devices.items()
    )


# --- fitted


def _fit_snapshot(case: Case, worker: Worker, version: str, stopped: threading.Event) -> Snapshot:
    from fitter import api

    go_on(stopped)
    plan = api.fit(case.model, worker=worker, on_progress=lambda _: go_on(stopped), **case.keywords())
    return snapshot_of(plan, case, worker, version)


def snapshot_of(plan: Plan, case: Case, worker: Worker, version: str) -> Snapshot:
    """Return the memory of ``plan`` as a lock records it; ``version`` is the version of the worker's llama.cpp."""
    devices, host = memory_of(plan.breakdown.rows)
    params = replace(plan.params, devices=plan.breakdown.devices) if plan.params.devices is None else plan.params
    # no path of this machine
    params = replace(params, lora=tuple(replace(lora, path=os.path.basename(lora.path)) for lora in params.lora))
    price = plan.estimate
    return Snapshot(
        fits=plan.fits,
        n_ctx=plan.breakdown.n_ctx,
        fitter=fitter.__version__,
        llama_cpp=version,
        settings=case.settings,
        model=_model(plan, worker),
        params=params,
        devices={
            use.name: LockedDevice(
                use.description, use.total, use.free, use.margin, devices.get(use.name, {}), use.shared
            )
            for use in plan.devices
        },
        host=LockedHost(plan.host.margin, plan.host.free, host, plan.host.shared, plan.host.later),
        estimate=None
        if price is None
        else LockedSpeed(four_digits(price.prompt_tokens_per_second), four_digits(price.generation_tokens_per_second)),
        cpu=plan.llama_cpp.cpu if plan.llama_cpp else "",
        pools={pool.name: LockedPool(pool.total, pool.free, pool.margin, pool.used) for pool in plan.pools},
    )


def _model(plan: Plan, worker: Worker) -> LockedModel:
    files = model_files(plan.model.path)
    read = [worker.header(file) for file in files]
    header_bytes = tuple(header.data_offset for header in read)
    return LockedModel(
        file=printable(files[0].name),
        name=plan.model.name,
        architecture=plan.model.architecture,
        bytes=plan.model.bytes,
        header=header_digest(files, header_bytes),
        header_bytes=header_bytes,
        file_bytes=tuple(file.stat().st_size for file in files),
        tensors=summarize_types(tensor for header in read for tensor in header.tensors),
    )


def memory_of(rows: Iterable[Row]) -> tuple[dict[str, dict[str, Memory]], dict[str, Memory]]:
    """Sum memory by buffer type, of each device and of the host, without empty buffer types."""
    devices: dict[str, dict[str, Memory]] = {}
    host: dict[str, Memory] = {}
    for row in sorted(rows, key=lambda row: row.buffer_type):
        if not row.used:
            continue
        into = host if row.is_host or row.device is None else devices.setdefault(row.device, {})
        same = into.get(row.buffer_type, Memory(0, 0, 0))
        into[row.buffer_type] = Memory(same.model + row.model, same.context + row.context, same.compute + row.compute)
    return devices, host
