"""Models below the directory that a server offers. Nothing outside of it is named, opened or listed."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from fitter.errors import ModelError, UsageError
from fitter.model.files.source import split_name, split_path
from fitter.model.repository_models import Listed, listed
from fitter.text import LONGEST_NAME, printable

_SUFFIX = ".gguf"
_BYTE = re.compile(r"\\x([89a-f][0-9a-f])")
"""Writes a byte of a name that is not UTF-8, which JSON cannot hold."""
_MOST = 5000
"""Most files and directories to list, so that a whole disk as root answers too."""


@dataclass(frozen=True)
class Root:
    """A directory whose models may be planned, by its real path."""

    path: Path

    @classmethod
    def of(cls, path: Path) -> Root:
        """Open a directory. Raises ``UsageError`` if it cannot be read."""
        try:
            real = path.expanduser().resolve(strict=True)
            next(os.scandir(real), None)
        except (OSError, RuntimeError) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            raise UsageError(f"--root {path}: {reason}: name a directory with models") from None
        return cls(real)

    def models(self) -> tuple[Listed, ...]:
        r"""List the models below it, by relative path, in order; links to other places are skipped.

        Bytes of a name that is not UTF-8 are written as ``\xff``.
        """
        models = sorted(self._files_below())
        return tuple(each for each in listed("", models, None).models if each.problem is None)

    def file(self, name: str) -> Path:
        """Return the file of a model by its relative path. Raises ``ModelError`` if it is not below the root."""
        unknown = ModelError(f"there is no model '{printable(name, LONGEST_NAME)}' here: take one of the list")
        parts = _BYTE.sub(lambda byte: os.fsdecode(bytes.fromhex(byte[1])), name).split("/")
        if any(part in ("", ".", "..") or "\\" in part for part in parts) or not parts[-1].endswith(_SUFFIX):
            raise unknown
        path = self.path.joinpath(*parts)
        if not self._has(path):
            raise unknown
        split = split_name(path)
        files = (
            [path]
            if split is None
            else [path.with_name(split_path(split[0], number, split[2])) for number in range(1, split[2] + 1)]
        )
        # opening the model will report a missing file
        if not all(self._has(each) for each in files if os.path.lexists(each)):
            raise unknown
        return path

    def _has(self, path: Path) -> bool:
        """Return whether a file is really below the root, wherever links lead."""
        try:
            real = path.resolve(strict=True)
            return real.is_relative_to(self.path) and real.is_file()
        except (OSError, RuntimeError, ValueError):
            return False

    def _files_below(self) -> Iterator[tuple[str, int]]:
        seen = 0
        for place, folders, names in os.walk(self.path):
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            seen += 1
            for name in sorted(names):
                seen += 1
                if seen > _MOST:
                    return
                path = Path(place, name)
                # it may be removed meanwhile
                with suppress(OSError):
                    if name.endswith(_SUFFIX) and self._has(path):
                        called = os.fsencode(path.relative_to(self.path).as_posix()).decode(errors="backslashreplace")
                        yield called, path.stat().st_size


__all__ = ["Root"]
