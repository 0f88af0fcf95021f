"""What other contexts would take: the points of a curve, each a plan of its own. Sizes in bytes."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from fitter.planning.plan.plan import Plan, resolved
from fitter.text import human

MOST_POINTS = 9
"""Contexts beside the chosen one, each twice the one before."""


@dataclass(frozen=True)
class ContextPoint:
    """The best plan with one context, all else being as it was asked for."""

    n_ctx: int
    """Tokens of context, of all sequences together."""
    fits: bool
    """Whether there is a plan that fits."""
    devices: int
    """Bytes that it takes of all devices."""
    host: int
    """Bytes that it takes of host memory."""
    on_host: int
    """Bytes of weights and cache of those, which slow it down."""
    prompt_tokens_per_second: float | None
    """Estimated; ``None`` where it does not fit."""
    generation_tokens_per_second: float | None
    """Estimated; ``None`` where it does not fit."""
    message: str = ""
    """Why it does not fit, or could not be planned."""

    def to_dict(self) -> dict[str, Any]:
        """The point as JSON-ready data."""
        return asdict(self)


def point_of(plan: Plan) -> ContextPoint:
    """The point of a plan."""
    price = plan.estimate
    return ContextPoint(
        resolved(plan).n_ctx,
        plan.fits,
        sum(use.used for use in plan.devices),
        plan.host.used,
        plan.host.model + plan.host.context,
        None if price is None else price.prompt_tokens_per_second,
        None if price is None else price.generation_tokens_per_second,
        "; ".join(f"{problem.device} lacks {human(problem.missing)}" for problem in plan.problems),
    )


def contexts_to_try(n_ctx_train: int, n_streams: int, smallest: int, chosen: int) -> list[int]:
    """Contexts from the ``smallest`` of each sequence to the model's own, each twice the one before."""
    most = max(n_ctx_train * n_streams, 1)
    context = min(max(smallest * n_streams, 1), most)
    found = []
    while context < most:
        found.append(context)
        context *= 2
    # the largest ones say more than the smallest
    return [each for each in [*found, most][-MOST_POINTS:] if each != chosen]
