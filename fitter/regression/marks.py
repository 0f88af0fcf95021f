"""The work of the pytest plugin once a test has a marker: from markers to failures and to the lock. Sizes in bytes."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from fitter import api
from fitter.errors import FitterError, UsageError
from fitter.llama.client import DEFAULT_TIMEOUT, Worker
from fitter.llama.processes import wire
from fitter.machine.gpu import parse_gpus
from fitter.model.files.source import show
from fitter.model.location import is_address, model_files, name_of
from fitter.output.tables import plan_table
from fitter.parameters.table import PARAMETERS, of_a_case
from fitter.parameters.values import check_timeout, parse_size, shown
from fitter.planning.plan.plan import Plan
from fitter.planning.request.request_limits import MOST_SPEED
from fitter.regression import MARKER, trust
from fitter.regression.cases import Budget, Case, is_name_of_build, make_cases, place_of_build, suggest
from fitter.regression.check_cases import CaseResult
from fitter.regression.check_report import causes
from fitter.regression.compare import compare
from fitter.regression.lockfile import LOCK_FILE, Lock, Snapshot, alone, read_lock, write_lock
from fitter.regression.measuring import snapshot_of

CHANGES = ("max_growth", "max_slowdown")
"""Keywords of a marker that is compared with the lock."""

_SPEEDS = {
    "min_tokens_per_second": "generation_tokens_per_second",
    "min_prompt_tokens_per_second": "prompt_tokens_per_second",
}

LIMITS = {
    "limit": "most bytes (or `20GiB`) on each device, or a mapping with some devices' own",
    "host_limit": "most bytes (or `20GiB`) of host memory",
    "min_ctx": "smallest context, in tokens",
    "min_tokens_per_second": "lowest estimated speed of generation, in tokens per second",
    "min_prompt_tokens_per_second": "lowest estimated speed of prompt processing, in tokens per second",
}
"""Keywords for a marker's own limits, with their meaning; with one of them the lock is not used."""


def keywords() -> tuple[str, ...]:
    """List the keywords of a marker."""
    settings = (name for name in of_a_case() if name != "gpu")
    return ("model", "gpu", "gpus", *settings, *LIMITS, *CHANGES)


@dataclass(frozen=True)
class Verdict:
    """The result of a test's markers.

    ``failures``: a sentence for each marker that fails. ``is_memory``: whether memory is the reason, and not an error.
    ``sections``: texts to show in the report. ``measured``: snapshots to store, as JSON, by the name of their case.
    """

    failures: tuple[str, ...] = ()
    is_memory: bool = False
    sections: tuple[tuple[str, str], ...] = ()
    measured: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class _Marked:
    """A marker as it was read: the case to measure, and whether to compare it with the lock (``is_stored``)."""

    case: Case
    is_stored: bool


