"""The worker process: what it answers, and that nothing that happens to it happens to its parent."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import psutil
import pytest

import fitter
from fitter.errors import (
    FitterError,
    LibraryError,
    LlamaCppCrashError,
    LlamaCppError,
    TimeLimitError,
    UsageError,
    WorkerError,
)
from fitter.llama.client import Worker
from fitter.llama.header.read_header import MOST_TEXT
from fitter.llama.processes import memory_limit
from fitter.llama.types import Array, Params, VirtualDevice
from tests.support.cases import cases, named_cases
from tests.support.patience import SECONDS, is_running, until, with_more_time
from tools.comparisons.cuda_reference import write_model

CARD = VirtualDevice("CUDA0", "Card", "cuda", 890, 24 * 2**30, 24 * 2**30)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model("llama31-8b", tmp_path_factory.mktemp("models"))


@pytest.fixture
def worker() -> Iterator[Worker]:
    with Worker([CARD]) as started:
        yield started


def children() -> set[int]:
    """Process ids of this process's children, dead ones that nobody waited for included."""
    return {child.pid for child in psutil.Process().children()}


def open_files() -> Counter[str]:
    found = Counter[str]()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found[os.readlink(f"/proc/self/fd/{fd}")] += 1
    return found


# --- answers


def test_another_context_of_the_same_model_loads_nothing(model: Path) -> None:
    lines: list[str] = []

    def loaded() -> list[str]:
        return [line for line in lines if "n_layer" in line]

    with Worker([CARD], on_log=lines.append) as worker:
        worker.measure(model, Params(n_ctx=512))
        assert loaded()
        lines.clear()
        larger = worker.measure(model, Params(n_ctx=1024))
        assert larger.n_ctx == 1024
        assert not loaded()
        worker.measure(model, Params(n_ctx=1024, n_gpu_layers=3))
        assert loaded()
        assert worker.dummy_loads == 2
        worker.measure(model, Params(n_ctx=1024, n_gpu_layers=99))
        worker.measure(model, Params(n_ctx=1024, n_gpu_layers=-1))
        assert worker.dummy_loads == 3, "all layers are all layers, however that is said"


def test_a_file_that_changes_is_loaded_again(worker: Worker, tmp_path: Path) -> None:
    path = write_model("llama31-8b", tmp_path)
    before = worker.model_info(path, Params())
    other = write_model("qwen3-30b-a3b", tmp_path)
    os.replace(other, path)
    after = worker.model_info(path, Params())
    assert (before.n_layer, before.n_expert, before.devices) == (32, 0, ("CUDA0",))
    assert (after.n_layer, after.n_expert) == (48, 128)
    assert worker.dummy_loads == 2


def test_the_context_of_the_training_is_the_default(worker: Worker, model: Path) -> None:
    info = worker.model_info(model, Params())
    breakdown = worker.measure(model, Params())
    assert breakdown.n_ctx == info.n_ctx_train == 131072
    assert breakdown.flash_attn is True
    assert breakdown.n_splits is not None
    assert worker.measure(model, Params(n_ctx=512, flash_attn="off")).flash_attn is False


def test_the_host(worker: Worker) -> None:
    host = worker.host()
    assert (host.name, host.type) == ("CPU", "cpu")
    assert host.total == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


VALUES: dict[str, tuple[str, Any, Any]] = {
    "number": ("uint32", 2**32 - 1, 2**32 - 1),
    "negative": ("int32", -7, -7),
    "real": ("float32", 0.5, 0.5),
    "flag": ("bool", True, True),
    "text": ("string", "grüße", "grüße"),
    "list": ("array", [1, -2, 3], Array("i32", 3, (1, -2, 3))),
    "flags": ("array", [True, False], Array("bool", 2, (True, False))),
    "reals": ("array", [0.5, 2.0], Array("f32", 2, (0.5, 2.0))),
    "names": ("array", ["x", "y"], Array("str", 2)),
    "limit": ("array", [*range(4096)], Array("i32", 4096, tuple(range(4096)))),
    "long": ("array", [*range(4097)], Array("i32", 4097)),
}
"""Of each kind of value: how gguf calls it, what is written, and what is read."""


