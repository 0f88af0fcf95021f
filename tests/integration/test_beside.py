"""Plans beside those of other models: their memory stays free, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import fitter
from fitter.errors import UsageError
from fitter.output.keywords import fit_kwargs
from fitter.output.tables.plan_facts import facts
from fitter.planning.request.shared import parse_reserve
from tests.support.cases import named_cases
from tests.support.command import run_fitter

MODELS = ("llama-3.1-8b", "qwen3-30b-a3b")

MIB = 1024**2


def planned(path: Path, **words: Any) -> fitter.Plan:
    return fitter.fit(path, **{"gpus": "rtx-4090", "n_ctx": 8192, **words})


def written(plan: fitter.Plan, path: Path) -> Path:
    path.write_text(json.dumps(plan.to_dict()), encoding="utf-8")
    return path


def test_both_keep_the_margin_together(models: dict[str, Path], tmp_path: Path) -> None:
    small = planned(models["llama-3.1-8b"], host_memory="64GiB", program="llama-server")
    alone = planned(models["qwen3-30b-a3b"], host_memory="64GiB")
    both = planned(models["qwen3-30b-a3b"], host_memory="64GiB", beside=written(small, tmp_path / "small.json"))
    assert both.fits
    (use,) = both.shared
    first = small.devices[0]
    # the other process has memory of the card for itself: 469 MiB on an idle RTX 4090, by its catalogue
    assert use.on("CUDA0") >= first.used + 469 * MIB
    assert use.on(None) == small.host.used
    assert both.devices[0].used + both.devices[0].margin <= both.devices[0].free
    assert both.devices[0].model < alone.devices[0].model
    assert dict(facts(both))["beside"].startswith(f"{models['llama-3.1-8b'].name}: ")
    assert "--beside" not in both.arguments()


def test_a_full_card_is_left_alone(models: dict[str, Path], tmp_path: Path) -> None:
    full = planned(models["qwen3-30b-a3b"], n_ctx=None)
    rest = planned(models["llama-3.1-8b"], beside=[written(full, tmp_path / "full.json")])
    assert rest.fits
    assert rest.params.devices == ()
    assert rest.host.model > planned(models["llama-3.1-8b"]).host.model
    two = planned(models["llama-3.1-8b"], gpus="2x rtx-4090", beside=[written(full, tmp_path / "full.json")])
    assert two.params.devices == ("CUDA1",)


def test_several_plans_add_up(models: dict[str, Path], tmp_path: Path) -> None:
    small = written(planned(models["llama-3.1-8b"]), tmp_path / "small.json")
    once, twice = (planned(models["qwen3-30b-a3b"], beside=[small] * count) for count in (1, 2))
    assert sum(use.on("CUDA0") for use in twice.shared) == 2 * sum(use.on("CUDA0") for use in once.shared)


def test_a_plan_beside_others_does_not_bring_them_along(models: dict[str, Path], tmp_path: Path) -> None:
    first = written(planned(models["llama-3.1-8b"]), tmp_path / "first.json")
    words: list[dict[str, Any]] = [{}, {"beside": first, "reserve": "host=1GiB"}]
    plain, beside = (planned(models["llama-3.1-8b"], **each) for each in words)
    assert beside.devices[0].shared > 0
    uses = [
        planned(models["qwen3-30b-a3b"], beside=written(plan, tmp_path / "second.json")).shared[0]
        for plan in (plain, beside)
    ]
    assert uses[0].rows == uses[1].rows


def test_a_script_keeps_the_memory_free(models: dict[str, Path], tmp_path: Path) -> None:
    first = written(planned(models["llama-3.1-8b"], host_memory="64GiB"), tmp_path / "first.json")
    words: dict[str, Any] = {"host_memory": "64GiB", "beside": first, "reserve": "CUDA0=1GiB"}
    plan = planned(models["qwen3-30b-a3b"], **words)
    kept = parse_reserve(fit_kwargs(plan)["reserve"])
    assert kept == {"CUDA0": plan.devices[0].shared, "host": plan.host.shared}


def test_other_rpc_servers_are_refused(models: dict[str, Path], tmp_path: Path) -> None:
    document = planned(models["llama-3.1-8b"]).to_dict() | {"rpc": ["127.0.0.1:50052"]}
    path = tmp_path / "remote.json"
    path.write_text(json.dumps(document), encoding="utf-8")
    with pytest.raises(UsageError, match=r"has other rpc-servers: give --rpc 127\.0\.0\.1:50052 here, too"):
        planned(models["llama-3.1-8b"], beside=path)


def test_memory_that_is_shared_with_the_host(models: dict[str, Path], tmp_path: Path) -> None:
    words = {"gpus": "m4-pro:24GiB", "n_ctx": 4096}
    small = planned(models["llama-3.1-8b"], **words)
    both = planned(models["llama-3.1-8b"], **words, beside=written(small, tmp_path / "small.json"))
    (pool,) = both.pools
    assert pool.used >= small.pools[0].used + sum(use.used - use.shared for use in both.devices)
    (use,) = both.shared
    # no process of a Mac has memory of the GPU for itself
    assert use.on("MTL0") == small.breakdown.real.on("MTL0").used


@named_cases(
    ("another card", {"gpus": "rtx-3060"}, "is for a CUDA0 of 24564 MiB, but here it has 12288 MiB"),
    ("no card", {"gpus": "none"}, "has memory on CUDA0, which is not here; there are: none"),
    ("no such file", {"beside": "/nowhere/plan.json"}, "no such file"),
)
def test_what_is_refused(words: dict[str, Any], why: str, models: dict[str, Path], tmp_path: Path) -> None:
    small = written(planned(models["llama-3.1-8b"]), tmp_path / "small.json")
    with pytest.raises(UsageError, match=why):
        planned(models["llama-3.1-8b"], **{"beside": small, **words})


def test_a_plan_that_does_not_fit_is_refused(models: dict[str, Path], tmp_path: Path) -> None:
    bad = planned(models["qwen3-30b-a3b"], host_memory="1GiB", gpus="rtx-3060")
    assert not bad.fits
    with pytest.raises(UsageError, match="that plan does not fit"):
        planned(models["llama-3.1-8b"], gpus="rtx-3060", beside=written(bad, tmp_path / "bad.json"))


def test_the_command_and_a_case(models: dict[str, Path], tmp_path: Path) -> None:
    small = run_fitter(models["llama-3.1-8b"], "--gpu", "rtx-4090", "-c", "8192", "--json")
    (tmp_path / "small.json").write_text(small.stdout, encoding="utf-8")
    words = ["--gpu", "rtx-4090", "-c", "8192", "--beside", str(tmp_path / "small.json")]
    done = run_fitter(models["qwen3-30b-a3b"], *words, "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert [use["kind"] for use in document["shared"]] == ["beside"]
    case = f"""[cases.both]
model = "{models["qwen3-30b-a3b"]}"
gpu = "rtx-4090"
n_ctx = 8192
beside = ["small.json"]
"""
    (tmp_path / "fitter.toml").write_text(case, encoding="utf-8")
    cases = ["--cases", str(tmp_path / "fitter.toml")]
    locked = run_fitter("lock", *cases)
    assert locked.returncode == 0, locked.stderr
    checked = run_fitter("check", *cases)
    assert checked.returncode == 0, checked.stdout
    # where the other model grows, the case fails
    document = json.loads(small.stdout)
    document["devices"][0]["context"] += 16 * 1024 * MIB
    (tmp_path / "small.json").write_text(json.dumps(document), encoding="utf-8")
    grown = run_fitter("check", *cases)
    assert grown.returncode == 4, grown.stdout
