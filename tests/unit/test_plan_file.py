from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fitter.errors import UsageError
from fitter.llama.types import Lora, Params, TensorBuftOverride
from fitter.output.arguments import arguments
from fitter.output.documents.document import dumps
from fitter.output.documents.plan_document import read_plan, to_dict
from fitter.planning.plan.plan import Plan, Problem, resolved, with_real_load
from fitter.planning.pricing.pricing import SpeedAt
from fitter.planning.request.summary import PoolUse, Setting
from fitter.planning.speed.explain import Bound, Choice, Reason
from fitter.programs.later import Later
from tests.support.cases import cases, named_cases
from tests.support.plans import make_plan, make_price, reserving, shared_use

EVERYTHING = Params(
    n_ctx=8192,
    n_gpu_layers=17,
    tensor_split=(20.0, 13.0),
    tensor_buft_overrides=(TensorBuftOverride(r"^blk\.1\.", "CPU"),),
    n_batch=1024,
    n_ubatch=256,
    n_seq_max=4,
    kv_unified=True,
    type_k="q8_0",
    type_v="q4_0",
    flash_attn="on",
    offload_kqv=False,
    op_offload=False,
    swa_full=True,
    embeddings=True,
    split_mode="none",
    main_gpu=1,
    moe_cache_size=2048 * 2**20,
    devices=("CUDA1", "CUDA0"),
    load_mtp=True,
    n_rs_seq=3,
    n_outputs_max=4,
    lora=(Lora("adapter.gguf", 0.5),),
    more=(("pooling_type", "mean"), ("cache_ram", 512), ("ctx_checkpoints", 0), ("cache_idle_slots", False)),
)
"""No parameter has its default, but for those that only what drafts has."""

OF_A_DRAFT = {"ctx_type"}


LATER = (Later("prompt cache", None, 0, None), Later("idle slots", 0, 5, 4, 1), Later("checkpoints", 640, 5, 128, 32))


def test_no_parameter_of_the_example_has_its_default() -> None:
    assert {name for name, value in vars(EVERYTHING).items() if value == getattr(Params(), name)} == OF_A_DRAFT


def reread(directory: Path, document: Any) -> Plan:
    """The plan that the document is read as."""
    path = directory / "plan.json"
    path.write_text(json.dumps(document))
    return read_plan(path)


@named_cases(("everything", EVERYTHING), ("defaults", Params()))
def test_what_is_written_is_read_back(params: Params, tmp_path: Path) -> None:
    shared = shared_use("draft", ("-md", "draft.gguf"), CUDA0=5, host=7)
    bound = Bound(1.5, reached=3.2, reasons=(Reason("compute", 1.75, 300, ("CUDA1",)), Reason("whole", 3.2)))
    choices = (
        Choice("where", "here", 2.0, "there", 2.5),
        Choice("which", "this", 1.0, "that"),
        Choice("how", "so", 1.0),
    )
    plan = replace(
        make_plan(params, estimate=make_price(full=31.5), levers=("no op_offload",), bound=bound, choices=choices),
        shared=(shared,),
        rpc=("127.0.0.1:50052",),
        program="llama-server",
        later=LATER,
        host=replace(make_plan().host, later=7 << 30),
    )
    (tmp_path / "plan.json").write_text(dumps(to_dict(plan)))
    found = read_plan(tmp_path / "plan.json")
    assert found.params == resolved(plan) and found.breakdown.rows == plan.breakdown.rows
    assert (found.model, found.devices, found.host) == (plan.model, plan.devices, plan.host)
    assert (found.program, found.later, found.host.later) == ("llama-server", LATER, 7 << 30)
    assert (found.levers, found.shared, found.rpc, found.search) == (plan.levers, plan.shared, plan.rpc, plan.search)
    assert found.fits
    assert found.estimate and found.estimate.depths == (SpeedAt(4096, 1 / 31.5),)
    # the file has the devices that llama.cpp takes by itself
    default = () if params.devices else found.params.devices
    assert to_dict(found) == to_dict(replace(plan, params=resolved(plan), default_devices=default))
    assert arguments(found) == arguments(plan)


def test_a_plan_that_does_not_fit(tmp_path: Path) -> None:
    problem = Problem("host", 5, "too little")
    found = reread(tmp_path, to_dict(make_plan(host_free=100, problems=(problem,))))
    assert (found.fits, found.problems, found.estimate) == (False, (problem,), None)


def test_memory_that_is_shared(tmp_path: Path) -> None:
    setting = Setting("sudo sysctl x=1", 7, "it can be longer")
    pools = (
        PoolUse("MTL0+host", 64, 60, 1, 50, ("MTL0", "host"), 3, 4, "none", setting),
        PoolUse("CUDA0+host", 64, 60, 1, 50, ("CUDA0", "host")),
    )
    plan = replace(make_plan(), pools=pools)
    (tmp_path / "plan.json").write_text(plan.format("json", anyway=True))
    found = read_plan(tmp_path / "plan.json")
    assert found.pools == pools
    document = to_dict(plan)
    del document["pools"]
    assert reread(tmp_path, document).pools == ()


