"""Verify a plan with the user's llama-server: start it with the plan's arguments, send prompts, and read its log."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from fitter.errors import LlamaCppError
from fitter.llama.client import Worker
from fitter.llama.types import Array, DeviceInfo, Params
from fitter.machine.host import host_memory
from fitter.model.header import Model
from fitter.output.arguments import with_absolute_paths
from fitter.planning.checked import server_verification
from fitter.planning.checked.server_growth import Reading, growth_of
from fitter.planning.checked.server_verification import DRAFTS, Sizes, compare_rows
from fitter.planning.checked.verification import check_devices, free_of, problems_now
from fitter.planning.plan.plan import Plan, resolved
from fitter.planning.plan.verified import MemoryGrowth, MemoryUse, Verification, VerifiedRow
from fitter.planning.request.request import Progress
from fitter.planning.request.summary import DeviceUse
from fitter.programs.finding import asked, check_same_build, find_server
from fitter.programs.prompts import Fed, feed
from fitter.programs.resident import resident
from fitter.programs.running_server import Gone, Running, running
from fitter.programs.state import state_of
from fitter.text import printable


@dataclass(frozen=True)
class Serving:
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


def verify(plan: Plan, model: Model, worker: Worker, how: Serving) -> Verification:
    """Start a llama-server with ``plan``, send it prompts, and compare its memory with the plan.

    Args:
        plan: The plan; one that does not fit, or no longer fits, is not loaded.
        model: Its model.
        worker: A worker with the plan's llama.cpp; it is closed.
        how: The server, and how to verify.

    Raises:
        UsageError: There is no llama-server.
        LibraryError: The llama-server does not start.
        PlanError: It is another build than the plan's, or a device is not here.
        LlamaCppError: The llama-server failed.
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
    check_devices(uses, before)
    if problems := tuple(problems_now(uses, plan.host, before, host_before)):
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


_IDLE = 3.0
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
        self._server.tick(_IDLE)
        return growth_of(self._readings, self._reading(last))

    def _reading(self, answered: int) -> Reading:
        used = {device.name: -device.free for device in self.devices()}
        if own := resident(self._server.pid):
            said = self._server.said
            used["host"] = own.own - said.held.bytes - (said.cache.size.bytes if said.cache else 0)
        return Reading(answered, time.monotonic(), used)


@contextmanager
def _watching(server: Running, uses: tuple[DeviceUse, ...], plan: Plan, how: Serving) -> Iterator[_Watch]:
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
        MemoryUse(use.name, free_of(before, use.name), free_of(after, use.name), _bytes_on(rows, use.name))
        for use in uses
        if use.name in here
    ]


def _bytes_on(rows: tuple[VerifiedRow, ...], device: str) -> int:
    return sum(row.real.used for row in rows if row.real.device == device and not row.real.is_host)
