"""Devices of rpc-servers: real servers on loopback, upstream's own tools beside, and servers that are none."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import pytest

import fitter
from examples.tiny_moe import write
from fitter import api
from fitter.errors import FitterError, RemoteError, UsageError
from fitter.llama.client import Worker
from fitter.llama.processes import rpc
from fitter.llama.types import Params, VirtualDevice
from fitter.machine import bandwidth
from fitter.machine.gpu import parse_gpus
from tests.support.cases import cases, named_cases, stored
from tests.support.command import Command, json_of_python, run_fitter
from tests.support.patience import SECONDS, is_running, until, with_more_time
from tools.comparisons import upstream
from tools.faults.cut_servers import RpcServer
from tools.loopback import rpc_servers
from tools.models import shapes
from tools.models.tiny import TINY_DENSE, TINY_MOE, write_tiny

MIB = 2**20
SLOW = "0.1GB/s"
FAST = "2TB/s"


OTHERS: set[psutil.Process] = set()
"""Processes that tests of other files started and keep."""


@pytest.fixture(scope="module", autouse=True)
def others() -> None:
    OTHERS.update(psutil.Process().children())


@pytest.fixture(scope="module")
def two() -> Iterator[tuple[str, ...]]:
    with rpc_servers.servers(2) as endpoints:
        yield endpoints


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("models") / "dense.gguf", replace(TINY_DENSE, n_layer=8, n_embd=512))


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("models") / "moe.gguf", replace(TINY_MOE, n_embd=512, n_ff=1024))


def fit_params(
    model: Path, words: Sequence[str], virtual: Sequence[VirtualDevice] = ()
) -> dict[str, upstream.UpstreamRow]:
    """MiB per device, and of ``Host``, in upstream's order, that upstream measures with ``words``."""
    program = [str(upstream.tool("llama-fit-params")), "-m", str(model), *words, "--fit-print", "on"]
    done = subprocess.run(
        program, env=upstream.environment(virtual), capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    found = re.findall(r"^(\S+) (\d+) (\d+) (\d+) *$", done.stdout, re.MULTILINE)
    return {name: upstream.UpstreamRow(name, *map(int, numbers)) for name, *numbers in found}


# --- what there is


def test_remote_devices_come_first_and_have_their_memory(two: tuple[str, ...]) -> None:
    found, host = api.devices(rpc=two)
    listed = [(device.name, device.backend, device.description) for device in found]
    assert listed == [("RPC0", "RPC", two[0]), ("RPC1", "RPC", two[1])]
    # the servers' CPU is this machine's
    assert {device.total for device in found} == {host.total}


@named_cases(
    ("two cards", ["rtx-4090", "rtx-3090"], ["RPC0", "RPC1", "CUDA0", "CUDA1"]), ("no card", ["none"], ["RPC0", "RPC1"])
)
def test_beside_described_cards(gpus: list[str], names: list[str], two: tuple[str, ...]) -> None:
    found, _ = api.devices(gpus, rpc=",".join(two))
    assert [device.name for device in found] == names
    assert [device.virtual for device in found] == [not name.startswith("RPC") for name in names]


def test_the_order_is_upstreams(two: tuple[str, ...], dense: Path) -> None:
    cards = parse_gpus(["24GiB", "16GiB"])
    # an override that matches nothing makes it look for more backends
    rows = fit_params(dense, ["--rpc", ",".join(two), "-ot", "nothing=CPU", "-c", "512"], cards)
    assert list(rows) == ["RPC0", "RPC1", "CUDA0", "CUDA1", "Host"]
    measured = api.measure(dense, gpus=cards, rpc=two, n_ctx=512)
    assert measured.devices == ("RPC0", "RPC1", "CUDA0", "CUDA1")


def test_the_command_lists_them(two: tuple[str, ...]) -> None:
    done = run_fitter("devices", "--rpc", two[0], "--rpc", two[1], "--gpu", "rtx-4090", "--json")
    assert done.returncode == 0, done.stderr
    assert [device["name"] for device in json.loads(done.stdout)["devices"]] == ["RPC0", "RPC1", "CUDA0"]


# --- bytes


@cases(stored("rpc", "bytes_are_upstreams"))
def test_bytes_are_upstreams(words: str, given: dict[str, Any], two: tuple[str, ...], moe: Path) -> None:
    given = {name: value.replace("{0}", two[0]) if isinstance(value, str) else value for name, value in given.items()}
    measured = api.measure(moe, rpc=two, n_ubatch=given.pop("n_ubatch", 512), **given)
    words = words.replace("{0}", two[0])
    rows = fit_params(moe, ["--rpc", ",".join(two), *words.split()])
    for name in measured.devices:
        row = measured.on(name)
        ours = (row.model // MIB, row.context // MIB, row.compute // MIB)
        assert ours == (rows[name].model, rows[name].context, rows[name].compute)
        assert row.used


# --- plans


def test_a_plan_names_its_servers_and_upstream_takes_it(two: tuple[str, ...], dense: Path) -> None:
    done = run_fitter(str(dense), "--rpc", ",".join(two), "--rpc-bandwidth", FAST, "-ts", "1,1", "-c", "1024")
    assert done.returncode == 0, done.stderr
    words = done.stdout.split()
    assert words[words.index("--rpc") + 1] == ",".join(two)
    assert "--rpc" in words and "-dev" not in words, "llama.cpp uses both by itself"
    plan = fitter.fit(dense, rpc=two, rpc_bandwidth=FAST, tensor_split=[1, 1], n_ctx=1024)
    assert plan.params.devices == ("RPC0", "RPC1")
    assert plan.arguments() == words
    assert (plan.rpc, plan.virtual, plan.to_dict()["rpc"]) == (two, False, list(two))
    rows = fit_params(dense, words)
    for use in plan.devices:
        row = rows[use.name]
        assert (use.model // MIB, use.context // MIB, use.compute // MIB) == (row.model, row.context, row.compute)


def test_a_plan_for_a_remote_and_a_described_device(two: tuple[str, ...], dense: Path) -> None:
    cards = parse_gpus(["24GiB"])
    plan = fitter.fit(dense, gpus=["24GiB"], rpc=two[1], devices=["RPC0", "CUDA0"], tensor_split=[1, 1], n_ctx=1024)
    assert (plan.fits, plan.virtual, plan.rpc) == (True, True, (two[1],))
    assert all(device.model for device in plan.devices)
    rows = fit_params(dense, plan.arguments(), cards)
    assert [row.model for row in rows.values()][:2] == [device.model // MIB for device in plan.devices]


def test_margins_limit_them(two: tuple[str, ...], moe: Path) -> None:
    """With next to nothing free on either server, the model goes to both and the host."""
    found, _ = api.devices(rpc=two)
    whole = api.measure(moe, rpc=two[0], n_ctx=512)
    room = whole.on("RPC0").used * 2 // 5
    # what is free on a server's CPU changes only with its memory
    words: dict[str, Any] = {"n_ctx": 512, "n_ubatch": 64, "devices": ["RPC0", "RPC1"]}
    margins = [device.free - room for device in found]
    plan = fitter.fit(moe, rpc=two, rpc_bandwidth=FAST, margin=margins, **words)
    assert plan.fits
    assert [device.used > 0 and device.used <= room for device in plan.devices] == [True, True]
    assert plan.host.model > 0


@named_cases(
    ("slower than the host", {"rpc_bandwidth": SLOW, "host_bandwidth": "50GB/s"}, ()),
    ("faster than the host", {"rpc_bandwidth": f"{FAST},{SLOW}", "host_bandwidth": "1GB/s"}, ("RPC0",)),
    ("one of two", {"rpc_bandwidth": f"{SLOW},{FAST}", "host_bandwidth": "1GB/s"}, ("RPC1",)),
    ("slow, but the user's word", {"rpc_bandwidth": SLOW, "devices": ["RPC0"]}, ("RPC0",)),
)
def test_a_remote_device_is_used_where_it_is_worth_it(
    given: dict[str, Any], used: tuple[str, ...], two: tuple[str, ...], dense: Path
) -> None:
    plan = fitter.fit(dense, rpc=two, objective="generation", n_ctx=1024, **given)
    assert plan.breakdown.devices == used
    assert plan.rpc == (two if used else ())
    assert ("--rpc" in plan.arguments()) == bool(used)
    assert ("whether remote devices are worth their network: without RPC0 and RPC1" in plan.explain()) == (not used)


@named_cases(
    ("slower than the host", SLOW, "64GiB", None, ("CUDA0",)),
    # what is free on the server is this machine's memory
    ("faster than the host", FAST, "64GiB", 8192, ("RPC0",)),
    ("the host is full", SLOW, "3GiB", None, ("RPC0", "CUDA0")),
)
def test_beside_a_card_that_is_too_small(
    bandwidth: str, host_memory: str, n_ctx: int | None, used: tuple[str, ...], two: tuple[str, ...], tmp_path: Path
) -> None:
    """A server that is slower than the host is not used for a longer context either."""
    model = shapes.write("llama-3.1-8b", tmp_path, vocab=False)
    machine: dict[str, Any] = {"gpus": ["4GiB"], "rpc": two[0], "rpc_bandwidth": bandwidth, "host_memory": host_memory}
    plan = fitter.fit(model, **machine, n_ctx=n_ctx, objective="generation")
    assert plan.fits
    assert set(plan.breakdown.devices) == set(used)


def test_a_price_says_what_the_network_takes(two: tuple[str, ...], dense: Path) -> None:
    price = api.estimate(dense, rpc=two, rpc_bandwidth=["100GB/s", "200GB/s"], n_ctx=1024, tensor_split=[1, 1])
    assert {"RPC0: network", "RPC1: network"} <= {part.name for part in price.parts}
    texts = {source.device: source.text for source in price.sources}
    assert texts["RPC0"].startswith("given; reads 100 GB/s; network: ")
    assert texts["RPC1"].startswith("given; reads 200 GB/s; network: ")


# --- speed


def test_speed_is_measured_once(two: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bandwidth, "remote_cache_path", lambda: tmp_path / "remote.json")
    asked = []
    with Worker(rpc=two) as worker:
        devices = worker.devices()

        def measure(*question: object) -> object:
            asked.append(question[0])
            return worker.speed(*question)  # type: ignore[arg-type]

        first = bandwidth.remote_speeds(devices, devices, measure)  # type: ignore[arg-type]
        second = bandwidth.remote_speeds(devices, devices, measure)  # type: ignore[arg-type]
    assert asked == ["RPC0", "RPC1"]
    for name, speed in first.items():
        # any machine's memory, arithmetic and loopback
        assert 1e8 < speed.bandwidth < 1e13
        assert 1e8 < speed.compute < 1e15
        assert 1e7 < speed.pcie < 1e12
        assert 1e-6 < speed.round_trip < 0.1
        assert speed.known
        assert speed.source.startswith("measured; ")
        assert second[name] == replace(speed, source=second[name].source)
        assert second[name].source.startswith("measured earlier; ")


def test_what_cannot_be_measured_has_a_stated_default(two: tuple[str, ...], dense: Path) -> None:
    with Worker(rpc=two) as worker, pytest.raises(FitterError, match="too little free memory to measure with"):
        worker.speed("RPC0", 10 * MIB, 0.5)


# --- servers that are none


def _silent(connection: socket.socket) -> None:
    connection.recv(1 << 16)
    connection.recv(1 << 16)


def _http(connection: socket.socket) -> None:
    connection.sendall(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n")
    connection.recv(1 << 16)


def _drip(connection: socket.socket) -> None:
    while True:
        connection.sendall(b"\x1c")
        time.sleep(0.2)


def _greets(*version: int, devices: int | None = None) -> Callable[[socket.socket], None]:
    return rpc_servers.answer(*version, devices=devices)


def _greets_and_waits(connection: socket.socket) -> None:
    _greets(*rpc.PROTOCOL, 0)(connection)
    connection.recv(1 << 16)


@named_cases(
    ("says nothing", _silent, "accepts connections but does not answer"),
    ("a byte now and then", _drip, "accepts connections but does not answer"),
    ("closes", lambda connection: connection.close(), "it is not an rpc-server, or one of another version"),
    ("another program", _http, "does not answer as an rpc-server"),
    ("a newer protocol", _greets(rpc.PROTOCOL[0], rpc.PROTOCOL[1] + 1, 0), "has version 7.1.0 of the protocol"),
    ("no device", _greets(*rpc.PROTOCOL, 0, devices=0), "has no device"),
    ("greets and waits", _greets_and_waits, "accepts connections but does not answer"),
)
def test_no_server_of_ours(
    behave: rpc_servers.Behaviour, message: str, two: tuple[str, ...], dense: Path, command: Command
) -> None:
    def attempt(seconds: float) -> None:
        with rpc_servers.impostor(behave) as endpoint:
            status, out, err = command(dense, "--rpc", f"{two[0]},{endpoint}", "--timeout", seconds)
        assert (status, out, err.count("\n")) == (3, "", 1)
        assert err.startswith(f"fitter: error: the RPC server {endpoint} ") and message in err
        assert_nothing_is_left()

    with_more_time(attempt, 1.5, 6, 25)


@named_cases(
    ("a length of 2^63", 3, lambda answer: struct.pack("<Q", 2**63) + answer[8:]),
    ("no length", 3, lambda answer: bytes(8)),
    ("a byte more", 4, lambda answer: struct.pack("<Q", len(answer) - 7) + answer[8:] + b"x"),
    ("zeros", 3, lambda answer: answer[:8] + bytes(len(answer) - 8)),
    ("ones", 5, lambda answer: answer[:8] + b"\xff" * (len(answer) - 8)),
    ("half an answer", 3, lambda answer: answer[: len(answer) // 2]),
    ("nothing", 4, lambda answer: b""),
    ("the end", 5, lambda answer: None),
    ("an answer twice", 6, lambda answer: answer * 2),
    ("another protocol", 3, lambda answer: b"HTTP/1.1 200 OK\r\n\r\n"),
)
def test_a_server_that_lies_is_one_line_or_a_plan(
    number: int, change: rpc_servers.Change, dense: Path, command: Command
) -> None:
    """It has a server of its own: who leaves in the middle of an answer ends it by SIGPIPE."""
    with rpc_servers.servers(1) as (real,), rpc_servers.changing(real, number, change) as endpoint:
        status, out, err = command(dense, "--rpc", endpoint, "--timeout", 1)
    # it may have as much memory as it says
    assert (status, bool(out)) in ((0, True), (3, False))
    assert status == 0 or (err.startswith("fitter: error: ") and err.count("\n") == 1 and "bug" not in err)
    assert_nothing_is_left()


def test_nobody_listens(dense: Path, command: Command) -> None:
    nowhere = f"127.0.0.1:{rpc_servers.free_port()}"
    check = "check that rpc-server is running there, on that port"
    said = f"fitter: error: the RPC server {nowhere} cannot be reached (connection refused): {check}\n"
    assert command(dense, "--rpc", nowhere) == (3, "", said)


def test_a_full_queue_is_a_time_limit(dense: Path) -> None:
    """A full queue looks like a firewall that drops packets."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(0)
        clients = [socket.socket() for _ in range(8)]
        try:
            for client in clients:
                client.setblocking(False)
                client.connect_ex(listening.getsockname())
            with pytest.raises(RemoteError, match="cannot be reached within 1 seconds: check its address and firewall"):
                fitter.fit(dense, rpc=f"127.0.0.1:{listening.getsockname()[1]}", timeout=1)
        finally:
            for client in clients:
                client.close()


def test_an_unknown_name(dense: Path) -> None:
    with pytest.raises(RemoteError, match=r"the RPC server nowhere\.invalid:50052 was not found"):
        fitter.fit(dense, rpc="nowhere.invalid:50052", timeout=5)


def test_the_same_server_by_another_name(two: tuple[str, ...], dense: Path) -> None:
    other = two[0].replace("127.0.0.1", "localhost")
    with pytest.raises(UsageError, match=f"the RPC servers {two[0]} and {other} are the same one"):
        fitter.fit(dense, rpc=[two[0], other])


# --- servers that go


@cases((1, False), (8, False), (3, True))
def test_a_server_that_goes(connections: int, mute: bool, two: tuple[str, ...], dense: Path) -> None:
    """The server goes after a number of connections: the error names it, and the next fit works."""

    def attempt(seconds: float) -> None:
        with rpc_servers.relay(two[1], connections, mute=mute) as endpoint, pytest.raises(RemoteError) as raised:
            fitter.fit(dense, rpc=[two[0], endpoint], tensor_split=[1, 1], timeout=seconds)
        assert endpoint in str(raised.value)
        assert two[0] not in str(raised.value)
        assert_nothing_is_left()

    with_more_time(attempt, 2, 8, 30)
    assert fitter.fit(dense, rpc=two, n_ctx=512).fits


def test_a_server_that_comes_back(dense: Path) -> None:
    process, endpoint = rpc_servers.start()
    params = Params(n_ctx=512)
    try:
        with Worker(rpc=endpoint, timeout=SECONDS) as worker:
            before = worker.measure(dense, params)
            rpc_servers.stop(process)
            with pytest.raises(RemoteError, match=f"lost an RPC server during 'measure': {endpoint}, which cannot be"):
                worker.measure(dense, replace(params, n_ctx=1024))
            with pytest.raises(RemoteError, match=f"the RPC server {endpoint} cannot be reached"):
                worker.measure(dense, params)
            process, _ = rpc_servers.start(int(endpoint.rpartition(":")[2]))
            assert worker.measure(dense, params) == before
    finally:
        rpc_servers.stop(process)
    assert_nothing_is_left()


def test_a_busy_server_outlives_who_did_not_wait(dense: Path) -> None:
    """rpc-server answers whoever has waited, and SIGPIPE ends it where that one has closed the connection."""
    process, endpoint = rpc_servers.start()
    try:
        host, _, port = endpoint.rpartition(":")
        with socket.create_connection((host, int(port))) as client:
            rpc_servers.greet(client)
            said = f"{endpoint} accepts connections but does not answer: end the program"
            with pytest.raises(RemoteError, match=said):
                fitter.fit(dense, rpc=endpoint, timeout=1)
        assert fitter.fit(dense, rpc=endpoint, n_ctx=512).fits
        assert process.poll() is None
    finally:
        rpc_servers.stop(process)


def measured(worker: Worker, model: Path, params: Params) -> None:
    with contextlib.suppress(FitterError):
        worker.measure(model, params)
        pytest.fail("it was not ended")


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_server_outlives_a_worker_that_is_ended(dense: Path) -> None:
    process, endpoint = rpc_servers.start()
    params = Params(n_ctx=512)
    try:
        with Worker(rpc=endpoint) as worker:
            worker.devices()
            # it will answer a question whose asker has gone
            os.kill(process.pid, signal.SIGSTOP)
            asking = threading.Thread(target=measured, args=(worker, dense, params))
            asking.start()
            time.sleep(0.5)
        asking.join()
        os.kill(process.pid, signal.SIGCONT)
        with Worker(rpc=endpoint) as worker:
            assert worker.measure(dense, params).on("RPC0").used
        assert process.poll() is None
    finally:
        rpc_servers.stop(process)
    assert_nothing_is_left()


def test_two_fits_share_a_server(two: tuple[str, ...], dense: Path) -> None:
    """A server has one client at a time: the fits wait for one another between their loads."""
    plans: list[api.Plan] = []
    threads = [
        threading.Thread(target=lambda: plans.append(fitter.fit(dense, rpc=two, rpc_bandwidth=FAST, n_ctx=512)))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [plan.params for plan in plans] == [plans[0].params] * 3


def assert_nothing_is_left() -> None:
    children = set(psutil.Process().children()) - OTHERS
    until(lambda: not any(is_running(child) and child.name() != "rpc-server" for child in children), "a worker is left")


# --- words


@named_cases(
    ("no port", "host", "is not of the form host:port"),
    ("no host", ":50052", "is not of the form host:port"),
    ("a large port", "host:65536", "'65536' is not a port"),
    ("IPv6 in brackets", "[::1]:50052", "does not support IPv6"),
    ("a scheme", "http://host:50052", "does not support IPv6"),
    ("twice", "host:1,host:1", "the RPC server host:1 is given twice"),
    ("a space", "my host:1", "is not of the form host:port"),
)
def test_words_that_are_no_server(text: str, message: str, dense: Path) -> None:
    with pytest.raises(UsageError) as caught:
        fitter.fit(dense, rpc=text)
    assert message in str(caught.value)


def test_bandwidths_for_other_servers(two: tuple[str, ...], dense: Path) -> None:
    with pytest.raises(UsageError, match="has 3 values, but there are 2 remote devices"):
        fitter.fit(dense, rpc=two, rpc_bandwidth="1GB/s,2GB/s,3GB/s")
    with pytest.raises(UsageError, match="name one with --rpc"):
        fitter.fit(dense, rpc_bandwidth="1GB/s")


def test_the_protocol_is_that_of_the_pinned_source() -> None:
    text = (upstream.ROOT / "vendor/llama.cpp/source/ggml/include/ggml-rpc.h").read_text(encoding="utf-8")
    numbers = dict(re.findall(r"#define RPC_PROTO_(\w+)_VERSION\s+(\d+)", text))
    assert tuple(int(numbers[name]) for name in ("MAJOR", "MINOR")) == rpc.PROTOCOL


# --- one model over two rpc-servers and the host: loaded in one call, with the bytes that were predicted


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
