"""The turns of a plan's users: seconds, tokens per second, and what is computed again. Estimated by the cost model.

Users send a turn, read the answer, and send the next one: a closed queue. All that are answered at once share the steps
of generation; prompts are computed one after the other.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fitter.planning.placing.float_sum import float_sum
from fitter.planning.pricing.pricing import Price
from fitter.planning.request.session import Session

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
