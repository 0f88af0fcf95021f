"""What a report says, before it is opened in a browser."""

from __future__ import annotations

import html
import json
import re
import sys
from dataclasses import replace
from typing import Any

import pytest

from fitter.llama.types import TensorBuftOverride
from fitter.output.documents.document import dumps
from fitter.output.formats import is_unquoted
from fitter.output.pages.report_page import (
    NAMELESS,
    check_page,
    command_entry,
    plan_fragment,
    plan_page,
    plan_panel,
    plan_picture,
)
from fitter.output.pictures.change_pictures import moves_svg
from fitter.output.pictures.curves import charts, tokens
from fitter.output.pictures.drawing import BOLD, NARROW, WIDE
from fitter.parameters.targets import FORMATS
from fitter.planning.plan.layer_map import HOST_NAME, LayerMap, MapCell
from fitter.planning.plan.plan import Problem, with_real_load
from fitter.planning.request.summary import PoolUse, Setting
from fitter.planning.speed.cost import Part
from fitter.planning.speed.explain import Alternative, Bound, Choice
from fitter.planning.tables.parameter_rows import ContextPoint, contexts_to_try, point_of
from tests.support.cases import cases, named_cases, stored
from tests.support.plans import GIB, MIB, for_format, make_plan, make_price, reserving

ENDING = "</script><!--<script>"


def embedded(page: str, name: str) -> str:
    (text,) = re.findall(rf'<script type="application/json" id="{name}">(.*?)</script>', page, re.DOTALL)
    return str(text)


def test_the_document_cannot_end_its_script() -> None:
    plan = make_plan()
    plan = replace(plan, model=replace(plan.model, name=ENDING, path=f"/{ENDING}"))
    page = plan_page(plan)
    text = embedded(page, "plan")
    assert "<" not in text
    assert text.replace(r"\u003c", "<") == dumps(plan.to_dict())
    assert json.loads(text)["model"]["name"] == ENDING
    assert page.count("<script") == 3


def test_nothing_but_its_own_script_may_run() -> None:
    page = plan_page(make_plan())
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)
    assert "default-src &#39;none&#39;" in policy
    assert re.search(r"script-src &#39;sha256-[\w+/=]+&#39;", policy)
    assert not re.findall(r'(?:src|href)="(?!data:,")', page)


def test_memory_that_is_shared_is_a_row_of_its_own() -> None:
    setting = Setting("sudo sysctl x=1", 7, "the context can be longer where MTL0 may use more: sudo sysctl x=1")
    # 2404 MiB of the device and 320 of the host, of which both map 200
    used = 2524 * MIB
    pool = PoolUse("MTL0+host", 64 * GIB, 60 * GIB, GIB, used, ("MTL0", "host"), 200 * MIB, setting=setting)
    page = plan_page(replace(make_plan(devices=("MTL0",)), pools=(pool,)))
    (row,) = re.findall(r"<tr><th scope=.row.>MTL0\+host.*?</tr>", page, re.DOTALL)
    found = list(map(int, re.findall(r'value="(-?\d+)"', row)))
    assert found == [64 * GIB, 60 * GIB, 2148 * MIB, 256 * MIB, 120 * MIB, used, 60 * GIB - used, GIB]
    assert sum(found[2:5]) == used and "–" not in row
    assert "<dt>MTL0+host</dt><dd>2.5 GiB <small>of 64.0 GiB</small>" in page
    assert "200.0 MiB of weights are mapped by both, and counted once in their sum" in page
    assert "sudo sysctl x=1" in page


def test_the_compute_buffer_of_a_real_load_is_shown() -> None:
    page = plan_page(with_real_load(reserving(make_plan(devices=("CUDA0",)), CUDA0=4800 * MIB)))
    (row,) = re.findall(r"<tr><th scope=.row.>CUDA0.*?</tr>", page, re.DOTALL)
    assert str(4900 * MIB) in re.findall(r'value="(-?\d+)"', row)
    assert "<small>compute takes 36 MiB of the margin</small>" in row


def test_a_plan_that_does_not_fit_has_nothing_to_run() -> None:
    page = plan_page(make_plan(problems=(Problem("CUDA0", 3 * GIB, "CUDA0 lacks 3072 MiB: use less"),)))
    assert "CUDA0 lacks 3072 MiB: use less" in page
    assert "There are no arguments to copy" in page
    assert 'id="text-args"' not in page
    assert "lacks 3.0 GiB" in page


OVERRIDE = TensorBuftOverride("^blk.1.ffn_(up|down)_exps.weight$", "CPU")
COMMANDS = stored("output_report", "commands")


