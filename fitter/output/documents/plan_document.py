"""The document of ``fitter MODEL --json`` and ``Plan.to_dict``."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from fitter.llama.types import LlamaCpp, Params, Row
from fitter.output.arguments import arguments
from fitter.output.documents.document import Key, document, four_digits, rounded
from fitter.parameters.table import of_a_load
from fitter.planning.plan.drafting import BestDepth, Depth, Drafting
from fitter.planning.plan.plan import Alternative, Plan, resolved
from fitter.planning.plan.turns import Turns, UserSpeed
from fitter.planning.pricing.pricing import Price, SpeedAt
from fitter.planning.request.session import Session
from fitter.planning.request.summary import (
    DeviceUse,
    HostUse,
    LeftOut,
    ModelSummary,
    PoolUse,
    Problem,
    Search,
    Setting,
    SharedUse,
)
from fitter.planning.speed.explain import Bound, Choice, Reason
from fitter.programs.later import Later

BYTES = ("model", "context", "compute")
"""The kinds of memory of a row."""

MODEL = document(ModelSummary, "path", "name", "architecture", "bytes")
ROW_OF_DEVICE = document(Row, "device", *BYTES)
SHARED = document(SharedUse, "kind", "name", Key("memory", "rows", ROW_OF_DEVICE), "arguments")
PROBLEM = document(Problem, "device", "missing", "message")

_USE = (*BYTES, "shared", "used", "left")
_DEVICE = document(DeviceUse, "name", "description", "total", "free", "margin", *_USE, "more_in_use")
_HOST = document(HostUse, "total", "free", "margin", *BYTES, "shared", "later", "used", "left", "more_in_use")
_POOL = document(
    PoolUse,
    *("name", "members", "total", "free", "margin", "used", "left", "mapped_twice", "mapped_between", "load_mode"),
    Key("setting", of=document(Setting, "command", "bytes", "message")),
    "more_in_use",
)
_ROW = document(Row, "buffer_type", "device", "is_host", *BYTES, "reserved")
_SPEEDS = (rounded("prompt_tokens_per_second"), rounded("generation_tokens_per_second"))
_FULL = "Speed of generation when the context of a user is full; null where it is unknown, or nothing is generated."
_GENERATION = "Speed of generation, in tokens per second; null for a model that embeds or ranks texts."
_FULL_CONTEXT = document(SpeedAt, Key("tokens", "live_tokens"), rounded("generation_tokens_per_second"))
_ALTERNATIVE = document(Alternative, "arguments", "n_ctx", *_SPEEDS, Key("measured", "is_measured"), "file_type")
_USERS = document(UserSpeed, "users", *map(rounded, ("seconds", "each", "together")))
_DRAFTING = document(
    Drafting,
    "depth",
    rounded("acceptance"),
    rounded("accepted"),
    Key("assumed", "is_assumed"),
    Key("depths", of=document(Depth, "depth", *map(rounded, ("tokens", "each")))),
    Key("by_users", of=document(BestDepth, "users", "depth", *map(rounded, ("each", "off")))),
)
_SESSION = document(Session, "prompt", "answer", "reused", "turns", "users", "gap")
_TURNS = document(
    Turns,
    Key("session", of=_SESSION),
    rounded("computed"),
    rounded("kept"),
    Key("points", of=_USERS),
    "knee",
    "at_least",
    "holds",
    "why",
    rounded("seconds_if_kept"),
)
_CHOICE = document(Choice, "subject", "chosen", rounded("seconds"), "runner_up", rounded("runner_up_seconds"))
_BOUND = document(
    Bound,
    rounded("seconds"),
    "text",
    Key(
        "distance",
        change=four_digits,
        hint=float | None,
        about="How far the plan is from the bound, as a share of it.",
    ),
    Key("reasons", of=document(Reason, "kind", rounded("seconds"), "bytes", "devices")),
)


def _generation(price: Price) -> float | None:
    return four_digits(price.generation_tokens_per_second) if price.input_tokens is None else None


def params_to_dict(params: Params) -> dict[str, Any]:
    """Write the parameters of a load, named as in llama.cpp."""
    parameters = of_a_load()
    written = {name: parameters[name].kind.to_json(value) for name, value in params.planned().items()}
    # schema 1 has kv_unified after op_offload
    before = list(written)[: list(written).index("op_offload") + 1]
    return {name: written[name] for name in (*(name for name in before if name != "kv_unified"), *written)}


def _bound_of(plan: Plan) -> SimpleNamespace | None:
    bound = plan.bound
    if bound is None:
        return None
    distance = None if plan.estimate is None else bound.distance(plan.estimate.seconds)
    return SimpleNamespace(seconds=bound.seconds, text=bound.text, distance=distance, reasons=bound.reasons)


PLAN = document(
    Plan,
    "fits",
    "program",
    Key("model", of=MODEL, about=f"{ModelSummary.__doc__}"),
    Key("params", ".", change=lambda plan: params_to_dict(resolved(plan)), hint=Params),
    "own_split",
    Key(
        "arguments",
        ".",
        change=arguments,
        hint=tuple[str, ...],
        about="llama.cpp's command-line arguments for all of it.",
    ),
    Key("devices", of=_DEVICE),
    Key("host", of=_HOST),
    Key("pools", of=_POOL),
    Key("memory", "breakdown.rows", _ROW, about="What llama.cpp measured for each buffer type."),
    Key(
        "estimate",
        of=document(
            Price,
            _SPEEDS[0],
            Key("generation_tokens_per_second", ".", change=_generation, hint=float | None, about=_GENERATION),
            Key("full_context", of=_FULL_CONTEXT, about=_FULL),
            "input_tokens",
            rounded("inputs_per_second"),
        ),
        about="Estimated tokens per second; null where the plan does not fit.",
    ),
    Key("drafting", of=_DRAFTING),
    Key("turns", of=_TURNS),
    Key(
        "explanation",
        ".",
        document(Plan, Key("choices", of=_CHOICE), Key("bound", ".", _BOUND, _bound_of, Bound | None, "bound")),
        hint=Plan,
        about="Why the plan is as it is. Seconds.",
    ),
    "levers",
    Key("shared", of=SHARED),
    Key("later", of=document(Later, "kind", "bytes", "each", "count", "per_slot")),
    Key("left_out", of=document(LeftOut, "device", "reason", "message")),
    "rpc",
    "notes",
    Key("llama_cpp", of=document(LlamaCpp, "version", "ggml", "commit", "libllama", "key", "cpu")),
    Key(
        "search",
        of=document(
            Search,
            "dummy_loads",
            "shared_loads",
            Key("seconds", change=lambda seconds: round(seconds, 3)),
            Key("cut_short", "is_cut_short"),
        ),
    ),
    Key("problems", of=PROBLEM),
    Key("alternatives", of=_ALTERNATIVE),
    title="A plan of llama-fitter",
)


def to_dict(plan: Plan) -> dict[str, Any]:
    """Write ``plan`` in the published schema."""
    return PLAN.write(plan)
