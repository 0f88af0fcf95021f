"""A file of a model with its plan, and the choice of the best file type.

Quality comes first, as long as generation is fast enough to be useful, then speed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from fitter.model.tensors import file_type_data
from fitter.parameters.table import USEFUL_CONTEXT, USEFUL_SPEED
from fitter.text import printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from fitter.planning.plan.plan import Plan


class Planned:
    """A file, and its plan if there is one."""

    if TYPE_CHECKING:
        plan: Plan | None
        longest_context: int | None
        problem: str | None
        bits_per_weight: float | None

    @property
    def fits(self) -> bool:
        """Whether there is a plan that fits."""
        return self.plan is not None and self.plan.fits

    @property
    def n_ctx(self) -> int | None:
        """Context of the plan, in tokens; ``None`` if it does not fit."""
        return None if self.plan is None or not self.fits else self.plan.params.n_ctx or self.plan.breakdown.n_ctx

    @property
    def least_context(self) -> int:
        """Tokens of context that the best plan has: none where the user set the context or the smallest one."""
        keywords = {} if self.plan is None else self.plan.fit_keywords
        return 0 if {"n_ctx", "fit_ctx"}.intersection(keywords) else USEFUL_CONTEXT

    @property
    def host_weights(self) -> int | None:
        """Bytes of weights in host memory, where llama.cpp always has the token embedding; ``None`` without a plan."""
        return None if self.plan is None else self.plan.host.model

    @property
    def prompt_tokens_per_second(self) -> float | None:
        """Estimated speed of prompts; ``None`` if it does not fit."""
        price = None if self.plan is None else self.plan.estimate
        return None if price is None else price.prompt_tokens_per_second

    @property
    def generation_tokens_per_second(self) -> float | None:
        """Estimated speed of generation, or of a model that only reads, of its inputs; ``None`` if it does not fit."""
        price = None if self.plan is None else self.plan.estimate
        return None if price is None else price.tokens_per_second

    @property
    def is_on_devices(self) -> bool:
        """Whether it fits with every layer on devices."""
        plan = self.plan
        if plan is None or not plan.fits or not plan.breakdown.devices:
            return False
        layers, device_types = (
            plan.params.n_gpu_layers,
            {row.buffer_type for row in plan.breakdown.rows if not row.is_host},
        )
        is_whole = layers < 0 or layers > plan.n_layer
        return is_whole and all(each.buffer_type in device_types for each in plan.params.tensor_buft_overrides)


FULL = ("f32", "bf16", "f16")
"""Types of weights that are not quantized."""

_LEAST_BITS = 4.0
"""Bits per weight below which quality falls quickly: the published perplexity rises by 0.27 with Q4_K_S (4.6 bits), and
by 1.63 with Q3_K_S (3.6 bits).
"""
_WORTH_IT = 3.0
"""How many times as fast a file of fewer bits must be. Without a GPU an 8B model is twice as fast with 2 bits as with
4, which is not worth it; Llama 3.3 70B on an RTX 4090 is ten times as fast where all of it is on the card.
"""
_NEARLY = 0.8
"""Share of the fastest one's speed that counts as nearly as fast: without a GPU, Q4_K_M beside Q3_K_L."""


@dataclass(frozen=True)
class TypeFigures:
    """Figures of a fitting model in a file type, to choose by."""

    name: str
    """The name of the file type."""
    bytes: int | None
    bits_per_weight: float | None
    tokens_per_second: float | None
    needs_imatrix: bool = False
    n_ctx: int | None = None
    """Tokens of its context."""
    least_context: int = 0
    """Tokens of context that it should have."""

    @property
    def bits(self) -> float:
        return self.bits_per_weight or 0.0

    @property
    def rate(self) -> float:
        return self.tokens_per_second or 0.0

    @property
    def context(self) -> int:
        """Tokens of context, as far as they count."""
        return min(self.n_ctx or 0, self.least_context)


_Row = TypeVar("_Row")


