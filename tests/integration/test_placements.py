"""fitter's plans and upstream's for the same machines, priced by one code; and what a placement leaves on the host."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import placements
from benchmarks.placement_tables import CONSISTENT, FILLED, NEVER_SLOWER, TENTH, WITHIN, Spill, verdicts
from fitter.llama.client import Worker
from fitter.llama.types import Params
from fitter.model.header import open_model
from fitter.parameters.values import parse_overrides
from tools import shapes

# those that upstream is quick with, and what each has to show
QUICK = {
    "llama-3.1-8b/gtx-1060-6gb+rtx-4090/c8192": set[str](),
    "llama-3.1-8b/4GiB/c16384": {FILLED},
    "llama-3.1-8b/rtx-4060/prompt30000": {FILLED},
    "llama-3.1-70b/rtx-4090+rtx-3060-12gb": {FILLED},
    "qwen3-32b/4x4GiB+2x3GiB+2x2GiB": {FILLED, TENTH},
    "qwen3-30b-a3b/8GiB+6GiB": {FILLED},
    "gpt-oss-20b/8GiB": {FILLED},
    "qwen3-next-80b-a3b/rtx-4090": {FILLED},
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shapes")


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    with Worker() as started:
        yield started


@pytest.mark.parametrize("name", QUICK)
def test_never_slower_than_upstream_and_no_gap_left(
    name: str, models: Path, worker: Worker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placements, "KEPT", tmp_path)
    case = next(case for case in placements.PAIRS if case.name == name)
    pair = placements.compare(case, models, worker)
    assert pair.theirs is not None, "upstream found nothing"
    found = {verdict.check: verdict for verdict in verdicts([pair])}
    assert set(found) == {NEVER_SLOWER, WITHIN, CONSISTENT} | QUICK[name]
    assert all(verdict.met for verdict in found.values()), found


def test_there_are_enough_pairs_and_each_once() -> None:
    names = [case.name for case in placements.PAIRS]
    assert len(names) >= 40
    assert len(set(names)) == len(names)


def test_upstream_is_asked_once(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placements, "KEPT", tmp_path)
    case = next(case for case in placements.PAIRS if case.name == "qwen3-30b-a3b/8GiB+6GiB")
    path, gpus = shapes.write(case.shape, models, vocab=False), placements.parse_gpus(case.gpus)
    first = placements.upstream_plan(case, path, gpus)
    assert first is not None and len(list(tmp_path.iterdir())) == 1
    monkeypatch.setattr(placements.upstream, "fit", lambda *_: pytest.fail("asked again"))
    assert placements.upstream_plan(case, path, gpus) == first
    monkeypatch.setattr(placements, "pin", lambda: ["another version"])
    with pytest.raises(pytest.fail.Exception, match="asked again"):
        placements.upstream_plan(case, path, gpus)


FREE = {"CUDA0": 24 << 30, "CUDA1": 8 << 30}
BOTH = ("CUDA0", "CUDA1")


@pytest.mark.parametrize(
    ("shape", "params", "spilled"),
    [
        pytest.param("llama-3.1-8b", Params(devices=BOTH), [], id="nothing"),
        pytest.param("llama-3.1-8b", Params(n_gpu_layers=31, devices=BOTH), ["blk.0.", "blk.1."], id="two layers"),
        pytest.param(
            "llama-3.1-8b", Params(n_gpu_layers=31, tensor_split=(1, 1), devices=BOTH), ["blk.0.", "blk.1."], id="split"
        ),
        pytest.param(
            "llama-3.1-8b",
            Params(n_gpu_layers=32, devices=BOTH, tensor_buft_overrides=parse_overrides(["^blk.0.ffn_up=CUDA0"])),
            ["blk.0.attn", "blk.0.ffn_norm", "blk.0.ffn_gate", "blk.0.ffn_down"],
            id="a layer of which one tensor is on a device",
        ),
        pytest.param(
            "llama-3.1-8b",
            Params(devices=BOTH, tensor_buft_overrides=parse_overrides(["blk.7.ffn_(up|down)=CPU,blk.8=CUDA1"])),
            ["blk.7.ffn_up", "blk.7.ffn_down"],
            id="single tensors",
        ),
        pytest.param(
            "llama-3.1-8b", Params(n_gpu_layers=0, devices=BOTH), ["blk.", "output", "rope_freqs"], id="everything"
        ),
        pytest.param("llama-3.1-8b", Params(devices=()), ["blk.", "output", "rope_freqs"], id="no device"),
        pytest.param(
            "qwen3-30b-a3b",
            Params(devices=BOTH, tensor_buft_overrides=parse_overrides(["blk.3.ffn_down_exps=CPU"])),
            ["blk.3.ffn_down_exps"],
            id="experts",
        ),
    ],
)
def test_what_is_on_the_host(shape: str, params: Params, spilled: list[str], models: Path, worker: Worker) -> None:
    model = open_model(shapes.write(shape, models, vocab=False), worker.header)
    gone = [tensor for tensor in model.tensors if tensor.name.startswith(tuple(spilled))] if spilled else []
    single = [tensor.bytes for tensor in gone if "ffn_" in tensor.name and "norm" not in tensor.name]
    found = placements.spill_of(model, params, FREE, worker)
    assert found.total == sum(tensor.bytes for tensor in gone)
    assert found.smallest == (min(single) if single else None)
    assert (found.smallest is None) == (found.name == "")
    if not spilled:
        assert found == Spill(0, None)
