"""Reports in a browser: the page is the plan's JSON, asks nothing of any network, and everyone can use it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import fitter
from fitter.api import report_plan
from fitter.errors import PlanError
from fitter.installation import install_command
from fitter.model.shapes.catalogue import published_shape
from fitter.output.documents.document import dumps
from fitter.output.pages.report_page import plan_page
from fitter.parameters.targets import FORMATS
from fitter.planning.plan.plan import Plan
from fitter.text import printable
from tests.support.attacks import ATTACKS
from tests.support.cases import cases
from tests.support.command import run_fitter
from tests.support.pages import MARKUP, PHONE, WIDE, heard, opened, pasted, serving, words_of
from tools.models import shapes
from tools.models.tiny import TINY_DENSE, write_tiny

pytestmark = pytest.mark.usefixtures("one_worker")

if TYPE_CHECKING:
    from playwright.sync_api import Browser

EIGHT = {"gpus": ["4x rtx-5090", "4x rtx-3090"], "host_memory": "768GiB", "n_ctx": 32768, "program": "llama-server"}
PLANS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense, one device": ("llama-3.1-8b", {"gpus": "rtx-3090"}),
    "MoE, one device": ("qwen3-30b-a3b", {"gpus": "rtx-3090", "host_memory": "64GiB", "program": "llama-server"}),
    "MoE, two devices and the host": ("gpt-oss-120b", {"gpus": ["rtx-5090", "rtx-3090"], "host_memory": "64GiB"}),
    "MoE, eight devices": ("kimi-k2", EIGHT),
    "does not fit": ("llama-3.1-70b", {"gpus": "rtx-4090", "host_memory": "4GiB", "n_ctx": 8192}),
}
WITH_CONTEXTS = ("MoE, one device",)
"""The plans that are also planned with other contexts, which takes seconds."""


@dataclass(frozen=True)
class Report:
    plan: Plan
    page: str
    url: str


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, tuple[Plan, str]]:
    folder = tmp_path_factory.mktemp("models")
    found = {}
    for name, (shape, words) in PLANS.items():
        plan = fitter.fit(shapes.write(shape, folder, vocab=False), **words)
        found[name] = plan, fitter.report(plan, contexts=name in WITH_CONTEXTS)
    plan = found["dense, one device"][0]
    hostile = replace(plan, model=replace(plan.model, name=MARKUP))
    found["hostile"] = hostile, plan_page(hostile)
    return found


@pytest.fixture(scope="module")
def site(plans: Mapping[str, tuple[Plan, str]]) -> Iterator[tuple[Mapping[str, Report], list[str]]]:
    paths = {name: f"/{number}.html" for number, name in enumerate(plans)}
    with serving({paths[name]: page for name, (_, page) in plans.items()}) as (address, asked):
        yield {name: Report(plan, page, address + paths[name]) for name, (plan, page) in plans.items()}, asked


@pytest.mark.parametrize("name", [*PLANS, "hostile"])
def test_the_page_is_the_plan(name: str, site: Any, browser: Browser) -> None:
    reports, asked = site
    report = reports[name]
    del asked[:]
    document = report.plan.to_dict()
    with opened(browser, report.url) as page:
        text = page.locator("script#plan").text_content()
        assert text is not None
        assert text.replace("\\u003c", "<") == dumps(document)
        assert json.loads(text) == document
        rows = page.locator("section:has(#memory) tbody tr")
        heads = page.locator("section:has(#memory) thead th").all_inner_texts()
        keys = {"weights": "model", "KV cache": "context", "beside the model": "shared"}
        shown = [*document["devices"], {"name": "host", **document["host"]}]
        assert rows.count() == len(shown)
        for row, use in zip(rows.all(), shown, strict=True):
            # a real load's compute buffers may be larger
            more = {"compute": use["more_in_use"], "used": use["more_in_use"], "left": -use["more_in_use"]}
            found = {head: use.get(keys.get(head, head), 0) for head in heads[1:]}
            expected = [size if size is None else size + more.get(head, 0) for head, size in found.items()]
            cells = row.locator("td").all()
            values = [cell.locator("data").get_attribute("value") for cell in cells if cell.locator("data").count()]
            assert values == [str(size) for size in expected if size is not None]
            for cell, size in zip(cells, expected, strict=True):
                assert (f"{size:,}" if size is not None else "no limit") in cell.inner_text()
        context = page.locator(".facts dd").first.inner_text()
        assert context.startswith(f"{document['params']['n_ctx']:,}")
        assert page.locator("section:has(#layers) .picture.wide svg").is_visible() == (name != "hostile")
        for problem in document["problems"]:
            assert page.get_by_text(problem["message"], exact=True).is_visible()
    assert asked == [report.url[report.url.rindex("/") :]]


@pytest.mark.parametrize("name", PLANS)
def test_the_map_adds_up_to_the_plan(name: str, plans: Mapping[str, tuple[Plan, str]]) -> None:
    plan, page = plans[name]
    drawn = json.loads(page.split('id="drawn">')[1].split("</script>")[0])
    sums = dict.fromkeys(drawn["map"]["places"], 0)
    for cell in (cell for group in drawn["map"]["groups"] for cell in group["layers"]):
        for place, size in cell["bytes"].items():
            sums[place] += size
    measured = {use.name: use.model + use.context for use in plan.devices}
    del sums["host"]
    assert sums == {place: measured[place] for place in sums}


def test_other_contexts_are_drawn_and_listed(site: Any, browser: Browser) -> None:
    with opened(browser, site[0]["MoE, one device"].url) as page:
        points = json.loads(page.locator("script#drawn").text_content() or "")["contexts"]
        assert [point["n_ctx"] for point in points] == [4096, 8192, 16384, 32768, 40960]
        assert {point["prompt"] for point in points} == {2048}, "an open context is compared at one request"
        assert page.locator(".charts svg").count() == 3
        assert page.locator(".charts svg").first.locator(".dot").count() == 2 * len(points)
        rows = page.locator("section:has(#contexts) tbody tr")
        assert rows.count() == len(points)
        assert page.locator("tr.chosen th").inner_text().split() == ["40,960", "this", "plan"]
        for row, point in zip(rows.all(), points, strict=True):
            assert row.locator("data").first.get_attribute("value") == str(point["devices"])


def test_contexts_beside_one_that_is_set_have_requests_of_their_own(tmp_path: Path) -> None:
    model = shapes.write("qwen3-30b-a3b", tmp_path, vocab=False)
    plan = fitter.fit(model, gpus="rtx-3090", host_memory="64GiB", n_ctx=32768)
    points = report_plan.beside(plan).contexts
    prompts = {4096: 1024, 8192: 2048, 16384: 4096, 32768: 8192, 40960: 9158}
    assert [(point.n_ctx, point.prompt) for point in points] == [*prompts.items()]
    alone = fitter.fit(model, gpus="rtx-3090", host_memory="64GiB", n_ctx=16384).estimate
    assert alone and alone.full_context
    assert points[2].generation_tokens_per_second == alone.generation_tokens_per_second
    assert points[2].full_context_tokens_per_second == alone.full_context.generation_tokens_per_second


@cases("MoE, eight devices", "dense, one device")
def test_arguments_are_copied(name: str, site: Any, browser: Browser) -> None:
    report = site[0][name]
    allowed = {"permissions": ["clipboard-read", "clipboard-write"]}
    with opened(browser, report.url, **allowed) as page:
        says = heard(page)
        for word in FORMATS.keys() - {"json"}:
            button = page.locator(f'button[data-from="text-{word}"]')
            try:
                expected = report.plan.format(word)
            except PlanError as error:
                assert button.count() == 0
                assert page.get_by_text(str(error), exact=True).first.is_visible()
                continue
            # with the keyboard alone
            button.focus()
            page.keyboard.press("Enter")
            assert says("Copied") == ["Copied", "Copied", ""]
            assert page.evaluate("navigator.clipboard.readText()") == expected
        page.locator('button[data-from="plan"]').click()
        says("Copied")
        assert json.loads(page.evaluate("navigator.clipboard.readText()")) == report.plan.to_dict()


@pytest.mark.parametrize("where", ["http", "file"])
@pytest.mark.parametrize("name", ["MoE, two devices and the host", "MoE, eight devices"])
def test_the_command_is_pasted_and_run(name: str, where: str, site: Any, tmp_path: Path, browser: Browser) -> None:
    report = site[0][name]
    file = tmp_path / "report.html"
    file.write_text(report.page, encoding="utf-8")
    # nobody gave a permission
    with opened(browser, report.url if where == "http" else file.as_uri()) as page:
        says = heard(page)
        page.locator(".command button").click()
        says("Copied")
        line = pasted(page)
    model = report.plan.model.path
    assert "-ot" in report.plan.arguments()
    assert words_of(line, tmp_path) == ["llama-server", "-m", model, *report.plan.arguments()]


NO_CLIPBOARD = """
  Object.defineProperty(navigator, "clipboard", { value: undefined });
  const copies = document.execCommand.bind(document);
  document.execCommand = (word) => window.canCopy && copies(word);
