"""What ``import fitter`` offers: ``fit``, ``measure``, ``estimate``, ``inspect``, ``devices``. Sizes in bytes."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import fields, replace
from pathlib import Path as FilePath
from typing import TYPE_CHECKING, Any

from fitter.door import door
from fitter.errors import LibraryError, PlanError, UsageError
from fitter.kept import held
from fitter.llama import process
from fitter.llama.client import DEFAULT_TIMEOUT, Worker
from fitter.llama.types import (
    LAYOUT_DEVICE,
    RPC,
    Breakdown,
    DeviceInfo,
    Params,
    Skeleton,
    SplitMode,
    VirtualDevice,
)
from fitter.llama.virtual import is_surely_spilled
from fitter.machine import calibrated, catalogue
from fitter.machine.devices import Machine, real_machine, virtual_machine
from fitter.machine.gpu import parse_gpus, parse_twin
from fitter.machine.host import host_memory as measure_host_memory
from fitter.machine.speed import DeviceSpeed, HostSpeed, default_host, speed_of
from fitter.model.header import Model, open_model
from fitter.model.source import model_files
from fitter.model.tensors import Role, is_expert, layer_of, role_of
from fitter.parameters import MAX_TOKENS, AnyPath, Estimating, Fitting, Load, Measuring, taken_by
from fitter.planning import cost
from fitter.planning import fit as planning
from fitter.planning.ask import Ask
from fitter.planning.constraints import (
    batches_of,
    check_choices,
    check_live_tokens,
    check_margins,
    check_pins,
    check_split_mode,
    context_of_a_sequence,
    default_margin,
    device_limits,
    for_model,
    levers,
    params_of,
    sequences_of,
    workload_of,
)
from fitter.planning.cost import Workload
from fitter.planning.inspection import Inspection, LayerSize, RoleSize
from fitter.planning.limits import check_context, own_context
from fitter.planning.memory import HOST, units_of
from fitter.planning.placement import pinned_matches
from fitter.planning.plan import ModelSummary, PlanData, check_fits, resolved, stamp_of
from fitter.planning.pricing import Price, Speeds, price_params
from fitter.planning.request import DeviceLimit, HostLimit, Progress, Request
from fitter.planning.work import facts_of
from fitter.sharing import Asked, Drafts, check_mtp, choices, open_draft
from fitter.text import LONGEST_NAME, printable
from fitter.values import path, size

if TYPE_CHECKING:
    from typing import final

    import llama_cpp
    from typing_extensions import Unpack

    from fitter.llama.cuda_library import CudaLibrary
    from fitter.output.plan_file import PlanDocument
    from fitter.planning.calibration import Calibration
    from fitter.planning.verification import Prediction, Verification

    @final
    class Llama(llama_cpp.Llama):
        """What ``fitter.Llama`` and ``Plan.load`` make: a ``llama_cpp.Llama`` with a plan."""

        plan: Plan

        def __init__(self, model_path: str | os.PathLike[str], **keywords: Any) -> None: ...

        @classmethod
        def from_pretrained(  # type: ignore[override]
            cls, repo_id: str, filename: str | None, additional_files: list[str] | None = None, **keywords: Any
        ) -> Llama: ...


Path = AnyPath

_LOADED_PER_SECOND = 20 * 10**6
"""Bytes of a model: a slow disk, and a processor that computes a prompt with it."""

_FFN_WEIGHT = re.compile(r"\.ffn_(up|down|gate|gate_up)\.")


class Plan(PlanData):
    """Parameters that llama.cpp measured to fit (or, with ``fits`` false, the nearest that were tried).

    ``bool(plan)`` is ``plan.fits``, ``str(plan)`` the table that the command shows.
    """

    def __str__(self) -> str:
        from fitter.output.table import plan_text

        return plan_text(self)

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
        from fitter.output.arguments import arguments

        if not anyway:
            check_fits(self, "arguments(anyway=True)")
        return arguments(self)

    def to_dict(self) -> dict[str, Any]:
        """The plan as JSON-ready data, schema 1; sizes in bytes."""
        from fitter.output.json import to_dict

        return to_dict(self)

    def format(self, name: str, *, anyway: bool = False) -> str:
        """The plan as ``fitter fit --format`` writes it.

        ``name`` is ``args``, ``shell``, ``json``, ``ini``, ``env``, ``python`` or ``ik_llama``. Raises ``PlanError``
        where that format has no word for what the plan needs; all but ``json`` also where the plan does not fit, unless
        it is asked for ``anyway``.
        """
        from fitter.output.formats import render

        return render(self, name, anyway=anyway)

    def explain(self) -> str:
        """Why the plan is as it is: what takes its time, each choice's runner-up, the proven distance to the best."""
        from fitter.output.explanation import explanation

        return explanation(self)

    def llama_kwargs(self) -> dict[str, Any]:
        """Keyword arguments for ``llama_cpp.Llama``. Raises ``PlanError`` where it has none for what the plan needs."""
        from fitter.output.keywords import llama_kwargs

        return llama_kwargs(self)

    def load(self, **kwargs: Any) -> Llama:
        """A ``llama_cpp.Llama`` with the whole plan applied, overrides too; ``kwargs`` go to ``Llama``.

        Its ``plan`` is what it was loaded with: where a device has less memory than the plan counts on, what ``fit``
        was asked for is fitted again, at most twice, with a ``PlanWarning``.

        Raises ``PlanError`` where the plan does not fit or is for devices that are not here, ``UsageError`` for
        ``kwargs`` that contradict it, ``ModelError`` where the model is gone or another one, ``OutOfMemoryError``
        where a device refuses memory even so, ``RemoteError`` where an rpc-server fails, ``LlamaCppError`` where
        llama.cpp cannot load the model. Where llama.cpp would end the process, ``LlamaCppCrashError`` is raised.
        """
        from fitter.loading import load

        loaded: Llama = load(self, kwargs, fit)  # type: ignore[assignment]
        return loaded

    def verify(self, *, tolerance: int | str = 0, timeout: float = DEFAULT_TIMEOUT) -> Verification:
        """Load the plan for real in a worker process, and compare: ``fitter.verify``."""
        return verify(plan=self, tolerance=tolerance, timeout=timeout)


