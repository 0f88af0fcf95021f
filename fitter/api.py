"""What ``import fitter`` offers: ``fit``, ``measure``, ``estimate``, ``inspect``, ``devices``. Sizes in bytes."""

from __future__ import annotations

import copyreg
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path as FilePath
from typing import TYPE_CHECKING, Any

from fitter import beginning, choosing, programs
from fitter.asking import answering, fetch, fetch_all, limited, one_load, questions_of, with_addresses, worker_for
from fitter.door import door
from fitter.errors import LibraryError, UsageError
from fitter.keeping import Keeper, facts_of_program
from fitter.llama.client import DEFAULT_TIMEOUT, Worker
from fitter.llama.types import RPC, Breakdown, DeviceInfo, Params, VirtualDevice
from fitter.machine import calibrated
from fitter.machine.devices import choose, described, device_speeds, machine_of, speed_of_host
from fitter.machine.gpu import parse_twin, virtual_devices
from fitter.machine.host import host_memory
from fitter.model import location, source
from fitter.model.header import open_model
from fitter.parameters import AnyPath, Estimating, Fitting, Measuring
from fitter.planning import fit as planning
from fitter.planning.ask import Ask
from fitter.planning.constraints import (
    check_live_tokens,
    check_margins,
    check_split_mode,
    context_of_a_sequence,
    workload_of,
)
from fitter.planning.cost import Workload
from fitter.planning.inspection import Inspection, inspection_of
from fitter.planning.limits import check_context
from fitter.planning.load_mode import with_its_mode
from fitter.planning.plan import Plan, check_can_run, check_is_here, check_llama_cpp, register, renamed
from fitter.planning.pricing import Price, Speeds
from fitter.planning.request import Progress
from fitter.planning.requesting import limits_beside, pinned_by, request_of
from fitter.planning.split_price import priced_as_placed
from fitter.planning.summary import ModelSummary, stamp_of
from fitter.planning.work import facts_of
from fitter.programs import SERVER
from fitter.sharing import check_mtp, choices, open_draft
from fitter.storage.temporary import Directory
from fitter.values import path, size
from fitter.worker_door import door_with_worker

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from fitter.planning.calibration import Calibration
    from fitter.planning.plan import Llama
    from fitter.planning.verified import Verification

Path = AnyPath

_LOADED_PER_SECOND = 20 * 10**6  # bytes of a model: a slow disk, and a processor that computes a prompt with it
_WITH_PLAN = ("timeout", "llama_cpp", "program")  # what can be said beside a plan to verify


@door_with_worker(Fitting)
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
        return choosing.either(fit, model, parameters, on_progress=on_progress, on_log=on_log, worker=worker)
    if "program" not in parameters:
        parameters["program"] = programs.chosen("llama-cpp-python")
    ask, is_given = Ask.of(parameters), worker is not None
    words = {"timeout": ask.timeout, **parameters, "on_progress": on_progress, "on_log": on_log}
    deadline = None if ask.time_limit is None else started + ask.time_limit
    beginning.parse_meanwhile()
    ask = fetch_all(ask, model, min(ask.timeout, ask.time_limit or ask.timeout), on_progress)
    with (
        worker_for(ask, worker, on_log, at_once=True) as worker,
        limited(worker, deadline),
        beginning.begun(ask, model, first=worker, is_given=is_given, on_log=on_log) as second,
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
            beginning.llama_for(worker, second, opened, ask.skeleton, drafts),
            on_progress or (lambda _: None),
            ask.is_described,
            choices(ask.sharing, worker, opened, drafts, machine, request, keeper.reserved(request)),
            limits_beside(ask, opened, machine, request, known),
            deadline,
        )
        plan = keeper.kept(plan)
        is_free = known_of_program.has_load_mode and "load_mode" not in ask.given
        plan = with_its_mode(plan, request, opened, is_free=is_free)
        if ask.margin is not None:
            check_margins(request.devices, plan.problems)
        if not is_given:
            worker.dismiss()
    remote = {device.name for device in machine.devices if device.backend == RPC}
    rpc = worker.rpc if remote.intersection(plan.breakdown.devices) else ()
    from fitter.llama import compared

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


