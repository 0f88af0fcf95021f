"""A device that cannot keep its margin is left out, with a word; the plan goes on without it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import fitter
from fitter.errors import UsageError
from fitter.regression.cases import make_cases
from fitter.regression.measuring import measure_cases
from fitter.text import mib_up
from tests.support.cases import cases, named_cases
from tests.support.command import run_fitter

MODEL = "llama-3.1-8b"

MIB = 2**20
GIB = 2**30
LARGE, SMALL = "24GiB", "8GiB"


def out(device: str, why: str) -> str:
    return f"{device} is left out: its margin of {why}; set a smaller margin with --fit-target"


MORE_THAN_IT_HAS = "10000 MiB is more than its memory of 8192 MiB"


TOO_LARGE = {name: [out(name, MORE_THAN_IT_HAS)] for name in ("CUDA0", "CUDA1")}
FIRST = {"margin": [10000 * MIB, GIB]}
"""A margin that the first device cannot keep."""

LEFT_OUT: dict[str, tuple[list[str], dict[str, Any], tuple[str, ...], list[str]]] = {
    "one for all, and room": ([LARGE, SMALL], {"margin": 8192 * MIB - 1}, ("CUDA0",), []),
    "all of the device": (
        [LARGE, SMALL],
        {"margin": 8192 * MIB},
        ("CUDA0",),
        [out("CUDA1", "8192 MiB leaves nothing of its 8192 MiB free")],
    ),
    "more than the device": ([LARGE, SMALL], {"margin": 10000 * MIB}, ("CUDA0",), TOO_LARGE["CUDA1"]),
    "each its own": ([SMALL, LARGE], FIRST, ("CUDA1",), TOO_LARGE["CUDA0"]),
    "the default": ([LARGE, "512MiB"], {}, ("CUDA0",), [out("CUDA1", "1024 MiB is more than its memory of 512 MiB")]),
    "a device that is reserved": (
        [LARGE, SMALL],
        {"reserve": {"CUDA1": "7GiB"}},
        ("CUDA0",),
        [out("CUDA1", "1024 MiB and 7168 MiB reserved leave nothing of its 8192 MiB free")],
    ),
    "every device, and the host is enough": (
        [LARGE, SMALL],
        {"margin": 30000 * MIB},
        (),
        [
            out("CUDA0", "30000 MiB is more than its memory of 24576 MiB"),
            out("CUDA1", "30000 MiB is more than its memory of 8192 MiB"),
        ],
    ),
    "named, so it stays in the list": (
        [SMALL, LARGE],
        {**FIRST, "devices": ["CUDA0", "CUDA1"]},
        ("CUDA0", "CUDA1"),
        TOO_LARGE["CUDA0"],
    ),
    "in the split, so it stays in the list": (
        [SMALL, LARGE],
        {**FIRST, "tensor_split": [0, 1]},
        ("CUDA0", "CUDA1"),
        TOO_LARGE["CUDA0"],
    ),
    "layers that the other one holds": ([SMALL, LARGE], {**FIRST, "n_gpu_layers": 33}, ("CUDA1",), TOO_LARGE["CUDA0"]),
}


@cases(LEFT_OUT)
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
    if "tensor_split" in words:
        assert plan.params.tensor_split == tuple(words["tensor_split"]), (
            "shares are those of the devices that they were"
        )


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
    message = out("CUDA1", MORE_THAN_IT_HAS)
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
