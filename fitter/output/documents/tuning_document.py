"""The document of ``fitter tune --json``."""

from __future__ import annotations

import math

from fitter.output.documents.document import Key, document, four_digits, rounded
from fitter.output.documents.plan_document import PLAN
from fitter.planning.checked.tuning import Tuning, TuningRun

_RUN = document(
    TuningRun,
    Key("changes", "text"),
    Key("arguments", "words", about="Arguments of llama-server beyond those of the plan."),
    "environment",
    rounded("estimated"),
    Key(
        "seconds",
        change=lambda seconds: None if math.isinf(seconds) else four_digits(seconds),
        hint=float | None,
        about="Measured seconds of a turn, in the median; null where it failed.",
    ),
    *map(rounded, ("spread", "prompt", "step")),
    "hit_rate",
    "acceptance",
    "others",
    Key("doubt", about="Why something else than the plan decided the times, so that they are not stored."),
    "problem",
)

TUNING = document(
    Tuning,
    "server",
    Key("runs", of=_RUN),
    Key("best", of=_RUN),
    Key("plan", of=document(PLAN.kind, *PLAN.keys), about="The plan of the best run."),
    "left",
    "stored",
    "cut",
    Key("tuned", change=four_digits, hint=float | None, about="tuned"),
    title="A tuning",
)
