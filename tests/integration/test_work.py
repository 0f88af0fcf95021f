"""Plans for turns and users: slots, contexts, what is kept and why not, and what is refused."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import fitter
from fitter.errors import UsageError
from fitter.machine.gpu import virtual_devices
from fitter.machine.speed import speed_of
from fitter.output.tables.plan_facts import best_depths_text, facts, warnings
from fitter.output.tables.plan_table import plan_text
from fitter.planning.plan.plan import Plan
from fitter.planning.speed.cost import default, token_seconds
from tests.support.cases import named_cases
from tests.support.command import run_fitter
from tools.models.tiny import TINY_DENSE, TINY_MOE, write_tiny
from tools.models.tiny_kinds import write_hybrid

TALK = "prompt=600,reused=80%,answer=50,turns=4"


MODELS = {"moe": TINY_MOE, "dense": TINY_DENSE, "hybrid": write_hybrid}


def planned(path: Path, **words: Any) -> Plan:
    return fitter.fit(path, **{"gpus": "64MiB", "margin": 2**20, "program": "llama-server", "cache_ram": 64, **words})


def test_a_plan_without_work_says_nothing_of_it(models: dict[str, Path]) -> None:
    plan = planned(models["moe"])
    assert (plan.turns, plan.drafting) == (None, None)
    assert "work" not in dict(facts(plan))


@named_cases(
    ("each user has a slot", {"users": 3}, 3, 3),
    ("the user's slots are kept", {"users": 6, "n_seq_max": 2}, 2, 2),
    ("work says how many users", {"workload": f"{TALK},users=5"}, 5, 5),
    ("the option wins", {"workload": f"{TALK},users=5", "users": 2}, 2, 2),
    ("llama-cli has one", {"users": 3, "program": "llama-cli"}, 1, 1),
    ("llama-cpp-python has one", {"users": 3, "program": "llama-cpp-python", "cache_ram": None}, 1, 1),
)
def test_slots(words: dict[str, Any], n_seq_max: int, at_once: int, models: dict[str, Path]) -> None:
    plan = planned(models["moe"], **words)
    assert plan.estimate is not None
    assert (plan.params.n_seq_max, plan.estimate.workload.users) == (n_seq_max, at_once)
    assert [users for users, _ in plan.estimate.steps][-1:] == ([at_once] if at_once > 1 else [])


@named_cases(("caches of their own", False), ("one cache", True))
def test_the_context_holds_every_conversation_to_its_end(unified: bool, models: dict[str, Path]) -> None:
    plan = planned(models["moe"], workload=TALK, users=4, kv_unified=unified, fit_ctx=256)
    assert plan.turns is not None
    assert plan.turns.session.longest == 905
    assert plan.params.n_ctx >= 4 * 905
    with pytest.raises(UsageError, match="a conversation of 905 tokens at its end is more than a context of 904"):
        planned(models["moe"], workload=TALK, n_ctx=904)
    assert planned(models["moe"], workload=TALK, n_ctx=1024).fits


def test_a_named_kind_of_work_fits_the_model(models: dict[str, Path]) -> None:
    plan = planned(models["dense"], workload="agent", gpus="256MiB")
    assert plan.fits
    assert plan.turns is not None
    assert 0.98 * plan.params.n_ctx < plan.turns.session.longest <= plan.params.n_ctx
    assert sum("--workload agent is scaled to the model's own context" in line for line in warnings(plan)) == 1
    short = planned(models["dense"], workload="agent", n_ctx=1024)
    assert any("--workload agent is scaled to -c, 1024 tokens for each user" in line for line in warnings(short))


def test_what_is_kept(models: dict[str, Path]) -> None:
    def turns(**words: Any) -> fitter.Turns:
        found = planned(models["dense"], **{"workload": TALK, "users": 8, "n_seq_max": 2, **words}).turns
        assert found is not None
        return found

    # no prompt cache: of eight conversations the slots keep two
    few = turns(cache_ram=0)
    assert few.kept == 0.25
    assert few.why.startswith(
        "8 users have more conversations than are kept (2 in slots, 0 in the prompt cache): -np 8"
    )
    needed = few.why.rpartition("-cram ")[2].split()[0]
    enough = turns(cache_ram=int(needed))
    assert (enough.kept, enough.why, enough.seconds_if_kept) == (1.0, "", None)
    assert few.seconds_if_kept == pytest.approx(enough.all.seconds)
    assert turns(n_seq_max=8, cache_ram=0).kept == 1.0
    assert few.computed > enough.computed
    assert few.all.seconds > enough.all.seconds
    alone = turns(program="llama-cpp-python", cache_ram=None, n_seq_max=None)
    assert (alone.kept, "--for llama-server one for each slot" in alone.why) == (1 / 8, True)


def test_without_checkpoints_a_recurrent_model_computes_all_again(models: dict[str, Path]) -> None:
    with_them = planned(models["hybrid"], workload=TALK)
    without = planned(models["hybrid"], workload=TALK, ctx_checkpoints=0)
    assert with_them.turns is not None
    assert without.turns is not None
    assert (with_them.turns.kept, without.turns.kept) == (1.0, 0.0)
    assert "-ctxcp 32" in without.turns.why
    # a cache that can be cut needs none
    dense = planned(models["dense"], workload=TALK, ctx_checkpoints=0)
    assert dense.turns is not None
    assert dense.turns.kept == 1.0


def test_what_is_said(models: dict[str, Path]) -> None:
    plan = planned(models["dense"], workload=f"{TALK},gap=1s", users=8, n_seq_max=2, cache_ram=0, at_least=1e9)
    said = dict(facts(plan))["work"]
    assert said.startswith("8 users: ")
    assert " each, " in said and " prompt tokens computed" in said
    lines = warnings(plan)
    assert any(re.match("8 users have more conversations.* a turn instead of ", line) for line in lines)
    assert any("t/s each, less than 1e+09: not even one alone does" in line for line in lines)
    assert plan.turns is not None
    assert plan.turns.holds == 0
    assert plan_text(plan).count("8 users") == 3


def test_turns_are_part_of_a_report(models: dict[str, Path], tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    words = ["--gpu", "64MiB", "--fit-target", "1", "--for", "llama-server", "-cram", "64", "--users", "3"]
    done = run_fitter("report", str(models["moe"]), *words, "-o", str(page))
    assert done.returncode == 0, done.stderr
    text = page.read_text(encoding="utf-8")
    assert "Turns and users" in text
    assert text.count('<th scope="row">3</th>') == 1


def test_drafts_of_a_model(models: dict[str, Path]) -> None:
    plan = planned(models["moe"], model_draft=str(models["dense"]), draft_max=2, acceptance=0.9)
    assert plan.drafting is not None
    assert plan.estimate is not None
    assert (plan.drafting.depth, len(plan.drafting.depths), plan.drafting.is_assumed) == (2, 9, False)
    assert plan.drafting.off.each == pytest.approx(plan.estimate.generation_tokens_per_second)
    assert dict(facts(plan))["drafting"].startswith("2 at a time: ")
    # a draft as dear as the model never pays, if it is often wrong
    bad = planned(models["dense"], model_draft=str(models["dense"]), acceptance=0.1)
    assert bad.drafting is not None
    assert bad.drafting.best.depth == 0
    assert "quicker with no draft" in dict(facts(bad))["drafting"]


def test_the_best_draft_depends_on_the_users(models: dict[str, Path]) -> None:
    words = {"model_draft": str(models["dense"]), "draft_max": 2, "acceptance": 0.9, "users": 4}
    plan = planned(models["moe"], **words)
    assert plan.drafting is not None
    assert plan.estimate is not None
    assert [each.users for each in plan.drafting.by_users] == [1, 2, 4]
    assert [each.off for each in plan.drafting.by_users] == [
        pytest.approx(1 / seconds) for _, seconds in plan.estimate.steps
    ]
    every = plan.drafting.by_users[-1]
    assert (every.depth, every.each) == (plan.drafting.best.depth, plan.drafting.best.each)
    assert best_depths_text(plan.drafting).startswith("best to draft at a time: 1 user ")


def test_an_estimate_for_users(models: dict[str, Path]) -> None:
    words: dict[str, Any] = {"gpus": "64MiB", "n_ctx": 2048, "n_seq_max": 4, "prompt": 128, "generate": 32}
    one, four = (fitter.estimate(models["moe"], users=users, **words) for users in (None, 4))
    assert (one.workload.users, four.workload.users) == (1, 4)
    assert [users for users, _ in four.steps] == [1, 2, 4]
    assert four.steps[0][1] == pytest.approx(one.estimate.generation_seconds)
    assert four.estimate.seconds > one.estimate.seconds


def test_drafts_of_the_models_own_layers() -> None:
    # each drafted token reads the layer for prediction, of whose experts it uses some, and the output, and is chosen
    plan = planned(Path("shape://glm-4.5-air"), gpus="96GiB", margin=None, cache_ram=None, n_ctx=4096, mtp=True)
    assert plan.drafting is not None
    assert plan.estimate is not None
    one = plan.drafting.depths[1]
    draft = one.tokens / one.each - plan.estimate.checks[-1][1][1]
    layers = fitter.inspect("shape://glm-4.5-air").layers
    output = sum(
        role.bytes for layer in layers if layer.index is None for role in layer.weights if role.role == "output"
    )
    last = next(layer for layer in reversed(layers) if layer.index is not None)
    experts = sum(role.bytes for role in last.weights if "expert" in role.role)
    read = output + last.bytes - experts + experts * 8 / 128
    card = speed_of(virtual_devices(["96GiB"])[0])
    chosen = default().host.sampling * 151552
    assert draft == pytest.approx(token_seconds(read, 1, card) + chosen, rel=0.1)


def test_a_plan_for_many_users_is_another_one(tmp_path: Path) -> None:
    # experts that eight users touch are read more often: the same bytes on the host cost more
    path = write_tiny(tmp_path / "wide.gguf", replace(TINY_MOE, n_layer=8, n_expert=32, n_ff=256))
    one, many = (planned(path, users=users, gpus="12MiB", n_ctx=2048) for users in (1, 8))
    assert one.estimate is not None
    assert many.estimate is not None
    assert many.estimate.estimate.generation_seconds > one.estimate.estimate.generation_seconds
