"""Reference pages of the Python API: functions keyword by keyword, types field by field."""

from __future__ import annotations

import inspect
import re
import types
import typing
from collections.abc import Callable
from typing import Any, Literal

import fitter
from fitter.parameters import kinds
from fitter.parameters import table as parameters
from fitter.parameters.kinds import Kind
from fitter.parameters.table import GOAL_HELP, PARAMETERS, Estimating, Fitting, Measuring, Parameter, taken_by
from tools.docs.attributes import default, documented, hints_of
from tools.docs.markdown import code, heading, page, paragraphs, plain, sentence, table
from tools.docs.of_options import default_of, meaning_of, option_link

KEYWORDS: dict[str, Any] = {
    "fit": Fitting,
    "verify": Fitting,
    "tune": Fitting,
    "compare_builds": Fitting,
    "fleet": Fitting,
    "best_shapes": Fitting,
    "quants": Fitting,
    "repository": Fitting,
    "measure": Measuring,
    "estimate": Estimating,
}
"""The class of the keywords of each function that takes those of the table of parameters."""

_PLAIN = {
    "model": "The path of a model: a GGUF file, or the first one of a split model.",
    "plan": "A plan of `fit`, or the path of a file that `fitter --json` wrote, instead of fitting one now.",
    "builds": "Two builds of llama.cpp or more, each named as for `llama_cpp`.",
    "own_plans": "Whether each build makes its own plan as well.",
    "types": "File types to plan, such as `Q4_K_M`, in place of all.",
    "models": "The paths or addresses of models, directories or repositories, one or several.",
    "machines": "The machines, one or several: each as `--gpu`, with `+` between unlike cards, or `none`.",
    "prices": "The price of a card by its name, in any currency.",
    "watts": "The watts of a card by its name, in place of its price.",
    "answer": "What a machine has to do, such as `32k context at 20 t/s`: the cheapest that does is named.",
    "resume": "The path of a file that gets every cell that is done, and whose cells are not planned again.",
    "executor": "Where cells are planned: a `concurrent.futures.Executor`, such as a cluster's.",
    "jobs": "How many cells are planned at the same time, without an executor; by default one for each processor.",
    "max_cells": "The most cells of a grid.",
    "on_cell": "Is called with each cell that is done, how many are done, and how many there are.",
    "tokens_per_second": "The useful speed of generation: the best one has the most bits per weight that reaches it.",
    "most": "How many models to find.",
    "minutes": "Minutes for all runs; the plan itself always runs.",
    "server": "The path of a llama-server, or of a directory that has one.",
    "store": "Whether to store what was measured, for later plans.",
    "contexts": "Whether to plan other contexts as well, for a curve of what they take.",
    "words": "Words that names, titles or architectures have; one that is a name finds that shape alone.",
    "alternatives": "Whether to look for alternatives to the plan afterwards, for a quarter of the search's time.",
    "members": "For each model's name its keywords: `model`, keywords of `fit`, and `share`, `resident`, `evict` and "
    "`never_with` as in [`fitter.toml`](fitter-toml.md#fleet).",
    "goal": GOAL_HELP,
    "disk_bandwidth": "How fast models are loaded: bytes per second, or a text such as `3.4GB/s`.",
    "in_a_row": "Requests for a model one after the other, on average, beyond chance; 1 for requests in random order.",
    "on_step": "Is called after each step with the steps done, all steps and a text.",
    "worker": "A worker process that is there already, for many calls in a row; by default each call has its own.",
}
"""Keywords that are in no table, since no option or file has them."""

_OF_OTHERS = ("estimate_gpu_layers",)
"""Functions with another program's parameters, whose meaning is in their docstrings."""

_IN_THE_TABLE = 3
"""So many keywords in a paragraph of ``fit``'s docstring, and it is about what the tables of keywords say."""


def names() -> tuple[list[str], list[str], list[str]]:
    """What ``fitter.__all__`` has: functions, classes that are no errors, errors."""
    public = {name: getattr(fitter, name) for name in fitter.__all__ if not name.startswith("_")}
    functions = [name for name, each in public.items() if inspect.isfunction(each)]
    failures = [
        name for name, each in public.items() if isinstance(each, type) and issubclass(each, Exception | Warning)
    ]
    return functions, [name for name in public if name not in (*functions, *failures)], failures


