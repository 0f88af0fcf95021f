"""Alternatives on the real libllama: a fit with their words is as they say, and the plan stays the same."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import fitter
from fitter.cli import main
from fitter.planning.search import best_plan
from tests.support.cases import named_cases
from tests.support.llama_builds import NEWEST, where
from tools.models import shapes

pytestmark = pytest.mark.usefixtures("one_worker")

KEYWORDS = {
    "-c": "n_ctx",
    "-ctk": "type_k",
    "-ctv": "type_v",
    "-np": "n_seq_max",
    "-sm": "split_mode",
    "-ub": "n_ubatch",
}
Q8 = "-ctk q8_0 -ctv q8_0"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("shapes")
    return {
        name: shapes.write(name, directory, vocab=False)
        for name in ("llama-3.1-8b", "llama-3.1-70b", "gemma3-12b", "qwen3-30b-a3b")
    }


@named_cases(
    ("all on the device", "llama-3.1-8b", {"gpus": ["8GiB"]}, {"-c -ctk -ctv"}),
    ("nothing fits", "llama-3.1-8b", {"gpus": ["8GiB"], "n_ctx": 131072, "host_memory": "4GiB"}, {"-c"}),
    ("sliding windows", "gemma3-12b", {"gpus": ["9GiB"], "n_ctx": 8192}, {"-np"}),
    ("two cards that may split tensors", "llama-3.1-70b", {"gpus": ["2x rtx-3090"]}, {"-c -sm"}),
    ("a small batch", "qwen3-30b-a3b", {"gpus": ["12GiB"], "n_ctx": 8192, "n_ubatch": 64}, {"-ub"}),
)
def test_a_fit_with_the_words_is_as_said(
    name: str, options: dict[str, Any], kinds: set[str], models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(best_plan, "SHARE", 1000)
    monkeypatch.setattr(best_plan, "SHARE_OF_FAILURE", 1000)
    # without a prompt, the request follows a context that is set
    options = {"program": "llama-server", "host_bandwidth": "60GB/s", "prompt": 2048, **options}
    without, plan = (fitter.fit(models[name], **options, alternatives=flag) for flag in (False, True))
    # a second process may have measured the plan early, or not
    assert replace(plan, alternatives=(), search=without.search) == without
    assert kinds <= {" ".join(each.arguments[::2]) for each in plan.alternatives}
    for each in plan.alternatives:
        if each.file_type:
            continue
        pairs = zip(each.arguments[::2], each.arguments[1::2], strict=True)
        words = {KEYWORDS[word]: int(value) if value.isdigit() else value for word, value in pairs}
        other = fitter.fit(models[name], **{**options, **words})
        assert other.fits and other.estimate is not None and each.is_measured
        assert each.n_ctx == other.params.n_ctx
        found, said = other.estimate.generation_tokens_per_second, each.generation_tokens_per_second
        # no alternative is looked for with flash attention on or off for all layers
        assert 0.75 * found <= said <= 1.02 * found, each


@named_cases(
    ("the user's word", {"gpus": ["2x rtx-3090"], "split_mode": "layer"}),
    ("cards of unlike speed", {"gpus": ["rtx-3090", "40GiB"]}),
    ("one card", {"gpus": ["64GiB"]}),
)
def test_tensors_are_not_split_over(options: dict[str, Any], models: dict[str, Path]) -> None:
    plan = fitter.fit(models["llama-3.1-70b"], **options, program="llama-server", alternatives=True)
    assert plan.fits and not [each for each in plan.alternatives if "-sm" in each.arguments]


def test_a_cache_of_experts_where_llama_cpp_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(best_plan, "SHARE", 1000)
    model = shapes.write("qwen3-30b-a3b", tmp_path, vocab=False)
    options: dict[str, Any] = {"gpus": ["12GiB"], "n_ctx": 16384, "host_bandwidth": "40GB/s"}

    def with_cache(llama_cpp: str) -> list[fitter.Alternative]:
        plan = fitter.fit(model, **options, llama_cpp=llama_cpp, alternatives=True)
        return [each for each in plan.alternatives if each.arguments[:1] == ("--moe-cache-mib",)]

    assert with_cache("python") == []
    newest = where(NEWEST)
    (each,) = with_cache(newest)
    other = fitter.fit(model, **options, llama_cpp=newest, moe_cache_size=f"{each.arguments[1]}MiB")
    assert other.fits and other.estimate is not None
    found = other.estimate.generation_tokens_per_second
    assert 0.85 * found <= each.generation_tokens_per_second <= 1.02 * found


def test_only_who_reads_them_pays_for_them(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(best_plan, "SHARE", 1000)
    options = ["--gpu", "8GiB", "-c", "32768", "--host-bandwidth", "60GB/s"]
    for words, expected in ((["--json"], []), (["--json", "--alternatives"], [Q8.split(), []])):
        assert main([str(models["llama-3.1-8b"]), *options, *words]) == 0
        out, err = capsys.readouterr()
        assert [each["arguments"] for each in json.loads(out)["alternatives"]] == expected
        assert (f"or    {Q8} " in err) is bool(expected)


@named_cases(
    ("experts on the host", "qwen3-30b-a3b", "12GiB", "Q3_K_M"),
    ("then all of it is on the device", "llama-3.1-8b:Q8_0", "8GiB", "Q6_K"),
    ("not quantized", "llama-3.1-8b:BF16", "12GiB", "Q8_0"),
    ("all of it is on the device", "llama-3.1-8b", "24GiB", ""),
    ("published quantized", "gpt-oss-120b", "24GiB", ""),
)
def test_the_next_smaller_file_type_is_about_as_said(name: str, gpu: str, file_type: str) -> None:
    # without a prompt, the request follows a context that is set
    options: dict[str, Any] = {"gpus": [gpu], "host_bandwidth": "60GB/s", "prompt": 2048}
    plan = fitter.fit(f"shape://{name}", **options, alternatives=True)
    found = [each for each in plan.alternatives if each.file_type]
    assert [each.file_type for each in found] == [file_type] * bool(file_type)
    for each in found:
        option, shape = each.arguments
        assert (option, each.is_measured) == ("--shape", False)
        other = fitter.fit(f"shape://{shape}", **options, n_ctx=plan.params.n_ctx)
        assert other.estimate is not None
        assert each.generation_tokens_per_second == pytest.approx(other.estimate.generation_tokens_per_second, rel=0.1)


def test_there_are_none_where_every_tensor_is_shared(models: dict[str, Path]) -> None:
    words: dict[str, Any] = {"gpus": ["2x 3GiB"], "n_ctx": 4096, "host_bandwidth": "60GB/s", "alternatives": True}
    assert fitter.fit(models["llama-3.1-8b"], **words).alternatives
    assert fitter.fit(models["llama-3.1-8b"], **words, split_mode="tensor").alternatives == ()


def test_another_file_is_named_where_no_words_ask_for_it(
    models: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(models["llama-3.1-8b"]), "--gpu", "4GiB", "-c", "4096", "--json", "--alternatives"]) == 0
    out, err = capsys.readouterr()
    (found,) = [each for each in json.loads(out)["alternatives"] if each["file_type"]]
    assert (found["arguments"], found["file_type"], found["measured"]) == ([], "Q3_K_M", False)
    assert re.search(r"or +a Q3_K_M file +about [\d.]+ t/s", err)