class Checks:
    """Checks the markers of a session; every model is fitted once for each set of parameters.

    Raises ``UsageError`` for an option that is not valid.
    """

    def __init__(self, config: pytest.Config) -> None:
        self.root = config.rootpath
        self._config = config
        self.is_update = bool(self._setting("fitter_update"))
        self.lock_path = self._path("fitter_lock") or self.root / LOCK_FILE
        self.model: Path | str | None = self._model()
        self._max_growth = self._growth()
        self._llama_cpp = self._build()
        self._plans: dict[Any, tuple[api.Plan, Snapshot] | FitterError] = {}
        self._lock: Lock | FitterError | None = None
        self._worker = Worker(timeout=self._timeout())
        config.add_cleanup(self._worker.close)

    def check(self, item: pytest.Item, name: str) -> Verdict:
        """Compare the markers of ``item``, a test called ``name``, with their limits or with the lock."""
        failures: list[str] = []
        sections: list[tuple[str, str]] = []
        measured: dict[str, str] = {}
        errors = stored = 0
        # In reading order: markers of the module, then of the class, then of the test from top to bottom.
        for mark in list(item.iter_markers(MARKER))[::-1]:
            try:
                marked = self._read(mark, getattr(item, "funcargs", {}).get("fitter_model", self.model))
                stored += marked.is_stored
                case = replace(marked.case, name=name if stored < 2 else f"{name}#{stored}")
                plan, snapshot = self._fit_case(case)
                sections.append((f"memory of {show(Path(name_of(case.model)))}", plan_table.plan_text(plan)))
                if failure := self._failure(case, plan, snapshot, marked.is_stored):
                    failures.append(failure)
                elif marked.is_stored and self.is_update:
                    measured[case.name] = json.dumps(wire.encode(snapshot))
            except FitterError as error:
                errors += 1
                failures.append(_sentence(error))
        return Verdict(tuple(failures), bool(failures) and not errors, tuple(sections), measured)

    def plan(self, item: pytest.Item, model: Any) -> api.Plan:
        """Return the plan of the marker that is closest to ``item``; ``model`` is used if the marker names none."""
        mark = item.get_closest_marker(MARKER)
        assert mark is not None
        try:
            return self._fit_case(self._read(mark, model).case)[0]
        except FitterError as error:
            message = _sentence(error)
        pytest.fail(message, pytrace=False)

    @property
    def lock_name(self) -> str:
        """The path of the lock, for messages."""
        path = self.lock_path
        return show(path.relative_to(self.root) if path.is_relative_to(self.root) else path)

    def lock(self) -> Lock:
        """Return the lock; an empty one if there is no file. Raises ``UsageError``."""
        if self._lock is None:
            try:
                self._lock = read_lock(self.lock_path) if os.path.lexists(self.lock_path) else Lock({})
            except FitterError as error:
                self._lock = UsageError(f"{error}; if only tests use it, delete it and run pytest --fitter-update")
        if isinstance(self._lock, FitterError):
            raise self._lock
        return self._lock

    # --- options

    def _setting(self, name: str) -> Any:
        value = self._config.getoption(name)
        return self._config.getini(name) if value is None else value

    def _model(self) -> Path | str | None:
        model: str = self._setting("fitter_model")
        return model if model and is_address(model) else self._path("fitter_model")

    def _path(self, name: str) -> Path | None:
        """A path from the options: relative to where pytest was called, or to the directory of pytest's settings."""
        path: str = self._setting(name)
        return self._directory(name) / os.path.expanduser(path) if path else None

    def _directory(self, name: str) -> Path:
        """The directory that a path of this option is relative to."""
        config = self._config
        if config.getoption(name):
            return config.invocation_params.dir
        return config.inipath.parent if config.inipath else self.root

    def _timeout(self) -> float:
        text = self._setting("fitter_timeout") or str(DEFAULT_TIMEOUT)
        try:
            timeout = float(text)
            check_timeout(timeout)
        except (ValueError, UsageError):
            raise UsageError(f"fitter_timeout is {text!r}: give a number of seconds above 0") from None
        return timeout

    def _build(self) -> str | None:
        """The llama.cpp from the options; a path is relative as for ``_path``."""
        build: str = self._setting("fitter_llama_cpp")
        if not build:
            return None
        directory = self._directory("fitter_llama_cpp")
        is_named_here = bool(self._config.getoption("fitter_llama_cpp")) or is_name_of_build(build, directory)
        if not (is_named_here or trust.is_trusted()):
            raise UsageError(
                f"{trust.code('fitter_llama_cpp in the settings of pytest', build)}: if you trust whoever wrote them, "
                f"set {trust.VARIABLE}=1, or name it with --fitter-llama-cpp"
            )
        return place_of_build(build, directory)

    def _growth(self) -> str:
        growth: str = self._setting("fitter_max_growth") or "0%"
        try:
            self._case({"model": "any", "max_growth": growth})
        except UsageError as error:
            raise UsageError(f"fitter_{error}") from None
        return growth

    # --- markers

    def _read(self, mark: pytest.Mark, model: Any) -> _Marked:
        """Read ``mark``. Raises ``UsageError``."""
        if mark.args:
            raise UsageError(
                f'it takes keywords only, and {mark.args[0]!r} is not one: write gpu="rtx-4090", n_ctx=32768'
            )
        keys = {key: value for key, value in mark.kwargs.items() if value is not None}
        allowed = keywords()
        for key in keys:
            if key not in allowed:
                raise UsageError(f"unknown keyword '{key}': {suggest(key, allowed)}")
        if "gpus" in keys:
            if "gpu" in keys:
                raise UsageError("gpu and gpus are the same: give one of them")
            keys["gpu"] = keys.pop("gpus")
        model = keys.pop("model", model)
        if model is None:
            raise UsageError(
                "no model: give model=, a fixture called fitter_model, --fitter-model, or fitter_model in pytest's "
                "settings"
            )
        if not isinstance(model, str | os.PathLike):
            raise UsageError(f"model is {model!r}: give a path")
        limits = {key: keys.pop(key) for key in LIMITS if key in keys}
        changes = [key for key in CHANGES if key in keys]
        if limits and changes:
            raise UsageError(
                f"{changes[0]} is for a comparison with {LOCK_FILE}, and with {next(iter(limits))} there is none: "
                "leave one of them out"
            )
        if not limits:
            keys.setdefault("max_growth", self._max_growth)
        values = {key: list(value) if isinstance(value, tuple) else value for key, value in keys.items()}
        case = self._case({"model": os.fspath(model), **values})
        if self._llama_cpp and (case.llama_cpp is None or self._config.getoption("fitter_llama_cpp")):
            case = replace(case, llama_cpp=self._llama_cpp)
        return _Marked(replace(case, budget=_budget(limits, case)), is_stored=not limits)

    def _case(self, table: Mapping[str, Any]) -> Case:
        where = f"cases.{MARKER}"
        try:
            cases = make_cases(MARKER, table, self.root, is_trusted=True)
        except UsageError as error:
            raise UsageError(str(error).replace(f"{where}.", "").replace(where, "it")) from None
        if len(cases) > 1:
            raise UsageError(f"model {table['model']!r} matches {len(cases)} files: name one, or parametrize the test")
        return cases[0]

    # --- measurements

    def _fit_case(self, case: Case) -> tuple[api.Plan, Snapshot]:
        """The plan of ``case``, and its snapshot for the lock."""
        key = (case.model, _stamp(case.model), case.llama_cpp, tuple(sorted(case.settings.items())))
        if key not in self._plans:
            try:
                plan = api.fit(case.model, worker=self._worker, **case.keywords())
                self._plans[key] = plan, snapshot_of(plan, case, self._worker, self._worker.llama_cpp())
            except FitterError as error:
                self._plans[key] = error
        result = self._plans[key]
        if isinstance(result, FitterError):
            raise result
        return result

    def _failure(self, case: Case, plan: Plan, snapshot: Snapshot, is_stored: bool) -> str:
        """One sentence about the failure; empty if there is none. Raises ``UsageError`` if the lock lacks the case."""
        locked = None
        if is_stored and not self.is_update:
            locked = self.lock().cases.get(case.name)
            if locked is None and plan.fits:
                raise UsageError(
                    f"{self.lock_name} has no entry for {case.name}: run pytest --fitter-update, and commit it"
                )
        comparison, model = compare(case, locked, snapshot), show(Path(name_of(case.model)))
        if not plan.fits:
            failure = f"{model} does not fit: {'; '.join(problem.message for problem in plan.problems)}"
        elif comparison.failures:
            failure = f"{model}: {'; '.join(comparison.failures)}"
        else:
            return ""
        because = "; ".join(causes(CaseResult(case.name, comparison)))
        return f"{failure} ({because})" if because else failure