@held(Fitting)
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
    (``rtx-4090``, ``2x 24GiB``), or ``none``, that take the place of this machine's; the host is then unlimited
    unless ``host_memory`` (bytes, or ``64GiB``) says otherwise. ``profile`` ``library`` asks llama-cpp-python's own
    CUDA backend about them (``library:DIRECTORY``: the one there) instead of fitter's mirror of it. ``rpc`` names
    rpc-servers (``host:port``, or several with commas), whose devices stand before all others. ``devices`` chooses
    among them by name.

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
    ``model`` itself either way.
    ``timeout``: seconds for one dummy load. ``time_limit``: seconds for the whole search; the best plan that fits by
    then is confirmed, which is one load more, and its ``search.is_cut_short``. ``on_log`` gets every line of
    llama.cpp's log. A ``worker`` that is given is used and stays open, for many fits in a row; it is told of ``gpus``
    anew.

    ``embedding`` plans for ``Llama(embedding=True)``: unless they are set, a micro batch as large as the batch, and 256
    sequences with one cache.

    The plan's ``fits`` says whether there is one that fits. Safe to call from several threads at once.

    Raises ``UsageError`` (a parameter makes no sense), ``ModelError`` (the model cannot be read), ``LlamaCppError``
    (llama.cpp refused, crashed or hung), ``TimeLimitError`` (nothing that fits was found within ``time_limit``),
    ``LibraryError`` (libllama is missing or another one), ``RemoteError`` (an rpc-server cannot be used).
    """
    started = time.monotonic()
    model = os.fsdecode(model)
    ask, beside_it = Ask.of(parameters), Asked.of(parameters)
    words = {"timeout": ask.timeout, **parameters, "on_progress": on_progress, "on_log": on_log}
    deadline = None if ask.time_limit is None else started + ask.time_limit
    n_ctx, n_gpu_layers = parameters.get("n_ctx"), parameters.get("n_gpu_layers")
    tensor_split, split_mode = parameters.get("tensor_split"), parameters.get("split_mode") or Params.split_mode
    main_gpu, embedding = parameters.get("main_gpu") or 0, parameters.get("embedding") or False
    cpu_moe, n_cpu_moe = parameters.get("cpu_moe") or False, parameters.get("n_cpu_moe")
    check_split_mode(split_mode)
    check_choices(ask.objective, ask.strategy)
    check_pins(n_gpu_layers, tensor_split)
    allowed = levers(ask.allow)
    beside_it.check()
    given = _load_of(parameters, beside_it)
    if given.n_ctx:
        # what it was set to, or what room for all slots is
        n_ctx = given.n_ctx
    has_overrides = bool(given.tensor_buft_overrides or cpu_moe or n_cpu_moe)
    gpus, rpc, devices, fit_ctx = ask.gpus, ask.rpc, ask.devices, ask.fit_ctx
    host_speed = None if ask.host_bandwidth is None else _given_host_speed(ask.host_bandwidth, bool(gpus))
    remote_bandwidths = _given_bandwidths(rpc, ask.rpc_bandwidth)
    # both take longer to parse than there is time for once the model is known
    process.meanwhile(catalogue.gpus)
    process.meanwhile(cost.default)
    virtual = _virtual(gpus)
    library = _library(ask.profile, virtual)
    if gpus and not virtual and not rpc:
        devices = _no_devices(devices)
    with ExitStack() as stack:
        is_own = worker is None
        if worker is None:
            worker = stack.enter_context(Worker(virtual, library=library, timeout=ask.timeout, on_log=on_log, rpc=rpc))
            worker.start()
        else:
            worker.configure(virtual, library, rpc)
        stack.callback(setattr, worker, "deadline", worker.deadline)
        worker.deadline = deadline
        # Each process that asks a real device takes some of its memory, so those are for one process only. An
        # rpc-server even talks to one process only, and lets others wait.
        is_shared = is_own and library is None and bool(gpus) and not rpc
        second = stack.enter_context(Worker(virtual, timeout=ask.timeout, on_log=on_log)) if is_shared else None
        beside = _Beside(second, model_files(model)) if second else None
        is_placed = has_overrides or n_gpu_layers is not None or devices is not None or split_mode != "layer"
        is_free = not is_placed and not beside_it.mtp
        if beside and is_free:
            beside.load(virtual)
        # the header that was read last is at hand for its skeleton
        draft = open_draft(beside_it, worker)
        opened = open_model(model, worker.header)
        check_mtp(beside_it, opened)
        given = for_model(given, opened, cpu_moe, n_cpu_moe)
        overrides = given.tensor_buft_overrides
        stamps = tuple(stamp_of(file) for file in opened.files)
        machine = _machine(worker, virtual, ask.host_memory, bool(gpus), bool(rpc))
        if gpus and not virtual and devices is None:
            devices = tuple(device.name for device in machine.devices)
        chosen = _choose(machine, devices, split_mode, main_gpu)
        known = () if virtual else calibrated.read()

        def limits_of(infos: Sequence[DeviceInfo], given: int | Sequence[int] | None) -> tuple[DeviceLimit, ...]:
            return device_limits(infos, given, [default_margin(calibrated.outside_of(info, known)) for info in infos])

        limits = limits_of(chosen, ask.margin)
        named = _choose(machine, beside_it.names or ["none"], "layer", 0)
        # a list has a margin for each device of the model's
        others = limits_of([info for info in named if info not in chosen], None if _is_each(ask.margin) else ask.margin)
        if overrides:
            worker.check_patterns([override.pattern for override in overrides])
        fixed: dict[str, object] = {
            "n_ctx": n_ctx,
            "n_gpu_layers": n_gpu_layers,
            "tensor_split": tensor_split if tensor_split and any(tensor_split) else None,
            "devices": devices,
            "n_ubatch": given.n_ubatch if embedding else parameters.get("n_ubatch"),
            "type_k": parameters.get("type_k"),
            "type_v": parameters.get("type_v"),
            "op_offload": parameters.get("op_offload"),
        }
        pinned = _pinned(worker, opened, overrides, limits)
        # a device that cannot keep its margin is left out, unless the user has put something there
        has_none = any(d != HOST and limits[d].target <= 0 for d in pinned.values())
        if split_mode == "none" or has_none:
            fixed["devices"] = [limit.name for limit in limits]
        n_ctx_train = opened.n_ctx_train or min(fit_ctx, MAX_TOKENS)
        streams = 1 if given.kv_unified else given.n_seq_max
        is_asked = ask.prompt is not None or ask.generate is not None
        if n_ctx is None:
            context = n_ctx_train if is_asked else min(fit_ctx, n_ctx_train)
        else:
            context = context_of_a_sequence(given, n_ctx_train)
        workload = workload_of(ask.prompt, ask.generate, context, is_set=bool(n_ctx))
        if is_asked:
            fit_ctx = max(fit_ctx, workload.prompt + workload.generate)
        priced = machine.devices if draft or beside_it.mmproj else chosen
        request = Request(
            params=replace(given, n_ctx=n_ctx or own_context(n_ctx_train, streams)),
            fixed=frozenset(name for name, value in fixed.items() if value is not None),
            devices=limits,
            host=HostLimit(machine.host_total, machine.host_free, ask.host_margin, "paging" in allowed),
            n_layer=opened.n_layer,
            n_ctx_train=n_ctx_train,
            is_movable=is_expert if opened.is_moe else _is_ffn_weight,
            is_expert_model=opened.is_moe,
            fit_ctx=fit_ctx,
            model_bytes=opened.bytes,
            pinned=pinned,
            facts=facts_of(opened),
            speeds=_speeds(virtual, priced, machine.devices, worker, remote_bandwidths),
            host_speed=host_speed or _host_speed(bool(gpus)),
            workload=workload,
            objective=ask.objective,
            strategy=ask.strategy,
            allow=allowed,
        )
        drafts = Drafts(worker, draft) if draft else None
        llama = _llama(worker, beside, opened, ask.skeleton, drafts)
        shared = choices(
            beside_it,
            worker,
            opened,
            draft,
            drafts,
            given.flash_attn,
            machine.devices,
            machine.host_total,
            limits,
            request.speeds,
        )
        report = on_progress or (lambda _: None)
        data = planning.fit(request, _summary(opened), llama, report, bool(gpus), shared, others, deadline)
        if ask.margin is not None:
            check_margins(limits, data.problems)
        for each in filter(None, (worker if is_own else None, second)):
            each.dismiss()
    remote = {device.name for device in machine.devices if device.backend == RPC}
    data = replace(data, rpc=worker.rpc if remote.intersection(data.breakdown.devices) else ())
    data = replace(data, asked=words, files=stamps)
    return Plan(**{field.name: getattr(data, field.name) for field in fields(data)})


def _load_of(parameters: Fitting, beside_it: Asked) -> Params:
    """The parameters of a load that a fit begins with; devices are chosen later."""
    embedding = parameters.get("embedding") or False
    n_batch, n_ubatch = batches_of(embedding, parameters.get("n_batch"), parameters.get("n_ubatch"))
    n_seq_max, kv_unified = sequences_of(
        embedding, n_batch, parameters.get("n_seq_max"), parameters.get("kv_unified") or False
    )
    load: dict[str, Any] = {each.name: parameters.get(each.name) for each in taken_by(Load)}
    load |= {"n_batch": n_batch, "n_ubatch": n_ubatch, "n_seq_max": n_seq_max, "kv_unified": kv_unified}
    load |= {"devices": None, "main_gpu": None}
    return replace(params_of(None, **load), load_mtp=beside_it.mtp, n_rs_seq=beside_it.n_rs_seq)


class _Beside:
    """A worker that measures the model's own file beside another one."""

    def __init__(self, worker: Worker, files: Sequence[FilePath]) -> None:
        self._worker = worker
        self._path = str(files[0])
        self._bytes = sum(file.stat().st_size for file in files)
        self._devices: tuple[str, ...] = ()
        self._n_layers = 0
        self._is_held = False
        self.loading: Params | None = None

    @property
    def busy(self) -> bool:
        return self._worker.busy

    @property
    def dummy_loads(self) -> int:
        return self._worker.dummy_loads

    def load(self, devices: Sequence[VirtualDevice]) -> None:
        """Begin to load the model before anything is known of it but its size.

        Where that is too much for ``devices``, with the placement left open; else with all layers on the only one.
        """
        if is_surely_spilled(self._bytes, devices):
            self._devices = tuple(device.name for device in devices)
            self._is_held = True
            self._worker.begin_holding(self._path)
        elif len(devices) == 1 and self._bytes <= devices[0].free:
            self.loading = Params(devices=(devices[0].name,))
            self._worker.begin_loading(self._path, self.loading)

    def know(self, n_layer: int) -> None:
        """Be told how many layers the model has."""
        self._n_layers = n_layer + 1
        if self.loading:
            self.loading = replace(self.loading, n_gpu_layers=n_layer + 1)

    def awaits(self, params: Params) -> bool:
        return (
            self._is_held
            and sorted(params.devices or ()) == sorted(self._devices)
            and params.n_gpu_layers >= self._n_layers
            and bool(params.tensor_buft_overrides)
        )

    def begin(self, params: Params) -> None:
        self._is_held = False
        self._worker.begin_measure(self._path, params, reserve=True)

    def finish(self) -> Breakdown:
        return self._worker.finish_measure()


