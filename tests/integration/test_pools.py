"""Machines whose GPU and processor share one memory: no plan takes more of it than there is, and none wastes it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import fitter
from fitter import Plan, VirtualDevice
from fitter.llama.client import Worker
from fitter.machine.gpu import parse_gpus
from tools.models import shapes

MIB, GIB = 2**20, 2**30

MACHINES = (
    *("m1:16GiB", "m2-pro:32GiB", "m3-max:64GiB", "m3-ultra:512GiB", "m4-max:128GiB"),
    *("m5:24GiB", "strix-halo:128GiB", "strix-halo-96gb", "dgx-spark", "jetson-orin-64gb"),
    *("jetson-thor", "radeon-890m:64GiB", "lunar-lake:32GiB"),
)
SHAPES = ("llama-3.1-8b", "gemma3-12b", "gpt-oss-20b", "qwen3-30b-a3b", "llama-3.1-70b", "gpt-oss-120b")


class Models:
    """Models of each shape, written when they are first asked about, and a worker for all questions."""

    def __init__(self, directory: Path, worker: Worker) -> None:
        self.directory = directory
        self.worker = worker

    def path(self, shape: str) -> Path:
        path = self.directory / f"{shape}.gguf"
        return path if path.exists() else shapes.write(shape, self.directory, vocab=False)

    def fit(self, shape: str, device: VirtualDevice, **keywords: Any) -> Plan:
        return fitter.fit(self.path(shape), gpus=[device], worker=self.worker, program="any", **keywords)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Models]:
    directory = tmp_path_factory.mktemp("models")
    shapes.write("llama-3.1-8b", directory, vocab=False)
    with Worker() as worker:
        yield Models(directory, worker)


def taken(plan: Plan) -> int:
    """Count the bytes of a plan in the shared memory again; pages of the file count once where both sides map them."""
    (pool,) = plan.pools
    rows = [row for row in plan.breakdown.rows if row.is_host or row.device in pool.members]
    weights = sum(row.model for row in rows)
    is_mapped = pool.name.startswith("MTL") and pool.load_mode is None
    beyond = max(0, weights - plan.model.bytes) if is_mapped else 0
    later = sum(each.bytes or 0 for each in plan.later)
    shared = sum(row.used for use in plan.shared for row in use.rows)
    return sum(row.used for row in rows) - beyond + later + shared


def check(plan: Plan, device: VirtualDevice) -> None:
    assert device.shared is not None
    (pool,) = plan.pools
    assert pool.members == (device.name, "host") and pool.name == f"{device.name}+host"
    assert (pool.total, pool.free, pool.margin) == (device.shared.total, device.shared.free, GIB)
    assert pool.used == taken(plan)
    assert plan.fits == (pool.left >= pool.margin and all(use.fits for use in (*plan.devices, plan.host)))


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
@given(
    st.sampled_from(MACHINES),
    st.sampled_from(SHAPES),
    st.sampled_from([0.2, 0.4, 0.7, 1.0]),
    st.sampled_from([{}, {"n_ctx": 16384}, {"n_seq_max": 4}, {"objective": "context"}, {"n_gpu_layers": 12}]),
)
def test_no_more_than_there_is(models: Models, spec: str, shape: str, share: float, keywords: dict[str, Any]) -> None:
    (device,) = parse_gpus([spec])
    assert device.shared is not None
    carved, free = device.shared.carved, device.shared.free
    memory = replace(device.shared, free=carved + max(3 * GIB, int((free - carved) * share)))
    device = replace(device, free=min(device.free, memory.free), shared=memory)
    plan = models.fit(shape, device, **keywords)
    if plan.fits:
        check(plan, device)
    else:
        assert all(problem.missing > 0 for problem in plan.problems)
    # no worse than the simple plan: as many layers on the GPU as asked for, the smallest context, nothing moved
    simple = {"n_ctx": 4096 * keywords.get("n_seq_max", 1), "n_gpu_layers": 99, **keywords}
    simple.pop("objective", None)
    found = fitter.measure(models.path(shape), gpus=[device], worker=models.worker, **simple)
    does_fit = (
        found.on(device.name).used <= device.free - GIB
        and found.host.used <= memory.free - carved - GIB
        and sum(row.used for row in found.rows) <= memory.free - GIB
    )
    # a device of AMD's has a margin of its own, and a real load may take more
    assert plan.fits or not does_fit or device.profile == "rocm"
    assert not does_fit or not plan.fits or plan.params.n_ctx >= simple["n_ctx"]


@pytest.mark.parametrize("spec", MACHINES)
def test_more_than_two_halves_by_hand(models: Models, spec: str) -> None:
    """The GPU with what it may use, and the host with the rest: what had to be said before, byte by byte."""
    (device,) = parse_gpus([spec])
    assert device.shared is not None
    shape = "llama-3.1-70b" if device.shared.free > 44 * GIB else "gemma3-12b"
    plan = models.fit(shape, device)
    check(plan, device)
    free = min(device.free, device.shared.free - 4 * GIB)
    halves = replace(device, free=free, shared=None)
    by_hand = models.fit(shape, halves, host_memory=device.shared.free - free)
    assert plan.fits >= by_hand.fits
    assert plan.params.n_ctx >= by_hand.params.n_ctx
    assert plan.pools and not by_hand.pools


def test_the_whole_memory_of_a_spark_is_used(models: Models) -> None:
    (device,) = parse_gpus(["dgx-spark:available=44GiB"])
    plan = models.fit("llama-3.1-70b", device)
    check(plan, device)
    (pool,) = plan.pools
    # the next larger context is beyond it
    assert plan.fits and 0 <= pool.left - pool.margin < 256 * 320 * 1024 + 32 * MIB
    assert plan.params.tensor_buft_overrides == () and plan.params.n_gpu_layers == 81


def test_nothing_is_moved_where_both_sides_have_the_same_memory(models: Models) -> None:
    (device,) = parse_gpus(["dgx-spark:available=40GiB"])
    plan = models.fit("llama-3.1-70b", device)
    assert not plan.fits
    (problem,) = plan.problems
    assert problem.device == "CUDA0+host"
    assert problem.message.startswith("CUDA0 and host lack ") and "of the memory that they share" in problem.message


def test_a_gpu_that_may_use_too_little_has_a_part(models: Models) -> None:
    """Weights on the host of the same memory where macOS keeps the GPU from using more, and what would change that."""
    (device,) = parse_gpus(["metal:48GiB"])
    plan = models.fit("llama-3.1-70b", device)
    check(plan, device)
    (pool,) = plan.pools
    assert plan.fits and plan.params.tensor_buft_overrides and pool.load_mode == "none"
    assert " -lm none " in " ".join(plan.arguments())
    setting = pool.setting
    assert setting is not None and setting.command == f"sudo sysctl iogpu.wired_limit_mb={setting.bytes // MIB}"
    (larger,) = parse_gpus([f"metal:48GiB:free={setting.bytes // MIB}MiB"])
    better = models.fit("llama-3.1-70b", larger, n_ctx=4096)
    check(better, larger)
    assert better.fits and better.params.tensor_buft_overrides == ()
    assert better.pools[0].load_mode is None and "-lm" not in better.arguments()


def test_the_kernel_parameter_that_is_named_is_enough(models: Models) -> None:
    (device,) = parse_gpus(["strix-halo:128GiB"])
    plan = models.fit("gpt-oss-120b", device, context_cost=0)
    setting = plan.pools[0].setting
    assert setting is not None
    pages = setting.bytes // 4096
    assert setting.command == f"ttm.pages_limit={pages} ttm.page_pool_size={pages} on the kernel's command line"
    (larger,) = parse_gpus([f"strix-halo:128GiB:free={setting.bytes // MIB}MiB"])
    better = models.fit("gpt-oss-120b", larger, context_cost=0)
    assert plan.params.tensor_buft_overrides and not better.params.tensor_buft_overrides
    assert better.params.n_ctx == 131072 and better.pools[0].setting is None


def test_weights_of_both_sides_are_counted_once(models: Models) -> None:
    """Token embeddings that are the output's weights, too: a Mac maps the same pages of the file for both."""
    (device,) = parse_gpus(["m3-max:64GiB"])
    plan = models.fit("gemma3-12b", device)
    check(plan, device)
    (pool,) = plan.pools
    weights = sum(row.model for row in plan.breakdown.rows)
    assert pool.mapped_twice == weights - plan.model.bytes > 500 * MIB
    (device,) = parse_gpus(["dgx-spark"])
    assert models.fit("gemma3-12b", device).pools[0].mapped_twice == 0, "CUDA has a copy"


