"""Read a plan with upstream's own code: with its parser as llama-server calls it, and with its reader of presets."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fitter.llama.types import Params, TensorBuftOverride, VirtualDevice
from tests.support.upstream_program import compile_program
from tools.comparisons import upstream

_SOURCE = Path(__file__).with_name("reader.cpp")
_FLASH_ATTN = {"auto": "auto", "enabled": "on", "disabled": "off"}


@dataclass(frozen=True)
class Reading:
    """Parameters that llama-server would run with; ``fits_itself`` is its own fit.

    ``beside`` are those of what is loaded beside the model, and of what the program keeps.
    """

    model: str
    params: Params
    fits_itself: bool
    beside: tuple[tuple[str, str], ...] = field(default=(), compare=False)


def build(directory: Path) -> Path:
    """Compile the reader of arguments and presets."""
    return compile_program(_SOURCE, directory)


def read(
    reader: Path,
    devices: Sequence[VirtualDevice],
    words: Sequence[str] = (),
    variables: Mapping[str, str] | None = None,
) -> Reading:
    """Parse the arguments ``words`` and the environment ``variables`` as llama-server does."""
    pairs = [tuple(line.split("\t")) for line in _run([str(reader), "params", *words], devices, variables or {})]
    found = dict(pairs)
    several = {
        name: tuple(value for key, value in pairs if key == name) for name in ("tensor_split", "override_tensor")
    }
    overrides = (value.split("=") for value in several["override_tensor"])
    n_gpu_layers = int(found["n_gpu_layers"])
    assert n_gpu_layers != -1, "llama-server would choose the layers itself"
    # the list ends with a null device
    devices_read = found["devices"].removesuffix(",none")
    params = Params(
        n_ctx=int(found["n_ctx"]),
        n_gpu_layers=max(n_gpu_layers, -1),
        tensor_split=tuple(map(float, several["tensor_split"])) or None,
        tensor_buft_overrides=tuple(TensorBuftOverride(pattern, target) for pattern, target in overrides),
        n_batch=int(found["n_batch"]),
        n_ubatch=int(found["n_ubatch"]),
        n_seq_max=int(found["n_seq_max"]),
        kv_unified=found["kv_unified"] == "1",
        type_k=found["type_k"],
        type_v=found["type_v"],
        flash_attn=_FLASH_ATTN[found["flash_attn"]],
        offload_kqv=found["offload_kqv"] == "1",
        op_offload=found["op_offload"] == "1",
        swa_full=found["swa_full"] == "1",
        embeddings=found["embeddings"] == "1",
        split_mode=found["split_mode"],
        main_gpu=int(found["main_gpu"]),
        devices=None if not devices_read else () if devices_read == "none" else tuple(devices_read.split(",")),
    )
    beside = tuple((key, value) for key, value in pairs if key.startswith("beside "))
    return Reading(found["model"], params, found["fit"] == "1", beside)


def presets(reader: Path, file: Path) -> dict[str, list[str]]:
    """The name of every preset in ``file``, and the arguments that llama-server starts that model with."""
    found: dict[str, list[str]] = {}
    name = ""
    for line in _run([str(reader), "preset", str(file)], (), {}):
        if line.startswith("\t"):
            found[name].append(line[1:])
        else:
            name = line
            found[name] = []
    return found


def preset(reader: Path, file: Path) -> tuple[str, list[str]]:
    """The one preset in ``file``, as ``presets`` has it."""
    (found,) = presets(reader, file).items()
    return found


def fit_print(devices: Sequence[VirtualDevice], words: Sequence[str], variables: Mapping[str, str]) -> list[str]:
    """The memory that ``llama-fit-params`` prints for these arguments and that environment."""
    return _run([str(upstream.tool("llama-fit-params")), "--fit-print", "on", *words], devices, variables)


def _run(command: list[str], devices: Sequence[VirtualDevice], variables: Mapping[str, str]) -> list[str]:
    own = {name: value for name, value in upstream.environment(devices).items() if not name.startswith("LLAMA_ARG_")}
    environment = {**own, **variables}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout.rstrip("\n").split("\n")
