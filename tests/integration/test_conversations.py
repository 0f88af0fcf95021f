"""How many users a plan answers at once, and whole caches of sliding windows: tried where turns can get quicker."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

import fitter
from fitter.api.fits import fit_model
from fitter.api.fits.questions import PlanAnswer, Questions
from fitter.errors import WorkerError
from fitter.parameters.table import PARAMETERS
from fitter.planning.plan.plan import Plan
from fitter.planning.request.ask import Ask
from tests.support.cases import cases, named_cases
from tools.models import shapes

pytestmark = pytest.mark.usefixtures("one_worker")

AGENTS = {"workload": "agent", "users": 8}
CHAT = {"workload": "chat", "users": 8, "gpus": "rtx-3090"}
NO_CHECKPOINTS = {"workload": "agent", "gpus": "rtx-3090", "ctx_checkpoints": 0}
CASES: dict[str, tuple[str, dict[str, Any], int, bool]] = {
    # the caches of eight would put layers on the host
    "fewer slots leave room for experts": ("gpt-oss-120b", {**AGENTS, "gpus": "rtx-3090"}, 4, False),
    "a larger card loses little with eight": ("gpt-oss-120b", {**AGENTS, "gpus": "rtx-5090"}, 8, False),
    "eight at once read a dense model's weights once": ("llama-3.1-70b", CHAT, 8, False),
    "all is on the card": ("gpt-oss-20b", {**CHAT, "workload": "chat,gap=0"}, 8, False),
    "eight do not fit": ("gpt-oss-120b", {**AGENTS, "gpus": "rtx-4090", "host_memory": 60 * 2**30}, 4, False),
    "without checkpoints": ("gpt-oss-20b", NO_CHECKPOINTS, 1, True),
    "without checkpoints, several users": ("gpt-oss-20b", {**NO_CHECKPOINTS, "users": 4}, 2, True),
}


def planned(model: str, folder: Path, **words: Any) -> Plan:
    return fitter.fit(shapes.write(model, folder, vocab=False), program="llama-server", **words)


@cases(CASES)
def test_the_quickest_turn(model: str, words: dict[str, Any], slots: int, swa_full: bool, tmp_path: Path) -> None:
    plan = planned(model, tmp_path, **words)
    assert plan.turns is not None
    assert (plan.params.n_seq_max, plan.params.swa_full) == (slots, swa_full)
    users = words.get("users", 1)
    # what was not tried, or was slower, is asked for
    for other in {users, min(users, slots * 2)} - ({slots} if not swa_full else set()):
        fixed = planned(model, tmp_path, **words, n_seq_max=other, swa_full=False)
        assert fixed.params.n_seq_max == other
        assert fixed.turns is None or fixed.turns.all.seconds >= plan.turns.all.seconds
    if (slots, swa_full) != (users, False):
        assert f"planned with {slots} slot" in plan.notes[-1]
        assert plan.choices[-1].subject == "how conversations are kept"


LONG = "prompt=30000,reused=90%,answer=300,turns=8,users=8,gap=20"


@named_cases(
    ("some slots are idle", {"workload": "chat", "users": 16}, True),
    ("all slots are busy", {"workload": "chat,gap=0", "users": 16}, False),
    ("the user's caches are kept", {"workload": "chat", "users": 16, "kv_unified": False}, False),
    ("one user", {"workload": "chat"}, False),
    ("one cache would not hold all conversations", {"workload": LONG}, False),
)
def test_one_cache_or_one_for_each_slot(words: dict[str, Any], kv_unified: bool, tmp_path: Path) -> None:
    plan = planned("gpt-oss-20b", tmp_path, gpus="h100-sxm", **words)
    assert plan.params.kv_unified is kv_unified
    assert plan.turns is not None
    if kv_unified:
        other = planned("gpt-oss-20b", tmp_path, gpus="h100-sxm", **words, kv_unified=False)
        assert other.turns is not None
        assert plan.turns.all.seconds < other.turns.all.seconds
        assert (plan.params.n_ctx or 0) >= words["users"] * plan.turns.session.longest


@named_cases(
    ("one user", {"workload": "chat"}, True),
    ("several users", {"workload": "chat", "users": 4}, False),
    ("several requests", {"users": 4}, False),
    ("no work is described", {"n_seq_max": 4}, True),
    ("as the user says", {"workload": "chat", "users": 4, "cache_idle_slots": True}, True),
)
def test_idle_slots_are_not_saved_while_others_wait(words: dict[str, Any], saved: bool | None, tmp_path: Path) -> None:
    plan = planned("llama-3.1-8b", tmp_path, gpus="rtx-4090", **words)
    assert plan.params.of_parameter(PARAMETERS["cache_idle_slots"]) is saved
    assert ("--no-cache-idle-slots" in plan.arguments()) == (saved is False)
    if saved and "users" in words:
        other = planned("llama-3.1-8b", tmp_path, gpus="rtx-4090", **{**words, "cache_idle_slots": False})
        assert plan.turns is not None and other.turns is not None
        assert plan.turns.all.seconds > other.turns.all.seconds


def test_there_is_room_for_the_conversations_of_users_without_a_slot(tmp_path: Path) -> None:
    plan = planned("gpt-oss-120b", tmp_path, **AGENTS, gpus="rtx-3090")
    assert plan.turns is not None
    assert plan.turns.kept == 1
    again = planned("gpt-oss-120b", tmp_path, **AGENTS, gpus="rtx-3090", n_seq_max=4, cache_ram=8192)
    assert again.turns is not None
    assert again.turns.kept < 1
    needed = int(again.turns.why.rpartition("-cram ")[2].split()[0])
    cache = next(each for each in plan.later if each.kind == "prompt cache")
    assert cache.bytes == needed * 2**20
    assert "reduced" not in str(plan)


def test_conversations_that_move_take_time(tmp_path: Path) -> None:
    words = {"gpus": "rtx-3090", "workload": "prompt=1600,reused=90%,answer=300,turns=8,users=8", "cache_ram": 65536}
    moving = planned("llama-3.1-8b", tmp_path, **words, n_seq_max=4).turns
    assert moving is not None and moving.kept == 1
    seconds = {point.users: point.seconds for point in moving.points}
    # without a gap, eight wait twice as long as four, and for half of the conversations to come and to go
    state = 1600 * 32 * 2 * 8 * 128 * 2
    assert seconds[8] - 2 * seconds[4] == pytest.approx(4 * (state / 1.4e9 + state / 4e9), rel=0.01)


def test_a_time_limit_ends_the_tries(tmp_path: Path) -> None:
    limited = planned("gpt-oss-120b", tmp_path, **AGENTS, gpus="rtx-3090", time_limit=60)
    assert limited.params.n_seq_max == 4
    assert limited.fit_keywords["time_limit"] == 60
    assert not limited.search.is_cut_short


def test_questions_that_a_time_limit_prevents_are_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def late(ask: Ask, answer: Any, words: Any, deadline: float | None) -> Questions:
        return Questions(ask, answer, words, time.monotonic())

    monkeypatch.setattr(fit_model, "Questions", late)
    assert planned("gpt-oss-120b", tmp_path, **AGENTS, gpus="rtx-3090").search.is_cut_short


def test_a_question_that_fails_leaves_the_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(ask: Ask, answer: Any, words: Any, deadline: float | None) -> Questions:
        def first(changed: Any) -> PlanAnswer:
            if changed:
                raise WorkerError("the worker was killed")
            return answer(changed)

        return Questions(ask, first, words, deadline)

    monkeypatch.setattr(fit_model, "Questions", failing)
    plan = planned("gpt-oss-120b", tmp_path, **AGENTS, gpus="rtx-3090")
    assert plan.fits
    assert plan.params.n_seq_max == 8
