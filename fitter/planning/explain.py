"""Why a plan is as it is: what was chosen over what, and how far from the best the plan can be at most. Seconds."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Choice:
    """What was decided about ``subject`` (``where the weights go``), and what else it might have been.

    ``chosen`` takes ``seconds`` of what the plan is to be fast at. ``runner_up`` is the best of the others, ``None``
    where there was none; it takes ``runner_up_seconds``, ``None`` where it was not priced, as what does not fit.
    """

    subject: str
    chosen: str
    seconds: float
    runner_up: str | None = None
    runner_up_seconds: float | None = None

    @property
    def excess(self) -> float | None:
        """Seconds that the runner-up takes beyond what was chosen; negative where it takes less."""
        return None if self.runner_up_seconds is None else self.runner_up_seconds - self.seconds


@dataclass(frozen=True)
class Bound:
    """``seconds`` that nothing takes less than. ``text`` says what that is, as in ``at most 3 % from TEXT``.

    ``reached``: seconds that the plan takes of the same; ``None``: the whole estimated request.
    """

    seconds: float
    text: str = "the best that any placement of these tensors can reach by this model"
    reached: float | None = None

    def distance(self, request_seconds: float) -> float | None:
        """How far the plan is from the bound, as a share of it; ``None`` where there is nothing to compare.

        ``request_seconds``: what the plan takes for the whole request.
        """
        reached = request_seconds if self.reached is None else self.reached
        if self.seconds <= 0 or not math.isfinite(self.seconds):
            return None
        # sums taken in another order may differ in their last digits
        return max(0.0, reached / self.seconds - 1)
