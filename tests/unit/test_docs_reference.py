"""The reference pages are what their sources say, and say all of it."""

from __future__ import annotations

import inspect
import re
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest
from click.testing import CliRunner

import fitter
from fitter import errors
from fitter.cli import cli, llama_options
from fitter.cli.group import DOCUMENTATION
from fitter.machine import gpu_catalogue
from fitter.parameters import table
from fitter.parameters.table import LEVERS, PARAMETERS, Parameter, of_a_case, taken_by
from fitter.parameters.targets import FORMATS
from fitter.planning.request.request import OBJECTIVES, STRATEGIES
from fitter.regression import marks, pytest_plugin
from fitter.storage import parse_toml
from tests.support.cases import cases
from tools.docs import of_errors, of_options, of_python, reference
from tools.docs.attributes import documented
from tools.docs.pages import ROOT

PAGES = {name: (reference.REFERENCE / name).read_text(encoding="utf-8") for name in reference.PAGES}


@pytest.mark.parametrize("name", reference.PAGES)
def test_a_page_is_what_would_be_written_now(name: str) -> None:
    assert PAGES[name] == reference.PAGES[name](), (
        f"docs/reference/{name} is stale: run 'python -m tools.docs.reference' and commit it"
    )


def test_nothing_else_is_there() -> None:
    assert {path.name for path in reference.REFERENCE.iterdir()} == set(reference.PAGES)


def test_what_is_stale_is_named_and_written_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "PAGES", {"a.md": lambda: "a", "b.md": lambda: "b", "c.md": lambda: "c"})
    reference.write(tmp_path)
    assert reference.stale(tmp_path) == []
    (tmp_path / "a.md").write_text("another text")
    (tmp_path / "b.md").unlink()
    (tmp_path / "old.md").touch()
    assert reference.stale(tmp_path) == ["a.md", "b.md", "old.md"]
    reference.write(tmp_path)
    assert reference.stale(tmp_path) == []


def sections(page: str, level: int) -> dict[str, str]:
    """The parts of a page by their headings of a level, without the anchors."""
    parts = re.split(rf"^{'#' * level} (.+)$", PAGES[page], flags=re.MULTILINE)[1:]
    return {title.partition(" { #")[0]: text for title, text in zip(parts[::2], parts[1::2], strict=True)}


def cells(page: str) -> set[str]:
    """What is code in the first column of the tables of a page, without links."""
    first = re.findall(r"^\| ([^|]+) \|", PAGES[page], re.MULTILINE)
    return {word.split()[0] for cell in first for word in re.findall(r"`([^`]+)`", cell)}


def options() -> dict[str, str]:
    """Every option's heading, and what stands below it, of all pages of options."""
    found = [sections(page, 3) for page in of_options.topic_pages()]
    assert sum(map(len, found)) == len(of_options.entries())
    return {heading: text for page in found for heading, text in page.items()}


def test_every_option_of_every_command_is_there_with_a_meaning() -> None:
    headings = options()
    listed = {name.split()[0] for heading in headings for name in re.findall(r"`([^`]+)`", heading)}
    commands = of_options.commands()
    assert listed == {
        name
        for command in commands.values()
        for param in command.params
        if param.param_type_name == "option" and not getattr(param, "hidden", False)
        for name in (*param.opts, *param.secondary_opts)
    }
    for heading, text in headings.items():
        assert len(text.strip().splitlines()[0]) > len("A word."), heading
    assert list(sections("commands.md", 2)) == [f"`fitter {name}`" for name in commands]


@pytest.mark.parametrize("each", [each for each in PARAMETERS.values() if each.options], ids=lambda each: each.name)
def test_every_parameter_is_there_by_all_its_names(each: Parameter) -> None:
    name = each.options[0].partition("/")[0]
    [text] = (text for heading, text in options().items() if re.search(rf"`{name}[` ]", heading))
    facts = re.findall(r"`([^`]+)`", text)
    assert each.name in facts
    for name in (each.env, each.case and of_a_case() and each.case):
        assert not name or name in facts


def test_a_section_without_a_page_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(of_options.TOPICS, "Speed options")
    with pytest.raises(ValueError, match=r"section 'Speed' of --help has no page: add it to TOPICS"):
        of_options.options_page()


def test_no_page_of_options_is_long() -> None:
    assert max(len(PAGES[page]) for page in of_options.topic_pages()) < 12_000


def test_every_option_of_llama_cpp_is_there() -> None:
    assert set(llama_options.all_options()) == cells("llama-options.md")


def test_every_key_of_a_case_and_every_keyword_of_a_marker_is_there() -> None:
    assert cells("fitter-toml.md") >= {"model", *of_a_case(), "max_growth", "max_slowdown", "host"}
    assert cells("pytest.md") >= {*marks.keywords(), "fitter_plan", "fitter_model"}
    assert cells("pytest.md") >= {"--" + name.replace("_", "-") for name in pytest_plugin.OPTIONS}


