"""A model from its header: what is told of it, and what is refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest

from fitter.errors import ModelError
from fitter.llama.types import Array, Header, MetadataValue, TensorInfo
from fitter.model.header import open_model
from tests.support.cases import cases, named_cases
from tools.models.shapes import ALIGNMENT, SHAPES, write, write_split

OFFSET = 4096
METADATA: dict[str, MetadataValue] = {
    "general.architecture": "qwen3moe",
    "general.name": "A model",
    "qwen3moe.block_count": 2,
    "qwen3moe.context_length": 40960,
    "qwen3moe.expert_count": 8,
    "tokenizer.ggml.tokens": Array("string", 151936),
}
# the first one is padded to 128 bytes in the file
TENSORS = (
    TensorInfo("token_embd.weight", "F32", (25,), 100),
    TensorInfo("blk.0.ffn_up_exps.weight", "F32", (16,), 64),
    TensorInfo("blk.1.ffn_up_exps.weight", "F32", (25,), 100),
)
END = OFFSET + 128 + 64 + 100


def _header(tensors: tuple[TensorInfo, ...] = TENSORS, **changes: MetadataValue | None) -> Header:
    """A header; keyword ``a__b`` stands for ``a.b``, and ``None`` takes a key away."""
    metadata = {**METADATA, **{key.replace("__", "."): value for key, value in changes.items()}}
    return Header({key: value for key, value in metadata.items() if value is not None}, tensors, OFFSET, 3, ALIGNMENT)


def _open(directory: Path, *headers: Header, size: int = END, name: str = "a") -> object:
    """Open a model of as many files as there are headers, all of ``size`` bytes."""
    names = [f"{name}.gguf"]
    if len(headers) > 1:
        names = [f"{name}-{i:05d}-of-{len(headers):05d}.gguf" for i in range(1, len(headers) + 1)]
    read = dict(zip([str(directory / file) for file in names], headers, strict=True))
    for path in read:
        Path(path).write_bytes(b"GGUF\x03\x00\x00\x00".ljust(size, b"\0"))
    return open_model(next(iter(read)), read.__getitem__)


def _refused(directory: Path, *headers: Header, size: int = END, name: str = "a") -> str:
    with pytest.raises(ModelError) as caught:
        _open(directory, *headers, size=size, name=name)
    assert len(str(caught.value).splitlines()) == 1
    return str(caught.value)


def test_a_model(tmp_path: Path) -> None:
    model = _open(tmp_path, _header())
    path = tmp_path / "a.gguf"
    assert dataclasses.asdict(model) == {  # type: ignore[call-overload]
        "path": path,
        "files": (path,),
        "name": "A model",
        "architecture": "qwen3moe",
        "bytes": 264,
        "n_layer": 2,
        "n_layer_nextn": 0,
        "n_ctx_train": 40960,
        "n_expert": 8,
        "tensors": TENSORS,
        "metadata": {**METADATA, "tokenizer.ggml.tokens": {"type": "string", "length": 151936, "values": ()}},
    }


@named_cases(
    ("named by its file", {"general__name": None}, "name", "a"),
    ("an empty name", {"general__name": ""}, "name", "a"),
    ("no context", {"qwen3moe__context_length": None}, "n_ctx_train", 0),
    ("no experts", {"qwen3moe__expert_count": None}, "n_expert", 0),
    ("multi-token prediction", {"qwen3moe__nextn_predict_layers": 1}, "n_layer_nextn", 1),
    ("a type", {"general__type": "model"}, "name", "A model"),
)
def test_what_the_header_says(changes: dict[str, MetadataValue], field: str, value: object, tmp_path: Path) -> None:
    assert getattr(_open(tmp_path, _header(**changes)), field) == value


def test_experts_make_a_moe(tmp_path: Path) -> None:
    assert _open(tmp_path, _header()).is_moe  # type: ignore[attr-defined]
    assert not _open(tmp_path, _header(TENSORS[:1])).is_moe  # type: ignore[attr-defined]


@named_cases(
    ("vocabulary", _header(()), "has no tensors, only a vocabulary"),
    ("no architecture", _header(general__architecture=None), "has no general.architecture"),
    ("an odd architecture", _header(general__architecture=3), "has no general.architecture"),
    ("an old projector", _header(general__architecture="clip"), "is a multimodal projector"),
    ("projector", _header(general__type="mmproj"), "is a multimodal projector"),
    ("adapter", _header(general__type="adapter"), "is an adapter"),
    ("imatrix", _header(general__type="imatrix", general__architecture=None), "importance matrix"),
    ("no layers", _header(qwen3moe__block_count=None), "has no qwen3moe.block_count"),
    ("renamed split file", _header(split__count=3, split__no=0), "<name>-00001-of-00003.gguf"),
    (
        "too many layers",
        _header(qwen3moe__block_count=2**31),
        "a.gguf has qwen3moe.block_count 2147483648: llama.cpp takes a whole number from 1 to 512; download it",
    ),
    (
        "experts per layer",
        _header(qwen3moe__expert_count=Array("i32", 2, (8, 16))),
        "a.gguf has qwen3moe.expert_count with 2 values: llama.cpp takes a whole number from 0 to 1024",
    ),
)
def test_no_model(header: Header, says: str, tmp_path: Path) -> None:
    assert says in _refused(tmp_path, header)


def test_a_header_that_cannot_be_read(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(b"GGUF\x03\x00\x00\x00")

    def read(_: str) -> Header:
        raise ModelError("not readable")

    with pytest.raises(ModelError, match="its header is truncated or damaged"):
        open_model(path, read)


@cases(1, 100, (END - OFFSET,))
def test_a_truncated_file(missing: int, tmp_path: Path) -> None:
    assert f"is truncated: the last {missing} bytes" in _refused(tmp_path, _header(), size=END - missing)


@cases(0, 28, 1000)
def test_a_whole_file(more: int, tmp_path: Path) -> None:
    assert _open(tmp_path, _header(), size=END + more)


def _split(number: int, count: int = 2, total: int = 3, **changes: MetadataValue | None) -> Header:
    tensors = TENSORS[:2] if number == 0 else TENSORS[2:]
    said = {"split__no": number, "split__count": count, "split__tensors__count": total}
    return _header(tensors, **{**said, **changes})


def test_a_split_model(tmp_path: Path) -> None:
    model = _open(tmp_path, _split(0, general__name=None), _split(1), name="m")
    assert [file.name for file in model.files] == ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"]  # type: ignore[attr-defined]
    assert (model.name, model.bytes) == ("m", 264)  # type: ignore[attr-defined]
    assert [tensor.split for tensor in model.tensors] == [0, 0, 1]  # type: ignore[attr-defined]


@named_cases(
    ("another count", (_split(0, 3), _split(1, 3)), "is one of 3 files by its header, but one of 2 by its name"),
    ("not split at all", (_header(), _header()), "is one of 1 files by its header, but one of 2 by its name"),
    ("the same file twice", (_split(0), _split(0)), "00002-of-00002.gguf is not file 2 of 2"),
    ("exchanged", (_split(1), _split(0)), "00001-of-00002.gguf is not file 1 of 2"),
    ("no number", (_split(0), _split(1, split__no=None)), "is not file 2 of 2"),
    ("a tensor lost", (_split(0, total=4), _split(1)), "3 of 4 tensors"),
)
def test_a_split_that_does_not_hold_together(headers: tuple[Header, ...], says: str, tmp_path: Path) -> None:
    assert says in _refused(tmp_path, *headers)


def test_the_second_file_is_truncated(tmp_path: Path) -> None:
    message = _refused(tmp_path, _split(0), _split(1), size=OFFSET + 128 + 64 - 150)
    assert "is truncated" in message


def _reader(shape: str, parts: int) -> Callable[[str], Header]:
    """Reads what ``tools.models.shapes`` has written, but for the header itself."""

    def read(path: str) -> Header:
        tensors = SHAPES[shape].tensors
        size = -(-len(tensors) // parts)
        index = int(Path(path).name.split("-of-")[0][-5:]) - 1 if parts > 1 else 0
        mine = tensors[index * size : (index + 1) * size]
        data = sum(-(-tensor.bytes // ALIGNMENT) * ALIGNMENT for tensor in mine)
        metadata: dict[str, MetadataValue] = {
            "general.architecture": SHAPES[shape].architecture,
            f"{SHAPES[shape].architecture}.block_count": SHAPES[shape].n_layer,
            "split.no": index,
            "split.count": parts,
            "split.tensors.count": len(tensors),
        }
        infos = tuple(TensorInfo(tensor.name, tensor.type.name, tensor.shape, tensor.bytes) for tensor in mine)
        return Header(metadata, infos, Path(path).stat().st_size - data, 3, ALIGNMENT)

    return read


@cases(1, 5)
def test_a_model_of_hundreds_of_gigabytes(parts: int, tmp_path: Path) -> None:
    shape = "deepseek-v3.1"
    path = write(shape, tmp_path, vocab=False) if parts == 1 else write_split(shape, tmp_path, parts, vocab=False)
    model = open_model(path, _reader(shape, parts))
    assert (model.bytes, model.n_layer, len(model.tensors), len(model.files)) == (SHAPES[shape].bytes, 61, 1086, parts)
    assert model.is_moe


@pytest.mark.parametrize("tokens", [False, True], ids=["no texts", "texts"])
@pytest.mark.parametrize(("words", "most"), [(25, 25), (26, 25), (10**8, 25)])
def test_words_that_nothing_has_room_for(words: int, most: int, tokens: bool, tmp_path: Path) -> None:
    """llama.cpp takes 40 bytes for each before it finds that out, unless their texts are there to be counted."""
    changes = {"qwen3moe__vocab_size": words} | ({} if tokens else {"tokenizer__ggml__tokens": None})
    if tokens or words <= most:
        _open(tmp_path, _header(**changes))
    else:
        assert _refused(tmp_path, _header(**changes)) == (
            f"{tmp_path}/a.gguf has {words} words by its header, but room for {most}; download it again"
        )


@cases(1 << 23, (1 << 23) + 1)
def test_more_words_than_any_model_has(words: int, tmp_path: Path) -> None:
    rows = (TensorInfo("token_embd.weight", "F32", (1, 1 << 24), 100), *TENSORS[1:])
    header = _header(rows, qwen3moe__vocab_size=words, tokenizer__ggml__tokens=None)
    if words == 1 << 23:
        _open(tmp_path, header)
    else:
        assert "but room for 8388608; download it again" in _refused(tmp_path, header)
