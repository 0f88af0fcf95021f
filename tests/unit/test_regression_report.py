"""A check for people, pull requests and machines, and the documents as a whole: these keys, and no others."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fitter.errors import AnswerError, FitterError, ModelError, UsageError
from fitter.regression import check_report
from fitter.regression.cases import Budget, Case
from fitter.regression.check_cases import CaseResult
from fitter.regression.compare import Cause, Move, PlanDiff, compare
from fitter.regression.lockfile import Snapshot
from fitter.regression.measuring import Measured
from fitter.regression.regression_documents import DIFF as DIFF_DOCUMENT
from fitter.regression.regression_documents import MOVE
from tests.support.cases import cases, named_cases
from tests.support.snapshots import GIB, MIB, SNAPSHOT, with_memory


def outcome(name: str, measured: Snapshot, budget: Budget | None = None) -> CaseResult:
    case = Case(name, Path("a.gguf"), SNAPSHOT.settings, budget=budget or Budget())
    return CaseResult(name, compare(case, SNAPSHOT, measured))


GREW = "CUDA0 takes 6.2 GiB instead of 5.2 GiB (+1.0 GiB, +19.0 %)"
SAME = outcome("same", SNAPSHOT)
NEWER = replace(SNAPSHOT, fitter="0.2.0", settings={**SNAPSHOT.settings, "n_ubatch": 1024}, n_ctx=8193)
GROWN = outcome("gr|own_1", with_memory(replace(NEWER, params=replace(NEWER.params, n_gpu_layers=20)), context=GIB))
SHRUNK = outcome("shrunk", with_memory(SNAPSHOT, context=-MIB))
OVER = outcome("over", SNAPSHOT, Budget({"cuda0": 5 * GIB}, n_ctx=9000))
NO_FIT = outcome("same", replace(SNAPSHOT, fits=False))
ADDED = CaseResult("added", None, UsageError("not in the lock"), "added")
REMOVED = CaseResult("removed", None, UsageError("not in the cases"), "removed")
BROKEN = CaseResult("broken", None, ModelError("a.gguf: 100 % missing\x00, <b>"))


@cases(
    ((SAME, SHRUNK), 0),
    ((SAME, GROWN), 4),
    ((GROWN, BROKEN), 3),
    ((GROWN, CaseResult("a", None, UsageError("x"))), 2),
    ((BROKEN, CaseResult("a", None, UsageError("x"))), 3),
    ((SAME, ADDED), 2),
    ((SAME, REMOVED), 2),
    ((GROWN, ADDED, REMOVED), 4),
    ((BROKEN, ADDED), 3),
)
def test_exit_status(outcomes: tuple[CaseResult, ...], status: int) -> None:
    assert check_report.exit_status(outcomes) == status


def table(*outcomes: CaseResult, verbose: bool = False) -> str:
    stream = io.StringIO()
    check_report.print_check(stream, outcomes, verbose=verbose)
    return stream.getvalue()


def test_table() -> None:
    assert table(SAME) == "1 case: 1 unchanged\n"
    assert table(SAME, verbose=True) == "same same\n1 case: 1 unchanged\n"
    assert table(SAME, BROKEN) == "2 cases: 1 could not be measured, 1 unchanged\n", "nothing changed"
    assert table(SAME, GROWN, SHRUNK, BROKEN).splitlines() == [
        "gr|own_1 failed",
        "  what      locked      now            change",
        "! CUDA0    5.2 GiB  6.2 GiB  +1.0 GiB (+19 %)  context +1.0 GiB",
        "  context     8192     8193                +1",
        "  changed: setting: n_ubatch 512 → 1024",
        "  changed: fitter 0.1.0 → 0.2.0",
        "  fitted differently: n_gpu_layers 33 → 20",
        "shrunk changed",
        "  what    locked      now             change",
        "  CUDA0  5.2 GiB  5.2 GiB  -1.0 MiB (-0.0 %)  context -1.0 MiB",
        "  changed: nothing that the lock records; perhaps the build of llama.cpp or environment variables differ",
        "4 cases: 1 failed, 1 could not be measured, 1 changed within the limits, 1 unchanged",
    ]
    assert table(OVER).splitlines()[1:4] == [
        "  what                     locked      now               change",
        "! cuda0 budget    at most 5.0 GiB  5.2 GiB  +256.0 MiB (+5.0 %)",
        "! context budget    at least 9000     8192                 -808",
    ]


def document(name: str, status: str, fits: bool | None, **more: Any) -> dict[str, Any]:
    """A case as a document says it, with nothing in it but ``more``."""
    nothing: dict[str, Any] = {"error": None, "failures": [], "moves": [], "causes": [], "fitted": []}
    return {"name": name, "status": status, "fits": fits, **nothing, **more}


def moved(what: str, before: float, after: float, unit: str | None, detail: str = "", failure: str = "") -> Any:
    more = {"unit": unit, "detail": detail, "failure": failure, "budget": False}
    return {"what": what, "before": before, "after": after, **more}


def changed(kind: str, what: str, before: str, after: str) -> dict[str, str]:
    return {"kind": kind, "what": what, "before": before, "after": after}


LACKS = "it no longer fits: llama.cpp cannot place it"


@named_cases(
    ("same", SAME, document("same", "same", True)),
    (
        "failed",
        GROWN,
        document(
            *("gr|own_1", "failed", True),
            failures=[GREW],
            moves=[
                moved("CUDA0", 5.25 * GIB, 6.25 * GIB, "bytes", "context +1.0 GiB", GREW),
                moved("context", 8192, 8193, "tokens"),
            ],
            causes=[changed("setting", "n_ubatch", "512", "1024"), changed("fitter", "fitter", "0.1.0", "0.2.0")],
            fitted=[changed("fitted", "n_gpu_layers", "33", "20")],
        ),
    ),
    (
        "no fit",
        NO_FIT,
        document("same", "failed", False, failures=[LACKS], moves=[moved("fits", 1, 0, None, "", LACKS)]),
    ),
    ("broken", BROKEN, document("broken", "error", None, error=str(BROKEN.error))),
)
def test_json(result: CaseResult, expected: dict[str, Any]) -> None:
    found = check_report.check_to_dict([result])
    assert found == {"schema": 1, "passed": result is SAME, "cases": [expected]} == json.loads(json.dumps(found))


JUNIT = r"""<?xml version='1.0' encoding='utf-8'?>
<testsuites>
  <testsuite name="fitter check" tests="4" failures="1" errors="1" skipped="0">
    <testcase classname="fitter" name="same" />
    <testcase classname="fitter" name="gr|own_1">
      <failure message="GREW (setting: n_ubatch 512 → 1024; fitter 0.1.0 → 0.2.0)" type="regression">GREW
