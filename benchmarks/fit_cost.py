"""Fits the cost model's constants on published measurements, and shows how well it does on them.

    python benchmarks/fit_cost.py [--write] [--stored] [--placements FILE] [--gpus FILE] [--rows]

Without options it fits and prints; ``--write`` stores the constants in ``fitter/planning/speed/cost.toml``;
``--stored`` fits nothing and prices with what is stored there (``--placements`` and ``--gpus`` take other rows in the
same form).

A fit is least squares of log(priced / measured), robust against outliers, every series of rows (one source, machine and
arm) with the same weight. First the devices' constants on full offload, then the host's and the graph's on placements.
A host whose bandwidth nobody states gets one of its own that suits its rows best; such rows do not count as complete.
"""

from __future__ import annotations

import argparse
import itertools
import math
import re
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from fitter.planning.speed import cost
from fitter.planning.speed.cost import Costs, Workload, price
from tools import speed_rows
from tools.speed_rows import Measured, Skipped

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

COST = Path(cost.__file__).with_suffix(".toml")
Tables = dict[str, Any]
Key = tuple[str, ...]

_FAMILIES = ("cuda", "cuda-hbm", "cuda-old", "rocm", "rocm-hbm", "vulkan", "vulkan-alchemist", "vulkan-apple", "metal")
# too few rows of the others tell a fixed cost from a share
_WITH_LAYER = ("cuda", "cuda-hbm", "rocm", "rocm-hbm", "vulkan", "vulkan-apple", "metal")
DEVICE_KEYS: tuple[Key, ...] = (
    *(("family", name, "layer") for name in _WITH_LAYER),
    *(("family", name, "bandwidth") for name in _FAMILIES),
)
PROMPT_DEVICE_KEYS: tuple[Key, ...] = tuple(("family", name, "compute") for name in _FAMILIES)
PLACEMENT_KEYS: tuple[Key, ...] = (
    ("family", "cuda", "cache"),
    ("family", "cuda-hbm", "cache"),
    ("family", "cuda", "quantized_cache"),
    ("host", "sync"),
    ("host", "bandwidth"),
    ("host", "attention"),
    ("host", "plain_attention"),
    ("graph", "split"),
    ("graph", "pageable"),
    ("graph", "min_bits"),
)
PROMPT_PLACEMENT_KEYS: tuple[Key, ...] = (
    ("family", "cuda", "attention"),
    ("host", "compute"),
    ("graph", "pcie"),
)

START: Tables = {
    # ikawrakow/ik_llama.cpp#232 took a run apart: 1.88 s of 11.53 s went to synchronising and copying, 59 µs a split
    "graph": {"split": 60e-6, "hop": 50e-6, "pcie": 0.75, "pageable": 0.15, "min_bits": 3.5},
    "host": {"sync": 4e-6, "bandwidth": 0.9, "attention": 3e9, "plain_attention": 15e9, "compute": 50e9},
    "family": {
        "cuda": {
            "layer": 35e-6,
            "bandwidth": 0.8,
            "cache": 0.6,
            "quantized_cache": 0.8,
            "compute": 0.8,
            "attention": 0.3,
        },
        "cuda-hbm": {"layer": 80e-6, "bandwidth": 0.7, "cache": 0.4, "compute": 0.3},
        "cuda-old": {"bandwidth": 0.5, "compute": 0.5},
        "rocm": {"layer": 35e-6, "bandwidth": 0.7, "compute": 0.4},
        "rocm-hbm": {"layer": 40e-6, "bandwidth": 0.5, "compute": 0.4},
        "vulkan": {"layer": 35e-6, "bandwidth": 0.7, "compute": 0.4},
        "vulkan-alchemist": {"bandwidth": 0.4, "compute": 0.2},
        "vulkan-apple": {"layer": 700e-6, "bandwidth": 0.7, "compute": 0.4},
        "metal": {"layer": 150e-6, "bandwidth": 0.9, "compute": 0.7},
    },
}
"""Where the fit begins: what the rows say at a glance. It may go far from there, but not without reason."""


# ---- pricing


