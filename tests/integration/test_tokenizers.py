"""Models are loaded without their tokenizers, and llama.cpp reads each tokenizer once."""

from __future__ import annotations

import os
import struct
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

import fitter
from fitter.errors import LlamaCppError
from fitter.llama.build import library as native
from fitter.llama.client import Worker
from fitter.llama.load.real_load import tokenizer_key
from fitter.llama.types import Params, Skeleton
from fitter.machine.gpu import parse_gpus
from tests.integration.test_planner import timeless
from tests.support.cases import cases
from tests.support.expert_placements import GPUS as PLACED_ON
from tests.support.expert_placements import OTHERS, PLACED
from tools.models.shapes import Q4_K, Q8_0, SHAPES, Shape, write_shape, write_split

WORDS = 20_000
"""Enough that llama.cpp does not read them at once, and few enough that it does not take long."""
LONG = SHAPES["llama-3.1-8b"]
GPUS = ["6GiB"]


def with_fewer_words(shape: Shape) -> Shape:
    tensors = (
        replace(each, shape=tuple(WORDS if size == shape.n_vocab else size for size in each.shape))
        for each in shape.tensors
    )
    return replace(shape, n_vocab=WORDS, pre=LONG.pre, tensors=tuple(tensors))


BASE = with_fewer_words(LONG)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("base") / "base.gguf"
    write_shape(BASE, path)
    return path


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache of its own, in which no tokenizer is known."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    yield tmp_path / "cache"


@pytest.fixture
def known(base: Path) -> Path:
    """A model whose tokenizer llama.cpp has read."""
    assert is_read(base)
    return base


def is_read(model: Path) -> bool:
    """Whether a fit has llama.cpp read the tokenizer; a planner and ``fit`` have the same plan."""
    begun: list[str] = []
    really_begin = Worker.begin_tokenizer

    def begin(worker: Worker, path: str) -> None:
        begun.append(path)
        really_begin(worker, path)

    with pytest.MonkeyPatch.context() as patch, fitter.Planner(model, gpus=GPUS) as planner:
        patch.setattr(Worker, "begin_tokenizer", begin)
        plan = planner.fit()
        assert timeless(plan) == timeless(fitter.fit(model, gpus=GPUS))
    return bool(begun)


def with_another_kind_of_token(path: Path) -> None:
    """Change one number of the tokenizer: the first token becomes one that a user has defined."""
    with path.open("r+b") as file:
        start = file.read(1 << 24).index(b"tokenizer.ggml.token_type") + len("tokenizer.ggml.token_type")
        file.seek(start + 4 + 4 + 8)
        file.write(struct.pack("<i", 4))


def test_the_model_itself_is_not_read_again(known: Path) -> None:
    assert not is_read(known)


def test_a_fine_tune_has_the_tokenizer_of_its_base(known: Path, tmp_path: Path) -> None:
    larger = tuple(replace(each, type=Q8_0 if each.type == Q4_K else each.type) for each in BASE.tensors)
    write_shape(replace(BASE, title="a fine-tune", tensors=larger), tmp_path / "tuned.gguf")
    assert not is_read(tmp_path / "tuned.gguf")


def test_so_has_a_split_file(known: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SHAPES, "base", BASE)
    assert not is_read(write_split("base", tmp_path, 3))


