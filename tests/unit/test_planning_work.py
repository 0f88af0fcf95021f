"""What a placement does: read from headers and recorded sizes, the same whichever way the placement is said."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from fitter.llama.types import LAYOUT_DEVICE, Array, Layout, LayoutEntry, Params, TensorBuftOverride, TensorInfo
from fitter.planning.placing.layer_sizes import HOST, Unit, units_of
from fitter.planning.placing.placement import Placement
from fitter.planning.speed.cost import Work
from fitter.planning.speed.model_facts import WeightFacts, facts_of
from fitter.planning.speed.work import (
    HostOnlyTensors,
    Pieces,
    as_measured,
    host_only_tensors,
    pieces_of,
    work_of,
    work_of_params,
)
from fitter.text import MIB
from tests.support.cases import cases, named_cases
from tests.support.placements import MODEL, PLACEMENTS, facts, model_of, said
from tools.models.shapes import SHAPES

N_CTX = 8192


def units(name: str, *caches: int, state: int = 0) -> tuple[Unit, ...]:
    """Layers whose caches repeat ``caches``, of which ``state`` is recurrent, and the output."""
    shape = SHAPES[name]
    layers = [Unit(i, 0, caches[i % len(caches)], (), state) for i in range(shape.n_layer)]
    return (*layers, Unit(shape.n_layer, 0, 0))


def whole(name: str, cache: int = 4096 * N_CTX, params: Params | None = None, **more: object) -> Pieces:
    return pieces_of(facts(name), units(name, cache), N_CTX, params or Params(), **more)  # type: ignore[arg-type]


def total(work: Work) -> float:
    return sum(weights.bytes for layer in work.layers for weights in layer.weights)


def places(work: Work) -> list[int]:
    return [layer.home for layer in work.layers]


# --- from the header


def test_a_dense_model() -> None:
    shape, found = SHAPES["llama-3.1-8b"], facts("llama-3.1-8b")
    assert (found.n_layer, len(found.layers), found.n_embd, found.n_expert, found.window) == (32, 32, 4096, 0, 0)
    layer = found.layers[3]
    assert (layer.n_head, layer.n_head_kv, layer.key_length, layer.value_length) == (32, 8, 128, 128)
    embedding = next(tensor for tensor in shape.tensors if tensor.name == "token_embd.weight")
    work = work_of(whole("llama-3.1-8b"), Placement(0, (33,)))
    assert total(work) == shape.bytes - embedding.bytes, "the token embedding is only looked up"
    assert sum(w.n_params for layer in work.layers for w in layer.weights) == pytest.approx(7.5e9, rel=0.01)


def test_the_token_embedding_is_read_where_it_is_the_output_too() -> None:
    work = work_of(whole("gemma3-12b"), Placement(1, (48,)))
    assert total(work) == SHAPES["gemma3-12b"].bytes
    output = work.layers[-1].weights
    assert [weights.place for weights in output] == [0]
    assert output[0].bytes > 0.8e9


def test_experts_are_apart() -> None:
    found = facts("deepseek-v3.1")
    assert (found.n_expert, found.n_expert_used) == (256, 8)
    work = work_of(whole("deepseek-v3.1"), Placement(0, (62,)))
    assert [w.experts for w in work.layers[0].weights] == [False], "the first layers are dense"
    dense, experts = work.layers[10].weights
    assert experts.experts and not dense.experts
    assert experts.n_params == 3 * 7168 * 2048 * 256
    assert (work.n_expert, work.n_expert_used) == (256, 8)


def test_layers_for_multi_token_prediction_are_not_computed() -> None:
    found = facts("llama-3.1-8b", nextn_predict_layers=2)
    assert (found.n_layer, len(found.layers)) == (32, 30)
    pieces = pieces_of(found, units("llama-3.1-8b", 4096 * N_CTX), N_CTX, Params())
    work = work_of(pieces, Placement(10, (21, 2)))
    assert places(work) == [HOST] * 10 + [0] * 20 + [1], "the output is after the layers that are left out"


def per_layer(*values: int) -> Array:
    return Array("int32", len(values), values)


@named_cases(
    # query heads of layer 3, and of the last, and how long a key of layer 3 is
    ("as they are", {}, (32, 32, 128)),
    ("of each layer", {"attention__head_count": per_layer(*[32] * 3, 16, *[8] * 28)}, (16, 8, 256)),
    ("of the first layers", {"attention__head_count": per_layer(8, 8, 8, 16)}, (16, 16, 256)),
    ("of no layer", {"attention__head_count": per_layer()}, (0, 0, 0)),
    ("none", {"attention__head_count": None}, (0, 0, 0)),
    ("words", {"attention__head_count": "32"}, (0, 0, 0)),
    ("that do not divide", {"attention__head_count": 3}, (3, 3, 1365)),
    ("without a length", {"embedding_length": None}, (32, 32, 0)),
)
def test_heads_that_headers_have(changed: dict[str, Any], expected: tuple[int, int, int]) -> None:
    found = facts("llama-3.1-8b", **changed)
    assert (found.layers[3].n_head, found.layers[-1].n_head, found.layers[3].key_length) == expected
    assert isinstance(found.layers[3].key_length, int)


@named_cases(("8", 8, 8), ("1", 1, 1), ("not said", None, 128), ("0", 0, 128), ("too many", 1000, 128))
def test_experts_that_a_token_uses(said: int | None, used: int) -> None:
    found = facts(MODEL, expert_used_count=said)  # type: ignore[arg-type]
    assert (found.n_expert, found.n_expert_used) == (128, used)


def test_tensors_of_layers_that_there_are_not() -> None:
    model = model_of(SHAPES["llama-3.1-8b"])
    fewer = facts_of(replace(model, n_layer=31))
    assert fewer.layers == facts_of(model).layers[:31]


def test_what_projects_attention_comes_first() -> None:
    model = model_of(SHAPES["llama-3.1-8b"])
    backwards = facts_of(replace(model, tensors=model.tensors[::-1])).layers[3]
    assert [tensor.name.split(".")[2] for tensor in backwards.tensors] == [
        *("attn_output", "attn_v", "attn_k", "attn_q"),
        *("ffn_down", "ffn_up", "ffn_gate", "ffn_norm", "attn_norm"),
    ]
    assert backwards.n_attention == 4


@cases(("iq2_xxs", True), ("IQ3_S", True), ("iq4_xs", False), ("q2_K", False))
def test_weights_that_a_processor_looks_up(type_: str, is_looked_up: bool) -> None:
    model = model_of(SHAPES["llama-3.1-8b"])
    tensors = tuple(
        TensorInfo(tensor.name, type_ if ".ffn_up." in tensor.name else "q8_0", tensor.shape, tensor.bytes)
        for tensor in model.tensors
    )
    pieces = replace(whole("llama-3.1-8b"), facts=facts_of(replace(model, tensors=tensors)))
    for home in (0, HOST):
        (weights,) = pieces.layer(3, home).weights
        assert weights.n_looked_up == (4096 * 14336 if is_looked_up else 0)
        assert weights.n_params > 3 * 4096 * 14336


@cases(
    ("llama-3.1-8b", 4096, (4096, 16384, 4, 0)),
    ("llama-3.1-70b", 4096, (4096, 32768, 8, 0)),
    ("qwen3-30b-a3b", 2048, (2048, 16384, 8, 0)),
    # 128 query heads on one row of 512 + 64, whose first 512 are the values
    ("deepseek-v3.1", 1152, (1152, 2 * 128 * (576 + 512), 1, 0)),
)
def test_attention_is_what_the_cache_takes(name: str, cache: int, expected: tuple[float, ...]) -> None:
    attention = whole(name, cache * N_CTX).attention[5]
    assert attention is not None
    assert (attention.kv_bytes, attention.flops, attention.sharing, attention.window) == expected
    assert not attention.quantized


@cases(("f16", "f16", False), ("bf16", "f32", False), ("q8_0", "f16", True), ("f16", "q4_0", True))
def test_quantized_caches(type_k: str, type_v: str, quantized: bool) -> None:
    attention = whole("llama-3.1-8b", params=Params(type_k=type_k, type_v=type_v)).attention[0]
    assert attention is not None and attention.quantized is quantized


@cases(("auto", None, True), ("auto", False, False), ("off", None, False), ("on", True, True))
def test_flash_attention(asked: str, found: bool | None, flash: bool) -> None:
    params = Params(flash_attn=asked)  # type: ignore[arg-type]
    attention = whole("llama-3.1-8b", params=params, flash_attn=found).attention[0]
    assert attention is not None and attention.flash is flash


def test_a_model_without_head_counts_has_operations_by_its_cache() -> None:
    found = facts("llama-3.1-8b", attention__head_count=None, attention__head_count_kv=None)  # type: ignore[arg-type]
    attention = pieces_of(found, units("llama-3.1-8b", 4096 * N_CTX), N_CTX, Params()).attention[0]
    assert attention is not None
    assert (attention.kv_bytes, attention.flops, attention.sharing) == (4096, 4096, 1)


ELEMENT = 8 * (256 + 256)


@named_cases(
    ("window and micro batch", 8192, Params(), 1536, 1024),
    ("larger micro batch", 8192, Params(n_ubatch=2048), 3072, 1024),
    ("just more than a window's cells", 1792, Params(), 1536, 1024),
    ("no more than a window's cells", 1536, Params(), 1536, 1024),
    ("full size", 8192, Params(swa_full=True), 8192, 1024),
    ("two sequences", 8192, Params(n_seq_max=2), 2 * 1536, 1024),
    ("two in one cache", 8192, Params(n_seq_max=2, kv_unified=True), 2560, 1024),
)
def test_a_sliding_window_shows_in_the_cache(n_ctx: int, params: Params, cells: int, window: int) -> None:
    caches = [2 * ELEMENT * cells] * 5 + [2 * ELEMENT * n_ctx]
    found = pieces_of(facts("gemma3-12b"), units("gemma3-12b", *caches), n_ctx, params)
    seen = {(a.kv_bytes, a.window) for a in found.attention if a}
    assert seen == {(2 * ELEMENT, 0), (2 * ELEMENT, window)}


@named_cases(
    ("the architecture's period", "gemma3", {}, {0, 1, 2, 3, 4, 6, 7}),
    ("the header's period", "gemma3", {"sliding_window_pattern": 2}, {0, 2, 4, 6}),
    ("no period", "gemma3", {"sliding_window_pattern": 0}, {0, 1, 2, 3, 4, 6, 7}),
    ("the first of a period is dense", "smallthinker", {}, {1, 2, 3, 5, 6, 7}),
    ("an architecture that nobody knows", "of-tomorrow", {}, set()),
)
def test_which_layers_have_a_window(architecture: str, keys: dict[str, int], windowed: set[int]) -> None:
    metadata = {f"{architecture}.attention.{key}": value for key, value in {"sliding_window": 512, **keys}.items()}
    found = facts_of(replace(model_of(SHAPES["gemma3-12b"]), architecture=architecture, metadata=metadata))
    assert {i for i, layer in enumerate(found.layers[:8]) if layer.is_windowed} == windowed
    assert all(layer.is_windowed is not None for layer in found.layers) is bool(windowed)


@cases(
    ("llama4", {}, 8192),
    ("llama4", {"llama4.attention.sliding_window": 0}, 0),
    ("gemma2", {}, 4096),
    ("gemma2", {"gemma2.attention.sliding_window": 512}, 512),
    ("gemma3", {}, 0),
)
def test_a_window_that_no_header_names_is_the_architectures(
    architecture: str, keys: dict[str, int], window: int
) -> None:
    found = facts_of(replace(model_of(SHAPES["gemma3-12b"]), architecture=architecture, metadata=keys))
    assert found.window == window
    assert any(layer.is_windowed for layer in found.layers) is bool(window)


def test_a_quantized_window_is_not_taken_for_a_full_cache() -> None:
    params = Params(type_k="q8_0", type_v="q8_0")
    size = ELEMENT * 34 // 32
    for n_ctx in (2048, 65536):
        caches = [size * 1536, size * n_ctx]
        found = pieces_of(
            facts("gemma3-12b", attention__sliding_window_pattern=2), units("gemma3-12b", *caches), n_ctx, params
        )
        assert [a.window for a in found.attention if a] == [1024, 0] * 24


def test_a_header_that_lists_windows_is_believed() -> None:
    pattern = Array("bool", 48, tuple(i % 2 == 0 for i in range(48)))
    found = facts("gemma3-12b", attention__sliding_window_pattern=pattern)
    pieces = pieces_of(found, units("gemma3-12b", 2 * ELEMENT * 8192), 8192, Params(swa_full=True))
    assert [a.window for a in pieces.attention if a] == [1024, 0] * 24


def test_recurrent_layers_read_and_write_their_state() -> None:
    found = facts("nemotron-h-9b")
    state = 5 * 2**20
    kinds = [layer.n_head_kv for layer in found.layers]
    assert sorted(set(kinds)) == [0, 8]
    layers = [Unit(i, 0, 4096 * N_CTX if kind else state, (), 0 if kind else state) for i, kind in enumerate(kinds)]
    recorded = (*layers, Unit(len(kinds), 0, 0))
    plain = work_of(
        pieces_of(found, tuple(Unit(u.index, 0, 0) for u in recorded), N_CTX, Params()), Placement(0, (57,))
    )
    work = work_of(pieces_of(found, recorded, N_CTX, Params()), Placement(0, (57,)))
    assert total(work) - total(plain) == 2 * state * kinds.count(0)
    assert [layer.attention is not None for layer in work.layers] == [kind > 0 for kind in [*kinds, 0]]
    two = work_of(pieces_of(found, recorded, N_CTX, Params(n_seq_max=2)), Placement(0, (57,)))
    assert total(two) - total(plain) == state * kinds.count(0), "one sequence reads its own state alone"


def test_states_are_told_from_caches_by_their_names() -> None:
    sizes = {
        "cache_k_l0": 1,
        "cache_v_l0": 2,
        "cache_r_l1": 4,
        "cache_s_l1": 8,
        "cache_ple_r_l1": 16,
        "cache_s_l12": 32,
    }
    entries = tuple(LayoutEntry(LAYOUT_DEVICE, name, "context", size) for name, size in sizes.items())
    found = units_of(Layout(entries, 1, N_CTX), 13, lambda _: False)
    assert {u.index: (u.cache, u.state) for u in found if u.cache} == {0: (3, 0), 1: (28, 28), 12: (32, 32)}


# --- placements


@pytest.mark.parametrize("placement", PLACEMENTS.values(), ids=PLACEMENTS)
def test_a_placement_and_its_parameters_are_the_same_work(placement: Placement) -> None:
    pieces = whole(MODEL, 2048 * N_CTX)
    work = work_of(pieces, placement)
    assert total(work) == total(work_of(pieces, Placement(0, (49,)))), "nothing is lost and nothing is there twice"
    params, targets = said(placement)
    other = whole(MODEL, 2048 * N_CTX)
    assert work_of_params(other, params, [1] * len(placement.counts), targets) == work
    assert places(work) == [HOST] * placement.first + [d for d, n in enumerate(placement.counts) for _ in range(n)]


def test_what_is_moved_is_where_it_was_moved_to() -> None:
    work = work_of(whole(MODEL), PLACEMENTS["single tensors"])
    assert {(w.place, w.experts) for w in work.layers[7].weights} == {(0, False), (1, True), (0, True)}
    assert {(w.place, w.experts) for w in work.layers[45].weights} == {(1, False), (1, True), (HOST, True)}
    assert {w.place for w in work.layers[30].weights} == {1}


def test_the_users_overrides_stand() -> None:
    user = (TensorBuftOverride(r"blk\.0\.attn", "CPU"), TensorBuftOverride(r"blk\.4[0-9]\.ffn_down_exps", "CUDA0"))
    placement = PLACEMENTS["two devices"]
    params, targets = said(placement, user)
    pinned = {name: target for name, target in targets.items() if re.search(r"attn|down_exps", name)}
    pieces = pieces_of(facts(MODEL), units(MODEL, 2048 * N_CTX), N_CTX, Params(), pinned=pinned)
    work = work_of(pieces, placement)
    assert work == work_of_params(whole(MODEL, 2048 * N_CTX), params, [1, 1], targets)
    first, *_ = work.layers[0].weights
    assert first.place == HOST, "what attention computes with comes first"
    assert {w.place for w in work.layers[41].weights} == {0, 1}


# --- what llama.cpp keeps on the host

Q_AND_K = frozenset(f"blk.{layer}.attn_{name}.weight" for layer in range(48) for name in "qk")


def sizes(names: Iterable[str]) -> int:
    wanted = set(names)
    return sum(tensor.bytes for tensor in SHAPES[MODEL].tensors if tensor.name in wanted)


@pytest.mark.parametrize("placement", PLACEMENTS.values(), ids=PLACEMENTS)
def test_what_is_kept_is_on_the_host_wherever_its_layer_is(placement: Placement) -> None:
    work = work_of(whole(MODEL, host_only=HostOnlyTensors(Q_AND_K)), placement)
    assert total(work) == total(work_of(whole(MODEL), placement))
    for layer in work.layers[:-1]:
        assert [(w.place, w.experts) for w in layer.weights if w.is_host_only] == [(HOST, False)]
        assert layer.n_host_only == 2
    assert not work.layers[-1].n_host_only and not any(w.is_host_only for w in work.layers[-1].weights)
    assert sum(w.bytes for layer in work.layers for w in layer.weights if w.is_host_only) == sizes(Q_AND_K)


def test_an_override_does_not_give_a_device_kernels() -> None:
    pinned = dict.fromkeys(("blk.0.attn_q.weight", "blk.0.attn_v.weight"), 1)
    layer, *_ = work_of(whole(MODEL, host_only=HostOnlyTensors(Q_AND_K), pinned=pinned), Placement(0, (49, 0))).layers
    assert {w.place: w.is_host_only for w in layer.weights if not w.experts} == {HOST: True, 1: False, 0: False}


def test_what_a_device_keeps_on_the_host_is_what_its_recording_lacks() -> None:
    found = facts(MODEL)
    recorded = [LayoutEntry(LAYOUT_DEVICE, name, "model", 1) for name in found.names if name not in Q_AND_K]
    for others, unused, expected in (
        ([], [], Q_AND_K),
        # memory of the host that the device reads is no memory of the device's
        ([LayoutEntry("CUDA_Host", name, "model", 1) for name in Q_AND_K], [], Q_AND_K),
        ([], ["blk.0.attn_q.weight"], Q_AND_K - {"blk.0.attn_q.weight"}),
        ([LayoutEntry(LAYOUT_DEVICE, name, "model", 1) for name in Q_AND_K], [], frozenset()),
    ):
        layout = Layout((*recorded, *others), 128, N_CTX, tuple(unused))
        assert host_only_tensors(found, layout, [None]) == HostOnlyTensors(expected)


LARGEST = max(tensor.bytes for tensor in facts(MODEL).tensors)


@named_cases(
    ("no limits", (None, None), set()),
    ("as large as it may be", (LARGEST, LARGEST), set()),
    ("larger than on the first", (LARGEST - 1, None), {0}),
    ("larger than on the second", (LARGEST, LARGEST - 1), {1}),
    # what no device takes is not streamed to one either
    ("larger than on both", (LARGEST - 1, LARGEST - 1), {0, 1, HOST}),
)
def test_what_no_device_takes_is_on_the_host(largest_tensors: tuple[int | None, ...], too_small: set[int]) -> None:
    found = facts(MODEL)
    layout = Layout(tuple(LayoutEntry(LAYOUT_DEVICE, name, "model", 1) for name in found.names), 128, N_CTX)
    kept = host_only_tensors(found, layout, largest_tensors)
    assert bool(kept) == bool(too_small)
    large = sum(tensor.bytes for tensor in found.tensors if tensor.bytes == LARGEST)
    for home, placement in ((0, Placement(0, (49, 0))), (1, Placement(0, (0, 49))), (HOST, Placement(49, (0, 0)))):
        work = work_of(whole(MODEL, host_only=kept), placement)
        on_host = (w.bytes for layer in work.layers for w in layer.weights if w.is_host_only)
        assert sum(on_host) == large * (home in too_small)


def test_what_is_too_large_was_never_measured_to_be_there() -> None:
    found = facts(MODEL)
    large = frozenset(tensor.name for tensor in found.tensors if tensor.bytes == LARGEST)
    pieces = whole(MODEL, host_only=HostOnlyTensors(Q_AND_K, too_large=(large,)))
    work = work_of(pieces, Placement(0, (49,)))
    for has, takes in ((large | Q_AND_K, set()), (large, {0})):
        there = sizes(name for name in found.names if name not in has)
        assert as_measured(pieces, work, [there]).host_only.takes == takes


def test_an_embedding_is_on_the_host_since_it_is_only_looked_up() -> None:
    found = facts("llama-3.1-8b")
    output = (WeightFacts("token_embd.weight", 1, 1, False),)
    recorded = [LayoutEntry(LAYOUT_DEVICE, name, "model", 1) for layer in found.layers for name, *_ in layer.tensors]
    assert not host_only_tensors(replace(found, output=output), Layout(tuple(recorded), 128, N_CTX), [None])


@pytest.mark.parametrize("has_state", [False, True], ids=["", "with a state"])
@pytest.mark.parametrize("takes", [set(), {0}, {1}, {0, 1}], ids=str)
def test_a_device_was_measured_to_have_what_another_kind_keeps(takes: set[int], has_state: bool) -> None:
    recorded = units(MODEL, 2048 * N_CTX, state=(MIB if has_state else 0))
    pieces = pieces_of(facts(MODEL), recorded, N_CTX, Params(), host_only=HostOnlyTensors(Q_AND_K))
    work = work_of(pieces, Placement(1, (24, 24)))
    layers = {0: range(1, 25), 1: range(25, 48)}
    on_devices = []
    for device, has in layers.items():
        names = [tensor.name for layer in has for tensor in pieces.facts.layers[layer].tensors]
        output = [tensor.name for tensor in pieces.facts.output] if device == 1 else []
        on_devices.append(sizes(name for name in (*names, *output) if device in takes or name not in Q_AND_K))
    found = as_measured(pieces, work, on_devices)
    assert found.host_only.takes == takes
    homes = work_of(found, Placement(1, (24, 24))).layers[:-1]
    assert [bool(layer.n_host_only) for layer in homes] == [layer.home not in takes for layer in homes]


def test_what_an_override_put_on_a_device_is_no_sign_of_kernels() -> None:
    pieces = whole(MODEL, host_only=HostOnlyTensors(Q_AND_K), pinned=dict.fromkeys(Q_AND_K, 0))
    work = work_of(pieces, Placement(0, (49,)))
    assert not as_measured(pieces, work, [sizes(pieces.facts.names)]).host_only.takes


@named_cases(
    ("all", Params(), (10,), [0] * 33),
    ("more than there are", Params(n_gpu_layers=99), (10,), [0] * 33),
    ("none", Params(n_gpu_layers=0), (10, 10), [HOST] * 33),
    ("the output alone", Params(n_gpu_layers=1), (10,), [HOST] * 32 + [0]),
    ("no devices", Params(), (), [HOST] * 33),
    ("by free memory", Params(), (20, 10), [0] * 22 + [1] * 11),
    ("a split of nothing", Params(tensor_split=(0.0, 0.0)), (20, 10), [0] * 22 + [1] * 11),
    ("-ts", Params(tensor_split=(1.0, 3.0), n_gpu_layers=8), (9, 9), [HOST] * 25 + [0] * 2 + [1] * 6),
    ("a short split", Params(tensor_split=(1.0,)), (9, 9), [0] * 33),
)
def test_layers_go_where_llama_cpp_puts_them(params: Params, free: tuple[int, ...], homes: list[int]) -> None:
    assert places(work_of_params(whole("llama-3.1-8b"), params, free, {})) == homes


def test_an_override_of_the_output_moves_it() -> None:
    work = work_of_params(whole("llama-3.1-8b"), Params(), (10,), {"output.weight": HOST})
    (norm, output) = sorted(work.layers[-1].weights, key=lambda weights: weights.bytes)
    assert work.layers[-1].home == 0 and (norm.place, output.place) == (0, HOST)
    assert output.n_params == 128256 * 4096
    assert {weights.place for layer in work.layers[:-1] for weights in layer.weights} == {0}


def test_a_cache_that_is_not_offloaded_is_on_the_host() -> None:
    pieces = whole("llama-3.1-8b", params=Params(offload_kqv=False))
    work = work_of(pieces, Placement(10, (23,)))
    assert [layer.cache for layer in work.layers] == [None] * 10 + [HOST] * 22 + [None]
    assert all(layer.cache is None for layer in work_of(whole("llama-3.1-8b"), Placement(10, (23,))).layers)


def test_states_that_are_not_offloaded_are_on_the_host() -> None:
    found = facts("nemotron-h-9b")
    layers = tuple(Unit(i, 0, 1000, (), 1000) for i in range(56))
    pieces = pieces_of(found, (*layers, Unit(56, 0, 0)), N_CTX, Params(offload_kqv=False))
    work = work_of(pieces, Placement(20, (37,)))
    # read and written, beside the layer's own weights where those are on the host too
    on_host = [[w for w in layer.weights if w.place == HOST] for layer in work.layers[:-1]]
    assert [len(weights) for weights in on_host] == [1] * 56
    assert {(w.bytes, w.n_params, w.experts) for (w,) in on_host[20:]} == {(2000, 0, False)}
    assert all(w.bytes > 2000 for (w,) in on_host[:20])


ATTENDS: dict[str, tuple[int, dict[str, int], dict[int, int | None]]] = {
    # layers on the devices, tensors put elsewhere, and the device that attends for each layer, if that is another one
    "nothing is elsewhere": (0, {}, {3: None}),
    "a projection on a device": (0, {"blk.3.attn_k.weight": 1}, {2: None, 3: 1, 4: None}),
    "the first of two": (0, {"blk.3.attn_output.weight": 0, "blk.3.attn_q.weight": 1}, {3: 1}),
    "its norm alone": (0, {"blk.3.attn_norm.weight": 0}, {3: None}),
    "feed-forward on a device": (0, {"blk.3.ffn_up.weight": 0}, {3: None}),
    "a layer on a device": (33, {"blk.3.attn_k.weight": HOST}, {3: None}),
}


@pytest.mark.parametrize(("n_gpu_layers", "targets", "expected"), ATTENDS.values(), ids=ATTENDS)
@pytest.mark.parametrize("is_pinned", [False, True])
def test_a_device_attends_where_it_has_a_projection(
    n_gpu_layers: int, targets: dict[str, int], expected: dict[int, int | None], is_pinned: bool
) -> None:
    params = Params(n_gpu_layers=n_gpu_layers)
    pieces = whole("llama-3.1-8b", params=params, pinned=targets if is_pinned else None)
    work = work_of_params(pieces, params, (10, 10), {} if is_pinned else targets)
    assert {index: work.layers[index].attends for index in expected} == expected


@named_cases(
    ("grouped", {}, 4),
    ("one head for all", {"attention__head_count_kv": 1}, 32),
    ("compressed before", {"attention__kv_lora_rank": 512}, 4),
    ("one compressed row", {"attention__head_count_kv": 1, "attention__kv_lora_rank": 512}, 1),
    ("of one number", {"attention__head_count_kv": 1, "attention__kv_lora_rank": 1}, 1),
)
def test_query_heads_that_share_a_head(changed: dict[str, int], sharing: float) -> None:
    pieces = pieces_of(facts("llama-3.1-8b", **changed), units("llama-3.1-8b", 4096 * N_CTX), N_CTX, Params())
    attention = pieces.attention[0]
    assert attention is not None and attention.sharing == sharing


def test_what_else_the_cost_depends_on() -> None:
    work = work_of(whole(MODEL, params=Params(n_ubatch=1024, op_offload=False)), PLACEMENTS["last layers"], (7, 3))
    assert (work.n_ubatch, work.op_offload, work.n_splits) == (1024, False, (7, 3))
    assert work.n_embd == 2048


def test_layers_that_are_alike_are_one_object() -> None:
    pieces = whole("llama-3.1-8b")
    work = work_of(pieces, Placement(0, (33,)))
    # with and without the better quantization, and the output
    assert len({id(layer) for layer in work.layers}) == 3
    again = work_of(pieces, replace(Placement(0, (33,))))
    assert all(a is b for a, b in zip(work.layers, again.layers, strict=True))
