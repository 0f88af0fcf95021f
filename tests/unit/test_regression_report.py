"""A check for people, pull requests and machines."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from fitter.errors import FitterError, ModelError, UsageError
from fitter.regression import check_report
from fitter.regression.cases import Budget, Case
from fitter.regression.check_cases import CaseResult
from fitter.regression.compare import compare
from fitter.regression.lockfile import Snapshot
from fitter.regression.measuring import Measured
from tests.support.cases import cases
from tests.support.snapshots import GIB, MIB, SNAPSHOT, with_memory


def outcome(name: str, measured: Snapshot, budget: Budget | None = None) -> CaseResult:
    case = Case(name, Path("a.gguf"), SNAPSHOT.settings, budget=budget or Budget())
    return CaseResult(name, compare(case, SNAPSHOT, measured))


SAME = outcome("same", SNAPSHOT)
GROWN = outcome(
    "gr|own_1", replace(with_memory(SNAPSHOT, context=GIB), settings={**SNAPSHOT.settings, "n_ubatch": 1024})
)
SHRUNK = outcome("shrunk", with_memory(SNAPSHOT, context=-MIB))
OVER = outcome("over", SNAPSHOT, Budget({"cuda0": 5 * GIB}, n_ctx=9000))
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
    assert table(SAME, GROWN, SHRUNK, BROKEN).splitlines() == [
        "gr|own_1 failed",
        "  what    locked      now            change",
        "! CUDA0  5.2 GiB  6.2 GiB  +1.0 GiB (+19 %)  context +1.0 GiB",
        "  changed: setting: n_ubatch 512 → 1024",
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


def test_json() -> None:
    document = check_report.check_to_dict((SAME, GROWN, BROKEN))
    assert json.loads(json.dumps(document)) == document
    assert (document["schema"], document["passed"]) == (1, False)
    assert [case["status"] for case in document["cases"]] == ["same", "failed", "error"]
    assert document["cases"][1]["moves"] == [
        {
            "what": "CUDA0",
            "before": 5 * GIB + 256 * MIB,
            "after": 6 * GIB + 256 * MIB,
            "unit": "bytes",
            "detail": "context +1.0 GiB",
            "failure": "CUDA0 takes 6.2 GiB instead of 5.2 GiB (+1.0 GiB, +19.0 %)",
            "budget": False,
        }
    ]
    assert document["cases"][1]["causes"] == [{"kind": "setting", "what": "n_ubatch", "before": "512", "after": "1024"}]
    assert document["cases"][2]["error"] == str(BROKEN.error)


def test_markdown() -> None:
    text = check_report.markdown((SAME, GROWN, BROKEN))
    lines = text.splitlines()
    assert lines[0] == "### ❌ fitter check — 3 cases: 1 failed, 1 could not be measured, 1 unchanged"
    assert r"| `gr\|own_1` | CUDA0 | 5.2 GiB | 6.2 GiB | +1.0 GiB (+19 %) | ❌ context +1.0 GiB |" in lines
    assert "- **`gr|own_1`**: `setting: n_ubatch 512 → 1024`" in lines
    assert all(line.replace(r"\|", "").count("|") in (0, 7) for line in lines if line.startswith("|")), (
        "each row has six cells"
    )
    assert check_report.markdown((SAME,)) == "### ✅ fitter check — 1 case: 1 unchanged\n"


def test_junit() -> None:
    root = ElementTree.fromstring(check_report.junit((SAME, GROWN, SHRUNK, BROKEN)))
    suite = root.find("testsuite")
    assert suite is not None
    assert {key: suite.get(key) for key in ("tests", "failures", "errors")} == {
        "tests": "4",
        "failures": "1",
        "errors": "1",
    }
    assert [(test.get("name"), [child.tag for child in test]) for test in suite] == [
        ("same", []),
        ("gr|own_1", ["failure"]),
        ("shrunk", ["system-out"]),
        ("broken", ["error"]),
    ]
    failure, error = suite.find(".//failure"), suite.find(".//error")
    assert failure is not None
    assert error is not None
    assert failure.get("message", "").endswith("(+1.0 GiB, +19.0 %) (setting: n_ubatch 512 → 1024)")
    assert "changed: setting: n_ubatch 512 → 1024" in (failure.text or "")
    assert error.get("message") == r"a.gguf: 100 % missing\x00, <b>"


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
