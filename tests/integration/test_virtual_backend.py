"""Virtual devices measure what the real ggml-cuda backend measures, and cost nothing."""

from __future__ import annotations

import http.client
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import fitter
from examples.tiny_moe import TinyModel
from fitter.errors import UsageError
from fitter.llama.build.library import backend_path
from fitter.llama.client import Worker
from fitter.llama.types import LAYOUT_DEVICE, Params, TensorBuftOverride, VirtualDevice, describe
from fitter.machine.gpu import parse_gpus
from fitter.parameters.table import PARAMETERS
from tests.support import real_cards
from tests.support.cases import cases, named_cases
from tests.support.command import run_fitter
from tests.support.patience import SECONDS, until
from tests.support.real_cards import Load
from tools.comparisons import upstream
from tools.comparisons.cuda_reference import write_model
from tools.loopback.rpc_servers import free_port

GIB = 2**30
NAMES = ("llama31-8b", "qwen3-30b-a3b", "gemma3-12b", "dsv2lite", "nemotron-h-9b", "gptoss-20b")
MODELS = {name: lambda path, name=name: write_model(name, path.parent) for name in NAMES}


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


# --- ``fitter backend -- PROGRAM``: upstream's own programs see described cards, take their bytes, and answer on them


MODEL = TinyModel("tiny")

CARDS = ["2x rtx-5090"]
WORDS = ("--gpu", *CARDS, "--")
MIB = 2**20


@pytest.fixture(scope="module")
def server() -> Path:
    return upstream.tool("llama-server")


def answer(command: Sequence[str | Path], log: Path) -> str:
    """What a server answers to a prompt, with all its words chosen by the largest logit; its log is written."""
    port = free_port()
    with log.open("w") as output:
        words = [*map(str, command), "-c", "2048", "--port", str(port), "--no-repack", "-lv", "4"]
        process = subprocess.Popen(words, stdout=output, stderr=output)
    try:

        def is_ready() -> bool:
            assert process.poll() is None, log.read_text()
            with suppress(OSError):
                connection = http.client.HTTPConnection("127.0.0.1", port, timeout=SECONDS)
                connection.request("GET", "/health")
                return connection.getresponse().status == 200
            return False

        until(is_ready, "the server never answers")
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=SECONDS)
        body = {"prompt": "Once upon a time there was", "n_predict": 16, "temperature": 0, "seed": 1}
        connection.request("POST", "/completion", json.dumps(body))
        text: str = json.loads(connection.getresponse().read())["content"]
        return text
    finally:
        process.terminate()
        process.wait(SECONDS)


def test_a_server_answers_on_described_cards(server: Path, model: Path, tmp_path: Path) -> None:
    """The words of the CPU, since it computes, and the bytes of the cards, since they are planned on."""
    here = answer([server, "-m", model], tmp_path / "cpu.log")
    fitter_words = [sys.executable, "-m", "fitter", "backend", *WORDS]
    there = answer([*fitter_words, server, "-m", model, "-ngl", "99"], tmp_path / "cards.log")
    assert here == there != ""
    log = (tmp_path / "cards.log").read_text()
    plan = fitter.measure(model, gpus=CARDS, n_ctx=2048, n_seq_max=4, kv_unified=True, program="llama-server").real
    for name in ("CUDA0", "CUDA1"):
        row = plan.on(name)
        for what, size in (("model", row.model), ("KV", row.context), ("compute", row.compute)):
            (said,) = re.findall(rf"{name} {what} buffer size = +([0-9.]+) MiB", log)
            assert float(said) == pytest.approx(size / MIB, abs=0.006), (name, what)
    assert log.count("NVIDIA GeForce RTX 5090") >= 2


@named_cases(("itself", ()), ("by a shell", ("sh", "-c", '"$0" "$@"')))
def test_a_program_lists_the_cards(way: tuple[str, ...], server: Path) -> None:
    done = run_fitter("backend", *WORDS, *way, server, "--list-devices")
    assert done.returncode == 0, done.stderr
    assert re.findall(r"(CUDA\d): NVIDIA GeForce RTX 5090 \((\d+) MiB, (\d+) MiB free\)", done.stdout) == [
        ("CUDA0", "32607", "31331"),
        ("CUDA1", "32607", "31331"),
    ]


