"""The formats for llama-swap, compose and Ollama, read back as these programs read them: by schema and by grammar."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from dataclasses import replace
from functools import cache, reduce
from pathlib import Path
from typing import Any

import check_jsonschema
import jsonschema
import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fitter.errors import PlanError
from fitter.llama.types import Params, TensorBuftOverride
from fitter.output.arguments import with_absolute_paths
from fitter.planning.plan.plan import Plan, SharedUse
from tests.formats import modelfile
from tests.support.cases import cases, named_cases
from tests.support.plans import make_plan, render

SPILLED = Params(
    n_ctx=32768,
    n_gpu_layers=33,
    tensor_buft_overrides=(TensorBuftOverride(r"^blk\.(1|2)\.ffn_(up|gate)_exps.weight$", "CPU"),),
    tensor_split=(20.0, 13.0),
    type_k="q8_0",
    type_v="q8_0",
    n_seq_max=4,
    kv_unified=True,
)
PATHS = (
    "/models/Model-8B-Q4_K_M.gguf",
    "/my models/a 'b' \"c\".gguf",
    "/m/$HOME/$$.gguf",
    "/m/#1: {x}, [y] & *z.gguf",
    "/m/true",
    "/m/back\\slash\\",
    "/m/- é 模型 🦙.gguf",
    "/m/end .gguf ",
)
printable_paths = st.text(st.characters(blacklist_categories=("C", "Zl", "Zp", "Zs")) | st.just(" "), min_size=1).map(
    lambda name: "/m/" + name.replace("/", "|") + ".gguf"
)


def plan_at(path: str, params: Params = SPILLED, devices: tuple[str, ...] = ("CUDA0", "CUDA1")) -> Plan:
    plan = make_plan(params, devices=devices)
    return replace(plan, model=replace(plan.model, path=path))


def words_of(plan: Plan) -> list[str]:
    """The arguments of llama-server, the model among them."""
    return [word for each in with_absolute_paths(plan) for word in each.words]


@cache
def validator(name: str) -> Any:
    if name == "llama-swap":
        file = Path(__file__).parent.parent / "data" / "llama_swap" / "config-schema.json"
    else:
        # what the compose specification publishes comes with the package
        file = Path(check_jsonschema.__file__).parent / "builtin_schemas" / "vendor" / f"{name}.json"
    return jsonschema.Draft7Validator(json.loads(file.read_text()))


def read(text: str, name: str) -> Any:
    document = yaml.safe_load(text)
    validator(name).validate(document)
    return document


def of_paths(*paths: str) -> Callable[[Any], Any]:
    """Try each of these paths, beside those that are drawn."""
    return lambda test: reduce(lambda tried, path: example(path=path)(tried), paths, test)


def test_the_schemas_refuse_what_is_wrong() -> None:
    for text, name, message in (
        ("models:\n  a:\n    ttl: 1", "llama-swap", "'cmd' is a required property"),
        ("services:\n  a:\n    image: 1", "compose-spec", "1 is not of type 'string'"),
    ):
        with pytest.raises(jsonschema.ValidationError, match=message):
            read(text, name)


# --- llama-swap


def split(command: str, *, on_windows: bool = False) -> list[str]:
    """Split a command as llama-swap does, which skips comments and joins lines."""
    lines = [line for line in command.split("\n") if not line.strip().startswith("#")]
    assert not any(line.strip().endswith("\\") for line in lines)
    text = "\n".join(lines)
    return [a or b for a, b in re.findall(r'"([^"]*)"|(\S+)', text)] if on_windows else shlex.split(text)


@settings(max_examples=20, deadline=None)
@given(path=printable_paths)
@of_paths(*PATHS)
def test_llama_swap_starts_the_plan(path: str) -> None:
    plan = plan_at(path)
    if "${" in path:
        with pytest.raises(PlanError, match="for a macro: rename the file"):
            render(plan, "llama-swap")
        return
    (model,) = read(render(plan, "llama-swap"), "llama-swap")["models"].values()
    assert split(model["cmd"]) == ["llama-server", "--port", "${PORT}", *words_of(plan)]


def test_llama_swap_on_windows_reads_the_same() -> None:
    plan = plan_at("/my models/model.gguf")
    (model,) = read(render(plan, "llama-swap"), "llama-swap")["models"].values()
    assert split(model["cmd"], on_windows=True) == ["llama-server", "--port", "${PORT}", *words_of(plan)]


def test_llama_swap_names_the_model_like_its_file() -> None:
    document = read(render(plan_at("/m/no.gguf"), "llama-swap"), "llama-swap")
    # YAML would read the bare word as false
    assert list(document["models"]) == ["no"]


def test_llama_swap_has_no_escape_for_its_macros() -> None:
    with pytest.raises(PlanError, match=re.escape("llama-swap would take '${' in '/m/${a}.gguf' for a macro")):
        render(plan_at("/m/${a}.gguf"), "llama-swap")


# --- compose


def service(text: str) -> Any:
    """The one service of a compose file, after compose's own replacing of variables."""

    def replaced(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: replaced(each) for key, each in value.items()}
        if isinstance(value, list):
            return [replaced(each) for each in value]
        if isinstance(value, str):
            assert "$" not in value.replace("$$", ""), f"compose would read a variable in {value}"
            return value.replace("$$", "$")
        return value

    (only,) = replaced(read(text, "compose-spec"))["services"].values()
    return only