def type_text(hint: Any) -> str:
    """A type as one writes it in Python, with ``path`` for all that is a path."""
    if hint in (parameters.AnyPath, inspect.Parameter.empty):
        return "path" if hint is parameters.AnyPath else ""
    if hint is type(None):
        return "None"
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        paths = set(typing.get_args(parameters.AnyPath))
        rest = [each for each in inner if each not in paths] if paths <= set(inner) else list(inner)
        return " | ".join([*(["path"] if paths <= set(inner) else []), *map(type_text, rest)])
    if origin is Literal:
        return " | ".join(f'"{word}"' for word in inner)
    if origin is not None:
        name = getattr(origin, "__name__", str(origin))
        shown = ", ".join("..." if each is Ellipsis else type_text(each) for each in inner)
        return "function" if origin is Callable or name == "Callable" else f"{name}[{shown}]"
    if isinstance(hint, str):
        return re.sub(r"\bPath\b", "path", hint)
    return "VirtualDevice" if hint is kinds.Described else getattr(hint, "__name__", str(hint))


def unit(kind: Kind) -> str:
    """What a number or a text of a kind counts; empty if its type says all."""
    if isinstance(kind, kinds.Size):
        return "Bytes, or a text such as `24GiB`."
    if isinstance(kind, kinds.Mebibytes):
        return "MiB, or a text such as `2GiB`."
    if isinstance(kind, kinds.Seconds):
        return "Seconds."
    if isinstance(kind, kinds.Number):
        return "Bytes per second, or a text such as `60GB/s`."
    if isinstance(kind, kinds.Layers):
        return "-1 is all of them."
    return ""


def _keyword(each: Parameter) -> tuple[str, str, str, str]:
    name = option_link(each, each.name) if each.options else code(each.name)
    hint = type_text(each.hint).removesuffix(" | None")
    return name, code(hint), default_of(each), " ".join(filter(None, (meaning_of(each), unit(each.kind))))


def _own_keyword(
    name: str, parameter: inspect.Parameter, hint: Any, documented: dict[str, str]
) -> tuple[str, str, str, str]:
    """A parameter that stands in a function's own signature; ``documented``: what its docstring alone says of it."""
    if name in PARAMETERS and name not in documented:
        return _keyword(PARAMETERS[name])
    is_required = parameter.default is inspect.Parameter.empty
    meaning = documented.get(name) or _PLAIN[name]
    return code(name), code(type_text(hint).removesuffix(" | None")), "required" if is_required else "", meaning


def groups(call: Any) -> dict[str, list[Parameter]]:
    """The parameters of a call by the class that declares them."""
    found: dict[str, list[Parameter]] = {}
    for each in taken_by(call):
        found.setdefault(each.group, []).append(each)
    return found


def _title(group: str) -> str:
    return f"Keywords: {group.removesuffix('Keywords').lower()}"


def _groups() -> list[str]:
    """Every group of keywords, once."""
    every = {name: found for call in KEYWORDS.values() for name, found in groups(call).items()}
    return [
        "\n\n".join(
            [
                heading(2, _title(name), name.lower()),
                sentence(getattr(parameters, name).__doc__),
                table(("keyword", "type", "if not given", "meaning"), map(_keyword, found)),
            ]
        )
        for name, found in every.items()
    ]


def _function(name: str) -> str:
    function = inspect.unwrap(getattr(fitter, name))
    signature, hints = inspect.signature(function), _hints(function)
    documented = _documented(function) if name in _OF_OTHERS else {}
    own = [
        _own_keyword(each.name, each, hints.get(each.name, ""), documented)
        for each in signature.parameters.values()
        if each.kind is not inspect.Parameter.VAR_KEYWORD
    ]
    taken = groups(KEYWORDS[name]) if name in KEYWORDS else {}
    links = ", ".join(f"[{_title(group).partition(': ')[2]}](#{group.lower()})" for group in taken)
    raises, said = _said(function, [each.name for found in taken.values() for each in found])
    call = f"fitter.{name}({', '.join([*_positional(signature), '…'])})"
    return "\n\n".join(
        [
            heading(2, code(call), name),
            *(part for part in said if not documented or not part.startswith("- ")),
            table(("keyword", "type", "if not given", "meaning"), own),
            *([f"And the keywords of these tables: {links}."] if links else []),
            f"**Returns** {_linked(type_text(hints.get('return', '')))}.",
            *([f"**Raises** {raises}"] if raises else []),
        ]
    )


def _documented(function: Any) -> dict[str, str]:
    """What a docstring says of each parameter."""
    listed = (part for part in paragraphs(function.__doc__) if part.startswith("- `"))
    entries = (re.match(r"- `(\w+)`: (.*)", line) for part in listed for line in part.splitlines())
    return {entry[1]: entry[2] for entry in entries if entry}


def _hints(function: Any) -> dict[str, Any]:
    """The annotations of a function, as text where a name of them is only there for type checkers."""
    try:
        return typing.get_type_hints(function)
    except NameError:
        return dict(function.__annotations__)


