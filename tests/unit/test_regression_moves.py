"""What a comparison says has moved, number by number, and what was fitted otherwise."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from fitter.regression.cases import Case
from fitter.regression.compare import Move, compare, missing
from fitter.regression.lockfile import LockedDevice, LockedHost, Snapshot
from tests.support.cases import cases, named_cases
from tests.support.snapshots import GIB, MIB, SNAPSHOT, with_memory, with_model

USED = 5 * GIB + 256 * MIB
HOST = 116 * MIB
CASE = Case("a", Path("a.gguf"), SNAPSHOT.settings)


def with_shared(device: int = 0, host: int = 0) -> Snapshot:
    devices = {"CUDA0": replace(SNAPSHOT.devices["CUDA0"], shared=device)}
    return replace(SNAPSHOT, devices=devices, host=replace(SNAPSHOT.host, shared=host))


def too_large(context: int, host: int | None = None) -> Snapshot:
    snapshot = with_memory(SNAPSHOT, context=context)
    return replace(snapshot, fits=False, estimate=None, host=replace(snapshot.host, free=host))


NOTHING = LockedDevice("virtual", GIB, GIB, 0)

ROWS: dict[str, tuple[Snapshot, Snapshot, list[Move]]] = {
    "nothing": (SNAPSHOT, SNAPSHOT, []),
    "from one kind to another": (
        SNAPSHOT,
        with_memory(SNAPSHOT, model=-3 * MIB, context=MIB, compute=2 * MIB),
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
        with_shared(device=GIB),
        SNAPSHOT,
        [Move("CUDA0", USED + GIB, USED, "bytes", "shared -1.0 GiB")],
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
    "a device that has nothing": (SNAPSHOT, replace(SNAPSHOT, devices={**SNAPSHOT.devices, "CUDA1": NOTHING}), []),
    "such a device less": (replace(SNAPSHOT, devices={**SNAPSHOT.devices, "CUDA1": NOTHING}), SNAPSHOT, []),
    "a longer context": (SNAPSHOT, replace(SNAPSHOT, n_ctx=8193), [Move("context", 8192, 8193, "tokens")]),
    "it lacks more": (
        too_large(20 * GIB),
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


@cases(ROWS)
def test_moves(locked: Snapshot, measured: Snapshot, moves: list[Move]) -> None:
    # what fails a case has tests of its own
    found = compare(CASE, locked, measured)
    assert [replace(move, failure="") for move in found.moves] == moves


@named_cases(
    ("a byte", LockedHost(0, 99), "CUDA0 lacks 1 B"),
    ("the host too", LockedHost(0, 0, SNAPSHOT.host.memory), "CUDA0 lacks 1 B, the host lacks 116.0 MiB"),
)
def test_what_is_missing(host: LockedHost, said: str) -> None:
    device = replace(SNAPSHOT.devices["CUDA0"], free=USED + GIB - 1)
    assert missing(replace(SNAPSHOT, devices={"CUDA0": device}, host=host)) == said


def test_nothing_lacks_where_llama_cpp_says_no() -> None:
    assert missing(SNAPSHOT) == "llama.cpp cannot place it"


CAUSES: dict[str, tuple[Snapshot, list[str]]] = {
    "another card": (
        replace(SNAPSHOT, devices={"CUDA0": replace(SNAPSHOT.devices["CUDA0"], description="a card")}),
        ["device: CUDA0 virtual → a card"],
    ),
    "a device more": (
        replace(SNAPSHOT, devices={**SNAPSHOT.devices, "CUDA1": NOTHING}),
        ["device: CUDA1 none → virtual"],
    ),
    "another margin": (
        replace(SNAPSHOT, devices={"CUDA0": replace(SNAPSHOT.devices["CUDA0"], margin=2 * GIB)}),
        ["device: CUDA0 margin 1.0 GiB → 2.0 GiB"],
    ),
    "another model": (
        with_model(SNAPSHOT, header="sha256:01", architecture="qwen3", name="B"),
        [
            "header: architecture llama → qwen3",
            'header: name A "model" → B',
            "header: its metadata changed, but no tensor's type",
        ],
    ),
    "sizes of the host": (
        replace(SNAPSHOT, settings={**SNAPSHOT.settings, "host_memory": 64 * GIB, "host_margin": 512}),
        ["setting: host_margin unset → 512 B", "setting: host_memory unset → 64.0 GiB"],
    ),
}


@cases(CAUSES)
def test_causes(measured: Snapshot, causes: list[str]) -> None:
    assert list(map(str, compare(CASE, SNAPSHOT, measured).causes)) == causes


def test_what_was_fitted_is_said_as_it_is_given() -> None:
    bare = replace(SNAPSHOT, settings={})
    params = replace(SNAPSHOT.params, tensor_split=(0.5, 2.0), tensor_buft_overrides=(), devices=None)
    found = compare(CASE, bare, replace(bare, params=params))
    assert [(each.what, each.before, each.after) for each in found.chosen] == [
        ("tensor_split", "3,1", "0.5,2"),
        ("tensor_buft_overrides", r"blk\.1\.=CPU", "none"),
        ("devices", "CUDA0", "none"),
    ]
