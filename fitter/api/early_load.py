"""A load of the model's own file that begins before it is known how it will be placed, in a process of its own.

``begun`` begins it; planning suggests to it what may be the answer, and has it confirm what is (``Suggestions``). It
does without where there is none, and the plan is the same. ``llama_for`` has all the ways to ask llama.cpp about a
model. What it is worth, whole processes on two cores, sum of the 29 cases of ``tools/cases.py``: without it and what
``early`` starts they take 1.36 times as long, with processes started early that load nothing 1.16 times.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from fitter.api.shared_models import Drafts
from fitter.llama.client import Worker
from fitter.llama.types import Breakdown, Params, Skeleton, VirtualDevice
from fitter.llama.virtual import is_surely_spilled
from fitter.llama.worker import process
from fitter.llama.worker.remembered_loads import RememberingWorker
from fitter.machine import gpu_catalogue
from fitter.model.header import Model
from fitter.model.location import model_files
from fitter.parameters.table import of_a_struct
from fitter.planning.request.ask import Ask
from fitter.planning.search import best_plan as planning
from fitter.planning.speed import cost


class Loading(Protocol):
    """A process that has begun to load the model's own file, and measures it."""

    @property
    def loading(self) -> Params | None:
        """The placement with which it loads the model, or has loaded it, without having been asked."""

    @property
    def busy(self) -> bool:
        """Whether what was begun is not done yet."""

    def accepts(self, params: Params) -> bool:
        """Whether it has begun to load the model without a placement, and can still take that of ``params``."""

    def begin(self, params: Params) -> None:
        """Begin to measure, after what was begun before."""

    def finish(self) -> Breakdown:
        """What the measurement that was begun last has found."""


class Second:
    """A worker that loads the model's own file beside another one."""

    def __init__(self, worker: Worker, files: Sequence[Path]) -> None:
        self._worker = worker
        self._path = str(files[0])
        self._bytes = sum(file.stat().st_size for file in files)
        self._devices: tuple[str, ...] = ()
        self._n_layers = 0
        self._is_held = False
        self.loading: Params | None = None

    @property
    def busy(self) -> bool:
        return self._worker.busy

    @property
    def dummy_loads(self) -> int:
        return self._worker.dummy_loads

    def load(self, devices: Sequence[VirtualDevice]) -> None:
        """Begin to load the model before anything is known of it but its size.

        Where that is too much for ``devices``, with the placement left open; else with all layers on the only one.
        """
        if is_surely_spilled(self._bytes, devices):
            if self._worker.library is not None:
                # Only fitter's own devices can be told a placement later.
                return
            self._devices = tuple(device.name for device in devices)
            self._is_held = True
            self._worker.start_paused_load(self._path)
        elif len(devices) == 1 and self._bytes <= devices[0].free:
            self.loading = Params(devices=(devices[0].name,))
            self._worker.begin_loading(self._path, self.loading)

    def know(self, n_layer: int) -> None:
        """Be told how many layers the model has."""
        self._n_layers = n_layer + 1
        if self.loading:
            self.loading = replace(self.loading, n_gpu_layers=n_layer + 1)

    def accepts(self, params: Params) -> bool:
        return (
            self._is_held
            and sorted(params.devices or ()) == sorted(self._devices)
            and params.n_gpu_layers >= self._n_layers
            and bool(params.tensor_buft_overrides)
        )

    def begin(self, params: Params) -> None:
        if self._is_held and not self.accepts(params):
            # what waits cannot be had so, and would be in the way until its tokenizer is read
            self._worker.restart()
        self._is_held = False
        self._worker.begin_measure(self._path, params, reserve=True)

    def finish(self) -> Breakdown:
        return self._worker.finish_measure()


