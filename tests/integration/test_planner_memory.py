"""Planning takes the same memory of this machine whatever the plan is; and contexts that Vulkan refuses."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

import fitter
from fitter.errors import LlamaCppCrashError, TimeLimitError, UsageError
from fitter.llama.client import Worker
from fitter.llama.types import Breakdown, Params, VirtualDevice
from fitter.llama.worker.process import Process
from tests.support.cases import cases, named_cases
from tools.models import shapes

GIB, MIB = 2**30, 2**20
MOST = 250 * MIB
"""The most memory of a worker that plans."""


@pytest.fixture(scope="module")
def recurrent(directory: Path) -> Path:
    return shapes.write("nemotron-h-9b", directory, vocab=False)


@pytest.fixture
def peaks(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The most memory that each worker took at once, once it has ended, in bytes."""
    found: list[int] = []
    close, kill = Process.close, Process.kill

    def noted_close(process: Process) -> None:
        found.append(peak_of(process.pid))
        close(process)

    def noted_kill(process: Process, patience: float = 0.0) -> bytes:
        found.append(peak_of(process.pid))
        return kill(process, patience)

    monkeypatch.setattr(Process, "close", noted_close)
    monkeypatch.setattr(Process, "kill", noted_kill)
    # it ends by itself otherwise, and takes its figures along
    monkeypatch.setattr(Worker, "dismiss", lambda worker: None)
    yield found


def peak_of(pid: int | None) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    found = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert found is not None
    return int(found[1]) * 1024


def cards(count: int, gib: int, profile: str = "vulkan") -> tuple[VirtualDevice, ...]:
    return tuple(VirtualDevice(f"V{i}", "Card", profile, 0, gib * GIB, gib * GIB) for i in range(count))


@named_cases(
    ("256 sequences", Params(n_ctx=65536, n_seq_max=256, devices=())),
    ("-nkvo", Params(n_ctx=65536, n_seq_max=256, offload_kqv=False)),
    ("snapshots", Params(n_ctx=65536, n_seq_max=16, n_rs_seq=3, devices=())),
)
def test_recurrent_states_in_host_memory_take_none_of_it(params: Params, recurrent: Path) -> None:
    with Worker(cards(1, 2000, "cuda")) as worker:
        found = worker.measure(recurrent, params, reserve=True)
        assert found.host.context > 4 * GIB
        assert peak_of(worker.pid) < MOST


def test_a_fit_with_states_on_the_host(recurrent: Path, peaks: list[int]) -> None:
    plan = fitter.fit(recurrent, gpus=["none"], n_ctx=16384, n_seq_max=32)
    assert plan.fits and plan.host.context > 4 * GIB
    assert len(peaks) == 1 and max(peaks) < MOST


@cases(
    ("vulkan", 0xFFFFFFFC),
    ("vulkan-nvidia", 0xFFFFFFFE),
    ("vulkan-lavapipe", 2**27),
    ("cuda", None),
    ("rocm", None),
    ("metal", None),
)
def test_the_largest_tensor_of_a_device(profile: str, largest: int | None) -> None:
    device = VirtualDevice("V0", "Card", profile, 890 if profile == "cuda" else 0, 24 * GIB, 24 * GIB)
    if profile == "rocm":
        device = replace(device, compute_capability=0x1001100)
    with Worker([device]) as worker:
        assert [found.largest_tensor for found in worker.devices()] == [largest]


