"""A second process that loads the user's model file while the search still looks for the placement.

``second_worker`` starts the process. The search suggests likely plans to it and asks it to confirm the answer
(``Suggestions``); without the process, the plan is the same and only later. ``llama_for`` makes all calls by which a
search asks llama.cpp about a model.

Benefit, as the sum of the 29 cases of ``tools/cases.py`` (whole processes on two cores): without this process and early
starts they take 1.36 times as long, and with processes that start early but load nothing 1.16 times.
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


class EarlyLoad(Protocol):
    """A process that already loads the user's model file, and measures it."""

    @property
    def loading(self) -> Params | None:
        """The placement of the load that the process started by itself; ``None`` if it started none."""

    @property
    def busy(self) -> bool:
        """Whether the process still works on an earlier request."""

    def accepts(self, params: Params) -> bool:
        """Return whether the process loads without a placement so far, and can continue with ``params``."""

    def begin(self, params: Params) -> None:
        """Start a measurement of ``params``; earlier requests come first."""

    def finish(self) -> Breakdown:
        """Wait for the last measurement, and return it."""


class SecondWorker:
    """A worker that loads the user's model file beside the first worker."""

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
        """Start to load the model by its size alone, before its header is read.

        A model that is too large for ``devices`` starts without a placement, any other with all layers on the only
        device.
        """
        if is_surely_spilled(self._bytes, devices):
            if self._worker.library is not None:
                # Only fitter's own devices take a placement later.
                return
            self._devices = tuple(device.name for device in devices)
            self._is_held = True
            self._worker.start_paused_load(self._path)
        elif len(devices) == 1 and self._bytes <= devices[0].free:
            self.loading = Params(devices=(devices[0].name,))
            self._worker.begin_loading(self._path, self.loading)

    def set_layers(self, n_layer: int) -> None:
        """Set the number of the model's layers, once its header is read."""
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
            # The paused load cannot take this placement, and would block the process until its tokenizer is read.
            self._worker.restart()
        self._is_held = False
        self._worker.begin_measure(self._path, params, reserve=True)

    def finish(self) -> Breakdown:
        return self._worker.finish_measure()


class Suggestions:
    """Measure suggested and confirmed placements in the process ``second`` while it is free."""

    def __init__(self, second: EarlyLoad) -> None:
        self._second = second
        self._started: Params | None = None
        self._measured: dict[Params, Breakdown] = {}

    def suggest(self, params: Params, *, is_decided: bool = False) -> None:
        """Start to measure likely parameters; a paused load takes only parameters that are decided."""
        second = self._second
        if params in self._measured or params == self._started or second.accepts(params) != is_decided:
            return
        if not is_decided and second.busy and (self._started is not None or not self._is_loaded(params)):
            return
        self._begin(params)

    def confirm(self, params: Params) -> Breakdown | None:
        """Measure ``params``; ``None`` if the second process would not be quicker than the first."""
        if self._is_loaded(params) or self._second.accepts(params):
            # Another context of a loaded model costs next to nothing, and so does the rest of a paused load.
            self._collect()
            if params not in self._measured:
                self._begin(params)
                self._collect()
        return self._measured.get(params)

    def _begin(self, params: Params) -> None:
        self._collect()
        self._second.begin(params)
        self._started = params

    def _collect(self) -> None:
        started, self._started = self._started, None
        if started is not None:
            self._measured[started] = self._second.finish()

    def _is_loaded(self, params: Params) -> bool:
        """Return whether the second process has loaded the model as ``params`` place it, or does so now."""
        loaded = self._started or self._second.loading
        return loaded is not None and placement_of(loaded) == placement_of(params)


class WorkerSuggestions:
    """Suggestions to a ``worker`` that measures them in a second process of its own."""

    def __init__(self, worker: RememberingWorker, path: str) -> None:
        self._worker = worker
        self._path = path

    def suggest(self, params: Params, *, is_decided: bool = False) -> None:
        self._worker.suggest(self._path, params, is_decided=is_decided)

    def confirm(self, params: Params) -> Breakdown | None:
        """Return ``None``: the worker itself answers from its suggested measurements."""
        return None


def placement_of(params: Params) -> Params:
    """Return ``params`` with only the fields that place the model; a context's fields have their defaults."""
    return Params.of({str(each.key): params.of_parameter(each) for each in of_a_struct("model")})


def parse_meanwhile() -> None:
    """Parse data files while the process waits for llama.cpp: later they would cost time."""
    process.meanwhile(gpu_catalogue.gpus)
    process.meanwhile(cost.default)
    process.meanwhile(_parse_compared)


def _parse_compared() -> None:
    from fitter.llama.build import compared

    compared.data()


@contextmanager
def second_worker(
    ask: Ask, model: str, *, first: Worker, is_given: bool, on_log: Callable[[str], None] | None
) -> Iterator[SecondWorker | None]:
    """Start to load ``model`` in a second process; ``None`` if the devices of ``ask`` allow one process only.

    Args:
        ask: The parameters of the call.
        model: Path or address.
        first: The worker of the call.
        is_given: Whether the first worker is the caller's, which needs no second process.
        on_log: Called with every line of llama.cpp's log.

    Raises:
        ModelError: There is no such file.
    """
    # A process that uses a real device takes some of its memory, so only one does. An rpc-server even serves one
    # process at a time.
    if is_given or not ask.is_described or ask.rpc:
        yield None
        return
    with Worker(
        ask.virtual, library=first.library, timeout=ask.timeout, on_log=on_log, llama_cpp=ask.llama_cpp
    ) as worker:
        second = SecondWorker(worker, model_files(model))
        if not ask.is_placed:
            second.load(ask.virtual)
        yield second
        worker.dismiss()


def llama_for(
    worker: Worker, second: SecondWorker | None, model: Model, skeleton: bool, drafts: Drafts | None
) -> planning.LoadCalls:
    """Return the calls by which a search asks llama.cpp about ``model``."""
    path, loads = str(model.path), worker.dummy_loads
    copy = Skeleton(tuple(map(str, model.files)))
    if second:
        second.set_layers(model.n_layer)

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
        concurrent=_suggestions(worker, second, path),
        shared_loads=shared_loads,
        until=until,
    )


def _suggestions(worker: Worker, second: SecondWorker | None, path: str) -> Suggestions | WorkerSuggestions | None:
    if second:
        return Suggestions(second)
    return WorkerSuggestions(worker, path) if isinstance(worker, RememberingWorker) else None
