"""One model with several builds of llama.cpp: what the same parameters take with each, and what each would plan."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from fitter import api
from fitter.api.checked_call import checked_worker_call
from fitter.api.repeat_load import missing_of, same_load, without_timeout
from fitter.errors import FitterError, UsageError
from fitter.llama.build.build_folder import find
from fitter.llama.client import DEFAULT_TIMEOUT, Worker
from fitter.llama.types import Breakdown
from fitter.output.formats.python import fit_kwargs
from fitter.parameters.table import AnyPath, Fitting
from fitter.planning.plan.plan import Plan
from fitter.planning.request.ask import Ask
from fitter.planning.request.request import Progress
from fitter.planning.request.summary import SharedUse

if TYPE_CHECKING:
    from typing_extensions import Unpack


@dataclass(frozen=True)
class OnBuild:
    """What one build of llama.cpp says of a model. Sizes in bytes."""

    llama_cpp: str
    """The build, as it was named."""
    version: str = ""
    """Its version and commit; empty if it cannot be used."""
    breakdown: Breakdown | None = None
    """What the parameters of the first build's plan take with this one; ``None`` if that was not measured."""
    shared: tuple[SharedUse, ...] = ()
    """What is beside the model with those parameters, in the same places."""
    missing: Mapping[str, int] = field(default_factory=dict)
    """Bytes that those parameters lack, by the name of a device or ``host``; empty if they fit."""
    plan: Plan | None = None
    """The plan that this build makes; ``None`` if it makes none, or was not asked for one."""
    error: FitterError | None = None
    """Why something was not measured."""

    @property
    def fits(self) -> bool:
        """Whether the parameters of the first build's plan fit with this one."""
        return self.breakdown is not None and not self.missing


@checked_worker_call(Fitting)
def compare_builds(
    model: AnyPath,
    builds: Sequence[str],
    *,
    own_plans: bool = True,
    on_progress: Callable[[Progress], None] | None = None,
    on_log: Callable[[str], None] | None = None,
    worker: Worker | None = None,
    **parameters: Unpack[Fitting],
) -> tuple[OnBuild, ...]:
    """Plan with the first of ``builds``, and measure exactly those parameters with each of the others.

    ``builds`` are named as for ``llama_cpp``, in an order of which each is compared with the first: ``python``, a
    directory with libllama and ggml's libraries, a llama-server. If the first cannot plan the model, perhaps since it
    is older than the model's architecture, the parameters are those of the first that can. What is beside the model (a
    draft model, a projector) is measured in the same places. With ``own_plans`` every build also makes its own plan. A
    ``worker`` that is given is used and stays open.

    There is a result for each of ``builds``, in their order; what one build refuses is its ``error``. Raises
    ``UsageError`` for builds that are not there and parameters that make no sense, ``LibraryError`` for builds that
    cannot be used, and what ``fit`` raises if no build can plan the model.
    """
    if parameters.get("llama_cpp") is not None:
        raise UsageError("builds says which llama.cpp: leave llama_cpp out")
    check_builds(builds)
    Ask.of(parameters)
    on_builds: list[OnBuild] = []
    planned: Plan | None = None
    say = on_progress or (lambda _: None)
    with _worker(worker, parameters, on_log) as own:
        for build in builds:
            say(Progress(own.dummy_loads, f"asking {build}"))
            told: dict[str, Any] = {**parameters, "llama_cpp": build}
            to_fit = {**without_timeout(told), "on_progress": say}
            each = _with_plan(model, build, to_fit, own) if planned is None else _again(planned, build, told, own, say)
            say(Progress(own.dummy_loads, f"{build} has answered"))
            if planned is not None and own_plans:
                each = _and_own_plan(each, model, to_fit, own)
            planned = planned or each.plan
            on_builds.append(each)
    if planned is None:
        raise next(each.error for each in on_builds if each.error)
    return tuple(on_builds)


def check_builds(builds: Sequence[str]) -> None:
    """Raise ``UsageError`` if there are not two builds, or if one is not there; ``LibraryError`` for no llama.cpp."""
    if isinstance(builds, str) or len(builds) < 2:
        raise UsageError("builds are compared, and there are not two: name them with --llama-cpp OLD --llama-cpp NEW")
    for each in builds:
        find(each)


@contextlib.contextmanager
def _worker(given: Worker | None, parameters: Fitting, on_log: Callable[[str], None] | None) -> Iterator[Worker]:
    if given is not None:
        yield given
        return
    with Worker(timeout=parameters.get("timeout") or DEFAULT_TIMEOUT, on_log=on_log) as own:
        yield own


def _with_plan(model: AnyPath, build: str, told: dict[str, Any], worker: Worker) -> OnBuild:
    """What a build says that makes the plan whose parameters are compared."""
    try:
        plan = api.fit(model, worker=worker, **told)
        lacking = missing_of(plan, plan.breakdown, plan.shared)
        return OnBuild(build, worker.llama_cpp(), plan.breakdown, plan.shared, lacking, plan)
    except FitterError as error:
        return OnBuild(build, error=error)


def _again(planned: Plan, build: str, told: dict[str, Any], worker: Worker, say: Callable[[Progress], None]) -> OnBuild:
    """What a build says of the parameters of a plan."""
    try:
        breakdown = api.measure(planned.model.path, worker=worker, **same_load(planned, told))
        shared = _beside(planned, told, worker, say)
        lacking = missing_of(planned, breakdown, shared)
        return OnBuild(build, worker.llama_cpp(), breakdown, shared, lacking)
    except FitterError as error:
        return OnBuild(build, error=error)


def _beside(
    planned: Plan, told: dict[str, Any], worker: Worker, say: Callable[[Progress], None]
) -> tuple[SharedUse, ...]:
    """What is beside the model in the plan, as the worker's build measures it.

    Its places are fixed; the model itself may be placed otherwise by this fit if it no longer fits.
    """
    if all(use.kind == "reserve" for use in planned.shared):
        return planned.shared
    words = {**told, **fit_kwargs(planned)}
    return api.fit(planned.model.path, worker=worker, on_progress=say, **without_timeout(words)).shared


def _and_own_plan(each: OnBuild, model: AnyPath, told: dict[str, Any], worker: Worker) -> OnBuild:
    try:
        plan = api.fit(model, worker=worker, **told)
        return replace(each, version=worker.llama_cpp(), plan=plan)
    except FitterError as error:
        return replace(each, error=each.error or error)
