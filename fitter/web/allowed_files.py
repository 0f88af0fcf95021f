"""Models below the directory that a server offers. Nothing outside of it is named, opened or listed."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from fitter.errors import ModelError, UsageError
from fitter.model.files.source import split_name, split_path
from fitter.model.repository_models import Listed, listed, listing
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

    def folders(self) -> Iterator[tuple[str, int]]:
        """List the directories with several models in them or below, with their number: ``./`` and ``sub/``."""
        counts: Counter[str] = Counter()
        for each in self.models():
            parts = each.path.split("/")[:-1]
            counts.update(["./", *("/".join(parts[: i + 1]) + "/" for i in range(len(parts)))])
        return ((name, count) for name, count in counts.items() if count > 1)

    def folder(self, name: str) -> Path:
        """Return a directory of ``folders``. Raises ``ModelError`` for another one, or with links to other places."""
        if name not in dict(self.folders()):
            raise ModelError(f"there are no models in '{printable(name, LONGEST_NAME)}': take a directory of the list")
        path = self.path.joinpath(*_decoded(name).split("/"))
        within = {each for each, _ in self._files_below()}
        prefix = name.removeprefix("./")
        if not all(prefix + encoded(each) in within for each in listing(path, 0).names):
            raise ModelError(f"'{printable(name, LONGEST_NAME)}' has links to other places: plan one of its files")
        return path

    def file(self, name: str) -> Path:
        """Return the file of a model by its relative path. Raises ``ModelError`` if it is not below the root."""
        unknown = ModelError(f"there is no model '{printable(name, LONGEST_NAME)}' here: take one of the list")
        parts = _decoded(name).split("/")
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
                        yield encoded(path.relative_to(self.path).as_posix()), path.stat().st_size


def encoded(name: str) -> str:
    """Write a name for JSON, with ``\\xff`` for each byte that is not UTF-8."""
    return os.fsencode(name).decode(errors="backslashreplace")


def _decoded(name: str) -> str:
    return _BYTE.sub(lambda byte: os.fsdecode(bytes.fromhex(byte[1])), name)
