"""Draft models, projectors, adapters and reserved memory beside the model: counted once, to the byte of llama.cpp."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import fitter
from fitter import Plan, errors
from fitter.llama.client import Worker
from fitter.llama.types import Breakdown, Params
from fitter.machine.gpu import parse_gpus
from fitter.output.keywords import fit_kwargs
from tests.drafting import upstream as drafting
from tests.support.cases import cases, named_cases, stored
from tests.support.command import Command
from tests.support.llama_builds import where
from tools.models import shapes
from tools.models.shapes import F32, Q4_K, Shape, Tensor
from tools.models.tiny import TINY_DENSE, write_tiny
from tools.models.tiny_lora import write_lora
from tools.models.tiny_projector import TinyProjector, write_projector

pytestmark = pytest.mark.usefixtures("one_worker")

GPUS = ("1GiB", "1GiB")
MIB = 1024 * 1024


@pytest.fixture(scope="module")
def main_model(directory: Path) -> Path:
    return write_tiny(directory / "main.gguf")


@pytest.fixture(scope="module")
def draft(directory: Path) -> Path:
    return write_tiny(directory / "draft.gguf", dataclasses.replace(TINY_DENSE, n_layer=2))


@pytest.fixture(scope="module")
def large(directory: Path) -> Path:
    return shapes.write("llama-3.1-8b", directory, vocab=False)


def fit(model: Path, gpus: Sequence[str] = GPUS, **given: Any) -> Plan:
    given.setdefault("margin", 0)
    return fitter.fit(model, gpus=gpus, host_bandwidth="60GB/s", **given)


def used(plan: Plan) -> dict[str, int]:
    return {**{device.name: device.used for device in plan.devices}, "host": plan.host.used}


def used_of(breakdown: Breakdown, names: Sequence[str] = ("CUDA0", "CUDA1")) -> dict[str, int]:
    return {**{name: breakdown.on(name).used for name in names}, "host": breakdown.host.used}


def more(plan: Plan, than: Plan) -> dict[str, int]:
    return {name: size - used(than)[name] for name, size in used(plan).items()}


# --- draft models

SLOTS: dict[str, dict[str, Any]] = {
    "one sequence": {},
    "four, each its own cache": {"n_seq_max": 4},
    "four, one cache": {"n_seq_max": 4, "kv_unified": True},
    "small batches": {"n_batch": 256, "n_ubatch": 64},
    "cache on the host": {"offload_kqv": False},
    "no flash attention": {"flash_attn": "off"},
}


@pytest.mark.parametrize("given", SLOTS.values(), ids=SLOTS)
@pytest.mark.parametrize("place", [("CUDA0",), ("CUDA1",), ()], ids=["CUDA0", "CUDA1", "host"])
def test_a_draft_model_adds_what_it_takes_alone(
    main_model: Path, draft: Path, place: tuple[str, ...], given: dict[str, Any]
) -> None:
    # a worker of its own each: one that is shared remembers loads
    pins: dict[str, Any] = {"n_ctx": 4096, "n_ubatch": 512, "tensor_split": (2, 3), "worker": None, **given}
    without = fit(main_model, **pins)
    plan = fit(main_model, model_draft=draft, devices_draft=place or ["none"], **pins)
    alone = fitter.measure(
        draft, gpus=GPUS, devices=place, n_ctx=4096, n_outputs_max=given.get("n_seq_max", 1), **given
    )
    assert plan.fits and plan.params == without.params and plan.breakdown == without.breakdown
    assert more(plan, without) == used_of(alone)
    rows = {row.device or "host": row.used for row in plan.shared[0].rows}
    assert rows == {name: size for name, size in used_of(alone).items() if size}
    assert sum(alone.on(name).used for name in place) > 0 or not place
    assert plan.search.shared_loads == 1
    assert plan.search.dummy_loads <= without.search.dummy_loads


def test_a_micro_batch_for_drafting_takes_what_llama_server_takes(directory: Path) -> None:
    """A llama-server b11669 with -ub 256 logs 0.56 MiB of this draft model with 64 tokens, and 2.26 without."""
    tiny, build = write_tiny(directory / "tiny.gguf", TINY_DENSE), where("b11739")
    words = {"n_ctx": 1024, "n_batch": 512, "n_ubatch": 256, "n_seq_max": 1, "program": "llama-server"}
    for n_ubatch, logged in ((None, "2.26"), (64, "0.56"), (2000, "4.52")):
        plan = fit(tiny, ["none"], model_draft=tiny, n_ubatch_draft=n_ubatch, llama_cpp=build, **words)
        assert f"{sum(row.compute for row in plan.shared[0].rows) / MIB:.2f}" == logged
        assert ("--spec-draft-n-ubatch" in plan.arguments()) == (n_ubatch is not None)
    with pytest.raises(errors.UsageError, match=r"has no --spec-draft-n-ubatch: leave it out, or use b11669 or newer$"):
        fit(tiny, ["none"], model_draft=tiny, n_ubatch_draft=64, **words)


@pytest.fixture(scope="module")
def server(directory: Path) -> Path:
    return drafting.build(directory)


@cases(stored("shared", "llama_servers_own_code_takes_the_same_bytes_with_the_arguments"))
def test_llama_servers_own_code_takes_the_same_bytes_with_the_arguments(
    given: dict[str, Any], server: Path, large: Path
) -> None:
    cards = ["24GiB", "16GiB"]
    plan = fit(large, cards, n_ctx=8192, model_draft=large, **given)
    main, draft = drafting.takes(server, large, parse_gpus(cards), plan.arguments())
    assert plan.fits
    own = {row.device or "host": (row.model, row.context, row.compute) for row in plan.shared[0].rows}
    if own.keys() == {"host"}:
        # upstream leaves CPU_REPACK out
        assert own["host"][1:] == draft["host"][1:] and own["host"][0] > draft["host"][0]
    else:
        assert own == draft
    for device in plan.devices:
        assert main.get(device.name, (0, 0, 0)) == (device.model, device.context, device.compute)


def test_a_fitted_context_leaves_room_for_the_draft_models(large: Path, draft: Path) -> None:
    plan = fit(large, ["8GiB"], model_draft=large, margin=0, n_gpu_layers_draft=4)
    wider = plan.params.n_ctx + 256
    alone = fitter.measure(
        large, gpus=["8GiB"], devices=["CUDA0"], n_ctx=plan.params.n_ctx, n_gpu_layers=4, n_outputs_max=1
    )
    assert plan.fits and plan.shared[0].on("CUDA0") == alone.on("CUDA0").used
    assert plan.devices[0].shared == alone.on("CUDA0").used
    without = fit(large, ["8GiB"], margin=0)
    assert plan.params.n_ctx < without.params.n_ctx
    params = {"n_ctx": wider, "devices": ["CUDA0"]}
    both = [
        fitter.measure(large, gpus=["8GiB"], **params).on("CUDA0").used,
        fitter.measure(large, gpus=["8GiB"], n_gpu_layers=4, n_outputs_max=1, **params).on("CUDA0").used,
    ]
    assert sum(both) > plan.devices[0].free, "the next larger context would not fit"


def test_the_device_of_the_draft_model_is_the_faster_one(large: Path, draft: Path) -> None:
    for cards in itertools.permutations(("rtx-4090", "gtx-1060-6gb")):
        plan = fit(large, cards, n_ctx=8192, model_draft=draft)
        name = f"CUDA{cards.index('rtx-4090')}"
        assert [device.name for device in plan.devices if device.shared] == [name]
        assert f"-devd {name}" in " ".join(plan.arguments())
        assert any(choice.subject == "where the draft model is" for choice in plan.choices)


def test_a_draft_model_goes_where_the_model_leaves_room(large: Path) -> None:
    """The model fills the fast card; a draft model there too would push weights of it to the host."""
    plan = fit(large, ["rtx-4090:free=7GiB", "gtx-1060-6gb"], n_ctx=8192, model_draft=large, n_gpu_layers_draft=12)
    assert plan.fits
    words = plan.arguments()
    assert words[words.index("-devd") + 1] == "CUDA1"
    assert plan.devices[0].shared == 0 and not plan.params.tensor_buft_overrides


def test_a_draft_model_without_room_on_a_device_goes_to_the_host(large: Path, draft: Path) -> None:
    plan = fit(draft, ["1GiB"], n_ctx=4096, model_draft=large)
    assert plan.fits and plan.devices[0].shared == 0 < plan.host.shared
    assert f"-md {large} -devd none -ngld 0" in " ".join(plan.arguments())


def test_a_draft_model_whose_cache_fills_a_device_is_spread(large: Path, server: Path) -> None:
    cards = ["3x 8GiB"]
    given: dict[str, Any] = {"model_draft": large, "n_gpu_layers_draft": 99}
    pinned = [fit(large, cards, devices_draft=[name], **given) for name in ("CUDA0", "CUDA2")]
    plan = fit(large, cards, **given)
    assert plan.fits and plan.params.n_ctx > max(each.params.n_ctx for each in pinned)
    assert all(device.shared > 0 for device in plan.devices)
    assert plan.search.dummy_loads < 90
    main, draft = drafting.takes(server, large, parse_gpus(cards), plan.arguments())
    assert {row.device or "host": (row.model, row.context, row.compute) for row in plan.shared[0].rows} == draft
    for device in plan.devices:
        assert main[device.name] == (device.model, device.context, device.compute)


def test_a_context_that_may_shrink_shrinks_for_the_draft_model_too(large: Path, draft: Path) -> None:
    given: dict[str, Any] = {"n_ctx": 65536, "n_ubatch": 512, "model_draft": draft}
    plan = fit(large, ["6GiB"], allow=["context"], **given)
    assert plan.fits and plan.devices[0].shared > 0
    assert 2560 <= plan.params.n_ctx < 65536
    at = fitter.measure(draft, gpus=["6GiB"], devices=["CUDA0"], n_ctx=plan.params.n_ctx, n_outputs_max=1)
    assert plan.devices[0].shared == at.on("CUDA0").used


def test_a_device_for_the_draft_model_alone(main_model: Path, draft: Path) -> None:
    pins: dict[str, Any] = {"n_ctx": 4096, "devices": ["CUDA1"]}
    plan = fit(main_model, model_draft=draft, devices_draft=["CUDA0"], **pins)
    used_alone = [(device.name, device.used == device.shared) for device in plan.devices]
    assert used_alone == [("CUDA1", False), ("CUDA0", True)]
    assert fit(main_model, **pins).devices == (plan.devices[0],)


def test_a_draft_model_keeps_the_margin_of_its_device(main_model: Path, draft: Path) -> None:
    plan = fit(main_model, ["1GiB", "1GiB:free=1MiB"], n_ctx=4096, model_draft=draft, devices_draft=["CUDA1"])
    (problem,) = plan.problems
    assert not plan.fits and plan.estimate is None
    assert (problem.device, problem.missing) == ("CUDA1", -plan.devices[1].left)
    assert "of them beside the model" in problem.message


# --- multi-token prediction


def with_mtp(shape: Shape) -> Shape:
    """``qwen3next`` as ``qwen35moe``, which can go back to earlier states, with a layer for multi-token prediction."""
    n_layer = shape.n_layer
    n_embd = 2048
    last = f"blk.{n_layer}"
    attention = f"blk.{n_layer - 1}."
    own = [
        dataclasses.replace(tensor, name=f"{last}.{tensor.name.removeprefix(attention)}")
        for tensor in shape.tensors
        if tensor.name.startswith(attention)
    ]
    own.append(Tensor(f"{last}.nextn.eh_proj.weight", (2 * n_embd, n_embd), Q4_K))
    norms = ("enorm", "hnorm", "shared_head_norm")
    own += [Tensor(f"{last}.nextn.{name}.weight", (n_embd,), F32) for name in norms]
    tensors = [*shape.tensors]
    for tensor in shape.tensors:
        if "ssm_ba" in tensor.name:
            half = (tensor.shape[0], tensor.shape[1] // 2)
            tensors.remove(tensor)
            tensors += [Tensor(tensor.name.replace("ssm_ba", f"ssm_{part}"), half, Q4_K) for part in ("beta", "alpha")]
    more = {".block_count": n_layer + 1, ".nextn_predict_layers": 1, ".rope.dimension_sections": [11, 11, 10, 0]}
    return dataclasses.replace(
        shape, architecture="qwen35moe", metadata={**shape.metadata, **more}, tensors=(*tensors, *own)
    )


@pytest.fixture(scope="module")
def mtp_model(directory: Path) -> Path:
    path = directory / "mtp.gguf"
    shapes.write_shape(with_mtp(shapes.SHAPES["qwen3-next-80b-a3b"]), path, vocab=False)
    return path


@named_cases(("as llama-server does", 1, None), ("four slots, two tokens", 4, 2))
def test_prediction_layers_take_what_their_context_takes(slots: int, n_max: int | None, mtp_model: Path) -> None:
    gpus = ["rtx-5090", "24GiB"]
    plan = fit(mtp_model, gpus, n_ctx=8192, mtp=True, n_seq_max=slots, draft_max=n_max, type_k_draft="q8_0")
    assert plan.fits and plan.params.load_mtp and plan.params.n_rs_seq == (n_max or 3)
    second = dataclasses.replace(
        plan.params, ctx_type="mtp", n_rs_seq=0, n_outputs_max=slots, type_k="q8_0", n_ctx=plan.breakdown.n_ctx
    )
    with Worker(parse_gpus(gpus)) as worker:
        alone = worker.measure(mtp_model, second)
        own = worker.measure(mtp_model, plan.params)
        plain = worker.measure(mtp_model, dataclasses.replace(plan.params, load_mtp=False, n_rs_seq=0))
    assert own == plan.breakdown
    (shared,) = plan.shared
    for name in ("CUDA0", "CUDA1"):
        assert shared.on(name) == alone.on(name).context + alone.on(name).compute
    assert shared.on(None) == alone.host.context + alone.host.compute
    assert sum(row.context for row in shared.rows) > 0 == sum(row.model for row in shared.rows)
    assert sum(row.model for row in own.rows) > sum(row.model for row in plain.rows), "the layer's weights are loaded"
    assert sum(row.context for row in own.rows) > sum(row.context for row in plain.rows), "states to go back to"
    words = " ".join(plan.arguments())
    assert "--spec-type draft-mtp -ctkd q8_0" in words
    assert ("--spec-draft-n-max 2" in words) == (n_max == 2)
    assert plan.search.shared_loads == 0


@named_cases(
    ("as it is", {}),
    ("four slots", {"n_seq_max": 4, "draft_max": 2}),
    ("types", {"type_k_draft": "q8_0", "type_k": "q8_0"}),
    ("layers on the host", {"n_gpu_layers": 20}),
)
def test_llama_servers_own_code_predicts_with_the_same_bytes(
    given: dict[str, Any], server: Path, mtp_model: Path
) -> None:
    cards = ["rtx-5090", "24GiB"]
    plan = fit(mtp_model, cards, n_ctx=8192, mtp=True, **given)
    main, second = drafting.takes(server, mtp_model, parse_gpus(cards), plan.arguments())
    assert plan.fits
    for name in ("CUDA0", "CUDA1"):
        (device,) = [device for device in plan.devices if device.name == name]
        assert main.get(name, (0, 0, 0)) == (device.model, device.context, device.compute)
        assert sum(second.get(name, (0, 0, 0))) == device.shared
    assert sum(second["host"]) == plan.host.shared


# --- projectors and adapters


@pytest.fixture(scope="module")
def projector(directory: Path) -> Path:
    return write_projector(directory / "mmproj.gguf")


@pytest.fixture(scope="module")
def adapters(directory: Path, main_model: Path) -> tuple[Path, Path]:
    return (
        write_lora(directory / "first.gguf", main_model),
        write_lora(directory / "second.gguf", main_model, rank=64),
    )


@cases("CUDA0", "CUDA1", "none")
def test_a_projector_adds_what_libmtmd_says(place: str, main_model: Path, projector: Path) -> None:
    pins: dict[str, Any] = {"n_ctx": 4096, "tensor_split": (2, 3)}
    without = fit(main_model, **pins)
    plan = fit(main_model, mmproj=projector, mmproj_device=place, **pins)
    with Worker(parse_gpus(GPUS)) as worker:
        rows = worker.projector(projector, device=None if place == "none" else place)
    said = {"CUDA0": 0, "CUDA1": 0, "host": 0}
    for row in rows:
        said[row.device or "host"] += row.used
    assert more(plan, without) == said and any(said.values())
    assert plan.breakdown == without.breakdown
    assert f"--mmproj {projector} -mmdev {place} -fit off" in " ".join(plan.arguments())


def test_limits_of_images_reach_the_plan(main_model: Path, directory: Path) -> None:
    dynamic = write_projector(directory / "dynamic.gguf", TinyProjector("lfm2", scale_factor=2))
    sizes = []
    for most in (None, 1024):
        plan = fit(main_model, n_ctx=4096, mmproj=dynamic, image_max_tokens=most)
        sizes.append(plan.devices[0].shared)
        assert ("--image-max-tokens 1024" in " ".join(plan.arguments())) == (most is not None)
    assert 0 < sizes[0] < sizes[1]


def test_adapters_add_what_they_take_where_the_layers_are(main_model: Path, adapters: tuple[Path, Path]) -> None:
    first, second = adapters
    pins: dict[str, Any] = {"n_ctx": 4096, "tensor_split": (2, 3)}
    without = fit(main_model, **pins)
    plan = fit(main_model, lora=[first], lora_scaled=f"{second}:0.5", **pins)
    with Worker(parse_gpus(GPUS)) as worker:
        alone = worker.measure(main_model, plan.params)
    assert [use.name for use in plan.shared] == [str(first), str(second)] == [lora.path for lora in plan.params.lora]
    for use, rows in zip(plan.shared, alone.lora, strict=True):
        for name in ("CUDA0", "CUDA1"):
            assert use.on(name) == sum(row.used for row in rows if row.device == name) > 0
    assert plan.breakdown == alone
    for device, before in zip(plan.devices, without.devices, strict=True):
        assert (device.model, device.context) == (before.model, before.context)
        assert device.used == device.model + device.context + device.compute + device.shared
    assert f"--lora {first} --lora-scaled {second}:0.5" in " ".join(plan.arguments())
    twice = fit(main_model, lora=adapters, **pins)
    assert f"--lora {first},{second} -fit off" in " ".join(twice.arguments())


def test_everything_at_once_is_the_sum(
    main_model: Path, draft: Path, projector: Path, adapters: tuple[Path, Path]
) -> None:
    pins: dict[str, Any] = {"n_ctx": 4096, "tensor_split": (2, 3)}
    things: list[dict[str, Any]] = [
        {"model_draft": draft, "devices_draft": ["CUDA1"]},
        {"mmproj": projector, "mmproj_device": "CUDA1"},
        {"lora": adapters},
        {"reserve": {"CUDA0": 7 * MIB, "host": 5 * MIB}},
    ]
    plan = fit(main_model, **{name: value for thing in things for name, value in thing.items()}, **pins)
    alone = [fit(main_model, **thing, **pins) for thing in things]
    assert sorted(use.kind for use in plan.shared) == ["draft", "lora", "lora", "projector", "reserve"]
    for d, device in enumerate(plan.devices):
        assert device.shared == sum(each.devices[d].shared for each in alone)
        assert device.shared == sum(use.on(device.name) for use in plan.shared)
    assert plan.host.shared == sum(each.host.shared for each in alone)


@named_cases(
    ("a draft model", ("4GiB", "1GiB"), {"model_draft": "draft", "devices_draft": ["CUDA0"]}, 8192),
    ("a projector", ("4GiB", "1GiB"), {"mmproj": "projector", "mmproj_device": "CUDA0"}, 8192),
    ("reserved memory", ("8GiB", "6GiB"), {"reserve": {"CUDA0": "2GiB"}}, None),
    ("reserved memory of a card", ("rtx-4090", "rtx-3060-12gb"), {"reserve": {"CUDA0": "2GiB"}}, 16384),
)
def test_a_plan_is_the_one_of_a_device_with_that_much_less(
    cards: Sequence[str], given: dict[str, Any], n_ctx: int | None, large: Path, draft: Path, projector: Path
) -> None:
    files = {"draft": draft, "projector": projector}
    plan = fit(large, cards, n_ctx=n_ctx, **{name: files.get(str(value), value) for name, value in given.items()})
    first, second = parse_gpus(cards)
    size = plan.devices[0].shared
    less = dataclasses.replace(first, free=first.free - size)
    other = fitter.fit(large, gpus=(less, second), n_ctx=n_ctx, margin=0, host_bandwidth="60GB/s")
    assert (plan.params, plan.breakdown) == (other.params, other.breakdown)
    assert [device.left for device in plan.devices] == [device.left for device in other.devices]
    assert plan.devices[0].free - size == other.devices[0].free
    if "reserve" in given:
        assert (size, plan.estimate, plan.bound) == (2048 * MIB, other.estimate, other.bound)
    else:
        assert plan.params.tensor_buft_overrides, "the model does not fit, so that every byte counts"


def test_a_projector_goes_where_the_model_leaves_room(large: Path, directory: Path) -> None:
    """The draft model and the projector each have their place chosen; the host is for where no device has room."""
    wide = TinyProjector(n_embd=1024, n_ff=4096, n_layer=12, n_head=16)
    projector = write_projector(directory / "wide.gguf", wide)
    whole = fit(large, ["rtx-4090"], n_ctx=8192)
    free = whole.devices[0].used + 8 * MIB
    plan = fit(large, [f"rtx-4090:free={free // MIB}MiB", "gtx-1060-6gb"], n_ctx=8192, mmproj=projector)
    assert [use.on("CUDA1") > 0 for use in plan.shared] == [True]
    assert plan.breakdown == whole.breakdown
    tight = fit(large, [f"rtx-4090:free={free // MIB}MiB"], n_ctx=8192, mmproj=projector, mmproj_device="none")
    assert tight.breakdown == whole.breakdown and tight.shared[0].on(None) == tight.host.shared > 0


def test_adapters_and_a_load(main_model: Path, adapters: tuple[Path, Path]) -> None:
    first, second = adapters
    plain = fitter.fit(main_model, devices=["none"], n_ctx=512, host_margin=0).load(verbose=False)
    plan = fitter.fit(main_model, devices=["none"], n_ctx=512, lora_scaled=f"{first}:4", host_margin=0)
    llm = plan.load(verbose=False)
    prompt = list(range(3, 20))
    for each in (plain, llm):
        each.reset()
        each.eval(prompt)
    logits = [each._ctx.get_logits_ith(-1)[: each.n_vocab()] for each in (plain, llm)]
    assert any(logits[0])
    assert logits[0] != logits[1], "the adapter is applied"
    for each in (plain, llm):
        each.close()
    with pytest.raises(errors.UsageError, match="contradicts the plan"):
        plan.load(lora_path=str(second), verbose=False)
    both = fitter.fit(main_model, devices=["none"], n_ctx=512, lora=[first, second], host_margin=0)
    with pytest.raises(errors.PlanError, match="takes one LoRA adapter, but the plan has 2"):
        both.load(verbose=False)


# --- reserved memory


def test_host_memory_can_be_reserved(large: Path) -> None:
    given: dict[str, Any] = {"n_ctx": 4096, "n_ubatch": 512, "flash_attn": "on"}
    given |= {"host_memory": "6GiB", "host_margin": 0}
    plan = fit(large, ["1GiB"], **given)
    assert plan.fits
    room = (plan.host.left or 0) // MIB
    assert fit(large, ["1GiB"], reserve=[f"host={room}MiB"], **given).fits
    over = fit(large, ["1GiB"], reserve=[f"host={room}MiB", "host=1MiB"], **given)
    assert not over.fits and over.host.shared == (room + 1) * MIB
    assert over.problems[0].device == "host"


# --- what is wrong


def test_a_negative_reservation_of_python() -> None:
    with pytest.raises(errors.UsageError, match="is -1 bytes"):
        fitter.fit("model.gguf", gpus=["1GiB"], reserve={"CUDA0": -1})


def test_the_table_and_the_json_have_a_line_for_each(main_model: Path, draft: Path, command: Command) -> None:
    words = ["--gpu", "1GiB", "-c", "4096", "-fitt", "0", "-md", draft, "--reserve", "CUDA0=64MiB"]
    status, out, err = command(main_model, "-v", *words)
    assert status == 0 and "reserved: 64.0 MiB on CUDA0\n" in err
    assert f"draft model {draft.name}: " in err and " on CUDA0, " in err
    assert f"-md {draft}" in out
    plan = fit(main_model, ["1GiB"], n_ctx=4096, model_draft=draft, reserve=["CUDA0=64MiB"]).to_dict()
    assert [entry["kind"] for entry in plan["shared"]] == ["reserve", "draft"]
    assert plan["shared"][0]["memory"] == [{"device": "CUDA0", "model": 0, "context": 0, "compute": 64 * MIB}]
    rows = [row for entry in plan["shared"] for row in entry["memory"] if row["device"] == "CUDA0"]
    total = sum(row[kind] for row in rows for kind in ("model", "context", "compute"))
    assert plan["devices"][0]["shared"] == total
    assert plan["devices"][0]["left"] == plan["devices"][0]["free"] - plan["devices"][0]["used"]


# --- for other programs


def test_the_python_script_plans_the_same_again(
    main_model: Path, draft: Path, projector: Path, adapters: tuple[Path, Path]
) -> None:
    beside: dict[str, Any] = {"model_draft": draft, "type_k_draft": "q8_0", "mmproj": projector, "lora": adapters[0]}
    beside |= {"lora_scaled": f"{adapters[1]}:0.5", "reserve": {"CUDA0": 5 * MIB, "host": 7}}
    plan = fit(main_model, n_ctx=4096, n_seq_max=2, **beside)
    again = fitter.fit(main_model, gpus=GPUS, host_bandwidth="60GB/s", **fit_kwargs(plan))
    assert (again.params, again.breakdown) == (plan.params, plan.breakdown)
    assert again.shared == plan.shared
    assert f'model_draft="{draft}"' in plan.format("python")


def test_the_python_script_of_prediction_layers(mtp_model: Path) -> None:
    gpus = ["rtx-5090", "24GiB"]
    plan = fit(mtp_model, gpus, n_ctx=4096, mtp=True, draft_max=2)
    again = fitter.fit(mtp_model, gpus=gpus, host_bandwidth="60GB/s", **fit_kwargs(plan))
    assert (again.params, again.shared) == (plan.params, plan.shared)
    alone = dataclasses.replace(plan, params=Params(n_ctx=4096, load_mtp=True))
    with pytest.raises(errors.PlanError, match="no parameter for the layers for multi-token prediction"):
        alone.llama_kwargs()
