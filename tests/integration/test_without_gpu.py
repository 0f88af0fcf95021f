"""``--gpu none``: a plan for a machine without a GPU, whatever this one has."""

from __future__ import annotations

from pathlib import Path

import pytest

import fitter
from fitter.llama.types import Params
from tools import shapes


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shapes.write("llama-3.1-8b", tmp_path_factory.mktemp("models"), vocab=False)


@pytest.mark.parametrize(("host_memory", "fits"), [("16GiB", True), ("4GiB", False), (None, True)])
def test_the_host_alone(model: Path, host_memory: str | None, fits: bool) -> None:
    plan = fitter.fit(model, gpus=["none"], host_memory=host_memory, n_ctx=8192)
    assert plan.fits == fits
    assert plan.devices == () and plan.params.devices == () and plan.params.n_gpu_layers == 0
    assert plan.arguments(anyway=True)[:6] == ["-c", "8192", "-dev", "none", "-ngl", "0"]
    assert plan.to_dict()["host"]["total"] == (None if host_memory is None else int(host_memory[:-3]) * 2**30)


def test_the_context_is_the_largest_that_the_host_holds(model: Path) -> None:
    plan = fitter.fit(model, gpus=["none"], host_memory="10GiB")
    assert plan.fits and plan.params.n_ctx < 131072
    more = fitter.fit(model, gpus=["none"], host_memory="10GiB", n_ctx=plan.params.n_ctx + 2048)
    assert not more.fits


def test_its_devices_are_none(model: Path) -> None:
    plan = fitter.fit(model, gpus=["none"], devices=["none"], n_ctx=512)
    assert plan.params == Params(n_ctx=512, n_gpu_layers=0, devices=())
