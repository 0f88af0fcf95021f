"""The document of ``fitter explore --json``; a figure is ``null`` where it is not known."""

from __future__ import annotations

from fitter.output.documents.document import Key, document, rounded
from fitter.planning.tables.exploration import ASKED, Exploration, ExploredAnswer, ExploredCell

CELL = document(
    ExploredCell,
    *ASKED,
    *("fits", "n_ctx", "bytes", "used", "host_weights"),
    rounded("prompt_tokens_per_second"),
    rounded("tokens_per_second"),
    *("arguments", "problem", "needs_imatrix", "memory", "cost", "is_best", "bits_per_weight"),
    rounded("full_context_tokens_per_second"),
)

EXPLORATION = document(
    Exploration,
    *("fits", "cost"),
    Key("cells", of=CELL),
    "asked",
    Key("answers", of=document(ExploredAnswer, "model", Key("cell", of=CELL), "is_of_header", "refused")),
    *("kept", "seconds"),
    title="A grid of models, machines and parameters",
)
