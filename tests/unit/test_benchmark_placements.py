"""What the comparison of placements says of its pairs: every check on both sides of its bound, and the document."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.placement_tables import (
    CHECKS,
    CONSISTENT,
    FILLED,
    NEVER_SLOWER,
    TENTH,
    WITHIN,
    Pair,
    Placed,
    Spill,
    document,
    verdicts,
)
from tests.support.cases import named_cases

MIB = 2**20


def placed(
    seconds: float = 10.0,
    left: tuple[int, ...] = (10, 20),
    smallest: int | None = 30,
    n_ctx: int = 4096,
    own: float | None = None,
) -> Placed:
    """``left`` and ``smallest`` in MiB."""
    return Placed(
        arguments=("-c", str(n_ctx), "-ngl", "9"),
        n_ctx=n_ctx,
        seconds=seconds,
        prompt=1000.0,
        generation=20.0,
        left=tuple((f"CUDA{d}", size * MIB) for d, size in enumerate(left)),
        left_out=("CUDA1",),
        spill=Spill(100 * MIB, smallest * MIB, "blk.1.ffn_up.weight") if smallest else Spill(0, None),
        n_splits=(4, 3),
        own_seconds=own,
    )


def pair(ours: Placed | None = None, theirs: Placed | None = None, n_devices: int = 2) -> Pair:
    return Pair("a model/a machine", n_devices, (2048, 512), ours or placed(), theirs)


@named_cases(
    ("as slow", pair(placed(10), placed(10)), NEVER_SLOWER, True, "10.000 s against 10.000 s"),
    ("slower", pair(placed(10.01), placed(10)), NEVER_SLOWER, False, "(1.001×)"),
    ("slower by rounding", pair(placed(10 + 1e-10), placed(10)), NEVER_SLOWER, True, ""),
    ("upstream gives up", pair(placed(), None), NEVER_SLOWER, True, "upstream gives up"),
    ("another context", pair(placed(11), placed(10, n_ctx=8192)), NEVER_SLOWER, False, "context 4096 against 8192"),
    ("upstream over it", pair(placed(11), placed(10, left=(-1, 0))), NEVER_SLOWER, False, "beyond a margin"),
    ("a gap below the smallest", pair(placed(left=(29, 0))), FILLED, True, "29 MiB on CUDA0"),
    ("a gap as large", pair(placed(left=(30, 0))), FILLED, False, "blk.1.ffn_up.weight"),
    ("left out", pair(placed(left=(29, 40))), FILLED, False, "40 MiB on CUDA1, which is left out"),
    ("nothing on the host", pair(placed(smallest=None, left=(99, 99))), FILLED, None, ""),
    ("a tenth", pair(placed(left=(1, 2)), placed(left=(10, 20)), 8), TENTH, True, "3 MiB against 30 MiB"),
    ("over a tenth", pair(placed(left=(2, 2)), placed(left=(10, 20)), 8), TENTH, False, "4 MiB"),
    ("over a margin", pair(placed(left=(2, 1)), placed(left=(40, -10)), 8), TENTH, True, "against 40 MiB"),
    ("seven devices", pair(placed(left=(9, 9)), placed(), 7), TENTH, None, ""),
    ("no plan of upstream's", pair(placed(left=(9, 9)), None, 8), TENTH, None, ""),
    ("just the margin", pair(placed(left=(0, 3))), WITHIN, True, ""),
    ("beyond the margin", pair(placed(left=(-1, 3))), WITHIN, False, "CUDA0 by 1 MiB"),
    ("the same price", pair(placed(10, own=10)), CONSISTENT, True, ""),
    ("another price", pair(placed(10, own=10.001)), CONSISTENT, False, "10.001000 s by the plan"),
    ("another workload", pair(placed(10)), CONSISTENT, None, ""),
)
def test_checks(given: Pair, check: str, met: bool | None, shown: str) -> None:
    found = [verdict for verdict in verdicts([given]) if verdict.check == check]
    assert [verdict.met for verdict in found] == ([] if met is None else [met])
    assert all(shown in verdict.shown for verdict in found)


def test_no_plan_fails_the_first_check() -> None:
    failed = Pair("a", 1, (0, 0), None, placed(), "CUDA0 lacks 3 MiB")
    (only,) = verdicts([failed])
    assert (only.check, only.met, only.shown) == (NEVER_SLOWER, False, "CUDA0 lacks 3 MiB")
    assert "CUDA0 lacks 3 MiB" in document([failed])


def test_document() -> None:
    good = pair(placed(9, left=(1, 2), n_ctx=8192), placed(12, left=(-5, 7), smallest=None))
    text = document([good, replace(pair(placed(left=(50, 0))), name="bad")], "A note.")
    assert "A note." in text
    assert all(check in text for check in CHECKS)
    assert f"- **met** on 2 of 2: {NEVER_SLOWER}." in text
    assert f"- **not met** on 1 of 2: {FILLED}.\n  - bad: 50 MiB on CUDA0" in text
    assert f"- {TENTH}: no case is about it." in text
    row = "| a model/a machine | 2048 + 512 | 9.00 / 12.00 | 1000 / 1000 | 20.00 / 20.00 | 8192 / 4096 |"
    assert row + " 3 / 7 | 2 / 7 | 100 / 0 | 30 / – | 4, 3 / 4, 3 |" in text
    plans = text.partition("## Plans")[2]
    assert "### bad" in plans and "### a model" not in plans
    assert "-c 4096 -ngl 9" in plans and "CUDA0 50, CUDA1 0" in plans
