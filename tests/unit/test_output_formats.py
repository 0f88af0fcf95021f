"""What the formats of a plan look like, and what they refuse. That other programs read them: tests/integration."""

from __future__ import annotations

import ast
import json
import random
import re
import shlex
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import yaml

from fitter.errors import PlanError, UsageError
from fitter.llama.types import Params, TensorBuftOverride
from fitter.output import arguments, formats
from fitter.parameters.targets import FORMATS, OWN_FORMATS
from fitter.planning.placing.host_flags import host_overrides
from fitter.planning.plan.plan import Plan, Problem
from fitter.programs.later import Later
from fitter.programs.llama_server.text import section
from tests.formats import ik_llama, modelfile
from tests.support.cases import cases
from tests.support.plans import make_plan, render, shared_use

FOR_PODS = ("kubernetes", "llmkube")
"""Formats for llama-server alone: tests/unit/test_claims.py."""
SPILL = TensorBuftOverride("^blk.(1|2).ffn_up_exps.weight$", "CPU")
SPLIT = Params(n_ctx=4096, n_gpu_layers=33, tensor_split=(20.0, 13.0), tensor_buft_overrides=(SPILL,))


def plan_at(path: str, **params: Any) -> Plan:
    plan = make_plan(replace(SPLIT, **params))
    return replace(plan, model=replace(plan.model, path=path))


def test_a_preset() -> None:
    assert render(plan_at("/models/Model-8B-Q4_K_M.gguf", offload_kqv=False), "ini").splitlines() == [
        "version = 1",
        "",
        "[Model-8B-Q4_K_M]",
        "model = /models/Model-8B-Q4_K_M.gguf",
        "ctx-size = 4096",
        "n-gpu-layers = 33",
        "tensor-split = 20,13",
        "override-tensor = ^blk.(1|2).ffn_up_exps.weight$=CPU",
        "kv-offload = false",
        "parallel = 1",
        "fit = off",
    ]


@cases(
    ("/models/model.gguf", "model"),
    ("/models/Model 8B.gguf", "Model-8B"),
    ("/models/big-00001-of-00003.gguf", "big"),
    ("/models/a:b]c*.gguf", "a-b-c-"),
    ("/models/modèle.gguf", "modèle"),
    ("/models/*.gguf", "-"),
    ("/models/.gguf", "model"),
)
def test_a_presets_name(path: str, expected: str) -> None:
    assert section(path) == expected


@cases("/a;b/m.gguf", "/a#b/m.gguf", "/a\nb/m.gguf", "/a/m.gguf ")
def test_what_a_preset_would_cut_off_is_refused(path: str) -> None:
    with pytest.raises(PlanError, match="cannot be the model in a llama-server preset"):
        render(plan_at(path), "ini")


def test_an_environment_file() -> None:
    assert render(plan_at("/models/model.gguf", offload_kqv=False, swa_full=True), "env").splitlines() == [
        "# not for docker's --env-file, which would keep the quotes of LLAMA_ARG_OVERRIDE_TENSOR",
        "LLAMA_ARG_MODEL=/models/model.gguf",
        "LLAMA_ARG_CTX_SIZE=4096",
        "LLAMA_ARG_N_GPU_LAYERS=33",
        "LLAMA_ARG_TENSOR_SPLIT=20,13",
        "LLAMA_ARG_OVERRIDE_TENSOR='^blk.(1|2).ffn_up_exps.weight$=CPU'",
        "LLAMA_ARG_KV_OFFLOAD=false",
        "LLAMA_ARG_SWA_FULL=true",
        "LLAMA_ARG_N_PARALLEL=1",
        "LLAMA_ARG_FIT=off",
    ]


def test_an_environment_file_without_quotes_needs_no_comment() -> None:
    text = render(plan_at("/models/model.gguf", tensor_buft_overrides=()), "env")
    lines = text.splitlines()
    assert len(lines) > 5 and all(re.fullmatch(r"LLAMA_ARG_[A-Z_]+=[^'\" ]+", line) for line in lines)


