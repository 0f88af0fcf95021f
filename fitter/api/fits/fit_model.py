"""``fitter.fit``: find the parameters that run a model fastest on some devices. Bytes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, cast

from fitter import programs, system
from fitter.api.call_worker import (
    answering,
    fetch_all,
    limited,
    questions_of,
    tokenizer_check,
    with_addresses,
    worker_for,
)
from fitter.api.checked_call import checked_worker_call
from fitter.api.fits.questions import MODES, PlanAnswer, Questions, attempts_of, with_own_split
from fitter.api.fits.server_memory import ServerMemory, facts_of_program
from fitter.api.fits.shared_models import Drafts, check_mtp, choices, open_draft, other_plans
from fitter.errors import LlamaCppError, TimeLimitError
from fitter.llama.client import Worker
from fitter.llama.types import RPC
from fitter.llama.worker import process
from fitter.machine import gpu_catalogue
from fitter.machine.machine import machine_of
from fitter.machine.measured import corrected, read_calibrated
from fitter.model.files import source
from fitter.model.header import Model, open_model
from fitter.parameters.table import AnyPath as Path
from fitter.parameters.table import Fitting
from fitter.planning.plan.plan import Plan, is_on_devices, with_its_mode, with_real_load
from fitter.planning.plan.request_of_machine import limits_beside, request_of
from fitter.planning.pricing.objective import best_pair, longest_for
from fitter.planning.request.ask import Ask
from fitter.planning.request.constraints import check_margins
from fitter.planning.request.request import Progress, Request
from fitter.planning.request.session import Session
from fitter.planning.request.summary import ModelSummary, SharedUse, stamp_of
from fitter.planning.search import best_plan as planning
from fitter.planning.speed import cost

if TYPE_CHECKING:
    from typing_extensions import Unpack


_LATER = (partial(import_module, "fitter.llama.build.virtual_backends"), gpu_catalogue.gpus, cost.default)
"""What the first plan of a process needs after its first load."""


@checked_worker_call(Fitting)
def fit(
    model: Path,
    *,
    on_progress: Callable[[Progress], None] | None = None,
    on_log: Callable[[str], None] | None = None,
    worker: Worker | None = None,
    alternatives: bool = False,
    **parameters: Unpack[Fitting],
) -> Plan:
    """Find the parameters that run ``model`` fastest inside every device's memory margin.

    Parameters that are ``None`` are fitted; all others are kept. Dummy loads of llama.cpp measure every byte of the
    plan. They are of the model's header without its tokenizer, on which no byte depends, unless ``skeleton`` is false;
    llama.cpp reads each tokenizer once.
    The plan has the least estimated time for a request of ``prompt`` tokens (2048, or with ``n_ctx`` the geometric mean
    of 2048 and the context, at most a quarter of it) and ``generate`` more (512), or is best at another ``objective``.

    ``gpus`` describes virtual devices (``rtx-4090``, ``2x 24GiB``, or ``none``) that replace this machine's. Their host
    has unlimited memory, or the memory that such a GPU shares with it, unless ``host_memory`` sets a limit. ``margin``
    is one number of bytes for all devices, or one for each. Devices of rpc-servers stand before all others.

    A draft model, a projector and LoRA adapters are measured too; ``Plan.shared`` lists their memory. Unless their
    devices are named, they go where the plan is best. ``reserve`` maps a device or ``host`` to bytes (or ``2GiB``) that
    stay free for other programs. ``allow`` names concessions that the plan may make to fit or to be 2 % faster;
    ``Plan.levers`` lists those that it made.

    ``time_limit`` ends the search early: the best plan until then is confirmed by one more load, and its
    ``search.is_cut_short`` is true. Threads may call ``fit`` at the same time.

    Args:
        model: Path or address of a GGUF file.
        on_progress: Called at each step.
        on_log: Called with every line of llama.cpp's log.
        worker: A worker to use for many fits; it stays open, and takes the devices of each call.
        alternatives: Whether to look for alternatives to the plan afterwards, such as a longer context, a ``q8_0``
            cache or a smaller quantization, with at most a quarter of the search's dummy loads. They never change the
            plan.
        parameters: The keywords below.

    Returns:
        The plan; ``Plan.fits`` is false where no parameters fit, and ``Plan.problems`` says why.

    Raises:
        UsageError: A parameter makes no sense.
        ModelError: The model cannot be read.
        LlamaCppError: llama.cpp refused the load, or crashed.
        WorkerError: The worker process was killed, ran out of memory or hung.
        TimeLimitError: No plan that fits was found within ``time_limit``.
        LibraryError: libllama is missing or not usable.
        RemoteError: An rpc-server cannot be used.
    """
    started = time.monotonic()
    model = os.fsdecode(model)
    if "program" not in parameters:
        parameters["program"] = programs.chosen("llama-cpp-python")
    is_split_open = parameters.get("split_mode") == "auto"
    first: dict[str, Any] = {"split_mode": MODES[0]} if is_split_open else {}
    ask, is_given = Ask.of(cast(Fitting, {**parameters, **first})), worker is not None
    deadline = None if ask.time_limit is None else started + ask.time_limit
    for function in _LATER:
        process.meanwhile(function)
    ask = fetch_all(ask, model, min(ask.timeout, ask.time_limit or ask.timeout), on_progress)
    with (
        worker_for(ask, worker, on_log, at_once=True) as worker,
        limited(worker, deadline),
        tokenizer_check(worker, is_alone=ask.is_for_one_process) as check,
    ):
        # the worker copies the header that it read last: read the model's after the draft's
        drafts = open_draft(ask.sharing, worker)
        opened = open_model(model, worker.header)
        check_mtp(ask.sharing, opened)
        for each in (*([opened] if ask.skeleton else []), *([drafts.model] if drafts else [])):
            check.begin(each)
        stamps = tuple(stamp_of(file) for file in opened.files if not source.is_elsewhere(file))
        machine = machine_of(
            worker.devices, ask.virtual, ask.host_memory, is_described=ask.is_described, has_rpc=bool(ask.rpc)
        )
        calibrations = () if ask.virtual else read_calibrated()
        llama_cpp = worker.build()
        known_of_program = facts_of_program(ask.program, llama_cpp, worker.llama_cpp_for(ask.llama_cpp))
        ask, read_as = ask.for_texts(opened)
        ask = ask.for_model(opened, known_of_program)
        beside = other_plans(ask.sharing.beside, machine.devices, ask.rpc)
        llama = _load_calls(worker, opened, ask.skeleton, drafts)

        def answer(words: Mapping[str, Any]) -> PlanAnswer:
            asked = ask.having(words, known_of_program)
            request = request_of(asked, opened, machine, questions_of(asked, worker, machine), calibrations)
            if not asked.is_described and request.host_speed is not None:
                speeds, host = corrected(request.speeds, request.host_speed, machine.devices, llama_cpp.key)
                request = replace(request, speeds=speeds, host_speed=host)
            server_memory = ServerMemory(asked, worker, opened, drafts, known_of_program)

            def fitted(request: Request, reserved: tuple[SharedUse, ...]) -> Plan:
                return planning.fit(
                    request,
                    ModelSummary.of(opened),
                    llama,
                    on_progress or (lambda _: None),
                    asked.is_described,
                    choices(
                        asked.sharing,
                        worker,
                        opened,
                        drafts,
                        machine,
                        request,
                        (*reserved, *beside),
                        may_shrink=known_of_program.has_n_ubatch_draft,
                    ),
                    limits_beside(asked, opened, machine, request, calibrations),
                    deadline,
                    alternatives,
                    asked.with_one_slot(known_of_program) if alternatives else None,
                )

            plan = _longest_input(request, partial(server_memory.fitted, fit=fitted))
            plan = server_memory.with_turns(plan, request)
            is_free = known_of_program.has_load_mode and "load_mode" not in asked.given
            plan = with_its_mode(plan, request, opened, is_free=is_free)
            if asked.margin is not None:
                check_margins(request.devices, plan.problems)
            conversation = partial(server_memory.conversation, plan.params, asked.session or Session())
            return PlanAnswer(plan, conversation, known_of_program.cache_ram_mib or 0, bool(request.facts.window))

        attempts = attempts_of(ask, opened, machine)
        questions = Questions(ask, answer, {**first, **attempts[0][0].words}, deadline)
        questions.ask_of_program(attempts, first)
        questions.reserve_more(opened)
        if is_split_open:
            questions.ask_of_modes()
        if ask.session is not None and programs.PROGRAMS[ask.program].is_server:
            questions.ask_of_conversations(ask.session)
        plan = with_own_split(replace(questions.plan, program=ask.program), opened, worker)
        if questions.are_more:
            seconds = time.monotonic() - started
            effort = replace(
                plan.search, dummy_loads=llama.dummy_loads(), seconds=seconds, shared_loads=llama.shared_loads()
            )
            plan = replace(plan, search=effort)
        if on_progress is not None:
            on_progress(Progress(plan.search.dummy_loads, "done"))
        check.finish()
        if not is_given:
            worker.dismiss()
    plan = with_real_load(plan)
    remote = {device.name for device in machine.devices if device.backend == RPC}
    rpc = worker.rpc if remote.intersection(plan.breakdown.devices) else ()
    from fitter.llama.build import virtual_backends

    by = answering(ask.virtual, ask.profile, worker.llama_cpp_for(ask.llama_cpp))
    notes = virtual_backends.notes(ask.virtual, by, llama_cpp.ggml, llama_cpp.commit)
    if not (ask.is_described or ask.rpc or ask.named is not None or ask.load.n_gpu_layers == 0):
        from fitter.api.device_calls import why_no_gpu

        why = why_no_gpu(machine.devices, worker.llama_cpp_for(ask.llama_cpp))
        notes = (why, *notes) if why else notes
    if system.DRIVERS_SPILL and not ask.is_described:
        from fitter.machine.device_memory import spilling_notes

        cards = {device.name for device in machine.devices if device.type == "gpu"} - remote
        near = ((use.name, use.total, use.loaded.left) for use in plan.devices if use.used and use.name in cards)
        notes = (*notes, *spilling_notes(near))
    # a message of its own says that a device is left out, and why: not also that it stays idle
    out = {each.device for each in plan.left_out}
    plan = replace(plan, notes=tuple(note for note in plan.notes if set(note.split(" stay")[0].split(", ")) - out))
    return replace(
        plan,
        params=with_addresses(plan.params),
        rpc=rpc,
        llama_cpp=llama_cpp,
        notes=(*read_as, *notes, *plan.notes),
        fit_keywords={
            "timeout": ask.timeout,
            **parameters,
            # what the program takes beside llama.cpp is reserved anew
            **{name: value for name, value in questions.words.items() if name != "reserve"},
            "on_progress": on_progress,
            "on_log": on_log,
        },
        files=stamps,
    )


def _load_calls(worker: Worker, model: Model, skeleton: bool, drafts: Drafts | None) -> planning.LoadCalls:
    name, before = model.skeleton if skeleton else str(model.path), worker.dummy_loads

    def shared_loads() -> int:
        return drafts.loads if drafts else 0

    def until(deadline: float | None) -> None:
        worker.deadline = deadline

    return planning.LoadCalls(
        lambda params: worker.measure(name, params),
        lambda params: worker.layout(name, params),
        lambda params: worker.measure(name, params, reserve=True),
        lambda: worker.dummy_loads - before - shared_loads(),
        shared_loads,
        until,
    )


def _longest_input(request: Request, fit: Callable[[Request], Plan]) -> Plan:
    """Fit ``request``; where batches hold a whole input, with the largest context that takes little longer than others.

    Batches grow with the context there, and compute buffers with both. So contexts are fitted one by one: the model's
    own, and halves of it down to one with all on devices, or the smallest one.

    Raises:
        FitterError: As ``fit`` raises it.
    """
    if not request.whole_inputs or "n_ctx" in request.fixed:
        return fit(request)
    plans: list[Plan] = []
    has_devices = any(device.target > 0 for device in request.devices)
    failed: LlamaCppError | TimeLimitError | None = None
    for n_ctx in _contexts(request):
        try:
            plans.append(fit(request.with_context(n_ctx)))
        except LlamaCppError as error:
            # it may be too large for llama.cpp
            failed = error
            continue
        except TimeLimitError as error:
            failed = error
            break
        if plans[-1].fits and (not has_devices or is_on_devices(plans[-1])):
            break
    fitting = {
        (plan.params.n_ctx, plan.estimate.seconds if plan.estimate else 0.0): plan for plan in plans if plan.fits
    }
    if not fitting and failed is not None:
        raise failed
    plan = plans[-1]
    if fitting:
        best = best_pair([*fitting], lambda quickest: longest_for(request.objective, request.context_cost, quickest))
        plan = fitting[best]
    loads = max(each.search.dummy_loads for each in plans)
    seconds = sum(each.search.seconds for each in plans)
    return replace(plan, search=replace(plan.search, dummy_loads=loads, seconds=seconds))


def _contexts(request: Request) -> Iterator[int]:
    """Yield the largest context, halves of it, and the smallest."""
    n_ctx, step = request.n_ctx_max, request.alignment
    while n_ctx > request.n_ctx_min:
        yield n_ctx
        n_ctx = n_ctx // 2 // step * step
    yield request.n_ctx_min
