"""The worker that is asked: the caller's stays as it was, one of the call ends with it. No process is started here."""

from __future__ import annotations

import pytest

from fitter.api.call_worker import limited, worker_for
from fitter.errors import LlamaCppError
from fitter.llama.client import Worker
from fitter.planning.request.ask import Ask


def test_a_worker_of_the_callers_is_told_and_kept() -> None:
    given = Worker(timeout=7)
    given.deadline = 5.0
    with worker_for(Ask.of({"rpc": ("host:1",), "timeout": 3.0}), given, None) as worker:
        assert worker is given
        assert (worker.rpc, worker.timeout, worker.deadline) == (("host:1",), 7, 5.0)


def test_a_worker_of_the_call_ends_with_it() -> None:
    with worker_for(Ask.of({"timeout": 3.0}), None, print) as worker:
        assert (worker.timeout, worker.on_log) == (3.0, print)
    with pytest.raises(LlamaCppError, match="the worker is closed"):
        worker.devices()


def test_a_limit_is_for_one_fit() -> None:
    worker = Worker()
    worker.deadline = 5.0
    with pytest.raises(KeyError), limited(worker, 1.0):
        assert worker.deadline == 1.0
        raise KeyError
    assert worker.deadline == 5.0
    with limited(worker, None):
        assert worker.deadline is None