@cases(
    ("/model.gguf", {"op_offload": False}, "no environment variable for --no-op-offload, which this plan needs"),
    ("/a\nb.gguf", {}, "LLAMA_ARG_MODEL cannot be on one line"),
)
def test_what_no_environment_file_can_say(path: str, params: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        render(plan_at(path, **params), "env")


def test_a_path_is_whole_wherever_the_file_is_read(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("ini", "env", "python", "llama-swap", "compose"):
        assert str(tmp_path / "model.gguf") in render(plan_at("model.gguf"), name)


@cases(
    ({}, True, "-c 4096 -ngl 999 -np 1 -fa on"),
    ({}, False, "-c 4096 -ngl 999 -np 1 -fa off"),
    ({}, None, "-c 4096 -ngl 999 -np 1 -fa auto"),
    ({"flash_attn": "off"}, None, "-c 4096 -ngl 999 -np 1 -fa off"),
    ({"n_gpu_layers": -1}, True, "-c 4096 -ngl 999 -np 1 -fa on"),
    ({"devices": ()}, True, "-c 4096 -dev none -ngl 999 -np 1 -fa on"),
    ({"devices": ("CUDA1", "Vulkan0", "ROCm0")}, True, "-c 4096 -dev CUDA1,Vulkan0,ROCm0 -ngl 999 -np 1 -fa on"),
    ({"op_offload": False}, True, "-c 4096 -ngl 999 -op -1,0 -np 1 -fa on"),
    ({"n_seq_max": 4}, True, "-c 4096 -ngl 999 -np 4 -fa on"),
    ({"swa_full": True}, True, "-c 4096 -ngl 999 -np 1 -fa on"),
    ({"n_gpu_layers": 0}, True, "-c 4096 -ngl 0 -np 1 -fa on"),
    (
        {"n_gpu_layers": 20, "tensor_split": (12.0, 8.0), "devices": ("CUDA1", "CUDA0")},
        True,
        "-c 4096 -dev CUDA1,CUDA0 -ngl 19 -ts 12,8 -np 1 -ot ^output=CUDA1 -fa on",
    ),
    ({"split_mode": "none", "main_gpu": 1}, True, "-c 4096 -ngl 999 -sm none -mg 1 -np 1 -fa on"),
)
def test_ik_llama(params: dict[str, Any], resolved: bool | None, expected: str) -> None:
    plan = make_plan(Params(**{"n_ctx": 4096, "n_gpu_layers": 33, **params}), flash_attn=resolved)
    assert render(plan, "ik_llama") == expected


@cases(
    ({"moe_cache_size": 1 << 30}, "no option like llama.cpp's --moe-cache-mib, which this plan needs"),
    ({"n_gpu_layers": 1}, "ik_llama.cpp has no -ngl for the output alone, which is 1 in llama.cpp"),
    ({"devices": ("MTL0",)}, "ik_llama.cpp has no device called MTL0"),
    ({"devices": ("CUDA0", "RPC0")}, "ik_llama.cpp has no device called RPC0"),
)
def test_what_ik_llama_cannot_be_told(params: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=re.escape(message)):
        render(make_plan(Params(n_ctx=4096, **params)), "ik_llama")


OF_OTHERS: dict[str, tuple[tuple[str, ...], str]] = {
    "a draft model": (
        ("-md", "d.gguf", "-devd", "CUDA0", "-ngld", "all", "-ctkd", "q8_0", "--spec-type", "draft-simple"),
        "-md d.gguf -devd CUDA0 -ngld 999 -ctkd q8_0 --spec-type draft:n_max=3",
    ),
    "a draft of its own, and n-grams": (
        (*("--spec-type", "draft-mtp", "--spec-draft-n-max", "5"), *("--spec-type", "ngram-mod")),
        "--spec-type mtp:n_max=5 --spec-type ngram-mod",
    ),
    "n-grams of a size": (
        ("--spec-type", "ngram-simple", "--spec-ngram-simple-size-m", "12"),
        "--spec-type ngram-simple:ngram_size_m=12",
    ),
    "images on the first device": (
        ("--mmproj", "p.gguf", "-mmdev", "CUDA0", "--image-max-tokens", "256"),
        "--mmproj p.gguf --image-max-tokens 256",
    ),
    "images on the host": (("--mmproj", "p.gguf", "-mmdev", "none"), "--mmproj p.gguf --no-mmproj-offload"),
    "adapters": (("--lora", "a.gguf", "--lora", "b.gguf"), "--lora a.gguf --lora b.gguf"),
    "a scaled adapter": (("--lora-scaled", "a.gguf:0.5"), "--lora-scaled a.gguf 0.5"),
}


@cases(OF_OTHERS)
def test_what_stands_beside_a_model_for_ik_llama(arguments: tuple[str, ...], expected: str) -> None:
    plan = make_plan(Params.of({"n_ctx": 4096, "n_gpu_layers": 33, "cache_ram": 0, "ctx_checkpoints": 2}))
    text = render(replace(plan, shared=(shared_use("draft", arguments),)), "ik_llama")
    assert text == f"-c 4096 -ngl 999 -np 1 -cram 0 --ctx-checkpoints 2 {expected} -fa on"
    ik_llama.parse(text.split())


@cases(
    (("-md", "d.gguf", "-devd", "CUDA0,CUDA1"), "ik_llama.cpp splits a draft model by bytes"),
    (("--mmproj", "p.gguf", "-mmdev", "CUDA1"), "on the first device, or on the host, and this plan on CUDA1"),
    (("-md", "d.gguf", "-ts", "1,1"), "no -ts of its own is known for this plan"),
)
def test_what_no_words_of_ik_llama_place(arguments: tuple[str, ...], message: str) -> None:
    plan = replace(make_plan(), shared=(shared_use("draft", arguments),))
    with pytest.raises(PlanError, match=re.escape(message)):
        render(plan, "ik_llama")


def test_a_format_of_one_program_is_of_plans_for_it() -> None:
    for name in OWN_FORMATS:
        with pytest.raises(PlanError, match=f"are for {name}, and the plan is for any: fit with --for {name}$"):
            formats.render(make_plan(), name)
        with pytest.raises(PlanError, match="the plan does not say how many layers the model has"):
            render(replace(make_plan(), n_layer=0), name)


def test_a_model_of_a_thousand_layers_is_whole_for_ik_llama() -> None:
    assert "-ngl 1201 " in render(make_plan(Params(n_ctx=4096), n_layer=1200), "ik_llama")


def test_a_python_script_of_what_llama_takes_itself() -> None:
    plan = make_plan(Params(n_ctx=512, n_gpu_layers=3, type_k="q8_0"))
    script = render(replace(plan, model=replace(plan.model, path='/a "b".gguf')), "python")
    assert script.startswith('import llama_cpp\n\nllm = llama_cpp.Llama(\n    "/a \\"b\\".gguf",\n    n_ctx=512,\n')
    assert "    type_k=8,\n" in script


def test_a_python_script_of_what_fitter_must_load() -> None:
    script = render(plan_at("/model.gguf", devices=("CUDA0", "CUDA1"), n_batch=64), "python")
    assert script.startswith('import fitter\n\nplan = fitter.fit(\n    "/model.gguf",\n    n_ctx=4096,\n')
    assert '    devices=["CUDA0", "CUDA1"],\n' in script
    assert '    override_tensor=["^blk.(1|2).ffn_up_exps.weight$=CPU"],\n' in script
    assert "    n_batch=64,\n" in script
    assert script.endswith(")\nllm = plan.load()")


def test_a_python_script_names_the_rpc_servers() -> None:
    plan = replace(plan_at("/model.gguf", devices=("CUDA0", "CUDA1")), rpc=("one:50052", "two:50052"))
    assert '    rpc=["one:50052", "two:50052"],\n' in render(plan, "python")


def test_a_plan_that_does_not_fit_is_no_python_script() -> None:
    plan = replace(plan_at("/model.gguf"), problems=(Problem("host", 1, "1 MiB too little on the host"),))
    with pytest.raises(PlanError, match="does not fit: 1 MiB too little"):
        render(plan, "python")


@pytest.mark.parametrize("name", [name for name in FORMATS if name not in ("json", "gguf-parser", *FOR_PODS)])
def test_a_pattern_that_llama_cpp_would_cut_is_refused(name: str) -> None:
    overrides = (TensorBuftOverride("a{1,2}", "CPU"),)
    with pytest.raises(UsageError, match=re.escape("a{1,2}")):
        render(make_plan(Params(n_ctx=512, tensor_buft_overrides=overrides)), name)


def test_an_argument_that_no_table_knows_is_not_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arguments, "arguments", lambda plan: ["-c", "512", "--surprise", "1"])
    for name in ("ini", "env", "ik_llama", "llama-swap", "compose", "ollama"):
        with pytest.raises(PlanError, match="this format cannot express --surprise"):
            render(make_plan(), name)


def test_other_files_have_whole_paths_too(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(arguments, "arguments", lambda _: ["-md", "d.gguf", "--lora-scaled", "a.gguf:2,/b.gguf:1"])
    lines = render(plan_at("model.gguf"), "ini").splitlines()
    assert f"model-draft = {tmp_path}/d.gguf" in lines
    assert f"lora-scaled = {tmp_path}/a.gguf:2,/b.gguf:1" in lines


WITH_COMMAS = {
    "ini": "{option} = {path}\n",
    "env": "{path}",
    "llama-swap": "{option} {path}\n",
    "compose": '"{option}", "/models/{name}",',
    "python": '="{path}"',
}
"""A draft model or projector whose path has commas, which llama.cpp does not split."""


@pytest.mark.parametrize("option", ["-md", "--mmproj"])
@pytest.mark.parametrize("name", WITH_COMMAS)
def test_a_comma_is_a_part_of_a_path_that_llama_cpp_does_not_split(
    name: str, option: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    file = "a,b,..,c.gguf"
    text = render(replace(plan_at("/models/model.gguf"), shared=(shared_use("draft", (option, file)),)), name)
    key = {"-md": "model-draft", "--mmproj": "mmproj"}[option] if name == "ini" else option
    assert WITH_COMMAS[name].format(option=key, path=tmp_path / file, name=file) in text + "\n"
    # nothing else of this machine is mounted
    assert re.findall(r'source: "(.*)"', text) in ([], ["/models/model.gguf", f"{tmp_path}/{file}"])


@cases("ini", "env", "llama-swap", "compose")
def test_a_directory_with_a_comma_is_refused_where_llama_cpp_splits(
    name: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a,b").mkdir()
    monkeypatch.chdir(tmp_path / "a,b")
    plan = replace(plan_at("/models/model.gguf"), shared=(shared_use("lora", ("--lora", "c.gguf")),))
    with pytest.raises(PlanError, match=r"llama.cpp's --lora splits '.*/a,b/c.gguf' at the comma: rename it"):
        render(plan, name)


# --- names as the targets themselves read them, of files beside the model


def in_sh(text: str) -> list[str]:
    return shlex.split(text, comments=True)


def from_llama_swap(text: str) -> list[str]:
    """``internal/config``: lines that begin with ``#`` go, macros are put in, and the rest is split as in sh."""
    (model,) = yaml.safe_load(text)["models"].values()
    lines = [line for line in model["cmd"].splitlines() if not line.strip().startswith("#")]
    return in_sh(" ".join(re.sub(r"\$\{(\w+)\}", "9999", line) for line in lines))


def from_compose(text: str) -> list[str]:
    """Interpolation: ``$$`` is ``$``, and ``$NAME`` and ``${NAME}`` are variables."""
    service = yaml.safe_load(text)["services"]["llama-server"]
    words = [re.sub(r"\$(\$|\{?\w+\}?)", lambda f: "$" if f[1] == "$" else "", each) for each in service["command"]]
    volumes = {each["target"].replace("$$", "$"): each["source"].replace("$$", "$") for each in service["volumes"]}
    return [volumes.get(word, word) for word in words]


def from_ini(text: str) -> list[str]:
    """``common/preset.cpp``: a key, ``=`` and the rest of the line up to ``;`` or ``#``, without white space around."""
    pairs = (line.partition("=") for line in text.splitlines() if "=" in line)
    keys = {"model-draft": "-md", "mmproj": "--mmproj", "model": "-m"}
    return [
        word for key, _, value in pairs for word in (keys.get(key.strip(), key), re.split("[;#]", value)[0].strip())
    ]


def from_env(text: str) -> list[str]:
    keys = {"LLAMA_ARG_SPEC_DRAFT_MODEL": "-md", "LLAMA_ARG_MMPROJ": "--mmproj", "LLAMA_ARG_MODEL": "-m"}
    pairs = (word.partition("=") for word in in_sh(text))
    return [word for key, _, value in pairs for word in (keys.get(key, key), value)]


def from_ollama(text: str) -> list[str]:
    """``parser/parser.go``, as ``tests/formats/modelfile.py`` states it: a projector is the second FROM."""
    model, *others = modelfile.parse(text).of("FROM")
    return ["-m", model, *(word for other in others for word in ("--mmproj", other))]


def expanded(word: str) -> str:
    """``expansion/expand.go`` of Kubernetes, with no variables: ``$$`` is ``$``, and what is unknown stays."""
    return re.sub(r"\$\$|\$\([^)]*\)", lambda found: "$" if found[0] == "$$" else found[0], word)


def from_kubernetes(text: str) -> list[str]:
    deployment, _ = yaml.safe_load_all(text)
    pod = deployment["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    files = {each["name"]: each["hostPath"]["path"] for each in pod["volumes"]}
    mounts = {each["mountPath"]: files[each["name"]] for each in container["volumeMounts"]}
    return [mounts.get(word, word) for word in map(expanded, container["args"])]


def from_llmkube(text: str) -> list[str]:
    """The operator puts ``extraArgs`` into the container's arguments; the model's source is no argument."""
    model, service = yaml.safe_load_all(text)
    return ["-m", model["spec"]["source"], *map(expanded, service["spec"]["extraArgs"])]


def from_python(text: str) -> list[str]:
    """The values of the call, as Python's own parser has them."""
    call = next(node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call) and node.args)
    values = {str(each.arg): ast.literal_eval(each.value) for each in call.keywords}
    found = ["-m", ast.literal_eval(call.args[0])]
    for key, option in (("model_draft", "-md"), ("mmproj", "--mmproj")):
        found += [option, values[key]] if key in values else []
    return found


def from_json(text: str) -> list[str]:
    document = json.loads(text)
    return ["-m", document["model"]["path"], *document["arguments"]]


READERS = {
    "shell": in_sh,
    "llama-swap": from_llama_swap,
    "compose": from_compose,
    "ini": from_ini,
    "env": from_env,
    "ollama": from_ollama,
    "kubernetes": from_kubernetes,
    "llmkube": from_llmkube,
    "python": from_python,
    "json": from_json,
}
REFUSED = {"llama-swap": r"\$\{", "ini": r"[;#]|\s$", "ollama": '"""|"$', "kubernetes": ":", "llmkube": r"[\s:]"}
"""What a format cannot say of printable names."""
FILES = {"shell": ("-md", "--mmproj"), "ollama": ("-m", "--mmproj"), "llmkube": ("-m",)}
"""Options with a file that a format has; the others have these and the model."""
PIECES = (
    *(
        *("a", "é", "模", " ", "  ", "'", '"', "\\", "$", "$$", "${PORT}", "$(HOME)", "`id`", "%n", "%%"),
        *(":", ",", ";", "#"),
    ),
    *(
        *("=", "|", "&", "<", ">", "*", "?", "[", "]", "{", "}", "!", "~", "- ", "\t", "\n", "\x1b"),
        *("\x85", "\xa0", "\u2028", "\u202e", "\ufeff", "\udcff", "@", "^", "--host"),
    ),
)


@pytest.mark.parametrize("name", READERS)
def test_the_targets_read_any_name_as_it_is_or_it_is_refused(name: str) -> None:
    pick = random.Random(name)
    counts = Counter[str]()
    for _ in range(400):
        begin, end = pick.choice([("/m/", ".gguf"), ("/m/-", ""), ("/m m/", "")])
        file = begin + "".join(pick.choices(PIECES, k=pick.randint(1, 6))).replace("/", "") + end
        option = pick.choice(FILES.get(name, ("-m", "-md", "--mmproj")))
        plan = plan_at(file if option == "-m" else "/models/model.gguf", tensor_split=None, tensor_buft_overrides=())
        plan = replace(plan, program="llama-server", later=(Later("logits", 4, 4, 1),))
        if option != "-m":
            plan = replace(plan, shared=(shared_use("draft", (option, file)),))
        try:
            text = render(plan, name)
        except PlanError as error:
            counts["refused"] += 1
            said = str(error)
            assert said.isprintable() and any(way in said for way in ("rename", "control characters", "without spaces"))
            # only what this format really cannot say
            assert not file.isprintable() or (name in REFUSED and re.search(REFUSED[name], file)), (file, said)
            continue
        words = READERS[name](text)
        counts["read"] += 1
        assert words[words.index(option) + 1] == file, (file, text)
    assert counts["read"] > 50, counts


def test_an_unknown_format() -> None:
    with pytest.raises(UsageError, match=f"unknown format 'yaml': choose from {', '.join(FORMATS)}"):
        render(make_plan(), "yaml")


(NCMOE,) = host_overrides(False, 2, None, ["blk.0.a", "blk.1.a"])
FLAG = Params(n_ctx=4096, n_gpu_layers=33, tensor_buft_overrides=(NCMOE,), devices=("CUDA0", "CUDA1"))
WITH_A_FLAG = {
    "args": ("-ncmoe 2", False),
    "shell": ("-ncmoe 2", False),
    "ini": ("n-cpu-moe = 2", False),
    "env": ("LLAMA_ARG_N_CPU_MOE=2", False),
    "python": ("n_cpu_moe=2,", True),
    "ik_llama": (f"-ot {NCMOE.pattern}=CPU", True),
    "llama-swap": ("      -ncmoe 2\n", False),
    "compose": ('"-ncmoe", "2",', False),
    "kubernetes": ('- "-ncmoe"\n            - "2"', False),
    "llmkube": ("moeCPULayers: 2", False),
    "json": ('"-ncmoe",\n    "2",', False),
}
"""The words of a flag in each format, and whether the devices of llama.cpp's default are named all the same."""


@pytest.mark.parametrize("name", WITH_A_FLAG)
def test_a_flag_and_the_default_devices_in_every_format(name: str) -> None:
    words, names_devices = WITH_A_FLAG[name]
    plan = replace(make_plan(FLAG), default_devices=("CUDA0", "CUDA1"))
    if name in FOR_PODS:
        plan = replace(plan, program="llama-server", later=(Later("logits", 4, 4, 1),))
        plan = replace(plan, model=replace(plan.model, path="/models/a.gguf"))
    text = render(plan, name)
    assert words in text
    said = re.search(r"CUDA0,CUDA1|\[\"CUDA0\", \"CUDA1\"\]", text)
    assert bool(said) == names_devices
    assert bool(re.search(r"-dev\b|LLAMA_ARG_DEVICE|^device = ", text, re.MULTILINE)) == (name == "ik_llama")


def test_ollama_sees_the_devices_that_llama_cpp_uses_by_itself() -> None:
    plan = replace(make_plan(replace(FLAG, tensor_buft_overrides=())), default_devices=("CUDA0", "CUDA1"))
    assert "CUDA_VISIBLE_DEVICES=0,1" in render(plan, "ollama")
    with pytest.raises(PlanError, match=r"^Ollama has no parameter like llama\.cpp's -ncmoe, which this plan needs"):
        render(replace(plan, params=FLAG), "ollama")
