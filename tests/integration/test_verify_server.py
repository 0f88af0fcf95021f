"""``fitter verify --for llama-server``: the real llama-server with small models, and what goes wrong."""

from __future__ import annotations

import functools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil
import pytest
from gguf import PoolingType

import fitter
from fitter.api.real_runs import verify_plan
from fitter.errors import LibraryError, LlamaCppCrashError, LlamaCppError, PlanError
from fitter.planning.plan.plan import Plan
from fitter.planning.plan.verified import LaterUse, Verification
from fitter.planning.request.request import Progress
from fitter.programs import running_server, server_requests
from tests.support.cases import cases, named_cases
from tests.support.command import Command
from tests.support.llama_builds import fetched
from tests.support.patience import SECONDS, all_end, until, with_more_time
from tools.comparisons import upstream
from tools.faults.cut_servers import RpcServer
from tools.loopback.rpc_servers import free_port
from tools.models.tiny import TINY_DENSE, TINY_MOE, TinyModel
from tools.models.tiny_kinds import write_bert, write_hybrid, write_swa

MIB = 2**20
SERVER = "llama-server"
OF_ITS_CODE = 64 * MIB
"""More than a llama-server has of its own beside what is counted: 7 MiB here, its vocabulary and threads."""
SMALL: dict[str, Any] = {"cache_ram": 256}
"""MiB of the prompt cache: the 8 GiB that it has otherwise may not be free where the tests run."""
WIDE = TinyModel("tiny wide", n_layer=4, n_embd=64, n_head=8, n_head_kv=8, n_embd_head=128, n_ff=64, n_expert=0)
"""A model with few weights and 64 KiB of f32 cache for each token."""
MODELS = {
    "dense": TINY_DENSE,
    "moe": TINY_MOE,
    "wide": WIDE,
    "swa": write_swa,
    "hybrid": write_hybrid,
    "bert": write_bert,
    "ranker": functools.partial(write_bert, pooling=PoolingType.RANK),
}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """One thread each: many wait for each other, busily, where the processors are shared. None is watched for long."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LLAMA_ARG_THREADS", "1")
        patch.setattr(verify_plan, "IDLE", 0.2)
        yield


@pytest.fixture(scope="module")
def server() -> Path:
    return upstream.tool(SERVER)


@pytest.fixture(scope="module")
def plan_file(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plans") / "plan.json"
    plan = fitter.fit(models["dense"], program=SERVER, n_ctx=1024, n_seq_max=2, devices=["none"], **SMALL)
    path.write_text(json.dumps(plan.to_dict()))
    return path


def running_servers() -> list[psutil.Process]:
    """Every process that this one has started, and theirs, but for the workers of other tests."""
    marks = ("--alias", "fitter.llama.processes.supervisor")
    children = psutil.Process().children(recursive=True)
    return [each for each in children if any(mark in words_of(each) for mark in marks)]


def words_of(process: psutil.Process) -> str:
    """Its command line, empty once it has ended."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    yield
    until(lambda: not running_servers(), "a llama-server is left")


SPLIT = {"n_ctx": 1024, "n_batch": 128, "n_ubatch": 128}
"""Batches that hold no whole input."""