def test_compute_buffers_of_a_real_load(tmp_path: Path) -> None:
    pool = PoolUse("CUDA1+host", 64 << 30, 5 << 30, 1 << 30, 4 << 30, ("CUDA1", "host"))
    dummy = replace(reserving(make_plan(host_free=1200 << 20), CUDA1=5 << 30, CPU=40 << 20), pools=(pool,))
    dummy = replace(dummy, host=replace(dummy.host, margin=860 << 20))
    plan = with_real_load(dummy)
    document = to_dict(plan)
    uses = {"CUDA1": document["devices"][1], "CPU": document["host"], "both": document["pools"][0]}
    more = {"CUDA1": 5 << 30, "CPU": 40 << 20, "both": (5 << 30) + (40 << 20)}
    for name, use in uses.items():
        # what llama-fit-params prints keeps the margin
        assert use["more_in_use"] == more[name] and use["left"] == use["free"] - use["used"] >= use["margin"], name
    loaded = [use.loaded for use in (plan.devices[1], plan.host, *plan.pools)]
    assert [use.left for use in loaded] == [use["left"] - more[name] for name, use in uses.items()]
    assert not any(use.fits for use in loaded) and loaded[0].compute == (100 << 20) + (5 << 30)
    found = reread(tmp_path, document)
    assert (found.devices, found.host, found.pools) == (plan.devices, plan.host, plan.pools)
    unfit = replace(dummy, problems=(Problem("host", 5, "too little"),))
    assert with_real_load(unfit) == unfit


def test_what_an_earlier_version_did_not_say(tmp_path: Path) -> None:
    document = to_dict(make_plan(estimate=make_price(full=30.0), bound=Bound(1.5, reached=3.0)))
    del document["estimate"]["full_context"]
    del document["explanation"]["bound"]["reasons"]
    found = reread(tmp_path, document)
    assert found.bound == Bound(1.5, reached=3.0)
    assert found.estimate and (found.estimate.depths, found.estimate.full_context) == ((), None)
    assert to_dict(found)["estimate"] == {**document["estimate"], "full_context": None}
    for name in ("explanation", "program", "later"):
        del document[name]
    for use in (*document["devices"], document["host"]):
        del use["more_in_use"]
    del document["host"]["later"]
    for name in ("n_outputs_max", "pooling_type", "cache_ram", "ctx_checkpoints", "logits_all"):
        del document["params"][name]
    found = reread(tmp_path, document)
    assert (found.choices, found.bound) == ((), None)
    assert (found.program, found.later, found.host.later) == ("any", (), 0)
    assert found.params == Params(**{**vars(make_plan().params), "devices": found.params.devices})


def test_a_plan_of_the_first_version_that_could_read_plans() -> None:
    path = Path(__file__).parents[1] / "data/first_plan.json"
    old, found = json.loads(path.read_text()), read_plan(path)
    assert found.params == Params(
        n_ctx=8192, n_gpu_layers=17, tensor_split=(20.0, 13.0), n_seq_max=1, devices=("CUDA0", "CUDA1")
    )
    new = to_dict(found)

    def kept(now: Any, then: Any) -> Any:
        """Leave only the keys that the file has."""
        if isinstance(then, dict):
            return {key: kept(now[key], value) for key, value in then.items()}
        return list(map(kept, now, then)) if isinstance(then, list) else now

    same = {key: value for key, value in old.items() if key != "arguments"}
    assert kept(new, same) == same


def test_texts_of_a_file_cannot_write_to_a_terminal(tmp_path: Path) -> None:
    document = to_dict(replace(make_plan(), notes=("a note",)))
    document["model"]["name"] = document["notes"][0] = "a\x1b[2J"
    found = reread(tmp_path, document)
    assert (found.model.name, found.notes) == ("a\\x1b[2J", ("a\\x1b[2J",))


def test_a_plan_that_was_read_says_all_that_it_has(tmp_path: Path) -> None:
    plan = make_plan(Params(n_ctx=4096, n_gpu_layers=17, devices=("CUDA0", "CUDA1")), estimate=make_price())
    (tmp_path / "plan.json").write_text(plan.format("json"))
    found = read_plan(tmp_path / "plan.json")
    assert "weights   17 layers on 2 devices" in str(found)
    assert "weights   17 of 33 layers on 2 devices" in str(plan)
    for name in ("args", "shell", "json", "ini", "env"):
        assert found.format(name) == plan.format(name)


