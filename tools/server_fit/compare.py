"""What llama-server's own fit measures and decides, beside what fitter measures and plans."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import fitter
from fitter.api.call_worker import OneLoad, one_load
from fitter.errors import LlamaCppError
from fitter.llama.client import Worker
from fitter.llama.types import Breakdown, Params, Row
from fitter.machine.gpu import parse_gpus
from fitter.planning.plan.plan import Plan
from fitter.planning.request.ask import Ask
from fitter.planning.request.shared import Draft, Mtp
from fitter.programs import PROGRAMS, Asked, facts
from tools.models import shapes
from tools.models.tiny_projector import TinyProjector, write_projector
from tools.server_fit import server
from tools.server_fit.pairs import DRAFT, Case, keywords_of, of_a_load

HOST = "host"
_PADDING = 256
"""Of a tensor on a device: libmtmd adds up tensors, what is allocated has them aligned."""
_SERVER = PROGRAMS["llama-server"]
Uses = Mapping[str, server.Bytes]
"""Model, context and compute on each device and on the host."""


@dataclass(frozen=True)
class Difference:
    """Where the two do not agree: ``what`` of which load."""

    what: str
    theirs: object
    ours: object

    def __str__(self) -> str:
        return f"{self.what}: llama-server {self.theirs}, fitter {self.ours}"


class Models:
    """The files of a comparison, written once into ``directory``."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def of(self, shape: str) -> Path:
        """The model of a shape, without a tokenizer: that is most of a load's time, and no byte of a device."""
        return shapes.write(shape, self._directory, vocab=False)

    def projector(self) -> Path:
        """A small projector."""
        path = self._directory / "projector.gguf"
        return path if path.exists() else write_projector(path, TinyProjector(n_embd_text=4096))

    def beside(self, case: Case) -> tuple[str, ...]:
        """llama-server's arguments for the files beside the model."""
        named = {"draft": ("-md", str(self.of(DRAFT))), "projector": ("--mmproj", str(self.projector()))}
        return named.get(case.feature.beside, ())


def one_load_differs(case: Case, models: Models, worker: Worker) -> list[Difference]:
    """Where a load of the case's placement is not measured the same; llama.cpp may abort in both."""
    words = (*case.pair.placement, *case.options)
    try:
        said = server.ask(
            models.of(case.pair.shape), parse_gpus(case.pair.gpus), (*words, *models.beside(case), "-fit", "on")
        )
    except server.ServerEnded as error:
        with contextlib.suppress(LlamaCppError):
            _load_differs(case, words, None, models, worker)
            return [Difference("the load", error, "a measurement")]
        return []
    return _load_differs(case, words, said, models, worker)


def _load_differs(
    case: Case, words: Sequence[str], said: server.ServerFit | None, models: Models, worker: Worker
) -> list[Difference]:
    model, gpus = models.of(case.pair.shape), parse_gpus(case.pair.gpus)
    given = keywords_of(words)
    asked = Asked(
        *(given.get(name) for name in ("n_seq_max", "kv_unified", "n_batch", "n_ubatch")),
        reads_texts=bool(given.get("embedding") or given.get("reranking")),
        drafted=case.feature.drafted,
    )
    keywords = {**of_a_load(given), **case.feature.measured, **vars(_SERVER.shape(asked, facts("llama-server")))}
    ask = Ask.of_a_load({**keywords, "gpus": case.pair.gpus, "devices": [gpu.name for gpu in gpus]})
    with one_load(ask, str(model), worker, None) as load:
        ours, _ = load.measured()
        if said is None:
            return []
        found = _of_context(said.measured[0], load.params)
        found += _of_rows("the model", said.measured[0], ours)
        beside = _beside(case, load, ours, models)
        if beside is not None:
            found += _of_rows(f"beside it the {case.feature.beside}", said.measured[1], beside)
        elif {each.path for each in said.measured} != {str(model)} or any(
            each.params["ctx_type"] for each in said.measured
        ):
            found.append(Difference("loads", len(said.measured), 1))
        if case.feature.beside == "projector":
            found += _of_projector(said, worker.projector(models.projector(), device=gpus[0].name))
    return found


