"""``fitter.toml``: the cases, each a model on a machine whose memory must not grow."""

from __future__ import annotations

import ast
import difflib
import fnmatch
import glob
import itertools
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fitter.errors import UsageError
from fitter.llama.build.build_folder import PYTHON, on_path
from fitter.machine.gpu import NO_GPU, parse_gpus
from fitter.model.files.source import show, split_name
from fitter.model.location import is_address
from fitter.model.shapes.catalogue import CONFIG, SHAPE, beside
from fitter.parameters.kinds import Kind
from fitter.parameters.table import PARAMETERS, of_a_case
from fitter.parameters.values import read_size, shown_in_file
from fitter.planning.request.request_limits import MOST_SPEED
from fitter.regression import trust
from fitter.regression.trust import read_toml
from fitter.text import printable

CASES_FILE = "fitter.toml"

CaseValue = bool | int | float | str | tuple[bool | int | float | str, ...]
"""A value in ``fitter.toml``, sizes in bytes."""

DEFAULT_SLOWDOWN = 0.02
"""The share of its estimated speed that a plan may lose: an estimate is no more precise than that."""

DEFAULT_PROGRAM = "any"
"""Program of a case that names none: any, so that a lock does not depend on the default of other commands."""

_PERCENT = re.compile(r"([0-9]{1,6}(?:\.[0-9]{1,6})?)\s*%", re.ASCII)
_NAME = re.compile(r"[^\s()\[\]]+")
_MOST_SEEN = 20_000
"""Most entries of directories that a pattern looks at."""
EXAMPLE = '[cases.chat] with model = "shape://llama-3.1-8b" and gpu = ["rtx-4090"]'
"""A case that can be planned without a file."""


@dataclass(frozen=True)
class Growth:
    """How much memory may grow: by a number of bytes, or by a share of what it was (``part``, 0.01 for 1 %)."""

    bytes: int = 0
    part: float = 0.0

    def of(self, before: int) -> int:
        """Return the bytes by which ``before`` may grow."""
        return self.bytes + int(self.part * before)


@dataclass(frozen=True)
class Budget:
    """Limits that apply without a lock."""

    memory: Mapping[str, int] = field(default_factory=dict)
    """The most bytes on each device, by its name in lower case, or on ``host``."""
    n_ctx: int | None = None
    """The smallest context, in tokens."""
    prompt_tokens_per_second: float | None = None
    """The lowest estimated speed of prompt processing, in tokens per second."""
    generation_tokens_per_second: float | None = None
    """The lowest estimated speed of generation, in tokens per second."""

    def __bool__(self) -> bool:
        return self != Budget()


@dataclass(frozen=True)
class Case:
    """A model on a machine.

    ``settings``: the keys and values in ``fitter.toml``, in their order there; files in them are relative to
    ``directory``.
    """

    name: str
    model: Path | str
    """The model's path, or a pattern with one case for each match, relative to the directory of ``fitter.toml``; or
    its address, such as ``hf://org/repo/model.gguf``.
    """
    settings: Mapping[str, CaseValue]
    max_growth: Growth = Growth()
    """How much more than its lock each device and the host may take: a share such as ``1%``, or a size."""
    max_slowdown: float = DEFAULT_SLOWDOWN
    """The share of its estimated speed that the plan may lose, such as ``5%``."""
    budget: Budget = Budget()
    """Limits that apply without a lock."""
    directory: Path = Path()
    llama_cpp: str | None = None
    """The llama.cpp to measure with, as for ``--llama-cpp``; ``None`` for the default one. It is not one of the
    ``settings``: a lock has the version of the build instead, which is the same wherever that build is.
    """
    needs_trust: Mapping[str, str] = field(default_factory=dict)
    """Sentences about what needs a file whose author is trusted, by key (see ``fitter.regression.trust``)."""

    @property
    def gpus(self) -> tuple[str, ...]:
        """Descriptions of the GPUs. Without any, the case is a machine without a GPU, never this machine."""
        gpus = self.settings.get("gpu", ())
        assert isinstance(gpus, tuple)
        return tuple(map(str, gpus)) or (NO_GPU,)

    def keywords(self) -> dict[str, Any]:
        """List keyword arguments of ``fitter.fit``."""
        parameters = of_a_case()
        settings = {
            parameters[key].name: self._resolved(parameters[key].kind, value) for key, value in self.settings.items()
        }
        build = {} if self.llama_cpp is None else {"llama_cpp": self.llama_cpp}
        return {"program": DEFAULT_PROGRAM} | settings | {"gpus": self.gpus} | build

    def _resolved(self, kind: Kind, value: CaseValue) -> Any:
        if not kind.is_file:
            return value
        return [self._file(text) for text in map(str, value)] if isinstance(value, tuple) else self._file(str(value))

    def _file(self, text: str) -> str:
        return (
            beside(text, self.directory) if is_address(text) else os.path.join(self.directory, os.path.expanduser(text))
        )


