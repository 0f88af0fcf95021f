"""The turns of a plan's users, and whether drafting tokens pays for them. Estimated by the cost model.

Users send a turn, read the answer, and send the next one: a closed queue. All that are answered at once share the steps
of generation; prompts are computed one after the other. A step drafts some tokens, one after the other, and checks them
all at once. The model keeps those before the first that it would not have made itself, and makes one more.
"""

from __future__ import annotations

import functools
import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fitter.planning.placing.float_sum import float_sum
from fitter.planning.pricing.pricing import Price
from fitter.planning.request.session import Session
from fitter.storage import read_data

_KNEE = 0.5
"""Beyond the knee, another user brings less than this share of what one user alone has."""


@dataclass(frozen=True)
class UserSpeed:
    """Estimated speed for a number of users at once."""

    users: int
    """Their number."""
    seconds: float
    """Seconds of a turn, from the request to the last token of the answer."""
    each: float
    """Tokens per second of an answer, after its prompt."""
    together: float
    """Tokens per second of all answers."""


@dataclass(frozen=True)
class Turns:
    """Turns of the work that the user described."""

    session: Session
    """The work."""
    computed: float
    """Tokens of a prompt that are computed in a turn, on average."""
    kept: float
    """How often the turn before is still in memory."""
    points: tuple[UserSpeed, ...]
    """One user, and more, up to all."""
    why: str = ""
    """Why not all is kept, and what would keep it."""
    at_least: float | None = None
    """Tokens per second that each user should get."""
    seconds_if_kept: float | None = None
    """Seconds of a turn of all users if all were kept; ``None`` where it is."""

    @property
    def all(self) -> UserSpeed:
        """All users."""
        return self.points[-1]

    @property
    def holds(self) -> int | None:
        """The most users of ``points`` of which each gets ``at_least``; ``None`` where nothing is asked."""
        if self.at_least is None:
            return None
        return max((point.users for point in self.points if point.each >= self.at_least), default=0)

    @property
    def knee(self) -> int:
        """The most users with whom another one still brings half of what one user alone has."""
        first = self.points[0].together
        knee = self.points[0]
        for point in self.points[1:]:
            if point.together - knee.together < _KNEE * first * (point.users - knee.users):
                break
            knee = point
        return knee.users


def turns_of(
    session: Session,
    price: Price,
    slots: int,
    kept: Callable[[int], float],
    why: str = "",
    at_least: float | None = None,
    moved: Callable[[int, float], float] = lambda users, kept: 0.0,
    sampling: float = 0.0,
    is_unified: bool = True,
) -> Turns:
    """Estimate the turns of ``session`` with a plan's ``price``.

    Args:
        session: The work.
        price: The price of its average turn.
        slots: Users that are answered at once.
        kept: Returns how often the turn before is still in memory, for a number of users.
        why: Why not all is kept.
        at_least: Tokens per second that each user should get.
        moved: Returns the seconds of a turn in which conversations come from and go to the prompt cache, for a number
            of users and how often the turn before is kept.
        sampling: Seconds to choose a token of an answer.
        is_unified: Whether all slots have one KV cache. Else llama.cpp computes only neighbouring slots together.
    """
    steps = price.steps or ((1, price.estimate.generation_seconds),)
    prompt = price.estimate.prompt_seconds

    def of(users: int, share: float) -> UserSpeed:
        # a conversation stays in its slot, and a single request comes to any
        pool = min(users, slots) if session.reused else slots

        def step(busy: int) -> float:
            parts = 1.0 if is_unified else neighbours(busy, pool)
            return parts * step_seconds(steps, busy / parts) + busy * sampling

        return _users(session, users, slots, prompt * session.computed(share) + moved(users, share), step)

    points = tuple(of(users, kept(users)) for users in _numbers(session.users))
    share = kept(session.users)
    if_kept = of(session.users, 1.0).seconds if share < 1 else None
    return Turns(session, session.computed(share), share, points, why, at_least, if_kept)


def _numbers(users: int) -> list[int]:
    """List the numbers of users to show: all of few, else steps of about an eighth up to all."""
    numbers = [1]
    while numbers[-1] < users:
        numbers.append(min(users, max(numbers[-1] + 1, round(numbers[-1] * 9 / 8))))
    return numbers


def neighbours(busy: int, slots: int) -> float:
    """Return how many groups of neighbours ``busy`` slots form on average, if they are any of all ``slots``."""
    return busy * (slots - busy + 1) / slots


def _users(session: Session, users: int, slots: int, prompt: float, step: Callable[[int], float]) -> UserSpeed:
    """Solve the closed queue of ``users``, of whom some wait for an answer and the others read theirs.

    The numbers of those who wait are a chain of births and deaths, as in a queue of machines and repairmen: times are
    taken to be random with these averages.
    """

    def rate(waiting: int) -> float:
        # turns per second
        busy = min(waiting, slots)
        return busy / (busy * prompt + session.answer * step(busy))

    shares = [0.0] * users + [1.0]
    if session.gap:
        logs = [0.0]
        for waiting in range(1, users + 1):
            logs.append(logs[-1] + math.log((users - waiting + 1) / session.gap / rate(waiting)))
        largest = max(logs)
        shares = [math.exp(log - largest) for log in logs]
    total = float_sum(shares)
    turns = float_sum(share / total * rate(waiting) for waiting, share in enumerate(shares) if waiting)
    seconds = users / turns - session.gap
    # a user without a slot waits before the prompt
    queued = float_sum(share / total * max(0, waiting - slots) for waiting, share in enumerate(shares)) / turns
    answering = max(session.answer * step(1), seconds - queued - prompt)
    return UserSpeed(users, seconds, session.answer / answering, turns * session.answer)


def step_seconds(steps: Sequence[tuple[int, float]], users: float) -> float:
    """Return the seconds of a step for ``users``, between those of the numbers in ``steps``, or of the last."""
    at = bisect_left([number for number, _ in steps], users)
    if at == len(steps):
        return steps[-1][1]
    if not at or steps[at][0] == users:
        return steps[at][1]
    (before, fast), (after, slow) = steps[at - 1], steps[at]
    return fast + (slow - fast) * (users - before) / (after - before)


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
            Depth(
                number, count, count / drafted_step_seconds(checks[0], check, number * (draft + users * chosen), slower)
            )
            for number, (count, check) in enumerate(zip(tokens, checks, strict=True))
        )

    depths = {users: depths_of(users, checks) for users, checks in price.checks}
    best = {users: max(found, key=lambda one: one.each) for users, found in depths.items()}
    by_users = tuple(BestDepth(users, one.depth, one.each, depths[users][0].each) for users, one in best.items())
    return Drafting(depth, each, accepted is None, depths[max(depths)], by_users)


def drafted_step_seconds(alone: float, check: float, draft: float, slower: float) -> float:
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
    return float(read_data(__file__, "drafting.toml")["acceptance"])


@functools.cache
def deeper() -> float:
    """Return the median of how the published acceptance changes with each further token that is drafted at a time."""
    return float(read_data(__file__, "drafting.toml")["deeper"])
