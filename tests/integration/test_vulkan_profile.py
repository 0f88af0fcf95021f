"""The vulkan profile beside its table of answers (test_profile_tables); ``make test-vulkan`` asks the real one."""

from __future__ import annotations

from pathlib import Path

from fitter.llama.client import Worker
from fitter.llama.types import Params, VirtualDevice
from fitter.machine.gpu import parse_gpus
from tools import shapes
from tools.load_answers import answer


def measure(devices: tuple[VirtualDevice, ...], directory: Path, model: str, params: Params) -> str:
    with Worker(devices) as worker:
        return answer(worker, shapes.write(model, directory, vocab=False), params)


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
