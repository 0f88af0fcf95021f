"""Requests replayed with several ways to run models on one machine: ``python -m tools.fleets.replay SETUP.json``.

A policy says, for a request whose model is not in memory, how it is placed and what is unloaded first. Requests are
answered one after the other. What other programs do was read in their sources (``tests/data/fleet_logs/README.md``):

- ``plain``: each model is fitted alone, and loaded beside all that are in memory. Nothing is unloaded.
- ``ollama``: a model that is loaded first is placed as if alone. Beside others it must be below 80 % of the memory
  that is free on one device, and is then on the one with most of it, or below 80 % of that on all devices, over which
  it is then spread. If it is above, or three models a device are in memory, a model is unloaded: all have the same
  keep-alive time and are idle, so it is the first by name. Models go after five idle minutes. A failed load unloads all
  others and is tried again.
- ``lemonade``: a number of models of each type, one by default, whatever their memory, each placed as if alone. The
  least recently used one of the type is unloaded. A failed load unloads all others and is tried again.
- ``router`` (llama-server): four models, whatever their memory, each placed as if alone; the least recently used one
  is unloaded. A failed load is a lost request. (The fit of its processes is left out: it would move layers to the host
  where the memory is too full, and the answers would be slower instead.)
- ``fleet``: each model has its plan of the fleet; of the sets of models that fit together and have the one asked for,
  the one is kept for which the evictions cost least. All sets have the models that stay, from their first request on.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import cycle, islice
from pathlib import Path
from random import Random
from typing import Any

from fitter.planning.fleet.residency import FleetRoom, Way

OLLAMA_PERCENT = 80
OLLAMA_MODELS_PER_GPU = 3

Loaded = Mapping[str, Way]
"""The models in memory as they are placed, the least recently used one first."""


@dataclass(frozen=True)
class ReplayModel:
    """A model with its plans. ``reload_seconds`` of a way are those of every load."""

    name: str
    kind: str
    """``llm``, ``embedding`` or ``rerank``."""
    alone: Way
    """Its plan with the machine to itself."""
    fleet: Way
    """Its plan of the fleet."""
    predicted: int
    """Bytes that Ollama expects: those of the file, and an f16 KV cache for the context."""
    tokens: float
    """Tokens of an answer (of a prompt, for a model that answers none), where a log does not say."""
    on: Mapping[str, Way] = field(default_factory=dict)
    """Its plan on each device alone; without one it is as on the device that ``alone`` has."""
    slowness: Mapping[str, float] = field(default_factory=dict)
    """How much longer each device takes than the fastest one."""
    each: int = 0
    """Bytes that it takes on each device over which it is spread, beside its part of weights and cache."""


@dataclass(frozen=True)
class Setup:
    """The models and the machine's memory, which all policies share; the rest is of the fleet."""

    models: Mapping[str, ReplayModel]
    room: FleetRoom
    """Bytes at each place that are really there for models."""
    sets: tuple[frozenset[str], ...] = ()
    """The sets of models that fit together, in the fleet's order."""
    evict_costs: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Asked:
    """A request of a log: when, for which model, and the tokens of its answer if the log says them."""

    seconds: float
    model: str
    tokens: float | None = None


Decision = tuple[Way, Sequence[str]]
"""How a model is placed that is not in memory, and what is unloaded first."""


@dataclass(frozen=True)
class Policy:
    """A way to run several models; ``decide`` is asked for a model that is not in memory."""

    name: str
    decide: Callable[[Loaded, str], Decision]
    keep_alive: float = math.inf
    """Seconds after which an idle model is unloaded."""
    retries: bool = False
    """Whether a load that fails is tried again when all other models are unloaded."""


@dataclass(frozen=True)
class Replayed:
    """What came of a log; ``seconds`` are those of loads and answers."""

    policy: str
    requests: int
    answered: int
    seconds: float
    loads: int
    evictions: int
    out_of_memory: int
    """Loads that failed because a place had no room. They take no time."""
    tokens: float
    """Tokens of the requests that were answered."""

    @property
    def tokens_per_second(self) -> float:
        """Tokens a second on the mix, loads included."""
        return self.tokens / self.seconds if self.seconds else 0.0


def replay(log: Sequence[Asked], policy: Policy, setup: Setup) -> Replayed:
    """Replay a log with a policy: each request waits for the one before it."""
    loaded: dict[str, Way] = {}
    last: dict[str, float] = {}
    now = busy = tokens = 0.0
    answered = loads = evictions = out_of_memory = 0
    for asked in log:
        now = max(now, asked.seconds)
        for name in [name for name in loaded if now - last[name] >= policy.keep_alive]:
            del loaded[name]
            evictions += 1
        spent = 0.0
        way = loaded.pop(asked.model, None)
        if way is None:
            way, evicted = policy.decide(loaded, asked.model)
            for name in evicted:
                del loaded[name]
            evictions += len(evicted)
            if not setup.room.holds([*loaded.values(), way]):
                out_of_memory += 1
                if not policy.retries:
                    continue
                evictions += len(loaded)
                loaded.clear()
                way = policy.decide(loaded, asked.model)[0]
                if not setup.room.holds([way]):
                    continue
            loads += 1
            spent = way.reload_seconds
        spent += way.seconds
        busy, now = busy + spent, now + spent
        loaded[asked.model], last[asked.model] = way, now
        answered += 1
        tokens += setup.models[asked.model].tokens if asked.tokens is None else asked.tokens
    return Replayed(policy.name, len(log), answered, busy, loads, evictions, out_of_memory, tokens)


