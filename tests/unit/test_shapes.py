"""The sparse files that stand for real models: as gguf reads them, and as large as the real ones."""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path

import pytest
from gguf import GGUFReader

from tools.shapes import ALIGNMENT, Q4_K, SHAPES, Tensor, more_bits, write, write_shape, write_split

GIB = 2**30


@pytest.mark.parametrize(
    ("name", "tensors", "gib", "layers"),
    [
        ("llama-3.1-8b", 292, 4.58, 32),
        ("llama-3.1-70b", 724, 39.6, 80),
        ("qwen3-32b", 707, 18.4, 64),
        ("qwen3-30b-a3b", 579, 17.28, 48),
        ("qwen3-235b-a22b", 1131, 132.4, 94),
        ("deepseek-v3.1", 1086, 411.5, 61),
        ("kimi-k2", 1096, 624.0, 61),
        ("glm45-air", 803, 67.9, 47),
        ("gemma3-12b", 626, 6.79, 48),
        ("gpt-oss-20b", 459, 11.27, 24),
        ("gpt-oss-120b", 687, 59.0, 36),
        ("qwen3-next-80b-a3b", 843, 45.1, 48),
        ("nemotron-h-9b", 341, 4.94, 56),
    ],
)
def test_size_of_the_real_model(name: str, tensors: int, gib: float, layers: int) -> None:
    shape = SHAPES[name]
    assert (len(shape.tensors), shape.n_layer) == (tensors, layers)
    assert shape.bytes / GIB == pytest.approx(gib, rel=2e-3)


def test_every_shape_is_in_that_table() -> None:
    mark = test_size_of_the_real_model.pytestmark[0]  # type: ignore[attr-defined]
    assert [row[0] for row in mark.args[1]] == list(SHAPES)


@pytest.mark.parametrize("name", list(SHAPES))
def test_as_gguf_reads_it(name: str, tmp_path: Path) -> None:
    shape = SHAPES[name]
    path = write(name, tmp_path, vocab=False)
    reader = GGUFReader(path)
    assert [(tensor.name, tuple(map(int, tensor.shape)), tensor.n_bytes) for tensor in reader.tensors] == [
        (tensor.name, tensor.shape, tensor.bytes) for tensor in shape.tensors
    ]
    last = reader.tensors[-1]
    assert 0 <= path.stat().st_size - last.data_offset - last.n_bytes < ALIGNMENT
    assert reader.fields["general.architecture"].contents() == shape.architecture
    assert reader.fields["tokenizer.ggml.model"].contents() == "no_vocab"
    assert reader.fields[f"{shape.architecture}.vocab_size"].contents() == shape.n_vocab
    assert path.stat().st_blocks * 512 < 1_000_000, "the weights must not be on the disk"


def test_the_tokenizer(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    write_shape(dataclasses.replace(SHAPES["llama-3.1-8b"], n_vocab=2000), path)
    reader = GGUFReader(path)
    tokens = reader.fields["tokenizer.ggml.tokens"].contents()
    assert len(tokens) == len(set(tokens)) == 2000
    known = set(tokens)
    merges = reader.fields["tokenizer.ggml.merges"].contents()
    assert len(merges) == len(tokens) - 256 - 2
    assert all(merge.replace(" ", "") in known and set(merge.split()) <= known for merge in merges)
    assert Counter(reader.fields["tokenizer.ggml.token_type"].contents()) == {1: len(tokens) - 2, 3: 2}


def test_a_file_already_there_is_kept(tmp_path: Path) -> None:
    first = write("llama-3.1-8b", tmp_path, vocab=False)
    stamp = first.stat().st_mtime_ns
    assert write("llama-3.1-8b", tmp_path, vocab=False) == first
    assert first.stat().st_mtime_ns == stamp
    assert write("llama-3.1-8b", tmp_path) != first
    assert len(list(tmp_path.iterdir())) == 2, "nothing partial is left"


@pytest.mark.parametrize("n_files", [2, 7])
def test_split(n_files: int, tmp_path: Path) -> None:
    first = write_split("qwen3-30b-a3b", tmp_path, n_files, vocab=False)
    paths = sorted(tmp_path.iterdir())
    assert paths[0] == first
    assert [path.name for path in paths] == [
        f"qwen3-30b-a3b-{i:05d}-of-{n_files:05d}.gguf" for i in range(1, n_files + 1)
    ]
    names: list[str] = []
    for i, path in enumerate(paths):
        reader = GGUFReader(path)
        said = [reader.fields[f"split.{key}"].contents() for key in ("no", "count", "tensors.count")]
        assert said == [i, n_files, 579]
        assert ("general.name" in reader.fields) == (i == 0)
        names += [tensor.name for tensor in reader.tensors]
    assert names == [tensor.name for tensor in SHAPES["qwen3-30b-a3b"].tensors]


def test_more_files_than_tensors(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot be split into 1000 files"):
        write_split("llama-3.1-8b", tmp_path, 1000)


def test_rows_must_be_whole_blocks() -> None:
    assert Tensor("a", (512, 3), Q4_K).bytes == 2 * 3 * 144
    with pytest.raises(ValueError, match="rows of 100 are no multiple of 256"):
        _ = Tensor("a", (100,), Q4_K).bytes


@pytest.mark.parametrize(
    ("layer", "more"),
    [
        (0, True),
        (3, True),
        (4, False),
        (5, False),
        (6, True),
        (7, False),
        (9, True),
        (27, True),
        (28, True),
        (26, False),
    ],
)
def test_layers_with_more_bits(layer: int, more: bool) -> None:
    assert more_bits(layer, 32) is more