def _llama(
    worker: Worker, beside: _Beside | None, model: Model, skeleton: bool, drafts: Drafts | None
) -> planning.Llama:
    """The ways to ask llama.cpp about ``model``."""
    path, loads = str(model.path), worker.dummy_loads
    copy = Skeleton(tuple(map(str, model.files)))
    if beside:
        beside.know(model.n_layer)

    def shared_loads() -> int:
        return drafts.loads if drafts else 0

    def until(deadline: float | None) -> None:
        worker.deadline = deadline

    return planning.Llama(
        own=planning.Loads(
            lambda params: worker.measure(path, params, reserve=True), lambda params: worker.layout(path, params)
        ),
        dummy_loads=lambda: worker.dummy_loads - loads + (beside.dummy_loads if beside else 0) - shared_loads(),
        skeleton=planning.Loads(lambda params: worker.measure(copy, params), lambda params: worker.layout(copy, params))
        if skeleton
        else None,
        beside=beside,
        shared_loads=shared_loads,
        until=until,
    )


@held(Measuring)
def measure(
    model: Path,
    *,
    on_log: Callable[[str], None] | None = None,
    worker: Worker | None = None,
    **parameters: Unpack[Measuring],
) -> Breakdown:
    """Memory that llama.cpp would take with exactly these parameters: one dummy load, rows per buffer type in bytes.

    ``parameters`` are those of ``fit`` that llama.cpp has too, none of them fitted, each with llama.cpp's own default
    (``n_ctx`` 0, the model's own; ``n_gpu_layers`` -1, all), and ``load_mtp``, ``n_rs_seq`` and ``n_outputs_max``. A
    ``worker`` that is given is used and stays open, for many measurements in a row; it is told of ``gpus`` and ``rpc``
    anew.

    Raises what ``fit`` raises.
    """
    with _asked(model, parameters, on_log, worker) as (asked, _, opened, params):
        return asked.measure(str(opened.path), params)


