"""Random command lines end with a plan that keeps its margins and is what it is said to be, or with one line."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import click
import pytest

import fitter
from fitter import api
from fitter.cli import main
from fitter.cli.fit import fit as command
from fitter.errors import EXIT_DOES_NOT_FIT, EXIT_FITS
from fitter.llama.client import Worker
from fitter.machine.gpu import parse_gpus
from fitter.parameters.table import LoadKeywords, taken_by
from fitter.planning.request.request import DEFAULT_HOST_MARGIN
from tools.models import shapes

MODELS = {
    "dense": shapes.shape("small-dense"),
    "experts": shapes.shape("small-experts"),
    "windows": shapes.shape("small-windows"),
}

GPUS = (
    *("rtx-4060", "tesla-p40:free=1500MiB", "rx-7600", "arc-a380", "900MiB", "1400MiB", "3GiB", "cuda:12.0:2GiB"),
    *("rocm:gfx906:2GiB", "vulkan:2GiB", "vulkan:lavapipe:1500MiB", "vulkan:nvidia:1100MiB", "metal:4GiB"),
)

PATTERNS = ("exps", "blk.0", "attn", "ffn_(up|down)", "norm", "output", "token_embd", ".*", "nothing")

OPTIONS: tuple[tuple[float, str, tuple[str, ...]], ...] = (
    (0.3, "-c", ("0", "1", "4096", "32768", "1000000")),
    (0.2, "-ngl", ("0", "1", "5", "all")),
    (0.2, "-np", ("1", "4", "64", "256")),
    (0.1, "-b", ("1", "512", "4096")),
    (0.1, "-ub", ("16", "512", "2048")),
    (0.1, "-fa", ("on", "off")),
    (0.1, "-ctk", ("f32", "q8_0", "q4_0")),
    (0.1, "-sm", ("none", "layer")),
    (0.1, "-mg", ("0", "1")),
    (0.3, "--fit-target", ("0", "100", "512", "100000")),
    (0.2, "--fit-ctx", ("1", "256", "16384")),
    (0.2, "--host-memory", ("1100MiB", "2GiB", "64GiB")),
    (0.1, "--allow", ("ubatch,context", "paging", "kv-q8_0,no-op-offload")),
    (0.1, "--strategy", ("llama.cpp", "fastest")),
    (0.1, "--objective", ("generation", "prompt", "context")),
    (0.1, "--time-limit", ("0.05", "60")),
    (0.1, "--reserve", ("host=100MiB",)),
)

FLAGS = ("-kvu", "-nkvo", "--no-op-offload", "--swa-full", "--cpu-moe", "--embedding", "--json", "--anyway")


def drawn(seed: int) -> tuple[str, list[str]]:
    """A model and the words after it: always the same ones."""
    dice = random.Random(f"words {seed}")
    specs = [dice.choice(GPUS) for _ in range(dice.choice((1, 1, 2, 2, 3, 4)))]
    names = [gpu.name for gpu in parse_gpus(specs)]
    words = [word for spec in specs for word in ("--gpu", spec)]
    while dice.random() < 0.5:
        words += ["-ot", f"{dice.choice(PATTERNS)}={dice.choice((*names, 'CPU'))}"]
    if dice.random() < 0.15:
        words += ["-dev", ",".join(dice.sample(names, dice.randrange(1, len(names) + 1)))]
    if dice.random() < 0.15:
        words += ["-ts", ",".join(dice.choice(("0", "1", "3")) for _ in names)]
    for likely, option, values in OPTIONS:
        words += [option, dice.choice(values)] if dice.random() < likely else []
    words += [flag for flag in FLAGS if dice.random() < 0.05]
    return dice.choice(list(MODELS)), words


@pytest.mark.parametrize("first", range(0, 80, 10))
def test_random_words(
    models: dict[str, Path],
    worker: Worker,
    first: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    plans: list[tuple[api.Plan, dict[str, Any]]] = []

    fit_anew = api.fit

    def fit(model: str, **words: Any) -> api.Plan:
        plans.append((fit_anew(model, worker=worker, **words), words))
        return plans[-1][0]

    monkeypatch.setattr(api, "fit", fit)
    answered = 0
    for seed in range(first, first + 10):
        name, words = drawn(seed)
        plans.clear()
        status = main([str(models[name]), *words])
        said = capsys.readouterr().err
        errors = [line for line in said.splitlines() if line.startswith("fitter: error: ")]
        called = f"{seed}: {name} {' '.join(words)}\n{said}"
        assert status in (EXIT_FITS, EXIT_DOES_NOT_FIT) or (status in (2, 3, 5) and len(errors) == 1), called
        assert "llama.cpp was ended" not in said, called
        answered += bool(plans)
        for plan, given in plans:
            assert plan.fits == (status == EXIT_FITS) or status == 3, called
            assert faults(plan, given, models[name], worker) == [], called
    assert answered >= 3, "words that make no sense are no plan, and most make some"


def faults(plan: api.Plan, given: dict[str, Any], model: Path, worker: Worker) -> list[str]:
    """Return the faults of a plan: margins that it does not keep, and rows that its own arguments do not give."""
    used = {row.device: plan.breakdown.on(row.device).used for row in plan.breakdown.rows if row.device}
    found = [
        f"{device.name} does not keep its margin"
        for device in plan.devices
        if plan.fits and used.get(device.name) and device.free - used[device.name] < device.margin
    ]
    host = plan.breakdown.host
    taken = host.used - (host.model if "paging" in given.get("allow", ()) else 0)
    if plan.fits and plan.host.free is not None and plan.host.free - taken < DEFAULT_HOST_MARGIN:
        found.append("the host does not keep its margin")
    context: click.Context = command.make_context("fit", ["model.gguf", *plan.arguments(anyway=True)])
    parameters = {each.name: context.params[each.name] for each in taken_by(LoadKeywords) if each.options}
    again = fitter.measure(model, gpus=given["gpus"], worker=worker, **parameters)
    if set(filter(lambda row: row.used, again.rows)) != set(filter(lambda row: row.used, plan.breakdown.rows)):
        found.append(f"{plan.arguments(anyway=True)} take {again.rows}, the plan has {plan.breakdown.rows}")
    return found
