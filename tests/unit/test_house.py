"""The house of the design, read from the imports: no arrow runs up, none goes in a circle, benchmarks import no tests.

Imports inside functions and under ``TYPE_CHECKING`` count: they are arrows that a reader follows, too.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterable, Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from fitter.parameters.targets import TARGETS
from tests.support.cases import cases, named_cases

ROOT = Path(__file__).resolve().parents[2]

ROOMS = (
    "fitter.__main__",
    "fitter.cli",
    "fitter.web",
    "fitter.regression",
    "fitter",
    "fitter.api.explore",
    "fitter.api",
    "fitter.early_start",
    "fitter.output.pages",
    "fitter.output.pictures",
    "fitter.output.formats",
    "fitter.output.tables",
    "fitter.output",
    "fitter.planning.tables",
    "fitter.planning.fleet",
    "fitter.planning.checked",
    "fitter.planning.search",
    "fitter.planning.plan",
    "fitter.planning.pricing",
    "fitter.planning.request",
    "fitter.planning.speed",
    "fitter.planning.placing",
    "fitter.programs",
    "fitter.model",
    "fitter.model.shapes",
    "fitter.model.files",
    "fitter.machine",
    "fitter.llama.this_process",
    "fitter.llama.worker.remembered_loads",
    "fitter.llama.client",
    "fitter.llama.worker",
    "fitter.llama.load",
    "fitter.llama.header",
    "fitter.llama.build",
    "fitter.llama.types",
    "fitter.llama.processes",
    "fitter.llama",
    "fitter.parameters",
    "fitter.storage",
    "fitter.errors",
    "fitter.text",
    "fitter.installation",
    "fitter.version",
    "fitter.system",
)
"""From the top down. ``fitter`` itself is the front door: what ``import fitter`` offers, and it only points down."""

WRITERS = {f"fitter.programs.{name}{'.text' if each.programs else ''}" for name, each in TARGETS.items()}
"""Modules that write the formats of targets."""

RESULTS = (
    "fitter.planning.fleet.fleet",
    "fitter.planning.plan.plan",
    "fitter.planning.tables.exploration",
    "fitter.planning.tables.file_rows",
)
"""Modules with a result that a user writes, loads or verifies by its methods."""

ALLOWED: dict[tuple[str, str], str] = {
    (module, "fitter.api.result_methods"): "methods of a result, which planning itself never calls"
    for module in RESULTS
}
"""Arrows (from, to) that run up or close a circle for now, each with its reason."""

NATIVE = frozenset(
    {"llama_cpp", "cffi", "_cffi_backend", "fitter.llama._declarations", "fitter.llama.this_process.plan_load"}
)
"""What only ``fitter/llama`` may import to run, as everything that loads libllama; a type may be named anywhere."""


@functools.cache
def parsed(text: str) -> ast.Module:
    """``text``, which several tests read."""
    return ast.parse(text)


@functools.cache
def sources(*folders: str) -> dict[str, str]:
    """The text of every module below ``folders``, by its name."""
    found = {}
    for path in (path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path.read_text(encoding="utf-8")
    return found


def imports(module: str, text: str, *, types: bool = True) -> Iterator[str]:
    """Every name that ``module`` imports, wherever it does; without ``types``, none that is for types alone."""
    waiting: list[ast.AST] = [parsed(text)]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{module} has a relative import: write the full name"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif not types and isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            waiting += node.orelse
        else:
            waiting += ast.iter_child_nodes(node)


def arrows(modules: Mapping[str, str]) -> dict[str, set[str]]:
    """The modules of ``modules`` that each of them imports."""
    found: dict[str, set[str]] = {}
    for module, text in modules.items():
        names = ((name, name.rpartition(".")[0]) for name in imports(module, text))
        targets = (next((name for name in pair if name in modules), None) for pair in names)
        found[module] = {target for target in targets if target is not None and target != module}
    return found


def room(module: str) -> int:
    """The number of the room that ``module`` is in, counted from the top."""
    # a target's rules are what planning reads, and its formats are made of a plan
    if any(module == name or module.startswith(name + ".") for name in WRITERS):
        module = "fitter.output.formats"
    homes = [name for name in ROOMS if module == name or (name != "fitter" and module.startswith(name + "."))]
    assert homes, f"{module} is in no room: give it a place in ROOMS, and in CONTRIBUTING.md"
    return ROOMS.index(max(homes, key=len))


def upward(found: Mapping[str, set[str]]) -> set[tuple[str, str]]:
    """The arrows to a room above."""
    return {(module, target) for module in found for target in found[module] if room(target) < room(module)}


def circle(found: Mapping[str, set[str]]) -> list[str]:
    """A circle of imports, empty if there is none."""
    try:
        tuple(TopologicalSorter(found).static_order())
    except CycleError as error:
        return list(error.args[1])
    return []


def test_no_import_runs_up() -> None:
    assert upward(arrows(sources("fitter"))) - set(ALLOWED) == set()


def answers() -> dict[str, tuple[Path, str]]:
    """Each "where is ..." of CONTRIBUTING.md: a file, and what it declares."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").partition("\n## Where is")[2].partition("\n## ")[0]
    return {row[1]: (ROOT / row[2], row[3]) for row in re.finditer(r"\| (.+) \| `(.+)` \| `(.+)` \|", text)}