@named_cases(
    ("an embedder", "bert", {}, "--embedding"),
    ("a reranker", "ranker", {}, "--rerank"),
    ("a causal model without a pooling", "dense", {"embedding": True, **SPLIT}, "--embedding"),
    ("a causal model that ranks", "dense", {"reranking": True, **SPLIT}, "--rerank"),
    ("a mean of a causal model", "dense", {"embedding": True, "pooling_type": "mean", "n_ctx": 1024}, "--embedding"),
)
def test_an_input_as_long_as_the_context_is_read(
    name: str, words: dict[str, Any], option: str, models: dict[str, Path], server: Path
) -> None:
    plan = fitter.fit(models[name], program=SERVER, devices=["none"], **words)
    assert option in plan.arguments() and not any("refused" in note for note in plan.notes)
    assert [later.kind for later in plan.later] == ["logits"], "it keeps no prompt"
    n_ctx = plan.params.n_ctx
    with running_server.running([str(server), "-m", str(models[name]), *plan.arguments()], SECONDS) as running:

        def ask(tokens: int) -> tuple[int, int]:
            """Send so many tokens; return the status, and the tokens that the server counts."""
            words: dict[str, Any] = {"input": [300] * tokens}
            if option == "--rerank":
                words = {"query": "ba", "documents": ["ba" * tokens]}
            status, answer = running.ask("POST", f"/v1/{path}", words, SECONDS)
            return status, answer["usage"]["prompt_tokens"] if status == 200 else 0

        path = "embeddings" if option == "--embedding" else "rerank"
        _, beside = ask(0 if option == "--rerank" else 1)
        # an input in several batches leaves room for an answer
        longest = n_ctx - 1 if plan.params.n_ubatch < n_ctx else n_ctx
        text = longest - beside if option == "--rerank" else longest
        assert n_ctx == 1024
        assert ask(text) == (200, longest)
        assert ask(text + 1)[0] != 200
    verified = plan.verify(program=SERVER, server=server, prompts=2)
    assert verified.holds and not verified.differences


# --- predicted and real


@named_cases(
    ("dense", "dense", {"n_seq_max": 4}),
    ("dense, one cache", "dense", {}),
    ("experts", "moe", {"n_seq_max": 4}),
    ("sliding windows", "swa", {"n_seq_max": 4}),
    ("recurrent states", "hybrid", {"n_seq_max": 4}),
)
def test_forty_prompts_on_four_slots_keep_the_planned_bytes(
    name: str, options: dict[str, Any], models: dict[str, Path], server: Path
) -> None:
    plan = fitter.fit(models[name], program=SERVER, n_ctx=2048, devices=["none"], **SMALL, **options)
    steps: list[fitter.Progress] = []
    found = fitter.verify(plan=plan, program=SERVER, server=server, on_progress=steps.append)
    check(plan, found)
    assert found.server is not None
    assert (found.server.answered, found.server.prompts, found.server.slots) == (40, 40, 4)
    assert (steps[-1].text, steps[-1].part) == ("40 of 40 prompts answered", 1.0)
    (grown,) = found.server.growth
    assert (grown.name, grown.requests + 20 <= 40, grown.seconds >= 3) == ("host", True, True)
    assert grown.first > 0 and grown.second < 8 * MIB and grown.idle < MIB
    later = {use.kind: use for use in found.server.later}
    assert set(later) == {"prompt", "prompt cache", *(["checkpoint"] if name in ("swa", "hybrid") else [])}
    assert is_as_predicted(later["prompt"])
    if "checkpoint" in later:
        assert later["checkpoint"].count >= 40 and is_as_predicted(later["checkpoint"])


def test_on_an_rpc_server(models: dict[str, Path], server: Path) -> None:
    with RpcServer() as remote:
        # short prompts do not touch all of a buffer for scores
        words: dict[str, Any] = {"n_ctx": 2048, "rpc": [remote.address], "n_gpu_layers": 3, "flash_attn": "on"}
        plan = fitter.fit(models["moe"], program=SERVER, **words, **SMALL)
        found = fitter.verify(plan=plan, program=SERVER, server=server)
    check(plan, found)
    on_it = [row.real for row in found.rows if row.real.device == "RPC0"]
    assert sum(row.context for row in on_it) > 0 and sum(row.compute for row in on_it) > 0
    assert [use.name for use in found.memory] == ["host"]
    assert found.server is not None and found.server.answered == 40


