"""Models opened with the headers that the worker reads, and the machine as the worker sees it."""

from __future__ import annotations

from pathlib import Path

import pytest

from fitter.errors import ModelError
from fitter.llama.client import Worker
from fitter.machine.gpu import parse_gpus
from fitter.machine.machine import virtual_machine
from fitter.model.header import open_model
from tests.support.cases import cases
from tools.models import shapes
from tools.models.tiny import write_tiny


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
