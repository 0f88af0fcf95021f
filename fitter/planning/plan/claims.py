"""Claims: what one device must have to run a model at a speed, and what a pod needs that runs a plan. Bytes."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from fitter.errors import PlanError
from fitter.planning.plan.plan import Plan, resolved
from fitter.programs import PROGRAMS
from fitter.programs.later import process_bytes
from fitter.text import MIB, mib_up

_LEAST, _MOST = 1e9, 1e15
"""Bytes per second of memory that no device falls short of or beats."""


@dataclass(frozen=True)
class DeviceClaim:
    """What one device must have to run a model at a speed, as llmfit-dra reads it."""

    model: str
    """The model as the caller named it."""
    name: str
    """A name for the claim."""
    file_type: str
    """The model's file type."""
    weights: int
    """Bytes of all tensors."""
    memory: int
    """Bytes of memory that a card must have by its datasheet for all of the model, with its context."""
    bandwidth: float
    """Bytes per second that a card's datasheet must say."""
    min_tps: float
    """Tokens per second of generation that are asked for."""
    efficiency: int
    """Percent of the bandwidth that reading the weights alone takes."""
    version: str
    """Version of fitter."""

    @property
    def memory_gib(self) -> int:
        """``memory`` in whole GiB, rounded up."""
        return math.ceil(self.memory / (1024 * MIB))

    @property
    def bandwidth_gb(self) -> int:
        """``bandwidth`` in whole GB per second, rounded up."""
        return math.ceil(self.bandwidth / 1e9)

    @property
    def weights_gb(self) -> float:
        """``weights`` in GB."""
        return round(self.weights / 1e9, 1)


def least_bandwidth(speed: Callable[[float], float], least: float) -> float | None:
    """Return the least bandwidth at which ``speed`` reaches ``least`` tokens per second, to 10 MB per second.

    Args:
        speed: Tokens per second for a bandwidth in bytes per second; it grows with it.
        least: Tokens per second.

    Returns:
        Bytes per second; ``None`` if no bandwidth is enough.
    """
    low, high = 0.0, _LEAST
    while speed(high) < least:
        low, high = high, 2 * high
        if high > _MOST:
            return None
    while high - low > 1e7:
        middle = (low + high) / 2
        low, high = (low, middle) if speed(middle) >= least else (middle, high)
    return high


_RESOURCES = {"CUDA": "nvidia.com/gpu", "ROCm": "amd.com/gpu", "SYCL": "gpu.intel.com/i915"}
"""Resources of the vendors' device plugins, by backend."""
_VENDORS = {"nvidia": "CUDA", "geforce": "CUDA", "amd": "ROCm", "radeon": "ROCm", "intel": "SYCL"}
"""Backend whose resource a Vulkan device has, by a word of its description."""
_LOGIT = 4
"""Bytes of a token's logit."""
_LONGEST = 63
"""Most characters of a name in Kubernetes."""


@dataclass(frozen=True)
class PodClaim:
    """What a pod asks of Kubernetes to run a plan, both as requests and as limits."""

    name: str
    """A name for the claim, from the model's."""
    memory: int
    """Bytes of host memory: ``planned`` and ``process``, in whole MiB."""
    planned: int
    """Bytes that the plan counts on the host; weights that are mapped from the file count, since the system would read
    them again and again without room for them.
    """
    process: int
    """Most bytes that the process takes beside them: program, vocabulary, slots, requests, a state that is saved."""
    devices: Mapping[str, int]
    """Number of devices, by Kubernetes' name of the resource; empty without one."""

    @property
    def quantities(self) -> dict[str, str]:
        """The amounts as Kubernetes writes them."""
        return {"memory": f"{self.memory // MIB}Mi", **{name: str(count) for name, count in self.devices.items()}}


def pod_claim(plan: Plan) -> PodClaim:
    """Return the claim of a pod for ``plan``.

    Raises:
        PlanError: The plan is not for a llama-server, its memory has no limit, or a pod cannot have its devices.
    """
    logits = next((each for each in plan.later if each.kind == "logits"), None)
    program = PROGRAMS[plan.program]
    if not program.is_server or program.title or logits is None:
        raise PlanError(f"a pod runs llama-server, and the plan is for {plan.program}: fit with --for llama-server")
    if any(each.bytes is None for each in plan.later):
        raise PlanError("-cram -1 has no limit, and a pod has one: give the MiB that the prompt cache may take")
    params = resolved(plan)
    own = sum(use.on(None) for use in plan.shared if not use.is_of_others)
    pools = {name for pool in plan.pools for name in pool.members}
    in_pools = sum(use.used for use in plan.devices if use.name in pools)
    host = plan.host
    planned = host.model + host.context + host.loaded.compute + own + host.later + in_pools
    process = process_bytes(
        n_vocab=logits.each // _LOGIT,
        n_slots=params.n_seq_max,
        n_ctx=params.n_ctx or plan.breakdown.n_ctx,
        state=max((each.each for each in plan.later if each.kind == "prompt cache"), default=0),
        counted=planned,
        backends={_kind(name) for name in plan.breakdown.devices},
    )
    memory = mib_up(planned + process) * MIB
    return PodClaim(claim_name(plan.model.path), memory, planned, memory - planned, _devices(plan))


def claim_name(model: str) -> str:
    """Make a name that Kubernetes takes from a model's path, address or name."""
    last = re.sub(r"(-\d{5}-of-\d{5})?\.gguf$", "", model.partition("?")[0].rstrip("/"), flags=re.IGNORECASE)
    text = re.sub(r"[^a-z0-9]+", "-", re.split(r"[/\\]", last)[-1].lower()).strip("-")
    if not text[:1].isalpha():
        # a Service's name begins with a letter
        text = f"model-{text}"
    return text[: _LONGEST - len("-server")].strip("-")


def _devices(plan: Plan) -> dict[str, int]:
    """Count the plan's devices. A pod numbers those that it gets from 0."""
    numbers: dict[str, set[int]] = {}
    for name in plan.breakdown.devices:
        numbers.setdefault(_kind(name), set()).add(int(name[len(_kind(name)) :] or 0))
    for kind, used in numbers.items():
        if used != set(range(len(used))):
            left = min(set(range(len(used))) - used)
            raise PlanError(
                f"the plan leaves out {kind}{left}, and a pod sees only the devices that it gets, as {kind}0 and so "
                "on: fit again with no other devices than the plan uses (--gpu)"
            )
    counted: Counter[str] = Counter()
    for use in plan.devices:
        if use.name in plan.breakdown.devices:
            counted[_resource(use.name, use.description)] += 1
    return dict(counted)


def _resource(name: str, description: str) -> str:
    kind = _kind(name)
    if kind == "Vulkan":
        kind = next(iter(_words(description)), kind)
    if kind not in _RESOURCES:
        raise PlanError(
            f"no resource of Kubernetes is known for {name} ({description}): plan for CUDA, ROCm or SYCL devices, or "
            "for the host with --gpu none"
        )
    return _RESOURCES[kind]


def _words(description: str) -> Iterable[str]:
    return (kind for word, kind in _VENDORS.items() if word in description.lower())


def _kind(name: str) -> str:
    return re.sub(r"\d+$", "", name)