def _positional(signature: inspect.Signature) -> list[str]:
    return [each.name for each in signature.parameters.values() if each.kind is not inspect.Parameter.KEYWORD_ONLY][:1]


def _said(function: Any, keywords: list[str]) -> tuple[str, list[str]]:
    """What a docstring says is raised, and its paragraphs that are about more than the keywords of the table."""
    found = paragraphs(function.__doc__)
    raised = [part.removeprefix("Raises ") for part in found if part.startswith("Raises ")]
    inline = [m[1] for part in found if (m := re.search(r" Raises (.*)$", part))]
    rest = [
        part
        for part in found
        if not part.startswith("Raises ")
        and (function.__name__ != "fit" or sum(f"`{name}`" in part for name in keywords) < _IN_THE_TABLE)
    ]
    return " ".join(raised or inline), [re.sub(r" Raises .*$", "", part) for part in rest]


def _linked(text: str) -> str:
    """A type with a link for each of ours."""
    _, kinds_, _ = names()
    parts = re.split(r"(\w+)", text)
    if not any(part in kinds_ for part in parts):
        return code(text)
    return "".join(f"[`{part}`](python-types.md#{part.lower()})" if part in kinds_ else part for part in parts)


def functions_page() -> str:
    """Every function, and what loads a model."""
    functions, _, failures = names()
    rows = [(f"[`fitter.{name}`](#{name})", paragraphs(getattr(fitter, name).__doc__)[0]) for name in functions]
    rows.append(("[`fitter.Llama`](#llama)", paragraphs(fitter.Llama.__doc__)[0]))
    pretrained = getattr(fitter.Llama, "from_pretrained")  # noqa: B009 - a type checker has another one
    return page(
        "Python",
        "`None` means *not set* for every keyword. Sizes are bytes, or a text with a unit; results are bytes. The "
        "names are those of the [options](options.md). What functions return is in [types](python-types.md), what "
        "they raise in [errors](errors.md). All of them may be called from several threads at once.",
        table(("function", "what it does"), rows),
        *map(_function, functions),
        *_groups(),
        heading(2, "`fitter.Llama(model_path, **keywords)`", "llama"),
        *paragraphs(fitter.Llama.__doc__),
        heading(3, "`fitter.Llama.from_pretrained(repo_id, filename, additional_files=None, **keywords)`"),
        *paragraphs(pretrained.__doc__),
        heading(2, "`fitter.__version__`"),
        f"The version of fitter, `{fitter.__version__}` here.",
        heading(2, "Errors", "all-errors"),
        ", ".join(f"[`fitter.{name}`](errors.md#{name.lower()})" for name in failures),
    )


def _member(kind: type, name: str, text: str) -> tuple[str, str, str, str]:
    hint = type_text(hints_of(kind).get(name, ""))
    has_default = default(kind, name)
    if not text and kind is fitter.Params:
        known = parameters.of_a_load().get(name)
        text = f"As {option_link(known, known.name)}." if known is not None and known.options else ""
        text = text or (plain(known.help) if known is not None else "")
    return code(name), _linked(hint), code(has_default or ""), sentence(text)


def _methods(kind: type) -> list[str]:
    found = []
    bases = [base for base in reversed(kind.__mro__) if base.__module__.startswith("fitter")]
    for name, member in {name: member for base in bases for name, member in vars(base).items()}.items():
        if name.startswith("_") or not (inspect.isfunction(member) or isinstance(member, classmethod)):
            continue
        function = inspect.unwrap(getattr(kind, name))
        signature = re.sub(r"\(self(, )?", "(", str(inspect.signature(function))).replace("'", "")
        signature = signature.replace("DEFAULTS[timeout]", "120.0")
        found.append("\n\n".join([f"**`.{name}{signature}`**", *paragraphs(member.__doc__)]))
    return found


def _type(name: str) -> str:
    kind = getattr(fitter, name)
    rows = [_member(kind, member, text) for member, text in documented(kind).items() if not member.startswith("_")]
    return "\n\n".join(
        [
            heading(2, code(f"fitter.{name}"), name.lower()),
            *paragraphs(kind.__doc__),
            table(("attribute", "type", "default", "meaning"), rows),
            *_methods(kind),
        ]
    )


def types_page() -> str:
    """Every class that functions return or take."""
    _, found, _ = names()
    found = [name for name in found if name != "Llama"]
    return page(
        "Python types",
        "What the [functions](python.md) return and take: frozen dataclasses, all of them in `fitter` itself. Memory "
        "is in bytes, time in seconds. Attributes without a default are given by fitter; properties stand at the end.",
        ", ".join(f"[`{name}`](#{name.lower()})" for name in found),
        *map(_type, found),
    )
