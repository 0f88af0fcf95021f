"""The documents of ``fitter devices --json``, with ``--catalogue`` and without, and of ``shapes --json``."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fitter.llama.types import DeviceInfo
from fitter.machine.gpu_catalogue import CatalogueGpu, Sources, capability_text
from fitter.model.shapes.catalogue import ShapeInfo
from fitter.output.documents.document import Key, document

CAPABILITY = Key(
    "compute_capability",
    change=lambda number: capability_text(number) if number else None,
    hint=str | None,
    about="Such as 8.9 or gfx1100.",
)


@dataclass(frozen=True)
class Devices:
    """The devices of a machine."""

    devices: tuple[DeviceInfo, ...]
    """The devices, in llama.cpp's order."""
    host: DeviceInfo
    """The host; free is its available memory."""


DEVICES = document(
    Devices,
    Key("devices", of=document(DeviceInfo, "name", "description", "type", "backend", "total", "free", "virtual")),
    Key("host", of=document(DeviceInfo, "description", "total", "free")),
    title="Devices and host",
)


@dataclass(frozen=True)
class Catalogue:
    """The catalogue of GPUs; a figure is ``None`` if it is not published, or does not exist."""

    gpus: tuple[CatalogueGpu, ...]
    """Every GPU of the catalogue."""


_FIGURES = ("total", "usable", "free", "bandwidth", "pcie", "nvlink", "compute")

CATALOGUE = document(
    Catalogue,
    Key(
        "gpus",
        of=document(
            CatalogueGpu,
            Key("name", "key"),
            *("description", "profile"),
            replace(CAPABILITY, about="Such as 8.9 or gfx1100; null if there is none."),
            *_FIGURES,
            "unified",
            Key("sources", of=document(Sources, "compute_capability", *_FIGURES), about="The source of each figure."),
        ),
    ),
    title="The GPUs that --gpu knows",
)


@dataclass(frozen=True)
class Shapes:
    """Shapes that can be planned without a file."""

    shapes: tuple[ShapeInfo, ...]
    """Those that were asked for."""


SHAPES = document(
    Shapes,
    Key(
        "shapes",
        of=document(
            ShapeInfo,
            *("name", "model", "title", "architecture", "parameters", "bytes", "type", "n_layer", "n_ctx_train"),
            *("n_expert", "source", "config"),
        ),
    ),
    title="The shapes that --shape knows",
)