@pytest.mark.llama_cpp
@cases("swa", "hybrid")
def test_an_older_server(name: str, models: dict[str, Path]) -> None:
    build = fetched("b10434")
    options: dict[str, Any] = {"n_ctx": 2048, "n_seq_max": 4, "devices": ["none"], **SMALL}
    plan = fitter.fit(models[name], program=SERVER, llama_cpp=build, **options)
    found = fitter.verify(plan=plan, program=SERVER, llama_cpp=build, prompts=12)
    check(plan, found)
    assert found.server is not None and (found.server.answered, found.server.path) == (12, str(build / SERVER))
    assert {use.kind for use in found.server.later if is_as_predicted(use)} >= {"checkpoint", "prompt"}


def check(plan: Plan, found: Verification) -> None:
    """All that the log says is what the plan says, and the process has what is counted."""
    assert found.holds and not found.differences
    assert {row.real.buffer_type for row in found.rows} == {row.buffer_type for row in plan.breakdown.rows if row.used}
    for row in found.rows:
        rounding = row.rounding
        assert rounding is not None and max(rounding.model, rounding.context, rounding.compute) <= 3 * MIB / 200
        assert set(row.unsaid) <= ({"model"} if row.real.is_host else set()), "only mapped weights are not known"
    use = found.server
    assert use is not None and not use.refused
    assert use.own is not None and use.planned is not None
    assert use.own <= use.planned
    assert 0 <= use.own - use.counted + MIB <= OF_ITS_CODE


def is_as_predicted(use: LaterUse) -> bool:
    if use.predicted is None or use.real is None:
        return False
    # a prompt's checkpoints may be of fewer tokens, and then smaller
    is_less = use.kind == "prompt" and 0 <= use.predicted - use.real <= use.predicted // 100
    return is_less or abs(use.predicted - use.real) <= use.rounding


def test_with_two_gib_less_the_printed_cache_holds(models: dict[str, Path], server: Path) -> None:
    options: dict[str, Any] = {"n_ctx": 1024, "n_seq_max": 4, "devices": ["none"], "type_k": "f32", "type_v": "f32"}
    plan = fitter.fit(models["wide"], program=SERVER, host_memory="8GiB", **options)
    load = plan.host.used - plan.host.later
    memory = load + plan.host.margin + 96 * MIB
    before = fitter.fit(models["wide"], program=SERVER, host_memory=memory + 2048 * MIB, **options)
    plan = fitter.fit(models["wide"], program=SERVER, host_memory=memory, **options)
    caches = [int(each.arguments()[each.arguments().index("-cram") + 1]) for each in (before, plan)]
    assert 90 <= caches[1] <= 96 and caches[0] - caches[1] == 2048
    found = fitter.verify(plan=plan, program=SERVER, server=server)
    use = found.server
    assert found.holds and use is not None and use.own is not None
    (cache,) = (each for each in use.later if each.kind == "prompt cache")
    assert cache.real is not None and cache.most == caches[1] * MIB
    assert cache.most - 16 * MIB < cache.real <= cache.most, "it is full"
    assert use.own <= memory - plan.host.margin + OF_ITS_CODE and use.own > cache.most


# --- the command


