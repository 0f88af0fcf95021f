"""The curve of other contexts in a report; each point is a plan. Bytes."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from fitter.planning.plan.plan import Plan, resolved
from fitter.text import human

MOST_POINTS = 9
"""Most contexts beside the chosen one; each doubles the one before."""


@dataclass(frozen=True)
class ContextPoint:
    """The best plan for one context, with all other parameters unchanged."""

    n_ctx: int
    """Tokens of context, for all sequences together."""
    fits: bool
    """Whether a plan fits."""
    devices: int
    """Bytes on all devices."""
    host: int
    """Bytes of host memory."""
    on_host: int
    """Bytes of weights and cache in host memory, which slow the plan down."""
    prompt_tokens_per_second: float | None
    """Estimated speed; ``None`` if it does not fit."""
    generation_tokens_per_second: float | None
    """Estimated speed; ``None`` if it does not fit, or for a model that embeds or ranks texts."""
    message: str = ""
    """Why it does not fit or has no plan."""
    full_context_tokens_per_second: float | None = None
    """Estimated speed of generation when the context of a user is full; ``None`` if it does not fit."""
    prompt: int | None = None
    """Tokens of the prompt that its speeds are for; ``None`` without an estimate."""

    def to_dict(self) -> dict[str, Any]:
        """Return the point for JSON."""
        return asdict(self)


def point_of(plan: Plan) -> ContextPoint:
    """Return the point of a plan."""
    price = plan.estimate
    full = None if price is None else price.full_context
    return ContextPoint(
        resolved(plan).n_ctx,
        plan.fits,
        sum(use.used for use in plan.devices),
        plan.host.used,
        plan.host.model + plan.host.context,
        None if price is None else price.prompt_tokens_per_second,
        None if price is None or price.input_tokens is not None else price.generation_tokens_per_second,
        "; ".join(f"{problem.device} lacks {human(problem.missing)}" for problem in plan.problems),
        None if full is None else full.generation_tokens_per_second,
        None if price is None else price.workload.prompt,
    )


def contexts_to_try(n_ctx_train: int, n_streams: int, smallest: int, chosen: int) -> list[int]:
    """List contexts from the ``smallest`` per sequence to the model's own, each twice the one before."""
    most = max(n_ctx_train * n_streams, 1)
    context = min(max(smallest * n_streams, 1), most)
    contexts = []
    while context < most:
        contexts.append(context)
        context *= 2
    # of too many, keep the largest
    return [each for each in [*contexts, most][-MOST_POINTS:] if each != chosen]
