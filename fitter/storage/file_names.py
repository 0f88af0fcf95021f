"""Names of files that every system takes."""

from __future__ import annotations

import re

_CHARACTERS = re.compile(r'[\x00-\x1f"%*/:<>?\\|]|[. ]$')
_DEVICES = re.compile(
    r"(?:CON|PRN|AUX|NUL|CONIN\$|CONOUT\$|(?:COM|LPT)[0-9\u00b9\u00b2\u00b3])(?= *(?:\.|$))", re.IGNORECASE
)
"""Names that are devices on Windows, with any ending (Microsoft Learn: Naming Files, Paths, and Namespaces)."""


def portable(name: str) -> str:
    """Write ``name`` so that every system takes it for a file: other characters as in an address, such as ``%3A``.

    Different names stay different.
    """
    name = _CHARACTERS.sub(lambda found: f"%{ord(found[0]):02X}", name)
    return f"%{ord(name[0]):02X}{name[1:]}" if _DEVICES.match(name) else name