@held(Estimating)
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
    priced, by default what the request has there on average. ``host_bandwidth``: bytes per second, or ``60GB/s``, in
    place of what this machine was measured to read, or of the default for a described one; ``rpc_bandwidth`` the same
    of remote devices, one for all or one for each. The estimate's ``sources`` say where every speed is from.

    Raises what ``fit`` raises.
    """
    ask = Ask.of(parameters)
    check_split_mode(parameters.get("split_mode") or Params.split_mode)
    host_speed = None if ask.host_bandwidth is None else _given_host_speed(ask.host_bandwidth, bool(ask.gpus))
    remote_bandwidths = _given_bandwidths(ask.rpc, ask.rpc_bandwidth)
    with _asked(model, parameters, on_log, worker) as found:
        asked, virtual, opened, params = found
        context = context_of_a_sequence(params, opened.n_ctx_train or Workload.prompt + Workload.generate)
        workload = workload_of(ask.prompt, ask.generate, context, is_set=bool(params.n_ctx))
        check_live_tokens(live_tokens, context)
        breakdown = asked.measure(str(opened.path), params)
        layout = asked.layout(Skeleton(tuple(map(str, opened.files))), replace(params, n_ctx=breakdown.n_ctx))
        every = asked.devices() if breakdown.devices else ()
        by_name = {info.name: info for info in every}
        infos = tuple(by_name[name] for name in breakdown.devices)
        known = _speeds(virtual, infos, every, asked, remote_bandwidths)
        return price_params(
            facts_of(opened),
            layout,
            params,
            breakdown,
            Speeds(
                breakdown.devices,
                tuple(known[info.name] for info in infos),
                tuple(info.free for info in infos),
                host_speed or _host_speed(bool(ask.gpus)),
            ),
            _pinned(asked, opened, params.tensor_buft_overrides, infos),
            workload,
            live_tokens,
        )


@contextmanager
def _asked(
    model: Path,
    parameters: Measuring,
    on_log: Callable[[str], None] | None,
    worker: Worker | None,
) -> Iterator[tuple[Worker, tuple[VirtualDevice, ...], Model, Params]]:
    """A worker to ask about one load of ``model``, the given one or one for this: it, the virtual devices, the rest."""
    ask = Ask.of(parameters)
    gpus, rpc, devices = ask.gpus, ask.rpc, ask.devices
    virtual = _virtual(gpus)
    params = params_of(None, **parameters)
    library = _library(ask.profile, virtual)
    if gpus and not virtual and not rpc:
        params = replace(params, devices=_no_devices(devices))
    if worker is not None:
        worker.configure(virtual, library, rpc)
        own: AbstractContextManager[Worker] = nullcontext(worker)
    else:
        own = Worker(virtual, library=library, timeout=ask.timeout, on_log=on_log, rpc=rpc)
    with own as asked:
        if gpus and rpc and not virtual:
            machine = Machine(_described(asked.devices()), (), None, None)
            params = replace(params, devices=tuple(device.name for device in _choose(machine, devices, "layer", 0)))
        if params.split_mode == "none" and params.main_gpu > 0:
            _check_main_gpu(params.main_gpu, asked.devices() if params.devices is None else params.devices)
        opened = open_model(os.fsdecode(model), asked.header)
        check_context(params.n_ctx or opened.n_ctx_train, opened.n_ctx_train, params.n_seq_max)
        params = for_model(params, opened, parameters.get("cpu_moe") or False, parameters.get("n_cpu_moe"))
        asked.check_patterns([override.pattern for override in params.tensor_buft_overrides])
        yield asked, virtual, opened, params


@door()
def devices(
    gpus: str | VirtualDevice | Sequence[str | VirtualDevice] = (),
    *,
    rpc: str | Sequence[str] = (),
    timeout: float = DEFAULT_TIMEOUT,
) -> tuple[tuple[DeviceInfo, ...], DeviceInfo]:
    """The devices that a model would be offloaded to, and the host with the memory that it has available."""
    virtual = _virtual(gpus)
    with Worker(virtual, timeout=timeout, rpc=rpc) as worker:
        memory = measure_host_memory()
        found = worker.devices() if virtual or rpc or not gpus else ()
        return _described(found) if gpus else found, replace(worker.host(), total=memory.total, free=memory.available)


@door()
def calibrate(
    model: Path | None = None,
    *,
    devices: Sequence[str] | None = None,
    rpc: str | Sequence[str] = (),
    twin: str | None = None,
    store: bool = True,
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
    import tempfile

    from fitter.planning import calibration
    from fitter.planning.calibration import Calibration, twin_of

    profile, capability = parse_twin(twin) if twin else (None, None)

    def start(virtual: Sequence[VirtualDevice] = ()) -> Worker:
        return Worker(virtual, timeout=timeout, on_log=on_log, rpc=() if virtual else rpc)

    with start() as real, tempfile.TemporaryDirectory(prefix="fitter-") as directory:
        chosen = _choose(Machine(real.devices(), (), None, None), devices, "layer", 0)
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
        comparisons = []
        for group in [*((info,) for info in chosen), *([chosen] if len(chosen) > 1 else [])]:
            virtual = [device for info in group if (device := twins[info.name])]
            if len(virtual) == len(group):
                with start(virtual) as other:
                    wanted = calibration.configurations()
                    found = calibration.compare(real.measure, other.measure, group, compared, wanted, report)
                    comparisons.append(found)
        measured = []
        for info in chosen:
            loads = []
            for candidate in (candidate for candidate in small if candidate.is_loaded):
                report(f"{info.name}: loading {candidate.name}")
                with start() as loader:
                    loads.append(calibration.load(real, loader, info, candidate))
            comparisons.append(calibration.compare_loads(real.measure, loads, info))
            measured.append(calibration.device_calibration(info, twins[info.name], loads))
    records = calibration.records(measured)
    stored = calibrated.store(records) if store and records else None
    return Calibration(tuple(measured), tuple(comparisons), stored)


@door(Fitting)
def verify(
    model: Path | None = None,
    *,
    plan: PlanData | PlanDocument | Path | None = None,
    tolerance: int | str | None = None,
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

    ``timeout``: seconds for one dummy load; the real one has as much and a second more for each 20 MB.

    Raises what ``fit`` raises, ``LlamaCppError`` too where the real load fails, and ``PlanError`` where the plan is for
    devices that are not here.
    """
    from fitter.planning import verification

    timeout = Ask.of(parameters).timeout
    if parameters.get("gpus"):
        raise UsageError("virtual devices cannot run a model: verify a plan for those that are here")
    if plan is None:
        if model is None:
            raise UsageError("there is nothing to verify: give a model, a plan, or both")
        plan = fit(model, on_progress=on_progress, on_log=on_log, **parameters)
    elif others := [name for name in parameters if name != "timeout"]:
        raise UsageError(f"the plan already sets every parameter: leave {', '.join(others)} out")
    if not isinstance(plan, PlanData):
        from fitter.output.plan_file import PlanDocument, read_plan

        if not isinstance(plan, PlanDocument):
            plan = read_plan(path("plan", plan))
    prediction = _prediction(plan)
    patience = timeout + plan.model.bytes / _LOADED_PER_SECOND
    with Worker(timeout=patience, on_log=on_log, rpc=plan.rpc) as worker:
        opened = open_model(plan.model.path if model is None else os.fsdecode(model), worker.header)
        _check_same_model(plan.model, _summary(opened))
        if on_progress:
            on_progress(Progress(0, "loading for real"))
        allowed = size("tolerance", tolerance or 0)
        return verification.verify(prediction, opened.path, worker, lambda: measure_host_memory().available, allowed)


