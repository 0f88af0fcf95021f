"""The table of a repository's models with their plans, and the choice of the best one. Bytes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from fitter.model.repository_models import SideFile
from fitter.planning.plan.plan import Plan
from fitter.planning.tables.type_choice import Planned, TypeFigures, best_type, is_useful
from fitter.text import LONGEST_NAME, printable

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
class Repository:
    """The models of a repository or directory, with their plans."""

    address: str
    """Address of the repository, or path of the directory."""
    found: tuple[RepositoryFile, ...]
    """Its models, the largest first, those without a plan last."""
    beside: tuple[SideFile, ...]
    """Its other GGUF files."""
    best: RepositoryFile | None
    """The model with the most bits per weight that generates ``tokens_per_second``, by the rule of
    ``fitter.planning.tables.type_choice``; ``None`` if nothing fits. Excluded are files that another one beats by size
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

    def __bool__(self) -> bool:
        return self.fits

    def to_dict(self) -> dict[str, Any]:
        """Return all of it for JSON, schema 1. Bytes."""
        from fitter.api import result_methods

        return result_methods.repository_document(self)


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
