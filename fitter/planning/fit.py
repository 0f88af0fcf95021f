"""From a request to a plan: search, have the winner confirmed, and say what it takes. Bytes."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from fitter.errors import LlamaCppError
from fitter.llama.types import Breakdown, Layout, Params
from fitter.planning.explain import Choice
from fitter.planning.levers import Found, changes, improve, pulled, used
from fitter.planning.objective import objective_seconds
from fitter.planning.plan import DeviceUse, HostUse, ModelSummary, PlanData, Problem, Search
from fitter.planning.pricing import bound_of, price_placement
from fitter.planning.request import MIB, Measure, Progress, Record, Request
from fitter.planning.search import Trial, search

OnProgress = Callable[[Progress], None]
OnCandidate = Callable[[Params], None]


class Beside(Protocol):
    """Measures the user's own file in a process of its own, while another one goes on."""

    @property
    def loading(self) -> Params | None:
        """The placement with which it loads the model, or has loaded it, without having been asked."""

    @property
    def busy(self) -> bool:
        """Whether what was begun is not done yet."""

    def awaits(self, params: Params) -> bool:
        """Whether it has begun to load the model without a placement, and can still take that of ``params``."""

    def begin(self, params: Params) -> None:
        """Begin to measure, after what was begun before."""

    def finish(self) -> Breakdown:
        """What the measurement that was begun last has found."""


@dataclass(frozen=True)
class Loads:
    """Dummy loads of one file."""

    measure: Measure
    record: Record


@dataclass(frozen=True)
class Llama:
    """The ways in which a fit may ask llama.cpp about one model.

    ``own`` loads the user's file, ``skeleton`` a copy of its header that loads faster, ``beside`` the user's file in a
    second process. ``dummy_loads`` tells how many models were loaded in all.
    """

    own: Loads
    dummy_loads: Callable[[], int]
    skeleton: Loads | None = None
    beside: Beside | None = None


def fit(request: Request, summary: ModelSummary, llama: Llama, on_progress: OnProgress, virtual: bool) -> PlanData:
    """The plan for ``request``, measured on the user's own file. Raises what asking llama.cpp raises."""
    started = time.monotonic()
    found = _Fit(request, llama, on_progress).run()
    trial = found.trial
    loads = llama.dummy_loads()
    on_progress(Progress(loads, "done"))
    return PlanData(
        model=summary,
        params=trial.params,
        breakdown=trial.breakdown,
        devices=_device_uses(request, trial.breakdown),
        host=_host_use(request, trial.breakdown),
        search=Search(loads, time.monotonic() - started),
        problems=_problems(found.request, trial),
        n_layer=request.n_layer,
        virtual=virtual,
        estimate=found.price,
        choices=found.choices,
        bound=found.bound,
        levers=used(request, found),
    )


class _Fit:
    """One fit: the search on whatever loads fastest, and the confirmation on the user's own file."""

    def __init__(self, request: Request, llama: Llama, on_progress: OnProgress) -> None:
        self._request = request
        self._llama = llama
        self._on_progress = on_progress
        self._own: dict[Params, Breakdown] = {}
        self._begun: Params | None = None

    def run(self) -> Found:
        skeleton = self._llama.skeleton
        if skeleton is not None:
            try:
                found = self._best(skeleton, self._begin)
                if self._confirm(found.trial.params) == found.trial.breakdown:
                    return found
            except LlamaCppError:
                # Whatever there is to say is to be said of the user's own file.
                pass
        return self._best(Loads(self._measure_own, self._llama.own.record), lambda params: None)

    def _best(self, loads: Loads, on_candidate: OnCandidate) -> Found:
        """The best plan, with what the user lets be given up where that makes it better."""

        def attempt(request: Request) -> Found | None:
            try:
                return self._search(request, remembered, lambda params: None)
            except LlamaCppError:
                # nobody asked for these parameters
                return None

        known: dict[Params, Breakdown] = {}

        def measure(params: Params) -> Breakdown:
            if params not in known:
                known[params] = loads.measure(params)
            return known[params]

        remembered = replace(loads, measure=measure)
        first = self._search(self._request, remembered, on_candidate)
        return improve(first, attempt, lambda found: on_candidate(found.trial.params))

    def _search(self, request: Request, loads: Loads, on_candidate: OnCandidate) -> Found:
        layouts: list[Layout] = []
        choices: list[Choice] = []

        def measure(params: Params) -> Breakdown:
            self._say(_attempt(params, self._request))
            return loads.measure(params)

        def record(params: Params) -> Layout:
            self._say(f"sizes of all tensors at a context of {params.n_ctx}")
            layouts.append(loads.record(params))
            return layouts[-1]

        trial = search(request, measure, record, on_candidate, choices.append)
        if not trial.fits or request.facts is None:
            return Found(request, trial)
        on_candidate(trial.params)
        try:
            # what a token takes in the cache is the same at every context that was recorded
            layout = layouts[-1] if layouts else loads.record(replace(trial.params, tensor_buft_overrides=()))
        except LlamaCppError:
            # the plan holds without a price
            return Found(request, trial)
        devices, placement = trial.used
        price = price_placement(request, devices, placement, trial.params, trial.breakdown, layout)
        if price is None:
            return Found(request, trial)
        bound = None
        if not changes(request):
            smallest = min(layouts or [layout], key=lambda layout: layout.n_ctx)
            bound = bound_of(request, smallest, objective_seconds(request, price.estimate))
        return Found(request, trial, price, tuple(choices[-3:]), bound)

    def _say(self, text: str) -> None:
        self._on_progress(Progress(self._llama.dummy_loads(), text))

    def _begin(self, params: Params) -> None:
        """Have a candidate confirmed while the search goes on."""
        beside = self._llama.beside
        if beside is None or params in self._own or params == self._begun or beside.awaits(params):
            return
        if beside.busy and (self._begun is not None or not self._is_loaded(params)):
            return
        self._collect()
        beside.begin(params)
        self._begun = params

    def _is_loaded(self, params: Params) -> bool:
        """Whether the second worker has the model for ``params``, or is about to."""
        beside = self._llama.beside
        loaded = self._begun or (beside.loading if beside else None)
        return loaded is not None and placement_of(loaded) == placement_of(params)

    def _collect(self) -> None:
        beside, begun, self._begun = self._llama.beside, self._begun, None
        if beside is not None and begun is not None:
            self._own[begun] = beside.finish()

    def _confirm(self, params: Params) -> Breakdown:
        """What ``params`` take on the user's own file."""
        self._say("the model's own file")
        beside = self._llama.beside
        if beside is not None and (self._is_loaded(params) or beside.awaits(params)):
            # another context of a loaded model costs next to nothing, and neither does the rest of one that waits
            self._collect()
            if params not in self._own:
                beside.begin(params)
                self._own[params] = beside.finish()
        return self._measure_own(params)

    def _measure_own(self, params: Params) -> Breakdown:
        if params not in self._own:
            self._own[params] = self._llama.own.measure(params)
        return self._own[params]


