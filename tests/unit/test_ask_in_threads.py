"""Several workers answer many questions: each question once, and nothing is asked after an error."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from typing import Any, cast

import pytest

from fitter.api.call_worker import ask_in_threads
from fitter.llama.client import Worker


class Dummy:
    dismissed = False

    def dismiss(self) -> None:
        self.dismissed = True


def dummies(count: int) -> list[Worker]:
    return cast(list[Worker], [Dummy() for _ in range(count)])


@pytest.mark.parametrize("count", [1, 3])
def test_each_item_is_asked_once_and_told_alone(count: int) -> None:
    answers: dict[int, int] = {}
    telling = threading.Lock()

    def tell(item: int, answer: int, worker: Worker) -> None:
        assert telling.acquire(blocking=False), "two tell at the same time"
        answers[item] = answer
        telling.release()

    workers = dummies(count)
    ask_in_threads(workers, iter(range(200)), lambda item, worker: item * item, tell)
    assert answers == {item: item * item for item in range(200)}
    assert not any(cast(Any, worker).dismissed for worker in workers)


def test_workers_ask_at_the_same_time() -> None:
    both = threading.Barrier(2, timeout=60)
    ask_in_threads(dummies(2), [1, 2], lambda item, worker: both.wait(), lambda *told: None)


@pytest.mark.parametrize("dismiss", [True, False])
def test_the_first_error_ends_all(dismiss: bool) -> None:
    waiting: queue.SimpleQueue[int | None] = queue.SimpleQueue()
    waiting.put(1)
    asked: list[int] = []

    def items() -> Iterator[int]:
        # the second worker waits for an item that never comes
        yield from iter(waiting.get, None)

    def ask(item: int, worker: Worker) -> None:
        asked.append(item)
        raise ValueError(item)

    workers = dummies(2)
    with pytest.raises(ValueError, match="1"):
        ask_in_threads(workers, items(), ask, lambda *told: None, stop=lambda: waiting.put(None), dismiss=dismiss)
    assert asked == [1]
    assert [cast(Any, worker).dismissed for worker in workers] == [dismiss] * 2


def test_nothing_is_asked_after_an_error_of_what_is_told() -> None:
    asked: list[int] = []

    def tell(item: int, answer: None, worker: Worker) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ask_in_threads(dummies(1), range(9), lambda item, worker: asked.append(item), tell)
    assert asked == [0]


def test_items_may_end_with_an_answer() -> None:
    found: list[int] = []
    items = (item for item in range(9) if len(found) < 3)
    ask_in_threads(dummies(1), items, lambda item, worker: item, lambda item, answer, worker: found.append(answer))
    assert found == [0, 1, 2]