def generation_tps(row: Measured, costs: Costs, bandwidth: float | None = None) -> float:
    """Tokens per second that a row's placement generates at its depth, priced."""
    host = row.host if bandwidth is None else replace(row.host, bandwidth=bandwidth)
    workload = Workload(prompt=0, generate=128, cached=row.depth)
    return price(row.work, row.devices, host, workload, costs).generation_tokens_per_second


def prompt_tps(row: Measured, costs: Costs, bandwidth: float | None = None) -> float:
    """Prompt tokens per second at the row's depth, priced."""
    host = row.host if bandwidth is None else replace(row.host, bandwidth=bandwidth)
    workload = Workload(prompt=row.prompt, generate=0, cached=row.prompt_after)
    return price(row.work, row.devices, host, workload, costs).prompt_tokens_per_second


# ---- fitting


def fitted(
    tables: Tables,
    keys: Sequence[Key],
    rows: Sequence[Measured],
    priced: Callable[[Measured, Costs, float | None], float],
    measured: Callable[[Measured], float | None],
    hosts: dict[str, float],
    prior: float,
    tolerance: float,
) -> tuple[Tables, dict[str, float]]:
    """``tables`` with the constants ``keys`` fitted, and the bandwidth of hosts that nobody states.

    ``prior``: how far, as a factor's logarithm, a constant may drift from where it starts before that costs as much as
    one series that is off by 20 %. ``tolerance``: from which logarithm on an error counts linearly, not squared.
    Rows of other programs than llama.cpp count a quarter: the constants are to be llama.cpp's.
    """
    rows = [row for row in rows if measured(row)]
    unknown = sorted({row.machine for row in rows if not row.complete})
    start = np.log([_get(tables, key) for key in keys] + [hosts.get(name, 50e9) for name in unknown])
    series: dict[Key, int] = defaultdict(int)
    for row in rows:
        series[_series(row)] += 1
    weights = np.array(
        [(1 if row.cell[3] in ("llama.cpp", "0", "1") else 0.5) / math.sqrt(series[_series(row)]) for row in rows]
    )
    target = np.log([measured(row) or 1.0 for row in rows])

    def residuals(x: np.ndarray) -> np.ndarray:
        now, bandwidths = unpack(x)
        costs = cost.costs_of(now)
        return (
            np.array(
                [
                    math.log(priced(row, costs, bandwidths.get(row.machine) if not row.complete else None))
                    for row in rows
                ]
            )
            - target
        )

    def unpack(x: np.ndarray) -> tuple[Tables, dict[str, float]]:
        now = tables
        for key, value in zip(keys, np.exp(x[: len(keys)]), strict=True):
            now = _with(now, key, float(value))
        return now, dict(zip(unknown, map(float, np.exp(x[len(keys) :])), strict=True))

    loose = np.array([prior] * len(keys) + [1.5] * len(unknown))

    def objective(r: np.ndarray, x: np.ndarray) -> float:
        robust = 2 * (tolerance / 0.2) ** 2 * (np.sqrt(1 + (r / tolerance) ** 2) - 1)
        return float(np.sum(weights**2 * robust) + np.sum(((x - start) / loose) ** 2))

    x, damping = start.copy(), 1e-2
    r = residuals(x)
    best = objective(r, x)
    for _ in range(60):
        jacobian = np.empty((len(rows), len(x)))
        for j in range(len(x)):
            step = x.copy()
            step[j] += 1e-4
            jacobian[:, j] = (residuals(step) - r) / 1e-4
        robust = weights**2 / (0.04 * np.sqrt(1 + (r / tolerance) ** 2))
        left = jacobian.T @ (robust[:, None] * jacobian) + np.diag(1 / loose**2)
        right = jacobian.T @ (robust * r) + (x - start) / loose**2
        for _ in range(8):
            trial = x - np.linalg.solve(left + damping * np.diag(np.diag(left)), right)
            r_trial = residuals(trial)
            value = objective(r_trial, trial)
            if value < best:
                break
            damping *= 4
        else:
            break
        done = best - value < 1e-6 * best
        x, r, best, damping = trial, r_trial, value, damping / 4
        if done:
            break
    return unpack(x)


def _series(row: Measured) -> Key:
    return (row.source, *row.cell[:4], row.arm)


