"""Compare builds of llama.cpp: the memory of the same parameters with each, and the plan that each would make."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from fitter import api
from fitter.api.checked_call import checked_worker_call
from fitter.api.measure_load import load_keywords, missing_of, without_timeout
from fitter.errors import FitterError, UsageError
from fitter.llama.build.build_folder import find
from fitter.llama.client import DEFAULT_TIMEOUT, Worker
from fitter.llama.types import Breakdown
from fitter.output.keywords import fit_kwargs
from fitter.parameters.table import AnyPath, Fitting
from fitter.planning.plan.plan import Plan
from fitter.planning.request.ask import Ask
from fitter.planning.request.request import Progress
from fitter.planning.request.summary import SharedUse

if TYPE_CHECKING:
    from typing_extensions import Unpack


@dataclass(frozen=True)
class OnBuild:
    """The answers of one build of llama.cpp about a model. Sizes in bytes."""

    llama_cpp: str
    """The build, as the caller named it."""
    version: str = ""
    """Version and commit; empty if the build cannot be used."""
    breakdown: Breakdown | None = None
    """Memory of the first plan's parameters with this build; ``None`` if not measured."""
    shared: tuple[SharedUse, ...] = ()
    """Memory of draft model, projector and others with those parameters, in the same places."""
    missing: Mapping[str, int] = field(default_factory=dict)
    """Bytes that those parameters lack, by device or ``host``; empty if they fit."""
    plan: Plan | None = None
    """The plan that this build makes; ``None`` if there is none or none was requested."""
    error: FitterError | None = None
    """The first error of this build."""

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

    If the first build cannot plan the model (perhaps because it is older than the architecture), the first build that
    can sets the parameters.

    Args:
        model: Path or address.
        builds: Builds to compare, as ``llama_cpp`` names them: ``python``, a directory with libllama and ggml's
            libraries, or a llama-server.
        own_plans: Whether every build also makes a plan of its own.
        on_progress: Called at each step.
        on_log: Called with every line of llama.cpp's log.
        worker: A worker to use; it stays open.
        parameters: Keywords of ``fit``.

    Returns:
        One result for each build, in their order, with its ``error`` where the build refused something.

    Raises:
        UsageError: A build does not exist, or a parameter makes no sense.
        LibraryError: A build cannot be used.
        FitterError: As ``fit`` raises it, if no build can plan the model.
    """
    if parameters.get("llama_cpp") is not None:
        raise UsageError("builds says which llama.cpp: leave llama_cpp out")
    check_builds(builds)
    Ask.of(parameters)
    on_builds: list[OnBuild] = []
    planned: Plan | None = None
    say = on_progress or (lambda _: None)
    with _worker_for_plan(worker, parameters, on_log) as used_worker:
        for build in builds:
            say(Progress(used_worker.dummy_loads, f"asking {build}"))
            told: dict[str, Any] = {**parameters, "llama_cpp": build}
            to_fit = {**without_timeout(told), "on_progress": say}
            each = (
                _with_plan(model, build, to_fit, used_worker)
                if planned is None
                else _measure_again(planned, build, told, used_worker, say)
            )
            say(Progress(used_worker.dummy_loads, f"{build} has answered"))
            if planned is not None and own_plans:
                each = _and_own_plan(each, model, to_fit, used_worker)
            planned = planned or each.plan
            on_builds.append(each)
    if planned is None:
        raise next(each.error for each in on_builds if each.error)
    return tuple(on_builds)


def check_builds(builds: Sequence[str]) -> None:
    """Check that there are at least two builds and that each exists.

    Raises:
        UsageError: There are fewer than two builds, or one does not exist.
        LibraryError: A build is not llama.cpp.
    """
    if isinstance(builds, str) or len(builds) < 2:
        raise UsageError("builds are compared, and there are not two: name them with --llama-cpp OLD --llama-cpp NEW")
    for each in builds:
        find(each)


@contextlib.contextmanager
def _worker_for_plan(
    given: Worker | None, parameters: Fitting, on_log: Callable[[str], None] | None
) -> Iterator[Worker]:
    if given is not None:
        yield given
        return
    with Worker(timeout=parameters.get("timeout") or DEFAULT_TIMEOUT, on_log=on_log) as new_worker:
        yield new_worker


def _with_plan(model: AnyPath, build: str, told: dict[str, Any], worker: Worker) -> OnBuild:
    """Plan with the build whose plan sets the parameters."""
    try:
        plan = api.fit(model, worker=worker, **told)
        lacking = missing_of(plan, plan.breakdown, plan.shared)
        return OnBuild(build, worker.llama_cpp(), plan.breakdown, plan.shared, lacking, plan)
    except FitterError as error:
        return OnBuild(build, error=error)


def _measure_again(
    planned: Plan, build: str, told: dict[str, Any], worker: Worker, say: Callable[[Progress], None]
) -> OnBuild:
    """Measure the parameters of ``planned`` with another build."""
    try:
        breakdown = api.measure(planned.model.path, worker=worker, **load_keywords(planned, told))
        shared = _measure_companions(planned, told, worker, say)
        lacking = missing_of(planned, breakdown, shared)
        return OnBuild(build, worker.llama_cpp(), breakdown, shared, lacking)
    except FitterError as error:
        return OnBuild(build, error=error)


def _measure_companions(
    planned: Plan, told: dict[str, Any], worker: Worker, say: Callable[[Progress], None]
) -> tuple[SharedUse, ...]:
    """Measure draft model, projector and others in the places that ``planned`` has for them.

    The fit may place the model itself elsewhere, if it no longer fits.
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
