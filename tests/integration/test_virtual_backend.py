"""Virtual devices measure what the real ggml-cuda backend measures, and cost nothing."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from fitter.errors import UsageError
from fitter.llama.build.library import backend_path
from fitter.llama.client import Worker
from fitter.llama.types import LAYOUT_DEVICE, Params, TensorBuftOverride, VirtualDevice, describe
from tests.support.cases import named_cases
from tools.comparisons.cuda_reference import write_model

GIB = 2**30
MODELS = ("llama31-8b", "qwen3-30b-a3b", "gemma3-12b", "dsv2lite", "nemotron-h-9b", "gptoss-20b")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("models")
    return {name: write_model(name, directory) for name in MODELS}


def cards(*gib: float) -> tuple[VirtualDevice, ...]:
    return tuple(
        VirtualDevice(f"CUDA{i}", f"Card {i}", "cuda", 890, int(size * GIB), int(size * GIB))
        for i, size in enumerate(gib)
    )


@pytest.mark.parametrize("params", [Params(n_ctx=8192), Params(n_ctx=1024, n_seq_max=3, flash_attn="off")], ids=str)
@pytest.mark.parametrize("model", MODELS)
def test_a_layout_adds_up_to_the_measurement(
    worker: Worker, models: dict[str, Path], model: str, params: Params
) -> None:
    worker.configure(cards(2000))
    layout = worker.layout(models[model], params)
    breakdown = worker.measure(models[model], params)
    assert layout.n_ctx == breakdown.n_ctx
    assert layout.alignment == 128

    def padded(buffer_type: str, kind: str, alignment: int) -> int:
        sizes = [e.bytes for e in layout.entries if e.buffer_type == buffer_type and e.kind == kind]
        return sum(-(-size // alignment) * alignment for size in sizes)

    card = breakdown.on("CUDA0")
    assert padded(LAYOUT_DEVICE, "model", 128) == card.model
    assert padded(LAYOUT_DEVICE, "context", 128) == card.context
    assert padded("CUDA_Host", "model", 32) == breakdown.host.model
    names = [(e.buffer_type, e.name) for e in layout.entries]
    assert len(set(names)) == len(names)
    weights = {e.name for e in layout.entries if e.kind == "model"}
    assert weights == {t.name for t in worker.header(models[model]).tensors}


def test_a_layout_without_virtual_devices(models: dict[str, Path]) -> None:
    with Worker() as real:
        before = real.measure(models["llama31-8b"], Params(n_ctx=512))
        layout = real.layout(models["llama31-8b"], Params(n_ctx=512))
        assert not before.devices or any(e.buffer_type == LAYOUT_DEVICE for e in layout.entries)
        assert sum(e.bytes for e in layout.entries if e.kind == "context") == 512 * 128 * 1024
        # The recorder is no device of this machine.
        assert LAYOUT_DEVICE not in [device.name for device in real.devices()]
        assert real.measure(models["llama31-8b"], Params(n_ctx=512)) == before


def test_devices_are_described_anew_without_a_new_process(models: dict[str, Path]) -> None:
    with Worker(cards(10, 20)) as worker:
        assert [(d.name, d.total) for d in worker.devices()] == [("CUDA0", 10 * GIB), ("CUDA1", 20 * GIB)]
        two = worker.measure(models["llama31-8b"], Params(n_ctx=512))
        worker.configure(cards(30))
        assert [(d.name, d.description, d.free) for d in worker.devices()] == [("CUDA0", "Card 0", 30 * GIB)]
        one = worker.measure(models["llama31-8b"], Params(n_ctx=512))
        assert (two.devices, one.devices) == (("CUDA0", "CUDA1"), ("CUDA0",))
        # Each device has its own copy of the 256 bytes of rope_freqs.
        assert one.on("CUDA0").model == sum(two.on(name).model for name in two.devices) - 256
        worker.configure(())
        assert not any(device.virtual for device in worker.devices())


def test_a_model_is_on_fifteen_of_sixteen_devices_at_most(models: dict[str, Path]) -> None:
    with Worker(cards(*[4.0] * 16)) as worker:
        assert len(worker.devices()) == 16
        used = tuple(f"CUDA{i}" for i in range(1, 16))
        breakdown = worker.measure(models["llama31-8b"], Params(n_ctx=512, devices=used))
        assert breakdown.devices == used
        assert all(breakdown.on(name).model > 0 for name in used)
        with pytest.raises(UsageError, match="at most 15 devices"):
            worker.measure(models["llama31-8b"], Params(n_ctx=512))
        one = worker.measure(models["llama31-8b"], Params(n_ctx=512, split_mode="none", main_gpu=15))
        assert one.devices == ("CUDA15",)


@named_cases(
    ("no device", Params(n_ctx=512, devices=()), ()),
    ("one of two", Params(n_ctx=512, devices=("CUDA1",)), ("CUDA1",)),
    ("the other order", Params(n_ctx=512, devices=("CUDA1", "CUDA0")), ("CUDA1", "CUDA0")),
    ("the main device only", Params(n_ctx=512, split_mode="none", main_gpu=1), ("CUDA1",)),
)
def test_which_devices_a_model_is_on(
    params: Params, devices: tuple[str, ...], worker: Worker, models: dict[str, Path]
) -> None:
    worker.configure(cards(80, 80))
    breakdown = worker.measure(models["llama31-8b"], params)
    assert breakdown.devices == devices
    assert {row.device for row in breakdown.rows if not row.is_host} == set(devices)
    assert (breakdown.host.model > 4 * GIB) == (not devices)


def test_a_split_is_followed(worker: Worker, models: dict[str, Path]) -> None:
    worker.configure(cards(80, 80))
    breakdown = worker.measure(models["llama31-8b"], Params(n_ctx=512, tensor_split=(1, 3)))
    assert 2 < breakdown.on("CUDA1").model / breakdown.on("CUDA0").model < 4


@named_cases(
    ("device", Params(devices=("CUDA2",)), "unknown device 'CUDA2'; there are: CUDA0, CUDA1"),
    ("the CPU is no device", Params(devices=("CPU",)), "unknown device 'CPU'; there are: CUDA0, CUDA1"),
    (
        "buffer type",
        Params(tensor_buft_overrides=(TensorBuftOverride("x", "GPU"),)),
        "unknown buffer type 'GPU'; there are: CUDA0, CUDA1, CPU",
    ),
)
def test_a_name_that_is_not_there(params: Params, message: str, worker: Worker, models: dict[str, Path]) -> None:
    worker.configure(cards(80, 80))
    with pytest.raises(UsageError) as caught:
        worker.measure(models["llama31-8b"], params)
    assert str(caught.value).startswith(message)


CARD = cards(8)[0]


@named_cases(
    ("profile", replace(CARD, profile="voodoo"), "device 1: unknown profile 'voodoo' (known: cuda, rocm, vulkan, "),
    ("no name", replace(CARD, name=""), "device 1: the name must have 1 to 60 characters"),
    ("name that separates", replace(CARD, name="a b"), "device 1: the name 'a b' may hold letters"),
    ("name of the host", replace(CARD, name="CPU"), "device 1: the name 'CPU' is taken by the host"),
    ("more free than there is", replace(CARD, free=CARD.total + 1), "device 1: more memory is free"),
    ("negative", replace(CARD, free=-1), "device 1: the free memory '-1' is not a whole number"),
)
def test_a_description_that_is_not_valid(card: VirtualDevice, message: str, worker: Worker) -> None:
    worker.configure(cards(80, 80))
    # without a question there is no process yet that could refuse
    assert len(worker.devices()) == 2
    with pytest.raises(UsageError) as caught:
        worker.configure([card])
    assert str(caught.value).startswith(f"virtual devices: {message}")
    assert [device.name for device in worker.devices()] == ["CUDA0", "CUDA1"]
    # A worker that starts with it must not answer for the real devices instead.
    with Worker([card]) as fresh:
        for _ in range(2):
            with pytest.raises(UsageError, match=re.escape(str(caught.value))):
                fresh.devices()


def test_two_devices_of_one_name(worker: Worker) -> None:
    with pytest.raises(UsageError, match="device 2: the name 'CUDA0' is used twice"):
        worker.configure([CARD, CARD])


LIST_DEVICES = """
import ctypes, os, sys
import llama_cpp.llama_cpp as L
ctypes.CDLL(L._lib._name, mode=os.RTLD_NOLOAD | os.RTLD_GLOBAL)
L._lib.ggml_backend_load_all_from_path(sys.argv[1].encode())
L._lib.ggml_backend_dev_get.restype = L._lib.ggml_backend_dev_name.restype = ctypes.c_void_p
L._lib.ggml_backend_dev_get.argtypes, L._lib.ggml_backend_dev_name.argtypes = [ctypes.c_size_t], [ctypes.c_void_p]
for i in range(L._lib.ggml_backend_dev_count()):
    print(ctypes.string_at(L._lib.ggml_backend_dev_name(L._lib.ggml_backend_dev_get(i))).decode())
