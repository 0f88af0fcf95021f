"""The work of users: what ``--workload`` and ``--users`` mean, and what they refuse."""

from __future__ import annotations

from pathlib import Path

import pytest

from fitter.errors import UsageError
from fitter.planning.request.session import ServedRequest, Session, named, requests_in, session_of
from tests.support.cases import named_cases

NEW = """\
I slot launch_slot_: id  1 | task 0 | processing task, is_child = 0
I slot print_timing: id  1 | task 0 | prompt eval time =    1080.01 ms /   300 tokens (    3.60 ms per token)
I slot print_timing: id  1 | task 0 |        eval time =     735.86 ms /    20 tokens (   38.73 ms per token)
I slot print_timing: id  1 | task 0 |       total time =    1815.87 ms /   320 tokens
I slot      release: id  1 | task 0 | stop processing: n_tokens = 319, truncated = 0
I slot print_timing: id  1 | task 21 | prompt eval time =     347.73 ms /    51 tokens (    6.82 ms per token)
I slot print_timing: id  1 | task 21 |        eval time =     698.73 ms /    20 tokens (   36.78 ms per token)
I slot      release: id  1 | task 21 | stop processing: n_tokens = 389, truncated = 0
"""
OLD = """\
slot print_timing: id  0 | task 7 |
prompt eval time =     100.00 ms /    25 tokens (    4.00 ms per token,   250.00 tokens per second)
       eval time =     200.00 ms /    10 tokens (   20.00 ms per token,    50.00 tokens per second)
      total time =     300.00 ms /    35 tokens
slot      release: id  0 | task 7 | stop processing: n_past = 34, truncated = 0
"""


@named_cases(
    ("a name", "chat", None, named()["chat"]),
    ("a name, with a number of its own", "agent,turns=5", None, Session(50000, 380, 0.968, 5, 1, 3.0)),
    (
        "numbers",
        "prompt=12k,reused=90%,answer=300,turns=20,users=4,gap=2.5s",
        None,
        Session(12288, 300, 0.9, 20, 4, 2.5),
    ),
    ("a share", "reused=0.5", None, Session(reused=0.5)),
    ("users of the option win", "batch,users=3", 5, Session(1024, 256, users=5)),
    ("users alone", None, 5, Session(users=5)),
    ("nothing", None, None, None),
)
def test_written_work(text: str | None, users: int | None, expected: Session | None) -> None:
    assert session_of(text, users) == expected


@named_cases(
    ("an unknown name", "agnt", "neither a log of llama-server nor one of chat, agent, rag, batch"),
    ("an unknown key", "prompt=12,foo=3", "no 'foo': choose from prompt, answer"),
    ("a key twice", "users=2,users=3", "users twice"),
    ("no prompt", "prompt=0", "prompt of --workload is 0: give 1 or more"),
    ("too many users", "users=1025", "give 1 to 1024"),
    ("all reused", "reused=100%", "give a share below 1"),
    ("a share below 0", "reused=-0.1", "give a share below 1"),
    ("no share", "reused=much", "give a share below 1"),
    ("no time", "gap=long", "give seconds"),
    ("no number", "turns=x", "'x' is not a whole number"),
)
def test_work_that_is_refused(text: str, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        session_of(text, None)


def test_a_conversation_grows_by_what_is_new_and_the_answer() -> None:
    # prompts of 600, 800 and 1000 tokens: each has the 100 tokens of an answer and 100 new ones more
    session = Session(800, 100, 7 / 8, 3)
    assert session.new == pytest.approx(100)
    assert session.longest == 1100
    assert session.computed() == pytest.approx((600 + 100 + 100) / 3)
    assert session.computed(kept=0.0) == pytest.approx((600 + 800 + 800) / 3)
    assert session.workload().cached == 800 - 267


def test_requests_without_reuse_are_not_a_conversation() -> None:
    session = Session(1000, 100, 0.0, 10)
    assert (session.longest, session.computed(), session.computed(kept=0.0)) == (1100, 1000, 1000)


def test_a_conversation_that_was_cut_begins_with_what_is_new() -> None:
    assert Session(1000, 100, 0.9, 1000).computed() == pytest.approx(100)


@named_cases(
    ("b10434 and newer", NEW, [ServedRequest(300, 0, 20), ServedRequest(370, 319, 20)]),
    ("older", OLD, [ServedRequest(25, 0, 10)]),
    ("a request without its times", "stop processing: n_tokens = 12, truncated = 0\n", []),
)
def test_requests_of_a_log(log: str, expected: list[ServedRequest]) -> None:
    assert list(requests_in(log.encode().splitlines())) == expected


def test_work_from_a_log(tmp_path: Path) -> None:
    (tmp_path / "server.log").write_text(NEW, encoding="utf-8")
    session = session_of(str(tmp_path / "server.log"), 3)
    assert session == Session(335, 20, 319 / 370, 2, 3)
    # the log has 300 and 51
    assert session.computed() == pytest.approx(351 / 2, rel=0.01)


def test_a_log_without_requests(tmp_path: Path) -> None:
    (tmp_path / "empty.log").write_text("nothing\n", encoding="utf-8")
    with pytest.raises(UsageError, match="has no request of a llama-server"):
        session_of(str(tmp_path / "empty.log"), None)
