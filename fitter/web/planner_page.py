"""The page, the page of the API, and messages in the page's words: labels for options, remedies that it has."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import platformdirs

from fitter.errors import Message, Remedy
from fitter.machine import gpu_catalogue
from fitter.model.shapes import catalogue
from fitter.model.shapes.catalogue import DEFAULT_TYPE, ShapeInfo
from fitter.output.pages import page as output_pages
from fitter.output.pages import report_page
from fitter.output.pages.page import fragment
from fitter.output.pages.report_page import Fact, command_entry
from fitter.output.pictures.curves import tokens
from fitter.output.tables.file_tables import repository_lines
from fitter.parameters.table import PARAMETERS
from fitter.parameters.values import MAX_DEVICES
from fitter.planning.request.session import named
from fitter.programs import PROGRAMS
from fitter.text import LONGEST_TEXT, human, printable, speed
from fitter.web.allowed_files import Root
from fitter.web.questions import LONGEST

if TYPE_CHECKING:
    from fitter.planning.plan.layer_map import LayerMap
    from fitter.planning.plan.plan import Plan
    from fitter.planning.tables.file_rows import Repository, RepositoryFile

_TEMPLATES = Path(__file__).with_name("templates")
_FITS = {True: "yes", False: "no", None: "unknown"}
"""Words of a table."""
_TYPES = ("Q2_K", "IQ3_XXS", "Q3_K_M", "IQ4_XS", DEFAULT_TYPE, "Q5_K_M", "Q6_K", "Q8_0", "BF16")
"""File types that the page offers for a shape; others may be typed."""
_PATH = re.compile(r"(?<![\w:/.])/(?:[^\s/:;,'\"()]+/)+")
"""A directory of this machine in a message."""


def page(root: Root | None, *, has_devices: bool) -> str:
    """Write the planner's page, with the models and cards; ``has_devices``: also this machine's."""
    return (
        output_pages.environment(_TEMPLATES)
        .get_template("page.html")
        .render(
            models=root.models() if root is not None else (),
            folders=root.folders() if root is not None else (),
            has_root=root is not None,
            has_devices=has_devices,
            shapes=shapes(),
            gpus=gpu_catalogue.gpus().values(),
            types=_TYPES,
            default_type=DEFAULT_TYPE,
            parameters={name: PARAMETERS[name] for name in LABELS},
            usual={name: UNSET.get(name, worded(PARAMETERS[name].unset)) for name in LABELS},
            programs=tuple(PROGRAMS),
            works=tuple(named()),
            contexts=_contexts(),
            most_cards=MAX_DEVICES,
            longest=LONGEST,
        )
    )


@cache
def shapes() -> tuple[ShapeInfo, ...]:
    """Return all shapes; making their headers takes a moment."""
    return catalogue.shapes()


def _contexts() -> list[tuple[int, str]]:
    """Return the contexts of the slider, up to the largest that a model of the catalogue was trained for."""
    most = max(each.n_ctx_train for each in shapes())
    steps = sorted(
        {base << power for power in range(most.bit_length()) for base in (512, 768) if base << power <= most}
    )
    return [(step, tokens(step)) for step in steps]


_SIDES = {"a": "first plan", "b": "second plan"}


def panel(plan: Plan, layer_map: LayerMap | None, name: str) -> str:
    """Write a plan as the page's side ``a`` or ``b``."""
    return report_page.plan_panel(plan, layer_map, name, _SIDES[name], worded)


def repository_panel(repository: Repository, name: str, root: Root | None) -> str:
    """Draw the models of a repository as the page's side ``a`` or ``b``: HTML without style and script.

    A button for each plan has the model's address. Names of files, which are not trusted, are escaped.
    """
    best = repository.best
    fitting = sum(each.fits for each in repository.found)
    return fragment(
        "repository.html",
        prefix=f"{name}-",
        of=f", {_SIDES[name]}",
        below="h3",
        fits=repository.fits,
        verdict=f"{fitting} of {len(repository.found)} models {'fits' if fitting == 1 else 'fit'}",
        title=repository.address,
        command=None if best is None or best.plan is None else command_entry(best.plan),
        facts=[] if best is None else _facts(best),
        rows=[_figures_of(each, is_best=each is best) for each in repository.found],
        notes=[told(worded(line), root) for line in repository_lines(repository)],
    )


def api_page(schema: Mapping[str, Any]) -> str:
    """Write the OpenAPI document as a page without external parts."""
    calls = [
        {
            "method": method.upper(),
            "path": path,
            "summary": call.get("summary", ""),
            "description": call.get("description", ""),
            "fields": _fields(call, schema),
            "refusals": [(status, each["description"]) for status, each in call["responses"].items() if status >= "4"],
        }
        for path, methods in schema["paths"].items()
        for method, call in methods.items()
    ]
    template = output_pages.environment(_TEMPLATES).get_template("api.html")
    return template.render(title=schema["info"]["title"], calls=calls)