@pytest.mark.parametrize("name", COMMANDS)
def test_the_command_comes_first(name: str) -> None:
    path, program, head, note = COMMANDS[name]
    plan = make_plan()
    plan = replace(
        plan,
        program=program,
        model=replace(plan.model, path=path),
        params=replace(plan.params, tensor_buft_overrides=(OVERRIDE,)),
    )
    expected = head + plan.format("shell")
    assert "'^blk.1.ffn_(up|down)_exps.weight$=CPU'" in expected
    page = plan_page(plan)
    assert command_entry(plan) | {"name": "", "title": "", "meaning": ""} == {
        **dict.fromkeys(("name", "title", "meaning", "problem"), ""),
        "text": expected,
        "note": note,
    }
    first = re.findall(r"<pre.*?</pre>", page, re.DOTALL)[0]
    assert html.unescape(re.sub("<.*?>", "", first)) == expected


def test_what_else_could_be_had() -> None:
    other = Alternative(("-ctk", "q8_0", "-ctv", "q8_0"), 8192, 900.0, 52.0, True)
    smaller = Alternative((), 4096, 800.0, 61.0, False, "Q3_K_M")
    plan = replace(make_plan(estimate=make_price(generation=38.0)), alternatives=(other, smaller))
    words = re.sub(r"<[^>]+>", " ", plan_page(plan))
    assert re.search(r"What else could be had .*plan +4,096 +38 .*-ctk q8_0 -ctv q8_0 +8,192 +52 +900", words, re.S)
    assert re.search(r"a Q3_K_M file +4,096 +about 61 +about 800", words)
    assert "What else" not in plan_page(replace(plan, alternatives=()))
    lacking = make_plan(problems=(Problem("CUDA0", GIB, "CUDA0 lacks 1024 MiB"),))
    words = re.sub(r"<[^>]+>", " ", plan_page(replace(lacking, alternatives=(other,))))
    assert "What would fit" in words and not re.search(r"this plan +4,096", words)


def test_what_was_chosen_over_what() -> None:
    choices = (
        Choice("where the weights go", "layers", 2.0, "<tensors>", 3.5),
        Choice("which device has the draft", "CUDA0", 0.5, "CUDA1", None),
        Choice("the context", "4096", 1.0),
    )
    plan = make_plan(estimate=make_price(), choices=choices, bound=Bound(10.0, "the best could", 14.0))
    page = plan_page(plan)
    rows = re.findall(r'<tr><th scope="row">(where|which|the context).*?</tr>', page, re.DOTALL)
    assert rows == ["where", "which", "the context"]
    assert "&lt;tensors&gt;" in page and "3.5 s" in page and "there was none" in page
    assert "Lower bound: 10 s; this plan takes at most 40.0 % more than the best could." in page


@cases(
    (30.04, "tokens/s, estimated; 30 at 4,096 tokens"), (38.02, "tokens/s, estimated"), (None, "tokens/s, estimated")
)
def test_the_speed_with_a_full_context(full: float | None, note: str) -> None:
    plan = make_plan(estimate=make_price(full=full))
    for drawn in (plan_page(plan), plan_panel(plan, None, "a", "first plan")):
        assert f"<div><dt>generation</dt><dd>38 <small>{note}</small></dd></div>" in drawn


def test_what_takes_most_of_the_time_is_said_first() -> None:
    # 2048 + 512 tokens: 0.3, 1.4 and 8.5 seconds, and what rounds to nothing
    parts = (Part("a", 0.0001, 0.0002), Part("b", 0.0005, 0.0008), Part("c", 0.004, 0.0006), Part("d", 1e-6, 1e-6))
    page = plan_page(make_plan(estimate=make_price(parts=parts)))
    rows = re.findall(r'<tr><th scope="row">(.)</th><td class="number">(.*?)</td><td class="number">(.*?)</td>', page)
    assert rows == [("c", "87 %", "37 %"), ("b", "11 %", "50 %"), ("a", "2 %", "12 %")]


def test_invisible_characters_are_not_there_to_copy() -> None:
    plan = make_plan()
    plan = replace(plan, model=replace(plan.model, path="a\u2800b.gguf"))
    page = plan_page(plan)
    assert "it has invisible characters: use fitter fit --format ini" in page
    assert 'id="text-ini"' not in page
    assert 'id="text-args"' in page


@cases((MIB, True), (MIB - 1, False), (0, False))
def test_what_the_processor_packs_is_said(less: int, said: bool) -> None:
    plan = make_plan()
    cell = MapCell("experts", 0, ((HOST_NAME, plan.host.model + plan.host.context - less),))
    page = plan_page(plan, LayerMap(1, (*plan.breakdown.devices, HOST_NAME), (cell,)))
    assert ("the host takes 1.0 MiB more than the map shows" in page) is said