# a server needs a file: those of shapes have none
@pytest.mark.parametrize(
    "load", [each for each in real_cards.loads() if "://" not in each.header], ids=lambda load: load.name
)
def test_a_server_prints_the_loads_of_real_logs(load: Load, server: Path, directory: Path) -> None:
    """An unmodified llama-server of the pinned build with ``-fit on`` says of each load what fitter says."""
    model = real_cards.write_model(load, directory)
    of_server = {"n_seq_max": 1} | {name: load.parameters[name] for name in load.parameters if name != "n_outputs_max"}
    command = [server, "-m", model, *words_of(of_server), "-fit", "on", "-lv", "5"]
    with real_cards.environment(load.environment):
        fitted = breakdown_of(command, load.gpus)
        plan = fitter.measure(model, gpus=load.gpus, program="llama-server", **of_server)
    rows = [(row.name, plan.on(row.name)) for row in parse_gpus(load.gpus)]
    ours = {name: tuple(size // MIB for size in (row.model, row.context, row.compute)) for name, row in rows}
    ours["Host"] = tuple(size // MIB for size in (plan.host.model, plan.host.context, plan.host.compute))
    assert fitted == ours


def words_of(keywords: Mapping[str, Any]) -> list[str]:
    """Keywords of ``fitter.measure`` as llama-server's options."""
    words: list[str] = []
    for name, value in keywords.items():
        text = ",".join(map(str, value)) if isinstance(value, Sequence) and not isinstance(value, str) else str(value)
        words += [PARAMETERS[name].options[0].partition("/")[0], *([] if value is True else [text])]
    return words


def breakdown_of(command: Sequence[str | Path], gpus: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """MiB of model, context and compute on each device, as its fit prints them; then it is killed."""
    words = [sys.executable, "-m", "fitter", "backend", *(word for gpu in gpus for word in ("--gpu", gpu)), "--"]
    found: dict[str, tuple[int, ...]] = {}
    with subprocess.Popen(
        [*words, *map(str, command), "--port", str(free_port())],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        log = []
        for line in process.stderr:
            log.append(line)
            row = re.search(r"breakdown_print: \|   - (\w+) .*?= +(\d+) \+ +(\d+) \+ +(\d+)[) ]", line)
            if row:
                found[row[1]] = tuple(map(int, row.groups()[1:]))
                if row[1] == "Host":
                    break
        process.kill()
    assert "Host" in found, "".join(log[-20:])
    return found


@cases("64MiB", "140MiB", "24GiB")
def test_its_own_fit_is_the_one_of_a_plan_only(card: str, model: Path) -> None:
    """Computing changes nothing that a program plans: the same words as where cards only plan."""
    devices = parse_gpus([card])
    words = ["-fitt", "0"]
    alone = upstream.run(upstream.fit_command(model, devices, words), devices)
    done = run_fitter("backend", "--gpu", card, "--", *upstream.fit_command(model, devices, words))
    assert (done.returncode, done.stdout) == (alone.returncode, alone.stdout)


def test_a_program_without_llama_cpp_runs_as_ever() -> None:
    done = run_fitter("backend", *WORDS, "sh", "-c", 'echo "$LD_PRELOAD" | grep -c fitter; exit 7')
    assert (done.returncode, done.stdout, done.stderr) == (7, "1\n", "")


def test_what_cannot_be_run(tmp_path: Path) -> None:
    inside = tmp_path / "llama-static"
    shutil.copy(shutil.which("true") or "/bin/true", inside)
    with inside.open("ab") as file:
        file.write(b"\0ggml_backend_dev_count\0")
    cases = {
        "no-such-program": (2, "'no-such-program' is no program: name one on the PATH, or give its path"),
        str(inside): (3, "has llama.cpp built into it, so it sees no other devices"),
    }
    for program, (status, message) in cases.items():
        done = run_fitter("backend", *WORDS, program)
        assert (done.returncode, done.stdout) == (status, "")
        assert message in done.stderr and len(done.stderr.splitlines()) == 1


@named_cases(
    ("of another build", "0.1.0;GLU;1;;", True), ("wrongly of this one", "{ggml};NO_SUCH_OPERATION;1;;", False)
)
def test_what_a_program_is_told_of_its_build(told: str, has_cards: bool, server: Path) -> None:
    """The build that fitter is compiled for needs no description; one that does not fit shows no cards, and says so."""
    with Worker(llama_cpp=str(server)) as worker:
        told = told.format(ggml=worker.build().ggml)
    done = run_fitter("backend", *WORDS, "sh", "-c", f'FITTER_BUILD="{told}" exec "{server}" --list-devices')
    assert done.returncode == 0
    assert ("RTX 5090" in done.stdout) is has_cards
    assert ("there are no virtual devices" in " ".join(done.stderr.split())) is not has_cards
