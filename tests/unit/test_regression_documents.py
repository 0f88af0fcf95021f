"""The documents of a check as a whole: what machines read has these keys, and no others."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest

from fitter.errors import AnswerError, ModelError
from fitter.regression import check_report
from fitter.regression.cases import Case
from fitter.regression.check_cases import CaseResult
from fitter.regression.compare import Cause, Move, compare
from fitter.regression.lockfile import Snapshot
from fitter.regression.plans import PlanDiff
from fitter.regression.regression_documents import DIFF as DIFF_DOCUMENT
from fitter.regression.regression_documents import MOVE
from tests.support.cases import cases
from tests.support.snapshots import GIB, SNAPSHOT, with_memory


def outcome(name: str, measured: Snapshot) -> CaseResult:
    return CaseResult(name, compare(Case(name, Path("a.gguf"), SNAPSHOT.settings), SNAPSHOT, measured))


CHOSEN = replace(SNAPSHOT, params=replace(SNAPSHOT.params, n_gpu_layers=20))
SAME = outcome("same", SNAPSHOT)
GROWN = outcome("grown", replace(with_memory(CHOSEN, context=GIB), n_ctx=8193, fitter="0.2.0"))
BROKEN = CaseResult("broken", None, ModelError("a.gguf is missing\x00"))

CASES = {
    "same": (
        SAME,
        {"name": "same", "status": "same", "error": None, "fits": True}
        | {"failures": [], "moves": [], "causes": [], "fitted": []},
    ),
    "failed": (
        GROWN,
        {
            "name": "grown",
            "status": "failed",
            "error": None,
            "fits": True,
            "failures": ["CUDA0 takes 6.2 GiB instead of 5.2 GiB (+1.0 GiB, +19.0 %)"],
            "moves": [
                {
                    "what": "CUDA0",
                    "before": 5.25 * GIB,
                    "after": 6.25 * GIB,
                    "unit": "bytes",
                    "detail": "context +1.0 GiB",
                    "failure": "CUDA0 takes 6.2 GiB instead of 5.2 GiB (+1.0 GiB, +19.0 %)",
                    "budget": False,
                },
                {
                    "what": "context",
                    "before": 8192,
                    "after": 8193,
                    "unit": "tokens",
                    "detail": "",
                    "failure": "",
                    "budget": False,
                },
            ],
            "causes": [{"kind": "fitter", "what": "fitter", "before": "0.1.0", "after": "0.2.0"}],
            "fitted": [{"kind": "fitted", "what": "n_gpu_layers", "before": "33", "after": "20"}],
        },
    ),
    "no fit": (
        outcome("same", replace(SNAPSHOT, fits=False)),
        {
            "name": "same",
            "status": "failed",
            "error": None,
            "fits": False,
            "failures": ["it no longer fits: llama.cpp cannot place it"],
            "moves": [
                {
                    "what": "fits",
                    "before": 1,
                    "after": 0,
                    "unit": None,
                    "detail": "",
                    "failure": "it no longer fits: llama.cpp cannot place it",
                    "budget": False,
                }
            ],
            "causes": [],
            "fitted": [],
        },
    ),
    "broken": (
        BROKEN,
        {"name": "broken", "status": "error", "error": str(BROKEN.error), "fits": None}
        | {"failures": [], "moves": [], "causes": [], "fitted": []},
    ),
}


@cases(CASES)
def test_json(result: CaseResult, expected: dict[str, object]) -> None:
    passed = result is SAME
    assert check_report.check_to_dict([result]) == {"schema": 1, "passed": passed, "cases": [expected]}


JUNIT = """\
<?xml version='1.0' encoding='utf-8'?>
<testsuites>
  <testsuite name="fitter check" tests="4" failures="1" errors="1" skipped="0">
    <testcase classname="fitter" name="same" />
    <testcase classname="fitter" name="grown">
      <failure message="CUDA0 takes 6.2 GiB instead of 5.2 GiB (+1.0 GiB, +19.0 %) (fitter 0.1.0 → 0.2.0)" \