def test_the_picture_in_a_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    # of the packages for pages it needs none
    for package in ("jinja2", "markupsafe", "pygal"):
        monkeypatch.setitem(sys.modules, package, None)
    fragment = make_plan()._repr_html_()
    assert fragment == plan_fragment(make_plan())
    assert "<script" not in fragment
    # a notebook has a theme of its own
    assert "@media" not in fragment
    assert fragment.count("<svg") == 1
    assert "Model 8B fits, 4,096 tokens of context" in fragment


def test_pictures_of_a_page_have_patterns_of_their_own() -> None:
    first, second = (plan_picture(make_plan(devices=names).to_dict()) for names in (("CUDA0",), ("CUDA0", "CUDA1")))
    names = [set(re.findall(r'pattern id="([^"]+)"', drawn)) for drawn in (first, second)]
    assert all(names) and not names[0] & names[1]
    for drawn, own in zip((first, second), names, strict=True):
        assert set(re.findall(r"url\(#([^)]+)\)", drawn)) == own


def point(n_ctx: int, *, fits: bool = True) -> ContextPoint:
    return ContextPoint(n_ctx, fits, 10 * GIB, 2 * GIB, GIB, 100.0 if fits else None, 20.0 if fits else None)


@named_cases(
    ("none", [], []),
    ("one is no curve", [point(4096)], []),
    ("all", [point(4096), point(8192)], ["memory", "generation", "prompt"]),
    ("one speed is no curve", [point(4096), point(8192, fits=False)], ["memory"]),
)
def test_charts(points: list[ContextPoint], titles: list[str]) -> None:
    found = charts(points, 4096)
    assert [re.split(r"\W", chart.title)[0] for chart in found] == titles
    for chart in found:
        assert not re.search(r"<script|<style|href|<!--", chart.svg)
        assert 'role="img"' in chart.svg and "at 4,096 tokens" in chart.svg
        assert re.findall(r'r="7"', chart.svg)


def test_the_chart_and_the_table_have_the_speed_with_a_full_context() -> None:
    points = [
        replace(point(n_ctx), full_context_tokens_per_second=full, prompt=prompt)
        for n_ctx, full, prompt in ((4096, 18.0, 2048), (8192, 15.5, 4096))
    ]
    assert [c.lines for c in charts(points, 4096)[1:]] == [("for the request", "with a full context"), ("prompt",)]
    page = plan_page(make_plan(estimate=make_price()), contexts=points)
    assert re.findall(r'<td data-label="with a full context">(.*?)</td>', page) == ["18", "15.5"]
    assert "Speeds are estimated, for a longer prompt the larger the context." in page
    same = [replace(each, prompt=2048, full_context_tokens_per_second=None) for each in points]
    page = plan_page(make_plan(estimate=make_price()), contexts=same)
    assert "with a full context" not in page
    assert "Speeds are estimated, for the same request." in page


def test_tokens() -> None:
    assert [tokens(n) for n in (512, 4096, 15104, 40960, 131072, 1023999, 1048576, 10 * 2**20)] == [
        *("512", "4k", "14.8k", "40k", "128k", "1000k", "1M", "10M")
    ]


@cases(
    (40960, 1, 4096, 40960, [4096, 8192, 16384, 32768]),
    (40960, 1, 4096, 5000, [4096, 8192, 16384, 32768, 40960]),
    (8192, 4, 4096, 16384, [32768]),
    (2048, 1, 4096, 2048, []),
    (0, 1, 4096, 4096, [1]),
    (2**21, 1, 4096, 4096, [2**i for i in range(13, 22)]),
)
def test_contexts_to_try(trained: int, streams: int, smallest: int, chosen: int, expected: list[int]) -> None:
    assert contexts_to_try(trained, streams, smallest, chosen) == expected


def test_the_point_of_a_plan() -> None:
    assert point_of(make_plan(estimate=make_price())) == ContextPoint(
        4096, True, 2 * 2404 * MIB, 320 * MIB, 300 * MIB, 1240.4, 38.04, prompt=2048
    )
    full = point_of(make_plan(estimate=make_price(full=20.0))).full_context_tokens_per_second
    assert full == pytest.approx(20.0)
    lacking = make_plan(problems=(Problem("host", GIB, "a long message"),))
    assert point_of(lacking).message == "host lacks 1.0 GiB"


def test_a_check_without_a_change() -> None:
    case = {"name": "a", "status": "same", "error": None, "failures": [], "moves": [], "fitted": []}
    page = check_page({"schema": 1, "passed": True, "cases": [case]}, {}, "1 case: 1 unchanged")
    assert "Nothing changed." in page and "Passed" in page


def move(unit: str | None, before: float | None, after: float) -> dict[str, Any]:
    figures = {"before": before, "after": after, "unit": unit}
    return {"what": "it", **figures, "detail": "", "failure": False, "budget": False}