def test_what_a_later_version_adds_is_passed_over(tmp_path: Path) -> None:
    document = to_dict(make_plan())
    document["more"] = document["params"]["more"] = 1
    reason = {"kind": "weather", "seconds": 2.0, "bytes": 0, "devices": []}
    document["explanation"]["bound"] = {"seconds": 1.0, "text": "", "distance": 1.0, "reasons": [reason]}
    assert reread(tmp_path, document).fits


def _set(*keys: str | int, to: Any) -> Callable[[Any], None]:
    def change(document: Any) -> None:
        for key in keys[:-1]:
            document = document[key]
        document[keys[-1]] = to

    return change


def _without(*keys: str | int) -> Callable[[Any], None]:
    def change(document: Any) -> None:
        for key in keys[:-1]:
            document = document[key]
        del document[keys[-1]]

    return change


SPEEDS = {"prompt_tokens_per_second": 100.0, "generation_tokens_per_second": 10}

WRONG: dict[str, tuple[Callable[[Any], None], str]] = {
    "another schema": (_set("schema", to=2), "it has schema 2, but this fitter reads schema 1: install a newer fitter"),
    "no schema": (_without("schema"), "'schema' is missing"),
    "schema in words": (_set("schema", to="1"), "'schema' is \"1\", not a whole number"),
    "a parameter missing": (_without("params", "kv_unified"), "'params.kv_unified' is missing"),
    "a number for a flag": (_set("params", "op_offload", to=1), "'params.op_offload' is 1, not true or false"),
    "a flag for a number": (_set("params", "n_ctx", to=True), "'params.n_ctx' is true, not a whole number"),
    "a fraction": (_set("params", "n_ctx", to=1.5), "'params.n_ctx' is 1.5, not a whole number"),
    "nothing": (_set("params", "n_batch", to=None), "'params.n_batch' is null, not a whole number"),
    "an unknown word": (_set("params", "flash_attn", to="maybe"), "'params.flash_attn' is \"maybe\", not one of on"),
    "no number": (_set("params", "tensor_split", to=[float("nan")]), "'params.tensor_split[0]' is NaN, not a number"),
    "a text for a list": (_set("params", "devices", to="CUDA0"), "'params.devices' is \"CUDA0\", not a list"),
    "a list for an object": (_set("model", to=[]), "'model' is [], not an object"),
    "negative bytes": (_set("memory", 2, "model", to=-1), "'memory[2].model' is -1, not a whole number of 0 or more"),
    "bytes missing": (_without("memory", 0, "compute"), "'memory[0].compute' is missing"),
    "no memory": (_without("memory"), "'memory' is missing"),
    "a device without a margin": (_without("devices", 1, "margin"), "'devices[1].margin' is missing"),
    "a context in words": (
        _set("estimate", to={**SPEEDS, "full_context": {"tokens": "all", "generation_tokens_per_second": 1.0}}),
        "'estimate.full_context.tokens' is \"all\", not a whole number",
    ),
    "no speed with a full context": (
        _set("estimate", to={**SPEEDS, "full_context": {"tokens": 4096}}),
        "'estimate.full_context.generation_tokens_per_second' is missing",
    ),
    "fits, with problems": (
        _set("problems", to=[{"device": "host", "missing": 1, "message": ""}]),
        "'fits' and 'problems' contradict each other",
    ),
    "an option that no plan has": (
        _set("shared", to=[{"kind": "draft", "name": "d", "memory": [], "arguments": ["--path", "/"]}]),
        '\'shared[0].arguments\' is ["--path", "/"], not options that a plan has, each with a value',
    ),
    "long": (_set("model", "bytes", to="x" * 1000), f"'model.bytes' is \"{'x' * 39}…, not a whole number"),
}


@cases(WRONG)
def test_a_plan_that_is_none(change: Callable[[Any], None], message: str, tmp_path: Path) -> None:
    document = copy.deepcopy(to_dict(make_plan(Params(n_ctx=4096, tensor_split=(1.0, 1.0)))))
    change(document)
    with pytest.raises(UsageError) as caught:
        reread(tmp_path, document)
    assert str(caught.value).startswith(f"{tmp_path}/plan.json: {message}")
    assert "\n" not in str(caught.value)


@named_cases(
    ("empty", b""),
    ("half", b'{"schema": 1'),
    ("binary", b"GGUF\x03\xff\xfe"),
    ("another encoding", '{"schema": "ä"}'.encode("latin-1")),
    ("too deep", b"[" * 100_000),
    ("too long", b" " * (64 * 2**20 + 1)),
)
def test_no_json(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(data)
    with pytest.raises(
        UsageError, match=r"plan\.json is not JSON: give a file that 'fitter model\.gguf --json' wrote$"
    ):
        read_plan(path)


NO_FILES = {"gone.json": "no such file; 'fitter model.gguf --json' writes a plan", "": "cannot be read: Is a directory"}


@pytest.mark.parametrize(("name", "why"), NO_FILES.items())
def test_no_file(tmp_path: Path, name: str, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        read_plan(tmp_path / name)
