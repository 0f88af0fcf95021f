"""From what is asked to the request: what is kept, on which devices, with which margins, for which workload."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fitter.errors import UsageError
from fitter.llama.types import DeviceInfo, Params, TensorInfo
from fitter.machine.machine import Machine, device_speeds, virtual_machine
from fitter.machine.measured import Calibrated
from fitter.machine.speed import HostSpeed
from fitter.model.header import Model
from fitter.parameters.table import PARAMETERS
from fitter.planning.placing.host_flags import host_overrides
from fitter.planning.placing.layer_sizes import HOST
from fitter.planning.plan.request_of_machine import Questions, limits_beside, request_of
from fitter.planning.request.ask import Ask
from fitter.planning.request.request import Request
from fitter.planning.request.session import named
from fitter.planning.speed.cost import Workload
from fitter.text import MIB
from tests.support.cases import cases, named_cases, stored
from tests.support.placements import model_of
from tools.models.shapes import SHAPES

GPUS = ["24GiB", "8GiB"]
HOST_SPEED = HostSpeed(4e10, "said here")
NAMES = ("token_embd.weight", *(f"blk.{i}.ffn_{kind}.weight" for i in range(4) for kind in ("up", "down")))


def model(n_ctx_train: int = 32768, *, experts: bool = False) -> Model:
    names = (*NAMES, *(["blk.1.ffn_up_exps.weight"] if experts else []))
    tensors = tuple(TensorInfo(name, "f16", (8,), 16) for name in names)
    path = Path("model.gguf")
    return Model(path, (path,), "model", "llama", 16 * len(names), 4, 0, n_ctx_train, 8 * experts, tensors, {})


def match(patterns: Sequence[str], names: Sequence[str]) -> tuple[int, ...]:
    return tuple(next((i for i, one in enumerate(patterns) if re.search(one, name)), -1) for name in names)


class Asked:
    """Answers, and notes of which devices the speed was wanted."""

    def __init__(self, machine: Machine) -> None:
        self.speeds: list[str] = []
        self._machine = machine
        self.questions = Questions(match, self._speeds_of, lambda: HOST_SPEED)

    def _speeds_of(self, infos: Sequence[DeviceInfo]) -> dict[str, Any]:
        self.speeds += [info.name for info in infos]
        return device_speeds(infos, infos, self._machine.virtual, lambda *_: pytest.fail("nothing is measured"))


def ask(**words: Any) -> Ask:
    return Ask.of({name: PARAMETERS[name].check(value) for name, value in words.items()})  # type: ignore[arg-type]


def machine_of(asked: Ask) -> Machine:
    return virtual_machine(asked.virtual, asked.host_memory)


def request(of: Model | None = None, known: Sequence[Calibrated] = (), **words: Any) -> Request:
    asked = ask(**{"gpus": GPUS, **words})
    machine = machine_of(asked)
    return request_of(asked, of or model(), machine, Asked(machine).questions, known)


@named_cases(
    ("nothing", {}, set()),
    ("a context", {"n_ctx": 512}, {"n_ctx"}),
    ("the model's own context", {"n_ctx": 0}, {"n_ctx"}),
    ("room for all slots", {"kv_unified_per_slot": 512}, {"n_ctx"}),
    ("layers", {"n_gpu_layers": 3}, {"n_gpu_layers"}),
    ("shares", {"tensor_split": [3, 1]}, {"tensor_split"}),
    ("shares of nothing", {"tensor_split": [0, 0]}, set()),
    ("devices", {"devices": ["CUDA1"]}, {"devices"}),
    ("no devices", {"gpus": ["none"]}, {"devices"}),
    ("one device", {"split_mode": "none"}, {"devices", "split_mode"}),
    ("layers over devices", {"split_mode": "layer"}, {"split_mode"}),
    (
        "what levers change",
        {"n_ubatch": 256, "type_k": "f16", "type_v": "f16", "op_offload": True},
        {"n_ubatch", "type_k", "type_v", "op_offload"},
    ),
    ("texts at once", {"embedding": True}, {"n_ubatch"}),
    ("an override", {"override_tensor": "ffn_up=CUDA1"}, set()),
    ("an override on a device that is left out", {"override_tensor": "ffn_up=CUDA1", "margin": 9 << 30}, {"devices"}),
    ("an override on a device without a byte", {"override_tensor": "ffn_up=CUDA1", "margin": 8 << 30}, {"devices"}),
    ("an override on a device with one", {"override_tensor": "ffn_up=CUDA1", "margin": (8 << 30) - 1}, set()),
    ("an override on the host", {"override_tensor": "ffn_up=CPU", "margin": 9 << 30}, set()),
    ("a batch", {"n_batch": 1024}, {"n_batch"}),
    ("what is only passed on", {"swa_full": True, "main_gpu": 1}, set()),
)
def test_what_is_kept(words: dict[str, Any], fixed: set[str]) -> None:
    assert request(**words).fixed == fixed


@cases(stored("planning_request_of_machine", "the_devices"))
def test_the_devices(words: dict[str, Any], names: list[str]) -> None:
    found = request(**words)
    assert [device.name for device in found.devices] == names
    assert list(found.speeds) == names


@named_cases(
    ("a device that there is not", {"devices": ["CUDA7"]}, "unknown device 'CUDA7'; there are: CUDA0, CUDA1"),
    ("a device twice", {"devices": ["CUDA0", "CUDA0"]}, "a device is named twice"),
    (
        "a main GPU that there is not",
        {"split_mode": "none", "main_gpu": 2},
        "main GPU 2 does not exist: the number of devices is 2",
    ),
    ("too many margins", {"margin": [0, 0, 0]}, "3 margins for 2 devices"),
    ("more than the context", {"n_ctx": 512, "prompt": 500, "generate": 13}, "for a larger -c"),
    ("more than the model's own", {"prompt": 32768}, "it has no larger one"),
    ("a context beyond all reason", {"n_ctx": 2**30}, "give 4194304 at most"),
)
def test_what_makes_no_sense_there(words: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        request(**words)


@cases(stored("planning_request_of_machine", "notes"))
def test_what_has_no_effect_is_noted(words: dict[str, Any], notes: list[str]) -> None:
    assert list(request(**words).notes) == notes


@cases(1, 1000, 4096, 8192)
def test_the_smallest_context_changes_no_request(fit_ctx: int) -> None:
    found = request(fit_ctx=fit_ctx)
    assert (found.workload, found.fit_ctx) == (request().workload, fit_ctx)


@named_cases(
    ("the smallest context holds it", {}, Workload(2048, 512), 4096),
    ("a small context", {"n_ctx": 1000}, Workload(250, 200), 4096),
    ("a small context for each", {"n_ctx": 4000, "n_seq_max": 4}, Workload(250, 200), 4096),
    ("a small smallest one", {"fit_ctx": 500}, Workload(2048, 512), 500),
    ("a small smallest one beside a large context", {"n_ctx": 20000, "fit_ctx": 500}, Workload(5000, 512), 500),
    ("the model's own context, said so", {"n_ctx": 0, "fit_ctx": 500}, Workload(8192, 512), 500),
    ("the depth of a large context", {"n_ctx": 32768}, Workload(8192, 512), 4096),
    ("the depth of each slot", {"n_ctx": 32768, "n_seq_max": 2}, Workload(4096, 512), 4096),
    ("of slots that share", {"n_ctx": 32768, "n_seq_max": 2, "kv_unified": True}, Workload(8192, 512), 4096),
    ("a long answer in a large context", {"n_ctx": 32768, "generate": 30000}, Workload(2768, 30000), 32768),
    ("a prompt in a large context", {"n_ctx": 32768, "prompt": 100}, Workload(100, 512), 4096),
    ("users in a large context", {"n_ctx": 32768, "n_seq_max": 2, "users": 2}, Workload(2048, 512, 0, 2), 4096),
    ("a large context that may shrink", {"n_ctx": 32768, "allow": ["context"]}, Workload(2048, 512), 4096),
    (
        "a context for each slot",
        {"kv_unified_per_slot": 1000, "n_seq_max": 2, "fit_ctx": 500},
        *(Workload(250, 200), 500),
    ),
    ("a long prompt wants a long context", {"prompt": 9000}, Workload(9000, 512), 9512),
    ("a long answer does", {"generate": 9000}, Workload(2048, 9000), 11048),
    (
        "a conversation to its end",
        {"workload": "prompt=6000,reused=0.5,answer=500,turns=5,users=2", "program": "llama-server"},
        # prompts of 3000 are new in the four last turns, and 3000 in the first
        *(Workload(3000, 500, 3000, 2, is_text=True), 6000 + 2 * 3500 + 500),
    ),
    (
        "several in one cache",
        {"workload": "prompt=6000,answer=500,users=2", "program": "llama-server", "kv_unified": True},
        *(Workload(6000, 500, 0, 2, is_unified=True, is_text=True), 2 * 6500),
    ),
    ("more users than slots", {"users": 8, "n_seq_max": 2}, Workload(2048, 512, 0, 2), 4096),
    ("a short one does not", {"prompt": 10, "generate": 10}, Workload(10, 10), 4096),
)
def test_what_to_be_fast_at(words: dict[str, Any], workload: Workload, fit_ctx: int) -> None:
    found = request(**words)
    assert (found.workload, found.fit_ctx) == (workload, fit_ctx)


@named_cases(
    ("to the model's own context", {"workload": "agent"}, None, "scaled to the model's own context, 32768 tokens for"),
    ("to -c", {"workload": "agent", "n_ctx": 8192}, None, "scaled to -c, 8192 tokens for each user"),
    ("to the part of a user", {"workload": "agent,users=2", "n_ctx": 8192}, None, "scaled to -c, 4096 tokens"),
    ("a gap and users are no tokens", {"workload": "agent,gap=1", "users": 3, "n_ctx": 8192}, None, "2730 tokens"),
    (
        "one request",
        {"workload": "rag", "n_ctx": 2048},
        Workload(1926, 120, is_text=True),
        "1926 + 120 tokens, not 4096 + 256",
    ),
    ("what fits stays", {"workload": "chat", "n_ctx": 8192}, None, ""),
)
def test_a_named_kind_of_work_is_scaled(words: dict[str, Any], workload: Workload | None, note: str) -> None:
    found = request(**words, program="llama-server")
    assert found.session is not None
    context = found.params.n_ctx // found.params.n_seq_max
    usual = named()[words["workload"].partition(",")[0]]
    assert 0.98 * min(usual.longest, context) < found.session.longest <= context
    assert (found.session.turns, found.session.reused) == (usual.turns, usual.reused)
    assert found.fit_ctx == max(4096, found.session.longest)
    assert workload in (None, found.workload)
    assert [note in each for each in found.notes] == ([True] if note else [])


@named_cases(
    ("a share with the digits of a log", {"workload": "prompt=50000,reused=0.912345678,answer=380,turns=30,gap=2.5s"}),
    ("a name, with a number", {"workload": "agent,turns=20"}),
    ("no reuse", {"workload": "prompt=50000", "users": 2}),
    ("-c", {"workload": "prompt=1000", "n_ctx": 512}),
)
def test_numbers_of_the_users_own_are_refused_with_words_that_work(words: dict[str, Any]) -> None:
    words = {**words, "program": "llama-server"}
    with pytest.raises(UsageError, match="is more than a context of") as refused:
        request(**words)
    found = request(**{**words, "workload": re.search("--workload ([^ ]+[0-9])", str(refused.value))[1]})  # type: ignore[index]
    assert found.session is not None
    context = found.params.n_ctx // found.params.n_seq_max
    assert 0.98 * context < found.session.longest <= context
    if larger := re.search("larger -c, ([0-9]+)", str(refused.value)):
        assert request(**{**words, "n_ctx": int(larger[1])}).session is not None


def encoder(pooling: int = 1, *, is_causal: bool = False) -> Model:
    metadata = {"general.architecture": "llama", "llama.pooling_type": pooling, "llama.attention.causal": is_causal}
    return replace(model(2048), metadata=metadata)


SERVER, PYTHON = "llama-server", "llama-cpp-python"
CAUSAL = encoder(3, is_causal=True)
WIDE: dict[str, Any] = {"n_batch": 4096, "n_ubatch": 512}


def held(batch: int, micro_batch: int, note: str = "", of: Model | None = None, **words: Any) -> Any:
    """The batches of a model that reads texts, what is noted, and what is asked."""
    return of or encoder(), words, (batch, micro_batch), note


INPUTS = {
    "as long as the model's own context": held(2048, 2048),
    "as long as -c": held(1024, 1024, n_ctx=1024),
    "as long as a slot's part": held(512, 512, n_ctx=1024, n_seq_max=2),
    "as long as slots share": held(1024, 1024, n_ctx=1024, n_seq_max=2, kv_unified=True),
    "a token of each sequence": held(64, 64, n_ctx=1024, n_seq_max=64),
    "the last token of a causal model": held(512, 512, of=CAUSAL),
    "the same, for Llama": held(2048, 512, of=CAUSAL, program=PYTHON),
    "another pooling of it": held(2048, 2048, of=CAUSAL, pooling_type="mean"),
    "the last token of an encoder": held(2048, 2048, of=encoder(3)),
    "the user's micro batch": held(8, 8, "with -ub 8, inputs of more than 8 tokens are refused,", n_ubatch=8),
    "the user's batch": held(128, 128, "use -b 2048, or leave -b out", n_batch=128),
    "both": held(
        *(512, 512),
        "(llama-server lowers -b to 512, as -ub, where it embeds or ranks), although the context of a sequence has "
        "2048: use -b 2048 -ub 2048, or leave -b and -ub out",
        **WIDE,
    ),
    "both, for Llama": held(4096, 512, "inputs of more than 512 tokens are refused, although", program=PYTHON, **WIDE),
    "a batch that is lowered": held(
        *(2048, 2048, "llama-server lowers -b to 2048, as -ub, where it embeds or ranks: leave -b 4096 out"),
        **(WIDE | {"n_ubatch": 2048}),
    ),
    "enough": held(4096, 4096, n_ubatch=4096),
    "a reranker": held(8, 8, "with -ub 8, inputs of", encoder(4), embedding=None, reranking=True, n_ubatch=8),
}


@cases(INPUTS)
def test_batches_hold_a_whole_input(of: Model, words: dict[str, Any], batches: tuple[int, int], note: str) -> None:
    words = {"n_seq_max": 1, "embedding": True, "program": SERVER, **words}
    found = request(of, **{name: value for name, value in words.items() if value is not None})
    assert (found.params.n_batch, found.params.n_ubatch) == batches
    assert [note in each for each in found.notes] == ([True] if note else [])
    assert found.workload.generate == 0
    assert found.workload.prompt <= (batches[1] if note.startswith("with -ub") else 2048)
    if "n_ctx" not in words:
        # a smaller context has smaller batches, unless they are the user's
        smaller = found.with_context(512)
        assert (smaller.n_ctx_min, smaller.n_ctx_max) == (512, 512)
        follows = note == "" and "n_ubatch" not in words
        assert smaller.params.n_batch == (512 if follows else batches[0])


@cases(
    ({"workload": "chat"}, "--workload is for models that answer"),
    ({"users": 3}, "-np 3 answers as many at once"),
    ({"generate": 100}, "--prompt sets the tokens of an input"),
    ({"objective": "generation"}, "--objective prompt is the speed of inputs"),
    ({"prompt": 3000}, "--prompt is 3000, more than the context of 2048: give less"),
    ({"prompt": 3000, "n_ctx": 1024}, "more than the context of 1024: give less, or a larger -c"),
)
def test_what_only_a_model_that_answers_has(words: dict[str, Any], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        request(encoder(), embedding=True, program=SERVER, **words)
    with pytest.raises(UsageError, match=why):
        request(encoder(), reranking=True, program=SERVER, **words)


@named_cases(
    ("the model's own", model(), {}, 32768),
    ("its own for each", model(), {"n_seq_max": 2}, 65536),
    ("one for all", model(), {"n_seq_max": 2, "kv_unified": True}, 32768),
    ("what is set", model(), {"n_ctx": 512}, 512),
    ("a header that does not say", model(n_ctx_train=0), {}, 4096),
    ("the smallest that is wanted of it", model(n_ctx_train=0), {"fit_ctx": 1024}, 1024),
)
def test_the_context(of: Model, words: dict[str, Any], n_ctx: int) -> None:
    assert request(of, **words).params.n_ctx == n_ctx


def test_the_parameters_are_those_that_were_given() -> None:
    experts = host_overrides(False, 1, None, NAMES)[0].pattern
    found = request(n_gpu_layers=2**40, type_k="q8_0", n_cpu_moe=1, override_tensor="a=CPU", devices=["CUDA1"])
    assert replace(found.params, tensor_buft_overrides=()) == Params(n_ctx=32768, n_gpu_layers=5, type_k="q8_0")
    assert [each.pattern for each in found.params.tensor_buft_overrides] == ["a", experts]


def test_where_overrides_put_tensors() -> None:
    found = request(override_tensor=["blk.0=CUDA1", "ffn_up=CPU", "blk.3.ffn_down=CUDA0"])
    ups = {f"blk.{i}.ffn_up.weight": HOST for i in (1, 2, 3)}
    assert found.pinned == {"blk.0.ffn_up.weight": 1, "blk.0.ffn_down.weight": 1, **ups, "blk.3.ffn_down.weight": 0}
    assert request().pinned == {}


KNOWN = Calibrated("CUDA", "Card", 24 << 30, 900 * MIB)
REAL = tuple(
    DeviceInfo(name, description, "gpu", "CUDA", 24 << 30, 20 << 30)
    for name, description in (("CUDA0", "Card"), ("CUDA1", "Another"))
)


@named_cases(
    ("what was measured", {}, [1412, 1024]),
    ("that alone, here and of others like it", {"margin": "auto"}, [1412, 245 + 512]),
    ("one for all", {"margin": "100MiB"}, [100, 100]),
    ("one for each", {"margin": ["100MiB", "200MiB"]}, [100, 200]),
    ("one for each, in an order", {"margin": ["100MiB", "200MiB"], "devices": ["CUDA1", "CUDA0"]}, [100, 200]),
)
def test_margins(words: dict[str, Any], margins: list[int]) -> None:
    machine = Machine(REAL, (), 64 << 30, 60 << 30)
    found = request_of(ask(**words), model(), machine, Asked(machine).questions, (KNOWN,))
    assert [device.margin // MIB for device in found.devices] == margins
    assert (found.host.total, found.host.free) == (64 << 30, 60 << 30)


@named_cases(
    ("nothing", {}, [], ["CUDA0"]),
    ("a draft on the model's own", {"model_draft": "d", "devices_draft": ["CUDA0"]}, [], ["CUDA0", "CUDA1"]),
    (
        "a draft on another",
        {"model_draft": "d", "devices_draft": ["CUDA1"], "margin": 5 * MIB},
        [("CUDA1", 5 * MIB)],
        ["CUDA0", "CUDA1"],
    ),
    (
        "a margin for each of the model's",
        {"mmproj": "p", "mmproj_device": "CUDA1", "margin": [5 * MIB]},
        [("CUDA1", 5 * MIB)],
        ["CUDA0", "CUDA1"],
    ),
    ("a draft that may be anywhere", {"model_draft": "d"}, [], ["CUDA0", "CUDA1"]),
)
def test_what_else_is_there(words: dict[str, Any], limits: list[tuple[str, int]], priced: list[str]) -> None:
    asked = ask(gpus=GPUS, devices=["CUDA0"], **words)
    machine = machine_of(asked)
    told = Asked(machine)
    found = request_of(asked, model(), machine, told.questions)
    assert [(limit.name, limit.margin) for limit in limits_beside(asked, model(), machine, found)] == limits
    assert told.speeds == priced


def test_a_list_of_margins_is_for_the_models_devices() -> None:
    asked = ask(gpus=[*GPUS, "8GiB"], devices=["CUDA0", "CUDA1"], margin=[MIB, 0], mmproj="p", mmproj_device="CUDA2")
    machine = machine_of(asked)
    found = request_of(asked, model(), machine, Asked(machine).questions)
    assert [limit.margin for limit in limits_beside(asked, model(), machine, found)] == [1024 * MIB]


@named_cases(
    # pools with their MiB beyond the margin, devices
    ("a Mac", {"gpus": "metal:64GiB"}, [("MTL0+host", 61440 - 1024)], ["MTL0"]),
    ("with another margin", {"gpus": "metal:64GiB", "host_margin": 0}, [("MTL0+host", 61440)], ["MTL0"]),
    ("a card", {"gpus": "24GiB"}, [], ["CUDA0"]),
    (
        "beside a card",
        {"gpus": ["radeon-890m:32GiB", "24GiB"]},
        [("Vulkan0+host", 31457 - 1024)],
        ["CUDA0", "Vulkan0 at choice"],
    ),
    ("beside a card with a split", {"gpus": ["radeon-890m:32GiB", "24GiB"], "tensor_split": [1]}, [], ["CUDA0"]),
    (
        "beside a card, and named",
        {"gpus": ["radeon-890m:32GiB", "24GiB"], "devices": ["Vulkan0"]},
        [("Vulkan0+host", 31457 - 1024)],
        ["Vulkan0"],
    ),
)
def test_memory_that_is_shared(words: dict[str, Any], pools: list[tuple[str, int]], names: list[str]) -> None:
    found = request(**words)
    assert [(pool.name, pool.target // MIB) for pool in found.pools] == pools
    assert all(pool.input_bytes == 16 for pool in found.pools), "the token embeddings"
    assert [f"{each.name}{'' if each.is_default else ' at choice'}" for each in found.devices] == names
    is_said = "radeon-890m:32GiB" in words["gpus"] and "tensor_split" in words
    assert [note[:18] for note in found.notes] == (["Vulkan0 is not use"] if is_said else [])


def test_a_pool_without_room() -> None:
    with pytest.raises(UsageError, match=r"^MTL0\+host has 1024 MiB of shared memory available, and the margin"):
        request(gpus="metal:5GiB")


def test_servers_alone() -> None:
    """On a machine that is described without a GPU, the devices of its rpc-servers are all that there are."""
    asked = ask(gpus=["none"], rpc=["host:1"])
    infos = tuple(DeviceInfo(f"RPC{i}", "There", "gpu", "RPC", 1 << 33, 1 << 33) for i in range(2))
    machine = Machine(infos, (), None, None)
    questions = Questions(match, lambda infos: {}, lambda: HOST_SPEED)
    found = request_of(asked, model(), machine, questions)
    assert [device.name for device in found.devices] == ["RPC0", "RPC1"]
    assert "devices" in found.fixed


@cases(
    (model(), "blk.1.ffn_up.weight", True),
    (model(), "blk.1.attn_q.weight", False),
    (model(experts=True), "blk.1.ffn_up.weight", False),
    (model(experts=True), "blk.1.ffn_up_exps.weight", True),
)
def test_what_may_be_spilled(of: Model, name: str, is_movable: bool) -> None:
    found = request(of)
    assert found.is_movable(name) is is_movable
    assert found.is_expert_model is of.is_moe


def test_what_is_the_best() -> None:
    allow = ["paging", "kv-q8_0", "ubatch"]
    found = request(objective="context", strategy="llama.cpp", allow=allow, host_memory="64GiB")
    assert (found.objective, found.strategy, found.allow) == ("context", "llama.cpp", {"paging", "kv-q8_0"})
    assert (found.host.paging, found.host.free, found.host.margin) == (True, 64 << 30, 1024 * MIB)
    assert found.host_speed == HOST_SPEED
    assert (found.n_layer, found.model_bytes, found.n_ctx_train) == (4, 144, 32768)
    assert found.facts is not None


def test_a_cache_of_experts_needs_a_device() -> None:
    moe = model_of(SHAPES["qwen3-30b-a3b"])
    assert request(moe, moe_cache_size="2GiB").params.moe_cache_size == 2 * 2**30
    with pytest.raises(UsageError, match="needs a device"):
        request(moe, moe_cache_size="2GiB", gpus=["none"])