def _get(tables: Tables, key: Key) -> float:
    value: Any = tables
    for word in key:
        value = value[word] if word in value else tables["family"]["cuda"][word]
    return float(value)


def _with(tables: Tables, key: Key, value: float) -> Tables:
    head, *rest = key
    return {**tables, head: _with(tables.get(head, {}), tuple(rest), value) if rest else value}


def fit_devices(tables: Tables, gpus: Sequence[Measured], with_prompts: bool = True) -> Tables:
    """Constants of the devices, from models that are whole on one."""
    tables, _ = fitted(tables, DEVICE_KEYS, gpus, generation_tps, lambda row: row.generation_tps, {}, 1.0, 3.0)
    if not with_prompts:
        return tables
    tables, _ = fitted(tables, PROMPT_DEVICE_KEYS, gpus, prompt_tps, lambda row: row.prompt_tps, {}, 1.0, 0.3)
    return tables


def fit_placements(
    tables: Tables, rows: Sequence[Measured], with_prompts: bool = True
) -> tuple[Tables, dict[str, float]]:
    """Constants of the host and the graph, from placements; and the bandwidth of hosts that nobody states."""
    # what other programs do on the CPU says nothing of llama.cpp
    rows = [row for row in rows if row.cell[3] == "llama.cpp" or not speed_rows.attends_on_host(row)]
    tables, hosts = fitted(tables, PLACEMENT_KEYS, rows, generation_tps, lambda row: row.generation_tps, {}, 1.0, 0.2)
    if not with_prompts:
        return tables, hosts
    tables, _ = fitted(
        tables,
        PROMPT_PLACEMENT_KEYS,
        [row for row in rows if row.complete and row.cell[3] == "llama.cpp"],
        prompt_tps,
        lambda row: row.prompt_tps,
        hosts,
        1.0,
        0.3,
    )
    return tables, hosts


def fit_hosts(tables: Tables, rows: Sequence[Measured]) -> dict[str, float]:
    """The bandwidth of hosts that nobody states, everything else given."""
    rows = [row for row in rows if not row.complete and row.generation_tps]
    return fitted(tables, (), rows, generation_tps, lambda row: row.generation_tps, {}, 1.0, 0.2)[1] if rows else {}


# ---- criteria


def error(priced: float, measured: float) -> float:
    """|priced / measured - 1|."""
    return abs(priced / measured - 1)


def ordered(rows: Iterable[tuple[Measured, float, float]]) -> list[tuple[Measured, Measured, bool]]:
    """Pairs of arms whose measured speeds differ by more than 10 %, and whether the priced ones are ordered alike."""
    cells: dict[Key, list[tuple[Measured, float, float]]] = defaultdict(list)
    for row, priced, measured in rows:
        cells[row.cell].append((row, priced, measured))
    pairs = []
    for cell in cells.values():
        for (a, priced_a, measured_a), (b, priced_b, measured_b) in itertools.combinations(cell, 2):
            if a.arm != b.arm and not 0.9 <= measured_a / measured_b <= 1.1:
                pairs.append((a, b, (priced_a > priced_b) == (measured_a > measured_b)))
    return pairs


def generation(rows: Sequence[Measured], costs: Costs, hosts: dict[str, float]) -> list[tuple[Measured, float, float]]:
    """Rows with a generation speed: priced and measured."""
    return [
        (row, generation_tps(row, costs, None if row.complete else hosts.get(row.machine)), row.generation_tps)
        for row in rows
        if row.generation_tps
    ]


def prompts(rows: Sequence[Measured], costs: Costs, hosts: dict[str, float]) -> list[tuple[Measured, float, float]]:
    """Rows with a prompt speed: priced and measured."""
    return [
        (row, prompt_tps(row, costs, None if row.complete else hosts.get(row.machine)), row.prompt_tps)
        for row in rows
        if row.prompt_tps
    ]


# ---- printing


def print_rows(title: str, rows: Sequence[tuple[Measured, float, float]]) -> None:
    """One line per row."""
    print(f"\n{title}")
    print(f"{'line':>5} {'measured':>9} {'priced':>9} {'error':>7}  row")
    for row, priced, measured in rows:
        what = f"{' '.join(row.cell[:2])} | {row.arm}" + (f" @ {row.depth}" if row.depth else "")
        note = "" if row.complete else " (host's bandwidth fitted)"
        print(f"{row.line:>5} {measured:>9.2f} {priced:>9.2f} {priced / measured - 1:>+7.0%}  {what}{note}")


