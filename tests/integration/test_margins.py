"""A device that cannot keep its margin is left out, with a word; the plan goes on without it."""

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
from fitter.regression.cases import make_cases
from fitter.regression.measuring import measure_cases
from fitter.text import mib_up
from tests.support.cases import named_cases
from tests.support.command import run_fitter

MODEL = "llama-3.1-8b"

MIB = 2**20
GIB = 2**30
LARGE, SMALL = "24GiB", "8GiB"


def out(device: str, why: str) -> str:
    return f"{device} is left out: its margin of {why}; set a smaller margin with --fit-target"


TOO_LARGE = {name: [out(name, "10000 MiB is more than its memory of 8192 MiB")] for name in ("CUDA0", "CUDA1")}
FIRST = {"margin": [10000 * MIB, GIB]}
"""A margin that the first device cannot keep."""
NOTHING = [out("CUDA1", "8192 MiB leaves nothing of its 8192 MiB free")]
RESERVED = [out("CUDA1", "1024 MiB and 7168 MiB reserved leave nothing of its 8192 MiB free")]
BOTH = [out(f"CUDA{d}", f"30000 MiB is more than its memory of {size} MiB") for d, size in enumerate((24576, 8192))]
STAYS, SPLIT = {**FIRST, "devices": ["CUDA0", "CUDA1"]}, {**FIRST, "tensor_split": [0, 1]}


@named_cases(
    ("one for all, and room", [LARGE, SMALL], {"margin": 8192 * MIB - 1}, ("CUDA0",), []),
    ("all of the device", [LARGE, SMALL], {"margin": 8192 * MIB}, ("CUDA0",), NOTHING),
    ("more than the device", [LARGE, SMALL], {"margin": 10000 * MIB}, ("CUDA0",), TOO_LARGE["CUDA1"]),
    ("each its own", [SMALL, LARGE], FIRST, ("CUDA1",), TOO_LARGE["CUDA0"]),
    ("the default", [LARGE, "512MiB"], {}, ("CUDA0",), [out("CUDA1", "1024 MiB is more than its memory of 512 MiB")]),
    ("a device that is reserved", [LARGE, SMALL], {"reserve": {"CUDA1": "7GiB"}}, ("CUDA0",), RESERVED),
    ("every device, and the host is enough", [LARGE, SMALL], {"margin": 30000 * MIB}, (), BOTH),
    ("named, so it stays in the list", [SMALL, LARGE], STAYS, ("CUDA0", "CUDA1"), TOO_LARGE["CUDA0"]),
    ("in the split, so it stays in the list", [SMALL, LARGE], SPLIT, ("CUDA0", "CUDA1"), TOO_LARGE["CUDA0"]),
    (
        "layers that the other one holds",
        [SMALL, LARGE],
        {**FIRST, "n_gpu_layers": 33},
        ("CUDA1",),
        TOO_LARGE["CUDA0"],
    ),
)
def test_what_is_left_out(
    gpus: list[str], words: dict[str, Any], used: tuple[str, ...], said: list[str], model: Path
) -> None:
    plan = fitter.fit(model, gpus=gpus, **words)
    assert plan.fits
    assert plan.params.devices == used
    assert [left.message for left in plan.left_out] == said
    assert {left.reason for left in plan.left_out} <= {"margin"}
    left = {left.device for left in plan.left_out}
    assert left == {use.name for use in plan.devices if use.free - use.margin <= use.shared}
    assert all(plan.breakdown.on(name).used == 0 for name in left)
    # shares are those of the devices that they were
    assert "tensor_split" not in words or plan.params.tensor_split == tuple(words["tensor_split"])


ALL_TOO_LARGE = (
    "the margin is larger than the device (10000 MiB of CUDA0 with 8192 MiB), so nothing can be placed there"
)


@named_cases(
    ("the host is too small", {"host_memory": "3GiB"}, "but without a device the host lacks "),
    ("layers are to be there", {"n_gpu_layers": 1}, "but -ngl, -ts or -ot needs a device: use a smaller --fit-target"),
    ("a tensor is to be there", {"override_tensor": ["blk.0.ffn.*=CUDA0"]}, "but -ngl, -ts or -ot needs a device"),
)
def test_nothing_runs_without_a_device(words: dict[str, Any], said: str, model: Path) -> None:
    with pytest.raises(UsageError) as caught:
        fitter.fit(model, gpus=[SMALL], margin=10000 * MIB, **words)
    assert str(caught.value).startswith(f"{ALL_TOO_LARGE}, {said}")


