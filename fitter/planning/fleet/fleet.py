"""A fleet: models on one machine, which are in memory together, and what makes room for what. Bytes and seconds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fitter.planning.plan.plan import Plan
from fitter.text import LONGEST_NAME, printable


@dataclass(frozen=True)
class FleetModel:
    """A model of a fleet, with the one plan that it has whatever is beside it."""

    name: str
    """Its name in ``fitter.toml``."""
    plan: Plan
    """Its plan, measured beside the models of each of its sets."""
    share: float
    """Its share of all requests, from 0 to 1."""
    seconds: float
    """Estimated seconds of a request when it is in memory."""
    alone_seconds: float
    """Estimated seconds of a request if it had the whole machine."""
    load_seconds: float
    """Seconds to load it from the disk."""
    lost_seconds: float
    """Seconds to compute again what the caches of a running model keep of the turn before."""
    needs: Mapping[str, int]
    """Bytes of its whole process at each place: a device, ``host``, or a pool that they share."""
    miss: float
    """The share of its requests before which it must be loaded."""
    evict_cost: int
    """The cost of its eviction, relative to those of the others: of sets with room for what is asked for, the one in
    memory costs least to change."""
    is_resident: bool = False
    """Whether it is loaded at the start, and stays."""
    may_be_evicted: bool = True
    """Whether it may make room for others."""

    @property
    def stays(self) -> bool:
        """Whether no other model takes its place."""
        return self.is_resident or not self.may_be_evicted


@dataclass(frozen=True)
class PlaceUse:
    """The memory of several models at one place."""

    name: str
    """A device, ``host``, or a pool of memory that they share."""
    used: int
    """Bytes of all of them, and of their processes on a card."""
    room: int | None
    """Bytes within the margin; ``None`` if unlimited."""


@dataclass(frozen=True)
class ResidentSet:
    """Models that fit together, with room for no other one."""

    models: tuple[str, ...]
    """Their names."""
    uses: tuple[PlaceUse, ...]
    """Their memory at each place."""


@dataclass(frozen=True)
class Swap:
    """What makes room when a model is asked for that is not in memory."""

    asked: str
    """The model that is loaded."""
    running: tuple[str, ...]
    """The models in memory before."""
    evicted: tuple[str, ...]
    """Those of them that are unloaded."""
    share: float
    """The share of all requests with this swap."""


@dataclass(frozen=True)
class Disk:
    """How fast model files are read."""

    bandwidth: float
    """Bytes per second."""
    source: str
    """How that is known, in words."""


@dataclass(frozen=True)
class Fleet:
    """Several models on one machine. ``bool(fleet)`` is ``fleet.fits``."""

    goal: str
    """``time``, ``resident`` or ``alone``."""
    models: tuple[FleetModel, ...]
    """The models, in the order of ``fitter.toml``; empty where they do not fit."""
    sets: tuple[ResidentSet, ...]
    """The sets that fit together, those with most models first."""
    swaps: tuple[Swap, ...]
    """What makes room for what, the most frequent first."""
    seconds: float
    """Seconds of a request, on average over all, loads included."""
    bound_seconds: float
    """Seconds that no way to run these models on this machine can beat."""
    any_together: int
    """The largest number of models of which any so many fit together: for servers that only count."""
    disk: Disk
    """How fast models are loaded."""
    dummy_loads: int = 0
    """Dummy loads that llama.cpp made for it."""
    problems: tuple[str, ...] = ()
    """Why the models do not fit, one line each, with what would help."""

    @property
    def alone_seconds(self) -> float:
        """Seconds of a request if each model had the whole machine and were always in memory."""
        return sum(model.share * model.alone_seconds for model in self.models)

    @property
    def fits(self) -> bool:
        """Whether every model can run, beside those that stay."""
        return not self.problems

    def __repr__(self) -> str:
        names = ", ".join(printable(model.name, LONGEST_NAME) for model in self.models)
        return f"<Fleet: {names}, in {len(self.sets)} sets{'' if self.fits else ', do not fit'}>"

    def __bool__(self) -> bool:
        return self.fits

    def __str__(self) -> str:
        from fitter.api import result_methods

        return result_methods.fleet_text(self)

    def to_dict(self) -> dict[str, Any]:
        """Return the fleet for JSON, schema 1. Bytes and seconds."""
        from fitter.api import result_methods

        return result_methods.fleet_document(self)

    def format(self, name: str) -> str:
        """Write the fleet as ``fitter fleet --format`` does.

        Args:
            name: ``llama-swap``, ``llama-swap-groups``, ``ini``, ``compose`` or ``systemd``.

        Raises:
            PlanError: The models do not fit, or the format has no word for something of a plan.
        """
        from fitter.api import result_methods

        return result_methods.fleet_formatted(self, name)

    def model(self, name: str) -> FleetModel:
        """Return the model of this name. Raises ``KeyError``."""
        for model in self.models:
            if model.name == name:
                return model
        raise KeyError(name)
