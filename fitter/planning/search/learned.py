"""Compute buffers learned from the dummy loads already made. Bytes."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass
class LearnedCompute:
    """Compute bytes per device, by context, for one kind of placement.

    What it answers is a proposal: what was measured at that context, else a line through the two nearest ones.
    """

    _points: dict[str, dict[int, int]] = field(default_factory=dict)
    _corrected: set[tuple[str, int]] = field(default_factory=set)

    def learn(self, device: str, n_ctx: int, compute: int) -> None:
        """Take in a measurement. The second at a context replaces the first, of a placement that was only a guess; from
        then on the largest counts, so that placements which differ by a tensor do not correct each other for ever."""
        points = self._points.setdefault(device, {})
        if (device, n_ctx) in self._corrected:
            compute = max(compute, points[n_ctx])
        elif n_ctx in points:
            self._corrected.add((device, n_ctx))
        points[n_ctx] = compute

    def copy(self, renamed: Mapping[str, str]) -> LearnedCompute:
        """The same, to learn more apart from it; a device has what the one had that it is ``renamed`` from."""
        points = {renamed.get(device, device): dict(known) for device, known in self._points.items()}
        return LearnedCompute(points, {(renamed.get(device, device), n_ctx) for device, n_ctx in self._corrected})

    @property
    def knows_any(self) -> bool:
        """Whether anything was measured."""
        return bool(self._points)

    def at(self, device: str, n_ctx: int) -> int | None:
        """Expected compute bytes, ``None`` where nothing was measured."""
        points = self._points.get(device)
        if not points:
            return None
        contexts = sorted(points)
        if len(contexts) == 1 or n_ctx in points:
            return points.get(n_ctx, points[contexts[0]])
        right = min(max(bisect_left(contexts, n_ctx), 1), len(contexts) - 1)
        low, high = contexts[right - 1], contexts[right]
        return max(0, points[low] + (points[high] - points[low]) * (n_ctx - low) // (high - low))
