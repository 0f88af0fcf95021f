"""The error tree of fitter. Every error is one line that names what is wrong and what to do about it."""

from __future__ import annotations

from fitter.text import printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import ClassVar

EXIT_FITS = 0
EXIT_DOES_NOT_FIT = 1
EXIT_USAGE = 2
EXIT_FAILURE = 3
EXIT_REGRESSION = 4
EXIT_UNWRITTEN = 5


class FitterError(Exception):
    """Base of all errors that fitter raises on purpose; ``exit_code`` is the command's exit status.

    The message is printable, whatever names it contains.
    """

    exit_code: ClassVar[int] = EXIT_FAILURE

    def __init__(self, message: str = "") -> None:
        super().__init__(printable(message))


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