def test_every_public_name_is_there() -> None:
    everything = "\n".join(PAGES[name] for name in ("python.md", "python-types.md", "errors.md"))
    headings = set(re.findall(r"^##+ `([\w.]+)", everything, re.MULTILINE))
    functions, types, failures = of_python.names()
    assert {*functions, *types, *failures, "__version__"} == set(fitter.__all__)
    assert {f"fitter.{name}" for name in (*functions, *types, "__version__")} <= headings
    assert set(failures) <= headings


@pytest.mark.parametrize("name", of_python.names()[0])
def test_every_keyword_of_a_function_is_there(name: str) -> None:
    page = sections("python.md", 2)
    [text] = (text for heading, text in page.items() if heading.startswith(f"`fitter.{name}("))
    parts = re.split(r"^## .* \{ #(\w+) \}$", PAGES["python.md"], flags=re.MULTILINE)[1:]
    by_anchor = dict(zip(parts[::2], parts[1::2], strict=True))
    text += "".join(by_anchor[group] for group in re.findall(r"\(#(\w+keywords)\)", text))
    listed = {cell.strip("[").split("`")[1] for cell in re.findall(r"^\| (\[?`\w+`)", text, re.MULTILINE)}
    taken = inspect.signature(getattr(fitter, name)).parameters.values()
    # those of explore are the same as of fit, as its text says
    assert listed == {each.name for each in taken if each.kind is not each.VAR_KEYWORD}


def test_every_field_of_a_type_has_a_meaning() -> None:
    known = table.of_a_load()
    for name in of_python.names()[1]:
        kind = getattr(fitter, name)
        said = documented(kind)
        for each in fields(kind) if is_dataclass(kind) else ():
            assert said[each.name] or (kind is fitter.Params and each.name in known), f"{name}.{each.name}"
    assert not [line for line in PAGES["python-types.md"].splitlines() if re.match(r"\| .*\|\s*\|$", line)]


def test_the_tree_of_errors_and_every_exit_status() -> None:
    classes = [each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, Exception)]
    assert set(sections("errors.md", 2)) == {f"`{each.__name__}`" for each in classes}
    statuses = {number for name, number in vars(errors).items() if name.startswith("EXIT_")}
    assert set(of_errors.of_every_command()) == {*statuses, 128 + 1, 128 + 2, 128 + 13, 128 + 15}
    assert {str(status) for status in of_errors.of_every_command()} <= cells("exit-statuses.md")


def test_the_statuses_of_a_command_are_read_from_its_help() -> None:
    text = "Examples:\n  fitter x\n\nExit status: 0 it fits, or not, 2 usage error, or 5 times\nthat, 4 it does not.\n"
    assert of_errors.statuses(text) == {0: "it fits, or not", 2: "usage error, or 5 times that", 4: "it does not"}
    assert of_errors.statuses("Examples:\n") == {}


def test_gpus_levers_and_formats() -> None:
    assert set(gpu_catalogue.gpus()) <= cells("gpus.md")
    assert set(LEVERS) == cells("levers.md")
    assert set(FORMATS) <= cells("formats.md")
    help_ = {name: PARAMETERS[name].help for name in ("objective", "strategy", "allow")}
    for name, words in (("objective", OBJECTIVES), ("strategy", STRATEGIES), ("allow", LEVERS)):
        assert all(re.search(rf"(?<!\w){re.escape(word)}(?!\w)", help_[name]) for word in words), name


def test_every_call_that_takes_the_table_is_known() -> None:
    of_a_load = {each.name for each in taken_by(table.LoadKeywords)}
    signatures = {name: inspect.signature(getattr(fitter, name)) for name in of_python.names()[0]}
    assert {name for name, found in signatures.items() if of_a_load <= set(found.parameters)} == set(of_python.KEYWORDS)


def test_all_of_it_is_in_the_site() -> None:
    assert {f"reference/{name}" for name in reference.PAGES if name.endswith(".md")} <= set(
        re.findall(r"[\w/-]+\.md", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    )


@cases(True, False)
def test_the_help_ends_with_where_all_of_it_is(is_published: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fitter.cli.group.IS_PUBLISHED", is_published)
    monkeypatch.setattr("fitter.cli.group.IS_PUBLISHED", is_published)
    helps = [CliRunner().invoke(cli, words).output for words in (["--help"], ["fit", "--help"])]
    assert [DOCUMENTATION in text for text in helps] == [is_published] * 2
    project = parse_toml((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["urls"]["Documentation"] == DOCUMENTATION
    assert f"\nsite_url: {DOCUMENTATION}\n" in (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
