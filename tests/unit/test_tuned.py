"""What ``fitter tune`` stores, what follows for estimates, and which of several runs is the best."""

from __future__ import annotations

import io
import json
import math
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fitter.errors import AnswerError
from fitter.machine.host import OtherPrograms
from fitter.machine.measured import Tuned, factors_of, read_tuned, store_tuned, tuned_document
from fitter.machine.speed import DeviceSpeed, Factor, Factors, HostSpeed
from fitter.output.tables.checked_tables import tuning_table
from fitter.output.tables.plan_table import print_to
from fitter.planning.checked.tuning import Tuning, TuningChange, TuningRun, best_of, is_quicker, joined, tuned_of
from fitter.planning.placing.layer_sizes import HOST
from fitter.planning.pricing.pricing import Price
from fitter.planning.speed.cost import Attention, Estimate, Layer, Part, Weights, Work, Workload, price
from fitter.programs.server_requests import Load, Taken, Turn
from tests.support.cases import named_cases

ROW = Tuned("pc", "build", "model", ("-c", "4096"), 1, (("host: weights", 0.001, 0.02),), 0.002, 0.03, 5.0)
CARD = DeviceSpeed(1000e9, 160e12, 31.5e9, "cuda", "8.9", "test", True)
PC = HostSpeed(60e9, "test", 8)


def test_one_row_makes_its_own_factors() -> None:
    assert factors_of([ROW], "pc", "build") == {"host: weights": (pytest.approx(2.0), pytest.approx(1.5))}


@named_cases(("machine", "laptop", "build"), ("build", "pc", "another"))
def test_rows_of_others_do_not_count(machine: str, build: str) -> None:
    assert factors_of([ROW], machine, build) == {}


@given(st.floats(0.3, 3), st.floats(0.3, 3), st.floats(0.1, 0.9), st.floats(0.1, 0.9))
def test_rows_tell_parts_apart(host: float, card: float, first: float, second: float) -> None:
    rows = [
        replace(
            ROW,
            parts=(
                ("host: weights", share, share),
                ("CUDA card: weights", 1 - share, 1 - share),
                ("graph splits", 0, 0),
            ),
            prompt=host * share + card * (1 - share),
            step=host * share + card * (1 - share),
        )
        for share in (first, second)
    ]
    found = factors_of(rows, "pc", "build")
    for row, share in zip(rows, (first, second), strict=True):
        estimated = found["host: weights"].prompt * share + found["CUDA card: weights"].prompt * (1 - share)
        assert estimated == pytest.approx(row.prompt, rel=0.1)


def test_what_has_no_place_keeps_its_estimate() -> None:
    row = replace(ROW, parts=(("host: weights", 0.001, 0.02), ("graph splits", 0.001, 0.02)), prompt=0.003, step=0.05)
    assert factors_of([row], "pc", "build") == {"host: weights": (pytest.approx(2.0), pytest.approx(1.5))}


def test_factors_have_limits() -> None:
    (found,) = factors_of([replace(ROW, prompt=100.0, step=1e-9)], "pc", "build").values()
    assert found == (20.0, 1 / 20)


def test_factors_change_the_part_and_the_place_that_were_measured() -> None:
    attention = Attention(4096, 16384, 4)
    work = Work((Layer(0, (Weights(0, 1e8, 2e8), Weights(HOST, 1e8, 2e8)), attention), Layer(0, ())), 4096)
    workload = Workload(512, 128, 4096)

    def parts(card: DeviceSpeed, host: HostSpeed) -> dict[str, tuple[float, float]]:
        return {part.name: (part.prompt, part.generation) for part in price(work, [card], host, workload).parts}

    plain = parts(CARD, PC)
    slow = parts(
        replace(CARD, factors=Factors(attention=Factor(2.0, 3.0))),
        replace(PC, factors=Factors(weights=Factor(4.0, 5.0))),
    )
    changed = {n: (pytest.approx(2 * p), pytest.approx(3 * g)) for n, (p, g) in plain.items() if "attention" in n}
    changed |= {
        "host: weights": tuple(pytest.approx(n * s) for n, s in zip((4, 5), plain["host: weights"], strict=True))
    }
    assert slow == {**plain, **changed}
    assert len(changed) == 2


