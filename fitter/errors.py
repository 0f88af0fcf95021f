"""The error tree of fitter. Every error is one line that names what is wrong and what to do about it."""

from __future__ import annotations

from fitter.text import printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import ClassVar, Literal

    Action = Literal["lower", "omit", "raise", "set"]

EXIT_FITS = 0
EXIT_DOES_NOT_FIT = 1
EXIT_USAGE = 2
EXIT_FAILURE = 3
EXIT_REGRESSION = 4
EXIT_UNWRITTEN = 5


class Remedy(str):
    """A remedy in the command line's words: an ``action`` on a ``parameter`` of Python, or by another option."""

    parameter: str
    action: Action

    def __new__(cls, words: str, parameter: str = "", action: Action = "set") -> Remedy:
        remedy = super().__new__(cls, words)
        remedy.parameter, remedy.action = parameter, action
        return remedy


class Message(str):
    """A text in the command line's words that keeps its remedies for other surfaces. A ``str`` is one for all of them.

    Remedies joined by " and " help only together. ``otherwise`` replaces remedies and ``end`` where they are missing.
    """

    remedies: tuple[str, ...]
    _around: tuple[str, str, str, str]

    def __new__(
        cls, beginning: str, *remedies: str, joined: str = " or ", end: str = "", otherwise: str = ""
    ) -> Message:
        message = super().__new__(cls, beginning + joined.join(remedies) + end)
        message.remedies, message._around = remedies, (beginning, joined, end, otherwise)
        return message

    def __radd__(self, before: str) -> Message:
        return self._begun(before + self._around[0])

    def removeprefix(self, prefix: str, /) -> Message:
        return self._begun(self._around[0].removeprefix(prefix))

    def _begun(self, beginning: str) -> Message:
        _, joined, end, otherwise = self._around
        return Message(beginning, *self.remedies, joined=joined, end=end, otherwise=otherwise)

    def worded(self, word: Callable[[str], str]) -> str:
        """Write it for another surface: ``word`` writes a remedy, or returns an empty text for a missing one."""
        beginning, joined, end, otherwise = self._around
        # two remedies may be the same there
        words = [*dict.fromkeys(filter(None, map(word, self.remedies)))]
        if len(words) == len(self.remedies) or (words and joined != " and "):
            return beginning + joined.join(words) + end
        return beginning + otherwise if otherwise else beginning.rstrip(" ,:;") + end


class FitterError(Exception):
    """Base of all errors that fitter raises on purpose; ``exit_code`` is the command's exit status.

    The message is printable, whatever names it contains. Each of ``remedies`` is a part of it; most name the
    ``parameter`` to change, and the ``action``: ``lower``, ``omit``, ``raise`` or ``set``.
    """

    exit_code: ClassVar[int] = EXIT_FAILURE

    def __init__(self, message: str = "", *remedies: str) -> None:
        safe = printable(message)
        self.message = safe if isinstance(safe, Message) else Message(safe, *remedies)
        self.remedies = self.message.remedies
        super().__init__(self.message)


class UsageError(FitterError):
    """A parameter is not valid, or contradicts another one."""

    exit_code: ClassVar[int] = EXIT_USAGE


class ModelError(FitterError):
    """The model cannot be used: missing, not GGUF, truncated, or not a language model."""


class LibraryError(FitterError):
    """libllama, ggml or fitter's libraries are missing, or do not belong together."""


class LlamaCppError(FitterError):
    """llama.cpp refused a load, or crashed.

    ``log`` holds the last lines that llama.cpp wrote before that, oldest first.
    """

    def __init__(self, message: str, log: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.log = tuple(map(printable, log))


class LlamaCppCrashError(LlamaCppError):
    """llama.cpp ended its process by an abort or fault, twice for the same question."""


class ExpertCacheError(LlamaCppCrashError):
    """llama.cpp ends its process because a device has no buffer as large as a tensor of the cache of experts.

    ``largest()`` searches the largest ``moe_cache_size`` that this placement loads, in MiB, by dummy loads.
    """

    def __init__(self, message: str, largest: Callable[[], int], log: tuple[str, ...] = ()) -> None:
        super().__init__(message, log)
        self.largest = largest


class WorkerError(FitterError):
    """The worker process was killed, ran out of memory, failed or did not answer, which says nothing about the load.

    No plan is made without the missing answer. ``log`` holds the last lines that the worker wrote, oldest first.
    """

    def __init__(self, message: str, log: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.log = tuple(map(printable, log))


class TimeLimitError(FitterError):
    """The time limit of a fit ended before a plan that fits was found."""


class CancelledError(FitterError):
    """A question to a ``Planner`` was cancelled before it was answered, or the planner is closed."""


class RemoteError(FitterError):
    """An rpc-server cannot be reached, is not one, speaks another protocol, or was lost."""


class OutOfMemoryError(LlamaCppError):
    """llama.cpp could not allocate memory that a plan needs: ``missing`` bytes in one block on ``device``.

    ``device`` is the name of a device, or ``host``.
    """

    def __init__(self, message: str, device: str, missing: int, log: tuple[str, ...] = ()) -> None:
        super().__init__(message, log)
        self.device = device
        self.missing = missing


class PlanWarning(UserWarning):
    """A model was not loaded as planned, or takes memory that the plan does not include."""


class PlanError(FitterError):
    """The plan does not allow the request, such as the parameters of a plan that does not fit."""


class AnswerError(FitterError):
    """The result cannot be written: stdout is closed or full, or a file's directory does not exist."""

    exit_code: ClassVar[int] = EXIT_UNWRITTEN