def test_the_table_of_the_server_on_the_path(
    models: dict[str, Path], server: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{server.parent}{os.pathsep}{os.environ['PATH']}")
    words = ("--for", SERVER, "-c", 2048, "-np", 2, "-dev", "none", "-cram", 256, "--prompts", 6)
    done = command("verify", models["hybrid"], *words)
    assert (done.status, done.err) == (0, "")
    lines = done.out.splitlines()
    assert lines[0].endswith(", loaded by") and lines[1].startswith(f"{server} ")
    assert any(re.match(r"CPU context +2,[\d,]+ +2,[\d,]+ ± 10,486$", line) for line in lines)
    assert any(line.startswith("6 of 6 prompts answered, ") and line.endswith(" tokens, 2 at a time") for line in lines)
    assert any(re.match(r"a context checkpoint of \d+ tokens +12,412 +12,583 ± 525 +12,412$", line) for line in lines)
    assert any(line.startswith("MiB of its process") for line in lines)
    assert lines[-1] == "as predicted, as far as its log says it"


def test_json_of_a_plan_file(plan_file: Path, server: Path, command: Command) -> None:
    done = command("verify", "--plan", plan_file, "--for", SERVER, "--server", server.parent, "--prompts", 4, "--json")
    assert (done.status, done.err) == (0, "")
    document = done.document
    use = document["server"]
    assert (use["path"], use["prompts"], use["answered"], use["slots"]) == (str(server), 4, 4, 2)
    assert [each["kind"] for each in use["later"]] == ["prompt", "prompt cache"]
    assert use["resident"] > use["of_files"] > 0
    (cpu,) = (row for row in document["memory"] if row["buffer_type"] == "CPU")
    assert cpu["real"]["model"] is None and cpu["real"]["context"] > 0


@cases(("context", (), 4), ("compute", ("--tolerance", "16KiB"), 0))
def test_what_exceeds_the_plan_fails(
    kind: str,
    words: tuple[str, ...],
    status: int,
    plan_file: Path,
    server: Path,
    command: Command,
    tmp_path: Path,
) -> None:
    document = json.loads(plan_file.read_text())
    row = next(row for row in document["memory"] if row["buffer_type"] == "CPU")
    row["reserved" if kind == "compute" else kind] -= 8192
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(document))
    done = command("verify", "--plan", path, "--for", SERVER, "--server", server, "--prompts", 1, *words)
    assert done.status == status, done.err
    said = "more than predicted" if status else "within the tolerance"
    assert re.match(rf"{said}.*CPU {kind} \+\d,\d\d\d bytes$", done.out.splitlines()[-1])


def test_a_checkpoint_that_exceeds_the_plan_fails(models: dict[str, Path], server: Path) -> None:
    plan = fitter.fit(models["hybrid"], program=SERVER, n_ctx=1024, n_seq_max=2, devices=["none"], **SMALL)
    smaller = tuple(replace(each, each=each.each - 4096) for each in plan.later)
    found = fitter.verify(plan=replace(plan, later=smaller), program=SERVER, server=server, prompts=2)
    assert not found.holds and [use.kind for use in found.exceeding_later] == ["checkpoint"]
    assert not found.exceeding


# --- what cannot be verified


@pytest.fixture
def fake(tmp_path: Path, server: Path) -> Callable[[str], Path]:
    """A llama-server that does as it is told: Python that runs after ``words`` and ``port`` are set."""
    version = subprocess.run([server, "--version"], capture_output=True, text=True, check=True)
    said = (version.stdout + version.stderr).splitlines()[0]

    def make(code: str, version: str = said) -> Path:
        path = tmp_path / SERVER
        path.write_text(
            f"#!{sys.executable}\nimport sys, time\nwords = sys.argv[1:]\n"
            f"if '--version' in words:\n    print({version!r})\n    sys.exit()\n"
            f"port, alias = (words[words.index(name) + 1] for name in ('--port', '--alias'))\n{code}"
        )
        path.chmod(0o755)
        return path

    return make


SERVES = """
import http.server, json
class Handler(http.server.BaseHTTPRequestHandler):
    def answer(self, document, status=200):
        text = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)
    def do_GET(self):
        self.answer({"data": [{"id": alias}]} if self.path == "/v1/models" else {"status": "ok"})
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        ANSWER
    def log_message(self, *words):
        pass
http.server.ThreadingHTTPServer(("127.0.0.1", int(port)), Handler).serve_forever()
"""


TAKES = """
import threading
held = []
def take():
    while True:
        held.append(b"x" * 2**20)
        time.sleep(0.01)
threading.Thread(target=take, daemon=True).start()
"""


def verify(plan_file: Path, server: Path | None, **options: Any) -> Verification:
    return fitter.verify(plan=plan_file, program=SERVER, server=server, **options)


