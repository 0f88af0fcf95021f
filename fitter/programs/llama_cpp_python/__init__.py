"""llama-cpp-python, as ``Plan.load`` and ``fitter.Llama`` use it."""

from __future__ import annotations

from typing import ClassVar

from fitter.llama.types import Params
from fitter.parameters.table import MAX_SEQUENCES
from fitter.programs.facts import Facts
from fitter.programs.program import Asked, Program


class LlamaCppPython(Program):
    """llama-cpp-python: ``Llama`` reads the logits of the last token only, unless ``logits_all`` is set."""

    name: ClassVar[str] = "llama-cpp-python"
    reads_logits: ClassVar[bool] = True

    def sequences(self, asked: Asked, facts: Facts) -> tuple[int, bool]:
        """Return as many sequences for embeddings as ``Llama`` computes at once."""
        if asked.n_seq_max is None and asked.reads_texts:
            n_batch, _ = self.batches(asked)
            return min(n_batch or Params.n_batch, MAX_SEQUENCES), True
        return super().sequences(asked, facts)

    def outputs(self, asked: Asked, facts: Facts, n_seq_max: int) -> int:
        if asked.reads_texts or asked.is_pooled or asked.logits_all or not facts.sets_outputs:
            return 0
        return n_seq_max


PROGRAMS = (LlamaCppPython(),)
