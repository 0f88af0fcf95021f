"""Whether drafting tokens pays, and how many at a time. Estimated by the cost model.

A step drafts some tokens, one after the other, and checks them all at once. The model keeps those before the first that
it would not have made itself, and makes one more.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from fitter.planning.placing.float_sum import float_sum
from fitter.planning.pricing.pricing import Price
from fitter.storage.files import read_data

DEEPEST = 8
"""The most tokens at a time that are estimated: no published run (tests/data/speeds/speculation.csv) drafts more."""

_HALVINGS = 50
"""Halvings to the last bits of a share."""


@dataclass(frozen=True)
class Depth:
    """Estimated speed with a number of tokens drafted at a time."""

    depth: int
    """Tokens drafted at a time; 0 is off."""
    tokens: float
    """Tokens of a step that each user gets, on average."""
    each: float
    """Tokens per second of each user."""


@dataclass(frozen=True)
class BestDepth:
    """Estimated speed of some users at once with the number of tokens drafted at a time that is best for them."""

    users: int
    """Their number."""
    depth: int
    """Tokens drafted at a time; 0 is off."""
    each: float
    """Tokens per second of each user."""
    off: float
    """The same without drafts."""


@dataclass(frozen=True)
class Drafting:
    """Estimated speeds with drafts of different lengths."""

    depth: int
    """Tokens that the plan drafts at a time."""
    acceptance: float
    """How often the model accepts a drafted token, if those before it are accepted, at ``depth``."""
    is_assumed: bool
    """Whether the acceptance is a published one, not the user's."""
    depths: tuple[Depth, ...]
    """No draft, one token at a time, two, and so on: for all users of the work."""
    by_users: tuple[BestDepth, ...] = ()
    """One user, twice as many and so on, and all."""

    @property
    def accepted(self) -> float:
        """Share of all tokens that the plan drafts which are accepted, as llama-server and ``--acceptance`` count."""
        return (expected(self.depth, self.acceptance) - 1) / self.depth

    @property
    def off(self) -> Depth:
        """Without drafts."""
        return self.depths[0]

    @property
    def planned(self) -> Depth:
        """As the plan drafts."""
        return self.depths[min(self.depth, len(self.depths) - 1)]

    @property
    def best(self) -> Depth:
        """The quickest."""
        return max(self.depths, key=lambda each: each.each)


def drafting_of(
    price: Price, depth: int, draft: float, accepted: float | None, chosen: float = 0.0, slower: float = 1.0
) -> Drafting | None:
    """Estimate the speeds with drafts of different lengths; ``None`` where the price has none.

    Args:
        price: The price of the plan.
        depth: Tokens that it drafts at a time.
        draft: Seconds to draft a token for all users.
        accepted: Share of all drafted tokens that the model accepts at this depth, if the user knows it.
        chosen: Seconds to choose a token, for each user and drafted token.
        slower: ``Family.drafts`` of the slowest device.
    """
    if not price.checks:
        return None
    each = published() if accepted is None else of_each(accepted, depth)

    def depths_of(users: int, checks: Sequence[float]) -> tuple[Depth, ...]:
        tokens = [expected(number, min(1.0, each * deeper() ** (number - depth))) for number in range(len(checks))]
        return tuple(
            Depth(number, count, count / step_seconds(checks[0], check, number * (draft + users * chosen), slower))
            for number, (count, check) in enumerate(zip(tokens, checks, strict=True))
        )

    depths = {users: depths_of(users, checks) for users, checks in price.checks}
    best = {users: max(found, key=lambda one: one.each) for users, found in depths.items()}
    by_users = tuple(BestDepth(users, one.depth, one.each, depths[users][0].each) for users, one in best.items())
    return Drafting(depth, each, accepted is None, depths[max(depths)], by_users)


def step_seconds(alone: float, check: float, draft: float, slower: float) -> float:
    """Return the seconds of a step that makes and checks drafts.

    Args:
        alone: Seconds of a step without drafts.
        check: Seconds of one that checks them, as if their tokens were another user's.
        draft: Seconds to make them.
        slower: ``Family.drafts``.
    """
    return alone + slower * (check - alone + draft)


def expected(depth: int, acceptance: float) -> float:
    """Return the tokens of a step: those accepted of ``depth``, until the first that is not, and one more.

    Leviathan, Kalman, Matias: Fast Inference from Transformers via Speculative Decoding (2022), equation 1.
    """
    return float_sum(acceptance**each for each in range(depth + 1))


def of_each(accepted: float, depth: int) -> float:
    """Return how often a token is accepted if those before it are, from the share of all drafted ones.

    llama-server counts the tokens after a rejected one as drafted.
    """
    low, high = 0.0, 1.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if expected(depth, middle) - 1 < accepted * depth else (low, middle)
    return high


@functools.cache
def published() -> float:
    """Return the median of published acceptances."""
    return float(read_data(__file__)["acceptance"])


@functools.cache
def deeper() -> float:
    """Return the median of how the published acceptance changes with each further token that is drafted at a time."""
    return float(read_data(__file__)["deeper"])
