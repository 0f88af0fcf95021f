"""``fitter lock`` and ``fitter check``: measure cases, and write or compare the lock."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fitter.errors import FitterError, UsageError
from fitter.llama.client import DEFAULT_TIMEOUT
from fitter.model.files.source import show
from fitter.regression.cases import Case, check_trusted, is_test, read_cases, select_named, suggest, with_build
from fitter.regression.compare import CaseComparison, compare
from fitter.regression.fleets import FLEET, FleetTable, compare_sets, fleet, has_fleet, locked_fleet, read_fleet
from fitter.regression.lockfile import LOCK_FILE, Lock, Snapshot, alone, check_can_be_written, read_lock, write_lock
from fitter.regression.measuring import Measured, OnDone, measure_cases


@dataclass(frozen=True)
class CaseResult:
    """The result of checking one case: a comparison, or an error."""

    name: str
    """The case's name."""
    comparison: CaseComparison | None
    """How it compares with its lock and its budget; ``None`` if it was not measured."""
    error: FitterError | None = None
    """Why it could not be measured."""
    unmatched: Literal["added", "removed"] | None = None
    """``added`` if the case is not in the lock yet, ``removed`` if it is only in the lock."""

    @property
    def status(self) -> str:
        """``same``, ``changed`` (within the limits), ``failed``, ``added``, ``removed`` or ``error``."""
        if self.unmatched is not None:
            return self.unmatched
        return "error" if self.comparison is None else self.comparison.status


def lock_path(cases_file: Path, lock_file: Path | None) -> Path:
    """Return the path of the lock: ``lock_file``, or by default beside the cases."""
    return cases_file.with_name(LOCK_FILE) if lock_file is None else lock_file


def lock(
    cases_file: Path,
    lock_file: Path | None = None,
    *,
    update: Sequence[str] = (),
    llama_cpp: str | None = None,
    trust: bool = False,
    jobs: int | None = None,
    timeout: float = DEFAULT_TIMEOUT,
    on_done: OnDone | None = None,
) -> tuple[Measured, ...]:
    """Fit all cases, or those named in ``update``, and write the lock; returns the measured cases.

    The name of a table with a pattern stands for all of its cases. ``llama_cpp`` is measured with in place of what the
    cases name. ``trust``: whether cases may name native code. If a case cannot be measured, its ``error`` says why and
    nothing is written. Raises ``UsageError`` for cases and locks that are not valid, ``LibraryError`` if llama.cpp
    cannot be used, ``AnswerError`` if the lock cannot be written.
    """
    path = lock_path(cases_file, lock_file)
    _check_is_another(path, cases_file)
    # before measuring, which may take minutes
    check_can_be_written(path)
    cases = read_cases(cases_file, is_trusted=trust)
    if update:
        cases = _select_cases(cases, update, cases_file)
        read_lock(path)
    # Without the locked snapshots, so that every case is fitted and none is copied from the old lock.
    cases = with_build(cases, llama_cpp)
    check_trusted(cases, cases_file, trust)
    measured = measure_cases(cases, {}, jobs=jobs, timeout=timeout, on_done=on_done)
    snapshots = {each.case.name: each.snapshot for each in measured if each.snapshot}
    if len(snapshots) == len(measured):
        planned = None
        if has_fleet(cases_file) and not update:
            planned = locked_fleet(fleet(cases_file, llama_cpp=llama_cpp, trust=trust, jobs=jobs))
        with alone(path):
            # Read only now, with what others have written while these were measured.
            others = _unchanged_snapshots(path, update) if update else _of_tests(path)
            write_lock(path, Lock(others | snapshots, read_lock(path).fleet if update else planned))
    return measured


def prune(cases_file: Path, lock_file: Path | None = None, *, trust: bool = False) -> tuple[str, ...]:
    """Remove the cases from the lock that are no longer in ``cases_file``, and return their names.

    Nothing is measured, and what pytest has stored stays. ``trust``: whether patterns may lead out of the directory of
    ``cases_file``. Raises ``UsageError`` for cases and locks that are not valid,
    ``AnswerError`` if the lock cannot be written.
    """
    path = lock_path(cases_file, lock_file)
    _check_is_another(path, cases_file)
    names = {case.name for case in read_cases(cases_file, is_trusted=trust)}
    with alone(path):
        lock = read_lock(path)
        gone = tuple(name for name in sorted(lock.cases) if name not in names and not is_test(name))
        planned = lock.fleet if has_fleet(cases_file) else None
        if gone or planned != lock.fleet:
            left = {name: snapshot for name, snapshot in lock.cases.items() if name not in gone}
            write_lock(path, Lock(left, planned))
    return gone if planned == lock.fleet else (*gone, FLEET)