@named_cases(
    ("a share of the layers", [SMALL, LARGE], {"margin": [10000 * MIB, GIB], "tensor_split": [1, 1]}, "CUDA0"),
    ("a tensor", [LARGE, SMALL], {"margin": [GIB, 10000 * MIB], "override_tensor": ["blk.0.ffn.*=CUDA1"]}, "CUDA1"),
    ("a tensor on a card without room", ["512MiB", LARGE], {"override_tensor": ["blk.0.ffn.*=CUDA0"]}, "CUDA0"),
    ("all of it", [SMALL], {"margin": 8192 * MIB, "n_gpu_layers": 33}, "CUDA0"),
    ("an ordinary margin", [SMALL], {"n_gpu_layers": 33, "n_ctx": 131072}, "CUDA0"),
)
def test_what_is_to_be_on_a_device_is_not_put_elsewhere(
    gpus: list[str], words: dict[str, Any], lacking: str, model: Path
) -> None:
    plan = fitter.fit(model, gpus=gpus, **words)
    assert not plan.fits
    assert [problem.device for problem in plan.problems] == [lacking]
    assert f"{lacking} lacks " in plan.problems[0].message
    margin = next(use.margin for use in plan.devices if use.name == lacking)
    assert ("--fit-target" in plan.problems[0].message) is (margin >= plan.problems[0].missing)


@named_cases(
    ("wherever it is best", {}, {"CUDA0"}, True),
    ("named", {"devices_draft": ["CUDA1"]}, {"CUDA1"}, False),
    ("on a device for it alone", {"devices_draft": ["CUDA1"], "devices": ["CUDA0"]}, {"CUDA1"}, False),
)
def test_a_draft_model(words: dict[str, Any], places: set[str], fits: bool, model: Path, tiny: Path) -> None:
    plan = fitter.fit(model, gpus=[LARGE, SMALL], margin=10000 * MIB, model_draft=tiny, **words)
    assert plan.fits == fits
    assert {row.device for shared in plan.shared for row in shared.rows if row.device} == places
    assert [left.device for left in plan.left_out] == ([] if "CUDA1" in places else ["CUDA1"])
    assert [problem.device for problem in plan.problems] == ([] if fits else ["CUDA1"])


def test_the_command_says_so(model: Path) -> None:
    done = run_fitter(model, "--gpu", LARGE, "--gpu", SMALL, "-fitt", 10000, "--json")
    assert done.returncode == 0, done.stderr
    (message,) = TOO_LARGE["CUDA1"]
    assert f"  {message}" in done.stderr.splitlines()
    document = json.loads(done.stdout)
    assert document["left_out"] == [{"device": "CUDA1", "reason": "margin", "message": message}]
    assert document["params"]["devices"] == ["CUDA0"]
    assert [device["name"] for device in document["devices"]] == ["CUDA0", "CUDA1"]


def test_cases_with_margins(model: Path) -> None:
    table = {"model": model.name, "gpu": [LARGE, SMALL], "margin": "9GiB"}
    [one] = make_cases("one", table, model.parent)
    [none] = make_cases("none", {**table, "margin": "25GiB", "host_memory": "3GiB"}, model.parent)
    found, failed = measure_cases([one, none], {})
    assert found.snapshot is not None
    assert found.snapshot.fits
    assert found.snapshot.params.devices == ("CUDA0",)
    # what is locked is measured again, and not fitted
    assert measure_cases([one], {"one": found.snapshot})[0].snapshot is found.snapshot
    assert isinstance(failed.error, UsageError)
    assert "the margin is larger than the device" in str(failed.error)


def test_a_real_load_may_take_a_part_of_the_margin() -> None:
    # what a layer on one card has on the other is copied there, in buffers that no dummy load has
    elsewhere = [
        "^blk.(([3-9]|1.|2[0-3]).ffn_(down|gate|up)_exps|(1|2).ffn_(up|gate)_exps|24.ffn_(gate|down)_exps).weight$=CPU",
        "^blk.(1|2).ffn_down_exps.weight$=CUDA0",
    ]
    asked: dict[str, Any] = {"gpus": ["16GiB", "24GiB"], "devices": ["CUDA1", "CUDA0"], "n_ctx": 8192, "n_ubatch": 2048}
    asked |= {"n_gpu_layers": 48, "tensor_split": [38, 10], "override_tensor": elsewhere, "program": "llama-server"}
    second = fitter.fit("shape://glm-4.5-air", **asked).devices[1]
    plan = fitter.fit("shape://glm-4.5-air", **asked, margin=[GIB, second.left])
    use = plan.devices[1]
    assert use.name == "CUDA0" and plan.fits and use.fits and use.loaded.left < use.margin == use.left
    assert use.loaded.compute == plan.breakdown.most.on("CUDA0").compute > use.compute
    assert f"compute takes {mib_up(use.more_in_use)} MiB of the margin" in " ".join(str(plan).split())


# --- plans beside those of other models: their memory stays free, and what is refused


MODELS = ("llama-3.1-8b", "qwen3-30b-a3b")


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
