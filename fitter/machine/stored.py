"""Writing a file of figures that a machine was measured to have, all of it or nothing."""

from __future__ import annotations

import contextlib
import json
import os
import threading
from pathlib import Path


def write(path: Path, document: object) -> None:
    """Write ``document`` as JSON in place of what is at ``path``. Raises ``OSError`` and leaves that as it is."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        partial.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def write_if_possible(path: Path, document: object) -> None:
    """The same for what can be measured again: nothing is written where that cannot be."""
    with contextlib.suppress(OSError):
        write(path, document)