def check(
    cases_file: Path,
    lock_file: Path | None = None,
    *,
    expression: str | None = None,
    llama_cpp: str | None = None,
    trust: bool = False,
    jobs: int | None = None,
    timeout: float = DEFAULT_TIMEOUT,
    on_done: OnDone | None = None,
) -> tuple[CaseResult, ...]:
    """Measure all cases, or those that ``expression`` selects, and compare them with the lock and their budgets.

    Cases that are not in the lock and, without an ``expression``, cases that are only in the lock have results too,
    after those that were measured. Without a lock, all cases must have budgets. ``llama_cpp`` is measured with in place
    of what the cases name. ``trust``: whether cases may name native code. Raises ``UsageError`` for cases and locks
    that are not valid, ``LibraryError`` if llama.cpp cannot be used.
    """
    path = lock_path(cases_file, lock_file)
    cases = read_cases(cases_file, is_trusted=trust)
    table = read_fleet(cases_file, is_trusted=trust) if expression is None and has_fleet(cases_file) else None
    names = [case.name for case in cases]
    cases = select_named(cases, expression)
    locked: Mapping[str, Snapshot] = {}
    needs_lock = not all(case.budget for case in cases)
    if path.exists() or needs_lock:
        locked = {name: snapshot for name, snapshot in read_lock(path).cases.items() if not is_test(name)}
    unmatched: tuple[CaseResult, ...] = ()
    if locked or needs_lock:
        removed = sorted(locked.keys() - set(names)) if expression is None else []
        added = [case.name for case in cases if case.name not in locked]
        cases = tuple(case for case in cases if case.name in locked)
        unmatched = (*_added(added, path, cases_file), *_removed(removed, path, cases_file))
    cases = with_build(cases, llama_cpp)
    check_trusted((*cases, *(with_build(table.cases, llama_cpp) if table else ())), cases_file, trust)
    measured = measure_cases(cases, locked, jobs=jobs, timeout=timeout, on_done=on_done) if cases else ()
    of_fleet = _check_fleet(table, cases_file, path, llama_cpp) if expression is None else ()
    return (*(_result(each, locked.get(each.case.name)) for each in measured), *of_fleet, *unmatched)


def _check_fleet(
    table: FleetTable | None, cases_file: Path, path: Path, llama_cpp: str | None
) -> tuple[CaseResult, ...]:
    """Compare the fleet of ``cases_file``, if it has one, with that in the lock: a result for each set of models."""
    lock = read_lock(path) if path.exists() else Lock({})
    if table is None:
        return () if lock.fleet is None else tuple(_removed([FLEET], path, cases_file))
    if lock.fleet is None or lock.fleet.models.keys() != {case.name for case in table.cases}:
        how = "is not in" if lock.fleet is None else "has other models than"
        why = f"the fleet in {show(cases_file)} {how} {show(path)}: run 'fitter lock'"
        return (CaseResult(FLEET, None, UsageError(why), "added"),)
    try:
        return tuple(CaseResult(each.name, each) for each in compare_sets(table, lock, llama_cpp))
    except FitterError as error:
        return (CaseResult(FLEET, None, error),)


def _added(names: Iterable[str], path: Path, cases_file: Path) -> Iterator[CaseResult]:
    where = f"the case is in {show(cases_file)}, but not in {show(path)}"
    for name in names:
        yield CaseResult(name, None, UsageError(f"{where}: run 'fitter lock --update {name}'"), "added")


def _removed(names: Iterable[str], path: Path, cases_file: Path) -> Iterator[CaseResult]:
    where = f"the case is in {show(path)}, but not in {show(cases_file)}"
    for name in names:
        yield CaseResult(name, None, UsageError(f"{where}: run 'fitter lock --prune'"), "removed")


def _unchanged_snapshots(path: Path, updated: Sequence[str]) -> dict[str, Snapshot]:
    """The cases in the lock that are not ``updated``."""
    return {name: snapshot for name, snapshot in read_lock(path).cases.items() if not _is_of(name, updated)}


def _of_tests(path: Path) -> dict[str, Snapshot]:
    """Read the cases of pytest in the same lock; none if it cannot be read, since it will be written anew."""
    try:
        return {name: snapshot for name, snapshot in read_lock(path).cases.items() if is_test(name)}
    except UsageError:
        return {}


def _result(measured: Measured, locked: Snapshot | None) -> CaseResult:
    name = measured.case.name
    if measured.snapshot is None:
        return CaseResult(name, None, measured.error)
    return CaseResult(name, compare(measured.case, locked, measured.snapshot))


def _check_is_another(path: Path, cases_file: Path) -> None:
    if path.exists() and cases_file.exists() and path.samefile(cases_file):
        raise UsageError(f"{show(path)} is the file with the cases: give the lock another name")


def _select_cases(cases: Sequence[Case], requested: Sequence[str], cases_file: Path) -> tuple[Case, ...]:
    for name in requested:
        if not any(_is_of(case.name, (name,)) for case in cases):
            names = [case.name for case in cases]
            raise UsageError(f"there is no case '{name}' in {show(cases_file)}: {suggest(name, names)}")
    return tuple(case for case in cases if _is_of(case.name, requested))


def _is_of(name: str, requested: Iterable[str]) -> bool:
    """Whether a case is one of the ``requested`` ones, or one match of a requested pattern."""
    return any(name == each or name.startswith(each + "/") for each in requested)
