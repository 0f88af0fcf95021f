"""Headers of real models with something wrong in them, as a file and over HTTP: one line each, and little memory."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import psutil
import pytest

import fitter
from fitter.errors import FitterError, LlamaCppCrashError, ModelError
from fitter.llama.client import Worker
from fitter.llama.header.limits import limits
from fitter.llama.types import Params
from fitter.machine.gpu import parse_gpus
from fitter.machine.machine import virtual_machine
from fitter.model.files import remote_files
from fitter.model.header import open_model
from tests.support.cases import cases
from tests.support.ranges import clean_environment, serving
from tools.models import shapes
from tools.models.tiny import write_tiny
from tools.mutated_headers.__main__ import outcomes
from tools.mutated_headers.doors import ALONE, TOGETHER
from tools.mutated_headers.fields import FLOAT32, INT32, STRING, UINT32, UINT64, Walk, packed
from tools.mutated_headers.mutations import KNOWN, Mutation, Source, drawn, mutated, mutations, sources

_T = TypeVar("_T")

COUNT = 100
SOON = 5.0
"""Seconds for one of them."""
LITTLE = 500 * 10**6


NUMBERS = {
    "version": (0, 1, 4, 0x03000000),
    "count": (-1, 1, 2**27, 2**29, 2**31, 2**40, 2**61, 2**63, 2**64 - 1),
    "key length": (-1, 1, 2**16, 2**29, 2**33, 2**63, 2**64 - 1),
    "length": (2**27, 2**29, 2**31, 2**33, 2**40, 2**62, 2**63, 2**64 - 1),
    "name length": (-1, 1, 64, 2**31, 2**63, 2**64 - 1),
    "type": (13, 255, 2**31, 2**32 - 1),
    "dimensions": (5, 255, 2**31, 2**32 - 1),
    "dimension": (0, 7, 2**32, 2**62, 2**63, 2**64 - 1),
    "tensor type": (4, 5, 99, 2**31, 2**32 - 1),
    "offset": (7, 32, 2**40, 2**63, 2**64 - 32),
}
"""Values that replace each kind of field; -1 and 1 are added to the value that is there."""


def malformed(data: bytes, walk: Walk, draw: random.Random) -> bytes:
    """``data`` with one field that cannot be so."""
    kind = draw.choice([*NUMBERS, "name"])
    field = draw.choice([field for field in walk.fields if field.kind == kind])
    old = data[field.at : field.at + field.size]
    if kind == "name":
        new = draw.choice([b"\xff" * field.size, b"x" * field.size, b"\0" * field.size])
    else:
        value = draw.choice([n for n in NUMBERS[kind] if n.bit_length() <= 8 * field.size])
        if value in (-1, 1) and kind not in ("version",):
            value += int.from_bytes(old, "little")
        new = value.to_bytes(field.size, "little")
    if new == old:
        return malformed(data, walk, draw)
    return data[: field.at] + new + data[field.at + field.size :]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("malformed")


@pytest.fixture(scope="module")
def models(folder: Path) -> list[tuple[bytes, Walk, int]]:
    """Headers to change, and how long their files are: small ones, and some of models of many GiB."""
    paths = [
        write_tiny(folder / "tiny.gguf"),
        shapes.write("llama-3.1-8b", folder, vocab=False),
        shapes.write("deepseek-v3.1", folder),
    ]
    found = []
    for path in paths:
        with path.open("rb") as file:
            data = file.read(8 << 20)
        walk = Walk(data)
        found.append((data[: walk.header_bytes], walk, path.stat().st_size))
    return found


def written(path: Path, models: list[tuple[bytes, Walk, int]], number: int) -> Path:
    """A file with a header that is malformed in the way of ``number``."""
    draw = random.Random(number)
    data, walk, size = models[number % len(models)]
    with path.open("wb") as file:
        file.write(malformed(data, walk, draw))
        file.truncate(size)
    return path


def most_memory() -> int:
    """The most that this process and its children have had in memory at once, each for itself."""
    every = [psutil.Process(), *psutil.Process().children(recursive=True)]
    found = []
    for process in every:
        try:
            text = Path(f"/proc/{process.pid}/status").read_text()
        except OSError:
            continue
        match = re.search(r"VmHWM:\s+(\d+) kB", text)
        found.append(int(match[1]) * 1024 if match else 0)
    return max(found)


def soon(what: Callable[[], _T]) -> tuple[_T, float]:
    """Return the result and the least seconds of three calls: a busy machine makes a call longer."""
    found = []
    for _ in range(3):
        began = time.monotonic()
        found.append((what(), time.monotonic() - began))
        if found[-1][1] < SOON:
            break
    return min(found, key=lambda each: each[1])


def failures(
    folder: Path, models: list[tuple[bytes, Walk, int]], worker: Worker, where: str, numbers: range
) -> list[str]:
    """Return the numbers of headers that do not end as they should, with the reason."""
    found = []
    for number in numbers:
        path = written(folder / f"{number}.gguf", models, number)
        address = str(path) if where == str(folder) else f"{where}/{path.name}"

        def measure(address: str = address) -> FitterError | None:
            try:
                fitter.measure(address, gpus="24GiB", worker=worker)
            except FitterError as refused:
                return refused
            return None

        error, seconds = soon(measure)
        if error is None:
            found.append(f"{number}: it is a model")
        elif error.exit_code != 3 or isinstance(error, LlamaCppCrashError) or not str(error).isprintable():
            found.append(f"{number}: {type(error).__name__}: {error}")
        elif not str(error).startswith(address):
            found.append(f"{number}: of what? {error}")
        if seconds > SOON:
            found.append(f"{number}: {seconds:.1f} s")
        path.unlink()
    return found


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in clean_environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    remote_files.forget()


@pytest.mark.usefixtures("own_cache")
@cases("file", "HTTP")
def test_a_malformed_header_is_one_line(
    where: str, folder: Path, models: list[tuple[bytes, Walk, int]], worker: Worker
) -> None:
    before = most_memory()
    with serving(folder) as server:
        place = str(folder) if where == "file" else server.url
        assert failures(folder, models, worker, place, range(COUNT)) == []
    assert most_memory() < max(LITTLE, before + LITTLE // 2)


@pytest.mark.slow
@pytest.mark.usefixtures("own_cache")
def test_many_more_malformed_headers(folder: Path, models: list[tuple[bytes, Walk, int]], worker: Worker) -> None:
    assert failures(folder, models, worker, str(folder), range(COUNT, 10 * COUNT)) == []


# --- headers with one value at an extreme, through every door; and none is refused that llama.cpp itself loads


ARCHITECTURES = ("qwen3", "qwen3moe", "gemma3", "lfm2", "llama", "deepseek2", "gpt-oss", "jamba")
MUTATED = 60
MANY = 1500


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Source]:
    return sources(tmp_path_factory.mktemp("sources"), ARCHITECTURES)


@pytest.fixture(scope="module")
def loader() -> Iterator[Worker]:
    with Worker(parse_gpus(["24GiB"])) as loader:
        yield loader


def wrong(tried: Sequence[Mutation], found: Mapping[str, Source], doors: Sequence[str]) -> list[str]:
    """Return the mutations that do not end as they should, and how they end."""
    every = outcomes(tried, found, doors, jobs=2)
    return [f"{each.door}: {each.what}: {each.wrong} ({each.said})" for each in every if each.wrong]


@pytest.mark.parametrize("door", [*ALONE, TOGETHER])
def test_what_was_bad_is_one_line(found: Mapping[str, Source], door: str | tuple[str, ...]) -> None:
    assert wrong(KNOWN, found, [door] if isinstance(door, str) else door) == []


def test_others_end_as_they_should(found: Mapping[str, Source]) -> None:
    others = drawn(found, len(KNOWN) + 4, seed=1)[len(KNOWN) :]
    assert wrong(others, found, (*ALONE, *TOGETHER)) == []


def loads(loader: Worker, path: Path) -> bool:
    """Whether llama.cpp loads it, asked without anything that fitter checks."""
    try:
        loader.measure(str(path), Params(n_ctx=4096))
    except FitterError:
        return False
    return True


def refused(loader: Worker, path: Path, headers: Sequence[tuple[str, Source, bytes]]) -> tuple[list[str], int]:
    """Return the headers that only fitter refuses, and the number of headers that llama.cpp loads."""
    found, n_loaded = [], 0
    for what, source, header in headers:
        source.write(path, header)
        if loads(loader, path):
            n_loaded += 1
            try:
                open_model(path, loader.header)
            except ModelError as error:
                found.append(f"{what}: {error}")
    return found, n_loaded


def extremes(found: Mapping[str, Source], count: int) -> list[tuple[str, Source, bytes]]:
    """Some of the mutations; a vocabulary without texts would take the memory for it."""
    every = [each for each in mutations(found) if not each.key.endswith(".vocab_size")]
    chosen = random.Random(2).sample(every, min(count, len(every)))
    return [(str(each), found[each.architecture], mutated(found[each.architecture], each)) for each in chosen]


def test_what_llama_cpp_loads_is_not_refused(found: Mapping[str, Source], loader: Worker, tmp_path: Path) -> None:
    bad, n_loaded = refused(loader, tmp_path / "model.gguf", extremes(found, MUTATED))
    assert bad == [] and 5 < n_loaded < MUTATED


@pytest.mark.slow
def test_much_of_what_llama_cpp_loads(found: Mapping[str, Source], loader: Worker, tmp_path: Path) -> None:
    assert refused(loader, tmp_path / "model.gguf", extremes(found, MANY))[0] == []


def test_llama_cpp_has_these_limits(found: Mapping[str, Source], loader: Worker, tmp_path: Path) -> None:
    """llama.cpp loads no header beyond a limit, and fitter refuses no header within it."""
    headers = []
    for name in ("qwen3moe", "gemma3"):
        source = found[name]
        entries = {entry.key.removeprefix(name): entry for entry in source.walk.entries}
        for limit in limits():
            if limit.key not in entries:
                continue
            most = limit.most if isinstance(limit.most, int) else 2**32 - 1
            values = [packed(UINT32, each) for each in {0, 1, limit.least, most, min(most + 1, 2**32 - 1)}]
            values += [packed(STRING, "1"), packed(FLOAT32, 1.0), packed(INT32, 1), packed(UINT64, 2**32)]
            for number, value in enumerate(values):
                headers.append((f"{name}{limit.key} {number}", source, source.walk.replaced(entries[limit.key], value)))
    bad, n_loaded = refused(loader, tmp_path / "model.gguf", headers)
    assert bad == [] and n_loaded > 5
    path = tmp_path / "beyond.gguf"
    for key, value in ((".block_count", 513), (".expert_count", 1025)):
        source = found["qwen3moe"]
        entry = next(each for each in source.walk.entries if each.key.endswith(key))
        source.write(path, source.walk.replaced(entry, packed(UINT32, value)))
        assert not loads(loader, path)
        with pytest.raises(ModelError, match=f"has qwen3moe{key} {value}: llama.cpp takes a whole number from "):
            open_model(path, loader.header)


# --- models opened with the headers that the loader reads, and the machine as the loader sees it


@cases("llama-3.1-8b", "qwen3-235b-a22b", "deepseek-v3.1", "nemotron-h-9b")
def test_a_real_shape(name: str, worker: Worker, tmp_path: Path) -> None:
    shape = shapes.SHAPES[name]
    model = open_model(shapes.write(name, tmp_path), worker.header)
    assert (model.name, model.architecture, model.bytes) == (shape.title, shape.architecture, shape.bytes)
    assert (model.n_layer, model.n_ctx_train) == (shape.n_layer, shape.metadata[".context_length"])
    assert [(tensor.name, tensor.shape, tensor.bytes) for tensor in model.tensors] == [
        (tensor.name, tensor.shape, tensor.bytes) for tensor in shape.tensors
    ]


def test_a_split_model(worker: Worker, tmp_path: Path) -> None:
    first = shapes.write_split("qwen3-32b", tmp_path, 3, vocab=False)
    last = first.with_name("qwen3-32b-00003-of-00003.gguf")
    model = open_model(last, worker.header)
    assert (model.path, len(model.files), model.bytes) == (first, 3, shapes.SHAPES["qwen3-32b"].bytes)
    assert {tensor.split for tensor in model.tensors} == {0, 1, 2}


def test_a_model_missing_its_last_byte(worker: Worker, tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "a.gguf")
    content = path.read_bytes()
    assert open_model(path, worker.header).n_expert == 8
    # the last tensor ends at a multiple of the alignment, so nothing of the file is padding
    path.write_bytes(content[:-1])
    with pytest.raises(ModelError, match="the last 1 bytes"):
        open_model(path, worker.header)


def test_virtual_devices_are_to_llama_cpp_what_they_are_to_us() -> None:
    virtual = parse_gpus(["2x rtx-4090", "cuda:12.0:32GiB:free=30GiB"])
    with Worker() as worker:
        worker.configure(virtual)
        assert worker.devices() == virtual_machine(virtual).devices