"""


@named_cases(
    ("two devices", describe(cards(8, 16)), ["CUDA0", "CUDA1"], ""),
    ("sixteen devices", describe(cards(*[1.0] * 16)), [f"CUDA{i}" for i in range(16)], ""),
    ("not set", None, [], "FITTER_DEVICES is not set"),
    ("nonsense", "CUDA0", [], "device 1: 'CUDA0' has 1 fields"),
    ("second one broken", describe(cards(8)) + ";CUDA1,cuda,890,x,1,Card", [], "device 2: the total memory 'x'"),
    ("seventeen devices", ";".join(f"CUDA{i},cuda,890,2,1,Card" for i in range(17)), [], "more than 16 devices"),
)
def test_any_program_sees_the_devices_that_the_environment_describes(
    value: str | None, names: list[str], message: str, tmp_path: Path
) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "FITTER_DEVICES"}
    environment["GGML_BACKEND_PATH"] = str(backend_path())
    if value is not None:
        environment["FITTER_DEVICES"] = value
    done = subprocess.run(
        [sys.executable, "-c", LIST_DEVICES, str(tmp_path)], env=environment, capture_output=True, text=True, check=True
    )
    assert [name for name in done.stdout.split() if name.startswith("CUDA")] == names
    said = [line for line in done.stderr.splitlines() if line.startswith("fitter:")]
    assert len(said) == (1 if message else 0)
    assert message in "".join(said)