def read_cases(path: Path, *, is_trusted: bool = False) -> tuple[Case, ...]:
    """Read the cases of ``fitter.toml`` by name.

    Raises ``UsageError``, also for a pattern that leads out of the file's directory unless the file is trusted.
    """
    document = read_toml(path, f"write one, such as {EXAMPLE}")
    try:
        check_keys(document, ("cases", "defaults", "history", "fleet"), "")
        defaults = read_table(document.get("defaults", {}), "defaults")
        check_keys(defaults, (*of_a_case(), *_LIMITS), "defaults")
        tables = read_table(document.get("cases", {}), "cases")
        if not tables:
            raise UsageError(f"there are no cases: add {EXAMPLE}")
        cases: dict[str, Case] = {}
        for name, table in tables.items():
            table = {**defaults, **read_table(table, f"cases.{name}")}
            for case in make_cases(name, table, path.absolute().parent, is_trusted=is_trusted):
                if case.name in cases:
                    raise UsageError(f"there are two cases '{case.name}': rename one of them")
                cases[case.name] = case
    except UsageError as error:
        raise UsageError(f"{show(path)}: {error}") from None
    return tuple(cases[name] for name in sorted(cases))


def read_builds(path: Path, *, is_trusted: bool = False) -> tuple[str, ...]:
    """Read the builds of ``fitter history`` from ``[history]`` of ``fitter.toml``; none without it.

    Paths are relative to the file. Raises ``UsageError``, also for paths in a file that is not trusted.
    """
    document = read_toml(path, f"write one, such as {EXAMPLE}")
    try:
        table = read_table(document.get("history", {}), "history")
        check_keys(table, ("llama_cpp",), "history")
        builds = table.get("llama_cpp", [])
        if not isinstance(builds, list) or not all(isinstance(each, str) and each for each in builds):
            raise UsageError(f'history.llama_cpp is {shown_in_file(builds)}: give a list such as ["old", "new"]')
    except UsageError as error:
        raise UsageError(f"{show(path)}: {error}") from None
    directory = path.absolute().parent
    paths = (each for each in builds if not is_name_of_build(each, directory))
    trust.check((trust.code("llama_cpp of [history]", each) for each in paths), show(path), is_trusted)
    return tuple(place_of_build(each, directory) for each in builds)


def make_cases(name: str, table: Mapping[str, Any], directory: Path, *, is_trusted: bool = False) -> tuple[Case, ...]:
    """Make the cases of one table: one, or for a pattern as ``model`` one for each match, called ``name/model``.

    ``model`` and ``llama_cpp`` are relative to ``directory``. Raises ``UsageError``, also for a pattern that leads out
    of it unless ``is_trusted``.
    """
    where = f"cases.{name}"
    if not _NAME.fullmatch(name) or not name.isprintable():
        raise UsageError(f"a case cannot be called {name!r}: use no spaces, parentheses, brackets or hidden characters")
    if is_test(name):
        raise UsageError(f"a case cannot be called {name!r}: names with '::' are for pytest tests")
    settable = of_a_case()
    check_keys(table, ("model", *settable, *_LIMITS, "budget"), where)
    model = table.get("model")
    if not isinstance(model, str) or not model:
        raise UsageError(f'{where} has no model: add model = "model.gguf", a path or a pattern such as models/*.gguf')
    settings = {key: each.kind.read(f"{where}.{key}", table[key]) for key, each in settable.items() if key in table}
    _check_gpus(settings.get("gpu", ()), f"{where}.gpu")
    needs_trust = _needs_trust(model, settings, directory)
    llama_cpp = settings.pop("llama_cpp", None)
    build = None if llama_cpp is None else place_of_build(str(llama_cpp), directory)
    limits = {key: read(table[key], f"{where}.{key}") for key, read in _LIMITS.items() if key in table}
    budget = _budget(read_table(table.get("budget", {}), f"{where}.budget"), settings, f"{where}.budget")
    models = _models(model, directory, where, is_trusted=is_trusted)
    case = Case(
        name, Path(), settings, budget=budget, directory=directory, llama_cpp=build, needs_trust=needs_trust, **limits
    )
    return tuple(replace(case, name=name + more, model=path) for more, path in models)