@cases("pre", "token", "architecture")
def test_any_other_tokenizer_is_read(change: str, known: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.gguf"
    shape = {"pre": replace(BASE, pre="qwen2"), "architecture": with_fewer_words(SHAPES["qwen3-30b-a3b"])}.get(
        change, BASE
    )
    write_shape(shape, other)
    if change == "token":
        with_another_kind_of_token(other)
    assert is_read(other)
    assert not is_read(other)


def test_a_tokenizer_that_llama_cpp_refuses_is_refused_always(known: Path, tmp_path: Path) -> None:
    write_shape(replace(BASE, pre="of-tomorrow"), tmp_path / "new.gguf")
    with fitter.Planner(tmp_path / "new.gguf", gpus=GPUS) as planner:
        for _ in range(2):
            with pytest.raises(LlamaCppError, match="unknown pre-tokenizer type: 'of-tomorrow'"):
                planner.fit()
    assert not is_read(known)


VALUES = {"model": (b"gpt9", b"bert", b"rwkv", b"\xff\xfe\x00\x01"), "pre": (b"what",)}
RENAMED = ("model", "pre", "tokens", "token_type", "merges")


@cases(*((key, value) for key, each in VALUES.items() for value in each), *((key, b"") for key in RENAMED))
def test_a_damaged_tokenizer_is_refused_as_llama_cpp_refuses_it(
    key: str, change: bytes, base: Path, tmp_path: Path
) -> None:
    """A key has another name or value: the plan and a load of the whole file are both made, or both refused alike."""
    key = f"tokenizer.ggml.{key}"
    with base.open("rb") as file:
        data = file.read(1 << 25)
    at = data.index(key.encode())
    place = at + len(key) + 4 + 8 if change else at + len(key) - 1
    other = tmp_path / "damaged.gguf"
    data = data[:place] + (change or b"_") + data[place + len(change or b"_") :]
    with other.open("wb") as file:
        file.write(data)
        file.truncate(base.stat().st_size)

    # only one process may use a real device
    devices = {} if key.endswith("pre") else {"gpus": GPUS}

    def said(*, skeleton: bool) -> str:
        try:
            return str(fitter.fit(other, n_ctx=512, skeleton=skeleton, **devices).params)
        except LlamaCppError as error:
            return str(error)

    assert said(skeleton=True) == said(skeleton=False)


def test_a_killed_process_is_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "long.gguf"
    write_shape(LONG, path)
    really_begin = Worker.begin_tokenizer

    def begin(worker: Worker, path: str) -> None:
        really_begin(worker, path)
        worker.interrupt()

    monkeypatch.setattr(Worker, "begin_tokenizer", begin)
    assert fitter.fit(path, gpus=GPUS).fits
    assert not is_read(path)


def test_no_answer_is_given_before_the_check_has_ended(tmp_path: Path) -> None:
    write_shape(replace(LONG, pre="of-tomorrow"), tmp_path / "new.gguf")
    for ask in (fitter.fit, fitter.measure, fitter.estimate):
        with pytest.raises(LlamaCppError, match="unknown pre-tokenizer type: 'of-tomorrow'"):
            ask(tmp_path / "new.gguf", gpus=GPUS, n_ctx=4096)
    with pytest.raises(LlamaCppError, match="unknown pre-tokenizer type: 'of-tomorrow'"):
        fitter.inspect(tmp_path / "new.gguf", n_ctx=4096)


def test_placements_take_the_same_memory_without_the_tokenizer(tmp_path: Path) -> None:
    model, every = tmp_path / "moe.gguf", PLACED | OTHERS
    write_shape(SHAPES["qwen3-30b-a3b"], model)
    with Worker(parse_gpus(PLACED_ON)) as worker:
        found, expected = (
            {name: worker.measure(path, wanted, reserve=True) for name, wanted in every.items()}
            for path in (Skeleton((str(model),)), str(model))
        )
    assert found == expected
    assert len({str(each) for each in found.values()}) == len(every) - 1, "two say the same"


@pytest.mark.skipif(sys.platform != "linux", reason="the limit is of Linux")
def test_without_a_skeleton_the_file_is_loaded(tmp_path: Path) -> None:
    model, params = tmp_path / "base.gguf", Params(n_ctx=4096, devices=("CUDA0",))
    write_shape(BASE, model)
    with Worker(parse_gpus(GPUS)) as worker:
        expected = worker.measure(Skeleton((str(model),)), params, reserve=True)
        # another skeleton must be made, and cannot be
        os.utime(model, (1, 1))
        psutil.Process(worker.pid).rlimit(psutil.RLIMIT_FSIZE, (4096, 4096))
        assert worker.measure(Skeleton((str(model),)), params, reserve=True) == expected


def test_a_header_that_ends_early_has_no_key(base: Path, tmp_path: Path) -> None:
    native.prepare()
    with base.open("rb") as file:
        data = file.read(1 << 20)
    for length in (0, 3, 8, 23, 24, 40, 200, 1 << 17):
        (tmp_path / "cut").write_bytes(data[:length])
        assert tokenizer_key(str(tmp_path / "cut")) == ""
    (tmp_path / "cut").write_bytes(data[:24] + struct.pack("<Q", 2**63))
    assert tokenizer_key(str(tmp_path / "cut")) == ""
    assert tokenizer_key(str(tmp_path / "not there")) == ""
    assert tokenizer_key(str(base)) == tokenizer_key(str(base)) != ""
