"""Machines of 1 to 15 described cards with a model to run on them, and what makes such a machine better."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fitter.llama.types import VirtualDevice
from fitter.machine.gpu import parse_gpus
from fitter.planning.request.request import DEFAULT_MARGIN, LEVERS
from fitter.planning.speed.cost import Workload

MIB = 2**20
GIB = 2**30

SHAPES = (
    "llama-3.1-8b",
    "llama-3.1-70b",
    "qwen3-32b",
    "qwen3-30b-a3b",
    "qwen3-235b-a22b",
    "deepseek-v3.1",
    "glm45-air",
    "gemma3-12b",
    "gpt-oss-20b",
    "gpt-oss-120b",
    "qwen3-next-80b-a3b",
    "nemotron-h-9b",
)

MOE = frozenset(
    {
        "qwen3-30b-a3b",
        "qwen3-235b-a22b",
        "deepseek-v3.1",
        "glm45-air",
        "gpt-oss-20b",
        "gpt-oss-120b",
        "qwen3-next-80b-a3b",
    }
)

CARDS = (
    "gtx-1060-6gb", "gtx-1080-ti", "tesla-p40", "rtx-2080-ti", "rtx-3050-8gb", "rtx-3060-12gb", "rtx-3080", "rtx-3090",
    "rtx-4060", "rtx-4060-ti-16gb", "rtx-4070", "rtx-4090", "rtx-5060-ti-16gb", "rtx-5090", "rtx-6000-ada", "a100-80gb",
    "h100-pcie", "rtx-pro-6000-blackwell",
)  # fmt: skip
PLAIN = (
    "rtx-3060-12gb", "rtx-3080", "rtx-3090", "rtx-4060", "rtx-4060-ti-16gb", "rtx-4070", "rtx-4090",
    "rtx-5060-ti-16gb", "rtx-5090", "tesla-p40", "rtx-6000-ada",
)  # fmt: skip
_OTHERS = (
    ("rx-6700-xt", "rx-7600", "rx-7900-xtx", "rx-9070-xt", "mi50-32gb", "mi300x", "w7900"),
    ("arc-a380", "arc-a770-16gb", "arc-b580", "arc-pro-b60"),
)
INTEGRATED = ("radeon-780m", "strix-halo")
"""GPUs that share the host's memory."""
DRAFTS = {
    "llama-3.1-70b": {"model_draft": "llama-3.1-8b"},
    "glm45-air": {"mtp": True},
}
"""What drafts for a shape, as keywords of ``fitter.fit``; a draft model is another shape."""
_SLOTS = (1, 1, 1, 1, 1, 2, 4, 8, 16, 32, 64, 128, 256)


@dataclass(frozen=True)
class Card:
    """A card of the catalogue, with ``free`` bytes; ``None``: as many as the catalogue says."""

    name: str
    free: int | None = None

    @property
    def spec(self) -> str:
        """What ``--gpu`` takes."""
        return self.name if self.free is None else f"{self.name}:free={self.free // MIB}MiB"


