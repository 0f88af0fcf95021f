"""What the programs of llama.cpp have as defaults, by version."""

from __future__ import annotations

from dataclasses import dataclass

from fitter.llama.types import LlamaCpp


@dataclass(frozen=True)
class Facts:
    n_parallel: int = 4
    kv_unified: bool = True
    cache_ram_mib: int = 8192
    n_ctx_checkpoints: int = 32
    checkpoint_min_step: int = 8192
    cache_idle_slots: bool = True
    sets_outputs: bool = True
    draft_n_max: int = 3


def facts(program: str, build: LlamaCpp | None) -> Facts:
    return Facts()
