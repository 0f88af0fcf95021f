"""The real llama-server's own fit, on virtual devices: what it measures, to the byte, and what it decides.

``make test-server`` compares all cases; here each pair of model and machine and each feature come once.
"""

from __future__ import annotations

import inspect
import random
from dataclasses import replace

import llama_cpp
import pytest

from fitter.llama.client import Worker
from fitter.programs import facts
from fitter.programs.facts import defaults_of
from tools.comparisons import upstream
from tools.server_fit.compare import Models, compare_plan, one_load_differs, plan_differs, planned
from tools.server_fit.pairs import FEATURES, PAIRS, SLOTS, Case

_QUICK = ("llama-3.1-8b", "gemma3-12b", "qwen3-30b-a3b", "gpt-oss-20b", "nemotron-h-9b", "glm45-air")
"""Shapes whose plans are found in a second."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"))


def drawn(shapes: tuple[str, ...], seed: int, *, more: bool = True) -> list[Case]:
    """Every feature with one of the pairs of these shapes that have it; with ``more`` all their other pairs, too."""
    draw = random.Random(seed)
    pairs = [pair for pair in PAIRS if pair.shape in shapes]
    having = {feature: [pair for pair in pairs if feature.fits(pair)] for feature in FEATURES}
    found = [Case(draw.choice(own), feature, draw.choice(SLOTS)) for feature, own in having.items()]
    for pair in pairs if more else ():
        if pair not in {case.pair for case in found}:
            feature = draw.choice([each for each in FEATURES if each.fits(pair)])
            found.append(Case(pair, feature, draw.choice(SLOTS)))
    return found


ALL = tuple({pair.shape: None for pair in PAIRS})


@pytest.mark.parametrize("case", drawn(ALL, 1), ids=lambda case: case.name)
def test_a_load_is_what_llama_server_measures(models: Models, worker: Worker, case: Case) -> None:
    assert one_load_differs(case, models, worker) == []


OVER = {
    "llama-3.1-8b/6GiB+3GiB/draft": "the draft model alone is too large, and stays where it is",
    "llama-3.1-8b/arc-a380/draft of 7": "the same",
    "glm45-air/h100-pcie/mtp": "what the second context takes is taken for a straight line between two contexts",
    "glm45-air/rtx-4090/mtp of 5": "the same",
    "glm45-air/rtx-4090/mtp and n-grams": "the same",
}
"""Cases in which llama-server's own fit exceeds the margins, so that there is nothing to match, and why."""


@pytest.mark.parametrize("case", drawn(_QUICK, 2, more=False), ids=lambda case: case.name)
def test_a_plan_is_what_llama_server_measures_and_gets_no_less(models: Models, worker: Worker, case: Case) -> None:
    name = "/".join((case.pair.shape, "+".join(case.pair.gpus), case.feature.name))
    note = "llama-server's fit takes more than the margins leave" if name in OVER else ""
    assert compare_plan(case, models, worker) == ([], note)


CASE = Case(PAIRS[0], FEATURES[0], ("-np", "4"))


def test_other_slots_are_noticed(models: Models, worker: Worker) -> None:
    plan = planned(CASE, models, worker)
    assert plan_differs(plan, CASE, models) == []
    # its arguments say so, its bytes are those of four
    other = replace(plan, params=replace(plan.params, n_seq_max=3, n_outputs_max=3))
    assert [each.what for each in plan_differs(other, CASE, models)] == ["the model on CUDA0", "the model on host"]


def test_facts_are_those_of_the_program_itself() -> None:
    path = str(upstream.tool("llama-server"))
    said = defaults_of(path)
    assert {"n_parallel", "cache_ram_mib", "n_ctx_checkpoints", "checkpoint_min_step", "draft-mtp"} <= {*said}
    assert facts("llama-server", executable=path) == facts("llama-server")


def test_facts_of_any_program_are_the_librarys() -> None:
    known, params = facts("any"), llama_cpp.llama_context_default_params()
    assert (known.n_batch, known.n_ubatch) == (params.n_batch, params.n_ubatch)
    assert (known.n_parallel, known.kv_unified) == (params.n_seq_max, params.kv_unified)
    assert params.flash_attn_type == llama_cpp.LLAMA_FLASH_ATTN_TYPE_AUTO and known.flash_attn == "auto"


def test_facts_of_llama_cpp_python_are_its_own() -> None:
    known = facts("llama-cpp-python")
    given = inspect.signature(llama_cpp.Llama).parameters
    assert {name: given[name].default for name in ("n_batch", "n_ubatch", "flash_attn")} == {
        "n_batch": known.n_batch,
        "n_ubatch": known.n_ubatch,
        "flash_attn": known.flash_attn == "on",
    }