def print_summary(name: str, rows: Sequence[tuple[Measured, float, float]]) -> None:
    """Median and worst."""
    errors = [error(priced, measured) for _, priced, measured in rows]
    factors = [max(priced / measured, measured / priced) for _, priced, measured in rows]
    if errors:
        beyond = sum(factor > 2 for factor in factors)
        print(f"{name}: {len(rows)} rows, median error {statistics.median(errors):.1%}, ", end="")
        print(f"largest factor {max(factors):.2f}, beyond a factor of 2: {beyond}")


def print_pairs(name: str, pairs: Sequence[tuple[Measured, Measured, bool]], every: bool = False) -> None:
    """How many are in order, and those that are not; with ``every`` also what is compared, depths taken together."""
    right = sum(good for _, _, good in pairs)
    share = f" ({right / len(pairs):.1%})" if pairs else ""
    print(f"{name}: {right} of {len(pairs)} pairs beyond 10 % in order{share}")
    if every:
        compared: dict[Key, list[bool]] = defaultdict(list)
        for a, b, good in pairs:
            compared[(" ".join(a.cell[:2]), a.cell[3], a.arm, b.arm)].append(good)
        for (model, engine, arm, other), results in compared.items():
            print(f"    {sum(results)} of {len(results)}: {model}, {engine}: {arm} / {other}")
    for a, b, good in pairs:
        if not good:
            print(f"    not: lines {a.line} and {b.line}: {a.cell[0]} {a.cell[1]} @ {a.depth}: {a.arm} / {b.arm}")