def test_weights_that_are_read_are_counted_twice(models: Models) -> None:
    """The user's load mode does not map the file: both sides have a copy, and a device none of what is the host's."""
    (device,) = parse_gpus(["m3-max:64GiB"])
    words = {"n_ctx": 8192, "load_mode": "none"}
    plan, mapped = models.fit("gemma3-12b", device, **words), models.fit("gemma3-12b", device, n_ctx=8192)
    (pool,), (before,) = plan.pools, mapped.pools
    assert (pool.mapped_twice, pool.mapped_between, pool.load_mode) == (0, 0, None)
    assert pool.used == before.used + before.mapped_twice == sum(row.used for row in plan.breakdown.rows)
    shape = "shape://qwen3-30b-a3b:Q4_K_M"
    between, before_between = (
        fitter.fit(shape, gpus=[device], worker=models.worker, n_ctx=8192, **each).pools[0].mapped_between
        for each in ({"load_mode": "none"}, {})
    )
    assert before_between > 0 == between


def test_what_a_server_keeps_is_in_the_same_memory(models: Models) -> None:
    (device,) = parse_gpus(["m5:24GiB"])
    plan = fitter.fit(models.path("gpt-oss-20b"), gpus=[device], worker=models.worker, program="llama-server")
    (pool,) = plan.pools
    assert plan.fits and plan.host.later > 0 and pool.used == taken(plan) and pool.left >= pool.margin
    assert plan.host.left is not None and plan.host.left - plan.host.margin > pool.left - pool.margin
    assert "-cram" in plan.arguments()


def test_a_gpu_beside_another_is_used_where_it_is_named(models: Models) -> None:
    gpus = ["radeon-890m:32GiB", "rtx-4060"]
    alone = fitter.fit(models.path("llama-3.1-8b"), gpus=gpus, worker=models.worker, program="any", n_ctx=4096)
    assert [use.name for use in alone.devices] == ["CUDA0"] and alone.pools == ()
    assert alone.notes[-1].startswith("Vulkan0 stays idle: it shares the host's memory, and with a layer there")
    assert alone.host.total == 32 * GIB
    named = fitter.fit(
        models.path("llama-3.1-8b"), gpus=gpus, worker=models.worker, program="any", devices=["CUDA0", "Vulkan0"]
    )
    assert [use.name for use in named.devices] == ["CUDA0", "Vulkan0"]
    assert named.pools[0].members == ("Vulkan0", "host")
    every, _ = fitter.devices(gpus)
    assert [device.type for device in every] == ["igpu", "gpu"]


def test_a_pool_that_cannot_keep_its_margin(models: Models) -> None:
    with pytest.raises(fitter.UsageError, match=r"^MTL0\+host has 1024 MiB .* so nothing can be placed: use a smaller"):
        fitter.fit(models.path("llama-3.1-8b"), gpus="metal:5GiB", worker=models.worker)
