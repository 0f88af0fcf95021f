"""llama-server, and llama-cli, a llama-server with one slot."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from fitter.errors import UsageError
from fitter.llama.types import Params
from fitter.programs.facts import Facts
from fitter.programs.program import OF_A_SERVER, Asked, Program, Shape


class LlamaServer(Program):
    """llama-server: an output for each slot and each drafted token (``server_output_limits``)."""

    name: ClassVar[str] = "llama-server"
    is_server: ClassVar[bool] = True
    has_slots: ClassVar[bool] = True
    reads_logits: ClassVar[bool] = True
    knows: ClassVar[frozenset[str]] = frozenset(OF_A_SERVER)

    def shape(self, asked: Asked, facts: Facts) -> Shape:
        """Set batch sizes where the server's defaults differ from llama.cpp's."""
        n_batch, n_ubatch = (
            of_program if given is None and of_program != usual else given
            for given, of_program, usual in (
                (asked.n_batch, facts.n_batch, Params.n_batch),
                (asked.n_ubatch, facts.n_ubatch, Params.n_ubatch),
            )
        )
        return super().shape(replace(asked, n_batch=n_batch, n_ubatch=n_ubatch), facts)

    def batches(self, asked: Asked) -> tuple[int | None, int | None]:
        n_batch, n_ubatch = super().batches(asked)
        if asked.reads_texts and n_batch is not None and n_ubatch is not None:
            # the server cuts the batch to the micro batch
            n_batch = min(n_batch, n_ubatch)
        return n_batch, n_ubatch

    def sequences(self, asked: Asked, facts: Facts) -> tuple[int, bool]:
        if asked.n_seq_max is not None:
            n_seq_max, kv_unified = asked.n_seq_max, facts.kv_unified_of_slots
        else:
            n_seq_max, kv_unified = facts.n_parallel, facts.kv_unified
        return n_seq_max, kv_unified if asked.kv_unified is None else asked.kv_unified

    def check_facts(self, given: frozenset[str], facts: Facts) -> None:
        super().check_facts(given, facts)
        if "kv_unified_per_slot" in given and not facts.has_kv_unified_per_slot:
            raise UsageError(
                f"this {self.name} has no --kv-unified-per-slot: leave it out, and limit the context with -c"
            )

    def outputs(self, asked: Asked, facts: Facts, n_seq_max: int) -> int:
        if asked.reads_texts or asked.is_pooled or asked.logits_all or not facts.sets_outputs:
            return 0
        return n_seq_max * (1 + asked.drafted)


class LlamaCli(LlamaServer):
    """llama-cli: the code of llama-server, with one slot."""

    name: ClassVar[str] = "llama-cli"
    has_slots: ClassVar[bool] = False
    knows: ClassVar[frozenset[str]] = frozenset({"backend_sampling", "cache_ram", "ctx_checkpoints", "spec_type"})

    def sequences(self, asked: Asked, facts: Facts) -> tuple[int, bool]:
        if asked.kv_unified:
            raise UsageError(f"{self.name} has no -kvu: leave it out, or plan for llama-server")
        return super().sequences(asked, facts)


PROGRAMS = (LlamaServer(), LlamaCli())
