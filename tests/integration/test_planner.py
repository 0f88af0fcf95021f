"""``fitter.Planner``: the answers of ``fitter.fit``, whatever was asked before, and no load twice."""

from __future__ import annotations

import os
import random
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

import fitter
from fitter.api.report_plan import beside
from fitter.errors import CancelledError, LlamaCppCrashError, ModelError, TimeLimitError, UsageError
from fitter.llama.client import Worker
from fitter.llama.types import Breakdown, Params, VirtualDevice
from fitter.llama.worker.process import Process
from fitter.machine import bandwidth
from fitter.planning.plan.plan import Search
from fitter.planning.request.request import Progress
from tests.support.cases import cases, named_cases, refused
from tests.support.patience import SECONDS, all_end, until
from tools.models import shapes
from tools.models.shapes import write, write_split
from tools.models.tiny import TINY_DENSE, TINY_MOE

MODEL = "qwen3-30b-a3b"


@pytest.fixture
def planner(model: Path) -> Iterator[fitter.Planner]:
    with fitter.Planner(model, gpus=["12GiB"]) as planner:
        yield planner


def timeless(plan: fitter.Plan) -> fitter.Plan:
    """The plan without what it took to find it."""
    search = replace(plan.search, dummy_loads=0, seconds=0.0)
    return replace(plan, search=search, fit_keywords={**plan.fit_keywords, "on_progress": None, "on_log": None})


DRAWN = 2


@pytest.mark.parametrize("gpus", [["12GiB"], ["8GiB", "6GiB"], ["rtx-5090"], ["none"]], ids=str)
def test_the_plans_are_those_of_fit(model: Path, gpus: list[str]) -> None:
    drawn = random.Random(str(gpus))

    def question() -> dict[str, Any]:
        every = {
            "n_ctx": drawn.randrange(512, 40960),
            "margin": drawn.randrange(3 * 2**30),
            "type_k": drawn.choice(["f16", "q8_0", "q4_0"]),
            "n_ubatch": drawn.choice([128, 512, 1024]),
            "allow": drawn.choice([["no-op-offload"], ["kv-q8_0"], ["context"]]),
            "objective": drawn.choice(["prompt", "generation", "context"]),
            "host_memory": drawn.choice(["8GiB", "64GiB"]),
        }
        return {name: value for name, value in every.items() if drawn.random() < 0.3}

    with fitter.Planner(model, gpus=gpus) as planner:
        for asked in [{}, *(question() for _ in range(DRAWN))]:
            plan, expected = planner.fit(**asked), fitter.fit(model, gpus=gpus, **asked)
            assert timeless(plan) == timeless(expected), asked
            assert plan.to_dict() | {"search": None} == expected.to_dict() | {"search": None}, asked


def test_nothing_is_loaded_twice(planner: fitter.Planner) -> None:
    first = planner.fit(n_ctx=8192)
    assert first.search.dummy_loads > 0
    planner.fit(n_ctx=16384)
    before = planner.dummy_loads
    assert timeless(planner.fit(n_ctx=8192)) == timeless(first)
    assert planner.dummy_loads == before


def test_a_question_overrides_what_holds_for_all(model: Path) -> None:
    with fitter.Planner(model, gpus=["12GiB"], n_ctx=8192, type_k="q8_0") as planner:
        assert planner.fit().params.n_ctx == 8192
        assert planner.fit(n_ctx=4096).params.type_k == "q8_0"
        assert planner.fit(type_k=None).params.type_k == "f16"
        assert planner.fit(gpus=["none"]).devices == ()
        # measure has no margin, and takes what it has
        assert planner.measure(n_gpu_layers=2) == fitter.measure(
            model, gpus=["12GiB"], n_ctx=8192, type_k="q8_0", n_gpu_layers=2
        )
        assert planner.estimate(n_ctx=4096) == fitter.estimate(model, gpus=["12GiB"], n_ctx=4096, type_k="q8_0")


