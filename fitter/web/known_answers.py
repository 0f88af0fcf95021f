"""Answers that the server has given, so that the same question costs a look. They are about described cards alone."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from fitter.model import location
from fitter.model.files import header_cache
from fitter.storage import identity

MOST = 64 << 20
"""Most bytes of all answers."""


class KnownAnswers:
    """The last answers, ``most`` bytes of them, by their questions."""

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._answers: OrderedDict[str, bytes] = OrderedDict()
        self.bytes = 0
        """Bytes of all answers."""
        self.hits = 0
        """Questions whose answer was known."""

    def __len__(self) -> int:
        return len(self._answers)

    def get(self, question: str) -> bytes | None:
        """Return the answer to a question, and keep it longer than others; ``None`` if it is not known."""
        answer = self._answers.get(question)
        if answer is not None:
            self._answers.move_to_end(question)
            self.hits += 1
        return answer

    def put(self, question: str, answer: bytes) -> None:
        """Keep an answer, and forget those that were longest not asked for."""
        self.bytes += len(answer) - len(self._answers.pop(question, b""))
        self._answers[question] = answer
        while self.bytes > self._most:
            self.bytes -= len(self._answers.popitem(last=False)[1])


def question(model: str, keywords: Mapping[str, Any]) -> str:
    """Return a text that differs for other keywords, another model, and another version of its files.

    The time limit makes no difference: a plan that it cut short is not kept. Raises ``FitterError`` if the model cannot
    be opened.
    """
    with header_cache.reading():
        files = location.model_files(model)
        asked = {name: value for name, value in keywords.items() if name != "time_limit"}
        return json.dumps([model, [identity(str(file)) for file in files], asked], sort_keys=True)
