"""A tokenizer that llama.cpp has read before is not read again for another file with it."""

from __future__ import annotations

import os
import struct
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

import fitter
from fitter.errors import LlamaCppError
from fitter.llama.build import library as native
from fitter.llama.client import Worker
from fitter.llama.header.tokenizer import tokenizer_key
from fitter.llama.types import Breakdown, Params, Skeleton
from fitter.llama.worker import remembered_loads
from fitter.llama.worker.remembered_loads import RememberingWorker, tokenizers
from fitter.machine.gpu import parse_gpus
from tests.integration.test_planner import timeless
from tools.shapes import Q4_K, Q8_0, SHAPES, write_shape, write_split

BASE = SHAPES["llama-3.1-8b"]
GPUS = ["6GiB"]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("base") / "base.gguf"
    write_shape(BASE, path)
    return path


@pytest.fixture
def known(base: Path) -> Path:
    """A model whose tokenizer a planner has read, in a second process."""
    assert asked(base) == 2
    return base


def asked(model: Path) -> int:
    """How many processes of llama.cpp a planner needs for a plan, which has to be the one of ``fit``."""
    before = {child.pid for child in psutil.Process().children()}
    with fitter.Planner(model, gpus=GPUS) as planner:
        plan = planner.fit()
        processes = {child.pid for child in psutil.Process().children()} - before
    assert timeless(plan) == timeless(fitter.fit(model, gpus=GPUS))
    return len(processes)


def with_another_kind_of_token(path: Path) -> None:
    """Change one number of the tokenizer: the first token becomes one that a user has defined."""
    with path.open("r+b") as file:
        start = file.read(1 << 24).index(b"tokenizer.ggml.token_type") + len("tokenizer.ggml.token_type")
        file.seek(start + 4 + 4 + 8)
        file.write(struct.pack("<i", 4))


def test_the_model_itself_is_not_read_again(known: Path) -> None:
    assert asked(known) == 1


def test_a_fine_tune_has_the_tokenizer_of_its_base(known: Path, tmp_path: Path) -> None:
    larger = tuple(replace(each, type=Q8_0 if each.type == Q4_K else each.type) for each in BASE.tensors)
    write_shape(replace(BASE, title="a fine-tune", tensors=larger), tmp_path / "tuned.gguf")
    assert asked(tmp_path / "tuned.gguf") == 1


def test_so_has_a_split_file(known: Path, tmp_path: Path) -> None:
    assert asked(write_split("llama-3.1-8b", tmp_path, 3)) == 1


@pytest.mark.parametrize("change", ["pre", "token", "architecture"])
def test_any_other_tokenizer_is_read(known: Path, tmp_path: Path, change: str) -> None:
    other = tmp_path / "other.gguf"
    shape = {"pre": replace(BASE, pre="qwen2"), "architecture": SHAPES["qwen3-30b-a3b"]}.get(change, BASE)
    write_shape(shape, other)
    if change == "token":
        with_another_kind_of_token(other)
    assert asked(other) == 2
    assert asked(other) == 1


def test_a_tokenizer_that_llama_cpp_refuses_is_refused_always(known: Path, tmp_path: Path) -> None:
    write_shape(replace(BASE, pre="of-tomorrow"), tmp_path / "new.gguf")
    with fitter.Planner(tmp_path / "new.gguf", gpus=GPUS) as planner:
        for _ in range(2):
            with pytest.raises(LlamaCppError, match="unknown pre-tokenizer type: 'of-tomorrow'"):
                planner.fit()
    assert asked(known) == 1


@pytest.mark.skipif(sys.platform != "linux", reason="the limit is of Linux")
def test_without_a_skeleton_the_file_is_read(tmp_path: Path) -> None:
    model, params = tmp_path / "base.gguf", Params(n_ctx=4096, devices=("CUDA0",))
    write_shape(BASE, model)
    skeleton = Skeleton((str(model),))
    with RememberingWorker() as worker:
        worker.configure(parse_gpus(GPUS))
        expected = worker.measure(skeleton, params)
        assert worker.measure(str(model), params, reserve=True) == expected
        assert len(tokenizers) == 1
        # another skeleton must be made, and cannot be
        os.utime(model, (1, 1))
        psutil.Process(worker.pid).rlimit(psutil.RLIMIT_FSIZE, (4096, 4096))
        with pytest.raises(LlamaCppError, match=r"no skeleton of .* can be made"):
            worker.measure(skeleton, params)
        assert worker.measure(str(model), params, reserve=True) == expected


def test_no_time_for_its_key_ends_no_search(known: Path) -> None:
    params = Params(n_ctx=4096, devices=("CUDA0",))
    with RememberingWorker() as worker:
        worker.configure(parse_gpus(GPUS))
        expected = worker.measure(Skeleton((str(known),)), params)
        worker.deadline = time.monotonic() - 1
        worker.suggest(str(known), params, is_decided=True)
        worker.deadline = None
        assert worker.measure(str(known), params, reserve=True) == expected


def test_a_file_that_takes_other_memory_than_its_skeleton_tells_nothing(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = Params(n_ctx=4096, devices=("CUDA0",))
    really_measure = Worker.measure

    def measure(worker: Worker, path: str | Skeleton, params: Params, *words: Any, **more: Any) -> Breakdown:
        breakdown = really_measure(worker, path, params, *words, **more)
        return replace(breakdown, n_ctx=1) if isinstance(path, Skeleton) else breakdown

    monkeypatch.setattr(Worker, "measure", measure)
    with RememberingWorker() as worker:
        worker.configure(parse_gpus(GPUS))
        worker.measure(Skeleton((str(base),)), params)
        for _ in range(2):
            assert worker.measure(str(base), params, reserve=True).n_ctx == 4096
    assert not tokenizers


def test_the_last_tokenizers_are_known(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remembered_loads, "MOST_TOKENIZERS", 1)
    write_shape(replace(BASE, pre="qwen2"), tmp_path / "other.gguf")
    assert [asked(each) for each in (base, tmp_path / "other.gguf", tmp_path / "other.gguf", base)] == [2, 2, 1, 2]


def test_a_header_that_ends_early_has_no_key(base: Path, tmp_path: Path) -> None:
    native.prepare()
    with base.open("rb") as file:
        data = file.read(1 << 20)
    for length in (0, 3, 8, 23, 24, 40, 200, 1 << 20):
        (tmp_path / "cut").write_bytes(data[:length])
        assert tokenizer_key(str(tmp_path / "cut")) == ""
    (tmp_path / "cut").write_bytes(data[:24] + struct.pack("<Q", 2**63))
    assert tokenizer_key(str(tmp_path / "cut")) == ""
    assert tokenizer_key(str(tmp_path / "not there")) == ""
    assert tokenizer_key(str(base)) == tokenizer_key(str(base)) != ""
