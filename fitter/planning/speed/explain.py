"""Why a plan is as it is: what was chosen over what, and how far from the best the plan can be at most. Seconds."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

ReasonKind = Literal["context", "compute", "whole"]
REASONS: tuple[ReasonKind, ...] = ("context", "compute", "whole")


@dataclass(frozen=True)
class Choice:
    """What was decided about something, and what else it might have been."""

    subject: str
    """What was decided about, such as ``where the weights go``."""
    chosen: str
    """What was chosen."""
    seconds: float
    """Seconds that this takes of what the plan is to be fast at."""
    runner_up: str | None = None
    """The best of the others; ``None`` where there was none."""
    runner_up_seconds: float | None = None
    """Seconds that this takes; ``None`` where it was not priced, as what does not fit."""

    @property
    def excess(self) -> float | None:
        """Seconds that the runner-up takes beyond what was chosen; negative where it takes less."""
        return None if self.runner_up_seconds is None else self.runner_up_seconds - self.seconds


FAR = 1.5
"""How many times its bound a plan takes from which on the search goes wider, and the plan says what is left of it."""


@dataclass(frozen=True)
class Reason:
    """Why a plan is far from its bound."""

    kind: ReasonKind
    """``context``: the plan's is larger than the smallest, by ``bytes`` of cache. ``compute``: compute buffers take
    ``bytes``. ``whole``: layers and tensors are not divided.
    """
    seconds: float
    """With this, and all reasons before it, nothing takes less than so many seconds."""
    bytes: int = 0
    """Bytes of cache or of compute buffers; 0 if it is not about any."""
    devices: tuple[str, ...] = ()
    """The devices that cannot hold their own compute buffers."""


@dataclass(frozen=True)
class Bound:
    """A time that no placement goes below."""

    seconds: float
    """Seconds that nothing takes less than."""
    text: str = "the best placement of these tensors could, by the cost model"
    """What that is, as in ``at most 3 % more than TEXT``."""
    reached: float | None = None
    """Seconds that the plan takes of the same; ``None``: the whole estimated request."""
    reasons: tuple[Reason, ...] = ()
    """What keeps a plan from it that is far from it (``FAR``)."""

    @property
    def is_far(self) -> bool:
        """Whether the plan takes more than ``FAR`` times the bound."""
        return self.times > FAR

    @property
    def times(self) -> float:
        """How many times the bound the plan takes; 1 where there is nothing to compare."""
        return self.reached / self.seconds if self.reached is not None and self.seconds > 0 else 1.0

    def distance(self, request_seconds: float) -> float | None:
        """How far the plan is from the bound, as a share of it; ``None`` where there is nothing to compare.

        ``request_seconds``: what the plan takes for the whole request.
        """
        reached = request_seconds if self.reached is None else self.reached
        if self.seconds <= 0 or not math.isfinite(self.seconds):
            return None
        # sums taken in another order may differ in their last digits
        return max(0.0, reached / self.seconds - 1)