def _prediction(plan: PlanData | PlanDocument) -> Prediction:
    from fitter.planning.verification import Prediction

    if not isinstance(plan, PlanData):
        params, rows = plan.params, plan.rows
    elif plan.virtual:
        raise PlanError("the plan is for virtual devices, which cannot run a model: fit again without them")
    else:
        params, rows = resolved(plan), plan.breakdown.rows
    # what has nothing of the model need not be here
    used = tuple(use for use in plan.devices if use.name in (params.devices or ()))
    return Prediction(plan.model, params, rows, used, plan.host, plan.problems, plan.shared)


def _check_same_model(planned: ModelSummary, found: ModelSummary) -> None:
    """Raise ``UsageError`` where a plan is of another model than the one that was found."""
    for what in ("architecture", "name", "bytes"):
        wanted, here = getattr(planned, what), getattr(found, what)
        if wanted != here:
            raise UsageError(f"the plan is for another model than {found.path}: its {what} is {wanted}, not {here}")


@door()
def inspect(model: Path, *, n_ctx: int | None = None, timeout: float = DEFAULT_TIMEOUT) -> Inspection:
    """What a model is made of: tensors by role, each layer's weights and its part of the KV cache at ``n_ctx``.

    ``n_ctx`` ``None`` or 0 is the model's own context. Weights are the bytes in the file; caches and compute buffers
    are what llama.cpp asks for with everything on the host. Raises what ``fit`` raises.
    """
    with Worker(timeout=timeout) as worker:
        opened = open_model(os.fsdecode(model), worker.header)
        check_context(n_ctx or opened.n_ctx_train, opened.n_ctx_train, 1)
        params = Params(n_ctx=n_ctx or 0, n_gpu_layers=0, devices=())
        breakdown = worker.measure(str(opened.path), params)
        layout = worker.layout(str(opened.path), params)
    units = units_of(layout, opened.n_layer, lambda _: False)
    known = {entry.name for entry in layout.entries if entry.buffer_type == LAYOUT_DEVICE and entry.kind == "context"}
    layers = [_layer_size(opened, None, units[-1].cache if known else 0)]
    layers += [_layer_size(opened, unit.index, unit.cache) for unit in units[:-1]]
    return Inspection(
        model=_summary(opened),
        metadata=opened.metadata,
        roles=_roles([(role_of(tensor.name), tensor.bytes) for tensor in opened.tensors]),
        layers=tuple(layers),
        n_ctx=breakdown.n_ctx,
        rows=breakdown.rows,
    )


