"""What a program of llama.cpp makes of a load, and takes beside it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fitter.errors import UsageError
from fitter.llama.types import Params
from fitter.programs.facts import Facts


@dataclass(frozen=True)
class Asked:
    """What the user says that a program reads; ``None`` is not set.

    ``drafted``: the most tokens that are drafted at a time, 0 where nothing drafts. ``reads_texts``: embeddings or
    reranking are asked for. ``logits_all``: every token is to have its logits.
    """

    n_seq_max: int | None = None
    kv_unified: bool | None = None
    n_batch: int | None = None
    n_ubatch: int | None = None
    reads_texts: bool = False
    is_pooled: bool = False
    logits_all: bool = False
    drafted: int = 0


@dataclass(frozen=True)
class Shape:
    """What a program sets of a load, named as in ``Params``; ``None`` leaves it to what follows from the others."""

    n_seq_max: int
    kv_unified: bool
    n_batch: int | None
    n_ubatch: int | None
    n_outputs_max: int


class Program:
    """A program, and what it sets and takes; this one is any of them: every token of a batch has an output.

    ``is_server``: it keeps prompts and checkpoints in host memory after the load. ``reads_logits``: it is known to read
    those of every token that is an output. ``knows``: keywords that are options of llama-server's, which this program
    has too.
    """

    name: ClassVar[str] = "any"
    is_server: ClassVar[bool] = False
    reads_logits: ClassVar[bool] = False
    knows: ClassVar[frozenset[str]] = frozenset()

    def shape(self, asked: Asked, facts: Facts) -> Shape:
        """What it makes of ``asked``, in the version that ``facts`` are of."""
        n_batch, n_ubatch = self.batches(asked)
        n_seq_max, kv_unified = self.sequences(asked, facts)
        outputs = self.outputs(asked, facts, n_seq_max)
        most = Params.n_batch if n_batch is None else n_batch
        return Shape(n_seq_max, kv_unified, n_batch, n_ubatch, min(outputs, most) if outputs else 0)

    def check_facts(self, given: frozenset[str], facts: Facts) -> None:
        """Raise ``UsageError`` for what its version does not know, of the keywords that are ``given``."""

    def batches(self, asked: Asked) -> tuple[int | None, int | None]:
        """``n_batch`` and ``n_ubatch``; for texts that are only read the same unless both are given.

        A model that is not causal needs all of a batch at once, and llama.cpp aborts where it is not so.
        """
        if not asked.reads_texts:
            return asked.n_batch, asked.n_ubatch
        n_ubatch = Params.n_ubatch if asked.n_ubatch is None else asked.n_ubatch
        n_batch = n_ubatch if asked.n_batch is None else asked.n_batch
        return n_batch, n_batch if asked.n_ubatch is None else n_ubatch

    def sequences(self, asked: Asked, facts: Facts) -> tuple[int, bool]:
        """``n_seq_max`` and ``kv_unified``."""
        return asked.n_seq_max or 1, bool(asked.kv_unified)

    def outputs(self, asked: Asked, facts: Facts, n_seq_max: int) -> int:
        """Tokens of a batch that get an output; 0 is all."""
        return 0

    def check(self, given: frozenset[str]) -> None:
        """Raise ``UsageError`` for what it does not know, of the keywords that are ``given``."""
        for name, option in _OF_A_SERVER.items():
            if name in given and name not in self.knows:
                raise UsageError(
                    f"{option} is an option of llama-server, but the plan is for {self.name}: leave one of the two out"
                )


_OF_A_SERVER = {
    "cache_ram": "-cram",
    "ctx_checkpoints": "-ctxcp",
    "checkpoint_min_step": "-cms",
    "cache_idle_slots": "--cache-idle-slots",
    "reranking": "--reranking",
    "spec_type": "--spec-type",
    "backend_sampling": "-bs",
}
"""Parameters that not all programs know, with the option of each."""
