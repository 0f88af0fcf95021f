"""Loads that fail, each in a process that has to live on: it can fit and load again, and ends by itself."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import fitter
from examples.tiny_moe import TinyModel
from fitter.machine import bandwidth
from tests.support.cases import cases, named_cases
from tests.support.patience import SECONDS, until, with_more_time
from tools.faults.cut_servers import Proxy, RpcServer
from tools.models.tiny import write_tiny

MIB = 1024 * 1024
MODEL = TinyModel("some MiB", n_layer=6, n_embd=512, n_head=8, n_head_kv=4, n_embd_head=64, n_ff=512, n_expert=8)

HEAD = """
import json, os, resource, sys, threading, time, warnings
import fitter
from fitter.errors import FitterError

path, arguments = sys.argv[1], json.loads(sys.argv[2])
options = {"n_ctx": 256, "verbose": False, "use_mmap": False, "n_threads": 1, **arguments.get("options", {})}
told = []

def generate(llm):
    return llm("ba lu mi", max_tokens=2, temperature=0)["usage"]["completion_tokens"]

def attempt(load):
    start = time.monotonic()
    try:
        return {"tokens": generate(load())}
    except FitterError as error:
        found = {"error": type(error).__name__, "message": str(error), "device": getattr(error, "device", None)}
        return {**found, "missing": getattr(error, "missing", None), "seconds": time.monotonic() - start}

def virtual_size():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()

def wait(name):
    print(json.dumps({"at": name}), flush=True)
    sys.stdin.readline()