def test_a_server_that_says_nothing_and_takes_memory(plan_file: Path, fake: Callable[[str], Path]) -> None:
    found = verify(plan_file, fake(TAKES + SERVES.replace("ANSWER", "self.answer({})")), prompts=5)
    (host,) = found.server.growth if found.server is not None else ()
    assert host.idle > 0 and host.seconds >= 0.2
    assert found.holds and found.server is not None and found.server.answered == 5
    assert all(set(row.unsaid) == {"model", "context", "compute"} for row in found.rows)
    assert [(use.kind, use.real) for use in found.server.later] == [("prompt cache", None)]


NO_ROOM = """\
print('0.00.001.000 E srv  load_model: failed to load model, x')
print('0.00.001.001 E llama_model_load: error loading model: no room for a tensor')
sys.exit(1)"""
REFUSES = SERVES.replace("ANSWER", "self.answer({'error': {'message': 'no room for so many tokens'}}, 500)")
ABORTS = SERVES.replace("ANSWER", "print('GGML_ASSERT(false) failed', flush=True); import os; os._exit(134)")
NO_PORT = "print('srv start: couldn\\'t bind HTTP server socket, hostname: 127.0.0.1')\nsys.exit(1)"


@named_cases(
    ("ends while it loads", NO_ROOM, "ended before it had loaded the model (exit status 1): no room for a tensor"),
    ("refuses prompts", REFUSES, "answered none of 9 prompts: no room for so many tokens"),
    (
        "ends in between",
        ABORTS,
        "ended while it answered prompts, 0 of 9 (exit status 134): GGML_ASSERT(false) failed",
    ),
    (
        "never has its port",
        NO_PORT,
        "got no port of its own: another program took 3 free ones before it, last PORT; try again",
    ),
)
def test_a_server_that_fails(
    code: str, message: str, plan_file: Path, fake: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_requests, "SECONDS", SECONDS)
    kind = LlamaCppCrashError if message.startswith("ended") else LlamaCppError
    text = re.escape(f"llama-server {message}").replace("PORT", r"\d+")
    with pytest.raises(kind, match=rf"\A[^\n]*{text}\Z") as caught:
        verify(plan_file, fake(code), prompts=9)
    assert type(caught.value) is kind


def test_a_server_that_hangs(plan_file: Path, fake: Callable[[str], Path]) -> None:
    def attempt(seconds: float) -> None:
        said = f"llama-server has not loaded the model within {seconds:g} seconds: give it more with --timeout$"
        with pytest.raises(LlamaCppError, match=said):
            verify(plan_file, fake("time.sleep(600)"), timeout=seconds)

    with_more_time(attempt, 2, 8, 30)


def test_a_server_that_never_answers(
    plan_file: Path, fake: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_requests, "SECONDS", 1.0)
    said = "llama-server answered none of 1 prompts: the time for them was over; give it more with more of --prompts$"
    with pytest.raises(LlamaCppError, match=said):
        verify(plan_file, fake(SERVES.replace("ANSWER", "time.sleep(600 * (self.path == '/completion'))")), prompts=1)


def test_a_server_that_does_not_start(plan_file: Path, fake: Callable[..., Path], tmp_path: Path) -> None:
    programs = {"plain": b"x", "foreign": b"\x7fELF\x02\x01\x01" + bytes(57), "silent": b"#!/bin/sh\nexit 0\n"}
    for name, content in programs.items():
        (tmp_path / name).write_bytes(content)
        (tmp_path / name).chmod(0o644 if name == "plain" else 0o755)
    fake("", "version: 1 (abcdef0)")
    for name, error, message in (
        ("plain", LibraryError, r"plain is not executable: chmod \+x it, or name another llama-server"),
        ("foreign", LibraryError, "foreign cannot be started \\(exec format error\\): name a"),
        ("silent", PlanError, "silent does not say its version, .* is it a llama-server[?] Name one"),
        (SERVER, PlanError, r"made with llama.cpp .*, and .*llama-server is 1 \(abcdef0\), which may"),
    ):
        with pytest.raises(error, match=message) as caught:
            verify(plan_file, tmp_path / name)
        assert "\n" not in str(caught.value), name