def plain(setup: Setup) -> Policy:
    """Return the policy that fits each model alone and keeps all."""
    return Policy("plain", lambda loaded, name: (setup.models[name].alone, ()))


def ollama(setup: Setup, keep_alive: float = 300.0) -> Policy:
    """Return Ollama's policy; ``keep_alive`` in seconds, the same for all models."""
    devices = [place for place in setup.room.bytes if place != "host"]
    most = OLLAMA_MODELS_PER_GPU * max(1, len(devices))

    def decide(loaded: Loaded, name: str) -> Decision:
        left, evicted, model = dict(loaded), list[str](), setup.models[name]
        while left:
            if len(left) < most:
                way = _beside(left.values(), model, devices, setup.room) if devices else model.alone
                if way:
                    return way, evicted
            evicted.append(min(left))
            del left[evicted[-1]]
        return model.alone, evicted

    return Policy("ollama", decide, keep_alive, retries=True)


def _beside(loaded: Collection[Way], model: ReplayModel, devices: Sequence[str], room: FleetRoom) -> Way | None:
    """Place a model beside others as Ollama does; ``None`` if it is above 80 % of what is free."""
    free = {device: max(0, room.bytes[device] - sum(way.needs.get(device, 0) for way in loaded)) for device in devices}
    freest = max(devices, key=lambda device: free[device])
    if model.predicted <= free[freest] * OLLAMA_PERCENT // 100:
        if freest in model.on:
            return model.on[freest]
        return _on(model, {freest: 1.0}, devices)
    if model.predicted <= (total := sum(free.values())) * OLLAMA_PERCENT // 100:
        return _on(model, {device: free[device] / total for device in devices}, devices)
    return None


def _on(model: ReplayModel, parts: Mapping[str, float], devices: Sequence[str]) -> Way:
    """Place the parts of a model on devices; each has compute buffers, and memory of the process, too."""
    rest = {place: need for place, need in model.alone.needs.items() if place not in devices}
    on_devices = sum(model.alone.needs.values()) - sum(rest.values())
    n_alone = sum(place in devices for place in model.alone.needs)
    split = max(0, on_devices - n_alone * model.each)
    needs = {**rest, **{device: math.ceil(split * part) + model.each for device, part in parts.items()}}
    # layers are computed one after the other, each at the speed of its device
    seconds = model.alone.seconds * sum(part * model.slowness.get(device, 1.0) for device, part in parts.items())
    return Way(needs, seconds, model.alone.reload_seconds)


def lemonade(setup: Setup, max_loaded_models: int = 1) -> Policy:
    """Return lemonade's policy: ``max_loaded_models`` of each type, -1 for any number."""

    def decide(loaded: Loaded, name: str) -> Decision:
        model = setup.models[name]
        same = [other for other in loaded if setup.models[other].kind == model.kind]
        return model.alone, same[:1] if 0 < max_loaded_models <= len(same) else ()

    return Policy("lemonade", decide, retries=True)


def router(setup: Setup, models_max: int = 4) -> Policy:
    """Return the policy of llama-server as a router: ``models_max`` models, 0 for any number."""

    def decide(loaded: Loaded, name: str) -> Decision:
        return setup.models[name].alone, list(loaded)[:1] if 0 < models_max <= len(loaded) else ()

    return Policy("router", decide)


def fleet(setup: Setup) -> Policy:
    """Return the policy of ``fitter fleet``: its sets, and what an eviction costs."""

    def decide(loaded: Loaded, name: str) -> Decision:
        gone = [[each for each in loaded if each not in models] for models in setup.sets if name in models]
        return setup.models[name].fleet, min(gone, key=lambda names: sum(setup.evict_costs[each] for each in names))

    return Policy("fleet", decide)


POLICIES: tuple[Callable[[Setup], Policy], ...] = (plain, ollama, lemonade, router, fleet)

Drawn = Iterator[tuple[float, str]]
"""Requests without end: the gap before each, 1 on average or less, and its model."""


def _uniform(random: Random, models: Sequence[ReplayModel], weights: Sequence[float] | None = None) -> Drawn:
    while True:
        yield random.expovariate(1), random.choices(models, weights)[0].name


def _zipf(random: Random, models: Sequence[ReplayModel]) -> Drawn:
    return _uniform(random, models, [1 / rank for rank in range(1, len(models) + 1)])