def _layer_size(model: Model, index: int | None, cache: int) -> LayerSize:
    own = [(role_of(tensor.name), tensor.bytes) for tensor in model.tensors if layer_of(tensor.name) == index]
    return LayerSize(index, _roles(own), cache)


def _roles(tensors: Sequence[tuple[Role, int]]) -> tuple[RoleSize, ...]:
    sizes = [[size for role, size in tensors if role is wanted] for wanted in Role]
    return tuple(RoleSize(role.value, len(own), sum(own)) for role, own in zip(Role, sizes, strict=True) if own)


def _is_each(margin: int | Sequence[int] | None) -> bool:
    """Whether it is a margin for each device, not one for all."""
    return not isinstance(margin, int) and margin is not None and len(margin) > 1


def _virtual(gpus: str | VirtualDevice | Sequence[str | VirtualDevice]) -> tuple[VirtualDevice, ...]:
    if isinstance(gpus, (str, VirtualDevice)):
        gpus = [gpus]
    if all(isinstance(gpu, VirtualDevice) for gpu in gpus):
        return tuple(gpu for gpu in gpus if isinstance(gpu, VirtualDevice))
    if all(isinstance(gpu, str) for gpu in gpus):
        return parse_gpus([gpu for gpu in gpus if isinstance(gpu, str)])
    raise UsageError("gpus has both strings and VirtualDevice objects: give only one kind")


