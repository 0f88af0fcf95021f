"""What is asked: every word in its place, and what is refused before anything is started."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields, replace
from typing import Any

import pytest

from fitter.errors import UsageError
from fitter.llama.types import Params, TensorBuftOverride, VirtualDevice
from fitter.machine.gpu import parse_gpus
from fitter.parameters.kinds import Flag
from fitter.parameters.table import PARAMETERS, SPECULATION, Estimating, Fitting, LoadKeywords, ServerKeywords, taken_by
from fitter.planning.request.ask import Ask, Sharing
from fitter.programs import facts
from fitter.text import MIB
from tests.support.cases import cases, named_cases

CARD = parse_gpus(["24GiB"])[0]


def checked(words: dict[str, Any]) -> Any:
    """The keywords as the door hands them on."""
    return {name: PARAMETERS[name].check(value) for name, value in words.items()}


def ask(**words: Any) -> Ask:
    return Ask.of(checked(words))


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a split of every row": ({"split_mode": "row"}, "split mode 'row' cannot be fitted"),
    "a split of every tensor without flash attention": (
        {"split_mode": "tensor", "flash_attn": "off"},
        "split mode 'tensor' needs flash attention: leave -fa off out, or use --split-mode layer",
    ),
    "a split of every tensor with a cache on the host": (
        {"split_mode": "tensor", "offload_kqv": False},
        "with split mode 'tensor' and a KV cache in host memory llama.cpp ends its process: leave -nkvo out, or use "
        "--split-mode layer",
    ),
    "a split of every tensor with a draft model": (
        {"split_mode": "tensor", "model_draft": "draft.gguf"},
        "no plan can be made for split mode 'tensor' with -md: leave one of the two out",
    ),
    "a split of every tensor with layers that draft": (
        {"split_mode": "tensor", "mtp": True},
        "no plan can be made for split mode 'tensor' with --mtp: leave one of the two out",
    ),
    "a split of every tensor with layers that draft, in llama.cpp's words": (
        {"split_mode": "tensor", "spec_type": "draft-mtp"},
        "no plan can be made for split mode 'tensor' with --spec-type draft-mtp: leave one of the two out",
    ),
    "texts to read, and layers that draft, in llama.cpp's words": (
        {"embedding": True, "spec_type": ["draft-mtp"]},
        "--embedding is for texts that are only read, and --spec-type draft-mtp drafts tokens",
    ),
    "a split of every tensor with a projector": (
        {"split_mode": "tensor", "mmproj": "mmproj.gguf"},
        "no plan can be made for split mode 'tensor' with --mmproj: leave one of the two out",
    ),
    "a split of every tensor with an adapter": (
        {"split_mode": "tensor", "lora": ["style.gguf"]},
        "no plan can be made for split mode 'tensor' with --lora: leave one of the two out",
    ),
    "an objective that there is not": ({"objective": "fast"}, "unknown objective 'fast': choose from request"),
    "a strategy that there is not": ({"strategy": "mine"}, "unknown strategy 'mine': choose from fastest"),
    "no layers, and shares of them": ({"n_gpu_layers": 0, "tensor_split": [1, 1]}, "-ngl 0 keeps every layer on the"),
    "weights that are read, and paged": (
        {"allow": ["paging"], "load_mode": "none"},
        "--allow paging needs weights that are mapped from the file, and --load-mode none reads weights into memory of "
        "their own: leave one of the two out",
    ),
    "weights that are kept, and paged": (
        {"allow": ["paging"], "load_mode": "mmap+mlock"},
        "--allow paging needs weights that are mapped from the file, and --load-mode mmap+mlock keeps weights in "
        "memory: leave one of the two out",
    ),
    "a lever that there is not": ({"allow": ["kv-q8"]}, "unknown lever 'kv-q8': did you mean kv-q8_0"),
    "an override without a place": ({"override_tensor": "exps"}, "override 'exps' is not of the form <name"),
    "an adapter without its scale": ({"lora_scaled": ["style.gguf"]}, "'style.gguf' is not a scaled adapter"),
    "a reservation without a size": ({"reserve": ["CUDA0"]}, "'CUDA0' is not a reservation: write DEVICE=SIZE"),
    "two that draft": ({"model_draft": "d.gguf", "mtp": True}, "exclude each other"),
    "a draft's devices without one": ({"devices_draft": ["CUDA0"]}, "-devd is about a draft model"),
    "a draft's layers without one": ({"n_gpu_layers_draft": 3}, "-ngld is about a draft model"),
    "a draft's device twice": (
        {"model_draft": "d.gguf", "devices_draft": ["CUDA0", "CUDA0"]},
        "a device of the draft model is named twice",
    ),
    "a way to draft that there is not": (
        {"program": "llama-server", "spec_type": "ngram-best"},
        "no plan can be made for drafting with 'ngram-best' (--spec-type): choose from draft-simple, draft-mtp, ",
    ),
    "a draft model that is not named": (
        {"program": "llama-server", "spec_type": ["draft-simple", "ngram-mod"]},
        "--spec-type draft-simple drafts with a model: name it with -md, or leave it out",
    ),
    "tokens of ngrams that do not draft": (
        {"program": "llama-server", "spec_type": "ngram-mod", "spec_ngram_simple_size_m": 8},
        "--spec-ngram-simple-size-m is about ngram-simple: add --spec-type ngram-simple, or leave it out",
    ),
    "texts and a draft": ({"embedding": True, "model_draft": "d.gguf"}, "--embedding is for texts that are only read"),
    "texts and ngrams": (
        {"program": "llama-server", "reranking": True, "spec_type": "ngram-mod"},
        "--reranking is for texts that are only read, and --spec-type drafts tokens: leave one of them out",
    ),
    "a cache of prompts of no server": (
        {"program": "any", "cache_ram": 512},
        "-cram is an option of llama-server, but the plan is for any: leave one of the two out",
    ),
    "a program that there is not": ({"program": "llama-serve"}, "program (--for)"),
    "a draft's cache without one": ({"type_k_draft": "q8_0"}, "-ctkd is about drafting"),
    "a draft's micro batch without one": ({"n_ubatch_draft": 64}, "--spec-draft-n-ubatch is about drafting: use it"),
    "drafted tokens without layers": ({"draft_max": 3}, "--spec-draft-n-max is about drafting: use it with -md or"),
    "a projector's device without one": ({"mmproj_device": "CUDA0"}, "-mmdev is about a projector"),
    "a projector's tokens without one": ({"image_max_tokens": 9}, "--image-max-tokens is about a projector"),
    "a GPU that there is not": ({"gpus": ["rtx-0000"]}, "--gpu 'rtx-0000': unknown GPU; did you mean"),
    "no GPU, and one": ({"gpus": ["none", "24GiB"]}, "none means a machine without a GPU"),
    "descriptions and devices": ({"gpus": ["24GiB", CARD]}, "gpus has both strings and VirtualDevice objects"),
    "a device of a machine without any": (
        {"gpus": ["none"], "devices": ["CUDA0"]},
        "unknown device 'CUDA0': --gpu none means a machine without a GPU",
    ),
    "a profile that there is not": ({"profile": "vulkan", "gpus": ["24GiB"]}, "unknown profile 'vulkan'"),
    "a library for another's card": (
        {"profile": "library", "gpus": ["vulkan:24GiB"]},
        "is for NVIDIA cards, but Vulkan0",
    ),
    "a library for cards that are here": ({"profile": "library:here"}, "is for virtual cards"),
    "no bandwidth of the host": ({"host_bandwidth": "fast"}, "'fast' is not a bandwidth"),
    "a bandwidth of nothing remote": ({"rpc_bandwidth": "9GB/s"}, "without an rpc-server: name one with --rpc"),
    "no bandwidth of what is remote": ({"rpc": ["a:1"], "rpc_bandwidth": ["fast"]}, "'fast' is not a bandwidth"),
    "a number of GiB": (
        {"host_memory": 64},
        "host_memory (--host-memory) is 64 bytes, less than a MiB: give more, or write a unit, such as ",
    ),
    "a margin of the command line's unit": ({"margin": 1024}, "margin (-fitt) is 1024 bytes, less than a MiB"),
    "just below a MiB": ({"host_memory": MIB - 1}, "write a unit"),
    "a host without memory": ({"host_memory": 0}, "--host-memory is 0 bytes"),
}


@cases(REFUSED)
def test_what_is_refused(words: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        ask(**words)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_host_may_have_a_mebibyte() -> None:
    assert ask(host_memory=MIB).host_memory == MIB


def test_libllama_is_not_needed() -> None:
    code = (
        "import sys\n"
        "from fitter.errors import UsageError\n"
        "from fitter.planning.request.ask import Ask\n"
        "assert Ask.of({'gpus': ('24GiB',), 'n_ctx': 4096}).virtual\n"
        "try: Ask.of({'allow': ('kv',)})\n"
        "except UsageError as error: print(error)\n"
        "native = {'llama_cpp', 'cffi', 'fitter.llama.build.library', 'fitter.llama.client'}\n"
        "native.add('fitter.llama.worker.process')\n"
        "print(sorted(native & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    said, native = done.stdout.splitlines()
    assert said.startswith("unknown lever 'kv'")
    assert native == "[]"


OF_A_PROGRAM: dict[str, Any] = {
    each.name: not each.default if isinstance(each.kind, Flag) else 64
    for each in taken_by(ServerKeywords)
    if each.struct == "program"
}
"""What llama.cpp's programs read, and its loader does not."""


