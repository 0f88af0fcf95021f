"""The document of ``fitter shapes --json``; sizes in bytes."""

from __future__ import annotations

from dataclasses import dataclass

from fitter.model.shapes.catalogue import ShapeInfo
from fitter.output.documents.document import Key, document


@dataclass(frozen=True)
class Shapes:
    """Shapes that can be planned without a file."""

    shapes: tuple[ShapeInfo, ...]
    """Those that were asked for."""


SHAPES = document(
    Shapes,
    Key(
        "shapes",
        of=document(
            ShapeInfo,
            *("name", "model", "title", "architecture", "parameters", "bytes", "type", "n_layer", "n_ctx_train"),
            *("n_expert", "source", "config"),
        ),
    ),
    title="The shapes that --shape knows",
)
