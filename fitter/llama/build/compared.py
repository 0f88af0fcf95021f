"""Comparisons of the rules of virtual devices with builds of llama.cpp.

``compared.json`` has the figures: loads drawn at random, with the answers of fitter's rules and of the build's backend.
``python -m tools.compared --update`` writes it.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fitter.llama.build.cuda_library import Answering
from fitter.llama.build.functions import same_commit
from fitter.llama.virtual import VirtualDevice
from fitter.version import numbers_of

SIMULATED = "the cards were simulated by"
"""The beginning of a note of a plan."""


@dataclass(frozen=True)
class Compared:
    """A comparison of a profile's rules with a build.

    Attributes:
        llama_cpp: The makers' name for the build.
        ggml: Its version of ggml.
        commit: Its commit; '' if unknown.
        by: What answered for the build.
        rows: Number of compared loads.
        equal: Loads with equal bytes for every buffer and equal graph splits, or refused by both.
        left: A description of the other loads; '' without any.
    """

    llama_cpp: str
    ggml: str
    commit: str
    by: str
    rows: int
    equal: int
    left: str


@functools.cache
def comparisons(profile: str) -> tuple[Compared, ...]:
    """Return all comparisons of a profile (``vulkan`` for every driver), the oldest build first."""
    return tuple(Compared(**each) for each in data().get(profile.partition("-")[0], ()))


@functools.cache
def data() -> dict[str, list[dict[str, Any]]]:
    """Read ``compared.json``: comparisons by profile."""
    with open(os.path.join(os.path.dirname(__file__), "compared.json"), encoding="utf-8") as file:
        document: dict[str, list[dict[str, Any]]] = json.load(file)
    return document


def compared(profile: str, ggml: str, commit: str) -> Compared | None:
    """Return the comparison of a profile's rules with this build; ``None`` without one.

    The llama.cpp in fitter's wheel says its makers' name instead of a commit.
    """
    same_ggml = (each for each in comparisons(profile) if each.ggml == ggml)
    return next((each for each in same_ggml if commit == each.llama_cpp or _is(each.commit, commit)), None)


def around(profile: str, ggml: str) -> tuple[Compared | None, Compared | None]:
    """Return the newest comparison with an older or equal ggml, and the oldest with a newer one."""
    version = numbers_of(ggml)
    older = [each for each in comparisons(profile) if numbers_of(each.ggml) <= version]
    newer = [each for each in comparisons(profile) if numbers_of(each.ggml) > version]
    return (older[-1] if older else None), (newer[0] if newer else None)


def said_of(profile: str, ggml: str, commit: str) -> str:
    """Say for a plan how far a profile's rules were compared with this build; '' if all was equal."""
    comparison = compared(profile, ggml, commit)
    if comparison is None:
        near = [each.llama_cpp for each in around(profile, ggml) if each is not None]
        only = f", only with {' and '.join(near)}" if near else ""
        return f"the rules of the {profile} profile were never compared with this llama.cpp{only}"
    if comparison.equal == comparison.rows:
        return ""
    return (
        f"the rules of the {profile} profile say what this llama.cpp does for {comparison.equal} of {comparison.rows} "
        f"drawn loads; the others are {comparison.left}"
    )


def notes(virtual: Sequence[VirtualDevice], answering: Answering | None, ggml: str, commit: str) -> tuple[str, ...]:
    """List the notes of a plan about the rules or the backend that answered for its virtual devices.

    Args:
        virtual: The devices.
        answering: The CUDA backend that answered, if any.
        ggml: The plan's version of ggml.
        commit: The plan's commit of llama.cpp.
    """
    if answering is not None and answering.library is not None:
        return (f"{SIMULATED} {answering.library.path}, a CUDA backend of llama.cpp",)
    lines = [f"fitter's own rules answered for the cards: {answering.why}"] if answering is not None else []
    profiles = dict.fromkeys(device.profile.partition("-")[0] for device in virtual)
    return (*lines, *filter(None, (said_of(profile, ggml, commit) for profile in profiles)))


def _is(compared_commit: str, commit: str) -> bool:
    """Return whether a build with this ``commit`` may be the compared one."""
    if not compared_commit and commit not in ("", "unknown"):
        # a source without a history takes the commit of the repository around it
        return commit.endswith("-dirty")
    return same_commit(compared_commit, commit) is not False
