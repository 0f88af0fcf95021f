"""One model over two rpc-servers and the host: loaded in one call, with the bytes that were predicted.

No device's margin lets it have the model alone, and the host's memory is limited too.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import fitter
from examples.tiny_moe import write
from tests.support.command import json_of_python
from tools.faults.cut_servers import RpcServer

MIB = 1024 * 1024
PART = 48 * MIB
"""The most bytes of a plan on each server."""
HOST = 80 * MIB
"""The most bytes of a plan on the host."""

LOAD = """
import json, sys
import fitter
from fitter.llama.processes import wire
from fitter.llama.load.breakdown import breakdown_of

path, options = sys.argv[1], json.loads(sys.argv[2])
llm = fitter.Llama(path, **options)
said = llm.create_completion("ba lu mi", max_tokens=8, temperature=0)
print(json.dumps({
    "plan": llm.plan.to_dict(),
    "rpc": llm.plan.rpc,
    "predicted": wire.encode(llm.plan.breakdown),
    "real": wire.encode(breakdown_of(llm.ctx)),
    "usage": said["usage"],
    "text": said["choices"][0]["text"],
}), flush=True)
sys.stdin.readline()
llm.close()
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = write(tmp_path_factory.mktemp("models") / "moe.gguf")
    assert path.stat().st_size >= 100 * 10**6
    return path


@pytest.fixture(scope="module")
def servers() -> Iterator[list[RpcServer]]:
    with RpcServer() as first, RpcServer() as second:
        yield [first, second]


def options(servers: list[RpcServer], **more: Any) -> dict[str, Any]:
    rpc = [server.address for server in servers]
    found, _ = fitter.devices(rpc=rpc)
    return {
        "rpc": rpc,
        "margin": [device.free - PART for device in found[: len(rpc)]],
        "devices": [f"RPC{i}" for i in range(len(rpc))],
        "host_memory": HOST,
        "host_margin": 0,
        # by bytes alone, however fast this machine and its network are just now: experts go to the host
        "strategy": "llama.cpp",
        "rpc_bandwidth": "400GB/s",
        "host_bandwidth": "40GB/s",
        "n_ctx": 1024,
        "n_ubatch": 64,
        "verbose": False,
        "use_mmap": False,
        "n_threads": 2,
        **more,
    }


