"""A Modelfile as Ollama reads it: its documented grammar, and the parameters that its ``api/types.go`` has."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fitter.planning.plan.plan import DeviceUse
from tools.models.shapes import Shape

_INSTRUCTIONS = ("FROM", "PARAMETER", "ADAPTER", "REQUIRES", "DRAFT", "TEMPLATE", "SYSTEM", "LICENSE", "MESSAGE")
_INTEGERS = ("num_ctx", "num_batch", "num_gpu", "main_gpu", "num_thread", "draft_num_predict")
_BOOLEANS = ("use_mmap",)


@dataclass(frozen=True)
class Modelfile:
    """Instructions in their order, and parameters by their names."""

    instructions: tuple[tuple[str, str], ...]
    parameters: dict[str, int | bool]
    comments: tuple[str, ...]

    def of(self, instruction: str) -> list[str]:
        return [value for name, value in self.instructions if name == instruction]


def parse(text: str) -> Modelfile:
    """Read ``text``. Fails where Ollama would refuse it, or drop a character."""
    instructions: list[tuple[str, str]] = []
    parameters: dict[str, int | bool] = {}
    comments: list[str] = []
    for line in text.split("\n"):
        if line.startswith("#"):
            comments.append(line)
            continue
        match = re.fullmatch(r"([A-Za-z]+)[ \t]+(.+)", line)
        assert match, f"no instruction: {line!r}"
        name, value = match[1].upper(), _unquoted(match[2])
        assert name in _INSTRUCTIONS, f"Ollama has no instruction {name}"
        assert value.isprintable(), f"Ollama drops characters of {value!r}"
        if name == "PARAMETER":
            key, value = value.split(" ", 1)
            assert key not in parameters, f"{key} is there twice"
            if key in _INTEGERS:
                parameters[key] = int(value)
            else:
                assert key in _BOOLEANS and value in ("true", "false"), f"Ollama has no {key} {value}"
                parameters[key] = value == "true"
        instructions.append((name, value))
    assert any(name == "FROM" for name, _ in instructions), "no FROM line"
    return Modelfile(tuple(instructions), parameters, tuple(comments))


def _unquoted(value: str) -> str:
    value = value.strip()
    if not value.startswith('"'):
        return value
    assert len(value) > 1 and value.endswith('"') and not value.startswith('"""'), f"an open quote: {value!r}"
    return value[1:-1]


@dataclass(frozen=True)
class LlamaServer:
    """The llama-server that Ollama starts: parameters of its load, and the device of a projector."""

    parameters: dict[str, Any]
    mmproj_device: str


ONE_SLOT = (
    "qwen3vl",
    "qwen3vlmoe",
    "qwen35",
    "qwen35moe",
    "qwen3next",
    "lfm2",
    "lfm2moe",
    "nemotron_h",
    "nemotron_h_moe",
)
"""``load`` in server/sched.go, line 507."""


def llama_server(found: Modelfile, shape: Shape, devices: Sequence[DeviceUse]) -> LlamaServer:
    """Start ``found`` as Ollama does at commit fb30760, on a machine with ``devices``.

    ``startLlamaServer`` in llm/llama_server.go, line 348; nothing tells llama.cpp how to split, which does so by free
    memory. The lines below are of that file, where no other is named.
    """
    started = " ".join(line.partition(", which holds")[0] for line in found.comments if "start the server" in line)
    given = dict(re.findall(r"([A-Z0-9_]+)=(\S+)", started))
    visible = next((value for name, value in given.items() if name.endswith("VISIBLE_DEVICES")), None)
    kind = {"ROCR_VISIBLE_DEVICES": "ROCm", "GGML_VK_VISIBLE_DEVICES": "Vulkan"}
    numbers = visible.split(",") if visible else []
    names = [f"{kind.get(next(iter(given)), 'CUDA')}{number}" for number in numbers] or [each.name for each in devices]
    of = found.parameters
    # of several cards it takes one alone where it thinks that the model has room there: server/sched.go, line 1009
    assert len(names) < 2 or of["num_gpu"] == 0 or given.get("OLLAMA_SCHED_SPREAD") == "1"
    slots = int(given.get("OLLAMA_NUM_PARALLEL", "1"))
    assert slots == 1 or shape.architecture not in ONE_SLOT
    most = shape.metadata[".context_length"]
    assert isinstance(most, int)
    # server/sched.go, lines 161 and 793
    n_ctx = min(of["num_ctx"], most)
    type_k = given.get("OLLAMA_KV_CACHE_TYPE", "f16")
    # lines 614 to 621
    flash_attn = {"1": "on", "0": "off"}.get(given.get("OLLAMA_FLASH_ATTENTION", ""), "auto")
    parameters = {
        # lines 375 and 376
        "n_ctx": n_ctx * slots,
        "n_seq_max": slots,
        # lines 404 to 409
        "n_gpu_layers": of["num_gpu"],
        # lines 590 and 591
        "n_batch": of["num_batch"],
        "n_ubatch": of["num_batch"],
        "type_k": type_k,
        "type_v": type_k,
        "flash_attn": flash_attn,
        "devices": names,
    }
    # lines 670 to 691, of a projector of less than a mebibyte
    is_on_host = of["num_gpu"] < shape.n_layer + 1 or any(each.free < (1 << 30) + (1 << 20) for each in devices)
    return LlamaServer(parameters, "host" if is_on_host or not names else names[0])
