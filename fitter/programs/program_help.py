"""Defaults of a program of llama.cpp, from its own ``--help``."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

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
