"""Small changes to the code, one after another, that a unit test should notice: `make test-mutations`.

mutmut makes the changes and runs the tests; what it may change and which tests it runs is in pyproject.toml. Its own
commands are taken as they are (`run 'fitter.planning.packing.*'`, `results`, `show NAME`), and `table` counts what was
found in each file.
"""

from __future__ import annotations

import ast
import importlib.util
import itertools
import json
import os
import shutil
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, settings

MUTANTS = Path("mutants")

SECONDS = float(os.environ.get("MUTATION_SECONDS", "3"))
"""How long the tests of a mutant may take together: what survives runs all of them, and the slow ones notice least."""

# What pytest answered under a mutant, as mutmut stores it: everything else means that a test has noticed the change.
KINDS = ("types", "killed", "survived", "no test", "not run")
UNNOTICED = {0: "survived", 33: "no test", 37: "types", None: "not run"}


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


class Selected:
    """The plugin that keeps `tests` alone, the quickest first."""

    def __init__(self, tests: Iterable[str], seconds: Mapping[str, float]) -> None:
        self.tests, self.seconds = frozenset(tests), seconds

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        kept = [item for item in items if item.nodeid in self.tests]
        items[:] = sorted(kept, key=lambda item: self.seconds.get(item.nodeid, 0.0))


def quickest(tests: Iterable[str], seconds: Mapping[str, float]) -> list[str]:
    """As many of ``tests`` as take ``SECONDS``, the quickest first, and one at least."""
    ordered = sorted(tests, key=lambda name: (seconds.get(name, 0.0), name))
    reached = list(itertools.accumulate(seconds.get(name, 0.0) for name in ordered))
    return [name for name, until in zip(ordered, reached, strict=True) if until <= SECONDS] or ordered[:1]


class Unshrunk:
    """The plugin that has tests of properties fail at the first example: the smallest one takes minutes to find."""

    def pytest_collection(self) -> None:
        phases = (Phase.explicit, Phase.generate)
        settings.register_profile("mutations", settings.get_profile("fitter"), phases=phases, derandomize=True)
        settings.load_profile("mutations")


def seen_by_types() -> dict[str, Any]:
    """mutmut's own function of this purpose in a hundredth of its time: the mutants that the type checker finds."""
    from mutmut.configuration import config
    from mutmut.mutation.file_mutation import FailedTypeCheckMutant, MutatedMethodLocation, group_by_path
    from mutmut.type_checking import run_type_checker
    from mutmut.utils.file_utils import change_cwd
    from mutmut.utils.format_utils import get_mutant_name

    with change_cwd(MUTANTS):
        errors = group_by_path(run_type_checker(config().type_check_command))
    found = {}
    for path, those in errors.items():
        at = {
            line: MutatedMethodLocation(path, node.name, node.lineno, node.end_lineno or node.lineno)
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.FunctionDef) and "__mutmut_" in node.name
            for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
        }
        for error in those:
            place = at[error.line_number]
            name = get_mutant_name(path.relative_to(MUTANTS.absolute()), place.function_name)
            found[name] = FailedTypeCheckMutant(place, name, error)
    return found


def select_by_plugin() -> None:
    """Have mutmut name files to pytest, not each test: there are thousands, and what is in brackets may be anything."""
    from mutmut.runners.harness import PytestRunner
    from mutmut.state import state
    from mutmut.utils.file_utils import change_cwd

    execute = PytestRunner.execute_pytest

    def execute_unshrunk(self: PytestRunner, params: list[str], plugins: Iterable[object] = ()) -> int:
        return execute(self, params, plugins=[*plugins, Unshrunk()])

    def run_tests(self: PytestRunner, *, mutant_name: str | None, tests: Iterable[str]) -> int:
        names = quickest(tests, state().duration_by_test)
        files = sorted({name.partition("::")[0] for name in names})
        plugins = [Selected(names, state().duration_by_test)] if names else []
        with change_cwd(MUTANTS):
            status: int = self.execute_pytest([*self._pytest_args_regular_run(files)], plugins=plugins)
        return status

    PytestRunner.run_tests, PytestRunner.execute_pytest = run_tests, execute_unshrunk


def forget_unnoticed() -> None:
    """Have mutants that no test noticed tried again: there may be a test by now, and mutmut keeps what it found."""
    for path in MUTANTS.rglob("*.meta"):
        stored = json.loads(path.read_text())
        found = stored["exit_code_by_key"]
        stored["exit_code_by_key"] = {
            name: None if UNNOTICED.get(status) in ("survived", "no test") else status for name, status in found.items()
        }
        path.write_text(json.dumps(stored, indent=4))


def table() -> str:
    """A line for each file: how many mutants there are, and how many of them no test notices."""
    rows = [f"| file | mutants | {' | '.join(KINDS)} |", f"| --- | {' | '.join(['--:'] * (len(KINDS) + 1))} |"]
    total: Counter[str] = Counter()
    for path in sorted((MUTANTS / "fitter").rglob("*.meta")):
        found = json.loads(path.read_text())["exit_code_by_key"]
        if not found:
            continue
        counts = Counter(UNNOTICED.get(status, "killed") for status in found.values())
        total += counts
        rows.append(_row(str(path.relative_to(MUTANTS).with_suffix("")), counts))
    return "\n".join([*rows, _row("all", total)])


def _row(name: str, counts: Counter[str]) -> str:
    numbers = (counts.total(), *(counts[kind] for kind in KINDS))
    return f"| {name} | {' | '.join(map(str, numbers))} |"


def main() -> None:
    if sys.argv[1:] == ["table"]:
        print(table())
        return
    if sys.argv[1:2] == ["run"]:
        forget_unnoticed()
    use_the_copy()
    # The type checker is the one beside this Python, too.
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    # Not as a program of its own: it would be imported a second time, by what it writes.
    import mutmut.__main__ as program

    program.filter_mutants_with_type_checker = seen_by_types
    select_by_plugin()
    program.cli()


if __name__ == "__main__":
    main()