def test_a_newcomer_has_ten_answers() -> None:
    assert len(answers()) >= 10


@pytest.mark.parametrize(("file", "name"), answers().values(), ids=answers())
def test_an_answer_is_where_a_newcomer_is_sent(file: Path, name: str) -> None:
    assert re.search(rf"(?m)^(def |class |\[)?{re.escape(name)}\b", file.read_text(encoding="utf-8"))


SEAMS = ("fitter.system", "fitter.llama.processes.supervisor", "fitter.llama.build.linking")
"""Packages with a module for each kind of system."""

OF_ONE_SYSTEM = frozenset({"fcntl", "grp", "msvcrt", "pwd", "resource", "select", "termios", "winreg", "_winapi"})
"""Modules that only some systems have, or have a part of."""

ASKS = re.compile(r"\b(sys\.platform|os\.name|platform\.system)\b")

STILL_ASKING = frozenset({"fitter.llama.build.virtual_backends", "fitter.llama.load.canary"})
"""Modules that ask for Linux, without which they leave something out."""


def test_what_differs_between_systems_is_in_seams() -> None:
    found = {
        module
        for module, text in sources("fitter").items()
        if not module.startswith(SEAMS)
        and (
            OF_ONE_SYSTEM & set(imports(module, text))
            or re.search(r"\b(sys\.platform|os\.name|platform\.system)\b", text)
        )
    }
    assert found == STILL_ASKING


def offered(body: Iterable[ast.stmt]) -> set[str]:
    """What a module of a seam declares for all to use."""
    names: set[str] = set()
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {each.id for each in node.targets if isinstance(each, ast.Name)}
        elif isinstance(node, ast.If):
            names |= offered((*node.body, *node.orelse))
    return {name for name in names if not name.startswith("_")}


@cases(("fitter.system", {"Job", "NEW_PROCESS"}), ("fitter.llama.build.linking", {"read_cache"}))
def test_systems_offer_the_same_names(seam: str, of_one: set[str]) -> None:
    posix, windows = (offered(parsed(sources("fitter")[f"{seam}.{name}"]).body) for name in ("posix", "windows"))
    assert posix ^ windows == of_one


def test_few_files_stand_at_the_root() -> None:
    """A newcomer finds a room by its name; what is not in a room is what every room needs, or a start."""
    assert len(list((ROOT / "fitter").glob("*.py"))) <= 10
    assert len(list((ROOT / "fitter/api").glob("*.py"))) <= 20
    assert list((ROOT / "tools").glob("*.py")) == []


def test_no_imports_in_a_circle() -> None:
    found = arrows(sources("fitter"))
    assert circle({module: {to for to in found[module] if (module, to) not in ALLOWED} for module in found}) == []


def test_what_is_allowed_is_still_there() -> None:
    found = arrows(sources("fitter"))
    assert [arrow for arrow in ALLOWED if arrow[1] not in found.get(arrow[0], ())] == []


BY_NAME = {
    "fitter": "what it offers, imported on use",
    "fitter.api": "the same",
    "fitter.api.fits.fit_model": "a module that is read beside the start of a worker",
    "fitter.cli.group": "commands, imported on use",
    "fitter.cli.options": "a module that is read while a worker plans",
    "fitter.llama.build.library": "declarations that the build writes",
    "fitter.output.formats": "writers of targets",
    "fitter.programs": "rules of targets",
}
"""Modules that import others by a text, in which nobody sees an arrow, each with its reason."""


def test_few_modules_are_imported_by_a_text() -> None:
    found = {module for module, text in sources("fitter").items() if re.search(r"\b(import_module|__import__)\b", text)}
    assert found == set(BY_NAME)


def test_only_one_room_runs_native_code() -> None:
    found = {
        module
        for module, text in sources("fitter").items()
        if not module.startswith("fitter.llama.") and NATIVE & roots(module, text)
    }
    assert found == {"fitter.api.real_runs.load_plan"}, (
        "loading asks fitter.llama.this_process.plan_load, once it is sure that libllama is there"
    )


def roots(module: str, text: str) -> set[str]:
    """What ``module`` imports to run, with everything that is above it: ``a.b.c`` is ``a``, ``a.b`` and ``a.b.c``."""
    parts = [name.split(".") for name in imports(module, text, types=False)]
    return {".".join(words[: i + 1]) for words in parts for i in range(len(words))}