def planned(case: Case, models: Models, worker: Worker, **keywords: Any) -> Plan:
    """fitter's plan for llama-server, which places the model itself, with llama-server's own micro batch."""
    more: dict[str, Any] = {
        "program": "llama-server",
        "n_ubatch": Params.n_ubatch,
        **keywords_of((*case.options, *models.beside(case))),
        **keywords,
    }
    return fitter.fit(models.of(case.pair.shape), gpus=case.pair.gpus, worker=worker, **more)


def plan_differs(plan: Plan, case: Case, models: Models) -> list[Difference]:
    """Where llama-server measures another thing with a plan's arguments than the plan says."""
    # llama-server loads virtual devices for -dev alone
    words = replace(plan, default_devices=()).arguments()
    said = server.ask(models.of(case.pair.shape), parse_gpus(case.pair.gpus), (*words, "-fit", "on"))
    ours = {
        **{each.name: (each.model, each.context, each.compute) for each in plan.devices},
        HOST: (plan.host.model, plan.host.context, plan.host.compute),
    }
    found = _of_context(said.measured[0], plan.params)
    found += _of_uses("the model", _uses(said.measured[0].rows.items()), ours)
    shared = [each for each in plan.shared if each.kind in ("draft", "mtp")]
    for each, theirs in zip(shared, said.measured[1:], strict=False):
        rows = {row.device or HOST: (row.model, row.context, row.compute) for row in each.rows}
        beside = _uses(theirs.rows.items())
        if each.kind == "mtp":
            # they are the weights of the first context
            beside = {place: (0, context, compute) for place, (_, context, compute) in beside.items()}
        found += _of_uses(f"beside it the {each.kind}", beside, rows)
    for each in plan.shared:
        if each.kind == "projector":
            found += _of_projector(said, each.rows)
    return found


@dataclass(frozen=True)
class Fitted:
    """llama-server's own fit: ``measured`` with its context and placement, ``is_over``: more than the margins leave."""

    decided: server.Decided
    measured: Breakdown
    is_over: bool

    @property
    def on_devices(self) -> int:
        """Bytes of weights that it puts on devices."""
        return sum(row.model for row in self.measured.rows if not row.is_host)


def fitted(case: Case, models: Models, worker: Worker, plan: Plan) -> Fitted | None:
    """What llama-server decides itself where nothing of the placement is given; ``None`` where it gives up."""
    model, gpus = models.of(case.pair.shape), parse_gpus(case.pair.gpus)
    said = server.ask(model, gpus, (*case.options, *models.beside(case)))
    decided = said.decided
    if decided is None or not decided.succeeded:
        return None
    names = ("n_ctx", "n_batch", "n_ubatch", "n_seq_max", "n_outputs_max", "n_rs_seq")
    keywords: dict[str, Any] = {
        **of_a_load(keywords_of(case.options)),
        **case.feature.measured,
        **{name: decided.params[name] for name in names},
        "kv_unified": bool(decided.params["kv_unified"]),
        "n_gpu_layers": decided.n_gpu_layers,
        "tensor_split": decided.tensor_split,
        "override_tensor": decided.override_tensor,
        "devices": [gpu.name for gpu in gpus],
    }
    ask = Ask.of_a_load({**keywords, "gpus": case.pair.gpus})
    with one_load(ask, str(model), worker, None) as load:
        measured, _ = load.measured()
        beside = _beside(case, load, measured, models)
    used = {each.name: measured.on(each.name).used for each in plan.devices}
    for each in plan.devices:
        row = beside.on(each.name) if beside is not None else None
        if row is not None:
            # the second context of a model has its weights from the first
            used[each.name] += row.context + row.compute + (0 if case.feature.beside == "mtp" else row.model)
        if case.feature.beside == "projector":
            used[each.name] += each.shared
    is_over = any(used[each.name] > each.free - each.margin for each in plan.devices)
    return Fitted(decided, measured, is_over)


