"""Upstream's own program gets the printed arguments on the same virtual devices; and its own fit is no better."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import fitter
from fitter.llama.types import Breakdown
from fitter.machine.gpu import parse_gpus
from fitter.parameters.table import DEFAULTS
from tools.comparisons import upstream
from tools.comparisons.cases import CASES, Case
from tools.models import shapes

MIB = 1024 * 1024


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("shapes")
    (directory / "bare").mkdir()
    return directory


@pytest.fixture(scope="session")
def theirs(models: Path) -> Callable[[Case], upstream.UpstreamPlan]:
    """Ask upstream for its plan of a case once, with models that have no tokenizer.

    Reading it takes most of each of upstream's dozens of loads, and changes no byte on a device.
    """

    @functools.cache
    def ask(case: Case) -> upstream.UpstreamPlan:
        found = upstream.fit(
            shapes.write(case.shape, models / "bare", vocab=False), parse_gpus(case.gpus), case.options
        )
        assert found is not None, "upstream found nothing at all"
        return found

    return ask


def run_fitter(model: Path, case: Case) -> dict[str, Any]:
    """``python -m fitter`` as a user runs it."""
    gpus = [word for spec in case.gpus for word in ("--gpu", spec)]
    command = [sys.executable, "-m", "fitter", str(model), *gpus, *case.options, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


SAME = 0.022
"""A tensor of 134 MiB of gpt-oss 20B on 8 GiB, by bytes, and less by time."""

OVER = {"llama-3.1-8b/6GiB+3GiB", "llama-3.1-70b/4x8GiB+2x6GiB+2x12GiB"}
"""Cases in which upstream's plan exceeds the margins, so that there is nothing to match."""


def is_over(case: Case, theirs: Breakdown, plan: dict[str, Any]) -> bool:
    is_it = any(theirs.on(each["name"]).used > each["free"] - each["margin"] for each in plan["devices"])
    assert is_it == (case.name in OVER)
    return is_it


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_upstream_measures_what_fitter_says_and_is_no_faster(
    models: Path, theirs: Callable[[Case], upstream.UpstreamPlan], case: Case
) -> None:
    model = shapes.write(case.shape, models)
    gpus = parse_gpus(case.gpus)
    plan = run_fitter(model, case)

    assert plan["fits"] and not plan["problems"]
    assert plan["host"]["free"] is None
    rows = upstream.fit_print(model, gpus, plan["arguments"])
    for device in plan["devices"]:
        assert device["left"] == device["free"] - device["used"] >= device["margin"], device["name"]
        row = rows.get(device["name"])
        if row is None:
            assert device["used"] == 0, f"upstream does not use {device['name']}"
            continue
        assert (row.model, row.context, row.compute) == tuple(
            device[kind] // MIB for kind in ("model", "context", "compute")
        ), device["name"]

    other = theirs(case)
    bare = shapes.write(case.shape, models / "bare", vocab=False)
    price = fitter.estimate(bare, gpus=gpus, **other.keywords)
    if is_over(case, price.breakdown, plan):
        return
    assert plan["params"]["n_ctx"] >= other.n_ctx
    speeds = plan["estimate"]
    seconds = (
        price.workload.prompt / speeds["prompt_tokens_per_second"]
        + price.workload.generate / speeds["generation_tokens_per_second"]
    )
    # upstream's plans of these are up to 0.6 % faster, and 2.2 % where a compute buffer is larger because the first
    # layers leave a card: benchmarks/placements.py says which, and why
    more = DEFAULTS["context_cost"] if plan["params"]["n_ctx"] > other.n_ctx else 0.0
    assert seconds <= price.seconds * (1 + SAME) * (1 + more)


BY_BYTES = [case for case in CASES if len(case.gpus) == 1]


@pytest.mark.parametrize("case", BY_BYTES, ids=lambda case: case.name)
def test_by_bytes_no_less_is_on_devices_than_with_upstream(
    models: Path, theirs: Callable[[Case], upstream.UpstreamPlan], case: Case
) -> None:
    model = shapes.write(case.shape, models / "bare", vocab=False)
    gpus = parse_gpus(case.gpus)
    plan = run_fitter(model, replace(case, options=(*case.options, "--strategy", "llama.cpp")))
    other = theirs(case)
    measured = fitter.measure(model, gpus=gpus, **other.keywords)
    assert not is_over(case, measured, plan)
    assert plan["params"]["n_ctx"] >= other.n_ctx
    on_devices = sum(row.model for row in measured.rows if not row.is_host)
    # where the first layers leave a card, its compute buffer is some 45 MiB larger: a tensor of 134 MiB less has room
    assert sum(device["model"] for device in plan["devices"]) >= (1 - SAME) * on_devices
