"""Draft models, projectors and reserved memory: from the parameters of ``fit`` to what planning adds to each device."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from fitter.errors import ModelError, UsageError
from fitter.llama.client import Worker
from fitter.llama.types import Breakdown, DeviceInfo, FlashAttn, Params, Row
from fitter.machine.machine import Machine
from fitter.machine.speed import named
from fitter.model import location
from fitter.model.files.source import show
from fitter.model.header import Model, open_model
from fitter.planning.plan.plan import Plan
from fitter.planning.request.ask import Sharing
from fitter.planning.request.request import Request
from fitter.planning.request.request_limits import layers_on_devices
from fitter.planning.request.shared import (
    DRAFT_MAX,
    Companions,
    Draft,
    Mtp,
    Projector,
    parse_reserve,
    places,
    remembered,
    reservation,
    taken,
)
from fitter.planning.request.summary import DeviceUse, SharedUse
from fitter.text import mib

_HEADS = ("eagle3", "dflash", "gemma4-assistant")
"""Architectures of draft models that run only with a context of the main model."""


_TABLE = (Row("ngram-mod", None, True, 0, 0, 4 * 2**22),)
"""The table of 2**22 tokens of 4 bytes (``common_speculative_impl_ngram_mod``); other n-gram tables grow with prompts.
"""


def other_plans(paths: Sequence[str], devices: Sequence[DeviceInfo], rpc: Sequence[str]) -> tuple[SharedUse, ...]:
    """Read plans of other models that run at the same time; return their memory.

    Each process takes memory of a card for itself, which no plan counts: as much as an idle card of its kind lacks.

    Raises:
        UsageError: A file is no plan, or the plan does not fit or is for other devices.
    """
    if not paths:
        return ()
    from fitter.output.documents.plan_document import read_plan

    known = {device.name: device for device in devices}
    uses = []
    for path in paths:
        plan, name = read_plan(path), show(Path(path))
        if not plan.fits:
            raise UsageError(f"--beside {name}: that plan does not fit, so it cannot run beside another one")
        if plan.rpc and plan.rpc != tuple(rpc):
            raise UsageError(f"--beside {name} has other rpc-servers: give --rpc {','.join(plan.rpc)} here, too")
        running = use_of(plan)
        _check_is_here(running, plan, name, known)
        uses.append(running)
    return tuple(uses)


def _check_is_here(running: SharedUse, plan: Plan, name: str, devices: Mapping[str, DeviceInfo]) -> None:
    for use in (use for use in plan.devices if running.on(use.name)):
        if use.name not in devices:
            there = ", ".join(devices) or "none"
            raise UsageError(f"--beside {name} has memory on {use.name}, which is not here; there are: {there}")
        if use.total != (here := devices[use.name]).total:
            raise UsageError(
                f"--beside {name} is for a {use.name} of {mib(use.total)} MiB, but here it has {mib(here.total)} MiB: "
                "plan that model for this machine first"
            )


def use_of(plan: Plan) -> SharedUse:
    """Return all that a plan's process takes while it runs: its real load, everything beside the model, what the
    program takes later, and what a process takes of each card for itself.
    """
    # a plan that was itself made beside others, or with reservations, has their memory among its own
    own = [use for use in plan.shared if not use.is_of_others]
    rows = []
    for use in plan.devices:
        compute = use.loaded.compute + taken(own, use.name)
        if use.model + use.context + compute:
            rows.append(Row(use.name, use.name, False, use.model, use.context, compute + bytes_of_a_process(use)))
    host = plan.host
    rows.append(Row("Host", None, True, host.model, host.context, host.loaded.compute + taken(own, None) + host.later))
    return SharedUse("beside", plan.model.path, tuple(rows))


def bytes_of_a_process(device: DeviceInfo | DeviceUse) -> int:
    """Return the bytes of a card that a process takes for itself: as many as an idle card of its kind lacks."""
    cards = named(device.description)
    if any(card.unified for card in cards):
        return 0
    return max(((card.usable or card.total) - card.free for card in cards), default=max(0, device.total - device.free))


class Drafts:
    """Dummy loads of a draft model, counted apart from the model's own; each placement and context is loaded once."""

    def __init__(self, worker: Worker, model: Model) -> None:
        self.model = model
        self._worker = worker
        self.loads = 0
        self.measure = remembered(self._measure)

    def _measure(self, params: Params) -> Breakdown:
        before = self._worker.dummy_loads
        try:
            # the worker keeps one model for each role
            return self._worker.measure(self.model.skeleton, params, role=f"draft on {','.join(params.devices or ())}")
        finally:
            self.loads += self._worker.dummy_loads - before


def open_draft(sharing: Sharing, worker: Worker) -> Drafts | None:
    """Open the draft model; return ``None`` if there is none.

    Raises:
        ModelError: llama-server cannot draft with this model alone.
    """
    if sharing.model_draft is None:
        return None
    model = open_model(sharing.model_draft, worker.header)
    check_drafts_alone(model)
    return Drafts(worker, model)


def check_drafts_alone(model: Model) -> None:
    """Raise ``ModelError`` for a draft model that runs only with a context of the main model."""
    names = {tensor.name for tensor in model.tensors}
    has_heads_alone = any(".nextn." in name for name in names) and "blk.0.attn_norm.weight" not in names
    if model.architecture in _HEADS or has_heads_alone:
        raise ModelError(
            f"{show(model.path)} ({model.architecture}) drafts with the model's own context, so it cannot be measured "
            "separately: give its memory with --reserve"
        )


