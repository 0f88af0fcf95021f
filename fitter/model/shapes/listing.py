"""The shapes of the catalogue as they are listed and shown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fitter.errors import UsageError
from fitter.llama.header.gguf_writer import data_bytes
from fitter.model.shapes import catalogue
from fitter.model.shapes.mapping import header_of
from fitter.model.shapes.shape_addresses import SHAPE
from fitter.parameters.values import shown
from fitter.text import printable


@dataclass(frozen=True)
class ShapeInfo:
    """A model of the catalogue, which can be planned without a file."""

    name: str
    """Its name, as ``--shape`` takes it."""
    title: str
    """What it is called by those who published it."""
    architecture: str
    """llama.cpp's name of its architecture."""
    parameters: int
    """How many weights it has."""
    bytes: int
    """Bytes of its tensors as it is converted, before anything is quantized."""
    type: str
    """The types of its matrices then, such as ``bf16``; with ``mxfp4`` where experts are published so."""
    n_layer: int
    """``<arch>.block_count``, which includes layers for multi-token prediction."""
    n_ctx_train: int
    """The context that it was trained for, in tokens."""
    n_expert: int
    """Routed experts; 0 for a dense model."""
    source: str
    """Where its hyperparameters are from."""
    config: Mapping[str, Any]
    """The hyperparameters, by their names in its ``config.json``."""

    @property
    def model(self) -> str:
        """What ``fit`` and the others take as a model: ``shape://NAME``."""
        return f"{SHAPE}://{self.name}"


def shapes(*words: str) -> tuple[ShapeInfo, ...]:
    """The shapes whose names, titles or architectures have all of ``words`` in them, in whatever case; all by default.

    One word that is the name of a shape finds that one alone. Raises ``UsageError`` where none has them.
    """
    if not all(isinstance(word, str) for word in words):
        raise UsageError(f"words are {shown(words)}: give texts, such as fitter.shapes('qwen3', 'moe')")
    wanted = [word.strip().lower() for word in words]
    if len(wanted) == 1 and wanted[0] in catalogue.names():
        return (_info(wanted[0]),)
    shape_infos = [each for each in map(_info, catalogue.names()) if _has(each, wanted)]
    if not shape_infos and len(wanted) == 1:
        # with the names that are nearest
        catalogue.published(wanted[0])
    if not shape_infos:
        raise UsageError(
            f"no shape has all of '{printable(' '.join(words), 100)}' in its name: 'fitter shapes' lists all"
        )
    return tuple(shape_infos)


def _has(each: ShapeInfo, words: Sequence[str]) -> bool:
    text = f"{each.name} {each.title} {each.architecture}".lower()
    return all(word in text for word in words)


def _info(name: str) -> ShapeInfo:
    published = catalogue.published(name)
    header = header_of(published.config, f"the shape {name}")
    return ShapeInfo(
        name,
        published.title,
        header.architecture,
        header.parameters,
        data_bytes(header.tensors),
        ", ".join(sorted({tensor.type for tensor in header.tensors} - {"f32"})),
        header.number("block_count"),
        header.number("context_length"),
        header.number("expert_count"),
        published.source,
        published.config,
    )