def test_every_keyword_of_fit_has_a_place() -> None:
    own = {field.name for kind in (Ask, Sharing) for field in fields(kind)}
    own -= {"load", "given", "sharing", "split_poolings", "words", "more"}
    of_loads = {each.name for each in taken_by(LoadKeywords)}
    of_ways = {each.name for each in PARAMETERS.values() if each.needs in SPECULATION}
    assert own | of_loads | OF_A_PROGRAM.keys() | of_ways == {each.name for each in taken_by(Fitting)}
    words = {"program": "llama-server", "spec_type": SPECULATION[2:], **dict.fromkeys(of_ways, 8)}
    assert {name for name, _ in ask(**words).sharing.more} == of_ways


@pytest.mark.parametrize(("name", "value"), OF_A_PROGRAM.items(), ids=OF_A_PROGRAM)
def test_what_a_program_reads_is_in_the_parameters_of_a_plan(name: str, value: Any) -> None:
    begun = ask(program="llama-server", **{name: value}).load
    assert begun.of_parameter(PARAMETERS[name]) == value
    assert ask(program="llama-server").load.of_parameter(PARAMETERS[name]) == PARAMETERS[name].default


def test_nothing_is_set() -> None:
    assert ask() == Ask() == Ask.of(dict.fromkeys(each.name for each in taken_by(Fitting)))  # type: ignore[arg-type]
    assert Ask.of_a_load({}) == Ask()


