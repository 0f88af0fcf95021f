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
from tests.support.cases import cases, named_cases, stored

CARD = parse_gpus(["24GiB"])[0]


def checked(words: dict[str, Any]) -> Any:
    """The keywords as the door hands them on."""
    return {name: PARAMETERS[name].check(value) for name, value in words.items()}


def ask(**words: Any) -> Ask:
    return Ask.of(checked(words))


@cases(
    stored("planning_ask", "refused")
    | {
        "descriptions and devices": ({"gpus": ["24GiB", CARD]}, "gpus has both strings and VirtualDevice objects"),
    }
)
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


@cases(
    stored("planning_ask", "loads")
    | {
        "override": ({"override_tensor": "exps=CPU"}, {"tensor_buft_overrides": (TensorBuftOverride("exps", "CPU"),)}),
    }
)
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