@cases(
    ("bytes", 1024, 2048 * 1024, ["1.0 KiB", "2.0 MiB", "+2.0 MiB", "+204700.0 %"]),
    ("bytes", 2048, 1024, ["2.0 KiB", "1.0 KiB", "-1.0 KiB", "-50.0 %"]),
    ("bytes", None, 1024, ["-", "1.0 KiB", "", ""]),
    ("bytes", 0, 1024, ["0 B", "1.0 KiB", "+1.0 KiB", ""]),
    ("tokens", 4096, 8192, ["4,096", "8,192", "+4,096", "+100.0 %"]),
    ("tokens/s", 2150000.0, 1946000.0, ["2,150,000 t/s", "1,950,000 t/s", "-204,000 t/s", "-9.5 %"]),
    ("tokens/s", 10.0, 20.0, ["10 t/s", "20 t/s", "+10 t/s", "+100.0 %"]),
    (None, 1, 0, ["yes", "no", "", ""]),
)
def test_what_changed_in_a_case(unit: str | None, before: float | None, after: float, words: list[str]) -> None:
    fitted = [{"kind": "choice", "what": "<n_ctx>", "before": "512", "after": "1024"}]
    case = {"name": "a", "status": "changed", "error": None, "failures": [], "fitted": fitted}
    page = check_page({"schema": 1, "passed": True, "cases": [{**case, "moves": [move(unit, before, after)]}]}, {}, "")
    (row,) = re.findall(r'<tr><th scope="row">it</th>(.*?)</tr>', page)
    assert [re.sub("<.*?>", "", cell) for cell in re.findall(r"<td.*?</td>", row)][:3] == [
        words[0],
        words[1],
        words[2] + words[3],
    ]
    assert "<li>&lt;n_ctx&gt; 512 → 1024</li>" in page


@cases("GPU", "CUDA0 (NVIDIA GeForce RTX 5090 Laptop) used", "w" * 200)
def test_no_name_in_the_picture_of_a_check_is_clipped(what: str) -> None:
    moves = [{**move("bytes", 1024, 2048), "what": what}]
    for width in (NARROW, WIDE):
        drawn = moves_svg(moves, width)
        (name,) = re.findall(r'<text class="name" x="(\d+)" y="\d+">(.*?)</text>', drawn)
        assert int(name[0]) + BOLD * len(name[1]) <= width and (name[1] == what or name[1].endswith("…"))


def test_the_host_alone() -> None:
    page = plan_page(make_plan(devices=()))
    assert page.count('<tr><th scope="row">host') == 1
    assert "no limit" in page


def test_a_panel_stands_beside_another_one() -> None:
    plan = make_plan()
    plan = replace(plan, model=replace(plan.model, name=ENDING))
    first, second = (plan_panel(plan, None, name, of) for name, of in (("a", "first plan"), ("b", "second plan")))
    ids = [re.findall(r'(?<!data-)\bid="([^"]*)"', panel) for panel in (first, second)]
    own = [[each for each in found if not each.startswith("hatched-")] for found in ids]
    shown = ("command", *NAMELESS)
    for found, name in zip(own, "ab", strict=True):
        # arguments of ik_llama.cpp are of plans for it
        found.append(f"{name}-text-ik_llama")
    assert own == [[f"{name}-{what}-{each}" for each in shown for what in ("format", "text")] for name in "ab"]
    assert "<script" not in first and "<style" not in first
    assert 'aria-label="Table of each device&#39;s memory, first plan"' in first
    sizes = re.compile(r'<data value="\d+">')
    assert sizes.findall(first) == sizes.findall(plan_page(plan)) != []


def test_a_line_that_a_shell_would_change_says_so_once() -> None:
    plan = for_format(make_plan(), "ik_llama")
    plan = replace(plan, params=replace(plan.params, tensor_buft_overrides=(OVERRIDE,)))
    for text in (plan_page(plan), plan_panel(plan, None, "a", "first plan")):
        assert text.count("It has no quotes") == sum(map(is_unquoted, FORMATS))


@cases(
    ("-c 4096 -fit off", ["-c", "-fit"]), ("take less with --host-margin", ["--host-margin"]), ("a-b <-x> -- -1 -é", [])
)
def test_no_option_is_broken_at_its_hyphens(text: str, whole: list[str]) -> None:
    page = plan_page(make_plan(problems=(Problem("CUDA0", GIB, text),)))
    (problem,) = re.findall(r'<p class="problem">(.*?)</p>', page)
    assert re.findall(r'<span class="whole">(.*?)</span>', problem) == whole
    assert html.unescape(re.sub(r"</?span[^>]*>", "", problem)) == text
