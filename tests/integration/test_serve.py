"""``fitter serve``: the page in a browser, the API beside ``fitter.fit``, what is refused, and how it ends."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jsonschema
import psutil
import pytest

import fitter
from fitter.installation import install_command
from fitter.llama.build import build_folder
from fitter.machine import gpu_catalogue
from fitter.model.shapes.catalogue import shapes
from fitter.output.pages import report_page
from fitter.parameters.kinds import Whole
from fitter.parameters.table import CACHE_TYPES, PARAMETERS
from fitter.parameters.values import MAX_DEVICES
from fitter.planning.request.session import named
from fitter.programs import PROGRAMS
from fitter.web.guard import HEADERS
from fitter.web.planner_page import worded
from fitter.web.questions import ASKED
from tests.support import patience, ranges
from tests.support.cases import cases, named_cases
from tests.support.command import Command, run_fitter
from tests.support.hub import hub_of
from tests.support.pages import heard, pasted, reads, words_of
from tests.support.patience import until
from tools.comparisons.upstream import TOOLS
from tools.loopback.web_server import Served, ask, load, serving
from tools.models.tiny import TINY_DENSE, TINY_MOE, write_tiny

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

WIDE, PHONE = 1300, 390
MARKUP = "<img src=x onerror=document.title='owned'><script>alert(1)</script>{{ 7*7 }}\"'&amp;"
TOKEN = "hf_abcdefghijklmnopqrstuvwxyz"
CARD = ["1GiB"]
UNDECODABLE = os.fsdecode(b"na\xefve/caf\xe9.gguf")


@dataclass(frozen=True)
class Site:
    """A server, the directory that it offers, and the files that another one has, which it may not ask."""

    served: Served
    root: Path
    files: ranges.FileServer

    @property
    def url(self) -> str:
        return self.served.url

    def get(self, path: str) -> Any:
        """The JSON at a path."""
        connection = self.served.connection()
        connection.request("GET", path)
        answer = connection.getresponse()
        assert (answer.status, answer.headers["content-type"]) == (200, "application/json")
        return json.loads(answer.read())

    def question(self) -> Any:
        """The schema of a question."""
        document = self.get("/api/v1/openapi.json")
        return document["components"]["schemas"]["PlanQuestion"]

    def plan(self, **question: Any) -> tuple[int, Any]:
        """Ask the API for a plan, and return the status and the answer."""
        status, body = ask(self.served.connection(), "/api/v1/plan", question)
        assert TOKEN not in body
        return status, json.loads(body)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("models")
    root = folder / "root"
    (root / "deep").mkdir(parents=True)
    write_tiny(root / "dense.gguf", TINY_DENSE)
    write_tiny(root / "deep" / "moe.gguf", TINY_MOE)
    write_tiny(root / "deep" / "dense-Q8_0.gguf", TINY_DENSE)
    write_tiny(root / "hostile.gguf", replace(TINY_DENSE, name=MARKUP))
    (root / UNDECODABLE).parent.mkdir()
    write_tiny(root / UNDECODABLE, TINY_DENSE)
    (root / "broken.gguf").write_bytes(b"GGUF\3\0\0\0")
    write_tiny(folder / "outside.gguf", TINY_DENSE)
    (root / "link.gguf").symlink_to(folder / "outside.gguf")
    with (
        ranges.serving(folder) as files,
        serving("--root", str(root), "--workers", "3", HF_ENDPOINT=files.url.rstrip("/"), HF_TOKEN=TOKEN) as served,
    ):
        yield Site(served, root, files)
        assert served.stop() == (0, [])


@contextmanager
def opened(
    browser: Browser, site: Site, fragment: str = "", width: int = WIDE, scheme: Any = "light", **settings: Any
) -> Iterator[Page]:
    """The page with a first plan; it may not complain, nor ask another server for anything."""
    said: list[str] = []
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme, **settings)
    context.set_default_timeout(1000 * patience.SECONDS)
    page = context.new_page()
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("dialog", lambda dialog: (said.append(dialog.message), dialog.dismiss()))
    page.on("request", lambda request: None if request.url.startswith(site.url) else said.append(request.url))
    page.goto(f"{site.url}{fragment}")
    answered(page)
    yield page
    assert said == []
    context.close()


def answered(page: Page) -> None:
    """Wait until each plan is the one of what is chosen."""
    from playwright.sync_api import expect

    planned = ":has(.panel[aria-busy=false] .verdict, .failed:not([hidden]))"
    # a panel is busy from the change on
    expect(page.locator(f".side:not([hidden]):not({planned})")).to_have_count(0, timeout=1000 * patience.SECONDS)
    expect(page.locator(".side:not([hidden]) .panel[aria-busy=true]")).to_have_count(0, timeout=1000 * patience.SECONDS)


def figures(page: Page, side: str = "a") -> list[int]:
    """Every number of bytes in the table of a plan."""
    return [int(each.get_attribute("value") or 0) for each in page.locator(f"#{side} .panel .sizes data").all()]


def fact(page: Page, name: str, side: str = "a") -> str:
    """A figure at the top of a plan."""
    return page.locator(f"#{side} .facts div", has_text=name).locator("dd").inner_text().split()[0]


def chosen(page: Page, selector: str, value: str) -> None:
    """Write into a field and leave it."""
    page.locator(selector).fill(value)
    page.locator(selector).blur()
    answered(page)


def test_pick_change_compare_share_and_open_again(site: Site, browser: Browser) -> None:
    with opened(browser, site, "#a.model=dense.gguf&a.gpus=1GiB", permissions=["clipboard-read"]) as page:
        assert page.locator("#a .verdict").inner_text() == "Fits"
        assert page.locator("#a h2").inner_text() == "tiny dense"
        chosen(page, "#a-model", "deep/moe.gguf")
        assert page.locator("#a h2").inner_text() == "tiny moe"
        chosen(page, "#a .gpu", "rtx-3090")
        chosen(page, "#a .count", "2")
        page.locator("#a .steps").fill("4")
        page.locator("#a-type_k").select_option("q8_0")
        page.locator("#a-margin").fill("2048")
        answered(page)
        status, plan = site.plan(
            model="deep/moe.gguf", gpus=["2x rtx-3090"], n_ctx=2048, type_k="q8_0", margin="2048MiB"
        )
        assert (status, plan["fits"], plan["devices"][0]["margin"]) == (200, True, 2048 << 20)
        assert fact(page, "context") == "2,048"
        used = [plan["devices"][0], plan["host"]]
        assert {*figures(page)} >= {use[key] for use in used for key in ("model", "context", "used", "left")} - {None}
        page.locator("#compare").click()
        answered(page)
        chosen(page, "#b .gpu", "rtx-4090")
        page.locator("#b .steps").fill("6")
        answered(page)
        assert [fact(page, "context", side) for side in "ab"] == ["2,048", "4,096"]
        rows = [row.inner_text().split("\t") for row in page.locator("#differences tbody tr").all()]
        assert rows[:4] == [
            ["model", "deep/moe.gguf", "deep/moe.gguf"],
            ["cards", "2x rtx-3090", "2x rtx-4090"],
            ["verdict", "Fits", "Fits"],
            ["context", "2,048 tokens", "4,096 tokens"],
        ]
        says = heard(page)
        page.locator("#share").click()
        says("Copied")
        address = page.evaluate("navigator.clipboard.readText()")
        page.locator("#a .panel summary").first.click()
        text = page.locator("#sides").inner_text()
        page.reload()
        answered(page)
        page.locator("#a .panel summary").first.click()
        assert page.locator("#sides").inner_text() == text
    with opened(browser, site, address.removeprefix(site.url)) as page:
        page.locator("#a .panel summary").first.click()
        assert page.locator("#sides").inner_text() == text
        assert page.locator("#compare").get_attribute("aria-pressed") == "true"


@cases("1GiB", "1MiB")
def test_the_command_is_pasted_and_run(cards: str, site: Site, tmp_path: Path, browser: Browser) -> None:
    expected = site.plan(model="deep/moe.gguf", gpus=[cards], n_ctx=2048)[1]["arguments"]
    # nobody gave a permission
    with opened(browser, site, f"#a.model=deep/moe.gguf&a.gpus={cards}&a.n_ctx=2048") as page:
        says = heard(page)
        page.locator("#a .command button").click()
        says("Copied")
        line = pasted(page)
        assert str(site.root) not in page.content()
    assert words_of(line, tmp_path) == ["llama-server", "-m", "deep/moe.gguf", *expected]


def test_a_directory_is_a_table_of_plans(site: Site, browser: Browser) -> None:
    from playwright.sync_api import expect

    planned = fitter.repository(site.root / "deep", gpus=CARD, program="llama-server", n_ctx=2048)
    assert planned.best is not None and len(planned.found) == 2
    with opened(browser, site, "#a.model=deep/&a.gpus=1GiB&a.n_ctx=2048", PHONE) as page:
        assert page.locator("#a .verdict").inner_text() == "2 of 2 models fit"
        assert page.locator("#a .open").all_inner_texts() == [each.name for each in planned.found]
        assert page.locator("#a tr.chosen .open").all_inner_texts() == [planned.best.name]
        contexts = page.locator("#a td[data-label=context]").all_inner_texts()
        assert contexts == [f"{each.n_ctx:,}" for each in planned.found]
        assert f"deep/{planned.best.name}" in page.locator("#a-text-command").inner_text()
        assert page.evaluate("document.documentElement.scrollWidth") == PHONE
        other = next(each.name for each in planned.found if each is not planned.best)
        page.locator("#a .open", has_text=other).click()
        answered(page)
        assert page.locator("#a .verdict").inner_text() == "Fits"
        assert page.locator("#a-model").input_value() == f"deep/{other}"
        expect(page.locator("#a .verdict")).to_be_in_viewport()
        assert page.url.partition("#")[2].startswith(f"a.model=deep%2F{other}&")
        page.locator("#a .back").get_by_role("button", name="All models of deep/").click()
        answered(page)
        assert (page.locator("#a-model").input_value(), page.locator("#a .open").count()) == ("deep/", 2)
        assert not page.locator("#a .back").is_visible()
        assert page.locator("#models option[value='deep/']").inner_text() == "2 models"
        # it has a link to a file outside
        chosen(page, "#a-model", "./")
        reads(page.locator("#a .failed"), "'./' has links to other places: plan one of its files")
        chosen(page, "#a-model", "../")
        reads(page.locator("#a .failed"), "there are no models in '../': take a directory of the list")
    status, answer = site.plan(model="deep/", gpus=CARD)
    assert (status, answer["error"]) == (400, "deep/ holds several models: name a file of it")


def test_how_far_a_directory_is(site: Site, browser: Browser) -> None:
    from playwright.sync_api import Route, expect

    held: list[Route] = []
    with opened(browser, site, "#a.model=deep/&a.gpus=1GiB&a.n_ctx=2048") as page:
        page.route("**/progress/*", lambda route: route.fulfill(json={"said": "planned 1 of 2: a"}))
        page.route("**/panel/a", lambda route: held.append(route))
        page.locator("#a-context").fill("4096")
        page.locator("#a-context").blur()
        said = page.locator("#a .panel[aria-busy=true]")
        expect(said).to_have_attribute("data-said", "planned 1 of 2: a", timeout=1000 * patience.SECONDS)
        held[0].continue_()
        answered(page)
        assert page.locator("#a .open").count() == 2
    assert site.get("/progress/nobody") == {"said": ""}


OPTION = re.compile(r"(?<![\w-])--?[a-z][a-z-]*")


def test_nobody_reads_options_on_the_page(site: Site, browser: Browser) -> None:
    for question in (
        "a.model=dense.gguf&a.gpus=1GiB",
        "a.model=dense.gguf&a.gpus=600MiB&a.host_memory=1MiB&a.n_ctx=4096",
        "a.model=dense.gguf&a.gpus=rtx-9999",
        "a.model=deep/&a.gpus=none",
        "a.model=dense.gguf&a.gpus=1GiB&a.host_memory=much",
    ):
        with opened(browser, site, f"#{question}") as page:
            page.evaluate("for (const each of document.querySelectorAll('pre, .format, datalist')) each.remove()")
            for each in page.locator("details").all():
                each.locator("summary").click()
            assert OPTION.findall(page.locator("body").inner_text()) == [], question


def test_work_and_users_are_chosen(site: Site, browser: Browser) -> None:
    with opened(browser, site, "#a.model=dense.gguf&a.gpus=1GiB") as page:
        assert page.locator("#a [name=workload] option").all_inner_texts() == ["one request", *named()]
        page.locator("#a-work").select_option("batch")
        chosen(page, "#a-users", "3")
        status, plan = site.plan(model="dense.gguf", gpus=["1GiB"], workload="batch", users=3)
        assert (status, plan["params"]["n_seq_max"], len(plan["turns"]["points"])) == (200, 3, 3)
        page.locator("#a summary", has_text="Turns and users").click()
        rows = page.locator("#a details", has_text="Turns and users").locator("tbody th")
        assert rows.all_inner_texts() == ["1", "2", "3"]
        assert "a.workload=batch&a.users=3" in page.url


def test_fields_allow_what_the_table_does(site: Site, browser: Browser) -> None:
    with opened(browser, site, "#a.model=dense.gguf&a.gpus=1GiB") as page:
        for name in ("n_seq_max", "users"):
            field, kind = page.locator(f"#a [name={name}]"), PARAMETERS[name].kind
            assert isinstance(kind, Whole)
            assert [field.get_attribute(each) for each in ("min", "max")] == [str(kind.least), str(kind.most)]
        assert page.locator("#a .count").get_attribute("max") == str(MAX_DEVICES)
        for name, values in (("type_k", CACHE_TYPES), ("type_v", CACHE_TYPES), ("program", PROGRAMS)):
            assert page.locator(f"#a [name={name}] option").all_inner_texts() == list(values)
        for field, value, says, right in (
            ("#a-slots", "257", "Slots: give a whole number from 1 to 256", "256"),
            ("#a-margin", "-1", "Margin, in MiB: give a whole number of 0 or more", ""),
            ("#a-context", "much", "Context, in tokens: give tokens, such as 32768 or 32k", ""),
            ("#a-context", "1.5", "Context, in tokens: give tokens, such as 32768 or 32k", "2048"),
            ("#a .count", "-3", "How many of this card: give a whole number from 1 to 16", "1"),
        ):
            page.locator(field).fill(value)
            reads(page.locator("#a .failed"), says)
            assert page.locator("#a .verdict").count() == 0
            chosen(page, field, right)
            assert page.locator("#a .verdict").inner_text() == "Fits"


def test_a_model_and_a_context_are_typed_as_people_say_them(site: Site, browser: Browser) -> None:
    with opened(browser, site, "#a.model=smollm2-135m&a.gpus=1GiB") as page:
        assert page.locator("#a-type").is_visible()
        page.locator("#a-context").fill("2k")
        answered(page)
        assert (fact(page, "context"), page.locator("#a-steps").input_value()) == ("2,048", "4")
        chosen(page, "#a-type", "Q8_0")
        assert "smollm2-135m-Q8_0.gguf" in page.locator("#a pre").first.inner_text()
        chosen(page, "#a-model", "smollm3-135m")
        reads(page.locator("#a .failed"), "there is no model 'smollm3-135m' here: take one of the list")


def test_what_else_could_be_had_and_why_it_is_slow(site: Site, browser: Browser) -> None:
    """As ``fitter`` says it, in the words of the page."""
    words = {"gpus": ["8GiB"], "n_ctx": 8192, "program": "llama-server"}
    plan = fitter.fit("shape://gemma-3-12b", **words, alternatives=True)
    assert plan.alternatives and plan.estimate is not None
    with opened(browser, site, "#a.model=gemma-3-12b&a.gpus=8GiB&a.n_ctx=8192") as page:
        heading = page.locator("#a h3", has_text="What else could be had")
        assert heading.is_visible()
        rows = page.locator("#a table", has_text="this plan").locator("tbody th")
        assert rows.all_inner_texts() == [
            "this plan",
            *(
                f"quantization {each.file_type}" if each.file_type else worded(" ".join(each.arguments))
                for each in plan.alternatives
            ),
        ]
        page.locator("#a summary", has_text="Why is it not faster?").click()
        why = page.locator("#a details", has_text="Where the time goes")
        assert "host: attention" in why.inner_text() and "micro batch" in why.inner_text()
        assert not re.search(r"\s--?[a-z]", why.inner_text())


def test_the_verdict_is_above_the_form_on_a_telephone(site: Site, browser: Browser) -> None:
    for question in ("a.gpus=1GiB", "a.gpus=rtx-9999"):
        for width, is_above in ((PHONE, True), (WIDE, False)):
            with opened(browser, site, f"#a.model=dense.gguf&{question}", width) as page:
                places = [page.locator(each).bounding_box() for each in ("#a .verdict, #a .failed:visible", "#a form")]
                assert places[0] is not None and places[1] is not None
                assert (places[0]["y"] < places[1]["y"]) == is_above


def test_a_slider_is_moved_with_the_keyboard(site: Site, browser: Browser) -> None:
    with opened(browser, site, "#a.model=dense.gguf&a.gpus=1GiB&a.n_ctx=512") as page:
        asked: list[Any] = []
        page.on("request", lambda request: asked.append(request.post_data_json))
        page.locator("#a .steps").focus()
        # no pause after a key is long, however busy the machine is
        page.clock.install(time=0)
        page.clock.pause_at(1000)
        for _ in range(4):
            page.keyboard.press("ArrowRight")
        assert page.locator("#a .panel").get_attribute("aria-busy") == "true" and not asked
        page.clock.run_for(1000)
        answered(page)
        assert fact(page, "context") == "2,048"
        assert [each["n_ctx"] for each in asked] == [2048], "what is asked last is what counts"


def test_a_plan_that_fails_is_one_line(site: Site, browser: Browser) -> None:
    with opened(browser, site, "#a.model=dense.gguf&a.gpus=1GiB") as page:
        chosen(page, "#a-host", "1MiB")
        chosen(page, "#a .gpu", "600MiB")
        assert page.locator("#a .verdict").inner_text() == "Does not fit"
        words = {"gpus": ["600MiB"], "host_memory": "1MiB"}
        status, plan = site.plan(model="dense.gguf", **words)
        assert (status, plan["fits"]) == (200, False)
        problems = fitter.fit(site.root / "dense.gguf", program="llama-server", **words).problems
        assert [each.message for each in problems] == [each["message"] for each in plan["problems"]]
        messages = [worded(each.message) for each in problems]
        assert page.locator("#a .problem:visible").all_inner_texts() == messages
        chosen(page, "#a .gpu", "rtx-9999")
        failed = page.locator("#a .failed")
        assert failed.inner_text() == worded(site.plan(model="dense.gguf", gpus=["rtx-9999"])[1]["error"])
        assert "\n" not in failed.inner_text() and "unknown GPU" in failed.inner_text()
        chosen(page, "#a .gpu", "8GiB")
        page.locator("#a-host").fill("")
        page.locator("#a-host").blur()
        answered(page)
        assert (failed.is_visible(), page.locator("#a .verdict").inner_text()) == (False, "Fits")


def test_what_an_address_cannot_say_is_named(site: Site, browser: Browser) -> None:
    strange = "a.margin=auto&a.n_seq_max=four&a.type_k=q9_9&a.n_ctx=many&a.owner=me&x=1"
    with opened(browser, site, f"#a.model=dense.gguf&a.gpus=1GiB&a.type_v=q8_0&{strange}") as page:
        note = page.locator("#ignored")
        said = "x=1, a.margin=auto, a.n_seq_max=four, a.type_k=q9_9, a.n_ctx=many, a.owner=me"
        reads(note, f"The address says what cannot be chosen here, which is ignored: {said}")
        assert fact(page, "context") == "16,384"
        page.locator("#a .steps").fill("3")
        answered(page)
        assert not note.is_visible()
        assert page.url.partition("#")[2] == "a.model=dense.gguf&a.gpus=1GiB&a.n_ctx=1536&a.type_v=q8_0"
        page.evaluate("location.hash = 'a.model=dense.gguf&a.gpus=2x+1GiB'")
        reads(page.locator("#a .facts dt").nth(3), "on 2 devices")


def test_without_a_model_or_a_card_there_is_no_plan(site: Site, browser: Browser) -> None:
    with opened(browser, site, "#a.model=dense.gguf&a.gpus=1GiB") as page:
        for field, value in (("#a-model", "dense.gguf"), ("#a .gpu", "1GiB")):
            page.locator(field).fill("")
            page.locator(field).blur()
            reads(page.locator("#a .panel"), "Pick a model and a card.")
            chosen(page, field, value)
            assert page.locator("#a .verdict").inner_text() == "Fits"


def test_a_server_that_ends_is_asked_again(site: Site, browser: Browser) -> None:
    with opened(browser, site, "#a.model=dense.gguf&a.gpus=1GiB") as page:
        # what it answers to a question that it ends
        page.route("**/panel/a", lambda route: route.fulfill(json={"html": None, "error": None}))
        page.locator("#a .steps").fill("3")
        reads(page.locator("#a .failed"), "the server does not answer: start it again, then try again")
        assert page.locator("#a .verdict").count() == 0
        page.unroute("**/panel/a")
        page.locator("#a .again").click()
        reads(page.locator("#a .facts dd").first, "1,536 tokens")
        assert not page.locator("#a .again").is_visible()


def test_this_machine_is_planned_for_where_nobody_else_can_ask(site: Site, browser: Browser) -> None:
    # a program that keeps nothing of prompts: what a server keeps depends on what is free
    expected = fitter.fit(site.root / "dense.gguf", program="any", n_ctx=4096)
    with opened(browser, site, "#a.model=dense.gguf&a.gpus=1GiB&a.n_ctx=4096&a.program=any") as page:
        page.locator("#a .own").check()
        answered(page)
        assert (page.locator("#a .gpu").is_visible(), page.locator("#a .add").is_visible()) == (False, False)
        assert fact(page, "host memory") == report_page.human(expected.host.used).split()[0]
        shared = page.url
        page.goto("about:blank")
        page.goto(shared)
        answered(page)
        assert page.locator("#a .own").is_checked()
        assert fact(page, "host memory") == report_page.human(expected.host.used).split()[0]
    status, plan = site.plan(model="dense.gguf", n_ctx=4096, program="any")
    assert (status, plan["arguments"]) == (200, list(expected.arguments()))
    assert [each["name"] for each in plan["devices"]] == [use.name for use in expected.devices]
    assert plan["host"]["used"] == expected.host.used


def test_no_process_stays_on_this_machines_devices(tmp_path: Path) -> None:
    write_tiny(tmp_path / "dense.gguf", TINY_DENSE)
    with serving("--root", str(tmp_path), "--workers", "1") as served:
        for gpus, is_left in ((None, False), (CARD, True)):
            assert ask(served.connection(), "/api/v1/plan", {"model": "dense.gguf", "gpus": gpus})[0] == 200
            assert bool(served.children()) == is_left


def test_a_name_with_markup_is_text(site: Site, browser: Browser) -> None:
    with opened(browser, site, "#a.model=hostile.gguf&a.gpus=1GiB&b.model=hostile.gguf&b.gpus=2GiB") as page:
        assert page.locator("#a h2").inner_text() == MARKUP
        assert page.title() == "fitter: plan a model"
        assert page.locator(".panel img, .panel script").count() == 0
        chosen(page, "#a-model", MARKUP[:290])
        assert MARKUP in page.locator("#a .failed").inner_text()
        assert page.locator(".failed img").count() == 0


@cases(("light", WIDE), ("dark", PHONE))
def test_everyone_can_use_it(scheme: str, width: int, site: Site, browser: Browser) -> None:
    from axe_playwright_python.sync_playwright import Axe

    one = "#a.model=deep/&a.gpus=1GiB&a.n_ctx=2048"
    both = "#a.model=dense.gguf&a.gpus=1GiB&b.model=deep/moe.gguf&b.gpus=2x+600MiB&b.host_memory=1MiB&b.n_ctx=900000"
    for question in (one, both):
        # axe's own script is not one that the page allows
        with opened(browser, site, question, width, scheme, bypass_csp=True) as page:
            for details in page.locator("details:visible").all():
                details.locator("summary").click()
            found = Axe().run(page).response["violations"]
            assert [(each["id"], each["impact"], each["nodes"][0]["target"]) for each in found] == []
            assert page.evaluate("document.documentElement.scrollWidth") == width


def test_the_api_has_a_page(site: Site, browser: Browser) -> None:
    document = site.get("/api/v1/openapi.json")
    calls = {f"/api/v1/{name}" for name in ("plan", "plans", "models", "shapes", "gpus")}
    assert set(document["paths"]) == {*calls, "/health", "/metrics"}
    keys = document["components"]["schemas"]["PlanQuestion"]["properties"]
    assert set(keys) == {"model", "gpus", "session", *ASKED}
    context = browser.new_context()
    context.set_default_timeout(1000 * patience.SECONDS)
    page = context.new_page()
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url.removeprefix(site.url)))
    page.goto(f"{site.url}api")
    one, several = page.locator("section").nth(0), page.locator("section").nth(1)
    assert one.locator("tbody th code").all_inner_texts() == list(keys)
    assert several.locator("tbody th code").all_inner_texts() == ["questions"]
    assert sorted(asked) == ["api", "style.css"]
    meanings = dict(zip(keys, one.locator("tbody td").all_inner_texts(), strict=True))
    assert meanings["host_margin"].endswith(" Bytes, or a text such as 24GiB. [default: 1024 MiB]")
    answers = document["paths"]["/api/v1/plan"]["post"]["responses"]
    assert one.locator("dt").all_inner_texts() == [status for status in answers if status != "200"]
    context.close()


# --- the API


def test_the_api_answers_as_fit_does(site: Site) -> None:
    words = {"gpus": ["rtx-3090", "8GiB"], "n_ctx": 4096, "type_k": "q8_0", "type_v": "q8_0", "n_seq_max": 2}
    asked = {"model": "dense.gguf", **words}
    jsonschema.validate(asked, site.question())
    status, document = site.plan(**asked)
    expected = fitter.fit(site.root / "dense.gguf", program="llama-server", **words).to_dict()
    expected["model"]["path"] = "dense.gguf"
    expected["llama_cpp"]["libllama"] = Path(expected["llama_cpp"]["libllama"]).name
    assert (status, {**document, "search": None}) == (200, {**expected, "search": None})


@named_cases(
    ("a number of tokens", "n_ctx", [4096, "4k", None], [-1, 1.5, [4096]]),
    ("a number of a range", "n_seq_max", [1, 256], [0, 257]),
    ("yes or no", "kv_unified", [True, False], ["true", 2]),
    ("a word", "type_k", ["q8_0"], ["q9_9", 8, True]),
    ("a size", "host_memory", ["64GiB", 1 << 36], [True, 1.5, ["64GiB"]]),
    ("a size for each card", "margin", ["1GiB", 1 << 30, ["1GiB"], "auto"], [True, [True]]),
    ("a speed", "host_bandwidth", ["60GB/s", 6e10], [True, ["60GB/s"]]),
    ("work", "workload", ["chat", "prompt=100,users=2"], [7, ["chat"]]),
    ("words", "allow", [["kv-q8_0"], []], [1, [1]]),
)
def test_the_document_says_what_is_taken(name: str, right: Sequence[Any], wrong: Sequence[Any], site: Site) -> None:
    valid = jsonschema.Draft202012Validator(site.question()).is_valid
    for values, expected in ((right, True), (wrong, False)):
        for value in values:
            asked = {"model": "dense.gguf", "gpus": CARD, name: value}
            assert (valid(asked), site.plan(**asked)[0] == 200) == (expected, expected), value


def test_the_lists_are_those_of_the_commands(site: Site) -> None:
    models = ["broken.gguf", "deep/dense-Q8_0.gguf", "deep/moe.gguf", "dense.gguf", "hostile.gguf"]
    models.append("na\\xefve/caf\\xe9.gguf")
    assert [each["model"] for each in site.get("/api/v1/models")["models"]] == models
    assert [each["name"] for each in site.get("/api/v1/gpus")["gpus"]] == list(gpu_catalogue.gpus())
    assert [each["name"] for each in site.get("/api/v1/shapes")["shapes"]] == [each.name for each in shapes()]


def test_a_name_that_is_no_utf_8_is_planned(site: Site) -> None:
    name = "na\\xefve/caf\\xe9.gguf"
    status, plan = site.plan(model=name, gpus=CARD)
    assert (status, plan["model"]["path"]) == (200, name)
    assert f'value="{name}"' in said(site, f"Host: {site.served.host}", "Connection: close", start="GET / HTTP/1.1")[1]
    for other in ("na\\xefve/caf\\xea.gguf", "na\\xefve\\caf\\xe9.gguf", "\\x2e\\x2e/outside.gguf"):
        assert site.plan(model=other, gpus=CARD)[0] == 422


@named_cases(
    ("no such model", {"model": "none.gguf"}, 422, "there is no model 'none.gguf' here: take one of the list"),
    ("a broken model", {"model": "broken.gguf"}, 422, "broken.gguf: "),
    ("above the root", {"model": "../outside.gguf"}, 422, "there is no model '../outside.gguf' here"),
    ("encoded", {"model": "%2e%2e/outside.gguf"}, 422, "there is no model '%2e%2e/outside.gguf' here"),
    ("absolute", {"model": "/etc/passwd"}, 422, "there is no model '…/passwd' here"),
    ("a link", {"model": "link.gguf"}, 422, "there is no model 'link.gguf' here"),
    ("a lone surrogate", {"model": "dense\udcff.gguf"}, 400, "model: Input should be a valid string"),
    ("NUL", {"model": "dense.gguf\0"}, 422, "there is no model 'dense.gguf\\x00' here"),
    ("a file's URL", {"model": "file:///etc/passwd"}, 400, "file:///etc/passwd: no file:// address is asked for"),
    ("a bucket", {"model": "s3://a/b.gguf"}, 400, "s3://a/b.gguf: no s3:// address is asked for"),
    ("no shape", {"model": "shape://none"}, 400, "there is no shape 'none'"),
    ("no card", {"gpus": []}, 400, "gpus: List should have at least 1 item"),
    ("an unknown card", {"gpus": ["rtx-9999"]}, 400, "--gpu 'rtx-9999': unknown GPU"),
    ("too many cards", {"gpus": ["17x rtx-4090"]}, 400, "llama.cpp has room for 16 devices at most"),
    ("no context", {"n_ctx": -1}, 400, "n_ctx"),
    ("an object", {"n_ctx": {}}, 400, "n_ctx: no value of this kind is taken: see /api for what may be asked"),
    ("half a token", {"n_ctx": 1.5}, 400, "n_ctx"),
    ("no number", {"host_bandwidth": float("nan")}, 400, "is not a bandwidth: write a number and a unit"),
    ("an endless number", {"n_ctx": 10**300}, 400, "n_ctx"),
    ("a log to read", {"workload": "/etc/passwd"}, 400, "workload is neither numbers such as prompt=12000"),
    ("no work", {"workload": "prompt=0"}, 400, "prompt of --workload is 0: give 1 or more"),
    ("no KV type", {"type_k": "q9_9"}, 400, "type_k"),
    ("another program", {"program": "/bin/sh"}, 400, "program"),
    ("a library to load", {"profile": "library:/tmp"}, 400, "profile: Extra inputs are not permitted"),
    ("a llama.cpp to load", {"llama_cpp": "/tmp"}, 400, "llama_cpp: Extra inputs are not permitted"),
    ("64 KB of unknown keys", {f"{key:x}": 1 for key in range(6000)}, 400, "0: Extra inputs are not permitted"),
    ("a file beside it", {"mmproj": "/etc/passwd"}, 400, "mmproj: Extra inputs are not permitted"),
    ("a server to ask", {"rpc": "10.0.0.1:50052"}, 400, "rpc: Extra inputs are not permitted"),
    ("a long name", {"model": "x" * 301}, 400, "model: String should have at most 300 characters"),
)
def test_what_cannot_be_is_one_line(change: dict[str, Any], status: int, message: str, site: Site) -> None:
    found, answer = site.plan(**{"model": "dense.gguf", "gpus": CARD, **change})
    assert str(status) in site.get("/api/v1/openapi.json")["paths"]["/api/v1/plan"]["post"]["responses"]
    assert (found, set(answer)) == (status, {"error"}), answer
    assert message in answer["error"] and "\n" not in answer["error"]
    assert str(site.root.parent) not in answer["error"] and str(Path.home()) not in answer["error"]


@cases(b"", b"{", b"[]", b'"a"', b"\xff", b"[" * 60000, b"1" * 6000)
def test_what_is_no_question(body: bytes, site: Site) -> None:
    connection = site.served.connection()
    connection.request("POST", "/api/v1/plan", body, {"Content-Type": "application/json"})
    answer = connection.getresponse()
    found = json.loads(answer.read())
    assert answer.status == 400 and list(found) == ["error"]


def test_private_addresses_are_not_asked(site: Site) -> None:
    site.files.forget()
    address = f"{site.files.url.rstrip('/')}/outside.gguf"
    answers = []
    for model in (address, address.replace("127.0.0.1", "localhost"), "hf://org/repo/a.gguf"):
        status, answer = site.plan(model=model, gpus=CARD)
        assert status == 422, answer
        answers.append(answer)
    answers.append(json.loads(ask(site.served.connection(), "/panel/a", {"model": "hf://org/repo", "gpus": CARD})[1]))
    assert all("is in a private network, which is not asked for models" in each["error"] for each in answers), answers
    assert site.files.requests == []


def test_private_addresses_are_asked_where_that_is_allowed(site: Site, tmp_path: Path) -> None:
    address = f"{site.files.url.rstrip('/')}/outside.gguf"
    (tmp_path / "org" / "repo").mkdir(parents=True)
    write_tiny(tmp_path / "org" / "repo" / "a.gguf", TINY_DENSE)
    with (
        hub_of(tmp_path, token=TOKEN) as hub,
        serving("--allow-private-addresses", "--workers", "1", HF_ENDPOINT=hub.url, HF_TOKEN=TOKEN) as served,
    ):
        for model in (address, "hf://org/repo/a.gguf"):
            status, body = ask(served.connection(), "/api/v1/plan", {"model": model, "gpus": CARD})
            assert (status, json.loads(body)["model"]["path"]) == (200, model)
        page = json.loads(ask(served.connection(), "/panel/a", {"model": "hf://org/repo", "gpus": CARD})[1])
        assert page["error"] is None and 'data-model="hf://org/repo/a.gguf"' in page["html"]
        hub.token = "another"
        status, body = ask(served.connection(), "/api/v1/plan", {"model": "hf://org/repo/b.gguf", "gpus": CARD})
        assert status == 422 and TOKEN not in body

        status, body = ask(served.connection(), "/api/v1/plan", {"model": "dense.gguf", "gpus": CARD})
        said = "'dense.gguf' is no address, and the server offers no directory"
        assert (status, json.loads(body)["error"].partition(":")[0]) == (400, said)
        served.process.send_signal(signal.SIGTERM)
        assert served.process.wait(patience.SECONDS) == 0


# --- requests


def said(site: Site, *lines: str, body: bytes = b"", start: str = "POST /api/v1/plan HTTP/1.1") -> tuple[int, str]:
    """Status and text of the answer to a request of these lines."""
    with socket.create_connection((site.served.host, site.served.port), patience.SECONDS) as sock:
        sock.sendall("\r\n".join([start, *lines, "", ""]).encode("latin-1") + body)
        data = b""
        # what it does not read may end the connection with a reset
        with suppress(ConnectionResetError):
            while piece := sock.recv(1 << 16):
                data += piece
    text = data.decode("latin-1")
    return int(text.split()[1]), text


def chunked(size: int, count: int) -> bytes:
    return b"".join(b"%x\r\n%s\r\n" % (size, b" " * size) for _ in range(count)) + b"0\r\n\r\n"


def test_requests_of_others_are_refused(site: Site) -> None:
    own = f"Host: {site.served.host}:{site.served.port}"
    for status, *lines in (
        (200, own),
        *((421, f"Host: {host}") for host in ("evil.example", f"evil.example:{site.served.port}", "10.0.0.1")),
        *((403, own, f"Origin: {origin}") for origin in ("http://evil.example", "null", "http://127.0.0.1:1")),
    ):
        assert said(site, *lines, "Connection: close", start="GET / HTTP/1.1")[0] == status, lines
    lines = [own, "Origin: http://evil.example", "Access-Control-Request-Method: POST"]
    status, text = said(site, *lines, start="OPTIONS /api/v1/plan HTTP/1.1")
    assert status == 403 and "access-control" not in text.lower()


def test_a_body_has_one_length(site: Site) -> None:
    lines = (f"Host: {site.served.host}:{site.served.port}", "Content-Type: application/json", "Connection: close")
    body = chunked(20, 1)
    assert said(site, *lines, "Transfer-Encoding: chunked", body=body)[0] == 400, "no JSON"
    status, text = said(site, *lines, "Transfer-Encoding: chunked", f"Content-Length: {len(body)}", body=body)
    assert status == 400 and "the body has two lengths: give Content-Length or Transfer-Encoding" in text


@cases(("GET", "/none", 404, "Not Found", None), ("PUT", "/api/v1/plan", 405, "Method Not Allowed", "POST"))
def test_what_is_not_there_says_where_to_look(
    method: str, path: str, status: int, words: str, allowed: str | None, site: Site
) -> None:
    connection = site.served.connection()
    connection.request(method, path, b"{}", {"Content-Type": "application/json"})
    answer = connection.getresponse()
    error = {"error": f"{words}: see /api for what may be asked"}
    assert (answer.status, json.loads(answer.read()), answer.headers["allow"]) == (status, error, allowed)


@cases("/", "/api", "/app.js", "/style.css", "/api/v1/shapes", "/none", "/../etc/passwd")
def test_every_answer_has_its_headers(path: str, site: Site) -> None:
    connection = site.served.connection()
    connection.request("GET", path)
    answer = connection.getresponse()
    answer.read()
    assert HEADERS.items() <= {name.lower(): value for name, value in answer.getheaders()}.items()
    assert answer.status == (404 if "none" in path or ".." in path else 200)
    assert "server" not in {name.lower() for name, _ in answer.getheaders()}


# --- many, and the end


def test_many_pages_at_once(site: Site) -> None:
    found = load(site.served, clients=6, seconds=1)
    assert (found.errors, len(found.taken) >= 6) == ([], True)
    until(lambda: len(site.served.children()) <= 2 * 3, "more processes than its planners have")


def test_an_asker_who_goes_away_holds_nothing(site: Site) -> None:
    host, port = site.served.host, site.served.port
    body = json.dumps({"model": "shape://deepseek-v3", "gpus": ["8x rtx-3090"]})
    lines = ["POST /api/v1/plan HTTP/1.1", f"Host: {host}:{port}", "Content-Type: application/json"]
    for _ in range(8):
        with socket.create_connection((host, port), patience.SECONDS) as sock:
            sock.sendall("\r\n".join([*lines, f"Content-Length: {len(body)}", "", body]).encode())
    status, plan = site.plan(model="dense.gguf", gpus=CARD)
    assert (status, plan["fits"]) == (200, True)
    until(lambda: len(site.served.children()) <= 2 * 3, "what nobody waits for holds processes")


@cases(signal.SIGTERM, signal.SIGINT)
def test_stopped_workers_do_not_hold_up_the_end(signal_number: int, tmp_path: Path) -> None:
    def attempt(seconds: float) -> None:
        question = {"model": "shape://llama-3.2-1b", "gpus": ["8GiB"]}
        with serving("--workers", "2", XDG_CACHE_HOME=str(tmp_path)) as served:
            assert ask(served.connection(), "/api/v1/plan", question)[0] == 200
            asking = threading.Thread(target=left_without, args=[served, {**question, "n_ctx": 2048}])
            workers = served.children()
            assert workers
            for worker in workers:
                worker.suspend()
            asking.start()
            served.process.send_signal(signal_number)
            assert served.process.wait(seconds) == 0
            asking.join()
            assert patience.all_end(workers)

    # some seconds, however busy the machine is; it was 38 and more
    patience.with_more_time(attempt, 8, 20)


def test_workers_that_are_killed_again_and_again_are_said(tmp_path: Path) -> None:
    question = {"model": "shape://llama-3.2-1b", "gpus": ["8GiB"]}
    with serving("--workers", "1", XDG_CACHE_HOME=str(tmp_path)) as served:
        whole = ask(served.connection(), "/api/v1/plan", question)
        answers: list[tuple[int, str]] = []
        other = {**question, "n_ctx": 2048}
        asking = threading.Thread(target=lambda: answers.append(ask(served.connection(), "/api/v1/plan", other)))
        asking.start()
        while asking.is_alive():
            for worker in served.children():
                with suppress(psutil.NoSuchProcess):
                    worker.kill()
            asking.join(0.01)
        ((status, body),) = answers
        assert status == 503
        assert json.loads(body)["error"].startswith("the process that runs llama.cpp was ended by SIGKILL during '")
        again = ask(served.connection(), "/api/v1/plan", question)
        assert (again[0], json.loads(again[1])["params"]) == (200, json.loads(whole[1])["params"])


def left_without(served: Served, question: dict[str, Any]) -> None:
    """Ask a server that ends."""
    with suppress(OSError, http.client.HTTPException):
        assert ask(served.connection(), "/api/v1/plan", question)[0] == 409


def test_what_it_cannot_be_started_with(site: Site) -> None:
    port = str(site.served.port)
    taken = f"nothing can listen at 127.0.0.1:{port} (Address already in use): give another --port, or --host"
    for words, said in (
        (["--port", port], re.escape(taken)),
        (["--host", "no.such.host.invalid"], r"nothing can listen at no\.such\.host\.invalid:8080 \(.*"),
        *((words, ".+") for words in (["--workers", "0"], ["--port", "65536"], ["a.gguf"], ["--host", ""])),
    ):
        done = run_fitter("serve", *words)
        assert (done.returncode, done.stdout) == (2, "") and re.fullmatch(f"fitter: error: {said}\n", done.stderr)


def with_program(folder: Path, name: str, code: str) -> str:
    """Write a script that comes first on the PATH, and return the PATH."""
    (folder / name).write_text(f"#!/bin/sh\n{code}\n")
    (folder / name).chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"


def test_the_page_is_opened_in_a_browser(tmp_path: Path) -> None:
    address = tmp_path / "address"
    path = with_program(tmp_path, "chosen", f'printf "%s" "$1" > "{address}.new" && mv "{address}.new" "{address}"')
    with serving("--open", "--workers", "1", BROWSER="chosen", PATH=path) as served:
        until(address.exists, "no browser is started")
        assert address.read_text() == served.url


def test_without_a_display_nothing_is_opened(tmp_path: Path) -> None:
    gone = {"DISPLAY": None, "WAYLAND_DISPLAY": None, "BROWSER": None}
    with serving("--open", "--workers", "1", PATH=with_program(tmp_path, "w3m", "exit 1"), **gone) as served:
        assert served.process.stderr is not None
        line = served.process.stderr.readline()
        assert line == f"fitter: no browser can be opened here: open {served.url} in one\n"
        assert served.stop() == (0, [])


def test_connections_wait_where_no_more_files_may_be_opened() -> None:
    with serving("--workers", "1") as served:
        own = psutil.Process(served.process.pid)
        until(lambda: own.num_fds() > 10)
        own.rlimit(psutil.RLIMIT_NOFILE, (own.num_fds() + 4,) * 2)
        several = [served.connection() for _ in range(60)]
        for connection in several:
            connection.connect()
        assert served.process.stderr is not None
        said = "this process may open no more files, so new connections wait: raise their limit (ulimit -n)"
        assert served.process.stderr.readline() == f"fitter: {said}\n"
        for connection in several:
            connection.close()
        last = served.connection()
        last.request("GET", "/health")
        assert last.getresponse().status == 200
        served.stop()
        # asyncio would write thousands of lines
        assert served.process.stderr.read() == ""


def test_which_llama_cpp_plans(tmp_path: Path) -> None:
    where = str(TOOLS)
    done = run_fitter("serve", "--llama-cpp", tmp_path)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (3, "", 1) and str(tmp_path) in done.stderr
    with serving("--llama-cpp", where, "--workers", "1") as served:
        status, body = ask(served.connection(), "/api/v1/plan", {"model": "shape://llama-3.2-1b", "gpus": ["8GiB"]})
        assert (status, json.loads(body)["llama_cpp"]["key"]) == (200, build_folder.find(where).key)
        assert str(where) not in body


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, command: Command) -> None:
    for name in [name for name in sys.modules if name.startswith("fitter.web.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    said = f"fitter serve needs the package uvicorn, which is missing: {install_command('web')}"
    assert command("serve") == (3, "", f"fitter: error: {said}\n")
