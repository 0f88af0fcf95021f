"""Prebuilt builds of llama.cpp with CUDA: what their own libggml-cuda.so says, and what fitter's rules say of them.

They are 140 MB each and fetched by package name: ``make test-llama-cpp`` does. Where a package index cannot be reached,
and the build is not there, its tests are skipped.
"""

from __future__ import annotations

from pathlib import Path

import pytest

import fitter
from fitter.api.call_worker import answering
from fitter.llama.build.inspect_build import inspect_build
from fitter.llama.build.virtual_backends import Answering, compared, find_cuda_library
from fitter.llama.client import Worker
from fitter.machine.gpu import parse_gpus
from tools.builds import llama_builds
from tools.comparisons.cuda_reference import Load, difference, loads, spread
from tools.comparisons.cuda_rules import Subject, answers, differing, packaged
from tools.models import shapes
from tools.oracle.draw import draw

pytestmark = [pytest.mark.llama_cpp, pytest.mark.timeout(1200)]

COUNT, SEED = 250, 77
GPUS = ["2x rtx-4090", "rtx-3090"]
VOLTA = 700


def subject(name: str) -> Subject:
    try:
        return packaged(name)
    except llama_builds.FetchError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("name", llama_builds.cuda())
def test_the_rules_are_those_of_the_build(name: str, directory: Path) -> None:
    real, mirror = answers(subject(name), draw(list(shapes.SHAPES), COUNT, SEED), directory, 2)
    assert sum(not row["result"].startswith("FAIL") for row in real) > COUNT * 4 // 5
    assert differing(real, mirror) == []


@pytest.mark.parametrize("name", llama_builds.cuda())
def test_its_own_library_answers_without_being_asked(name: str, directory: Path) -> None:
    build = subject(name)
    library = find_cuda_library(build.library)
    assert answering(parse_gpus(GPUS), None, build.where) == Answering(library)
    model = shapes.write("qwen3-235b-a22b", directory, vocab=False)
    with Worker(llama_cpp=build.where) as worker:
        plan = fitter.fit(model, gpus=GPUS, n_ctx=16384, worker=worker)
        assert worker.library == library
        assert {device.backend for device in worker.devices()} == {"CUDA"}
        by_rules = fitter.fit(model, gpus=GPUS, n_ctx=16384, profile="cuda", worker=worker)
        assert worker.library is None
        assert {device.backend for device in worker.devices()} == {"fitter"}
    assert plan.fits
    assert (plan.params, plan.breakdown) == (by_rules.params, by_rules.breakdown)


@pytest.mark.parametrize("name", llama_builds.cuda())
def test_the_build_is_among_the_figures(name: str) -> None:
    seen = inspect_build(subject(name).where)
    found = compared("cuda", seen.ggml, seen.commit)
    assert found is not None
    assert found.llama_cpp == name.removesuffix("-cuda")


def sample() -> list[Load]:
    """Stored answers of the pinned ggml-cuda, but those on cards for which the prebuilt one has no code."""
    every = [load for load in loads("drawn") if not any(each.compute_capability == VOLTA for each in load.devices)]
    return spread(every, max(1, len(every) // COUNT))


def test_a_library_of_v0_5_0_answers_as_the_pinned_one(directory: Path) -> None:
    # Nothing of ggml-cuda that decides bytes changed in between, so the answers of the one are the other's.
    library = find_cuda_library(subject("v0.5.0-cuda").library)
    wrong = []
    with Worker() as worker:
        for load in sample():
            if load.environment:
                continue
            worker.configure(load.devices, library)
            wrong += filter(None, [difference(worker, directory, load)])
    assert wrong == []
