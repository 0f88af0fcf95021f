"""``--gpu none``: a plan for a machine without a GPU, whatever this one has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import fitter
from fitter.cli import main
from fitter.llama.types import Params
from tests.support.cases import cases
from tools.models.tiny import write_tiny

MODEL = "llama-3.1-8b"


@cases(("16GiB", True), ("4GiB", False), (None, True))
def test_the_host_alone(host_memory: str | None, fits: bool, model: Path) -> None:
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


SAID = "this machine has a GPU of NVIDIA, but "


def test_a_gpu_that_llama_cpp_does_not_use_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the system's word it is there, and llama.cpp has no device."""
    if fitter.devices()[0]:
        pytest.skip("llama.cpp has a device here")
    monkeypatch.setattr("fitter.machine.host.vendors", lambda root: ("NVIDIA",))
    assert main(["devices"]) == 0
    out, err = capsys.readouterr()
    assert err.startswith(f"fitter: warning: {SAID}") and err.count("\n") == 1 and SAID not in out
    assert main(["devices", "--gpu", "none"]) == 0
    assert capsys.readouterr().err == ""
    model = write_tiny(tmp_path / "tiny.gguf")
    assert [note.startswith(SAID) for note in fitter.fit(model).notes] == [True]
    meant: list[dict[str, Any]] = [{"gpus": "none"}, {"devices": "none"}, {"n_gpu_layers": 0}]
    for given in meant:
        assert SAID not in str(fitter.fit(model, **given).notes), given