class Writer:
    """Stores the measurements of a session, all at once at its end. Raises ``pytest.UsageError``."""

    def __init__(self, checks: Checks) -> None:
        self._checks = checks
        self._measured: dict[str, str] = {}
        self._message = ""
        try:
            checks.lock()
        except FitterError as error:
            # A lock that cannot be read is not replaced.
            raise pytest.UsageError(str(error)) from None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Take the measurements of a test, here or in one of xdist's workers."""
        self._measured.update(getattr(report, "fitter_measured", {}))

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Store it."""
        if not self._measured:
            return
        cases = {name: wire.decode(Snapshot, json.loads(text)) for name, text in self._measured.items()}
        path = self._checks.lock_path
        try:
            with alone(path):
                # Another process may have written it while the tests ran.
                before = read_lock(path) if os.path.lexists(path) else Lock({})
                write_lock(path, Lock({**before.cases, **cases}, before.fleet))
        except FitterError as error:
            self._message = f"fitter: error: {error}"
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        else:
            count = "1 marker" if len(cases) == 1 else f"{len(cases)} markers"
            self._message = f"fitter: stored the memory of {count} in {self._checks.lock_name}"

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Report the stored measurements."""
        if self._message:
            terminalreporter.write_line(self._message)


def _sentence(error: FitterError) -> str:
    return f"{MARKER}: {' '.join(str(error).split())}"


def _stamp(model: Path | str) -> tuple[tuple[int, int], ...] | None:
    """Sizes and times of the model's files, which change if the model is replaced."""
    try:
        states = [file.stat() for file in model_files(model)]
    except (FitterError, OSError):
        return None
    return tuple((state.st_size, state.st_mtime_ns) for state in states)


def _budget(limits: Mapping[str, Any], case: Case) -> Budget:
    names = {device.name.lower(): device.name for device in parse_gpus(case.gpus)}
    memory = {}
    limit = limits.get("limit")
    if isinstance(limit, Mapping):
        for key, value in limit.items():
            if str(key).lower() not in names:
                there = ", ".join(names.values()) or "none"
                raise UsageError(f"limit names an unknown device {key!r}; the devices are: {there}")
            memory[str(key).lower()] = _size(value, f"limit of {key}")
    elif limit is not None:
        if not names:
            raise UsageError("limit applies to devices, and there are none: give gpu=, or host_limit= for the host")
        memory = dict.fromkeys(names, _size(limit, "limit"))
    if "host_limit" in limits:
        memory["host"] = _size(limits["host_limit"], "host_limit")
    n_ctx = limits.get("min_ctx")
    if n_ctx is not None:
        n_ctx = PARAMETERS["fit_ctx"].kind.read("min_ctx", n_ctx)
    for key in _SPEEDS:
        value = limits.get(key)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if value is not None and (not is_number or not 0 < value <= MOST_SPEED):
            raise UsageError(f"{key} is {shown(value)}: give a number above 0")
    speeds = {name: float(limits[key]) for key, name in _SPEEDS.items() if key in limits}
    return Budget(memory, n_ctx, **speeds)


def _size(value: Any, what: str) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    if not isinstance(value, str):
        raise UsageError(f'{what} is {shown(value)}: give a size such as "20GiB", or a number of bytes')
    try:
        return parse_size(value)
    except UsageError as error:
        raise UsageError(f"{what}: {error}") from None
