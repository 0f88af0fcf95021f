"""Write a plan as keyword arguments of ``llama_cpp.Llama``, and of ``fitter.fit``."""

from __future__ import annotations

import os
from typing import Any

from fitter.errors import PlanError
from fitter.llama.types import Params
from fitter.output.arguments import option_values
from fitter.parameters.kinds import Kind, Paths, Texts
from fitter.parameters.table import MAX_SEQUENCES, PARAMETERS, SHARED, LoadKeywords, Parameter, of_a_load, taken_by
from fitter.planning.placing.host_flags import flags_among
from fitter.planning.plan.plan import Plan, check_fits


def llama_kwargs(plan: Plan, *, anyway: bool = False) -> dict[str, Any]:
    """List keyword arguments that make ``llama_cpp.Llama`` allocate the measured bytes of ``plan``.

    By default ``Llama`` maps host weights from the file; with ``use_mmap=False``, which is included where prompts are
    faster with it, they are allocated, and every buffer type takes exactly the predicted bytes.

    Raises:
        PlanError: ``Llama`` has no parameter for something in the plan, or the plan does not fit and ``anyway`` is
            false.
    """
    if not anyway:
        check_fits(plan)
    params = plan.params
    needs = {
        "devices of rpc-servers": bool(plan.rpc),
        "tensor overrides": bool(params.tensor_buft_overrides),
        "the list of devices": params.devices is not None and not _are_default(plan),
        "more than one sequence": (params.n_seq_max, params.kv_unified) not in _sequences(params),
        "the layers for multi-token prediction": params.load_mtp,
        "as few outputs as this plan counts": bool(params.n_outputs_max),
        **{
            name: True
            for name, _ in params.more
            if of_a_load()[name].native and not of_a_load()[name].is_keyword_of_llama
        },
    }
    for need, is_needed in needs.items():
        if is_needed:
            raise PlanError(f"llama_cpp.Llama has no parameter for {need}, which this plan needs: use plan.load()")
    return keywords(plan) | mapping(plan)


def _sequences(params: Params) -> tuple[tuple[int, bool], ...]:
    """Return the combinations of ``n_seq_max`` and ``kv_unified`` that ``Llama`` itself uses."""
    if params.embeddings:
        return ((min(params.n_batch, params.n_ctx or params.n_batch, MAX_SEQUENCES), True),)
    return ((1, False), (1, True))


def _are_default(plan: Plan) -> bool:
    """Return whether the plan's devices are llama.cpp's default here."""
    from fitter.llama.load.backend_devices import default_names

    return not plan.virtual and plan.params.devices == default_names()


def keywords(plan: Plan) -> dict[str, Any]:
    """List the parameters that are keywords of ``llama_cpp.Llama``. Raises ``PlanError`` for two or more adapters."""
    parameters = [each for each in of_a_load().values() if each.native and each.is_keyword_of_llama]
    logits_all = {"logits_all": True} if plan.params.of_parameter(PARAMETERS["logits_all"]) else {}
    return {each.name: _value(plan, each) for each in parameters} | logits_all | _adapter(plan)


def mapping(plan: Plan) -> dict[str, bool]:
    """Return keywords of ``Llama`` for the load mode, if it is not ``Llama``'s default, to map the file."""
    return _MAPPING.get(plan.params.of_parameter(PARAMETERS["load_mode"]), {})


_MAPPING = {
    "none": {"use_mmap": False},
    "mlock": {"use_mmap": False, "use_mlock": True},
    "mmap+mlock": {"use_mlock": True},
}


def _value(plan: Plan, each: Parameter) -> Any:
    """Return the value of one keyword of ``Llama``."""
    value = plan.params.of_parameter(each)
    if each.key == "n_ctx":
        return value or plan.breakdown.n_ctx
    if each.key == "tensor_split":
        return None if value is None else list(value)
    if each.key == "flash_attn":
        # Llama has no "auto": use llama.cpp's choice in the measurement
        return value != "off" if plan.breakdown.flash_attn is None else plan.breakdown.flash_attn
    return each.kind.native(str(each.key), value)


def _adapter(plan: Plan) -> dict[str, Any]:
    adapters = plan.params.lora
    if len(adapters) > 1:
        raise PlanError(f"llama_cpp.Llama takes one LoRA adapter, but the plan has {len(adapters)}: fit with one")
    return {"lora_path": adapters[0].path, "lora_scale": adapters[0].scale} if adapters else {}


def fit_kwargs(plan: Plan) -> dict[str, Any]:
    """List keyword arguments of ``fitter.fit`` that fix every parameter, so that it makes the same plan."""
    pins = {
        each.name: plan.params.of_parameter(each)
        for each in taken_by(LoadKeywords)
        if each.key and each.section != SHARED
    }
    flags = flags_among(plan.params.tensor_buft_overrides)
    others = [each for each in plan.params.tensor_buft_overrides if each not in flags]
    devices = plan.breakdown.devices if plan.params.devices is None else plan.params.devices
    margins = {device.name: device.margin for device in plan.devices}
    pins |= {
        "n_ctx": plan.params.n_ctx or plan.breakdown.n_ctx,
        "tensor_split": list(plan.params.tensor_split or ()),
        "override_tensor": [PARAMETERS["override_tensor"].kind.word([each]) for each in others],
        **dict(flags.values()),
        "devices": list(devices) or ["none"],
        "margin": [margins[name] for name in devices],
        "host_margin": plan.host.margin,
        "allow": [lever for lever in plan.levers if lever == "paging"],
        "rpc": list(plan.rpc),
        "program": plan.program,
        **_shared_kwargs(plan),
    }
    return {name: value for name, value in pins.items() if value != []}


def _shared_kwargs(plan: Plan) -> dict[str, Any]:
    """List keyword arguments of ``fitter.fit`` for draft models, vision and LoRA, in the same places as in ``plan``."""
    keywords: dict[str, Any] = {}
    shared = {each.option: each for each in PARAMETERS.values() if each.section == SHARED}
    for argument in option_values(plan):
        each, value = shared.get(argument.option.name), argument.value
        if each is not None:
            keywords[each.name] = _shared_value(each.kind, value)
    ways = keywords.pop("spec_type", [])
    # a draft model needs no keyword, and the model's own layers have one that all programs know
    if "draft-mtp" in ways:
        keywords["mtp"] = True
    if ngrams := [way for way in ways if not way.startswith("draft-")]:
        keywords["spec_type"] = ngrams
    others = [row for use in plan.shared if use.is_of_others for row in use.rows]
    if others:
        keywords["reserve"] = [f"{row.device or 'host'}={row.used}B" for row in others]
    return keywords


def _shared_value(kind: Kind, word: str) -> Any:
    if isinstance(kind, Texts):
        parts = word.split(",")
        return list(map(os.path.abspath, parts)) if isinstance(kind, Paths) else parts
    return os.path.abspath(word) if kind.is_file else kind.parse(word)
