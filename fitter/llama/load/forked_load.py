"""One load that has read its tokenizer, and places its tensors again and again, in a fork for each placement.

The tokenizer takes most of a dummy load, and comes before the placement. A fork continues like any load, so it measures
the memory of a load of the model's own file. Only on systems that tell a fork when its parent ends, and only on
fitter's virtual devices, which a fork can describe anew.
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
"""Whether the system ends a fork with its parent."""

_PR_SET_PDEATHSIG = 1
_PATIENCE = 30
"""Seconds for a fork."""
_END = b"\n"
"""The end of an answer."""

Place = Callable[["Placer", Params], None]
"""Places the tensors of the load in a fork."""

Measure = Callable[["Placer", Any, Params, bool], Breakdown | None]
"""Measures the loaded model in a fork, with its reservation; ``None`` if it is placed otherwise."""


@dataclass(frozen=True)
class _Fork:
    """A process that measures a placement, and writes the result."""

    pid: int
    answer: int

    def collect(self) -> Breakdown | None:
        """Return its result; ``None`` if it could not load the model, or ended too early."""
        with open(self.answer, "rb") as file:
            data = file.read()
        with suppress(ChildProcessError):
            os.waitpid(self.pid, 0)
        return wire.decode(Breakdown, json.loads(data)) if data.endswith(_END) else None


class Placer:
    """A load of the model at ``path`` on the first ``count`` virtual devices, with all layers on them.

    ``measure`` is called in a fork, with the placed model. Raises ``LibraryError`` and ``UsageError``.
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
        # keep a reference: it is called as long as the load waits
        self._called = self._library.ffi.callback("void(void)", self._wait)
        self._library.fitter.fitter_hold_call(self._hold, self._called)
        self._thread = threading.Thread(target=self._load, args=(model_params,), daemon=True)
        self._thread.start()

    def is_of(self, path: str, description: str, count: int) -> bool:
        """Return whether it loads this file, unchanged, on those devices."""
        return (self.path, self.description, self.count) == (path, description, count) and (
            self.identity == identity(path)
        )

    def measure(self, params: Params, reserve: bool) -> Breakdown | None:
        """Measure a placement in a fork; ``None`` if another load must measure it."""
        self._jobs.put((params, reserve))
        fork = self._forks.get()
        if fork is None:
            # the load has ended: tell the next caller too
            self._forks.put(None)
            return None
        return fork.collect()

    def close(self) -> None:
        """End the load, and wait for its end: the devices will be described anew."""
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
        """Fork for each placement; return where the load continues, in a fork or at the end."""
        if sys.platform == "win32":
            # CAN_FORK is false there; types are checked for it nevertheless
            return
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
        if sys.platform == "win32":
            return
        try:
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            # if it hangs, another load answers
            signal.alarm(_PATIENCE)
            memory_limit.watch(lambda why: os._exit(1))
            self._library.fitter.fitter_log_clear()
            self._place(self, params)
        except BaseException:
            os._exit(1)

    def _answer(self, model: Any) -> None:
        """Measure the model in a fork, write the result, and end."""
        try:
            assert self._child is not None
            params, reserve, write = self._child
            if model:
                breakdown = self._measure(self, model, params, reserve)
                view = memoryview(json.dumps(wire.encode(breakdown)).encode() + _END if breakdown else b"")
                while view:
                    view = view[os.write(write, view) :]
        finally:
            os._exit(0)


def split_of(params: Params) -> list[int] | None:
    """Return the layers of each device, if the parameters say them in whole numbers and nothing else."""
    counts = [int(count) for count in params.tensor_split or (1.0,)]
    return counts if counts == list(params.tensor_split or (1.0,)) else None


def can_hold(params: Params) -> bool:
    """Return whether a waiting load accepts the overrides of ``params``."""
    return 0 < len(params.tensor_buft_overrides) <= MAX_HELD_OVERRIDES


def place(overrides: Any, counts: Sequence[int], targets: Sequence[tuple[bytes, int]]) -> None:
    """Tell a waiting load the layers of each device and the targets of overrides."""
    for entry, (pattern, buffer_type) in zip(overrides, targets, strict=False):
        entry.pattern, entry.buft = pattern, buffer_type
    backend = native.open_backend()
    for i, count in enumerate(counts):
        # without a tensor split, llama.cpp splits the layers by free memory
        backend.fitter_virtual_say_free(i, count)