def with_build(cases: Iterable[Case], llama_cpp: str | None) -> tuple[Case, ...]:
    """``cases``, measured with another llama.cpp than theirs if one is given."""
    return tuple(cases) if llama_cpp is None else tuple(_with_build(case, llama_cpp) for case in cases)


def _with_build(case: Case, llama_cpp: str) -> Case:
    others = {key: why for key, why in case.needs_trust.items() if key != "llama_cpp"}
    return replace(case, llama_cpp=llama_cpp, needs_trust=others)


def check_trusted(cases: Iterable[Case], cases_file: Path, is_trusted: bool) -> None:
    """Raise ``UsageError`` if one of ``cases`` needs a trusted file, and ``cases_file`` is none."""
    reasons = (f"in the case '{case.name}' {why}" for case in cases for why in case.needs_trust.values())
    trust.check(reasons, show(cases_file), is_trusted)


def _needs_trust(model: str, settings: Mapping[str, CaseValue], directory: Path) -> dict[str, str]:
    """Return the reasons why a table needs a trusted file, by key."""
    needs = {}
    for key, value in {"model": model, **settings}.items():
        texts = [str(each) for each in (value if isinstance(value, tuple) else (value,))]
        if key == "llama_cpp":
            reasons = [trust.code(key, text) for text in texts if not is_name_of_build(text, directory)]
        elif key == "profile":
            reasons = [trust.code(key, text) for text in texts if ":" in text]
        elif key == "model" or of_a_case()[key].kind.is_file:
            reasons = [why for text in texts if (why := trust.address(key, text))]
        else:
            continue
        if reasons:
            needs[key] = reasons[0]
    return needs


def place_of_build(text: str, directory: Path) -> str:
    """Resolve the llama.cpp that ``text`` names in a file in ``directory``: ``python``, or a path relative to that.

    A name without ``/`` that is no file there, such as ``llama-server``, is a program on the PATH.
    """
    if text == PYTHON:
        return text
    # A bare name could later mean a file in the current directory.
    return (is_name_of_build(text, directory) and on_path(text)) or os.path.join(directory, os.path.expanduser(text))


def is_name_of_build(text: str, directory: Path) -> bool:
    """Whether ``text`` names ``python`` or a program on the PATH, and no path in or from ``directory``."""
    is_bare = "/" not in text and not text.startswith("~")
    return text == PYTHON or (is_bare and not os.path.lexists(os.path.join(directory, text)))


def is_test(name: str) -> bool:
    """Whether a case in a lock was stored by the pytest plugin for a test, and is not from ``fitter.toml``."""
    return "::" in name


def select(cases: Iterable[Case], expression: str) -> tuple[Case, ...]:
    """Select the cases whose name matches ``expression``: a word matches any name that contains it, in any case.

    Words may be combined with ``and``, ``or``, ``not`` and parentheses. Raises ``UsageError``.
    """
    accepts = _parsed(expression)
    return tuple(case for case in cases if accepts(case.name.lower()))


def select_named(cases: Sequence[Case], expression: str | None) -> tuple[Case, ...]:
    """Select cases; all without an expression. Raises ``UsageError``, also if nothing is selected."""
    if expression is None:
        return tuple(cases)
    if selected := select(cases, expression):
        return selected
    text = printable(expression, _LONGEST)
    raise UsageError(f"-k '{text}' selects no case; the cases are {', '.join(case.name for case in cases)}")


_SCHEMES = {SHAPE: "NAME", CONFIG: "FILE"}
"""Options for a model without a file, whose address is a ``model`` in a file."""
_MOST_NAMED = 12
"""Most keywords that a message lists."""


def suggest(word: str, words: Collection[str]) -> str:
    """``did you mean n_ctx?``, also for ``ctx_size`` (the option's name), or a short list if none is similar."""
    option = word.lower().lstrip("-").replace("_", "-")
    by_option = [key for key, each in of_a_case().items() if option in (name.lstrip("-") for name in each.options)]
    close = [key for key in by_option if key in words] or difflib.get_close_matches(word.lower(), words, n=1)
    if close:
        return f"did you mean {close[0]}?"
    if word in _SCHEMES and "model" in words:
        return f'write model = "{word}://{_SCHEMES[word]}"'
    if "n_ctx" in words and len(words) > _MOST_NAMED:
        return "the keys are the keywords of fitter.fit, as fitter fit --help-all lists them"
    return f"choose from {', '.join(words)}"


