"""What attention without flash attention takes beyond llama.cpp's count: the rule, and what real cards took."""

from __future__ import annotations

import csv
from dataclasses import replace
from typing import Any

from fitter.llama.types import Breakdown, Params, Row
from fitter.planning.plan.plan import ModelSummary, Plan
from fitter.planning.request.request import Request
from fitter.planning.search import scratch
from fitter.planning.search.best_plan import fit
from fitter.planning.search.load_reserve import reserve_for
from fitter.planning.speed.model_facts import LayerFacts, ModelFacts
from tests.support.cases import cases, named_cases
from tests.support.real_cards import DATA
from tests.support.synthetic import MIB, SyntheticLlama, SyntheticModel, limits, load_calls, priced, request

MODEL = SyntheticModel()


def facts(*layers: LayerFacts, window: int = 0) -> ModelFacts:
    return ModelFacts(len(layers), layers, (), 4096, 0, 0, window)


def asked(of: ModelFacts | None, buffer_type: str = "CUDA0") -> Request:
    (device,) = limits(1)
    return replace(request(MODEL, (replace(device, buffer_type=buffer_type),)), facts=of)


def measured(n_ctx: int, flash_attn: bool | None = False, context: int = 1) -> Breakdown:
    return Breakdown((Row("CUDA0", "CUDA0", False, 1, context, 1),), ("CUDA0",), n_ctx, flash_attn)


HEADS = facts(LayerFacts((), n_head=0), LayerFacts((), n_head=32))
WINDOWED = facts(LayerFacts((), n_head=16), LayerFacts((), n_head=40, is_windowed=True), window=1000)
MANY = Params(n_seq_max=4)


@named_cases(("the margin holds it", 0), ("a byte more", 1))
def test_a_search_counts_what_a_margin_does_not_hold(more: int) -> None:
    breakdown = measured(4096)
    (size,) = scratch.scores_of(asked(HEADS), Params(), breakdown).values()
    (device,) = limits(1)
    wanted = replace(asked(HEADS), devices=(replace(device, margin=size + scratch.others() - more),))
    counted = scratch.beyond_margins(wanted, Params(), breakdown)
    assert counted.on("CUDA0").compute == breakdown.on("CUDA0").compute + more
    assert (counted == breakdown) is (more == 0)


@named_cases(
    ("all cells", asked(HEADS), Params(), measured(4096), {"CUDA0": 4096 * 512 * 32 * 2}),
    ("a card of AMD's", asked(HEADS, "ROCm0"), Params(), measured(4096), {"CUDA0": 4096 * 512 * 32 * 2}),
    ("a larger micro batch", asked(HEADS), Params(n_ubatch=2048), measured(4096), {"CUDA0": 4096 * 2048 * 32 * 2}),
    ("a small batch", asked(HEADS), Params(n_batch=64), measured(4096), {"CUDA0": 4096 * 64 * 32 * 2}),
    ("a cache for each sequence", asked(HEADS), MANY, measured(4096), {"CUDA0": 1024 * 512 * 32 * 2}),
    ("one for all", asked(HEADS), replace(MANY, kv_unified=True), measured(4096), {"CUDA0": 4096 * 512 * 32 * 2}),
    ("short windows", asked(WINDOWED), Params(), measured(8192), {"CUDA0": 8192 * 512 * 16 * 2}),
    ("windows of more heads", asked(WINDOWED), Params(), measured(2048), {"CUDA0": 1512 * 512 * 40 * 2}),
    ("windows kept whole", asked(WINDOWED), Params(swa_full=True), measured(8192), {"CUDA0": 8192 * 512 * 40 * 2}),
    ("flash attention", asked(HEADS), Params(), measured(4096, True), {}),
    ("it is not known", asked(HEADS), Params(), measured(4096, None), {}),
    ("values of 32 bits", asked(HEADS), Params(type_v="f32"), measured(4096), {}),
    ("another backend", asked(HEADS, "Vulkan0"), Params(), measured(4096), {}),
    ("the cache is elsewhere", asked(HEADS), Params(), measured(4096, context=0), {}),
    ("no attention", asked(facts(LayerFacts(()))), Params(), measured(4096), {"CUDA0": 0}),
)
def test_the_rule(wanted: Request, params: Params, breakdown: Breakdown, expected: dict[str, int]) -> None:
    assert scratch.scores_of(wanted, params, breakdown) == expected