def compare_plan(case: Case, models: Models, worker: Worker) -> tuple[list[str], str]:
    """Where a plan is not what llama-server measures, or gets less context or weights on devices than its own fit.

    Beside it why its own fit was not compared, '' where it was.
    """
    try:
        plan = planned(case, models, worker)
    except LlamaCppError as error:
        return [], f"no plan ({error})"
    if not plan.fits:
        return [], "no plan fits"
    said = [str(each) for each in plan_differs(plan, case, models)]
    theirs = fitted(case, models, worker, plan)
    if theirs is None:
        return said, "llama-server's fit gives up"
    if theirs.is_over:
        return said, "llama-server's fit takes more than the margins leave"
    n_ctx = theirs.decided.params["n_ctx"]
    if plan.params.n_ctx < n_ctx:
        said.append(f"context: llama-server {n_ctx}, fitter {plan.params.n_ctx}")
    full = planned(case, models, worker, strategy="llama.cpp")
    ours = sum(each.model for each in full.devices)
    if full.params.n_ctx <= n_ctx and ours < theirs.on_devices:
        said.append(f"weights on devices: llama-server {theirs.on_devices}, fitter {ours}")
    return said, ""


def _beside(case: Case, load: OneLoad, main: Breakdown, models: Models) -> Breakdown | None:
    params, given = replace(load.params, n_ctx=main.n_ctx), keywords_of(case.feature.options)
    type_k, type_v = given.get("type_k_draft", Params.type_k), given.get("type_v_draft", Params.type_v)
    if case.feature.beside == "draft":
        path = str(models.of(DRAFT))
        where, layers = given.get("devices_draft"), given.get("n_gpu_layers_draft", -1)
        draft = Draft(path, where, layers, type_k, type_v, load.worker.measure)
        return load.worker.measure(path, draft.params(params))
    if case.feature.beside == "mtp":
        return load.worker.measure(str(load.model.path), Mtp("", type_k, type_v).params(params))
    return None


def _of_projector(said: server.ServerFit, ours: Sequence[Row]) -> list[Difference]:
    theirs, n_bytes = sum(said.projector.values()), sum(row.used for row in ours)
    is_near = theirs <= n_bytes <= theirs + _PADDING * 100
    return [] if is_near else [Difference("the projector", theirs, n_bytes)]


def _of_context(theirs: server.Measured, ours: Params) -> list[Difference]:
    names = {
        "n_ctx": ours.n_ctx,
        "n_batch": ours.n_batch,
        "n_ubatch": ours.n_ubatch,
        "n_seq_max": ours.n_seq_max,
        "n_rs_seq": ours.n_rs_seq,
        # all of a batch are 0 here
        "n_outputs_max": ours.n_outputs_max or ours.n_batch,
        "embeddings": int(ours.embeddings),
        "kv_unified": int(ours.kv_unified),
    }
    if ours.n_seq_max == 1:
        # one sequence takes the same with it and without, so plans leave it out
        del names["kv_unified"]
    return [each for name, value in names.items() for each in _different(name, theirs.params[name], value)]


def _of_rows(what: str, theirs: server.Measured, ours: Breakdown) -> list[Difference]:
    rows = {
        (row.buffer_type, "" if row.is_host else row.device or "", row.is_host): (row.model, row.context, row.compute)
        for row in ours.rows
        if row.used
    }
    return [
        each
        for key in sorted({*rows, *theirs.rows})
        for each in _different(f"{what}, {key[0]}", theirs.rows.get(key), rows.get(key))
    ]


def _uses(rows: Iterable[tuple[server.Key, server.Bytes]]) -> dict[str, server.Bytes]:
    found: dict[str, server.Bytes] = {}
    for (_, device, is_host), (model, context, compute) in rows:
        place = HOST if is_host else device or HOST
        before = found.get(place, (0, 0, 0))
        found[place] = (before[0] + model, before[1] + context, before[2] + compute)
    return found


def _of_uses(what: str, theirs: Uses, ours: Uses) -> list[Difference]:
    nothing = (0, 0, 0)
    return [
        each
        for place in sorted({*theirs, *ours})
        for each in _different(f"{what} on {place}", theirs.get(place, nothing), ours.get(place, nothing))
    ]


def _different(what: str, theirs: object, ours: object) -> list[Difference]:
    return [] if theirs == ours else [Difference(what, theirs, ours)]
