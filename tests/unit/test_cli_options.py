"""What the command line makes of its words: the keywords that reach the Python API."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import fields
from typing import Any

import click
import pytest

from fitter import api
from fitter.cli import cli, main
from fitter.cli.fit import fit
from fitter.cli.group import COMMANDS
from fitter.llama.types import DeviceInfo, Params
from tests.support.cases import cases, named_cases, outcomes, stored
from tests.support.plans import GIB, MIB, make_plan


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    made: list[tuple[str, dict[str, Any]]] = []
    plan = make_plan(Params(n_ctx=4096, n_gpu_layers=33))

    def fit(model: str, **given: Any) -> api.Plan:
        assert given.pop("on_progress") is None
        given.pop("on_log")
        given.pop("alternatives")
        made.append((model, given))
        return api.Plan(**{field.name: getattr(plan, field.name) for field in fields(plan)})

    monkeypatch.setattr(api, "fit", fit)
    return made


@cases(
    ("", {}),
    ("-c 4096", {"n_ctx": 4096}),
    ("--ctx-size 0", {"n_ctx": 0}),
    ("-ngl 12", {"n_gpu_layers": 12}),
    ("--gpu-layers 0", {"n_gpu_layers": 0}),
    ("--n-gpu-layers all", {"n_gpu_layers": -1}),
    ("-ngl -2", {"n_gpu_layers": -1}),
    ("-ngl auto", {}),
    ("-ngl -1", {}),
    ("-ts 3,1", {"tensor_split": (3.0, 1.0)}),
    ("--tensor-split 0.5/1", {"tensor_split": (0.5, 1.0)}),
    ("-ot exps=CPU", {"override_tensor": ("exps=CPU",)}),
    ("-ot a=CPU,b=CUDA0 --override-tensor c=CPU", {"override_tensor": ("a=CPU", "b=CUDA0", "c=CPU")}),
    ("-sm none -mg 1", {"split_mode": "none", "main_gpu": 1}),
    ("--split-mode layer --main-gpu 0", {"split_mode": "layer", "main_gpu": 0}),
    ("-dev CUDA1,CUDA0", {"devices": ("CUDA1", "CUDA0")}),
    ("--device none", {"devices": ()}),
    ("-b 4096 -ub 1024", {"n_batch": 4096, "n_ubatch": 1024}),
    ("--batch-size 64 --ubatch-size 32", {"n_batch": 64, "n_ubatch": 32}),
    ("-np 4 -kvu", {"n_seq_max": 4, "kv_unified": True}),
    ("--parallel 4 --no-kv-unified", {"n_seq_max": 4, "kv_unified": False}),
    ("-ctk q8_0 -ctv q4_0", {"type_k": "q8_0", "type_v": "q4_0"}),
    ("--cache-type-k bf16 --cache-type-v iq4_nl", {"type_k": "bf16", "type_v": "iq4_nl"}),
    ("-fa on", {"flash_attn": "on"}),
    ("--flash-attn auto", {"flash_attn": "auto"}),
    ("-nkvo", {"offload_kqv": False}),
    ("--kv-offload", {"offload_kqv": True}),
    ("--no-op-offload", {"op_offload": False}),
    ("--op-offload", {"op_offload": True}),
    ("--swa-full", {"swa_full": True}),
    ("-cmoe", {"cpu_moe": True}),
    ("--cpu-moe", {"cpu_moe": True}),
    ("-ncmoe 3", {"n_cpu_moe": 3}),
    ("-ncffn 3", {"n_cpu_ffn": 3}),
    ("--moe-cache-mib 2048", {"moe_cache_size": 2048 * 2**20}),
    ("--n-cpu-moe 0", {"n_cpu_moe": 0}),
    ("-fitc 8192", {"fit_ctx": 8192}),
    ("--fit-target 512", {"margin": 512 * MIB}),
    ("-fitt 512,0", {"margin": (512 * MIB, 0)}),
    ("-fitt 2GiB,512", {"margin": (2 * GIB, 512 * MIB)}),
    ("-fitt 1.5GiB --host-margin 4GiB", {"margin": GIB + 512 * MIB, "host_margin": 4 * GIB}),
    ("-c 32k --fit-ctx 8K --prompt 2k -ub 1k", {"n_ctx": 32768, "fit_ctx": 8192, "prompt": 2048, "n_ubatch": 1024}),
    ("-c 1M --generate 1.5k -cms 2k", {"n_ctx": 2**20, "generate": 1536, "checkpoint_min_step": 2048}),
    ("-cram 24GB -fitt 1GB,512", {"cache_ram": 22888, "margin": (10**9, 512 * MIB)}),
    ("--gpu rtx-4090 --gpu 24GiB", {"gpus": ("rtx-4090", "24GiB")}),
    ("--gpu none", {"gpus": ("none",)}),
    ("--gpu rtx-4090 --profile library:/d", {"gpus": ("rtx-4090",), "profile": "library:/d"}),
    ("--host-memory 64GiB --host-margin 2048", {"host_memory": "64GiB", "host_margin": 2 * GIB}),
    ("--rpc a:1,b:2 --rpc c:3", {"rpc": ("a:1", "b:2", "c:3")}),
    ("--rpc a:1 --rpc-bandwidth 900GB/s,1TB/s", {"rpc": ("a:1",), "rpc_bandwidth": "900GB/s,1TB/s"}),
    ("--timeout 2.5", {"timeout": 2.5}),
    ("--time-limit 30", {"time_limit": 30.0}),
    ("-md d.gguf -devd CUDA1 -ngld 9", {"model_draft": "d.gguf", "devices_draft": ("CUDA1",), "n_gpu_layers_draft": 9}),
    (
        "--model-draft d.gguf -devd none -ngld all",
        {"model_draft": "d.gguf", "devices_draft": (), "n_gpu_layers_draft": -1},
    ),
    (
        "--spec-draft-model d -ctkd q8_0 -ctvd q4_0",
        {"model_draft": "d", "type_k_draft": "q8_0", "type_v_draft": "q4_0"},
    ),
    ("--mtp --spec-draft-n-max 5", {"mtp": True, "draft_max": 5}),
    ("--mtp --spec-draft-n-ubatch 256", {"mtp": True, "n_ubatch_draft": 256}),
    (
        "--mmproj p.gguf -mmdev CUDA1 --image-min-tokens 64 --image-max-tokens 256",
        {"mmproj": "p.gguf", "mmproj_device": "CUDA1", "image_min_tokens": 64, "image_max_tokens": 256},
    ),
    ("-mm p.gguf --mmproj-device none", {"mmproj": "p.gguf", "mmproj_device": "none"}),
    ("--lora a,b --lora c --lora-scaled d:0.5", {"lora": ("a", "b", "c"), "lora_scaled": ("d:0.5",)}),
    ("--reserve CUDA0=2GiB --reserve host=1GiB", {"reserve": ("CUDA0=2GiB", "host=1GiB")}),
    ("--allow paging", {"allow": ("paging",)}),
    ("--allow paging,kv-q8_0 --allow context", {"allow": ("paging", "kv-q8_0", "context")}),
)
def test_options_reach_the_api(words: str, expected: dict[str, Any], calls: list[tuple[str, dict[str, Any]]]) -> None:
    assert main(["model.gguf", *words.split()]) == 0
    assert calls == [("model.gguf", expected)]


@cases(
    ("", True),
    ("--format shell", True),
    ("--json", False),
    ("--format json", False),
    ("--json --alternatives", True),
    ("--no-alternatives", False),
)
def test_who_gets_alternatives(words: str, expected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []

    def fit(model: str, *, alternatives: bool, **given: Any) -> api.Plan:
        asked.append(alternatives)
        return make_plan(Params(n_ctx=4096, n_gpu_layers=33))

    monkeypatch.setattr(api, "fit", fit)
    assert main(["model.gguf", *words.split()]) == 0
    assert asked == [expected]


@cases(
    ("fit model.gguf", "model.gguf"),
    ("-c 4096 model.gguf", "model.gguf"),
    ("./fit", "./fit"),
    ("./llama-3.1-8b", "./llama-3.1-8b"),
    ("fit devices", "devices"),
    ("-- -odd.gguf", "-odd.gguf"),
)
def test_fit_is_the_default(words: str, model: str, calls: list[tuple[str, dict[str, Any]]]) -> None:
    assert main(words.split()) == 0
    assert calls[0][0] == model


@outcomes(stored("cli_options", "wrong_words"))
def test_wrong_words_are_one_line(
    words: str, message: str, calls: list[tuple[str, dict[str, Any]]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words.split()) == 2
    out, err = capsys.readouterr()
    assert (out, calls) == ("", []) and message in err
    # without a word it is the help
    assert not words or (err.startswith("fitter: error: ") and err.count("\n") == 1)


def test_an_unknown_option_is_named_in_full(capsys: pytest.CaptureFixture[str]) -> None:
    main(["m.gguf", "-tx", "4"])
    assert re.search(r"No such option:? '?-tx'? ", capsys.readouterr().err)


@cases(["--help"], ["-h"], ["fit", "--help"], ["inspect", "-h"], ["devices", "-h"])
def test_help_is_on_stdout(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 0
    out, err = capsys.readouterr()
    assert out.startswith("Usage: fitter")
    assert err == ""


@cases(("help", "fitter MODEL [OPTIONS]"), ("help check", "fitter check "))
def test_the_word_help(words: str, usage: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words.split()) == 0
    assert f"Usage: {usage}" in capsys.readouterr().out


def test_all_help_of_fit_has_its_options_in_sections(capsys: pytest.CaptureFixture[str]) -> None:
    main(["m.gguf", "--help-all"])
    lines = capsys.readouterr().out.splitlines()
    titles = ["Context and batch:", "Placement (what you set is kept; the rest is fitted around it):"]
    titles += ["Devices and limits:", "Output:", "Examples:"]
    assert [line for line in lines if line in titles] == titles
    assert max(map(len, lines)) <= 100
    context = click.Context(fit)
    options = [param for param in fit.get_params(context) if isinstance(param, click.Option)]
    words = " ".join(lines)
    assert [param.opts for param in options if not all(name in words for name in param.opts)] == []
    assert not [line for line in lines if "--help-all, or" in line]


@pytest.mark.parametrize("name", COMMANDS)
def test_help_has_60_lines(name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main([name, "--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 60
    command = cli.get_command(click.Context(cli), name)
    assert command is not None
    is_brief = len(command.params) > 20
    hint = f"All options: fitter {name} --help-all"
    assert lines[-1].startswith(hint) is is_brief
    # no reader can open an address without an owner
    assert not any("//OWN" in line for line in lines)
    if is_brief:
        assert main([name, "--help-all"]) == 0
        assert len(capsys.readouterr().out.splitlines()) > len(lines)
    else:
        assert main([name, "--help-all"]) == 0
        assert capsys.readouterr().out.splitlines() == lines


def test_short_help_names_an_option_in_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    main(["fit", "--help"])
    lines = capsys.readouterr().out.splitlines()
    for line in (
        "  -ngl, --n-gpu-layers N        Layers on the devices: a number, auto or all.",
        "  --report FILE    Also write a report to a file, as HTML to forward.",
        "Placement:",
    ):
        assert line in lines
    assert not [line for line in lines if "--gpu-layers" in line or "--timeout" in line]


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    import fitter

    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"fitter {fitter.__version__}\n"


def test_devices(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    host = DeviceInfo("CPU", "Processor", "cpu", "CPU", 32 * GIB, 30 * GIB)
    monkeypatch.setattr(api, "devices", lambda gpus=(): ((), replace_name(host, gpus)))
    assert main(["devices", "--gpu", "24GiB"]) == 0
    assert "24GiB" in capsys.readouterr().out
    assert main(["devices", "--json"]) == 0
    assert '"free": 32212254720' in capsys.readouterr().out


def replace_name(device: DeviceInfo, gpus: tuple[str, ...]) -> DeviceInfo:
    return DeviceInfo(device.name, ",".join(gpus), device.type, device.backend, device.total, device.free)


def test_nothing_heavy_is_imported_before_it_is_needed() -> None:
    code = "import sys, fitter.cli; print(sorted({'numpy', 'llama_cpp', 'rich', 'cffi'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@named_cases(
    ("lock", ["lock"]),
    ("check", ["check"]),
    ("diff", ["diff", "--llama-cpp", "old", "--llama-cpp", "new"]),
    ("history", ["history", "--llama-cpp", "old"]),
)
def test_the_file_of_the_cases_has_one_name(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*words, "--cases", "nowhere.toml"]) == 2
    missing = capsys.readouterr().err
    assert missing.startswith("fitter: error: nowhere.toml does not exist: ")
    # what scripts had before
    former = {"lock": ["--file", "nowhere.toml"], "check": ["--file", "nowhere.toml"], "history": ["nowhere.toml"]}
    for more in [former[words[0]]] if words[0] in former else []:
        assert main([*words, *more]) == 2
        assert capsys.readouterr().err == missing
    assert main([words[0], "--help"]) == 0
    shown = capsys.readouterr().out
    assert "--cases FILE" in shown and "--file" not in shown


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_takes_a_build(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name, "--help-all"]) == 0
    # the program of `backend` brings its own llama.cpp
    assert ("--llama-cpp" in capsys.readouterr().out) == (name != "backend")
