"""Defaults of programs, by version: from ``facts.toml`` or a program's folder, and from a program's own ``--help``.

The version is ggml's, which every build of llama.cpp tells (``LlamaCpp.ggml``).
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from fitter.errors import UsageError
from fitter.llama.types import LlamaCpp
from fitter.storage import read_data
from fitter.version import numbers_of


@dataclass(frozen=True)
class Facts:
    """Defaults of ``program``."""

    program: str
    """Its name: ``llama-server``."""
    n_batch: int
    """Most tokens of a batch."""
    n_ubatch: int
    """Most tokens of a micro batch."""
    n_parallel: int
    """Sequences; for llama-server its slots if ``-np`` is missing or -1."""
    kv_unified: bool
    """Whether its sequences share one cache if ``-np`` is missing or -1."""
    kv_unified_of_slots: bool
    """The same with ``-np``."""
    has_kv_unified_per_slot: bool
    """Whether it has the option ``--kv-unified-per-slot``."""
    has_n_ubatch_draft: bool
    """Whether it has the option ``--spec-draft-n-ubatch``."""
    has_load_mode: bool
    """Whether ``--load-mode`` or ``use_mmap`` can make it read host weights into own memory."""
    flash_attn: str
    """``auto``, ``on`` or ``off``."""
    sets_outputs: bool
    """Whether it limits the outputs of a batch to those that it reads; else every token of a micro batch may be one.

    llama-server reads ``n_parallel * (1 + tokens drafted)`` outputs, and ``n_batch`` for embeddings.
    """
    cache_ram_mib: int
    """Limit of its prompt cache in MiB of host memory: 0 for no cache, -1 for no limit."""
    n_ctx_checkpoints: int
    """Most context checkpoints of a slot."""
    checkpoint_min_step: int
    """Least tokens between two checkpoints."""
    cache_idle_slots: bool
    """Whether it moves idle slots to the prompt cache."""
    warmup: bool
    """Whether it runs the model once before it begins."""
    backend_sampling: bool
    """Whether it samples on the device."""
    draft_backend_sampling: bool
    """Whether it samples a draft model's output on the device."""
    split_poolings: tuple[str, ...]
    """Kinds of pooling for which it gives llama.cpp an input of a causal model in several batches."""
    draft_tokens: Mapping[str, int] = field(default_factory=dict)
    """Tokens drafted at a time, for each ``--spec-type`` that it has."""

    @property
    def draft_n_max(self) -> int:
        """Tokens drafted at a time by a draft model or the model's own layers (``--spec-draft-n-max``)."""
        return self.draft_tokens["draft-simple"]


def facts(program: str, build: LlamaCpp | None = None, executable: str | None = None) -> Facts:
    """Return the defaults of a program.

    A program older than all known versions counts as the oldest.

    Args:
        program: Its name.
        build: Its build of llama.cpp; ``None`` for the newest known.
        executable: Its path, to run it for its help, whose defaults replace the known ones.

    Raises:
        UsageError: The program is unknown.
    """
    ggml = "" if build is None else build.ggml
    found = {name: _value_at(values, ggml) for name, values in _values_of(program).items() if name != _DRAFTS}
    drafts = {name: _value_at(values, ggml) for name, values in _values_of(program)[_DRAFTS].items()}
    defaults = Facts(program, **found, draft_tokens={name: n for name, n in drafts.items() if n is not None})
    return defaults if executable is None else with_defaults(defaults, defaults_of(executable))


def with_defaults(own_defaults: Facts, defaults: Mapping[str, Any]) -> Facts:
    """Replace stored defaults by the defaults in the program's help."""
    names = {each.name for each in fields(Facts)}
    replaced = {name: value for name, value in defaults.items() if name in names}
    slots = replaced.pop("n_parallel", -1)
    if slots > 0:
        replaced |= {"n_parallel": slots, "kv_unified": own_defaults.kv_unified_of_slots}
    drafts = {name: defaults.get(name, n) for name, n in own_defaults.draft_tokens.items()}
    return replace(own_defaults, **replaced, draft_tokens=drafts)


RULES = "program.toml"
"""The data file in a program's folder."""

_DRAFTS = "draft_tokens"
_OLDEST = (0, 13, 1)
"""ggml's version in the oldest known source."""


def _value_at(values: list[dict[str, Any]], ggml: str) -> Any:
    """Return the value of the newest entry that ``ggml`` has; ``None`` if it has none."""
    version = numbers_of(ggml)
    held = [each["value"] for each in values if not version or numbers_of(each["since"]) <= max(version, _OLDEST)]
    return held[-1] if held else None


def _values_of(program: str) -> dict[str, Any]:
    every = data()
    if program not in every:
        raise UsageError(f"unknown program '{program}': give one of {', '.join(every)}")
    values = dict(every[program])
    like = values.pop("like", None)
    if like is None:
        return values
    inherited = _values_of(like)
    return {name: _merged(inherited[name], values.get(name)) for name in inherited}