"""


class Script:
    """A process that runs a script after ``HEAD``; it says one JSON value per line, and waits for ``go``."""

    def __init__(self, code: str, path: Path, **arguments: Any) -> None:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
        environment["MALLOC_ARENA_MAX"] = "1"
        words = [sys.executable, "-c", HEAD + code, str(path), json.dumps(arguments)]
        pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        self.process = subprocess.Popen(words, text=True, env=environment, **pipes)

    def __enter__(self) -> Script:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()

    def read(self) -> Any:
        """The next value."""
        assert self.process.stdout
        line = self.process.stdout.readline()
        assert line, self.process.communicate(timeout=SECONDS)[1][-2000:]
        return json.loads(line)

    def go(self) -> None:
        """Let it go on from where it waits."""
        assert self.process.stdin
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def end(self) -> str:
        """Wait for its end, which must be a good one; what it wrote to stderr."""
        _, errors = self.process.communicate(timeout=SECONDS)
        assert self.process.returncode == 0, errors[-2000:]
        return errors


@pytest.fixture(scope="module")
def server() -> Iterator[RpcServer]:
    with RpcServer() as started:
        yield started


def on_server(address: str, **options: Any) -> dict[str, Any]:
    return {"rpc": address, "n_gpu_layers": 99, **options}


# --- rpc-servers that go


@contextmanager
def failing(server: RpcServer, model: Path, share: int, *, stalls: bool = False) -> Iterator[Proxy]:
    """A server that dies, or stalls, once it has been sent one ``share``-th of ``model``.

    Measuring its speed sends as much as the network takes in a while: it is measured before, and remembered. On a busy
    machine noise may hide the speed, which is then not remembered: measured until it is.
    """
    with Proxy(server.port, stalls=stalls) as proxy:
        stored = bandwidth.remote_cache_path()
        for _ in range(20):
            fitter.fit(model, rpc=proxy.address)
            if stored.exists() and proxy.address in stored.read_text():
                break
        else:
            pytest.fail("the server's speed was never remembered")
        proxy.limit_to(model.stat().st_size // share)
        yield proxy


FAIL_AND_RECOVER = """
first = attempt(lambda: fitter.Llama(path, **options))
print(json.dumps(first), flush=True)
print("on stdout", file=sys.stderr)
second = attempt(lambda: fitter.Llama(path, n_ctx=256, verbose=False))
print(json.dumps(second), flush=True)
wait("failed")
print(json.dumps(attempt(lambda: fitter.Llama(path, **options))), flush=True)
"""


def test_a_server_that_dies_while_weights_are_sent(model: Path, server: RpcServer) -> None:
    with (
        failing(server, model, 2) as proxy,
        Script(FAIL_AND_RECOVER, model, options=on_server(proxy.address)) as script,
    ):
        failed = script.read()
        lost = f"lost an RPC server while it loaded {model}: {proxy.address}, which cannot be reached"
        assert failed["error"] == "RemoteError" and lost in failed["message"] and "\n" not in failed["message"]
        assert script.read() == {"tokens": 2}, "without the server"
        assert script.read() == {"at": "failed"}
        proxy.revive()
        script.go()
        assert script.read() == {"tokens": 2}, "with the server at the same address"
        assert "on stdout" in script.end(), "llama-cpp-python had turned the streams off"


def test_a_server_beside_one_that_dies_lives_on(model: Path, server: RpcServer) -> None:
    """The living server frees its part of the model at once: for others, and for this process."""
    with RpcServer() as other, failing(server, model, 4) as proxy:
        servers = f"{proxy.address},{other.address}"
        with Script(FAIL_AND_RECOVER, model, options=on_server(servers, tensor_split=[1, 1])) as script:
            assert proxy.address in script.read()["message"]
            script.read()
            script.read()
            elsewhere = fitter.fit(model, rpc=other.address, n_gpu_layers=99, n_ctx=256)
            assert elsewhere.fits
            proxy.revive()
            script.go()
            assert script.read() == {"tokens": 2}
            script.end()
        assert other.is_alive


def test_a_server_that_says_nothing_any_more(model: Path, server: RpcServer) -> None:
    def attempt(seconds: float) -> None:
        with (
            failing(server, model, 2, stalls=True) as proxy,
            Script(FAIL_AND_RECOVER, model, options=on_server(proxy.address, timeout=seconds)) as script,
        ):
            failed = script.read()
            lost = f"llama.cpp lost an RPC server while it loaded {model}: {proxy.address}, which accepts connections"
            assert failed["error"] == "RemoteError" and failed["message"].startswith(f"{lost} but does not answer")
            assert script.read() == {"tokens": 2}
            script.read()
            proxy.revive()
            script.go()
            assert script.read() == {"tokens": 2}
            script.end()

    with_more_time(attempt, 3, 12, 40)


REFUSED = """
plan = fitter.fit(path, **{k: v for k, v in options.items() if k in ("rpc", "n_gpu_layers", "n_ctx")})
rest = {"verbose": False}
wait("fitted")
print(json.dumps({**attempt(lambda: plan.load(**rest)), "threads": threading.active_count()}), flush=True)
wait("failed")
print(json.dumps(attempt(lambda: plan.load(**rest))), flush=True)
"""


def test_a_server_that_is_gone_when_llama_cpp_connects(model: Path, server: RpcServer) -> None:
    """ggml aborts on the thread that loads, with locks held that the next connection needs."""
    with Proxy(server.port) as proxy, Script(REFUSED, model, options=on_server(proxy.address)) as script:
        script.read()
        # the first one is for the question whether it is there
        proxy.revive(connections=1)
        script.go()
        failed = script.read()
        assert failed["error"] == "RemoteError"
        assert "cannot be reached" in failed["message"]
        assert "until the process ends" not in failed["message"], "nothing is left behind"
        assert failed["threads"] == 1
        script.read()
        proxy.revive()
        script.go()
        assert script.read() == {"tokens": 2}
        script.end()


CLOSE = """
llm = fitter.Llama(path, **options)
generate(llm)
wait("loaded")
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always", fitter.PlanWarning)
    {how}
