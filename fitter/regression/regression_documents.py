"""The documents of ``fitter check``, ``diff`` and ``history`` with ``--json``; sizes in bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from fitter.api.compare_builds import OnBuild
from fitter.llama.types import Row
from fitter.output.documents.document import Document, Key, document
from fitter.regression.check_cases import CaseResult
from fitter.regression.compare import CaseComparison, Cause, Move, PlanDiff

MOVE = document(
    Move,
    *("what", "before", "after"),
    Key(
        "unit",
        change=lambda unit: unit or None,
        hint=Literal["bytes", "tokens", "layers", "tokens/s", None],
        about="`bytes`, `tokens`, `layers` or `tokens/s`; null, 1 means yes and 0 means no.",
    ),
    *("detail", "failure"),
    Key("budget", "is_budget"),
)
CAUSE = document(Cause, "kind", "what", "before", "after")


@dataclass(frozen=True)
class Check:
    """A check of cases."""

    passed: bool
    """Whether the exit status is 0."""
    cases: tuple[CaseResult, ...]
    """Every case, by name."""


def _compared(name: str, of: Document | None = None, field: str = "") -> Key:
    """A list of the comparison, which is empty where the case was not measured."""
    field = field or name
    hints = {"failures": tuple[str, ...], "moves": tuple[Move, ...]}
    return Key(
        name,
        ".",
        of,
        change=lambda case: getattr(case.comparison, field, ()),
        hint=hints.get(field, tuple[Cause, ...]),
        about=_MEANINGS[field],
    )


_MEANINGS = {
    "failures": f"{CaseComparison.failures.__doc__}",
    "moves": "The numbers that changed.",
    "causes": "Changes that may explain them.",
    "chosen": "Parameters that were fitted differently.",
}

CHECK = document(
    Check,
    "passed",
    Key(
        "cases",
        of=document(
            CaseResult,
            "name",
            Key("status", hint=Literal["same", "changed", "failed", "added", "removed", "error"]),
            Key("error", change=str, hint=str | None),
            Key(
                "fits",
                "comparison",
                change=lambda comparison: comparison.fits,
                hint=bool | None,
                about="Whether the plan fits; null if it was not measured.",
            ),
            _compared("failures"),
            _compared("moves", MOVE),
            _compared("causes", CAUSE),
            _compared("fitted", CAUSE, "chosen"),
        ),
    ),
    title="A check",
)

DIFF = document(
    PlanDiff,
    Key("equal", "is_empty"),
    Key("moves", of=MOVE, about=_MEANINGS["moves"]),
    Key("changes", of=CAUSE),
    title="The differences between two plans",
)


@dataclass(frozen=True)
class Build:
    """A build of llama.cpp."""

    llama_cpp: str
    """The build, as it was named."""
    label: str
    """A short name of the build, the last part of its path."""
    version: str | None
    """Its version and commit; null if no case could ask it."""


@dataclass(frozen=True)
class MemoryOnBuild:
    """The memory of a buffer type with a build."""

    device: str
    """The device, or host."""
    buffer_type: str
    """Its name in llama.cpp, such as ``CUDA0`` or ``CPU_REPACK``."""
    row: Row
    """Its bytes."""


@dataclass(frozen=True)
class CaseOnBuild:
    """The answer of one build to a case."""

    label: str
    """A short name of the build, the last part of its path."""
    asked: OnBuild
    """The answer."""
    memory: tuple[MemoryOnBuild, ...]
    """The bytes of those parameters, by buffer type."""
    moves: tuple[Move, ...]
    """The numbers that differ from those of the first build."""
    plan: tuple[Move, ...]
    """The numbers that differ in this build's own plan; always empty in a history."""


@dataclass(frozen=True)
class CaseOnBuilds:
    """The answers of several builds to a case."""

    name: str
    """The case, or the model."""
    error: str | None
    """Why no build could plan it; null if one could."""
    builds: tuple[CaseOnBuild, ...]
    """The answer of each build, in their order."""


@dataclass(frozen=True)
class Builds:
    """Builds of llama.cpp, compared."""

    equal: bool
    """Whether nothing differs between the first and the last build."""
    grown: bool
    """Whether a case takes more with the last build, or fits no more."""
    builds: tuple[Build, ...]
    """The builds, in their order."""
    cases: tuple[CaseOnBuilds, ...]
    """Every case."""


BUILDS = document(
    Builds,
    *("equal", "grown"),
    Key("builds", of=document(Build, "llama_cpp", "label", "version")),
    Key(
        "cases",
        of=document(
            CaseOnBuilds,
            *("name", "error"),
            Key(
                "builds",
                of=document(
                    CaseOnBuild,
                    "label",
                    Key(
                        "error",
                        "asked.error",
                        change=str,
                        hint=str | None,
                        about="Why it was not measured; null if it was.",
                    ),
                    Key(
                        "fits",
                        "asked",
                        change=lambda asked: None if asked.breakdown is None else asked.fits,
                        hint=bool | None,
                        about=f"{OnBuild.fits.__doc__} null if that was not measured.",
                    ),
                    Key("missing", "asked.missing", hint=Mapping[str, int]),
                    Key(
                        "memory",
                        of=document(
                            MemoryOnBuild,
                            *("device", "buffer_type"),
                            *(Key(name, f"row.{name}") for name in ("model", "context", "compute", "used")),
                        ),
                    ),
                    Key("moves", of=MOVE),
                    Key("plan", of=MOVE),
                ),
            ),
        ),
    ),
    title="Builds of llama.cpp compared",
)
