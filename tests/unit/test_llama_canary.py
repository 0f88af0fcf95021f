"""The small models that a build of llama.cpp has to load as arithmetic says, before it is trusted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from gguf import GGUFReader

from fitter.llama.load import canary
from fitter.llama.types import Breakdown, Row
from tests.support.cases import cases, named_cases

CARDS = ("CUDA0",) * 4
SPLIT = ("CUDA1", "CUDA1", "CUDA0", "CUDA0")


@cases("DENSE", "EXPERTS", "QUANTIZED")
def test_the_tensors_are_those_in_the_file(kind: str, tmp_path: Path) -> None:
    tensors = getattr(canary, kind)
    found = GGUFReader(canary.write(tmp_path, tensors)).tensors
    assert {tensor.name: tensor.n_bytes for tensor in found} == {tensor.name: tensor.bytes for tensor in tensors}
    assert kind == "QUANTIZED" or all(tensor.bytes % 256 == 0 for tensor in tensors)


def test_weights_are_where_their_layer_is() -> None:
    # 512 tokens of 512 values of 2 bytes, a norm of 512 values of 4 bytes; a layer has four matrices of 512 x 512 for
    # attention and three for the rest, and two norms
    table, norm, matrix = 512 * 512 * 2, 512 * 4, 512 * 512 * 2
    layer = 7 * matrix + 2 * norm
    assert canary.weights(canary.DENSE, CARDS) == {"": table, "CUDA0": 3 * layer + norm + table}
    assert canary.weights(canary.DENSE, SPLIT) == {"": table, "CUDA1": 2 * layer, "CUDA0": layer + norm + table}
    assert canary.weights(canary.DENSE, ("", "", "CUDA0", "CUDA0")) == {
        "": table + 2 * layer,
        "CUDA0": layer + norm + table,
    }
    experts = 3 * 4 * matrix
    assert canary.weights(canary.EXPERTS, CARDS, "_exps") == {
        "": table + 3 * experts,
        "CUDA0": 3 * (4 * matrix + 2 * norm + 512 * 4 * 4) + norm + table,
    }


def test_a_cache_is_where_its_layer_is() -> None:
    # a token has 512 values for keys and as many for values; a block of q8_0 has 32 values in 34 bytes
    assert canary.cache(SPLIT[:3], 1000) == {"CUDA1": 2 * 1000 * 2048, "CUDA0": 1000 * 2048}
    assert canary.cache(["CUDA0"], 1000, "q8_0", "q8_0") == {"CUDA0": 1000 * 2 * 16 * 34}
    assert canary.cache(["CUDA0"], 1000, "f16", "q8_0") == {"CUDA0": 1000 * (1024 + 16 * 34)}


CARD = Row("CUDA0", "CUDA0", False, 70, 20, 5)
PINNED = Row("CUDA_Host", "CUDA0", True, 30, 0, 7)
RIGHT = Breakdown((CARD, PINNED), ("CUDA0",), 1024)


def test_what_is_as_expected_is_not_told() -> None:
    assert not [*canary.differences("x", RIGHT, {"": 30, "CUDA0": 70}, {"CUDA0": 20})]


@named_cases(
    ("weights", replace(CARD, model=71), "x: weights take 30 bytes of the host, 71 bytes of CUDA0 instead of"),
    ("the cache", replace(CARD, context=21), "x: the KV cache take 21 bytes of CUDA0 instead of 20 bytes of CUDA0"),
    ("another device", replace(CARD, device="CUDA1"), "x: weights take 30 bytes of the host, 70 bytes of CUDA1 "),
    ("the host", replace(CARD, is_host=True), "x: weights take 100 bytes of the host instead of"),
)
def test_what_is_not_as_expected_is_told(row: Row, message: str) -> None:
    found = [*canary.differences("x", replace(RIGHT, rows=(row, PINNED)), {"": 30, "CUDA0": 70}, {"CUDA0": 20})]
    assert found[0].startswith(message)
