from __future__ import annotations

import os
import re
import shlex
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fitter.errors import PlanError, UsageError
from fitter.llama.types import LlamaCpp, Params, TensorBuftOverride
from fitter.output.arguments import arguments, check_line, command_line, shell_word, unsafe_arguments
from fitter.output.keywords import mapping
from fitter.parameters.values import plain_pattern
from fitter.planning.placing.host_flags import host_overrides
from tests.support.cases import cases, named_cases, stored, stored_rows
from tests.support.plans import make_plan, shared_use

SPILL = TensorBuftOverride("^blk.(1|2|3).ffn_(up|gate)_exps.weight$", "CPU")
USERS_OWN = TensorBuftOverride(r"blk\.\d+\.ffn_.*_exps", "CPU")


@pytest.mark.parametrize(
    ("name", "params", "expected"),
    [
        ("the least", {}, "-c 4096 -ngl 33 -np 1 -fit off"),
        ("the model's own context", {"n_ctx": 0}, "-c 8192 -ngl 33 -np 1 -fit off"),
        ("a context that llama.cpp pads", {"n_ctx": 100}, "-c 100 -ngl 33 -np 1 -fit off"),
        ("all layers", {"n_gpu_layers": -1}, "-c 4096 -ngl all -np 1 -fit off"),
        ("no layer", {"n_gpu_layers": 0}, "-c 4096 -ngl 0 -np 1 -fit off"),
        ("devices", {"devices": ("CUDA1", "CUDA0")}, "-c 4096 -dev CUDA1,CUDA0 -ngl 33 -np 1 -fit off"),
        ("no device", {"devices": ()}, "-c 4096 -dev none -ngl 33 -np 1 -fit off"),
        ("split", {"tensor_split": (20.0, 13.0)}, "-c 4096 -ngl 33 -ts 20,13 -np 1 -fit off"),
        ("split by hand", {"tensor_split": (0.25, 1.5)}, "-c 4096 -ngl 33 -ts 0.25,1.5 -np 1 -fit off"),
        ("nothing on the last", {"tensor_split": (33.0, 0.0)}, "-c 4096 -ngl 33 -ts 33 -np 1 -fit off"),
        ("nothing on the first", {"tensor_split": (0.0, 33.0)}, "-c 4096 -ngl 33 -ts 0,33 -np 1 -fit off"),
        (
            "overrides",
            {"tensor_buft_overrides": (SPILL, TensorBuftOverride("^blk.4.", "CUDA1"))},
            "-c 4096 -ngl 33 -ot ^blk.(1|2|3).ffn_(up|gate)_exps.weight$=CPU,^blk.4.=CUDA1 -np 1 -fit off",
        ),
        ("one device alone", {"split_mode": "none", "main_gpu": 1}, "-c 4096 -ngl 33 -sm none -mg 1 -np 1 -fit off"),
        ("batches", {"n_batch": 4096, "n_ubatch": 1024}, "-c 4096 -ngl 33 -b 4096 -ub 1024 -np 1 -fit off"),
        ("KV types", {"type_k": "q8_0", "type_v": "q4_0"}, "-c 4096 -ngl 33 -ctk q8_0 -ctv q4_0 -np 1 -fit off"),
        ("flash attention", {"flash_attn": "on"}, "-c 4096 -ngl 33 -fa on -np 1 -fit off"),
        ("KV cache on the host", {"offload_kqv": False}, "-c 4096 -ngl 33 -nkvo -np 1 -fit off"),
        ("no op offload", {"op_offload": False}, "-c 4096 -ngl 33 --no-op-offload -np 1 -fit off"),
        ("full SWA cache", {"swa_full": True}, "-c 4096 -ngl 33 --swa-full -np 1 -fit off"),
        ("four sequences", {"n_seq_max": 4}, "-c 4096 -ngl 33 -np 4 -fit off"),
        ("four in one cache", {"n_seq_max": 4, "kv_unified": True}, "-c 4096 -ngl 33 -np 4 -kvu -fit off"),
        ("one in one cache", {"kv_unified": True}, "-c 4096 -ngl 33 -np 1 -fit off"),
        ("outputs, which are the program's own", {"n_outputs_max": 4}, "-c 4096 -ngl 33 -np 1 -fit off"),
        (
            "less to keep",
            {"more": (("cache_ram", 512), ("ctx_checkpoints", 3))},
            "-c 4096 -ngl 33 -np 1 -cram 512 -ctxcp 3 -fit off",
        ),
        ("nothing to keep", {"more": (("cache_ram", 0),)}, "-c 4096 -ngl 33 -np 1 -cram 0 -fit off"),
        ("no limit", {"more": (("cache_ram", -1),)}, "-c 4096 -ngl 33 -np 1 -cram -1 -fit off"),
        (
            "idle slots stay",
            {"more": (("cache_idle_slots", False), ("checkpoint_min_step", 64))},
            "-c 4096 -ngl 33 -np 1 -cms 64 --no-cache-idle-slots -fit off",
        ),
        (
            "reranking",
            {"more": (("pooling_type", "rank"), ("reranking", True))},
            "-c 4096 -ngl 33 --pooling rank -np 1 --rerank -fit off",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) and not value.startswith("-c") else "",
)
def test_arguments(name: str, params: dict[str, Any], expected: str) -> None:
    plan = make_plan(Params(**{"n_ctx": 4096, "n_gpu_layers": 33, **params}), n_ctx=8192)
    assert arguments(plan) == expected.split(" ")


CMOE, NCMOE, NCFFN = (
    host_overrides(*flag, ["blk.0.a", "blk.1.a"])[0]
    for flag in ((True, None, None), (False, 2, None), (False, None, 1))
)
OTHER, ON_A_DEVICE = TensorBuftOverride("a", "CPU"), TensorBuftOverride("b", "CUDA1")
FLAGS: dict[str, tuple[tuple[TensorBuftOverride, ...], str | None, str]] = {
    "experts of the first layers": ((NCMOE,), None, "-ncmoe 2"),
    "all experts": ((CMOE,), None, "-cmoe"),
    "feed-forward weights": ((NCFFN,), None, "-ncffn 1"),
    "feed-forward weights, a build with it": ((NCFFN,), "0.24.0", "-ncffn 1"),
    "a build without": ((NCFFN, NCMOE), "0.23.9", f"-ot {NCFFN.pattern}=CPU -ncmoe 2"),
    "all of it": ((OTHER, NCFFN, NCMOE), None, "-ot a=CPU -ncffn 1 -ncmoe 2"),
    "beside a device, whose place counts": ((ON_A_DEVICE, NCMOE), None, f"-ot b=CUDA1,{NCMOE.pattern}=CPU"),
    "a layer too few at the start": (
        (replace(NCMOE, pattern=NCMOE.pattern.replace("0|", "")),),
        None,
        f"-ot {NCMOE.pattern.replace('0|', '')}=CPU",
    ),
}


@cases(FLAGS)
def test_flags_for_weights_on_the_host(overrides: tuple[TensorBuftOverride, ...], ggml: str | None, words: str) -> None:
    plan = make_plan(Params(n_ctx=4096, n_gpu_layers=33, tensor_buft_overrides=overrides))
    llama_cpp = None if ggml is None else LlamaCpp("1", ggml, "commit", "libllama.so", "key", "")
    assert " ".join(arguments(replace(plan, llama_cpp=llama_cpp))) == f"-c 4096 -ngl 33 {words} -np 1 -fit off"


BOTH = ("CUDA0", "CUDA1")


@named_cases(
    ("llama.cpp's own", BOTH, BOTH, {}, ""),
    ("the user's", BOTH, (), {}, "-dev CUDA0,CUDA1 "),
    ("one of them", BOTH[:1], BOTH, {}, "-dev CUDA0 "),
    ("in another order", BOTH[::-1], BOTH, {}, "-dev CUDA1,CUDA0 "),
    ("none", (), BOTH, {}, "-dev none "),
    ("none, where there is none", (), (), {}, "-dev none "),
    ("split tensors, which have another default", BOTH, BOTH, {"split_mode": "tensor"}, "-dev CUDA0,CUDA1 "),
    ("one alone, counted by -mg", BOTH, BOTH, {"split_mode": "none", "main_gpu": 1}, "-dev CUDA0,CUDA1 "),
)
def test_devices_that_llama_cpp_uses_by_itself(
    used: tuple[str, ...], default: tuple[str, ...], params: dict[str, Any], words: str
) -> None:
    plan = make_plan(Params(n_ctx=4096, n_gpu_layers=33, devices=used, **params))
    args = " ".join(arguments(replace(plan, default_devices=default)))
    assert args.startswith(f"-c 4096 {words}-ngl 33 ")


@cases(stored("output_arguments", "lists_of_what_is_beside_the_model"))
def test_lists_of_what_is_beside_the_model(beside: list[tuple[str, ...]], expected: str) -> None:
    uses = tuple(shared_use("beside", words) for words in beside)
    words = " ".join(arguments(replace(make_plan(), shared=uses)))
    assert words == f"-c 4096 -ngl 33 -np 1 {expected} -fit off"


def test_one_device_needs_no_split() -> None:
    plan = make_plan(Params(n_ctx=512, tensor_split=(33.0,)), devices=["CUDA0"])
    assert "-ts" not in arguments(plan)


@cases((15, True), (16, False))
def test_llama_cpp_takes_a_split_over_fifteen_devices(n_devices: int, is_accepted: bool) -> None:
    names = [f"CUDA{i}" for i in range(n_devices)]
    plan = make_plan(Params(n_ctx=512, tensor_split=(2.0,) * n_devices), devices=names)
    if is_accepted:
        assert ",".join(["2"] * 15) in arguments(plan)
    else:
        with pytest.raises(PlanError, match="at most 15 devices, but this plan splits over 16"):
            arguments(plan)


def test_sixteen_devices_with_the_last_one_unused_are_fifteen() -> None:
    plan = make_plan(Params(n_ctx=512, tensor_split=(2.0,) * 15 + (0.0,)), devices=[f"CUDA{i}" for i in range(16)])
    assert ",".join(["2"] * 15) in arguments(plan)


@cases("a{1,2}", "a=b")
def test_a_pattern_that_llama_cpp_would_cut_is_refused(pattern: str) -> None:
    plan = make_plan(Params(n_ctx=512, tensor_buft_overrides=(TensorBuftOverride(pattern, "CPU"),)))
    with pytest.raises(UsageError, match=re.escape(pattern)):
        arguments(plan)


@cases(
    ("^blk.(1|2).", "^blk.(1|2)."),
    (r"blk\.1\.ffn", "blk[.]1[.]ffn"),
    (r"blk\.\d+\.", "blk[.][0-9]+[.]"),
    (r"[\.a]\.", r"[\.a][.]"),
    (r"[0-9]\.x", "[0-9][.]x"),
    (r"a\b", r"a\b"),
    (r"\\", r"\\"),
    ("a\\", "a\\"),
)
def test_plain_pattern(pattern: str, expected: str) -> None:
    assert plain_pattern(pattern) == expected


@cases(
    ("^blk.(1|2|3).ffn_(up|gate)_exps.weight$=CPU", True),
    ("blk[.][0-9]+[.]ffn_.*_exps=CPU", True),
    (r"a\b=CPU", False),
    ("a b=CPU", False),
    ("a'b=CPU", False),
    ('a"b=CPU', False),
)
def test_unsafe_arguments(argument: str, is_safe: bool) -> None:
    assert unsafe_arguments(["-ot", argument]) == ([] if is_safe else [argument])


LINE = ["-c", "4096", "-ot", "^blk.(1|2|3).ffn_(up|gate)_exps.weight$=CPU,blk[.][0-9]+[.]ffn_.*_exps=CUDA0"]


@cases(
    ("bash", "printf '%s\\n' $(printf '%s\\n' \"$LINE\")"),
    ("sh", "printf '%s\\n' $(printf '%s\\n' \"$LINE\")"),
    ("sh", "printf '%s\\n' \"$LINE\" | xargs printf '%s\\n'"),
)
def test_the_plain_line_survives_command_substitution_and_xargs(shell: str, script: str, tmp_path: Path) -> None:
    environment = {**os.environ, "LINE": command_line(LINE, quoted=False)}
    assert _lines([shell, "-c", script], tmp_path, environment) == LINE


def test_the_quoted_line_can_be_pasted_into_a_shell(tmp_path: Path) -> None:
    line = command_line(LINE, quoted=True)
    assert shlex.split(line) == LINE
    assert _lines(["sh", "-c", f"printf '%s\\n' {line}"], tmp_path, dict(os.environ)) == LINE


def test_a_users_escaped_pattern_goes_out_without_backslashes() -> None:
    args = arguments(make_plan(Params(n_ctx=512, tensor_buft_overrides=(USERS_OWN,))))
    assert args[args.index("-ot") + 1] == "blk[.][0-9]+[.]ffn_.*_exps=CPU"
    assert not unsafe_arguments(args)


def _lines(command: list[str], directory: Path, environment: dict[str, str]) -> list[str]:
    done = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


@cases(*stored_rows("output_arguments", "a_word_for_eval"))
def test_a_word_for_eval(word: str, quoted: str) -> None:
    assert shell_word(word) == quoted
    assert shlex.split(quoted) == [word]


@cases("a\nb", "a\x1b[31m", "a\u202eb", "a\udcffb")
def test_what_no_line_can_have(name: str) -> None:
    with pytest.raises(PlanError, match="control characters") as caught:
        check_line(["-md", name])
    assert str(caught.value).isprintable()


@named_cases(
    ("the newest that is known", None, "-lm none"),
    ("of today", "0.25.3", "-lm none"),
    ("the first with it", "0.19.0", "-lm none"),
    ("an older one", "0.18.9", "--no-mmap"),
)
def test_a_file_that_must_not_be_mapped(ggml: str | None, words: str) -> None:
    llama_cpp = None if ggml is None else LlamaCpp("1", ggml, "commit", "libllama.so", "key", "")
    plan = replace(make_plan(), llama_cpp=llama_cpp)
    plan = replace(plan, params=plan.params.having({"load_mode": "none"}))
    assert " ".join(arguments(plan)) == f"-c 4096 -ngl 33 {words} -np 1 -fit off"
    assert mapping(plan) == {"use_mmap": False}
    if words == "--no-mmap":
        with pytest.raises(PlanError, match=r"^this format cannot express --no-mmap, which this plan needs"):
            plan.format("ini")
        return
    assert "\nload-mode = none\n" in plan.format("ini")
    assert "\nLLAMA_ARG_LOAD_MODE=none\n" in plan.format("env")
    assert "--no-mmap" in replace(plan, program="ik_llama").format("ik_llama").split()
