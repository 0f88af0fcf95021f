"""Models without a file: their addresses, ``shape://NAME`` and ``config://config.json``, and the catalogue of shapes.

A path or another address follows ``config://``. Both may end with a colon and a file type. The bare name of a shape is
its address too, where no such file is. The catalogue has published hyperparameters with their source, one small file
each.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fitter.errors import Remedy, UsageError
from fitter.parameters.values import shown
from fitter.storage import parse_toml
from fitter.text import printable

SHAPE, CONFIG = "shape", "config"
DEFAULT_TYPE = "Q4_K_M"
"""The default file type; llama-server takes it from a repository with several."""
PACKED_TYPE = "MXFP4_MOE"
"""The default for a model that is published with experts in MXFP4, which it keeps."""
FILE_TYPES = (
    *("Q4_K_M", "Q8_0", "Q6_K", "Q5_K_M", "Q5_K_S", "Q4_K_S", "Q3_K_L", "Q3_K_M", "Q3_K_S", "Q2_K", "Q2_K_S"),
    *("IQ4_NL", "IQ4_XS", "IQ3_M", "IQ3_S", "IQ3_XS", "IQ3_XXS", "IQ2_M", "IQ2_S", "IQ2_XS", "IQ2_XXS", "IQ1_M"),
    *("IQ1_S", "Q5_1", "Q5_0", "Q4_1", "Q4_0", "Q2_0", "Q1_0", "TQ2_0", "TQ1_0", "MXFP4_MOE", "BF16", "F16", "F32"),
)
"""File types of llama-quantize in llama.cpp 0c1e57098. Any other that the user's llama.cpp has can be planned too."""
CONVERTED = "converted"
"""Stands for the type of the converted model before any quantization: BF16, or F16."""

_ADDRESS = re.compile(r"(?P<scheme>shape|config):/{1,2}(?P<rest>.*)", re.DOTALL | re.IGNORECASE)
_TYPED = re.compile(
    r"(?P<what>.*):(?P<type>(?:I?Q|TQ|MXFP|NVFP|BF|F)[0-9][0-9A-Za-z_]*|converted)", re.DOTALL | re.IGNORECASE
)
"""The file type after the last colon; whether llama.cpp has it is checked later."""


@dataclass(frozen=True)
class Wanted:
    """A model without a file: the ``name`` of a shape or the place of a ``config.json``, and the ``file_type`` (empty
    if not named).
    """

    scheme: str
    name: str
    file_type: str

    @property
    def address(self) -> str:
        """Its address, with the file type."""
        return f"{self.scheme}://{self.name}" + (f":{self.file_type}" if self.file_type else "")

    @property
    def shown(self) -> str:
        """Its address, without possible secrets."""
        from fitter.model.files.addresses import as_url, shown

        url = as_url(self.name) if self.scheme == CONFIG else None
        return self.address if url is None else Wanted(CONFIG, shown(url), self.file_type).address

    def of_type(self, file_type: str) -> Wanted:
        """Return it in another file type."""
        return Wanted(self.scheme, self.name, file_type)

    @property
    def stem(self) -> str:
        """Name of its file; for a ``config.json``, its directory's."""
        name = self.name.replace("\\", "/").partition("?")[0].rstrip("/")
        last = name.rpartition("/")[2]
        if self.scheme == CONFIG and last.lower() == "config.json" and "/" in name:
            last = name.rpartition("/")[0].rpartition("/")[2]
        return re.sub(r"[^A-Za-z0-9._-]+", "-", last.removesuffix(".json"))[:100].strip("-.") or "model"

    @property
    def file_name(self) -> str:
        """Name that its file would have."""
        return f"{self.stem}-{self.file_type}.gguf" if self.file_type else f"{self.stem}.gguf"


def wanted(path: str | os.PathLike[str]) -> Wanted | None:
    """Parse an address, or the name of a shape; ``None`` for the path or address of a file."""
    text = os.fspath(path)
    if (address := _parsed(text)) is not None:
        return address
    shape = by_name(text)
    return None if shape is None or os.path.lexists(text) else shape