CUDA0 5.2 GiB 6.2 GiB +1.0 GiB (+19 %) context +1.0 GiB
context 8192 8193 +1
changed: setting: n_ubatch 512 → 1024
changed: fitter 0.1.0 → 0.2.0</failure>
    </testcase>
    <testcase classname="fitter" name="changed?">
      <system-out>changed: fitter 0.1.0 → 0.2.0</system-out>
    </testcase>
    <testcase classname="fitter" name="broken">
      <error message="a.gguf: 100 % missing\x00, &lt;b&gt;" type="ModelError" />
    </testcase>
  </testsuite>
</testsuites>
""".replace("GREW", GREW)


def test_junit(tmp_path: Path) -> None:
    newer = outcome("changed\x1f", replace(SNAPSHOT, fitter="0.2.0"))
    path = tmp_path / "check.xml"
    check_report.write_junit(path, [SAME, GROWN, newer, BROKEN])
    assert path.read_text(encoding="utf-8") == JUNIT


def test_junit_that_cannot_be_written(tmp_path: Path) -> None:
    path = tmp_path / "missing" / "check.xml"
    with pytest.raises(AnswerError, match=r"check\.xml cannot be written: No such file or directory"):
        check_report.write_junit(path, [SAME])


def test_markdown() -> None:
    assert check_report.markdown([SAME, GROWN, BROKEN]).splitlines() == [
        "### ❌ fitter check — 3 cases: 1 failed, 1 could not be measured, 1 unchanged",
        "",
        "| case | what | locked | now | change | |",
        "| --- | --- | ---: | ---: | ---: | --- |",
        r"| `gr\|own_1` | CUDA0 | 5.2 GiB | 6.2 GiB | +1.0 GiB (+19 %) | ❌ context +1.0 GiB |",
        r"| `gr\|own_1` | context | 8192 | 8193 | +1 |  |",
        "",
        "- **`gr|own_1`**: `setting: n_ubatch 512 → 1024`",
        "- **`gr|own_1`**: fitter 0.1.0 → 0.2.0",
        r"- **broken**: `a.gguf: 100 % missing\x00, <b>`",
    ]
    assert check_report.markdown((SAME,)) == "### ✅ fitter check — 1 case: 1 unchanged\n"


def test_github_annotations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("GITHUB_WORKSPACE", raising=False)
    cases = tmp_path / "sub" / "fitter.toml"
    cases.parent.mkdir()
    cases.write_text('[defaults]\n\n[cases."gr|own_1"]\nmodel = "a"\n[ cases.broken ]\nmodel = "b"\n')
    lines = check_report.github_annotations((SAME, GROWN, BROKEN, SHRUNK), cases)
    assert [line.partition("::CUDA0")[0].partition("::a.gguf")[0] for line in lines] == [
        "::error file=sub/fitter.toml,line=3,title=fitter%3A gr|own_1",
        "::error file=sub/fitter.toml,line=5,title=fitter%3A broken",
        "::notice file=sub/fitter.toml,title=fitter%3A shrunk::changed within its limits "
        "(nothing that the lock records; perhaps the build of llama.cpp or environment variables differ)",
    ]
    assert "100 %25 missing" in lines[1]
    monkeypatch.chdir(cases.parent)
    (elsewhere := tmp_path / "fitter.toml").write_text("")
    assert check_report.github_annotations((GROWN,), elsewhere)[0].startswith("::error title=fitter")


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


@cases(
    ("", "", "job/sub", ""),
    ("", "", "job", "file=sub/fitter.toml,"),
    ("job", "", "job/sub", "file=sub/fitter.toml,"),
    ("job", "", "elsewhere", "file=sub/fitter.toml,"),
    ("", "job/.git", "job/sub", "file=sub/fitter.toml,"),
    ("", "job/.git", "elsewhere", "file=sub/fitter.toml,"),
    ("elsewhere", "job/.git", "elsewhere", "file=sub/fitter.toml,"),
    (".", "job/.git", ".", "file=sub/fitter.toml,"),
    ("job", ".git", ".", "file=sub/fitter.toml,"),
    ("elsewhere", "", "job", "file=sub/fitter.toml,"),
    ("elsewhere", "", "elsewhere", None),
)
def test_paths_of_annotations_are_those_of_the_repository(
    workspace: str, git: str, cwd: str, expected: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for directory in ("job/sub", "elsewhere"):
        (tmp_path / directory).mkdir(parents=True)
    if git:
        (tmp_path / git).mkdir()
    monkeypatch.delenv("GITHUB_WORKSPACE", raising=False)
    if workspace:
        monkeypatch.setenv("GITHUB_WORKSPACE", str(tmp_path / workspace))
    monkeypatch.chdir(tmp_path / cwd)
    cases = tmp_path / "job/sub/fitter.toml"
    cases.write_text("")
    (line,) = check_report.github_annotations((GROWN,), cases)
    place = {"": "file=fitter.toml,", None: ""}.get(expected, expected)
    assert line.startswith(f"::error {place}title=")


def test_lines_of_a_lock() -> None:
    case = Case("a", Path("a.gguf"), {})
    too_large = replace(with_memory(SNAPSHOT, context=20 * GIB), fits=False)
    error: FitterError = ModelError("gone")
    measured = (Measured(case, SNAPSHOT), Measured(case, too_large), Measured(case, None, error))
    assert check_report.lock_lines(measured) == ("a does not fit: CUDA0 lacks 3.2 GiB", "error: a: gone")


# --- two plans

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
        "changes": [changed("params", "n_ubatch", "512", "64")],
    }
