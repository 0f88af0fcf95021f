"""The interface of a program: the parameters that it sets for a load."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from fitter.errors import UsageError
from fitter.llama.types import Params
from fitter.model.header import Model
from fitter.parameters.table import DEFAULTS, PARAMETERS, ServerKeywords, taken_by
from fitter.programs.facts import Facts

Words = dict[str, Any]
"""Keywords of ``fit``, with their values."""


@dataclass(frozen=True)
class Asked:
    """The user's keywords that a program reads; ``None`` is not set.

    Attributes:
        drafted: Most tokens drafted at a time; 0 without drafting.
        reads_texts: Whether the user wants embeddings or reranking.
        logits_all: Whether every token has logits.
    """

    n_seq_max: int | None = None
    kv_unified: bool | None = None
    n_batch: int | None = None
    n_ubatch: int | None = None
    reads_texts: bool = False
    is_pooled: bool = False
    logits_all: bool = False
    drafted: int = 0


@dataclass(frozen=True)
class Shape:
    """Parameters that a program sets, named as in ``Params``; ``None`` leaves them to the other parameters."""

    n_seq_max: int
    kv_unified: bool
    n_batch: int | None
    n_ubatch: int | None
    n_outputs_max: int


@dataclass(frozen=True)
class Attempt:
    """A plan to make.

    Attributes:
        words: Keywords of ``fit`` beside the user's.
        layers: Numbers of layers on devices that the program can be told, with the output as the last; any if empty.
    """

    words: Words = field(default_factory=dict)
    layers: Collection[int] = ()


class Program:
    """A program; the base class stands for any program, with an output for every token of a batch.

    Attributes:
        title: What messages call it; empty for llama.cpp's own programs.
        lacks: Keywords for a placement that it cannot be told, each with what to do instead; ``n_batch`` where its
            batches are micro batches.
        is_server: Whether it caches prompts and checkpoints in host memory.
        has_slots: Whether it answers several users at once.
        reads_logits: Whether it reads the logits of every output.
        knows: Keywords for options of llama-server that it has too.
    """

    name: ClassVar[str] = "any"
    title: ClassVar[str] = ""
    lacks: ClassVar[Mapping[str, str]] = {}
    is_server: ClassVar[bool] = False
    has_slots: ClassVar[bool] = False
    reads_logits: ClassVar[bool] = False
    knows: ClassVar[frozenset[str]] = frozenset()

    def shape(self, asked: Asked, facts: Facts) -> Shape:
        """Return the parameters that the program sets, in the version of ``facts``."""
        n_batch, n_ubatch = self.batches(asked)
        n_seq_max, kv_unified = self.sequences(asked, facts)
        outputs = self.outputs(asked, facts, n_seq_max)
        most = Params.n_batch if n_batch is None else n_batch
        return Shape(n_seq_max, kv_unified, n_batch, n_ubatch, min(outputs, most) if outputs else 0)

    def check_facts(self, given: frozenset[str], facts: Facts) -> None:
        """Raise ``UsageError`` for a keyword that its version does not have."""
        if "n_ubatch_draft" in given and not facts.has_n_ubatch_draft:
            who = "llama.cpp" if self.name == "any" else self.title or self.name
            raise UsageError(f"this {who} has no --spec-draft-n-ubatch: leave it out, or use b11669 or newer")

    def batches(self, asked: Asked) -> tuple[int | None, int | None]:
        """Return ``n_batch`` and ``n_ubatch``; for texts that are only read, equal ones unless both are set.

        A model that is not causal needs the whole batch at once; llama.cpp aborts otherwise.
        """
        if not asked.reads_texts:
            return asked.n_batch, asked.n_ubatch
        n_ubatch = Params.n_ubatch if asked.n_ubatch is None else asked.n_ubatch
        n_batch = n_ubatch if asked.n_batch is None else asked.n_batch
        return n_batch, n_batch if asked.n_ubatch is None else n_ubatch

    def sequences(self, asked: Asked, facts: Facts) -> tuple[int, bool]:
        """Return ``n_seq_max`` and ``kv_unified``."""
        return asked.n_seq_max or 1, bool(asked.kv_unified)

    def outputs(self, asked: Asked, facts: Facts, n_seq_max: int) -> int:
        """Return the number of tokens of a batch with an output; 0 is all."""
        return 0

    def of_model(self, model: Model, words: Mapping[str, Any]) -> Words:
        """Return the keywords that it sets for ``model`` by itself, where the user sets ``words``.

        Raises:
            UsageError: It would change one that the user set.
        """
        return {}

    def attempts(self, model: Model, free: Mapping[str, int], words: Mapping[str, Any]) -> list[list[Attempt]]:
        """List groups of plans to make: a group's first plan that fits and can be told counts, and the best of all.

        Args:
            model: The model.
            free: Free bytes of each device that llama.cpp uses, by name.
            words: The user's keywords.
        """
        return [[Attempt()]]

    def split(
        self, model: Model, params: Params, caches: Callable[[], Sequence[int]], counts: Sequence[int]
    ) -> Sequence[float] | None:
        """Return the shares with which it cuts layers like llama.cpp with ``params``; none if it cuts so itself.

        ``None`` where no shares cut so.

        Args:
            model: The model.
            params: Parameters of the plan.
            caches: Returns the bytes of each layer's cache.
            counts: Layers of each device, with the output as the last one.
        """
        return ()

    def more(self, model: Model) -> Mapping[int, int]:
        """Return, by layer, the bytes that it takes beside llama.cpp's weights, on the layer's device."""
        return {}

    def check(self, given: Mapping[str, Any]) -> None:
        """Raise ``UsageError`` for a keyword that it does not have."""
        for name, instead in self.lacks.items():
            value = given.get(name, DEFAULTS[name])
            if name != "n_batch" and value not in (DEFAULTS[name], _ONE_DEVICE):
                option = PARAMETERS[name].option + f" {value}" * (name == "split_mode")
                raise UsageError(f"{self.title} has no option like llama.cpp's {option}: {instead}")
        for name, option in OF_A_SERVER.items():
            if name in given and name not in self.knows:
                raise UsageError(
                    f"{option} is an option of llama-server, but the plan is for {self.name}: leave one of the two out"
                )


_ONE_DEVICE = "none"
"""The split mode that every program has."""

OF_A_SERVER = {
    each.name: next((option for option in each.positive if not option.startswith("--")), each.positive[-1])
    for each in taken_by(ServerKeywords)
    if each.options and not each.needs
}
"""Keywords that programs other than llama-server may lack, with their options: the short one, or else the last."""