@named_cases(
    ("70B, 32 sequences", "llama-3.1-70b", "8x vulkan:128GiB", 32),
    ("qwen3-next, 16 sequences", "qwen3-next-80b-a3b", "4x vulkan:24GiB", 16),
    ("10 million tokens", "8b-10m", "4x vulkan:128GiB", 1),
    ("states", "nemotron-h-9b", "2x vulkan:48GiB", 256),
)
def test_vulkan_gets_the_largest_context_that_it_takes(
    name: str, gpu: str, n_seq_max: int, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "8b-10m":
        model = directory / "8b-10m.gguf"
        shape = shapes.SHAPES["llama-3.1-8b"]
        if not model.exists():
            long = replace(shape, metadata={**shape.metadata, ".context_length": 10 * 2**20})
            shapes.write_shape(long, model, vocab=False)
    else:
        model = shapes.write(name, directory, vocab=False)

    def no_crash(*_: object) -> None:
        raise AssertionError("llama.cpp has crashed")

    monkeypatch.setattr("fitter.llama.client.LlamaCppCrashError", no_crash)
    plan = fitter.fit(model, gpus=[gpu], n_seq_max=n_seq_max)
    assert plan.fits
    monkeypatch.undo()
    if plan.params.tensor_buft_overrides or plan.params.n_ctx < 2 * 10**6:
        # it is memory that ends there
        return
    with pytest.raises(LlamaCppCrashError, match="pre-allocated tensor"):
        fitter.measure(
            model,
            gpus=[gpu],
            devices=plan.params.devices,
            n_ctx=plan.params.n_ctx + 256 * n_seq_max,
            n_seq_max=n_seq_max,
        )


def test_a_fixed_context_that_vulkan_refuses(directory: Path) -> None:
    model = shapes.write("llama-3.1-70b", directory, vocab=False)
    plan = fitter.fit(model, gpus=["8x vulkan:128GiB"], n_ctx=4 * 2**20, n_seq_max=32)
    assert not plan.fits
    assert plan.problems[0].message.startswith(
        "Vulkan0 cannot use a tensor of more than 4095 MiB, but at a context of 4194304"
    )
    widest = re.search(r"use -c (\d+) or less", plan.problems[0].message)
    assert widest is not None
    assert fitter.fit(model, gpus=["8x vulkan:128GiB"], n_ctx=int(widest[1]), n_seq_max=32).fits
    assert fitter.fit(model, gpus=["8x vulkan:128GiB"], n_ctx=4 * 2**20, n_seq_max=32, offload_kqv=False).fits


def test_a_context_of_many_sequences_that_no_memory_holds_is_not_loaded(directory: Path, peaks: list[int]) -> None:
    """At the model's own context for each of 256 sequences, llama.cpp's list of cells alone has gigabytes."""
    model = shapes.write("qwen3-next-80b-a3b", directory, vocab=False)
    plan = fitter.fit(model, gpus=["6x rx-7900-xtx:free=23592MiB"], n_seq_max=256, margin="1GiB")
    assert plan.fits and plan.params.n_ctx == 2490368
    assert max(peaks) < 2 * MOST


@pytest.mark.skipif(sys.platform != "linux", reason="llama.cpp allocates them by itself elsewhere")
@named_cases(
    ("one sequence", Params(n_ctx=10 * 2**20)),
    ("one cache for 64", Params(n_ctx=16 * 2**20, n_seq_max=64, kv_unified=True, offload_kqv=False)),
)
def test_cells_of_a_huge_cache_take_no_memory(params: Params, directory: Path) -> None:
    """52 bytes a token, of which 4 stay. They are mapped many times, so that it is the share of each that counts."""
    model = shapes.write("llama-3.1-8b", directory, vocab=False)
    with Worker(cards(1, 5000, "cuda")) as worker:
        small = worker.measure(model, replace(params, n_ctx=params.n_ctx // 64, n_seq_max=1))
        taken = [share_of(worker)]
        with ThreadPoolExecutor(1) as asking:
            measuring = asking.submit(worker.measure, model, params)
            while not measuring.done():
                taken.append(share_of(worker))
        large = measuring.result()
    assert max(taken) < 130 * MIB
    assert 52 * params.n_ctx > 500 * MIB

    def caches(found: Breakdown) -> int:
        return sum(row.context for row in found.rows)

    assert caches(large) == 64 * caches(small)


def share_of(worker: Worker) -> int:
    rollup = Path(f"/proc/{worker.pid}/smaps_rollup").read_text()
    found = re.search(r"^Pss:\s+(\d+) kB", rollup, re.M)
    assert found is not None
    return int(found[1]) * 1024


def test_the_time_limit_of_a_whole_fit(directory: Path) -> None:
    model = shapes.write("llama-3.1-8b", directory, vocab=False)
    with pytest.raises(TimeLimitError, match="time limit") as caught:
        fitter.fit(model, gpus=["16GiB"], time_limit=0.001)
    assert "\n" not in str(caught.value) and caught.value.exit_code == 3
    with Worker() as worker:
        with pytest.raises(TimeLimitError, match=r"^no plan was found within the time limit"):
            fitter.fit(model, gpus=["16GiB"], time_limit=0.001, worker=worker)
        # a worker that is given is as it was before
        plan = fitter.fit(model, gpus=["16GiB"], worker=worker)
    assert plan.fits and not plan.search.is_cut_short
    assert fitter.fit(model, gpus=["16GiB"], time_limit=100).params == plan.params
    with pytest.raises(UsageError, match=r"a time limit of 0.* seconds is too short"):
        fitter.fit(model, gpus=["16GiB"], time_limit=0)
