"""Cells of a grid where they are planned: in a thread, another process, or another machine. Bytes.

A cell travels as a ``Task``, which has the model's header, so that nobody needs the model's file.
"""

from __future__ import annotations

import atexit
import hashlib
import os
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fitter import api
from fitter.errors import FitterError, LibraryError, LlamaCppCrashError, TimeLimitError, WorkerError
from fitter.llama.processes.resource_errors import is_resource_error
from fitter.llama.worker.remembered_loads import RememberingWorker
from fitter.output.arguments import arguments
from fitter.planning.plan.plan import Plan
from fitter.planning.tables.exploration import ExploredCell
from fitter.storage.files import replacing
from fitter.storage.temporary import Directory


@dataclass(frozen=True)
class CellHeader:
    """The header of a model without its tokenizer: enough to plan it. ``packed`` is compressed."""

    packed: bytes = field(repr=False)
    size: int
    """Bytes of a file with that header."""
    digest: str
    """Another one where the header or the size is."""

    @classmethod
    def of(cls, path: Path, data_offset: int) -> CellHeader:
        """The header in the file at ``path``, which ends at ``data_offset``."""
        with open(path, "rb") as file:
            header = file.read(data_offset)
        size = path.stat().st_size
        digest = hashlib.sha256(header + str(size).encode()).hexdigest()
        return cls(zlib.compress(header, 1), size, digest)

    def write(self, path: Path) -> None:
        """Write a file with it, all or nothing."""
        try:
            with replacing(path) as file:
                file.write(zlib.decompress(self.packed))
                file.truncate(self.size)
        except OSError as error:
            raise WorkerError(
                f"a model's header cannot be written to {path.parent} ({error.strerror}): set TMPDIR to a directory "
                "that takes files as long as the model"
            ) from None


@dataclass(frozen=True)
class Task:
    """A cell to be planned: its header and the keywords of ``fit``. ``called``: the model, for messages.

    ``version`` is that of the llama.cpp that has to plan it.
    """

    header: CellHeader
    called: str
    keywords: Mapping[str, Any]
    version: str


def run(task: Task) -> tuple[dict[str, Any], bool]:
    """What is found for a cell, as ``ExploredCell.figures`` has it, and whether it would be the same once more.

    What llama.cpp refuses is the cell's problem. Raises ``LibraryError`` where another llama.cpp is here, or none.
    """
    with _workers.one(task) as worker:
        version = worker.build().version
        if version != task.version:
            raise LibraryError(
                f"a worker of the executor has llama.cpp {version}, and this machine {task.version}: install the same "
                "on both, or name one with --llama-cpp"
            )
        path = None
        try:
            path = _workers.path(task.header)
            plan = api.fit(path, **{**task.keywords, "skeleton": False}, worker=worker)
        except LibraryError:
            raise
        except FitterError as error:
            cell = ExploredCell("", None, "", None, None, None, None)
            said = str(error) if path is None else str(error).replace(str(path), task.called)
            is_passing = isinstance(error, (LlamaCppCrashError, TimeLimitError, WorkerError))
            return {**cell.figures(), "problem": said}, not is_passing and not is_resource_error(error)
    return figures_of(plan, task.called, str(path)), not plan.search.is_cut_short


def figures_of(plan: Plan, called: str = "", path: str = "") -> dict[str, Any]:
    """What a cell says of ``plan``. Its messages name a file at ``path`` as it is ``called``."""
    price, problem = plan.estimate if plan.fits else None, None
    if plan.problems:
        problem = plan.problems[0].message.replace(path, called) if path else plan.problems[0].message
    return {
        "fits": plan.fits,
        "n_ctx": (plan.params.n_ctx or plan.breakdown.n_ctx) if plan.fits else None,
        "bytes": plan.model.bytes,
        "used": sum(use.used + use.shared for use in plan.devices),
        "host_weights": plan.host.model,
        "prompt_tokens_per_second": None if price is None else price.prompt_tokens_per_second,
        "tokens_per_second": None if price is None else price.generation_tokens_per_second,
        "arguments": tuple(arguments(plan)) if plan.fits else None,
        "problem": problem,
    }


_IDLE_SECONDS = 60.0
"""How long workers wait for the next cell, in processes that outlive the grid."""


class _Workers:
    """The workers of this process that wait for the next cell, and the files of the headers that it was sent."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: dict[tuple[object, ...], list[RememberingWorker]] = {}
        self._folder: Directory | None = None
        self._ending: threading.Timer | None = None
        self._busy = 0
        self._owner = 0

    @contextmanager
    def one(self, task: Task) -> Iterator[RememberingWorker]:
        """One that nobody else asks."""
        self._begin()
        llama_cpp, timeout = task.keywords.get("llama_cpp"), task.keywords.get("timeout")
        key = llama_cpp, timeout
        with self._lock:
            waiting = self._idle.setdefault(key, [])
            worker = waiting.pop() if waiting else None
            self._busy += 1
        if worker is None:
            known: dict[str, Any] = {} if timeout is None else {"timeout": timeout}
            worker = RememberingWorker(llama_cpp=llama_cpp, is_alone=True, **known)
        try:
            yield worker
        except BaseException:
            worker.close()
            raise
        finally:
            with self._lock:
                self._busy -= 1
        with self._lock:
            self._idle.setdefault(key, []).append(worker)
            if self._ending is not None:
                self._ending.cancel()
            self._ending = threading.Timer(_IDLE_SECONDS, self.close)
            self._ending.daemon = True
            self._ending.start()

    def path(self, header: CellHeader) -> Path:
        """Where a header is."""
        self._begin()
        with self._lock:
            if self._folder is None:
                self._folder = Directory()
            path = Path(self._folder.name) / f"{header.digest[:32]}.gguf"
        if not path.exists():
            header.write(path)
        return path

    def close(self) -> None:
        """End those that wait, and remove the files."""
        if self._owner != os.getpid():
            return
        with self._lock:
            if self._ending is not None:
                self._ending.cancel()
                self._ending = None
            idle, self._idle = self._idle, {}
            folder = self._folder
            if self._busy:
                # somebody reads a header there
                folder = None
            else:
                self._folder = None
        for worker in (worker for waiting in idle.values() for worker in waiting):
            worker.close()
        if folder is not None:
            folder.cleanup()

    def _begin(self) -> None:
        """A fork has nothing of what its parent had."""
        if self._owner != os.getpid():
            self.__init__()  # type: ignore[misc]
            self._owner = os.getpid()
            atexit.register(self.close)


_workers = _Workers()

close: Callable[[], None] = _workers.close
"""End the workers of this process, and remove the headers that it was sent."""
