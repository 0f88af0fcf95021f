"""Files of zeros, as the gguf package reads them."""

from __future__ import annotations

from pathlib import Path

import pytest
from gguf import GGMLQuantizationType, GGUFReader

from fitter.llama.header.gguf_writer import TENSOR_TYPES, Tensor, Value, write_file

METADATA: dict[str, Value] = {
    "general.architecture": "llama",
    "general.name": "Umlaut Ä",
    "llama.block_count": 4,
    "llama.rope.freq_base": 500000.0,
    "a.flag": True,
    "a.list": [1, -2, 3],
    "a.flags": [True, False],
}


def test_what_is_written_is_read(tmp_path: Path) -> None:
    tensors = [
        Tensor("token_embd.weight", (256, 10), "q4_K"),
        Tensor("output_norm.weight", (5,), "f32"),
        Tensor("blk.0.ffn_up_exps.weight", (32, 2, 3), "q8_0"),
    ]
    path = write_file(tmp_path / "zeros.gguf", METADATA, tensors)
    reader = GGUFReader(path)
    assert {key: reader.fields[key].contents() for key in METADATA} == METADATA
    found = [(tensor.name, tuple(map(int, tensor.shape)), tensor.tensor_type.name) for tensor in reader.tensors]
    assert found == [
        ("token_embd.weight", (256, 10), "Q4_K"),
        ("output_norm.weight", (5,), "F32"),
        ("blk.0.ffn_up_exps.weight", (32, 2, 3), "Q8_0"),
    ]
    assert not any(tensor.data.any() for tensor in reader.tensors)
    assert [entry.name for entry in tmp_path.iterdir()] == ["zeros.gguf"]


@pytest.mark.parametrize(("kind", "known"), TENSOR_TYPES.items(), ids=TENSOR_TYPES)
def test_types_are_ggmls(tmp_path: Path, kind: str, known: tuple[int, int, int]) -> None:
    number, elements, _ = known
    tensor = Tensor("t", (2 * elements, 3), kind)
    (found,) = GGUFReader(write_file(tmp_path / "m.gguf", {"general.architecture": "llama"}, [tensor])).tensors
    assert GGMLQuantizationType(number).name.lower() == kind.lower()
    assert (found.tensor_type, found.n_bytes) == (number, tensor.bytes)


def test_nothing_is_left_of_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    with pytest.raises(IsADirectoryError, match="taken"):
        write_file(tmp_path / "taken", METADATA, [])
    assert [entry.name for entry in tmp_path.iterdir()] == ["taken"]