def _merged(inherited: Any, values: Any) -> Any:
    """Return a program's own values, after those that it inherits."""
    if values is None or isinstance(inherited, dict):
        return inherited
    return [*inherited, *values]


@functools.cache
def data() -> dict[str, Any]:
    """Read ``facts.toml``, and the facts in ``program.toml`` of each program that has a folder."""
    own = sorted(Path(__file__).parent.glob(f"*/{RULES}"))
    return read_data(__file__) | {path.parent.name: read_data(str(path), RULES)["facts"] for path in own}


SECONDS = 10.0
"""Seconds for a program to print its help."""
_MOST_BYTES = 1 << 20
"""More than any help has."""


def _is_enabled(text: str) -> bool:
    if text not in ("enabled", "disabled"):
        raise ValueError(text)
    return text == "enabled"


def _choice(text: str) -> str:
    if text not in ("auto", "on", "off"):
        raise ValueError(text)
    return text


OPTIONS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "--batch-size": ("n_batch", int),
    "--ubatch-size": ("n_ubatch", int),
    "--parallel": ("n_parallel", int),
    "--flash-attn": ("flash_attn", _choice),
    "--cache-ram": ("cache_ram_mib", int),
    "--ctx-checkpoints": ("n_ctx_checkpoints", int),
    "--checkpoint-min-step": ("checkpoint_min_step", int),
    "--cache-idle-slots": ("cache_idle_slots", _is_enabled),
    "--warmup": ("warmup", _is_enabled),
    "--backend-sampling": ("backend_sampling", _is_enabled),
    "--spec-draft-backend-sampling": ("draft_backend_sampling", _is_enabled),
    "--spec-ngram-simple-size-m": ("ngram-simple", int),
    "--spec-ngram-map-k-size-m": ("ngram-map-k", int),
    "--spec-ngram-map-k4v-size-m": ("ngram-map-k4v", int),
    "--spec-ngram-mod-n-max": ("ngram-mod", int),
}
"""The fact for an option's default, and the parser of the default."""

_HAS = {
    "--kv-unified-per-slot": "has_kv_unified_per_slot",
    "--spec-draft-n-ubatch": "has_n_ubatch_draft",
    "--load-mode": "has_load_mode",
    "--no-mmap": "has_load_mode",
}
"""Facts that are true if the help has the option."""

DRAFTS = ("draft-simple", "draft-eagle3", "draft-mtp", "draft-dflash", "draft-dspark")
"""The spec types that ``--spec-draft-n-max`` limits."""


def parse(text: str) -> dict[str, Any]:
    """Read the defaults in a help text; those in an unknown form are left out."""
    defaults: dict[str, Any] = {}
    for option, said in _entries(text).items():
        if option in _HAS:
            defaults[_HAS[option]] = True
        default = re.search(r"\bdefault: '?([^\s,;)']+)", said)
        if default is None:
            continue
        if option == "--spec-draft-n-max" and default[1].isdecimal():
            defaults |= dict.fromkeys(DRAFTS, int(default[1]))
        if option in OPTIONS:
            name, read = OPTIONS[option]
            try:
                defaults[name] = read(default[1])
            except ValueError:
                continue
    return defaults


def _entries(text: str) -> dict[str, str]:
    """Return the text of each option in one line, by each of its names."""
    entries: dict[str, str] = {}
    for entry in re.split(r"\n(?=-)", "\n" + text):
        said = " ".join(entry.split())
        names = re.match(r"(?:-\S+, )*-\S+", said)
        if names is not None:
            entries |= dict.fromkeys(names[0].split(", "), said)
    return entries


def defaults_of(executable: str) -> Mapping[str, Any]:
    """Run the program with ``--help``, and return its defaults; none if it does not print them in time.

    Cached as long as the program and the libraries beside it are unchanged.
    """
    return _defaults_of(executable, _stamp(executable))


@functools.cache
def _defaults_of(executable: str, _stamped: tuple[tuple[str, int, int], ...]) -> Mapping[str, Any]:
    import subprocess

    try:
        done = subprocess.run(
            [executable, "--help"],
            # ggml loads backends from the current directory, too
            cwd=os.path.dirname(executable),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=SECONDS,
            check=False,
        )
    except (OSError, subprocess.SubprocessError):
        return {}
    return parse(done.stdout[:_MOST_BYTES].decode("utf-8", "replace")) if done.returncode == 0 else {}


def _stamp(executable: str) -> tuple[tuple[str, int, int], ...]:
    """Return names, times and sizes of the program and of the libraries with its options."""
    path = Path(os.path.realpath(executable))
    try:
        files = [path, *sorted(path.parent.glob("libllama*"))]
        states = [(file.name, file.stat()) for file in files]
    except OSError:
        return ()
    return tuple((name, state.st_mtime_ns, state.st_size) for name, state in states)
