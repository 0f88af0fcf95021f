"""Write a plan as LLMKube's Model and InferenceService (``inference.llmkube.dev/v1alpha1``).

Every parameter that has a field is there; the others are in ``extraArgs``, which the operator puts last, where
llama-server takes them instead of the operator's own.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from fitter.errors import PlanError
from fitter.model import location
from fitter.output.arguments import MODEL, OptionValue, split_files, with_absolute_paths
from fitter.planning.plan.claims import PodClaim, pod_claim
from fitter.planning.plan.plan import Plan
from fitter.programs.compose import PORT, container
from fitter.programs.kubernetes import documents, escaped, variables
from fitter.text import printable

_API = "inference.llmkube.dev/v1alpha1"
_MOST_GPUS = 8
_KINDS = {
    "nvidia.com/gpu": ("nvidia", "cuda"),
    "amd.com/gpu": ("amd", "rocm"),
    "gpu.intel.com/i915": ("intel", "intel"),
}
"""Vendor and accelerator of a resource."""
_CACHE_TYPES = ("f16", "f32", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "iq4_nl")


def _number(least: int, most: int) -> Callable[[str], int | None]:
    return lambda text: int(text) if least <= int(text) <= most else None


def _cache_type(text: str) -> str | None:
    return text if text in _CACHE_TYPES else None


_FIELDS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "-c": ("contextSize", _number(128, 2097152)),
    "-np": ("parallelSlots", _number(1, 64)),
    "-b": ("batchSize", _number(1, 16384)),
    "-ub": ("uBatchSize", _number(1, 2**31 - 1)),
    "-ctk": ("cacheTypeK", _cache_type),
    "-ctv": ("cacheTypeV", _cache_type),
    "-cmoe": ("moeCPUOffload", lambda _: True),
    "-ncmoe": ("moeCPULayers", _number(1, 2**31 - 1)),
    "-nkvo": ("noKvOffload", lambda _: True),
    "-ot": ("tensorOverrides", lambda text: [escaped(each) for each in text.split(",")]),
}
"""Field of an option, and its value; ``None`` where the field does not take it."""


def llmkube_text(plan: Plan) -> str:
    """Write both objects.

    Raises:
        PlanError: LLMKube has no word for a part of the plan, or no pod can run it.
    """
    claim, made = pod_claim(plan), container(plan)
    count = sum(claim.devices.values())
    if count > _MOST_GPUS or len(claim.devices) > 1:
        raise PlanError(f"LLMKube gives a pod {_MOST_GPUS} GPUs of one vendor at most, and this plan uses {count}")
    fields: dict[str, Any] = {}
    others: list[str] = []
    layers = None
    for each in with_absolute_paths(plan):
        name = each.option.name
        if each.option is MODEL:
            continue
        if each.option.is_file:
            raise PlanError(f"LLMKube's InferenceService has no field for the file of {name}: use kubernetes")
        field, value = _field(each, has_devices=bool(count))
        if name == "-ngl" and count and each.value.isdecimal() and int(each.value):
            layers = int(each.value)
        elif field and value is not None:
            fields[field] = value
        else:
            others += each.words
    resources = {"hostMemory": claim.quantities["memory"], **({"gpu": count} if count else {})}
    model = {"source": _source(plan), "format": "gguf", "hardware": _hardware(claim, made.image, count, layers)}
    service = {
        "modelRef": claim.name,
        "replicas": 1,
        "image": made.image,
        **fields,
        "extraArgs": [escaped(word) for word in others],
        "env": variables(),
        "resources": resources,
        "endpoint": {"port": PORT, "type": "ClusterIP"},
    }
    return documents(_object("Model", claim.name, model), _object("InferenceService", claim.name, service))


def _object(kind: str, name: str, spec: dict[str, Any]) -> dict[str, Any]:
    return {"apiVersion": _API, "kind": kind, "metadata": {"name": name}, "spec": spec}


def _field(argument: OptionValue, *, has_devices: bool) -> tuple[str, Any]:
    if argument.option.name == "-fa":
        # the operator says on only beside a GPU, and never off
        return "flashAttention", True if has_devices and argument.value == "on" else None
    field, read = _FIELDS.get(argument.option.name, ("", lambda _: None))
    return field, read(argument.value)


def _hardware(claim: PodClaim, image: str, count: int, layers: int | None) -> dict[str, Any]:
    if not count:
        return {"accelerator": "cpu"}
    (resource,) = claim.devices
    vendor, accelerator = _KINDS[resource]
    gpu: dict[str, Any] = {"enabled": True, "count": count, "vendor": vendor}
    if image.endswith("-vulkan"):
        accelerator = gpu["runtime"] = "vulkan"
    return {"accelerator": accelerator, "gpu": gpu if layers is None else {**gpu, "layers": layers}}


def _source(plan: Plan) -> str:
    """Return the model's path or address as LLMKube takes it."""
    path = plan.model.path
    if location.is_address(path):
        from fitter.model.files.addresses import addresses, as_url

        files = [each.shown for each in addresses(as_url(path) or path)] if "://" in path else [path]
    else:
        (model,) = (each.value for each in with_absolute_paths(plan) if each.option is MODEL)
        files = split_files(model)
    if len(files) > 1:
        raise PlanError(f"LLMKube's Model has one file, and this model has {len(files)}: use kubernetes")
    if not re.fullmatch(r"https?://\S+|/\S+", files[0]):
        raise PlanError(
            f"LLMKube reads a model from a path without spaces or an http address, not from {printable(files[0])}"
        )
    return files[0]
