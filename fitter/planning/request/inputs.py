"""Inputs of embedders and rerankers: batches that hold a whole input, and a note on those that do not. Tokens."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from fitter.errors import UsageError
from fitter.llama.types import Params
from fitter.model.header import Model
from fitter.parameters.table import PARAMETERS

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
