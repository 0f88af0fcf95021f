"""Writes the reference pages of the documentation from what they are about.

    python -m tools.docs.reference [--check]

With ``--check`` nothing is written; pages that would change are named, and the exit status is 1 if there are any.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from tools.docs import of_cases, of_errors, of_gpus, of_json, of_options, of_python
from tools.docs.pages import ROOT

REFERENCE = ROOT / "docs" / "reference"

PAGES: dict[str, Callable[[], str]] = {
    "commands.md": of_options.commands_page,
    "options.md": of_options.options_page,
    **of_options.topic_pages(),
    "llama-options.md": of_options.llama_options_page,
    "levers.md": of_gpus.levers_page,
    "formats.md": of_gpus.formats_page,
    "fitter-toml.md": of_cases.toml_page,
    "pytest.md": of_cases.pytest_page,
    "json.md": of_json.json_page,
    **{f"{name}.schema.json": document for name, document in of_json.schema_files().items()},
    "python.md": of_python.functions_page,
    "python-types.md": of_python.types_page,
    "errors.md": of_errors.errors_page,
    "exit-statuses.md": of_errors.exit_statuses_page,
    "gpus.md": of_gpus.gpus_page,
}
"""What writes each file of the reference."""


def stale(folder: Path = REFERENCE) -> list[str]:
    """The files that are not what would be written now, or that nothing writes."""
    found = [name for name, text in PAGES.items() if _read(folder / name) != text()]
    return found + sorted(path.name for path in folder.iterdir() if path.name not in PAGES)


def _read(path: Path) -> str | None:
    return path.read_text(encoding="utf-8") if path.exists() else None


def write(folder: Path = REFERENCE) -> None:
    """Write every file, and remove those that nothing writes."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in PAGES.items():
        (folder / name).write_text(text(), encoding="utf-8")
    for path in folder.iterdir():
        if path.name not in PAGES:
            path.unlink()


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the reference, or check it; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tools.docs.reference", description="Write the reference pages.")
    parser.add_argument("--check", action="store_true", help="only say which pages would change")
    if not parser.parse_args(arguments).check:
        write()
        return 0
    for name in (names := stale()):
        print(f"docs/reference/{name} is stale: run 'python -m tools.docs.reference' and commit it")
    return 1 if names else 0


if __name__ == "__main__":
    sys.exit(main())
