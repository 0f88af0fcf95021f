"""A plan: parameters, and the memory that llama.cpp measured for them. Bytes.

``fitter.api.result_methods`` has the methods that write, load or verify a plan.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from fitter.errors import Message, PlanError, Remedy, UsageError
from fitter.llama.types import Breakdown, LlamaCpp, Params
from fitter.model import location
from fitter.model.header import Model
from fitter.model.tensors import Role, role_of
from fitter.parameters.table import DEFAULTS, MAPPED, PARAMETERS, AnyPath
from fitter.planning.plan.turns import Drafting, Turns
from fitter.planning.pricing.pricing import Price
from fitter.planning.request.pool_margin import MAPS
from fitter.planning.request.request import Request
from fitter.planning.request.shared import HOST_NAME
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
from fitter.planning.speed.cost import MIN_OFFLOAD_BATCH
from fitter.planning.speed.explain import Alternative, Bound, Choice
from fitter.programs.later import Later
from fitter.text import LONGEST_NAME, MIB, mib, mib_up, printable

if TYPE_CHECKING:
    import llama_cpp

    from fitter.planning.plan.verified import Verification

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
    """Parameters that llama.cpp measured to fit; with ``fits`` false, the nearest ones that were tried.

    A dummy load of the model confirmed them and measured all bytes. ``bool(plan)`` is ``plan.fits``,
    ``str(plan)`` the table of the command. A plan from a file has the file's values, and defaults for the rest.
    """

    model: ModelSummary
    """The model."""
    params: Params
    """The parameters of the load."""
    breakdown: Breakdown
    """Measured memory, in rows by buffer type."""
    devices: tuple[DeviceUse, ...]
    """Memory on each device, in llama.cpp's order."""
    host: HostUse
    """Host memory."""
    search: Search
    """The effort of the search."""
    problems: tuple[Problem, ...]
    """Why the plan does not fit; empty exactly if it fits: if its margins are kept with ``compute`` of each row (of a
    dummy load), and ``reserved`` (of a real load) has room.
    """
    n_layer: int = 0
    """Repeating layers that llama.cpp can offload, without the output; 0 if unknown."""
    virtual: bool = False
    """Whether the devices are virtual."""
    default_devices: tuple[str, ...] = ()
    """The devices that llama.cpp uses by itself on the described machine, in its order; empty where the user names
    some. A plan with exactly these needs no ``-dev``.
    """
    estimate: Price | None = None
    """Estimated time; ``None`` if the plan does not fit."""
    choices: tuple[Choice, ...] = ()
    """Decisions of the search, with their alternatives."""
    turns: Turns | None = None
    """Turns of the work that ``workload`` or ``users`` describes; ``None`` without these keywords."""
    drafting: Drafting | None = None
    """Speeds with drafts of different lengths; ``None`` without a model that drafts."""
    bound: Bound | None = None
    """A time that no placement can beat."""
    levers: tuple[str, ...] = ()
    """Concessions that the plan made, of those that the user allowed."""
    shared: tuple[SharedUse, ...] = ()
    """Memory of draft models, projectors, adapters and reservations; in no row of ``breakdown``."""
    rpc: tuple[str, ...] = ()
    """The rpc-servers (``host:port``) of the call, if the plan uses a device of theirs; their order decides the
    devices' names.
    """
    program: str = "any"
    """The program that will load the plan, as ``--for`` names it."""
    own_split: tuple[float, ...] = ()
    """Shares of devices with which the program itself cuts layers like ``params.tensor_split`` does in llama.cpp; empty
    for a program that cuts as llama.cpp does, or cannot cut so.
    """
    later: tuple[Later, ...] = ()
    """Host memory that the program takes after the load."""
    llama_cpp: LlamaCpp | None = None
    """The build of llama.cpp that made the plan; ``None`` if a file does not name it."""
    notes: tuple[str, ...] = ()
    """Notes, one line each: the CUDA backend that answered for virtual devices; rules that were not compared with this
    build; weights that llama.cpp computes with on the host although their layer is on a device; unused devices.
    """
    pools: tuple[PoolUse, ...] = ()
    """Memory that devices and the host share, and the plan's use of it; empty if each has its own."""
    alternatives: tuple[Alternative, ...] = ()
    """Other plans that the user could ask for, each with the words to add; empty unless ``fit`` looked for them."""
    fit_keywords: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)
    """The keywords of ``fit``, to fit again."""
    files: tuple[FileStamp, ...] = field(default=(), compare=False, repr=False)
    """The files that were fitted, to recognize a change."""

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        vars(self).update(renamed(state))

    @property
    def asked(self) -> Mapping[str, Any]:
        """The earlier name of ``fit_keywords``."""
        return self.fit_keywords

    @property
    def fits(self) -> bool:
        """Whether every device, the host and each pool keep their margin."""
        return not self.problems

    @property
    def left_out(self) -> tuple[LeftOut, ...]:
        """Devices whose margin and reservations leave no byte for the plan."""
        rows = [row for shared in self.shared if not shared.is_of_others for row in shared.rows if row.used]
        busy = {row.device for row in rows}
        return tuple(
            LeftOut(use.name, "margin", _why_left_out(use))
            for use in self.devices
            if use.used == use.shared and use.left <= use.margin and use.name not in busy
        )

    def __bool__(self) -> bool:
        return self.fits

    def __str__(self) -> str:
        from fitter.api import result_methods

        return result_methods.plan_text(self)

    def _repr_html_(self) -> str:
        """Draw the plan for a notebook."""
        from fitter.api import result_methods

        return result_methods.plan_html(self)

    def __repr__(self) -> str:
        names = ", ".join(printable(name) for name in self.breakdown.devices) or "the host"
        verdict = "fits" if self.fits else "does not fit"
        n_ctx = self.params.n_ctx or self.breakdown.n_ctx
        return f"<Plan: {printable(self.model.name, LONGEST_NAME)} {verdict}, n_ctx={n_ctx}, on {names}>"

    def arguments(self, *, anyway: bool = False) -> list[str]:
        """Return llama.cpp's command-line arguments.

        Args:
            anyway: Whether to return them for a plan that does not fit.

        Raises:
            PlanError: The plan does not fit, or llama.cpp has no argument for one of its parameters.
        """
        from fitter.api import result_methods

        if not anyway:
            check_fits(self, "arguments(anyway=True)")
        return result_methods.arguments(self)

    def to_dict(self) -> dict[str, Any]:
        """Return the plan for JSON, schema 1. Bytes."""
        from fitter.api import result_methods

        return result_methods.plan_document(self)

    def format(self, name: str, *, anyway: bool = False) -> str:
        """Write the plan as ``fitter fit --format`` does.

        Args:
            name: ``args``, ``shell``, ``json``, ``ini``, ``env``, ``python``, ``ik_llama``, ``llama-swap``,
                ``compose``, ``ollama``, ``kubernetes``, ``llmkube`` or ``gguf-parser``.
            anyway: Whether to write a plan that does not fit; ``json`` always does. ``ollama`` then also leaves out
                what Ollama cannot be told.

        Raises:
            PlanError: The plan does not fit, or the format has no word for one of its parameters.
        """
        from fitter.api import result_methods

        return result_methods.formatted(self, name, anyway)

    def explain(self) -> str:
        """Explain the plan: the steps of its time, the runner-up of each choice, and the proven distance to the best
        plan.
        """
        from fitter.api import result_methods

        return result_methods.explanation(self)

    def llama_kwargs(self) -> dict[str, Any]:
        """Return keyword arguments for ``llama_cpp.Llama``.

        Raises:
            PlanError: The plan does not fit, or ``Llama`` has no keyword for one of its parameters.
        """
        from fitter.api import result_methods

        return result_methods.llama_kwargs(self)

    def load(self, **kwargs: Any) -> Llama:
        """Load the plan as a ``llama_cpp.Llama``, with all parameters and overrides.

        Where a device has less memory than the plan needs, the model is fitted again, at most twice, with a
        ``PlanWarning``; the result's ``plan`` is the loaded one.

        Args:
            kwargs: Keywords for ``llama_cpp.Llama``.

        Raises:
            PlanError: The plan does not fit, or its devices are not here.
            UsageError: A keyword contradicts the plan.
            ModelError: The model is gone or has changed.
            OutOfMemoryError: A device refused memory even after the fits.
            RemoteError: An rpc-server failed.
            LlamaCppError: llama.cpp cannot load the model; ``LlamaCppCrashError`` where it would end the process.
        """
        from fitter.api import result_methods

        return result_methods.load(self, kwargs)

    def verify(
        self,
        *,
        tolerance: int | str = 0,
        timeout: float = DEFAULTS["timeout"],
        program: str | None = None,
        server: AnyPath | None = None,
        prompts: int | None = None,
    ) -> Verification:
        """Load the plan for real in a worker process or by a llama-server, and compare; see ``fitter.verify``."""
        from fitter.api import result_methods

        keywords = {
            "tolerance": tolerance,
            "timeout": timeout,
            "program": program,
            "server": server,
            "prompts": prompts,
        }
        keywords = {name: value for name, value in keywords.items() if value is not None}
        return result_methods.verify(self, keywords)


