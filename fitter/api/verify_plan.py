"""``fitter.verify``: load a plan for real, and compare its memory with the prediction."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from fitter.api.checked_call import checked_call
from fitter.api.fit_model import fit
from fitter.errors import UsageError
from fitter.llama.client import DEFAULT_TIMEOUT, Worker
from fitter.machine.host import host_memory
from fitter.model import location
from fitter.model.header import open_model
from fitter.parameters.table import AnyPath as Path
from fitter.parameters.table import Fitting
from fitter.parameters.values import path, size
from fitter.planning.plan.plan import Plan, check_can_run, check_is_here, check_llama_cpp
from fitter.planning.request.request import Progress
from fitter.planning.request.summary import ModelSummary
from fitter.programs import SERVER

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from fitter.planning.plan.verified import Verification


_LOADED_PER_SECOND = 20 * 10**6  # bytes of a model: a slow disk, and a processor that computes a prompt with it
_WITH_PLAN = ("timeout", "llama_cpp", "program")  # what can be said beside a plan to verify


def real_load_patience(timeout: float | None, size: int) -> float:
    """Return the seconds to wait for a real load of a model of ``size`` bytes."""
    return (timeout or DEFAULT_TIMEOUT) + size / _LOADED_PER_SECOND


@checked_call(Fitting)
def verify(
    model: Path | None = None,
    *,
    plan: Plan | Path | None = None,
    tolerance: int | str | None = None,
    server: Path | None = None,
    prompts: int | None = None,
    on_progress: Callable[[Progress], None] | None = None,
    on_log: Callable[[str], None] | None = None,
    **parameters: Unpack[Fitting],
) -> Verification:
    """Load a plan for real, compute with it, and compare every number of bytes with its prediction.

    A worker process loads the model without mmap, as the plan was measured, and computes prompts of a micro batch and
    single tokens. With the ``program`` ``llama-server``, that program loads the plan instead: it gets the plan's
    arguments and a free port, then prompts of random tokens, as many at once as it has slots, each for at most 7.5
    seconds. The server is always ended.

    Args:
        model: The model to fit and verify, or the model of ``plan`` at another path.
        plan: A plan, or a file that ``fitter --json`` wrote; without it, ``fit`` makes one.
        tolerance: Bytes (or ``1MiB``) by which a number may exceed its prediction.
        server: The llama-server (file or directory); by default the one of ``llama_cpp``, else the one on the PATH.
        prompts: Prompts for the llama-server; 40 by default.
        on_progress: Called at each step.
        on_log: Called with every line of llama.cpp's log.
        parameters: Keywords of ``fit``. ``timeout`` is in seconds for a dummy load; a real load gets one more second
            for each 20 MB.

    Returns:
        Each number with its prediction. ``exceeding`` lists numbers beyond the tolerance; ``holds`` is true without
        any. ``server`` has the caches of a llama-server. A plan that does not fit, or no longer fits, is not loaded;
        ``problems`` says why.

    Raises:
        LlamaCppError: The real load failed.
        PlanError: The plan's devices are not here, or the llama-server is another build than the plan's.
        FitterError: As ``fit`` raises it.
    """
    from fitter.planning.checked import verification

    if model is not None:
        location.check_is_here(os.fsdecode(model))
    if parameters.get("gpus"):
        raise UsageError("virtual devices cannot run a model: verify a plan for those that are here")
    program = verification.loaded_by(parameters.get("program"), server, prompts)
    if plan is None:
        if model is None:
            raise UsageError("there is nothing to verify: give a model, a plan, or both")
        parameters["program"] = program
        plan = fit(model, on_progress=on_progress, on_log=on_log, **parameters)
    elif others := [name for name in parameters if name not in _WITH_PLAN]:
        raise UsageError(f"the plan already sets every parameter: leave {', '.join(others)} out")
    if not isinstance(plan, Plan):
        from fitter.output.documents.plan_document import read_plan

        plan = read_plan(path("plan", plan))
    check_is_here(plan if model is None else replace(plan, model=replace(plan.model, path=os.fsdecode(model))))
    check_can_run(plan)
    patience = real_load_patience(parameters.get("timeout"), plan.model.bytes)
    llama_cpp = parameters.get("llama_cpp")
    with Worker(timeout=patience, on_log=on_log, rpc=plan.rpc, llama_cpp=llama_cpp) as worker:
        check_llama_cpp(plan, worker.build(), "verify it with the one that it was made with, or fit again")
        opened = open_model(plan.model.path if model is None else os.fsdecode(model), worker.header)
        verification.check_same_model(plan.model, ModelSummary.of(opened))
        allowed = size("tolerance", tolerance or 0)
        if program == SERVER:
            from fitter.api import verify_server
            from fitter.programs.prompts import PROMPTS

            where = None if server is None else os.fsdecode(server)
            named = None if llama_cpp is None else os.fsdecode(llama_cpp)
            report = on_progress or (lambda _: None)
            number = PROMPTS if prompts is None else prompts
            how = verify_server.Serving(where, named, number, patience, allowed, report, on_log)
            return verify_server.verify(plan, opened, worker, how)
        if on_progress:
            on_progress(Progress(0, "loading for real"))
        return verification.verify(plan, opened.path, worker, lambda: host_memory().available, allowed)
