"""The child process in which llama.cpp runs, so that a crash, an abort or a hang does not harm the parent.

Requests and answers are lines of JSON on two separate pipes, so that output of native code does not disturb them.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import queue
import signal
import sys
import threading
import typing
from collections.abc import Callable
from typing import Any

from fitter import system
from fitter.errors import FitterError, LibraryError, LlamaCppError, WorkerError
from fitter.llama.build import library as native
from fitter.llama.build.log import captured_log
from fitter.llama.header.read_header import Headers, file_types
from fitter.llama.load import projector, real_load
from fitter.llama.load.backend_devices import (
    cuda_registry,
    device_named,
    host_of,
    load_cuda_backend,
    register_virtual,
    registry,
    settle_host_layouts,
)
from fitter.llama.load.loader import Loader
from fitter.llama.load.structs import match_patterns
from fitter.llama.processes import memory_limit, wire
from fitter.llama.processes.worker_exit import OUT_OF_MEMORY_STATUS, is_out_of_memory
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
)

LOG_LINES = 60
"""Lines of llama.cpp's log in an error."""

RAN_OUT_OF_MEMORY = "llama.cpp ran out of memory ({}): end other programs, and try again"


class Commands:
    """The state of the worker between requests. Every public method is a command."""

    def __init__(self) -> None:
        self._loader: Loader | None = None
        self._virtual = False
        self._description = ""
        self._reported = 0
        self._adopted = False
        self._real: real_load.RealLoad | None = None
        self._has_servers = False
        # a real load, and the measurement of a device, have no limit
        self._is_limited = True
        # kept when the loader is replaced, because headers do not depend on devices
        self._headers: Headers | None = None

    @property
    def loads(self) -> int:
        """Dummy loads so far."""
        return self._loader.loads if self._loader else 0

    def _unreported_loads(self) -> int:
        """Dummy loads since the last call."""
        reported, self._reported = self._reported, self.loads
        return self.loads - reported

    def configure(self, description: str) -> None:
        """Replace the virtual devices; without any, commands are about the real ones."""
        if description == self._description:
            return
        loads = self.loads
        if self._loader:
            self._loader.close()
            self._loader = None
        if description:
            register_virtual(description)
        elif self._virtual:
            native.open_backend().fitter_virtual_host_is_described(False)
        self._virtual = bool(description)
        self._description = description
        self._open().loads = loads

    def adopt(self, path: str, plugin: bool, count: int) -> None:
        """Use the ``count`` cards of a CUDA backend that runs without a GPU."""
        load_cuda_backend(path, plugin)
        self._adopted = True
        count_here = sum(device.info.virtual for device in self._open().devices.default)
        if count_here != count:
            raise LibraryError(f"{path} has {count_here} devices, but {count} are described: unset GGML_CUDA_DEVICES")

    def devices(self) -> tuple[DeviceInfo, ...]:
        return tuple(device.info for device in self._open().devices.default)

    def build(self) -> LlamaCpp:
        return native.loaded()

    def host(self) -> DeviceInfo:
        return host_of(self._open().devices)

    def header(self, path: str) -> Header:
        return self._known_headers().read(path)

    def is_tokenizer_read(self, path: str) -> bool:
        return real_load.is_tokenizer_read(path)

    def check_tokenizer(self, path: str) -> None:
        real_load.check_tokenizer(path)

    def file_types(self, files: tuple[str, ...], directory: str) -> FileTypes:
        return file_types(self._known_headers(), files, directory)

    def write_skeleton(self, skeleton: Skeleton, path: str) -> None:
        self._known_headers().write_skeleton(skeleton, path)

    def measure(self, path: str | Skeleton, params: Params, role: str, reserve: bool) -> Breakdown:
        return self._open().measure(path, params, role, reserve=reserve)

    def model_info(self, path: str | Skeleton, params: Params) -> ModelInfo:
        return self._open().model_info(path, params)

    def layout(self, path: str | Skeleton, params: Params) -> Layout:
        return self._open().layout(path, params)

    def caches(self, path: str | Skeleton, params: Params) -> Caches:
        return self._open().caches(path, params)

    def projector(
        self, path: str, device: str | None, flash_attn: FlashAttn, image_min_tokens: int, image_max_tokens: int
    ) -> tuple[Row, ...]:
        devices = self._open().devices
        return projector.measure(path, device, devices, flash_attn, image_min_tokens, image_max_tokens)

    def add_rpc_server(self, endpoint: str) -> None:
        self._has_servers = True
        real_load.add_rpc_server(endpoint)
        if self._loader:
            # loaded models refer to devices by address, and the addresses stay
            self._loader.devices = registry(self._virtual)

    def compute_capabilities(self) -> tuple[tuple[str, int], ...]:
        return tuple(real_load.compute_capabilities(self._open().devices).items())

    def memory(self) -> tuple[DeviceInfo, ...]:
        return tuple(device.info for device in registry(self._virtual).default)

    def speed(self, device: str, memory: int, seconds: float) -> MeasuredSpeed:
        self._is_limited = False
        return real_load.device_speed(device_named(device, self._open().devices), memory, seconds)

    def load(self, path: str, params: Params) -> Loaded:
        self.unload()
        self._is_limited = False
        self._real = real_load.RealLoad(path, params, self._open().devices)
        return Loaded(self._real.breakdown(), self.memory())

    def unload(self) -> None:
        loaded, self._real = self._real, None
        if loaded:
            loaded.close()

    def match(self, patterns: tuple[str, ...], names: tuple[str, ...]) -> tuple[int, ...]:
        return match_patterns(patterns, names)

    def _end(self, status: int = 0) -> None:
        """End the process in the middle of its work."""
        if self._has_servers:
            with contextlib.suppress(Exception):
                real_load.reset_connections()
        os._exit(status)

    def _check_memory(self) -> None:
        """End the process if it takes more memory than a plan may."""
        if self._is_limited and (why := memory_limit.excess()):
            self._run_out(why)

    def _run_out(self, why: str) -> None:
        """End the process because memory ran out; the parent asks a new one."""
        os.write(2, f"\n{why}\n".encode(errors="replace"))
        self._end(OUT_OF_MEMORY_STATUS)

    def _open(self) -> Loader:
        if self._loader is None:
            if not self._virtual:
                settle_host_layouts()
            devices = cuda_registry() if self._adopted else registry(self._virtual)
            self._loader = Loader(devices, self._known_headers())
        return self._loader

    def _known_headers(self) -> Headers:
        self._headers = self._headers or Headers()
        return self._headers


