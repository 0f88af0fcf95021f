"""A plan: parameters, and the memory that llama.cpp measured for them. Sizes in bytes.

Functions that write, load or verify a plan are in rooms above this one (``result_methods``).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from fitter.errors import PlanError
from fitter.llama.types import Breakdown, LlamaCpp, Params
from fitter.model import location
from fitter.parameters.table import DEFAULTS, AnyPath
from fitter.planning.plan.result_methods import methods_of
from fitter.planning.pricing.pricing import Price
from fitter.planning.request.summary import (
    DeviceUse,
    FileStamp,
    HostUse,
    LeftOut,
    ModelSummary,
    PoolUse,
    Problem,
    Search,
    SharedUse,
    stamp_of,
)
from fitter.planning.speed.explain import Bound, Choice
from fitter.programs.later import Later
from fitter.text import LONGEST_NAME, mib, mib_up, printable

if TYPE_CHECKING:
    from typing import final

    import llama_cpp

    from fitter.planning.plan.verified import Verification

    @final
    class Llama(llama_cpp.Llama):
        """What ``fitter.Llama`` and ``Plan.load`` make: a ``llama_cpp.Llama`` with a plan."""

        plan: Plan

        def __init__(self, model_path: str | os.PathLike[str], **keywords: Any) -> None: ...

        @classmethod
        def from_pretrained(  # type: ignore[override]
            cls, repo_id: str, filename: str | None, additional_files: list[str] | None = None, **keywords: Any
        ) -> Llama: ...


@dataclass(frozen=True)
class Plan:
    """Parameters that llama.cpp measured to fit (or, with ``fits`` false, the nearest that were tried).

    They were confirmed by a dummy load of the user's own file, and the rest is what that load measured. ``bool(plan)``
    is ``plan.fits``, ``str(plan)`` the table that the command shows. A plan that was read from a file has what the file
    says, and defaults for the rest.
    """

    model: ModelSummary
    """The model."""
    params: Params
    """The parameters of the load."""
    breakdown: Breakdown
    """What llama.cpp measured: rows per buffer type."""
    devices: tuple[DeviceUse, ...]
    """What it takes of each device, in llama.cpp's order."""
    host: HostUse
    """What it takes of host memory."""
    search: Search
    """What finding it took."""
    problems: tuple[Problem, ...]
    """Why it does not fit; empty exactly when it fits: when its margins are kept with ``compute`` of each row, a dummy
    load's figure, and it has room with ``reserved``, that of a real one.
    """
    n_layer: int = 0
    """Repeating layers that llama.cpp can offload, without the output layer; 0 where that is not known."""
    virtual: bool = False
    """Whether the devices are described ones."""
    estimate: Price | None = None
    """What it takes in time; ``None`` where it does not fit."""
    choices: tuple[Choice, ...] = ()
    """What was chosen over what."""
    bound: Bound | None = None
    """What no placement is faster than."""
    levers: tuple[str, ...] = ()
    """What was given up for it, of what the user allowed to be."""
    shared: tuple[SharedUse, ...] = ()
    """What else takes of the same memory; it is in no row of ``breakdown``."""
    rpc: tuple[str, ...] = ()
    """The rpc-servers (``host:port``) that were given, where the plan uses a device of theirs; their order decides how
    those are named.
    """
    program: str = "any"
    """The program that it is for, as ``--for`` names it."""
    later: tuple[Later, ...] = ()
    """What that takes of host memory after the load."""
    llama_cpp: LlamaCpp | None = None
    """The build of llama.cpp that it was made with; ``None`` where a file does not say it."""
    notes: tuple[str, ...] = ()
    """What else is to be said of it, a line each: who answered for described devices, where that is a CUDA backend, or
    rules of fitter's that were not compared with this build of llama.cpp; weights that llama.cpp has the host compute
    with although their layer is on a device; devices that are not used. Empty where nothing is.
    """
    pools: tuple[PoolUse, ...] = ()
    """Memory that devices and the host share, and what all of them take of it; empty where each has its own."""
    fit_keywords: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)
    """The keywords that ``fit`` was called with, to fit again."""
    files: tuple[FileStamp, ...] = field(default=(), compare=False, repr=False)
    """The files that were fitted, to load what was planned."""

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        vars(self).update(renamed(state))

    @property
    def asked(self) -> Mapping[str, Any]:
        """``fit_keywords`` by its earlier name."""
        return self.fit_keywords

    @property
    def fits(self) -> bool:
        """Whether every device, the host and each pool keep their margin."""
        return not self.problems

    @property
    def left_out(self) -> tuple[LeftOut, ...]:
        """Devices without a byte beside their margin, and what is kept free with ``reserve``."""
        rows = [row for shared in self.shared if shared.kind != "reserve" for row in shared.rows if row.used]
        busy = {row.device for row in rows}
        return tuple(
            LeftOut(use.name, "margin", _why_left_out(use))
            for use in self.devices
            if use.used == use.shared and use.left <= use.margin and use.name not in busy
        )

    def __bool__(self) -> bool:
        return self.fits

    def __str__(self) -> str:
        return str(methods_of(self).text(self, as_html=False))

    def _repr_html_(self) -> str:
        """The picture of the plan, which a notebook shows."""
        return str(methods_of(self).text(self, as_html=True))

    def __repr__(self) -> str:
        names = ", ".join(printable(name) for name in self.breakdown.devices) or "the host"
        verdict = "fits" if self.fits else "does not fit"
        n_ctx = self.params.n_ctx or self.breakdown.n_ctx
        return f"<Plan: {printable(self.model.name, LONGEST_NAME)} {verdict}, n_ctx={n_ctx}, on {names}>"

    def arguments(self, *, anyway: bool = False) -> list[str]:
        """llama.cpp's command-line arguments.

        Raises ``PlanError`` where the plan does not fit, unless they are asked for ``anyway``, and where llama.cpp has
        no argument for what the plan needs.
        """
        if not anyway:
            check_fits(self, "arguments(anyway=True)")
        words: list[str] = methods_of(self).arguments(self)
        return words

    def to_dict(self) -> dict[str, Any]:
        """The plan as JSON-ready data, schema 1; sizes in bytes."""
        document: dict[str, Any] = methods_of(self).to_dict(self)
        return document

    def format(self, name: str, *, anyway: bool = False) -> str:
        """The plan as ``fitter fit --format`` writes it.

        ``name`` is ``args``, ``shell``, ``json``, ``ini``, ``env``, ``python`` or ``ik_llama``. Raises ``PlanError``
        where that format has no word for what the plan needs; all but ``json`` also where the plan does not fit, unless
        it is asked for ``anyway``.
        """
        return str(methods_of(self).format(self, name, anyway))

    def explain(self) -> str:
        """Why the plan is as it is: what takes its time, each choice's runner-up, the proven distance to the best."""
        return str(methods_of(self).explain(self))

    def llama_kwargs(self) -> dict[str, Any]:
        """Keyword arguments for ``llama_cpp.Llama``. Raises ``PlanError`` where it has none for what the plan needs."""
        keywords: dict[str, Any] = methods_of(self).llama_kwargs(self)
        return keywords

    def load(self, **kwargs: Any) -> Llama:
        """A ``llama_cpp.Llama`` with the whole plan applied, overrides too; ``kwargs`` go to ``Llama``.

        Its ``plan`` is what it was loaded with: where a device has less memory than the plan counts on, what ``fit``
        was asked for is fitted again, at most twice, with a ``PlanWarning``.

        Raises ``PlanError`` where the plan does not fit or is for devices that are not here, ``UsageError`` for
        ``kwargs`` that contradict it, ``ModelError`` where the model is gone or another one, ``OutOfMemoryError``
        where a device refuses memory even so, ``RemoteError`` where an rpc-server fails, ``LlamaCppError`` where
        llama.cpp cannot load the model. Where llama.cpp would end the process, ``LlamaCppCrashError`` is raised.
        """
        llama: Llama = methods_of(self).load(self, kwargs)
        return llama

    def verify(
        self,
        *,
        tolerance: int | str = 0,
        timeout: float = DEFAULTS["timeout"],
        program: str | None = None,
        server: AnyPath | None = None,
        prompts: int | None = None,
    ) -> Verification:
        """Load the plan for real in a worker process, or by a ``llama-server``, and compare: ``fitter.verify``."""
        keywords = {
            "tolerance": tolerance,
            "timeout": timeout,
            "program": program,
            "server": server,
            "prompts": prompts,
        }
        keywords = {name: value for name, value in keywords.items() if value is not None}
        verification: Verification = methods_of(self).verify(self, keywords)
        return verification


