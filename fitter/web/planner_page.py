"""The page, the page of the API, and what of errors may be told."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import platformdirs

from fitter.machine import gpu_catalogue
from fitter.model.shapes import listing
from fitter.model.shapes.shape_addresses import DEFAULT_TYPE
from fitter.output.pages import page as output_pages
from fitter.output.pages import report_page
from fitter.output.pictures.curves import tokens
from fitter.parameters.table import DEFAULTS, PARAMETERS
from fitter.programs import PROGRAMS
from fitter.text import LONGEST_TEXT, MIB, printable
from fitter.web.allowed_files import Root

if TYPE_CHECKING:
    from fitter.planning.plan.layer_map import LayerMap
    from fitter.planning.plan.plan import Plan

_TEMPLATES = Path(__file__).with_name("templates")
_TYPES = ("Q2_K", "IQ3_XXS", "Q3_K_M", "IQ4_XS", DEFAULT_TYPE, "Q5_K_M", "Q6_K", "Q8_0", "BF16")
"""File types that are offered for a shape; any other may be written."""
_PATH = re.compile(r"(?<![\w:/.])/(?:[^\s/:;,'\"()]+/)+")
"""Directories of this machine in a message."""


def page(root: Root | None, *, has_devices: bool) -> str:
    """The page that plans are made on, with the names of what there is; ``has_devices``: this machine's, too."""
    kinds = PARAMETERS["type_k"].kind
    return (
        output_pages.environment(_TEMPLATES)
        .get_template("page.html")
        .render(
            models=root.models() if root is not None else (),
            has_root=root is not None,
            has_devices=has_devices,
            shapes=shapes(),
            gpus=gpu_catalogue.gpus().values(),
            types=_TYPES,
            default_type=DEFAULT_TYPE,
            cache_types=tuple(getattr(kinds, "words", ())),
            default_cache=DEFAULTS["type_k"],
            programs=tuple(PROGRAMS),
            contexts=_contexts(),
            margin=DEFAULTS["host_margin"] // MIB,
        )
    )


@cache
def shapes() -> tuple[listing.ShapeInfo, ...]:
    """All shapes, whose headers take a moment to make."""
    return listing.shapes()


def _contexts() -> list[tuple[int, str]]:
    """The contexts that a slider steps through."""
    steps = sorted({base << power for power in range(21) for base in (512, 768) if base << power <= 1 << 20})
    return [(step, tokens(step)) for step in steps]


def panel(plan: Plan, found: LayerMap | None, name: str) -> str:
    """A plan as a part of the page: of its side ``a`` or ``b``."""
    return report_page.plan_panel(plan, found, name, {"a": "first plan", "b": "second plan"}[name])


def api_page(schema: Mapping[str, Any]) -> str:
    """The OpenAPI document as a page, which needs nothing from elsewhere."""
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
    """The keys of a call's body: name, whether it must be there, meaning."""
    content = call.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
    name = content.get("$ref", "").rpartition("/")[2]
    body = schema.get("components", {}).get("schemas", {}).get(name, {})
    needed: Sequence[str] = body.get("required", ())
    return [(key, key in needed, each.get("description", "")) for key, each in body.get("properties", {}).items()]


def static() -> dict[str, tuple[str, str]]:
    """The style and the scripts: the type and the text of each, by its path."""
    own = {name: (_TEMPLATES / name).read_text(encoding="utf-8") for name in ("app.css", "app.js")}
    script = "text/javascript; charset=utf-8"
    return {
        "/style.css": ("text/css; charset=utf-8", output_pages.style() + own["app.css"]),
        "/copy.js": (script, output_pages.resource("copy.js")),
        "/app.js": (script, own["app.js"]),
    }


def told(message: str, root: Root | None) -> str:
    """A message without what it says of this machine beyond the root: directories and the user's name."""
    if root is not None:
        message = message.replace(f"{root.path}{os.sep}", "")
    home = os.path.expanduser("~")
    for place in (platformdirs.user_cache_dir(), tempfile.gettempdir(), home):
        if len(place) > 1:
            message = message.replace(place, "…")
    return printable(_PATH.sub("…/", message), LONGEST_TEXT)


__all__ = ["api_page", "page", "panel", "shapes", "static", "told"]
