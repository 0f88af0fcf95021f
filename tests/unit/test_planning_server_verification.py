"""What a llama-server said, beside what a plan says: buffer types, what came later, the memory of its process."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

import pytest

from fitter.llama.types import Breakdown, Params, Row
from fitter.output.documents.checked_documents import VERIFICATION
from fitter.output.tables import plan_table
from fitter.output.tables.checked_tables import verification_table
from fitter.planning.checked.verification import Reading, Sizes, compare_rows, growth_of, server_use
from fitter.planning.plan.plan import Plan
from fitter.planning.plan.verified import LaterUse, MemoryGrowth, MemoryUse, ServerUse, Verification, VerifiedRow
from fitter.planning.request.summary import SharedUse
from fitter.programs.finding import ServerProgram
from fitter.programs.later import Later
from fitter.programs.running_server import Resident
from fitter.programs.server_log import Buffer, CachedPrompt, CacheState, Checkpoint, ExpertLookups, Figure, Kind, Said
from fitter.programs.server_requests import Fed
from tests.support.cases import cases, named_cases
from tests.support.plans import GIB, MIB, make_plan

CACHE = 8 * GIB
LATER = (Later("prompt cache", CACHE, 40 * MIB, 204), Later("checkpoints", 128 * MIB, MIB, 128))
PLAN = replace(
    make_plan(
        Params(n_ctx=4096, n_seq_max=4, devices=("CUDA0",)), devices=["CUDA0"], virtual=False, host_free=64 * GIB
    ),
    later=LATER,
    program="llama-server",
)
PLAN = replace(PLAN, host=replace(PLAN.host, later=CACHE + 128 * MIB))
SERVER = ServerProgram("/llama-server", "1 (abcdef0)")
FED = Fed(40, 40, 1000, 4)
TWO = 5243


def buffer(name: str, kind: Kind, mib: float, *, context: int = 0, is_mapped: bool = False) -> Buffer:
    return Buffer(context, name, kind, is_mapped, Figure(round(mib * MIB), TWO))


LOADED = (
    buffer("CUDA0", "model", 2048),
    buffer("CUDA0", "context", 256),
    buffer("CUDA0", "compute", 100),
    buffer("CPU", "model", 4000, is_mapped=True),
    buffer("CPU", "compute", 20),
    buffer("CPU", "output", 1),
)


def differences(plan: Plan, *buffers: Buffer) -> list[tuple[str, str, int]]:
    return [(e.buffer_type, e.kind, e.more) for row in compare_rows(plan, Said(buffers)) for e in row.differences]


def test_what_the_log_says_is_what_was_planned() -> None:
    rows = compare_rows(PLAN, Said(LOADED))
    assert [(row.real.buffer_type, row.real.device, row.real.is_host, row.unsaid) for row in rows] == [
        ("CUDA0", "CUDA0", False, ()),
        ("CPU", None, True, ("model",)),
    ]
    assert rows[0].rounding == Row("CUDA0", "CUDA0", False, TWO, TWO, TWO)
    assert differences(PLAN, *LOADED) == []


@pytest.mark.parametrize("kind", ["model", "context", "compute"])
@pytest.mark.parametrize(("off", "is_seen"), [(TWO, False), (-TWO, False), (TWO + 1, True), (-TWO - 1, True)])
def test_a_difference_is_more_than_the_rounding(kind: Kind, off: int, is_seen: bool) -> None:
    changed = [
        replace(each, size=Figure(each.size.bytes + off, TWO))
        if (each.buffer_type, each.kind) == ("CUDA0", kind)
        else each
        for each in LOADED
    ]
    assert differences(PLAN, *changed) == ([("CUDA0", kind, off)] if is_seen else [])


def test_weights_that_are_not_mapped_are_compared() -> None:
    loaded = [*LOADED[:3], buffer("CPU", "model", 301), LOADED[4]]
    assert differences(PLAN, *loaded) == [("CPU", "model", MIB)]


def test_what_one_side_does_not_have() -> None:
    assert differences(PLAN, *LOADED, buffer("CPU_REPACK", "model", 7)) == [("CPU_REPACK", "model", 7 * MIB)]
    without = [each for each in LOADED if each.buffer_type != "CUDA0"]
    assert differences(PLAN, *without, buffer("CPU", "context", 1)) == [
        *(("CUDA0", kind, -size * MIB) for kind, size in (("model", 2048), ("context", 256), ("compute", 100))),
        ("CPU", "context", MIB),
    ]


def test_what_is_said_of_no_buffer_type_is_not_compared() -> None:
    without = [each for each in LOADED if each.kind != "compute"]
    rows = compare_rows(PLAN, Said(tuple(without)))
    assert all("compute" in row.unsaid for row in rows) and differences(PLAN, *without) == []
    assert all(row.unsaid == ("model", "context", "compute") for row in compare_rows(PLAN, Said()))
    assert len(compare_rows(PLAN, Said())) == 2


def test_a_draft_is_compared_by_device() -> None:
    rows = (Row("CUDA0", "CUDA0", False, 500 * MIB, 30 * MIB, 9 * MIB), Row("Host", None, True, 40 * MIB, 0, 2 * MIB))
    plan = replace(PLAN, shared=(SharedUse("draft", "draft.gguf", rows), SharedUse("reserve", "CUDA0", ())))
    of_draft = [
        buffer("CUDA0", "model", 500, context=1),
        buffer("CPU", "model", 90, context=1, is_mapped=True),
        buffer("CUDA0", "context", 30, context=1),
        buffer("CUDA0", "compute", 9, context=1),
        buffer("CUDA_Host", "compute", 2, context=1),
    ]
    found = compare_rows(plan, Said((*LOADED, *of_draft)))
    assert [row.real.buffer_type for row in found] == ["CUDA0", "CPU", "draft on CUDA0", "draft on host"]
    assert differences(plan, *LOADED, *of_draft) == []
    more = replace(of_draft[2], size=Figure(31 * MIB, TWO))
    assert differences(plan, *LOADED, *of_draft, more) == [("draft on CUDA0", "context", 31 * MIB)]
    use = server_use(plan, SERVER, Said((*LOADED, *of_draft)), FED, None, Sizes())
    assert use.counted == plan.host.used - plan.host.later - (300 + 40) * MIB


SAID = Said(
    LOADED,
    (Checkpoint(60, Figure(MIB // 2, 525)), Checkpoint(600, Figure(MIB, 525))),
    80,
    held=Figure(6 * MIB, 6 * 525),
    cache=CacheState(36, Figure(900 * MIB, 525), Figure(CACHE, 525)),
    cached=(CachedPrompt(67, 1, Figure(3 * MIB, 525)), CachedPrompt(1000, 2, Figure(22 * MIB, 525))),
)
SIZES = Sizes(lambda tokens: tokens * 20 * MIB // 1000, lambda tokens: min(tokens, 600) * MIB // 600)


def test_what_came_later() -> None:
    use = server_use(PLAN, SERVER, SAID, FED, Resident(3 * GIB, 2 * GIB), SIZES)
    assert use.later == (
        LaterUse("checkpoint", 80, 600, MIB, MIB, 525, MIB),
        LaterUse("prompt", 2, 1000, 22 * MIB, 22 * MIB, 525, CACHE),
        LaterUse("prompt cache", 36, None, None, 900 * MIB, 525, CACHE),
    )
    # without the weights on the host, which are mapped
    load = PLAN.host.compute
    assert (use.counted, use.planned) == (load + 906 * MIB, load + CACHE + 128 * MIB)
    assert (use.own, use.unaccounted) == (GIB, GIB - load - 906 * MIB)
    assert use.is_within and not any(each.more for each in use.later)


def test_what_was_not_said_is_not_known() -> None:
    use = server_use(PLAN, SERVER, Said(LOADED), FED, None, Sizes())
    assert use.later == (
        LaterUse("checkpoint", 0, None, None, None, 0, MIB),
        LaterUse("prompt cache", 0, None, None, None, 0, CACHE),
    )
    assert use.own is None and use.unaccounted is None and use.is_within
    assert server_use(replace(PLAN, later=()), SERVER, SAID, FED, None, SIZES).later == ()
    unlimited = (replace(LATER[0], bytes=None), LATER[1])
    use = server_use(replace(PLAN, later=unlimited), SERVER, SAID, FED, None, SIZES)
    assert use.planned is None and use.is_within and use.later[-1].most is None


def test_a_cache_of_experts() -> None:
    said = Said(LOADED, lookups=ExpertLookups(900, 300, Figure(MIB, TWO)), reallocations=0)
    use = server_use(PLAN, SERVER, said, FED, None, Sizes())
    assert (use.expert_hits, use.expert_misses, use.expert_hit_rate, use.reallocations) == (900, 300, 0.75, 0)
    without = server_use(PLAN, SERVER, Said(LOADED), FED, None, Sizes())
    assert (without.expert_hits, without.expert_hit_rate, without.reallocations) == (0, None, None)


def test_what_a_real_load_reserves_on_the_host_counts() -> None:
    cuda, cpu = PLAN.breakdown.rows
    rows = (cuda, replace(cpu, reserved=cpu.compute + 5))
    plan = replace(PLAN, breakdown=Breakdown(rows, ("CUDA0",), 4096))
    assert server_use(plan, SERVER, Said(LOADED), FED, None, Sizes()).counted == PLAN.host.compute + 5


@cases(
    (100, 100, 200, 0),
    (110, 100, 200, 0),
    (111, 100, 200, 1),
    (211, None, 200, 1),
    (210, None, 200, 0),
    (50, 100, 200, 0),
    (5000, None, None, 0),
    (None, 100, 200, 0),
)
def test_more_than_planned(real: int | None, predicted: int | None, most: int | None, more: int) -> None:
    assert LaterUse("prompt", 1, 5, predicted, real, 10, most).more == more


USE = ServerUse(
    path="/llama-server",
    version="1 (abcdef0)",
    prompts=40,
    answered=39,
    tokens=1234,
    slots=4,
    refused="too long",
    later=(
        LaterUse("checkpoint", 0, None, None, None, 0, MIB),
        LaterUse("prompt", 2, 1000, 2000, 2100, 525, None),
        LaterUse("prompt cache", 36, None, None, 3000, 525, 4000),
    ),
    resident=300 * MIB,
    of_files=100 * MIB,
    counted=150 * MIB,
    planned=160 * MIB,
    margin=40 * MIB,
)
ROW = VerifiedRow(
    Row("CPU", None, True, 300, 200, 100),
    Row("CPU", None, True, 400, 0, 101),
    Row("CPU", None, True, 5, 0, 5),
    ("model", "context"),
)
FOUND = Verification(
    PLAN.model, PLAN.params, 0, (ROW,), (MemoryUse("host", GIB, GIB, 0),), server=USE, shared=PLAN.shared
)


def shown(found: Verification) -> list[str]:
    out = io.StringIO()
    plan_table.print_to(out, verification_table(found))
    return out.getvalue().splitlines()


def test_the_table() -> None:
    assert shown(FOUND) == [
        "Model 8B (llama, 4.0 GiB of weights), loaded by",
        "/llama-server 1 (abcdef0)",
        "buffer type  bytes: predicted             real  difference",
        "CPU model                 300  400 of the file",
        "CPU context               200         not said",
        "CPU compute               100          101 ± 5",
        "",
        "MiB   free before  after  counted  unaccounted",
        "host         1024   1024        0            0",
        "unaccounted: memory taken beyond llama.cpp's count; negative if other programs freed memory, or if",
        "counted memory is not in use yet; - if the device always reports the same free memory",
        "",
        "39 of 40 prompts answered, 1,234 tokens, 4 at a time",
        "the first that was not: too long",
        "then                                          bytes: predicted         real    at most",
        "a context checkpoint                                         -    none said  1,048,576",
        "a prompt in the prompt cache of 1,000 tokens             2,000  2,100 ± 525   no limit",
        "the prompt cache (36 prompts)                                -  3,000 ± 525      4,000",
        "",
        "MiB of its process  resident  of files  its own  counted  more  planned  margin",
        "at most                  300       100      200      150    50      160      40",
        "counted: what the plan counts without mapped files, and what was kept of the prompts; more: code,",
        "vocabulary and threads; planned: with all that may be kept of prompts",
        "",
        "as predicted, as far as its log says it",
    ]
    cached = replace(USE, expert_hits=900, expert_misses=300, reallocations=2)
    assert shown(replace(FOUND, server=cached))[18:20] == [
        "75.0% of 1,200 used experts were in the cache of experts",
        "2 graphs took other memory than was reserved",
    ]
    grown = replace(
        USE,
        growth=(MemoryGrowth("CUDA0", 10 * MIB, 160 * MIB, 20, MIB, 3.0), MemoryGrowth("host", 0, -MIB, 20, 0, 3.0)),
    )
    assert shown(replace(FOUND, server=grown))[18:24] == [
        "",
        "grew, MiB  first half of the prompts  second half  by a prompt  by a minute without one",
        "CUDA0                          +10.0       +160.0         +8.0                    +20.0",
        "host                            +0.0         -1.0         -0.1                     +0.0",
        "of a device: with other programs; of the host: this process without what it keeps of prompts; memory that",
        "still grows in the second half may go on growing: plan a larger margin, or restart the server in time",
    ]
    assert shown(replace(FOUND, server=replace(USE, resident=None)))[18] == (
        "memory of its process: this system does not say it"
    )


def readings(*used: int, device: str = "CUDA0") -> list[Reading]:
    """A reading after each prompt."""
    return [Reading(answered, float(answered), {device: size}) for answered, size in enumerate(used)]


@named_cases(
    ("with every prompt", readings(100, 108, 116, 124, 132), 132, MemoryGrowth("CUDA0", 16, 16, 2, 0, 3.0)),
    ("with the first prompt", readings(100, 150, 150, 150, 150), 150, MemoryGrowth("CUDA0", 50, 0, 2, 0, 3.0)),
    ("over time", readings(100, 100, 100), 106, MemoryGrowth("CUDA0", 0, 0, 1, 6, 3.0)),
    ("with one prompt", readings(100, 110), 110, MemoryGrowth("CUDA0", 10, 0, 0, 0, 3.0)),
    ("less", readings(100, 90, 80), 80, MemoryGrowth("CUDA0", -10, -10, 1, 0, 3.0)),
)
def test_what_grows_by_prompts_and_over_time(found: list[Reading], after: int, expected: MemoryGrowth) -> None:
    last = found[-1]
    assert growth_of(found, Reading(last.answered, last.at + 3.0, {"CUDA0": after})) == (expected,)
    assert [each.idle for each in growth_of(found)] == [0]


def test_the_rate_of_growth() -> None:
    grown = MemoryGrowth("CUDA0", 0, 160, 20, 10, 30.0)
    assert (grown.per_request, grown.per_minute) == (8.0, 20.0)
    assert (replace(grown, requests=0).per_request, replace(grown, seconds=0.0).per_minute) == (0.0, 0.0)
    # nothing was answered, or a device is not read any more
    assert growth_of([]) == growth_of(readings(5)) == ()
    assert growth_of([*readings(1, 2), *readings(1, 2, 3, device="host")[2:]]) == ()


def of_server(found: Verification = FOUND, **changes: Any) -> Verification:
    return replace(found, server=replace(USE, **changes))


MORE = (LaterUse("checkpoint", 9, 60, 2000, 2600, 525, 2000),)
HOLDS = "as predicted, as far as its log says it"
VERDICTS: dict[str, tuple[Verification, bool, str]] = {
    "it holds": (FOUND, True, HOLDS),
    "the process has more": (of_server(resident=301 * MIB), False, "more than planned: the memory of its process"),
    "what comes later is more": (
        *(of_server(later=MORE), False, "more than predicted: a context checkpoint +75 bytes"),
    ),
    "more, but tolerated": (replace(of_server(later=MORE), tolerance=75), True, HOLDS),
    "a buffer is more": (
        replace(FOUND, rows=(replace(ROW, real=replace(ROW.real, compute=106)),)),
        *(False, "more than predicted: CPU compute +6 bytes"),
    ),
}


@cases(VERDICTS)
def test_the_verdict(found: Verification, holds: bool, verdict: str) -> None:
    assert found.holds is holds
    assert shown(found)[-1] == verdict


def test_json() -> None:
    document = VERIFICATION.write(FOUND)
    assert document["memory"][0]["real"] == {"model": None, "context": None, "compute": 101}
    assert document["memory"][0]["predicted"] == {"model": 300, "context": 200, "compute": 100}
    use = document["server"]
    assert list(use) == [
        *("path", "version", "prompts", "answered", "tokens", "slots", "refused", "later"),
        *("resident", "of_files", "counted", "planned", "margin", "growth"),
        *("expert_hits", "expert_misses", "expert_hit_rate", "reallocations"),
    ]
    later = {"kind": "prompt", "count": 2, "tokens": 1000, "predicted": 2000, "real": 2100, "rounding": 525}
    assert use["later"][1] == later | {"most": None}
    assert VERIFICATION.write(replace(FOUND, server=None))["server"] is None
