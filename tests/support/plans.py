"""Plans made by hand, for tests of what is said about a plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fitter.api import Plan
from fitter.llama.types import Breakdown, Params, Row
from fitter.output import formats
from fitter.parameters.targets import OWN_FORMATS
from fitter.planning.plan.plan import DeviceUse, HostUse, ModelSummary, Problem, Search, SharedUse
from fitter.planning.pricing.pricing import Price, SpeedAt, SpeedSource
from fitter.planning.speed.cost import Estimate, Part, Workload
from fitter.planning.speed.explain import Bound, Choice

MIB = 1024 * 1024
GIB = 1024 * MIB

MODEL = ModelSummary("model.gguf", "Model 8B", "llama", 4 * GIB)
FREE = 8 * GIB
MARGIN = 1 * GIB
HOST_ROW = Row("CPU", None, True, 300 * MIB, 0, 20 * MIB)


def make_plan(
    params: Params | None = None,
    *,
    devices: Sequence[str] = ("CUDA0", "CUDA1"),
    n_ctx: int = 4096,
    flash_attn: bool | None = True,
    host_free: int | None = None,
    problems: tuple[Problem, ...] = (),
    virtual: bool = True,
    n_layer: int = 32,
    estimate: Price | None = None,
    levers: tuple[str, ...] = (),
    choices: tuple[Choice, ...] = (),
    bound: Bound | None = None,
    is_cut_short: bool = False,
) -> Plan:
    """A plan that takes 2048 MiB of weights, 256 of context and 100 of compute on each of ``devices``."""
    rows = tuple(Row(name, name, False, 2048 * MIB, 256 * MIB, 100 * MIB) for name in devices)
    return Plan(
        model=MODEL,
        params=params or Params(n_ctx=n_ctx, n_gpu_layers=33),
        breakdown=Breakdown((*rows, HOST_ROW), tuple(devices), n_ctx, flash_attn),
        devices=tuple(
            DeviceUse(
                row.buffer_type, f"Card of {row.buffer_type}", FREE, FREE, MARGIN, row.model, row.context, row.compute
            )
            for row in rows
        ),
        host=HostUse(host_free, host_free, MARGIN, HOST_ROW.model, HOST_ROW.context, HOST_ROW.compute),
        search=Search(5, 1.25, is_cut_short=is_cut_short),
        problems=problems,
        n_layer=n_layer,
        virtual=virtual,
        estimate=estimate,
        levers=levers,
        choices=choices,
        bound=bound,
    )


def for_format(plan: Plan, name: str) -> Plan:
    """``plan`` for the program of the format ``name``, if that has one of its own."""
    return replace(plan, program=name, own_split=plan.params.tensor_split or ()) if name in OWN_FORMATS else plan


def render(plan: Plan, name: str, *, anyway: bool = False) -> str:
    """The text of ``plan`` in the format ``name``, for its program."""
    return formats.render(for_format(plan, name), name, anyway=anyway)


def reserving(plan: Plan, **more: int) -> Plan:
    """``plan`` with so many more bytes of compute buffers in a real load of each buffer type."""
    rows = (replace(row, reserved=row.compute + more.get(row.buffer_type, 0)) for row in plan.breakdown.rows)
    return replace(plan, breakdown=replace(plan.breakdown, rows=tuple(rows)))


def shared_use(what: str = "projector", arguments: tuple[str, ...] = (), **mib: int) -> SharedUse:
    """What stands beside the model, with so many MiB in all by device, or ``host``, and some bytes of each kind."""
    rows = tuple(
        Row("Host" if name == "host" else name, None if name == "host" else name, name == "host", size * MIB - 3, 2, 1)
        for name, size in mib.items()
    )
    return SharedUse(what, {"projector": "mmproj.gguf"}.get(what, f"{what}.gguf"), rows, arguments)


def make_price(
    *sources: SpeedSource,
    prompt: float = 1240.4,
    generation: float = 38.04,
    parts: tuple[Part, ...] = (),
    full: float | None = None,
) -> Price:
    """The price of 2048 + 512 tokens at so many tokens per second; ``full``: those of generation with 4096."""
    seconds = 2048 / prompt + 512 / generation
    breakdown = Breakdown((HOST_ROW,), (), 4096)
    estimate = Estimate(1 / prompt, 1 / generation, seconds, parts)
    depths = () if full is None else (SpeedAt(4096, 1 / full),)
    return Price(estimate, Workload(), 2304, sources, breakdown, depths=depths)