type="regression">CUDA0 takes 6.2 GiB instead of 5.2 GiB (+1.0 GiB, +19.0 %)
CUDA0 5.2 GiB 6.2 GiB +1.0 GiB (+19 %) context +1.0 GiB
context 8192 8193 +1
changed: fitter 0.1.0 → 0.2.0</failure>
    </testcase>
    <testcase classname="fitter" name="changed?">
      <system-out>changed: fitter 0.1.0 → 0.2.0</system-out>
    </testcase>
    <testcase classname="fitter" name="broken">
      <error message="MESSAGE" type="ModelError" />
    </testcase>
  </testsuite>
</testsuites>
"""


def test_junit(tmp_path: Path) -> None:
    changed = outcome("changed\x1f", replace(SNAPSHOT, fitter="0.2.0"))
    path = tmp_path / "check.xml"
    check_report.write_junit(path, [SAME, GROWN, changed, BROKEN])
    assert path.read_text(encoding="utf-8") == JUNIT.replace("MESSAGE", str(BROKEN.error))


def test_junit_that_cannot_be_written(tmp_path: Path) -> None:
    path = tmp_path / "missing" / "check.xml"
    with pytest.raises(AnswerError, match=r"check\.xml cannot be written: No such file or directory"):
        check_report.write_junit(path, [SAME])


def test_markdown() -> None:
    assert check_report.markdown([SAME, GROWN]).splitlines() == [
        "### ❌ fitter check — 2 cases: 1 failed, 1 unchanged",
        "",
        "| case | what | locked | now | change | |",
        "| --- | --- | ---: | ---: | ---: | --- |",
        "| grown | CUDA0 | 5.2 GiB | 6.2 GiB | +1.0 GiB (+19 %) | ❌ context +1.0 GiB |",
        "| grown | context | 8192 | 8193 | +1 |  |",
        "",
        "- **grown**: fitter 0.1.0 → 0.2.0",
    ]


DIFF = PlanDiff(
    (Move("CUDA0", 5 * GIB, 6 * GIB, "bytes", "context +1.0 GiB"),), (Cause("params", "n_ubatch", "512", "64"),)
)


def printed(diff: PlanDiff) -> list[str]:
    stream = io.StringIO()
    check_report.print_diff(stream, diff)
    return stream.getvalue().splitlines()


def test_two_plans() -> None:
    assert printed(PlanDiff((), ())) == ["the plans are the same"]
    assert printed(DIFF) == [
        "  what         A        B            change",
        "  CUDA0  5.0 GiB  6.0 GiB  +1.0 GiB (+20 %)  context +1.0 GiB",
        "  params: n_ubatch 512 → 64",
    ]
    assert printed(replace(DIFF, moves=())) == ["  params: n_ubatch 512 → 64"]
    assert len(printed(replace(DIFF, changes=()))) == 2


def test_two_plans_as_json() -> None:
    assert DIFF_DOCUMENT.write(PlanDiff((), ())) == {"schema": 1, "equal": True, "moves": [], "changes": []}
    assert DIFF_DOCUMENT.write(DIFF) == {
        "schema": 1,
        "equal": False,
        "moves": [MOVE.write(DIFF.moves[0])],
        "changes": [{"kind": "params", "what": "n_ubatch", "before": "512", "after": "64"}],
    }


def test_annotations_of_a_pattern_are_where_its_table_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GITHUB_WORKSPACE", raising=False)
    monkeypatch.chdir(tmp_path)
    cases = tmp_path / "a,b" / "fitter.toml"
    missing = CaseResult("code/x", None, ModelError("gone"))
    where = "title=fitter%3A code/x::gone"
    assert check_report.github_annotations([missing], cases) == (f"::error {where}",), "no file, no place"
    cases.parent.mkdir()
    cases.write_text('[cases.chat]\nmodel = "a"\n[cases.code]\nmodel = "*"\n', encoding="utf-8")
    assert check_report.github_annotations([missing], cases) == (f"::error file=a%2Cb/fitter.toml,line=3,{where}",)


def test_nothing_but_the_summary_where_nothing_changed() -> None:
    stream = io.StringIO()
    check_report.print_check(stream, [SAME, BROKEN])
    assert stream.getvalue() == "2 cases: 1 could not be measured, 1 unchanged\n"
