"""What fails a case, on both sides of every limit, and what is said to have changed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from fitter.regression.cases import Budget, Case, Growth
from fitter.regression.compare import compare
from fitter.regression.lockfile import LockedDevice, LockedPool, LockedSpeed, Memory, Snapshot
from tests.support.cases import cases
from tests.support.snapshots import GIB, MIB, SNAPSHOT, with_memory, with_model

USED = 5 * GIB + 256 * MIB
CASE = Case("a", Path("a.gguf"), SNAPSHOT.settings)


def with_host(**more: int) -> Snapshot:
    old = SNAPSHOT.host.memory["CPU"]
    new = Memory(*(getattr(old, kind) + more.get(kind, 0) for kind in ("model", "context", "compute")))
    return replace(SNAPSHOT, host=replace(SNAPSHOT.host, memory={**SNAPSHOT.host.memory, "CPU": new}))


def later(size: int) -> Snapshot:
    return replace(SNAPSHOT, host=replace(SNAPSHOT.host, later=size))


def with_speed(prompt: float = 1000.0, generation: float = 50.0) -> Snapshot:
    return replace(SNAPSHOT, estimate=LockedSpeed(prompt, generation))


TOO_LARGE = replace(with_memory(SNAPSHOT, context=20 * GIB), fits=False, estimate=None)
NEW_DEVICE = LockedDevice("virtual", GIB, GIB, 0, {"CUDA1": Memory(1, 0, 0)})

ROWS: dict[str, tuple[Snapshot, Case, list[str]]] = {
    "nothing": (SNAPSHOT, CASE, []),
    "a byte more": (with_memory(SNAPSHOT, compute=1), CASE, ["CUDA0 takes 5.3 GiB instead of 5.2 GiB (+1 B, +0.0 %)"]),
    "a byte less": (with_memory(SNAPSHOT, compute=-1), CASE, []),
    "all of the bytes that are allowed": (
        with_memory(SNAPSHOT, compute=MIB),
        replace(CASE, max_growth=Growth(bytes=MIB)),
        [],
    ),
    "one more than that": (
        with_memory(SNAPSHOT, compute=MIB + 1),
        replace(CASE, max_growth=Growth(bytes=MIB)),
        ["CUDA0 takes 5.3 GiB instead of 5.2 GiB (+1.0 MiB, +0.0 %); it may grow by 1.0 MiB"],
    ),
    "all of the percentage": (
        with_memory(SNAPSHOT, context=USED // 100),
        replace(CASE, max_growth=Growth(part=0.01)),
        [],
    ),
    "a byte more than that": (
        with_memory(SNAPSHOT, context=USED // 100 + 1),
        replace(CASE, max_growth=Growth(part=0.01)),
        ["CUDA0 takes 5.3 GiB instead of 5.2 GiB (+53.8 MiB, +1.0 %); it may grow by 53.8 MiB"],
    ),
    "from one kind to another": (with_memory(SNAPSHOT, compute=-MIB, context=MIB), CASE, []),
    "a device that was not used": (
        replace(SNAPSHOT, devices={**SNAPSHOT.devices, "CUDA1": NEW_DEVICE}),
        CASE,
        ["CUDA1 takes 1 B instead of 0 B (+1 B)"],
    ),
    "compute on the host": (
        with_host(compute=MIB),
        CASE,
        ["host takes 117.0 MiB instead of 116.0 MiB (+1.0 MiB, +0.9 %)"],
    ),
    "weights on the host": (
        with_host(model=1, compute=-1),
        CASE,
        ["weights on the host take 100.0 MiB instead of 100.0 MiB (+1 B, +0.0 %)"],
    ),
    "weights on the host, as allowed": (with_host(model=1, compute=-1), replace(CASE, max_growth=Growth(bytes=1)), []),
    "another buffer type of the host": (
        replace(SNAPSHOT, host=replace(SNAPSHOT.host, memory={"CPU_REPACK": Memory(100 * MIB, 0, 16 * MIB)})),
        CASE,
        [],
    ),
    "as much later": (later(GIB), replace(CASE, max_growth=Growth(bytes=GIB)), []),
    "more later": (later(MIB), CASE, ["host takes 117.0 MiB instead of 116.0 MiB (+1.0 MiB, +0.9 %)"]),
    "a token less": (replace(SNAPSHOT, n_ctx=8191), CASE, ["the context has 8191 tokens instead of 8192"]),
    "a token more": (replace(SNAPSHOT, n_ctx=8193), CASE, []),
    "slower as allowed": (with_speed(prompt=980.0), CASE, []),
    "slower": (
        with_speed(prompt=979.9),
        CASE,
        ["prompt is estimated at 980 tokens/s instead of 1,000: 2.0 % slower, and 2 % is allowed"],
    ),
    "slower generation": (
        with_speed(generation=40.0),
        replace(CASE, max_slowdown=0.1),
        ["generation is estimated at 40 tokens/s instead of 50: 20.0 % slower, and 10 % is allowed"],
    ),
    "faster": (with_speed(generation=60.0), CASE, []),
    "too large": (TOO_LARGE, replace(CASE, max_growth=Growth(part=9.0)), ["it no longer fits: CUDA0 lacks 3.2 GiB"]),
    "a budget that it just keeps": (SNAPSHOT, replace(CASE, budget=Budget({"cuda0": USED, "host": 116 * MIB})), []),
    "a byte beyond a budget": (
        with_memory(SNAPSHOT, context=-1),
        replace(CASE, budget=Budget({"cuda0": USED - 2})),
        ["CUDA0 takes 5.2 GiB, 1 B more than its budget of 5.2 GiB"],
    ),
    "the host beyond a budget": (
        SNAPSHOT,
        replace(CASE, budget=Budget({"host": 116 * MIB - 1})),
        ["host takes 116.0 MiB, 1 B more than its budget of 116.0 MiB"],
    ),
    "the least context": (SNAPSHOT, replace(CASE, budget=Budget(n_ctx=8192)), []),
    "below it": (
        SNAPSHOT,
        replace(CASE, budget=Budget(n_ctx=8193)),
        ["the context has 8192 tokens, fewer than its budget of 8193"],
    ),
    "the least speed": (SNAPSHOT, replace(CASE, budget=Budget(generation_tokens_per_second=50.0)), []),
    "below the least speed": (
        SNAPSHOT,
        replace(CASE, budget=Budget(generation_tokens_per_second=50.1)),
        ["generation is estimated at 50 tokens/s, below its budget of 50.1"],
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


def test_what_moved_is_said() -> None:
    both = replace(SNAPSHOT, host=replace(SNAPSHOT.host, shared=2 * MIB, later=3 * MIB))
    [move] = compare(CASE, both, later(MIB)).moves
    assert (move.what, move.detail, move.failure) == ("host", "shared -2.0 MiB, later -2.0 MiB", "")


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


def smaller_device(**changes: int) -> Snapshot:
    device = replace(SNAPSHOT.devices["CUDA0"], **changes)
    return replace(SNAPSHOT, devices={"CUDA0": device})


CAUSES: dict[str, tuple[Snapshot, list[str]]] = {
    "nothing": (SNAPSHOT, []),
    "a setting": (
        replace(SNAPSHOT, settings={**SNAPSHOT.settings, "n_ubatch": 1024}),
        ["setting: n_ubatch 512 → 1024"],
    ),
    "several": (
        replace(SNAPSHOT, settings={"gpu": ("24GiB", "8GiB"), "margin": GIB, "kv_unified": False, "n_ubatch": 512}),
        [
            "setting: gpu 24GiB → 24GiB, 8GiB",
            "setting: kv_unified true → false",
            "setting: margin unset → 1.0 GiB",
            "setting: tensor_split 3.0, 1.0 → unset",
        ],
    ),
    "a smaller device": (
        smaller_device(total=12 * GIB, free=12 * GIB - 1),
        ["device: CUDA0 total 24.0 GiB → 12.0 GiB", "device: CUDA0 free 23.0 GiB → 12.0 GiB"],
    ),
    "by bytes": (smaller_device(free=23 * GIB - 1), ["device: CUDA0 free 24696061952 B → 24696061951 B"]),
    "no device": (replace(SNAPSHOT, devices={}), ["device: CUDA0 virtual → none"]),
    "llama.cpp and fitter": (
        replace(SNAPSHOT, fitter="0.2.0", llama_cpp="0.6.0"),
        ["llama.cpp 0.5.0 (ggml 0.25.3, commit 0c1e57098) → 0.6.0", "fitter 0.1.0 → 0.2.0"],
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
    "metadata": (with_model(SNAPSHOT, header="sha256:01"), ["header: its metadata changed, but no tensor's type"]),
    "another file": (with_model(SNAPSHOT, file="b.gguf"), ["model: file a.gguf → b.gguf"]),
}


@cases(CAUSES)
def test_causes(measured: Snapshot, causes: list[str]) -> None:
    found = compare(CASE, SNAPSHOT, measured)
    assert list(map(str, found.causes)) == causes


def test_what_was_fitted_otherwise() -> None:
    params = replace(SNAPSHOT.params, n_gpu_layers=20, n_ubatch=1024, tensor_split=None, tensor_buft_overrides=())
    found = compare(CASE, SNAPSHOT, replace(SNAPSHOT, params=params))
    # n_ubatch and tensor_split are set, so they are causes
    assert [(each.what, each.before, each.after) for each in found.chosen] == [
        ("n_gpu_layers", "33", "20"),
        ("tensor_buft_overrides", r"blk\.1\.=CPU", "none"),
    ]
