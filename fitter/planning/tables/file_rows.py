"""Files of models with their plans: the choice of the best file type, and the table of a repository. Bytes.

Quality comes first, as long as generation is fast enough to be useful, then speed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from fitter.errors import Message, Remedy
from fitter.model.repository_models import SideFile
from fitter.model.tensors import file_type_data
from fitter.parameters.table import USEFUL_CONTEXT, USEFUL_SPEED
from fitter.planning.plan.plan import Plan
from fitter.text import LONGEST_NAME, printable

TYPE_CHECKING = False


class Planned:
    """A file, and its plan if there is one."""

    if TYPE_CHECKING:
        name: str
        bytes: int | None
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


class Plans:
    """Many plans. It is true where one of them is of use."""

    if TYPE_CHECKING:

        @property
        def fits(self) -> bool: ...

    def __bool__(self) -> bool:
        return self.fits

    def to_dict(self) -> dict[str, Any]:
        """Return all of it for JSON, schema 1. Bytes."""
        from fitter.api import result_methods

        return result_methods.document_of_many(self)


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
        others = Remedy(" (--tokens-per-second and --fit-ctx set others)", "tokens_per_second")
        return Message(f"{name} has the best quality at {rate} or more, {context}", others)
    if is_useful(best, tokens_per_second):
        another = Remedy(" (--tokens-per-second sets another speed)", "tokens_per_second")
        return Message(f"{name} has the best quality at {rate} or more", another)
    which, why = "none", f": with 4 bits, none fits or is a third as fast as {name}"
    if best.bits >= _LEAST_BITS:
        which, why = "none with 4 bits or more", f": {name} has the best quality of those that are nearly the fastest"
    return Message(f"{which} generates {rate}", Remedy(" (--tokens-per-second)", "tokens_per_second"), end=why)


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


_SAME_MODEL = 0.95
"""Files whose numbers of weights differ by less are one model: some leave the output's tensor out."""


@dataclass(frozen=True)
class RepositoryFile(Planned):
    """A model of a repository, in one file or several, and its plan."""

    name: str
    """Path of its first file in the repository."""
    files: tuple[str, ...]
    """All its files."""
    bytes: int
    """Bytes of all its files."""
    file_type: str
    """The file type in its name, such as ``Q4_K_M``; empty if none."""
    path: str
    """Its address, or its path on this machine."""
    weights: int | None = None
    """Number of weights; ``None`` if its header cannot be read."""
    bits_per_weight: float | None = None
    """Bits of all tensors per weight; ``None`` if its header cannot be read."""
    plan: Plan | None = None
    """Its plan, if any."""
    longest_context: int | None = None
    """The longest context that fits, in tokens, however slow; ``None`` if none fits."""
    problem: str | None = None
    """Why there is no plan."""


@dataclass(frozen=True)
class Repository(Plans):
    """The models of a repository or directory, with their plans."""

    address: str
    """Address of the repository, or path of the directory."""
    found: tuple[RepositoryFile, ...]
    """Its models, the largest first, those without a plan last."""
    beside: tuple[SideFile, ...]
    """Its other GGUF files."""
    best: RepositoryFile | None
    """The model with the most bits per weight that generates ``tokens_per_second``, by the rule of
    ``fitter.planning.tables.file_rows``; ``None`` if nothing fits. Excluded are files that another one beats by size
    and published perplexity. Models with fewer weights count only if the larger ones are too slow.
    """
    n_devices: int = 0
    """Number of devices."""
    tokens_per_second: float | None = None
    """The useful speed of generation that the user set; ``None`` for the default, 20."""
    download: tuple[str, ...] | None = None
    """The command that downloads the best model into the current directory; ``None`` if it is here, or there is none.
    """
    run: tuple[str, ...] | None = None
    """The command that runs the best model, if there is one."""
    hf: tuple[str, ...] | None = None
    """llama.cpp's arguments in place of ``-m FILE`` that download the best model; ``None`` if they would fail or load
    another file.
    """

    @property
    def fits(self) -> bool:
        """Whether any model fits."""
        return any(each.fits for each in self.found)

    def __repr__(self) -> str:
        best = f"the best is {printable(self.best.name, LONGEST_NAME)}" if self.best else "none fits"
        return f"<Repository: {len(self.found)} models, {best}>"


def ordered(files: Iterable[RepositoryFile]) -> tuple[RepositoryFile, ...]:
    """Sort by size, the largest first, those without a plan last."""
    return tuple(sorted(files, key=lambda each: (each.plan is None, -each.bytes, each.name)))


def best_file(files: Sequence[RepositoryFile], tokens_per_second: float | None) -> RepositoryFile | None:
    """Choose the best model; see ``Repository.best``."""
    groups = [[each for each in group if each.fits] for group in _models(files)]
    best = [each for each in (_best_of(group, tokens_per_second) for group in groups) if each is not None]
    # a model with fewer weights that is useful, rather than a larger one that is too slow
    return next((each for each in best if is_useful(figures_of(each), tokens_per_second)), best[0] if best else None)


def _best_of(group: Sequence[RepositoryFile], tokens_per_second: float | None) -> RepositoryFile | None:
    types = {each.file_type.lower() for each in group}
    own_type = next((each for each in ("bf16", "f16", "f32") if each in types), "")
    return best_type(group, figures_of, tokens_per_second, own_type=own_type)


def figures_of(each: RepositoryFile) -> TypeFigures:
    """Return the figures of a file to choose by."""
    name, rate = each.file_type or each.name, each.generation_tokens_per_second
    return TypeFigures(name, each.bytes, each.bits_per_weight, rate, n_ctx=each.n_ctx, least_context=each.least_context)


def _models(files: Sequence[RepositoryFile]) -> list[list[RepositoryFile]]:
    """Group the files by model, the model with the most weights first."""
    groups: list[list[RepositoryFile]] = []
    for each in sorted(files, key=lambda each: (-(each.weights or 0), each.name)):
        if groups and (each.weights or 0) >= _SAME_MODEL * (groups[-1][0].weights or 0):
            groups[-1].append(each)
        else:
            groups.append([each])
    return groups


__all__ = ["Repository", "RepositoryFile", "SideFile", "best_file", "ordered"]
