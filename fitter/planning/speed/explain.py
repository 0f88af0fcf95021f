"""Explanations of a plan: the rejected alternatives, those the user may ask for, and the lower bound. Seconds."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

ReasonKind = Literal["context", "compute", "whole"]
REASONS: tuple[ReasonKind, ...] = ("context", "compute", "whole")


@dataclass(frozen=True)
class Choice:
    """A decision of the search, and its best alternative."""

    subject: str
    """The decision, such as ``where the weights go``."""
    chosen: str
    """The chosen alternative."""
    seconds: float
    """Seconds of the chosen alternative, for the plan's objective."""
    runner_up: str | None = None
    """The best rejected alternative; ``None`` without one."""
    runner_up_seconds: float | None = None
    """Its seconds; ``None`` if it was not priced, for example because it does not fit."""

    @property
    def excess(self) -> float | None:
        """Seconds that the runner-up takes longer; negative if it is faster."""
        return None if self.runner_up_seconds is None else self.runner_up_seconds - self.seconds


FAR = 1.5
"""From this ratio of a plan's time to its bound, the search goes wider, and the plan names its reasons."""


@dataclass(frozen=True)
class Reason:
    """A reason why a plan is far from its bound."""

    kind: ReasonKind
    """``context``: the plan's context is larger than the smallest one, by ``bytes`` of cache. ``compute``: compute
    buffers take ``bytes``. ``whole``: layers and tensors are not divided.
    """
    seconds: float
    """The lower bound that includes this reason and all before it."""
    bytes: int = 0
    """Bytes of cache or compute buffers; 0 for another reason."""
    devices: tuple[str, ...] = ()
    """Devices that cannot hold their own compute buffers."""


@dataclass(frozen=True)
class Bound:
    """A time that no placement can beat."""

    seconds: float
    """The lower bound."""
    text: str = "the best placement of these tensors could, by the cost model"
    """Words for the bound, as in ``at most 3 % more than TEXT``."""
    reached: float | None = None
    """Seconds of the plan to compare with; ``None``: those of the whole request."""
    reasons: tuple[Reason, ...] = ()
    """Reasons why the plan is far (``FAR``) from the bound."""

    @property
    def is_far(self) -> bool:
        """Whether the plan takes more than ``FAR`` times the bound."""
        return self.times > FAR

    @property
    def times(self) -> float:
        """The plan's time as a multiple of the bound; 1 if there is nothing to compare."""
        return self.reached / self.seconds if self.reached is not None and self.seconds > 0 else 1.0

    def distance(self, request_seconds: float) -> float | None:
        """Return the plan's distance from the bound, as a share of the bound; ``None`` if there is nothing to compare.

        Args:
            request_seconds: Seconds of the plan for the whole request.
        """
        reached = request_seconds if self.reached is None else self.reached
        if self.seconds <= 0 or not math.isfinite(self.seconds):
            return None
        # sums taken in another order may differ in their last digits
        return max(0.0, reached / self.seconds - 1)


@dataclass(frozen=True)
class Alternative:
    """A plan that other parameters would give. A fit with them may find a faster placement."""

    arguments: tuple[str, ...]
    """The words to add to the call, such as ``-c 65536``; none for another file of the model."""
    n_ctx: int
    """Its context."""
    prompt_tokens_per_second: float
    """Estimated speed of prompt processing."""
    generation_tokens_per_second: float
    """Estimated speed of generation."""
    is_measured: bool
    """Whether a dummy load kept every margin; otherwise its memory is an estimate as well."""
    file_type: str = ""
    """Its file type, if that is another one. The bytes of its weights are an estimate."""