"""


def test_without_a_clipboard_the_text_is_selected(site: Any, browser: Browser) -> None:
    report = site[0]["dense, one device"]
    with opened(browser, report.url) as page:
        page.evaluate(NO_CLIPBOARD)
        says = heard(page)
        for can_copy, name, words in (
            (True, "text-command", "Copied"),
            (False, "text-command", "Selected: copy it"),
            (False, "plan", "Not copied"),
        ):
            page.evaluate("can => { window.canCopy = can; getSelection().empty() }", can_copy)
            page.locator(f'button[data-from="{name}"]').click()
            selected = page.locator("#text-command").text_content() if words.startswith("Selected") else ""
            assert says(words) == [words, words, selected]


def test_a_line_that_a_shell_would_change_says_so(site: Any, browser: Browser) -> None:
    note = "It has no quotes, as for $(...): a shell would change it where it is pasted."
    for name, notes in (("dense, one device", []), ("MoE, two devices and the host", [f"{note} Take shell for that."])):
        with opened(browser, site[0][name].url) as page:
            assert page.locator(".format pre + .quiet").all_inner_texts() == notes, name


def test_a_plan_that_does_not_fit_has_nothing_to_copy_but_itself(site: Any, browser: Browser) -> None:
    with opened(browser, site[0]["does not fit"].url) as page:
        assert page.locator(".verdict").inner_text() == "Does not fit"
        assert page.locator("button.copy").count() == 1
        assert page.locator("tr.bad th").first.inner_text().split("\n")[0] == "host"
        assert "lacks" in (page.locator(".picture.wide svg").first.text_content() or "")


def test_markup_in_a_name_is_text(site: Any, browser: Browser) -> None:
    with opened(browser, site[0]["hostile"].url) as page:
        assert page.locator("h1").inner_text() == MARKUP
        assert page.title() == f"{MARKUP}: fits"
        assert page.locator("script").count() == 3
        assert page.locator("img").count() == 0


@pytest.mark.parametrize("width", [WIDE, PHONE])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_everyone_can_use_it(scheme: str, width: int, site: Any, browser: Browser) -> None:
    from axe_playwright_python.sync_playwright import Axe

    for name in ("MoE, one device", "MoE, eight devices" if scheme == "light" else "does not fit"):
        # axe's own script is not one that the page allows
        with opened(browser, site[0][name].url, width, scheme, bypass_csp=True) as page:
            for details in page.locator("details").all():
                details.locator("summary").click()
            found = Axe().run(page).response["violations"]
            assert [(each["id"], each["impact"], each["nodes"][0]["target"]) for each in found] == []
            assert page.evaluate("document.documentElement.scrollWidth") == width


def test_dark_is_dark_and_paper_is_white(site: Any, browser: Browser) -> None:
    background = "getComputedStyle(document.body).backgroundColor"
    url = site[0]["MoE, one device"].url
    with opened(browser, url, scheme="light") as page:
        light = page.evaluate(background)
    with opened(browser, url, scheme="dark") as page:
        assert page.evaluate(background) != light
        page.emulate_media(media="print")
        assert page.evaluate(background) == "rgb(255, 255, 255)"
        assert not page.locator("button.copy").first.is_visible()
        assert page.pdf()[:5] == b"%PDF-"
    # A4 with its margins
    with opened(browser, site[0]["MoE, eight devices"].url, 703) as page:
        page.emulate_media(media="print")
        assert page.evaluate("document.documentElement.scrollWidth") == 703


def test_without_scripts_everything_is_there(site: Any, browser: Browser) -> None:
    with opened(browser, site[0]["MoE, two devices and the host"].url, java_script_enabled=False) as page:
        assert page.locator("#text-args").inner_text() == site[0]["MoE, two devices and the host"].plan.format("args")
        assert page.locator("section:has(#layers) svg").first.is_visible()


@pytest.mark.parametrize("attack", [*ATTACKS[::7], "\u202e</script>"])
def test_no_name_has_anything_invisible(attack: str, plans: Mapping[str, tuple[Plan, str]]) -> None:
    plan = plans["MoE, one device"][0]
    devices = tuple(replace(use, description=attack) for use in plan.devices)
    named = replace(plan, model=replace(plan.model, name=attack, architecture=attack), devices=devices)
    page = plan_page(named)
    assert not [char for char in page if char != "\n" and printable(char) != char]
    fragment = named._repr_html_()
    assert not [char for char in fragment if char != "\n" and printable(char) != char]
    assert "<script" not in fragment


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("tiny") / "tiny.gguf", TINY_DENSE)


def test_the_command_writes_a_page_and_a_picture(tiny: Path, tmp_path: Path, browser: Browser) -> None:
    page_file, svg_file = tmp_path / "report.html", tmp_path / "plan.svg"
    done = run_fitter("report", tiny, "--gpu", "rtx-3090", "-c", "512", "-o", page_file, "--svg", svg_file)
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr == f"fitter: wrote {page_file}\nfitter: wrote {svg_file}\n"
    assert run_fitter("report", tiny, "-q", "-c", "512", "-o", page_file).stderr == ""
    for file in (page_file, svg_file):
        with opened(browser, file.as_uri()) as page:
            assert page.locator("svg").first.is_visible()


def test_a_plan_from_a_file_is_the_same(tiny: Path, tmp_path: Path) -> None:
    plan_file, page_file = tmp_path / "plan.json", tmp_path / "report.html"
    done = run_fitter(tiny, "--gpu", "rtx-3090", "-c", "512", "--json", "--report", tmp_path / "first.html")
    assert done.returncode == 0
    plan_file.write_text(done.stdout)
    assert run_fitter("report", plan_file, "-o", page_file).returncode == 0
    for page in (tmp_path / "first.html", page_file):
        text = page.read_text()
        assert done.stdout.rstrip("\n") in text
        assert "Where each layer is" in text
    assert "the plan is from a file" in page_file.read_text()


def test_a_config_is_a_model_and_no_plan(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(published_shape("qwen3-0.6b").config))
    page_file = tmp_path / "report.html"
    done = run_fitter("report", "--config", config, "--gpu", "rtx-3090", "--no-contexts", "-o", page_file)
    assert (done.returncode, done.stderr) == (0, f"fitter: wrote {page_file}\n")
    assert "Where each layer is" in page_file.read_text()


def test_a_report_of_another_model_has_nothing_of_it(tiny: Path, tmp_path: Path) -> None:
    plan = fitter.fit(tiny, gpus="rtx-3090", n_ctx=512)
    other = write_tiny(tmp_path / "other.gguf")
    page = fitter.report(plan, other)
    drawn = json.loads(page.split('id="drawn">')[1].split("</script>")[0])
    why = f"the plan is for another model than {other}: its architecture is qwen3, not qwen3moe"
    assert drawn == {"map": None, "contexts": [], "notes": [f"where each layer is cannot be shown: {why}"]}


@cases("report MODEL -o FILE", "fit MODEL --report FILE", "explore MODEL --gpu rtx-3090 --report FILE")
def test_a_missing_package_is_said_before_anything_is_planned(words: str, tmp_path: Path) -> None:
    (tmp_path / "jinja2.py").write_text("raise ImportError('not here', name='jinja2')\n")
    # neither is there: what is said first is the package
    words = words.replace("MODEL", f"{tmp_path}/nothing.gguf").replace("FILE", f"{tmp_path}/report.html")
    done = run_fitter(*words.split(), PYTHONPATH=str(tmp_path))
    needs = f"a report needs the package jinja2, which is missing: {install_command('report')}"
    assert (done.returncode, done.stderr) == (3, f"fitter: error: {needs}\n")
    assert not (tmp_path / "report.html").exists()


CLIPPED = """() => [...document.querySelectorAll("svg text")].filter((text) => {
  const box = text.getBoundingClientRect(), svg = text.ownerSVGElement.getBoundingClientRect();
  return box.width && (box.left < svg.left - 1 || box.right > svg.right + 1);
}).map((text) => text.textContent)"""


def test_a_check_and_a_verification_have_pages(tiny: Path, tmp_path: Path, browser: Browser) -> None:
    cases = tmp_path / "fitter.toml"
    table = '[cases."<b>chat"]\nmodel = "{}"\ngpu = ["rtx-3090"]\nn_ctx = {}\n'
    cases.write_text(table.format(tiny, 512))
    assert run_fitter("lock", "--cases", cases).returncode == 0
    cases.write_text(table.format(tiny, 1024))
    page_file = tmp_path / "check.html"
    done = run_fitter("check", "--cases", cases, "--json", "--report", page_file)
    assert done.returncode == 4, done.stderr
    document = json.loads(done.stdout)
    with opened(browser, page_file.as_uri()) as page:
        assert json.loads(page.locator("script#check").text_content() or "") == document
        assert page.locator(".verdict").inner_text() == "Failed"
        assert page.locator("h2").first.inner_text().startswith("<b>chat")
        names = page.locator("tbody th").all_inner_texts()
        assert names == [move["what"] for move in document["cases"][0]["moves"]]
        assert page.evaluate(CLIPPED) == []
    page_file = tmp_path / "verify.html"
    moe = write_tiny(tmp_path / "moe.gguf")
    done = run_fitter("verify", moe, "-c", "512", "-dev", "none", "--json", "--report", page_file)
    assert done.returncode == 0, done.stderr
    with opened(browser, page_file.as_uri(), PHONE) as page:
        assert json.loads(page.locator("script#verification").text_content() or "") == json.loads(done.stdout)
        assert page.locator(".verdict").inner_text() == "every byte as predicted"
        assert page.evaluate("document.documentElement.scrollWidth") == PHONE