def test_a_header(worker: Worker, tmp_path: Path) -> None:
    path = tmp_path / "header.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    for name, (kind, value, _) in VALUES.items():
        getattr(writer, f"add_{kind}")(name, value)
    writer.add_tensor_info("one", (3,), "float32", 12, gguf.GGMLQuantizationType.F32)
    writer.add_tensor_info("two", (5, 512), "uint8", 5 * 288, gguf.GGMLQuantizationType.Q4_K)
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_ti_data_to_file):
        write()
    writer.close()
    os.truncate(path, path.stat().st_size + 4096)
    header = worker.header(path)
    for name, (*_, expected) in VALUES.items():
        # 1 is equal to True
        assert repr(header.metadata[name]) == repr(expected), name
    tensors = [(t.name, t.type, t.shape, t.bytes) for t in header.tensors]
    assert tensors == [("one", "f32", (3,), 12), ("two", "q4_K", (512, 5), 5 * 288)]
    assert (header.version, header.alignment, header.data_offset % 32) == (3, 32, 0)


@named_cases(("all that is read", 0), ("a byte more", 1))
def test_long_texts_of_a_header(more: int, worker: Worker, tmp_path: Path) -> None:
    architecture, last = "llama", "é"
    writer = gguf.GGUFWriter(tmp_path / "long.gguf", architecture)
    writer.add_string("x.long", "x" * (MOST_TEXT - len(architecture) - len(last.encode()) + more))
    writer.add_string("x.last", last)
    writer.add_string("x.none", "more")
    writer.add_tensor("t", np.zeros(32, np.float32))
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write()
    writer.close()
    found = worker.header(tmp_path / "long.gguf").metadata
    assert (found["x.last"], found["x.none"]) == (last if not more else "\ufffd", "")


