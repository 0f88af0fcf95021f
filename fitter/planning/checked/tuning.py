"""What to try on a machine, and which of what was measured is best. Seconds."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fitter.machine.measured import HOST, PART, Tuned, place_of
from fitter.parameters.table import PARAMETERS
from fitter.planning.plan.plan import Plan
from fitter.planning.pricing.pricing import Price
from fitter.planning.request.shared import DRAFT_MAX
from fitter.planning.request.summary import DeviceUse
from fitter.planning.speed.cost import MIN_OFFLOAD_BATCH
from fitter.text import MIB

MINUTES = 10.0
"""Default of the minutes that tuning may take."""

ROUNDS = 5
"""Most turns of each user in a run."""

RUNS = 8
"""So many runs have time: turns are cut for it. The plan, five changes, and the second starts of the plan and the best.
"""

BUSY = 0.1
"""Share of the processors of which other programs decide what is measured: an idle desktop's use less than half."""

NOISY = 0.1
"""Standard error, by its time, of a run that noise decides: estimates themselves are off by no less."""

_LEAST_GAIN = 0.01
"""A smaller gain is taken for noise, however alike the turns of a run are: turns of one start share its luck."""

_SURE = 2.0
"""Standard errors by which two runs must differ."""

_LEAST_CACHE = 256 * MIB
"""The least room on a device for which a cache of experts is tried: a smaller one finds few of them."""
_UBATCHES = (256, 512, 1024, 2048)
_OFFLOAD = "GGML_OP_OFFLOAD_MIN_BATCH"
"""The variable of ggml's backends for the least tokens of a batch for which a device computes with host weights."""


@dataclass(frozen=True)
class TuningChange:
    """A change of a plan that is tried."""

    kind: str
    """What it changes; of each kind one value is best."""
    keywords: tuple[tuple[str, Any], ...] = ()
    """Keywords of ``fit``."""
    words: tuple[str, ...] = ()
    """Further arguments of llama-server."""
    environment: tuple[tuple[str, str], ...] = ()
    """Variables of its environment."""

    @property
    def text(self) -> str:
        """The change in words."""
        words = [f"{name}={value}" for name, value in self.environment] + list(self.words)
        for name, value in self.keywords:
            each = PARAMETERS[name]
            words += [each.option] if isinstance(value, bool) else [each.options[0], each.kind.word(value)]
        return " ".join(words)


@dataclass(frozen=True)
class TuningRun:
    """A plan with some changes, and what a llama-server took for its turns."""

    changes: tuple[TuningChange, ...]
    """The changes, the newest last; empty for the plan itself."""
    plan: Plan = field(repr=False)
    """The plan with the changes."""
    estimated: float = 0.0
    """Estimated seconds of a turn."""
    seconds: float = math.inf
    """Measured seconds of a turn, in the median; infinite where it failed."""
    spread: float = 0.0
    """How far these may be off: their standard error."""
    prompt: float = 0.0
    """Measured seconds of a prompt's token."""
    step: float = 0.0
    """Measured seconds of a step of generation."""
    hit_rate: float | None = None
    """How often tokens found their experts in a cache of them; ``None`` without one."""
    acceptance: float | None = None
    """Share of drafted tokens that the model accepted; ``None`` without drafts."""
    problem: str = ""
    """Why it failed."""
    others: float | None = None
    """Share of the machine's processors that other programs used meanwhile; ``None`` if unknown."""

    @property
    def doubt(self) -> str:
        """Why something else than the plan decided the times; empty if nothing did."""
        if (self.others or 0.0) > BUSY:
            return f"other programs used {self.others:.0%} of the processors"
        return f"its turns differ by {self.spread / self.seconds:.0%}" if self.spread > NOISY * self.seconds else ""

    @property
    def text(self) -> str:
        """The changes in words."""
        return " ".join(change.text for change in self.changes) or "the plan"

    @property
    def words(self) -> tuple[str, ...]:
        """Arguments of llama-server beyond those of its plan."""
        return tuple(word for change in self.changes for word in change.words)

    @property
    def environment(self) -> dict[str, str]:
        """Variables of its environment."""
        return {name: value for change in self.changes for name, value in change.environment}

    @property
    def keywords(self) -> dict[str, Any]:
        """Keywords of ``fit``."""
        return {name: value for change in self.changes for name, value in change.keywords}


@dataclass(frozen=True)
class Tuning:
    """The result of ``tune``."""

    runs: tuple[TuningRun, ...]
    """All runs, in their order; the first is the plan itself."""
    best: TuningRun
    """The quickest; the plan itself unless another one is quicker beyond noise."""
    left: tuple[str, ...] = ()
    """Changes that were not tried, for want of time."""
    server: str = ""
    """The llama-server."""
    stored: str = ""
    """The file that the measurements are in, for later plans; empty if they were not stored."""
    tuned: float | None = None
    """Seconds that later plans estimate for a turn of the best."""
    cut: str = ""
    """What was left out of the turns of the work so that several runs have time; empty if nothing was."""

    @property
    def plan(self) -> Plan:
        """The plan of the best run."""
        return self.best.plan

    def __repr__(self) -> str:
        return f"<Tuning: {len(self.runs)} runs, the best is {self.best.text}>"