def best_type(
    rows: Sequence[_Row],
    figures: Callable[[_Row], TypeFigures],
    tokens_per_second: float | None = None,
    *,
    own_type: str = "",
    published: str = "",
) -> _Row | None:
    """Choose the row with the best file type: the most bits per weight that generates ``tokens_per_second``.

    It has the least context that it should have, or where no row has that, the largest. Fewer than 4 bits must be three
    times as fast as the fastest with 4 bits or more. If that leaves none, choose the most bits of those with 4 bits or
    more that are at most a fifth slower than the fastest of them. Never chosen are types for models that were trained
    for them, types that another one beats by size and published perplexity, F16 of a BF16 model and the other way
    round, and types no smaller than the one that keeps published weights.

    Args:
        rows: The models that fit.
        figures: Returns the figures of a row.
        tokens_per_second: The useful speed of generation; ``USEFUL_SPEED`` if ``None``.
        own_type: The type of most weights of the model, if known.
        published: The file type that keeps the weights of a model that is published quantized; empty for others.
    """
    others = {each.upper() for each in FULL if each != own_type.lower()} if own_type.lower() in FULL else set()
    able = [row for row in rows if figures(row).name not in {*file_type_data()["trained"]["names"], *others}]
    enough = max((figures(row).context for row in able), default=0)
    fast = [row for row in able if is_useful(figures(row), tokens_per_second)]
    useful = [row for row in fast if figures(row).context >= enough] or fast

    def most_bits(candidates: list[_Row]) -> _Row | None:
        left = [row for row in candidates if not any(_beats(figures(by), figures(row), published) for by in candidates)]
        return max(left, key=lambda row: _order(figures(row)), default=None)

    whole = [row for row in able if figures(row).bits >= _LEAST_BITS]
    fastest = max((figures(row).rate for row in whole), default=0.0)
    best = most_bits(useful or [row for row in able if figures(row).rate >= _WORTH_IT * fastest])
    if best is not None and (figures(best).bits >= _LEAST_BITS or figures(best).rate >= _WORTH_IT * fastest):
        return best
    return most_bits([row for row in whole if figures(row).rate >= _NEARLY * fastest])


def is_useful(each: TypeFigures, tokens_per_second: float | None) -> bool:
    """Return whether generation is fast enough."""
    return each.rate >= (USEFUL_SPEED if tokens_per_second is None else tokens_per_second)


def reason(best: TypeFigures, called: str, tokens_per_second: float | None) -> str:
    """Say in a line why ``best`` is the best one."""
    rate = f"{USEFUL_SPEED if tokens_per_second is None else tokens_per_second:g} t/s"
    name = printable(called)
    if is_useful(best, tokens_per_second) and best.least_context and best.context == best.least_context:
        context = f"with {best.least_context} tokens of context or more"
        others = "--tokens-per-second and --fit-ctx set others"
        return f"{name} has the best quality at {rate} or more, {context} ({others})"
    if is_useful(best, tokens_per_second):
        return f"{name} has the best quality at {rate} or more (--tokens-per-second sets another speed)"
    if best.bits >= _LEAST_BITS:
        return (
            f"none with 4 bits or more generates {rate} (--tokens-per-second): {name} has the best quality of those "
            "that are nearly the fastest"
        )
    return f"none generates {rate} (--tokens-per-second): with 4 bits, none fits or is a third as fast as {name}"


def _order(each: TypeFigures) -> tuple[float, bool, float, str]:
    return each.bits, not each.needs_imatrix, each.rate, each.name


def _beats(by: TypeFigures, each: TypeFigures, published: str) -> bool:
    """Return whether ``by`` is no larger and has lower published perplexity, or the weights as published."""
    perplexity = file_type_data()["perplexity"]
    if by.bytes is None or each.bytes is None or by.bytes > each.bytes:
        return False
    if by.name == published and each.name != published:
        return True
    return by.name in perplexity and each.name in perplexity and bool(perplexity[by.name] < perplexity[each.name])
