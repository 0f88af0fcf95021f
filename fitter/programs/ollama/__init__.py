"""Ollama, which starts a llama-server for each model: what it sets, keeps and lacks (here), and its Modelfile (text).

Read at commit fb30760: ``server/sched.go`` and ``llm/llama_server.go``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from fitter.errors import UsageError
from fitter.model.header import Model
from fitter.programs.facts import RULES
from fitter.programs.llama_server import LlamaServer
from fitter.programs.program import Asked, Attempt, Words
from fitter.storage import read_data
from fitter.text import MIB

_RULES = read_data(__file__, RULES)["rules"]

LARGE_IMAGES = frozenset(_RULES["large_images"])
"""Architectures whose images it gives more tokens than llama.cpp does."""

HEADROOM: int = _RULES["headroom_mib"] * MIB
"""Bytes beyond a projector that each card must have free."""

_PLACES = "it places whole layers, split by free memory: leave it out"


class Ollama(LlamaServer):
    """Ollama: a llama-server with one batch, split by free memory over the devices that Ollama sees."""

    name: ClassVar[str] = "ollama"
    title: ClassVar[str] = "Ollama"
    lacks: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("tensor_split", "override_tensor", "cpu_moe", "n_cpu_moe", "n_cpu_ffn"), _PLACES),
        "moe_cache_size": "leave it out",
        "split_mode": "plan with -sm layer",
        "offload_kqv": "leave it out",
        "op_offload": "leave it out",
        "kv_unified": "each slot has a cache of its own; -np 1 has one",
        "n_batch": "",
    }
    knows: ClassVar[frozenset[str]] = frozenset(
        {"cache_idle_slots", "cache_ram", "checkpoint_min_step", "ctx_checkpoints"}
    )

    def batches(self, asked: Asked) -> tuple[int | None, int | None]:
        """Return one size for both, which is all that ``num_batch`` says."""
        n_batch, n_ubatch = super().batches(asked)
        sizes = [size for size in (n_batch, n_ubatch) if size is not None]
        return (min(sizes), min(sizes)) if sizes else (None, None)

    def of_model(self, model: Model, words: Mapping[str, Any]) -> Words:
        slots, has_one = words.get("n_seq_max") or 1, bool(model.pooling) or model.architecture in _RULES["one_slot"]
        own: Words = {"n_seq_max": 1} if has_one else {}
        if slots > 1 and has_one:
            raise UsageError(f"Ollama has one slot for {model.architecture} models: leave -np {slots} out")
        n_ctx, most, has_images = (words.get("n_ctx") or 0) // slots, model.n_ctx_train, bool(words.get("mmproj"))
        if most and n_ctx > most:
            raise UsageError(
                f"Ollama ends the context of a slot at the {most} tokens that the model was trained for: give -c "
                f"{most * slots} or less"
            )
        least: int = _RULES["n_ctx_with_images"]
        if has_images and 0 < n_ctx < least:
            raise UsageError(
                f"Ollama gives a slot of a model with images {least} tokens at least: give -c {least * slots} or more"
            )
        if has_images and model.architecture in LARGE_IMAGES:
            own["image_min_tokens"] = _RULES["image_min_tokens"]
        return own

    def attempts(self, model: Model, free: Mapping[str, int], words: Mapping[str, Any]) -> list[list[Attempt]]:
        """List plans on as few of the largest devices as may have room for the model, then on all."""
        names, groups = sorted(free, key=lambda name: -free[name]), [list(free)]
        if "devices" not in words and words.get("split_mode", "layer") == "layer":
            few = (count for count in range(1, len(names)) if sum(map(free.__getitem__, names[:count])) > model.bytes)
            groups = [*([name for name in free if name in names[:count]] for count in [*few][:1]), *groups]
        return [
            [
                Attempt({"devices": tuple(group), **each.words} if len(group) < len(free) else each.words, each.layers)
                for each in _with_images(model, {name: free[name] for name in group}, words)
            ]
            for group in groups
        ]


def _with_images(model: Model, free: Mapping[str, int], words: Mapping[str, Any]) -> list[Attempt]:
    """List the projector on the first device with all layers, on the host without (``shouldDisableMMProjOffload``)."""
    if not words.get("mmproj") or "mmproj_device" in words:
        return [Attempt()]
    file, all_layers = Path(words["mmproj"]), model.n_layer + 1
    size = file.stat().st_size if file.exists() else 0
    on_host = {"mmproj_device": "none"}
    if not free or min(free.values()) < size + HEADROOM:
        return [Attempt(on_host)]
    on_first = Attempt({"mmproj_device": next(iter(free))}, (all_layers,))
    if "n_gpu_layers" in words:
        return [on_first, Attempt(on_host, range(all_layers))]
    return [
        replace(on_first, words={**on_first.words, "n_gpu_layers": -1}),
        Attempt(on_host, range(all_layers)),
        Attempt({**on_host, "n_gpu_layers": model.n_layer}),
    ]


PROGRAMS = (Ollama(),)