def test_a_process_that_ended_is_started_again(planner: fitter.Planner, model: Path) -> None:
    planner.fit()
    workers = psutil.Process().children()
    assert workers
    for process in workers:
        os.kill(process.pid, signal.SIGKILL)
    plan = planner.fit(n_ctx=12288, margin="2GiB")
    assert timeless(plan) == timeless(fitter.fit(model, gpus=["12GiB"], n_ctx=12288, margin="2GiB"))


def test_a_file_that_has_changed_is_read_anew(tmp_path: Path, model: Path) -> None:
    path = tmp_path / "model.gguf"
    os.link(model, path)
    with fitter.Planner(path, gpus=["12GiB"]) as planner:
        assert planner.fit().model.name == "Qwen3 30B A3B"
        other = write("llama-3.1-8b", tmp_path, vocab=False)
        other.replace(path)
        plan = planner.fit()
        assert timeless(plan) == timeless(fitter.fit(path, gpus=["12GiB"]))
        assert plan.model.architecture == "llama"
        path.unlink()
        with pytest.raises(ModelError, match="no such file"):
            planner.fit()
        os.link(model, path)
        assert planner.fit().model.name == "Qwen3 30B A3B"


def test_any_file_of_a_split_model_is_looked_at(tmp_path: Path) -> None:
    path = write_split("llama-3.1-8b", tmp_path, 3, vocab=False)
    with fitter.Planner(path, gpus=["4GiB"]) as planner:
        first = planner.fit()
        last = sorted(tmp_path.iterdir())[-1]
        assert last != path
        os.utime(last, (1, 1))
        again = planner.fit()
        assert (again.params, again.breakdown) == (first.params, first.breakdown)
        # none of what was measured before is taken for what is there now; a second process may make some loads too many
        assert first.search.dummy_loads > 1 and abs(again.search.dummy_loads - first.search.dummy_loads) <= 3


def test_a_cancelled_question_ends_and_the_next_is_answered(planner: fitter.Planner) -> None:
    steps: list[str] = []

    def cancel(progress: Progress) -> None:
        steps.append(progress.text)
        planner.cancel()

    with pytest.raises(CancelledError, match=r"^the question was cancelled: ask it again$"):
        planner.fit(on_progress=cancel)
    assert len(steps) == 1
    assert planner.fit().fits


def test_a_stopped_process_is_killed_at_once(planner: fitter.Planner) -> None:
    others = psutil.Process().children()
    before = planner.fit(n_ctx=4096)
    processes = [child for child in psutil.Process().children() if child not in others]
    (process,) = processes
    process.suspend()
    ended: list[str] = []

    def ask() -> None:
        with pytest.raises(CancelledError, match=r"^the question was cancelled: ask it again$"):
            planner.fit(n_ctx=8192)
        ended.append("cancelled")

    asking = threading.Thread(target=ask)
    asking.start()
    until(lambda: planner.asked == 2)
    while asking.is_alive():
        planner.cancel(at_once=True)
        asking.join(0.1)
    assert ended == ["cancelled"] and all_end(processes)
    assert timeless(planner.fit(n_ctx=4096)) == timeless(before)


def test_those_that_wait_are_cancelled_too(planner: fitter.Planner) -> None:
    ended: list[str] = []
    is_asked, may_go_on = threading.Event(), threading.Event()

    def wait(_: Progress) -> None:
        is_asked.set()
        may_go_on.wait(SECONDS)

    def ask(name: str, **asked: Any) -> None:
        try:
            planner.fit(**asked)
            ended.append(f"{name} answered")
        except CancelledError:
            ended.append(f"{name} cancelled")

    threads = [threading.Thread(target=ask, args=("first",), kwargs={"on_progress": wait})]
    threads[0].start()
    assert is_asked.wait(SECONDS)
    threads.append(threading.Thread(target=ask, args=("second",), kwargs={"n_ctx": 8192}))
    threads[1].start()
    while planner.asked < 2:
        may_go_on.wait(0.01)
    planner.cancel()
    threads.append(threading.Thread(target=ask, args=("third",), kwargs={"n_ctx": 16384}))
    threads[2].start()
    may_go_on.set()
    for thread in threads:
        thread.join()
    assert sorted(ended) == ["first cancelled", "second cancelled", "third answered"]


