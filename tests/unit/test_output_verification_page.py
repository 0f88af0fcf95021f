"""The page of a verification: what it marks is what fails, and its words are those of the table."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html import unescape

import pytest

from fitter.output.documents.checked_documents import VERIFICATION
from fitter.output.documents.document import dumps
from fitter.output.pages.verification_page import verification_page
from fitter.planning.plan.plan import Problem
from fitter.planning.plan.verified import Verification
from tests.unit.test_planning_server_verification import FOUND, ROW, USE, VERDICTS

BAD: dict[str, list[str]] = {
    "it holds": [],
    "the process has more": ["at most"],
    "what comes later is more": ["a context checkpoint of 60 tokens"],
    "more, but tolerated": [],
    "a buffer is more": ["CPU"],
}


def rows(page: str, start: str) -> list[list[str]]:
    """The rows that begin with ``start``, as text."""
    found = [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row) for row in re.findall(r"<tr.*?</tr>", page, re.DOTALL)]
    texts = [[unescape(re.sub("<small.*", "", cell)) for cell in row] for row in found]
    return [[re.sub("<.*?>", "", cell) for cell in row] for row in texts if row[0].startswith(start)]


@pytest.mark.parametrize("name", VERDICTS)
def test_what_is_marked_is_what_fails(name: str) -> None:
    found, holds, verdict = VERDICTS[name]
    page = verification_page(found)
    assert f'<p class="verdict {"good" if holds else "bad"}">{verdict}</p>' in page
    assert re.findall(r'<tr class="bad"><th scope="row">(.*?)<small class="lacks">', page) == BAD[name]
    assert page.count('<tr class="bad">') == len(BAD[name])


def test_what_a_server_says_is_rounded_or_not_said() -> None:
    page = verification_page(FOUND)
    assert rows(page, "CPU") == [
        ["CPU", "model", "300", "400 of the file", "not known"],
        ["CPU", "context", "200", "not said", "not known"],
        ["CPU", "compute", "100", "101 ± 5", "none"],
    ]
    assert rows(page, "a prompt in") == [
        ["a prompt in the prompt cache of 1,000 tokens", "2,000", "2,100 ± 525", "no limit"]
    ]
    assert "39 of 40 prompts were answered, 1,234 tokens, 4 at a time. The first that was not: too long" in page
    assert rows(page, "at most")[0][1:] == [
        *("300.0 MiB", "100.0 MiB", "200.0 MiB", "150.0 MiB", "50.0 MiB", "160.0 MiB", "40.0 MiB")
    ]
    unsaid = verification_page(replace(FOUND, server=replace(USE, resident=None)))
    assert "Memory of its process: this system does not say it." in unsaid


def test_a_load_without_a_server() -> None:
    exact = replace(ROW, rounding=None, unsaid=(), real=replace(ROW.predicted, compute=99, model=333))
    found = replace(FOUND, server=None, rows=(exact,), tolerance=33)
    assert found.holds
    page = verification_page(found)
    assert [row[-1] for row in rows(page, "CPU")] == ["+33", "none", "-1"]
    assert "Up to 33 B more than predicted is tolerated." in page and '<tr class="bad">' not in page
    assert "After the load" not in page
    assert verification_page(replace(found, tolerance=32)).count('<tr class="bad">') == 1


def test_what_does_not_fit_was_not_loaded() -> None:
    found = Verification(FOUND.model, FOUND.params, 0, problems=(Problem("CUDA0", 5, "CUDA0 lacks <5> bytes"),))
    page = verification_page(found)
    assert "does not fit: it was not loaded</p>" in page and "CUDA0 lacks &lt;5&gt; bytes" in page
    assert "<table" not in page
    (text,) = re.findall(r'id="verification">(.*?)</script>', page, re.DOTALL)
    assert json.loads(text) == json.loads(dumps(VERIFICATION.write(found)))
