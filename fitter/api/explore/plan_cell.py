"""Plan one cell of a grid: in a thread, another process, or on another machine.

A cell travels as a ``Task`` with the model's header, so that no other machine needs the model's file.
"""

from __future__ import annotations

import atexit
import hashlib
import os
import threading
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fitter import api, system
from fitter.errors import FitterError, LibraryError, LlamaCppCrashError, TimeLimitError, WorkerError
from fitter.llama.client import DEFAULT_TIMEOUT
from fitter.llama.processes.worker_exit import is_resource_error
from fitter.llama.worker.remembered_loads import RememberingWorker
from fitter.output.arguments import arguments
from fitter.planning.plan.plan import Plan
from fitter.storage import TemporaryDirectory, replacing
from fitter.version import VERSION


@dataclass(frozen=True)
class CellHeader:
    """A model's header without the tokenizer, compressed (``packed``): enough to plan the model."""

    packed: bytes = field(repr=False)
    size: int
    """Bytes of the model file."""
    digest: str
    """SHA-256 of the header and the size."""

    @classmethod
    def of(cls, path: Path, data_offset: int) -> CellHeader:
        """Read the first ``data_offset`` bytes of the file at ``path``, its header."""
        with open(path, "rb") as file:
            header = file.read(data_offset)
        size = path.stat().st_size
        digest = hashlib.sha256(header + str(size).encode()).hexdigest()
        return cls(zlib.compress(header, 1), size, digest)

    def write(self, path: Path) -> None:
        """Write a sparse file with this header and size, all or nothing. Raises ``WorkerError``."""
        try:
            with replacing(path) as file:
                file.write(zlib.decompress(self.packed))
                system.extend(file, self.size)
        except OSError as error:
            raise WorkerError(
                f"a model's header cannot be written to {path.parent} ({error.strerror}): set TMPDIR to a directory "
                "that takes files as long as the model"
            ) from None


@dataclass(frozen=True)
class Task:
    """One cell to plan.

    Attributes:
        header: The model's header.
        called: The model's name in messages.
        keywords: Keywords of ``fit``.
        version: The llama.cpp that must plan the cell.
        fitter: The version of llama-fitter that must plan it.
    """

    header: CellHeader
    called: str
    keywords: Mapping[str, Any]
    version: str
    fitter: str = VERSION


def run(task: Task) -> tuple[dict[str, Any], bool]:
    """Plan one cell.

    Returns:
        The cell's figures by attribute of ``ExploredCell``, and whether another run would find the same. A refusal of
        llama.cpp becomes the cell's problem.

    Raises:
        LibraryError: llama.cpp is missing here, or it or llama-fitter is another version.
    """
    if task.fitter != VERSION:
        raise LibraryError(
            f"a worker of the executor has llama-fitter {VERSION}, and this machine {task.fitter}: install the same "
            "on both"
        )
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
            said = str(error) if path is None else str(error).replace(str(path), task.called)
            is_passing = isinstance(error, (LlamaCppCrashError, TimeLimitError, WorkerError))
            return {"problem": said}, not is_passing and not is_resource_error(error)
    return figures_of(plan, task.called, str(path)), not plan.search.is_cut_short


def figures_of(plan: Plan, called: str = "", path: str = "") -> dict[str, Any]:
    """Return the figures of ``plan`` by attribute of ``ExploredCell``; ``called`` replaces ``path`` in messages."""
    price, problem = plan.estimate if plan.fits else None, None
    full = None if price is None else price.full_context
    if plan.problems:
        problem = plan.problems[0].message.replace(path, called) if path else plan.problems[0].message
    return {
        "fits": plan.fits,
        "n_ctx": (plan.params.n_ctx or plan.breakdown.n_ctx) if plan.fits else None,
        "bytes": plan.model.bytes,
        "used": sum(use.used + use.shared for use in plan.devices),
        "host_weights": plan.host.model,
        "prompt_tokens_per_second": None if price is None else price.prompt_tokens_per_second,
        "tokens_per_second": None if price is None else price.tokens_per_second,
        "full_context_tokens_per_second": None if full is None else full.generation_tokens_per_second,
        "arguments": tuple(arguments(plan)) if plan.fits else None,
        "problem": problem,
    }


_IDLE_SECONDS = 60.0
"""Seconds after which idle workers end, in processes that outlive the grid."""


class _Workers:
    """The idle workers of this process, and the files of the headers that it received."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: dict[tuple[object, ...], list[RememberingWorker]] = defaultdict(list)
        self._folder: TemporaryDirectory | None = None
        self._ending: threading.Timer | None = None
        self._busy = 0
        self._owner = 0

    @contextmanager
    def one(self, task: Task) -> Iterator[RememberingWorker]:
        """Lend a worker that nobody else uses."""
        self._begin()
        key = llama_cpp, timeout = task.keywords.get("llama_cpp"), task.keywords.get("timeout", DEFAULT_TIMEOUT)
        with self._lock:
            worker = self._idle[key].pop() if self._idle[key] else None
            self._busy += 1
        worker = worker or RememberingWorker(llama_cpp=llama_cpp, timeout=timeout)
        try:
            yield worker
        except BaseException:
            worker.close()
            raise
        finally:
            with self._lock:
                self._busy -= 1
        with self._lock:
            self._idle[key].append(worker)
            if self._ending is not None:
                self._ending.cancel()
            self._ending = threading.Timer(_IDLE_SECONDS, self.close)
            self._ending.daemon = True
            self._ending.start()

    def path(self, header: CellHeader) -> Path:
        """Return the file of a header; write it first if needed."""
        self._begin()
        with self._lock:
            if self._folder is None:
                self._folder = TemporaryDirectory()
            path = Path(self._folder.name) / f"{header.digest[:32]}.gguf"
        if not path.exists():
            header.write(path)
        return path

    def close(self) -> None:
        """End the idle workers, and remove the files."""
        if self._owner != os.getpid():
            return
        with self._lock:
            if self._ending is not None:
                self._ending.cancel()
                self._ending = None
            idle = [worker for waiting in self._idle.values() for worker in waiting]
            self._idle.clear()
            # a busy worker still reads a header there
            folder, self._folder = (None, self._folder) if self._busy else (self._folder, None)
        for worker in idle:
            worker.close()
        if folder is not None:
            folder.cleanup()

    def _begin(self) -> None:
        """Start with nothing in a new process: a fork cannot use its parent's workers."""
        if self._owner != os.getpid():
            self.__init__()  # type: ignore[misc]
            self._owner = os.getpid()
            atexit.register(self.close)


_workers = _Workers()

close: Callable[[], None] = _workers.close
"""End the idle workers of this process, and remove the files of headers."""
