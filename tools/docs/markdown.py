"""Words for the pages that are generated: text of help and docstrings as Markdown, tables, links."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Sequence

_CODE = re.compile(r"(`+[^`]+`+|(?<![\w`-])--?[a-zA-Z][\w-]*(?![\w`]))")
_SPECIAL = re.compile(r"([\\*_<>\[\]|`])")
_NUMBER = re.compile(r"-?[\d.,]+")
_ROLE = re.compile(r":(?:class|func|meth):`~?([^`]+)`")


def plain(text: str) -> str:
    """Text without markup, such as a help, as Markdown: what looks like an option, or is in backticks, is code."""
    parts = _CODE.split(" ".join(text.split()))
    return "".join(f"`{part.strip('`')}`" if i % 2 else _SPECIAL.sub(r"\\\1", part) for i, part in enumerate(parts))


def paragraphs(docstring: str | None) -> list[str]:
    """The paragraphs of a docstring as Markdown, each on one line unless it is a list.

    A section ``Args:`` becomes a list, ``Returns:`` and ``Raises:`` a paragraph that begins with the word.
    """
    text = _ROLE.sub(r"`\1`", inspect.cleandoc(docstring or "")).replace("``", "`")
    found = [part.strip() for part in re.split(r"\n\s*\n", text) if part.strip()]
    return [part if part.startswith("- ") else _section(part) or " ".join(part.split()) for part in found]


def _section(part: str) -> str:
    """A section of a docstring in Google's layout; empty for any other paragraph."""
    head, _, body = part.partition("\n")
    if head not in ("Args:", "Returns:", "Raises:") or not body:
        return ""
    entries = [" ".join(each.split()) for each in re.split(r"\n(?=\S)", inspect.cleandoc(body))]
    if head == "Returns:":
        return f"Returns {' '.join(entries)[0].lower()}{' '.join(entries)[1:]}"
    named = [re.sub(r"^`?([\w.*]+)`?( \(.*?\))?: ", r"`\1`\2: ", each) for each in entries]
    if head == "Args:":
        return "\n".join(f"- {each}" for each in named)
    return f"Raises {'; '.join(each.rstrip('.') for each in named)}."


def sentence(docstring: str | None) -> str:
    """A whole docstring as one paragraph of Markdown."""
    return " ".join(paragraphs(docstring))


def code(text: object) -> str:
    """``text`` as code; empty if it is."""
    return f"`{text}`" if str(text) else ""


def codes(words: Iterable[object], between: str = ", ") -> str:
    """Several words, each as code."""
    return between.join(map(code, words))


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table. A column that is empty in all rows is left out; one of numbers is aligned to the right."""
    body = [[_cell(cell) for cell in row] for row in rows]
    kept = [i for i in range(len(head)) if any(row[i] for row in body)]
    rules = ["---:" if all(_NUMBER.fullmatch(row[i]) for row in body if row[i]) else "---" for i in kept]
    lines = [[head[i] for i in kept], rules, *([row[i] for i in kept] for row in body)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(text: str) -> str:
    """``text`` for a cell: a vertical line ends it, but not in code, where a backslash would be shown."""
    parts = text.replace("\n", " ").split("`")
    return "`".join(part if i % 2 else re.sub(r"\\?\|", r"\|", part) for i, part in enumerate(parts))


def heading(level: int, text: str, anchor: str = "") -> str:
    """A heading, with an anchor of its own if one is given."""
    return f"{'#' * level} {text}" + (f" {{ #{anchor} }}" if anchor else "")


def fenced(text: str, reason: str, language: str = "text") -> str:
    """A block that is shown and not run."""
    return f"<!-- not run: {reason} -->\n```{language}\n{text.rstrip()}\n```"


def page(title: str, *parts: str) -> str:
    """A whole page."""
    body = "\n\n".join(part.strip("\n") for part in parts if part.strip())
    return f"# {title}\n\n<!-- made by 'python -m tools.docs.reference': change what it is made from -->\n\n{body}\n"
