"""Writing a file of figures that a machine was measured to have, all of it or nothing."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

from fitter.storage.files import make_private, replacing


def write(path: Path, document: object) -> None:
    """Write ``document`` as JSON in place of what is at ``path``. Raises ``OSError`` and leaves that as it is."""
    make_private(path.parent)
    with replacing(path) as file:
        file.write(json.dumps(document, indent=1).encode() + b"\n")


def write_if_possible(path: Path, document: object) -> None:
    """The same for what can be measured again: nothing is written where that cannot be."""
    with contextlib.suppress(OSError):
        write(path, document)
