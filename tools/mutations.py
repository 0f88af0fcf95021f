"""Small changes to the code, one after another, that a unit test should notice: `make test-mutations`.

mutmut makes the changes; what it may change and which tests there are is in pyproject.toml. The tests are collected
once, and run in a new process for each change. `run 'fitter.planning.placing.packing.*'` tries what was not tried and
what no test has noticed yet, `table` counts what was found in each file; mutmut's own commands are taken as they are
(`results`, `show NAME`).
"""

from __future__ import annotations

import argparse
import ast
import fnmatch
import gc
import hashlib
import importlib.util
import json
import math
import os
import resource
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType, FunctionType
from typing import Any

import pytest
from hypothesis import Phase, settings

MUTANTS = Path("mutants").absolute()

SECONDS = float(os.environ.get("MUTATION_SECONDS", "30"))
"""How long the tests of a mutant may compute: what survives runs all of them, and the slow ones notice least."""

# What came of a mutant, as mutmut stores it: everything else means that a test has noticed the change.
SURVIVED, KILLED, NO_TEST, TYPES = 0, 1, 33, 37
KINDS = ("types", "killed", "survived", "no test", "not run")
UNNOTICED = {SURVIVED: "survived", NO_TEST: "no test", TYPES: "types", None: "not run"}


def use_the_copy() -> None:
    """Have `fitter` imported from mutmut's copy: an editable install finds its modules in the tree itself."""
    specification = importlib.util.find_spec("fitter.llama")
    folders = (specification.submodule_search_locations if specification else None) or []
    into = MUTANTS / "fitter" / "llama"
    into.mkdir(parents=True, exist_ok=True)
    for folder in folders:
        for built in (*Path(folder).glob("*.so"), *Path(folder).glob("_declarations.py")):
            shutil.copy2(built, into)
    sys.meta_path[:] = [finder for finder in sys.meta_path if not type(finder).__name__.startswith("ScikitBuild")]
    for name in [name for name in sys.modules if name.split(".")[0] == "fitter"]:
        del sys.modules[name]


def make_mutants(children: int) -> None:
    """Have mutmut write its copy, with the changes in it; what came of functions that are as they were is kept."""
    import mutmut.__main__ as program
    from mutmut.mutation.trampoline import set_mutant_under_test
    from mutmut.utils.file_utils import copy_also_copy_files, copy_src_dir, setup_source_paths

    set_mutant_under_test("mutant_generation")
    _progress("Making mutants")
    with redirect_stdout(None):
        copy_src_dir()
        copy_also_copy_files()
        setup_source_paths()
        program.create_mutants(children)
    set_mutant_under_test("")


def seen_by_types() -> frozenset[str]:
    """The mutants that the type checker finds: mutmut's own function of this purpose in a hundredth of its time."""
    from mutmut.configuration import config
    from mutmut.mutation.file_mutation import MutatedMethodLocation, group_by_path
    from mutmut.type_checking import run_type_checker
    from mutmut.utils.file_utils import change_cwd
    from mutmut.utils.format_utils import get_mutant_name

    _progress("Checking the types of the mutants")
    with change_cwd(MUTANTS):
        errors = group_by_path(run_type_checker(config().type_check_command))
    found = set()
    for path, those in errors.items():
        at = {
            line: MutatedMethodLocation(path, node.name, node.lineno, node.end_lineno or node.lineno)
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.FunctionDef) and "__mutmut_" in node.name
            for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
        }
        within = path.relative_to(MUTANTS)
        found |= {get_mutant_name(within, at[error.line_number].function_name) for error in those}
    return frozenset(found)


