"""The documents of ``fitter claim``: one with the keys that llmfit-dra reads, and one for a pod."""

from __future__ import annotations

from fitter.output.documents.document import Key, document, four_digits
from fitter.planning.plan.claims import DeviceClaim, PodClaim

DEVICE_CLAIM = document(
    DeviceClaim,
    "model",
    Key("claimName", "name"),
    Key("quant", "file_type"),
    Key("weightsGb", "weights_gb"),
    Key("memoryGi", "memory_gib"),
    Key("minBandwidthGBs", "bandwidth_gb"),
    Key("minTps", "min_tps", change=four_digits),
    Key("efficiencyPct", "efficiency"),
    Key("resolverVersion", "version"),
    title="A claim for a device, of llama-fitter",
)

POD_CLAIM = document(
    PodClaim,
    Key("claimName", "name"),
    "memory",
    "planned",
    "process",
    "devices",
    Key("requests", "quantities"),
    Key("limits", "quantities"),
    title="A claim for a pod, of llama-fitter",
)
