"""The picture of a plan in a terminal: no wider than it, and all there without colours."""

from __future__ import annotations

import io
from dataclasses import replace

from rich.console import Console

from fitter.output.documents.plan_document import to_dict
from fitter.output.pictures.plan_pictures import PlanPicture
from fitter.planning.plan.layer_map import LayerMap, MapCell
from fitter.planning.plan.plan import Plan, Problem
from fitter.planning.request.summary import PoolUse
from tests.support.cases import cases
from tests.support.plans import GIB, MIB, make_plan, shared_use

LAYERS = LayerMap(
    80,
    ("CUDA0", "CUDA1", "host"),
    (
        *(MapCell("experts", layer, (("CUDA0", 5),)) for layer in range(10)),
        MapCell("experts", 10, (("CUDA0", 1), ("host", 4))),
        *(MapCell("experts", layer, (("CUDA0" if layer < 40 else "CUDA1", 5),)) for layer in range(11, 80)),
        MapCell("KV cache", 0, (("host", 3),)),
    ),
)


def shown(plan: Plan, width: int, layers: LayerMap | None = LAYERS) -> list[str]:
    out = io.StringIO()
    console = Console(file=out, width=width, color_system=None, highlight=False, markup=False)
    console.print(PlanPicture(to_dict(plan), layers))
    return [line.rstrip() for line in out.getvalue().splitlines()]


def full_plan() -> Plan:
    plan = make_plan(host_free=8 * GIB, problems=(Problem("CUDA1", 700 * MIB, "CUDA1 lacks 700 MiB"),))
    (first, second) = plan.devices
    first = replace(first, total=10 * GIB, shared=GIB)
    return replace(plan, devices=(first, second), shared=(shared_use(CUDA0=1024),), host=replace(plan.host, later=GIB))


@cases(40, 63, 64, 80, 100, 200)
def test_every_width(width: int) -> None:
    lines = shown(full_plan(), width)
    assert max(map(len, lines)) <= width
    bars = [line for line in lines if line.startswith("|")]
    assert [len(line) for line in bars] == [min(width, 120)] * 3
    # each part that is there has a letter
    assert [sorted(set(line[1:-1])) for line in bars] == [sorted("wkcs-.x"), sorted("wkc-."), sorted("wcl-.")]
    assert "lacks 700.0 MiB" in lines
    for entry in (
        "w weights",
        "k KV cache",
        "s beside the model",
        "l later",
        "A CUDA0",
        "B CUDA1",
        "h host",
        "+ several",
    ):
        assert any(entry in line for line in lines), entry


def test_the_letters_of_the_layers() -> None:
    lines = shown(make_plan(), 120)
    row = next(line for line in lines if "experts" in line).split("experts ")[1]
    assert row == " " + "A" * 10 + "+" + "A" * 29 + "B" * 40
    assert next(line for line in lines if line.lstrip().startswith("KV cache")).split("KV cache ")[1] == " h"


def test_several_layers_in_a_letter() -> None:
    lines = shown(make_plan(), 40)
    assert "where each layer is (3 layers for each letter)" in " ".join(lines)
    row = lines[lines.index("experts") + 1]
    # what is before the layers is one more
    assert row == "AAA+" + "A" * 9 + "+" + "B" * 13


def test_nothing_in_several_places_needs_no_sign() -> None:
    whole = LayerMap(
        2, ("CUDA0", "host"), (MapCell("experts", 0, (("CUDA0", 1),)), MapCell("experts", 1, (("host", 1),)))
    )
    assert shown(make_plan(), 80, whole)[-1] == "A CUDA0   h host"


def test_without_a_map() -> None:
    assert not any("layer" in line for line in shown(make_plan(), 80, None))


def test_what_devices_share_has_a_bar_of_its_own() -> None:
    pool = PoolUse("CUDA0+host", 64 * GIB, 60 * GIB, GIB, 50 * GIB, ("CUDA0", "host"))
    plan = make_plan(problems=(Problem("CUDA0+host", 700 * MIB, "they lack 700 MiB"),))
    lines = shown(replace(plan, pools=(pool,)), 60, None)
    at = lines.index("CUDA0+host what they share 50.0 GiB of 64.0 GiB")
    assert lines[at + 1] == "lacks 700.0 MiB"
    assert lines[at + 2].startswith("|w") and len(lines[at + 2]) == 60
