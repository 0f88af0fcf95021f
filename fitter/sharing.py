"""What ``fit`` is asked to leave memory for: from the user's words to what planning counts."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from fitter.errors import ModelError, UsageError
from fitter.llama.client import Worker
from fitter.llama.types import Breakdown, DeviceInfo, FlashAttn, Params, Row
from fitter.machine.speed import DeviceSpeed
from fitter.model.header import Model, open_model
from fitter.model.source import show
from fitter.parameters import DEFAULTS
from fitter.planning.limits import layers_on_devices
from fitter.planning.request import DeviceLimit
from fitter.planning.shared import (
    DRAFT_MAX,
    Draft,
    Mtp,
    Projector,
    Shared,
    parse_reserve,
    places,
    remembered,
    reservation,
)

_HEADS = ("eagle3", "dflash", "gemma4-assistant")
"""Architectures of draft models that only run beside a context of the main one."""


@dataclass(frozen=True)
class Asked:
    """The parameters of ``fit`` that are about what shares the memory, as they were given."""

    reserve: Mapping[str, int] | tuple[str, ...] = DEFAULTS["reserve"]
    model_draft: str | None = DEFAULTS["model_draft"]
    devices_draft: tuple[str, ...] | None = DEFAULTS["devices_draft"]
    n_gpu_layers_draft: int | None = DEFAULTS["n_gpu_layers_draft"]
    type_k_draft: str | None = DEFAULTS["type_k_draft"]
    type_v_draft: str | None = DEFAULTS["type_v_draft"]
    mtp: bool = DEFAULTS["mtp"]
    draft_max: int | None = DEFAULTS["draft_max"]
    mmproj: str | None = DEFAULTS["mmproj"]
    mmproj_device: str | None = DEFAULTS["mmproj_device"]
    image_min_tokens: int | None = DEFAULTS["image_min_tokens"]
    image_max_tokens: int | None = DEFAULTS["image_max_tokens"]

    @classmethod
    def of(cls, checked: Mapping[str, Any]) -> Asked:
        """What is asked with these keywords; those that are not there are not set."""
        return cls(**{field.name: checked[field.name] for field in fields(cls) if field.name in checked})

    def check(self) -> None:
        """Raise ``UsageError`` for what makes no sense whatever the model and the machine."""
        parse_reserve(self.reserve)
        if self.model_draft is not None and self.mtp:
            raise UsageError(
                "a draft model and the model's own layers (--mtp) cannot draft both: leave one of them out"
            )
        value: object
        for option, value in (("-devd", self.devices_draft), ("-ngld", self.n_gpu_layers_draft)):
            if value is not None and self.model_draft is None:
                raise UsageError(f"{option} is about a draft model: name one with -md, or leave it out")
        if len(set(named := _devices(self.devices_draft) or ())) != len(named):
            raise UsageError("a device of the draft model is named twice: leave one out")
        for option, value in (("-ctkd", self.type_k_draft), ("-ctvd", self.type_v_draft)):
            if value is not None and self.model_draft is None and not self.mtp:
                raise UsageError(f"{option} is about drafting: use it with -md or --mtp, or leave it out")
        if self.draft_max is not None and not self.mtp:
            raise UsageError("--spec-draft-n-max only affects memory with --mtp: leave it out")
        images = (("--image-min-tokens", self.image_min_tokens), ("--image-max-tokens", self.image_max_tokens))
        for option, value in (("-mmdev", self.mmproj_device), *images):
            if value is not None and self.mmproj is None:
                raise UsageError(f"{option} is about a projector: name one with --mmproj, or leave it out")

    @property
    def n_rs_seq(self) -> int:
        """States of a recurrent model that llama-server keeps for tokens that are taken back."""
        return (self.draft_max or DRAFT_MAX) if self.mtp else 0

    @property
    def names(self) -> tuple[str, ...]:
        """Devices that are named for something else than the model."""
        of_projector = _devices(None if self.mmproj_device is None else (self.mmproj_device,)) or ()
        return tuple(dict.fromkeys((*(_devices(self.devices_draft) or ()), *of_projector)))


class Drafts:
    """Dummy loads of a draft model, counted apart from those of the model: each placement and context once."""

    def __init__(self, worker: Worker, model: Model) -> None:
        self._worker = worker
        self._path = str(model.path)
        self.loads = 0
        self.measure = remembered(self._measure)

    def _measure(self, params: Params) -> Breakdown:
        before = self._worker.dummy_loads
        try:
            # one model is kept for each place
            return self._worker.measure(self._path, params, role=f"draft on {','.join(params.devices or ())}")
        finally:
            self.loads += self._worker.dummy_loads - before


def open_draft(asked: Asked, worker: Worker) -> Model | None:
    """The draft model, ``None`` without one. Raises ``ModelError`` where llama-server would not draft with it alone."""
    if asked.model_draft is None:
        return None
    model = open_model(asked.model_draft, worker.header)
    names = {tensor.name for tensor in model.tensors}
    has_heads_alone = any(".nextn." in name for name in names) and "blk.0.attn_norm.weight" not in names
    if model.architecture in _HEADS or has_heads_alone:
        raise ModelError(
            f"{show(model.path)} ({model.architecture}) drafts with the model's own context, so it cannot be measured "
            "separately: give its memory with --reserve"
        )
    return model


def check_mtp(asked: Asked, model: Model) -> None:
    """Raise ``ModelError`` where layers for multi-token prediction are asked for and the model has none."""
    if asked.mtp and not (model.n_layer_nextn and any(".nextn." in tensor.name for tensor in model.tensors)):
        raise ModelError(f"{show(model.path)} has no layers for multi-token prediction: leave --mtp out")


def choices(
    asked: Asked,
    worker: Worker,
    model: Model,
    draft: Model | None,
    drafts: Drafts | None,
    flash_attn: FlashAttn,
    machine: Sequence[DeviceInfo],
    host_total: int | None,
    limits: Sequence[DeviceLimit],
    speeds: Mapping[str, DeviceSpeed],
) -> tuple[Shared, ...]:
    """What shares the memory, once for each choice of places; nothing where nothing but LoRA adapters does."""
    reserved = reservation(parse_reserve(asked.reserve), machine, host_total)
    type_k, type_v = asked.type_k_draft or Params.type_k, asked.type_v_draft or Params.type_v
    mtp = Mtp(model.path.name, type_k, type_v, asked.n_rs_seq) if asked.mtp else None
    named_draft = _devices(asked.devices_draft)
    named_projector = None if asked.mmproj_device is None else _devices((asked.mmproj_device,))
    is_draft_free, is_projector_free = draft is not None and named_draft is None, False
    projector = None
    if asked.mmproj is not None:
        is_projector_free = named_projector is None
        projector = _projector(asked, worker, flash_attn)
    free = places(limits, speeds, 2 if is_draft_free and is_projector_free else 4)
    # a place and which resort it is
    drafting: list[tuple[tuple[str, ...] | None, int]] = [(named_draft or (), 0)]
    if is_draft_free:
        drafting = [*(((name,), 0) for name in free), *([(None, 1)] if len(limits) > 1 else []), ((), 2)]
    projecting: list[tuple[str | None, int]] = [((named_projector or (None,))[0], 0)]
    if is_projector_free:
        projecting = [*((name, 0) for name in free), (None, 2)]
    found = []
    for at, first in drafting:
        for on, second in projecting:
            found.append(
                Shared(
                    reserved,
                    _draft(asked, draft, at, type_k, type_v, drafts) if draft and drafts else None,
                    projector(on) if projector else None,
                    mtp,
                    resort=max(first, second),
                )
            )
    return tuple(found) if reserved or draft or projector or mtp else ()


def _draft(asked: Asked, model: Model, at: tuple[str, ...] | None, type_k: str, type_v: str, drafts: Drafts) -> Draft:
    layers = asked.n_gpu_layers_draft
    if layers is None:
        layers = 0 if at == () else -1
    layers = layers_on_devices(layers, model.n_layer)
    return Draft(str(model.path), at, layers, type_k, type_v, drafts.measure)


def _projector(asked: Asked, worker: Worker, flash_attn: FlashAttn) -> Callable[[str | None], Projector]:
    """The projector in the place that is asked for."""
    path = asked.mmproj or ""
    least, most = asked.image_min_tokens, asked.image_max_tokens
    words = [] if least is None else ["--image-min-tokens", str(least)]
    words += [] if most is None else ["--image-max-tokens", str(most)]

    @functools.cache
    def measure(device: str | None) -> tuple[Row, ...]:
        return worker.projector(
            path,
            device=device,
            flash_attn=flash_attn,
            image_min_tokens=-1 if least is None else least,
            image_max_tokens=-1 if most is None else most,
        )

    return lambda device: Projector(path, device, tuple(words), measure)


def _devices(names: Sequence[str] | None) -> tuple[str, ...] | None:
    if names is None:
        return None
    return () if [name.lower() for name in names] == ["none"] else tuple(names)
