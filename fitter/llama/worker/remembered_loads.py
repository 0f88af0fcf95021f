"""A worker that asks nothing twice, for many questions about one model. Bytes."""

from __future__ import annotations

import contextlib
import os
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

from fitter.errors import FitterError, LlamaCppError, TimeLimitError
from fitter.llama.client import DEFAULT_TIMEOUT, Worker
from fitter.llama.header.file_identity import identity
from fitter.llama.types import Breakdown, DeviceInfo, Params, Skeleton, VirtualDevice
from fitter.parameters.table import AnyPath

if TYPE_CHECKING:
    from fitter.llama.build.cuda_library import CudaLibrary

_T = TypeVar("_T")

_KEPT = frozenset(
    {
        "build",
        "caches",
        "devices",
        "header",
        "host",
        "layout",
        "match",
        "measure",
        "model_info",
        "projector",
        "tokenizer",
    }
)
"""Commands whose answer stays valid as long as files and devices do not change."""

_OWN = "own"
"""Key of a measurement of the model's own file."""

MOST_TOKENIZERS = 1024
"""Most keys that are kept; the oldest goes first."""
tokenizers: OrderedDict[str, None] = OrderedDict()
"""Keys of tokenizers that llama.cpp has read from a file which took the memory of its skeleton."""

_MOST_SKELETONS = 8
_MOST_KEPT = 4096
_MOST_LARGE = 32
_LARGE = frozenset({"header", "layout", "match"})
"""Commands whose answers name every tensor of a model."""


