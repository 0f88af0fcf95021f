"""What may be asked for at most, from both sides of every limit."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fitter import api
from fitter.api.checked_call import checked_call
from fitter.cli import fit as fit_command
from fitter.cli import real_runs as verify_command
from fitter.errors import FitterError, UsageError
from fitter.llama.types import DeviceInfo, Params, TensorBuftOverride, TensorInfo, VirtualDevice
from fitter.model.header import Model
from fitter.parameters import table
from fitter.parameters.kinds import Whole
from fitter.parameters.table import LARGEST, MAX_TOKENS, PARAMETERS, of_a_case
from fitter.parameters.values import MAX_OVERRIDES, MAX_PATTERNS, parse_overrides, shown
from fitter.planning.placing.host_flags import host_overrides
from fitter.planning.request import request_limits
from fitter.planning.request.constraints import check_targets, for_model, params_of
from fitter.text import MIB
from tests.support.cases import cases, named_cases

HUGE = 2**70
ENDLESS = 10**5000
N_LAYER = 4


def hold(name: str, value: Any) -> Any:
    return PARAMETERS[name].check(value)


COUNTS = {name: each.kind for name, each in PARAMETERS.items() if isinstance(each.kind, Whole)}

ANY = 2**31 - 1
RANGES = {name: (limit.least, limit.most) for name, limit in COUNTS.items()} | {
    name: limits
    for names, limits in (
        ("n_ctx live_tokens checkpoint_min_step", (0, ANY)),
        ("fit_ctx kv_unified_per_slot prompt generate", (1, ANY)),
        ("n_batch n_ubatch n_ubatch_draft", (1, 2**22)),
        ("n_outputs_max", (0, 2**22)),
        ("n_seq_max", (1, 256)),
        ("users spec_ngram_simple_size_m spec_ngram_map_k_size_m spec_ngram_map_k4v_size_m", (1, 1024)),
        ("spec_ngram_mod_n_max", (1, 1024)),
        ("n_gpu_layers n_gpu_layers_draft", (-1, None)),
        ("n_cpu_moe n_cpu_ffn", (0, None)),
        ("main_gpu", (-1, 15)),
        ("draft_max", (1, 64)),
        ("cache_ram", (-1, ANY)),
        ("ctx_checkpoints", (0, 2**16)),
        ("image_min_tokens image_max_tokens", (1, 2**14)),
        ("n_rs_seq", (0, 64)),
        ("prompts", (0, 10_000)),
    )
    for name in names.split()
}


def taken(said: str, call: Callable[[], Any]) -> Any:
    """What a call returns where nothing is said against it; otherwise it is refused so, which is no answer."""
    if not said:
        return call()
    with pytest.raises(UsageError, match=said) as caught:
        call()
    assert len(str(caught.value)) < 300
    return None


def model(n_layer: int = N_LAYER, n_ctx_train: int = 4096, names: tuple[str, ...] | None = None) -> Model:
    if names is None:
        names = ("output.weight", *(f"blk.{layer}.ffn_up_exps.weight" for layer in range(n_layer)))
    tensors = tuple(TensorInfo(name, "f16", (1,), 2) for name in names)
    path = Path("model.gguf")
    return Model(path, (path,), "model", "llama", 2 * len(names), n_layer, 0, n_ctx_train, 8, tensors, {})


# --- counts


def test_every_count_has_a_row() -> None:
    assert {name: (limit.least, limit.most) for name, limit in COUNTS.items()} == RANGES


@pytest.mark.parametrize("name", COUNTS)
def test_both_sides_of_a_count(name: str) -> None:
    least, most = RANGES[name]
    assert hold(name, least) == least
    said = f"give {least} or more" if most is None else f"give {least} to {most}"
    for value in (least - 1, -HUGE, *(() if most is None else (most + 1, HUGE, ENDLESS))):
        with pytest.raises(UsageError) as caught:
            hold(name, value)
        assert str(caught.value).startswith(name)
        assert PARAMETERS[name].called in str(caught.value)
        assert str(caught.value).endswith(f"is {shown(value)}: {said}")
    assert hold(name, ENDLESS if most is None else most) == (ENDLESS if most is None else most)


@named_cases(
    ("int", 512, 512),
    ("numpy", np.int64(512), 512),
    ("small numpy", np.uint8(200), 200),
    ("whole float", 512.0, 512),
    ("whole numpy float", np.float64(512), 512),
    ("fraction", 512.5, None),
    ("nan", float("nan"), None),
    ("inf", float("inf"), None),
    ("text", "512", 512),
    ("text with a unit", "0.5k", 512),
    ("another text", "a few", None),
    ("bool", True, None),
    ("list", [512], None),
    ("bytes", b"512", None),
    ("complex", 1j, None),
)
def test_types_of_a_count(value: Any, expected: int | None) -> None:
    if expected is None:
        with pytest.raises(UsageError, match=r"^n_ubatch \(-ub\) is .*: give a whole number$"):
            hold("n_ubatch", value)
    else:
        held_value = hold("n_ubatch", value)
        assert (held_value, type(held_value)) == (expected, int)


@named_cases(
    ("one", 8192, 8192),
    ("text", "8k", 8192),
    ("list", [0, 8192], (0, 8192)),
    ("numpy, text, the largest", (np.int64(3), "1k", 2**31 - 1), (3, 1024, 2**31 - 1)),
    ("array", np.array([1, 2]), (1, 2)),
    ("iterator", iter([5]), (5,)),
    ("negative", -1, "live_tokens is -1: give 0 to 2147483647"),
    ("a negative one", [1, -1], "live_tokens is -1: give 0 to 2147483647"),
    ("too large", [2**31], "live_tokens is 2147483648: give 0 to 2147483647"),
    ("another text", "many", "live_tokens is 'many': give a whole number"),
    ("another text in a list", ["many"], "live_tokens is 'many': give a whole number"),
    ("list in a list", [[1]], "live_tokens is [1]: give a whole number"),
    ("bool", [True], "live_tokens is True: give a whole number"),
    ("fraction", [0.5], "live_tokens is 0.5: give a whole number"),
    ("bytes", b"1", "live_tokens is b'1': give a whole number"),
    ("dict", {1: 2}, "live_tokens is {1: 2}: give a whole number"),
    ("an empty list", [], "live_tokens is an empty list: give a number of tokens, or a list of them"),
)
def test_one_number_of_tokens_or_several(value: Any, expected: int | tuple[int, ...] | str) -> None:
    if isinstance(expected, str):
        with pytest.raises(UsageError) as caught:
            hold("live_tokens", value)
        assert str(caught.value) == expected
    else:
        held_value = hold("live_tokens", value)
        assert held_value == expected
        assert {type(each) for each in np.atleast_1d(held_value).tolist()} == {int}


LOADED = ("n_ctx", "n_gpu_layers", "n_cpu_moe", "main_gpu", "n_batch", "n_ubatch", "n_seq_max", "n_rs_seq")


@given(st.dictionaries(st.sampled_from((*LOADED, "n_outputs_max")), st.integers() | st.integers(-3, 300)))
def test_any_integers_are_parameters_or_an_error(words: dict[str, int]) -> None:
    """What comes out is something that llama.cpp can be told, and no larger than the model."""
    try:
        params = for_model(params_of(None, **words), model(), False, words.get("n_cpu_moe"))  # type: ignore[arg-type]
    except FitterError as error:
        assert len(str(error)) < 200
        return
    assert all(-1 <= getattr(params, name) <= LARGEST for name in COUNTS if hasattr(params, name))
    assert params.n_ctx <= MAX_TOKENS
    assert sum(len(override.pattern) for override in params.tensor_buft_overrides) < 100


@given(st.sampled_from(sorted(COUNTS)), st.integers() | st.floats() | st.text() | st.booleans() | st.none())
def test_anything_is_a_count_or_an_error(name: str, value: Any) -> None:
    try:
        number = hold(name, value)
    except FitterError as error:
        assert len(str(error)) < 200
    else:
        assert type(number) is int
        assert COUNTS[name].holds(number)


# --- what the model says


@pytest.mark.parametrize("n_cpu_moe", [N_LAYER, N_LAYER + 1, 999, 10**7, HUGE, ENDLESS], ids=shown)
def test_experts_beyond_the_layers_are_those_of_all_layers(n_cpu_moe: int) -> None:
    [override] = for_model(params_of(None), model(), False, n_cpu_moe).tensor_buft_overrides
    assert override.pattern == "^blk.(0|1|2|3).ffn_(up|down|gate|gate_up)_(ch|)exps"


@named_cases(
    ("a layer of any number", ("blk.0.attn_q.weight", "blk.99999999999.ffn_up_exps.weight")),
    ("no layer", ("output.weight",)),
)
def test_layers_are_those_that_have_tensors(names: tuple[str, ...]) -> None:
    found = host_overrides(False, HUGE, None, names)
    assert sum(len(override.pattern) for override in found) < 100


@pytest.mark.parametrize(
    ("n_gpu_layers", "expected"),
    [(0, 0), (-1, -1), (99, 99), (LARGEST, LARGEST), (LARGEST + 1, N_LAYER + 1), (ENDLESS, N_LAYER + 1)],
    ids=shown,
)
def test_layers_beyond_a_c_integer_are_all_layers(n_gpu_layers: int, expected: int) -> None:
    assert for_model(params_of(None, n_gpu_layers=n_gpu_layers), model(), False, None).n_gpu_layers == expected


@named_cases(
    ("what any model may have", MAX_TOKENS, 4096, 1, ""),
    ("more", MAX_TOKENS + 1, 4096, 1, "give 4194304 at most; the model was trained for 4096"),
    ("the model's own", 10 * 2**20, 10 * 2**20, 1, ""),
    ("more than its own", 10 * 2**20 + 1, 10 * 2**20, 1, "give 10485760 at most"),
    ("its own for all sequences", 2**17 * 256, 2**17, 256, ""),
    ("more than that", 2**17 * 256 + 1, 2**17, 256, "give 33554432 at most"),
    ("a model that does not say", 0, 0, 1, ""),
    ("a model that says too much", 2**24 + 1, 2**31, 1, "give 16777216 at most"),
    ("its own for all sequences, and too much", 2**25 + 1, 2**20, 256, "give 33554432 at most"),
)
def test_contexts(n_ctx: int, n_ctx_train: int, n_seq_max: int, said: str) -> None:
    params = params_of(None, n_ctx=n_ctx, n_seq_max=n_seq_max)
    found = taken(said, lambda: for_model(params, model(n_ctx_train=n_ctx_train), False, None))
    assert found == (None if said else params)


@named_cases(
    ("a token for each", {"n_ctx": 4}, True, ""),
    ("a small context", {"n_ctx": 3}, True, "n_ctx .-c. is 3, and 4 sequences"),
    ("a small context of a model that takes whole batches", {"n_ctx": 3}, False, ""),
    ("a small batch", {"n_batch": 3}, False, "n_batch .-b. is 3"),
    ("few outputs", {"n_outputs_max": 3}, True, "n_outputs_max is 3"),
    ("none is set", {}, True, ""),
)
def test_every_sequence_has_a_token(words: dict[str, int], causal: bool, said: str) -> None:
    found = replace(model(), metadata={"llama.attention.causal": causal})
    params = params_of(None, n_seq_max=4, **words)  # type: ignore[arg-type]
    assert taken(said, lambda: for_model(params, found, False, None).n_seq_max) == (None if said else 4)


SMALL = TensorInfo("blk.0.attn_norm.weight", "f32", (1,), MIB)
LARGE = TensorInfo("token_embd.weight", "f32", (1,), 2**30)


@named_cases(
    ("the host", SMALL, "CPU", ""),
    ("a device in use", SMALL, "Vulkan0", ""),
    ("a large tensor where there is no limit", LARGE, "Vulkan1", ""),
    ("a large tensor on the host", LARGE, "CPU", ""),
    ("as large as it takes", TensorInfo(LARGE.name, "f32", (1,), 128 * MIB), "Vulkan0", ""),
    ("a byte more", TensorInfo(LARGE.name, "f32", (1,), 128 * MIB + 1), "Vulkan0", "token_embd.weight of 129 MiB on V"),
    ("too large", LARGE, "Vulkan0", "token_embd.weight of 1024 MiB on Vulkan0, .* 128 MiB"),
    ("a device that is left out", SMALL, "Vulkan2", "attn_norm.weight on Vulkan2, and -dev"),
)
def test_where_an_override_may_put_a_tensor(tensor: TensorInfo, target: str, said: str) -> None:
    gpus = [DeviceInfo(f"Vulkan{d}", "", "gpu", "Vulkan", 1, 1, buffer_type=f"Vulkan{d}") for d in range(3)]
    every = [replace(gpus[0], largest_tensor=128 * MIB), *gpus[1:], replace(gpus[0], type="cpu", buffer_type="CPU")]
    taken(said, lambda: check_targets([(tensor, TensorBuftOverride(".*", target))], every[:2], every))


# --- everything else


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ([3, 1], ""),
        (np.array([3.0, 1.0]), ""),
        ([0, 0], ""),
        ([1] * 16, ""),
        ([1e30, 1e-30], ""),
        ([1] * 17, "has 17 shares: llama.cpp has room for 16"),
        ([1, -1], "share below 0"),
        ([1, float("nan")], "share below 0"),
        ([1, float("inf")], "share of inf: give 0, or 1e-30 to 1e.30"),
        ([1e308, 1e308], r"share of 1e\+308"),
        ([1e-320], "share of 9.99989e-321"),
        ([10**400], "is about 1e400: give a number"),
        (["3"], "is '3': give a number"),
        ([True], "is True: give a number"),
        ("3;1", "is not a list of numbers such as 3,1"),
        (3, "give a list of numbers"),
    ],
    ids=shown,
)
def test_tensor_splits(value: Any, said: str) -> None:
    assert taken(said, lambda: hold("tensor_split", value)) == (None if said else tuple(map(float, value)))


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("margin", 0, ""),
        ("margin", 2**60, ""),
        ("margin", (2**20, 0), ""),
        ("margin", (2**20, 2**20 - 1), r"is 1048575 bytes, less than a MiB"),
        ("margin", 2**60 + 1, "more memory than any machine has: give 1099511627776 MiB at most"),
        ("margin", (0, ENDLESS), "more memory than any machine has"),
        ("margin", -1, r"margin \(-fitt\) is -1 bytes"),
        ("margin", "1 GB of it", "margin .-fitt.: '1 GB of it' is not a size"),
        ("margin", 1.5, "is 1.5: give a whole number"),
        ("margin", {"CUDA0": 1}, "give a list of bytes"),
        ("host_margin", 2**60, ""),
        ("host_margin", HUGE, "more memory than any machine has"),
        ("host_memory", 2**60, ""),
        ("host_memory", HUGE, "more memory than any machine has"),
        ("host_memory", [1], "give a whole number"),
        ("reserve", {"CUDA0": 2**60}, ""),
        ("reserve", {"CUDA0": HUGE}, "reserve .--reserve. of 'CUDA0' is 1125899906842624 MiB"),
        ("reserve", {"CUDA0": None}, "give a whole number"),
        ("reserve", {5: 1}, "is 5: give a string"),
        ("reserve", 5, "give a list of strings"),
        ("timeout", 1e6, ""),
        ("timeout", 1000001.0, "too long"),
        ("timeout", float("nan"), "too short"),
        ("timeout", ENDLESS, "is about 1e5000: give a number"),
        ("timeout", "60", "give a number"),
        ("host_bandwidth", "60GB/s", ""),
        ("host_bandwidth", [1], "give a number"),
        ("type_k", "q8_0", ""),
        ("type_k", 8, "give a string"),
        ("flash_attn", "on", ""),
        ("flash_attn", "maybe", "is 'maybe': give one of on, off, auto"),
        ("flash_attn", True, "give a string"),
        ("cpu_moe", True, ""),
        ("cpu_moe", "yes", "is 'yes': give True or False"),
        ("cpu_moe", 2, "give True or False"),
        ("devices", ("CUDA0",), ""),
        ("devices", 5, "give a list of strings"),
        ("override_tensor", (None,), "give a string"),
        ("lora", 5, "give a list of paths"),
        ("mmproj", 5, "give the path of a file"),
        ("mmproj", "", r"mmproj \(--mmproj\) is an empty text: give the path of a file"),
        ("lora", ["a.gguf", ""], r"lora \(--lora\) is an empty text: give the path of a file"),
        ("gpus", ("rtx-4090",), ""),
        ("gpus", (5,), "has 5: describe a GPU"),
        ("gpus", (VirtualDevice("CUDA0", "", "cuda", 890, 2**60, 2**60),), ""),
        ("gpus", (VirtualDevice("CUDA0", "", "cuda", 890, HUGE, 1),), "CUDA0.total is .* more memory than any"),
        ("gpus", (VirtualDevice("CUDA0", "", "cuda", 890, 1, 2),), "has 2 of 1 bytes free"),
        ("gpus", (VirtualDevice("CUDA0", "", "cuda", 890, 0, 0),), "has 0 of 0 bytes free"),
    ],
    ids=shown,
)
def test_other_words(name: str, value: Any, said: str) -> None:
    assert taken(said, lambda: hold(name, value)) == (None if said else value)


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("margin", "1GiB", 1 << 30),
        ("margin", ["1GiB", 0, "0"], (1 << 30, 0, 0)),
        ("margin", np.array([0, 1 << 20]), (0, 1 << 20)),
        ("host_margin", "512MiB", 512 << 20),
        ("host_memory", "64GiB", 64 << 30),
        ("tolerance", "0", 0),
        ("reserve", {"CUDA0": "2GiB"}, {"CUDA0": 2 << 30}),
        ("reserve", "CUDA0=2GiB", ("CUDA0=2GiB",)),
        ("devices", "CUDA0", ("CUDA0",)),
        ("devices", ["none"], ()),
        ("devices_draft", "NONE", ()),
        ("allow", "paging", ("paging",)),
        ("lora", "a.gguf", ("a.gguf",)),
        ("lora", [b"a.gguf", Path("b.gguf")], ("a.gguf", "b.gguf")),
        ("mmproj", b"\xff.gguf", "\udcff.gguf"),
        ("cpu_moe", np.bool_(True), True),
        ("cpu_moe", 1, True),
        ("gpus", "rtx-4090", ("rtx-4090",)),
        ("timeout", np.float32(2.5), 2.5),
    ],
    ids=shown,
)
def test_what_is_made_of_it(name: str, value: Any, expected: Any) -> None:
    found = hold(name, value)
    assert (found, type(found)) == (expected, type(expected))


@pytest.mark.parametrize("value", ["a\0b", "\ud800", 5, None, b"a\0b"], ids=shown)
@pytest.mark.parametrize("name", ["model_draft", "mmproj"])
def test_paths_that_none_has(name: str, value: Any) -> None:
    with pytest.raises(UsageError, match=f"^{name} "):
        hold(name, value)


@named_cases(
    ("most", ["a=CPU"] * MAX_OVERRIDES, ""),
    ("too many", ["a=CPU"] * (MAX_OVERRIDES + 1), "513 tensor overrides .-ot. are given: give 512 at most"),
    ("longest", ["a" * MAX_PATTERNS + "=CPU"], ""),
    ("too long", ["a" * (MAX_PATTERNS + 1) + "=CPU"], "have 8193 characters: give 8192 at most"),
    ("too long together", ["a" * 5000 + "=CPU", "b" * 5000 + "=CPU"], "have 10000 characters"),
    ("none at all", ["a" * 10**6], "'aaa.{0,40} is not of the form"),
)
def test_overrides(texts: list[str], said: str) -> None:
    assert taken(said, lambda: len(parse_overrides(texts))) == (None if said else len(texts))


@named_cases(
    ("small", -7, "-7"),
    ("long", 10**29, "1" + "0" * 29),
    ("endless", ENDLESS, "about 1e5000"),
    ("endless and negative", -ENDLESS, "about -1e5000"),
    ("a flag", True, "True"),
    ("a long text", "a" * 100, "'" + "a" * 36 + "..."),
    ("a list of what is endless", [ENDLESS], "a list"),
)
def test_what_is_shown_of_a_value(value: object, expected: str) -> None:
    assert shown(value) == expected


# --- the doors


def test_what_is_not_set_has_its_default() -> None:
    @checked_call(table.LoadKeywords)
    def function(model: str, *, fit_ctx: int | None = 5, other: object = 1, **given: Any) -> tuple[object, ...]:
        return model, fit_ctx, other, given

    call: Any = function
    assert call("m") == ("m", 5, 1, {})
    assert call("m", n_ctx=None, fit_ctx=np.int64(3), other=None) == ("m", 3, 1, {})
    assert call(b"m", n_ctx=np.int32(7), other=2) == ("m", 5, 2, {"n_ctx": 7})
    signature = inspect.signature(function)
    assert [*signature.parameters][:5] == ["model", "fit_ctx", "other", "n_ctx", "devices"]
    assert signature.parameters["swa_full"].annotation == bool | None
    assert "``swa_full``: Use a KV cache of full size" in str(function.__doc__)
    for name, value in {"n_ctx": -1, "fit_ctx": 0, "n_ctxs": 1, "model": 5}.items():
        with pytest.raises(UsageError, match=name):
            call(**{"model": "m", name: value})
    with pytest.raises(UsageError, match="model is None: give the path of a file"):
        call(None)
    with pytest.raises(UsageError, match="function has no keyword n_ctxs: did you mean n_ctx"):
        call("m", n_ctxs=1)


OWN = {"alternatives", "model", "worker", "plan"}
"""Keywords that each call looks at itself."""


@pytest.mark.parametrize(
    "function",
    [getattr(api, name) for name in ("fit", "measure", "estimate", "verify", "inspect", "devices", "calibrate")],
)
def test_every_keyword_is_in_the_table_and_documented(function: Any) -> None:
    names = set(inspect.signature(function).parameters) - OWN
    assert names <= PARAMETERS.keys()
    assert all(f"``{name}``: " in function.__doc__ for name in names)


def test_what_one_call_knows_all_know() -> None:
    load = {each.name for each in table.taken_by(table.LoadKeywords)}
    for function in (api.fit, api.measure, api.estimate, api.verify):
        assert load <= inspect.signature(function).parameters.keys()
    assert load <= table.of_a_case().keys()
    for command in (fit_command.fit, verify_command.verify):
        assert load <= {param.name for param in command.params}


@pytest.mark.parametrize("name", sorted(COUNTS.keys() & of_a_case().keys()))
def test_a_file_of_cases_has_the_same_limits(name: str) -> None:
    least, most = RANGES[name]
    assert of_a_case()[name].kind.read("here", least) == least
    for value in (least - 1, *(() if most is None else (most + 1, ENDLESS))):
        with pytest.raises(UsageError, match=f"^here is {shown(value)}: give a whole number, {least} "):
            of_a_case()[name].kind.read("here", value)


@cases("margin", "host_margin", "host_memory")
def test_sizes_in_a_file_of_cases(name: str) -> None:
    assert of_a_case()[name].kind.read("here", 2**60) == 2**60
    with pytest.raises(UsageError, match=r"here is .* more memory than any machine has"):
        of_a_case()[name].kind.read("here", 2**60 + 1)


@named_cases(
    ("what fit chooses", Params(), ""),
    ("a negative context", replace(Params(), n_ctx=-1), r"n_ctx \(-c\) is -1"),
    ("sequences", replace(Params(), n_seq_max=257), "give 1 to 256"),
    ("snapshots", replace(Params(), n_rs_seq=2**31), "n_rs_seq is 2147483648"),
    ("shares", replace(Params(), tensor_split=(1e308, 1.0)), r"^tensor_split .* share of"),
)
def test_parameters_of_a_file(params: Params, said: str) -> None:
    taken(said, lambda: request_limits.check_params(params))
