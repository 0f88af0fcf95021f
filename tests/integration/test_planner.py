"""``fitter.Planner``: the answers of ``fitter.fit``, whatever was asked before, and no load twice."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

import fitter
from fitter.api.report_plan import beside
from fitter.errors import CancelledError, ModelError, UsageError
from fitter.planning.request.request import Progress
from tests.support.patience import SECONDS, all_end, until
from tools.models.shapes import write, write_split

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
        with pytest.raises(UsageError) as caught:
            ask(**given)
        assert str(caught.value) == said


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
