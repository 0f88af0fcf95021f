"""List the shapes of the catalogue."""

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
    """A model of the catalogue, to plan without a file."""

    name: str
    """Its name for ``--shape``."""
    title: str
    """Its makers' name."""
    architecture: str
    """llama.cpp's name of its architecture."""
    parameters: int
    """Number of weights."""
    bytes: int
    """Bytes of its tensors after the conversion, before any quantization."""
    type: str
    """Types of its matrices then, such as ``bf16``; with ``mxfp4`` if experts are published so."""
    n_layer: int
    """``<arch>.block_count``, with layers for multi-token prediction."""
    n_ctx_train: int
    """The context that it was trained for, in tokens."""
    n_expert: int
    """Routed experts; 0 for a dense model."""
    source: str
    """Source of its hyperparameters."""
    config: Mapping[str, Any]
    """Hyperparameters, by their names in its ``config.json``."""

    @property
    def model(self) -> str:
        """Its address for ``fit`` and other calls: ``shape://NAME``."""
        return f"{SHAPE}://{self.name}"


def shapes(*words: str) -> tuple[ShapeInfo, ...]:
    """Return the shapes with all of ``words`` in their name, title or architecture, in any case; by default all.

    A single word that is a shape's name finds this shape alone. Raises ``UsageError`` if none matches.
    """
    if not all(isinstance(word, str) for word in words):
        raise UsageError(f"words are {shown(words)}: give texts, such as fitter.shapes('qwen3', 'moe')")
    wanted = [word.strip().lower() for word in words]
    if len(wanted) == 1 and wanted[0] in catalogue.names():
        return (_info(wanted[0]),)
    shape_infos = [each for each in map(_info, catalogue.names()) if _has(each, wanted)]
    if not shape_infos and len(wanted) == 1:
        # the error names the nearest ones
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
