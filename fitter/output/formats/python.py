"""A plan as a Python script that loads the model."""

from __future__ import annotations

import json
import os
from typing import Any

from fitter.errors import PlanError
from fitter.output.formats.settings import settings
from fitter.planning.plan import PlanData


def text(plan: PlanData) -> str:
    """A script that leaves the loaded model in ``llm``.

    ``llama_cpp.Llama`` takes the parameters itself where it has all of them; else the script has fitter measure exactly
    these once more, on the machine that runs it, and load them. Raises :class:`PlanError` where the plan does not fit.
    """
    from fitter.output.llama_cpp import llama_kwargs

    if not plan.fits:
        raise PlanError(f"the plan does not fit: {plan.problems[0].message}")
    path = os.path.abspath(plan.model.path)
    try:
        return _script("import llama_cpp", "llm = llama_cpp.Llama", path, llama_kwargs(plan))
    except PlanError:
        # Llama has no parameter for something of it
        pass
    return _script("import fitter", "plan = fitter.fit", path, fit_kwargs(plan)) + "\nllm = plan.load()"


def fit_kwargs(plan: PlanData) -> dict[str, Any]:
    """Keyword arguments of ``fitter.fit`` that leave it nothing to choose: what it measures is what ``plan`` is."""
    params = plan.params
    devices = plan.breakdown.devices if params.devices is None else params.devices
    overrides = [part for each in settings(plan) if each.option.name == "-ot" for part in each.value.split(",")]
    margins = {device.name: device.margin for device in plan.devices}
    pins: dict[str, Any] = {
        "n_ctx": params.n_ctx or plan.breakdown.n_ctx,
        "devices": list(devices) or ["none"],
        "n_gpu_layers": params.n_gpu_layers,
        "tensor_split": None if params.tensor_split is None else list(params.tensor_split),
        "override_tensor": overrides,
        "split_mode": params.split_mode,
        "main_gpu": params.main_gpu,
        "n_batch": params.n_batch,
        "n_ubatch": params.n_ubatch,
        "n_seq_max": params.n_seq_max,
        "kv_unified": params.kv_unified,
        "type_k": params.type_k,
        "type_v": params.type_v,
        "flash_attn": params.flash_attn,
        "offload_kqv": params.offload_kqv,
        "op_offload": params.op_offload,
        "swa_full": params.swa_full,
        "margin": [margins[name] for name in devices],
        "host_margin": plan.host.margin,
        "allow": [lever for lever in plan.levers if lever == "paging"],
        "rpc": list(plan.rpc),
    }
    return {name: value for name, value in pins.items() if value is not None and value != []}


def _script(imports: str, call: str, path: str, kwargs: dict[str, Any]) -> str:
    words = [_literal(path), *(f"{name}={_literal(value)}" for name, value in kwargs.items())]
    return "\n".join([imports, "", f"{call}(", *(f"    {word}," for word in words), ")"])


def _literal(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_literal, value))}]"
    # JSON's strings are Python's, in double quotes
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)
