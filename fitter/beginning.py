"""A load of the model's own file that begins before it is known how it will be placed, in a process of its own.

``suggest`` begins it, and ``Suggested.begin`` and ``finish`` confirm with it what planning has found. Planning does
without it where there is none, and the plan is the same. ``llama_for`` has all the ways to ask llama.cpp about a model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from fitter.llama import process
from fitter.llama.client import Worker
from fitter.llama.types import Breakdown, Params, Skeleton, VirtualDevice
from fitter.llama.virtual import is_surely_spilled
from fitter.machine import catalogue
from fitter.model.header import Model
from fitter.model.source import model_files
from fitter.planning import cost
from fitter.planning import fit as planning
from fitter.planning.ask import Ask
from fitter.sharing import Drafts


class Suggested:
    """A worker that measures the model's own file beside another one."""

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
            self._devices = tuple(device.name for device in devices)
            self._is_held = True
            self._worker.begin_holding(self._path)
        elif len(devices) == 1 and self._bytes <= devices[0].free:
            self.loading = Params(devices=(devices[0].name,))
            self._worker.begin_loading(self._path, self.loading)

    def know(self, n_layer: int) -> None:
        """Be told how many layers the model has."""
        self._n_layers = n_layer + 1
        if self.loading:
            self.loading = replace(self.loading, n_gpu_layers=n_layer + 1)

    def awaits(self, params: Params) -> bool:
        return (
            self._is_held
            and sorted(params.devices or ()) == sorted(self._devices)
            and params.n_gpu_layers >= self._n_layers
            and bool(params.tensor_buft_overrides)
        )

    def begin(self, params: Params) -> None:
        self._is_held = False
        self._worker.begin_measure(self._path, params, reserve=True)

    def finish(self) -> Breakdown:
        return self._worker.finish_measure()


def parse_meanwhile() -> None:
    """Have the data files parsed while llama.cpp is waited for: once the model is known, there is no time for them."""
    process.meanwhile(catalogue.gpus)
    process.meanwhile(cost.default)


@contextmanager
def suggest(
    ask: Ask, model: str, *, is_given: bool, on_log: Callable[[str], None] | None
) -> Iterator[Suggested | None]:
    """Begin to load ``model`` in a second process, where ``ask`` may have one; ``is_given``: the first is the caller's.

    Raises ``ModelError`` where there is no such file.
    """
    # Each process that asks a real device takes some of its memory, so those are for one process only. An
    # rpc-server even talks to one process only, and lets others wait.
    if is_given or ask.profile is not None or not ask.is_described or ask.rpc:
        yield None
        return
    with Worker(ask.virtual, timeout=ask.timeout, on_log=on_log) as second:
        suggested = Suggested(second, model_files(model))
        if not ask.is_placed:
            suggested.load(ask.virtual)
        yield suggested
        second.dismiss()


def llama_for(
    worker: Worker, suggested: Suggested | None, model: Model, skeleton: bool, drafts: Drafts | None
) -> planning.Llama:
    """The ways to ask llama.cpp about ``model``."""
    path, loads = str(model.path), worker.dummy_loads
    copy = Skeleton(tuple(map(str, model.files)))
    if suggested:
        suggested.know(model.n_layer)

    def shared_loads() -> int:
        return drafts.loads if drafts else 0

    def until(deadline: float | None) -> None:
        worker.deadline = deadline

    return planning.Llama(
        own=planning.Loads(
            lambda params: worker.measure(path, params, reserve=True), lambda params: worker.layout(path, params)
        ),
        dummy_loads=lambda: worker.dummy_loads - loads + (suggested.dummy_loads if suggested else 0) - shared_loads(),
        skeleton=planning.Loads(lambda params: worker.measure(copy, params), lambda params: worker.layout(copy, params))
        if skeleton
        else None,
        beside=suggested,
        shared_loads=shared_loads,
        until=until,
    )
