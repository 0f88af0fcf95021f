"""Whether llama.cpp can read the tokenizers of models, which are loaded without them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from fitter.llama.client import Worker
from fitter.model.header import Model


class TokenizerCheck:
    """The tokenizers of a call's models.

    One that this llama.cpp has not read before is read while the search goes on, in another process; where only one
    process may use the devices, it is read at the end.

    Args:
        worker: The worker of the call.
        is_alone: Whether no other process may load llama.cpp.
    """

    def __init__(self, worker: Worker, *, is_alone: bool) -> None:
        self._worker, self._is_alone = worker, is_alone
        self._unread: list[str] = []
        self._others = ExitStack()
        self._begun: list[Worker] = []

    def begin(self, model: Model) -> None:
        """Start to read the tokenizer of ``model``. Raises ``LlamaCppError`` where llama.cpp refuses a small one."""
        path = str(model.path)
        if self._worker.is_tokenizer_read(path):
            return
        if self._is_alone:
            self._unread.append(path)
            return
        other = self._others.enter_context(self._worker.without_devices())
        other.begin_tokenizer(path)
        self._begun.append(other)

    def finish(self) -> None:
        """Wait until all are read. Raises ``LlamaCppError`` with llama.cpp's reason where it refuses one."""
        for path in self._unread:
            self._worker.begin_tokenizer(path)
            self._worker.finish_tokenizer()
        for other in self._begun:
            other.finish_tokenizer()
            other.dismiss()
        self._unread, self._begun = [], []

    def close(self) -> None:
        """End the processes that still read."""
        self._others.close()


@contextmanager
def tokenizer_check(worker: Worker, *, is_alone: bool) -> Iterator[TokenizerCheck]:
    """Check tokenizers in the ``with`` block; its end waits for them, unless an error ends it."""
    check = TokenizerCheck(worker, is_alone=is_alone)
    try:
        yield check
        check.finish()
    finally:
        check.close()