@settings(max_examples=20, deadline=None)
@given(path=printable_paths)
@of_paths(*PATHS[:4], *PATHS[5:])
def test_compose_starts_the_plan(path: str) -> None:
    plan = plan_at(path)
    found = service(render(plan, "compose"))
    target = f"/models/{Path(path).name}"
    expected = [target if word == path else word for word in words_of(plan)]
    # a llama-server from b11521 on listens at 9931 by itself
    assert found["command"] == [*expected, "--host", "0.0.0.0", "--port", "8080"]
    assert found["volumes"] == [{"type": "bind", "source": path, "target": target, "read_only": True}]
    assert found["ports"] == ["127.0.0.1:8080:8080"]


@cases(
    ((), "server", {}),
    (("CUDA0",), "server-cuda", {"deploy"}),
    (("CUDA0", "CUDA1"), "server-cuda", {"deploy"}),
    (("ROCm0",), "server-rocm", {"devices"}),
    (("Vulkan0",), "server-vulkan", {"devices"}),
    (("SYCL0",), "server-intel", {"devices"}),
)
def test_compose_has_the_image_of_the_devices(devices: tuple[str, ...], image: str, lent: set[str]) -> None:
    params = Params(n_ctx=512, n_gpu_layers=33, devices=devices)
    found = service(render(plan_at("/m.gguf", params, devices), "compose"))
    assert found["image"] == f"ghcr.io/ggml-org/llama.cpp:{image}"
    assert set(found) == {"image", "command", "ports", "volumes", *lent}


