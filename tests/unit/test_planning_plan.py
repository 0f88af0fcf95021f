"""What a plan says of itself, and whether it is for the llama.cpp that is here."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fitter.errors import PlanError
from fitter.llama.types import LlamaCpp, Params
from fitter.planning.plan.plan import DeviceUse, Problem, check_llama_cpp, resolved
from tests.support.cases import cases, named_cases
from tests.support.plans import MIB, make_plan

HERE = LlamaCpp("0.5.0 (ggml 0.25.3, commit 0c1e57098)", "0.25.3", "0c1e57098", "here/libllama.so", "aa", "cpu.so")
OTHER_FILES = replace(HERE, key="bb", libllama="there/libllama.so")
WITHOUT_COMMIT = replace(OTHER_FILES, version="0.5.0 (ggml 0.25.3, commit unknown)")


@named_cases(
    ("a-file-that-does-not-say", None, HERE, True),
    ("the-same", HERE, HERE, True),
    ("the-same-version-elsewhere", OTHER_FILES, HERE, True),
    ("another-version", replace(OTHER_FILES, version="0.5.1 (ggml 0.25.3, commit 1)"), HERE, False),
    ("the-same-files-under-another-name", replace(HERE, version="0.5.1"), HERE, True),
    ("versions-without-a-commit", WITHOUT_COMMIT, replace(WITHOUT_COMMIT, key="cc"), False),
    ("the-same-files-without-one", WITHOUT_COMMIT, replace(WITHOUT_COMMIT, libllama="x"), True),
)
def test_the_llama_cpp_that_is_here(planned: LlamaCpp | None, here: LlamaCpp, is_same: bool) -> None:
    plan = replace(make_plan(), llama_cpp=planned)
    if planned is None or is_same:
        check_llama_cpp(plan, here, "fit again")
        return
    with pytest.raises(PlanError) as caught:
        check_llama_cpp(plan, here, "fit again")
    assert str(caught.value) == (
        f"the plan was made with llama.cpp {planned.version}, and {here.libllama} is {here.version}, which may "
        "take other memory: fit again"
    )


@named_cases(
    ("there-is-room", 1 << 30, 0, None),
    ("as-much", 4096 * MIB, 0, "its margin of 4096 MiB leaves nothing of its 4096 MiB free"),
    ("as-its-memory", 8192 * MIB, 0, "its margin of 8192 MiB leaves nothing of its 4096 MiB free"),
    ("more-than-its-memory", 8193 * MIB, 0, "its margin of 8193 MiB is more than its memory of 8192 MiB"),
    (
        "with-what-is-reserved",
        4095 * MIB + 1,
        *(MIB - 1, "its margin of 4096 MiB and 1 MiB reserved leave nothing of its 4096 MiB free"),
    ),
)
def test_devices_that_are_left_out(margin: int, reserved: int, why: str | None) -> None:
    use = DeviceUse("CUDA0", "a card", 8192 * MIB, 4096 * MIB, margin, 0, 0, 0, shared=reserved)
    left_out = replace(make_plan(), devices=(use,)).left_out
    said = f"CUDA0 is left out: {why}; set a smaller margin with --fit-target"
    assert [each.message for each in left_out] == ([] if why is None else [said])


def test_a_device_that_others_fill_is_left_out_whatever_its_margin() -> None:
    use = DeviceUse("CUDA0", "a card", 8192 * MIB, 0, 1 << 30, 0, 0, 0)
    (left_out,) = replace(make_plan(), devices=(use,)).left_out
    assert left_out.message == "CUDA0 is left out: nothing of its 8192 MiB is free"


def test_what_llama_cpp_chose_is_resolved() -> None:
    assert resolved(make_plan(Params(n_ctx=0))) == Params(n_ctx=4096, devices=("CUDA0", "CUDA1"))
    chosen = Params(n_ctx=512, devices=("CUDA1",))
    assert resolved(make_plan(chosen)) == chosen


def test_arguments_of_a_plan_that_does_not_fit_are_asked_for_anyway() -> None:
    plan = make_plan(problems=(Problem("CUDA0", 5, "CUDA0 lacks 5 bytes"),))
    message = r"^the plan does not fit: CUDA0 lacks 5 bytes; to get it anyway, use arguments\(anyway=True\)$"
    with pytest.raises(PlanError, match=message):
        plan.arguments()
    with pytest.raises(PlanError, match=r"^the plan does not fit: CUDA0 lacks 5 bytes"):
        plan.format("args")
    assert plan.arguments(anyway=True) == make_plan().arguments()
    assert plan.format("args", anyway=True) == make_plan().format("args")


@cases((4096, 4096, 4096), (0, 8192, 8192), (512, 1024, 512))
def test_a_plan_in_a_line(asked: int, measured: int, said: int) -> None:
    plan = replace(make_plan(Params(n_ctx=asked)), breakdown=replace(make_plan().breakdown, n_ctx=measured))
    assert repr(plan) == f"<Plan: Model 8B fits, n_ctx={said}, on CUDA0, CUDA1>"