def test_rows_are_stored_all_or_nothing(tmp_path: Path) -> None:
    path = tmp_path / "tuned.json"
    store_tuned([ROW], path)
    again = replace(ROW, prompt=0.004)
    store_tuned([again, replace(ROW, users=4)], path)
    assert read_tuned(path) == (again, replace(ROW, users=4))
    with pytest.raises(AnswerError, match="cannot be written"):
        store_tuned([ROW], path / "below a file")


@named_cases(
    ("no document", []),
    ("another schema", {"schema": 2, "runs": []}),
    ("a row without its parts", {"schema": 1, "runs": [{"machine": "pc"}]}),
    ("seconds below 0", {"schema": 1, "runs": [{**tuned_document([ROW])["runs"][0], "step": -1}]}),
    ("no seconds", {"schema": 1, "runs": [{**tuned_document([ROW])["runs"][0], "step": 0}]}),
)
def test_a_damaged_file_is_as_none(document: Any, tmp_path: Path) -> None:
    path = tmp_path / "tuned.json"
    path.write_text(json.dumps(document), encoding="utf-8")
    assert read_tuned(path) == ()


def run(seconds: float, spread: float = 0.0) -> TuningRun:
    return TuningRun((TuningChange("threads", words=("-t", "2")),), None, seconds=seconds, spread=spread)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("seconds", "spread", "quicker"),
    [(0.9, 0.01, True), (0.9, 0.06, False), (0.995, 0.0, False), (0.985, 0.0, True), (math.inf, 0.0, False)],
    ids=["clearly", "within noise", "by less than a start differs", "by a little more", "failed"],
)
def test_quicker_is_beyond_noise(seconds: float, spread: float, quicker: bool) -> None:
    assert is_quicker(run(seconds, spread), run(1.0)) is quicker


def test_the_best_is_the_first_unless_another_is_quicker() -> None:
    runs = [run(1.0, 0.05), run(0.95, 0.05), run(0.7, 0.01), run(0.69, 0.01)]
    assert best_of(runs) is runs[2]


def test_only_runs_like_the_best_are_stored() -> None:
    # later plans are for a server with the best threads, not with those of other runs
    price = Price(Estimate(0.001, 0.02, 1.0, (Part("host: weights", 0.001, 0.02),)), Workload(), 0.0, (), None)  # type: ignore[arg-type]
    plan = SimpleNamespace(estimate=price, devices=(), model=SimpleNamespace(name="model"))
    done = {"seconds": 1.0, "prompt": 0.002, "step": 0.03}
    plain, threads = (TuningRun(changes, plan, **done) for changes in ((), run(1.0).changes))  # type: ignore[arg-type]
    batch = TuningRun((TuningChange("batch", (("n_ubatch", 256),)),), plan, **done)  # type: ignore[arg-type]
    for best, stored in ((plain, (plain, batch)), (threads, (threads,))):
        rows = [tuned_of(each, best, "pc", "build", ["-c"], {}) for each in (plain, threads, batch)]
        assert [row is not None for row in rows] == [each in stored for each in (plain, threads, batch)]
    row = tuned_of(plain, plain, "pc", "build", ["-c"], {"host: weights": (2.0, 4.0)})
    # as it would be without what was known of the host
    assert row == Tuned("pc", "build", "model", ("-c",), 1, (("host: weights", 0.0005, 0.005),), 0.002, 0.03, 1.0)
    assert tuned_of(TuningRun((), plan), plain, "pc", "build", [], {}) is None  # type: ignore[arg-type]