print(json.dumps([str(warning.message) for warning in caught if warning.category is fitter.PlanWarning]), flush=True)
print(json.dumps(attempt(lambda: fitter.Llama(path, n_ctx=256, verbose=False))), flush=True)
"""


@cases("llm.close()", "del llm")
def test_closing_a_model_whose_server_is_gone(how: str, model: Path) -> None:
    with RpcServer() as server, Script(CLOSE.replace("{how}", how), model, options=on_server(server.address)) as script:
        script.read()
        server.kill()
        script.go()
        assert script.read() == [
            f"an RPC server ({server.address}) is gone: the model's memory on this machine is not freed"
        ]
        assert script.read() == {"tokens": 2}
        script.end()


@cases(True, False)
def test_a_process_ends_whose_model_is_still_open(is_alive: bool, model: Path) -> None:
    with RpcServer() as server:
        code = "keep = fitter.Llama(path, **options)\ngenerate(keep)\nwait('loaded')\n"
        with Script(code, model, options=on_server(server.address)) as script:
            script.read()
            if not is_alive:
                server.kill()
            script.go()
            script.end()


def test_a_server_with_too_little_memory(model: Path) -> None:
    code = REFUSED.replace(
        "print(json.dumps({**attempt", 'warnings.simplefilter("always")\nprint(json.dumps({**attempt'
    )
    with RpcServer() as server, Script(code, model, options=on_server(server.address)) as script:
        script.read()
        server.limit_memory(4 * MIB)
        script.go()
        failed = script.read()
        assert (failed["error"], failed["device"]) == ("OutOfMemoryError", "RPC0")
        assert failed["missing"] > 4 * MIB
        assert f"RPC0 does not have {failed['missing']} bytes" in failed["message"]
        assert "fitted again 2 times" in failed["message"]
        script.read()
        server.limit_memory(1024 * MIB)
        script.go()
        assert script.read() == {"tokens": 2}
        warned = script.end()
        assert [f"({i} of 2)" in warned for i in (1, 2, 3)] == [True, True, False]


# --- memory of the caller's own


LIMITED = """
fitter.Llama(path, **options).close()
plan = fitter.fit(path, n_ctx=256)
before = resource.getrlimit(resource.RLIMIT_AS)

def tell(message, category, *_):
    told.append([category.__name__, str(message)])
    if arguments["lifts"]:
        resource.setrlimit(resource.RLIMIT_AS, before)

warnings.showwarning = tell
warnings.simplefilter("always", fitter.PlanWarning)
resource.setrlimit(resource.RLIMIT_AS, (virtual_size() + arguments["extra"], before[1]))
found = attempt(lambda: plan.load(verbose=False, use_mmap=False, n_threads=1))
resource.setrlimit(resource.RLIMIT_AS, before)
print(json.dumps({**found, "told": told}), flush=True)
print(json.dumps(attempt(lambda: fitter.Llama(path, **options))), flush=True)
"""


@named_cases(("at most twice", False), ("memory that is back is used", True))
def test_too_little_memory_is_fitted_again(lifts: bool, model: Path) -> None:
    with Script(LIMITED, model, lifts=lifts, extra=12 * MIB) as script:
        found = script.read()
        assert script.read() == {"tokens": 2}, "afterwards"
        script.end()
    assert [category for category, _ in found["told"]] == ["PlanWarning"] * (1 if lifts else 2)
    assert "Fitting again with the memory that is free now (1 of 2)" in found["told"][0][1]
    if lifts:
        assert found["tokens"] == 2
    else:
        assert (found["error"], found["device"]) == ("OutOfMemoryError", "host") and found["missing"] > 12 * MIB
        assert f"the host does not have {found['missing']} bytes" in found["message"]


# --- aborts, and being told to stop


ABORT = """
import ctypes
from fitter.llama.this_process import guarded
from fitter.llama.build import library

ggml = ctypes.CDLL(None)
library.libraries()

def give_up(progress):
    ggml.ggml_abort(b"file.c", 7, b"as %s", b"asked")

