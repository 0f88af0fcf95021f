"""A model as its header describes it."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fitter.errors import Message, ModelError, Remedy
from fitter.llama.header import limits
from fitter.llama.types import Array, Header, MetadataValue, Skeleton, TensorInfo
from fitter.model import location, tensors
from fitter.model.files import source
from fitter.model.files.source import show
from fitter.parameters.table import POOLING
from fitter.text import LONGEST_NAME, printable


@dataclass(frozen=True)
class Model:
    """A model that llama.cpp can load. ``name`` and ``architecture`` are safe to print; ``metadata`` and ``tensors``
    are exactly the file's.

    Attributes:
        path: The file for llama.cpp, which has only the header of a remote model.
        files: All files of a split model.
        bytes: Bytes of all tensors.
        n_layer: ``<arch>.block_count``, with the layers for multi-token prediction.
        n_layer_nextn: Layers for multi-token prediction.
        n_ctx_train: The context that it was trained for; 0 if unknown.
        n_expert: Routed experts; 0 for a dense model.
        metadata: Metadata of the first file.
    """

    path: Path
    files: tuple[Path, ...]
    name: str
    architecture: str
    bytes: int
    n_layer: int
    n_layer_nextn: int
    n_ctx_train: int
    n_expert: int
    tensors: tuple[TensorInfo, ...]
    metadata: Mapping[str, MetadataValue]

    @property
    def called(self) -> str:
        """Its path, or the address of its header."""
        return source.called(self.path)

    @property
    def skeleton(self) -> Skeleton:
        """What llama.cpp loads in its place."""
        return Skeleton(tuple(map(str, self.files)))

    @property
    def n_vocab(self) -> int:
        """Tokens of the vocabulary; 0 if unknown."""
        tokens = self.metadata.get("tokenizer.ggml.tokens")
        return tokens.length if isinstance(tokens, Array) else self.number("vocab_size")

    @property
    def n_embd(self) -> int:
        """Elements of an output embedding; 0 if unknown."""
        return self.number("embedding_length_out") or self.number("embedding_length")

    @property
    def pooling(self) -> str:
        """How its embeddings are pooled (``mean``, ``cls``, ``last``, ``rank``); empty for a model that pools none."""
        number = self.number("pooling_type")
        return next((name for name, value in POOLING.items() if value == number and value), "")

    @property
    def is_causal(self) -> bool:
        """Whether a token attends only to those before it, as in a model that generates."""
        return self.metadata.get(f"{self.architecture}.attention.causal") is not False

    def number(self, key: str) -> int:
        """Return a whole number of its architecture's metadata; 0 if it has none."""
        return _integer(self.metadata, f"{self.metadata.get('general.architecture')}.{key}")

    @property
    def is_moe(self) -> bool:
        """Whether it has routed experts, which upstream's fit moves to the host first."""
        return any(tensors.is_expert(tensor.name) for tensor in self.tensors)


def open_model(path: str | os.PathLike[str], read_header: Callable[[str], Header]) -> Model:
    """Open a model, and check its header.

    Args:
        path: Path or address.
        read_header: Reads the header of one file.

    Raises:
        ModelError: A file is missing, unreadable, truncated or not GGUF, or it is no language model (a vocabulary, an
            adapter, a projector).
    """
    files = location.model_files(path)
    headers = [_read(file, read_header) for file in files]
    metadata = headers[0].metadata
    architecture = _usable_architecture(files[0], metadata)
    _check_split(files, headers)
    infos = tuple(tensor._replace(split=split) for split, header in enumerate(headers) for tensor in header.tensors)
    if not infos:
        raise ModelError(f"{show(files[0])} has no tensors, only a vocabulary; give the file with the weights")
    for file, header in zip(files, headers, strict=True):
        _check_length(file, header)
    if wrong := limits.problem(metadata, len(infos)):
        raise ModelError(f"{show(files[0])} {wrong}; {source.again(files[0])}")
    _check_vocabulary(files[0], _integer(metadata, f"{architecture}.vocab_size"), metadata, infos)
    n_layer = _integer(metadata, f"{architecture}.block_count")
    if n_layer < 1:
        raise ModelError(
            f"{show(files[0])} has no {printable(architecture, LONGEST_NAME)}.block_count, so it is not "
            "a language model; convert it again"
        )
    return Model(
        files[0],
        files,
        printable(_name(files[0], metadata), LONGEST_NAME),
        printable(architecture, LONGEST_NAME),
        sum(tensor.bytes for tensor in infos),
        n_layer,
        _integer(metadata, f"{architecture}.nextn_predict_layers"),
        _integer(metadata, f"{architecture}.context_length"),
        _integer(metadata, f"{architecture}.expert_count"),
        infos,
        metadata,
    )