LOADS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "a context": ({"n_ctx": 8192}, {"n_ctx": 8192}),
    "a cache": ({"type_k": "q8_0", "flash_attn": "on"}, {"type_k": "q8_0", "flash_attn": "on"}),
    "an override": ({"override_tensor": "exps=CPU"}, {"tensor_buft_overrides": (TensorBuftOverride("exps", "CPU"),)}),
    "devices are chosen": ({"devices": ["CUDA1"], "main_gpu": 1}, {}),
    "room for all slots": ({"kv_unified_per_slot": 100, "n_seq_max": 4}, {"n_ctx": 400, "n_seq_max": 4}),
    "batches": ({"n_batch": 1024, "n_ubatch": 256}, {"n_batch": 1024, "n_ubatch": 256}),
    "texts in batches of one default": (
        {"embedding": True},
        {"embeddings": True, "n_batch": 512, "n_ubatch": 512, "n_seq_max": 256, "kv_unified": True},
    ),
    "texts in small batches": (
        {"embedding": True, "n_ubatch": 128},
        {"embeddings": True, "n_batch": 128, "n_ubatch": 128, "n_seq_max": 128, "kv_unified": True},
    ),
    "texts at once": (
        {"embedding": True, "n_batch": 1024},
        {"embeddings": True, "n_batch": 1024, "n_ubatch": 1024, "n_seq_max": 256, "kv_unified": True},
    ),
    "its own layers draft": ({"mtp": True}, {"load_mtp": True, "n_rs_seq": 3}),
    "they draft more": ({"mtp": True, "draft_max": 5}, {"load_mtp": True, "n_rs_seq": 5}),
    "a server": ({"program": "llama-server"}, {"n_seq_max": 4, "kv_unified": True, "n_outputs_max": 4}),
    "a server's slots": ({"program": "llama-server", "n_seq_max": 2}, {"n_seq_max": 2, "n_outputs_max": 2}),
    "a server whose model drafts": (
        {"program": "llama-server", "n_seq_max": 2, "spec_type": "draft-mtp"},
        {"n_seq_max": 2, "n_outputs_max": 8, "load_mtp": True, "n_rs_seq": 3},
    ),
    "a server that drafts in two ways": (
        {"program": "llama-server", "n_seq_max": 1, "mtp": True, "spec_type": ["ngram-mod"]},
        {"n_outputs_max": 65, "load_mtp": True, "n_rs_seq": 3},
    ),
    "llama-cli": ({"program": "llama-cli"}, {"n_outputs_max": 1}),
    "Llama": ({"program": "llama-cpp-python"}, {"n_outputs_max": 1}),
    "Llama with every logit": ({"program": "llama-cpp-python", "logits_all": True}, {}),
}


@cases(LOADS)
def test_what_a_fit_begins_with(words: dict[str, Any], expected: dict[str, Any]) -> None:
    found = ask(**words).load
    more = {"kv_unified_per_slot", "logits_all"} & words.keys()
    assert replace(found, more=()) == Params(**expected)
    assert {name for name, _ in found.more} == more
    assert ask(**words).given == words.keys()


