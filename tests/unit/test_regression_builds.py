"""Builds of llama.cpp compared: what they are called, what grew, whether it still fits, and how that is said."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from fitter.api import compare_builds
from fitter.api.compare_builds import OnBuild, load_keywords
from fitter.errors import LibraryError, LlamaCppError, UsageError
from fitter.llama.types import Row, TensorBuftOverride
from fitter.output.pictures import change_pictures
from fitter.planning.plan.plan import Plan, Problem
from fitter.regression import build_report
from fitter.regression.build_comparison import (
    Compared,
    Subject,
    labels,
    of_cases,
    of_models,
    own_plans,
    same_parameters,
)
from fitter.regression.cases import Case, Growth, read_builds
from tests.support.cases import named_cases
from tests.support.plans import GIB, MIB, make_plan, shared_use


@named_cases(
    ("directories", ("builds/b10361", "builds/v0.5.0"), ("b10361", "v0.5.0")),
    ("what they all end with tells nothing", ("old/build/bin", "/opt/new/build/bin"), ("old", "new")),
    ("as much as is needed", ("a/x/bin", "a/y/bin", "b/x/bin"), ("a/x", "a/y", "b/x")),
    ("one is the end of another", ("bin", "new/bin"), ("bin", "new")),
    ("llama-cpp-python", ("builds/v0.5.0", "python"), ("v0.5.0", "python")),
    ("the same twice", ("builds/v0.5.0", "builds/v0.5.0"), ("v0.5.0", "v0.5.0")),
    ("the same of three", ("builds/a", "builds/b", "builds/a"), ("a", "b", "a")),
    ("the root", ("/", "builds/a"), ("/", "a")),
)
def test_short_names(builds: tuple[str, ...], expected: tuple[str, ...]) -> None:
    assert labels(builds) == expected


def with_more(plan: Plan, device: str = "CUDA1", **more: int) -> OnBuild:
    """What another build takes for ``plan``, with so many bytes more on one device or on the host."""

    def changed(row: Row) -> Row:
        if row.buffer_type != device:
            return row
        return replace(row, **{name: getattr(row, name) + size for name, size in more.items()})

    breakdown = replace(plan.breakdown, rows=tuple(map(changed, plan.breakdown.rows)))
    return OnBuild("builds/new", "2", breakdown, (), compare_builds.missing_of(plan, breakdown))


def first_of(plan: Plan) -> OnBuild:
    return OnBuild("builds/old", "1", plan.breakdown, plan.shared, {}, plan)


def compared(after: OnBuild, plan: Plan | None = None, growth: Growth | None = None) -> Compared:
    subject = Subject("chat", Path("chat.gguf"), max_growth=growth or Growth())
    return Compared(subject, (first_of(plan or make_plan()), after))


# --- what fits. 2404 MiB of each 8 GiB are used, and 1 GiB is to stay free.

LEFT = 8 * GIB - GIB - 2404 * MIB


@named_cases(
    ("the margin is kept", make_plan(), with_more(make_plan(), compute=LEFT), {}),
    ("a byte too much", make_plan(), with_more(make_plan(), compute=LEFT + 1), {"CUDA1": 1}),
    ("a real load takes the margin", make_plan(), with_more(make_plan(), model=LEFT), {}),
    ("an unlimited host", make_plan(), with_more(make_plan(), "CPU", compute=99 * GIB), {}),
    (
        "a host",
        make_plan(host_free=2 * GIB),
        with_more(make_plan(host_free=2 * GIB), "CPU", model=GIB),
        {"host": 320 * MIB},
    ),
    ("a host that may page", make_plan(host_free=GIB), with_more(make_plan(host_free=GIB), "CPU", model=GIB), {}),
)
def test_whether_it_still_fits(plan: Plan, after: OnBuild, missing: dict[str, int]) -> None:
    assert plan.fits
    assert after.missing == missing
    assert after.fits == (missing == {})


def test_what_a_real_load_reserves_has_room() -> None:
    plan = make_plan()
    rows = tuple(replace(row, reserved=row.compute + LEFT + GIB + 1) for row in plan.breakdown.rows)
    assert compare_builds.missing_of(plan, replace(plan.breakdown, rows=rows)) == {"CUDA0": 1, "CUDA1": 1}


def test_a_plan_that_does_not_fit_may_fit_with_another_build() -> None:
    plan = make_plan(problems=(Problem("CUDA0", 1, "too small"),))
    assert with_more(plan).missing == {}
    assert with_more(plan, compute=LEFT + 1).missing == {"CUDA1": 1}


def test_a_device_that_had_no_room_may_have_some() -> None:
    whole = make_plan(problems=(Problem("CUDA0", MIB, "too small"),))
    short = replace(whole.devices[0], free=whole.devices[0].used + whole.devices[0].margin - MIB)
    plan = replace(whole, devices=(short, *whole.devices[1:]))
    assert with_more(plan).missing == {"CUDA0": MIB}
    assert with_more(plan, "CUDA0", compute=-MIB).fits


# --- what is different


def moved(after: OnBuild, growth: Growth | None = None) -> list[tuple[str, float | None, float, str, str]]:
    found = same_parameters(first_of(make_plan()), after, growth or Growth())
    return [(move.what, move.before, move.after, move.detail, move.failure) for move in found]


def test_the_same_is_nothing() -> None:
    assert moved(with_more(make_plan())) == []
    assert own_plans(make_plan(), make_plan()) == ()


def test_growth_by_place_and_buffer_type() -> None:
    used = 2404 * MIB
    failure = "CUDA1 takes 2.4 GiB instead of 2.3 GiB"
    assert moved(with_more(make_plan(), compute=64 * MIB, context=-MIB)) == [
        ("CUDA1", used, used + 63 * MIB, "context -1.0 MiB, compute +64.0 MiB", failure)
    ]
    assert moved(with_more(make_plan(), "CPU", compute=-MIB)) == [
        ("host CPU", 320 * MIB, 319 * MIB, "compute -1.0 MiB", "")
    ]


def test_growth_within_the_limit() -> None:
    after = with_more(make_plan(), compute=MIB)
    for growth, fails in ((Growth(bytes=MIB), False), (Growth(bytes=MIB - 1), True)):
        ((*_, failure),) = moved(after, growth)
        assert bool(failure) is fails


def test_a_buffer_type_that_goes_and_one_that_comes() -> None:
    plan = make_plan()
    rows = (Row("CUDA_Host", "CUDA0", True, 0, 0, 5 * MIB), *plan.breakdown.rows[:2])
    found = moved(OnBuild("new", "2", replace(plan.breakdown, rows=rows)))
    assert [(what, before, after) for what, before, after, *_ in found] == [
        ("host CPU", 320 * MIB, 0),
        ("host CUDA_Host", 0, 5 * MIB),
    ]


def test_what_only_moves_to_another_buffer_type_has_not_grown() -> None:
    plan = make_plan()
    (*cards, host) = plan.breakdown.rows
    elsewhere = Row("CUDA_Host", "CUDA0", True, host.model, 0, 0)
    for more, fails in ((0, False), (1, True)):
        rows = (*cards, replace(host, model=0, compute=host.compute + more), elsewhere)
        found = moved(OnBuild("new", "2", replace(plan.breakdown, rows=rows)))
        assert [(what, bool(fails_)) for what, *_, fails_ in found] == [("host CPU", False), ("host CUDA_Host", fails)]


def test_what_is_beside_the_model_is_there_too() -> None:
    plan = make_plan()
    before = replace(first_of(plan), shared=(shared_use("draft", CUDA1=100, host=5),))
    after = replace(with_more(plan), shared=(shared_use("draft", CUDA1=164, host=5), shared_use("projector", CUDA1=1)))
    (move,) = same_parameters(before, after, Growth())
    assert (move.what, move.before, move.after) == ("CUDA1 beside the model", 100 * MIB, 165 * MIB)
    assert move.failure == "CUDA1 beside the model takes 165.0 MiB instead of 100.0 MiB"
    shared = (shared_use("draft", CUDA1=1, CUDA0=7, host=3),)
    assert compare_builds.missing_of(plan, with_more(plan, compute=LEFT).breakdown or plan.breakdown, shared) == {
        "CUDA1": MIB
    }
    (*_, host) = build_report.to_dict((compared(replace(after, shared=shared)),), BUILDS)["cases"][0]["builds"][1][
        "memory"
    ]
    assert (host["device"], host["buffer_type"], host["used"]) == ("host", "beside the model", 3 * MIB)


def test_it_no_longer_fits() -> None:
    fits, grown = moved(with_more(make_plan(), compute=LEFT + MIB))
    assert fits == ("fits", 1, 0, "CUDA1 lacks 1.0 MiB", "it no longer fits: CUDA1 lacks 1.0 MiB")
    assert grown[0] == "CUDA1"


def test_what_could_not_be_measured_has_not_changed() -> None:
    assert moved(OnBuild("new", error=LlamaCppError("no"))) == []


def test_another_plan() -> None:
    after = make_plan(n_ctx=2048, problems=(Problem("CUDA0", 1, "too small"),))
    after = replace(
        after, params=replace(after.params, n_gpu_layers=30), host=replace(after.host, model=after.host.model + MIB)
    )
    found = own_plans(make_plan(), after)
    assert [(move.what, move.before, move.after, move.unit) for move in found] == [
        ("fits", 1, 0, ""),
        ("context", 4096, 2048, "tokens"),
        ("layers on devices", 33, 30, "layers"),
        ("weights on the host", 300 * MIB, 301 * MIB, "bytes"),
    ]


@named_cases(
    ("all", make_plan(), 33),
    ("all, as llama.cpp says it", make_plan(replace(make_plan().params, n_gpu_layers=-1)), 33),
    ("more than there are", make_plan(replace(make_plan().params, n_gpu_layers=99)), 33),
    ("none without a device", make_plan(devices=()), 0),
)
def test_layers_on_devices(plan: Plan, layers: int) -> None:
    few = make_plan(replace(make_plan().params, n_gpu_layers=5))
    assert [move.after for move in own_plans(few, plan) if move.unit == "layers"] == [layers]


def test_the_same_load_is_said_in_full() -> None:
    plan = make_plan()
    params = replace(
        plan.params,
        tensor_split=(3.0, 1.0),
        tensor_buft_overrides=(TensorBuftOverride("exps", "CPU"),),
        devices=("CUDA0", "CUDA1"),
        n_rs_seq=4,
        type_k="q8_0",
    )
    told = {"gpus": ["24GiB"], "llama_cpp": "new", "timeout": 9.0, "n_ctx": 7, "fit_ctx": 8, "prompt": 3, "margin": 1}
    found = load_keywords(replace(plan, params=params), told)
    assert {name: found[name] for name in ("gpus", "llama_cpp", "n_ctx", "n_gpu_layers", "tensor_split")} == {
        "gpus": ["24GiB"],
        "llama_cpp": "new",
        "n_ctx": 4096,
        "n_gpu_layers": 33,
        "tensor_split": [3.0, 1.0],
    }
    assert (found["override_tensor"], found["devices"]) == (["exps=CPU"], ["CUDA0", "CUDA1"])
    assert (found["n_rs_seq"], found["type_k"]) == (4, "q8_0")
    assert not found.keys() & {"timeout", "fit_ctx", "prompt", "margin", "allow"}


# --- subjects


def test_cases_are_asked_for_other_builds_than_theirs() -> None:
    case = Case("chat", Path("a.gguf"), {"n_ctx": 512}, Growth(bytes=3), llama_cpp="old")
    keywords = {"program": "any", "n_ctx": 512, "gpus": ("none",)}
    assert of_cases([case]) == (Subject("chat", Path("a.gguf"), keywords, Growth(bytes=3)),)
    assert not of_cases([case])[0].is_here


def test_models_are_called_as_their_files() -> None:
    found = of_models(["x/a.gguf", "b.gguf", "y/a.gguf"], {"n_ctx": 512})
    assert [(each.name, str(each.model)) for each in found] == [
        ("x/a.gguf", "x/a.gguf"),
        ("b", "b.gguf"),
        ("y/a.gguf", "y/a.gguf"),
    ]
    assert found[0].is_here and not of_models(["a"], {"gpus": ("none",)})[0].is_here
    with pytest.raises(UsageError, match=r"^a\.gguf is named twice: leave one out$"):
        of_models(["a.gguf", "a.gguf"], {})


def test_builds_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "fitter.toml"
    for text, expected in {
        "": (),
        '[history]\nllama_cpp = ["builds/old", "python"]': (str(tmp_path / "builds/old"), "python"),
    }.items():
        path.write_text(text)
        assert read_builds(path, is_trusted=True) == expected
    for text, sentence in {
        '[history]\nllama_cpp = "old"': 'history.llama_cpp is \'old\': give a list such as ["old", "new"]',
        "[history]\nllama_cpp = [1]": 'history.llama_cpp is [1]: give a list such as ["old", "new"]',
        "[history]\nbuilds = []": "unknown key 'builds' in history: choose from llama_cpp",
    }.items():
        path.write_text(text)
        with pytest.raises(UsageError) as caught:
            read_builds(path)
        assert str(caught.value).endswith(sentence)


@named_cases(
    ("none", (), UsageError, "builds are compared, and there are not two"),
    ("one", ("python",), UsageError, "builds are compared, and there are not two"),
    ("a text", "python", UsageError, "builds are compared, and there are not two"),
    ("not there", ("python", "/no/such"), UsageError, "llama_cpp '/no/such' is not there"),
    ("no llama.cpp", ("python", "/dev"), LibraryError, "there is no libllama.so in /dev"),
)
def test_builds_that_cannot_be_compared(builds: Sequence[str], kind: type[Exception], sentence: str) -> None:
    with pytest.raises(kind) as caught:
        compare_builds.compare_builds("a.gguf", builds)
    assert str(caught.value).startswith(sentence)


def test_builds_name_the_llama_cpp() -> None:
    with pytest.raises(UsageError, match="^builds says which llama.cpp: leave llama_cpp out$"):  # noqa: RUF043
        compare_builds.compare_builds("a.gguf", ("python", "python"), llama_cpp="python")


# --- how it is said

BUILDS = ("builds/old", "builds/new")
GROWN = compared(with_more(make_plan(), compute=64 * MIB))
MISFIT = compared(with_more(make_plan(), compute=LEFT + MIB))
SAME = compared(replace(with_more(make_plan()), plan=make_plan()))
PLANNED = compared(replace(with_more(make_plan()), plan=make_plan(n_ctx=2048)))
ALLOWED = compared(with_more(make_plan(), compute=MIB), growth=Growth(part=0.01))
REFUSED = compared(OnBuild("builds/new", error=LlamaCppError("unknown architecture")))
NOWHERE = Compared(Subject("gone", Path("gone.gguf")), (), UsageError("gone.gguf: no such file"))


@named_cases(
    ("the same", (SAME,), 0, 0, "1 case: 1 takes the same"),
    ("growth", (SAME, GROWN), 4, 4, "2 cases: 1 takes more with new than with old, 1 takes the same"),
    ("does not fit", (MISFIT, GROWN), 4, 4, "2 cases: 2 take more with new than with old"),
    ("within limits", (ALLOWED,), 4, 0, "1 case: 1 changed within the limits"),
    ("another plan", (PLANNED,), 4, 0, "1 case: 1 takes the same"),
    ("refused", (REFUSED, GROWN), 3, 3, "2 cases: 1 takes more with new than with old, 1 could not be compared"),
    ("cannot be read", (NOWHERE,), 2, 2, "1 case: 1 could not be compared"),
)
def test_exit_status(found: tuple[Compared, ...], diff: int, history: int, summary: str) -> None:
    assert (build_report.diff_status(found), build_report.history_status(found)) == (diff, history)
    assert build_report.summary(found, BUILDS) == summary


def test_an_error_is_a_line() -> None:
    assert build_report.error_lines((SAME, REFUSED, NOWHERE), BUILDS) == (
        "error: chat with new: unknown architecture",
        "error: gone: gone.gguf: no such file",
    )


def printed(*found: Compared, history: bool = False) -> str:
    out = io.StringIO()
    (build_report.print_history if history else build_report.print_diff)(out, found, BUILDS)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def test_a_diff_as_a_table() -> None:
    assert printed(GROWN, SAME, PLANNED) == (
        "old: 1\n"
        "new: 2\n"
        "chat\n"
        "  what       old      new              change\n"
        "! CUDA1  2.3 GiB  2.4 GiB  +64.0 MiB (+2.7 %)  compute +64.0 MiB\n"
        "chat\n"
        "  the same parameters take the same\n"
        "  fitted anew with new: context 4096 → 2048\n"
        "3 cases: 1 takes more with new than with old, 2 take the same"
    )


def test_a_history_as_a_table() -> None:
    assert printed(GROWN, MISFIT, REFUSED, NOWHERE, history=True) == (
        "case  on             old        new\n"
        "chat  devices    4.7 GiB  +64.0 MiB\n"
        "      host     320.0 MiB          =\n"
        "chat  devices    4.7 GiB  !+4.7 GiB\n"
        "      host     320.0 MiB          =\n"
        "chat  devices    4.7 GiB          -\n"
        "      host     320.0 MiB          -\n"
        "old: 1\n"
        "new: 2\n"
        "! no longer fits: chat with new, CUDA1 lacks 1.0 MiB\n"
        "4 cases: 2 take more with new than with old, 2 could not be compared"
    )


def test_markdown_has_what_changed() -> None:
    text = build_report.markdown((GROWN, SAME, PLANNED, REFUSED), BUILDS)
    assert text == (
        "### 📈 llama.cpp — 4 cases: 1 takes more with new than with old, 1 could not be compared, 2 take the same\n"
        "\n"
        "| case | what | old | new | change | |\n"
        "| --- | --- | ---: | ---: | ---: | --- |\n"
        "| chat | CUDA1 | 2.3 GiB | 2.4 GiB | +64.0 MiB | `📈 compute +64.0 MiB` |\n"
        "\n"
        "- **chat**: `fitted anew with new: context 4096 → 2048`\n"
        "- `error: chat with new: unknown architecture`\n"
        "- old: 1\n"
        "- new: 2\n"
    )


def test_csv_has_a_line_for_each_buffer_type() -> None:
    rows = list(csv.DictReader(build_report.to_csv((MISFIT, NOWHERE), BUILDS).splitlines()))
    assert len(rows) == 2 * 3
    assert rows[4] == {
        "case": "chat",
        "build": "new",
        "version": "2",
        "device": "CUDA1",
        "buffer_type": "CUDA1",
        "model": str(2048 * MIB),
        "context": str(256 * MIB),
        "compute": str(100 * MIB + LEFT + MIB),
        "used": str(2404 * MIB + LEFT + MIB),
        "fits": "false",
    }


@named_cases(
    ("the same", (SAME, SAME), "unchanged", "brightgreen"),
    ("growth", (SAME, GROWN), "1 of 2 grew", "orange"),
    ("within limits", (ALLOWED, SAME), "within limits", "brightgreen"),
    ("refused", (GROWN, REFUSED), "error", "lightgrey"),
)
def test_a_badge(found: tuple[Compared, ...], message: str, color: str) -> None:
    assert build_report.badge(found, BUILDS) == {
        "schemaVersion": 1,
        "label": "memory old → new",
        "message": message,
        "color": color,
    }


def test_the_picture_has_a_panel_for_each_case() -> None:
    hostile = replace(MISFIT, subject=replace(MISFIT.subject, name="a<b>\x1b&"))
    text = build_report.to_svg((GROWN, hostile, NOWHERE), BUILDS)
    root = ElementTree.fromstring(text)
    words = ["".join(each.itertext()) for each in root.iter("{http://www.w3.org/2000/svg}text")]
    assert words[:4] == ["Memory of the same parameters, more or less than with old", "devices", "host", "does not fit"]
    assert words[4:11] == [
        "chat",
        "4.7 GiB on devices, 320.0 MiB on the host",
        "no change",
        "+64.0 MiB",
        "old",
        "new",
        "a<b>\\x1b&",
    ]
    crosses = [each for each in root.iter("{http://www.w3.org/2000/svg}path") if each.get("class") == "bad"]
    assert len(crosses) == 2, "one in the legend, one for the build that it does not fit with"


def test_a_line_stops_where_nothing_was_measured() -> None:
    panel = change_pictures.Panel("a", "", (change_pictures.Line((0.0, None, 2.0, 1.0), "1"),), (1,))
    text = change_pictures.chart("t", ("x",), "bad", ("1", "2", "3", "4"), (panel,))
    (line,) = [part for part in text.split('"') if part.startswith("M") and "L" in part]
    assert line.count("M") == 2 and line.count("L") == 1


def test_a_peak_is_named() -> None:
    passing = with_more(make_plan(), compute=64 * MIB)
    found = Compared(GROWN.subject, (first_of(make_plan()), passing, with_more(make_plan(), compute=-MIB)))
    text = build_report.to_svg((found,), ("a", "b", "c"))
    assert text.count(">+64.0 MiB<") == text.count(">-1.0 MiB<") == 1
    assert build_report.to_svg((GROWN,), BUILDS).count(">+64.0 MiB<") == 1


def test_long_names_of_steps_leave_room() -> None:
    panel = change_pictures.Panel("a", "", (change_pictures.Line((0.0,) * 9, ""),))
    for steps, shown in ((("b1",) * 9, 9), (("a long name",) * 9, 2)):
        assert change_pictures.chart("t", ("x",), "bad", steps, (panel,)).count(f">{steps[0]}<") == shown


def test_nothing_in_a_name_acts() -> None:
    name = "a\x1b[31m|`@me`"
    hostile = replace(GROWN, subject=replace(GROWN.subject, name=name))
    for text in (printed(hostile), printed(hostile, history=True), build_report.markdown((hostile,), BUILDS)):
        assert "\x1b" not in text
    assert "\x1b" not in build_report.to_csv((hostile,), BUILDS)
    assert json.loads(json.dumps(build_report.to_dict((hostile,), BUILDS)))["cases"][0]["name"] == name