def _fields(call: Mapping[str, Any], schema: Mapping[str, Any]) -> list[tuple[str, bool, str]]:
    """Return name, necessity and meaning of each key in a call's body."""
    content = call.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
    name = content.get("$ref", "").rpartition("/")[2]
    body = schema.get("components", {}).get("schemas", {}).get(name, {})
    needed: Sequence[str] = body.get("required", ())
    return [(key, key in needed, each.get("description", "")) for key, each in body.get("properties", {}).items()]


def static() -> dict[str, tuple[str, str]]:
    """Return type and text of the style and the scripts, by path."""
    page_files = {name: (_TEMPLATES / name).read_text(encoding="utf-8") for name in ("app.css", "app.js")}
    script = "text/javascript; charset=utf-8"
    return {
        "/style.css": ("text/css; charset=utf-8", output_pages.style() + page_files["app.css"]),
        "/copy.js": (script, output_pages.resource("copy.js")),
        "/app.js": (script, page_files["app.js"]),
    }


def told(message: str, root: Root | None) -> str:
    """Remove this machine's directories and user name from a message, except below the root."""
    if root is not None:
        message = message.replace(f"{root.path}{os.sep}", "")
    home = os.path.expanduser("~")
    for place in (platformdirs.user_cache_dir(), tempfile.gettempdir(), home):
        if len(place) > 1:
            message = message.replace(place, "…")
    return printable(_PATH.sub("…/", message), LONGEST_TEXT)


LABELS = {
    "gpus": "card",
    "n_ctx": "context",
    "type_k": "keys",
    "type_v": "values",
    "n_seq_max": "slots",
    "workload": "work",
    "users": "users",
    "margin": "margin per card",
    "host_memory": "host memory",
    "program": "program",
}
"""Labels of the page's fields, by parameter. Other parameters are called by the words of their long option."""

UNSET = {
    "n_ctx": "the largest with which a request takes at most a tenth longer",
    "margin": "1024, or more where a card needs it",
}
"""Defaults of fields that the command line's help explains by another option or value."""

_ACTIONS = {"lower": "use a smaller {}", "omit": "set no {}", "raise": "use a larger {}", "set": "set another {}"}
_INSTEAD = {
    "time_limit": "set the context, or take fewer cards",
    "timeout": "try again later",
    "allow_private_addresses": "whoever starts the server can allow it",
    "format": "take another form",
    "shapes": "take one of the list",
}
"""Remedies of the page in place of those by something that it does not have; it leaves out all others of them."""
_OPTION = re.compile(r"(?<![\w-])--?[a-z][a-z0-9-]*")


@cache
def _labels() -> dict[str, str]:
    """Return the words for each option, and for a parameter as messages call it: ``n_ctx (-c)``."""
    words: dict[str, str] = {}
    for name, each in PARAMETERS.items():
        # whoever starts the server can name another llama.cpp
        if each.options and name != "llama_cpp":
            label = LABELS.get(name, each.long.replace("-", " "))
            words |= dict.fromkeys((*each.positive, *each.negative), label)
    return words


def _remedy(remedy: str) -> str:
    if not isinstance(remedy, Remedy):
        return remedy
    label = LABELS.get(remedy.parameter)
    return _INSTEAD.get(remedy.parameter, "") if label is None else _ACTIONS[remedy.action].format(label)


def worded(message: str) -> str:
    """Write a message of the library without options of the command line."""
    text = message.worded(_remedy) if isinstance(message, Message) else message
    for name, label in LABELS.items():
        text = text.replace(PARAMETERS[name].called, label)
    labels = _labels()
    return _OPTION.sub(lambda option: labels.get(option[0], option[0]), text)


def _facts(best: RepositoryFile) -> list[Fact]:
    rates = ((best.generation_tokens_per_second, "generation"), (best.prompt_tokens_per_second, "prompt"))
    facts = [Fact("best", best.file_type or best.name, human(best.bytes)), Fact("context", f"{best.n_ctx:,}", "tokens")]
    return facts + [Fact(name, speed(rate), "tokens/s, estimated") for rate, name in rates if rate is not None]


def _figures_of(each: RepositoryFile, *, is_best: bool) -> dict[str, Any]:
    """Write a model's figures; ``-`` for each that it does not have."""
    figures = {
        "size": human(each.bytes),
        "fits": _FITS[each.fits if each.plan is not None else None],
        "bits per weight": each.bits_per_weight and f"{each.bits_per_weight:.2f}",
        "context": each.n_ctx and f"{each.n_ctx:,}",
        "longest context": each.longest_context and f"{each.longest_context:,}",
        "weights on the host": human(each.plan.host.model) if each.plan is not None and each.fits else None,
        "generation, tokens/s": each.generation_tokens_per_second and speed(each.generation_tokens_per_second),
        "prompt, tokens/s": each.prompt_tokens_per_second and speed(each.prompt_tokens_per_second),
    }
    return {
        "name": each.name,
        "model": each.path,
        "has_plan": each.plan is not None,
        "is_best": is_best,
        "figures": [(title, text or "-") for title, text in figures.items()],
    }
