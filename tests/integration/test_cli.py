"""The command as a user runs it: a process, its streams, its exit status, and the real llama.cpp behind it."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from fitter import api
from fitter.errors import LlamaCppError
from fitter.llama.client import Worker
from fitter.llama.load.breakdown import breakdown_of
from fitter.llama.types import Params, TensorBuftOverride, VirtualDevice
from fitter.machine.gpu import parse_gpus
from tests.support.patience import SECONDS, TooLateError, in_time
from tools import shapes, upstream
from tools.tiny import write_tiny

MIB = 1024 * 1024
SMALL_GPUS = ("--gpu", "cuda:8.9:1200MiB", "--gpu", "cuda:8.6:1100MiB", "-fitt", "1024")


def fitter(*words: str, **settings: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "fitter", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, **settings)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("tiny") / "tiny.gguf")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shapes")


def test_fit_answers_with_one_line(tiny: Path) -> None:
    done = fitter(str(tiny), *SMALL_GPUS)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") == 1

    assert "CUDA0" in done.stderr
    assert "dummy load" in done.stderr


def test_json_is_the_same_answer(tiny: Path) -> None:
    document = json.loads(fitter(str(tiny), *SMALL_GPUS, "--json").stdout)
    assert " ".join(document["arguments"]) == fitter("fit", str(tiny), *SMALL_GPUS).stdout.strip()
    assert document["schema"] == 1
    assert document["fits"] is True
    assert document["model"]["path"] == str(tiny)
    assert [device["name"] for device in document["devices"]] == ["CUDA0", "CUDA1"]
    for device in document["devices"]:
        assert device["used"] == device["model"] + device["context"] + device["compute"]
        assert device["left"] == device["free"] - device["used"] >= device["margin"] == 1024 * MIB


def test_this_machine_has_a_host_with_a_limit(tiny: Path) -> None:
    document = json.loads(fitter(str(tiny), "-c", "512", "--json").stdout)
    host = document["host"]
    assert host["total"] >= host["free"] > 0
    assert host["left"] == host["free"] - host["used"]


# Parameters that a user may set, whatever the fit makes of the rest.
WORDS = [
    "-c 4096",
    "-c 2000 -b 256 -ub 128",
    "-c 6144 -np 3",
    "-ctk q8_0 -ctv q8_0 -fa on",
    "-fa off",
    "-nkvo",
    "--no-op-offload -ngl 20",
    "-ts 3,1",
    "-dev CUDA1",
    "-dev CUDA1,CUDA0",
    "-sm none -mg 1",
    "--swa-full",
    "-ngl 0",
    r"-ot blk\.[0-9]+\.ffn_down=CPU",
    "-ot ^blk.(3|4|5).ffn_(up|gate).weight$=CUDA1,^output.weight$=CPU",
]


@pytest.mark.parametrize("words", WORDS)
@pytest.mark.parametrize("model", ["llama-3.1-8b", "gemma3-12b"])
def test_upstream_measures_what_fitter_says(directory: Path, model: str, words: str) -> None:
    path = shapes.write(model, directory, vocab=False)
    specs = ["cuda:8.9:16GiB", "cuda:8.6:12GiB"]
    gpus = [word for spec in specs for word in ("--gpu", spec)]
    done = fitter(str(path), *gpus, "--json", *words.split())
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    expected = {
        device["name"]: (device["model"] // MIB, device["context"] // MIB, device["compute"] // MIB)
        for device in document["devices"]
        if device["name"] in document["params"]["devices"]
    }
    found = _upstream(path, parse_gpus(specs), document["arguments"])
    host = found.pop("Host")
    assert found == expected
    assert host[1:] == (document["host"]["context"] // MIB, document["host"]["compute"] // MIB)
    # upstream leaves out the buffer type CPU_REPACK
    assert host[0] <= document["host"]["model"] // MIB


def _upstream(path: Path, devices: tuple[VirtualDevice, ...], args: Sequence[str]) -> dict[str, tuple[int, int, int]]:
    """What ``llama-fit-params`` measures with exactly ``args``: it may choose no device by itself."""
    command = [str(upstream.tool("llama-fit-params")), "-m", str(path), "--fit-print", "on", *args]
    done = upstream.run(command, devices)
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    return {name: (int(model), int(context), int(compute)) for name, model, context, compute in lines}


def test_the_line_goes_through_a_shell(directory: Path) -> None:
    path = shapes.write("qwen3-30b-a3b", directory, vocab=False)
    specs = ["10GiB", "6GiB"]
    done = fitter(str(path), "--gpu", specs[0], "--gpu", specs[1])
    assert "-ot " in done.stdout
    environment = upstream.environment(parse_gpus(specs))
    tool = shlex.quote(str(upstream.tool("llama-fit-params")))
    model = shlex.quote(str(path))
    outputs = []
    for script in (f"{tool} -m {model} --fit-print on $(cat)", f"xargs {tool} -m {model} --fit-print on"):
        run = subprocess.run(
            ["sh", "-c", script], input=done.stdout, env=environment, capture_output=True, text=True, check=True
        )
        outputs.append(run.stdout)
    assert outputs[0] == outputs[1]
    assert outputs[0].startswith("CUDA0 ")
    for line in outputs[0].splitlines()[:2]:
        name, model_mib, *_ = line.split()
        assert f"{name} " in done.stderr
        assert f" {model_mib} " in done.stderr


def test_backend_shows_the_devices_to_a_llama_cpp_program() -> None:
    lines = fitter("backend", "--gpu", "rtx-4090", "--gpu", "24GiB").stdout
    tool = shlex.quote(str(upstream.tool("llama-fit-params")))
    done = subprocess.run(["sh", "-c", f"{lines}\n{tool} --list-devices"], capture_output=True, text=True, check=True)
    assert "CUDA0: NVIDIA GeForce RTX 4090 (24564 MiB, " in done.stdout
    assert "CUDA1: virtual CUDA GPU (24576 MiB, 24576 MiB free)" in done.stdout


def test_devices() -> None:
    done = fitter("devices", "--gpu", "2x 24GiB", "--json")
    document = json.loads(done.stdout)
    assert [device["name"] for device in document["devices"]] == ["CUDA0", "CUDA1"]
    assert all(device["virtual"] for device in document["devices"])
    assert document["host"]["free"] <= document["host"]["total"]
    assert "host" in fitter("devices").stdout


def test_catalogue() -> None:
    gpus = {gpu["name"]: gpu for gpu in json.loads(fitter("devices", "--catalogue", "--json").stdout)["gpus"]}
    card = gpus["rtx-4090"]
    assert (card["profile"], card["compute_capability"], card["total"]) == ("cuda", "8.9", 24564 * MIB)
    assert (card["usable"], card["free"]) == (24077 * MIB, 23608 * MIB)
    # No RTX 4090 has a bridge, so there is nothing to cite for it; every H100 with SXM has.
    assert card["sources"].pop("nvlink") is None
    assert all("https://" in source for source in (*card["sources"].values(), gpus["h100-sxm"]["sources"]["nvlink"]))
    lines = fitter("devices", "--catalogue").stdout.splitlines()
    assert [line.split()[0] for line in lines[1 : 1 + len(gpus)]] == list(gpus)
    both = fitter("devices", "--catalogue", "--gpu", "24GiB")
    assert (both.returncode, both.stdout, both.stderr.count("\n")) == (2, "", 1)


def test_inspect_adds_up(tiny: Path) -> None:
    document = json.loads(fitter("inspect", str(tiny), "-c", "1024", "--json").stdout)
    assert document["n_ctx"] == 1024
    assert document["metadata"]["general.architecture"] == "qwen3moe"
    assert sum(role["bytes"] for role in document["roles"]) == document["model"]["bytes"]
    assert sum(layer["bytes"] for layer in document["layers"]) == document["model"]["bytes"]
    assert [layer["layer"] for layer in document["layers"]] == [None, 0, 1, 2, 3]
    assert sum(layer["context"] for layer in document["layers"]) == sum(row["context"] for row in document["memory"])
    table = fitter("inspect", str(tiny), "-c", "1024").stdout
    assert "general.architecture" in table
    assert "KV cache" in table


def test_nothing_is_written_to_stdout_where_the_model_does_not_fit(tiny: Path) -> None:
    done = fitter(str(tiny), "--gpu", "cuda:8.9:1030MiB", "--host-memory", "1030MiB", "-c", "16384")
    assert done.returncode == 1, done.stderr
    assert done.stdout == ""
    assert "fitter: does not fit: " in done.stderr
    document = json.loads(
        fitter(str(tiny), "--gpu", "cuda:8.9:1030MiB", "--host-memory", "1030MiB", "-c", "16384", "--json").stdout
    )
    assert document["fits"] is False
    assert document["problems"][0]["missing"] > 0


def test_whoever_reads_stdout_may_leave(tiny: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "fitter", "inspect", str(tiny)]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    os.close(writer)
    assert done.returncode == 141
    assert done.stderr == ""


@pytest.mark.parametrize("to_the_group", [True, False], ids=["Ctrl-C", "kill -INT"])
def test_an_interrupt_leaves_no_process(directory: Path, to_the_group: bool) -> None:
    path = shapes.write("deepseek-v3.1", directory)
    gpus = [word for _ in range(4) for word in ("--gpu", "2x 20GiB")]

    def attempt() -> None:
        process = subprocess.Popen(
            [sys.executable, "-m", "fitter", "-v", str(path), *gpus],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert process.stderr is not None
        line = process.stderr.readline()
        assert line.startswith("[0 dummy loads]"), line
        time.sleep(0.05)
        (os.killpg if to_the_group else os.kill)(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=SECONDS)
        with pytest.raises(ProcessLookupError):
            os.killpg(process.pid, 0)
        if out:
            raise TooLateError
        assert process.returncode == 130, err
        assert all(rest.startswith("[") for rest in err.splitlines()), err

    in_time(attempt)


NO_REGEX = TensorBuftOverride("(", "CPU")
CPU_PARAMS = [
    Params(n_ctx=512),
    Params(n_ctx=512, tensor_buft_overrides=(TensorBuftOverride("^blk.(1|2).ffn_(up|gate)_exps", "CPU"),)),
    Params(n_ctx=768, n_seq_max=3, type_k="q8_0", type_v="q8_0"),
    Params(n_ctx=768, n_seq_max=3, kv_unified=True, flash_attn="off"),
    Params(n_ctx=100, n_batch=300, n_ubatch=64, devices=()),
]


@pytest.mark.parametrize("params", CPU_PARAMS, ids=str)
def test_a_loaded_plan_takes_what_was_predicted(tiny: Path, params: Params) -> None:
    plan = _plan(tiny, params)
    llama = plan.load(use_mmap=False, verbose=False)
    assert _taken(llama) == plan.breakdown.rows
    assert llama("Hello", max_tokens=4)["choices"][0]["text"]
    llama.close()


def test_an_override_reaches_a_real_load(tiny: Path) -> None:
    # On the CPU alone an override moves nothing, but llama.cpp still reads its pattern.
    plan = replace(_plan(tiny, Params(n_ctx=512)), params=Params(n_ctx=512, tensor_buft_overrides=(NO_REGEX,)))
    with pytest.raises(LlamaCppError, match=r"Mismatched '\(' and '\)' in regular expression"):
        plan.load(use_mmap=False, verbose=False)


def test_llama_takes_what_was_predicted(tiny: Path) -> None:
    import llama_cpp

    plan = api.fit(tiny, n_ctx=512)
    llama = llama_cpp.Llama(str(tiny), **plan.llama_kwargs(), use_mmap=False, verbose=False)
    assert _taken(llama) == plan.breakdown.rows
    llama.close()


def _plan(path: Path, params: Params) -> api.Plan:
    """A plan for this machine with exactly ``params``."""
    fitted = api.fit(path, n_ctx=512)
    with Worker() as worker:
        breakdown = worker.measure(path, params)
    changed = {"params": params, "breakdown": breakdown}
    return api.Plan(**{field.name: getattr(fitted, field.name) for field in fields(fitted)} | changed)


def _taken(llama: Any) -> Any:
    return breakdown_of(llama._ctx.ctx).rows


def test_as_many_devices_as_llama_cpp_takes(directory: Path) -> None:
    path = shapes.write("llama-3.1-70b", directory, vocab=False)
    plan = api.fit(path, gpus=["15x 5GiB"], n_ctx=4096, strategy="llama.cpp")
    assert plan.fits
    assert len(plan.breakdown.devices) == 15
    found = _upstream(path, parse_gpus(["15x 5GiB"]), plan.arguments())
    found.pop("Host")
    assert found == {
        device.name: (device.model // MIB, device.context // MIB, device.compute // MIB) for device in plan.devices
    }