class OtherServer(BaseHTTPRequestHandler):
    """A server that is ready, and no llama-server."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"data": [{"id": "another"}]}')

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def taken(is_answered: bool) -> Iterator[int]:
    """A port that another program listens on, which answers or does not."""
    if not is_answered:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            yield listener.getsockname()[1]
        return
    with ThreadingHTTPServer(("127.0.0.1", 0), OtherServer) as other:
        threading.Thread(target=other.serve_forever, daemon=True).start()
        yield other.server_port
        other.shutdown()


@named_cases(("silent", False), ("answers", True))
def test_a_port_that_is_taken_meanwhile(
    is_answered: bool, plan_file: Path, server: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with taken(is_answered) as port:
        ports = [port, free_port()]
        monkeypatch.setattr(running_server, "free_port", lambda: ports.pop(0))
        found = verify(plan_file, server, prompts=2)
    assert found.holds and not ports
    assert found.server is not None and found.server.answered == 2


# --- nothing is left


def test_a_server_that_is_killed_while_it_answers(plan_file: Path, server: Path) -> None:
    def kill(step: Progress) -> None:
        if step.text.startswith("sending"):
            (found,) = (each for each in running_servers() if "supervisor" not in words_of(each))
            found.kill()

    said = r"llama-server ended while it answered prompts, \d of 40 \(signal 9\)"
    with pytest.raises(LlamaCppCrashError, match=said):
        verify(plan_file, server, on_progress=kill)


@contextmanager
def at_work(plan_file: Path, server: Path) -> Iterator[tuple[subprocess.Popen[str], list[psutil.Process]]]:
    """A command that has started its llama-server, with all processes that it has."""
    words = ["verify", "--plan", str(plan_file), "--for", SERVER, "--server", str(server), "--prompts", "5000"]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen([sys.executable, "-m", "fitter", *words], start_new_session=True, **pipes)
    with process:
        try:
            yield process, processes_of(process)
        finally:
            if process.poll() is None:
                process.kill()


def processes_of(process: subprocess.Popen[str]) -> list[psutil.Process]:
    end = time.monotonic() + SECONDS
    while process.poll() is None and time.monotonic() < end:
        found = psutil.Process(process.pid).children(recursive=True)
        # not the one that is asked for its version
        # a process may end while it is looked at
        if any(SERVER in said.split()[0] and "--alias" in said for each in found if (said := words_of(each)).strip()):
            return found
        time.sleep(0.01)
    raise AssertionError(f"it has no llama-server: {process.communicate()}")


def test_an_interrupt_ends_the_server(plan_file: Path, server: Path) -> None:
    with at_work(plan_file, server) as (process, others):
        time.sleep(0.3)
        os.killpg(process.pid, signal.SIGINT)
        said, warned = process.communicate(timeout=SECONDS)
        assert (process.returncode, said) == (130, "") and "rror" not in warned
        assert all_end(others)


@cases(signal.SIGKILL, signal.SIGTERM)
def test_a_killed_command_leaves_no_server(number: signal.Signals, plan_file: Path, server: Path) -> None:
    with at_work(plan_file, server) as (process, others):
        process.send_signal(number)
        process.wait()
        assert all_end(others)


def test_a_killed_attendant_leaves_no_server(plan_file: Path, server: Path) -> None:
    with at_work(plan_file, server) as (process, others):
        (attendant,) = (each for each in others if "fitter.llama.processes.supervisor" in words_of(each))
        attendant.kill()
        _, warned = process.communicate(timeout=SECONDS)
        # before or after it has said that it has started the server
        said = ("llama-server ended", "llama-server cannot be started (what was to start it was killed)")
        assert process.returncode == 3 and any(each in warned for each in said) and len(warned.splitlines()) == 1
        assert all_end(others)
