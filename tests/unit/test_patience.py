"""What tests wait with: it waits for what comes, and fails where it never does."""

from __future__ import annotations

import subprocess
import sys

import psutil
import pytest

from tests.support import patience
from tests.support.cases import cases
from tests.support.patience import TooLateError, all_end, in_time, suspended, until, with_more_time


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "SECONDS", 0.05)


def test_what_comes_is_waited_for() -> None:
    looks = iter([False, False, True])
    until(lambda: next(looks))
    assert next(looks, None) is None


@pytest.mark.usefixtures("impatient")
def test_what_never_comes_fails() -> None:
    with pytest.raises(AssertionError, match="no one comes"):
        until(lambda: False, "no one comes")


@pytest.mark.usefixtures("impatient")
def test_a_process_that_goes_on_is_told() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        own = psutil.Process(process.pid)
        assert not all_end([own])
        process.communicate(b"\n")
        assert all_end([own])


def test_a_process_that_nobody_waits_for_has_ended() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        assert all_end([psutil.Process(process.pid)])
        assert process.returncode is None


def test_what_was_too_late_is_tried_again() -> None:
    tries: list[int] = []

    def attempt() -> int:
        tries.append(1)
        if len(tries) < 3:
            raise TooLateError
        return len(tries)

    assert in_time(attempt) == 3


def test_what_is_always_too_late_fails() -> None:
    def attempt() -> None:
        raise TooLateError

    with pytest.raises(pytest.fail.Exception, match="too late 25 times"):
        in_time(attempt)


def test_what_is_wrong_is_not_tried_again() -> None:
    tries: list[int] = []

    def attempt() -> None:
        tries.append(1)
        raise AssertionError("wrong")

    with pytest.raises(AssertionError, match="wrong"):
        in_time(attempt)
    assert tries == [1]


@cases((1, [1]), (2, [1, 2]), (3, [1, 2, 5]))
def test_a_longer_limit_is_tried(needed: float, tried: list[float]) -> None:
    seen: list[float] = []

    def attempt(seconds: float) -> None:
        seen.append(seconds)
        assert seconds >= needed

    with_more_time(attempt, 1, 2, 5)
    assert seen == tried


def test_what_fails_with_the_longest_limit_fails() -> None:
    def attempt(seconds: float) -> None:
        with pytest.raises(ValueError, match="never"):
            assert seconds

    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        with_more_time(attempt, 1, 2)


def test_children_are_stopped_as_they_begin() -> None:
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(1); print(1)'])"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        (child,) = suspended(process, 0.05, with_forks=False)
        assert child.status() == psutil.STATUS_STOPPED
        child.resume()
        assert process.communicate()[0] == "1\n"