@named_cases(
    ("nothing", {}, ""),
    ("as much as is bearable", {"others": 0.1, "spread": 0.1}, ""),
    ("a busy machine", {"others": 0.47}, "other programs used 47% of the processors"),
    ("noise", {"spread": 0.35}, "its turns differ by 35%"),
)
def test_what_something_else_decides_is_not_stored(change: dict[str, float], doubt: str) -> None:
    price = Price(Estimate(0.001, 0.02, 1.0, (Part("host: weights", 0.001, 0.02),)), Workload(), 0.0, (), None)  # type: ignore[arg-type]
    plan = SimpleNamespace(estimate=price, devices=(), model=SimpleNamespace(name="model"))
    measured = replace(TuningRun((), plan, seconds=1.0, prompt=0.002, step=0.03), **change)  # type: ignore[arg-type]
    assert measured.doubt == doubt
    assert (tuned_of(measured, measured, "pc", "build", ["-c"], {}) is None) is bool(doubt)
    tuning = Tuning((measured,), measured, cut="3 turns")
    out = io.StringIO()
    print_to(out, tuning_table(tuning))
    said = " ".join(out.getvalue().split())
    assert "measured with 3 turns" in said
    assert ("none stored, since something else decided the times" in said) is bool(doubt)
    assert doubt in said


@named_cases(
    ("all of it", 7 * 40.0, Load(0, 2000, 400, 1, 5)),
    ("as many rounds as there is time for", 5 * 40.0, Load(0, 2000, 400, 1, 4)),
    ("shorter answers", 4 * 30.0, Load(0, 2000, 200, 1, 3)),
    ("shorter prompts too", 4 * 10.8, Load(0, 1000, 16, 1, 3)),
    ("the least", 1.0, Load(0, 64, 16, 1, 3)),
)
def test_turns_are_cut_to_the_time(seconds: float, cut: Load) -> None:
    # a token of a prompt takes 10 ms, one of an answer 50
    whole = Load(0, 2000, 400, 1, 5)
    assert whole.within(seconds, 0.01, 0.05) == cut
    assert replace(whole, users=2).within(2 * seconds, 0.01, 0.05) == replace(cut, users=2)


def test_a_conversation_before_the_turns_takes_its_time() -> None:
    assert Load(1000, 2000, 400, 1, 5).within(10 + 4 * 30.0, 0.01, 0.05) == Load(1000, 2000, 200, 1, 3)


def test_another_program_is_told_from_the_one_that_is_measured() -> None:
    command = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        every, others = OtherPrograms(os.getpid()), OtherPrograms(command.pid)
        time.sleep(0.5)
        shares = every.share(), others.share()
    finally:
        command.kill()
        command.wait()
    assert shares[0] is not None and shares[1] is not None
    assert 0 <= shares[1] < shares[0] <= 1


def test_times_of_turns() -> None:
    turns = tuple(Turn(seconds, 100, 0.2, 10, 0.1, 8, 6) for seconds in (1.0, 1.1, 5.0))
    taken = Taken((Turn(9.0, 100, 0.2, 10, 0.1), Turn(9.0, 300, 0.6, 10, 0.3)), turns, Load(0, 300, 10, 2, 1))
    # one turn that something disturbed changes nothing
    assert taken.seconds == 1.1
    assert taken.spread == pytest.approx(1.4826 * 0.1 * 1.2533 / math.sqrt(3))
    assert taken.prompt == pytest.approx(0.8 / 400)
    assert taken.step == pytest.approx(0.02)
    assert taken.acceptance == 0.75


@named_cases(
    ("alike", (1.0, 0.1), (1.0, 0.1), 1.0, 0.1 / math.sqrt(2)),
    ("starts differ", (1.0, 0.0), (1.2, 0.0), 1.1, 0.1),
    ("turns differ more", (1.0, 0.3), (1.2, 0.4), 1.1, 0.25),
)
def test_two_starts_are_one_run(
    first: tuple[float, float], second: tuple[float, float], seconds: float, spread: float
) -> None:
    both = joined(replace(run(*first), prompt=0.1, step=0.2), replace(run(*second), prompt=0.3, step=0.4))
    assert (both.seconds, both.spread) == (pytest.approx(seconds), pytest.approx(spread))
    assert (both.prompt, both.step) == (pytest.approx(0.2), pytest.approx(0.3))
