"""The documents of ``fitter calibrate``, ``verify`` and ``tune`` with ``--json``: what ran for real."""

from __future__ import annotations

import math

from fitter.llama.types import Row, VirtualDevice
from fitter.output.documents.document import Document, Key, document, four_digits, rounded
from fitter.output.documents.listing_documents import CAPABILITY
from fitter.output.documents.plan_document import BYTES, MODEL, PLAN, PROBLEM, SHARED, params_to_dict
from fitter.planning.checked.calibration import Calibration, Comparison, DeviceCalibration, Difference
from fitter.planning.checked.tuning import Tuning, TuningRun
from fitter.planning.plan.verified import LaterUse, MemoryGrowth, MemoryUse, ServerUse, Verification, VerifiedRow
from fitter.planning.request.summary import ModelSummary

CALIBRATION = document(
    Calibration,
    Key("exact", "is_exact"),
    Key(
        "devices",
        of=document(
            DeviceCalibration,
            *(Key(name, f"info.{name}") for name in ("name", "description", "backend", "total", "free")),
            Key("twin", of=document(VirtualDevice, Key("profile", about="How the twin behaves."), CAPABILITY)),
            *("context", "outside", "margin"),
        ),
    ),
    Key(
        "comparisons",
        of=document(
            Comparison,
            *("devices", "between", "loads"),
            Key("differences", of=document(Difference, "model", "configuration", "what", "real", "other")),
        ),
    ),
    "stored",
    title="A calibration",
)


_SIZES = document(Row, *BYTES)


def _real(kind: str) -> Key:
    """A size of the real load, ``null`` where a llama-server does not say it."""
    return Key(
        kind,
        ".",
        change=lambda row: None if kind in row.unsaid else getattr(row.real, kind),
        hint=int | None,
        about=kind,
    )


def _use(*keys: str) -> Document:
    free = (Key("free_before", "before"), Key("free_after", "after"))
    return document(MemoryUse, *keys, *free, "counted", "unaccounted")


VERIFICATION = document(
    Verification,
    "fits",
    Key(
        "holds",
        ".",
        change=lambda found: found.holds if found.fits else None,
        hint=bool | None,
        about=f"{Verification.holds.__doc__} null if the plan does not fit.",
    ),
    "tolerance",
    Key("model", of=MODEL, about=f"{ModelSummary.__doc__}"),
    Key("params", change=params_to_dict),
    Key(
        "memory",
        "rows",
        document(
            VerifiedRow,
            Key("buffer_type", "real.buffer_type"),
            Key("device", "real.device"),
            Key("is_host", "real.is_host"),
            Key("predicted", of=_SIZES, about="What the plan predicts."),
            Key(
                "real",
                ".",
                document(Row, *map(_real, BYTES)),
                hint=Row,
                about="What the real load took; null of what a llama-server does not say.",
            ),
        ),
    ),
    Key(
        "devices",
        "memory",
        _use("name"),
        change=lambda memory: memory[:-1],
        about=f"{MemoryUse.__doc__}",
    ),
    Key(
        "host",
        "memory",
        _use(),
        change=lambda memory: memory[-1] if memory else None,
        hint=MemoryUse | None,
        about="The same of the host; null where nothing was loaded.",
    ),
    Key("shared", of=SHARED),
    Key("problems", of=PROBLEM),
    Key(
        "server",
        of=document(
            ServerUse,
            *("path", "version", "prompts", "answered", "tokens", "slots", "refused"),
            Key(
                "later",
                of=document(LaterUse, "kind", "count", "tokens", "predicted", "real", "rounding", "most"),
            ),
            *("resident", "of_files", "counted", "planned", "margin"),
            Key(
                "growth",
                of=document(
                    MemoryGrowth,
                    *("name", "first", "second", "requests", "per_request", "idle", "seconds", "per_minute"),
                ),
            ),
            *("expert_hits", "expert_misses", "expert_hit_rate", "reallocations"),
        ),
    ),
    title="A plan that was loaded for real",
)


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
