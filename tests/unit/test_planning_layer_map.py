"""Where each layer of a plan is: by llama.cpp's rules, and never otherwise than it measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from fitter.llama.types import (
    LAYOUT_DEVICE,
    Breakdown,
    Layout,
    LayoutEntry,
    Params,
    Row,
    TensorBuftOverride,
    TensorInfo,
)
from fitter.model.header import Model
from fitter.output.pictures.plan_pictures import Run, layer_svg, runs
from fitter.planning.plan.layer_map import LayerMap, MapCell, map_of
from fitter.planning.plan.plan import Plan
from tests.support.cases import cases, named_cases
from tests.support.plans import make_plan

N_LAYER = 4
EMBEDDING = 9 * 2**20
WEIGHTS = {"attn_q": 100, "ffn_up_exps": 1000, "ffn_norm": 10}
NAMES = [
    "token_embd.weight",
    *(f"blk.{layer}.{name}.weight" for layer in range(N_LAYER) for name in WEIGHTS),
    "output.weight",
]
ENTRIES = (
    LayoutEntry("CUDA_Host", "token_embd.weight", "model", EMBEDDING),
    *(
        LayoutEntry(LAYOUT_DEVICE, f"blk.{layer}.{name}.weight", "model", size)
        for layer in range(N_LAYER)
        for name, size in WEIGHTS.items()
    ),
    LayoutEntry(LAYOUT_DEVICE, "output.weight", "model", 70),
    *(LayoutEntry(LAYOUT_DEVICE, f"cache_k_l{layer}", "context", 20) for layer in range(N_LAYER)),
)
MODEL = Model(
    path=Path("m.gguf"),
    files=(Path("m.gguf"),),
    name="m",
    architecture="llama",
    bytes=0,
    n_layer=N_LAYER,
    n_layer_nextn=0,
    n_ctx_train=4096,
    n_expert=8,
    tensors=tuple(TensorInfo(name, "F32", (1,), 1) for name in NAMES),
    metadata={},
)
LAYOUT = Layout(ENTRIES, 1, 4096)


def replace_bytes(tensor: TensorInfo, size: int) -> TensorInfo:
    return TensorInfo(tensor.name, tensor.type, tensor.shape, size)


def plan_with(params: Params, *on_devices: int, caches: Sequence[int] = (0, 0), on_host: int = 0) -> Plan:
    """A plan whose devices, and whose host beside the embedding, have so many bytes of weights and caches."""
    names = ("CUDA0", "CUDA1")
    rows = tuple(
        Row(name, name, False, size - cache, cache, 5)
        for name, size, cache in zip(names, on_devices, caches, strict=True)
    )
    # what the host has for a device is no memory of it
    rows = (*rows, Row("CUDA_Host", "CUDA0", True, EMBEDDING + on_host, 0, 5))
    return replace(make_plan(params), breakdown=Breakdown(rows, names, 4096, True))


def where(found: LayerMap | None, group: str) -> list[tuple[int, dict[str, int]]]:
    assert found is not None
    return [(cell.layer, dict(cell.bytes)) for cell in found.cells if cell.group == group]


def test_layers_are_divided_as_llama_cpp_does() -> None:
    plan = plan_with(Params(n_ctx=4096, n_gpu_layers=4, tensor_split=(3.0, 1.0)), 3 * 1130, 70)
    found = map_of(plan, MODEL, LAYOUT, [-1] * len(NAMES))
    assert where(found, "experts") == [(layer, {"host" if layer < 1 else "CUDA0": 1000}) for layer in range(4)]
    assert where(found, "embedding and output") == [(-1, {"host": EMBEDDING}), (4, {"CUDA1": 70})]
    assert where(found, "KV cache")[0] == (0, {"host": 20})
    assert found is not None and found.places == ("CUDA0", "CUDA1", "host")


def test_overrides_come_first() -> None:
    overrides = (TensorBuftOverride("exps", "CPU"), TensorBuftOverride("output", "CUDA0"))
    params = Params(n_ctx=4096, n_gpu_layers=-1, tensor_split=(1.0, 1.0), tensor_buft_overrides=overrides)
    plan = plan_with(params, 3 * 130 + 70, 130)
    matches = [0 if "exps" in name else 1 if name.startswith("output") else -1 for name in NAMES]
    found = map_of(plan, MODEL, LAYOUT, matches)
    assert where(found, "experts") == [(layer, {"host": 1000}) for layer in range(4)]
    assert where(found, "embedding and output") == [(-1, {"host": EMBEDDING}), (4, {"CUDA0": 70})]
    assert where(found, "attention") == [(layer, {"CUDA0" if layer < 3 else "CUDA1": 100}) for layer in range(4)]


def test_the_cache_stays_on_the_host() -> None:
    params = Params(n_ctx=4096, n_gpu_layers=-1, tensor_split=(1.0, 0.0), offload_kqv=False)
    plan = plan_with(params, 4 * 1110 + 70, 0)
    assert where(map_of(plan, MODEL, LAYOUT, [-1] * len(NAMES)), "KV cache") == [(n, {"host": 20}) for n in range(4)]


@named_cases(
    ("other bytes", Params(n_ctx=4096, n_gpu_layers=-1, tensor_split=(1.0, 0.0)), (9 * 2**20, 0)),
    ("rows of every matrix", Params(n_ctx=4096, n_gpu_layers=-1, split_mode="row"), (4590, 0)),
)
def test_no_map_is_better_than_a_wrong_one(params: Params, on_devices: tuple[int, int]) -> None:
    assert map_of(plan_with(params, *on_devices), MODEL, LAYOUT, [-1] * len(NAMES)) is None


WITHOUT_EXPERTS = replace(LAYOUT, entries=tuple(entry for entry in ENTRIES if "exps" not in entry.name))
ON_FIRST = Params(n_ctx=4096, n_gpu_layers=-1, tensor_split=(3.0, 2.0))


@named_cases(
    ("the host computes with them", (3 * 130, 130 + 70), ["host"] * 4),
    ("a device of another kind has kernels for them", (3 * 130, 1130 + 70), ["host"] * 3 + ["CUDA1"]),
    ("all devices are of another kind", (3 * 1130, 1130 + 70), ["CUDA0"] * 3 + ["CUDA1"]),
)
def test_weights_of_no_layout_are_where_they_were_measured(on_devices: tuple[int, int], expected: list[str]) -> None:
    sizes = {"exps": 1000}
    model = replace(MODEL, tensors=tuple(replace_bytes(t, sizes.get(t.name[-11:-7], 1)) for t in MODEL.tensors))
    plan = plan_with(ON_FIRST, *on_devices, on_host=1000 * expected.count("host"))
    found = map_of(plan, model, WITHOUT_EXPERTS, [-1] * len(NAMES))
    assert where(found, "experts") == [(layer, {place: 1000}) for layer, place in enumerate(expected)]
    assert found is not None and found.on("host") == plan.breakdown.host.model
    assert [found.on(name) for name in ("CUDA0", "CUDA1")] == [*on_devices]


def test_overrides_say_where_weights_are_that_no_layout_has() -> None:
    params = replace(ON_FIRST, tensor_buft_overrides=(TensorBuftOverride("exps", "CUDA1"),))
    plan = plan_with(params, 3 * 130, 130 + 70 + 4)
    found = map_of(plan, MODEL, WITHOUT_EXPERTS, [0 if "exps" in name else -1 for name in NAMES])
    assert where(found, "experts") == [(layer, {"CUDA1": 1}) for layer in range(4)]


@named_cases(("an output of its own", False), ("the embedding is the output", True))
def test_an_embedding_in_memory_that_no_device_reads(is_tied: bool) -> None:
    output = "token_embd.weight" if is_tied else "output.weight"
    entries = (*ENTRIES[1:], LayoutEntry(LAYOUT_DEVICE, output, "model", 70))
    tensors = tuple(replace_bytes(each, EMBEDDING) if "embd" in each.name else each for each in MODEL.tensors)
    model = replace(MODEL, tensors=tensors)
    plan = plan_with(ON_FIRST, 3 * 1130, 1130 + 2 * 70)
    found = map_of(plan, model, replace(LAYOUT, entries=entries), [-1] * len(NAMES))
    assert where(found, "embedding and output") == [(-1, {"host": EMBEDDING}), (4, {"CUDA1": 140})]


@named_cases(("one buffer", False, [-1]), ("two buffers", True, [-1, 4]))
def test_an_embedding_that_is_an_output_on_the_host(is_twice: bool, cells: list[int]) -> None:
    entries = (
        *(entry for entry in ENTRIES if entry.name != "output.weight"),
        LayoutEntry(LAYOUT_DEVICE, "token_embd.weight", "model", EMBEDDING),
    )
    params = replace(ON_FIRST, n_gpu_layers=0)
    plan = plan_with(params, 0, 0, on_host=4 * 1130 + EMBEDDING * is_twice)
    found = map_of(plan, MODEL, replace(LAYOUT, entries=entries, unused=("output.weight",)), [-1] * len(NAMES))
    assert where(found, "embedding and output") == [(layer, {"host": EMBEDDING}) for layer in cells]


def test_what_llama_cpp_does_not_load_is_nowhere() -> None:
    unused = tuple(name for name in NAMES if "exps" in name)
    plan = plan_with(ON_FIRST, 3 * 130, 130 + 70)
    found = map_of(plan, MODEL, replace(WITHOUT_EXPERTS, unused=unused), [-1] * len(NAMES))
    assert where(found, "experts") == [] and where(found, "attention") != []


@cases((0, True), (2**20, False))
def test_no_map_where_the_host_has_something_else(on_host: int, is_shown: bool) -> None:
    plan = plan_with(ON_FIRST, 3 * 1130, 1130 + 70, on_host=on_host)
    assert (map_of(plan, MODEL, LAYOUT, [-1] * len(NAMES)) is not None) == is_shown


def cell(layer: int, **on: int) -> MapCell:
    return MapCell("experts", layer, tuple(on.items()))


def test_neighbours_are_joined() -> None:
    cells = (
        cell(-1, host=1),
        cell(0, host=5),
        cell(1, host=6),
        cell(2, CUDA0=2, host=6),
        cell(4, CUDA0=7),
        cell(5, CUDA0=7),
        cell(6, CUDA0=9),
    )
    found = LayerMap(6, ("CUDA0", "host"), cells)
    assert runs(found) == [
        Run("experts", -1, -1, (("host", 1),)),
        Run("experts", 0, 1, (("host", 11),)),
        Run("experts", 2, 2, (("CUDA0", 2), ("host", 6))),
        Run("experts", 4, 5, (("CUDA0", 14),)),
        Run("experts", 6, 6, (("CUDA0", 9),)),
    ]
    assert [run.layers(6) for run in runs(found)] == [
        "before the layers",
        "layers 0 to 1",
        "layer 2",
        "layers 4 to 5",
        "output",
    ]
    assert 'aria-label="Where the layers are: experts, before the layers: host; experts, layers 0 to 1: host;' in (
        layer_svg(found)
    )
