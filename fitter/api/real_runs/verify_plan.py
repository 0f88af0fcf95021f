"""``fitter.verify``: load a plan for real, and compare its memory with the prediction."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from fitter.api.checked_call import checked_call
from fitter.api.fits.fit_model import fit
from fitter.errors import LlamaCppError, UsageError
from fitter.llama.client import DEFAULT_TIMEOUT, Worker
from fitter.llama.types import Array, DeviceInfo, Params
from fitter.machine.host import host_memory
from fitter.model import location
from fitter.model.header import Model, open_model
from fitter.output.arguments import with_absolute_paths
from fitter.parameters.table import AnyPath as Path
from fitter.parameters.table import Fitting
from fitter.parameters.values import path, size
from fitter.planning.checked import verification
from fitter.planning.checked.verification import DRAFTS, Reading, Sizes, compare_rows, growth_of
from fitter.planning.plan.plan import Plan, check_can_run, check_is_here, check_llama_cpp, resolved
from fitter.planning.plan.verified import MemoryGrowth, MemoryUse, Verification, VerifiedRow
from fitter.planning.request.request import Progress
from fitter.planning.request.summary import DeviceUse, ModelSummary
from fitter.programs import SERVER
from fitter.programs.finding import asked, check_same_build, find_server
from fitter.programs.later import state_of
from fitter.programs.running_server import Gone, Running, resident, running
from fitter.programs.server_requests import PROMPTS, Fed, feed
from fitter.text import printable

if TYPE_CHECKING:
    from typing_extensions import Unpack


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
            where = None if server is None else os.fsdecode(server)
            named = None if llama_cpp is None else os.fsdecode(llama_cpp)
            report = on_progress or (lambda _: None)
            number = PROMPTS if prompts is None else prompts
            how = _Serving(where, named, number, patience, allowed, report, on_log)
            return _verify_with_server(plan, opened, worker, how)
        if on_progress:
            on_progress(Progress(0, "loading for real"))
        return verification.verify(plan, opened.path, worker, lambda: host_memory().available, allowed)


@dataclass(frozen=True)
class _Serving:
    """How to verify with a llama-server.

    Attributes:
        server: Its file or directory, if given.
        llama_cpp: The llama.cpp that may contain it (see ``find_server``).
        prompts: Number of prompts to send.
        patience: Seconds for the load.
        tolerance: Bytes by which a number may exceed its prediction.
    """

    server: str | None
    llama_cpp: str | None
    prompts: int
    patience: float
    tolerance: int
    on_progress: Callable[[Progress], None]
    on_log: Callable[[str], None] | None


def _verify_with_server(plan: Plan, model: Model, worker: Worker, how: _Serving) -> Verification:
    """Start a llama-server with ``plan``, send it prompts, and compare its memory with the plan.

    A plan that does not fit, or no longer fits, is not loaded. The worker is closed.
    """
    program = asked(find_server(how.server, how.llama_cpp))
    check_same_build(plan.llama_cpp, program)
    params = resolved(plan)
    answer = Verification(plan.model, params, how.tolerance, shared=plan.shared)
    if plan.problems:
        return replace(answer, problems=plan.problems)
    uses = tuple(use for use in plan.devices if use.name in (params.devices or ()))
    sizes = _sizes(worker, model, params, plan)
    # The worker's models would count as used memory, and must not be in the server's way:
    # no context of its own on a card, no connection to an rpc-server, which has one client at a time.
    worker.restart()
    before, host_before = worker.memory(), host_memory().available
    worker.close()
    verification.check_devices(uses, before)
    if problems := tuple(verification.problems_now(uses, plan.host, before, host_before)):
        return replace(answer, problems=problems)
    how.on_progress(Progress(0, f"loading with {printable(program.path)}"))
    # the server does not run in the current directory
    options = with_absolute_paths(plan)[1:]
    words = ["-m", os.path.abspath(model.path), *(word for each in options for word in each.words)]
    with running([program.path, *words], how.patience, how.on_log) as server:
        how.on_progress(Progress(0, f"sending {how.prompts} prompts"))
        with _watching(server, uses, plan, how) as watch:

            def on_answered(count: int) -> None:
                watch.look(count)
                part = count / max(1, how.prompts)
                how.on_progress(Progress(0, f"{count} of {how.prompts} prompts answered", min(1.0, part)))

            fed = _send_prompts(server, params, model, how.prompts, on_answered)
            growth = watch.growth()
            host_after, after = host_memory().available, watch.devices()
    said = server.said
    rows = compare_rows(plan, said)
    counted = sum(row.real.used for row in rows if row.real.is_host)
    memory = [*_memory_of_devices(uses, before, after, rows), MemoryUse("host", host_before, host_after, counted)]
    use = verification.server_use(plan, program, said, fed, server.most, sizes, growth)
    return replace(answer, rows=rows, memory=tuple(memory), server=use)


def _sizes(worker: Worker, model: Model, params: Params, plan: Plan) -> Sizes:
    """Measure the state of one sequence; unknown where a draft has a state as well."""
    if params.embeddings or any(use.kind in DRAFTS for use in plan.shared):
        return Sizes()
    state = state_of(worker.caches(model.skeleton, params), swa_full=params.swa_full)
    return Sizes(state.full, state.checkpoint)


def _send_prompts(
    server: Running, params: Params, model: Model, number: int, on_answered: Callable[[int], None]
) -> Fed:
    props, models = _answer(server, "/props"), _answer(server, "/v1/models")
    slots = props.get("total_slots") or params.n_seq_max
    if dict(params.more).get("pooling_type") == "rank":
        # a reranker reads pairs of texts, and caches nothing
        return Fed(0, 0, 0, slots)
    room = (params.n_ctx or model.n_ctx_train) // slots
    n_vocab = _n_vocab(models) or _n_tokens(model)
    is_read = params.embeddings
    fed = feed(server, slots=slots, room=room, n_vocab=n_vocab, number=number, is_read=is_read, on_answered=on_answered)
    if number and not fed.answered:
        why = fed.refused or "the time for them was over; give it more with more of --prompts"
        raise LlamaCppError(f"{server.path} answered none of {number} prompts: {why}", server.log)
    return fed


def _answer(server: Running, path: str) -> dict[str, Any]:
    try:
        status, answer = server.ask("GET", path, None, 10.0)
    except Gone:
        return {}
    return answer if status == 200 and isinstance(answer, dict) else {}


def _n_vocab(models: dict[str, Any]) -> int:
    try:
        return int(models["data"][0]["meta"]["n_vocab"])
    except (LookupError, TypeError, ValueError):
        return 0


def _n_tokens(model: Model) -> int:
    tokens = model.metadata.get("tokenizer.ggml.tokens")
    return tokens.length if isinstance(tokens, Array) else 1


IDLE = 3.0
"""Seconds to watch the memory without prompts."""


class _Watch:
    """Reads the memory of a running server and of its devices, with each answer."""

    def __init__(self, server: Running, devices: Callable[[], tuple[DeviceInfo, ...]]) -> None:
        self.devices, self._server = devices, server
        self._readings = [self._reading(0)]

    def look(self, answered: int) -> None:
        """Take a reading where more prompts are answered."""
        if answered > self._readings[-1].answered:
            self._readings.append(self._reading(answered))

    def growth(self) -> tuple[MemoryGrowth, ...]:
        """Wait for a while without prompts, and return what grew."""
        last = self._readings[-1].answered
        if not last:
            return ()
        self._readings.append(self._reading(last))
        self._server.tick(IDLE)
        return growth_of(self._readings, self._reading(last))

    def _reading(self, answered: int) -> Reading:
        used = {device.name: -device.free for device in self.devices()}
        if own := resident(self._server.pid):
            said = self._server.said
            used["host"] = own.own - said.held.bytes - (said.cache.size.bytes if said.cache else 0)
        return Reading(answered, time.monotonic(), used)


@contextmanager
def _watching(server: Running, uses: tuple[DeviceUse, ...], plan: Plan, how: _Serving) -> Iterator[_Watch]:
    """Watch the server and this machine's devices; an rpc-server answers only the llama-server now."""
    if all(_is_remote(use, plan) for use in uses):
        yield _Watch(server, tuple)
        return
    with Worker(timeout=how.patience, llama_cpp=how.llama_cpp) as worker:
        names = {use.name for use in uses}
        yield _Watch(server, lambda: tuple(each for each in worker.memory() if each.name in names))


def _is_remote(use: DeviceUse, plan: Plan) -> bool:
    return bool(plan.rpc) and use.name.startswith("RPC")


def _memory_of_devices(
    uses: tuple[DeviceUse, ...],
    before: tuple[DeviceInfo, ...],
    after: tuple[DeviceInfo, ...],
    rows: tuple[VerifiedRow, ...],
) -> list[MemoryUse]:
    here = {device.name for device in after}
    return [
        MemoryUse(
            use.name,
            verification.free_of(before, use.name),
            verification.free_of(after, use.name),
            _bytes_on(rows, use.name),
        )
        for use in uses
        if use.name in here
    ]


def _bytes_on(rows: tuple[VerifiedRow, ...], device: str) -> int:
    return sum(row.real.used for row in rows if row.real.device == device and not row.real.is_host)
