"""A stand-in for llama.cpp that counts bytes as it does, for searches too many or too odd to load a model for.

It takes ``Params`` as llama.cpp does (split points in single precision, the first matching override wins), so that a
search which says the wrong thing gets the wrong bytes. The integration tests run the same search on the real libllama.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import Any

from fitter.llama.types import LAYOUT_DEVICE, Breakdown, Layout, LayoutEntry, Params, Row
from fitter.machine.speed import DeviceSpeed, HostSpeed
from fitter.planning.placing.placement import counts_for_split
from fitter.planning.request.request import DeviceLimit, HostLimit, Measure, Request
from fitter.planning.request.shared import remembered
from fitter.planning.search.best_plan import LoadCalls
from fitter.planning.speed.cost import Workload
from fitter.planning.speed.model_facts import LayerFacts, ModelFacts, WeightFacts

MIB = 1024 * 1024
EXPERTS = re.compile(r"ffn_(up|down|gate_up|gate)_(ch|)exps")
FFN = re.compile(r"ffn_(up|down|gate)\.")
CACHE_BITS = {"f16": 16, "q8_0": 8.5, "q4_0": 4.5}


@dataclass(frozen=True)
class SyntheticModel:
    """Sizes in bytes; ``experts`` per expert tensor (empty for a dense model), ``cache`` per layer and token."""

    n_layer: int = 8
    attention: int = 20 * MIB
    ffn: tuple[int, ...] = (30 * MIB, 30 * MIB, 40 * MIB)
    experts: tuple[int, ...] = ()
    output: int = 100 * MIB
    embedding: int = 100 * MIB
    cache: int = 4096
    n_ctx_train: int = 32768
    compute: int = 50 * MIB
    compute_per_ctx: int = 1024
    dense_lead: int = 0
    bias: bool = False

    def tensors(self) -> list[tuple[str, int]]:
        """Name and bytes of every weight that a device may hold."""
        found = []
        for layer in range(self.n_layer):
            found.append((f"blk.{layer}.attn_q.weight", self.attention))
            expert = self.experts and layer >= self.dense_lead
            for kind, size in zip(("gate", "up", "down"), self.experts if expert else self.ffn, strict=True):
                stem = f"blk.{layer}.ffn_{kind}" + ("_exps" if expert else "")
                found.append((f"{stem}.weight", size))
                if self.bias:
                    found.append((f"{stem}.bias", 1024))
        return [*found, ("output.weight", self.output)]


DENSE = SyntheticModel()
MOE = SyntheticModel(experts=(200 * MIB, 200 * MIB, 250 * MIB))
MOE_AFTER_DENSE = replace(MOE, dense_lead=1)
"""Its first layer has no experts."""


@dataclass
class SyntheticLlama:
    """Answers ``measure`` and ``record`` for one model on one machine, and counts how often it was asked."""

    model: SyntheticModel
    limits: tuple[DeviceLimit, ...]
    asked: list[Params] = field(default_factory=list)
    records: int = 0

    def measure(self, params: Params) -> Breakdown:
        """A dummy load."""
        assert params not in self.asked, "the same parameters were measured twice"
        self.asked.append(params)
        model = self.model
        names = list(params.devices if params.devices is not None else [limit.name for limit in self.limits])
        units = model.n_layer + 1
        n_gpu_layers = min(params.n_gpu_layers if params.n_gpu_layers >= 0 else units, units) if names else 0
        split = params.tensor_split or tuple(1.0 if d == 0 else 0.0 for d in range(len(names)))
        counts = counts_for_split(n_gpu_layers, split) if names else ()
        home = ["Host"] * (units - n_gpu_layers) + [names[d] for d, count in enumerate(counts) for _ in range(count)]
        n_ctx = params.n_ctx or model.n_ctx_train
        use = {name: [0, 0, 0] for name in ["Host", *names]}
        spilled = 0
        for name, size in model.tensors():
            layer = int(name.split(".")[1]) if name.startswith("blk.") else model.n_layer
            where = home[layer]
            for override in params.tensor_buft_overrides:
                if re.search(override.pattern, name):
                    where = "Host" if override.buffer_type == "CPU" else override.buffer_type
                    break
            use[where][0] += size
            spilled = max(spilled, size if where == "Host" else 0)
        use["Host"][0] += model.embedding
        for layer in range(model.n_layer):
            use[home[layer]][1] += self.cache(params, n_ctx)
        pipeline = len(names) > 1 and n_gpu_layers == units and not params.tensor_buft_overrides
        for d, name in enumerate(names):
            if counts[d] or use[name][0]:
                use[name][2] = (model.compute + model.compute_per_ctx * n_ctx) * (2 if pipeline else 1)
                use[name][2] = use[name][2] * params.n_ubatch // 512
                use[name][2] += model.output // 4 if home[-1] == name else 0
                use[name][2] += spilled if d == 0 and params.op_offload else 0
        use["Host"][2] = 10 * MIB + n_ctx * 8
        rows = tuple(
            Row("CPU" if name == "Host" else name, None if name == "Host" else name, name == "Host", *use[name])
            for name in [*names, "Host"]
        )
        return Breakdown(rows, tuple(names), n_ctx, params.flash_attn != "off")

    def cache(self, params: Params, n_ctx: int) -> int:
        """KV cache of a layer."""
        bits = CACHE_BITS[params.type_k] + CACHE_BITS[params.type_v]
        return int(self.model.cache * n_ctx * bits / 32)

    def record(self, params: Params) -> Layout:
        """A dummy load on a recording device."""
        self.records += 1
        n_ctx = params.n_ctx or self.model.n_ctx_train
        weights = [LayoutEntry(LAYOUT_DEVICE, name, "model", size) for name, size in self.model.tensors()]
        caches = [
            LayoutEntry(LAYOUT_DEVICE, f"cache_k_l{layer}", "context", self.cache(params, n_ctx))
            for layer in range(self.model.n_layer)
        ]
        embedding = LayoutEntry("CUDA_Host", "token_embd.weight", "model", self.model.embedding)
        return Layout((embedding, *weights, *caches), 128, n_ctx)


def load_calls(llama: SyntheticLlama, measure: Measure | None = None, **more: Any) -> LoadCalls:
    """Return the calls of a fit to ``llama``, which confirms what it has measured without another load."""
    measured = remembered(measure or llama.measure)
    return LoadCalls(measured, **{"record": llama.record, "confirm": measured, "dummy_loads": lambda: 0, **more})


def limits(*mib: int, margin: int = 0) -> tuple[DeviceLimit, ...]:
    """Devices with so many MiB each."""
    return tuple(
        DeviceLimit(f"CUDA{d}", "virtual", size * MIB, size * MIB, margin * MIB, f"CUDA{d}")
        for d, size in enumerate(mib)
    )


def request(
    model: SyntheticModel,
    devices: tuple[DeviceLimit, ...],
    host_mib: int | None = None,
    params: Params | None = None,
    fixed: tuple[str, ...] = (),
    fit_ctx: int = 4096,
    paging: bool = False,
    chooses_micro_batch: bool = False,
) -> Request:
    """A fit of ``model`` on ``devices``, with the micro batch of ``params`` unless it ``chooses_micro_batch``."""
    host = None if host_mib is None else host_mib * MIB
    pattern = EXPERTS if model.experts else FFN
    return Request(
        params=params or Params(),
        fixed=frozenset(fixed) | (frozenset() if chooses_micro_batch else {"n_batch", "n_ubatch"}),
        devices=devices,
        host=HostLimit(host, host, 0, paging),
        n_layer=model.n_layer,
        n_ctx_train=model.n_ctx_train,
        is_movable=lambda name: pattern.search(name) is not None,
        is_expert_model=bool(model.experts),
        facts=facts_of(model),
        fit_ctx=fit_ctx,
        model_bytes=model.embedding + sum(size for _, size in model.tensors()),
    )


def facts_of(model: SyntheticModel) -> ModelFacts:
    """What pricing needs of ``model``: half a byte per weight, two of sixteen experts used, grouped attention."""
    tensors: dict[int, list[WeightFacts]] = {}
    for name, size in [*model.tensors(), ("token_embd.weight", model.embedding)]:
        layer = int(name.split(".")[1]) if name.startswith("blk.") else model.n_layer
        tensors.setdefault(layer, []).append(WeightFacts(name, size, 2 * size, "exps" in name))
    layers = tuple(
        LayerFacts(tuple(tensors[layer]), n_head=32, n_head_kv=8, key_length=128, value_length=128, n_attention=1)
        for layer in range(model.n_layer)
    )
    output = tuple(weight for weight in tensors[model.n_layer] if weight.name == "output.weight")
    return ModelFacts(model.n_layer, layers, output, 4096, 16, 2, 0)


CARD = DeviceSpeed(1000e9, 160e12, 32e9, "cuda", "8.9", "test", True)
SLOW_CARD = DeviceSpeed(200e9, 20e12, 8e9, "cuda", "8.9", "test", True)
REMOTE_CARD = DeviceSpeed(800e9, 100e12, 1e8, "remote", "", "test", True, 2e-4)
DESKTOP = HostSpeed(60e9, "test", 8)


def priced(asked: Request, model: SyntheticModel, *speeds: DeviceSpeed, host: HostSpeed = DESKTOP) -> Request:
    """``asked``, with what it takes to compare placements by time; the last of ``speeds`` is that of all others."""
    found = {d.name: speeds[min(i, len(speeds) - 1)] if speeds else CARD for i, d in enumerate(asked.devices)}
    return replace(asked, speeds=found, host_speed=host, workload=Workload(2048, 512))
