"""Measures cases: with what was locked, where that may still hold, and by a fit. In workers that live over many cases.

Bytes.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import fitter
from fitter.errors import FitterError, LlamaCppError, UsageError
from fitter.llama.client import DEFAULT_TIMEOUT, Worker
from fitter.llama.process import processors
from fitter.llama.types import Row, Skeleton, VirtualDevice
from fitter.machine.gpu import parse_gpus
from fitter.model.source import model_files
from fitter.regression import headers
from fitter.regression.cases import Case
from fitter.regression.lockfile import LockedDevice, LockedHost, LockedModel, LockedSpeed, Memory, Snapshot
from fitter.text import printable

if TYPE_CHECKING:
    from fitter.planning.plan import Plan

_MOST_HEADER = 2**30
"""Bytes that no header has: a lock that says more is damaged."""


@dataclass(frozen=True)
class Measured:
    """What a case takes; ``error`` where it could not be measured, and ``snapshot`` is ``None`` then."""

    case: Case
    snapshot: Snapshot | None
    error: FitterError | None = None


OnDone = Callable[[int, int, str], None]
"""Told how many cases are done, of how many, and the name of the last one (at first, with 0, an empty one)."""


def measure_cases(
    cases: Sequence[Case],
    locked: Mapping[str, Snapshot],
    *,
    jobs: int | None = None,
    timeout: float = DEFAULT_TIMEOUT,
    on_done: OnDone | None = None,
) -> tuple[Measured, ...]:
    """What every case takes, in the order of ``cases``, by as many workers as ``jobs`` says (one per processor).

    A case that asks for what is ``locked`` of it is measured with the locked parameters, and fitted only where that
    differs. ``on_done`` is called, one call at a time, whenever one is done. What goes wrong with one case is its
    ``error``. Raises ``LibraryError`` where there is no libllama to ask.
    """
    say: OnDone = on_done or (lambda done, total, name: None)
    say(0, len(cases), "")
    # One after another of the same model: a worker makes another context of what it has loaded.
    left = deque(sorted(cases, key=lambda case: (str(case.model), case.gpus, case.name)))
    count = max(1, min(jobs or processors(), len(left)))
    results: dict[str, Measured] = {}
    lock, stopped = threading.Lock(), threading.Event()

    def run(worker: Worker) -> None:
        version = worker.llama_cpp()
        while True:
            try:
                case = left.popleft()
            except IndexError:
                return
            measured = _measure(case, locked.get(case.name), worker, version, stopped)
            with lock:
                results[case.name] = measured
                say(len(results), len(cases), case.name)

    with ExitStack() as stack:
        # Started here: a process that was begun early is taken by one thread at a time.
        workers = [stack.enter_context(Worker(timeout=timeout)) for _ in range(count)]
        for worker in workers:
            worker.start()
        pool = stack.enter_context(ThreadPoolExecutor(count))
        try:
            for done in [pool.submit(run, worker) for worker in workers]:
                done.result()
        except BaseException:
            # The pool waits for its threads: they are to have nothing left to do, and nobody to wait for.
            stopped.set()
            for worker in workers:
                worker.dismiss()
            raise
    return tuple(results[case.name] for case in cases)


def measure_case(case: Case, locked: Snapshot | None, worker: Worker) -> Snapshot:
    """What ``case`` takes now: as locked where llama.cpp says so of the locked parameters, and otherwise by a fit.

    Raises what ``fitter.fit`` raises.
    """
    return _snapshot(case, locked, worker, worker.llama_cpp(), threading.Event())


def _measure(case: Case, locked: Snapshot | None, worker: Worker, version: str, stopped: threading.Event) -> Measured:
    try:
        return Measured(case, _snapshot(case, locked, worker, version, stopped))
    except FitterError as error:
        return Measured(case, None, error)


def _snapshot(case: Case, locked: Snapshot | None, worker: Worker, version: str, stopped: threading.Event) -> Snapshot:
    _go_on(stopped)
    if locked is not None and _may_hold(case, locked, version) and (same := _again(case, locked, worker)):
        return same
    return _fitted(case, worker, version, stopped)


class _StoppedError(Exception):
    """Nobody waits for the case any more."""


def _go_on(stopped: threading.Event) -> None:
    if stopped.is_set():
        raise _StoppedError


# --- measured as it was locked


def _may_hold(case: Case, locked: Snapshot, version: str) -> bool:
    """Whether a fit would be asked exactly what it was asked for the lock; what it then found, it would find again."""
    model = locked.model
    if (locked.fitter, locked.llama_cpp) != (fitter.__version__, version) or not locked.fits:
        return False
    files = model_files(case.model)
    if dict(locked.settings) != dict(case.settings) or printable(files[0].name) != model.file:
        return False
    if locked.host.shared or any(device.shared for device in locked.devices.values()):
        # Of what else is there, nothing is known here.
        return False
    sizes = tuple(file.stat().st_size for file in files)
    is_sound = len(model.header_bytes) == len(files) and all(0 < n <= _MOST_HEADER for n in model.header_bytes)
    # The headers are as long as they were, or they are others: a header says where it ends.
    return sizes == model.file_bytes and is_sound and headers.digest(files, model.header_bytes) == model.header


def _again(case: Case, locked: Snapshot, worker: Worker) -> Snapshot | None:
    """The snapshot, where llama.cpp says the same of the locked parameters; one dummy load without the tokenizer."""
    virtual = parse_gpus(case.gpus)
    if not _same_devices(virtual, locked) or case.settings.get("profile"):
        # A library's cards are asked anew each time.
        return None
    worker.configure(virtual)
    try:
        found = worker.measure(Skeleton(tuple(map(str, model_files(case.model)))), locked.params)
    except (LlamaCppError, UsageError):
        # The fit will say why.
        return None
    uses = {name: device.memory for name, device in locked.devices.items() if device.memory}
    is_same = found.n_ctx == locked.n_ctx and _memory(found.rows) == (uses, locked.host.memory)
    return locked if is_same else None


def _same_devices(virtual: Sequence[VirtualDevice], locked: Snapshot) -> bool:
    known = {device.name: (device.description, device.total, device.free) for device in virtual}
    return all(
        known.get(name) == (device.description, device.total, device.free) for name, device in locked.devices.items()
    )


# --- fitted


def _fitted(case: Case, worker: Worker, version: str, stopped: threading.Event) -> Snapshot:
    from fitter import api

    _go_on(stopped)
    plan = api.fit(case.model, worker=worker, on_progress=lambda _: _go_on(stopped), **case.keywords())
    return snapshot_of(plan, case, worker, version)


def snapshot_of(plan: Plan, case: Case, worker: Worker, version: str) -> Snapshot:
    """What ``plan`` takes, as a lock has it; ``version`` is what ``worker`` says of its llama.cpp."""
    devices, host = _memory(plan.breakdown.rows)
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
        host=LockedHost(plan.host.margin, plan.host.free, host, plan.host.shared),
        estimate=None
        if price is None
        else LockedSpeed(_digits(price.prompt_tokens_per_second), _digits(price.generation_tokens_per_second)),
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
        header=headers.digest(files, header_bytes),
        header_bytes=header_bytes,
        file_bytes=tuple(file.stat().st_size for file in files),
        tensors=headers.summarize(tensor for header in read for tensor in header.tensors),
    )


def _memory(rows: Iterable[Row]) -> tuple[dict[str, dict[str, Memory]], dict[str, Memory]]:
    """Memory by buffer type: of each device, and of the host. Buffer types of which nothing is taken are left out."""
    devices: dict[str, dict[str, Memory]] = {}
    host: dict[str, Memory] = {}
    for row in sorted(rows, key=lambda row: row.buffer_type):
        if not row.used:
            continue
        into = host if row.is_host or row.device is None else devices.setdefault(row.device, {})
        same = into.get(row.buffer_type, Memory(0, 0, 0))
        into[row.buffer_type] = Memory(same.model + row.model, same.context + row.context, same.compute + row.compute)
    return devices, host


def _digits(figure: float) -> float:
    """``figure`` to four digits, which is more than an estimate has."""
    return float(f"{figure:.4g}")