def _rare_large(random: Random, models: Sequence[ReplayModel]) -> Drawn:
    """Ask for the largest model once in fifty requests."""
    largest = max(models, key=lambda model: model.predicted)
    return _uniform(random, models, [max(1, len(models) - 1) if each is largest else 49 for each in models])


def _sessions(random: Random, models: Sequence[ReplayModel]) -> Drawn:
    """Stay with a model for six turns on average."""
    while True:
        name = random.choice(models).name
        while random.random() < 6 / 7:
            yield random.expovariate(1), name


def _day_and_night(random: Random, models: Sequence[ReplayModel]) -> Drawn:
    """Ask nine times in ten for one half of the models, and for the other half after 150 requests."""
    halves = [models[: (len(models) + 1) // 2], models[(len(models) + 1) // 2 :] or models]
    while True:
        for _ in range(150):
            yield random.expovariate(1), random.choice(halves[random.random() < 0.1]).name
        halves.reverse()


def _round_robin(random: Random, models: Sequence[ReplayModel]) -> Drawn:
    return ((random.expovariate(1), model.name) for model in cycle(models))


def _agent(random: Random, models: Sequence[ReplayModel]) -> Drawn:
    """Ask for a model of each kind in turn: an embedding, a rerank, then one to four turns of a chat."""
    while True:
        for kind in ("embedding", "rerank", "llm"):
            if names := [each.name for each in models if each.kind == kind]:
                name = random.choice(names)
                for _ in range(random.randint(1, 4) if kind == "llm" else 1):
                    yield random.expovariate(3), name


def _bursts(random: Random, models: Sequence[ReplayModel]) -> Drawn:
    """Ask for one model 5 to 40 times at once, and then wait."""
    draws = _zipf(random, models)
    while True:
        gap, name = next(draws)
        for at in range(random.randint(5, 40)):
            yield 0.01 if at else 20 * gap, name


def _two_tenants(random: Random, models: Sequence[ReplayModel]) -> Drawn:
    """Let two tenants ask at the same time, each in sessions with its own models."""
    tenants = [_sessions(random, part) for part in (models[::2], models[1::2] or models)]
    while True:
        yield next(random.choice(tenants))


_DRAWN = (_uniform, _zipf, _sessions, _day_and_night, _round_robin, _agent, _rare_large, _bursts, _two_tenants)
PATTERNS = {drawn.__name__.strip("_").replace("_", " "): drawn for drawn in _DRAWN}


def draw(pattern: str, models: Sequence[ReplayModel], n: int = 1000, seed: int = 1, gap: float = 10.0) -> list[Asked]:
    """Draw ``n`` requests of one of ``PATTERNS``; ``gap`` is the unit of its gaps in seconds."""
    draws = PATTERNS[pattern](Random(f"{pattern} {seed}"), models)
    seconds, log = 0.0, list[Asked]()
    for part, name in islice(draws, n):
        seconds += part * gap
        log.append(Asked(seconds, name))
    return log


def read_log(path: Path) -> list[Asked]:
    """Read requests from CSV with the columns ``seconds``, ``model`` and perhaps ``tokens``."""
    with open(path, encoding="utf-8-sig", newline="") as file:
        rows = [(row["seconds"], row["model"], row.get("tokens")) for row in csv.DictReader(file)]
    return [Asked(float(seconds), model, float(tokens) if tokens else None) for seconds, model, tokens in rows]


def read_setup(path: Path) -> Setup:
    """Read a ``Setup`` from JSON whose keys are the names of its fields; ``room`` is bytes by place."""
    read: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    models = [{**each, "alone": Way(**each["alone"]), "fleet": Way(**each["fleet"])} for each in read["models"]]
    sets = tuple(frozenset(each) for each in read["sets"])
    return Setup(
        {each["name"]: ReplayModel(**each) for each in models}, FleetRoom(read["room"]), sets, read["evict_costs"]
    )


def main(argv: list[str] | None = None) -> int:
    """Print what came of each log with each policy."""
    parser = argparse.ArgumentParser(description="Replay requests with several ways to run models on one machine.")
    parser.add_argument("setup", type=Path, help="models, room and sets as JSON")
    parser.add_argument("--log", type=Path, help="requests as CSV: seconds, model, tokens")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args(argv)
    setup = read_setup(args.setup)
    logs = {each: draw(each, list(setup.models.values()), args.requests, args.seed) for each in PATTERNS}
    if args.log:
        logs[args.log.name] = read_log(args.log)
    table = csv.writer(sys.stdout, lineterminator="\n")
    table.writerow(["log", *(each.name for each in fields(Replayed)), "tokens_per_second"])
    for title, log in logs.items():
        for found in (replay(log, policy(setup), setup) for policy in POLICIES):
            table.writerow([title, *vars(found).values(), round(found.tokens_per_second, 3)])
    return 0


if __name__ == "__main__":
    sys.exit(main())
