"""Loads that real GPUs logged (``tests/data/real_cards``), compared with the same loads on virtual devices."""

from __future__ import annotations

import contextlib
import csv
import gzip
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import ROUND_FLOOR, Decimal
from pathlib import Path
from typing import Any
from unittest import mock

import fitter
from fitter.llama.client import Worker
from fitter.llama.types import Breakdown
from fitter.storage import parse_toml

DATA = Path(__file__).resolve().parents[1] / "data" / "real_cards"

_MIB = Decimal(1024 * 1024)
_SPLITS = "graph splits"


@dataclass(frozen=True)
class Value:
    """A number that a log has: ``quantity`` is a buffer type and ``model``, ``context`` or ``compute``, in MiB.

    Or it is ``graph splits``, of a prompt and of generation. ``logged`` is as printed, whole where the log rounds down.
    ``difference`` is what is expected of ours less that, empty where it is the same number, and ``explanation`` why.
    """

    quantity: str
    logged: str
    difference: str
    explanation: str


@dataclass(frozen=True)
class Load:
    """A load that a log shows; see ``loads.toml`` for the meaning of each field."""

    name: str
    source: str
    build: str
    cards: str
    gpus: tuple[str, ...]
    model: str
    header: str
    is_real: bool
    parameters: Mapping[str, Any]
    environment: Mapping[str, str]
    values: tuple[Value, ...]
    date: str = ""
    file_bytes: int = 0


@dataclass(frozen=True)
class Compared:
    """A value beside what fitter measures: ``ours`` as the log would print it, ``difference`` as in ``Value``."""

    value: Value
    ours: str
    difference: str

    @property
    def is_expected(self) -> bool:
        """Whether it differs just as it is said to, or is the same where nothing is said."""
        return self.difference == self.value.difference


def loads() -> tuple[Load, ...]:
    """Every load with its values."""
    with (DATA / "values.csv").open(newline="", encoding="utf-8") as file:
        rows = [(row.pop("load"), Value(**row)) for row in csv.DictReader(file)]
    entries: list[dict[str, Any]] = parse_toml((DATA / "loads.toml").read_text(encoding="utf-8"))["load"]
    return tuple(
        Load(
            values=tuple(value for name, value in rows if name == entry["name"]),
            gpus=tuple(entry.pop("gpus")),
            environment=entry.pop("environment", {}),
            **entry,
        )
        for entry in entries
    )


def write_model(load: Load, directory: Path) -> Path:
    """A sparse GGUF file with the header of the model and its size; a file already there is kept."""
    path = directory / f"{load.header}.gguf"
    if not path.exists():
        path.write_bytes(gzip.decompress((DATA / f"{load.header}.head.gz").read_bytes()))
        os.truncate(path, load.file_bytes)
    return path


def measured(every: Sequence[Load], directory: Path) -> Iterator[tuple[Load, Breakdown]]:
    """Measure each load with ``fitter.measure``; the models are written to ``directory``."""
    for variables in {tuple(load.environment.items()): load.environment for load in every}.values():
        # a process begins with the first question, in the environment of that moment
        with environment(variables), Worker() as worker:
            for load in (load for load in every if load.environment == variables):
                model = load.header if "://" in load.header else write_model(load, directory)
                yield load, fitter.measure(model, gpus=load.gpus, worker=worker, **load.parameters)


def compare(load: Load, breakdown: Breakdown) -> tuple[Compared, ...]:
    """Every value of ``load`` beside the same one of ``breakdown``."""
    return tuple(_compared(value, breakdown, load.is_real) for value in load.values)


def _compared(value: Value, breakdown: Breakdown, is_real: bool) -> Compared:
    if value.quantity == _SPLITS:
        ours = "/".join(map(str, breakdown.n_splits or ()))
        return Compared(value, ours, "" if ours == value.logged else ours)
    buffer_type, kind = value.quantity.rsplit(" ", 1)
    rows = (breakdown.real if is_real else breakdown).rows
    size = sum(getattr(row, kind) for row in rows if row.buffer_type == buffer_type)
    logged = Decimal(value.logged)
    is_exact = "." in value.logged
    ours = Decimal(f"{size / _MIB:.2f}") if is_exact else (size / _MIB).to_integral_value(ROUND_FLOOR)
    return Compared(value, str(ours), f"{ours - logged:+}" if ours != logged else "")


@contextlib.contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """This process's environment with ``variables`` and no others of ggml's."""
    with mock.patch.dict(os.environ):
        for name in [name for name in os.environ if name.startswith("GGML_")]:
            del os.environ[name]
        os.environ.update(variables)
        yield
