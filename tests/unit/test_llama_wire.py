"""What the worker and its client say to each other survives the way."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from fitter.llama.processes import wire
from fitter.llama.types import (
    Array,
    Breakdown,
    Header,
    Layout,
    LayoutEntry,
    Params,
    Row,
    TensorBuftOverride,
    TensorInfo,
)
from tests.support.cases import cases

OVERRIDE = TensorBuftOverride(r"\.ffn_.*=x", "CPU")
VALUES: dict[str, Any] = {
    "defaults": Params(),
    "every kind of field": Params(
        *(4096, -1, (1.0, 2.5)), tensor_buft_overrides=(OVERRIDE,), flash_attn="on", devices=()
    ),
    "optional fields empty": Breakdown((Row("CPU", None, True, 1, 2, 3),), ("CUDA0",), 4096),
    "optional fields set": Breakdown((), (), 4096, flash_attn=False, n_splits=(3, 1)),
    "no record": Layout((), 128, 512),
    "sizes beyond 2**53": Row("CUDA0", "CUDA0", False, 2**63 - 1, 0, 0),
    "layout": Layout(
        (LayoutEntry("Recorder", "cache_k_l0", "context", 128), LayoutEntry("CPU", "o", "model", 2**60)), 1, 5
    ),
    "records of several shapes": Header(
        {}, (TensorInfo("a", "f32", (1,), 4), TensorInfo("b", "f32", (2, 3, 4), 96, 1)), 0, 3, 32
    ),
    "header": Header(
        {"text": "é", "whole": 7, "real": 7.0, "flag": True}
        | {"list": Array("i32", 2, (1, 0)), "flags": Array("bool", 1, (True,)), "long": Array("str", 10**6)},
        (TensorInfo("blk.0.ffn_up.weight", "q4_K", (256, 2), 288),),
        *(1024, 3, 32),
    ),
    "path that is no UTF-8": TensorInfo("\udcff", "f32", (1,), 4),
}


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES.keys())
def test_a_value_comes_back_as_it_was(value: Any) -> None:
    back = wire.decode(type(value), json.loads(json.dumps(wire.encode(value))))
    assert back == value
    assert repr(back) == repr(value)  # 7 is not 7.0, 1 is not True


TENSORS, ENTRIES = tuple[TensorInfo, ...], tuple[LayoutEntry, ...]
WRONG: dict[str, tuple[Any, Any, str]] = {
    "text for a number": (int, "1", "'1' is not of type int"),
    "boolean for a number": (int, True, "True is not of type int"),
    "number for a boolean": (bool, 1, "1 is not of type bool"),
    "unknown field": (Params, {"n_contexts": 1}, "Params has no n_contexts"),
    "no such choice": (Params, {"flash_attn": "maybe"}, "'maybe' is not one of ('auto', 'on', 'off')"),
    "tuple too short": (tuple[int, int], [1], "[1] does not have 2 items"),
    "tuple of other things": (tuple[int, ...], [1, "2"], "'2' is not of type int"),
    "text among numbers": (TENSORS, [["a"], ["f32"], [[1]], ["4"], [0]], "'4' is not of type int"),
    "boolean among numbers": (TENSORS, [["a"], ["f32"], [[1]], [True], [0]], "True is not of type int"),
    "a column too few": (TENSORS, [["a"], ["f32"], [[1]], [4]], "4 columns are not those of TensorInfo"),
    "a column too many": (TENSORS, [["a"], ["f32"], [[1]], [4], [0], [0]], "6 columns are not those of TensorInfo"),
    "two lengths": (TENSORS, [["a", "b"], ["f32"], [[1]], [4], [0]], "columns of TensorInfo differ in length"),
    "no such choice in a column": (
        *(ENTRIES, [["CPU"], ["a"], ["compute"], [1]], "'compute' is not one of ('model', 'context')"),
    ),
    "no columns": (TENSORS, {}, "{} is not a list"),
    "none of the alternatives": (int | None, "x", "'x' is not of type <class 'int'> or <class 'NoneType'>"),
}


@cases(WRONG)
def test_a_value_of_another_type_is_refused(kind: Any, value: Any, said: str) -> None:
    with pytest.raises(TypeError, match=f"^{re.escape(said)}$"):
        wire.decode(kind, value)


def test_records_go_by_columns() -> None:
    tensors = tuple(TensorInfo(f"blk.{i}.weight", "q4_K", (256, i), 144 * i) for i in (1, 2))
    assert wire.encode(tensors) == [
        ["blk.1.weight", "blk.2.weight"],
        ["q4_K", "q4_K"],
        [[256, 1], [256, 2]],
        [144, 288],
        [0, 0],
    ]
