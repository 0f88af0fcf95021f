"""Which cases are measured, what is compared with what, and what is written. Nothing is loaded: memory is made up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fitter.errors import FitterError, LlamaCppError, UsageError
from fitter.model.files.source import show
from fitter.regression import check_cases as checking
from fitter.regression.cases import Case
from fitter.regression.check_cases import CaseResult, check, lock, lock_path, prune
from fitter.regression.lockfile import Lock, Snapshot, read_lock, write_lock
from fitter.regression.measuring import Measured, OnDone
from tests.support.cases import cases, named_cases
from tests.support.snapshots import MIB, SNAPSHOT, with_memory

LARGER = with_memory(SNAPSHOT, compute=MIB)
OTHER = with_memory(SNAPSHOT, compute=2 * MIB)
BROKEN = LlamaCppError("it does not load")
TEST = "test_memory.py::test_chat"
CASES = ("a", "b", "code/x", "code/y", "coded")


class Machine:
    """Answers for `measure_cases` with what each case has, and remembers what it was asked."""

    def __init__(self) -> None:
        self.memory: dict[str, Snapshot | FitterError] = {}
        self.asked: list[str] = []
        self.locked: Mapping[str, Snapshot] = {}
        self.words: dict[str, Any] = {}
        self.meanwhile: OnDone | None = None

    def __call__(self, cases: Sequence[Case], locked: Mapping[str, Snapshot], **words: Any) -> tuple[Measured, ...]:
        if (meanwhile := self.meanwhile) is not None:
            self.meanwhile = None
            meanwhile(0, 0, "")
        self.asked, self.locked, self.words = [case.name for case in cases], locked, words
        return tuple(self._measured(case) for case in cases)

    def _measured(self, case: Case) -> Measured:
        found = self.memory.get(case.name, SNAPSHOT)
        return Measured(case, None, found) if isinstance(found, FitterError) else Measured(case, found)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    there = Machine()
    monkeypatch.setattr(checking, "measure_cases", there)
    return there


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Cases, the larger part of them from a pattern."""
    (tmp_path / "m").mkdir()
    for name in ("m/x.gguf", "m/y.gguf"):
        (tmp_path / name).touch()
    text = "".join(f'[cases.{name}]\nmodel = "{name}.gguf"\n' for name in ("a", "b", "coded"))
    path = tmp_path / "fitter.toml"
    path.write_text(text + '[cases.code]\nmodel = "m/*.gguf"\n')
    return path


def locked(file: Path, **cases: Snapshot) -> None:
    write_lock(file.with_name("fitter.lock"), Lock({**dict.fromkeys(CASES, SNAPSHOT), TEST: OTHER, **cases}))


def stored(file: Path) -> Mapping[str, Snapshot]:
    return read_lock(file.with_name("fitter.lock")).cases


def statuses(results: Sequence[CaseResult]) -> dict[str, str]:
    return {result.name: result.status for result in results}


@named_cases(("beside", None, "x/fitter.lock"), ("given", "y/other.lock", "y/other.lock"))
def test_where_the_lock_is(given: str | None, expected: str) -> None:
    assert lock_path(Path("x/cases.toml"), Path(given) if given else None) == Path(expected)


# --- lock


def test_a_lock_has_every_case_and_what_pytest_stored(file: Path, machine: Machine) -> None:
    locked(file, gone=SNAPSHOT)
    machine.memory["a"] = LARGER

    def say(done: int, total: int, name: str) -> None: ...

    measured = lock(file, jobs=3, timeout=7.0, on_done=say)
    assert [each.case.name for each in measured] == list(CASES)
    assert stored(file) == {**dict.fromkeys(CASES, SNAPSHOT), "a": LARGER, TEST: OTHER}
    assert machine.locked == {}, "a lock is a fit of every case, and no copy of an older lock"
    assert machine.words == {"jobs": 3, "timeout": 7.0, "on_done": say}


def test_a_lock_that_cannot_be_read_is_written_anew(file: Path, machine: Machine) -> None:
    file.with_name("fitter.lock").write_text("schema = 1\nwhat = 2\n")
    lock(file)
    assert set(stored(file)) == set(CASES)


def test_nothing_is_written_where_a_case_cannot_be_measured(file: Path, machine: Machine) -> None:
    machine.memory["b"] = BROKEN
    assert [each.error for each in lock(file)] == [None, BROKEN, None, None, None]
    assert not file.with_name("fitter.lock").exists()


@named_cases(("an update", ("a",)), ("all cases", ()))
def test_what_others_write_meanwhile_stays(update: tuple[str, ...], file: Path, machine: Machine) -> None:
    locked(file)

    def other(done: int, total: int, name: str) -> None:
        machine.memory = dict.fromkeys(CASES, OTHER)
        if update:
            lock(file, update=("b",))
        else:
            write_lock(lock_path(file, None), Lock({**stored(file), TEST: LARGER}))
        machine.memory = dict.fromkeys(CASES, LARGER)

    machine.meanwhile = other
    lock(file, update=update)
    changed = {"a": LARGER, "b": OTHER} if update else {**dict.fromkeys(CASES, LARGER), TEST: LARGER}
    assert {name: snapshot for name, snapshot in stored(file).items() if name in changed} == changed


@named_cases(
    ("one", ("a",), ["a"]),
    ("all of a pattern", ("code",), ["code/x", "code/y"]),
    ("one of a pattern, and another", ("code/y", "b"), ["b", "code/y"]),
)
def test_an_update_changes_these(names: tuple[str, ...], measured: list[str], file: Path, machine: Machine) -> None:
    locked(file, gone=OTHER)
    machine.memory = dict.fromkeys(CASES, LARGER)
    lock(file, update=names)
    assert machine.asked == measured
    assert stored(file) == {
        **dict.fromkeys(CASES, SNAPSHOT),
        **dict.fromkeys(measured, LARGER),
        "gone": OTHER,
        TEST: OTHER,
    }


