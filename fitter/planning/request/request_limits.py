"""Limits of parameters that depend on the model, and batches that hold a whole input of an embedder. Tokens, layers.

Limits without a model stand beside each parameter in ``fitter.parameters.table``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from fitter.errors import UsageError
from fitter.llama.types import Params
from fitter.model.header import Model
from fitter.parameters.kinds import Whole
from fitter.parameters.table import LARGEST, MAX_TOKENS, PARAMETERS, of_a_load
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


_BATCHES = {"n_batch": "-b", "n_ubatch": "-ub"}


def pooling_of(params: Params, model: Model) -> str:
    """Return how embeddings are pooled; empty or ``none`` for an embedding of each token."""
    pooling = params.of_parameter(PARAMETERS["pooling_type"])
    return model.pooling if pooling == "model" else str(pooling)


def whole_inputs(params: Params, model: Model, split_poolings: Collection[str]) -> frozenset[str]:
    """Return the parameters that must hold a whole input.

    llama.cpp pools the tokens of one micro batch, but for the last token of a causal model. A llama-server cuts such
    inputs into several batches (``split_poolings``, from its ``can_split``); llama-cpp-python refuses them.
    """
    if not params.embeddings:
        return frozenset()
    pooling = pooling_of(params, model)
    if model.is_causal and pooling in split_poolings:
        return frozenset()
    return frozenset({"n_batch"} if model.is_causal and pooling == "last" else _BATCHES)


def with_whole_inputs(params: Params, names: Collection[str], each: int) -> Params:
    """Return ``params`` with batches ``names`` for inputs of ``each`` tokens."""
    sizes = {name: max(each, params.n_seq_max) for name in names}
    return replace(
        params, n_batch=sizes.get("n_batch", params.n_batch), n_ubatch=sizes.get("n_ubatch", params.n_ubatch)
    )


def batch_notes(params: Params, names: Collection[str], given: Mapping[str, int], each: int, program: str) -> list[str]:
    """Note the user's batches that hold no input of ``each`` tokens, or that the program changes.

    Args:
        params: The parameters, as the program sets them.
        names: The batches that must hold a whole input.
        given: The user's batches.
        each: Tokens of the context of a sequence.
        program: Its name.
    """
    most = min((getattr(params, name) for name in names if given), default=each)
    words = " ".join(f"{_BATCHES[name]} {size}" for name, size in given.items())
    enough = " ".join(f"{_BATCHES[name]} {each}" for name in given)
    is_lowered = given.get("n_batch", 0) > params.n_batch
    lowers = f"{program} lowers -b to {params.n_batch}, as -ub, where it embeds or ranks" if is_lowered else ""
    if most >= each:
        return [f"{lowers}: leave -b {given['n_batch']} out"] if lowers else []
    return [
        f"with {words}, inputs of more than {most} tokens are refused{f' ({lowers})' if lowers else ''}, although the "
        f"context of a sequence has {each}: use {enough}, or leave {' and '.join(map(_BATCHES.__getitem__, given))} out"
    ]


def check_reads(objective: str, workload: str | None, users: int | None, generate: int | None) -> None:
    """Raise ``UsageError`` for what only a model that answers has."""
    for option, is_set, remedy in (
        ("--generate", generate is not None, "--prompt sets the tokens of an input"),
        ("--workload", workload is not None, "--prompt sets the tokens of an input"),
        ("--users", users is not None, f"-np {users} answers as many at once"),
        ("--objective generation", objective == "generation", "--objective prompt is the speed of inputs"),
    ):
        if is_set:
            raise UsageError(f"{option} is for models that answer, and this one embeds or ranks texts: {remedy}")
