"""What MkDocs does to pages of this site: the copy button of a console block copies its commands alone."""

from __future__ import annotations

import html
import re
from typing import Any

_CONSOLE = re.compile(r'<div class="language-console highlight">(.*?)</div>', re.DOTALL)


def on_page_content(content: str, /, **_: Any) -> str:
    """MkDocs calls it with the HTML of every page."""
    return _CONSOLE.sub(lambda block: block[0].replace("<div ", f'<div data-copy="{_commands(block[1])}" ', 1), content)


def _commands(block: str) -> str:
    """The commands of a console block, one on a line, quoted for an attribute."""
    lines = html.unescape(re.sub(r"<[^>]+>", "", block)).splitlines()
    found: list[str] = []
    is_command = False
    for line in lines:
        is_command = line.startswith("$ ") or (is_command and line.startswith("> "))
        if is_command:
            found.append(line[2:])
    return html.escape("\n".join(found), quote=True).replace("\n", "&#10;")
