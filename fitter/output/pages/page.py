"""HTML pages that need no network: templates, scripts, and how text gets into them."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fitter.errors import LibraryError
from fitter.installation import install_command
from fitter.output.documents.document import dumps
from fitter.output.pictures import drawing
from fitter.output.pictures.drawing import NARROW, WIDE
from fitter.text import duration, human, printable, speed

if TYPE_CHECKING:
    from jinja2 import Environment
    from markupsafe import Markup

_TEMPLATES = Path(__file__).with_name("templates")
_OPTION = re.compile(r"(?<!\S)--?[a-z][a-z-]*(?!\S)")


def check_installed() -> None:
    """Raise ``LibraryError`` if a package for pages is missing, before anything is planned."""
    environment()


def page(
    template: str,
    *,
    documents: Sequence[tuple[str, Mapping[str, Any]]],
    scripts: Sequence[str] = ("copy.js",),
    styles: Sequence[str] = ("report.css",),
    **values: Any,
) -> str:
    """Fill ``template`` with ``values``, and embed ``documents`` as JSON under their names.

    Only ``scripts`` run in the page; they contain no text of the documents.
    """
    from markupsafe import Markup

    texts = [resource(name) for name in scripts]
    hashes = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in texts]
    allowed = " ".join(f"'sha256-{each}'" for each in hashes)
    return (
        environment()
        .get_template(template)
        .render(
            documents=[(name, Markup(_in_script(document))) for name, document in documents],
            scripts=[Markup(text) for text in texts],
            style=Markup(style(styles)),
            policy=f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src {allowed}; "
            "base-uri 'none'; form-action 'none'",
            **values,
        )
    )


def fragment(template: str, **values: Any) -> str:
    """Fill ``template`` with ``values`` for a page that already has ``style`` and the scripts."""
    return environment().get_template(template).render(**values)


def style(names: Sequence[str] = ("report.css",)) -> str:
    """Join the style sheets, also of the pictures."""
    from fitter.output.pictures import curves

    return "".join([*map(resource, names), drawing.STYLE, drawing.DARK, curves.STYLE])


def pictures(draw: Callable[[int], str]) -> list[tuple[str, Markup]]:
    """Draw a picture for a page and one for a telephone; a style sheet shows one of them."""
    from markupsafe import Markup

    return [("wide", Markup(draw(WIDE))), ("narrow", Markup(draw(NARROW)))]


@cache
def resource(name: str) -> str:
    """Read a style sheet or a script."""
    return (_TEMPLATES / name).read_text(encoding="utf-8")


@cache
def environment(templates: Path = _TEMPLATES) -> Environment:
    """Load the templates of a directory; they escape text and write it on one line.

    Raises ``LibraryError`` if a package is missing.
    """
    try:
        import pygal  # noqa: F401
        from jinja2 import Environment, FileSystemLoader, StrictUndefined
    except ImportError as error:
        raise LibraryError(
            f"a report needs the package {error.name}, which is missing: {install_command('report')}"
        ) from None
    jinja = Environment(
        loader=FileSystemLoader(templates),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_template_text,
    )
    jinja.filters |= {"human": human, "duration": duration, "speed": speed, "lines": _lines}
    return jinja


def _template_text(value: Any) -> Any:
    """Write a template's value: text on one line, without invisible characters."""
    return printable(value) if isinstance(value, str) and not hasattr(value, "__html__") else value


def _lines(text: str) -> Markup:
    """Make each line of a text safe to show, and keep options whole at their hyphens."""
    from markupsafe import Markup, escape

    lines = "\n".join(str(escape(printable(line))) for line in text.split("\n"))
    return Markup(_OPTION.sub(r'<span class="whole">\g<0></span>', lines))


def _in_script(document: Mapping[str, Any]) -> str:
    """Write JSON that cannot end its script: as ``--json`` prints it, but for ``<``."""
    return dumps(dict(document)).replace("<", r"\u003c")