def handle(session: Commands, request: dict[str, Any]) -> dict[str, Any]:
    """Answer one request. A failure becomes an ``error`` in the answer."""
    answer: dict[str, Any] = {}
    try:
        native.libraries().fitter.fitter_log_clear()
        answer["result"] = wire.encode(_call(session, request["command"], request["arguments"]))
    except FitterError as error:
        if (
            session._is_limited
            and isinstance(error, LlamaCppError)
            and is_out_of_memory([str(error), *_log(LOG_LINES)])
        ):
            session._run_out(RAN_OUT_OF_MEMORY.format(error))
        answer["error"] = {"type": type(error).__name__, "message": " ".join(str(error).split())}
    except MemoryError:
        session._run_out(RAN_OUT_OF_MEMORY.format("Cannot allocate memory"))
    except Exception as error:
        sys.excepthook(*sys.exc_info())
        message = f"{request.get('command')} failed in the worker: {type(error).__name__}: {error}"
        answer["error"] = {"type": WorkerError.__name__, "message": " ".join(message.split())}
    answer["loads"] = session._unreported_loads()
    if "error" in answer or request.get("log"):
        answer["log"] = _log(None if request.get("log") else LOG_LINES)
    return answer


def _call(session: Commands, command: str, arguments: dict[str, Any]) -> Any:
    if command.startswith("_") or not callable(function := getattr(session, command, None)):
        raise LlamaCppError(f"the worker knows no command '{command}'")
    kinds = _kinds(getattr(function, "__func__", function))
    return function(**{name: wire.decode(kinds[name], value) for name, value in arguments.items()})


_kinds = functools.cache(typing.get_type_hints)


def _log(count: int | None) -> list[str]:
    try:
        lines = [line.text for line in captured_log()]
    except FitterError:
        return []
    return lines if count is None else lines[-count:]


def main(request_fd: int, answer_fd: int, parent: int) -> None:
    """Serve requests until the parent closes its end of the pipe or is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Processes that this one starts must not inherit the pipes.
    os.set_inheritable(request_fd, False)
    os.set_inheritable(answer_fd, False)

    requests: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    # Native calls release the interpreter's lock, so this thread can end the process even if one hangs.
    session = Commands()
    threading.Thread(target=_read_requests, args=(request_fd, parent, requests.put, session), daemon=True).start()

    native.load_cells()
    with contextlib.suppress(FitterError):
        # every request will fail with this error, and report it
        native.prepare()
    while True:
        answer = handle(session, json.loads(requests.get()))
        _write(answer_fd, json.dumps(answer).encode() + b"\n")


def _read_requests(fd: int, parent: int, put: Callable[[bytes], None], session: Commands) -> None:
    requests, pending = system.Reader(fd), b""
    while True:
        is_ready = requests.is_ready(memory_limit.CHECK_SECONDS)
        session._check_memory()
        if not is_ready:
            # The pipe stays open if the parent was killed but a fork of it is alive.
            if os.getppid() != parent:
                session._end()
            continue
        data = requests.read()
        if not data:
            session._end()
        *lines, pending = (pending + data).split(b"\n")
        for line in filter(None, lines):
            put(line)


def _write(fd: int, data: bytes) -> None:
    view = memoryview(data)
    try:
        while view:
            view = view[os.write(fd, view) :]
    except BrokenPipeError:
        os._exit(0)
