"""One load of a model that has read its tokenizer, and is placed again and again: in a fork for each placement.

The tokenizer takes most of a dummy load, and where tensors go is not looked at before. A fork goes on from there as any
load would, so what it measures is what a load of the model's own file takes. Only where a fork is told when its parent
ends, and only on fitter's own virtual devices, which a fork can describe anew.
"""

from __future__ import annotations

import ctypes
import json
import os
import queue
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from fitter.llama.build import library as native
from fitter.llama.header.file_identity import identity
from fitter.llama.load.first_load import MAX_HELD_OVERRIDES, params_of
from fitter.llama.processes import memory_limit, wire
from fitter.llama.types import Breakdown, Params

CAN_FORK = sys.platform == "linux"
"""Whether a fork can be told to end with its parent."""

_PR_SET_PDEATHSIG = 1
_PATIENCE = 30
"""Seconds that a fork may take."""
_END = b"\n"
"""The end of an answer."""

Place = Callable[["Placer", Params], None]
"""Tells the load in a fork where its tensors go."""

Measure = Callable[["Placer", Any, Params, bool], Breakdown | None]
"""Measures in a fork the model that was loaded, with its reservation; ``None`` where it is placed otherwise."""


@dataclass(frozen=True)
class _Fork:
    """A process that measures a placement, and writes what it has found."""

    pid: int
    answer: int

    def collect(self) -> Breakdown | None:
        """What it has found; ``None`` if it could not load the model, or was ended before it had said all of it."""
        with open(self.answer, "rb") as file:
            data = file.read()
        with suppress(ChildProcessError):
            os.waitpid(self.pid, 0)
        return wire.decode(Breakdown, json.loads(data)) if data.endswith(_END) else None


class Placer:
    """A load of the model at ``path`` on the first ``count`` of the described virtual devices, all layers on them.

    ``measure`` is called in a fork, with the model as it was placed. Raises ``LibraryError`` and ``UsageError``.
    """

    def __init__(self, path: str, description: str, count: int, place: Place, measure: Measure):
        self.path = path
        self.description = description
        self.count = count
        self.identity = identity(path)
        self._place, self._measure = place, measure
        self._library = native.libraries()
        model_params, self.pointers, self.overrides = params_of(description, True, count)
        self._jobs: queue.SimpleQueue[tuple[Params, bool] | None] = queue.SimpleQueue()
        self._forks: queue.SimpleQueue[_Fork | None] = queue.SimpleQueue()
        self._child: tuple[Params, bool, int] | None = None
        self._hold = self._library.fitter.fitter_hold_new()
        # kept: it is called as long as the load waits
        self._called = self._library.ffi.callback("void(void)", self._wait)
        self._library.fitter.fitter_hold_call(self._hold, self._called)
        self._thread = threading.Thread(target=self._load, args=(model_params,), daemon=True)
        self._thread.start()

    def is_of(self, path: str, description: str, count: int) -> bool:
        """Whether it is a load of that file as it is now, on those devices."""
        return (self.path, self.description, self.count) == (path, description, count) and (
            self.identity == identity(path)
        )

    def measure(self, params: Params, reserve: bool) -> Breakdown | None:
        """What a placement takes; ``None`` where that has to be asked of another load."""
        self._jobs.put((params, reserve))
        fork = self._forks.get()
        if fork is None:
            # the load has ended, and says so to the next one too
            self._forks.put(None)
            return None
        return fork.collect()

    def close(self) -> None:
        """Let the load end, and wait for that: the devices are described anew next."""
        self._jobs.put(None)
        self._thread.join()

    def _load(self, model_params: Any) -> None:
        library = self._library
        library.fitter.fitter_hold_use(self._hold)
        model = library.llama.llama_model_load_from_file(os.fsencode(self.path), model_params)
        if self._child is not None:
            self._answer(model)
        self._forks.put(None)
        library.fitter.fitter_hold_use(library.ffi.NULL)
        library.fitter.fitter_hold_free(self._hold)
        if model:
            library.llama.llama_model_free(model)

    def _wait(self) -> None:
        """Fork for each placement; return where the load is to go on, in a fork or at the end."""
        while (job := self._jobs.get()) is not None:
            read, write = os.pipe()
            try:
                pid = os.fork()
            except OSError:
                os.close(read)
                os.close(write)
                return
            if pid == 0:
                self._child = (*job, write)
                self._begin_child(job[0])
                return
            os.close(write)
            self._forks.put(_Fork(pid, read))

    def _begin_child(self, params: Params) -> None:
        try:
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            # one that hangs is asked of another load
            signal.alarm(_PATIENCE)
            memory_limit.watch(lambda why: os._exit(1))
            self._library.fitter.fitter_log_clear()
            self._place(self, params)
        except BaseException:
            os._exit(1)

    def _answer(self, model: Any) -> None:
        """Measure the model in a fork, say what it takes, and end."""
        try:
            assert self._child is not None
            params, reserve, write = self._child
            if model:
                found = self._measure(self, model, params, reserve)
                view = memoryview(json.dumps(wire.encode(found)).encode() + _END if found else b"")
                while view:
                    view = view[os.write(write, view) :]
        finally:
            os._exit(0)


def split_of(params: Params) -> list[int] | None:
    """How many layers each device gets, where that is all that is said of it in whole numbers."""
    counts = [int(count) for count in params.tensor_split or (1.0,)]
    return counts if counts == list(params.tensor_split or (1.0,)) else None


def can_hold(params: Params) -> bool:
    """Whether a load that waits can be given the overrides of ``params``."""
    return 0 < len(params.tensor_buft_overrides) <= MAX_HELD_OVERRIDES


def place(overrides: Any, counts: Sequence[int], targets: Sequence[tuple[bytes, int]]) -> None:
    """Tell a load that waits how many layers each device gets, and where overrides put tensors."""
    for entry, (pattern, buffer_type) in zip(overrides, targets, strict=False):
        entry.pattern, entry.buft = pattern, buffer_type
    backend = native.open_backend()
    for i, count in enumerate(counts):
        # without a tensor split, llama.cpp splits the layers by free memory
        backend.fitter_virtual_say_free(i, count)