def test_released_and_closed_it_leaves_no_process(model: Path) -> None:
    before = set(psutil.Process().children())
    planner = fitter.Planner(model, gpus=["12GiB"])
    plan = planner.fit()
    assert set(psutil.Process().children()) - before
    planner.release()
    assert set(psutil.Process().children()) <= before
    assert timeless(planner.fit()) == timeless(plan)
    planner.close()
    planner.close()
    assert set(psutil.Process().children()) <= before
    with pytest.raises(CancelledError, match=r"^the planner is closed: make another one$"):
        planner.fit()


def test_the_map_of_a_plan_is_that_of_its_report(planner: fitter.Planner) -> None:
    for words in ({"n_ctx": 8192}, {"gpus": ["6GiB", "5GiB"], "type_k": "q8_0"}):
        plan = planner.fit(**words)
        found = planner.layer_map(plan)
        assert found is not None
        assert found == beside(plan, with_contexts=False).layer_map
        loads = planner.dummy_loads
        assert (planner.layer_map(plan), planner.dummy_loads) == (found, loads)
    assert planner.layer_map(planner.fit(gpus=["2x 12GiB"], split_mode="tensor", flash_attn="on")) is None


@pytest.mark.skipif(not hasattr(os, "fork"), reason="nothing forks here")
def test_a_fork_has_a_planner_of_its_own_and_leaves_that_of_its_parent(planner: fitter.Planner, model: Path) -> None:
    first = planner.fit(n_ctx=8192)
    workers = {process.pid for process in psutil.Process().children()}
    child = os.fork()
    if child == 0:
        status = 1
        try:
            status = int(timeless(planner.fit(n_ctx=8192)) != timeless(first))
            planner.close()
        finally:
            os._exit(status)
    # both ask at the same time
    plan = planner.fit(n_ctx=12288)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert timeless(plan) == timeless(fitter.fit(model, gpus=["12GiB"], n_ctx=12288))
    assert {process.pid for process in psutil.Process().children()} == workers


@pytest.mark.parametrize(
    ("given", "said"),
    {
        "a worker": ({"worker": 1}, "a planner has its own worker: leave it out of a question"),
        "a timeout": (
            {"timeout": 5},
            "a planner has its own timeout: leave it out of a question, and give it to fitter.Planner",
        ),
        "a log": (
            {"on_log": print},
            "a planner has its own on_log: leave it out of a question, and give it to fitter.Planner",
        ),
    }.values(),
)
def test_what_holds_for_every_question_is_not_of_one(planner: fitter.Planner, given: dict[str, Any], said: str) -> None:
    for ask in (planner.fit, planner.measure, planner.estimate):
        with refused(UsageError, said):
            ask(**given)


def test_a_question_in_the_middle_of_another_one_is_refused(planner: fitter.Planner) -> None:
    said: list[str] = []

    def ask(_: Progress) -> None:
        for call in (planner.fit, planner.release):
            with pytest.raises(UsageError) as caught:
                call()
            said.append(str(caught.value))

    assert planner.fit(on_progress=ask).fits
    assert set(said) == {"a planner answers one question at a time: ask it after on_progress and on_log have returned"}


def test_it_may_be_closed_in_the_middle_of_a_question(model: Path) -> None:
    before = set(psutil.Process().children())
    planner = fitter.Planner(model, gpus=["12GiB"])
    with pytest.raises(CancelledError, match=r"^the planner is closed: make another one$"):
        planner.fit(on_progress=lambda _: planner.close())
    assert set(psutil.Process().children()) <= before


