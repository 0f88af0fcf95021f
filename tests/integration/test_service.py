"""``fitter serve`` as a service: what it keeps, batches, health, figures, and the client in Python."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

import fitter
from fitter.web.pool import FRESH
from fitter.web.questions import KnownAnswers
from tests.support.cases import cases, named_cases
from tools.loopback.web_server import Served, ask, serving
from tools.models.tiny import TINY_DENSE, TINY_MOE, write_tiny

CARD = ["1GiB"]
DENSE = {"model": "dense.gguf", "gpus": CARD, "n_ctx": 2048}


@dataclass(frozen=True)
class Service:
    """A server with one planner, its directory, and a client."""

    served: Served
    root: Path
    client: fitter.Client

    def body(self, **question: Any) -> str:
        """What it answers, byte for byte."""
        return ask(self.served.connection(), "/api/v1/plan", question)[1]

    def figures(self) -> dict[str, float]:
        """Its figures, by name and status."""
        connection = self.served.connection()
        connection.request("GET", "/metrics")
        answer = connection.getresponse()
        assert answer.headers["content-type"].startswith("text/plain; version=")
        families = text_string_to_metric_families(answer.read().decode())
        samples = (sample for family in families for sample in family.samples)
        return {sample.name + sample.labels.get("status", ""): sample.value for sample in samples}

    def hits(self) -> float:
        """Questions whose answer it had kept."""
        return self.figures()["fitter_known_answers_hits"]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    root = tmp_path_factory.mktemp("root")
    write_tiny(root / "dense.gguf", TINY_DENSE)
    write_tiny(root / "moe.gguf", TINY_MOE)
    with serving("--root", str(root), "--workers", "1") as served:
        yield Service(served, root, fitter.Client(served.url))
        assert served.stop() == (0, [])


def test_a_question_is_answered_once(service: Service) -> None:
    first, hits = service.body(**DENSE), service.hits()
    assert json.loads(first)["fits"] and service.body(**DENSE) == first and service.hits() == hits + 1
    service.body(**DENSE, type_k="q8_0")
    assert service.hits() == hits + 1


def test_a_question_says_how_long_a_search_may_take(service: Service) -> None:
    question = {**DENSE, "n_ctx": 1024}
    assert "time limit" in service.body(**question, time_limit=1e-6)
    whole = service.body(**question)
    assert json.loads(whole)["fits"]
    assert service.body(**question, time_limit=1e-6) == whole, "a known answer needs no search"
    for wrong, message in ((0, "is too short"), (30.5, "the server searches for 30 seconds at most"), ("soon", "")):
        status, body = ask(service.served.connection(), "/api/v1/plan", {**question, "time_limit": wrong})
        assert status == 400 and "time" in body and message in body


def test_a_plan_that_the_time_limit_cut_short_is_not_kept(service: Service) -> None:
    question = {"model": "shape://llama-3.3-70b", "gpus": ["rtx-4090"]}
    # with each try, the planner has more loads in memory
    limit, answer = 0.05, {}
    while not answer.get("search", {}).get("cut_short"):
        answer = json.loads(service.body(**question, time_limit=limit))
        assert not answer.get("fits") or answer["search"]["cut_short"], "no limit cut it short"
        limit *= 1.1
    assert answer["fits"]
    whole = json.loads(service.body(**question))
    assert not whole["search"]["cut_short"] and whole["params"]["n_ctx"] > answer["params"]["n_ctx"]


def test_a_changed_file_is_asked_about_anew(service: Service) -> None:
    path = write_tiny(service.root / "changes.gguf", TINY_DENSE)
    before = json.loads(service.body(**{**DENSE, "model": path.name}))
    path.unlink()
    write_tiny(path, TINY_MOE)
    hits = service.hits()
    after = json.loads(service.body(**{**DENSE, "model": path.name}))
    assert (before["model"]["name"], after["model"]["name"]) == ("tiny dense", "tiny moe")
    assert service.hits() == hits


def test_what_real_devices_have_left_is_asked_each_time(service: Service) -> None:
    hits = service.hits()
    for _ in range(2):
        assert json.loads(service.body(model="dense.gguf", n_ctx=2048))["schema"] == 1
    assert service.hits() == hits


def test_another_model_has_the_same_processes(service: Service) -> None:
    """A planner turns to the model that is asked about, and plans it as its own process would."""
    service.body(**DENSE, n_batch=512)
    had = {child.pid for child in service.served.children()}
    answer = json.loads(service.body(model="moe.gguf", gpus=CARD, n_ctx=2048, n_batch=512))
    plan = fitter.fit(service.root / "moe.gguf", gpus=CARD, n_ctx=2048, n_batch=512, program="llama-server")
    assert [each["used"] for each in answer["devices"]] == [each.used for each in plan.devices]
    assert {child.pid for child in service.served.children()} == had


def until_ready(served: Served) -> None:
    client, end = fitter.Client(served.url), time.monotonic() + 60
    while not client.health()["ready"]:
        assert time.monotonic() < end
        time.sleep(0.05)


def test_processes_start_before_the_first_question(tmp_path: Path) -> None:
    write_tiny(tmp_path / "dense.gguf", TINY_DENSE)
    with serving("--root", str(tmp_path), "--workers", "3") as served:
        until_ready(served)
        fresh = {child.pid for child in served.children()}
        assert len(fresh) == FRESH
        began = {child.pid: child.create_time() for child in served.children()}
        assert json.loads(ask(served.connection(), "/api/v1/plan", DENSE)[1])["fits"]
        assert {pid for pid in fresh if psutil.pid_exists(pid)} == fresh
        # another starts in place of the one that was asked
        while len(served.children()) < 3:
            time.sleep(0.05)
        assert {child.pid: child.create_time() for child in served.children() if child.pid in fresh} == began
        assert served.stop() == (0, [])


@cases(0.0, 1.1, 1.3)
def test_it_ends_while_they_start(seconds: float) -> None:
    with serving() as served:
        time.sleep(seconds)
        assert served.stop() == (0, [])


def test_several_questions_at_once(service: Service) -> None:
    questions = [DENSE, {"model": "none.gguf", "gpus": CARD}, {**DENSE, "model": "moe.gguf"}, {"model": ""}]
    status, body = ask(service.served.connection(), "/api/v1/plans", {"questions": questions})
    answers = json.loads(body)["answers"]
    assert (status, [each["status"] for each in answers]) == (200, [200, 422, 200, 400])
    assert json.dumps(answers[0]["answer"]) == service.body(**DENSE)
    assert answers[1]["answer"] == {"error": "there is no model 'none.gguf' here: take one of the list"}


@named_cases(
    ("none", {"questions": []}, "questions: "),
    ("too many", {"questions": [DENSE] * 65}, "questions: "),
    ("nothing", {}, "questions: "),
    ("no card", {"questions": [DENSE, {**DENSE, "gpus": []}]}, "gpus of question 2: "),
    ("unknown key", {"questions": [DENSE, DENSE, {**DENSE, "colour": "red"}]}, "colour of question 3: "),
    ("no model", {"questions": [DENSE, {"gpus": CARD}]}, "model of question 2: "),
    ("no question", {"questions": [7]}, "the body of question 1: "),
)
def test_wrong_batches(body: Any, message: str, service: Service) -> None:
    status, said = ask(service.served.connection(), "/api/v1/plans", body)
    assert status == 400 and json.loads(said)["error"].startswith(message) and "see /api" in said


def test_health_and_figures(service: Service) -> None:
    assert service.client.health() == {"status": "ok", "ready": True, "version": fitter.__version__, "waiting": 0}
    before = service.figures()
    service.body(**DENSE)
    service.body(model="none.gguf", gpus=CARD)
    after = service.figures()
    for name in ("fitter_questions_total200", "fitter_questions_total422"):
        assert after[name] == before.get(name, 0) + 1
    assert after["fitter_answer_seconds_count"] == before["fitter_answer_seconds_count"] + 2
    assert 0 < after["fitter_known_answers_bytes"] < 1 << 20
    assert after["process_resident_memory_bytes"] > 1 << 20


def test_the_client_answers_as_fit(service: Service) -> None:
    keywords = {"gpus": CARD, "n_ctx": 2048, "program": "llama-server"}
    asked = service.client.fit("moe.gguf", **keywords)
    here = fitter.fit(service.root / "moe.gguf", **keywords)  # type: ignore[arg-type]
    assert (asked.arguments(), asked.devices, asked.host) == (here.arguments(), here.devices, here.host)
    assert service.client.fit("moe.gguf", **{**keywords, "gpus": CARD[0]}).params == asked.params
    plan, error = service.client.fit_all([{"model": "dense.gguf", **keywords}, {"model": "none.gguf", "gpus": CARD}])
    assert isinstance(plan, fitter.Plan) and plan.fits
    assert isinstance(error, fitter.ModelError) and "there is no model 'none.gguf'" in str(error)
    assert len(service.client.fit_all([DENSE] * 70)) == 70


def test_what_the_client_raises(service: Service) -> None:
    for wrong in ({1}, float("nan")):
        with pytest.raises(fitter.UsageError, match=r"^a question holds only what JSON has: "):
            service.client.fit("dense.gguf", gpus=CARD, n_ctx=wrong)
    with pytest.raises(fitter.ModelError, match=r"there is no model"):
        service.client.fit("none.gguf", gpus=CARD)
    with pytest.raises(fitter.UsageError, match="type_k"):
        service.client.fit("dense.gguf", gpus=CARD, type_k="q9")
    with pytest.raises(fitter.UsageError, match="see /api"):
        service.client.fit("dense.gguf", gpus=CARD, unknown=1)
    with pytest.raises(fitter.RemoteError, match=r"does not answer \(.*refused\): start it with fitter serve"):
        fitter.Client("http://127.0.0.1:1/").fit("dense.gguf")
    with pytest.raises(fitter.UsageError, match="is no address of a server"):
        fitter.Client("ftp://127.0.0.1/")


def test_what_is_longest_not_asked_for_is_forgotten() -> None:
    known = KnownAnswers(10)
    for name, size in (("a", 4), ("b", 4)):
        known.put(name, bytes(size))
    assert (known.get("a"), known.bytes, len(known)) == (bytes(4), 8, 2)
    known.put("c", bytes(4))
    assert [known.get(name) is None for name in "abc"] == [False, True, False]
    known.put("a", bytes(6))
    assert (known.bytes, known.get("c")) == (10, bytes(4))
    known.put("d", bytes(11))
    assert (known.bytes, len(known)) == (0, 0)
