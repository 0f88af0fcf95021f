"""What a model is made of, and whether a plan is of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from fitter.errors import UsageError
from fitter.llama.types import LAYOUT_DEVICE, Breakdown, Layout, LayoutEntry, Row, TensorInfo
from fitter.model.header import Model
from fitter.planning.checked.verification import check_same_model
from fitter.planning.plan.layer_map import LayerSize, RoleSize, inspection_of
from fitter.planning.request.summary import FileStamp, ModelSummary, stamp_of
from tests.support.cases import named_cases

TENSORS = (
    TensorInfo("token_embd.weight", "f16", (1,), 1000),
    TensorInfo("blk.0.attn_q.weight", "f16", (1,), 100),
    TensorInfo("blk.0.attn_k.weight", "f16", (1,), 50),
    TensorInfo("blk.0.ffn_up.weight", "f16", (1,), 400),
    TensorInfo("blk.1.ffn_up_exps.weight", "f16", (1,), 800),
    TensorInfo("output.weight", "f16", (1,), 2000),
)
PATH = Path("m.gguf")
MODEL = Model(PATH, (PATH,), "a model", "llama", 4350, 2, 0, 4096, 8, TENSORS, {"general.name": "a model"})
SUMMARY = ModelSummary("m.gguf", "a model", "llama", 4350)
BREAKDOWN = Breakdown((Row("CPU", None, True, 4350, 96, 7),), (), 512)


def layout(*caches: tuple[str, str, int]) -> Layout:
    entries = tuple(LayoutEntry(where, name, "context", size) for where, name, size in caches)
    weights = tuple(LayoutEntry(LAYOUT_DEVICE, tensor.name, "model", tensor.bytes) for tensor in TENSORS)
    return Layout((*weights, *entries), 32, 512)


@named_cases(
    ("each layer", [(LAYOUT_DEVICE, "cache_k_l0", 32), (LAYOUT_DEVICE, "cache_k_l1", 64)], (0, 32, 64)),
    ("no layer", [(LAYOUT_DEVICE, "cache_k", 32)], (32, 0, 0)),
    ("none", [], (0, 0, 0)),
    ("kept by the host", [("CPU", "cache_k_l0", 32)], (0, 0, 0)),
)
def test_an_inspection(caches: list[tuple[str, str, int]], expected: tuple[int, ...]) -> None:
    found = inspection_of(MODEL, BREAKDOWN, layout(*caches))
    assert (found.model, found.metadata, found.n_ctx, found.rows) == (SUMMARY, MODEL.metadata, 512, BREAKDOWN.rows)
    roles = {role.role: (role.count, role.bytes) for role in found.roles}
    assert sum(count for count, _ in roles.values()) == 6 and sum(size for _, size in roles.values()) == 4350
    assert (roles["attention"], roles["experts"]) == ((2, 150), (1, 800))
    assert [(layer.index, layer.bytes, layer.context) for layer in found.layers] == [
        (None, 3000, expected[0]),
        (0, 550, expected[1]),
        (1, 800, expected[2]),
    ]
    assert found.layers[2] == LayerSize(1, (RoleSize("experts", 1, 800),), expected[2])


def test_a_stamp_is_of_the_file_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"12345")
    stamp = stamp_of(path)
    assert stamp == FileStamp(str(path), 5, path.stat().st_mtime_ns)
    path.write_bytes(b"123456")
    assert stamp_of(path) != stamp


@named_cases(
    ("architecture", replace(SUMMARY, architecture="qwen3"), "its architecture is llama, not qwen3"),
    ("name", replace(SUMMARY, name="another"), "its name is a model, not another"),
    ("size", replace(SUMMARY, bytes=4351), "its bytes is 4350, not 4351"),
)
def test_a_plan_of_another_model(found: ModelSummary, said: str) -> None:
    check_same_model(SUMMARY, replace(SUMMARY, path="elsewhere.gguf"))
    with pytest.raises(UsageError, match=f"^the plan is for another model than m.gguf: {said}$"):
        check_same_model(SUMMARY, found)