class Changes:
    """The functions that may be changed. They are as they were until one is: mutmut has each call look which is."""

    def __init__(self) -> None:
        from mutmut.mutation import trampoline

        self.functions: list[tuple[FunctionType, Mapping[str, Any]]] = []
        trampoline.wrap_in_trampoline = self._keep  # type: ignore[assignment]

    def _keep(self, mutants: Mapping[str, Any], is_classmethod: bool = False) -> Callable[[FunctionType], FunctionType]:
        def as_it_is(function: FunctionType) -> FunctionType:
            self.functions.append((function, mutants))
            return function

        return as_it_is

    def named(self) -> dict[str, FunctionType]:
        """What the functions are called without the number of a mutant."""
        return {
            f"{function.__module__}.{mutants['_mutmut_orig'].__name__.rpartition('__mutmut_')[0]}": function
            for function, mutants in self.functions
        }

    def make(self, name: str) -> None:
        """Change a function into the mutant of this name."""
        module, _, mutant = name.rpartition(".")
        ((function, changed),) = (
            (function, mutants[mutant])
            for function, mutants in self.functions
            if function.__module__ == module and mutant in mutants
        )
        # that of a class method is bound
        changed = getattr(changed, "__func__", changed)
        function.__code__, function.__defaults__ = changed.__code__, changed.__defaults__
        function.__kwdefaults__ = changed.__kwdefaults__


_FAILED = MUTANTS / "failed.txt"
"""Tests that fail with nothing changed, such as those that read what the copy does not have."""


class Results:
    """What came of each mutant, in the file that mutmut has beside each mutated one."""

    def __init__(self) -> None:
        self.stored = {path: json.loads(path.read_text()) for path in sorted((MUTANTS / "fitter").rglob("*.meta"))}
        self.place = {name: path for path in self.stored for name in self.of(path)}

    def of(self, path: Path) -> dict[str, int | None]:
        found: dict[str, int | None] = self.stored[path]["exit_code_by_key"]
        return found

    def unnoticed(self, patterns: Sequence[str]) -> dict[str, int | None]:
        """The mutants of ``patterns`` (all, if there are none) that no test has noticed so far, in that order."""
        left = {
            name: status
            for path in self.stored
            for name, status in sorted(self.of(path).items())
            if UNNOTICED.get(status) in ("survived", "no test", "not run")
        }
        return {
            name: status
            for pattern in patterns or ["*"]
            for name, status in left.items()
            if fnmatch.fnmatchcase(name, pattern)
        }

    def add(self, found: Mapping[str, int]) -> None:
        for name, status in found.items():
            self.of(self.place[name])[name] = status
        for path in {self.place[name] for name in found}:
            path.write_text(json.dumps(self.stored[path], indent=4))


@dataclass(frozen=True)
class Reached:
    """What a test calls of what may be mutated, and the seconds that it computes."""

    seconds: float
    functions: frozenset[str]


class Session:
    """The plugin that runs what pytest has collected once for each mutant, each time in a process of its own."""

    def __init__(self, names: Iterable[str], results: Results, changes: Changes, children: int) -> None:
        self.names, self.results, self.changes, self.children = list(names), results, changes, children
        self.running: dict[int, str] = {}

    def pytest_collection(self) -> None:
        # A property fails at the first example: to find the smallest one takes minutes.
        phases = (Phase.explicit, Phase.generate)
        settings.register_profile("mutations", settings.get_profile("fitter"), phases=phases, derandomize=True)
        settings.load_profile("mutations")

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        items = {item.nodeid: item for item in session.items}
        gc.freeze()
        tests = reached(items, self.changes)
        by_function: defaultdict[str, list[str]] = defaultdict(list)
        for name in sorted(tests, key=lambda name: tests[name].seconds):
            for function in tests[name].functions:
                by_function[function].append(name)
        for number, mutant in enumerate(self.names):
            _progress(f"{number + 1} of {len(self.names)}: {mutant}")
            own = f"_{mutant.split('.')[-2]}.py"
            chosen = sorted(by_function[mutant.rpartition("__mutmut_")[0]], key=lambda name: own not in name)
            if not chosen:
                self.results.add({mutant: NO_TEST})
                continue
            while len(self.running) >= self.children:
                self._one_ended()
            seconds = sum(tests[name].seconds for name in chosen)
            process = _forked(partial(self._tried, mutant, [items[name] for name in chosen], seconds))
            self.running[process] = mutant
        while self.running:
            self._one_ended()
        _progress("All tests with nothing changed, once more")
        if _status(_forked(partial(_all_pass, list(items.values())))) != SURVIVED:
            sys.exit("a test fails with nothing changed by now: what was found may be wrong, try those mutants again")
        return True

    def _one_ended(self) -> None:
        process, status = os.wait()
        self.results.add({self.running.pop(process): os.waitstatus_to_exitcode(status)})

    def _tried(self, mutant: str, items: Sequence[pytest.Item], seconds: float) -> int:
        """What comes of ``mutant``, by as many of ``items`` as ``SECONDS`` are enough for; all take ``seconds``."""
        self.changes.make(mutant)
        most = math.ceil(2 * min(seconds, SECONDS)) + 5
        resource.setrlimit(resource.RLIMIT_CPU, (most, most + 1))
        return _all_pass(items, SECONDS)