def renamed(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Rename fields of a plan from an earlier version's pickle to today's names."""
    return {"fit_keywords" if name == "asked" else name: value for name, value in fields.items()}


def _why_left_out(use: DeviceUse) -> str:
    if not use.free:
        return f"{use.name} is left out: nothing of its {mib(use.total)} MiB is free"
    margin = f"its margin of {mib_up(use.margin)} MiB"
    if use.margin > use.total:
        why = f"{margin} is more than its memory of {mib(use.total)} MiB"
    elif use.shared:
        why = f"{margin} and {mib_up(use.shared)} MiB reserved leave nothing of its {mib(use.free)} MiB free"
    else:
        why = f"{margin} leaves nothing of its {mib(use.free)} MiB free"
    remedy = Remedy("set a smaller margin with --fit-target", "margin", "lower")
    return Message(f"{use.name} is left out: {why}; ", remedy)


def check_fits(plan: Plan, remedy: str = "") -> None:
    """Raise ``PlanError`` for a plan that does not fit; ``remedy`` is a way to use it nevertheless."""
    if not plan.fits:
        more = f"; to get it anyway, use {remedy}" if remedy else ""
        raise PlanError(f"the plan does not fit: {plan.problems[0].message}{more}")


def is_on_devices(plan: Plan) -> bool:
    """Return whether devices have all layers and caches of ``plan``."""
    params = plan.params
    has_all = params.n_gpu_layers < 0 or params.n_gpu_layers > plan.n_layer
    return bool(plan.breakdown.devices) and has_all and not plan.host.context and not params.tensor_buft_overrides


def check_can_run(plan: Plan) -> None:
    """Raise ``PlanError`` for a plan for virtual devices."""
    if plan.virtual:
        raise PlanError("the plan is for virtual devices, which cannot run a model: fit again without them")


def check_is_here(plan: Plan) -> None:
    """Raise ``ModelError`` if the model, or a file beside it, is remote and so cannot be loaded."""
    for path in (plan.model.path, *(use.name for use in plan.shared if use.kind in ("draft", "projector", "lora"))):
        location.check_is_here(path)


def check_llama_cpp(plan: Plan, here: LlamaCpp, advice: str) -> None:
    """Raise ``PlanError`` with ``advice`` if another llama.cpp than the one ``here`` made the plan."""
    planned = plan.llama_cpp
    # equal versions without a commit may be different builds
    is_known = planned is not None and "unknown" not in planned.version
    is_same = planned is None or planned.key == here.key or (is_known and planned.version == here.version)
    if planned is not None and not is_same:
        raise PlanError(
            f"the plan was made with llama.cpp {planned.version}, and {here.libllama} is {here.version}, which may "
            f"take other memory: {advice}"
        )


def resolved(plan: Plan) -> Params:
    """Return the plan's parameters with the context and devices that llama.cpp chose."""
    params, breakdown = plan.params, plan.breakdown
    devices = breakdown.devices if params.devices is None else params.devices
    return replace(params, n_ctx=params.n_ctx or breakdown.n_ctx, devices=devices)


_PINNED = "_Host"
"""End of the names of pinned host buffer types: ``CUDA_Host``, ``ROCm_Host``, ``Vulkan_Host``."""
_WORTH = 32 * MIB
"""Bytes of weights that justify another argument."""


def with_its_mode(plan: Plan, request: Request, model: Model, *, is_free: bool) -> Plan:
    """Set the load mode that ``plan`` needs, or the fastest one if the user and the build leave it open (``is_free``).

    A note says where the user's is slower.

    Raises:
        UsageError: The user's load mode maps weights that the plan has no room for.
    """
    has = plan.params.of_parameter(PARAMETERS["load_mode"])
    if has == "auto" and _pages_where_nothing_is_mapped(plan, request):
        return _with_mode(plan, "mmap")
    if plan.fits and any(pool.load_mode for pool in plan.pools):
        if has in MAPPED:
            raise UsageError(
                f"with --load-mode {has} the GPU maps what the host has of the layers as well, for which there is no "
                "room: leave it out"
            )
        return plan if has != "auto" else _with_mode(plan, "none")
    if not (is_free or has in MAPPED) or not _copies(plan, request, model):
        return plan
    note = f"with --load-mode {has} prompts are slower, since devices copy weights from the mapped file: leave it out"
    return _with_mode(plan, "none") if is_free else replace(plan, notes=(*plan.notes, note))


def _pages_where_nothing_is_mapped(plan: Plan, request: Request) -> bool:
    """Return whether weights must be paged on a machine where ``auto`` becomes ``none``.

    It does where a device other than Apple's shares the host's memory: ggml's backends have no ``mmap_support`` there
    (``load_tensors`` in ``llama-model.cpp``).
    """
    is_short = any(not pool.fits for pool in plan.pools) or not plan.host.fits
    is_read = any(pool.system != MAPS for pool in request.pools)
    return request.host.paging and is_read and plan.fits and is_short


def _with_mode(plan: Plan, mode: str) -> Plan:
    return replace(plan, params=plan.params.having({"load_mode": mode}))


def _copies(plan: Plan, request: Request, model: Model) -> bool:
    """Return whether a device copies host weights in prompts, which is faster with ``none``.

    By default llama.cpp maps host weights into pageable memory, from which a driver copies each byte twice; ``none``
    puts them into pinned memory (``select_weight_buft`` in ``llama-model-loader.cpp``). The plan's dummy load had this
    mode, so the host has room. Paging needs mapped weights.
    """
    is_long = min(plan.params.n_ubatch, request.workload.prompt) >= MIN_OFFLOAD_BATCH
    # llama.cpp's device for split mode tensor does not compute with host weights
    is_taken_over = plan.params.op_offload and plan.params.split_mode != "tensor"
    if not (plan.fits and is_taken_over and is_long) or request.host.paging:
        return False
    looked_up = sum(tensor.bytes for tensor in model.tensors if role_of(tensor.name) is Role.TOKEN_EMBEDDING)
    pinned = sum(row.model for row in plan.breakdown.rows if row.is_host and row.buffer_type.endswith(_PINNED))
    return pinned - looked_up > _WORTH


def with_real_load(plan: Plan) -> Plan:
    """Set how much larger the compute buffers of a real load of a fitting ``plan`` are (``more_in_use``)."""
    if not plan.fits:
        return plan
    dummy, most = plan.breakdown, plan.breakdown.most
    more = {use.name: most.on(use.name).compute - dummy.on(use.name).compute for use in plan.devices}
    more[HOST_NAME] = most.host.compute - dummy.host.compute
    return replace(
        plan,
        devices=tuple(replace(use, more_in_use=more[use.name]) for use in plan.devices),
        host=replace(plan.host, more_in_use=more[HOST_NAME]),
        pools=tuple(replace(pool, more_in_use=sum(more.get(name, 0) for name in pool.members)) for pool in plan.pools),
    )


__all__ = [
    "Alternative",
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
    "is_on_devices",
    "renamed",
    "resolved",
    "stamp_of",
    "with_its_mode",
    "with_real_load",
]