def placement_of(params: Params) -> Params:
    """What of ``params`` decides how the model is loaded; the rest is the context's."""
    return Params(
        devices=params.devices,
        n_gpu_layers=params.n_gpu_layers,
        tensor_split=params.tensor_split,
        tensor_buft_overrides=params.tensor_buft_overrides,
        split_mode=params.split_mode,
        main_gpu=params.main_gpu,
    )


def _attempt(params: Params, request: Request) -> str:
    context = ", ".join([*pulled(request, params), f"context {params.n_ctx}"])
    if not params.devices:
        return f"{context}, all on the host"
    n_gpu_layers = params.n_gpu_layers if params.n_gpu_layers >= 0 else request.n_layer + 1
    return f"{context}, {n_gpu_layers} of {request.n_layer + 1} layers on {', '.join(params.devices)}"


def _device_uses(request: Request, breakdown: Breakdown) -> tuple[DeviceUse, ...]:
    uses = []
    for device in request.devices:
        row = breakdown.on(device.name)
        uses.append(
            DeviceUse(
                device.name,
                device.description,
                device.total,
                device.free,
                device.margin,
                row.model,
                row.context,
                row.compute,
            )
        )
    return tuple(uses)


def _host_use(request: Request, breakdown: Breakdown) -> HostUse:
    host, row = request.host, breakdown.host
    return HostUse(host.total, host.free, host.margin, row.model, row.context, row.compute)


def _problems(request: Request, trial: Trial) -> tuple[Problem, ...]:
    problems = []
    for name, missing in trial.missing:
        if name == "host":
            remedy = "free host memory or leave more of the model on devices"
            if "n_ctx" in request.fixed and trial.params.n_ctx > request.n_ctx_min:
                remedy = "ask for a smaller -c, " + remedy
            if not request.host.paging:
                remedy += ", or let weights be paged from disk with --allow paging"
            used, free, margin = trial.breakdown.host.used, request.host.free or 0, request.host.margin
            where = "the host"
        else:
            device = next(device for device in request.devices if device.name == name)
            used, free, margin = trial.breakdown.on(name).used, device.free, device.margin
            where = name
            freed = [
                f"{flag} free"
                for flag, field in (("-ngl", "n_gpu_layers"), ("-ts", "tensor_split"), ("-c", "n_ctx"))
                if field in request.fixed
            ]
            if request.params.tensor_buft_overrides:
                freed.append("fewer tensors to it with -ot")
            remedy = " or ".join([*(f"leave {flag}" for flag in freed), "use a smaller margin with --fit-target"])
        problems.append(
            Problem(
                name,
                missing,
                f"{where} lacks {_mib_up(missing)} MiB: {_mib_up(used)} MiB are needed beside a margin of "
                f"{margin // MIB} MiB, and {free // MIB} MiB are free; {remedy}",
            )
        )
    return tuple(problems)


def _mib_up(size: int) -> int:
    return -(-size // MIB)
