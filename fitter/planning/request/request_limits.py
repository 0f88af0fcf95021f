"""How much of everything a user may ask for, as far as only a model tells. Tokens, layers.

What is known without one stands beside each parameter in ``fitter.parameters.table``.
"""

from __future__ import annotations

from fitter.errors import UsageError
from fitter.llama.types import Params
from fitter.parameters.kinds import Whole
from fitter.parameters.table import LARGEST, MAX_TOKENS, of_a_load
from fitter.parameters.values import shares, shown

MAX_OWN_CONTEXT = 2**24
"""Tokens of a sequence, whatever a model says that it was trained for: a dummy load at 2^25 takes a second, and a plan
makes twenty. Of published models Llama 4 Scout has the most, 10,485,760.
"""

MAX_OWN_TOKENS = 2**25
"""Tokens of all contexts together, whatever a model says that it was trained for: 128 Ki for 256 sequences."""

MOST_SPEED = 1e15
"""Tokens per second that nothing reaches."""


def check_context(n_ctx: int, n_ctx_train: int, n_seq_max: int) -> None:
    """Raise ``UsageError`` for a context that the model was not made for and that is beyond all reason."""
    most = max(MAX_TOKENS, own_context(n_ctx_train, n_seq_max))
    if n_ctx > most:
        raise UsageError(f"n_ctx (-c) is {shown(n_ctx)}: give {most} at most; the model was trained for {n_ctx_train}")


def check_sequences(params: Params, n_ctx: int | None) -> None:
    """Raise ``UsageError`` where not every sequence can have a token in a batch: llama.cpp aborts there.

    ``n_ctx`` is the context of a causal model, whose batches are no larger.
    """
    for called, most in (
        ("n_ctx (-c)", n_ctx),
        ("n_batch (-b)", params.n_batch),
        ("n_outputs_max", params.n_outputs_max or None),
    ):
        if most is not None and most < params.n_seq_max:
            raise UsageError(
                f"{called} is {most}, and {params.n_seq_max} sequences (-np) need a token each: give "
                f"{params.n_seq_max} or more, or fewer sequences"
            )


def own_context(n_ctx_train: int, n_streams: int) -> int:
    """The model's own context for so many caches, as far as llama.cpp gets through that."""
    alignment = 256 * n_streams
    return min(min(n_ctx_train, MAX_OWN_CONTEXT) * n_streams, MAX_OWN_TOKENS // alignment * alignment)


def layers_on_devices(n_gpu_layers: int, n_layer: int) -> int:
    """``n_gpu_layers`` as llama.cpp can be told: more than a model of ``n_layer`` has are all of them."""
    return n_gpu_layers if n_gpu_layers <= LARGEST else n_layer + 1


def check_params(params: Params) -> None:
    """Raise ``UsageError`` for parameters, of a file, that ``fit`` would not have taken."""
    for each in of_a_load().values():
        value = params.of_parameter(each)
        if isinstance(each.kind, Whole) and value is not None:
            each.check(value)
    if params.tensor_split is not None:
        shares("tensor_split", params.tensor_split)
