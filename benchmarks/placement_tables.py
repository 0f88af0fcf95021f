"""What fitter and upstream chose for the same machines, the checks of it, and both as Markdown. Bytes and seconds."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

MIB = 1024**2

NEVER_SLOWER = "Estimated request time never above upstream's"
FILLED = "With weights on the host: left beyond the margin of every device less than the smallest of them"
TENTH = "With weights on the host of eight devices: left in total at most a tenth of upstream's"
WITHIN = "Every margin kept"
CONSISTENT = "The plan's own estimate is that of its parameters"
CHECKS = (NEVER_SLOWER, FILLED, TENTH, WITHIN, CONSISTENT)

SAME = 1 + 1e-9
"""Two prices of one placement may differ by rounding."""


@dataclass(frozen=True)
class Spill:
    """Weights that a placement has on the host: ``total`` bytes, and the ``smallest`` that could be placed singly."""

    total: int
    smallest: int | None
    name: str = ""


@dataclass(frozen=True)
class Placed:
    """One program's plan, measured and priced.

    ``arguments`` in llama.cpp's words. ``prompt``, ``generation``: tokens per second. ``left``: bytes beyond the margin
    of every device of the machine, negative where the plan goes beyond it; of a device that the plan leaves out,
    all of them. ``n_splits``: graph splits of prompt processing and of generation.
    """

    arguments: tuple[str, ...]
    n_ctx: int
    seconds: float
    prompt: float
    generation: float
    left: tuple[tuple[str, int], ...]
    left_out: tuple[str, ...]
    spill: Spill
    n_splits: tuple[int, int] | None
    own_seconds: float | None = None

    @property
    def unused(self) -> int:
        """Bytes left beyond the margins in total."""
        return sum(max(0, size) for _, size in self.left)

    @property
    def most_unused(self) -> int:
        """The most that is left on one device."""
        return max((size for _, size in self.left), default=0)

    @property
    def keeps_margins(self) -> bool:
        """Whether nothing is taken of any margin."""
        return all(size >= 0 for _, size in self.left)


@dataclass(frozen=True)
class Pair:
    """A model on a machine; ``workload``: tokens of prompt and of generation. ``theirs``: ``None`` if upstream gave up.

    ``failure`` says why there is no plan of fitter's.
    """

    name: str
    n_devices: int
    workload: tuple[int, int]
    ours: Placed | None
    theirs: Placed | None
    failure: str = ""


@dataclass(frozen=True)
class Verdict:
    """A check on one pair, and what was found in words."""

    check: str
    pair: str
    met: bool
    shown: str


def verdicts(pairs: Iterable[Pair]) -> tuple[Verdict, ...]:
    """Every check on every pair that it is about. A pair without a plan of ours fails the first one."""
    found = []
    for pair in pairs:
        if pair.ours is None:
            found.append(Verdict(NEVER_SLOWER, pair.name, False, pair.failure))
            continue
        for check, look in _LOOKS:
            verdict = look(pair, pair.ours)
            if verdict is not None:
                found.append(Verdict(check, pair.name, *verdict))
    return tuple(found)


def _never_slower(pair: Pair, ours: Placed) -> tuple[bool, str]:
    theirs = pair.theirs
    if theirs is None:
        return True, "upstream gives up"
    shown = f"{ours.seconds:.3f} s against {theirs.seconds:.3f} s ({ours.seconds / theirs.seconds:.3f}×)"
    if ours.n_ctx != theirs.n_ctx:
        shown += f"; context {ours.n_ctx} against {theirs.n_ctx}"
    if not theirs.keeps_margins:
        shown += "; upstream goes beyond a margin"
    return ours.seconds <= theirs.seconds * SAME, shown


def _filled(pair: Pair, ours: Placed) -> tuple[bool, str] | None:
    if ours.spill.smallest is None:
        return None
    worst, size = max(ours.left, key=lambda row: row[1], default=("no device", 0))
    shown = f"{_mib(size)} MiB on {worst}"
    if worst in ours.left_out:
        shown += ", which is left out"
    shown += f"; {ours.spill.name} with {_mib(ours.spill.smallest)} MiB is on the host"
    return size < ours.spill.smallest, shown


def _tenth(pair: Pair, ours: Placed) -> tuple[bool, str] | None:
    if pair.n_devices != 8 or ours.spill.smallest is None or pair.theirs is None:
        return None
    theirs = pair.theirs.unused
    return ours.unused * 10 <= theirs, f"{_mib(ours.unused)} MiB against {_mib(theirs)} MiB"


def _within(pair: Pair, ours: Placed) -> tuple[bool, str]:
    over = [f"{name} by {_mib(-size)} MiB" for name, size in ours.left if size < 0]
    return not over, ", ".join(over)


def _consistent(pair: Pair, ours: Placed) -> tuple[bool, str] | None:
    if ours.own_seconds is None:
        return None
    shown = f"{ours.own_seconds:.6f} s by the plan, {ours.seconds:.6f} s by its parameters"
    return math.isclose(ours.own_seconds, ours.seconds, rel_tol=1e-9), shown


_LOOKS: tuple[tuple[str, Callable[[Pair, Placed], tuple[bool, str] | None]], ...] = (
    (NEVER_SLOWER, _never_slower),
    (FILLED, _filled),
    (TENTH, _tenth),
    (WITHIN, _within),
    (CONSISTENT, _consistent),
)


def document(pairs: Sequence[Pair], note: str = "") -> str:
    """The checks, then the table."""
    found = verdicts(pairs)
    parts = ["# Placements by fitter and by llama-fit-params"]
    if note:
        parts.append(note)
    parts += ["## Checks", "\n".join(_check(check, found) for check in CHECKS)]
    parts += ["## Side by side", _LEGEND, _table(pairs)]
    failed = {verdict.pair for verdict in found if not verdict.met}
    if failed:
        parts += ["## Plans that do not meet a check", *(_plans(pair) for pair in pairs if pair.name in failed)]
    return "\n\n".join(parts) + "\n"


def _plans(pair: Pair) -> str:
    lines = [f"### {pair.name}"]
    for who, placed in (("fitter", pair.ours), ("upstream", pair.theirs)):
        if placed is not None:
            left = ", ".join(f"{name} {_mib(size)}" for name, size in placed.left)
            lines.append(f"{who}, {placed.seconds:.3f} s, MiB left: {left}")
            lines.append("```\n" + " ".join(placed.arguments) + "\n```")
    return "\n\n".join(lines)


def _check(check: str, found: Sequence[Verdict]) -> str:
    about = [verdict for verdict in found if verdict.check == check]
    if not about:
        return f"- {check}: no case is about it."
    failed = [verdict for verdict in about if not verdict.met]
    word = "not met" if failed else "met"
    lines = [f"- **{word}** on {len(about) - len(failed)} of {len(about)}: {check}."]
    lines += [f"  - {verdict.pair}: {verdict.shown}" for verdict in failed]
    return "\n".join(lines)


_LEGEND = (
    "First fitter's, then upstream's. Both plans are priced by `fitter.estimate` for the same request (prompt + "
    "generated tokens), which fits in the smaller of the two contexts. Left: bytes beyond the margins, in total and "
    "the most on one device; a device that is left out counts with all it has. Spilled: weights on the host, and the "
    "smallest of them that could be placed on its own (a routed expert tensor, of a dense model an FFN matrix). "
    "Splits: of the graph, for a prompt and for generation."
)


def _table(pairs: Iterable[Pair]) -> str:
    header = (
        "case",
        "request",
        "s",
        "prompt t/s",
        "generation t/s",
        "context",
        "left MiB",
        "most on one",
        "spilled MiB",
        "smallest MiB",
        "splits",
    )
    rows = ["| " + " | ".join(header) + " |", "| --- | ---" + " | ---:" * (len(header) - 2) + " |"]
    for pair in pairs:
        cells = [pair.name, f"{pair.workload[0]} + {pair.workload[1]}"]
        for show in _CELLS:
            cells.append(" / ".join("–" if placed is None else show(placed) for placed in (pair.ours, pair.theirs)))
        rows.append("| " + " | ".join(cells) + " |")
    return "\n".join(rows)


def _splits(placed: Placed) -> str:
    return "?" if placed.n_splits is None else f"{placed.n_splits[0]}, {placed.n_splits[1]}"


_CELLS: tuple[Callable[[Placed], str], ...] = (
    lambda placed: f"{placed.seconds:.2f}",
    lambda placed: f"{placed.prompt:.0f}",
    lambda placed: f"{placed.generation:.2f}",
    lambda placed: str(placed.n_ctx),
    lambda placed: _mib(placed.unused),
    lambda placed: _mib(placed.most_unused),
    lambda placed: _mib(placed.spill.total),
    lambda placed: "–" if placed.spill.smallest is None else _mib(placed.spill.smallest),
    _splits,
)


def _mib(size: int) -> str:
    return f"{size / MIB:.0f}"