def by_name(text: str) -> Wanted | None:
    """Parse ``NAME`` or ``NAME:TYPE`` of a shape, or a name as Ollama writes it; ``None`` for anything else."""
    if text.endswith(".gguf") or "/" in text:
        # most are files, which need no catalogue
        return None
    if text.partition(":")[0].strip().lower() in shape_names():
        return _parsed(f"{SHAPE}://{text}")
    name = spelt_so(text)
    return Wanted(SHAPE, name, "") if name else None


def _parsed(text: str) -> Wanted | None:
    match = _ADDRESS.fullmatch(text)
    if match is None:
        return None
    scheme, rest = match["scheme"].lower(), match["rest"]
    rest = rest.strip().lower() if scheme == SHAPE else rest
    typed = _TYPED.fullmatch(rest)
    if typed is None and scheme == SHAPE and ":" in rest:
        name, _, file_type = rest.partition(":")
        return Wanted(scheme, name, type_name(file_type))
    if typed is None:
        return Wanted(scheme, rest, "")
    return Wanted(scheme, typed["what"], CONVERTED if typed["type"].lower() == CONVERTED else type_name(typed["type"]))


def type_name(text: str) -> str:
    """Return llama-quantize's spelling of a file type: ``Q4_K_M`` for ``q4km`` and ``q4-k-m``; others in capitals."""
    spelt = {name.replace("_", ""): name for name in FILE_TYPES}
    name = text.strip().upper()
    return spelt.get(re.sub("[-_ ]", "", name), name)


def unknown_type(name: str, known: Sequence[str]) -> UsageError:
    """Make the error for a file type that llama.cpp does not have; ``known`` are those that it has."""
    import difflib

    begins = [each for each in (*FILE_TYPES, *known) if each.startswith(name) and each in known]
    close = list(dict.fromkeys(begins or difflib.get_close_matches(name, known)))[:3]
    meant = f"did you mean {' or '.join(close)}? " if close else ""
    return UsageError(f"this llama.cpp has no file type {shown(name)}: {meant}it has {', '.join(known)}")


def named(scheme: str, text: str) -> str:
    """Return the address of the shape or ``config.json`` in an option, which may be an address itself."""
    address = _parsed(text)
    if address is not None and address.scheme == scheme:
        return text
    shape = by_name(text) if scheme == SHAPE else None
    return shape.address if shape else f"{scheme}://{text}"


def as_converted(path: str) -> str:
    """Return the address of the model before any quantization; ``path`` itself if the model has a file."""
    shape = wanted(path)
    return path if shape is None else shape.of_type(CONVERTED).address


def note(called: str) -> tuple[str, ...]:
    """List the notes of a plan for a model without a file."""
    shape = wanted(called)
    if shape is None:
        return ()
    of = "as published" if shape.scheme == SHAPE else "in that config.json"
    full = shape.file_type in ("F32", "F16", "BF16")
    types = "as it is converted" if full else "with the types that llama-quantize chooses without an importance matrix"
    return (
        f"{shape.shown} is the shape of a model, not a file: its tensors follow from the hyperparameters {of}, "
        f"{shape.file_type} {types}",
    )


def beside(path: str, directory: str | os.PathLike[str]) -> str:
    """Make the path of a ``config.json`` in ``path`` relative to ``directory``; ``path`` itself if it has none."""
    shape = wanted(path)
    if shape is None or shape.scheme != CONFIG or "://" in shape.name:
        return path
    name = os.path.expanduser(shape.name)
    # a bare file name stays one: its directory differs between machines
    here = "" if os.path.dirname(name) else os.curdir
    return Wanted(CONFIG, os.path.join(directory, here, name), shape.file_type).address


_FOLDER = Path(__file__).with_name("catalogue")


@dataclass(frozen=True)
class Published:
    """The published facts of a model. ``config``: hyperparameters by their names in its ``config.json``."""

    name: str
    title: str
    source: str
    config: Mapping[str, Any]


@functools.cache
def shape_names() -> tuple[str, ...]:
    """Return the names of all shapes."""
    return tuple(sorted(path.stem for path in _FOLDER.glob("*.toml")))