def reached(items: Mapping[str, pytest.Item], changes: Changes) -> dict[str, Reached]:
    """What each of ``items`` calls: kept for each file of tests, until that or any file that is no test changes."""
    kept = MUTANTS / "reached.json"
    stored = json.loads(kept.read_text()) if kept.exists() else {}
    tests = {item.path for item in items.values()}
    common = [path for path in sorted(MUTANTS.rglob("*.py")) if path not in tests and path.name != Path(__file__).name]
    digests = {path.name: _digest([*common, path]) for path in sorted(tests)}
    known = {name: stored[name] for name in digests if stored.get(name, {}).get("digest") == digests[name]}
    missing = [item for item in items.values() if item.path.name not in known]
    if missing:
        _progress(f"What {len(missing)} tests call")
        _FAILED.unlink(missing_ok=True)
        if _status(_forked(partial(_write_reached, missing, changes, digests, kept))) != SURVIVED:
            sys.exit(f"a test fails with nothing changed: {', '.join(_FAILED.read_text().split())}")
        known |= json.loads(kept.read_text())
        kept.write_text(json.dumps(known))
    return {
        name: Reached(seconds, frozenset(functions))
        for those in known.values()
        for name, (seconds, functions) in those["tests"].items()
        if name in items
    }


def _digest(paths: Iterable[Path]) -> str:
    content = hashlib.sha256()
    for path in paths:
        content.update(path.read_bytes())
    return content.hexdigest()


def _write_reached(items: Sequence[pytest.Item], changes: Changes, digests: Mapping[str, str], kept: Path) -> int:
    """Run ``items`` with nothing changed, and write to ``kept`` what each of them calls."""
    found: dict[str, dict[str, Any]] = {
        name: {"digest": digests[name], "tests": {}} for name in {item.path.name for item in items}
    }
    name_of = {id(function.__code__): name for name, function in changes.named().items()}
    called: set[str] = set()

    def note(frame: FrameType, event: str, argument: object) -> None:
        if id(frame.f_code) in name_of:
            called.add(name_of[id(frame.f_code)])

    # What one test has had computed would hide the calls of the next.
    modules = [module for name, module in list(sys.modules.items()) if name.startswith("fitter.")]
    caches = [each for module in modules for each in vars(module).values() if hasattr(each, "cache_clear")]
    threading.settrace(note)
    for item in items:
        for cache in caches:
            cache.cache_clear()
        called.clear()
        begun = time.process_time()
        sys.settrace(note)
        failed = item.session.testsfailed
        _passes(item, None)
        sys.settrace(None)
        if item.session.testsfailed > failed:
            with _FAILED.open("a") as names:
                names.write(f"{item.nodeid}\n")
        found[item.path.name]["tests"][item.nodeid] = (time.process_time() - begun, sorted(called))
    if _FAILED.exists():
        return KILLED
    kept.write_text(json.dumps(found))
    return SURVIVED