def _library(profile: str | None, virtual: tuple[VirtualDevice, ...]) -> CudaLibrary | None:
    if profile is None:
        return None
    name, _, place = profile.partition(":")
    if name != "library":
        raise UsageError(
            f"unknown profile '{profile}': use library or library:DIRECTORY; other profiles are part of a GPU's "
            "description, such as --gpu metal:64GiB"
        )
    other = next((device for device in virtual if device.profile != "cuda"), None)
    if other is not None:
        raise UsageError(f"the profile 'library' is for NVIDIA cards, but {other.name} is '{other.description}'")
    if not virtual:
        raise UsageError("the profile 'library' is for virtual cards: describe them, such as --gpu rtx-4090")
    from fitter.llama.cuda_library import find_cuda_library

    return find_cuda_library(place or None)


def _no_devices(devices: Sequence[str] | None) -> tuple[str, ...]:
    """The devices of a machine without a GPU: this one's are none of them."""
    if devices and [name.lower() for name in devices] != ["none"]:
        raise UsageError(f"unknown device '{devices[0]}': --gpu none means a machine without a GPU")
    return ()


def _machine(
    worker: Worker, virtual: tuple[VirtualDevice, ...], host_memory: int | None, is_described: bool, has_rpc: bool
) -> Machine:
    host = _host_bytes(host_memory)
    if not is_described:
        return real_machine(worker.devices(), measure_host_memory(), host)
    # a machine without a GPU has no use for what is here
    found = worker.devices() if virtual or has_rpc else ()
    return replace(virtual_machine(virtual, host), devices=_described(found))


