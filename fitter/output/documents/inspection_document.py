"""The document of ``fitter inspect --json``."""

from __future__ import annotations

import math
from typing import Any

from fitter.llama.types import Array, MetadataValue, Row
from fitter.output.documents.document import Key, document
from fitter.output.documents.plan_document import BYTES, MODEL
from fitter.planning.plan.layer_map import Inspection, LayerSize, RoleSize
from fitter.planning.request.summary import ModelSummary


def _metadata(value: MetadataValue) -> Any:
    if isinstance(value, Array):
        return {"type": value.type, "length": value.length, "values": [_metadata(each) for each in value.values]}
    # JSON has no other numbers
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


INSPECTION = document(
    Inspection,
    Key("model", of=MODEL, about=f"{ModelSummary.__doc__}"),
    Key("metadata", change=lambda metadata: {key: _metadata(value) for key, value in metadata.items()}),
    Key("roles", of=document(RoleSize, "role", "count", "bytes")),
    "n_ctx",
    Key(
        "layers",
        of=document(
            LayerSize,
            Key("layer", "index"),
            "bytes",
            Key("weights", change=lambda roles: {role.role: role.bytes for role in roles}, hint=dict[str, int]),
            "context",
        ),
    ),
    Key("memory", "rows", document(Row, "buffer_type", "device", *BYTES)),
    title="What a model is made of",
)