class RememberingWorker(Worker):
    """A ``Worker`` that remembers its answers, and measures a model's own file in a second process of virtual devices.

    Answers about a file are dropped when it changes (its time, size or number), answers about real devices when their
    free memory changes. ``check`` is called before every question. With ``is_alone`` one process does everything.

    Reading a tokenizer takes most of a load. If llama.cpp has read an equal one before, from any file, and that file
    took the memory of its skeleton, the model's skeleton is measured in place of its file: it has all other keys and
    all tensors.
    """

    def __init__(
        self,
        *,
        timeout: float = DEFAULT_TIMEOUT,
        on_log: Callable[[str], None] | None = None,
        llama_cpp: AnyPath | None = None,
        is_alone: bool = False,
    ) -> None:
        super().__init__(timeout=timeout, on_log=on_log, llama_cpp=llama_cpp)
        self._is_alone = is_alone
        self._virtual: tuple[VirtualDevice, ...] = ()
        self._answers: OrderedDict[tuple[object, ...], Any] = OrderedDict()
        self._files: dict[str, tuple[int, ...]] = {}
        self._free: tuple[DeviceInfo, ...] = ()
        self._second: Worker | None = None
        self._suggested: tuple[str, Params] | None = None
        self._skeletons: dict[str, Skeleton] = {}

    @property
    def dummy_loads(self) -> int:
        return super().dummy_loads + (self._second.dummy_loads if self._second else 0)

    def configure(
        self,
        virtual_devices: Sequence[VirtualDevice],
        library: CudaLibrary | None = None,
        rpc: str | Sequence[str] = (),
        llama_cpp: AnyPath | None = None,
    ) -> None:
        super().configure(virtual_devices, library, rpc, llama_cpp)
        self._virtual = tuple(virtual_devices)
        if self._second is not None:
            self._settle()
            if virtual_devices:
                second, where = self._second, self._llama_cpp
                second.configure(virtual_devices, library, (), where)

    def measure(
        self, path: str | os.PathLike[str] | Skeleton, params: Params, role: str = "measure", *, reserve: bool = False
    ) -> Breakdown:
        if isinstance(path, Skeleton):
            breakdown = super().measure(path, params, role, reserve=reserve)
            # llama.cpp can load it
            self._skeletons.pop(path.files[0], None)
            self._skeletons[path.files[0]] = path
            if len(self._skeletons) > _MOST_SKELETONS:
                del self._skeletons[next(iter(self._skeletons))]
            return breakdown
        if role != "measure":
            return super().measure(path, params, role, reserve=reserve)
        name = os.fspath(path)
        key = self._own_key(name, params)
        if key not in self._answers and (skeleton := self._known_skeleton(name)):
            # the error of the model's own file is raised instead
            with contextlib.suppress(LlamaCppError):
                return super().measure(skeleton, params, role, reserve=reserve)
        # the file may change during the load
        copy = self._skeletons.get(name)
        tokenizer = self.tokenizer(name) if copy else ""
        if not self._has_second or not reserve:
            # the skeleton stays loaded beside it
            breakdown = super().measure(path, params, _OWN, reserve=reserve)
        else:
            breakdown = self._ask_once(key, lambda: self._measure_here(name, params))
        if copy and tokenizer and self._is_alike(copy, params, breakdown):
            tokenizers[tokenizer] = None
            if len(tokenizers) > MOST_TOKENIZERS:
                tokenizers.popitem(last=False)
        return breakdown

    def _is_alike(self, skeleton: Skeleton, params: Params, breakdown: Breakdown) -> bool:
        """Whether a skeleton takes the memory of its model."""
        try:
            return super().measure(skeleton, params) == breakdown
        except LlamaCppError:
            return False

    def suggest(self, path: str, params: Params, *, is_decided: bool) -> None:
        """Measure the user's file in a second process, for a likely question; ``is_decided``: a certain one."""
        is_known = self._suggested == (path, params) or self._own_key(path, params) in self._answers
        if not self._has_second or is_known or (self._suggested and not is_decided and self._own_worker().busy):
            return
        # without time for a suggestion, the search still has what it has found
        with contextlib.suppress(TimeLimitError):
            if self._known_skeleton(path):
                return
            self._settle()
            self._own_worker().begin_placing(path, params)
            self._suggested = path, params

    def devices(self) -> tuple[DeviceInfo, ...]:
        if self._description:
            return super().devices()
        # other programs use and free memory of real devices
        self._free = self.memory()
        return self._free

    def dismiss(self) -> None:
        super().dismiss()
        if self._second is not None:
            self._second.dismiss()

    def interrupt(self) -> None:
        second = self._second
        super().interrupt()
        if second is not None:
            second.interrupt()

    def release(self) -> None:
        """End the processes; the next question starts them again."""
        self._kill()
        second, self._second, self._suggested = self._second, None, None
        if second is not None:
            self._loads += second.dummy_loads
            second.close()

    def close(self) -> None:
        second, self._second = getattr(self, "_second", None), None
        try:
            super().close()
        finally:
            if second is not None:
                second.close()

    @property
    def _has_second(self) -> bool:
        # Each process that asks a real device takes some of its memory, and an rpc-server talks to one process only.
        # What a fork logs is not heard here.
        return bool(self._description) and not (self._rpc or self._on_log or self._is_alone)

    def _own_worker(self) -> Worker:
        """Return the worker that has loaded the model's own file."""
        if self._second is None:
            self._second = Worker(
                self._virtual,
                library=self._library,
                timeout=self._timeout,
                on_log=self._on_log,
                llama_cpp=self._llama_cpp,
            )
            self._second.check = self._check
        self._second.deadline = self.deadline
        return self._second

    def _known_skeleton(self, path: str) -> Skeleton | None:
        """Return the skeleton of a model whose tokenizer llama.cpp has read before; ``None`` without one."""
        skeleton = self._skeletons.get(path)
        return skeleton if skeleton and self.tokenizer(path) in tokenizers else None

    def _measure_here(self, path: str, params: Params) -> Breakdown:
        worker = self._own_worker()
        if self._suggested != (path, params):
            self._settle()
            worker.begin_placing(path, params)
        self._suggested = None
        return worker.finish_measure()

    def _settle(self) -> None:
        """Wait for a suggested measurement; its answer is kept, and its error is raised when it is asked for."""
        suggested, self._suggested = self._suggested, None
        if suggested is not None:
            with contextlib.suppress(FitterError):
                self._answers[self._own_key(*suggested)] = self._own_worker().finish_measure()

    def _own_key(self, path: str, params: Params) -> tuple[object, ...]:
        return _OWN, self._key({"path": path, "params": params})

    def _ask(self, kind: type[_T], command: str, **arguments: Any) -> _T:
        self._check()
        ask = super()._ask
        if command == "header":
            self._notice(arguments["path"])
        if command not in _KEPT:
            return ask(kind, command, **arguments)
        return self._ask_once((command, self._key(arguments)), lambda: ask(kind, command, **arguments))

    def _check(self) -> None:
        if self.check is not None:
            self.check()

    def _ask_once(self, key: tuple[object, ...], ask: Callable[[], _T]) -> _T:
        answers = self._answers
        if key in answers:
            answers.move_to_end(key)
            return cast(_T, answers[key])
        answer = answers[key] = ask()
        large = [each for each in answers if each[0] in _LARGE] if key[0] in _LARGE else []
        if len(large) > _MOST_LARGE:
            del answers[large[0]]
        if len(answers) > _MOST_KEPT:
            answers.popitem(last=False)
        return answer

    def _notice(self, path: str) -> None:
        """Drop all answers if the file has changed: a split model is named by its first file, which is all that its
        processes know.
        """
        now = identity(path)
        if self._files.get(path, now) != now:
            self.release()
            self._answers.clear()
            self._files.clear()
        self._files[path] = now

    def _key(self, arguments: Mapping[str, Any]) -> tuple[object, ...]:
        machine = (self._description, self._library, self._rpc, self._llama_cpp, self._cpu, self._free)
        return machine, *(_part(value) for value in arguments.values())


def _part(value: object) -> object:
    """Return a value that changes with ``value``, or with the file that it names."""
    if isinstance(value, Skeleton):
        return value, *map(identity, value.files)
    if isinstance(value, Params):
        return value, *(identity(lora.path) for lora in value.lora)
    if isinstance(value, list):
        return tuple(value)
    return (value, identity(value)) if isinstance(value, str) and os.path.dirname(value) else value
