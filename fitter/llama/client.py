"""The worker process, as its parent uses it: start it, ask it questions, and survive its end."""

from __future__ import annotations

import bisect
import contextlib
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from fitter import errors
from fitter.errors import (
    ExpertCacheError,
    FitterError,
    LlamaCppCrashError,
    LlamaCppError,
    Message,
    Remedy,
    RemoteError,
    TimeLimitError,
    WorkerError,
)
from fitter.llama.processes import interpreter, memory_limit, wire
from fitter.llama.processes.worker_exit import OUT_OF_MEMORY_STATUS, WorkerExit
from fitter.llama.types import (
    Breakdown,
    Caches,
    DeviceInfo,
    FileTypes,
    FlashAttn,
    Header,
    Layout,
    LlamaCpp,
    Loaded,
    MeasuredSpeed,
    ModelInfo,
    Params,
    Row,
    Skeleton,
    VirtualDevice,
    describe,
)
from fitter.llama.worker import process
from fitter.parameters.table import DEFAULTS, AnyPath
from fitter.text import MIB, printable

if TYPE_CHECKING:
    from fitter.llama.build.virtual_backends import CudaLibrary

_T = TypeVar("_T")

DEFAULT_TIMEOUT: float = DEFAULTS["timeout"]
"""Seconds to wait for one answer of the worker."""

_STDERR_LINES = 60

_TOO_LARGE_CACHE = "pre-allocated tensor (moe_cache."
"""How llama.cpp's last words begin where no operation of a device takes a tensor as large as that of the cache."""
_DROPPED = "Remote RPC server crashed"
_ASKED_ONCE = frozenset({"load"})
"""Commands that are not repeated in a new process: a real load takes the memory that may have run out."""
_DIAGNOSIS_SECONDS = 2.0
_FAREWELL_SECONDS = 1.0
_LEAST_SECONDS = 0.25
"""Time that a question has after the deadline, too: after a killed process, the next one takes longer to start."""


