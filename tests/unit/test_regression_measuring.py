"""When what a lock says is taken to be so still, after one dummy load, and when a case is fitted anew."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

import fitter
from fitter import api
from fitter.errors import LlamaCppError, UsageError
from fitter.llama.build.virtual_backends import Answering, CudaLibrary
from fitter.llama.types import Breakdown, Params, Row, Skeleton, VirtualDevice
from fitter.machine.gpu import parse_gpus
from fitter.regression import measuring
from fitter.regression.cases import Case
from fitter.regression.lockfile import LockedDevice, LockedHost, Memory, Snapshot, header_digest
from fitter.regression.measuring import measure_case
from tests.support.cases import cases, named_cases
from tests.support.snapshots import GIB, MIB, SNAPSHOT

VERSION = "0.5.0 (ggml 0.25.3)"
HEADER = 64
CARD = parse_gpus(["24GiB"])[0]

ROWS = (
    Row("CUDA0", "CUDA0", False, 4 * GIB, GIB, 256 * MIB),
    Row("CPU", None, True, 100 * MIB, 0, 0),
    # a buffer type that has nothing is none, and two rows of one are one
    Row("CUDA_Host", "CUDA0", True, 0, 0, 10 * MIB),
    Row("CUDA_Host", None, False, 0, 0, 6 * MIB),
    Row("CPU_REPACK", None, True, 0, 0, 0),
)


@dataclass
class FakeWorker:
    """A worker that measures `rows`, or cannot."""

    rows: Sequence[Row] = ROWS
    n_ctx: int = 8192
    error: Exception | None = None
    version: str = VERSION
    devices: tuple[VirtualDevice, ...] = ()
    build: str | None = None
    asked: list[tuple[Any, Params]] = field(default_factory=list)

    def llama_cpp(self) -> str:
        return self.version + (self.build or "")

    def use_cpu(self, name: str) -> None:
        pass

    def configure(self, devices: tuple[VirtualDevice, ...], *, llama_cpp: str | None = None) -> None:
        self.devices = devices
        self.build = llama_cpp

    def measure(self, model: Any, params: Params) -> Breakdown:
        self.asked.append((model, params))
        if self.error is not None:
            raise self.error
        return Breakdown(tuple(self.rows), ("CUDA0",), self.n_ctx)


class FittedError(Exception):
    """Somebody wants a fit."""


@pytest.fixture(autouse=True)
def no_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    def fit(*words: Any, **more: Any) -> None:
        raise FittedError

    monkeypatch.setattr(api, "fit", fit)


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, ...]:
    """A model of two files."""
    found = tuple(tmp_path / f"a-0000{number}-of-00002.gguf" for number in (1, 2))
    for number, path in enumerate(found):
        path.write_bytes(b"GGUF\x03\0\0\0" + bytes([number]) * 100)
    return found


def case_of(files: tuple[Path, ...]) -> Case:
    return Case("a", files[0], {"gpu": ("24GiB",), "n_ubatch": 512})


def locked_of(files: tuple[Path, ...]) -> Snapshot:
    sizes = tuple(path.stat().st_size for path in files)
    header_bytes = (HEADER,) * len(files)
    model = replace(
        SNAPSHOT.model,
        file=files[0].name,
        header=header_digest(files, header_bytes),
        header_bytes=header_bytes,
        file_bytes=sizes,
    )
    memory = {"CUDA0": Memory(4 * GIB, GIB, 256 * MIB)}
    return replace(
        SNAPSHOT,
        fitter=fitter.__version__,
        llama_cpp=VERSION,
        settings=case_of(files).settings,
        model=model,
        devices={"CUDA0": LockedDevice(CARD.description, CARD.total, CARD.free, GIB, memory)},
        host=LockedHost(GIB, None, {"CPU": Memory(100 * MIB, 0, 0), "CUDA_Host": Memory(0, 0, 16 * MIB)}),
    )


def device(snapshot: Snapshot, **changes: Any) -> Snapshot:
    return replace(snapshot, devices={"CUDA0": replace(snapshot.devices["CUDA0"], **changes)})


def model(snapshot: Snapshot, **changes: Any) -> Snapshot:
    return replace(snapshot, model=replace(snapshot.model, **changes))


def measured(case: Case, locked: Snapshot | None, worker: Any) -> Snapshot | None:
    """What was locked, if that still holds; ``None`` if a fit is wanted."""
    try:
        return measure_case(case, locked, worker)
    except FittedError:
        return None


def test_a_case_is_measured_with_its_build(files: tuple[Path, ...]) -> None:
    case = replace(case_of(files), llama_cpp="builds/new")
    locked, worker = replace(locked_of(files), llama_cpp=VERSION + "builds/new"), FakeWorker()
    assert measured(case, locked, worker) is locked
    assert worker.build == "builds/new"
    assert measured(case, locked_of(files), worker) is None, "that is the lock of another build"


def test_what_did_not_change_is_one_load(files: tuple[Path, ...]) -> None:
    locked, worker = locked_of(files), FakeWorker()
    assert measured(case_of(files), locked, worker) is locked
    assert worker.asked == [(Skeleton(tuple(map(str, files))), locked.params)]
    assert worker.devices == (CARD,)


# What was locked is another, so it is not even measured.
@named_cases(
    ("no lock", lambda locked: None),
    ("another fitter", lambda locked: replace(locked, fitter="0.0.1")),
    ("another llama.cpp", lambda locked: replace(locked, llama_cpp="0.4.0")),
    ("what did not fit", lambda locked: replace(locked, fits=False)),
    ("other settings", lambda locked: replace(locked, settings={**locked.settings, "n_ubatch": 256})),
    ("a setting less", lambda locked: replace(locked, settings={"gpu": ("24GiB",)})),
    ("another file", lambda locked: model(locked, file="b-00001-of-00002.gguf")),
    ("another size of a file", lambda locked: model(locked, file_bytes=(108, 107))),
    ("another header", lambda locked: model(locked, header="sha256:00")),
    ("headers of more files", lambda locked: model(locked, header_bytes=(HEADER,) * 3)),
    ("something beside the model", lambda locked: device(locked, shared=1)),
    ("something beside it on the host", lambda locked: replace(locked, host=replace(locked.host, shared=1))),
    ("another card", lambda locked: device(locked, description="another")),
    ("a larger card", lambda locked: device(locked, total=CARD.total + 1)),
    ("a fuller card", lambda locked: device(locked, free=CARD.free - 1)),
    ("a card less", lambda locked: replace(locked, devices={**locked.devices, "CUDA1": locked.devices["CUDA0"]})),
)
def test_what_changed_is_fitted_anew(change: Callable[[Snapshot], Snapshot | None], files: tuple[Path, ...]) -> None:
    worker = FakeWorker()
    assert measured(case_of(files), change(locked_of(files)), worker) is None
    assert worker.asked == []


def test_a_byte_of_a_header_is_a_change(files: tuple[Path, ...]) -> None:
    locked = locked_of(files)
    for position, holds in ((HEADER, True), (HEADER - 1, False)):
        content = bytearray(files[1].read_bytes())
        content[position] ^= 1
        files[1].write_bytes(content)
        assert (measured(case_of(files), locked, FakeWorker()) is locked) is holds


@named_cases(
    ("as they are", (HEADER, HEADER), True),
    ("the longest", (1, 2**30), True),
    ("none", (HEADER, 0), False),
    ("below none", (-1, HEADER), False),
    ("beyond reason", (HEADER, 2**30 + 1), False),
)
def test_a_header_has_a_length(header_bytes: tuple[int, ...], holds: bool, files: tuple[Path, ...]) -> None:
    locked = model(locked_of(files), header_bytes=header_bytes, header=header_digest(files, header_bytes))
    assert (measured(case_of(files), locked, FakeWorker()) is locked) is holds


def test_cards_of_a_library_are_measured_each_time(files: tuple[Path, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    library = CudaLibrary(Path("libggml-cuda.so"), (), 13, False)
    monkeypatch.setattr(measuring, "answering", lambda virtual, profile, llama_cpp: Answering(library))
    locked = locked_of(files)
    settings = {**locked.settings, "profile": "library"}
    case = replace(case_of(files), settings=settings)
    assert measured(case, replace(locked, settings=settings), FakeWorker()) is None


@cases(("any", True), ("llama-server", False), ("llama-cpp-python", False))
def test_a_program_is_asked_anew_what_it_takes(program: str, holds: bool, files: tuple[Path, ...]) -> None:
    locked = locked_of(files)
    settings = {**locked.settings, "program": program}
    case = replace(case_of(files), settings=settings)
    assert (measured(case, replace(locked, settings=settings), FakeWorker()) is not None) is holds


def rows(**changes: int) -> tuple[Row, ...]:
    return (replace(ROWS[0], **changes), *ROWS[1:])


@named_cases(
    ("another context", FakeWorker(n_ctx=8191)),
    ("a byte more weights", FakeWorker(rows(model=4 * GIB + 1))),
    ("a byte less cache", FakeWorker(rows(context=GIB - 1))),
    ("a byte more compute", FakeWorker(rows(compute=256 * MIB + 1))),
    ("the same bytes elsewhere", FakeWorker(rows(model=5 * GIB, context=0))),
    ("another buffer type", FakeWorker((replace(ROWS[0], buffer_type="CUDA0_Split"), *ROWS[1:]))),
    ("another device", FakeWorker((replace(ROWS[0], device="CUDA1"), *ROWS[1:]))),
    ("a device more", FakeWorker((*ROWS, Row("CUDA1", "CUDA1", False, 0, 0, 1)))),
    ("less on the host", FakeWorker(ROWS[:1] + ROWS[2:])),
    ("a row of the host less", FakeWorker(ROWS[:3])),
    ("more on the host", FakeWorker((*ROWS, Row("CPU_REPACK", None, True, 1, 0, 0)))),
    ("llama.cpp cannot load it", FakeWorker(error=LlamaCppError("no"))),
    ("llama.cpp refuses it", FakeWorker(error=UsageError("no"))),
)
def test_other_bytes_are_fitted_anew(worker: FakeWorker, files: tuple[Path, ...]) -> None:
    assert measured(case_of(files), locked_of(files), replace(worker, asked=[])) is None


def test_a_device_that_has_nothing_needs_no_rows(files: tuple[Path, ...]) -> None:
    case = replace(case_of(files), settings={"gpu": ("24GiB", "24GiB"), "n_ubatch": 512})
    locked = locked_of(files)
    idle = replace(locked.devices["CUDA0"], memory={})
    locked = replace(locked, settings=case.settings, devices={**locked.devices, "CUDA1": idle})
    assert measured(case, locked, FakeWorker()) is locked
