"""Headers with one value at an extreme, through every door; and none is refused that llama.cpp itself loads."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from fitter.errors import FitterError, ModelError
from fitter.llama.client import Worker
from fitter.llama.header.limits import limits
from fitter.llama.types import Params
from fitter.machine.gpu import parse_gpus
from fitter.model.header import open_model
from tools.mutated_headers.__main__ import outcomes
from tools.mutated_headers.doors import ALONE, TOGETHER
from tools.mutated_headers.fields import FLOAT32, INT32, STRING, UINT32, UINT64, packed
from tools.mutated_headers.mutations import KNOWN, Mutation, Source, drawn, mutated, mutations, sources

ARCHITECTURES = ("qwen3", "qwen3moe", "gemma3", "lfm2", "llama", "deepseek2", "gpt-oss", "jamba")
COUNT = 60
MANY = 1500


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Source]:
    return sources(tmp_path_factory.mktemp("sources"), ARCHITECTURES)


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    with Worker(parse_gpus(["24GiB"])) as worker:
        yield worker


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


def loads(worker: Worker, path: Path) -> bool:
    """Whether llama.cpp loads it, asked without anything that fitter checks."""
    try:
        worker.measure(str(path), Params(n_ctx=4096))
    except FitterError:
        return False
    return True


def refused(worker: Worker, path: Path, headers: Sequence[tuple[str, Source, bytes]]) -> tuple[list[str], int]:
    """Return the headers that only fitter refuses, and the number of headers that llama.cpp loads."""
    found, n_loaded = [], 0
    for what, source, header in headers:
        source.write(path, header)
        if loads(worker, path):
            n_loaded += 1
            try:
                open_model(path, worker.header)
            except ModelError as error:
                found.append(f"{what}: {error}")
    return found, n_loaded


def extremes(found: Mapping[str, Source], count: int) -> list[tuple[str, Source, bytes]]:
    """Some of the mutations; a vocabulary without texts would take the memory for it."""
    every = [each for each in mutations(found) if not each.key.endswith(".vocab_size")]
    chosen = random.Random(2).sample(every, min(count, len(every)))
    return [(str(each), found[each.architecture], mutated(found[each.architecture], each)) for each in chosen]


def test_what_llama_cpp_loads_is_not_refused(found: Mapping[str, Source], worker: Worker, tmp_path: Path) -> None:
    bad, n_loaded = refused(worker, tmp_path / "model.gguf", extremes(found, COUNT))
    assert bad == [] and 5 < n_loaded < COUNT


@pytest.mark.slow
def test_much_of_what_llama_cpp_loads(found: Mapping[str, Source], worker: Worker, tmp_path: Path) -> None:
    assert refused(worker, tmp_path / "model.gguf", extremes(found, MANY))[0] == []


def test_llama_cpp_has_these_limits(found: Mapping[str, Source], worker: Worker, tmp_path: Path) -> None:
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
    bad, n_loaded = refused(worker, tmp_path / "model.gguf", headers)
    assert bad == [] and n_loaded > 5
    path = tmp_path / "beyond.gguf"
    for key, value in ((".block_count", 513), (".expert_count", 1025)):
        source = found["qwen3moe"]
        entry = next(each for each in source.walk.entries if each.key.endswith(key))
        source.write(path, source.walk.replaced(entry, packed(UINT32, value)))
        assert not loads(worker, path)
        with pytest.raises(ModelError, match=f"has qwen3moe{key} {value}: llama.cpp takes a whole number from "):
            open_model(path, worker.header)
