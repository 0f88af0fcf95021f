"""Roles of tensors, by their names, as in llama.cpp; and llama-quantize's types of files of them."""

from __future__ import annotations

import enum
import functools
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

from fitter.llama.types import TensorInfo
from fitter.model.shapes.catalogue import wanted
from fitter.storage import read_data

EXPERT_PATTERN = r"blk\.[0-9]+\.ffn_(up|down|gate_up|gate)_(ch|)exps"
"""Routed expert tensors, which ``--cpu-moe`` keeps on the host."""


class Role(enum.Enum):
    """The role of a tensor; the value is a name for people."""

    TOKEN_EMBEDDING = "token embedding"
    OUTPUT = "output"
    ATTENTION = "attention"
    FFN = "feed-forward"
    EXPERT = "experts"
    SHARED_EXPERT = "shared experts"
    ROUTER = "router"
    NORM = "norm"
    RECURRENT = "recurrent"
    PREDICTION = "multi-token prediction"
    OTHER = "other"


_NAME = re.compile(r"(?:(.*?)\bblk\.([0-9]+)\.)?(.*)", re.DOTALL)
_STACKS = ("", "enc.", "dec.")
_EXPERT = re.compile(EXPERT_PATTERN)

# the first match decides; names without "blk.N." and without ".weight" or ".bias"
_ROLES: tuple[tuple[Role, re.Pattern[str]], ...] = tuple(
    (role, re.compile(pattern))
    for role, pattern in (
        (Role.NORM, r".*norm(_[0-9a-z]+)?|nextn\..*norm"),
        (Role.EXPERT, r"ffn_(up|down|gate_up|gate)_(ch)?exps|ffn_(up|down|gate)\.[0-9]+"),
        (Role.SHARED_EXPERT, r"ffn_(up|down|gate|gate_inp)_shexp"),
        (Role.ROUTER, r"ffn_gate_inp|exp_probs_b.*|ffn_gate_tid2eid"),
        (Role.FFN, r"ffn_.*|ffn\.act"),
        (Role.RECURRENT, r"ssm_.*|time_mix_.*|channel_mix_.*|shortconv\..*"),
        (Role.ATTENTION, r"(cross_)?attn_.*|indexer.*"),
        (Role.PREDICTION, r"nextn\..*"),
    )
)

_ENDS = {
    "token_embd": Role.TOKEN_EMBEDDING,
    "per_layer_token_embd": Role.TOKEN_EMBEDDING,
    "position_embd": Role.TOKEN_EMBEDDING,
    "token_types": Role.TOKEN_EMBEDDING,
    "output": Role.OUTPUT,
}


def split_name(name: str) -> tuple[str, int | None, str]:
    """Split ``enc.blk.N.attn_q.weight`` into ``enc.``, N and the rest; outside layers N is ``None``."""
    stack, layer, rest = cast(re.Match[str], _NAME.fullmatch(name)).groups("")
    return stack, int(layer) if layer else None, rest


def layer_of(name: str) -> int | None:
    """Return the layer of ``blk.N.…``; ``None`` for a tensor outside layers."""
    stack, layer, _ = split_name(name)
    return layer if stack in _STACKS else None


def is_expert(name: str) -> bool:
    """Return whether a tensor has routed experts, which upstream's fit moves to the host first."""
    return _EXPERT.search(name) is not None


def stays_on_host(name: str) -> bool:
    """Return whether llama.cpp only looks a tensor up, and so keeps it on the host with all layers on devices."""
    return layer_of(name) is None and role_of(name) is Role.TOKEN_EMBEDDING


def role_of(name: str) -> Role:
    """Return the role of a tensor."""
    base = re.sub(r"\.(weight|bias|scale)$", "", name)
    stack, layer, rest = split_name(base)
    if layer is None or stack not in _STACKS:
        if base in _ENDS:
            return _ENDS[base]
        return Role.NORM if base.endswith("norm") else Role.OTHER
    for role, pattern in _ROLES:
        if pattern.fullmatch(rest):
            return role
    return Role.OTHER


class SmallerType(NamedTuple):
    """The next smaller file type of a model.

    Attributes:
        name: Its name.
        share: About the share of the weights' bytes that it keeps.
        arguments: The options that name a model without a file in that type; empty for the path of a file.
    """

    name: str
    share: float
    arguments: tuple[str, ...] = ()


@functools.cache
def file_type_data() -> Mapping[str, Any]:
    """Return the published facts about file types."""
    return read_data(__file__, "file_types.toml")


def source_type(tensors: Sequence[TensorInfo]) -> str:
    """Return the type of most weights."""
    counts: Counter[str] = Counter()
    for tensor in tensors:
        counts[tensor.type] += math.prod(tensor.shape)
    return counts.most_common(1)[0][0] if counts else ""


def least_share(architecture: str, bits_per_weight: float) -> float:
    """Return about the share of its bytes that a model keeps in the smallest type that ``smaller_type`` may name."""
    least = min(each["bits"] for each in file_type_data()["smaller"].values())
    return 1.0 if architecture in file_type_data()["published"] else min(1.0, least / max(least, bits_per_weight))


def smaller_type(called: str, architecture: str, own_type: str, bits_per_weight: float) -> SmallerType | None:
    """Return the next smaller file type; ``None`` for models that are published quantized, or already small.

    Args:
        called: The path or address of the model.
        own_type: The type of most of its weights.
    """
    if architecture in file_type_data()["published"]:
        return None
    types = file_type_data()["smaller"]
    own_bits = next((each["bits"] for each in types.values() if each["type"] == own_type.lower()), bits_per_weight)
    for name, each in types.items():
        if each["bits"] < own_bits:
            shape = wanted(called)
            words = () if shape is None else (f"--{shape.scheme}", f"{shape.name}:{name}")
            return SmallerType(name, each["bits"] / own_bits, words)
    return None