outcome = guarded.attempt(give_up)
print(json.dumps({"crash": outcome.crash, "is_lost": outcome.is_lost}), flush=True)
print(json.dumps(attempt(lambda: fitter.Llama(path, **options))), flush=True)
ggml.ggml_abort(b"file.c", 8, b"again")
"""


def test_an_abort_stops_its_thread_in_a_load_and_the_process_outside_of_one(model: Path) -> None:
    with Script(ABORT, model) as script:
        assert script.read() == {"crash": "file.c:7: as asked", "is_lost": True}
        assert script.read() == {"tokens": 2}
        _, errors = script.process.communicate(timeout=SECONDS)
        assert script.process.returncode == -signal.SIGABRT
        assert "file.c:8: again" in errors


INTERRUPTED = """
wait("ready")
try:
    fitter.Llama(path, **options)
except KeyboardInterrupt:
    print(json.dumps("interrupted"), flush=True)
print(json.dumps(attempt(lambda: fitter.Llama(path, n_ctx=256, verbose=False))), flush=True)
wait("interrupted")
print(json.dumps(attempt(lambda: fitter.Llama(path, **options))), flush=True)
"""


def test_ctrl_c_ends_a_load(model: Path, server: RpcServer) -> None:
    """The load waits for a server; any other load ends at the next tensor."""
    with (
        failing(server, model, 2, stalls=True) as proxy,
        Script(INTERRUPTED, model, options=on_server(proxy.address)) as script,
    ):
        script.read()
        script.go()
        until(lambda: proxy.has_stalled)
        script.process.send_signal(signal.SIGINT)
        assert script.read() == "interrupted"
        assert script.read() == {"tokens": 2}, "without the server"
        assert script.read() == {"at": "interrupted"}
        proxy.revive()
        script.go()
        assert script.read() == {"tokens": 2}, "with it"
        script.end()


# --- the model's file


@named_cases(
    ("gone", lambda path: path.unlink(), "model.gguf: no such file"),
    ("another one", lambda path: write_tiny(path), "model.gguf has changed since it was fitted: fit it again"),
    ("written again", lambda path: os.utime(path), "model.gguf has changed since it was fitted: fit it again"),
)
def test_a_model_that_is_not_what_it_was(change: Any, message: str, tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "model.gguf", MODEL)
    plan = fitter.fit(path, n_ctx=256)
    change(path)
    with pytest.raises(fitter.ModelError, match=message):
        plan.load(verbose=False)


# --- nothing is left


REPEATED = """
import ctypes, gc

def children():
    found = 0
    for task in os.listdir("/proc/self/task"):
        with open(f"/proc/self/task/{task}/children") as file:
            found += len(file.read().split())
    return found

def counts():
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), children()

def state():
    # what ends, ends: until nothing has changed for a while
    gc.collect()
    before, same = counts(), 0
    while same < 20:
        time.sleep(0.02)
        same = same + 1 if counts() == before else 0
        before = counts()
    # what is free in the C library is no growth
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/statm") as file:
        resident = int(file.read().split()[1]) * resource.getpagesize()
    return {"resident": resident, **dict(zip(("descriptors", "threads", "children"), counts()))}

def once(closes):
    llm = fitter.Llama(path, **options)
    generate(llm)
    if closes:
        llm.close()

for i in range(10):
    once(i % 2)
print(json.dumps(state()), flush=True)
for i in range(arguments["count"]):
    once(i % 2)
print(json.dumps(state()), flush=True)
"""

NOISE = 20 * 1024
"""Bytes of resident memory for each of them, fifty at least: a hundredth of what one of these models takes."""


@pytest.mark.parametrize("count", [10, pytest.param(100, marks=pytest.mark.slow)])
@pytest.mark.parametrize("place", ["here", "on a server"])
def test_fits_and_loads_leave_nothing(tmp_path: Path, server: RpcServer, place: str, count: int) -> None:
    path = write_tiny(tmp_path / "model.gguf")
    options = on_server(server.address) if place == "on a server" else {}
    with Script(REPEATED, path, options=options, count=count) as script:
        before: Mapping[str, int] = script.read()
        after: Mapping[str, int] = script.read()
        script.end()
    assert after["resident"] - before["resident"] < NOISE * max(count, 50)
    assert after["descriptors"] <= before["descriptors"]
    assert after["children"] <= before["children"]
    assert after["threads"] <= before["threads"] + 1
