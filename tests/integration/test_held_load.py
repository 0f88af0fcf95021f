"""A load of the model's own file that reads the tokenizer first and waits to be told where its tensors go."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from fitter.api.early_load import SecondWorker
from fitter.errors import LlamaCppError
from fitter.llama.client import Worker
from fitter.llama.types import Breakdown, Params, Skeleton
from fitter.machine.gpu import parse_gpus
from tests.support.expert_placements import GPUS, OTHERS, PLACED, params
from tools.shapes import write


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models")
    (directory / "bare").mkdir()
    return write("qwen3-30b-a3b", directory)


@pytest.fixture
def worker() -> Iterator[Worker]:
    with Worker(parse_gpus(GPUS)) as worker:
        yield worker


@pytest.fixture(scope="module")
def expected(model: Path) -> dict[str, Breakdown]:
    """Measure each placement without waiting. A header without a tokenizer has the same bytes and is read at once."""
    path = write("qwen3-30b-a3b", model.parent / "bare", vocab=False)
    with Worker(parse_gpus(GPUS)) as worker:
        return {name: worker.measure(path, wanted) for name, wanted in (PLACED | OTHERS).items()}


@pytest.mark.parametrize("name", (PLACED | OTHERS))
def test_the_answer_is_that_of_any_other_load(model: Path, expected: dict[str, Breakdown], name: str) -> None:
    with Worker(parse_gpus(GPUS)) as worker:
        worker.start_paused_load(model)
        worker.begin_measure(model, (PLACED | OTHERS)[name])
        assert worker.finish_measure() == expected[name]
        # and so is what is asked afterwards
        assert worker.measure(model, params()) == expected["layers shared out"]


def test_it_is_the_only_load(worker: Worker, model: Path) -> None:
    worker.start_paused_load(model)
    worker.measure(model, params())
    worker.measure(model, params(n_ctx=8192))
    assert worker.dummy_loads == 1


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
    """``SecondWorker.begin``: what cannot be had of it is measured by another process, and is the same."""
    wanted = params(overrides=())
    with Worker(parse_gpus(GPUS)) as other:
        expected = other.measure(model, wanted)
    second = SecondWorker(worker, [model])
    before = set(psutil.Process().children())
    second.load(parse_gpus(["1GiB"]))
    (waiting,) = set(psutil.Process().children()) - before
    second.begin(wanted)
    assert not waiting.is_running()
    assert [row.used for row in second.finish().rows] == [row.used for row in expected.rows]