def _all_pass(items: Sequence[pytest.Item], seconds: float = math.inf) -> int:
    """Run ``items`` until one fails, or until they have computed for so many seconds."""
    begun = time.process_time()
    for item, following in zip(items, (*items[1:], None), strict=True):
        if not _passes(item, following):
            return KILLED
        if time.process_time() - begun > seconds:
            break
    return SURVIVED


def _passes(item: pytest.Item, following: pytest.Item | None) -> bool:
    item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
    return not item.session.testsfailed


def _forked(answer: Callable[[], int]) -> int:
    """The id of a new process that prints nothing, and whose exit status is what ``answer`` returns."""
    process = os.fork()
    if process:
        return process
    status = KILLED
    try:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
        # Processes are not to look for numbers of folders that no other has.
        tempfile.tempdir = tempfile.mkdtemp()
        status = answer()
    finally:
        os._exit(status)


def _status(process: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def _progress(line: str) -> None:
    print(f"\r\033[K{line}" if sys.stderr.isatty() else line, file=sys.stderr, end="" if sys.stderr.isatty() else "\n")


def run(patterns: Sequence[str], children: int) -> None:
    """Try the mutants of ``patterns`` that no test has noticed so far; the type checker looks at what is new first."""
    from mutmut.configuration import config
    from mutmut.utils.file_utils import change_cwd

    changes = Changes()
    make_mutants(children)
    results = Results()
    if None in results.unnoticed(patterns).values():
        results.add(dict.fromkeys(seen_by_types() & results.place.keys(), TYPES))
    session = Session(results.unnoticed(patterns), results, changes, children)
    if not session.names:
        sys.exit("no mutant of that name is left that no test has noticed")
    # The files of a test that has passed are gone at once, and what waits forever is a change that was noticed.
    options = (
        "-qs",
        "--rootdir=.",
        "-otmp_path_retention_policy=failed",
        "-otimeout=60",
        *config().pytest_add_cli_args,
    )
    with change_cwd(MUTANTS), tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        tempfile.tempdir = folder
        pytest.main([*options, *config().pytest_add_cli_args_test_selection], plugins=[session])
        tempfile.tempdir = None


def table() -> str:
    """A line for each file: how many mutants there are, and how many of them no test notices."""
    rows = [f"| file | mutants | {' | '.join(KINDS)} |", f"| --- | {' | '.join(['--:'] * (len(KINDS) + 1))} |"]
    total: Counter[str] = Counter()
    results = Results()
    for path in results.stored:
        counts = Counter(UNNOTICED.get(status, "killed") for status in results.of(path).values())
        if counts:
            rows.append(_row(str(path.relative_to(MUTANTS).with_suffix("")), counts))
        total += counts
    return "\n".join([*rows, _row("all", total)])


def _row(name: str, counts: Counter[str]) -> str:
    numbers = (counts.total(), *(counts[kind] for kind in KINDS))
    return f"| {name} | {' | '.join(map(str, numbers))} |"


def main() -> None:
    if sys.argv[1:] == ["table"]:
        print(table())
        return
    use_the_copy()
    # The type checker is the one beside this Python, too.
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    if sys.argv[1:2] == ["run"]:
        parser = argparse.ArgumentParser(prog="tools.mutations run")
        parser.add_argument("patterns", nargs="*", metavar="PATTERN")
        parser.add_argument("--max-children", type=int, default=os.cpu_count() or 1, metavar="N")
        asked = parser.parse_args(sys.argv[2:])
        run(asked.patterns, asked.max_children)
        return
    # Not as a program of its own: it would be imported a second time, by what it writes.
    import mutmut.__main__ as program

    program.cli()


if __name__ == "__main__":
    main()
