"""What llama.cpp takes of a header's values, from both sides of every limit."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from fitter.llama.header.gguf_writer import Value
from fitter.llama.header.limits import Limit, limits, problem
from fitter.llama.types import Array, MetadataValue
from fitter.model.shapes.catalogue import published_shape, shape_names
from fitter.model.shapes.mapping import header_of
from tests.support.cases import cases

N_TENSORS = 40
METADATA: dict[str, MetadataValue] = {
    "general.architecture": "qwen3",
    "qwen3.block_count": 28,
    "qwen3.embedding_length": 1024,
    "qwen3.attention.head_count": 16,
}


def said(key: str, value: MetadataValue) -> str:
    return problem({**METADATA, key: value}, N_TENSORS)


@cases(
    ("qwen3.block_count", 0, "0: llama.cpp takes a whole number from 1 to 512"),
    ("qwen3.block_count", 513, "513: llama.cpp takes a whole number from 1 to 512"),
    ("qwen3.block_count", 2**31, "2147483648: llama.cpp takes a whole number from 1 to 512"),
    ("qwen3.block_count", "many", "'many': llama.cpp takes a whole number from 1 to 512"),
    ("qwen3.block_count", True, "true: llama.cpp takes a whole number from 1 to 512"),
    ("qwen3.block_count", Array("u32", 1, (28,)), "with 1 values: llama.cpp takes a whole number from 1 to 512"),
    ("qwen3.nextn_predict_layers", 29, "29: llama.cpp takes a whole number from 0 to 28"),
    ("qwen3.embedding_length", math.nan, "nan: llama.cpp takes a whole number from 0 to 4294967295"),
    ("qwen3.embedding_length", math.inf, "inf: llama.cpp takes a whole number from 0 to 4294967295"),
    ("qwen3.context_length", -1, "-1: llama.cpp takes a whole number from 0 to 4294967295"),
    ("qwen3.context_length", 2**32, "4294967296: llama.cpp takes a whole number from 0 to 4294967295"),
    ("qwen3.expert_count", 1025, "1025: llama.cpp takes a whole number from 0 to 1024"),
    (
        "qwen3.attention.head_count",
        Array("u32", 10**6),
        "with 1000000 values: llama.cpp takes a whole number from 0 to 4294967295, or up to 512 of them",
    ),
    ("qwen3.attention.causal", 1, "1: llama.cpp takes true or false"),
    ("split.count", 65536, "65536: llama.cpp takes a whole number from 0 to 65535"),
    ("qwen3.vision.block_count", 41, "41: llama.cpp takes a whole number from 0 to 40"),
)
def test_what_llama_cpp_does_not_take(key: str, value: MetadataValue, words: str) -> None:
    assert said(key, value) == f"has {key} {words}"


@cases(
    ("qwen3.block_count", 1),
    ("qwen3.block_count", 512),
    ("qwen3.nextn_predict_layers", 28),
    ("qwen3.context_length", 2**32 - 1),
    ("qwen3.expert_count", 1024),
    ("qwen3.attention.head_count", Array("u32", 512, (1,) * 512)),
    ("qwen3.attention.causal", False),
    ("qwen3.vision.block_count", 40),
    # llama.cpp reads these of some architectures only, and not as what fitter does
    ("qwen3.vocab_size", math.nan),
    ("qwen3.attention.sliding_window", "none"),
    ("llama.block_count", 2**31),
)
def test_what_it_may_take(key: str, value: MetadataValue) -> None:
    assert said(key, value) == ""


def test_a_name_is_safe_to_print() -> None:
    metadata: dict[str, MetadataValue] = {"general.architecture": "a\x1b[31m", "a\x1b[31m.block_count": "b\nc"}
    assert problem(metadata, 1).isprintable()


def test_without_an_architecture_nothing_is_said() -> None:
    assert problem({"block_count": 2**31, "None.block_count": 5}, 1) == ""


def test_every_limit_says_where_it_is_from() -> None:
    assert [each for each in limits() if not each.why or each.kind not in ("whole", "flag")] == []
    assert all(isinstance(each, Limit) for each in limits())
    assert len({each.key for each in limits()}) == len(limits())


def as_read(value: Value) -> MetadataValue:
    is_one = isinstance(value, str) or not isinstance(value, Sequence)
    return value if is_one else Array("i32", len(value), tuple(value))  # type: ignore[return-value,arg-type]


@pytest.mark.parametrize("name", shape_names())
def test_no_known_model_is_refused(name: str) -> None:
    made = header_of(published_shape(name).config, name)
    metadata = {key: as_read(value) for key, value in made.metadata.items()}
    assert problem(metadata, len(made.tensors)) == ""
