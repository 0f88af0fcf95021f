"""Host memory for the logits and embeddings of a batch, which the breakdown of a load does not have. Bytes.

A context starts with a row for each sequence, and allocates a larger buffer when a batch needs more
(``llama_context::output_reserve``).
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
    """Compute the bytes of the output buffer.

    Args:
        n_outputs: Tokens with an output; at least the number of sequences.
        n_vocab: Tokens of the vocabulary.
        n_embd: Elements of each embedding, if requested.
        n_embd_of_batch: Elements for each token of the batch, if the model's own layers draft
            (``llama_set_embeddings_nextn``).
        n_batch: Tokens of the batch.
        has_samplers: Whether samplers run on the device (``--backend-sampling``, by default for the model's own
            drafts): probabilities and candidates then have buffers too.
    """
    row = _FLOAT * (n_vocab + n_embd)
    if has_samplers:
        row += 2 * _FLOAT * n_vocab + _TOKEN * (1 + n_vocab)
    return n_outputs * row + _FLOAT * n_embd_of_batch * n_batch