def _read(file: Path, read_header: Callable[[str], Header]) -> Header:
    try:
        return read_header(str(file))
    except ModelError as error:
        if other := _of_another(str(error)):
            raise ModelError(f"{show(file)} " + other) from error
        # the file begins like a GGUF file, so the rest of its header is wrong
        again = source.again(file) if source.is_elsewhere(file) else "download the model again"
        raise ModelError(f"{show(file)}: its header is truncated or damaged; {again}") from error


_TYPE = re.compile(r"has invalid ggml type ([0-9]{1,3})[. ]")
_GIVEN_UP = re.compile(
    r" of type [0-9]+ \(([^()]+)\) has -?[0-9]+ elements per row, not a multiple of block size \(0\)"
)
"""ggml's messages about an unknown type and about a removed one."""


def _of_another(reason: str) -> str:
    """Say that another llama.cpp is needed for a file whose header is complete."""
    if match := _TYPE.search(reason):
        return Message(
            f"has tensors of type {match[1]}, which this llama.cpp does not have: ",
            Remedy("use a newer one (--llama-cpp)", "llama_cpp"),
            "another file if this one was made for a fork such as ik_llama.cpp",
            joined=", or ",
        )
    if match := _GIVEN_UP.search(reason):
        return (
            f"has tensors of a type that llama.cpp has given up ({printable(match[1], 80)}): take another file of the "
            "model, such as Q4_0"
        )
    return ""


def _usable_architecture(file: Path, metadata: Mapping[str, MetadataValue]) -> str:
    """Return the architecture of a language model. Raises ``ModelError`` for other files."""
    kind, architecture = metadata.get("general.type"), metadata.get("general.architecture")
    if kind == "mmproj" or architecture == "clip":
        named = Remedy(", and this file with --mmproj", "mmproj")
        raise ModelError(f"{show(file)} is a multimodal projector; give the language model", named)
    if kind == "adapter":
        named = Remedy(", and this file with --lora", "lora")
        raise ModelError(f"{show(file)} is an adapter; give the model that it is for", named)
    if kind == "imatrix" or architecture == "imatrix":
        raise ModelError(f"{show(file)} is an importance matrix, used to quantize a model; give the model itself")
    if not isinstance(architecture, str) or not architecture:
        raise ModelError(f"{show(file)} has no general.architecture, so it is not a model; convert it again")
    return architecture


def _check_split(files: Sequence[Path], headers: Sequence[Header]) -> None:
    """Raise ``ModelError`` if the names and the headers of the files contradict each other."""
    count = _integer(headers[0].metadata, "split.count") or 1
    if count != len(files):
        if len(files) == 1:
            name = source.split_path("<name>", 1, count)
            raise ModelError(f"{show(files[0])} is one of {count} split files; rename them to names such as {name}")
        raise ModelError(source.another_count(show(files[0]), count, len(files), source.again(files[0])))
    if count == 1:
        return
    for index, (file, header) in enumerate(zip(files, headers, strict=True)):
        number = _integer(header.metadata, "split.no")
        if number != index or "split.no" not in header.metadata:
            raise ModelError(f"{show(file)} is not file {index + 1} of {count} of its model; {source.again(file)}")
    expected = _integer(headers[0].metadata, "split.tensors.count")
    n_tensors = sum(len(header.tensors) for header in headers)
    if expected and expected != n_tensors:
        again = source.again(files[0]) if source.is_elsewhere(files[0]) else "download them again"
        raise ModelError(f"{show(files[0])}: its {count} split files have {n_tensors} of {expected} tensors; {again}")


def _check_length(file: Path, header: Header) -> None:
    """Raise ``ModelError`` if the file ends before its tensors do."""
    missing = header.file_bytes - file.stat().st_size
    if missing > 0:
        raise ModelError(
            f"{show(file)} is truncated: the last {missing} bytes of its tensors are missing; {source.again(file)}"
        )


def _check_vocabulary(
    file: Path, n_vocab: int, metadata: Mapping[str, MetadataValue], infos: Sequence[TensorInfo]
) -> None:
    """Raise ``ModelError`` for an impossible number of words without texts: llama.cpp creates all before it reads
    tensors.
    """
    most = min(limits.MOST_WORDS, max(max(tensor.shape, default=0) for tensor in infos))
    if n_vocab > most and "tokenizer.ggml.tokens" not in metadata:
        raise ModelError(f"{show(file)} has {n_vocab} words by its header, but room for {most}; {source.again(file)}")


def _name(file: Path, metadata: Mapping[str, MetadataValue]) -> str:
    name = metadata.get("general.name")
    if isinstance(name, str) and name:
        return name
    split = source.split_name(file)
    return split[0] if split else file.stem


def _integer(metadata: Mapping[str, MetadataValue], key: str) -> int:
    """Return the whole number at ``key``; 0 without one."""
    value = metadata.get(key, 0)
    return value if isinstance(value, int) else 0