@named_cases(
    ("devices are said", {"devices": ["CUDA1"], "main_gpu": 1}, {"devices": ("CUDA1",), "main_gpu": 1}),
    ("no devices", {"gpus": ["none"]}, {"devices": ()}),
    ("texts, as many as are said", {"embedding": True}, {"embeddings": True}),
    ("layers that draft", {"load_mtp": True, "n_rs_seq": 2}, {"load_mtp": True, "n_rs_seq": 2}),
    ("outputs", {"n_outputs_max": 3}, {"n_outputs_max": 3}),
    ("a server's", {"program": "llama-server"}, {"n_seq_max": 4, "kv_unified": True, "n_outputs_max": 4}),
    (
        "a server's, whatever is said",
        {"program": "llama-server", "n_outputs_max": 9},
        {"n_seq_max": 4, "kv_unified": True, "n_outputs_max": 9},
    ),
)
def test_exactly_one_load(words: dict[str, Any], expected: dict[str, Any]) -> None:
    assert words.keys() <= {each.name for each in taken_by(Estimating)}
    ask = Ask.of_a_load(checked(words))
    assert (ask.load, ask.given) == (Params(**expected), frozenset(words))


@named_cases(
    ("this one", {}, {"virtual": (), "is_described": False, "is_without_devices": False, "named": None}),
    ("its second device", {"devices": ["CUDA1"]}, {"is_described": False, "named": ("CUDA1",)}),
    ("one that is described", {"gpus": ["24GiB"]}, {"virtual": (CARD,), "is_described": True, "named": None}),
    ("one that is at hand", {"gpus": [CARD]}, {"virtual": (CARD,), "is_described": True}),
    ("one without a GPU", {"gpus": ["none"]}, {"virtual": (), "is_without_devices": True, "named": ()}),
    ("that, in words", {"gpus": ["none"], "devices": ["none"]}, {"is_without_devices": True, "named": ()}),
    ("servers alone", {"gpus": ["none"], "rpc": ["a:1"]}, {"is_without_devices": False, "named": None}),
    ("their speeds", {"rpc": ["a:1"], "rpc_bandwidth": ["1GB/s,2GB/s"]}, {"remote_bandwidths": (1e9, 2e9)}),
)
def test_the_machine(words: dict[str, Any], expected: dict[str, Any]) -> None:
    found = ask(**words)
    assert {name: getattr(found, name) for name in expected} == expected


@named_cases(
    ("nothing", {}, False),
    ("a context", {"n_ctx": 512, "type_k": "q8_0"}, False),
    ("layers", {"n_gpu_layers": 0}, True),
    ("an override", {"override_tensor": "a=CPU"}, True),
    ("experts", {"cpu_moe": True}, True),
    ("feed-forward weights", {"n_cpu_ffn": 1}, True),
    ("no experts", {"cpu_moe": False, "n_cpu_moe": 0}, False),
    ("a device", {"devices": ["CUDA0"]}, True),
    ("no device", {"gpus": ["none"]}, True),
    ("one device", {"split_mode": "none"}, True),
    ("layers that draft", {"mtp": True}, True),
)
def test_whether_anything_is_said_of_the_placement(words: dict[str, Any], is_placed: bool) -> None:
    assert ask(**words).is_placed is is_placed


@named_cases(
    ("nobody", {}, ()),
    ("to be chosen", {"model_draft": "d.gguf", "mmproj": "p.gguf"}, ()),
    ("the host", {"model_draft": "d.gguf", "devices_draft": ["none"], "mmproj": "p.gguf", "mmproj_device": "None"}, ()),
    (
        "both",
        {"model_draft": "d.gguf", "devices_draft": ["A", "B"], "mmproj": "p.gguf", "mmproj_device": "B"},
        ("A", "B"),
    ),
)
def test_devices_of_what_shares_the_memory(words: dict[str, Any], names: tuple[str, ...]) -> None:
    sharing = ask(**words).sharing
    assert sharing.names == names
    assert sharing.may_be_anywhere is bool(words)


def test_a_value() -> None:
    assert ask(gpus=["24GiB"], n_ctx=512) == ask(n_ctx=512, gpus=["24GiB"]) != ask(gpus=["24GiB"])
    assert ask(gpus=["24GiB"]).virtual == (VirtualDevice(**vars(CARD)),)


@cases(
    ({}, (1, False, 1)),
    ({"kv_unified": True}, (1, True, 1)),
    ({"n_seq_max": 4}, None),
    ({"kv_unified_per_slot": 4096}, None),
)
def test_one_slot_instead_of_the_servers(words: dict[str, Any], expected: tuple[int, bool, int] | None) -> None:
    one = ask(program="llama-server", **words).with_one_slot(facts("llama-server"))
    assert (one and (one.n_seq_max, one.kv_unified, one.n_outputs_max)) == expected
