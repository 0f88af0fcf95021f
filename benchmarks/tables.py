"""The results as Markdown: goals first, then the tables. Computed from the raw results alone."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from benchmarks.results import Comparison, Growth, Program, Results, Setting

GIB = 1024**3
MIB = 1024**2
MB = 10**6

EIGHT_RATIO = "Eight devices: at least 25 times as fast as upstream"
EIGHT_LOADS = "Eight devices: at most 6 dummy loads"
ONE_RATIO = "One device, vocabulary of 128k or more: at least as fast as upstream"
MEMORY = "Peak memory of all processes: below 250 MB"
DEVICES = "Time grows no faster than linearly from 1 to 16 devices"
LAYERS = "Time grows no faster than linearly from 16 to 100 layers"
GOALS = (EIGHT_RATIO, EIGHT_LOADS, ONE_RATIO, MEMORY, DEVICES, LAYERS)

LARGE_VOCABULARY = 128_000


@dataclass(frozen=True)
class Check:
    """A goal on one case: what was measured, as people read it, and whether it meets the goal.

    ``excess`` orders the checks of a goal: the larger, the worse; around 1 they meet it by a hair, or miss it.
    """

    goal: str
    case: str
    shown: str
    excess: float
    met: bool


def median_seconds(program: Program | Growth) -> float:
    """Median of the whole processes, in seconds."""
    return statistics.median(program.seconds)


def ratio(comparison: Comparison) -> float:
    """How many times as fast as upstream fitter is."""
    return median_seconds(comparison.upstream) / median_seconds(comparison.fitter)


def checks(results: Results) -> tuple[Check, ...]:
    """Every goal of issue 4 on every case that it is about."""
    found = []
    for case in results.comparisons:
        if case.n_devices == 8:
            found += [_at_least(EIGHT_RATIO, case, 25.0), _loads(case)]
        if case.n_devices == 1 and case.n_vocab >= LARGE_VOCABULARY:
            found.append(_at_least(ONE_RATIO, case, 1.0))
        peak = max(case.fitter.memory.peak, case.open.memory.peak)
        found.append(Check(MEMORY, case.name, f"{_mb(peak)} MB", peak / (250 * MB), peak < 250 * MB))
    for goal, rows in ((DEVICES, results.devices), (LAYERS, results.layers)):
        for row in rows[1:]:
            excess = _growth(row, rows) / (row.n / rows[0].n)
            found.append(Check(goal, _row_name(row, goal), f"{_growth(row, rows):.2f}×", excess, excess <= 1))
    return tuple(found)


def _at_least(goal: str, case: Comparison, bound: float) -> Check:
    return Check(goal, case.name, f"{ratio(case):.2f}×", bound / ratio(case), ratio(case) >= bound)


def _loads(case: Comparison) -> Check:
    return Check(EIGHT_LOADS, case.name, f"{case.fitter.loads} loads", case.fitter.loads / 6, case.fitter.loads <= 6)


def _row_name(row: Growth, goal: str) -> str:
    return f"{row.n} {'devices' if goal == DEVICES else 'layers'}"


def _growth(row: Growth, rows: Sequence[Growth]) -> float:
    """Seconds relative to the first row."""
    return median_seconds(row) / median_seconds(rows[0])


def document(results: Results) -> str:
    """RESULTS.md."""
    found = checks(results)
    parts = [
        "# fitter and llama-fit-params side by side",
        _how(results.setting),
        "## Goals",
        *([_failures(results)] if results.failed else []),
        "\n".join(_summary(goal, found) for goal in GOALS),
    ]
    if results.comparisons:
        # the goals are about one and about eight devices
        ordered = sorted(results.comparisons, key=lambda case: case.n_devices)
        parts += ["## Speed", _SPEED, _speed(ordered, found)]
        parts += ["## Memory", _MEMORY, _memory(ordered, found)]
        parts += ["## Plans", _PLANS, _plans(ordered)]
    for title, noun, goal, rows in (
        ("## More devices", "devices", DEVICES, results.devices),
        ("## More layers", "layers", LAYERS, results.layers),
    ):
        if rows:
            parts += [title, _SCALING[noun], _scaling(noun, goal, rows, found)]
    return "\n\n".join(parts) + "\n"


_SPEED = (
    "Seconds are medians, loads dummy loads. fitter was asked for the context that upstream chose (`-c`). The ratio is "
    "upstream's seconds by fitter's: above 1 fitter is faster. *Open*: without `-c`, fitter measures several contexts, "
    "and how fast a plan is at each."
)
_MEMORY = (
    "MB of 10⁶ bytes. The peak is that of all processes of the program together, in a run of its own; a page that "
    "several of them map counts once (PSS, sampled every few milliseconds). *At most* adds up what each process had at "
    "its own highest moment, where such a page counts for each of them."
)
_PLANS = (
    "What each chose: the context, the weights that are on devices, and the memory left there beyond the margins of 1 "
    "GiB per device."
)
_SCALING = {
    "devices": "Kimi K2 (624 GiB of weights) on devices of 32 GiB. llama.cpp runs at most 15 devices beside the CPU: "
    "of 16, fitter uses 15. The bound is linear growth from the first row.",
    "layers": "Layers of Qwen3 235B A22B, 16 to 100 of them, on eight devices with room for half of the weights and "
    "1400 MiB each beside them. The bound is linear growth from the first row.",
}


def _how(setting: Setting) -> str:
    written = f"Written by `benchmarks/compare.py` on {setting.date}. To measure again: `make bench`."
    points = (
        f"fitter {setting.fitter} ({setting.commit}) with llama-cpp-python {setting.llama_cpp_python}, against "
        f"`llama-fit-params` of the llama.cpp in it ({setting.llama_cpp}), on the same virtual devices.",
        f"{setting.cpu}, {setting.cores} cores, Python {setting.python}.",
        "Whole processes, from start to exit, one after the other and in turn: medians of "
        f"{_count(setting.runs, 'run')} each, after one that is not timed. Seconds depend on the machine; what counts "
        "is the ratio.",
        "The models are sparse files with the header of the real one, tokenizer included, and no weights in them.",
    )
    return written + "\n\n" + "\n".join(f"- {point}" for point in points)


def _failures(results: Results) -> str:
    return "Not measured:\n\n" + "\n".join(f"- {text}" for text in results.failed)


def _summary(goal: str, found: Iterable[Check]) -> str:
    own = [check for check in found if check.goal == goal]
    if not own:
        return f"- **{goal}**: not measured."
    worst = max(own, key=lambda check: check.excess)
    missed = [check for check in own if not check.met]
    if not missed:
        return f"- **{goal}**: met ({_count(len(own), 'case')}; the closest {worst.shown}, {worst.case})."
    named = ", ".join(f"{check.case} ({check.shown})" for check in missed)
    return f"- **{goal}**: not met in {len(missed)} of {_count(len(own), 'case')}: {named}."


def _verdict(found: Iterable[Check], case: str, goals: Sequence[str]) -> str:
    own = [check for check in found if check.case == case and check.goal in goals]
    if not own:
        return ""
    missed = [check.shown for check in own if not check.met]
    return f"not met: {', '.join(missed)}" if missed else "met"


def _speed(cases: Sequence[Comparison], found: Sequence[Check]) -> str:
    goals = (EIGHT_RATIO, EIGHT_LOADS, ONE_RATIO)
    return _table(
        (
            "case",
            "devices",
            "vocabulary",
            "ratio",
            "fitter s",
            "upstream s",
            "loads",
            "upstream",
            "open s",
            "loads",
            "goal",
        ),
        (
            (
                case.name,
                str(case.n_devices),
                str(case.n_vocab),
                f"{ratio(case):.1f}×",
                f"{median_seconds(case.fitter):.3f}",
                f"{median_seconds(case.upstream):.2f}",
                str(case.fitter.loads),
                str(case.upstream.loads),
                f"{median_seconds(case.open):.3f}",
                str(case.open.loads),
                _verdict(found, case.name, goals),
            )
            for case in cases
        ),
    )


def _memory(cases: Sequence[Comparison], found: Sequence[Check]) -> str:
    return _table(
        ("case", "10⁹ parameters", "fitter MB", "at most", "open MB", "processes", "upstream MB", "at most", "goal"),
        (
            (
                case.name,
                f"{case.n_params / 1e9:.0f}",
                _mb(case.fitter.memory.peak),
                _mb(case.fitter.memory.at_most),
                _mb(case.open.memory.peak),
                str(case.fitter.memory.processes),
                _mb(case.upstream.memory.peak),
                _mb(case.upstream.memory.at_most),
                _verdict(found, case.name, (MEMORY,)),
            )
            for case in cases
        ),
    )


def _plans(cases: Sequence[Comparison]) -> str:
    def shown(program: Program) -> tuple[str, str, str]:
        chosen = program.chosen
        if chosen is None:
            return ("gave up",) * 3
        over = f" (over on {', '.join(chosen.over)})" if chosen.over else ""
        return str(chosen.n_ctx), f"{chosen.weights / GIB:.2f}", f"{chosen.left / MIB:.0f}{over}"

    return _table(
        ("case", "open context", "context", "upstream", "weights on devices GiB", "upstream", "MiB left", "upstream"),
        (
            (
                case.name,
                shown(case.open)[0],
                *(cell for pair in zip(shown(case.fitter), shown(case.upstream), strict=True) for cell in pair),
            )
            for case in cases
        ),
    )


def _scaling(noun: str, goal: str, rows: Sequence[Growth], found: Sequence[Check]) -> str:
    return _table(
        (noun, "devices used", "share of weights on devices", "fitter s", "loads", "relative", "bound", "goal"),
        (
            (
                str(row.n),
                str(row.used),
                f"{100 * row.weights / row.total:.0f} %",
                f"{median_seconds(row):.3f}",
                str(row.loads),
                f"{_growth(row, rows):.2f}×",
                f"{row.n / rows[0].n:.2f}×",
                _verdict(found, _row_name(row, goal), (goal,)),
            )
            for row in rows
        ),
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _mb(size: int) -> str:
    return f"{size / MB:.0f}"


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