@dataclass(frozen=True)
class Machine:
    """A shape on cards, with options of ``fitter.fit``. ``number`` draws it again.

    ``link``: how many times as fast as in the catalogue the cards' link to the host is. ``server``: free bytes of an
    rpc-server's device; 0 for no server.
    """

    number: int
    shape: str
    cards: tuple[Card, ...]
    options: dict[str, Any] = field(default_factory=dict)
    link: float = 1.0
    server: int = 0

    @property
    def gpus(self) -> tuple[VirtualDevice, ...]:
        """The cards as llama.cpp sees them."""
        return parse_gpus([card.spec for card in self.cards])

    @property
    def arguments(self) -> list[str]:
        """The words after ``fitter MODEL`` that ask for the same."""
        names = {"n_seq_max": "-np", "n_ctx": "-c", "type_k": "-ctk", "type_v": "-ctv", "host_memory": "--host-memory"}
        names |= {
            "model_draft": "-md",
            "prompt": "--prompt",
            "n_ubatch": "-ub",
            "flash_attn": "-fa",
            "n_cpu_moe": "-ncmoe",
        }
        words = [word for card in self.cards for word in ("--gpu", card.spec)]
        for name, value in self.options.items():
            if name in ("kv_unified", "mtp"):
                words.append("-kvu" if name == "kv_unified" else "--mtp")
            elif name == "margin":
                words += ["--fit-target", str(value // MIB)]
            else:
                words += [names[name], f"{value // MIB}MiB" if name == "host_memory" else str(value)]
        return [*words, *(["--rpc", f"({self.server // MIB} MiB)"] if self.server else [])]

    def __str__(self) -> str:
        return f"#{self.number} {self.shape} {' '.join(self.arguments)}"

    @property
    def slots(self) -> int:
        """The number of slots."""
        return int(self.options.get("n_seq_max", 1))

    @property
    def streams(self) -> int:
        """The number of caches that share the context."""
        return 1 if self.options.get("kv_unified") else self.slots

    def having(self, **options: Any) -> Machine:
        """The machine with other options."""
        return replace(self, options={**self.options, **options})


def draw(number: int, most_cards: int = 15) -> Machine:
    """The machine with a ``number``: always the same one."""
    rng = random.Random(f"machine {number}")
    shape = rng.choice(SHAPES)
    if rng.random() < 0.8:
        kinds: Sequence[str] = CARDS
    else:
        kinds = rng.choice(_OTHERS)
    count = min(most_cards, rng.choice((1, 1, 2, 2, 2, 3, 3, 4, 4, 5, 6, 7, 8, 10, 12, 15)))
    some = [rng.choice(kinds) for _ in range(rng.choice((1, 1, 2, 3)))]
    cards = [_card(rng.choice(some), rng) for _ in range(count)]
    # at one request: without it, the request follows a set context
    options: dict[str, Any] = {"prompt": Workload.prompt}
    if (slots := rng.choice(_SLOTS)) > 1:
        options["n_seq_max"] = slots
        if rng.random() < 0.3:
            options["kv_unified"] = True
    if rng.random() < 0.25:
        options["n_ctx"] = rng.choice((8192, 16384, 32768)) * (1 if options.get("kv_unified") else slots)
    if rng.random() < 0.2:
        options["type_k"] = options["type_v"] = "q8_0"
    if rng.random() < 0.3:
        options["host_memory"] = rng.choice((8, 16, 32, 64, 128, 256, 512)) * GIB
    if rng.random() < 0.15:
        options["margin"] = rng.choice((0, 256, 512, 2048, 4096)) * MIB
    return Machine(number, shape, tuple(cards), options)


def draw_mixed(number: int) -> Machine:
    """The machine with a ``number`` among those with an integrated GPU beside their cards, drafts, or both."""
    rng = random.Random(f"mixed {number}")
    machine = draw(rng.randrange(1 << 30), 4)
    kind = rng.choice(("integrated", "drafts", "both"))
    shape, options, cards = machine.shape, dict(machine.options), machine.cards
    if kind != "drafts":
        cards = (*cards, Card(rng.choice(INTEGRATED)))
        # it shares the host's memory, so the host has as much
        options.pop("host_memory", None)
    if kind != "integrated":
        shape = rng.choice(sorted(DRAFTS))
        options |= DRAFTS[shape]
    return Machine(number, shape, cards, options)


def draw_plain(number: int) -> Machine:
    """The machine with a ``number`` among those that most people have: one to four free cards, and long prompts."""
    rng = random.Random(f"plain {number}")
    some = [rng.choice(PLAIN) for _ in range(rng.choice((1, 1, 1, 2)))]
    cards = tuple(Card(rng.choice(some)) for _ in range(rng.choice((1, 1, 1, 1, 2, 2, 2, 3, 4))))
    slots, n_ctx = rng.choice((1, 1, 1, 1, 2, 4)), rng.choice((8192, 16384, 32768, 65536, 131072))
    options: dict[str, Any] = {"prompt": 3 * n_ctx // 4, "n_ctx": n_ctx * slots, "n_seq_max": slots}
    if rng.random() < 0.25:
        options["type_k"] = options["type_v"] = "q8_0"
    if rng.random() < 0.3:
        options["host_memory"] = rng.choice((32, 64, 96, 128, 192)) * GIB
    return Machine(number, rng.choice(SHAPES), cards, options)


def draw_remote(number: int) -> Machine:
    """The machine with a ``number`` among those with an rpc-server beside their cards."""
    rng = random.Random(f"remote {number}")
    return replace(draw(rng.randrange(1 << 30), 3), number=number, server=rng.randrange(2 * GIB, 48 * GIB) // MIB * MIB)


def _card(name: str, rng: random.Random) -> Card:
    kind = rng.random()
    if kind < 0.6:
        return Card(name)
    total = parse_gpus([name])[0].free
    if kind < 0.75:
        free = rng.randrange(300 * MIB, 1100 * MIB)
    elif kind < 0.88:
        free = rng.randrange(1100 * MIB, 3 * GIB)
    else:
        free = rng.randrange(total // 3, total)
    return Card(name, min(total, free) // MIB * MIB)


def better(machine: Machine) -> list[tuple[str, Machine]]:
    """Machines on which nothing may be worse, each with what it has more."""
    rng = random.Random(f"better than {machine.number}")
    cards, options = machine.cards, machine.options
    found = []
    if len(cards) < 15:
        names = [card.name for card in cards if card.name not in INTEGRATED]
        same = parse_gpus([names[0]])[0].profile
        kinds = [*names, *(name for name in CARDS if parse_gpus([name])[0].profile == same)]
        tiny = Card(rng.choice(names), rng.randrange(300, 3000) * MIB)
        for what, card in ("a small card", tiny), ("a card", _card(rng.choice(kinds), rng)):
            at = rng.randrange(len(cards) + 1)
            found.append((f"{what}: {card.spec} at {at}", replace(machine, cards=(*cards[:at], card, *cards[at:]))))
    at = rng.randrange(len(cards))
    full, free = parse_gpus([cards[at].name])[0], parse_gpus([cards[at].spec])[0].free
    if free < full.total:
        freed = Card(cards[at].name, rng.randrange(free // MIB, full.total // MIB + 1) * MIB)
        found.append((f"memory: {freed.spec} at {at}", replace(machine, cards=(*cards[:at], freed, *cards[at + 1 :]))))
    if memory := options.get("host_memory"):
        more = memory + rng.randrange(1, 64) * GIB
        found.append((f"host memory: {more // GIB} GiB", machine.having(host_memory=more)))
    if margin := options.get("margin", DEFAULT_MARGIN):
        less = rng.randrange(margin // MIB) * MIB
        found.append((f"a smaller margin: {less // MIB} MiB", machine.having(margin=less)))
    # the memory of an integrated GPU reads up to 256 GB/s
    speed = rng.randrange(42, 300) + (256 if any(card.name in INTEGRATED for card in cards) else 0)
    found.append((f"a faster host: {speed} GB/s", machine.having(host_bandwidth=f"{speed}GB/s")))
    link = rng.uniform(1.1, 4.0)
    found.append((f"a faster link: {link:.2f} times", replace(machine, link=link)))
    if machine.server:
        more = replace(machine, server=machine.server + rng.randrange(1, 24) * GIB)
        found.append((f"memory of the server: {more.server // MIB} MiB", more))
    lever = rng.choice(list(LEVERS))
    found.append((f"a lever: {lever}", machine.having(allow=[lever])))
    if machine.slots > 1:
        less = machine.having(n_seq_max=machine.slots // 2)
        if "n_ctx" in options:
            # of the same length: with twice of it, compute buffers grow
            less = less.having(n_ctx=options["n_ctx"] // machine.streams * less.streams)
        found.append((f"fewer slots: {less.slots}", less))
    return found


def renamed(machine: Machine) -> list[VirtualDevice] | None:
    """The same cards where equal ones have changed names, ``None`` where no two are equal."""
    gpus = list(machine.gpus)
    rng = random.Random(f"renamed {machine.number}")
    groups: dict[VirtualDevice, list[int]] = {}
    for index, gpu in enumerate(gpus):
        groups.setdefault(replace(gpu, name=""), []).append(index)
    changed = False
    for indices in groups.values():
        shuffled = rng.sample(indices, len(indices))
        names = [gpus[index].name for index in shuffled]
        for index, name in zip(indices, names, strict=True):
            changed |= gpus[index].name != name
            gpus[index] = replace(gpus[index], name=name)
    return gpus if changed else None