class Suggestions:
    """Measure in ``second``, while it is free, the placements that the search suggests and confirms."""

    def __init__(self, second: Loading) -> None:
        self._second = second
        self._begun: Params | None = None
        self._measured: dict[Params, Breakdown] = {}

    def suggest(self, params: Params, *, is_found: bool = False) -> None:
        """Begin to measure what may be the answer. What waits for its placement is only told what ``is_found``."""
        second = self._second
        if params in self._measured or params == self._begun or second.accepts(params) != is_found:
            return
        if not is_found and second.busy and (self._begun is not None or not self._is_loaded(params)):
            return
        self._begin(params)

    def confirm(self, params: Params) -> Breakdown | None:
        """What ``params`` take; ``None`` where the second process has nothing that would make it quicker."""
        if self._is_loaded(params) or self._second.accepts(params):
            # another context of a loaded model costs next to nothing, and neither does the rest of one that waits
            self._collect()
            if params not in self._measured:
                self._begin(params)
                self._collect()
        return self._measured.get(params)

    def _begin(self, params: Params) -> None:
        self._collect()
        self._second.begin(params)
        self._begun = params

    def _collect(self) -> None:
        begun, self._begun = self._begun, None
        if begun is not None:
            self._measured[begun] = self._second.finish()

    def _is_loaded(self, params: Params) -> bool:
        """Whether the second process has the model for ``params``, or is about to."""
        loaded = self._begun or self._second.loading
        return loaded is not None and placement_of(loaded) == placement_of(params)


class Suggested:
    """What planning suggests, measured meanwhile by a second process of the ``worker`` that is asked."""

    def __init__(self, worker: RememberingWorker, path: str) -> None:
        self._worker = worker
        self._path = path

    def suggest(self, params: Params, *, is_found: bool = False) -> None:
        self._worker.suggest(self._path, params, is_found=is_found)

    def confirm(self, params: Params) -> Breakdown | None:
        """Nothing: the worker itself knows what it has begun."""
        return None


def placement_of(params: Params) -> Params:
    """What of ``params`` decides how the model is loaded; the rest is the context's."""
    return Params.of({str(each.key): params.of_parameter(each) for each in of_a_struct("model")})


def parse_meanwhile() -> None:
    """Have the data files parsed while llama.cpp is waited for: once the model is known, there is no time for them."""
    process.meanwhile(gpu_catalogue.gpus)
    process.meanwhile(cost.default)
    process.meanwhile(_compared)


def _compared() -> None:
    from fitter.llama.build import compared

    compared.data()


@contextmanager
def begun(
    ask: Ask, model: str, *, first: Worker, is_given: bool, on_log: Callable[[str], None] | None
) -> Iterator[Second | None]:
    """Begin to load ``model`` in a second process, where ``ask`` may have one; ``is_given``: the first is the caller's.

    Raises ``ModelError`` where there is no such file.
    """
    # Each process that asks a real device takes some of its memory, so those are for one process only. An
    # rpc-server even talks to one process only, and lets others wait.
    if is_given or not ask.is_described or ask.rpc:
        yield None
        return
    with Worker(
        ask.virtual, library=first.library, timeout=ask.timeout, on_log=on_log, llama_cpp=ask.llama_cpp
    ) as worker:
        second = Second(worker, model_files(model))
        if not ask.is_placed:
            second.load(ask.virtual)
        yield second
        worker.dismiss()


def llama_for(
    worker: Worker, second: Second | None, model: Model, skeleton: bool, drafts: Drafts | None
) -> planning.LoadCalls:
    """The ways to ask llama.cpp about ``model``."""
    path, loads = str(model.path), worker.dummy_loads
    copy = Skeleton(tuple(map(str, model.files)))
    if second:
        second.know(model.n_layer)

    def shared_loads() -> int:
        return drafts.loads if drafts else 0

    def until(deadline: float | None) -> None:
        worker.deadline = deadline

    return planning.LoadCalls(
        user_file=planning.DummyLoads(
            lambda params: worker.measure(path, params, reserve=True), lambda params: worker.layout(path, params)
        ),
        dummy_loads=lambda: worker.dummy_loads - loads + (second.dummy_loads if second else 0) - shared_loads(),
        skeleton=planning.DummyLoads(
            lambda params: worker.measure(copy, params), lambda params: worker.layout(copy, params)
        )
        if skeleton
        else None,
        concurrent=_concurrent(worker, second, path),
        shared_loads=shared_loads,
        until=until,
    )


def _concurrent(worker: Worker, second: Second | None, path: str) -> Suggestions | Suggested | None:
    if second:
        return Suggestions(second)
    return Suggested(worker, path) if isinstance(worker, RememberingWorker) else None