@door_with_worker(Measuring)
def measure(
    model: Path,
    *,
    on_log: Callable[[str], None] | None = None,
    worker: Worker | None = None,
    **parameters: Unpack[Measuring],
) -> Breakdown:
    """Memory that llama.cpp would take with exactly these parameters: one dummy load, rows per buffer type in bytes.

    Each row has both figures for its compute buffer: ``compute`` is the dummy load's, as llama-fit-params and a plan
    say, ``reserved`` what a real load of llama.cpp reserves, more or less. ``.real`` has all rows as of a real load.

    ``parameters`` are those of ``fit`` that llama.cpp has too, none of them fitted, each with llama.cpp's own default
    (``n_ctx`` 0, the model's own; ``n_gpu_layers`` -1, all), and ``load_mtp``, ``n_rs_seq`` and ``n_outputs_max``. A
    ``worker`` that is given is used and stays open, for many measurements in a row; it is told of ``gpus`` and ``rpc``
    anew.

    Raises what ``fit`` raises.
    """
    with one_load(Ask.of_a_load(parameters), os.fsdecode(model), worker, on_log) as load:
        return load.worker.measure(str(load.model.path), load.params, reserve=True)


@door_with_worker(Estimating)
def estimate(
    model: Path,
    *,
    live_tokens: int | None = None,
    on_log: Callable[[str], None] | None = None,
    worker: Worker | None = None,
    **parameters: Unpack[Estimating],
) -> Price:
    """The time that a request is estimated to take with exactly these parameters, and the memory that they take.

    ``parameters`` and ``worker`` are those of ``measure``. The request is one of ``prompt`` tokens and ``generate``
    more, by default 2048 and 512, or what the context holds. ``live_tokens``: tokens in the cache when generation is
    priced, by default what the request has there on average. ``load_mode`` is ``none`` unless it is set, as in plans.
    ``host_bandwidth``: bytes per second, or ``60GB/s``, in place of what this machine was measured to read, or of the
    default for a described one; ``rpc_bandwidth`` the same of remote devices. Its ``sources`` say where each is from.

    Raises what ``fit`` raises.
    """
    ask = Ask.of_a_load(parameters)
    check_split_mode(ask.load.split_mode)
    with one_load(ask, os.fsdecode(model), worker, on_log) as load:
        context = context_of_a_sequence(load.params, load.model.n_ctx_train or Workload.prompt + Workload.generate)
        workload = workload_of(ask.prompt, ask.generate, context, is_set=bool(load.params.n_ctx))
        check_live_tokens(live_tokens, context)
        breakdown, layout = load.measured()
        every = load.worker.devices() if breakdown.devices else ()
        infos = choose(every, breakdown.devices)
        speeds = device_speeds(infos, every, ask.virtual, load.worker.speed, ask.remote_bandwidths)
        return priced_as_placed(
            facts_of(load.model),
            layout,
            load.params,
            breakdown,
            Speeds(
                breakdown.devices,
                tuple(speeds[info.name] for info in infos),
                tuple(info.free for info in infos),
                speed_of_host(ask.host_bandwidth, is_described=ask.is_described, virtual=ask.virtual),
                tuple(info.largest_tensor for info in infos),
            ),
            pinned_by(load.params, load.model, infos, every, load.worker.match),
            workload,
            live_tokens,
        )


@door()
def devices(
    gpus: str | VirtualDevice | Sequence[str | VirtualDevice] = (),
    *,
    rpc: str | Sequence[str] = (),
    llama_cpp: Path | None = None,
    timeout: float = DEFAULT_TIMEOUT,
) -> tuple[tuple[DeviceInfo, ...], DeviceInfo]:
    """The devices that a model would be offloaded to, and the host with the memory that it has available."""
    virtual = virtual_devices(gpus)
    with Worker(virtual, timeout=timeout, rpc=rpc, llama_cpp=llama_cpp) as worker:
        found = worker.devices() if virtual or rpc or not gpus else ()
        memory, shown = host_memory(), described(found, virtual) if gpus else found
        return shown, replace(worker.host(), total=memory.total, free=memory.available)


