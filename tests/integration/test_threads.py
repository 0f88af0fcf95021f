"""``fitter.fit`` from several threads at once: the plans of one after the other, and no process left behind."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

import fitter
from fitter.errors import ModelError
from fitter.machine import bandwidth
from fitter.planning.plan.plan import Search
from fitter.planning.request.request import Progress
from tests.support.patience import SECONDS
from tools.models import shapes
from tools.models.tiny import TINY_DENSE, TINY_MOE, write_tiny

FITS: dict[str, tuple[str, dict[str, Any]]] = {
    "large MoE, three unequal": ("qwen3-30b-a3b", {"gpus": ["8GiB", "6GiB", "4GiB"]}),
    "large dense, two": ("llama-3.1-8b", {"gpus": ["2x 4GiB"], "n_seq_max": 2}),
    "the same file, one of another size": ("llama-3.1-8b", {"gpus": ["7GiB"], "type_k": "q8_0", "type_v": "q8_0"}),
    "this machine": ("tiny moe", {"host_memory": "8GiB", "devices": ()}),
    "does not fit": ("tiny dense", {"gpus": ["2GiB"], "n_ctx": 4_000_000, "host_memory": "2GiB"}),
    "overrides": ("tiny moe", {"gpus": ["2GiB"], "override_tensor": ["ffn_down_exps=CPU"], "n_gpu_layers": 3}),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    tiny = {model.name: write_tiny(folder / f"{model.name}.gguf", model) for model in (TINY_MOE, TINY_DENSE)}
    large = {name: shapes.write(name, folder, vocab=False) for name in ("qwen3-30b-a3b", "llama-3.1-8b")}
    return {**tiny, **large}


def _ignore(_: Progress) -> None:
    pass


def fit(models: Mapping[str, Path], name: str, on_progress: Callable[[Progress], None] = _ignore) -> fitter.Plan:
    """The plan, without how long it took to find."""
    model, options = FITS[name]
    plan = fitter.fit(models[model], on_progress=on_progress, **options)
    # a second process may have measured the plan early, or not
    return replace(plan, search=Search(0, 0.0))


def test_the_plans_are_those_of_one_after_the_other(models: Mapping[str, Path], tmp_path: Path) -> None:
    # the plan that measures the host's memory says so, and all later ones that it was kept
    bandwidth.host_speed()
    before = set(psutil.Process().children())
    alone = {name: fit(models, name) for name in FITS}
    assert len({str(plan) for plan in alone.values()}) == len(FITS), "no two are alike"
    assert not alone["does not fit"].fits

    everyone_is_at_it = threading.Barrier(len(FITS), timeout=SECONDS)
    workers: set[int] = set()

    def together(name: str) -> fitter.Plan:
        steps = 0

        def step(_: Progress) -> None:
            nonlocal steps
            steps += 1
            if steps == 1:
                everyone_is_at_it.wait()
                workers.add(len(set(psutil.Process().children()) - before))
                everyone_is_at_it.wait()

        plan = fit(models, name, step)
        assert steps
        return plan

    def fails() -> None:
        not_a_model = tmp_path / "no.gguf"
        not_a_model.write_bytes(b"no model")
        for _ in range(3):
            with pytest.raises(ModelError, match=r"no\.gguf"):
                fitter.fit(not_a_model, gpus=["8GiB"])

    with ThreadPoolExecutor(len(FITS) + 1) as pool:
        failing = pool.submit(fails)
        plans = dict(zip(FITS, pool.map(together, FITS), strict=True))
        failing.result()
    assert plans == alone
    assert max(workers) >= len(FITS), "each had a worker of its own at the same time"
    assert set(psutil.Process().children()) <= before


def test_an_interrupted_fit_disturbs_no_other(models: Mapping[str, Path]) -> None:
    """An error that ``on_progress`` raises ends its own fit, and its worker."""
    before = set(psutil.Process().children())
    name = "large MoE, three unequal"
    alone = fit(models, name)

    def stop(_: Progress) -> None:
        raise KeyboardInterrupt

    def interrupted() -> None:
        with pytest.raises(KeyboardInterrupt):
            fit(models, name, stop)

    with ThreadPoolExecutor(2) as pool:
        stopped = pool.submit(interrupted)
        assert fit(models, name) == alone
        stopped.result()
    assert set(psutil.Process().children()) <= before
