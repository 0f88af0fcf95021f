"""What ``fit`` is asked to leave memory for: from the user's words to what planning counts."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fitter.errors import ModelError, UsageError
from fitter.llama.client import Worker
from fitter.llama.types import Breakdown, DeviceInfo, Params
from fitter.machine.speed import DeviceSpeed
from fitter.model.header import Model, open_model
from fitter.model.source import show
from fitter.planning.request import DeviceLimit
from fitter.planning.shared import (
    DRAFT_MAX,
    Draft,
    Mtp,
    Shared,
    draft_places,
    parse_reserve,
    remembered,
    reservation,
)

_HEADS = ("eagle3", "dflash", "gemma4-assistant")
"""Architectures of draft models that only run beside a context of the main one."""


@dataclass(frozen=True)
class Asked:
    """The parameters of ``fit`` that are about what shares the memory, as they were given."""

    reserve: Mapping[str, int | str] | Sequence[str] = ()
    model_draft: str | os.PathLike[str] | None = None
    devices_draft: Sequence[str] | None = None
    n_gpu_layers_draft: int | None = None
    type_k_draft: str | None = None
    type_v_draft: str | None = None
    mtp: bool = False
    draft_max: int | None = None

    def check(self) -> None:
        """Raise ``UsageError`` for what makes no sense whatever the model and the machine."""
        parse_reserve(self.reserve)
        if self.model_draft is not None and self.mtp:
            raise UsageError(
                "a draft model and the model's own layers (--mtp) cannot draft both: leave one of them out"
            )
        for option, value in (("-devd", self.devices_draft), ("-ngld", self.n_gpu_layers_draft)):
            if value is not None and self.model_draft is None:
                raise UsageError(f"{option} is about a draft model: name one with -md, or leave it out")
        for option, value in (("-ctkd", self.type_k_draft), ("-ctvd", self.type_v_draft)):
            if value is not None and self.model_draft is None and not self.mtp:
                raise UsageError(f"{option} is about drafting: use it with -md or --mtp, or leave it out")
        if self.draft_max is not None and not self.mtp:
            raise UsageError("--spec-draft-n-max changes the memory with --mtp only: leave it out")
        if self.draft_max is not None and self.draft_max < 1:
            raise UsageError(f"--spec-draft-n-max is {self.draft_max}: it must be 1 or more")

    @property
    def n_rs_seq(self) -> int:
        """States of a recurrent model that llama-server keeps for tokens that are taken back."""
        return (self.draft_max or DRAFT_MAX) if self.mtp else 0

    @property
    def names(self) -> tuple[str, ...]:
        """Devices that are named for something else than the model."""
        return _devices(self.devices_draft) or ()


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
            "alone: give its memory with --reserve"
        )
    return model


def check_mtp(asked: Asked, model: Model) -> None:
    """Raise ``ModelError`` where layers for multi-token prediction are asked for and the model has none."""
    if asked.mtp and not (model.n_layer_nextn and any(".nextn." in tensor.name for tensor in model.tensors)):
        raise ModelError(f"{show(model.path)} has no layers for multi-token prediction: leave --mtp out")


def choices(
    asked: Asked,
    model: Model,
    draft: Model | None,
    drafts: Drafts | None,
    machine: Sequence[DeviceInfo],
    host_total: int | None,
    limits: Sequence[DeviceLimit],
    speeds: Mapping[str, DeviceSpeed],
) -> tuple[Shared, ...]:
    """What shares the memory, once for each place that a draft model may have; nothing where nothing does."""
    fixed = reservation(parse_reserve(asked.reserve), machine, host_total)
    type_k, type_v = asked.type_k_draft or Params.type_k, asked.type_v_draft or Params.type_v
    if draft is None or drafts is None:
        mtp = Mtp(model.path.name, type_k, type_v, asked.n_rs_seq) if asked.mtp else None
        return (Shared(fixed, mtp=mtp),) if fixed or mtp else ()
    named = _devices(asked.devices_draft)
    places = draft_places(limits, speeds) if named is None else (named,)

    def n_gpu_layers(place: tuple[str, ...]) -> int:
        if asked.n_gpu_layers_draft is not None:
            return asked.n_gpu_layers_draft
        return -1 if place else 0

    return tuple(
        Shared(fixed, Draft(str(draft.path), place, n_gpu_layers(place), type_k, type_v, drafts.measure))
        for place in places
    )


def _devices(names: Sequence[str] | None) -> tuple[str, ...] | None:
    if names is None:
        return None
    return () if [name.lower() for name in names] == ["none"] else tuple(names)
