"""A worker that asks nothing twice, for many questions about one model. Bytes."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar, cast

from fitter.llama.client import DEFAULT_TIMEOUT, Worker
from fitter.llama.types import DeviceInfo, Params, Skeleton
from fitter.parameters.table import AnyPath
from fitter.storage import identity

if TYPE_CHECKING:
    pass

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
    }
)
"""Commands whose answer stays valid as long as files and devices do not change."""

_MOST_KEPT = 4096
_MOST_LARGE = 32
_LARGE = frozenset({"header", "layout", "match"})
"""Commands whose answers name every tensor of a model."""


class RememberingWorker(Worker):
    """A ``Worker`` that remembers its answers.

    Answers about a file are dropped when it changes (its time, size or number), answers about real devices when their
    free memory changes. ``check`` is called before every question.
    """

    def __init__(
        self,
        *,
        timeout: float = DEFAULT_TIMEOUT,
        on_log: Callable[[str], None] | None = None,
        llama_cpp: AnyPath | None = None,
    ) -> None:
        super().__init__(timeout=timeout, on_log=on_log, llama_cpp=llama_cpp)
        self._answers: OrderedDict[tuple[object, ...], Any] = OrderedDict()
        self._files: dict[str, tuple[int, ...]] = {}
        self._free: tuple[DeviceInfo, ...] = ()

    def is_tokenizer_read(self, path: str | os.PathLike[str]) -> bool:
        key = "tokenizer", self._key({"path": os.fspath(path)})
        # one that was not read may be read since
        if not self._answers.get(key):
            self._answers[key] = super().is_tokenizer_read(path)
        return bool(self._answers[key])

    def devices(self) -> tuple[DeviceInfo, ...]:
        if self._description:
            return super().devices()
        # other programs use and free memory of real devices
        self._free = self.memory()
        return self._free

    def release(self) -> None:
        """End the process; the next question starts it again."""
        self._kill()

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
