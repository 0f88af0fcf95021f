"""Plans and measurements with other builds of llama.cpp than the pinned one: their bytes are those of the builds."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import fitter
from fitter.errors import RemoteError
from fitter.llama.build.build_folder import find
from fitter.llama.client import Worker
from fitter.llama.types import Params, TensorBuftOverride
from fitter.machine.gpu import parse_gpus
from tests.support.cases import cases
from tests.support.command import run_fitter
from tests.support.llama_builds import COMPILED, NEWEST, PINNED, every, where
from tools.builds import llama_builds
from tools.llama_truth.loads import TINY, Load, draw, known, measured
from tools.llama_truth.program import answers, compiled, headers_of, servers, with_one_cpu
from tools.models import shapes

PINNED_SOURCE = Path(__file__).resolve().parents[2] / "vendor" / "llama.cpp" / "source"
PREBUILT = list(llama_builds.libraries())
OTHERS = [*PREBUILT, *COMPILED]


class Case(NamedTuple):
    """A model, the cards it is planned on, and what the plan must have."""

    model: str
    cards: tuple[str, ...]
    is_spilled: bool


CASES = {
    "dense on one card": Case("qwen3-32b", ("rtx-4090",), False),
    "experts spilled from two cards": Case("deepseek-v3.1", ("rtx-6000-ada", "rtx-4090"), True),
    "hybrid on one card": Case("qwen3-next-80b-a3b", ("48GiB",), False),
}


@pytest.fixture(scope="module")
def one_cpu(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A directory for directories of builds with one backend for the CPU each."""
    yield tmp_path_factory.mktemp("builds")


def called(name: str, one_cpu: Path) -> str:
    where(name)
    (one_cpu / name).mkdir(exist_ok=True)
    return with_one_cpu(name, one_cpu / name)


# --- plans


def plan(model: Path, case: Case, build: str) -> dict[str, Any]:
    cards = [word for card in case.cards for word in ("--gpu", card)]
    done = run_fitter(model, *cards, "--llama-cpp", build, "--json")
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("name", every())
def test_a_plan_is_what_the_build_measures(name: str, case: Case, directory: Path) -> None:
    """A plan fits, leaves no room for much more, and a load of its parameters takes the bytes that it says."""
    build, model = where(name), shapes.write(case.model, directory, vocab=False)
    found = plan(model, case, build)
    assert found["fits"]
    assert len(found["devices"]) == len(case.cards)
    assert all(device["left"] >= device["margin"] for device in found["devices"])
    overrides = found["params"]["tensor_buft_overrides"]
    assert bool(overrides) == case.is_spilled
    assert (found["host"]["used"] > 100 * 2**30) == case.is_spilled
    split = found["params"]["tensor_split"]
    params = replace(
        Params(n_ctx=found["params"]["n_ctx"], n_gpu_layers=found["params"]["n_gpu_layers"]),
        tensor_split=tuple(split) if split else None,
        tensor_buft_overrides=tuple(TensorBuftOverride(each["pattern"], each["buffer_type"]) for each in overrides),
        n_batch=found["params"]["n_batch"],
        n_ubatch=found["params"]["n_ubatch"],
        flash_attn=found["params"]["flash_attn"],
    )
    with Worker(parse_gpus(case.cards), llama_cpp=build) as worker:
        again = worker.measure(model, params)
        more = worker.measure(model, replace(params, n_ctx=2 * params.n_ctx))
    used = {device["name"]: device["used"] for device in found["devices"]}
    assert {name: again.on(name).used for name in used} == used
    free = {device["name"]: device["free"] - device["margin"] for device in found["devices"]}
    assert any(more.on(name).used > free[name] for name in used)


COMPUTE: dict[str, tuple[tuple[str, ...], dict[str, Any], tuple[int, ...], tuple[int, ...]]] = {
    "llama-3.1-8b": (("rtx-4060",), {}, (271056896, 25180160), (304627712, 41963520)),
    "qwen3-32b": (("2x rtx-3090",), {}, (270573568, 439140352, 86040576), (364961792, 439140352, 138493952)),
    "kimi-k2": (("rtx-5090",), {"cpu_moe": True}, (4829747200, 37758976), (4842334208, 67125248)),
}
"""Cards, keywords, and bytes of compute buffers: of the pinned build, and of newer ones."""


@pytest.mark.parametrize("model", COMPUTE)
def test_newer_builds_compute_in_more_memory(model: str, directory: Path) -> None:
    cards, keywords, pinned, newer = COMPUTE[model]
    path = shapes.write(model, directory, vocab=False)
    for build, expected in ((PINNED, pinned), ("b11524", newer), (NEWEST, newer)):
        found = fitter.measure(
            path, gpus=cards, n_ctx=8192, n_ubatch=512, n_gpu_layers=99, llama_cpp=where(build), **keywords
        )
        assert tuple(row.compute for row in found.rows) == expected


# --- bytes, by the builds themselves


def different(worker: Worker, rows: list[tuple[Load, str]], directory: Path) -> list[str]:
    told = ((load, said, measured(worker, load, directory)) for load, said in rows)
    return [f"{load}: {found} is not {said}" for load, said, found in told if found != said]


@pytest.mark.parametrize("name", every(PREBUILT))
def test_stored_bytes_of_a_build(name: str, directory: Path, one_cpu: Path) -> None:
    rows = list(known(name))
    assert len(rows) == 60
    assert len({said for _, said in rows}) > 50
    assert sum(load.model == TINY for load, _ in rows) > 5
    with Worker(llama_cpp=called(name, one_cpu)) as worker:
        assert different(worker, rows, directory) == []


@pytest.mark.parametrize("n_servers", [0, 2])
@pytest.mark.parametrize("name", [PINNED, *(pytest.param(name, marks=pytest.mark.llama_cpp) for name in OTHERS)])
def test_bytes_that_a_build_is_asked_for_now(
    name: str, n_servers: int, directory: Path, one_cpu: Path, tmp_path: Path
) -> None:
    """A program with the build's own headers tells them, of the CPU and of the build's own rpc-servers."""
    if not PINNED_SOURCE.is_dir():
        pytest.skip("the source of the pinned llama.cpp is not there: make tools")
    place = called(name, one_cpu)
    build = find(place)
    program = compiled(build, headers_of(name, PINNED_SOURCE), tmp_path)
    with servers(name, n_servers) as endpoints:
        if len(endpoints) != n_servers:
            pytest.skip(f"{name} has no rpc-server")
        loads = list(draw(40, 7, bool(endpoints)))
        rows = list(zip(loads, answers(program, build, loads, directory, endpoints), strict=True))
        with Worker(llama_cpp=place, rpc=endpoints) as worker:
            assert different(worker, rows, directory) == []


@pytest.mark.llama_cpp
@cases(("b10434", PINNED, "7.0.0"), (PINNED, "b10434", "5.0.0"))
def test_a_server_of_another_protocol(name: str, server: str, version: str) -> None:
    """Which protocols it can use is llama.cpp's to say: one refuses the server, another one ends."""
    build = where(name)
    with servers(server, 1) as (endpoint,), pytest.raises(RemoteError) as caught:
        Worker(llama_cpp=build, rpc=endpoint).devices()
    assert str(caught.value) == (
        f"the RPC server {endpoint} has version {version} of the protocol, and this llama.cpp has another one: run an "
        "rpc-server of the same llama.cpp as this one"
    )