def load(model: Path, servers: list[RpcServer], **more: Any) -> tuple[dict[str, Any], dict[str, int], str]:
    """Load the model in a process; return its answer, the resident bytes of the servers meanwhile, and its stderr."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
    before = {server.address: server.resident for server in servers}
    command = [sys.executable, "-c", LOAD, str(model), json.dumps(options(servers, **more))]
    pipe = subprocess.PIPE
    with (
        tempfile.TemporaryFile("w+") as log,
        subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=log, text=True, env=environment) as process,
    ):
        assert process.stdout
        line = process.stdout.readline()
        held = {server.address: server.resident - before[server.address] for server in servers}
        process.communicate("\n", timeout=120)
        log.seek(0)
        errors = log.read()
    assert process.returncode == 0, errors[-2000:]
    return json.loads(line), held, errors


def rows(breakdown: Mapping[str, Any]) -> dict[str, tuple[int, int, int]]:
    found = {row["buffer_type"]: (row["model"], row["context"], row["compute"]) for row in breakdown["rows"]}
    return {name: sizes for name, sizes in found.items() if any(sizes)}


def test_no_device_has_room_for_the_model_alone(model: Path, servers: list[RpcServer]) -> None:
    asked = options(servers)
    fit = {name: value for name, value in asked.items() if name not in ("verbose", "use_mmap", "n_threads")}
    for alone in (["RPC0"], ["RPC1"], ["none"]):
        margin = asked["margin"][:1] if alone != ["none"] else None
        plan = fitter.fit(model, **{**fit, "devices": alone, "margin": margin})
        assert not plan.fits, alone


@dataclass(frozen=True)
class Loaded:
    """The answer of a process that loaded the model, the memory that the servers held, and what was written."""

    answer: dict[str, Any]
    held: dict[str, int]
    errors: str
    before: list[int]


@pytest.fixture(scope="module")
def loaded(model: Path, servers: list[RpcServer]) -> Loaded:
    before = [server.resident for server in servers]
    return Loaded(*load(model, servers, verbose=True), before)


def test_a_model_over_two_servers_and_the_host(loaded: Loaded, servers: list[RpcServer]) -> None:
    found, held, errors = loaded.answer, loaded.held, loaded.errors
    plan, names = found["plan"], [f"RPC0[{server.address}]" for server in servers]

    assert found["rpc"] == [server.address for server in servers]
    assert plan["fits"]
    assert plan["params"]["devices"] == ["RPC0", "RPC1"]
    assert plan["params"]["tensor_buft_overrides"], "a part of the experts is on the host"
    assert errors.count("buffer type overridden to CPU") > 0

    real = rows(found["real"])
    assert real == rows(found["predicted"])
    for name, device in zip(names, plan["devices"], strict=True):
        assert real[name] == (device["model"], device["context"], device["compute"])
        assert 0 < device["used"] <= PART
        assert all(real[name])
    assert 0 < plan["host"]["used"] <= HOST
    assert sum(sizes[0] for sizes in real.values()) >= 100 * 10**6, "every weight is somewhere"

    # what the servers have grown by: their cache and compute buffers need not all be touched, weights are
    for name, server in zip(names, servers, strict=True):
        weights, context, compute = real[name]
        assert weights <= held[server.address] <= weights + context + compute + 8 * MIB

    assert found["usage"]["completion_tokens"] == 8
    assert found["text"].strip()


def test_the_same_words_as_on_the_host_alone(model: Path, loaded: Loaded) -> None:
    with_host = fitter.Llama(model, n_ctx=1024, n_ubatch=64, n_gpu_layers=0, devices=["none"], verbose=False)
    with_host_said = with_host("ba lu mi", max_tokens=8, temperature=0)["choices"][0]["text"]
    with_host.close()
    assert loaded.answer["text"] == with_host_said


def test_servers_give_back_what_they_held(loaded: Loaded, servers: list[RpcServer]) -> None:
    for server, was in zip(servers, loaded.before, strict=True):
        assert server.resident - was < PART // 4


NAMES = """
import json, sys
import fitter
path, (first, second) = sys.argv[1], json.loads(sys.argv[2])
options = dict(n_ctx=256, n_gpu_layers=99, verbose=False, n_threads=1)
with_both = fitter.Llama(path, rpc=[first, second], **options)
with_both.close()
# the second one's device is RPC1 here, and RPC0 where the plan is made
alone = fitter.Llama(path, rpc=second, override_tensor=["blk.0.ffn_.*_exps=CPU"], **options)
from fitter.llama.load.breakdown import breakdown_of
rows = {row.buffer_type: row.model for row in breakdown_of(alone.ctx).rows}
said = alone("ba lu mi", max_tokens=2)["usage"]["completion_tokens"]
again = alone.plan.load(verbose=False)
both = again("ba lu mi", max_tokens=2)["usage"]["completion_tokens"]
again.close()
alone.close()
import llama_cpp
plain = llama_cpp.Llama(path, n_ctx=256, n_gpu_layers=-1, verbose=False)
here = [row.buffer_type for row in breakdown_of(plain.ctx).rows]
print(json.dumps([alone.plan.params.devices, rows, [said, both], here]))
"""


def test_names_are_those_of_the_plan_and_nobody_elses_models_are_touched(
    tmp_path: Path, servers: list[RpcServer]
) -> None:
    from tools.models.tiny import write_tiny

    path, addresses = write_tiny(tmp_path / "tiny.gguf"), [server.address for server in servers]
    devices, found, said, plain = json_of_python(NAMES, path, json.dumps(addresses))
    assert devices == ["RPC0"]
    assert found[f"RPC0[{addresses[1]}]"] > 0
    assert f"RPC0[{addresses[0]}]" not in found
    assert said == [2, 2], "two models on the same server, from one process"
    assert not [name for name in plain if "RPC" in name], "llama_cpp.Llama knows nothing of the servers"