def _described(devices: Sequence[DeviceInfo]) -> tuple[DeviceInfo, ...]:
    """Those of a machine that is described: not this machine's own."""
    return tuple(device for device in devices if device.virtual or device.backend == RPC)


def _host_bytes(host: int | None) -> int | None:
    if host is not None and host < 1:
        raise UsageError(f"--host-memory is {host} bytes: give more than 0")
    return host


def _speeds(
    virtual: Sequence[VirtualDevice],
    infos: Sequence[DeviceInfo],
    every: Sequence[DeviceInfo],
    worker: Worker,
    remote_bandwidths: Sequence[float],
) -> dict[str, DeviceSpeed]:
    """The speed of each of ``infos`` by its name, which are some of ``every`` device that there is."""
    described = {device.name: device for device in virtual}
    speeds = {info.name: speed_of(described.get(info.name, info)) for info in infos}
    if any(info.backend == RPC for info in infos):
        from fitter.machine.remote import remote_speeds

        speeds |= remote_speeds(infos, every, worker.speed, remote_bandwidths)
    return speeds


def _given_bandwidths(rpc: str | Sequence[str], given: float | str | Sequence[float | str] | None) -> tuple[float, ...]:
    if given is None:
        return ()
    if not rpc:
        raise UsageError("--rpc-bandwidth is given without an rpc-server: name one with --rpc")
    from fitter.machine.remote import parse_bandwidths

    return parse_bandwidths(given)


def _given_host_speed(given: float | str, is_described: bool) -> HostSpeed:
    from fitter.machine import bandwidth

    speed = bandwidth.given(given if isinstance(given, str) else f"{given:.0f}")
    return speed if is_described else replace(speed, threads=bandwidth.this_host().cores)


def _host_speed(is_described: bool) -> HostSpeed:
    """What this machine reads; of a host that is not this one, nothing can be measured."""
    if is_described:
        return default_host()
    from fitter.machine import bandwidth

    return bandwidth.host_speed()


def _choose(
    machine: Machine, names: Sequence[str] | None, split_mode: SplitMode, main_gpu: int
) -> tuple[DeviceInfo, ...]:
    """The machine's devices that the user named (``none`` for none), all of them without a word of his."""
    chosen = machine.devices
    if names is not None and [name.lower() for name in names] != ["none"]:
        by_name = {device.name: device for device in machine.devices}
        for name in names:
            if name not in by_name:
                raise UsageError(f"unknown device '{name}'; there are: {', '.join(by_name) or 'none'}")
        if len(set(names)) != len(names):
            raise UsageError("a device is named twice: leave one out")
        chosen = tuple(by_name[name] for name in names)
    elif names is not None:
        chosen = ()
    if split_mode == "none" and chosen:
        _check_main_gpu(main_gpu, chosen)
        chosen = () if main_gpu < 0 else (chosen[main_gpu],)
    return chosen


def _check_main_gpu(main_gpu: int, devices: Sequence[object]) -> None:
    if main_gpu >= len(devices):
        raise UsageError(f"main GPU {main_gpu} does not exist: the number of devices is {len(devices)}, counted from 0")


def _pinned(worker: Worker, model: Model, overrides: Sequence[Any], limits: Sequence[Any]) -> dict[str, int]:
    if not overrides:
        return {}
    index_of = {limit.buffer_type: d for d, limit in enumerate(limits)}
    targets = [index_of.get(override.buffer_type, HOST) for override in overrides]
    names = [tensor.name for tensor in model.tensors]
    matches = worker.match([override.pattern for override in overrides], names)
    return dict(pinned_matches(names, matches, targets))


def _is_ffn_weight(name: str) -> bool:
    return _FFN_WEIGHT.search(name) is not None


def _summary(model: Model) -> ModelSummary:
    return ModelSummary(str(model.path), model.name, model.architecture, model.bytes)


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
