"""Find the parameters that run a model fastest on some devices. Bytes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from fitter import programs
from fitter.api import choose_split_mode, early_load
from fitter.api.call_worker import answering, fetch_all, limited, questions_of, with_addresses, worker_for
from fitter.api.checked_call import checked_worker_call
from fitter.api.server_memory import Keeper, facts_of_program
from fitter.api.shared_models import check_mtp, choices, open_draft
from fitter.llama.client import Worker
from fitter.llama.types import RPC
from fitter.machine import calibrated
from fitter.machine.machine import machine_of
from fitter.model.files import source
from fitter.model.header import open_model
from fitter.parameters.table import AnyPath as Path
from fitter.parameters.table import Fitting
from fitter.planning.plan.load_mode import with_its_mode
from fitter.planning.plan.plan import Plan
from fitter.planning.plan.request_of_machine import limits_beside, request_of
from fitter.planning.request.ask import Ask
from fitter.planning.request.constraints import check_margins
from fitter.planning.request.request import Progress
from fitter.planning.request.summary import ModelSummary, stamp_of
from fitter.planning.search import best_plan as planning

if TYPE_CHECKING:
    from typing_extensions import Unpack


@checked_worker_call(Fitting)
def fit(
    model: Path,
    *,
    on_progress: Callable[[Progress], None] | None = None,
    on_log: Callable[[str], None] | None = None,
    worker: Worker | None = None,
    **parameters: Unpack[Fitting],
) -> Plan:
    """Find the parameters that use the devices best, every one of them confirmed by a dummy load of ``model``.

    What is ``None`` is fitted; what is set is kept, and the rest is fitted around it. ``n_ctx`` in tokens (0: the
    model's own), ``fit_ctx`` the smallest that fitting may choose per sequence. ``margin``: bytes that must stay free,
    one for all devices or one for each; ``host_margin`` the same for the host. ``gpus`` describes virtual devices
    (``rtx-4090``, ``2x 24GiB``), or ``none``, that take the place of this machine's; the host has the memory that such
    a GPU shares with it, else it is unlimited, unless ``host_memory`` (bytes, or ``64GiB``) says otherwise. ``profile``
    ``library`` asks llama.cpp's own CUDA backend about NVIDIA cards (``library:DIRECTORY``: the one there), which is
    the default where it has one that can be asked, and ``cuda`` fitter's own rules. ``rpc`` names rpc-servers
    (``host:port``, or several with commas), whose devices stand before all others. ``devices`` chooses among them.
    ``split_mode`` ``tensor`` has all of them share every tensor; ``auto`` plans with ``layer`` too: the better wins.

    What shares the memory is measured too, and the plan's ``shared`` says what it takes. ``model_draft`` is a draft
    model, which follows the context; it goes to the device with which the plan is the best one, unless
    ``devices_draft`` (``none`` for the host) and ``n_gpu_layers_draft`` say otherwise. With ``mtp`` the model's own
    layers for multi-token prediction draft, ``draft_max`` tokens at a time. ``type_k_draft`` and ``type_v_draft`` are
    the types of either's KV cache. ``mmproj`` is a multimodal projector, on a device that is chosen likewise unless
    ``mmproj_device`` names it, for images of ``image_min_tokens`` to ``image_max_tokens``. ``lora`` are adapters, and
    ``lora_scaled`` some as ``FILE:SCALE``. ``reserve`` keeps memory for anything else: bytes, or ``2GiB``, by the name
    of a device or ``host``.

    ``allow`` names what may be given up to fit, or to be 2 % faster: ``ubatch`` (a smaller ``n_ubatch``), ``kv-q8_0``
    and ``kv-q4_0`` (a KV cache of that type, with flash attention), ``no-op-offload``, ``context`` (less than
    ``n_ctx``, ``fit_ctx`` at least); none of them changes another parameter that is set. ``paging`` lets weights on the
    host exceed its memory. The plan's ``levers`` say what was used.

    The plan is the one with the least estimated time for a request of ``prompt`` tokens and ``generate`` more (2048 and
    512, or what the smallest context holds; a context is chosen that holds those that are given). ``objective`` asks
    for the fastest ``generation`` or ``prompt`` alone, or the most ``context``; with the ``strategy`` ``llama.cpp``
    upstream's own placement is made. ``host_bandwidth``: bytes per second, or ``60GB/s``, in place of what this machine
    was measured to read, or of the default for a described one. ``rpc_bandwidth``: the same of remote devices, one for
    all or one for each, in place of what they were measured to reach.

    The search loads a copy of the header without the tokenizer, unless ``skeleton`` is false; the plan is measured on
    ``model`` itself either way. ``timeout``: seconds for one dummy load. ``time_limit``: seconds for the whole search;
    the best plan that fits by then is confirmed, which is one load more, and its ``search.is_cut_short``. ``on_log``
    gets every line of llama.cpp's log. A ``worker`` that is given stays open for many fits, and is told ``gpus`` anew.

    ``embedding`` plans for ``Llama(embedding=True)``: unless they are set, a micro batch as large as the batch, and 256
    sequences with one cache.

    The plan's ``fits`` says whether there is one that fits. Safe to call from several threads at once.

    Raises ``UsageError`` (a parameter makes no sense), ``ModelError`` (the model cannot be read), ``LlamaCppError``
    (llama.cpp refused or crashed), ``WorkerError`` (its process was killed, ran out of memory or hung),
    ``TimeLimitError`` (nothing that fits was found within ``time_limit``), ``LibraryError`` (libllama is missing or
    another one), ``RemoteError`` (an rpc-server cannot be used).
    """
    started = time.monotonic()
    model = os.fsdecode(model)
    if parameters.get("split_mode") == "auto":
        return choose_split_mode.either(fit, model, parameters, on_progress=on_progress, on_log=on_log, worker=worker)
    if "program" not in parameters:
        parameters["program"] = programs.chosen("llama-cpp-python")
    ask, is_given = Ask.of(parameters), worker is not None
    words = {"timeout": ask.timeout, **parameters, "on_progress": on_progress, "on_log": on_log}
    deadline = None if ask.time_limit is None else started + ask.time_limit
    early_load.parse_meanwhile()
    ask = fetch_all(ask, model, min(ask.timeout, ask.time_limit or ask.timeout), on_progress)
    with (
        worker_for(ask, worker, on_log, at_once=True) as worker,
        limited(worker, deadline),
        early_load.begun(ask, model, first=worker, is_given=is_given, on_log=on_log) as second,
    ):
        # the header that was read last is at hand for its skeleton
        drafts = open_draft(ask.sharing, worker)
        opened = open_model(model, worker.header)
        check_mtp(ask.sharing, opened)
        stamps = tuple(stamp_of(file) for file in opened.files if not source.is_elsewhere(file))
        machine = machine_of(
            worker.devices, ask.virtual, ask.host_memory, is_described=ask.is_described, has_rpc=bool(ask.rpc)
        )
        known = () if ask.virtual else calibrated.read()
        llama_cpp = worker.build()
        known_of_program = facts_of_program(ask.program, llama_cpp, worker.llama_cpp_for(ask.llama_cpp))
        ask = ask.with_facts(known_of_program)
        request = request_of(ask, opened, machine, questions_of(ask, worker, machine), known)
        keeper = Keeper(ask, worker, opened, drafts, known_of_program)
        plan = planning.fit(
            request,
            ModelSummary.of(opened),
            early_load.llama_for(worker, second, opened, ask.skeleton, drafts),
            on_progress or (lambda _: None),
            ask.is_described,
            choices(ask.sharing, worker, opened, drafts, machine, request, keeper.reserved(request)),
            limits_beside(ask, opened, machine, request, known),
            deadline,
        )
        plan = keeper.with_server_memory(plan)
        is_free = known_of_program.has_load_mode and "load_mode" not in ask.given
        plan = with_its_mode(plan, request, opened, is_free=is_free)
        if ask.margin is not None:
            check_margins(request.devices, plan.problems)
        if not is_given:
            worker.dismiss()
    remote = {device.name for device in machine.devices if device.backend == RPC}
    rpc = worker.rpc if remote.intersection(plan.breakdown.devices) else ()
    from fitter.llama.build import compared

    by = answering(ask.virtual, ask.profile, worker.llama_cpp_for(ask.llama_cpp))
    notes = compared.notes(ask.virtual, by, llama_cpp.ggml, llama_cpp.commit)
    return replace(
        plan,
        params=with_addresses(plan.params),
        program=ask.program,
        rpc=rpc,
        llama_cpp=llama_cpp,
        notes=(*notes, *plan.notes),
        fit_keywords=words,
        files=stamps,
    )
