"""The document of ``fitter fleet --json`` and ``Fleet.to_dict``."""

from __future__ import annotations

from fitter.output.documents.document import Key, document, rounded
from fitter.output.documents.plan_document import PLAN
from fitter.planning.fleet.fleet import Disk, Fleet, FleetModel, PlaceUse, ResidentSet, Swap

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
