"""Real loads on CUDA cards, beside what fitter says of them without a card.

``python -m tools.measurements.card_loads`` compares them. What cards took is in
``tests/data/real_cards/card_loads.csv``, the cards are in ``cards.toml`` there. It prints the table of
``docs/explanation/real-cards.md``; ``--write`` puts it there. On a machine with a card, ``--measure FILE`` makes every
load of ``LOADS`` three times: without allocating on the card's virtual twin, without allocating on the card, and for
real, with prompts and single tokens computed. The exit status is 1 if a byte differs.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path

from gguf import GGMLQuantizationType

from fitter.errors import EXIT_FAILURE, EXIT_FITS, FitterError
from fitter.llama.client import Worker
from fitter.llama.types import Breakdown, DeviceInfo, Params, TensorBuftOverride, VirtualDevice
from fitter.planning.checked.calibration import twin_of, write_models
from fitter.storage import parse_toml
from tools.comparisons import cuda_reference
from tools.comparisons.load_answers import read_table, text_of
from tools.models import shapes

DATA = Path(__file__).resolve().parents[2] / "tests" / "data" / "real_cards"
TIMEOUT = 400.0

_EXPERTS = r"ffn_(up|gate|down|gate_up)_exps"
_FFN = r"ffn_(up|gate|down)\.weight"

SETTINGS: dict[str, Params] = {
    "plain": Params(n_ctx=4096),
    "long": Params(n_ctx=32768, n_ubatch=2048),
    "ub64 q8_0": Params(n_ctx=8192, n_ubatch=64, type_k="q8_0", type_v="q8_0"),
    "ub4096": Params(n_ctx=16384, n_batch=4096, n_ubatch=4096),
    "half": Params(n_ctx=4096, n_gpu_layers=4),
    "none": Params(n_ctx=4096, n_gpu_layers=0),
    "experts": Params(n_ctx=8192, tensor_buft_overrides=(TensorBuftOverride(_EXPERTS, "CPU"),)),
    "experts ub2048": Params(n_ctx=8192, n_ubatch=2048, tensor_buft_overrides=(TensorBuftOverride(_EXPERTS, "CPU"),)),
    "some experts": Params(n_ctx=8192, tensor_buft_overrides=(TensorBuftOverride(rf"blk\.[0-2]\.{_EXPERTS}", "CPU"),)),
    "experts, no op_offload": Params(
        n_ctx=8192, op_offload=False, tensor_buft_overrides=(TensorBuftOverride(_EXPERTS, "CPU"),)
    ),
    "ffn": Params(n_ctx=8192, tensor_buft_overrides=(TensorBuftOverride(_FFN, "CPU"),)),
    "ffn ub2048": Params(n_ctx=8192, n_ubatch=2048, tensor_buft_overrides=(TensorBuftOverride(_FFN, "CPU"),)),
    "all of the FFN": Params(n_ctx=8192, tensor_buft_overrides=(TensorBuftOverride("ffn_", "CPU"),)),
    "fa off": Params(n_ctx=8192, flash_attn="off"),
    "fa on q4_0": Params(n_ctx=8192, flash_attn="on", type_k="q4_0", type_v="q4_0"),
    "f32": Params(n_ctx=4096, type_k="f32", type_v="f32"),
    "bf16": Params(n_ctx=4096, type_k="bf16", type_v="bf16"),
    "4 sequences": Params(n_ctx=16384, n_seq_max=4),
    "4 unified": Params(n_ctx=16384, n_seq_max=4, kv_unified=True),
    "16 unified": Params(n_ctx=16384, n_seq_max=16, kv_unified=True, n_outputs_max=16),
    "1 output": Params(n_ctx=4096, n_outputs_max=1),
    "4 outputs": Params(n_ctx=16384, n_seq_max=4, n_outputs_max=4),
    "caches on the host": Params(n_ctx=4096, offload_kqv=False),
    "swa full": Params(n_ctx=16384, swa_full=True),
}
"""What models are loaded with, by name."""

_ALL = ("plain", "long", "ub64 q8_0", "half", "fa off", "4 sequences", "4 unified", "1 output", "caches on the host")
_DENSE = (*_ALL, "ffn", "none")
_MOE = (*_ALL, "all of the FFN", "experts", "experts ub2048", "some experts")

LOADS: dict[str, tuple[str, ...]] = {
    "qwen3-0.6b": ("plain", "fa on q4_0", "f32", "bf16", "none", "16 unified", "4 outputs"),
    "qwen2.5-0.5b-q4_k_m": ("plain", "half", "ub4096", "fa off"),
    "qwen1.5-4b-q4_0": ("plain", "ub64 q8_0", "4 unified", "half"),
    "llama31-8b": ("plain", "4 outputs", "half", "ub64 q8_0"),
    "llama-3.1-8b@12": (*_DENSE, "ub4096", "ffn ub2048", "bf16", "16 unified"),
    "llama-3.1-70b@10": ("plain", "ub4096", "half", "ffn"),
    "gemma3-12b@18": (*_DENSE, "swa full", "f32"),
    "gpt-oss-20b@8": (*_MOE, "swa full"),
    "gptoss-20b": ("plain", "experts"),
    "qwen3-30b-a3b@12": (*_MOE, "experts, no op_offload", "ub4096", "none"),
    "qwen3-30b-a3b": ("plain", "experts"),
    "glm45-air@6": _MOE,
    "deepseek-v3.1@4": ("plain", "long", "half", "experts", "ub64 q8_0", "4 unified", "1 output"),
    "dsv2lite": ("plain", "all of the FFN", "half", "experts", "4 sequences"),
    "qwen3-next-80b-a3b@8": _MOE,
    "nemotron-h-9b": ("plain", "all of the FFN", "half", "4 sequences", "ub4096", "caches on the host", "1 output"),
    "recurrent": ("plain", "half", "4 sequences", "ub4096"),
    "llama-3.1-8b@4:f16": ("plain", "long", "ffn", "ub64 q8_0"),
    "llama-3.1-8b@4:bf16": ("plain", "half", "fa off"),
    "qwen3-30b-a3b@4:bf16": ("plain", "experts", "experts ub2048"),
    "qwen3-30b-a3b@4:f16": ("plain", "long", "some experts"),
    "window": ("plain", "long", "swa full"),
}
"""The settings that each model is loaded with.

