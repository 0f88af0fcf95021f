"""A load of the model's own file that reads the tokenizer first and waits to be told where its tensors go."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from fitter.api.early_load import Second
from fitter.errors import LlamaCppError
from fitter.llama.client import Worker
from fitter.llama.types import Breakdown, Params, Skeleton, TensorBuftOverride
from fitter.machine.gpu import parse_gpus
from tools.shapes import write

GPUS = ["4GiB", "cuda:8.6:6GiB", "3GiB"]
HOST = (TensorBuftOverride("^blk.(1|7|30).ffn_(up|down)_exps.weight$", "CPU"),)
BOTH = (*HOST, TensorBuftOverride("^blk.9.ffn_gate_exps.weight$", "CUDA2"))
ALL = ("CUDA0", "CUDA1", "CUDA2")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models")
    (directory / "bare").mkdir()
    return write("qwen3-30b-a3b", directory)


@pytest.fixture
def worker() -> Iterator[Worker]:
    with Worker(parse_gpus(GPUS)) as worker:
        yield worker


def params(
    devices: tuple[str, ...] = ALL,
    split: tuple[float, ...] | None = (20.0, 20.0, 9.0),
    overrides: tuple[TensorBuftOverride, ...] = HOST,
    n_gpu_layers: int = 49,
    n_ctx: int = 4096,
) -> Params:
    return Params(
        n_ctx=n_ctx,
        n_gpu_layers=n_gpu_layers,
        devices=devices,
        tensor_split=split,
        tensor_buft_overrides=overrides,
    )


PLACEMENTS = {
    "layers shared out": params(),
    "another split": params(split=(3.0, 40.0, 6.0)),
    "a device without a layer": params(split=(20.0, 0.0, 29.0)),
    "an override to a device": params(overrides=BOTH),
    "devices in another order": params(("CUDA1", "CUDA2", "CUDA0"), (8.0, 30.0, 11.0), BOTH),
    "all layers, in llama.cpp's words": params(n_gpu_layers=-1),
    # what the load that waits cannot become
    "no override": params(overrides=()),
    "fewer layers": params(n_gpu_layers=30, split=(10.0, 10.0, 10.0)),
    "fewer devices": params(("CUDA0", "CUDA1"), (30.0, 19.0)),
    "shares that are no numbers of layers": params(split=(0.5, 0.25, 0.25)),
    "shares by free memory": params(split=None),
    "no device": params((), None, ()),
}


@pytest.fixture(scope="module")
def expected(model: Path) -> dict[str, Breakdown]:
    """What a worker answers that waits for nothing. Headers without a tokenizer have the same bytes, in no time."""
    path = write("qwen3-30b-a3b", model.parent / "bare", vocab=False)
    with Worker(parse_gpus(GPUS)) as worker:
        return {name: worker.measure(path, wanted) for name, wanted in PLACEMENTS.items()}


@pytest.mark.parametrize("name", PLACEMENTS)
def test_the_answer_is_that_of_any_other_load(model: Path, expected: dict[str, Breakdown], name: str) -> None:
    with Worker(parse_gpus(GPUS)) as worker:
        worker.start_paused_load(model)
        worker.begin_measure(model, PLACEMENTS[name])
        assert worker.finish_measure() == expected[name]
        # and so is what is asked afterwards
        assert worker.measure(model, params()) == expected["layers shared out"]


def test_it_is_the_only_load(worker: Worker, model: Path) -> None:
    worker.start_paused_load(model)
    worker.measure(model, params())
    worker.measure(model, params(n_ctx=8192))
    assert worker.dummy_loads == 1


def test_devices_are_in_their_order_again_once_they_are_described(worker: Worker, model: Path) -> None:
    before = worker.devices()
    worker.start_paused_load(model)
    worker.measure(model, params(("CUDA2", "CUDA1", "CUDA0"), (9.0, 20.0, 20.0)))
    worker.configure(parse_gpus(GPUS))
    assert worker.devices() == before


def test_other_questions_do_not_wait_for_a_placement(worker: Worker, model: Path) -> None:
    header = worker.header(model)
    worker.start_paused_load(model)
    assert worker.header(model) == header
    assert worker.layout(Skeleton((str(model),)), Params(n_ctx=4096)).entries
    assert worker.measure(model, params()).on("CUDA0").model


def test_a_model_that_cannot_be_loaded(worker: Worker, tmp_path: Path, model: Path) -> None:
    broken = tmp_path / "broken.gguf"
    with open(model, "rb") as file:
        broken.write_bytes(file.read(100_000))
    worker.start_paused_load(broken)
    with pytest.raises(LlamaCppError, match=r"broken\.gguf"):
        worker.measure(broken, params())
    assert worker.measure(model, params()).on("CUDA0").model


def test_a_worker_ends_with_a_load_that_waits(model: Path) -> None:
    # what another file's tests have started ends with this process
    before = set(psutil.Process().children())
    with Worker(parse_gpus(GPUS)) as worker:
        worker.start_paused_load(model)
        worker.devices()
        children = set(psutil.Process().children()) - before
    assert children and not [child for child in children if child.is_running()]


def test_a_load_that_waits_in_vain_is_ended(model: Path, worker: Worker) -> None:
    """``Second.begin``: what cannot be had of it is measured by another process, and is the same."""
    wanted = params(overrides=())
    with Worker(parse_gpus(GPUS)) as other:
        expected = other.measure(model, wanted)
    second = Second(worker, [model])
    before = set(psutil.Process().children())
    second.load(parse_gpus(["1GiB"]))
    (waiting,) = set(psutil.Process().children()) - before
    second.begin(wanted)
    assert not waiting.is_running()
    assert [row.used for row in second.finish().rows] == [row.used for row in expected.rows]