def renamed(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a plan from a pickle, with the name of today where an earlier version had another one."""
    return {"fit_keywords" if name == "asked" else name: value for name, value in fields.items()}


def _why_left_out(use: DeviceUse) -> str:
    margin = f"its margin of {mib_up(use.margin)} MiB"
    if use.margin > use.total:
        why = f"{margin} is more than its memory of {mib(use.total)} MiB"
    elif use.shared:
        why = f"{margin} and {mib_up(use.shared)} MiB reserved leave nothing of its {mib(use.free)} MiB free"
    else:
        why = f"{margin} leaves nothing of its {mib(use.free)} MiB free"
    return f"{use.name} is left out: {why}; set a smaller margin with --fit-target"


def check_fits(plan: Plan, remedy: str = "") -> None:
    """Raise ``PlanError`` for a plan that does not fit: nobody is to run it by accident. ``remedy`` is a way to."""
    if not plan.fits:
        more = f"; to get it anyway, use {remedy}" if remedy else ""
        raise PlanError(f"the plan does not fit: {plan.problems[0].message}{more}")


def check_can_run(plan: Plan) -> None:
    """Raise ``PlanError`` for a plan that no machine can run."""
    if plan.virtual:
        raise PlanError("the plan is for virtual devices, which cannot run a model: fit again without them")


def check_is_here(plan: Plan) -> None:
    """Raise ``ModelError`` where the model, or something beside it, is elsewhere and so cannot be loaded."""
    for path in (plan.model.path, *(use.name for use in plan.shared if use.kind in ("draft", "projector", "lora"))):
        location.check_is_here(path)


def check_llama_cpp(plan: Plan, here: LlamaCpp, advice: str) -> None:
    """Raise ``PlanError`` with ``advice`` where ``plan`` was made with another llama.cpp than the one that is here."""
    planned = plan.llama_cpp
    # Where the commit is not known, equal versions do not say that it is the same one.
    is_known = planned is not None and "unknown" not in planned.version
    is_same = planned is None or planned.key == here.key or (is_known and planned.version == here.version)
    if planned is not None and not is_same:
        raise PlanError(
            f"the plan was made with llama.cpp {planned.version}, and {here.libllama} is {here.version}, which may "
            f"take other memory: {advice}"
        )


def resolved(plan: Plan) -> Params:
    """The plan's parameters with what llama.cpp chose where they leave it the choice: context and devices."""
    params, found = plan.params, plan.breakdown
    devices = found.devices if params.devices is None else params.devices
    return replace(params, n_ctx=params.n_ctx or found.n_ctx, devices=devices)


__all__ = [
    "DeviceUse",
    "FileStamp",
    "HostUse",
    "LeftOut",
    "ModelSummary",
    "Plan",
    "PoolUse",
    "Problem",
    "Search",
    "SharedUse",
    "check_can_run",
    "check_fits",
    "check_is_here",
    "check_llama_cpp",
    "renamed",
    "resolved",
    "stamp_of",
]
