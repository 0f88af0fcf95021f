"""List the models of a repository of Hugging Face's hub or of a directory, and their other GGUF files."""

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
"""Beginnings by which llama.cpp recognizes files that are no models (``gguf_filename_is_model``), with their kinds."""

_FILE_TYPE = re.compile(
    r"(?:(?:UD|APEX|DWQ)-)?(?:I?Q[0-9](?:_[A-Z0-9]+)*|TQ[0-9]_[0-9]|MXFP4(?:_[A-Z0-9]+)*|NVFP4|BF16|F16|FP16|F32)",
    re.IGNORECASE,
)
_MOST_NAMED = 12
"""Most file types in a message."""


@dataclass(frozen=True)
class SideFile:
    """A GGUF file that is no model itself."""

    name: str
    """Its path in the repository."""
    kind: str
    """``multimodal projector``, ``draft model`` or ``importance matrix``, by its name as in llama.cpp."""
    bytes: int
    """Bytes of the file."""


@dataclass(frozen=True)
class Listed:
    """A model of a repository; ``path`` opens it, ``problem`` says why nothing can."""

    path: str
    name: str
    files: tuple[str, ...]
    bytes: int
    problem: str | None = None

    @property
    def file_type(self) -> str:
        """The file type in its name, such as ``Q4_K_M`` or ``UD-Q4_K_XL``; empty if none."""
        return type_by_name(self.name)


@dataclass(frozen=True)
class Listing:
    """The files of a repository; ``called`` is its address or path, ``names`` are all files in their order."""

    called: str
    models: tuple[Listed, ...]
    beside: tuple[SideFile, ...]
    hub: HubFolder | None = None
    names: tuple[str, ...] = field(default=(), repr=False)

    def path_of(self, name: str) -> str | None:
        """Return the path or address of a file by its name; ``None`` if there is none."""
        if name not in self.names:
            return None
        return self.hub.file(name) if self.hub else os.path.join(self.called, name)


def is_repository(path: str | os.PathLike[str]) -> bool:
    """Return whether ``path`` is a repository or folder of the hub, or a directory with GGUF files."""
    text = os.fspath(path)
    if "://" in text or ":/" in text:
        from fitter.model.files.addresses import as_url

        return hub_folder(as_url(text) or "") is not None
    return os.path.isdir(text) and any(_files_below(Path(text)))


def listing(path: str | os.PathLike[str], seconds: float) -> Listing:
    """List a repository or directory.

    Args:
        path: Its path or address.
        seconds: Time limit for the hub.

    Raises:
        ModelError: It does not exist, or has no model.
        LibraryError: huggingface_hub is missing.
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
        made = listed(text, sorted(_files_below(directory)), None)
        where = show(directory)
    if not made.models and not made.beside:
        raise ModelError(f"{where} has no GGUF file: look for a repository with GGUF files of this model")
    if not made.models:
        kinds = ", ".join(sorted({each.kind for each in made.beside}))
        raise ModelError(f"{where} has no GGUF file of a model, only of another kind ({kinds}): take another one")
    return made


def listed(called: str, files: Iterable[tuple[str, int]], hub: HubFolder | None) -> Listing:
    """Sort ``files`` (names and bytes) into models and others, in the order of their names."""
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
    """Return the file type in a file's name or its folder's; empty if none."""
    path = Path(name)
    split = split_name(path)
    stem = split[0] if split else path.name.removesuffix(_SUFFIX)
    for text in (stem, path.parent.name):
        types = [
            match[0]
            for match in _FILE_TYPE.finditer(text)
            if not (match.start() and text[match.start() - 1].isalnum())
            and not text[match.end() : match.end() + 1].isalnum()
        ]
        if types:
            return types[-1].upper()
    return ""


def only(repository: Listing, types: tuple[str, ...]) -> tuple[tuple[Listed, ...], str | None]:
    """Select models by file type; also return the first of ``types`` without a model."""
    kept = []
    for each in repository.models:
        kind = each.file_type
        if any(wanted.upper() in (kind, kind.partition("-")[2]) for wanted in types):
            kept.append(each)
    has = {word for each in kept for word in (each.file_type, each.file_type.partition("-")[2])}
    return tuple(kept), next((each for each in types if each.upper() not in has), None)


def types_in(repository: Listing) -> str:
    """List the file types in the names, for a message."""
    types = sorted({each.file_type for each in repository.models} - {""})
    more = f" and {len(types) - _MOST_NAMED} more" if len(types) > _MOST_NAMED else ""
    return ", ".join(types[:_MOST_NAMED]) + more if types else "none by its files' names"


def hf_words(repository: Listing, chosen: Listed) -> list[str] | None:
    """Return llama.cpp's own arguments to download exactly ``chosen``; ``None`` if they would take another file.

    ``-hf org/repo:TYPE`` takes the first model with the type before a dot or hyphen in its path, so the type must name
    only this one.
    """
    hub = repository.hub
    if hub is None or hub.revision not in (None, "main") or hub.kind is not None or "preset.ini" in repository.names:
        # llama.cpp knows no revisions, and follows a preset if there is one
        return None
    words = ["-hf", hub.repository, "-hff", chosen.name]
    if not hub.folder and (kind := chosen.file_type):
        pattern = re.compile(re.escape(kind) + "[.-]", re.IGNORECASE)
        if [each for each in repository.models if pattern.search(each.name)] == [chosen]:
            words = ["-hf", f"{hub.repository}:{kind}"]
    has_projector = any(each.kind == _SIDE["mmproj"] for each in repository.beside)
    return [*words, "--no-mmproj"] if has_projector else words


def _is_gguf(name: str) -> bool:
    return name.endswith(_SUFFIX)


def _files_below(directory: Path) -> Iterable[tuple[str, int]]:
    """Yield the GGUF files in a directory and below, with their bytes."""
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
