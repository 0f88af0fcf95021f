"""The levers of --allow on real headers and the real libllama: each where it helps, none without --allow."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import fitter
from fitter import Plan
from fitter.cli import main
from fitter.planning.request.request import LEVERS, Progress
from fitter.planning.search import best_plan
from tests.support.cases import cases, named_cases
from tests.support.command import run_fitter
from tests.support.llama_builds import NEWEST, where
from tools.models import shapes

pytestmark = pytest.mark.usefixtures("one_worker")

HOST = "60GB/s"
GPT_OSS = "shape://gpt-oss-120b"
MODELS = ("llama-3.1-8b", "llama-3.1-70b", "gemma3-12b", "qwen3-30b-a3b", "deepseek-v3.1")

CACHE = {"gpus": ["8GiB"], "host_memory": "2GiB", "n_ctx": 32768}
"""With an f16 cache Llama 3.1 8B lacks a GiB on the device, and on the host that it would be moved to."""
EXPERTS = {"gpus": ["5GiB"], "n_ctx": 8192, "cpu_moe": True, "n_gpu_layers": 99}
"""DeepSeek's cache leaves less than the buffer for streaming experts in, even without dense weights."""


def fit(path: Path, *allow: str, **options: Any) -> Plan:
    plan = fitter.fit(path, allow=allow, host_bandwidth=HOST, **options)
    if plan.fits:
        params = plan.params
        overrides = [f"{o.pattern}={o.buffer_type}" for o in params.tensor_buft_overrides]
        measured = fitter.measure(
            path,
            gpus=options["gpus"],
            devices=params.devices,
            n_ctx=params.n_ctx,
            n_gpu_layers=params.n_gpu_layers,
            tensor_split=params.tensor_split,
            override_tensor=overrides,
            n_batch=params.n_batch,
            n_ubatch=params.n_ubatch,
            flash_attn=params.flash_attn,
            type_k=params.type_k,
            type_v=params.type_v,
            op_offload=params.op_offload,
            offload_kqv=params.offload_kqv,
        )
        assert measured == plan.breakdown, "a plan is what its parameters take"
    return plan


@cases("kv-q8_0", "kv-q4_0")
def test_a_quantized_cache_makes_it_fit(lever: str, models: dict[str, Path]) -> None:
    name = lever.removeprefix("kv-")
    plan = fit(models["llama-3.1-8b"], lever, **CACHE)
    assert plan.fits and plan.params.n_ctx == 32768
    assert plan.levers == (f"KV cache {name}/{name} instead of f16/f16",)
    assert plan.breakdown.flash_attn is True
    arguments = " ".join(plan.arguments())
    assert f"-ctk {name} -ctv {name}" in arguments


def test_the_better_of_two_caches_where_it_does(models: dict[str, Path]) -> None:
    # a prompt takes as long with either, where generation would be faster with the smaller one
    usual = {**CACHE, "objective": "prompt"}
    assert fit(models["llama-3.1-8b"], "kv-q4_0", "kv-q8_0", **usual).params.type_k == "q8_0"
    smaller = {**usual, "gpus": ["6500MiB"]}
    assert not fit(models["llama-3.1-8b"], "kv-q8_0", **smaller).fits
    assert fit(models["llama-3.1-8b"], "kv-q4_0", "kv-q8_0", **smaller).params.type_k == "q4_0"


@named_cases(
    ("no flash attention", {"flash_attn": "off"}),
    ("the user's K", {"type_k": "f16"}),
    ("the user's cache", {"type_k": "f16", "type_v": "f16"}),
)
def test_the_users_cache_stays(options: dict[str, Any], models: dict[str, Path]) -> None:
    plan = fitter.fit(models["llama-3.1-8b"], allow=["kv-q8_0", "kv-q4_0"], **CACHE, **options)
    assert not plan.fits and plan.levers == () and (plan.params.type_k, plan.params.type_v) == ("f16", "f16")


def test_a_former_lever_changes_nothing(models: dict[str, Path]) -> None:
    """A fit chooses the micro batch by itself."""
    options: dict[str, Any] = {"gpus": ["8GiB"], "n_ctx": 8192}
    before, after = (fit(models["gemma3-12b"], *allow, **options) for allow in ((), ("ubatch",)))
    assert after.levers == () and after.params == before.params
    kept = fit(models["gemma3-12b"], "ubatch", n_ubatch=64, **options)
    assert kept.levers == () and kept.params.n_ubatch == 64


def test_without_op_offload_no_buffer_for_streaming(models: dict[str, Path]) -> None:
    one = {**EXPERTS, "n_ubatch": 512}
    before = fit(models["deepseek-v3.1"], **one)
    after = fit(models["deepseek-v3.1"], "no-op-offload", **one)
    assert not before.fits and after.fits
    assert after.levers == ("no op_offload",) and "--no-op-offload" in after.arguments()
    assert after.devices[0].compute < before.devices[0].compute / 4
    assert fitter.fit(models["deepseek-v3.1"], allow=["no-op-offload"], op_offload=True, **EXPERTS).levers == ()


