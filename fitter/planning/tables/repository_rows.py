"""The models of a repository, each with a plan, and which of them to take. Bytes, if not said."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from fitter.model.repository_models import SideFile
from fitter.planning.plan.plan import Plan
from fitter.planning.plan.plan_or_error import Planned
from fitter.planning.plan.result_methods import methods_of
from fitter.planning.tables.quantization_rows import Quantization, best_of

_SAME_MODEL = 0.95
"""Files whose numbers of weights differ by less are of the same model: some leave the output's tensor out."""


@dataclass(frozen=True)
class RepositoryFile(Planned):
    """A model of a repository, in one file or split into several, and the plan for it."""

    name: str
    """The path of its first file in the repository."""
    files: tuple[str, ...]
    """All its files."""
    bytes: int
    """Bytes of all its files."""
    file_type: str
    """The file type that its name says, such as ``Q4_K_M``; empty where it says none."""
    path: str
    """Its address, or its path on this machine."""
    weights: int | None = None
    """How many weights it has; ``None`` where its header could not be read."""
    bits_per_weight: float | None = None
    """Bits of all tensors by the number of their weights; ``None`` where its header could not be read."""
    plan: Plan | None = None
    """The plan for it; ``None`` where there is none."""
    longest_context: int | None = None
    """The most tokens of context with which it fits, whatever that costs in time; ``None`` where it does not fit."""
    problem: str | None = None
    """Why there is no plan; ``None`` where there is one."""


@dataclass(frozen=True)
class Repository:
    """The models of a repository of Hugging Face's hub, or of a directory, each with a plan."""

    address: str
    """The address of the repository, or the path of the directory."""
    found: tuple[RepositoryFile, ...]
    """Its models, the largest first; those without a plan last."""
    beside: tuple[SideFile, ...]
    """Its other GGUF files, which are no models of their own."""
    best: RepositoryFile | None
    """The one with the most bits per weight of those that fit with every layer on devices, or where none does, of those
    that fit; or of those that generate as fast as was asked for. Left out are those of which another one is no larger
    and has the lower published perplexity, and models with fewer weights. ``None`` where none fits.
    """
    n_devices: int = 0
    """How many devices there are to place it on."""
    tokens_per_second: float | None = None
    """How fast it must generate at least to be the best one, where that was asked for."""
    download: tuple[str, ...] | None = None
    """The command that downloads the best one into the current directory; ``None`` where it is here, or there is none.
    """
    run: tuple[str, ...] | None = None
    """The command that runs the best one once it is here; ``None`` where there is none."""
    hf: tuple[str, ...] | None = None
    """llama.cpp's arguments in place of ``-m FILE`` that have it download the best one itself; ``None`` where it could
    not, or would load something else.
    """

    @property
    def fits(self) -> bool:
        """Whether any of them fits."""
        return any(each.fits for each in self.found)

    def __bool__(self) -> bool:
        return self.fits

    def to_dict(self) -> dict[str, Any]:
        """All of it as JSON-ready data, schema 1; sizes in bytes."""
        document: dict[str, Any] = methods_of(self).to_dict(self)
        return document


def ordered(found: Iterable[RepositoryFile]) -> tuple[RepositoryFile, ...]:
    """The largest first, those without a plan last."""
    return tuple(sorted(found, key=lambda each: (each.plan is None, -each.bytes, each.name)))


def best_file(
    found: Sequence[RepositoryFile], n_devices: int, tokens_per_second: float | None
) -> RepositoryFile | None:
    """Which one to take: see ``Repository.best``."""
    # Without a device to count, those count whose weights are on the host.
    for devices in dict.fromkeys((n_devices, 0)):
        for group in _models(found):
            types = {each.file_type.lower() for each in group}
            own_type = next((each for each in ("bf16", "f16", "f32") if each in types), "")
            choices = [(_as_quantization(each), each) for each in group]
            best = best_of([each for each, _ in choices], own_type, devices, tokens_per_second)
            if best is not None:
                return next(file for each, file in choices if each is best)
    return None


def _as_quantization(each: RepositoryFile) -> Quantization:
    """It as one of the file types of a model."""
    kind, bits = each.file_type or each.name, each.bits_per_weight
    return Quantization(kind, each.bytes, bits, {}, False, plan=each.plan, longest_context=each.longest_context)


def _models(found: Sequence[RepositoryFile]) -> list[list[RepositoryFile]]:
    """The files of each model, the one with the most weights first."""
    groups: list[list[RepositoryFile]] = []
    for each in sorted(found, key=lambda each: (-(each.weights or 0), each.name)):
        if groups and (each.weights or 0) >= _SAME_MODEL * (groups[-1][0].weights or 0):
            groups[-1].append(each)
        else:
            groups.append([each])
    return groups


__all__ = ["Repository", "RepositoryFile", "SideFile", "best_file", "ordered"]