def check_keys(table: Mapping[str, Any], allowed: Collection[str], where: str) -> None:
    """Raise ``UsageError`` for a key of ``table`` that is not ``allowed``."""
    for key in table:
        if key not in allowed:
            place = f" in {where}" if where else ""
            raise UsageError(f"unknown key '{key}'{place}: {suggest(key, allowed)}")


def read_table(value: object, where: str) -> dict[str, Any]:
    """Return ``value`` as a table. Raises ``UsageError``."""
    if not isinstance(value, dict):
        raise UsageError(f"{where} must be a table: write [{where}] above its keys")
    return value


def _models(text: str, directory: Path, where: str, *, is_trusted: bool) -> Sequence[tuple[str, Path | str]]:
    """List the models that ``text`` names: the suffix of the case's name, and the path or address."""
    if is_address(text):
        return [("", beside(text, directory))]
    pattern = os.path.expanduser(text)
    whole = os.path.join(directory, pattern)
    if not glob.has_magic(pattern) or os.path.exists(whole):
        return [("", Path(whole))]
    # The name of the directory itself may look like a pattern.
    parts = Path(pattern).parts
    first = next(index for index, part in enumerate(parts) if glob.has_magic(part))
    base = directory.joinpath(*parts[:first])
    search = _Search(where, text, None if trust.is_trusted(is_trusted) else os.path.realpath(directory))
    matches = dict.fromkeys(map(Path, search.matches(str(base), parts[first:])))
    if not matches:
        raise UsageError(f"{where}: no file matches '{text}': write it relative to the directory of fitter.toml")
    firsts = [match for match in matches if (split_name(match) or ("", 1, 1))[1] == 1]
    return sorted(("/" + _without_suffix(match.relative_to(base)), match) for match in firsts)


@dataclass
class _Search:
    """A search for files that match a pattern, as ``glob`` does, but one that ends.

    Attributes:
        where: The place of the pattern, for errors.
        pattern: The pattern, for errors.
        inside: The real path of the directory that it may not leave, if any.
        seen: Number of the entries of directories until now.
    """

    where: str
    pattern: str
    inside: str | None
    seen: int = 0

    def matches(self, folder: str, parts: Sequence[str]) -> Iterator[str]:
        """Yield the paths below ``folder`` that match ``parts``. Raises ``UsageError``."""
        part, *rest = parts
        if part != "**" and not glob.has_magic(part):
            path = os.path.join(folder, part)
            if rest:
                yield from self.matches(path, rest)
            elif os.path.lexists(path):
                self._check(folder)
                yield path
            return
        if part == "**" and rest:
            yield from self.matches(folder, rest)
        for entry in self._entries(folder):
            if entry.name.startswith(".") and not part.startswith("."):
                continue
            if part == "**":
                # a link may lead to a directory above it
                if entry.is_dir(follow_symlinks=False):
                    yield from self.matches(entry.path, parts)
                elif not rest:
                    yield entry.path
            elif fnmatch.fnmatch(entry.name, part):
                if not rest:
                    yield entry.path
                elif entry.is_dir():
                    yield from self.matches(entry.path, rest)

    def _entries(self, folder: str) -> Iterator[os.DirEntry[str]]:
        self._check(folder)
        try:
            entries = os.scandir(folder)
        except OSError:
            return
        with entries:
            for entry in entries:
                self.seen += 1
                if self.seen > _MOST_SEEN:
                    raise UsageError(
                        f"{self.where}: '{self.pattern}' looks at more than {_MOST_SEEN} files: name their directories"
                    )
                yield entry

    def _check(self, folder: str) -> None:
        """Raise ``UsageError`` for a directory that the pattern may not look at."""
        if self.inside is not None and not Path(os.path.realpath(folder)).is_relative_to(self.inside):
            raise UsageError(
                f"{self.where}: '{self.pattern}' looks outside of the directory of fitter.toml, at {folder}: if you "
                f"trust whoever wrote that file, give --trust or set {trust.VARIABLE}=1"
            )


