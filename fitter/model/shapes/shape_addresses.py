"""Addresses of models without a file: ``shape://NAME`` and ``config://config.json``.

``config://`` is followed by a path or by another address. Both may end in a colon and a file type.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

SHAPE, CONFIG = "shape", "config"
DEFAULT_TYPE = "Q4_K_M"
"""The file type where none is said, as llama-server takes it from a repository with several."""
PACKED_TYPE = "MXFP4_MOE"
"""The same of a model that is published with experts in MXFP4, which are kept so."""
CONVERTED = "converted"
"""Stands for the type that the model is converted to before anything is quantized: BF16, or F16."""

_ADDRESS = re.compile(r"(?P<scheme>shape|config):/{1,2}(?P<rest>.*)", re.DOTALL | re.IGNORECASE)
_TYPED = re.compile(
    r"(?P<what>.*):(?P<type>(?:I?Q|TQ|MXFP|NVFP|BF|F)[0-9][0-9A-Za-z_]*|converted)", re.DOTALL | re.IGNORECASE
)
"""A file type is said after the last colon; one that no llama.cpp has is found out later."""


@dataclass(frozen=True)
class Wanted:
    """What an address asks for: the ``name`` of a shape, or where a ``config.json`` is, as ``file_type``.

    That is empty where none is said.
    """

    scheme: str
    name: str
    file_type: str

    @property
    def address(self) -> str:
        """The address, with its file type."""
        return f"{self.scheme}://{self.name}" + (f":{self.file_type}" if self.file_type else "")

    @property
    def shown(self) -> str:
        """The address, without what may be secret in it."""
        from fitter.model.files.addresses import as_url, shown

        url = as_url(self.name) if self.scheme == CONFIG else None
        return self.address if url is None else Wanted(CONFIG, shown(url), self.file_type).address

    def of_type(self, file_type: str) -> Wanted:
        """The same as another file type."""
        return Wanted(self.scheme, self.name, file_type)

    @property
    def stem(self) -> str:
        """The name of a file of it, without where that is: of a ``config.json`` that of its directory."""
        name = self.name.replace("\\", "/").partition("?")[0].rstrip("/")
        last = name.rpartition("/")[2]
        if self.scheme == CONFIG and last.lower() == "config.json" and "/" in name:
            last = name.rpartition("/")[0].rpartition("/")[2]
        return re.sub(r"[^A-Za-z0-9._-]+", "-", last.removesuffix(".json"))[:100].strip("-.") or "model"

    @property
    def file_name(self) -> str:
        """The name that a file of it would have."""
        return f"{self.stem}-{self.file_type}.gguf" if self.file_type else f"{self.stem}.gguf"


def wanted(path: str | os.PathLike[str]) -> Wanted | None:
    """What ``path`` asks for; ``None`` if it is the path or the address of a file."""
    match = _ADDRESS.fullmatch(os.fspath(path))
    if match is None:
        return None
    scheme, rest = match["scheme"].lower(), match["rest"]
    rest = rest.strip().lower() if scheme == SHAPE else rest
    typed = _TYPED.fullmatch(rest)
    if typed is None and scheme == SHAPE and ":" in rest:
        name, _, file_type = rest.partition(":")
        return Wanted(scheme, name, file_type.upper())
    if typed is None:
        return Wanted(scheme, rest, "")
    return Wanted(scheme, typed["what"], CONVERTED if typed["type"].lower() == CONVERTED else typed["type"].upper())


def named(scheme: str, text: str) -> str:
    """The address of the shape or the ``config.json`` that an option names, which may be an address itself."""
    found = wanted(text)
    return text if found is not None and found.scheme == scheme else f"{scheme}://{text}"


def as_converted(path: str) -> str:
    """The address of the same model before it is quantized; ``path`` itself if it is no model without a file."""
    found = wanted(path)
    return path if found is None else found.of_type(CONVERTED).address


def note(called: str) -> tuple[str, ...]:
    """What a plan says of a model that is ``called`` so, if that has no file."""
    found = wanted(called)
    if found is None:
        return ()
    of = "as published" if found.scheme == SHAPE else "in that config.json"
    full = found.file_type in ("F32", "F16", "BF16")
    types = "as it is converted" if full else "with the types that llama-quantize chooses without an importance matrix"
    return (
        f"{found.shown} is the shape of a model, not a file: its tensors follow from the hyperparameters {of}, "
        f"{found.file_type} {types}",
    )


def beside(path: str, directory: str | os.PathLike[str]) -> str:
    """``path`` with that of a ``config.json`` relative to ``directory``; itself if there is none in it."""
    found = wanted(path)
    if found is None or found.scheme != CONFIG or "://" in found.name:
        return path
    name = os.path.expanduser(found.name)
    # one without a directory is not named by that which it happens to be in: it would be called otherwise elsewhere
    here = "" if os.path.dirname(name) else os.curdir
    return Wanted(CONFIG, os.path.join(directory, here, name), found.file_type).address
