"""Alternatives on the real libllama: a fit with their words is as they say, and the plan stays the same."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import fitter
from fitter.cli import main
from fitter.planning.search import best_plan
from tools import shapes

KEYWORDS = {"-c": "n_ctx", "-ctk": "type_k", "-ctv": "type_v", "-np": "n_seq_max"}
Q8 = "-ctk q8_0 -ctv q8_0"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("shapes")
    return {name: shapes.write(name, directory, vocab=False) for name in ("llama-3.1-8b", "gemma3-12b")}


@pytest.mark.parametrize(
    ("name", "options", "kinds"),
    [
        pytest.param("llama-3.1-8b", {"gpus": ["8GiB"]}, {"-c -ctk -ctv"}, id="all on the device"),
        pytest.param(
            "llama-3.1-8b", {"gpus": ["8GiB"], "n_ctx": 131072, "host_memory": "4GiB"}, {"-c"}, id="nothing fits"
        ),
        pytest.param("gemma3-12b", {"gpus": ["8GiB"], "n_ctx": 4096}, {"-ctk -ctv", "-np"}, id="sliding windows"),
    ],
)  # fmt: skip
def test_a_fit_with_the_words_is_as_said(
    models: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    options: dict[str, Any],
    kinds: set[str],
) -> None:
    monkeypatch.setattr(best_plan, "SHARE", 1000)
    monkeypatch.setattr(best_plan, "SHARE_OF_FAILURE", 1000)
    options = {"program": "llama-server", "host_bandwidth": "60GB/s", **options}
    without, plan = (fitter.fit(models[name], **options, alternatives=flag) for flag in (False, True))
    # a second process may have measured the plan early, or not
    assert replace(plan, alternatives=(), search=without.search) == without
    assert kinds <= {" ".join(each.arguments[::2]) for each in plan.alternatives}
    for each in plan.alternatives:
        pairs = zip(each.arguments[::2], each.arguments[1::2], strict=True)
        words = {KEYWORDS[word]: int(value) if value.isdigit() else value for word, value in pairs}
        other = fitter.fit(models[name], **{**options, **words})
        assert other.fits and other.estimate is not None and each.is_measured
        assert each.n_ctx == other.params.n_ctx
        found, said = other.estimate.generation_tokens_per_second, each.generation_tokens_per_second
        assert 0.85 * found <= said <= 1.02 * found, each


def test_only_who_reads_them_pays_for_them(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(best_plan, "SHARE", 1000)
    options = ["--gpu", "8GiB", "-c", "32768", "--host-bandwidth", "60GB/s"]
    for words, expected in ((["--json"], []), (["--json", "--alternatives"], [Q8.split()])):
        assert main([str(models["llama-3.1-8b"]), *options, *words]) == 0
        out, err = capsys.readouterr()
        assert [each["arguments"] for each in json.loads(out)["alternatives"]] == expected
        assert (f"or    {Q8} " in err) is bool(expected)
