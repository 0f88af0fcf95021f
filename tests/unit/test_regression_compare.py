"""What fails a case, on both sides of every limit, what is said to have moved, and why."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fitter.regression.cases import Budget, Case, Growth
from fitter.regression.compare import Move, compare, missing
from fitter.regression.lockfile import LockedDevice, LockedHost, LockedPool, LockedSpeed, Memory, Snapshot
from tests.support.cases import cases, named_cases
from tests.support.snapshots import GIB, MIB, SNAPSHOT, with_memory, with_model

METADATA = "its metadata changed, but no tensor's type"
USED = 5 * GIB + 256 * MIB
HOST = 116 * MIB
CASE = Case("a", Path("a.gguf"), SNAPSHOT.settings)
MORE_ON_HOST = "host takes 117.0 MiB instead of 116.0 MiB (+1.0 MiB, +0.9 %)"
NOTHING = LockedDevice("virtual", GIB, GIB, 0)
NEW_DEVICE = replace(NOTHING, memory={"CUDA1": Memory(1, 0, 0)})


def more(**memory: int) -> Snapshot:
    """The snapshot with so many more bytes on its device."""
    return with_memory(SNAPSHOT, **memory)


def with_devices(**devices: LockedDevice) -> Snapshot:
    return replace(SNAPSHOT, devices={**SNAPSHOT.devices, **devices})


def of_device(**changes: Any) -> Snapshot:
    return with_devices(CUDA0=replace(SNAPSHOT.devices["CUDA0"], **changes))


def of_host(**changes: Any) -> Snapshot:
    return replace(SNAPSHOT, host=replace(SNAPSHOT.host, **changes))


def with_host(**more: int) -> Snapshot:
    old = SNAPSHOT.host.memory["CPU"]
    new = Memory(*(getattr(old, kind) + more.get(kind, 0) for kind in ("model", "context", "compute")))
    return of_host(memory={**SNAPSHOT.host.memory, "CPU": new})


def with_speed(prompt: float = 1000.0, generation: float = 50.0) -> Snapshot:
    return replace(SNAPSHOT, estimate=LockedSpeed(prompt, generation))


def with_settings(**settings: Any) -> Snapshot:
    return replace(SNAPSHOT, settings={**SNAPSHOT.settings, **settings})


def too_large(context: int, host: int | None = None) -> Snapshot:
    snapshot = with_memory(SNAPSHOT, context=context)
    return replace(snapshot, fits=False, estimate=None, host=replace(snapshot.host, free=host))


def with_shared(device: int = 0, host: int = 0) -> Snapshot:
    return replace(of_device(shared=device), host=replace(SNAPSHOT.host, shared=host))


TOO_LARGE = too_large(20 * GIB)


def limit(measured: Snapshot, *failures: str, **limits: Any) -> tuple[Snapshot, Case, list[str]]:
    """What is measured, the case with its limits, and what fails it."""
    return measured, replace(CASE, **limits), list(failures)


ROWS = {
    "nothing": limit(SNAPSHOT),
    "a byte more": limit(more(compute=1), "CUDA0 takes 5.3 GiB instead of 5.2 GiB (+1 B, +0.0 %)"),
    "a byte less": limit(more(compute=-1)),
    "all of the bytes that are allowed": limit(more(compute=MIB), max_growth=Growth(bytes=MIB)),
    "one more than that": limit(
        more(compute=MIB + 1),
        "CUDA0 takes 5.3 GiB instead of 5.2 GiB (+1.0 MiB, +0.0 %); it may grow by 1.0 MiB",
        max_growth=Growth(bytes=MIB),
    ),
    "all of the percentage": limit(more(context=USED // 100), max_growth=Growth(part=0.01)),
    "a byte more than that": limit(
        more(context=USED // 100 + 1),
        "CUDA0 takes 5.3 GiB instead of 5.2 GiB (+53.8 MiB, +1.0 %); it may grow by 53.8 MiB",
        max_growth=Growth(part=0.01),
    ),
    "from one kind to another": limit(more(compute=-MIB, context=MIB)),
    "a device that was not used": limit(with_devices(CUDA1=NEW_DEVICE), "CUDA1 takes 1 B instead of 0 B (+1 B)"),
    "compute on the host": limit(with_host(compute=MIB), MORE_ON_HOST),
    "weights on the host": limit(
        with_host(model=1, compute=-1), "weights on the host take 100.0 MiB instead of 100.0 MiB (+1 B, +0.0 %)"
    ),
    "weights on the host, as allowed": limit(with_host(model=1, compute=-1), max_growth=Growth(bytes=1)),
    "another buffer type of the host": limit(of_host(memory={"CPU_REPACK": Memory(100 * MIB, 0, 16 * MIB)})),
    "as much later": limit(of_host(later=GIB), max_growth=Growth(bytes=GIB)),
    "more later": limit(of_host(later=MIB), MORE_ON_HOST),
    "a token less": limit(replace(SNAPSHOT, n_ctx=8191), "the context has 8191 tokens instead of 8192"),
    "a token more": limit(replace(SNAPSHOT, n_ctx=8193)),
    "slower as allowed": limit(with_speed(prompt=980.0)),
    "slower": limit(
        with_speed(prompt=979.9),
        "prompt is estimated at 980 tokens/s instead of 1,000: 2.0 % slower, and 2 % is allowed",
    ),
    "slower generation": limit(
        with_speed(generation=40.0),
        "generation is estimated at 40 tokens/s instead of 50: 20.0 % slower, and 10 % is allowed",
        max_slowdown=0.1,
    ),
    "faster": limit(with_speed(generation=60.0)),
    "too large": limit(TOO_LARGE, "it no longer fits: CUDA0 lacks 3.2 GiB", max_growth=Growth(part=9.0)),
    "a budget that it just keeps": limit(SNAPSHOT, budget=Budget({"cuda0": USED, "host": HOST})),
    "a byte beyond a budget": limit(
        more(context=-1),
        "CUDA0 takes 5.2 GiB, 1 B more than its budget of 5.2 GiB",
        budget=Budget({"cuda0": USED - 2}),
    ),
    "the host beyond a budget": limit(
        SNAPSHOT, "host takes 116.0 MiB, 1 B more than its budget of 116.0 MiB", budget=Budget({"host": HOST - 1})
    ),
    "the least context": limit(SNAPSHOT, budget=Budget(n_ctx=8192)),
    "below it": limit(
        SNAPSHOT, "the context has 8192 tokens, fewer than its budget of 8193", budget=Budget(n_ctx=8193)
    ),
    "the least speed": limit(SNAPSHOT, budget=Budget(generation_tokens_per_second=50.0)),
    "below the least speed": limit(
        SNAPSHOT,
        "generation is estimated at 50 tokens/s, below its budget of 50.1",
        budget=Budget(generation_tokens_per_second=50.1),
    ),
}


SAME = (
    *("nothing", "another buffer type of the host"),
    *("a budget that it just keeps", "the least context", "the least speed"),
)
"""Rows that hold what the lock holds; any other that does not fail has changed."""


@pytest.mark.parametrize("name", ROWS)
def test_limits(name: str) -> None:
    measured, case, failures = ROWS[name]
    found = compare(case, SNAPSHOT, measured)
    assert list(found.failures) == failures
    assert found.status == ("failed" if failures else "same" if name in SAME else "changed")


def test_budgets_without_a_lock() -> None:
    budget = Budget({"cuda0": GIB}, n_ctx=9000)
    found = compare(replace(CASE, budget=budget), None, TOO_LARGE)
    assert [move.what for move in found.moves] == ["fits", "cuda0 budget", "context budget"]
    assert (len(found.failures), found.causes, found.chosen) == (3, (), ())
    assert compare(CASE, None, TOO_LARGE).status == "same", "a case without a lock or a budget has no limits"


def test_still_not_fitting_is_no_failure_of_its_own() -> None:
    found = compare(CASE, TOO_LARGE, TOO_LARGE)
    assert found.status == "same"
    worse = replace(with_memory(TOO_LARGE, context=MIB), fits=False)
    assert [move.what for move in compare(CASE, TOO_LARGE, worse).moves] == ["missing", "CUDA0"]
    assert compare(CASE, TOO_LARGE, SNAPSHOT).failures == ()


# --- what moved

MOVES: dict[str, tuple[Snapshot, Snapshot, list[Move]]] = {
    "nothing": (SNAPSHOT, SNAPSHOT, []),
    "from one kind to another": (
        SNAPSHOT,
        more(model=-3 * MIB, context=MIB, compute=2 * MIB),
        [Move("CUDA0", USED, USED, "bytes", "model -3.0 MiB, context +1.0 MiB, compute +2.0 MiB")],
    ),
    "beside the model": (
        SNAPSHOT,
        with_shared(device=GIB, host=MIB),
        [
            Move("CUDA0", USED, USED + GIB, "bytes", "shared +1.0 GiB"),
            Move("host", HOST, HOST + MIB, "bytes", "shared +1.0 MiB"),
        ],
    ),
    "no longer beside the model": (
        *(with_shared(device=GIB), SNAPSHOT),
        [Move("CUDA0", USED + GIB, USED, "bytes", "shared -1.0 GiB")],
    ),
    "beside the host's as well, and later": (
        of_host(shared=2 * MIB, later=3 * MIB),
        of_host(later=MIB),
        [Move("host", HOST + 5 * MIB, HOST + MIB, "bytes", "shared -2.0 MiB, later -2.0 MiB")],
    ),
    "the same beside the model": (with_shared(device=GIB, host=MIB), with_shared(device=GIB, host=MIB), []),
    "from the model to what is beside it": (
        SNAPSHOT,
        with_memory(with_shared(device=MIB), context=-MIB),
        [Move("CUDA0", USED, USED, "bytes", "context -1.0 MiB, shared +1.0 MiB")],
    ),
    "a device less": (
        SNAPSHOT,
        replace(SNAPSHOT, devices={}),
        [Move("CUDA0", USED, 0, "bytes", "model -4.0 GiB, context -1.0 GiB, compute -256.0 MiB")],
    ),
    "a device that has nothing": (SNAPSHOT, with_devices(CUDA1=NOTHING), []),
    "such a device less": (with_devices(CUDA1=NOTHING), SNAPSHOT, []),
    "a longer context": (SNAPSHOT, replace(SNAPSHOT, n_ctx=8193), [Move("context", 8192, 8193, "tokens")]),
    "it lacks more": (
        TOO_LARGE,
        too_large(20 * GIB + MIB),
        [
            Move("missing", 3.25 * GIB, 3.25 * GIB + MIB, "bytes", "CUDA0 lacks 3.3 GiB"),
            Move("CUDA0", USED + 20 * GIB, USED + 20 * GIB + MIB, "bytes", "context +1.0 MiB"),
        ],
    ),
    "it lacks more on the host": (
        too_large(20 * GIB, GIB + HOST),
        too_large(20 * GIB, GIB),
        [Move("missing", 3.25 * GIB, 3.25 * GIB + HOST, "bytes", "CUDA0 lacks 3.2 GiB, the host lacks 116.0 MiB")],
    ),
    "it fits at last": (replace(SNAPSHOT, fits=False), SNAPSHOT, [Move("fits", 0, 1, "")]),
}


@cases(MOVES)
def test_moves(locked: Snapshot, measured: Snapshot, moves: list[Move]) -> None:
    found = compare(CASE, locked, measured)
    assert [replace(move, failure="") for move in found.moves] == moves


@named_cases(
    ("a byte", LockedHost(0, 99), "CUDA0 lacks 1 B"),
    ("the host too", LockedHost(0, 0, SNAPSHOT.host.memory), "CUDA0 lacks 1 B, the host lacks 116.0 MiB"),
)
def test_what_is_missing(host: LockedHost, said: str) -> None:
    assert missing(replace(of_device(free=USED + GIB - 1), host=host)) == said
    assert missing(SNAPSHOT) == "llama.cpp cannot place it", "nothing lacks"


def pooled(used: int, free: int = 60 * GIB, fits: bool = True) -> Snapshot:
    return replace(SNAPSHOT, fits=fits, pools={"CUDA0+host": LockedPool(64 * GIB, free, GIB, used)})


def test_memory_that_is_shared() -> None:
    found = compare(CASE, pooled(50 * GIB), pooled(51 * GIB))
    assert [(move.what, move.before, move.after, move.failure) for move in found.moves] == [
        ("CUDA0+host", 50 * GIB, 51 * GIB, "")
    ]
    assert compare(CASE, pooled(50 * GIB), pooled(50 * GIB)).status == "same"
    found = compare(CASE, pooled(50 * GIB), pooled(50 * GIB, 40 * GIB, fits=False))
    assert found.failures == ("it no longer fits: CUDA0+host lacks 11.0 GiB",)
    assert list(map(str, found.causes)) == ["device: CUDA0+host free 60.0 GiB → 40.0 GiB"]


# --- causes

CAUSES: dict[str, tuple[Snapshot, list[str]]] = {
    "nothing": (SNAPSHOT, []),
    "a setting": (with_settings(n_ubatch=1024), ["setting: n_ubatch 512 → 1024"]),
    "several": (
        replace(SNAPSHOT, settings={"gpu": ("24GiB", "8GiB"), "margin": GIB, "kv_unified": False, "n_ubatch": 512}),
        [
            "setting: gpu 24GiB → 24GiB, 8GiB",
            "setting: kv_unified true → false",
            "setting: margin unset → 1.0 GiB",
            "setting: tensor_split 3.0, 1.0 → unset",
        ],
    ),
    "sizes of the host": (
        with_settings(host_memory=64 * GIB, host_margin=512),
        ["setting: host_margin unset → 512 B", "setting: host_memory unset → 64.0 GiB"],
    ),
    "a smaller device": (
        of_device(total=12 * GIB, free=12 * GIB - 1),
        ["device: CUDA0 total 24.0 GiB → 12.0 GiB", "device: CUDA0 free 23.0 GiB → 12.0 GiB"],
    ),
    "by bytes": (of_device(free=23 * GIB - 1), ["device: CUDA0 free 24696061952 B → 24696061951 B"]),
    "another card": (of_device(description="a card"), ["device: CUDA0 virtual → a card"]),
    "another margin": (of_device(margin=2 * GIB), ["device: CUDA0 margin 1.0 GiB → 2.0 GiB"]),
    "no device": (replace(SNAPSHOT, devices={}), ["device: CUDA0 virtual → none"]),
    "a device more": (with_devices(CUDA1=NOTHING), ["device: CUDA1 none → virtual"]),
    "llama.cpp and fitter": (
        replace(SNAPSHOT, fitter="0.2.0", llama_cpp="0.6.0"),
        ["llama.cpp 0.5.0 (ggml 0.25.3, commit 0c1e57098) → 0.6.0", "fitter 0.1.0 → 0.2.0"],
    ),
    "another model": (
        with_model(SNAPSHOT, header="sha256:01", architecture="qwen3", name="B"),
        ["header: architecture llama → qwen3", 'header: name A "model" → B', f"header: {METADATA}"],
    ),
    "a tensor of another type": (
        with_model(
            SNAPSHOT,
            header="sha256:01",
            bytes=5 * GIB,
            tensors={"blk.*.ffn_up.weight": "q4_K 0-2; q8_0 3", "output.weight": "q6_K"},
        ),
        ["header: blk.3.ffn_up.weight q4_K → q8_0", "header: all tensors 4.0 GiB → 5.0 GiB"],
    ),
    "many of them": (
        with_model(
            SNAPSHOT,
            header="sha256:01",
            tensors={"blk.*.ffn_up.weight": "q8_0 0-3", "output.weight": "q8_0", "blk.*.b": "f32 0-6"},
        ),
        [
            "header: " + ", ".join(f"blk.{i}.ffn_up.weight" for i in range(4)) + " q4_K → q8_0",
            "header: output.weight q6_K → q8_0",
            "header: " + ", ".join(f"blk.{i}.b" for i in range(6)) + " and 1 more not there → there",
        ],
    ),
    "a tensor less": (
        with_model(SNAPSHOT, header="sha256:01", tensors={"blk.*.ffn_up.weight": "q4_K 0-3"}),
        ["header: output.weight there → gone"],
    ),
    "metadata": (with_model(SNAPSHOT, header="sha256:01"), [f"header: {METADATA}"]),
    "another file": (with_model(SNAPSHOT, file="b.gguf"), ["model: file a.gguf → b.gguf"]),
}


@cases(CAUSES)
def test_causes(measured: Snapshot, causes: list[str]) -> None:
    found = compare(CASE, SNAPSHOT, measured)
    assert list(map(str, found.causes)) == causes


@named_cases(
    (
        "in place of the lock's",
        SNAPSHOT.settings,
        {"n_gpu_layers": 20, "n_ubatch": 1024, "tensor_split": None, "tensor_buft_overrides": ()},
        # n_ubatch and tensor_split are set, so they are causes
        [("n_gpu_layers", "33", "20"), ("tensor_buft_overrides", r"blk\.1\.=CPU", "none")],
    ),
    (
        "as it is given",
        {},
        {"tensor_split": (0.5, 2.0), "tensor_buft_overrides": (), "devices": None},
        [
            ("tensor_split", "3,1", "0.5,2"),
            ("tensor_buft_overrides", r"blk\.1\.=CPU", "none"),
            ("devices", "CUDA0", "none"),
        ],
    ),
)
def test_what_was_fitted_otherwise(settings: Any, params: dict[str, Any], said: list[tuple[str, ...]]) -> None:
    locked = replace(SNAPSHOT, settings=settings)
    found = compare(CASE, locked, replace(locked, params=replace(locked.params, **params)))
    assert [(each.what, each.before, each.after) for each in found.chosen] == said
