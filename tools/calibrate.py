"""Rows of tests/data/cuda, measured on the CUDA cards of this machine.

    make calibrate CMAKE_ARGS="-DGGML_CUDA=on"
    python -m tools.calibrate [--limit N] [--output FILE]

Every load of the stored tables that these cards can make is made on them, without allocating, and on their virtual
twins. The rows go to a file that is named after the cards: add it to the repository. The exit status is 4 where a
twin says other bytes, 3 where there is no CUDA card.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import re
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from fitter.errors import EXIT_FAILURE, EXIT_REGRESSION, EXIT_USAGE, LlamaCppError
from fitter.llama.client import Worker
from fitter.llama.types import Breakdown, DeviceInfo, Params
from fitter.planning.checked.calibration import twin_of
from tools import cuda_reference

DATA = Path(__file__).resolve().parent.parent / "tests" / "data" / "cuda"
MEASURED = ("result", "splits")
COLUMNS = (
    *("model", "placement", "n_devices", "compute_capability", "n_ctx", "type_k", "type_v", "flash_attn", "n_ubatch"),
    *("n_seq_max", "kv_unified", "op_offload", "offload_kqv", "swa_full"),
    *MEASURED,
)

Row = dict[str, str]
Measure = Callable[[Path, Params], Breakdown]


def stored_rows() -> Iterator[Row]:
    """Rows of every table in tests/data/cuda that needs no environment variable."""
    for path in sorted([*DATA.glob("*.csv"), *DATA.glob("*.csv.gz")]):
        data = path.read_bytes()
        text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode()
        yield from (row for row in csv.DictReader(text.splitlines()) if not row.get("environment"))


def wanted_rows(rows: Iterable[Row], capabilities: Sequence[int]) -> list[Row]:
    """``rows`` that as many devices can make, once each, with the capabilities of these and nothing measured."""
    wanted: dict[tuple[str, ...], Row] = {}
    for row in rows:
        count = int(row["n_devices"])
        if count <= len(capabilities):
            used = [str(capability // 10) for capability in capabilities[:count]]
            new = {column: row[column] for column in COLUMNS if column not in MEASURED}
            new["compute_capability"] = used[0] if len(set(used)) == 1 else "/".join(used)
            wanted.setdefault(tuple(new.values()), new)
    return list(wanted.values())


def params_of(row: Row, devices: Sequence[DeviceInfo]) -> Params:
    """The parameters of ``row`` on the first of ``devices``; shares are equal, as on the tables' equal devices."""
    count = int(row["n_devices"])
    names = tuple(device.name for device in devices[:count])
    # the reader of the tables wants what was measured as well
    params = cuda_reference.load_of("row", {**row, "result": "FAIL ", "splits": ""}).params
    return replace(params, devices=names, tensor_split=(1.0,) * count if count > 1 else None)


def measured(row: Row, measure: Measure, path: Path, devices: Sequence[DeviceInfo]) -> Row | None:
    """``row`` with what ``measure`` says; ``None`` where the card has too little memory for it.

    Recurrent states are allocated even by a dummy load.
    """
    try:
        breakdown = measure(path, params_of(row, devices))
    except LlamaCppError as error:
        reason = str(error).removeprefix(f"{path}: ")
        return (
            None if re.search(r"alloc|memory", reason) else {**row, "result": f"FAIL llama.cpp: {reason}", "splits": ""}
        )
    cells = [f"{row.buffer_type}={row.model}/{row.context}/{row.compute}" for row in breakdown.rows]
    splits = breakdown.n_splits
    text = "" if splits is None else str(splits[0]) if splits[0] == splits[1] else f"{splits[0]} / {splits[1]}"
    return {**row, "result": " ".join(cells), "splits": text}


def file_name(devices: Sequence[DeviceInfo]) -> str:
    """``real-nvidia-geforce-rtx-4090.csv`` for one card of that name, ``real-2x-...`` for two."""
    kinds = dict.fromkeys(device.description for device in devices)
    count = "" if len(devices) == 1 else f"{len(devices)}x-"
    return f"real-{count}{re.sub(r'[^a-z0-9]+', '-', ' '.join(kinds).lower()).strip('-')}.csv"


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    """Store a table as the others are."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def run(
    rows: Iterable[Row], real: Measure, twin: Measure, devices: Sequence[DeviceInfo], directory: Path
) -> tuple[list[Row], list[tuple[Row, Row | None]]]:
    """Rows as ``real`` measures them, and those of them that ``twin`` measures otherwise."""
    found, differing = [], []
    for row in sorted(rows, key=lambda row: (row["model"], int(row["n_devices"]), row["placement"])):
        path = cuda_reference.write_model(row["model"], directory)
        if (answer := measured(row, real, path, devices)) is not None:
            found.append(answer)
            if (other := measured(row, twin, path, devices)) != answer:
                differing.append((answer, other))
    return found, differing


def main(arguments: Sequence[str]) -> int:
    """Measure, compare, write."""
    parser = argparse.ArgumentParser(prog="python -m tools.calibrate", description=__doc__.splitlines()[0])
    parser.add_argument("--limit", type=int, help="every so-many-th row only, this many in all")
    parser.add_argument("--output", type=Path, help="file to write (default: in tests/data/cuda)")
    options = parser.parse_args(arguments)
    if options.limit is not None and options.limit < 1:
        print("calibrate: --limit must be 1 or more", file=sys.stderr)
        return EXIT_USAGE
    with Worker() as real, tempfile.TemporaryDirectory() as directory:
        devices = [device for device in real.devices() if device.backend == "CUDA"]
        known = dict(real.compute_capabilities())
        twins = [twin for device in devices if (twin := twin_of(device, known.get(device.name)))]
        if not devices or len(twins) != len(devices):
            print(
                'calibrate: no CUDA card here: run it on a machine with one, with CMAKE_ARGS="-DGGML_CUDA=on"',
                file=sys.stderr,
            )
            return EXIT_FAILURE
        rows = wanted_rows(stored_rows(), [twin.compute_capability for twin in twins])
        rows = rows[:: -(-len(rows) // options.limit)] if options.limit else rows
        with Worker(twins) as twin:
            found, differing = run(rows, real.measure, twin.measure, devices, Path(directory))
    output = options.output or DATA / file_name(devices)
    write_rows(output, found)
    for answer, other in differing:
        said = "too little memory" if other is None else f"{other['result']} ({other['splits']} splits)"
        load = ",".join(answer[column] for column in COLUMNS if column not in MEASURED)
        print(f"{load}\n  real {answer['result']} ({answer['splits']} splits)\n  twin {said}")
    left_out = len(rows) - len(found)
    print(f"{len(found)} rows in {output}, {len(differing)} of them other than the twin says", end="")
    print(f"; {left_out} need more memory than is free here" if left_out else "")
    return EXIT_REGRESSION if differing else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
