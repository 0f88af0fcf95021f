"""How far the rules of a virtual device's profile were compared with a build of llama.cpp.

The figures are in ``compared.json``, which ``python -m tools.compared --update`` writes: loads drawn at random, and
what fitter's rules and the backend of the build itself say of each.
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
from fitter.llama.build.versions import numbers_of
from fitter.llama.virtual import VirtualDevice


@dataclass(frozen=True)
class Compared:
    """A comparison of a profile's rules with a build. ``llama_cpp``: what its makers call the build.

    ``ggml`` and ``commit``: as the build says them; '' for a commit that nobody knows. ``by``: what answered for the
    build. ``rows``: the loads that were compared. ``equal``: those where both said the same bytes for every buffer and
    the same number of graph splits, or both refused. ``left``: what the others are, '' without any.
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
    """All with the rules of a profile (``vulkan`` for every driver), the oldest build first."""
    return tuple(Compared(**each) for each in data().get(profile.partition("-")[0], ()))


@functools.cache
def data() -> dict[str, list[dict[str, Any]]]:
    """What is in ``compared.json``: comparisons by profile."""
    with open(os.path.join(os.path.dirname(__file__), "compared.json"), encoding="utf-8") as file:
        found: dict[str, list[dict[str, Any]]] = json.load(file)
    return found


def compared(profile: str, ggml: str, commit: str) -> Compared | None:
    """The comparison of a profile's rules with this build; ``None`` where there was none."""
    return next((each for each in comparisons(profile) if each.ggml == ggml and _is(each.commit, commit)), None)


def around(profile: str, ggml: str) -> tuple[Compared | None, Compared | None]:
    """The newest comparison with an older ggml or the same one, and the oldest with a newer one."""
    version = numbers_of(ggml)
    older = [each for each in comparisons(profile) if numbers_of(each.ggml) <= version]
    newer = [each for each in comparisons(profile) if numbers_of(each.ggml) > version]
    return (older[-1] if older else None), (newer[0] if newer else None)


def said_of(profile: str, ggml: str, commit: str) -> str:
    """How far the rules of a profile were compared with this build, as a plan says it; '' where all was equal."""
    found = compared(profile, ggml, commit)
    if found is None:
        near = [each.llama_cpp for each in around(profile, ggml) if each is not None]
        only = f", only with {' and '.join(near)}" if near else ""
        return f"the rules of the {profile} profile were never compared with this llama.cpp{only}"
    if found.equal == found.rows:
        return ""
    return (
        f"the rules of the {profile} profile say what this llama.cpp does for {found.equal} of {found.rows} drawn "
        f"loads; the others are {found.left}"
    )


def notes(virtual: Sequence[VirtualDevice], answering: Answering | None, ggml: str, commit: str) -> tuple[str, ...]:
    """What a plan on the devices ``virtual`` says of who answered for them, a line each; none where all is as usual.

    ``ggml`` and ``commit`` are those of the llama.cpp that was planned with.
    """
    if answering is not None and answering.library is not None:
        return (f"the cards were simulated by {answering.library.path}, a CUDA backend of llama.cpp",)
    lines = [f"fitter's own rules answered for the cards: {answering.why}"] if answering is not None else []
    profiles = dict.fromkeys(device.profile.partition("-")[0] for device in virtual)
    return (*lines, *filter(None, (said_of(profile, ggml, commit) for profile in profiles)))


def _is(known: str, commit: str) -> bool:
    """Whether a build that says this ``commit`` may be the one that was compared."""
    if not known and commit not in ("", "unknown"):
        # A source without a history takes the commit of whatever is around it.
        return commit.endswith("-dirty")
    return same_commit(known, commit) is not False