def check_mtp(sharing: Sharing, model: Model) -> None:
    """Raise ``ModelError`` if the user wants multi-token prediction and ``model`` has no layers for it."""
    if sharing.mtp and not (model.n_layer_nextn and any(".nextn." in tensor.name for tensor in model.tensors)):
        raise ModelError(f"{show(model.path)} has no layers for multi-token prediction: leave {sharing.mtp_word} out")


def drafting_params(sharing: Sharing, drafts: Drafts | None, main: Params) -> Params | None:
    """Return the parameters of the drafting context for the main context ``main``; ``None`` without drafting."""
    type_k, type_v = sharing.type_k_draft or Params.type_k, sharing.type_v_draft or Params.type_v
    if drafts is not None:
        return _draft(sharing, drafts, (), type_k, type_v).params(main)
    return Mtp("", type_k, type_v, sharing.n_rs_seq, sharing.n_ubatch_draft).params(main) if sharing.mtp else None


def choices(
    sharing: Sharing,
    worker: Worker,
    model: Model,
    drafts: Drafts | None,
    machine: Machine,
    request: Request,
    more: tuple[SharedUse, ...] = (),
    *,
    may_shrink: bool = False,
) -> tuple[Companions, ...]:
    """List what shares the devices with the model, once for each choice of places.

    Args:
        sharing: The draft model, projector and reserved memory that the user wants.
        worker: Measures the projector.
        model: The main model.
        drafts: The opened draft model.
        machine: All devices and the host.
        request: The request that is planned.
        more: Further reserved memory.
        may_shrink: Whether the program can be told a micro batch for drafting.

    Returns:
        The choices; none where nothing shares the devices.
    """
    reserved = (*reservation(parse_reserve(sharing.reserve), machine.devices, machine.host_total), *more)
    type_k, type_v = sharing.type_k_draft or Params.type_k, sharing.type_v_draft or Params.type_v
    mtp = Mtp(model.path.name, type_k, type_v, sharing.n_rs_seq, sharing.n_ubatch_draft) if sharing.mtp else None
    ngrams = tuple(
        SharedUse("ngram", word, _TABLE if word == "ngram-mod" else (), words) for word, words in sharing.ngrams.items()
    )
    named_draft, named_projector = sharing.named_for_draft, sharing.named_for_projector
    is_draft_free, is_projector_free = drafts is not None and named_draft is None, False
    projector = None
    if sharing.mmproj is not None:
        is_projector_free = named_projector is None
        projector = _projector(sharing, worker, request.params.flash_attn)
    of_default = [device for device in request.devices if device.is_default]
    free = places(of_default, request.speeds, 2 if is_draft_free and is_projector_free else 4)
    # each place with its rank: a higher rank is tried only if no lower one is good enough
    drafting: list[tuple[tuple[str, ...] | None, int]] = [(named_draft or (), 0)]
    if is_draft_free:
        drafting = [*(((name,), 0) for name in free), *([(None, 1)] if len(of_default) > 1 else []), ((), 2)]
    projecting: list[tuple[str | None, int]] = [((named_projector or (None,))[0], 0)]
    if is_projector_free:
        projecting = [*((name, 0) for name in free), (None, 2)]
    every_choice = []
    for at, first in drafting:
        for on, second in projecting:
            every_choice.append(
                Companions(
                    reserved,
                    _draft(sharing, drafts, at, type_k, type_v) if drafts else None,
                    projector(on) if projector else None,
                    mtp,
                    ngrams,
                    may_shrink and sharing.n_ubatch_draft is None and sharing.drafts_with_a_model,
                    max(first, second),
                )
            )
    return tuple(every_choice) if reserved or drafts or projector or mtp or ngrams else ()


def _draft(sharing: Sharing, drafts: Drafts, at: tuple[str, ...] | None, type_k: str, type_v: str) -> Draft:
    layers = sharing.n_gpu_layers_draft
    if layers is None:
        layers = 0 if at == () else -1
    layers = layers_on_devices(layers, drafts.model.n_layer)
    n_max = sharing.draft_max or DRAFT_MAX
    return Draft(drafts.model.called, at, layers, type_k, type_v, drafts.measure, n_max, sharing.n_ubatch_draft)


def _projector(sharing: Sharing, worker: Worker, flash_attn: FlashAttn) -> Callable[[str | None], Projector]:
    """Return a function that makes the projector for a device."""
    path = sharing.mmproj or ""
    file = str(location.model_files(path)[0]) if location.is_address(path) else path
    least, most = sharing.image_min_tokens, sharing.image_max_tokens
    words = [] if least is None else ["--image-min-tokens", str(least)]
    words += [] if most is None else ["--image-max-tokens", str(most)]

    @functools.cache
    def measure(device: str | None) -> tuple[Row, ...]:
        return worker.projector(
            file,
            device=device,
            flash_attn=flash_attn,
            image_min_tokens=-1 if least is None else least,
            image_max_tokens=-1 if most is None else most,
        )

    return lambda device: Projector(location.called(path), device, tuple(words), measure)
