"""How large the state of a sequence is, against llama.cpp's own ``llama_state_seq_get_size_ext`` after real tokens."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from fitter.errors import LlamaCppError
from fitter.llama.client import Worker
from fitter.llama.types import Params
from fitter.programs.later import SequenceState, state_of
from tests.support.cases import named_cases
from tests.support.llama_builds import every, where
from tools.architectures.states import CONFIGURATIONS, COUNTS, compare
from tools.models.tiny import TINY_DENSE, TINY_MOE
from tools.models.tiny_kinds import write_hybrid, write_swa, write_vision

MODELS = {
    "dense": TINY_DENSE,
    "MoE": TINY_MOE,
    "SWA": write_swa,
    "recurrent hybrid": write_hybrid,
    "positions of several dimensions": write_vision,
}

OF_BUILDS = {name: CONFIGURATIONS[name] for name in ("4 sequences, one cache, no flash attention",)}
DIFFERING = ("dense", "SWA", "recurrent hybrid", "positions of several dimensions")
"""Kinds whose states builds write in several ways."""


@pytest.mark.parametrize("kind", MODELS)
def test_a_state_has_the_bytes_that_llama_cpp_writes(kind: str, models: dict[str, Path], worker: Worker) -> None:
    found = {each.configuration: each for each in compare(worker, models[kind], CONFIGURATIONS)}
    assert {name: (each.wrong, each.skipped) for name, each in found.items()} == dict.fromkeys(CONFIGURATIONS, ((), ""))
    # the context of each has room for all of them, and for none more
    assert {each.count for each in found.values()} == {len(COUNTS)}


@pytest.mark.parametrize("build", every())
def test_builds_write_what_is_said_of_them(build: str, models: dict[str, Path]) -> None:
    with Worker(llama_cpp=where(build)) as worker:
        for kind in DIFFERING:
            for each in compare(worker, models[kind], OF_BUILDS):
                assert (kind, each.configuration, each.wrong, each.skipped) == (kind, each.configuration, (), "")
                assert each.count == len(COUNTS)


def state(worker: Worker, path: Path, params: Params) -> SequenceState:
    return state_of(worker.caches(path, params), swa_full=params.swa_full)


@named_cases(
    ("dense", "dense", Params(n_ctx=512), False),
    ("MoE", "MoE", Params(n_ctx=512), False),
    ("SWA", "SWA", Params(n_ctx=512), True),
    ("SWA in full", "SWA", Params(n_ctx=512, swa_full=True), False),
    ("recurrent hybrid", "recurrent hybrid", Params(n_ctx=512), True),
    ("recurrent hybrid, SWA in full", "recurrent hybrid", Params(n_ctx=512, swa_full=True), True),
)
def test_checkpoints_are_needed_where_tokens_cannot_be_taken_back(
    kind: str, params: Params, needed: bool, models: dict[str, Path], worker: Worker
) -> None:
    assert state(worker, models[kind], params).needs_checkpoints is needed


def test_a_checkpoint_grows_no_more_behind_the_window(models: dict[str, Path], worker: Worker) -> None:
    params = Params(n_ctx=65536, n_seq_max=4, kv_unified=True)
    own = state(worker, models["SWA"], params)
    assert own.checkpoint(100) < own.checkpoint(256) == own.checkpoint(60000) == own.largest_checkpoint
    assert own.full(60000) < own.full(65536) == own.largest
    hybrid = state(worker, models["recurrent hybrid"], params)
    assert hybrid.checkpoint(0) < hybrid.checkpoint(1) == hybrid.checkpoint(65536) == hybrid.largest_checkpoint


def test_a_build_that_writes_otherwise_is_refused(models: dict[str, Path], worker: Worker) -> None:
    found = worker.caches(models["dense"], Params(n_ctx=512))
    with pytest.raises(LlamaCppError) as error:
        state_of(replace(found, empty_partial=found.empty_partial + 4))
    assert str(error.value) == (
        "this build of llama.cpp writes the state of a sequence in a way that fitter does not know (an empty "
        "checkpoint has 20 bytes, not 16): plan with another build of llama.cpp"
    )