@door()
def calibrate(
    model: Path | None = None,
    *,
    devices: Sequence[str] | None = None,
    rpc: str | Sequence[str] = (),
    twin: str | None = None,
    store: bool = True,
    llama_cpp: Path | None = None,
    timeout: float = DEFAULT_TIMEOUT,
    on_progress: Callable[[Progress], None] | None = None,
    on_log: Callable[[str], None] | None = None,
) -> Calibration:
    """Compare this machine's devices with their virtual twins, and measure what llama.cpp does not count.

    Dummy loads of ``model``, or of small models of several kinds, run on each device and on its twin, and on all of
    them together where there are more. Small models are then loaded for real. What that takes beyond llama.cpp's own
    bytes is kept for the default margin, unless ``store`` is false. ``rpc`` adds the devices of rpc-servers
    (``host:port``); ``twin`` is a profile for all twins, such as ``cuda:8.6``, in place of the devices' own.

    Raises ``LibraryError`` where there is no device, ``AnswerError`` where what was measured cannot be kept, and what
    ``fit`` raises.
    """
    from fitter.planning import calibration
    from fitter.planning.calibration import Calibration, twin_of

    profile, capability = parse_twin(twin) if twin else (None, None)

    def start(virtual: Sequence[VirtualDevice] = ()) -> Worker:
        rpc_of_it = () if virtual else rpc
        return Worker(virtual, timeout=timeout, on_log=on_log, rpc=rpc_of_it, llama_cpp=llama_cpp)

    with start() as real, Directory() as directory:
        chosen = choose(real.devices(), devices)
        if not chosen:
            raise LibraryError(
                "llama.cpp has no GPU here to calibrate: run this on a machine with one, and install llama-cpp-python "
                'with its backend, such as CMAKE_ARGS="-DGGML_CUDA=on"'
            )

        def report(text: str) -> None:
            if on_progress:
                on_progress(Progress(real.dummy_loads, text))

        known = dict(real.compute_capabilities())
        twins = {info.name: twin_of(info, capability or known.get(info.name), profile) for info in chosen}
        small = calibration.write_models(FilePath(directory))
        compared = small
        if model is not None:
            path = open_model(os.fsdecode(model), real.header).path
            compared = (calibration.CalibrationModel(path.name, path, False),)
        comparisons = [*calibration.compare_twins(real.measure, start, chosen, twins, compared, report)]
        measured = []
        for info in chosen:
            loads = calibration.load_each(real, start, info, small, report)
            comparisons.append(calibration.compare_loads(partial(real.measure, reserve=True), loads, info))
            measured.append(calibration.device_calibration(info, twins[info.name], loads))
    records = calibration.records(measured)
    stored = calibrated.store(records) if store and records else None
    return Calibration(tuple(measured), tuple(comparisons), stored)


@door(Fitting)
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
    """Load a plan for real, compute with it, and compare every number of bytes with the predicted one.

    The plan is one that ``fit`` finds for ``model`` with ``options``, its keywords, or the given ``plan``: one of
    ``fit``'s, or a file that ``fitter --json`` wrote; it is then of ``model``, or of the model at its own path. The
    load is in a worker process, without mmap as the plan was measured, with prompts of a micro batch and single tokens.
    The result's ``exceeding`` has the numbers that are more than ``tolerance`` (bytes, or ``1MiB``) beyond their
    prediction; ``holds`` says that there are none. A plan that does not fit, now or ever, is not loaded: ``problems``.

    With the ``program`` ``llama-server``, the plan is loaded by that: the one at ``server`` (a file or directory), else
    that of ``llama_cpp``, else the one on the PATH. It gets the plan's arguments and a free port of this machine, then
    ``prompts`` (40) of random tokens, as many at once as it has slots, for at most 7.5 seconds each. The result's
    ``server`` says what it kept of them, and its process took. It is ended in any case.

    ``timeout``: seconds for one dummy load; the real one has as much and a second more for each 20 MB.

    Raises what ``fit`` raises, ``LlamaCppError`` too where the real load fails, and ``PlanError`` where the plan is for
    devices that are not here, or the llama-server is another build than it was made with.
    """
    from fitter.planning import verification

    timeout = parameters.get("timeout") or DEFAULT_TIMEOUT
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
        from fitter.output.plan_file import read_plan

        plan = read_plan(path("plan", plan))
    check_is_here(plan if model is None else replace(plan, model=replace(plan.model, path=os.fsdecode(model))))
    check_can_run(plan)
    patience = timeout + plan.model.bytes / _LOADED_PER_SECOND
    llama_cpp = parameters.get("llama_cpp")
    with Worker(timeout=patience, on_log=on_log, rpc=plan.rpc, llama_cpp=llama_cpp) as worker:
        check_llama_cpp(plan, worker.build(), "verify it with the one that it was made with, or fit again")
        opened = open_model(plan.model.path if model is None else os.fsdecode(model), worker.header)
        verification.check_same_model(plan.model, ModelSummary.of(opened))
        allowed = size("tolerance", tolerance or 0)
        if program == SERVER:
            from fitter import serving
            from fitter.programs.prompts import PROMPTS

            where = None if server is None else os.fsdecode(server)
            named = None if llama_cpp is None else os.fsdecode(llama_cpp)
            report = on_progress or (lambda _: None)
            number = PROMPTS if prompts is None else prompts
            how = serving.Serving(where, named, number, patience, allowed, report, on_log)
            return serving.verify(plan, opened, worker, how)
        if on_progress:
            on_progress(Progress(0, "loading for real"))
        return verification.verify(plan, opened.path, worker, lambda: host_memory().available, allowed)