@cases(
    (("MTL0",), "no image of llama.cpp has MTL devices, which this plan uses: use another format"),
    (("CUDA0", "Vulkan0"), "no image of llama.cpp has CUDA and Vulkan devices, which this plan uses: choose with"),
    (("RPC0",), "no image of llama.cpp has RPC devices"),
)
def test_compose_has_no_image_of_other_devices(devices: tuple[str, ...], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        render(plan_at("/m.gguf", Params(n_ctx=512, devices=devices), devices), "compose")


def test_compose_mounts_every_file() -> None:
    draft = SharedUse("draft", "", (), ("-md", "/d/big-00001-of-00002.gguf", "-devd", "none"))
    adapters = SharedUse("lora", "", (), ("--lora-scaled", "/a/x.gguf:0.5,/b/x.gguf:2"))
    plan = replace(plan_at("/m/big-00001-of-00002.gguf"), shared=(draft, adapters))
    found = service(render(plan, "compose"))
    assert {each["source"]: each["target"] for each in found["volumes"]} == {
        "/m/big-00001-of-00002.gguf": "/models/big-00001-of-00002.gguf",
        "/m/big-00002-of-00002.gguf": "/models/big-00002-of-00002.gguf",
        "/d/big-00001-of-00002.gguf": "/models/more/big-00001-of-00002.gguf",
        "/d/big-00002-of-00002.gguf": "/models/more/big-00002-of-00002.gguf",
        "/a/x.gguf": "/models/x.gguf",
        "/b/x.gguf": "/models/more/x.gguf",
    }
    command = found["command"]
    assert command[command.index("-md") + 1] == "/models/more/big-00001-of-00002.gguf"
    assert command[command.index("--lora-scaled") + 1] == "/models/x.gguf:0.5,/models/more/x.gguf:2"


# --- Ollama


@settings(max_examples=20, deadline=None)
@given(path=printable_paths)
@of_paths(*PATHS[1::2])
def test_ollama_reads_the_path(path: str) -> None:
    found = modelfile.parse(render(plan_at(path, Params(n_ctx=512, n_gpu_layers=33)), "ollama"))
    assert found.of("FROM") == [path]


@cases(
    ({}, {"num_ctx": 8192, "num_gpu": 33, "num_batch": 512}, ""),
    ({"n_gpu_layers": -1}, {"num_ctx": 8192, "num_gpu": 33, "num_batch": 512}, ""),
    ({"n_ubatch": 1024}, {"num_ctx": 8192, "num_gpu": 33, "num_batch": 1024}, ""),
    # which takes 512 at a time
    ({"n_batch": 512, "n_ubatch": 4096}, {"num_ctx": 8192, "num_gpu": 33, "num_batch": 512}, ""),
    ({"n_seq_max": 4}, {"num_ctx": 2048, "num_gpu": 33, "num_batch": 512}, "OLLAMA_NUM_PARALLEL=4"),
    (
        {"type_k": "q8_0", "type_v": "q8_0", "flash_attn": "on", "devices": ("CUDA1", "CUDA0")},
        {"num_ctx": 8192, "num_gpu": 33, "num_batch": 512},
        "CUDA_VISIBLE_DEVICES=1,0 OLLAMA_SCHED_SPREAD=1 OLLAMA_KV_CACHE_TYPE=q8_0 OLLAMA_FLASH_ATTENTION=1",
    ),
    (
        {"split_mode": "none", "main_gpu": 1, "load_mode": "none", "flash_attn": "off"},
        {"num_ctx": 8192, "num_gpu": 33, "num_batch": 512, "main_gpu": 1, "use_mmap": False},
        "OLLAMA_FLASH_ATTENTION=0",
    ),
    (
        {"cache_ram": 512, "ctx_checkpoints": 4, "cache_idle_slots": False},
        {"num_ctx": 8192, "num_gpu": 33, "num_batch": 512},
        "LLAMA_ARG_CACHE_RAM=512 LLAMA_ARG_CTX_CHECKPOINTS=4 LLAMA_ARG_CACHE_IDLE_SLOTS=false",
    ),
)
def test_ollamas_parameters(params: dict[str, Any], parameters: dict[str, Any], variables: str) -> None:
    plan = plan_at("/m/Model 8B.gguf", Params.of({"n_ctx": 8192, "n_gpu_layers": 33, **params}))
    found = modelfile.parse(render(plan, "ollama"))
    assert found.parameters == parameters
    started = f"# start the server with {variables}, which holds for all its models"
    assert found.comments == ("# ollama create model-8b -f Modelfile", *([started] if variables else []))


def test_ollama_on_the_host_alone() -> None:
    plan = plan_at("/m.gguf", Params(n_ctx=512, n_gpu_layers=0, devices=()), ())
    assert modelfile.parse(render(plan, "ollama")).parameters["num_gpu"] == 0


def test_ollama_takes_every_file() -> None:
    shared = (
        SharedUse("vision", "", (), ("--mmproj", "/m/mmproj.gguf")),
        SharedUse("lora", "", (), ("--lora", "/m/a.gguf,/m/b.gguf")),
    )
    plan = replace(plan_at("/m/big-00001-of-00002.gguf", Params(n_ctx=512)), shared=shared)
    found = modelfile.parse(render(plan, "ollama"))
    assert found.of("FROM") == ["/m/big-00001-of-00002.gguf", "/m/big-00002-of-00002.gguf", "/m/mmproj.gguf"]
    assert found.of("ADAPTER") == ["/m/a.gguf", "/m/b.gguf"]


def test_ollama_drafts_with_the_models_own_layers() -> None:
    words = ("--spec-type", "draft-mtp", "--spec-draft-n-max", "5")
    plan = replace(plan_at("/m.gguf", Params(n_ctx=512)), shared=(SharedUse("mtp", "", (), words),))
    assert modelfile.parse(render(plan, "ollama")).parameters["draft_num_predict"] == 5
    usual = replace(plan, shared=(SharedUse("mtp", "", (), words[:2]),))
    assert modelfile.parse(render(usual, "ollama")).parameters["draft_num_predict"] == 3


@cases(
    (33, ("-mmdev", "CUDA0"), ""),
    (33, ("-mmdev", "none"), "the plan has it on the host: leave -mmdev out"),
    (33, ("-mmdev", "CUDA1"), "the plan has it on CUDA1: leave -mmdev out"),
    (32, ("-mmdev", "none"), ""),
    (32, ("-mmdev", "CUDA0"), "and on the host without, where the plan has it on CUDA0: leave -mmdev out"),
    (33, ("-md", "/m/draft.gguf"), "a DRAFT file as heads of the model, and draft.gguf is a model of its own"),
    (33, ("--spec-type", "ngram-mod"), "and this plan with --spec-type ngram-mod: leave it out"),
)
def test_what_stands_beside_a_model_for_ollama(layers: int, words: tuple[str, ...], message: str) -> None:
    plan = plan_at("/m.gguf", Params(n_ctx=512, n_gpu_layers=layers))
    plan = replace(plan, shared=(SharedUse("projector", "", (), ("--mmproj", "/p.gguf", *words)),))
    if not message:
        assert modelfile.parse(render(plan, "ollama")).of("FROM") == ["/m.gguf", "/p.gguf"]
        return
    with pytest.raises(PlanError, match=re.escape(message)):
        render(plan, "ollama")


@named_cases(
    ("overrides", {"tensor_buft_overrides": SPILLED.tensor_buft_overrides}, "no parameter like llama.cpp's -ot", "-ot"),
    ("a split", {"tensor_split": (1.0, 2.0)}, "no parameter like llama.cpp's -ts", "-ts"),
    ("no offload", {"offload_kqv": False}, "no parameter like llama.cpp's -nkvo", "-nkvo"),
    ("rows", {"split_mode": "row"}, "no parameter like llama.cpp's -sm", "-sm"),
    ("one cache", {"n_seq_max": 2, "kv_unified": True}, "no parameter like llama.cpp's -kvu", "-kvu"),
    ("two types", {"type_k": "q8_0"}, "this plan has -ctk q8_0: plan with one of them for -ctk and -ctv", "-ctk"),
    ("another type", {"type_k": "q5_1", "type_v": "q5_1"}, "this plan has -ctk q5_1", "-ctk"),
    ("two backends", {"devices": ("CUDA0", "Vulkan0")}, "no parameter like llama.cpp's -dev", "-dev"),
)
def test_what_ollama_cannot_be_told(params: dict[str, Any], message: str, option: str) -> None:
    plan = plan_at("/m.gguf", Params.of({"n_ctx": 8192, "n_gpu_layers": 33, **params}))
    with pytest.raises(PlanError, match=re.escape(message)):
        render(plan, "ollama")
    # with --anyway it is left out, and a comment says so
    found = modelfile.parse(render(plan, "ollama", anyway=True))
    assert any(each.startswith(f"# Ollama cannot be told this part of the plan: {option}") for each in found.comments)
    assert found.comments[-1] == "# so Ollama itself chooses the layers on devices, and its memory is not the plan's"
    assert found.parameters.keys() <= {"num_ctx", "num_batch"}
