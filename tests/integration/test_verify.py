"""``fitter verify``: real loads of tiny real models on the CPU and on rpc-servers, beside what was predicted."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

import fitter
from fitter.errors import LlamaCppError, RemoteError
from fitter.llama.client import Worker
from fitter.llama.types import Params
from fitter.planning.plan.verified import Verification
from fitter.planning.request.request import Progress
from tests.support.cases import cases, named_cases
from tests.support.command import run_fitter
from tools.faults.cut_servers import Proxy, RpcServer
from tools.models.tiny import TINY_DENSE, TINY_MOE

MIB = 2**20
# positions and prompts end with the training context of the last one
MODELS = {"moe": TINY_MOE, "dense": TINY_DENSE, "short": replace(TINY_DENSE, n_ctx_train=64)}


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with RpcServer() as started:
        yield started.address


@pytest.fixture(scope="module")
def plan_file(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plans") / "plan.json"
    path.write_text(json.dumps(fitter.fit(models["moe"], n_ctx=1024, devices=["none"]).to_dict()))
    return path


def most_memory(process: psutil.Process) -> int:
    """The most address space that a process ever had."""
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmPeak:"))


def check(found: Verification) -> None:
    assert found.holds and not found.differences
    kinds = {kind for row in found.rows for kind in ("model", "context", "compute") if getattr(row.real, kind)}
    assert kinds == {"model", "context", "compute"}
    for use in found.memory:
        mine = [row.real for row in found.rows if (row.real.device if not row.real.is_host else "host") == use.name]
        assert use.counted == sum(row.used for row in mine)


# --- predicted and real bytes


@named_cases(
    ("defaults", "moe", {}),
    ("sequences, one cache", "dense", {"n_seq_max": 4, "kv_unified": True, "n_ctx": 1024}),
    ("cache types", "moe", {"type_k": "q8_0", "type_v": "q8_0", "flash_attn": "on"}),
    ("no flash attention", "dense", {"flash_attn": "off", "n_ubatch": 64}),
    ("context below the micro batch", "dense", {"n_ctx": 256}),
    ("positions below the micro batch", "short", {"n_ctx": 1024}),
    ("micro batch of one", "dense", {"n_ubatch": 1, "n_batch": 1, "n_ctx": 256}),
)
def test_on_the_cpu(name: str, options: dict[str, Any], models: dict[str, Path]) -> None:
    found = fitter.verify(models[name], devices=["none"], **options)
    check(found)
    assert [use.name for use in found.memory] == ["host"]


@named_cases(
    ("all of it", {}),
    ("some layers", {"n_gpu_layers": 2}),
    ("experts on the host", {"override_tensor": ["exps=CPU"]}),
    ("sequences", {"n_seq_max": 3, "n_ctx": 3072, "n_gpu_layers": 3}),
)
def test_on_a_device(options: dict[str, Any], models: dict[str, Path], server: str) -> None:
    found = fitter.verify(models["moe"], rpc=[server], devices=["RPC0"], **options)
    check(found)
    assert [use.name for use in found.memory] == ["RPC0", "host"]
    assert found.memory[0].counted > 0
    assert found.memory[0].unaccounted is None, "what a CPU reports as free stands still"


@cases({}, {"n_seq_max": 2, "n_ctx": 4096, "n_gpu_layers": 3})
def test_on_two_devices(options: dict[str, Any], models: dict[str, Path], server: str) -> None:
    with RpcServer() as other:
        found = fitter.verify(models["moe"], rpc=[server, other.address], tensor_split=[1, 1], **options)
    check(found)
    assert [use.name for use in found.memory] == ["RPC0", "RPC1", "host"]
    assert all(use.counted > 0 for use in found.memory)


def test_reserving_allocates_nothing(models: dict[str, Path]) -> None:
    params = Params(n_ctx=16384, n_ubatch=2048, n_seq_max=1, flash_attn="off", devices=())
    others = set(psutil.Process().children(recursive=True))
    with Worker() as worker:
        small = replace(params, n_ctx=256, n_ubatch=32)
        before = worker.measure(models["dense"], small, reserve=True).real.host.compute
        mine = set(psutil.Process().children(recursive=True)) - others
        used = sum(map(most_memory, mine))
        found = worker.measure(models["dense"], params, reserve=True).real.host.compute
        assert mine and found > before + 512 * MIB
        assert sum(map(most_memory, mine)) < used + 128 * MIB


def test_a_plan_verifies_itself(models: dict[str, Path]) -> None:
    plan = fitter.fit(models["dense"], n_ctx=512)
    found = plan.verify()
    check(found)
    assert found.params.n_ctx == 512
    assert [row.predicted for row in found.rows] == list(plan.breakdown.rows)


# --- the command


def test_the_table(models: dict[str, Path], server: str) -> None:
    done = run_fitter("verify", models["moe"], "--rpc", server, "-ngl", 2)
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    sizes = {" ".join(line[:2]): line[2:] for line in lines if len(line) == 4 and line[0] in ("CPU", f"RPC0[{server}]")}
    assert {name.split("[")[0] for name in sizes} == {"CPU model", "CPU context", "CPU compute", "RPC0"}
    assert all(predicted == real for predicted, real in sizes.values())
    assert {line[0] for line in lines if line} >= {"RPC0", "host"}
    assert done.stdout.rstrip().endswith("every byte as predicted")


def test_json(models: dict[str, Path], server: str) -> None:
    done = run_fitter("verify", models["moe"], "--rpc", server, "-ngl", 2, "-c", 1024, "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert list(document) == [
        *("schema", "fits", "holds", "tolerance", "model", "params", "memory", "devices", "host", "shared", "problems"),
        "server",
    ]
    assert document["server"] is None
    assert (document["schema"], document["fits"], document["holds"], document["tolerance"]) == (1, True, True, 0)
    assert document["params"]["n_ctx"] == 1024 and document["params"]["devices"] == ["RPC0"]
    assert all(row["predicted"] == row["real"] for row in document["memory"])
    (device,) = document["devices"]
    on_it = [row["real"] for row in document["memory"] if row["device"] == "RPC0"]
    assert device["counted"] == sum(sum(real.values()) for real in on_it) > 0
    assert device["free_before"] > 0 and document["host"]["free_before"] > 0


# --- a plan from a file


def test_a_plan_of_a_file(models: dict[str, Path], plan_file: Path) -> None:
    for words in ([], [models["moe"]]):
        done = run_fitter("verify", *words, "--plan", plan_file, "--json")
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["params"] == json.loads(plan_file.read_text())["params"]


def test_a_plan_of_a_file_on_a_device(models: dict[str, Path], server: str, tmp_path: Path) -> None:
    plan = fitter.fit(models["moe"], rpc=[server], n_gpu_layers=2, n_ctx=1024)
    (tmp_path / "plan.json").write_text(json.dumps(plan.to_dict()))
    check(fitter.verify(plan=tmp_path / "plan.json"))


@cases(
    ("model", -1, [], 4),
    ("context", -1, [], 4),
    ("compute", -1, [], 4),
    ("context", -1, ["--tolerance", "1B"], 0),
    ("compute", -2, ["--tolerance", "1B"], 4),
    ("model", -1024, ["--tolerance", "1KiB"], 0),
    ("compute", +1, [], 0),
)
def test_the_exit_status_on_both_sides_of_the_tolerance(
    kind: str, predicted: int, words: list[str], status: int, plan_file: Path, tmp_path: Path
) -> None:
    document = json.loads(plan_file.read_text())
    row = next(row for row in document["memory"] if row["buffer_type"] == "CPU")
    # of compute it is what a real load reserves
    row["reserved" if kind == "compute" else kind] += predicted
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(document))
    done = run_fitter("verify", "--plan", path, *words)
    assert done.returncode == status, done.stderr
    assert f"CPU {kind} {-predicted:+,} bytes" in done.stdout.splitlines()[-1]
    said = "more than predicted" if status else "less than predicted" if predicted > 0 else "within the tolerance of"
    assert done.stdout.splitlines()[-1].startswith(said)


# --- what cannot be verified


def test_a_plan_that_does_not_fit_is_not_loaded(models: dict[str, Path], tmp_path: Path) -> None:
    plan = fitter.fit(models["moe"], host_memory=100 * MIB)
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(plan.to_dict()))
    for words in (["--plan", path], [models["moe"], "--host-memory", "100MiB"]):
        done = run_fitter("verify", *words, "--json")
        assert done.returncode == 1
        assert done.stderr.startswith("fitter: does not fit: the host lacks ")
        document = json.loads(done.stdout)
        assert (document["fits"], document["holds"], document["memory"]) == (False, None, [])
        assert document["problems"] == plan.to_dict()["problems"]


def test_a_plan_that_fits_no_more_is_not_loaded(plan_file: Path, tmp_path: Path) -> None:
    document = json.loads(plan_file.read_text())
    document["host"]["model"] += 2**50
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(document))
    done = run_fitter("verify", "--plan", path)
    assert (done.returncode, done.stdout) == (1, "")
    assert "bytes on host, but only " in done.stderr and "are free there now: fit again" in done.stderr


# --- a load that fails


def test_too_little_memory_for_the_real_load(models: dict[str, Path]) -> None:
    words = [sys.executable, "-m", "fitter", "verify", str(models["dense"]), "-c", "1048576", "-dev", "none"]
    limited = ["prlimit", f"--as={1500 * MIB}", *words]
    done = subprocess.run(limited, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (3, "")
    assert len(done.stderr.splitlines()) == 1
    assert "dense.gguf: " in done.stderr


def test_a_server_that_the_plan_leaves_out_is_not_missed(models: dict[str, Path]) -> None:
    with RpcServer() as server:
        check(fitter.verify(models["moe"], rpc=[server.address], rpc_bandwidth="1GB/s", n_ctx=512))


def test_a_server_that_ends_before_the_load(models: dict[str, Path]) -> None:
    with RpcServer() as server:

        def end(step: Progress) -> None:
            if step.text == "loading for real":
                server.kill()

        with pytest.raises((RemoteError, LlamaCppError), match=server.address):
            fitter.verify(models["moe"], rpc=[server.address], devices=["RPC0"], on_progress=end)
    # the process that asks is none the worse
    check(fitter.verify(models["moe"], devices=["none"], n_ctx=512))


def test_a_server_that_ends_in_the_middle_of_the_load(models: dict[str, Path]) -> None:
    half = models["moe"].stat().st_size // 2
    with RpcServer() as server, Proxy(server.port) as proxy:

        def limit(step: Progress) -> None:
            if step.text == "loading for real":
                proxy.limit_to(half)

        with pytest.raises(RemoteError, match=f"lost an RPC server during 'load': {proxy.address}") as caught:
            fitter.verify(models["moe"], rpc=[proxy.address], devices=["RPC0"], on_progress=limit)
        assert "\n" not in str(caught.value)
    check(fitter.verify(models["moe"], devices=["none"], n_ctx=512))
