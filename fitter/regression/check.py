"""``fitter lock`` and ``fitter check``: cases, what was locked of them, and what they take now."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fitter.errors import FitterError, UsageError
from fitter.llama.client import DEFAULT_TIMEOUT
from fitter.model.source import show
from fitter.regression.cases import Case, is_test, read_cases, select, suggest
from fitter.regression.compare import Comparison, compare
from fitter.regression.lockfile import LOCK_FILE, Lock, Snapshot, check_can_be_written, read_lock, write_lock
from fitter.regression.measuring import Measured, OnDone, measure_cases


@dataclass(frozen=True)
class Outcome:
    """One case of a check: a comparison, or the error that there is none for.

    ``unmatched``: ``added``, of one that is not in the lock yet, or ``removed``, of one that is only there.
    """

    name: str
    comparison: Comparison | None
    error: FitterError | None = None
    unmatched: Literal["added", "removed"] | None = None

    @property
    def status(self) -> str:
        """``same``, ``changed`` (within the limits), ``failed``, ``added``, ``removed`` or ``error``."""
        if self.unmatched is not None:
            return self.unmatched
        return "error" if self.comparison is None else self.comparison.status


def lock_path(cases_file: Path, lock_file: Path | None) -> Path:
    """Where the lock is: beside the cases, unless it is said."""
    return cases_file.with_name(LOCK_FILE) if lock_file is None else lock_file


def lock(
    cases_file: Path,
    lock_file: Path | None = None,
    *,
    update: Sequence[str] = (),
    jobs: int | None = None,
    timeout: float = DEFAULT_TIMEOUT,
    on_done: OnDone | None = None,
) -> tuple[Measured, ...]:
    """Fit all cases, or those named by ``update``, and write the lock; returns what was measured.

    A name stands for all cases of its pattern as well. Nothing is written where a case cannot be measured: its
    ``error`` says why. Raises ``UsageError`` for cases and locks that make no sense, ``AnswerError`` where the
    lock cannot be written.
    """
    path = lock_path(cases_file, lock_file)
    _check_is_another(path, cases_file)
    # before minutes of measuring
    check_can_be_written(path)
    cases = read_cases(cases_file)
    kept = _of_tests(path)
    if update:
        locked = read_lock(path).cases
        cases = _named(cases, update, cases_file)
        kept = {name: snapshot for name, snapshot in locked.items() if not _is_of(name, update)}
    # Fitted, never taken over from the lock that is there: what it says would then be what it said.
    measured = measure_cases(cases, {}, jobs=jobs, timeout=timeout, on_done=on_done)
    found = {each.case.name: each.snapshot for each in measured if each.snapshot}
    if len(found) == len(measured):
        write_lock(path, Lock(kept | found))
    return measured


def prune(cases_file: Path, lock_file: Path | None = None) -> tuple[str, ...]:
    """Take the cases out of the lock that are no longer in ``cases_file``, measure nothing, and return their names.

    What pytest has stored stays. Raises ``UsageError`` for cases and locks that make no sense, ``AnswerError`` where
    the lock cannot be written.
    """
    path = lock_path(cases_file, lock_file)
    _check_is_another(path, cases_file)
    names = {case.name for case in read_cases(cases_file)}
    locked = read_lock(path).cases
    gone = tuple(name for name in sorted(locked) if name not in names and not is_test(name))
    if gone:
        write_lock(path, Lock({name: snapshot for name, snapshot in locked.items() if name not in gone}))
    return gone


def check(
    cases_file: Path,
    lock_file: Path | None = None,
    *,
    expression: str | None = None,
    jobs: int | None = None,
    timeout: float = DEFAULT_TIMEOUT,
    on_done: OnDone | None = None,
) -> tuple[Outcome, ...]:
    """Measure all cases, or those that ``expression`` selects, and compare them with the lock and their budgets.

    A case that the lock lacks, and without an ``expression`` one that is only in the lock, has an outcome of its own
    after those that were measured. Where there is no lock, all cases must have budgets. Raises ``UsageError`` for cases
    and locks that make no sense.
    """
    path = lock_path(cases_file, lock_file)
    cases = read_cases(cases_file)
    names = [case.name for case in cases]
    if expression is not None:
        cases = select(cases, expression)
        if not cases:
            raise UsageError(f"-k '{expression}' selects no case; the cases are {', '.join(names)}")
    locked: Mapping[str, Snapshot] = {}
    needs_lock = not all(case.budget for case in cases)
    if path.exists() or needs_lock:
        locked = {name: snapshot for name, snapshot in read_lock(path).cases.items() if not is_test(name)}
    unmatched: tuple[Outcome, ...] = ()
    if locked or needs_lock:
        removed = sorted(locked.keys() - set(names)) if expression is None else []
        added = [case.name for case in cases if case.name not in locked]
        cases = tuple(case for case in cases if case.name in locked)
        unmatched = (*_added(added, path, cases_file), *_removed(removed, path, cases_file))
    measured = measure_cases(cases, locked, jobs=jobs, timeout=timeout, on_done=on_done) if cases else ()
    return (*(_outcome(each, locked.get(each.case.name)) for each in measured), *unmatched)


def _added(names: Iterable[str], path: Path, cases_file: Path) -> Iterator[Outcome]:
    where = f"the case is in {show(cases_file)}, but not in {show(path)}"
    for name in names:
        yield Outcome(name, None, UsageError(f"{where}: run 'fitter lock --update {name}'"), "added")


def _removed(names: Iterable[str], path: Path, cases_file: Path) -> Iterator[Outcome]:
    where = f"the case is in {show(path)}, but not in {show(cases_file)}"
    for name in names:
        yield Outcome(name, None, UsageError(f"{where}: run 'fitter lock --prune'"), "removed")


def _of_tests(path: Path) -> dict[str, Snapshot]:
    """What pytest has stored in the same lock; nothing where that cannot be read, since it is to be made anew."""
    try:
        return {name: snapshot for name, snapshot in read_lock(path).cases.items() if is_test(name)}
    except UsageError:
        return {}


def _outcome(measured: Measured, locked: Snapshot | None) -> Outcome:
    name = measured.case.name
    if measured.snapshot is None:
        return Outcome(name, None, measured.error)
    return Outcome(name, compare(measured.case, locked, measured.snapshot))


def _check_is_another(path: Path, cases_file: Path) -> None:
    if path.exists() and cases_file.exists() and path.samefile(cases_file):
        raise UsageError(f"{show(path)} is the file of the cases: give the lock another name")


def _named(cases: Sequence[Case], wanted: Sequence[str], cases_file: Path) -> tuple[Case, ...]:
    for name in wanted:
        if not any(_is_of(case.name, (name,)) for case in cases):
            names = [case.name for case in cases]
            raise UsageError(f"there is no case '{name}' in {show(cases_file)}: {suggest(name, names)}")
    return tuple(case for case in cases if _is_of(case.name, wanted))


def _is_of(name: str, wanted: Iterable[str]) -> bool:
    """Whether a case is one of ``wanted``, or of one of those patterns."""
    return any(name == each or name.startswith(each + "/") for each in wanted)
