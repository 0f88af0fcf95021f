"""Write a plan as a Deployment and a Service of Kubernetes that start llama-server with an image of llama.cpp's own."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fitter.errors import PlanError
from fitter.planning.plan.claims import PodClaim, pod_claim
from fitter.planning.plan.plan import Plan
from fitter.programs.compose import PORT, Container, container
from fitter.programs.later import ENVIRONMENT

_HEALTH = {"httpGet": {"path": "/health", "port": "http"}}
_PROBES = {
    # a large model may load for an hour, and a busy server answers late
    "startupProbe": {**_HEALTH, "periodSeconds": 5, "failureThreshold": 720},
    "readinessProbe": {**_HEALTH, "periodSeconds": 5},
    "livenessProbe": {**_HEALTH, "periodSeconds": 30, "timeoutSeconds": 10, "failureThreshold": 4},
}


def kubernetes_text(plan: Plan) -> str:
    """Write a Deployment whose pod has requests and limits, and a Service. The files are mounted from the node.

    Raises:
        PlanError: No image has the plan's devices, or a pod cannot have them, its memory or its files.
    """
    claim, made = pod_claim(plan), container(plan)
    labels = {"app": claim.name}
    metadata = {"name": claim.name, "labels": labels}
    deployment = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": metadata,
        "spec": {
            "replicas": 1,
            # two pods would need the devices twice
            "strategy": {"type": "Recreate"},
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": _pod(claim, made)},
        },
    }
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata,
        "spec": {"selector": labels, "ports": [{"name": "http", "port": PORT, "targetPort": "http"}]},
    }
    return documents(deployment, service)


def variables() -> list[dict[str, str]]:
    """List the environment with which the claim's memory holds."""
    return [{"name": name, "value": value} for name, value in ENVIRONMENT.items()]


def _pod(claim: PodClaim, made: Container) -> dict[str, Any]:
    for target in made.files.values():
        if ":" in target:
            raise PlanError(f"Kubernetes mounts no file with a colon in its name, such as {target}: rename it")
    named = {f"file-{number}": file for number, file in enumerate(made.files)}
    volumes = [{"name": name, "hostPath": {"path": file, "type": "File"}} for name, file in named.items()]
    mounts = [{"name": name, "mountPath": made.files[file], "readOnly": True} for name, file in named.items()]
    server = {
        "name": "llama-server",
        "image": made.image,
        "args": [escaped(word) for words in made.options for word in words],
        "env": variables(),
        "ports": [{"name": "http", "containerPort": PORT}],
        "resources": {"requests": claim.quantities, "limits": claim.quantities},
        **_PROBES,
        "volumeMounts": mounts,
    }
    return {"enableServiceLinks": False, "containers": [server], "volumes": volumes}


def documents(*objects: Mapping[str, Any]) -> str:
    """Write several objects of Kubernetes into one file."""
    return "\n---\n".join("\n".join(_yaml(each)) for each in objects)


def escaped(word: str) -> str:
    """Escape an argument of a container, in which Kubernetes takes ``$(NAME)`` for a variable and ``$$`` for ``$``."""
    return re.sub(r"\$(?=[$(])", "$$", word)


def _yaml(value: Mapping[str, Any] | Sequence[Any]) -> Iterator[str]:
    entries = value.items() if isinstance(value, Mapping) else [("-", each) for each in value]
    for key, each in entries:
        mark = key if key == "-" else f"{key}:"
        if isinstance(each, str) or not isinstance(each, (Mapping, Sequence)):
            yield f"{mark} {json.dumps(each, ensure_ascii=False)}"
        elif not each:
            yield f"{mark} {'{}' if isinstance(each, Mapping) else '[]'}"
        elif key == "-":
            first, *rest = _yaml(each)
            yield f"- {first}"
            yield from (f"  {line}" for line in rest)
        else:
            yield mark
            yield from (f"  {line}" for line in _yaml(each))