def test_a_model_that_llama_cpp_refuses(worker: Worker, tmp_path: Path, model: Path) -> None:
    path = tmp_path / "foo.gguf"
    with model.open("rb") as file:
        head = file.read(100_000)
    path.write_bytes(head.replace(b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0foooo", 1))
    os.truncate(path, model.stat().st_size)
    with pytest.raises(LlamaCppError) as caught:
        worker.measure(path, Params())
    assert str(caught.value) == f"{path}: unknown model architecture: 'foooo'"
    assert any("failed to load model" in line for line in caught.value.log)
    assert worker.measure(model, Params(n_ctx=512)).n_ctx == 512


@named_cases(
    ("part of a name", ["ffn"], 0),
    ("the first one decides", ["blk", "ffn"], 0),
    ("a later one", ["attn", r"\.ffn_(up|gate)_exps\.", "ffn"], 1),
    ("anchored", [r"^ffn", r"weight$"], 1),
    ("alternatives of numbers", [r"blk\.(1[0-9]|20)\.", r"blk\.([0-9])\."], 1),
    ("none", ["attn", "output"], -1),
    ("no patterns", [], -1),
    ("empty pattern", [""], 0),
)
def test_which_pattern_a_tensor_matches(patterns: list[str], expected: int, worker: Worker) -> None:
    assert worker.match(patterns, ["blk.7.ffn_up_exps.weight"]) == (expected,)


@cases("(", "*")
def test_a_pattern_that_is_no_regular_expression(pattern: str, worker: Worker) -> None:
    worker.match([r"\.ffn_.*_exps\.", "x|y"], ())
    with pytest.raises(UsageError) as caught:
        worker.match(["fine", pattern], ())
    assert str(caught.value).startswith(f"pattern '{pattern}' is not a valid regular expression: ")


# --- what may happen


ENDED = "{} during 'host', and so did a new one: find out what ends it, such as a lack of memory, and try again"
NO_MEMORY = "ggml_aligned_malloc: insufficient memory (attempted to allocate 9 MB)"
OTHERS = "end other programs, and try again"
ASSERTS = r"os.write(2, b'x.cpp:7: GGML_ASSERT(n) failed\n'); os.abort()"
BAD_ALLOC = "from fitter.errors import LlamaCppError; raise LlamaCppError('std::bad_alloc')"
FATE: dict[str, tuple[str, type[FitterError], str]] = {
    "abort": ("os.abort()", LlamaCppCrashError, "was ended by SIGABRT during 'host'"),
    "segmentation fault": ("ctypes.string_at(0)", LlamaCppCrashError, "was ended by SIGSEGV during 'host'"),
    "assertion": (
        ASSERTS,
        LlamaCppCrashError,
        "was ended by SIGABRT during 'host': x.cpp:7: GGML_ASSERT(n) failed",
    ),
    "exit": ("os._exit(3)", WorkerError, ENDED.format("ended with status 3")),
    "killed": ("os.kill(os.getpid(), 9)", WorkerError, ENDED.format("was ended by SIGKILL")),
    "the signal of a fault, sent by another process": (
        "os.system(f'kill -SEGV {os.getpid()}')",
        WorkerError,
        ENDED.format("was ended by SIGSEGV"),
    ),
    "an assertion of one that has no memory": (
        f"os.write(2, b'{NO_MEMORY}\\n'); os.abort()",
        WorkerError,
        f"was ended by SIGABRT during 'host', and so did a new one: {NO_MEMORY}: {OTHERS}",
    ),
    "Python has no memory": (
        "raise MemoryError",
        WorkerError,
        f"ran out of memory (Cannot allocate memory): {OTHERS}",
    ),
    "llama.cpp has no memory": (BAD_ALLOC, WorkerError, f"ran out of memory (std::bad_alloc): {OTHERS}"),
}


@cases(FATE)
def test_a_worker_that_ends_twice_is_an_error_and_goes_on(
    code: str, kind: type[FitterError], message: str, sabotage: None, monkeypatch: pytest.MonkeyPatch, worker: Worker
) -> None:
    monkeypatch.setenv("SABOTAGE", code)
    before = children()
    with pytest.raises(FitterError) as caught:
        worker.host()
    process = "the process that runs " if "a new one" in message else ""
    assert (type(caught.value), str(caught.value)) == (kind, f"{process}llama.cpp {message}")
    assert children() <= before
    assert [device.name for device in worker.devices()] == ["CUDA0"]


@pytest.mark.parametrize("code", [FATE[name][0] for name in ("abort", "exit", "llama.cpp has no memory")])
def test_a_worker_that_ends_once_answers(
    sabotage: None, monkeypatch: pytest.MonkeyPatch, worker: Worker, tmp_path: Path, code: str
) -> None:
    whole = worker.host()
    ended = tmp_path / "ended"
    monkeypatch.setenv("SABOTAGE", f"if not os.path.exists({str(ended)!r}): open({str(ended)!r}, 'w'); {code}")
    worker.restart()
    assert worker.host() == whole
    assert ended.exists()


def test_two_ends_that_differ_say_nothing_about_the_question(
    sabotage: None, monkeypatch: pytest.MonkeyPatch, worker: Worker, tmp_path: Path
) -> None:
    ended = str(tmp_path / "ended")
    monkeypatch.setenv("SABOTAGE", f"os.abort() if os.path.exists({ended!r}) else [open({ended!r}, 'w'), os._exit(3)]")
    with pytest.raises(WorkerError, match="was ended by SIGABRT during 'host' once more: "):
        worker.host()


def test_a_new_process_has_the_environment_of_the_one_that_was_lost(
    sabotage: None, monkeypatch: pytest.MonkeyPatch, worker: Worker
) -> None:
    monkeypatch.setenv("SABOTAGE", "os._exit(3)")
    assert worker.devices()
    monkeypatch.delenv("SABOTAGE")
    with pytest.raises(WorkerError, match="ended with status 3 during 'host', and so did a new one: "):
        worker.host()
    assert worker.host().name == "CPU"


def test_one_that_is_dismissed_is_not_asked_again(sabotage: None, monkeypatch: pytest.MonkeyPatch) -> None:
    before = children()
    monkeypatch.setenv("SABOTAGE", "ctypes.CDLL(None).sleep(600)")
    with Worker([CARD]) as worker:
        assert worker.devices()
        asking = threading.Timer(0.5, worker.dismiss)
        asking.start()
        with pytest.raises(WorkerError, match="was ended by SIGKILL during 'host': "):
            worker.host()
        asking.join()
        assert children() <= before


def test_what_was_begun_is_asked_of_a_new_process(worker: Worker, model: Path) -> None:
    params = Params(n_ctx=1024)
    whole = worker.measure(model, params)
    assert worker.pid is not None
    os.kill(worker.pid, signal.SIGKILL)
    assert worker.measure(model, params) == whole
    worker.restart()
    worker.begin_tokenizer(model)
    worker.begin_tokenizer(model)
    assert worker.pid is not None
    os.kill(worker.pid, signal.SIGSTOP)
    os.kill(worker.pid, signal.SIGKILL)
    worker.finish_tokenizer()
    assert worker.measure(model, params) == whole


def test_a_worker_that_takes_too_much_memory(sabotage: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SABOTAGE", "import time; taken = bytearray(400 << 20); time.sleep(600)")
    monkeypatch.setenv(memory_limit.VARIABLE, "300MiB")
    with Worker([CARD]) as worker:
        assert worker.devices()
        allow = "check the model's file, or allow more with FITTER_MEMORY_LIMIT"
        with pytest.raises(WorkerError, match=rf"^planning takes more than 300 MiB of memory \(\d+ MiB\): {allow}$"):
            worker.host()


def test_a_context_that_llama_cpp_refuses(worker: Worker, model: Path) -> None:
    worker.measure(model, Params(n_ctx=512))
    with pytest.raises(LlamaCppError) as caught:
        worker.measure(model, Params(n_ctx=512, n_seq_max=100_000))
    assert "n_seq_max must be <= " in str(caught.value)


def test_a_hang_is_an_error(sabotage: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SABOTAGE", "ctypes.CDLL(None).pause()")
    before = children()

    def attempt(seconds: float) -> None:
        with Worker([CARD], timeout=seconds) as worker:
            assert worker.devices()
            started = time.monotonic()
            with pytest.raises(WorkerError, match=f"did not answer 'host' within {seconds:g} seconds"):
                worker.host()
            assert 0.9 * seconds < time.monotonic() - started < SECONDS
            assert children() <= before

    with_more_time(attempt, 2, 8, 30)


def test_a_deadline_ends_what_is_asked(sabotage: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SABOTAGE", "ctypes.CDLL(None).sleep(600)")
    with Worker([CARD]) as worker:
        assert worker.devices()
        started = time.monotonic()
        worker.deadline = started + 1
        said = r"^no plan was found within the time limit, which ended while asking for the host's memory: raise"
        with pytest.raises(TimeLimitError, match=said):
            worker.host()
        assert 0.9 < time.monotonic() - started < SECONDS
        worker.deadline = None
        monkeypatch.delenv("SABOTAGE")
        pid = worker.devices() and worker.pid
        worker.deadline = started + 1
        with pytest.raises(TimeLimitError, match="while listing the devices: "):
            worker.devices()
        assert worker.pid == pid, "what was not asked for is no reason to begin anew"


def test_a_short_question_is_answered_after_the_deadline(sabotage: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """To kill the process and start another takes longer; a long one is ended."""
    monkeypatch.setenv("SABOTAGE", "ctypes.CDLL(None).usleep(30000)")
    with Worker([CARD]) as worker:
        assert worker.devices()
        pid = worker.pid
        worker.deadline = time.monotonic() + 0.01
        assert worker.host()
        assert worker.pid == pid and time.monotonic() > worker.deadline
    monkeypatch.setenv("SABOTAGE", "ctypes.CDLL(None).sleep(600)")
    with Worker([CARD]) as worker:
        assert worker.devices()
        started = time.monotonic()
        worker.deadline = started + 0.01
        with pytest.raises(TimeLimitError, match="while asking for the host's memory"):
            worker.host()
        assert 0.2 < time.monotonic() - started < SECONDS


def test_a_start_after_the_deadline_is_of_use_later() -> None:
    with Worker([CARD]) as worker:
        worker.deadline = time.monotonic() + SECONDS
        worker.start()
        worker.deadline = time.monotonic()
        with pytest.raises(TimeLimitError, match=r"which ended while listing the devices: raise --time-limit$"):
            worker.devices()
        worker.deadline = None
        assert worker.devices()


def test_an_interrupt_ends_the_worker(sabotage: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SABOTAGE", "ctypes.CDLL(None).sleep(600)")
    before = children()
    with Worker() as worker:
        worker.devices()
        with pytest.raises(KeyboardInterrupt):
            threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
            worker.host()
        assert children() <= before


def test_an_interrupt_of_the_whole_group_is_the_parents_affair(worker: Worker) -> None:
    worker.devices()
    assert worker.pid is not None
    os.kill(worker.pid, signal.SIGINT)
    assert worker.devices()


@named_cases(("idle", False), ("in native code", True))
def test_the_worker_dies_with_its_parent(busy: bool, tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(
        "import sys, threading, time\n"
        f"sys.path[:] = {[entry for entry in sys.path if entry]!r}\n"
        "from fitter.llama import client; from fitter.llama.processes import interpreter\n"
        "start, _, rest = interpreter.BOOT.partition('from {module}')\n"
        "interpreter.BOOT = start + 'import ctypes; from fitter.llama.worker.worker import Commands; '"
        " + 'Commands.host = lambda self: ctypes.CDLL(None).sleep(600)\\nfrom {module}' + rest\n"
        "worker = client.Worker()\n"
        "worker.devices()\n"
        f"if {busy}: threading.Thread(target=worker.host, daemon=True).start(); time.sleep(0.5)\n"
        "print(worker.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        worker = psutil.Process(int(parent.stdout.readline()))
        assert is_running(worker)
        parent.kill()
    until(lambda: not is_running(worker), f"{worker} is still there")


def test_nothing_is_left_behind(model: Path) -> None:
    # what earlier tests have left to be collected, and their threads, may go meanwhile
    gc.collect()
    processes, files, threads = children(), open_files(), set(threading.enumerate())
    with Worker([CARD]) as worker:
        worker.measure(model, Params(n_ctx=512))
        assert children() - processes == {worker.pid}
    assert not children() - processes
    assert not open_files() - files
    assert not set(threading.enumerate()) - threads
    worker.close()
    with pytest.raises(LlamaCppError, match="closed"):
        worker.devices()


def test_what_native_code_prints_disturbs_nobody(sabotage: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SABOTAGE", "os.write(1, b'{}\\n' * 1000); raise RuntimeError('no such luck')")
    with Worker() as worker:
        with pytest.raises(WorkerError, match="host failed in the worker: RuntimeError: no such luck"):
            worker.host()
        worker.devices()


def test_a_library_that_is_not_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LLAMA_CPP_LIB_PATH", str(tmp_path))
    with Worker([CARD]) as worker, pytest.raises(LibraryError) as caught:
        worker.devices()
    assert f"libllama cannot be loaded from LLAMA_CPP_LIB_PATH={tmp_path}" in str(caught.value)


def _quiet(line: str) -> None:
    assert line


@named_cases(
    ("nothing said", {"timeout": 90.0}, {}, None),
    ("the same", {"timeout": 90.0, "on_log": _quiet}, {"timeout": 90, "on_log": _quiet}, None),
    ("another timeout", {"timeout": 90.0}, {"timeout": 60.0}, "timeout"),
    ("a log where the worker has none", {}, {"on_log": _quiet}, "on_log"),
    ("another log", {"on_log": _quiet}, {"on_log": print}, "on_log"),
)
def test_a_worker_that_is_given_keeps_its_timeout_and_log(
    own: dict[str, Any], given: dict[str, Any], refused: str | None, model: Path
) -> None:
    with Worker(**own) as worker:
        if refused is None:
            assert fitter.measure(model, gpus=["24GiB"], n_ctx=512, worker=worker, **given)
        else:
            with pytest.raises(UsageError, match=f"has its own {refused}: leave {refused} out of this call"):
                fitter.measure(model, gpus=["24GiB"], n_ctx=512, worker=worker, **given)
        assert (worker.timeout, worker.on_log) == (own.get("timeout", 120.0), own.get("on_log"))


@cases("asks", "closes", "asks while its parent waits")
def test_a_fork_leaves_the_process_of_its_parent_alone(how: str, model: Path) -> None:
    with Worker() as worker:
        build, pid = worker.build(), worker.pid
        if how.endswith("waits"):
            worker.begin_tokenizer(model)
        child = os.fork()
        if child == 0:
            status = 1
            try:
                if how != "closes":
                    assert worker.build() == build and worker.pid != pid
                worker.close()
                status = 0
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        if how.endswith("waits"):
            worker.finish_tokenizer()
        assert worker.build() == build and worker.pid == pid


def test_a_dismissed_worker_starts_no_other_process(model: Path) -> None:
    # a search goes on after some errors, and would go on loading after Ctrl-C
    with Worker() as worker:
        worker.measure(str(model), Params(n_ctx=512))
        worker.dismiss()
        for n_ctx in (1024, 2048):
            with pytest.raises(LlamaCppError, match="the worker is closed"):
                worker.measure(str(model), Params(n_ctx=n_ctx))