# --- planning takes the same memory of this machine whatever the plan is; and contexts that Vulkan refuses


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


# --- ``fitter.fit`` from several threads at once: the plans of one after the other, and no process left behind


FITS: dict[str, tuple[str, dict[str, Any]]] = {
    "large MoE, three unequal": ("qwen3-30b-a3b", {"gpus": ["8GiB", "6GiB", "4GiB"]}),
    "large dense, two": ("llama-3.1-8b", {"gpus": ["2x 4GiB"], "n_seq_max": 2}),
    "the same file, one of another size": ("llama-3.1-8b", {"gpus": ["7GiB"], "type_k": "q8_0", "type_v": "q8_0"}),
    "this machine": ("tiny moe", {"host_memory": "8GiB", "devices": ()}),
    "does not fit": ("tiny dense", {"gpus": ["2GiB"], "n_ctx": 4_000_000, "host_memory": "2GiB"}),
    "overrides": ("tiny moe", {"gpus": ["2GiB"], "override_tensor": ["ffn_down_exps=CPU"], "n_gpu_layers": 3}),
}


MODELS: dict[str, Any] = {name: name for name in ("qwen3-30b-a3b", "llama-3.1-8b")}
MODELS |= {TINY_MOE.name: TINY_MOE, TINY_DENSE.name: TINY_DENSE}


def _ignore(_: Progress) -> None:
    pass


def fit(models: dict[str, Path], name: str, on_progress: Callable[[Progress], None] = _ignore) -> fitter.Plan:
    """The plan, without how long it took to find."""
    model, options = FITS[name]
    plan = fitter.fit(models[model], on_progress=on_progress, **options)
    # a second process may have measured the plan early, or not
    return replace(plan, search=Search(0, 0.0))


def test_the_plans_are_those_of_one_after_the_other(models: dict[str, Path], tmp_path: Path) -> None:
    # the plan that measures the host's memory says so, and all later ones that it was kept
    bandwidth.host_speed()
    before = set(psutil.Process().children())
    alone = {name: fit(models, name) for name in FITS}
    assert len({str(plan) for plan in alone.values()}) == len(FITS), "no two are alike"
    assert not alone["does not fit"].fits

    everyone_is_at_it = threading.Barrier(len(FITS), timeout=SECONDS)
    workers: set[int] = set()

    def together(name: str) -> fitter.Plan:
        steps = 0

        def step(_: Progress) -> None:
            nonlocal steps
            steps += 1
            if steps == 1:
                everyone_is_at_it.wait()
                workers.add(len(set(psutil.Process().children()) - before))
                everyone_is_at_it.wait()

        plan = fit(models, name, step)
        assert steps
        return plan

    def fails() -> None:
        not_a_model = tmp_path / "no.gguf"
        not_a_model.write_bytes(b"no model")
        for _ in range(3):
            with pytest.raises(ModelError, match=r"no\.gguf"):
                fitter.fit(not_a_model, gpus=["8GiB"])

    with ThreadPoolExecutor(len(FITS) + 1) as pool:
        failing = pool.submit(fails)
        plans = dict(zip(FITS, pool.map(together, FITS), strict=True))
        failing.result()
    assert plans == alone
    assert max(workers) >= len(FITS), "each had a worker of its own at the same time"
    assert set(psutil.Process().children()) <= before


def test_an_interrupted_fit_disturbs_no_other(models: dict[str, Path]) -> None:
    """An error that ``on_progress`` raises ends its own fit, and its worker."""
    before = set(psutil.Process().children())
    name = "large MoE, three unequal"
    alone = fit(models, name)

    def stop(_: Progress) -> None:
        raise KeyboardInterrupt

    def interrupted() -> None:
        with pytest.raises(KeyboardInterrupt):
            fit(models, name, stop)

    with ThreadPoolExecutor(2) as pool:
        stopped = pool.submit(interrupted)
        assert fit(models, name) == alone
        stopped.result()
    assert set(psutil.Process().children()) <= before