@cases(
    ("fitter", ("tools", "benchmarks", "tests")),
    ("tools", ("benchmarks", "tests")),
    ("benchmarks", ("tests",)),
    ("examples", ("tools", "benchmarks", "tests")),
)
def test_folders_import_downward(folder: str, others: tuple[str, ...]) -> None:
    found = {
        (module, name)
        for module, text in sources(folder).items()
        for name in imports(module, text)
        if name.split(".")[0] in others
    }
    assert found == set()


OTHERS_PRIVATES = frozenset({"_ctx", "_seed", "_fields_", "_exit", "_lib", "_name", "_repr_html_"})
"""Of llama-cpp-python's, ctypes', IPython's and ``os``, which the tests use as their users do."""

NOT_YET: dict[tuple[str, str], str] = {}
"""Private names of fitter's (module, name) that a test may touch for now, each with its reason."""


def privates(text: str) -> Iterator[str]:
    """Names with an underscore that ``text`` takes from elsewhere, in the scripts that it starts as well."""
    for node in ast.walk(parsed(text)):
        if isinstance(node, ast.Attribute) and not (isinstance(node.value, ast.Name) and node.value.id == "self"):
            names = [node.attr]
        elif isinstance(node, ast.ImportFrom):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".setattr"):
            words = [word.value for word in node.args if isinstance(word, ast.Constant)]
            names = [word.rpartition(".")[2] for word in words if isinstance(word, str)]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names = re.findall(r"(?<!self)\.(_[a-z]\w*)", node.value)
        else:
            continue
        yield from (name for name in names if re.match(r"_[A-Za-z]", name) and name not in OTHERS_PRIVATES)


def test_nobody_reaches_into_privates() -> None:
    found = {
        (module, name)
        for module, text in sources("tests", "tools", "benchmarks", "examples").items()
        for name in privates(text)
        if module != __name__
    }
    assert found == set(NOT_YET)


@cases(
    "worker._child.pid",
    "from fitter.planning.speed.cost import _data",
    'patch.setattr(process, "_BOOT", "")',
    'patch.setattr("fitter.llama.client._late", None)',
    'run("from fitter.llama.worker import process; process._early")',
)
def test_a_reach_into_privates_is_found(text: str) -> None:
    assert len(set(privates(text))) == 1
    assert not list(privates("self._own; llm._ctx; a.__class__"))


def unsaid(text: str) -> Iterator[int]:
    """Lines of ``pytest.raises`` that any error of the class satisfies, whatever it says."""
    for node in ast.walk(parsed(text)):
        for item in node.items if isinstance(node, ast.With) else ():
            call = item.context_expr
            if not isinstance(call, ast.Call) or ast.unparse(call.func) != "pytest.raises" or item.optional_vars:
                continue
            name = ast.unparse(call.args[0])
            if name.endswith("Error") and name not in NOTHING_TO_SAY and "match" not in {k.arg for k in call.keywords}:
                yield call.lineno


NOTHING_TO_SAY = ("BlockingIOError", "ProcessLookupError", "KeyError")
"""A lock that others have; a process that is gone; and what a test itself raises."""


def test_an_expected_error_is_known_by_what_it_says() -> None:
    found = {module: list(unsaid(text)) for module, text in sources("tests").items()}
    assert {module: lines for module, lines in found.items() if lines} == {}


def test_an_error_of_any_words_is_found() -> None:
    assert list(unsaid("with pytest.raises(UsageError):\n    ask()")) == [1]
    assert list(unsaid("with a, pytest.raises(LlamaCppError, match='x'):\n    ask()")) == []
    assert list(unsaid("with pytest.raises(UsageError) as caught:\n    ask()")) == []


@named_cases(
    ("at the top of the file", "from fitter.api import fit"),
    ("inside a function", "def late():\n    from fitter import api"),
    ("for a type", "if TYPE_CHECKING:\n    from fitter.api import Plan"),
    ("by the module's name", "import fitter.api"),
)
def test_an_import_that_runs_up_is_found(text: str) -> None:
    modules = {"fitter.api": "", "fitter.llama.worker.worker": text}
    assert upward(arrows(modules)) == {("fitter.llama.worker.worker", "fitter.api")}


def test_a_circle_is_found() -> None:
    modules = {
        "fitter.llama.a": "from fitter.llama import b",
        "fitter.llama.b": "def late():\n    import fitter.llama.c",
        "fitter.llama.c": "from fitter.llama.a import x",
    }
    assert set(circle(arrows(modules))) == set(modules)
    assert circle(arrows({**modules, "fitter.llama.c": ""})) == []


def test_a_module_without_a_room_is_found() -> None:
    with pytest.raises(AssertionError, match=r"fitter\.attic is in no room"):
        upward(arrows({"fitter.attic": "import fitter.text", "fitter.text": ""}))