def test_a_shorter_context_keeps_the_model_on_the_device(models: dict[str, Path]) -> None:
    one = {**CACHE, "n_ubatch": 512}
    plan = fit(models["llama-3.1-8b"], "context", **one)
    assert plan.fits and 4096 <= plan.params.n_ctx < 32768
    assert plan.levers == (f"context {plan.params.n_ctx} instead of 32768",)
    free = fit(models["llama-3.1-8b"], **{**one, "n_ctx": None})
    assert plan.params == free.params, "it is the context that would have been fitted"
    kept = fit(models["llama-3.1-8b"], "context", fit_ctx=32768, **one)
    assert not kept.fits and kept.levers == ()


@cases(("llama-3.1-8b", CACHE), ("deepseek-v3.1", EXPERTS))
def test_nothing_is_given_up_unless_it_is_allowed(model: str, options: dict[str, Any], models: dict[str, Path]) -> None:
    steps: list[Progress] = []
    plan = fitter.fit(models[model], on_progress=steps.append, **options)
    paging = fitter.fit(models[model], allow=["paging"], **options)
    assert not plan.fits and plan.levers == ()
    assert (plan.params.type_k, plan.params.type_v, plan.params.op_offload) == ("f16", "f16", True)
    assert plan.params.n_ctx == paging.params.n_ctx == options["n_ctx"]
    assert not any("instead of" in step.text or "no op_offload" in step.text for step in steps)
    steps.clear()
    fitter.fit(
        models[model], allow=[lever for lever in LEVERS if lever != "paging"], on_progress=steps.append, **options
    )
    assert any("instead of" in step.text for step in steps)


def test_the_command_line(models: dict[str, Path]) -> None:
    words = ["--gpu", "8GiB", "--host-memory", "2GiB", "-c", "32768", "--json"]
    done = run_fitter(models["llama-3.1-8b"], *words, "--allow", "ubatch,kv-q8_0")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["levers"] == ["KV cache q8_0/q8_0 instead of f16/f16"]
    assert "-ctk" in document["arguments"]
    assert "given up, as --allow permits: KV cache q8_0/q8_0 instead of f16/f16" in done.stderr
    done = run_fitter(models["llama-3.1-8b"], *words)
    assert done.returncode == 1 and json.loads(done.stdout)["levers"] == []
    assert "given up" not in done.stderr


def test_a_lever_that_this_llama_cpp_lacks_has_no_effect(models: dict[str, Path]) -> None:
    """The pinned llama.cpp has no cache of experts."""
    before, after = (fit(models["deepseek-v3.1"], *allow, **EXPERTS) for allow in ((), ("moe-cache",)))
    assert after.params == before.params and after.levers == ()
    assert [note for note in after.notes if "moe_cache_size is not a parameter of llama.cpp" in note] == [
        note for note in after.notes if note not in before.notes
    ]
    with pytest.raises(fitter.UsageError, match="moe_cache_size is not a parameter"):
        fit(models["deepseek-v3.1"], moe_cache_size="2GiB", **EXPERTS)


@cases(1, 2)
def test_a_cache_of_experts_that_no_buffer_holds(n_cards: int) -> None:
    """llama.cpp would end its process: a card on Mesa's RADV has no buffer above 4 GiB."""
    asked: dict[str, Any] = {"gpus": ["vulkan:30GiB"] * n_cards, "n_ctx": 4096, "llama_cpp": where(NEWEST)}
    asked |= {"cpu_moe": True, "n_gpu_layers": 99, "tensor_split": [1] * n_cards}
    refused = "a cache of {} MiB for experts needs a larger buffer than a device has: give --moe-cache-mib {} or less"
    # three tensors with as many slots on each card
    with pytest.raises(fitter.UsageError) as error:
        fitter.measure(GPT_OSS, moe_cache_size="28GiB", **asked)
    most = int(str(error.value).split()[-3])
    assert str(error.value) == refused.format(28672, most)
    assert most == pytest.approx(n_cards * 3 * 4096, rel=0.01)
    loaded = fitter.measure(GPT_OSS, moe_cache_size=f"{most}MiB", **asked)
    assert sum(loaded.on(f"Vulkan{i}").context for i in range(n_cards)) > n_cards * 11.9 * 2**30
    assert fitter.fit(GPT_OSS, moe_cache_size=f"{most}MiB", **asked).fits
    for ask in (fitter.fit, fitter.measure):
        with pytest.raises(fitter.UsageError, match=refused.format(most + 1, most)):
            ask(GPT_OSS, moe_cache_size=f"{most + 1}MiB", **asked)


def test_a_fit_goes_on_where_one_card_has_no_buffer_for_a_cache_of_experts() -> None:
    asked: dict[str, Any] = {"gpus": ["vulkan:30GiB"] * 2, "n_ctx": 4096, "llama_cpp": where(NEWEST), "cpu_moe": True}
    plan = fitter.fit(GPT_OSS, moe_cache_size="20000MiB", **asked)
    assert plan.fits and plan.params.tensor_split == pytest.approx((19, 18))


# --- alternatives on the real libllama: a fit with their words is as they say, and the plan stays the same


KEYWORDS = {
    "-c": "n_ctx",
    "-ctk": "type_k",
    "-ctv": "type_v",
    "-np": "n_seq_max",
    "-sm": "split_mode",
    "-ub": "n_ubatch",
}
Q8 = "-ctk q8_0 -ctv q8_0"


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
