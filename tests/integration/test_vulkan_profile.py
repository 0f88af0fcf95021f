"""The vulkan profile answers what the real ggml-vulkan answered (tests/data/vulkan); ``make test-vulkan`` asks."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from pathlib import Path

import pytest

from fitter.llama.client import Worker
from fitter.llama.types import Params, VirtualDevice
from fitter.machine.gpu import VULKAN_DRIVERS, parse_gpus
from tools import shapes
from tools.vulkan import loads as vulkan_reference
from tools.vulkan.loads import Load

SAMPLE = 6
"""One row of so many is compared in the quick test."""


def different(known: Iterable[tuple[Load, str]], directory: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The loads whose answer is another one, with both."""
    found = []
    for environment, rows in itertools.groupby(known, key=lambda row: row[0].environment):
        for name in {variable.partition("=")[0] for variable in vulkan_reference.ENVIRONMENTS}:
            monkeypatch.delenv(name, raising=False)
        if environment:
            monkeypatch.setenv(*environment.split("=", 1))
        with Worker() as worker:
            for load, expected in rows:
                worker.configure(load.devices)
                model = shapes.write(load.model, directory, vocab=False)
                answer = vulkan_reference.answer(worker, model, load.params)
                if answer != expected:
                    found.append(f"{load}\n  expected {expected}\n  found    {answer}")
    return found


def test_a_sample_is_that_of_real_vulkan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = vulkan_reference.known()[::SAMPLE]
    assert {load.driver for load, _ in known} == set(VULKAN_DRIVERS)
    assert {load.model for load, _ in known} >= set(vulkan_reference.MODELS)
    assert {load.environment for load, _ in known} >= {"", *vulkan_reference.ENVIRONMENTS}
    assert not different(known, tmp_path, monkeypatch)


@pytest.mark.slow
def test_every_answer_is_that_of_real_vulkan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(vulkan_reference.known()) >= 200
    assert not different(vulkan_reference.known(), tmp_path, monkeypatch)


def measure(devices: tuple[VirtualDevice, ...], directory: Path, model: str, params: Params) -> str:
    with Worker(devices) as worker:
        return vulkan_reference.answer(worker, shapes.write(model, directory, vocab=False), params)


def test_without_a_driver_it_is_radv(tmp_path: Path) -> None:
    params = Params(n_ctx=4096)
    answers = [
        measure(parse_gpus([spec]), tmp_path, "qwen3-30b-a3b", params) for spec in ("vulkan:80GiB", "vulkan:radv:80GiB")
    ]
    assert answers[0] == answers[1]
    assert "Vulkan0=" in answers[0]
    assert "Vulkan_Host=" in answers[0]


def test_what_the_devices_say_of_themselves() -> None:
    with Worker(parse_gpus(["2x vulkan:nvidia:24GiB:free=23GiB"])) as worker:
        devices = [(d.name, d.description, d.type, d.total, d.free) for d in worker.devices() if d.virtual]
    assert devices == [
        (f"Vulkan{i}", "virtual Vulkan GPU (NVIDIA's driver)", "gpu", 24 * 2**30, 23 * 2**30) for i in range(2)
    ]