def _without_suffix(path: Path) -> str:
    split = split_name(path)
    name = path.with_name(split[0]) if split else path.with_suffix("") if path.suffix == ".gguf" else path
    return re.sub(r"[\s()\[\]]|::", "_", printable(name.as_posix()))


# --- values


def _part(value: Any, where: str) -> float:
    match = _PERCENT.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None and (isinstance(value, bool) or value != 0):
        raise UsageError(f'{where} is {shown_in_file(value)}: give a percentage such as "2%"')
    return float(match[1]) / 100 if match else 0.0


def _growth(value: Any, where: str) -> Growth:
    if isinstance(value, str) and value.strip().endswith("%"):
        return Growth(part=_part(value, where))
    try:
        return Growth(bytes=read_size(where, value))
    except UsageError:
        raise UsageError(
            f'{where} is {shown_in_file(value)}: give a percentage or a size, such as "1%" or "64MiB"'
        ) from None


def _speed(value: Any, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= MOST_SPEED:
        raise UsageError(f"{where} is {shown_in_file(value)}: give a number of tokens per second")
    return float(value)


def _check_gpus(specs: CaseValue, where: str) -> None:
    assert isinstance(specs, tuple)
    try:
        parse_gpus(list(map(str, specs)))
    except UsageError as error:
        raise UsageError(f"{where}: {str(error).removeprefix('--gpu ')}") from None


def _budget(table: Mapping[str, Any], settings: Mapping[str, CaseValue], where: str) -> Budget:
    gpus = settings.get("gpu", ())
    assert isinstance(gpus, tuple)
    names = [device.name.lower() for device in parse_gpus(list(map(str, gpus)))]
    speeds = ("prompt_tokens_per_second", "generation_tokens_per_second")
    limits = {key.lower(): value for key, value in table.items()}
    check_keys(limits, (*names, "host", "n_ctx", *speeds), where)
    return Budget(
        {name: read_size(f"{where}.{name}", limits[name]) for name in (*names, "host") if name in limits},
        PARAMETERS["fit_ctx"].kind.read(f"{where}.n_ctx", limits["n_ctx"]) if "n_ctx" in limits else None,
        **{name: _speed(limits[name], f"{where}.{name}") for name in speeds if name in limits},
    )


_LIMITS: Mapping[str, Callable[[Any, str], Any]] = {"max_growth": _growth, "max_slowdown": _part}
"""Keys of a case that limit how much it may change, with the function that reads each."""


# --- -k


_OPERATORS = ("and", "or", "not", "(", ")")
_OF_EXPRESSIONS = (ast.Expression, ast.BoolOp, ast.boolop, ast.UnaryOp, ast.Not, ast.Constant)
_DEEPEST = 50
"""More parentheses inside one another than anybody writes."""
_LONGEST = 60
"""Characters of an expression that a message shows."""


def _parsed(text: str) -> Callable[[str], bool]:
    """Parse an expression of words, with the ``and``, ``or``, ``not`` and parentheses of Python."""
    parts = re.findall(r"[()]|[^\s()]+", text)
    shown = printable(text, _LONGEST)
    depths = itertools.accumulate((part == "(") - (part == ")") for part in parts)
    if max(depths, default=0) > _DEEPEST:
        raise UsageError(f"-k '{shown}' has more than {_DEEPEST} parentheses inside one another: leave some out")
    words = [part.lower() for part in parts if part not in _OPERATORS]
    numbers = itertools.count()
    try:
        tree = ast.parse(" ".join(part if part in _OPERATORS else str(next(numbers)) for part in parts), mode="eval")
        if not all(isinstance(each, _OF_EXPRESSIONS) for each in ast.walk(tree)):
            raise SyntaxError
        for has in (False, True):
            _accepts(tree.body, [has] * len(words))
    except (SyntaxError, RecursionError, MemoryError):
        raise UsageError(
            f"-k {shown!r} is not an expression: combine words with and, or, not, such as 'a or not b'"
        ) from None
    return lambda name: _accepts(tree.body, [word in name for word in words])


def _accepts(tree: ast.expr, has: Sequence[bool]) -> bool:
    """Evaluate an expression of numbers of words; ``has`` says which words there are."""
    if isinstance(tree, ast.BoolOp):
        terms = (_accepts(term, has) for term in tree.values)
        return all(terms) if isinstance(tree.op, ast.And) else any(terms)
    return not _accepts(tree.operand, has) if isinstance(tree, ast.UnaryOp) else has[ast.literal_eval(tree)]
