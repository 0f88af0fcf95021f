"""ik_llama.cpp, a fork of llama.cpp: what its server sets and lacks (here), how it cuts layers, and its arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from fitter.errors import UsageError
from fitter.llama.types import Params
from fitter.model.header import Model
from fitter.programs.facts import RULES, Facts
from fitter.programs.ik_llama.layers import computed_weights, layer_sizes, shares
from fitter.programs.llama_server import LlamaServer
from fitter.programs.program import Asked, Attempt, Words
from fitter.storage import read_data

_RULES = read_data(__file__, RULES)["rules"]


class IkLlama(LlamaServer):
    """ik_llama.cpp's server: its slots divide one cache, in which sliding windows keep every token."""

    name: ClassVar[str] = "ik_llama"
    title: ClassVar[str] = "ik_llama.cpp"
    lacks: ClassVar[Mapping[str, str]] = {
        "moe_cache_size": "leave it out",
        "split_mode": "plan with -sm layer; its own -sm graph splits tensors too, but no plan can be made for that",
        "kv_unified": "each slot has its part of the context; -np 1 gives it to one",
    }
    knows: ClassVar[frozenset[str]] = frozenset({"cache_ram", "checkpoint_min_step", "ctx_checkpoints", "spec_type"})

    def outputs(self, asked: Asked, facts: Facts, n_seq_max: int) -> int:
        return 0

    def of_model(self, model: Model, words: Mapping[str, Any]) -> Words:
        if model.architecture not in _RULES["architectures"]:
            raise UsageError(f"ik_llama.cpp loads no {model.architecture} models: plan for llama-server")
        return {"swa_full": True}

    def attempts(self, model: Model, free: Mapping[str, int], words: Mapping[str, Any]) -> list[list[Attempt]]:
        """List plans with the output on a device only beside all layers, or where it is a tensor that ``-ot`` moves."""
        n_units = model.n_layer + 1
        is_apart = any(tensor.name == "output.weight" for tensor in model.tensors)
        layers = {0, n_units, *(range(2, n_units) if is_apart else ())}
        plans = [Attempt({}, layers)]
        if "n_gpu_layers" not in words and free:
            on_host = [{"n_gpu_layers": -1, "offload_kqv": False}] if "offload_kqv" not in words else []
            plans += map(Attempt, [{"n_gpu_layers": -1}, *on_host, {"n_gpu_layers": 0}])
        if not words.get("mmproj") or "mmproj_device" in words or not free:
            return [plans]
        # it computes images on the first device of all, or on the host
        places = next(iter(free)), "none"
        return [[Attempt({**each.words, "mmproj_device": place}, each.layers) for place in places for each in plans]]

    def split(
        self, model: Model, params: Params, caches: Callable[[], Sequence[int]], counts: Sequence[int]
    ) -> Sequence[float] | None:
        first, counts = model.n_layer + 1 - sum(counts), list(counts)
        if first > 0 and any(counts):
            # without all layers its -ts leaves the output out
            last = max(device for device, count in enumerate(counts) if count)
            counts[last] -= 1
        return shares(layer_sizes(model, params, caches()), first, counts)

    def more(self, model: Model) -> Mapping[int, int]:
        return computed_weights(model)


PROGRAMS = (IkLlama(),)
