"""Any program: a plan that holds for all of them."""

from __future__ import annotations

from typing import ClassVar

from fitter.programs.facts import Facts
from fitter.programs.llama_cpp_python import LlamaCppPython
from fitter.programs.program import Asked


class AnyProgram(LlamaCppPython):
    """Any program: every token of a batch has an output, the most that a program can use."""

    name: ClassVar[str] = "any"
    has_slots: ClassVar[bool] = True
    reads_logits: ClassVar[bool] = False

    def outputs(self, asked: Asked, facts: Facts, n_seq_max: int) -> int:
        return 0


PROGRAMS = (AnyProgram(),)