def spelt_so(text: str) -> str:
    """Return the one shape with these letters and digits (``llama3.1:8b`` is llama-3.1-8b); empty if there is none."""
    wanted = re.sub("[^a-z0-9]", "", text.lower()[:100])
    found = [name for name in shape_names() if re.sub("[^a-z0-9]", "", name) == wanted]
    return found[0] if len(found) == 1 else ""


def similar_shape(name: str, cutoff: float = 0.7) -> str:
    """Return ``did you mean NAME?`` with the shapes most similar to ``name``; empty if none is."""
    import difflib

    close = difflib.get_close_matches(name.strip().lower()[:100], shape_names(), n=3, cutoff=cutoff)
    return f"did you mean {' or '.join(close)}?" if close else ""


def published_shape(name: str) -> Published:
    """Read the shape ``name``. Raises ``UsageError`` for an unknown one."""
    key = name.strip().lower()
    if key not in shape_names():
        hint = f"{similar_shape(key, 0.5)} ".lstrip()
        listed = Remedy("'fitter shapes' lists them", "shapes")
        raise UsageError(f"there is no shape '{printable(name, 60)}': {hint}", listed)
    entry = parse_toml((_FOLDER / f"{key}.toml").read_text(encoding="utf-8"))
    return Published(key, entry["title"], entry["source"], entry["config"])


@dataclass(frozen=True)
class ShapeInfo:
    """A model of the catalogue, to plan without a file."""

    name: str
    """Its name for ``--shape``."""
    title: str
    """Its makers' name."""
    architecture: str
    """llama.cpp's name of its architecture."""
    parameters: int
    """Number of weights."""
    bytes: int
    """Bytes of its tensors after the conversion, before any quantization."""
    type: str
    """Types of its matrices then, such as ``bf16``; with ``mxfp4`` if experts are published so."""
    n_layer: int
    """``<arch>.block_count``, with layers for multi-token prediction."""
    n_ctx_train: int
    """The context that it was trained for, in tokens."""
    n_expert: int
    """Routed experts; 0 for a dense model."""
    source: str
    """Source of its hyperparameters."""
    config: Mapping[str, Any]
    """Hyperparameters, by their names in its ``config.json``."""

    @property
    def model(self) -> str:
        """Its address for ``fit`` and other calls: ``shape://NAME``."""
        return f"{SHAPE}://{self.name}"


def shapes(*words: str) -> tuple[ShapeInfo, ...]:
    """Return the shapes with all of ``words`` in their name, title or architecture, in any case; by default all.

    A single word that is a shape's name finds this shape alone. Raises ``UsageError`` if none matches.
    """
    if not all(isinstance(word, str) for word in words):
        raise UsageError(f"words are {shown(words)}: give texts, such as fitter.shapes('qwen3', 'moe')")
    wanted = [word.strip().lower() for word in words]
    if len(wanted) == 1 and wanted[0] in shape_names():
        return (_info(wanted[0]),)
    shape_infos = [each for each in map(_info, shape_names()) if _matches(each, wanted)]
    if not shape_infos and len(wanted) == 1:
        # the error names the nearest ones
        published_shape(wanted[0])
    if not shape_infos:
        listed = Remedy("'fitter shapes' lists all", "shapes")
        raise UsageError(f"no shape has all of '{printable(' '.join(words), 100)}' in its name: ", listed)
    return tuple(shape_infos)


def _matches(each: ShapeInfo, words: Sequence[str]) -> bool:
    text = f"{each.name} {each.title} {each.architecture}".lower()
    return all(word in text for word in words)


def _info(name: str) -> ShapeInfo:
    # commands that only parse an address do not need them
    from fitter.llama.header.gguf_writer import data_bytes
    from fitter.model.shapes.mapping import header_of

    published = published_shape(name)
    header = header_of(published.config, f"the shape {name}")
    return ShapeInfo(
        name,
        published.title,
        header.architecture,
        header.parameters,
        data_bytes(header.tensors),
        ", ".join(sorted({tensor.type for tensor in header.tensors} - {"f32"})),
        header.number("block_count"),
        header.number("context_length"),
        header.number("expert_count"),
        published.source,
        published.config,
    )
