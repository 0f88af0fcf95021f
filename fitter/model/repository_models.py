"""The models in a repository of Hugging Face's hub, or in a directory: split files together, other GGUF files apart."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fitter.errors import ModelError
from fitter.model.files.addresses import HubFolder, hub_folder
from fitter.model.files.ranges import Patience
from fitter.model.files.source import show, split_name

_SUFFIX = ".gguf"
_SIDE = {
    "mmproj": "multimodal projector",
    "imatrix": "importance matrix",
    "mtp-": "draft model",
    "eagle3-": "draft model",
    "dflash-": "draft model",
    "dspark-": "draft model",
}
"""What llama.cpp knows a file by that is no model of its own (``gguf_filename_is_model``), and what it is."""

_FILE_TYPE = re.compile(
    r"(?:(?:UD|APEX|DWQ)-)?(?:I?Q[0-9](?:_[A-Z0-9]+)*|TQ[0-9]_[0-9]|MXFP4(?:_[A-Z0-9]+)*|NVFP4|BF16|F16|FP16|F32)",
    re.IGNORECASE,
)
_MOST_NAMED = 12
"""How many file types a message lists."""


@dataclass(frozen=True)
class SideFile:
    """A GGUF file that is not a model of its own."""

    name: str
    """Its path in the repository."""
    kind: str
    """``multimodal projector``, ``draft model`` or ``importance matrix``, by its name as llama.cpp reads it."""
    bytes: int
    """Bytes of the file."""


@dataclass(frozen=True)
class Listed:
    """A model of a repository. ``path`` is what opens it, ``problem`` why it cannot be."""

    path: str
    name: str
    files: tuple[str, ...]
    bytes: int
    problem: str | None = None

    @property
    def file_type(self) -> str:
        """The file type by its name, such as ``Q4_K_M`` or ``UD-Q4_K_XL``; empty where the name has none."""
        return type_by_name(self.name)


@dataclass(frozen=True)
class Listing:
    """What a repository has. ``called`` is its address or path; ``names`` are all its files, in their order."""

    called: str
    models: tuple[Listed, ...]
    beside: tuple[SideFile, ...]
    hub: HubFolder | None = None
    names: tuple[str, ...] = field(default=(), repr=False)

    def path_of(self, name: str) -> str | None:
        """What opens the file of that name in it; ``None`` where it has none."""
        if name not in self.names:
            return None
        return self.hub.file(name) if self.hub else os.path.join(self.called, name)


def is_repository(path: str | os.PathLike[str]) -> bool:
    """Whether ``path`` is a repository or a folder of the hub, or a directory with GGUF files in it."""
    text = os.fspath(path)
    if "://" in text or ":/" in text:
        from fitter.model.files.addresses import as_url

        return hub_folder(as_url(text) or "") is not None
    return os.path.isdir(text) and any(_found(Path(text)))


def listing(path: str | os.PathLike[str], seconds: float) -> Listing:
    """What is in the repository or the directory at ``path``.

    ``seconds`` are for asking the hub. Raises ``ModelError`` where there is none, or no model in it, and
    ``LibraryError`` without huggingface_hub.
    """
    from fitter.model.files.addresses import as_url

    text = os.fspath(path)
    place = hub_folder(as_url(text) or "") if ":" in text else None
    if place is not None:
        from fitter.model.files.hub import files_of

        files = files_of(place, Patience(seconds))
        made = listed(place.url, files, place)
        where = place.url
    else:
        from fitter.model.files.addresses import shown

        directory, url = Path(text).expanduser(), as_url(text)
        if not directory.is_dir():
            where = show(directory) if url is None else shown(url)
            raise ModelError(
                f"{where} is no repository and no directory: give one of them (hf://org/repo), or plan the model itself"
            )
        made = listed(text, sorted(_found(directory)), None)
        where = show(directory)
    if not made.models and not made.beside:
        raise ModelError(f"{where} has no GGUF file: look for a repository with GGUF files of this model")
    if not made.models:
        kinds = ", ".join(sorted({each.kind for each in made.beside}))
        raise ModelError(f"{where} has no GGUF file of a model, only of another kind ({kinds}): take another one")
    return made


def listed(called: str, files: Iterable[tuple[str, int]], hub: HubFolder | None) -> Listing:
    """The models among ``files``, each a name with its bytes, in the order of their names."""
    sizes = dict(files)
    beside: list[SideFile] = []
    models: dict[tuple[str, int], list[str]] = {}
    for name, size in sizes.items():
        if not _is_gguf(name):
            continue
        folder, slash, last = name.rpartition("/")
        kind = next((kind for word, kind in _SIDE.items() if word in last), None)
        split = split_name(Path(name))
        if kind is not None:
            beside.append(SideFile(name, kind, size))
        elif split is None:
            models[name, 1] = [name]
        else:
            prefix, _, count = split
            models.setdefault((f"{folder}{slash}{prefix}", count), []).append(name)
    found = tuple(
        Listed(
            _path(called, there[0], hub), there[0], tuple(there), sum(map(sizes.__getitem__, there)), _lack(there, n)
        )
        for (_, n), there in models.items()
    )
    return Listing(called, found, tuple(beside), hub, tuple(sizes))


def _lack(there: Sequence[str], count: int) -> str | None:
    missing = count - len(there)
    return f"{missing} of its {count} files are missing" if missing else None


def _path(called: str, name: str, hub: HubFolder | None) -> str:
    return hub.file(name) if hub else os.path.join(called, name)


def type_by_name(name: str) -> str:
    """The file type that the name of a file says, or that of its folder; empty where neither does."""
    path = Path(name)
    split = split_name(path)
    stem = split[0] if split else path.name.removesuffix(_SUFFIX)
    for text in (stem, path.parent.name):
        found = [
            match[0]
            for match in _FILE_TYPE.finditer(text)
            if not (match.start() and text[match.start() - 1].isalnum())
            and not text[match.end() : match.end() + 1].isalnum()
        ]
        if found:
            return found[-1].upper()
    return ""


def only(found: Listing, types: tuple[str, ...]) -> tuple[tuple[Listed, ...], str | None]:
    """The models of file types, by their names, and the first of ``types`` that there is none of."""
    kept = []
    for each in found.models:
        kind = each.file_type
        if any(wanted.upper() in (kind, kind.partition("-")[2]) for wanted in types):
            kept.append(each)
    has = {word for each in kept for word in (each.file_type, each.file_type.partition("-")[2])}
    return tuple(kept), next((each for each in types if each.upper() not in has), None)


def types_in(found: Listing) -> str:
    """The file types that the names say, for a message."""
    types = sorted({each.file_type for each in found.models} - {""})
    more = f" and {len(types) - _MOST_NAMED} more" if len(types) > _MOST_NAMED else ""
    return ", ".join(types[:_MOST_NAMED]) + more if types else "none by its files' names"


def hf_words(found: Listing, chosen: Listed) -> list[str] | None:
    """llama.cpp's own arguments that download ``chosen``, and nothing beside it; ``None`` where it would take another.

    With ``-hf org/repo:TYPE`` it takes the first model in whose path that type is followed by a dot or a hyphen, so
    that is what names the only one of that kind.
    """
    hub = found.hub
    if hub is None or hub.revision not in (None, "main") or hub.kind is not None or "preset.ini" in found.names:
        # It knows no revisions, and where there is a preset it takes what that says.
        return None
    words = ["-hf", hub.repository, "-hff", chosen.name]
    if not hub.folder and (kind := chosen.file_type):
        pattern = re.compile(re.escape(kind) + "[.-]", re.IGNORECASE)
        if [each for each in found.models if pattern.search(each.name)] == [chosen]:
            words = ["-hf", f"{hub.repository}:{kind}"]
    has_projector = any(each.kind == _SIDE["mmproj"] for each in found.beside)
    return [*words, "--no-mmproj"] if has_projector else words


def _is_gguf(name: str) -> bool:
    return name.endswith(_SUFFIX)


def _found(directory: Path) -> Iterable[tuple[str, int]]:
    """The GGUF files in a directory and in those below it, with their bytes."""
    for place, folders, names in os.walk(directory):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in names:
            path = os.path.join(place, name)
            if _is_gguf(name) and os.path.isfile(path):
                yield os.path.relpath(path, directory).replace(os.sep, "/"), os.path.getsize(path)


__all__ = [
    "Listed",
    "Listing",
    "SideFile",
    "hf_words",
    "is_repository",
    "listed",
    "listing",
    "only",
    "type_by_name",
    "types_in",
]