@cases((("cod",),), (("a", "code/z"),), (("code/",),))
def test_an_update_of_no_case(names: tuple[str, ...], file: Path, machine: Machine) -> None:
    locked(file)
    with pytest.raises(UsageError, match=f"there is no case '{names[-1]}' in .*fitter.toml: "):
        lock(file, update=names)
    assert machine.asked == []


@cases((lock,), (prune,))
def test_cases_are_no_lock(function: Any, file: Path, machine: Machine) -> None:
    before = file.read_text()
    with pytest.raises(UsageError, match="is the file with the cases: give the lock another name"):
        function(file, file.parent / "m" / ".." / "fitter.toml")
    assert (file.read_text(), machine.asked) == (before, [])


# --- prune


def test_prune_removes_what_is_no_case_any_more(file: Path) -> None:
    locked(file, gone=SNAPSHOT, also=SNAPSHOT)
    assert prune(file) == ("also", "gone")
    assert set(stored(file)) == {*CASES, TEST}
    before = file.with_name("fitter.lock").stat()
    assert prune(file) == ()
    assert file.with_name("fitter.lock").stat().st_ino == before.st_ino, "what is as it should be is not written again"


def test_prune_of_another_lock(file: Path) -> None:
    other = file.with_name("other.lock")
    write_lock(other, Lock({"a": SNAPSHOT, "gone": SNAPSHOT}))
    assert prune(file, other) == ("gone",)
    assert set(read_lock(other).cases) == {"a"}


# --- check


def test_each_case_is_compared_with_its_own_lock(file: Path, machine: Machine) -> None:
    locked(file, b=LARGER)
    machine.memory = {"a": LARGER, "b": LARGER, "code/x": BROKEN, "coded": replace(SNAPSHOT, n_ctx=8193)}

    def say(done: int, total: int, name: str) -> None: ...

    results = check(file, jobs=2, timeout=5.0, on_done=say)
    assert statuses(results) == {"a": "failed", "b": "same", "code/x": "error", "code/y": "same", "coded": "changed"}
    assert [result.error for result in results] == [None, None, BROKEN, None, None]
    assert machine.locked == {**dict.fromkeys(CASES, SNAPSHOT), "b": LARGER}
    assert machine.words == {"jobs": 2, "timeout": 5.0, "on_done": say}


def test_cases_on_one_side_only(file: Path, machine: Machine) -> None:
    write_lock(file.with_name("fitter.lock"), Lock({"b": SNAPSHOT, "z": SNAPSHOT, "y": SNAPSHOT, TEST: OTHER}))
    results = check(file)
    assert [(result.name, result.status) for result in results] == [
        ("b", "same"),
        ("a", "added"),
        ("code/x", "added"),
        ("code/y", "added"),
        ("coded", "added"),
        ("y", "removed"),
        ("z", "removed"),
    ]
    assert machine.asked == ["b"]
    said = {result.name: str(result.error) for result in results}
    here, stored_in = show(file), show(file.with_name("fitter.lock"))
    assert said["a"] == f"the case is in {here}, but not in {stored_in}: run 'fitter lock --update a'"
    assert said["z"] == f"the case is in {stored_in}, but not in {here}: run 'fitter lock --prune'"


@named_cases(
    ("some", "code", {"code/x": "same", "code/y": "same", "coded": "same"}, ["code/x", "code/y", "coded"]),
    ("one that is not locked", "a", {"a": "added"}, []),
)
def test_selected(expression: str, expected: dict[str, str], asked: list[str], file: Path, machine: Machine) -> None:
    names = ("b", "code/x", "code/y", "coded", "gone")
    write_lock(file.with_name("fitter.lock"), Lock(dict.fromkeys(names, SNAPSHOT)))
    assert statuses(check(file, expression=expression)) == expected
    assert machine.asked == asked


def test_nothing_is_selected(file: Path, machine: Machine) -> None:
    locked(file)
    with pytest.raises(UsageError, match="-k 'zzz' selects no case; the cases are a, b, code/x, code/y, coded"):
        check(file, expression="zzz")


def budgeted(file: Path, *names: str) -> None:
    lines = [f'[cases.{name}]\nmodel = "{name}.gguf"\nbudget.n_ctx = 8192\n' for name in names]
    file.write_text("".join(lines) + '[cases.free]\nmodel = "free.gguf"\n')


def test_budgets_need_no_lock(file: Path, machine: Machine) -> None:
    budgeted(file, "a", "b")
    machine.memory["b"] = replace(SNAPSHOT, n_ctx=8191)
    assert statuses(check(file, expression="not free")) == {"a": "same", "b": "failed"}
    with pytest.raises(UsageError, match=r"fitter\.lock does not exist: run 'fitter lock' to make it"):
        check(file)
    write_lock(file.with_name("fitter.lock"), Lock({TEST: OTHER}))
    assert statuses(check(file, expression="not free")) == {"a": "same", "b": "failed"}, "tests' memory is no case's"
    assert statuses(check(file)) == {"free": "added", "a": "added", "b": "added"}, "a lock that is needed has them all"


def test_a_lock_elsewhere(file: Path, machine: Machine) -> None:
    locked(file)
    other = file.with_name("other.lock")
    write_lock(other, Lock(dict.fromkeys(CASES, LARGER)))
    machine.memory = dict.fromkeys(CASES, LARGER)
    assert set(statuses(check(file, other)).values()) == {"same"}
    assert set(statuses(check(file)).values()) == {"failed"}
