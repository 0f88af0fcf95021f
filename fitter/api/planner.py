"""``fitter.Planner``: answer many questions about one model, and remember every measurement."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from fitter import api
from fitter.api import report_plan
from fitter.api.checked_call import checked_call, naming_addresses
from fitter.errors import CancelledError, UsageError
from fitter.llama.client import DEFAULT_TIMEOUT
from fitter.llama.types import Breakdown
from fitter.llama.worker.remembered_loads import RememberingWorker
from fitter.model.files import header_cache
from fitter.model.header import open_model
from fitter.model.location import called
from fitter.parameters.table import AnyPath, Estimating, Fitting, Measuring, taken_by
from fitter.planning.plan.layer_map import LayerMap
from fitter.planning.plan.plan import Plan
from fitter.planning.pricing.pricing import Price
from fitter.planning.request.request import Progress
from fitter.planning.tables.file_rows import Repository
from fitter.text import printable

if TYPE_CHECKING:
    from typing_extensions import Unpack

_T = TypeVar("_T")


class Planner:
    """Answers ``fit``, ``measure`` and ``estimate`` for one model, and remembers what it measured.

    Answers equal those of the functions, but for the numbers of dummy loads and seconds: another context, KV type or
    margin takes some tens of milliseconds on virtual devices.

    The processes of llama.cpp start with the first question, and again after a crash. ``release`` ends them until the
    next question; ``close``, or the end of ``with``, ends them for good. A changed model file is read anew. Threads may
    ask at the same time: their questions wait for each other. A fork of the process gets a planner without memory.

    Args:
        model: Path or address of a GGUF file.
        on_log: Called with every line of llama.cpp's log.
        defaults: Keywords of ``fit``, for every question that does not set them.

    Raises:
        UsageError: A keyword is unknown, or its value makes no sense.
    """

    def __init__(
        self, model: AnyPath, *, on_log: Callable[[str], None] | None = None, **defaults: Unpack[Fitting]
    ) -> None:
        self._model, self._defaults = _check_defaults(model, **defaults)
        self._own = {"on_log": on_log} if on_log else {}
        self._begin()
        self.asked = 0
        """Questions asked until now."""
        self._cancelled = 0
        self._is_closed = False

    def _begin(self) -> None:
        """Create the worker and the locks of this process."""
        self._worker = RememberingWorker(
            timeout=self._defaults.get("timeout", DEFAULT_TIMEOUT),
            on_log=self._own.get("on_log"),
            llama_cpp=self._defaults.get("llama_cpp"),
        )
        self._asking = threading.Lock()
        self._counting = threading.Lock()
        self._asker: int | None = None
        self._process = os.getpid()

    def _begin_in_fork(self) -> None:
        """Create a new worker after a fork: the old one answers the parent, and its threads are gone."""
        if self._process != os.getpid():
            self._begin()

    def __repr__(self) -> str:
        defaults = "".join(f", {name}={value!r}" for name, value in self._defaults.items())
        return f"<Planner: {printable(called(self._model))}{printable(defaults)}>"

    @property
    def model(self) -> str:
        """The model's path or address, as given."""
        return self._model

    @property
    def dummy_loads(self) -> int:
        """Dummy loads made until now."""
        return self._worker.dummy_loads

    def turn_to(self, model: AnyPath) -> None:
        """Answer about another ``model`` from now on, with the same processes and what they have measured.

        Raises ``UsageError`` if it has no name.
        """
        self._begin_in_fork()
        name, _ = _check_defaults(model)
        with self._alone():
            self._model = name

    def fit(
        self,
        *,
        on_progress: Callable[[Progress], None] | None = None,
        alternatives: bool = False,
        **parameters: Unpack[Fitting],
    ) -> Plan:
        """Answer as ``fitter.fit``. Raises what that raises, and ``CancelledError``."""
        own = {"on_progress": on_progress, "alternatives": alternatives}
        return self._ask(api.fit, Fitting, parameters, own)

    def measure(self, **parameters: Unpack[Measuring]) -> Breakdown:
        """Answer as ``fitter.measure``. Raises what that raises, and ``CancelledError``."""
        return self._ask(api.measure, Measuring, parameters, {})

    def estimate(self, *, live_tokens: int | Sequence[int] | None = None, **parameters: Unpack[Estimating]) -> Price:
        """Answer as ``fitter.estimate``. Raises what that raises, and ``CancelledError``."""
        return self._ask(api.estimate, Estimating, parameters, {"live_tokens": live_tokens})

    def repository(
        self, *, on_progress: Callable[[Progress], None] | None = None, **parameters: Unpack[Fitting]
    ) -> Repository:
        """Answer as ``fitter.repository``, if the model is a repository or a directory. Raises what that raises."""
        from fitter.api import plan_repository

        return self._ask(plan_repository.repository, Fitting, parameters, {"on_progress": on_progress})

    def layer_map(self, plan: Plan) -> LayerMap | None:
        """Map the layers of a ``plan`` of this planner to devices, by one dummy load at most.

        Returns:
            The map; ``None`` where several devices share a tensor.

        Raises:
            FitterError: As ``fit`` raises it; ``CancelledError``.
        """
        with self._turn(), header_cache.reading(), naming_addresses():
            return report_plan.layer_map(plan, open_model(self._model, self._worker.header), self._worker)

    def cancel(self, *, at_once: bool = False) -> None:
        """End the current question before its next dummy load, and all waiting ones; each raises ``CancelledError``.

        The planner keeps what was measured, and answers the next question.

        Args:
            at_once: Kill the processes of llama.cpp in the middle of a load; the next question starts them again.
        """
        self._begin_in_fork()
        with self._counting:
            self._cancelled = self.asked
        if at_once:
            self._worker.interrupt()

    def release(self) -> None:
        """End the processes of llama.cpp after the current question, and keep the measurements."""
        self._begin_in_fork()
        with self._alone():
            self._worker.release()

    def close(self) -> None:
        """Cancel all questions, and end the processes of llama.cpp for good."""
        self._begin_in_fork()
        self._is_closed = True
        self.cancel()
        if self._asker != threading.get_ident():
            with self._alone():
                self._worker.close()

    def __enter__(self) -> Planner:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(
        self, call: Callable[..., _T], keywords: Any, given: Mapping[str, Any], callbacks: Mapping[str, Any]
    ) -> _T:
        names = {each.name for each in taken_by(keywords)}
        defaults = {name: value for name, value in self._defaults.items() if name in names}
        for name in ("worker", "timeout", "on_log"):
            if given.get(name) not in (None, defaults.get(name, self._own.get(name))):
                raise UsageError(f"a planner has its own {name}: leave it out of a question{_INSTEAD[name]}")
        self._begin_in_fork()
        with self._turn():
            return call(
                self._model, worker=self._worker, **{**defaults, **self._own, **callbacks, **_without_worker(given)}
            )

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Wait for the other questions, and let ``cancel`` end this one."""
        with self._counting:
            self.asked += 1
            number = self.asked

        def check() -> None:
            if self._is_closed:
                raise CancelledError("the planner is closed: make another one")
            if number <= self._cancelled:
                raise CancelledError("the question was cancelled: ask it again")

        with self._alone():
            check()
            self._worker.check = check
            try:
                yield
            finally:
                self._worker.check = None
                if self._is_closed:
                    # on_progress or on_log has closed it
                    self._worker.close()
                elif self._worker.rpc:
                    # an rpc-server talks to one process only
                    self._worker.release()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Wait for the other questions. Raises ``UsageError`` inside a callback of a question."""
        if self._asker == threading.get_ident():
            raise UsageError(
                "a planner answers one question at a time: ask it after on_progress and on_log have returned"
            )
        with self._asking:
            self._asker = threading.get_ident()
            try:
                yield
            finally:
                self._asker = None


_INSTEAD = {"worker": "", "timeout": ", and give it to fitter.Planner", "on_log": ", and give it to fitter.Planner"}
"""Where to give a keyword that belongs to the planner."""


def _without_worker(given: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in given.items() if name != "worker"}


@checked_call(Fitting, called="Planner")
def _check_defaults(model: AnyPath, **defaults: Unpack[Fitting]) -> tuple[str, dict[str, Any]]:
    """Check the model and each keyword."""
    name = os.fsdecode(model)
    if not name:
        raise UsageError("the model has no name: give a path or an address")
    return name, dict(defaults)
