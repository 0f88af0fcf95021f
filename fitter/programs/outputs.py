"""Logits and embeddings that llama.cpp keeps of the tokens of a batch, in host memory beside what it counts. Bytes.

A context begins with a row for each sequence, and has another buffer as soon as a batch asks for more
(``llama_context::output_reserve``). The breakdown of a load has neither.
"""

from __future__ import annotations

_FLOAT = _TOKEN = 4


def output_bytes(
    n_outputs: int,
    n_vocab: int,
    *,
    n_embd: int = 0,
    n_embd_of_batch: int = 0,
    n_batch: int = 0,
    has_samplers: bool = False,
) -> int:
    """The buffer for ``n_outputs`` tokens of a batch, but at least for as many as there are sequences.

    ``n_embd``: elements of the embedding of each, where these are asked for. ``n_embd_of_batch``: those of each of the
    ``n_batch`` tokens of a batch, asked for where a model's own layers draft (``llama_set_embeddings_nextn``).
    ``has_samplers``: whether samplers run on the device (``--backend-sampling``, and by default what a model's own
    layers draft), whose probabilities and candidates are kept as well.
    """
    row = _FLOAT * (n_vocab + n_embd)
    if has_samplers:
        row += 2 * _FLOAT * n_vocab + _TOKEN * (1 + n_vocab)
    return n_outputs * row + _FLOAT * n_embd_of_batch * n_batch
