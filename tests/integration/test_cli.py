"""The command as a user runs it: a process, its streams, its exit status, and the real llama.cpp behind it."""

from __future__ import annotations

import json
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from fitter import api
from fitter.llama.types import VirtualDevice
from fitter.machine.gpu import parse_gpus
from tests.support.command import run_fitter
from tools.comparisons import upstream
from tools.models import shapes

MIB = 1024 * 1024
SMALL_GPUS = ("--gpu", "cuda:8.9:1200MiB", "--gpu", "cuda:8.6:1100MiB", "-fitt", "1024")


def test_json_has_the_answer_of_the_one_line(tiny: Path) -> None:
    line = run_fitter(str(tiny), *SMALL_GPUS)
    assert (line.returncode, line.stdout.count("\n")) == (0, 1), line.stderr
    assert "CUDA0" in line.stderr and "KV cache" in line.stderr and "llama-server" not in line.stderr
    document = json.loads(run_fitter("fit", str(tiny), *SMALL_GPUS, "--json").stdout)
    assert " ".join(document["arguments"]) == line.stdout.strip()
    assert document["schema"] == 1
    assert document["fits"] is True
    assert document["model"]["path"] == str(tiny)
    assert [device["name"] for device in document["devices"]] == ["CUDA0", "CUDA1"]
    for device in document["devices"]:
        assert device["used"] == device["model"] + device["context"] + device["compute"]
        assert device["left"] == device["free"] - device["used"] >= device["margin"] == 1024 * MIB


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
def test_upstream_measures_what_fitter_says(directory: Path, words: str) -> None:
    """``llama-fit-params`` gets the printed arguments and measures the bytes of the plan on every device."""
    path = shapes.write("gemma3-12b", directory, vocab=False)
    specs = ["cuda:8.9:16GiB", "cuda:8.6:12GiB"]
    gpus = [word for spec in specs for word in ("--gpu", spec)]
    done = run_fitter(str(path), *gpus, "--json", *words.split())
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
    """Measure with ``llama-fit-params`` and exactly ``args``: it may choose no device by itself."""
    command = [str(upstream.tool("llama-fit-params")), "-m", str(path), "--fit-print", "on", *args]
    done = upstream.run(command, devices)
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    return {name: (int(model), int(context), int(compute)) for name, model, context, compute in lines}


def test_the_line_goes_through_a_shell(directory: Path) -> None:
    path = shapes.write("qwen3-30b-a3b", directory, vocab=False)
    specs = ["10GiB", "6GiB"]
    done = run_fitter(str(path), "--gpu", specs[0], "--gpu", specs[1])
    assert "-ot " in done.stdout
    environment = upstream.environment(parse_gpus(specs))
    tool = shlex.quote(str(upstream.tool("llama-fit-params")))
    model = shlex.quote(str(path))
    outputs = []
    # the plan has no -dev, but virtual devices are looked for only with it
    command = f"{tool} -m {model} -dev CUDA0,CUDA1 --fit-print on"
    for script in (f"{command} $(cat)", f"xargs {command}"):
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
    lines = run_fitter("backend", "--gpu", "rtx-4090", "--gpu", "24GiB").stdout
    tool = shlex.quote(str(upstream.tool("llama-fit-params")))
    done = subprocess.run(["sh", "-c", f"{lines}\n{tool} --list-devices"], capture_output=True, text=True, check=True)
    assert "CUDA0: NVIDIA GeForce RTX 4090 (24564 MiB, " in done.stdout
    assert "CUDA1: virtual CUDA GPU (24576 MiB, 24576 MiB free)" in done.stdout


def test_devices() -> None:
    done = run_fitter("devices", "--gpu", "2x 24GiB", "--json")
    document = json.loads(done.stdout)
    assert [device["name"] for device in document["devices"]] == ["CUDA0", "CUDA1"]
    assert all(device["virtual"] for device in document["devices"])
    assert document["host"]["free"] <= document["host"]["total"]
    assert "host" in run_fitter("devices").stdout


def test_catalogue() -> None:
    gpus = {gpu["name"]: gpu for gpu in json.loads(run_fitter("devices", "--catalogue", "--json").stdout)["gpus"]}
    card = gpus["rtx-4090"]
    assert (card["profile"], card["compute_capability"], card["total"]) == ("cuda", "8.9", 24564 * MIB)
    assert (card["usable"], card["free"]) == (24077 * MIB, 23608 * MIB)
    # No RTX 4090 has a bridge, so there is nothing to cite for it; every H100 with SXM has.
    assert card["sources"].pop("nvlink") is None
    assert all("https://" in source for source in (*card["sources"].values(), gpus["h100-sxm"]["sources"]["nvlink"]))
    lines = run_fitter("devices", "--catalogue").stdout.splitlines()
    assert [line.split()[0] for line in lines[1 : 1 + len(gpus)]] == list(gpus)
    both = run_fitter("devices", "--catalogue", "--gpu", "24GiB")
    assert (both.returncode, both.stdout, both.stderr.count("\n")) == (2, "", 1)


def test_inspect_adds_up(tiny: Path) -> None:
    document = json.loads(run_fitter("inspect", str(tiny), "-c", "1024", "--json").stdout)
    assert document["n_ctx"] == 1024
    assert document["metadata"]["general.architecture"] == "qwen3moe"
    assert sum(role["bytes"] for role in document["roles"]) == document["model"]["bytes"]
    assert sum(layer["bytes"] for layer in document["layers"]) == document["model"]["bytes"]
    assert [layer["layer"] for layer in document["layers"]] == [None, 0, 1, 2, 3]
    assert sum(layer["context"] for layer in document["layers"]) == sum(row["context"] for row in document["memory"])
    table = run_fitter("inspect", str(tiny), "-c", "1024").stdout
    assert "general.architecture" in table
    assert "KV cache" in table


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