class Worker:
    """A child process that runs llama.cpp on the real devices, or on virtual ones.

    Use a worker from one thread at a time; there may be several workers. The process starts with the first question. If
    it ends before its answer, a new process gets the question once more.

    Every question raises

    - ``LlamaCppError`` if llama.cpp refuses,
    - ``LlamaCppCrashError`` if llama.cpp ended both processes by the same abort or fault,
    - ``WorkerError`` if something else ended them, or if there was no answer within ``timeout`` seconds,
    - ``TimeLimitError`` after ``deadline`` (on the monotonic clock); a question that was sent before has 0.25 seconds,
    - ``RemoteError`` if an rpc-server cannot be used.

    ``fit``, ``measure`` and ``estimate`` set the devices of a worker that they are given; they refuse another
    ``timeout`` or ``on_log`` than the worker's (``UsageError``).

    Args:
        virtual_devices: The virtual devices; without any, the real ones.
        library: A CUDA backend that simulates the virtual devices, in place of their profiles.
        timeout: Seconds to wait for one answer.
        on_log: Called with each line of llama.cpp's log, after each answer.
        rpc: rpc-servers (``host:port``), whose devices come before all others.
        llama_cpp: The llama.cpp to use: ``python`` for llama-cpp-python's, a directory with its libraries, or a
            llama-server; by default the environment variable ``FITTER_LLAMA_CPP``, or ``python``.
    """

    check: Callable[[], None] | None = None
    """Called before a question is repeated in a new process; its error ends the question."""

    def __init__(
        self,
        virtual_devices: Sequence[VirtualDevice] = (),
        *,
        library: CudaLibrary | None = None,
        timeout: float = DEFAULT_TIMEOUT,
        on_log: Callable[[str], None] | None = None,
        rpc: str | Sequence[str] = (),
        llama_cpp: AnyPath | None = None,
    ) -> None:
        self.deadline: float | None = None
        self._description = describe(virtual_devices)
        self._library = library
        self._rpc = _servers(rpc)
        self._cpu = ""
        self._own_llama_cpp = self._llama_cpp = None if llama_cpp is None else os.fsdecode(llama_cpp)
        self._timeout = timeout
        self._on_log = on_log
        self._child: _Child | None = None
        self._beside: Worker | None = None
        self._closed = self._is_dismissed = False
        self._loads = 0
        self._begun: list[_Begun] = []
        self._exits: dict[str, WorkerExit] = {}
        self._answered: Any = None
        self._failed: FitterError | None = None

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self.close()

    @property
    def pid(self) -> int | None:
        """The process id; ``None`` while there is no process."""
        return None if self._child is None else self._child.pid

    @property
    def timeout(self) -> float:
        """Seconds to wait for one answer."""
        return self._timeout

    @property
    def on_log(self) -> Callable[[str], None] | None:
        """The function for the lines of llama.cpp's log."""
        return self._on_log

    @property
    def rpc(self) -> tuple[str, ...]:
        """The rpc-servers, as ``host:port``."""
        return self._rpc

    @property
    def library(self) -> CudaLibrary | None:
        """The CUDA backend that simulates the virtual devices."""
        return self._library

    def llama_cpp_for(self, named: AnyPath | None) -> str | None:
        """Return the llama.cpp of a call: its own choice, or the worker's."""
        return self._own_llama_cpp if named is None else os.fsdecode(named)

    @property
    def dummy_loads(self) -> int:
        """Dummy loads until now; another context of a loaded model does not count."""
        return self._loads

    def without_devices(self) -> Worker:
        """Return another worker of the same llama.cpp, for questions that are about no device."""
        other = self._beside = Worker(timeout=self._timeout, llama_cpp=self._llama_cpp)
        other.check = self.check
        return other

    def start(self) -> None:
        """Start the process now instead of with the first question."""
        self._guarded(self._open)

    def restart(self) -> None:
        """Kill the process in the middle of its work, and start another one."""
        self._kill()
        self._failed, self._answered = None, None
        self.start()

    def configure(
        self,
        virtual_devices: Sequence[VirtualDevice],
        library: CudaLibrary | None = None,
        rpc: str | Sequence[str] = (),
        llama_cpp: AnyPath | None = None,
    ) -> None:
        """Replace the virtual devices; without any, questions are about the real ones.

        Args:
            virtual_devices: The virtual devices.
            library: A CUDA backend that simulates them.
            rpc: rpc-servers.
            llama_cpp: Another llama.cpp than the worker's own, until the next call.

        Raises:
            UsageError: A device or a server is not valid.
        """
        description, remote = describe(virtual_devices), _servers(rpc)
        llama_cpp = self.llama_cpp_for(llama_cpp)
        is_library = library is not None or self._library is not None
        is_other = is_library and (library, description) != (self._library, self._description)
        if is_other or (remote, llama_cpp) != (self._rpc, self._llama_cpp):
            # A CUDA backend reads the description of its cards only once, ggml cannot forget a server, and
            # a process has one libllama.
            self._kill()
        elif self._child is not None and library is None:
            self._ask(type(None), "configure", description=description)
        self._description, self._library = description, library
        self._rpc, self._llama_cpp = remote, llama_cpp

    def use_cpu(self, name: str) -> None:
        """Load the CPU backend in the file ``name`` until the next call, if llama.cpp has several.

        The best one for this machine is loaded if the file is missing or cannot run here, and for ``''``.
        """
        if name != self._cpu:
            self._kill()
            self._cpu = name

    def devices(self) -> tuple[DeviceInfo, ...]:
        """Return the virtual devices, or the real ones that llama.cpp uses, in llama.cpp's order: remote ones first."""
        return self._ask(tuple[DeviceInfo, ...], "devices")

    def llama_cpp(self) -> str:
        """Return the version and commit of the worker's llama.cpp."""
        return self.build().version

    def build(self) -> LlamaCpp:
        """Return the worker's build of llama.cpp."""
        return self._ask(LlamaCpp, "build")

    def host(self) -> DeviceInfo:
        """Return the CPU as ggml reports it; on Linux ggml reports all memory as free."""
        return self._ask(DeviceInfo, "host")

    def header(self, path: str | os.PathLike[str]) -> Header:
        """Read the header of one GGUF file. Raises ``ModelError`` with ggml's reason if it is malformed."""
        return self._ask(Header, "header", path=os.fspath(path))

    def is_tokenizer_read(self, path: str | os.PathLike[str]) -> bool:
        """Return whether this llama.cpp is known to read a model's tokenizer. A small one is read at once."""
        return self._ask(bool, "is_tokenizer_read", path=os.fspath(path))

    def begin_tokenizer(self, path: str | os.PathLike[str]) -> None:
        """Start to read a model's tokenizer; ``finish_tokenizer`` waits until it is read."""
        self._begin("check_tokenizer", path=os.fspath(path))

    def finish_tokenizer(self) -> None:
        """Wait for the tokenizer of ``begin_tokenizer``. Raises ``LlamaCppError`` where llama.cpp refuses it."""
        self._guarded(self._finish)

    def file_types(self, files: Sequence[str | os.PathLike[str]], directory: str | os.PathLike[str]) -> FileTypes:
        """Ask llama-quantize's rule for the types of a model's tensors, in each of its file types.

        Args:
            files: The model's files.
            directory: Gets the header of each such file as ``NAME.gguf``, without a tokenizer; llama.cpp measures it
                like the file.

        Raises:
            LibraryError: This llama.cpp does not tell its rule.
        """
        names = [os.fspath(file) for file in files]
        return self._ask(FileTypes, "file_types", files=names, directory=os.fspath(directory))

    def write_skeleton(self, skeleton: Skeleton, path: str | os.PathLike[str]) -> None:
        """Write a copy of the header without its tokenizer to ``path``, as long as the model.

        llama.cpp measures it like the model. Raises ``LlamaCppError`` if no such copy can be made.
        """
        self._ask(type(None), "write_skeleton", skeleton=skeleton, path=os.fspath(path))

    def measure(
        self,
        path: str | os.PathLike[str] | Skeleton,
        params: Params,
        role: str = "measure",
        *,
        reserve: bool = False,
    ) -> Breakdown:
        """Measure the memory of a load, by a dummy load.

        Args:
            path: The model. A ``Skeleton`` is loaded in place of its model, unless llama.cpp refuses that.
            params: Parameters of the load.
            role: The last model of each role stays loaded, so that another context of it is quick.
            reserve: Whether rows also get the compute buffers that a real load reserves (``Row.reserved``).

        Raises:
            UsageError: A name is unknown.
            ModelError: An adapter cannot be read, or belongs to another model.
            ExpertCacheError: The cache of experts needs a larger buffer than a device has.
        """
        try:
            return self._ask(Breakdown, "measure", path=_model(path), params=params, role=role, reserve=reserve)
        except LlamaCppCrashError as error:
            if _TOO_LARGE_CACHE not in str(error):
                raise
            raise ExpertCacheError(
                str(error), lambda: self._largest_expert_cache(_model(path), params, role), error.log
            ) from None

    def _largest_expert_cache(self, path: str | Skeleton, params: Params, role: str) -> int:
        """Search the largest ``moe_cache_size`` that llama.cpp loads, in MiB, by dummy loads."""

        def ends(mib: int) -> bool:
            smaller = replace(params, moe_cache_size=mib * MIB)
            try:
                self._ask(Breakdown, "measure", path=path, params=smaller, role=role, reserve=False)
            except LlamaCppError as error:
                # it only refuses one that is too small
                return isinstance(error, LlamaCppCrashError)
            return False

        return bisect.bisect_left(range(1, params.moe_cache_size // MIB), True, key=ends)

    def model_info(self, path: str | os.PathLike[str] | Skeleton, params: Params) -> ModelInfo:
        """Ask llama.cpp for facts about the model; ``measure`` with the same ``params`` does not load it again."""
        return self._ask(ModelInfo, "model_info", path=_model(path), params=params)

    def layout(self, path: str | os.PathLike[str] | Skeleton, params: Params) -> Layout:
        """Record the size of every weight and cache tensor on a device. Only the context's parameters matter."""
        return self._ask(Layout, "layout", path=_model(path), params=params)

    def caches(self, path: str | os.PathLike[str] | Skeleton, params: Params) -> Caches:
        """List the caches of a context. Only the context's parameters and ``load_mtp`` matter.

        Raises ``LlamaCppError`` if this build of llama.cpp does not tell which caches it makes.
        """
        return self._ask(Caches, "caches", path=_model(path), params=params)

    def projector(
        self,
        path: str | os.PathLike[str],
        *,
        device: str | None,
        flash_attn: FlashAttn = "auto",
        image_min_tokens: int = -1,
        image_max_tokens: int = -1,
    ) -> tuple[Row, ...]:
        """Measure a multimodal projector without allocating, in a row per buffer type.

        Weights are model bytes. Compute is for libmtmd's warm-up image, which for some projectors is smaller than the
        largest one.

        Args:
            path: The projector.
            device: The device that llama-server would choose: ``-mmdev`` or else the first of ``-dev``; ``None`` for
                the host, whose rows have no device.
            flash_attn: Flash attention.
            image_min_tokens: Fewest tokens of an image; -1 for the projector's own limit.
            image_max_tokens: Most tokens of an image; -1 for the projector's own limit.

        Raises:
            ModelError: The file is no projector, or is truncated.
            UsageError: The device is unknown.
            LibraryError: libmtmd is missing, or has another version.
        """
        return self._ask(
            tuple[Row, ...],
            "projector",
            path=os.fspath(path),
            device=device,
            flash_attn=flash_attn,
            image_min_tokens=image_min_tokens,
            image_max_tokens=image_max_tokens,
        )

    def compute_capabilities(self) -> dict[str, int]:
        """Return the compute capability (890 for 8.9) of each CUDA device by name, if the driver reports it."""
        return dict(self._ask(tuple[tuple[str, int], ...], "compute_capabilities"))

    def memory(self) -> tuple[DeviceInfo, ...]:
        """Return ``devices()`` with the memory that is free now."""
        return self._ask(tuple[DeviceInfo, ...], "memory")

    def speed(self, device: str, memory: int, seconds: float) -> MeasuredSpeed:
        """Measure the speed of a device with up to ``memory`` bytes of it, for about ``seconds``.

        Raises ``LlamaCppError`` if it cannot be measured.
        """
        return self._ask(MeasuredSpeed, "speed", device=device, memory=memory, seconds=seconds)

    def load(self, path: str | os.PathLike[str], params: Params) -> Loaded:
        """Load ``path`` for real, compute a full micro batch and single tokens, and keep it until ``unload``."""
        return self._ask(Loaded, "load", path=os.fspath(path), params=params)

    def unload(self) -> None:
        """Free the model of ``load``."""
        self._ask(type(None), "unload")

    def match(self, patterns: Sequence[str], names: Sequence[str]) -> tuple[int, ...]:
        """Return for each name the index of the first pattern that matches it, or -1. Raises ``UsageError``."""
        return self._ask(tuple[int, ...], "match", patterns=list(patterns), names=list(names))

    def dismiss(self) -> None:
        """Tell the process to end, or kill it if it is busy, without waiting; no other process answers in its place."""
        self._is_dismissed = True
        if self._child is not None:
            self._child.dismiss(at_once=bool(self._begun) and not self._rpc)

    def interrupt(self) -> None:
        """Kill the process, from any thread. A new one repeats the open question, unless ``check`` raises an error."""
        if (child := self._child) is not None:
            child.interrupt()
        if (other := self._beside) is not None:
            other.interrupt()

    def close(self) -> None:
        """End the process, and wait for its end."""
        self._closed = True
        child, self._child = self._child, None
        begun, self._begun = self._begun, []
        if child is not None and begun:
            child.kill(self._farewell)
        elif child is not None:
            child.close()

    def _ask(self, kind: type[_T], command: str, **arguments: Any) -> _T:
        return self._guarded(lambda: _decoded(kind, self._answer(self._ready(), command, arguments)))

    def _begin(self, command: str, **arguments: Any) -> None:
        self._guarded(lambda: self._send(self._open(), command, arguments))

    def _ready(self) -> _Child:
        """Return the process, after waiting for all started questions; their answers and errors are dropped."""
        if any(not begun.is_opening for begun in self._begun) or self._failed or self._answered is not None:
            with contextlib.suppress(FitterError):
                self._finish()
        return self._open()

    def _open(self) -> _Child:
        if self._closed or self._is_dismissed:
            raise LlamaCppError("the worker is closed")
        return self._child or self._start()

    def _guarded(self, ask: Callable[[], _T]) -> _T:
        self._leave()
        try:
            return ask()
        except FitterError:
            raise
        except BaseException:
            # the late answer would be taken for the next question's
            self._kill()
            raise

    def _leave(self) -> None:
        """Forget the process in a fork: it answers the process that started it."""
        if self._child is not None and not self._child.is_own:
            self._kill()
            self._failed, self._answered = None, None

    def _start(self, lost: _Child | None = None) -> _Child:
        """Start the process; in place of a ``lost`` one, in the same environment."""
        if self._rpc:
            from fitter.llama.processes import rpc

            rpc.check(self._rpc, self._timeout)
        memory_limit.check()
        library = self._library if self._description else None
        # The links are needed until the backend is loaded.
        with _temporary_directory() if library else contextlib.nullcontext("") as links:
            variables = library.environment(Path(links), self._description) if library else {}
            child = self._child = _Child(variables | interpreter.worker_variables(self._llama_cpp, self._cpu), lost)
            for endpoint in self._rpc:
                self._send(child, "add_rpc_server", {"endpoint": endpoint}, is_opening=True)
            if library is not None:
                count = self._description.count(";") + 1
                adopted = {"path": str(library.path), "plugin": library.plugin, "count": count}
                self._send(child, "adopt", adopted, is_opening=True)
                self._finish()
            elif self._description:
                self._send(child, "configure", {"description": self._description}, is_opening=True)
        return child

    def _answer(self, child: _Child, command: str, arguments: dict[str, Any]) -> Any:
        if self._is_late():
            raise _time_limit_error(command)
        self._send(child, command, arguments)
        return self._finish()

    def _send(self, child: _Child, command: str, arguments: dict[str, Any], is_opening: bool = False) -> None:
        request = {"command": command, "arguments": wire.encode(arguments), "log": self._on_log is not None}
        self._send_request(child, command, json.dumps(request), is_opening)

    def _send_request(self, child: _Child, command: str, request: str, is_opening: bool) -> None:
        begun = _Begun(child, command, request, time.monotonic(), is_opening)
        self._begun.append(begun)
        try:
            child.send(request, self._end_of(begun))
        except _TimeoutError:
            raise self._unanswered(begun) from None

    def _finish(self) -> Any:
        """Return the answer to the last question; raise the first error of all open questions."""
        while self._begun:
            self._take_answer()
        answer, self._answered = self._answered, None
        failed, self._failed = self._failed, None
        if failed is not None:
            raise failed
        return answer

    def _take_answer(self) -> None:
        """Wait for the answer to the first open question, and store it or its error."""
        begun = self._begun[0]
        try:
            try:
                # Answers come in order, so waiting for one includes those before it.
                answer = begun.child.receive(self._end_of(begun))
            except _TimeoutError:
                raise self._unanswered(begun) from None
            except _EndedError as ended:
                self._ask_again(begun, ended.status)
                return
            del self._begun[0]
            self._exits.pop(begun.request, None)
            self._loads += answer.get("loads", 0)
            log = tuple(map(printable, answer.get("log", ())))
            if self._on_log is not None:
                for line in log:
                    self._on_log(line)
            if "error" in answer:
                if begun.is_opening:
                    self._kill()
                raise _error(answer["error"], log)
            self._answered = answer["result"]
        except FitterError as error:
            self._failed = self._failed or error

    def _unanswered(self, begun: _Begun) -> FitterError:
        """Kill the process after a missing answer; return the error."""
        log = self._kill()
        if self._end_of(begun) < begun.sent + self._patience:
            return _time_limit_error(begun.command)
        try:
            self._check_servers(begun.command, log)
        except RemoteError as error:
            return error
        waited = f"llama.cpp did not answer '{begun.command}' within {self._patience:g} seconds: "
        return WorkerError(Message(waited, Remedy("raise --timeout", "timeout", "raise")), log)

    def _ask_again(self, begun: _Begun, status: int) -> None:
        """Repeat the open questions in a new process; raise an error if it was the second one.

        Only an equal end of both says something about the question: memory comes back, and other programs may kill a
        process.
        """
        lost, exits = self._begun, self._exits
        log = self._kill()
        self._check_servers(begun.command, log)
        ending = WorkerExit(begun.child.pid, status, log)
        before = exits.get(begun.request)
        if before is not None or begun.command in _ASKED_ONCE or self._is_dismissed or self._closed:
            raise _ended_error(begun.command, before or ending, ending)
        self._exits = {**exits, begun.request: ending}
        if self.check is not None:
            self.check()
        child = self._start(begun.child)
        for each in lost:
            if not each.is_opening:
                self._send_request(child, each.command, each.request, False)

    def _end_of(self, begun: _Begun) -> float:
        """Return the latest time for an answer; a deadline that was set later applies too."""
        end = begun.sent + self._patience
        return end if self.deadline is None else min(end, max(self.deadline, begun.sent + _LEAST_SECONDS))

    def _is_late(self) -> bool:
        return self.deadline is not None and time.monotonic() >= self.deadline

    @property
    def _farewell(self) -> float:
        """Seconds for the process to reset its connections to rpc-servers; see ``reset_connections``."""
        return min(_FAREWELL_SECONDS, self._timeout / 8) if self._rpc else 0.0

    @property
    def _patience(self) -> float:
        """Seconds for one answer; with rpc-servers, some of the timeout is left to find out which one was lost."""
        return self._timeout - min(_DIAGNOSIS_SECONDS, self._timeout / 4) if self._rpc else self._timeout

    def _check_servers(self, command: str, log: Sequence[str]) -> None:
        """Raise ``RemoteError`` if an rpc-server is why the process ended or did not answer."""
        if not self._rpc:
            return
        from fitter.llama.processes import rpc

        if wrong := rpc.mismatch(self._rpc, log):
            raise RemoteError(wrong) from None
        if gone := rpc.lost(self._rpc, self._timeout - self._patience):
            raise RemoteError(f"llama.cpp lost an RPC server during '{command}': {gone}") from None
        if any(_DROPPED in line for line in log):
            raise RemoteError(
                f"an RPC server ({', '.join(self._rpc)}) dropped the connection during '{command}', but answers again: "
                "look for the reason in its log, and try again"
            ) from None

    def _kill(self) -> tuple[str, ...]:
        child, self._child = self._child, None
        self._begun, self._exits = [], {}
        return child.kill(self._farewell) if child is not None else ()


def _servers(rpc: str | Sequence[str]) -> tuple[str, ...]:
    if not rpc:
        return ()
    # imported here, since network modules are slow to import
    from fitter.llama.processes.rpc import parse_servers

    return parse_servers(rpc)


def _decoded(kind: type[_T], value: Any) -> _T:
    decoded: _T = wire.decode(kind, value)
    return decoded


DOING = {
    "add_rpc_server": "connecting to an rpc-server",
    "adopt": "loading the CUDA backend",
    "check_tokenizer": "reading the tokenizer of a model",
    "build": "asking for llama.cpp's version",
    "compute_capabilities": "asking for the devices' compute capabilities",
    "configure": "describing the virtual devices",
    "devices": "listing the devices",
    "file_types": "asking for the types of a quantized model's tensors",
    "header": "reading the header of a model",
    "host": "asking for the host's memory",
    "is_tokenizer_read": "comparing tokenizers",
    "layout": "measuring the sizes of a model's tensors",
    "caches": "asking which caches a context has",
    "load": "loading a model for real",
    "match": "comparing tensor overrides with the model's tensors",
    "measure": "loading a model",
    "memory": "asking for the devices' free memory",
    "model_info": "loading a model",
    "projector": "loading a multimodal projector",
    "speed": "measuring a device's speed",
    "unload": "freeing a model",
    "write_skeleton": "copying the header of a model",
}
"""Words for each command of the worker, for users."""


def _time_limit_error(command: str) -> TimeLimitError:
    passed = f"no plan was found within the time limit, which ended while {DOING[command]}: "
    return TimeLimitError(passed, Remedy("raise --time-limit", "time_limit", "raise"))


def _model(path: str | os.PathLike[str] | Skeleton) -> str | Skeleton:
    return path if isinstance(path, Skeleton) else os.fspath(path)


def _error(error: dict[str, str], log: tuple[str, ...]) -> FitterError:
    kind = getattr(errors, error["type"])
    if issubclass(kind, (LlamaCppError, WorkerError)):
        told: FitterError = kind(error["message"], log)
        return told
    made: FitterError = kind(error["message"])
    return made


def _ended_error(command: str, first: WorkerExit, second: WorkerExit) -> FitterError:
    """Make the error for a question that ended two processes, or the only process that it may use."""
    what = f"{second.how} during '{command}'"
    said = f": {second.last_words}" if second.last_words else ""
    if first.is_same_as(second):
        return LlamaCppCrashError(f"llama.cpp {what}{said}", second.log)
    if second.status == OUT_OF_MEMORY_STATUS:
        return WorkerError(second.last_words, second.log)
    twice = "" if first is second else ", and so did a new one" if second.status == first.status else " once more"
    remedy = "end other programs" if second.has_run_out else "find out what ends it, such as a lack of memory"
    return WorkerError(f"the process that runs llama.cpp {what}{twice}{said}: {remedy}, and try again", second.log)


class _TimeoutError(Exception):
    pass


@dataclass(frozen=True)
class _Begun:
    """A question that was sent.

    Attributes:
        child: The process.
        command: Its command.
        request: Its JSON.
        sent: When it was sent, on the monotonic clock.
        is_opening: Whether it belongs to the start of the process.
    """

    child: _Child
    command: str
    request: str
    sent: float
    is_opening: bool


class _EndedError(Exception):
    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


class _Child:
    """The process, with the requests and answers on its pipes."""

    def __init__(self, variables: Mapping[str, str], lost: _Child | None = None) -> None:
        try:
            self._process: process.Process = process.take(variables, None if lost is None else lost._process)
        except OSError as error:
            raise LlamaCppError(f"the worker cannot be started: {error}") from error
        self._pending = b""

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_own(self) -> bool:
        return self._process.is_own

    def send(self, request: str, deadline: float) -> None:
        """Send a request; ``receive`` reports the end of the process. Raises ``_TimeoutError``."""
        if not self._process.send(request.encode() + b"\n", deadline):
            raise _TimeoutError

    def receive(self, deadline: float) -> dict[str, Any]:
        """Wait for the answer to the request. Raises ``_TimeoutError`` and ``_EndedError``."""
        process.use_wait(self._process.answers)
        # an answer may have many megabytes: join once
        pieces = [self._pending]
        while b"\n" not in pieces[-1]:
            left = deadline - time.monotonic()
            if left <= 0 or not self._process.answers.is_ready(left):
                raise _TimeoutError
            pieces.append(self._process.answers.read())
            if not pieces[-1]:
                raise _EndedError(self._process.wait())
        line, _, self._pending = b"".join(pieces).partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def interrupt(self) -> None:
        """Kill the process, from any thread."""
        self._process.interrupt()

    def dismiss(self, at_once: bool) -> None:
        """Tell the process to end, or kill it ``at_once``."""
        self._process.dismiss(at_once)

    def close(self) -> None:
        """Tell the process to end, and kill it if it does not."""
        self._process.close()

    def kill(self, patience: float = 0.0) -> tuple[str, ...]:
        """Kill the process, ``patience`` seconds after telling it to end; return the last lines that it printed."""
        return tuple(self._process.kill(patience).decode("utf-8", "replace").splitlines()[-_STDERR_LINES:])


def _temporary_directory() -> contextlib.AbstractContextManager[str]:
    from fitter.storage import TemporaryDirectory

    return TemporaryDirectory()
