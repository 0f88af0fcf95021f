"""Whatever Python hands to a public call is an answer or a ``UsageError``, and neither takes long."""

from __future__ import annotations

import inspect
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import fitter
from fitter import api
from fitter.errors import FitterError, LlamaCppError, ModelError, RemoteError, TimeLimitError, UsageError
from fitter.llama.client import Worker
from tools.models.tiny import TINY_DENSE, write_tiny

CALLS = {
    name: getattr(api, name) for name in ("fit", "measure", "estimate", "verify", "inspect", "devices", "calibrate")
}
KEYWORDS = [
    (name, keyword)
    for name, call in CALLS.items()
    for keyword in (*inspect.signature(call).parameters, "no_such_keyword")
]

ODD = (np.int64(1), 0.5, float("nan"), "x", "1GiB", b"x", 2**70, -(10**5000), [], [None], object(), "\ud800")
"""Values that each keyword of each call gets; ``tests/unit/test_parameters.py`` sends more of them to each kind."""

VALUES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=20)
    | st.binary(max_size=20)
    | st.integers(-(2**63), 2**63 - 1).map(np.int64)
    | st.floats(width=32).map(np.float32)
    | st.lists(st.integers() | st.floats() | st.text(max_size=5) | st.none(), max_size=3)
    | st.dictionaries(st.text(max_size=5), st.integers() | st.text(max_size=5), max_size=2)
)

FILES = ("model", "plan", "model_draft", "mmproj", "lora", "lora_scaled")
OTHERS: dict[str, type[FitterError]] = {
    **dict.fromkeys((*FILES, "mtp"), ModelError),
    "rpc": RemoteError,
    "timeout": LlamaCppError,
    "time_limit": TimeLimitError,
}
"""Errors that a call finds later: a missing file or missing layers, a silent server, too little time."""

GENEROUS = 1.0
"""Seconds that this process computes for one call, ten times what it may: the machine may be busy."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = write_tiny(tmp_path_factory.mktemp("tiny") / "tiny.gguf", TINY_DENSE)
    # measures this machine's memory, which takes seconds the first time
    fitter.fit(path, gpus=[], n_ctx=256)
    return path


def check(name: str, given: dict[str, Any], model: Path, worker: Worker) -> None:
    """Call it with that beside what it needs in any case."""
    taken = inspect.signature(CALLS[name]).parameters
    usual = {"model": model, "gpus": ["1GiB"], "worker": worker, "n_ctx": 256}
    # to load for real takes long, and what is said of a keyword does not depend on it
    needed = {} if name in ("verify", "calibrate") else {each: usual[each] for each in usual if each in taken}
    start = time.process_time()
    try:
        CALLS[name](**{**needed, **given})
    except UsageError as error:
        assert len(str(error)) < 1000 and "\n" not in str(error)
    except FitterError as error:
        assert name == "calibrate" or isinstance(error, tuple(OTHERS[keyword] for keyword in given)), (given, error)
    assert time.process_time() - start < GENEROUS, (name, given)


@pytest.mark.parametrize(("name", "keyword"), KEYWORDS, ids=[f"{name}-{keyword}" for name, keyword in KEYWORDS])
def test_odd_values_of_every_keyword(name: str, keyword: str, model: Path, worker: Worker) -> None:
    for value in ODD:
        check(name, {keyword: value}, model, worker)


@pytest.mark.parametrize("name", CALLS)
def test_none_is_not_set(name: str, model: Path, worker: Worker) -> None:
    call = CALLS[name]
    unset = dict.fromkeys(inspect.signature(call).parameters.keys() - {"model", "gpus", "worker"})
    if name in ("verify", "calibrate"):
        check(name, unset, model, worker)
    elif name == "fit":
        plans = [call(model, gpus=["1GiB"], worker=worker, **more) for more in ({}, unset)]
        assert plans[0].params == plans[1].params and plans[0].breakdown == plans[1].breakdown
    else:
        needed = {"model": model, "worker": worker, "gpus": ["1GiB"]}
        given = {keyword: value for keyword, value in needed.items() if keyword in inspect.signature(call).parameters}
        answers = [call(**given), call(**given, **unset)]
        # what the host has free is another number each time
        assert answers[0] == answers[1] if name != "devices" else answers[0][0] == answers[1][0]


@given(where=st.sampled_from(KEYWORDS), value=VALUES)
@example(where=("fit", "margin"), value="1GiB")
@example(where=("fit", "n_ctx"), value=np.int64(512))
@example(where=("measure", "devices"), value=["none"])
@example(where=("fit", "devices"), value=["none"])
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
def test_anything_is_an_answer_or_a_usage_error(
    where: tuple[str, str], value: Any, model: Path, worker: Worker
) -> None:
    check(where[0], {where[1]: value}, model, worker)


def test_what_is_the_same_in_other_words(model: Path, worker: Worker) -> None:
    """Bytes and paths, a text for a list, sizes with units, numbers of numpy: the same plan."""
    usual = {"worker": worker, "n_ctx": 512}
    plain = fitter.fit(
        str(model),
        gpus=["1GiB"],
        margin=64 << 20,
        host_margin=0,
        devices=["CUDA0"],
        override_tensor=["ffn_up=CPU"],
        **usual,
    )
    said = fitter.fit(
        os.fsencode(model),
        gpus="1GiB",
        margin="64MiB",
        host_margin="0",
        devices="CUDA0",
        override_tensor="ffn_up=CPU",
        worker=worker,
        n_ctx=np.uint16(512),  # type: ignore[arg-type]
    )
    assert (said.params, said.breakdown, said.devices) == (plain.params, plain.breakdown, plain.devices)
    for call in (fitter.measure, fitter.fit):
        nothing: Any = call(model, gpus=["1GiB"], devices=["none"], **usual)
        assert call(model, gpus=["1GiB"], devices=[], **usual).__class__ is nothing.__class__
        assert (nothing if call is fitter.measure else nothing.breakdown).devices == ()