``NAME@N`` is the first N layers of a shape, ``NAME@N:f16`` the same with weights of that type.
"""


COLUMNS = ("model", "settings", "cards", "splits", "bytes")


@dataclass(frozen=True)
class Card:
    """A card of ``cards.toml``, as ggml described it when nothing was loaded."""

    key: str
    description: str
    compute_capability: int
    total: int
    free: int
    driver: str
    build: str
    date: str

    @property
    def twin(self) -> VirtualDevice:
        """The virtual device that must say the same."""
        return VirtualDevice("CUDA0", self.description, "cuda", self.compute_capability, self.total, self.free)


@dataclass(frozen=True)
class CardLoad:
    """A load and what it took on ``cards``: ``bytes`` by buffer type (model/context/compute), and its graph splits."""

    model: str
    settings: str
    cards: tuple[str, ...]
    splits: str
    bytes: str


def cards() -> dict[str, Card]:
    """The cards by their key."""
    entries = parse_toml((DATA / "cards.toml").read_text(encoding="utf-8"))["card"]
    return {entry["key"]: Card(**entry) for entry in entries}


def loads() -> tuple[CardLoad, ...]:
    """Every stored load."""
    rows = read_table(DATA / "card_loads.csv")
    return tuple(CardLoad(**row | {"cards": tuple(row["cards"].split())}) for row in rows)  # type: ignore[arg-type]


def cut(shape: shapes.Shape, n_layer: int, kind: str = "") -> shapes.Shape:
    """The first ``n_layer`` layers of ``shape``, without what it has for multi-token prediction.

    With ``kind``, such as ``f16``, that is the type of all its tensors that have another one than ``f32``.
    """
    of_layer = re.compile(r"blk\.(\d+)\.")

    def is_kept(name: str) -> bool:
        found = of_layer.match(name)
        return found is None or int(found[1]) < n_layer

    metadata = {
        key: value[:n_layer] if isinstance(value, list) else value
        for key, value in shape.metadata.items()
        if key != ".nextn_predict_layers"
    }
    metadata[".block_count"] = n_layer
    kept = [each for each in shape.tensors if is_kept(each.name)]
    if kind:
        other = GGMLQuantizationType[kind.upper()]
        kept = [each if each.type == shapes.F32 else replace(each, type=other) for each in kept]
    return replace(shape, metadata=metadata, tensors=tuple(kept))


def write_model(name: str, directory: Path) -> Path:
    """A sparse file of the model ``name`` of ``LOADS``; one already there is kept."""
    whole, _, layers = name.partition("@")
    path = directory / f"{name}.gguf"
    if path.exists():
        return path
    if layers:
        count, _, kind = layers.partition(":")
        shapes.write_shape(cut(shapes.SHAPES[whole], int(count), kind), path, vocab=False)
    elif name in ("recurrent", "window"):
        write_models(directory)
    elif (head := DATA / f"{name}.head.gz").exists():
        path.write_bytes(gzip.decompress(head.read_bytes()))
        with path.open("r+b") as file:
            file.truncate(_file_bytes(name))
    else:
        return cuda_reference.write_model(name, directory)
    return path


def _file_bytes(header: str) -> int:
    """The size of the file whose header is stored."""
    entries = parse_toml((DATA / "loads.toml").read_text(encoding="utf-8"))["load"]
    return int(next(entry["file_bytes"] for entry in entries if entry["header"] == header))


def text(breakdown: Breakdown) -> str:
    """Write the bytes of buffer types that hold anything, as the tables have them."""
    return " ".join(word for word in text_of(breakdown).split() if not word.endswith("=0/0/0"))


def splits(breakdown: Breakdown) -> str:
    """Graph splits of a prompt and of generation."""
    return "/".join(map(str, breakdown.n_splits or ()))


def dummy(worker: Worker, path: Path, params: Params) -> tuple[str, str, str]:
    """What a load that allocates nothing says: its own figures, those of a real load, and its graph splits."""
    try:
        found = worker.measure(path, params, reserve=True)
    except FitterError as error:
        return (failure := _failure(path, error)), failure, ""
    return text(found), text(found.real), splits(found)


def real(worker: Worker, path: Path, params: Params) -> str:
    """What a real load takes once it has computed."""
    try:
        found = worker.load(path, params)
        worker.unload()
    except FitterError as error:
        return _failure(path, error)
    return text(found.breakdown)


def _failure(path: Path, error: FitterError) -> str:
    return "FAIL " + " ".join(str(error).removeprefix(f"{path}: ").split())


# --- compared with what is stored


def wrong(every: Sequence[CardLoad], card: Card, directory: Path) -> Iterator[str]:
    """A line for each of ``every`` that the twin of ``card`` does not answer as the card did."""
    with Worker([card.twin]) as worker:
        for load in every:
            params = replace(SETTINGS[load.settings], devices=("CUDA0",))
            found = dummy(worker, write_model(load.model, directory), params)
            if found != (load.bytes, load.bytes, load.splits):
                yield f"{load.model}, {load.settings}, {card.key}: {found} is not {(load.bytes, load.splits)}"


# --- on a machine with a card


def measure_model(name: str, directory: Path, device: DeviceInfo, twin: VirtualDevice) -> list[dict[str, str]]:
    """Every load of one model, three times."""
    found = []
    path = write_model(name, directory)
    with Worker(timeout=TIMEOUT) as card, Worker([twin], timeout=TIMEOUT) as virtual:
        for settings in LOADS[name]:
            params = replace(SETTINGS[settings], devices=(device.name,))
            row = {"model": name, "settings": settings}
            row |= zip(("dummy", "reserved", "splits"), dummy(card, path, params), strict=True)
            row |= zip(("twin dummy", "twin loaded", "twin splits"), dummy(virtual, path, params), strict=True)
            found.append(row | {"loaded": real(card, path, params)})
    return found


def differences(row: Mapping[str, str]) -> list[str]:
    """What is not equal in a row of ``measure_model``."""
    pairs = (
        ("dummy load", "dummy", "twin dummy"),
        ("real load", "loaded", "twin loaded"),
        ("real load and the card's own dummy load", "loaded", "reserved"),
        ("graph splits", "splits", "twin splits"),
    )
    where = f"{row['model']}, {row['settings']}"
    return [f"{where}: {what}: {row[a]} is not {row[b]}" for what, a, b in pairs if row[a] != row[b]]


def measure(output: Path, jobs: int) -> int:
    """Make all loads on this machine's first card, ``jobs`` models at a time, and write what it said."""
    with Worker() as worker:
        device = next((each for each in worker.devices() if each.backend == "CUDA"), None)
        twin = device and twin_of(device, dict(worker.compute_capabilities()).get(device.name))
    if device is None or twin is None:
        print("card_loads: no CUDA card here: run it on a machine with one, after make install CUDA=1", file=sys.stderr)
        return EXIT_FAILURE
    rows: list[dict[str, str]] = []
    with tempfile.TemporaryDirectory() as directory, ProcessPoolExecutor(jobs) as pool:
        for done in as_completed([pool.submit(measure_model, name, Path(directory), device, twin) for name in LOADS]):
            rows += done.result()
    rows.sort(key=lambda row: list(LOADS).index(row["model"]))
    with output.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n", extrasaction="ignore")
        writer.writeheader()
        writer.writerows(row | {"cards": device.description, "bytes": row["loaded"]} for row in rows)
    found = [line for row in rows for line in differences(row)]
    print(*found, sep="\n", end="\n" if found else "")
    print(
        f"{device.description}, {device.total} bytes, {device.free} free: {len(rows)} loads, {len(found)} differences"
    )
    return 1 if found else EXIT_FITS


def main(arguments: Sequence[str]) -> int:
    """Compare, or measure."""
    parser = argparse.ArgumentParser(prog="tools.measurements.card_loads", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--measure", type=Path, metavar="FILE", help="make all loads on this machine's card instead")
    parser.add_argument("--jobs", type=int, default=1, help="models that are loaded at once with --measure (1)")
    given = parser.parse_args(arguments)
    if given.measure:
        return measure(given.measure, given.jobs)
    every = loads()
    with tempfile.TemporaryDirectory() as directory:
        found = [
            line
            for key, card in cards().items()
            for line in wrong([load for load in every if key in load.cards], card, Path(directory))
        ]
    print(*found, f"{len(every)} loads, {len(found)} differences", sep="\n")
    return 1 if found else EXIT_FITS


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