def is_quicker(run: TuningRun, than: TuningRun) -> bool:
    """Whether a run is quicker beyond noise."""
    noise = _SURE * math.hypot(run.spread, than.spread)
    return run.seconds < than.seconds - max(noise, _LEAST_GAIN * than.seconds)


def best_of(runs: Sequence[TuningRun]) -> TuningRun:
    """Return the first run, or the last one that was quicker than all before it."""
    best = runs[0]
    for run in runs[1:]:
        if is_quicker(run, best):
            best = run
    return best


def joined(run: TuningRun, again: TuningRun) -> TuningRun:
    """Join two starts of the same server: averages, which are off by half of what the starts differ, or more."""
    spread = math.hypot(run.spread, again.spread) / 2
    return replace(
        run,
        seconds=(run.seconds + again.seconds) / 2,
        spread=max(spread, abs(run.seconds - again.seconds) / 2),
        prompt=(run.prompt + again.prompt) / 2,
        step=(run.step + again.step) / 2,
        others=max(run.others or 0.0, again.others or 0.0),
    )


def changes_of(plan: Plan, given: Mapping[str, Any], cores: int) -> Iterator[tuple[TuningChange, ...]]:
    """Yield kinds of changes to try, those that bring most first, each with its values.

    Args:
        plan: The plan.
        given: Keywords that the user set: they stay.
        cores: Physical cores.
    """
    on_host = plan.host.model + plan.host.context > 0
    has_devices = bool(plan.breakdown.devices)
    spills = has_devices and plan.host.model > MIB and _host_computes(plan)
    if not has_devices or spills:
        counts = dict.fromkeys((max(1, cores // 2), cores - 1, 2 * cores))
        yield tuple(TuningChange("threads", words=("-t", str(n))) for n in counts if n >= 1 and n != cores)
    has_experts = any("exps" in override.pattern for override in plan.params.tensor_buft_overrides)
    if spills and has_experts and "moe_cache_size" not in given:
        room = max((use.left - use.margin for use in plan.devices), default=0) // MIB * MIB
        caches = (room, room // 2 // MIB * MIB) if room > _LEAST_CACHE else ()
        yield tuple(TuningChange("cache of experts", (("moe_cache_size", size),)) for size in caches)
    if spills and "op_offload" not in given:
        yield (
            *(TuningChange("offload", environment=((_OFFLOAD, str(n)),)) for n in (4 * MIN_OFFLOAD_BATCH, 1024)),
            TuningChange("offload", (("op_offload", False),)),
        )
    if "n_ubatch" not in given:
        now = plan.params.n_ubatch
        sizes = tuple(size for size in _UBATCHES if size != now and (has_devices or size <= 2 * now))
        yield tuple(TuningChange("batch", (("n_ubatch", size),)) for size in sizes if size <= plan.params.n_batch)
    if (most := plan.fit_keywords.get("draft_max") or (DRAFT_MAX if plan.drafting else None)) is not None:
        yield tuple(TuningChange("draft", (("draft_max", n),)) for n in (1, 2, 4, 8) if n != most)
    if on_host and "load_mode" not in given:
        mode = dict(plan.params.more).get("load_mode")
        others = ("mmap", "none") if mode in (None, "none", "auto") else ("none",)
        yield tuple(TuningChange("load mode", (("load_mode", other),)) for other in others if other != mode)


def _host_computes(plan: Plan) -> bool:
    """Whether the host computes with some of the layers."""
    is_whole = plan.params.n_gpu_layers < 0 or plan.params.n_gpu_layers > plan.n_layer
    return not is_whole or bool(plan.params.tensor_buft_overrides)


Factored = Mapping[str, tuple[float, float]]
"""Factors of prompts and of generation, by part."""


def parts_of(price: Price, devices: Sequence[DeviceUse], factors: Factored) -> dict[str, tuple[float, float]]:
    """Return the parts of an estimate, without the ``factors`` of earlier runs; equal devices are one."""
    names = {device.name: place_of(device.name, device.description) for device in devices} | {HOST: HOST}
    sums: dict[str, tuple[float, float]] = {}
    for part in price.parts:
        place, has_place, what = part.name.partition(PART)
        name = f"{names.get(place, place)}{PART}{what}" if has_place else part.name
        of_prompt, of_step = factors.get(name, (1.0, 1.0))
        prompt, step = sums.get(name, (0.0, 0.0))
        sums[name] = prompt + part.prompt / of_prompt, step + part.generation / of_step
    return sums


def tuned_of(
    run: TuningRun, best: TuningRun, machine: str, llama_cpp: str, words: Sequence[str], factors: Factored
) -> Tuned | None:
    """Make the row to store of a run; ``None`` without a measurement, or with other threads than the best run has.

    A run is left out that other programs or noise decided.

    Later plans are for a server like the best one: with the arguments and variables that no plan has.
    """
    price = run.plan.estimate
    is_like_best = (run.words, run.environment) == (best.words, best.environment)
    is_measured = not math.isinf(run.seconds) and run.prompt and run.step and not run.doubt
    if price is None or not (is_measured and is_like_best):
        return None
    parts = parts_of(price, run.plan.devices, factors)
    return Tuned(
        machine,
        llama_cpp,
        run.plan.model.name,
        tuple(words),
        price.workload.users,
        tuple((name, *seconds) for name, seconds in parts.items()),
        run.prompt,
        run.step,
        run.seconds,
    )
