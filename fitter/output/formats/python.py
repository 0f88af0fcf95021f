"""Write a plan as a Python script that loads the model."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from typing import Any

from fitter.errors import PlanError
from fitter.model.location import local_name
from fitter.output.formats.format_options import option_values
from fitter.parameters.kinds import Kind, Paths, Texts
from fitter.parameters.table import PARAMETERS, SHARED, LoadKeywords, taken_by
from fitter.planning.placing.host_flags import flags_among
from fitter.planning.plan.plan import Plan


def text(plan: Plan) -> str:
    """Write a script that loads the model into ``llm``.

    It calls ``llama_cpp.Llama`` if that has all the parameters. Otherwise, and beside a draft model or a projector, it
    calls ``fitter.fit`` with every parameter fixed, which measures them again on the machine that runs the script, and
    then ``plan.load()``.
    """
    from fitter.output.keywords import llama_kwargs

    path = os.path.abspath(local_name(plan.model.path))
    if not any(use.arguments for use in plan.shared if use.kind != "lora"):
        # Llama may have no parameter for something in the plan
        with suppress(PlanError):
            return _script("import llama_cpp", "llm = llama_cpp.Llama", path, llama_kwargs(plan, anyway=True))
    return _script("import fitter", "plan = fitter.fit", path, fit_kwargs(plan)) + "\nllm = plan.load()"


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


def _script(imports: str, call: str, path: str, kwargs: dict[str, Any]) -> str:
    words = [_literal(path), *(f"{name}={_literal(value)}" for name, value in kwargs.items())]
    return "\n".join([imports, "", f"{call}(", *(f"    {word}," for word in words), ")"])


def _literal(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_literal, value))}]"
    if isinstance(value, str) and value.isprintable():
        # a JSON string is a Python string in double quotes
        return json.dumps(value, ensure_ascii=False)
    return ascii(value)