@cases((1 + 1 + 7 * MIB, False), (1 + 1 + 7 * MIB - 1, True))
def test_it_adds_to_what_a_real_load_takes_more(free: int, is_short: bool) -> None:
    wanted = asked(HEADS)
    (device,) = wanted.devices
    scores = 4096 * 512 * 32 * 2
    limit = replace(device, free=free + scores + scratch.others(), margin=0)
    wanted = replace(wanted, devices=(limit,), fixed=frozenset({"n_ctx"}))
    found = Breakdown((Row("CUDA0", "CUDA0", False, 1, 1, 0, 7 * MIB),), ("CUDA0",), 4096, False)
    room = reserve_for(wanted, found, Params())
    assert room == ({"CUDA0": 7 * MIB + scores + scratch.others(), "host": 0} if is_short else {})


# --- real cards

N_HEAD = {"llama31-8b": 32, "llama-3.1-8b@4": 32, "llama-3.1-70b": 64, "gemma3-12b@18": 16, "dsv2lite": 16}
N_HEAD |= {"deepseek-v3.1@4": 128}


def taken_by_cards() -> list[dict[str, Any]]:
    with (DATA / "beyond.csv").open(newline="", encoding="utf-8") as file:
        return [
            {name: int(value) if value.isdigit() else value for name, value in row.items()}
            for row in csv.DictReader(file)
        ]


def said_of(row: dict[str, Any], tokens: int, n_ubatch: int) -> int:
    """Bytes at so many tokens of each sequence in the cache, whose cells in use are a multiple of 256."""
    params = Params(
        n_batch=max(2048, n_ubatch),
        n_ubatch=n_ubatch,
        n_seq_max=row["n_seq_max"],
        kv_unified=bool(row["kv_unified"]),
        type_v=row["type_v"],
    )
    cells = -(-tokens * row["n_seq_max"] // 256) * 256
    wanted = asked(facts(LayerFacts((), n_head=N_HEAD[row["model"]])))
    return scratch.scores_of(wanted, params, measured(cells)).get("CUDA0", 0)


def test_the_rule_is_what_cards_took() -> None:
    """With the last micro batch, or the one before, which is a whole one."""
    rows = [row for row in taken_by_cards() if row["flash_attn"] == "off"]
    assert len(rows) == 14
    for row in rows:
        tokens, n_ubatch = row["tokens"], row["n_ubatch"]
        rest = tokens % n_ubatch
        said = max(said_of(row, tokens - rest, n_ubatch), said_of(row, tokens, rest))
        assert said < row["at_most"] < said + scratch.others(), row


def test_a_margin_is_enough_with_flash_attention() -> None:
    rows = [row["at_most"] for row in taken_by_cards() if row["flash_attn"] == "auto"]
    assert len(rows) == 68 and max(rows) < 512 * MIB


# --- plans


def plan_of(mib: int, flash_attn: str, fixed: tuple[str, ...] = (), n_ctx: int = 0, buffer_type: str = "CUDA0") -> Plan:
    """A plan with a host that has nothing but what is always there, where the context is fixed."""
    (device,) = limits(mib)
    params = Params(flash_attn=flash_attn, n_ctx=n_ctx)  # type: ignore[arg-type]
    devices = (replace(device, buffer_type=buffer_type),)
    wanted = request(MODEL, devices, 111 if n_ctx else None, params, fixed=("flash_attn", *fixed))
    llama = SyntheticLlama(MODEL, wanted.devices)
    calls = load_calls(llama)
    return fit(priced(wanted, MODEL), ModelSummary("m", "m", "llama", 0), calls, lambda _: None, True)


def test_a_plan_leaves_room_for_it() -> None:
    room = 2 * 512 * 32
    on, off = plan_of(3000, "on"), plan_of(3000, "off")
    assert on.fits and off.fits
    (use,) = off.devices
    assert use.left >= off.params.n_ctx * room + scratch.others()
    # and not much more of it: the context is as long as it can be with both
    per_token = use.context / off.params.n_ctx + room
    assert use.left < off.params.n_ctx * room + scratch.others() + 600 * per_token
    assert off.params.n_ctx < on.params.n_ctx


def test_a_plan_without_room_for_it_does_not_fit() -> None:
    fixed = ("n_ctx", "n_gpu_layers")
    whole = plan_of(100_000, "off", fixed, 32768)
    (use,) = whole.devices
    needed = (use.used + 32768 * 512 * 32 * 2 + scratch.others()) // MIB + 1
    assert plan_of(needed, "off", fixed, 32768).fits
    short = plan_of(needed - 100, "off", fixed, 32768)
    assert [problem.device for problem in short.problems] == ["CUDA0"]
    assert plan_of(needed - 100, "on", fixed, 32768).fits
    assert plan_of(needed - 100, "off", fixed, 32768, "Vulkan0").fits
