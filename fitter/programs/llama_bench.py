"""llama-bench: one sequence, with an output for every token of a prompt."""

from __future__ import annotations

from typing import ClassVar

from fitter.programs.program import Program


class LlamaBench(Program):
    """llama-bench."""

    name: ClassVar[str] = "llama-bench"


PROGRAMS = (LlamaBench(),)
