"""Starting llama-server with the spy, and reading what it wrote."""

from __future__ import annotations

import atexit
import functools
import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fitter.llama.types import VirtualDevice
from tools.comparisons import upstream

_SOURCE = Path(__file__).with_name("spy.cpp")
_LLAMA = upstream.ROOT / "vendor" / "llama.cpp" / "source"
_SECONDS = 300
Key = tuple[str, str, bool]
"""Buffer type, device ('' for the host's) and whether it is the host's."""
Bytes = tuple[int, int, int]
"""Model, context and compute."""


@dataclass(frozen=True)
class Measured:
    """A dummy load of its fit: the model's ``path``, its context's ``params``, the bytes of its buffers."""

    path: str
    params: Mapping[str, int]
    rows: Mapping[Key, Bytes]


@dataclass(frozen=True)
class Decided:
    """What its fit hands to the load."""

    succeeded: bool
    params: Mapping[str, int]
    n_gpu_layers: int
    tensor_split: tuple[float, ...] | None
    override_tensor: tuple[str, ...]


@dataclass(frozen=True)
class ServerFit:
    """All that it did: ``measured`` in order, and bytes of a projector by device; ``log`` is what it printed."""

    measured: tuple[Measured, ...]
    decided: Decided | None
    projector: Mapping[str, int]
    log: str


class ServerEnded(Exception):
    """It ended before its fit had decided; what it said."""


@functools.cache
def spy() -> Path:
    """The compiled spy, in a directory that ends with this process; fails with what the compiler says."""
    directory = tempfile.TemporaryDirectory(prefix="fitter-spy-")
    atexit.register(directory.cleanup)
    path = Path(directory.name) / "spy.so"
    command = [
        *(os.environ.get("CXX", "c++"), "-std=c++17", "-O1", "-Wall", "-Wextra", "-shared", "-fPIC"),
        *(str(_SOURCE), "-o", str(path), "-ldl"),
        *(f"-I{_LLAMA / below}" for below in ("include", "ggml/include", "src", "common", "tools/mtmd")),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
    assert done.returncode == 0, done.stderr
    return path


def ask(model: Path, devices: Sequence[VirtualDevice], arguments: Sequence[str] = ()) -> ServerFit:
    """What llama-server does with ``model`` on ``devices`` when it is started with ``arguments``, up to the load.

    Raises ``ServerEnded``.
    """
    names = ",".join(device.name for device in devices)
    command = [
        str(upstream.tool("llama-server")),
        "-m",
        str(model),
        "-dev",
        names,
        "--offline",
        "--port",
        "0",
        *arguments,
    ]
    with tempfile.NamedTemporaryFile("r", encoding="utf-8", prefix="fitter-spy-") as file:
        environment = {**_clean(upstream.environment(devices)), "LD_PRELOAD": str(spy()), "FITTER_SPY": file.name}
        done = subprocess.run(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=False,
        )
        said = file.read()
    log = done.stdout + done.stderr
    if done.returncode:
        raise ServerEnded(f"llama-server ended with {done.returncode}: {log[-2000:]}")
    return _parsed(said, log)


def _clean(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if not name.startswith("LLAMA_ARG_")}


def _parsed(said: str, log: str) -> ServerFit:
    measured: list[tuple[str, dict[str, int], dict[Key, Bytes]]] = []
    decided, projector, succeeded = None, {}, False
    for line in said.splitlines():
        kind, *words = line.split("\t")
        if kind == "row":
            buffer_type, device, is_host, *sizes = words
            model, context, compute = map(int, sizes)
            if model or context or compute:
                # weights that are repacked for the processor are not in a host buffer type, but in its memory
                host = is_host == "1" or device == "CPU"
                measured[-1][2][(buffer_type, "" if host else device, host)] = (model, context, compute)
        elif kind == "projector":
            projector[words[0]] = int(words[1])
        elif kind == "status":
            succeeded = words[0] == "0"
        else:
            values = dict(word.partition("=")[::2] for word in words)
            path = values.pop("path")
            if kind == "measured":
                measured.append((path, {name: int(value) for name, value in values.items()}, {}))
            elif kind == "decided":
                decided = _decided(values, succeeded)
    return ServerFit(tuple(Measured(*each) for each in measured), decided, projector, log)


def _decided(values: dict[str, str], succeeded: bool) -> Decided:
    layers = int(values.pop("n_gpu_layers"))
    split = tuple(map(float, filter(None, values.pop("tensor_split").split(","))))
    overrides = tuple(filter(None, values.pop("override_tensor").split(",")))
    params = {name: int(value) for name, value in values.items()}
    return Decided(succeeded, params, layers, split if any(split) else None, overrides)
