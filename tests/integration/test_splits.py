"""Split mode tensor: bytes of each device as a real ggml-cuda allocates them, and as rpc-servers take them."""

from __future__ import annotations

import contextlib
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import fitter
from fitter.errors import FitterError, LibraryError, LlamaCppError
from fitter.llama.client import Worker
from fitter.llama.types import Breakdown, Params, TensorBuftOverride
from fitter.machine.gpu import parse_gpus
from fitter.model.header import open_model
from tests.support.cases import cases, named_cases
from tests.support.llama_builds import NEWEST, PINNED, every, where
from tools.loopback import rpc_servers
from tools.models import shapes
from tools.models.tiny import TINY_MOE, TinyModel, write_tiny
from tools.splits import loads

STORED = Path(__file__).resolve().parents[1] / "data" / "splits"
"""Bytes that ``python -m tools.splits --store`` stored for the loads that ``draw`` draws with seed 1."""

SAMPLE = 30


@pytest.fixture(scope="module", params=["dense", "experts"])
def tiny_split_model(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """A real model that is wide enough to be split."""
    n_expert = 8 if request.param == "experts" else 0
    model = TinyModel(
        f"tiny {request.param}",
        n_layer=4,
        n_embd=256,
        n_head=8,
        n_head_kv=4,
        n_embd_head=64,
        n_ff=768,
        n_expert=n_expert,
    )
    return write_tiny(tmp_path_factory.mktemp("tiny") / "model.gguf", model)


@cases((PINNED, "held.jsonl.gz"), (NEWEST, "held-0.27.jsonl.gz"))
def test_cards_hold_what_is_said(build: str, table: str, directory: Path) -> None:
    stored = loads.stored(STORED / table)
    drawn = loads.draw(len(stored), 1)
    every = len(stored) // min(SAMPLE, len(stored))
    asked = drawn[::every]
    found = loads.virtual(asked, directory, where(build))
    assert [pair for pair in zip(asked, found, stored[::every], strict=True) if pair[1] != pair[2]] == []
    assert {bool(held.failure) for held in found} == {True, False}


def test_a_build_that_was_not_compared_is_refused(directory: Path) -> None:
    path = loads.write_model("llama-3.1-70b", directory)
    cards = [loads.card(i, "86") for i in range(2)]
    says = r"^split mode 'tensor' is planned for ggml 0\.25\.3, 0\.26\.0, 0\.27\.0 only, and this .* has 0\.25\.1: use "
    with Worker(cards, llama_cpp=where("v0.5.0")) as worker, pytest.raises(LibraryError, match=says):
        worker.measure(path, Params(n_ctx=512, split_mode="tensor"))


def test_row_is_measured_as_llama_cpp_takes_it(directory: Path) -> None:
    path = loads.write_model("llama-3.1-70b", directory)
    with Worker([loads.card(i, "86") for i in range(2)]) as worker, pytest.raises(FitterError, match="split buffers"):
        worker.measure(path, Params(n_ctx=512, split_mode="row"))


def test_what_was_loaded_for_real_is_gone_when_it_is_measured_again(tiny_split_model: Path) -> None:
    """A model often has the address of the one before."""
    with rpc_servers.servers(2) as endpoints, Worker(rpc=endpoints) as worker:
        devices = tuple(device.name for device in worker.devices())
        loads = [
            Params(n_ctx=512, n_ubatch=64, n_batch=64, split_mode="tensor", devices=devices, n_gpu_layers=n_gpu_layers)
            for n_gpu_layers in (5, 4)
        ]
        said = [worker.measure(tiny_split_model, params) for params in loads]
        for _ in range(3):
            worker.load(tiny_split_model, loads[0])
            worker.unload()
            assert [worker.measure(tiny_split_model, params) for params in loads] == said


def test_servers_take_what_is_said_with_experts_on_the_host(tmp_path: Path) -> None:
    """The first sums are smaller than later ones."""
    path = write_tiny(tmp_path / "model.gguf", replace(TINY_MOE, n_embd=256, n_head=8, n_head_kv=4, n_embd_head=64))
    overrides = (TensorBuftOverride("^blk.(0|1).ffn_(up|down|gate)_exps", "CPU"),)
    with rpc_servers.servers(2) as endpoints, Worker(rpc=endpoints) as worker:
        devices = tuple(device.name for device in worker.devices())
        params = Params(
            n_ctx=512, n_ubatch=64, n_batch=64, split_mode="tensor", devices=devices, tensor_buft_overrides=overrides
        )
        said = worker.measure(path, params, reserve=True)
        taken = worker.load(path, params)
        worker.unload()
    assert _rows(said) == _rows(taken.breakdown)


def _rows(breakdown: Breakdown) -> dict[str, tuple[int, int, int]]:
    return {row.buffer_type: (row.model, row.context, row.compute) for row in breakdown.real.rows if row.used}


@cases(2, 3)
def test_servers_take_what_is_said(n_servers: int, tiny_split_model: Path) -> None:
    with rpc_servers.servers(n_servers) as endpoints, Worker(rpc=endpoints) as worker:
        devices = tuple(device.name for device in worker.devices())
        params = Params(n_ctx=512, n_ubatch=64, n_batch=64, split_mode="tensor", devices=devices)
        said = worker.measure(tiny_split_model, params, reserve=True)
        assert said.devices == devices
        taken = worker.load(tiny_split_model, params)
        worker.unload()
    assert _rows(said) == _rows(taken.breakdown)
    assert sum(name.endswith("_AllReduce") for name in _rows(said)) == n_servers


@pytest.mark.parametrize("build", every(["b11413", "b11548", NEWEST]))
@pytest.mark.parametrize(
    ("n_servers", "n_ubatch"),
    [
        pytest.param(2, 64, id="small sums"),
        pytest.param(2, 256, id="large sums"),
        pytest.param(3, 256, id="no sums of their own"),
    ],
)
def test_servers_of_newer_builds_take_what_is_said(
    tiny_split_model: Path, n_servers: int, n_ubatch: int, build: str, tmp_path: Path
) -> None:
    """From b11450 on (ggml 0.26), two servers keep what they send each other; no client counts it."""
    logs = [tmp_path / f"{i}.log" for i in range(n_servers)]
    with contextlib.ExitStack() as started:
        endpoints = []
        for log in logs:
            process, endpoint = rpc_servers.start(log=log, counts=where(build))
            started.callback(rpc_servers.stop, process)
            endpoints.append(endpoint)
        with Worker(rpc=endpoints, llama_cpp=where(build)) as worker:
            devices = tuple(device.name for device in worker.devices())
            params = Params(n_ctx=512, n_ubatch=n_ubatch, n_batch=n_ubatch, split_mode="tensor", devices=devices)
            said = worker.measure(tiny_split_model, params, reserve=True)
            assert [counted(log) for log in logs] == [0] * n_servers
            taken = worker.load(tiny_split_model, params)
            assert _rows(said) == _rows(taken.breakdown)
            assert [counted(log) for log in logs] == [said.real.on(name).used for name in devices]
            worker.unload()


def counted(log: Path) -> int:
    """Bytes of all buffers that a server has made."""
    return sum(int(size) for size in re.findall(r"^buffer (\d+)$", log.read_text(), re.MULTILINE))


def test_caches_of_more_than_a_block_of_vulkans_memory(directory: Path) -> None:
    """Slices are in several buffers then."""
    path = loads.write_model("qwen3-32b", directory)
    with Worker(parse_gpus(["2x vulkan:24GiB"])) as worker:
        small, large = (worker.measure(path, Params(n_ctx=n_ctx, split_mode="tensor")) for n_ctx in (131072, 524288))
    for name in small.devices:
        assert large.on(name).context == 4 * small.on(name).context > 2**30
        assert large.on(name).model == small.on(name).model


@named_cases(
    ("experts", "qwen3-30b-a3b", ["2x 9GiB"], {"host_memory": "5GiB"}),
    ("experts on unlike cards", "gpt-oss-20b", ["6GiB", "3GiB", "4GiB"], {"n_ctx": 8192}),
    ("no experts", "qwen3-32b", ["2x 9GiB"], {"n_gpu_layers": 99}),
    ("layers of the user", "qwen3-30b-a3b", ["4x 3GiB"], {"n_gpu_layers": 40}),
)
def test_as_few_layers_as_possible_have_something_on_the_host(
    shape: str, gpus: list[str], keywords: dict[str, Any], directory: Path
) -> None:
    path = shapes.write(shape, directory, vocab=False)
    with Worker() as worker:
        plan = fitter.fit(path, gpus=gpus, worker=worker, split_mode="tensor", program="any", **keywords)
        assert plan.fits and plan.estimate is not None
        (override,) = plan.params.tensor_buft_overrides
        said = worker.measure(path, plan.params)
        assert said.rows == plan.breakdown.rows
        assert all(device.free - said.on(device.name).used >= device.margin for device in plan.devices)
        layers = re.findall(r"blk\.(\d+)\.ffn_up", " ".join(caught(worker, path, plan.params)))
        # with the least of them on the cards again, equal shares do not fit whichever way they are corrected
        less = without_layer(worker, path, plan.params, int(layers[-1]))
        used = worker.measure(path, less)
    assert sum(used.on(d.name).used for d in plan.devices) > sum(d.free - d.margin for d in plan.devices) or any(
        used.on(device.name).used > device.free - device.margin for device in plan.devices
    )
    assert override.buffer_type == "CPU"


def caught(worker: Worker, path: Path, params: Params) -> list[str]:
    """The tensors that the overrides of ``params`` catch."""
    names = [tensor.name for tensor in open_model(str(path), worker.header).tensors]
    found = worker.match([each.pattern for each in params.tensor_buft_overrides], names)
    return [name for name, index in zip(names, found, strict=True) if index >= 0]


def without_layer(worker: Worker, path: Path, params: Params, layer: int) -> Params:
    """``params`` with everything of a layer on the devices again."""
    kept = [name for name in caught(worker, path, params) if not name.startswith(f"blk.{layer}.")]
    pattern = "^(" + "|".join(map(re.escape, kept)) + ")$"
    return replace(params, tensor_buft_overrides=(TensorBuftOverride(pattern, "CPU"),) if kept else ())


def test_what_cannot_be_split_is_known_before_the_load(directory: Path) -> None:
    path = loads.write_model("qwen3-next-80b-a3b", directory)
    params = Params(n_ctx=512, split_mode="tensor", tensor_split=(24.0, 24.0, 12.0, 8.0))
    with Worker([loads.card(i, "86") for i in range(4)]) as worker:
        with pytest.raises(LlamaCppError, match="cannot split the tensors of this model over these devices"):
            worker.measure(path, params)
        # the process is there for the next question
        assert worker.measure(path, Params(n_ctx=512, split_mode="tensor")).devices
