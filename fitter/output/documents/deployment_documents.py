"""The documents of what runs plans: ``fitter fleet --json``, and the claims of ``fitter claim``."""

from __future__ import annotations

from fitter.output.documents.document import Key, document, four_digits, rounded
from fitter.output.documents.plan_document import PLAN
from fitter.planning.fleet.fleet import Disk, Fleet, FleetModel, PlaceUse, ResidentSet, Swap
from fitter.planning.plan.claims import DeviceClaim, PodClaim

FLEET = document(
    Fleet,
    "fits",
    "goal",
    Key(
        "models",
        of=document(
            FleetModel,
            "name",
            *map(rounded, ("share", "seconds", "alone_seconds", "load_seconds", "lost_seconds", "miss")),
            "needs",
            "evict_cost",
            Key("resident", "is_resident"),
            Key("evictable", "may_be_evicted"),
            Key("plan", of=document(PLAN.kind, *PLAN.keys)),
        ),
    ),
    Key("sets", of=document(ResidentSet, "models", Key("memory", "uses", document(PlaceUse, "name", "used", "room")))),
    Key("swaps", of=document(Swap, "asked", "running", "evicted", rounded("share"))),
    *map(rounded, ("seconds", "alone_seconds", "bound_seconds")),
    "any_together",
    Key("disk", of=document(Disk, rounded("bandwidth"), "source")),
    "dummy_loads",
    "problems",
    title="A fleet",
)


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
