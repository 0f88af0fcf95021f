"""Read TOML: the data files that stand beside modules, and the files of users."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any


def parse_toml(text: str) -> dict[str, Any]:
    """Parse TOML. Raises ``ValueError`` (a ``TOMLDecodeError``) for anything else."""
    # Imported when it is needed: it takes milliseconds.
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    return tomllib.loads(text)


def read_data(module_file: str, name: str = "") -> dict[str, Any]:
    """Read the data file beside a module, given as its ``__file__``; by default the file of the module's own name."""
    path = Path(module_file)
    return parse_toml((path.with_name(name) if name else path.with_suffix(".toml")).read_text(encoding="utf-8"))
