"""Limits of parameters that depend on the model. Tokens, layers.

Limits without a model stand beside each parameter in ``fitter.parameters.table``.
"""

from __future__ import annotations

from fitter.errors import UsageError
from fitter.llama.types import Params
from fitter.parameters.kinds import Whole
from fitter.parameters.table import LARGEST, MAX_TOKENS, of_a_load
from fitter.parameters.values import shares, shown

MAX_OWN_CONTEXT = 2**24
"""Most tokens of a sequence, whatever context a header claims: a dummy load at 2^25 takes a second, and a plan makes
twenty. Of published models Llama 4 Scout has the largest, 10,485,760.
"""

MAX_OWN_TOKENS = 2**25
"""Most tokens of all contexts together, whatever context a header claims: 128 Ki for 256 sequences."""

MOST_SPEED = 1e15
"""Tokens per second that no machine reaches."""


def check_context(n_ctx: int, n_ctx_train: int, n_seq_max: int) -> None:
    """Raise ``UsageError`` for a context far beyond the model's own."""
    most = max(MAX_TOKENS, own_context(n_ctx_train, n_seq_max))
    if n_ctx > most:
        raise UsageError(f"n_ctx (-c) is {shown(n_ctx)}: give {most} at most; the model was trained for {n_ctx_train}")


def check_sequences(params: Params, n_ctx: int | None) -> None:
    """Raise ``UsageError`` if a batch cannot hold a token of every sequence: llama.cpp aborts then.

    Args:
        params: Parameters of the load.
        n_ctx: Context of a causal model, whose batches are no larger; else ``None``.
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
    """Return the model's own context for ``n_streams`` caches, as far as llama.cpp supports it."""
    alignment = 256 * n_streams
    return min(min(n_ctx_train, MAX_OWN_CONTEXT) * n_streams, MAX_OWN_TOKENS // alignment * alignment)


def layers_on_devices(n_gpu_layers: int, n_layer: int) -> int:
    """Return ``n_gpu_layers`` as llama.cpp accepts it: a number above ``LARGEST`` becomes all layers."""
    return n_gpu_layers if n_gpu_layers <= LARGEST else n_layer + 1


def check_params(params: Params) -> None:
    """Raise ``UsageError`` if parameters from a file are not valid for ``fit``."""
    for each in of_a_load().values():
        value = params.of_parameter(each)
        if isinstance(each.kind, Whole) and value is not None:
            each.check(value)
    if params.tensor_split is not None:
        shares("tensor_split", params.tensor_split)