def print_skipped(skipped: Sequence[Skipped]) -> None:
    """Rows that are not used, by reason."""
    reasons: dict[str, list[int]] = defaultdict(list)
    for row in skipped:
        reasons[row.reason].append(row.line)
    for reason, lines in reasons.items():
        print(f"    {reason}: lines {', '.join(map(str, lines))}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="store the fitted constants")
    parser.add_argument("--stored", action="store_true", help="price with the stored constants, fit nothing")
    parser.add_argument("--placements", type=Path, default=speed_rows.PLACEMENTS, help="rows like placements.csv")
    parser.add_argument("--gpus", type=Path, default=speed_rows.GPUS, help="rows like gpus_tg128.csv")
    parser.add_argument("--rows", action="store_true", help="print every row")
    options = parser.parse_args()
    gpus, gpus_skipped = speed_rows.full_offload(options.gpus)
    rows, skipped = speed_rows.placements(options.placements)
    before = stored()
    if options.stored:
        show(before, fit_hosts(before, rows), gpus, gpus_skipped, rows, skipped, options.rows)
        return
    devices = fit_devices(_merged(before, START), gpus)
    tables, hosts = fit_placements(devices, rows)
    show(tables, hosts, gpus, gpus_skipped, rows, skipped, options.rows)
    cross_validate(_merged(before, START), gpus, rows)
    if options.write:
        COST.write_text(rewritten(COST.read_text(encoding="utf-8"), tables), encoding="utf-8")
        print(f"\nwritten to {COST}")


def stored() -> Tables:
    """The constants as they are stored."""
    return tomllib.loads(COST.read_text(encoding="utf-8"))


def show(
    tables: Tables,
    hosts: dict[str, float],
    gpus: Sequence[Measured],
    gpus_skipped: Sequence[Skipped],
    rows: Sequence[Measured],
    skipped: Sequence[Skipped],
    every: bool,
) -> None:
    """The tables that say how good the constants are."""
    costs = cost.costs_of(tables)
    offload, offload_prompts = generation(gpus, costs, hosts), prompts(gpus, costs, hosts)
    placed, placed_prompts = generation(rows, costs, hosts), prompts(rows, costs, hosts)
    if every:
        print_rows("Whole model on one device: generated tokens per second", offload)
        print_rows("Whole model on one device: prompt tokens per second", offload_prompts)
        print_rows("Placements: generated tokens per second", placed)
        print_rows("Placements: prompt tokens per second", placed_prompts)
    print("\nConstants")
    for key in (*DEVICE_KEYS, *PROMPT_DEVICE_KEYS, *PLACEMENT_KEYS, *PROMPT_PLACEMENT_KEYS):
        print(f"    {'.'.join(key)} = {_get(tables, key):.4g}")
    for name, bandwidth in hosts.items():
        print(f"    bandwidth fitted to its own rows: {name}: {bandwidth / 1e9:.0f} GB/s")
    print("\nWhole model on one device (gpus_tg128.csv)")
    print_summary("  generation", offload)
    print_summary("  prompt", offload_prompts)
    print("  not used:")
    print_skipped(gpus_skipped)
    print("\nPlacements (placements.csv)")
    print_summary("  generation, complete rows", [row for row in placed if row[0].complete])
    print_summary(
        "  generation, complete rows of llama.cpp",
        [row for row in placed if row[0].complete and row[0].cell[3] == "llama.cpp"],
    )
    print_summary("  generation, host's bandwidth fitted", [row for row in placed if not row[0].complete])
    print_summary(
        "  prompt, complete rows of llama.cpp",
        [row for row in placed_prompts if row[0].complete and row[0].cell[3] == "llama.cpp"],
    )
    print_summary("  prompt, complete rows", [row for row in placed_prompts if row[0].complete])
    print_pairs("  generation", ordered(placed), every)
    llama_cpp = [row for row in placed if row[0].cell[3] == "llama.cpp"]
    print_pairs("  generation, llama.cpp alone", ordered(llama_cpp))
    print_pairs("  prompt", ordered(placed_prompts))
    print("  not used:")
    print_skipped(skipped)


_FOLDS = 8


def cross_validate(start: Tables, gpus: Sequence[Measured], rows: Sequence[Measured]) -> None:
    """Every row priced with constants that were fitted without any row of its source, or card."""
    print("\nLeft out of the fit in turn")
    left: list[tuple[Measured, float, float]] = []
    cards = sorted({row.machine for row in gpus})
    for fold in (cards[first::_FOLDS] for first in range(_FOLDS)):
        tables = fit_devices(start, [row for row in gpus if row.machine not in fold], with_prompts=False)
        left += generation([row for row in gpus if row.machine in fold], cost.costs_of(tables), {})
    print_summary(f"  a {_FOLDS}th of the cards: generation", left)
    devices = fit_devices(start, gpus)
    left, medians = [], []
    for name in sorted({_thread(row) for row in rows}):
        tables, _ = fit_placements(devices, [row for row in rows if _thread(row) != name], with_prompts=False)
        own = [row for row in rows if _thread(row) == name]
        priced = generation(own, cost.costs_of(tables), fit_hosts(tables, own))
        left += priced
        complete = [error(p, m) for row, p, m in priced if row.complete]
        if complete:
            medians.append(statistics.median(complete))
            print(f"    {name}: {len(complete)} complete rows, median error {medians[-1]:.1%}")
    print_summary("  each source: generation, complete rows", [row for row in left if row[0].complete])
    print(f"  median of the sources' medians: {statistics.median(medians):.1%}")
    print_pairs("  each source: generation", ordered(left))


def _thread(row: Measured) -> str:
    """The discussion that a row is from, without the comment or the person; a discussion is one source."""
    return row.source.split(" ")[0]


def _merged(below: Tables, above: Tables) -> Tables:
    both = {**below, **above}
    for key in below.keys() & above.keys():
        if isinstance(below[key], dict):
            both[key] = _merged(below[key], above[key])
    return both


def rewritten(text: str, tables: Tables) -> str:
    """``cost.toml`` with the figures of ``tables``, everything else as it is."""
    section: Key = ()
    lines = []
    for line in text.splitlines():
        if match := re.fullmatch(r"\[([\w.-]+)\]", line):
            section = tuple(match[1].split("."))
        elif line.startswith("[["):
            section = ()
        elif section and (match := re.fullmatch(r"(\w+) = .+", line)):
            line = f"{match[1]} = {_get(tables, (*section, match[1])):.3g}"
        lines.append(line)
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
