"""What a program sets where its user sets nothing, by its version: read from ``facts.toml``, and from its own help.

A version is that of ggml, which every build of llama.cpp tells (``LlamaCpp.ggml``).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from fitter.errors import UsageError
from fitter.llama.build.versions import numbers_of
from fitter.llama.types import LlamaCpp
from fitter.programs.program_help import defaults_of
from fitter.storage.data_files import read_data


@dataclass(frozen=True)
class Facts:
    """What ``program`` sets where its user sets nothing."""

    program: str
    """Its name: ``llama-server``."""
    n_batch: int
    """Tokens of a batch, at most."""
    n_ubatch: int
    """Tokens of a micro batch, at most."""
    n_parallel: int
    """Sequences: of llama-server its slots, as many as it has where ``-np`` is not given or -1."""
    kv_unified: bool
    """Whether its sequences share one cache where ``-np`` is not given or -1."""
    kv_unified_of_slots: bool
    """The same where ``-np`` is given."""
    has_kv_unified_per_slot: bool
    """Whether it has the option ``--kv-unified-per-slot``."""
    has_load_mode: bool
    """Whether it can be told to read host weights into memory of their own: with ``--load-mode``, or ``use_mmap``."""
    flash_attn: str
    """``auto``, ``on`` or ``off``."""
    sets_outputs: bool
    """Whether it limits the outputs of a batch to what it reads; otherwise every token of a micro batch may be one.

    llama-server reads those of ``n_parallel * (1 + tokens drafted)`` tokens, and of ``n_batch`` for embeddings."""
    cache_ram_mib: int
    """MiB of host memory that its prompt cache may take: 0 for no cache, -1 for no limit."""
    n_ctx_checkpoints: int
    """How many context checkpoints a slot has, at most."""
    checkpoint_min_step: int
    """Tokens between two checkpoints, at least."""
    cache_idle_slots: bool
    """Whether it moves slots that are idle to the prompt cache."""
    warmup: bool
    """Whether it runs the model once before it begins."""
    backend_sampling: bool
    """Whether it samples on the device."""
    draft_backend_sampling: bool
    """Whether it samples what a draft model says on the device."""
    draft_tokens: Mapping[str, int] = field(default_factory=dict)
    """Tokens drafted at a time, by the name of each ``--spec-type`` that it has."""

    @property
    def draft_n_max(self) -> int:
        """Tokens that a draft model, or the model's own layers for it, draft at a time: ``--spec-draft-n-max``."""
        return self.draft_tokens["draft-simple"]


def facts(program: str, build: LlamaCpp | None = None, executable: str | None = None) -> Facts:
    """What ``program`` of the llama.cpp ``build`` sets, ``None`` for the newest that is known.

    ``executable``: the path of that program, which is run for its help, whose defaults are taken instead; where it does
    not say any within some seconds, those that are known remain. A program that is older than all that are known is
    taken for the oldest. Raises ``UsageError`` for a program that is not known.
    """
    ggml = "" if build is None else build.ggml
    found = {name: _value_at(values, ggml) for name, values in _values_of(program).items() if name != _DRAFTS}
    drafts = {name: _value_at(values, ggml) for name, values in _values_of(program)[_DRAFTS].items()}
    known = Facts(program, **found, draft_tokens={name: n for name, n in drafts.items() if n is not None})
    return known if executable is None else with_defaults(known, defaults_of(executable))


def programs() -> tuple[str, ...]:
    """The names of the programs that are known."""
    return tuple(data())


def with_defaults(known: Facts, defaults: Mapping[str, Any]) -> Facts:
    """``known`` with what the program's own help says, by the names of ``Facts``; tokens drafted by their spec type."""
    names = {each.name for each in fields(Facts)}
    found = {name: value for name, value in defaults.items() if name in names}
    slots = found.pop("n_parallel", -1)
    if slots > 0:
        found |= {"n_parallel": slots, "kv_unified": known.kv_unified_of_slots}
    drafts = {name: defaults.get(name, n) for name, n in known.draft_tokens.items()}
    return replace(known, **found, draft_tokens=drafts)


_DRAFTS = "draft_tokens"
_OLDEST = (0, 13, 1)
"""The version of ggml of the oldest source that was read."""


def _value_at(values: list[dict[str, Any]], ggml: str) -> Any:
    """The value of the newest entry that ``ggml`` has; ``None`` for what it does not have yet."""
    version = numbers_of(ggml)
    held = [each["value"] for each in values if not version or numbers_of(each["since"]) <= max(version, _OLDEST)]
    return held[-1] if held else None


def _values_of(program: str) -> dict[str, Any]:
    every = data()
    if program not in every:
        raise UsageError(f"unknown program '{program}': give one of {', '.join(every)}")
    own = dict(every[program])
    like = own.pop("like", None)
    if like is None:
        return own
    inherited = _values_of(like)
    return {name: _merged(inherited[name], own.get(name)) for name in inherited}


def _merged(inherited: Any, own: Any) -> Any:
    """A program's own values, before the first of which those hold that it inherits."""
    if own is None or isinstance(inherited, dict):
        return inherited
    return [*inherited, *own]


@functools.cache
def data() -> dict[str, Any]:
    """What ``facts.toml`` says, parsed once."""
    return read_data(__file__)