@door()
def inspect(
    model: Path,
    *,
    n_ctx: int | None = None,
    llama_cpp: Path | None = None,
    timeout: float = DEFAULT_TIMEOUT,
    on_progress: Callable[[Progress], None] | None = None,
) -> Inspection:
    """What a model is made of: tensors by role, each layer's weights and its part of the KV cache at ``n_ctx``.

    ``n_ctx`` ``None`` or 0 is the model's own context. Weights are the bytes in the file; caches and compute buffers
    are what llama.cpp asks for with everything on the host. ``on_progress`` is told how far the header of a model is
    that is elsewhere. Raises what ``fit`` raises.
    """
    fetch(os.fsdecode(model), timeout, on_progress)
    with Worker(timeout=timeout, llama_cpp=llama_cpp) as worker:
        opened = open_model(os.fsdecode(model), worker.header)
        check_context(n_ctx or opened.n_ctx_train, opened.n_ctx_train, 1)
        params = Params(n_ctx=n_ctx or 0, n_gpu_layers=0, devices=())
        breakdown = worker.measure(str(opened.path), params)
        layout = worker.layout(str(opened.path), params)
    return inspection_of(opened, breakdown, layout)


class _Methods:
    """What the methods of a plan do; what only some of them need is imported by those."""

    def text(self, plan: Plan, as_html: bool) -> str:
        from fitter.output import report, table

        return report.plan_fragment(plan) if as_html else table.plan_text(plan)

    def arguments(self, plan: Plan) -> list[str]:
        from fitter.output.arguments import arguments

        return arguments(plan)

    def to_dict(self, plan: Plan) -> dict[str, Any]:
        from fitter.output.json import to_dict

        return to_dict(plan)

    def format(self, plan: Plan, name: str, anyway: bool) -> str:
        from fitter.output.formats import render

        return render(plan, name, anyway=anyway)

    def explain(self, plan: Plan) -> str:
        from fitter.output.explanation import explanation

        return explanation(plan)

    def llama_kwargs(self, plan: Plan) -> dict[str, Any]:
        from fitter.output.keywords import llama_kwargs
        from fitter.same_load import with_every_output

        return llama_kwargs(with_every_output(plan, measure))

    def load(self, plan: Plan, kwargs: Mapping[str, Any]) -> Llama:
        from fitter.loading import load

        loaded: Llama = load(plan, kwargs, fit)  # type: ignore[assignment]
        return loaded

    def verify(self, plan: Plan, keywords: Mapping[str, Any]) -> Verification:
        return verify(plan=plan, **keywords)


def _restored(values: dict[str, Any]) -> Plan:
    return Plan(**renamed(values))


register(_Methods())
# a plan that is read from a pickle has its methods: this module is imported for it
copyreg.pickle(Plan, lambda plan: (_restored, (dict(vars(plan)),)))

__all__ = [
    "Breakdown",
    "Inspection",
    "Plan",
    "Price",
    "Progress",
    "calibrate",
    "devices",
    "estimate",
    "fit",
    "inspect",
    "measure",
    "verify",
]
