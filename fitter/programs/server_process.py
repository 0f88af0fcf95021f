"""Host memory of a llama-server's process beside what a plan counts. Bytes.

``server_process.toml`` has the figures and their sources.
"""

from __future__ import annotations

import functools
from collections.abc import Collection
from typing import Any

from fitter.storage import read_data
from fitter.text import MIB

ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": str(MIB)}
"""Variables with which the figures hold: without them the C library keeps freed states of slots."""


def process_bytes(
    *, n_vocab: int, n_slots: int, n_ctx: int, state: int, counted: int, backends: Collection[str] = ()
) -> int:
    """Return the most bytes of a llama-server's process.

    Args:
        n_vocab: Tokens of the vocabulary.
        n_slots: Its slots.
        n_ctx: Tokens of all slots' contexts.
        state: Bytes of one slot's whole state, if it has a prompt cache; a state is saved before an old one goes.
        counted: Bytes that the plan counts on the host.
        backends: Kinds of its devices, such as ``CUDA``.
    """
    data = _data()
    each_token = data["per_token"] + data["per_token_and_slot"] * n_slots
    size = (data["base_mib"] + data["per_slot_mib"] * n_slots) * MIB + each_token * n_vocab
    size += data["per_context_token"] * n_ctx + state * data["states"]
    size += sum(data["backend_mib"].get(backend, 0) for backend in backends) * MIB
    return int(size + (size + counted) * data["page_tables"])


@functools.cache
def _data() -> dict[str, Any]:
    return read_data(__file__)
