"""Published measurements of ``tests/data/speeds`` as the cost model's input.

A row says in words what ran where. ``reference.toml`` says what its names mean; what a row leaves open makes it
unusable, and ``Unusable`` says why.
"""

from __future__ import annotations

import csv
import functools
import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fitter.llama.types import VirtualDevice
from fitter.machine import gpu_catalogue
from fitter.machine.gpu_catalogue import CatalogueGpu
from fitter.machine.speed import DeviceSpeed, HostSpeed, named, speed_of
from fitter.planning.placing.layer_sizes import HOST
from fitter.planning.speed.cost import Attention, Layer, Weights, Work
from fitter.storage import parse_toml

DATA = Path(__file__).resolve().parents[1] / "data" / "speeds"
PLACEMENTS = DATA / "placements.csv"
LATER = DATA / "later_placements.csv"
"""Published after the constants were fitted on the others."""
MIXTURES = DATA / "mixtures.csv"
"""Mixtures of experts that are whole on one card; every second row was fitted, from the first on."""
GPUS = DATA / "gpus_tg128.csv"

GB = 1e9
MIB = 1024**2

KV_BITS = {"f16": 16.0, "q8_0": 8.5, "q4_0": 4.5}


class Unusable(Exception):
    """Why the cost model can say nothing of a row."""


@dataclass(frozen=True)
class Measured:
    """One row. Speeds in tokens per second, ``None`` where the row has none; ``depth``: tokens in the cache at
    generation. ``prompt`` tokens were processed after ``prompt_after``.

    Rows with the same ``cell`` are arms to compare: same model, quantization, machine, engine and depth. ``complete``:
    whether the bandwidth of the host is stated, where it matters.
    """

    line: int
    source: str
    machine: str
    cell: tuple[str, ...]
    arm: str
    work: Work
    devices: tuple[DeviceSpeed, ...]
    host: HostSpeed
    depth: int
    prompt: int
    prompt_after: int
    generation_tps: float | None
    prompt_tps: float | None
    complete: bool


@dataclass(frozen=True)
class Skipped:
    """A row that is not used, and why."""

    line: int
    source: str
    arm: str
    reason: str


# ---- names


@functools.cache
def _reference() -> dict[str, Any]:
    data: dict[str, Any] = parse_toml((DATA / "reference.toml").read_text(encoding="utf-8"))
    return data


def _entry(table: str, text: str, what: str, model: str = "") -> dict[str, Any]:
    for entry in _reference()[table]:
        if re.search(entry["match"], text, re.IGNORECASE) and re.search(entry.get("model", ""), model, re.IGNORECASE):
            found: dict[str, Any] = entry
            return found
    raise Unusable(what)


def device_speed(name: str, backend: str) -> DeviceSpeed:
    """Return the speed of a card by its datasheet."""
    kind = backend.split()[0].lower()
    try:
        entry = _entry("device", name, f"no datasheet of {name!r}")
    except Unusable:
        card = _card(name)
        if card is None:
            raise
        entry = {"card": card.key}
    if "card" in entry:
        card = gpu_catalogue.gpus()[entry["card"]]
        virtual = VirtualDevice("", card.description, kind, card.compute_capability, card.total, card.free)
        speed = speed_of(virtual)
        return replace(speed, pcie=entry["pcie"] * GB) if "pcie" in entry else speed
    figures = entry["figures"]
    return DeviceSpeed(
        figures["bandwidth"] * GB,
        figures["compute"] * 1e12,
        figures["pcie"] * GB,
        kind,
        figures["capability"],
        f"datasheet: {name}",
        True,
    )


def _card(name: str) -> CatalogueGpu | None:
    """The card of the catalogue, without what else the column says: how many, memory, slot, cores."""
    plain = re.sub(r"\([^)]*\)|^\d+x |PCIe ?\d.*|<.*| \d+c\b", "", name).strip()
    for text in (plain, re.sub(r" \d+ ?GB$", "", plain)):
        if card := gpu_catalogue.find(text):
            return card
        if cards := named(text) or named(f"GeForce {text}"):
            return cards[0]
    return None


def _devices(gpu: str, source: str) -> tuple[DeviceSpeed, ...]:
    if not gpu or "not named" in gpu or "not stated" in gpu:
        gpu = next((entry["gpu"] for entry in _reference()["elsewhere"] if entry["source"] in source), "")
        if not gpu:
            return ()
    count = re.match(r"(\d+)x ", gpu)
    backend = re.search(r"vulkan|rocm", gpu, re.IGNORECASE)
    return (device_speed(gpu, backend[0] if backend else "cuda"),) * (int(count[1]) if count else 1)


def _host(cpu: str, ram: str, machine: str) -> tuple[HostSpeed, bool]:
    """The host, and whether its bandwidth is stated: in the table, or in the row."""
    achieved = _reference()["host_memory"]["achieved"]
    text = f"{cpu} {ram}"
    try:
        entry = _entry("host", text, "")
    except Unusable:
        entry = {"source": "the row", "threads": _threads(text)}
        if match := re.search(r"([\d.]+) ?GB/s( theoretical)?", text):
            entry["theoretical" if match[2] else "stated"] = float(match[1])
        elif theoretical := _theoretical(text):
            entry["theoretical"] = theoretical
    if "stated" in entry:
        return HostSpeed(entry["stated"] * GB, entry["source"], entry["threads"]), True
    if "theoretical" in entry:
        return HostSpeed(entry["theoretical"] * achieved * GB, entry["source"], entry["threads"]), True
    return HostSpeed(_reference()["fitted_host"].get(machine, 50) * GB, "not stated", entry["threads"]), False


def _threads(text: str) -> int:
    match = re.search(r"(\d+) ?(?:c\b|cores|-core|threads|t\b)", text)
    return int(match[1]) if match else 0


def _theoretical(text: str) -> float | None:
    """GB/s of the channels that ``text`` names: two where it names a speed only."""
    speed = re.search(r"DDR[345][- @]*(\d{4})|@ ?(\d{4})|(\d{4}) ?M(?:T/s|Hz)", text, re.IGNORECASE)
    if not speed:
        return None
    words = {"dual": 2, "quad": 4, "octa": 8, "eight": 8, "twelve": 12}
    channels = 2
    if match := re.search(r"(\d+)[- ]?ch", text):
        channels = int(match[1])
    elif match := re.search(r"(dual|quad|octa|eight|twelve)[- ]channel", text, re.IGNORECASE):
        channels = words[match[1].lower()]
    elif (match := re.search(r"(\d+) ?x ?\d*(?: ?GB)? ?DDR", text)) and int(match[1]) > 4:
        channels = int(match[1])
    return channels * int(speed[1] or speed[2] or speed[3]) * 8 / 1000


# ---- models


@dataclass(frozen=True)
class Tensor:
    """A weight of a layer: bytes and number of parameters."""

    name: str
    n_params: float
    bytes: float
    experts: bool = False


@dataclass(frozen=True)
class Model:
    """A model's tensors per layer, the output as the last, and what its attention reads."""

    layers: tuple[tuple[Tensor, ...], ...]
    attention: tuple[Attention | None, ...]
    n_embd: int
    n_expert: int
    n_expert_used: int


def model_of(name: str, quant: str, size_gib: float | None, kv_type: str, flash: bool = True) -> Model:
    """The model of that name in that quantization; ``size_gib`` of the file scales what the quantization says."""
    facts = _entry("model", name, f"no architecture of {name!r} is published")["facts"]
    bits = _entry("quant", quant, f"no bits per weight of {quant!r}", name)["bits"]
    counts = list(_counts(facts))
    embedding = facts["n_vocab"] * facts["n_embd"] * bits[1] / 8
    total = sum(n * bits[kind] / 8 for layer in counts for _, n, kind, _ in layer) + embedding
    scale = (size_gib - facts.get("table", 0)) * 1024**3 / total if size_gib else 1.0
    layers = tuple(
        tuple(Tensor(tensor, n, n * bits[kind] / 8 * scale, experts) for tensor, n, kind, experts in layer)
        for layer in counts
    )
    moe = facts.get("moe", [0, 0])
    return Model(layers, tuple(_attentions(facts, kv_type, flash)), facts["n_embd"], moe[0], moe[1])


def _counts(facts: dict[str, Any]) -> Iterator[list[tuple[str, float, int, bool]]]:
    """Per layer: name, parameters, which of the quantization's bits, whether routed experts."""
    n_embd, n_layer = facts["n_embd"], facts["n_layer"]
    heads, kv_heads, head = facts["n_head"], facts["n_head_kv"], facts["head"]
    for i in range(n_layer):
        layer: list[tuple[str, float, int, bool]] = []
        gated = 2 if "recurrent" in facts else 1
        if "mla" in facts:
            kv_rank, rope, q_rank, nope, value = facts["mla"]
            query = heads * (nope + rope)
            attention = n_embd * q_rank + q_rank * query if q_rank else n_embd * query
            attention += n_embd * (kv_rank + rope) + kv_rank * heads * (nope + value) + heads * value * n_embd
        elif "recurrent" in facts and (i + 1) % facts["every"]:
            attention = facts["recurrent"]
        else:
            attention = n_embd * head * (heads * (1 + gated) + 2 * kv_heads)
        layer.append((f"blk.{i}.attn_qkvo.weight", attention, 1, False))
        moe = facts.get("moe")
        if moe and i >= moe[4]:
            for part in ("gate", "up", "down"):
                layer.append((f"blk.{i}.ffn_{part}_exps.weight", moe[0] * n_embd * moe[2], 0, True))
            if moe[3]:
                layer.append((f"blk.{i}.ffn_shexp.weight", 3 * n_embd * moe[3], 1, False))
        else:
            for part in ("gate", "up", "down"):
                layer.append((f"blk.{i}.ffn_{part}.weight", n_embd * facts["n_ff"], 0, False))
        yield layer
    yield [("output.weight", n_embd * facts["n_vocab"], 2, False)]


def _attentions(facts: dict[str, Any], kv_type: str, flash: bool) -> Iterator[Attention | None]:
    match = re.match(r"K (\w+), V (\w+)", kv_type)
    named = (match[1], match[2]) if match else (kv_type, kv_type)
    if "quantkv 1" in kv_type:
        named = ("q8_0", "q8_0")
    key_bits, value_bits = (KV_BITS.get(name, 16.0) for name in named)
    heads, kv_heads, head = facts["n_head"], facts["n_head_kv"], facts["head"]
    quantized = min(key_bits, value_bits) < 16
    for i in range(facts["n_layer"]):
        every = facts.get("every", 1)
        apart = (i + 1) % every != 0
        if "mla" in facts:
            rank, rope = facts["mla"][:2]
            yield Attention((rank + rope) * key_bits / 8, 2 * heads * (2 * rank + rope), 1, 0, quantized, flash)
        elif apart and "recurrent" in facts:
            yield None
        else:
            kv_bytes = kv_heads * head * (key_bits + value_bits) / 8
            window = facts.get("window", 0) if apart else 0
            yield Attention(kv_bytes, 4 * heads * head, heads / kv_heads, window, quantized, flash)
    yield None


# ---- placements


@dataclass(frozen=True)
class Where:
    """Which layers are on devices (the last ``n_gpu_layers``, the output counted), what is apart, where the cache."""

    n_gpu_layers: int
    apart: Callable[[int, str], int | None]
    cache_on_host: bool = False
    shares: tuple[int, ...] = ()
    """Of each device, as ``-ts`` has them; without, equal ones."""


def _nothing(layer: int, name: str) -> int | None:
    return None


def where_of(words: str, model: Model, fit: Callable[[], int] | None) -> Where:
    """What a row's placement says. ``fit``: layers that upstream's fit would put on the device, where that is known."""
    shares = re.search(r" -ts ([\d,]+)", words)
    where = _where_of(words, model, fit)
    return replace(where, shares=tuple(map(int, shares[1].split(",")))) if shares else where


def _where_of(words: str, model: Model, fit: Callable[[], int] | None) -> Where:
    text = words.lower()
    units = len(model.layers)
    # a note in brackets is not the placement, unless it is the number of a planner's blocks
    plain = re.sub(r"\([^)]*\)", "", text)
    if re.search(r"resident|whole model|all on gpu", plain) and "cache" not in plain:
        return Where(units, _nothing)
    if re.search(r"^cpu only|weights\+kv cpu|^ngl 0$", plain):
        return Where(0, _nothing)
    if re.search(r"cache .*on host", plain):
        return Where(units, _nothing, True)
    if match := re.search(r"planner spill.*: (\d+)/(\d+)", text):
        count = int(match[1])
        return Where(units, _ffn(lambda layer: HOST if layer >= units - 1 - count else None))
    if plain.strip() == "fit":
        if fit is None:
            raise Unusable("what was fitted depends on free memory that is not stated")
        return Where(fit(), _nothing)
    if match := re.match(r"(\d+) of (\d+) layers on gpu", plain):
        return Where(int(match[1]), _nothing)
    if match := re.search(r"regex (\S+?)\) on cpu", text):
        return Where(units, _patterns([match[1]]))
    layers = re.search(r"-?ngl (\d+)", plain)
    on_devices = min(int(layers[1]), units) if layers else units
    if match := re.search(r"-ot (\S+)", plain.replace('"', "")):
        patterns = [part.removesuffix("=cpu") for part in match[1].split(",")]
        return Where(on_devices, _patterns(patterns), "-nkvo" in plain)
    if match := re.search(r"n-?cpu-?moe (\d+)|-ncmoe (\d+)", plain):
        first = int(match[1] or match[2])
        return Where(on_devices, _experts(lambda layer, part: HOST if layer < first else None))
    if match := re.search(r"gate_exps of blk (\d+)-(\d+) \+ all up/down exps cpu", plain):
        a, b = int(match[1]), int(match[2])
        return Where(on_devices, _experts(lambda layer, part: HOST if part != "gate" or a <= layer <= b else None))
    if match := re.search(r"up/gate exps of blk (\d+)-(\d+) gpu, rest exps cpu", plain):
        a, b = int(match[1]), int(match[2])
        return Where(on_devices, _experts(lambda layer, part: None if part != "down" and a <= layer <= b else HOST))
    if match := re.search(r"all ffn weights|all ffn on host", text):
        return Where(on_devices, _ffn(lambda layer: HOST))
    if match := re.search(r"ffn of last (\d+) of", plain):
        count = int(match[1])
        return Where(on_devices, _ffn(lambda layer: HOST if layer >= units - 1 - count else None))
    if match := re.search(r"ffn of first (\d+) of \d+ layers on gpu, other ffn cpu", plain):
        count = int(match[1])
        return Where(on_devices, _ffn(lambda layer: None if layer < count else HOST))
    if match := re.search(r"ffn of layers (\d+)-(\d+) cpu", plain):
        a, b = int(match[1]), int(match[2])
        return Where(on_devices, _ffn(lambda layer: HOST if a <= layer <= b else None))
    ranges = re.findall(r"(\d+)-(\d+) gpu(\d+)", plain)
    if ranges and "rest cpu" in plain:
        found = {i: int(d) for a, b, d in ranges for i in range(int(a), int(b) + 1)}
        return Where(on_devices, _ffn(lambda layer: found.get(layer, HOST)))
    if match := re.search(r"ffn (?:of )?(?:layers|blk) (\d+)-(\d+) on gpu, (?:rest|exps|rest exps|\d+-\d+) cpu", plain):
        a, b = int(match[1]), int(match[2])
        return Where(on_devices, _ffn(lambda layer: None if a <= layer <= b else HOST))
    if match := re.search(r"blk (\d+) ffn gpu, exps=cpu", plain):
        kept = int(match[1])
        return Where(on_devices, _experts(lambda layer, part: None if layer == kept else HOST))
    if re.search(r"exps=cpu|-cmoe|cpu-moe|all experts|experts on cpu", text):
        return Where(on_devices, _experts(lambda layer, part: HOST))
    if layers:
        return Where(on_devices, _nothing)
    raise Unusable(f"placement {words!r} is not understood")


def _ffn(place: Callable[[int], int | None]) -> Callable[[int, str], int | None]:
    """Dense FFN tensors, or the routed experts where a model has those: shared experts stay."""
    return lambda layer, name: place(layer) if ".ffn_" in name and "shexp" not in name else None


def _experts(place: Callable[[int, str], int | None]) -> Callable[[int, str], int | None]:
    return lambda layer, name: place(layer, name.split("_")[1]) if "_exps" in name else None


def _patterns(patterns: list[str]) -> Callable[[int, str], int | None]:
    return lambda layer, name: HOST if any(re.search(pattern, name) for pattern in patterns) else None


def work_of(model: Model, where: Where, n_devices: int, n_ubatch: int) -> Work:
    """``model`` placed: layers on devices in ranges, as many on each as its share says."""
    units = len(model.layers)
    first = units - where.n_gpu_layers
    ends = list(itertools.accumulate(where.shares or (1,) * n_devices))
    layers: list[Layer] = []
    known: dict[Layer, Layer] = {}
    for i, (tensors, attention) in enumerate(zip(model.layers, model.attention, strict=True)):
        home = HOST
        if i >= first and n_devices:
            home = sum(end * (units - first) <= (i - first) * ends[-1] for end in ends)
        groups: dict[tuple[int, bool], list[Tensor]] = {}
        for tensor in tensors:
            apart = where.apart(i, tensor.name)
            groups.setdefault((home if apart is None else apart, tensor.experts), []).append(tensor)
        weights = tuple(
            Weights(place, sum(t.bytes for t in group), sum(t.n_params for t in group), experts)
            for (place, experts), group in groups.items()
        )
        layer = Layer(home, weights, attention, HOST if where.cache_on_host else None)
        layers.append(known.setdefault(layer, layer))
    return Work(tuple(layers), model.n_embd, model.n_expert, model.n_expert_used, n_ubatch)


def whole_layers(model: Model, free_mib: float, n_ctx: int) -> int:
    """Layers, the output counted, that upstream's fit puts on a device: whole ones with their cache, 1 GiB left free.

    Half a GiB is taken for compute buffers.
    """
    left = (free_mib - 1024 - 512) * MIB
    count = 0
    for tensors, attention in reversed(list(zip(model.layers, model.attention, strict=True))):
        left -= sum(t.bytes for t in tensors) + (attention.kv_bytes * n_ctx if attention else 0)
        if left < 0:
            break
        count += 1
    return count


# ---- rows


def _number(text: str) -> float | None:
    return float(text) if re.fullmatch(r"[\d.]+", text.strip()) else None


def _live(text: str) -> tuple[int, int | None]:
    """Tokens in the cache, and of the prompt where the same column says that."""
    text = text.strip()
    if match := re.fullmatch(r"(\d+)K", text):
        return int(match[1]) * 1024, None
    if match := re.match(r"pp ?(\d+)", text):
        return 0, int(match[1])
    if match := re.match(r"(\d+) prompt", text):
        return int(match[1]), int(match[1])
    if match := re.match(r"(\d+)", text):
        return int(match[1]), None
    return 0, None


def _size(quant: str) -> float | None:
    if match := re.search(r"~?([\d.]+) GiB\)", quant):
        return float(match[1])
    if match := re.search(r"~?([\d.]+) ?GB\)", quant):
        return float(match[1]) * GB / 1024**3
    return None


def placements(path: Path = PLACEMENTS) -> tuple[list[Measured], list[Skipped]]:
    """Rows of a file like ``placements.csv`` that the cost model can price, and those that it cannot."""
    usable: list[Measured] = []
    skipped: list[Skipped] = []
    with path.open(encoding="utf-8", newline="") as file:
        for line, row in enumerate(csv.DictReader(file), start=2):
            row = {key: value or "" for key, value in row.items()}
            try:
                usable.append(_placement(line, row))
            except Unusable as reason:
                skipped.append(Skipped(line, row["source"], row["arm"], str(reason)))
    return usable, skipped


def _placement(line: int, row: dict[str, str]) -> Measured:
    if "SUSPECT" in row["notes"]:
        raise Unusable("marked SUSPECT: probably measured with speculative decoding")
    generation, prompt_speed = _number(row["tg_tps"]), _number(row["pp_tps"])
    if generation is None and prompt_speed is None:
        raise Unusable("no speed measured")
    depth, prompt = _live(row["live_tokens"])
    after = depth
    if match := re.search(r"PP=(\d+)", row["notes"]):
        prompt = int(match[1])
    elif depth:
        # whoever gives one speed for a prompt of that length means all of it
        prompt, after = depth, 0
    ubatch = re.search(r"\bub(?:atch)? (\d+)|n_ubatch (\d+)", row["notes"])
    n_ubatch = int(ubatch[1] or ubatch[2]) if ubatch else 512
    if not row["quant"]:
        raise Unusable("quantization not stated")
    engine = _engine(row)
    # other programs attend on the CPU with matrix products, flash attention or not, as llama.cpp does without
    flash = engine == "llama.cpp" and not re.search(r"no FA\b", row["placement"])
    model = model_of(row["model"], row["quant"], _size(row["quant"]), row["kv_type"], flash)
    free, n_ctx = _number(row["gpu_free_mib"]), _number(row["n_ctx"])
    fit = (lambda: whole_layers(model, free, int(n_ctx))) if free and n_ctx and not model.n_expert else None
    words = row["placement"]
    if re.fullmatch(r"(-?ngl|ngl) .*", words) and "experts on CPU" in row["arm"] and "-ot" not in words:
        words += ", all experts on CPU"
    where = where_of(words, model, fit)
    devices = _devices(row["gpu"], row["source"]) if where.n_gpu_layers else ()
    if where.n_gpu_layers and not devices:
        raise Unusable("GPU not stated")
    work = replace(work_of(model, where, len(devices), n_ubatch), is_mapped=bool(re.search(r"\bmmap\b", row["notes"])))
    on_host = any(w.place == HOST for layer in work.layers for w in layer.weights) or where.cache_on_host
    machine = " ".join(f"{row['host_cpu']} {row['host_ram']}".replace(",", " ").split())
    machine = machine or f"{row['source']} {row['gpu']}"
    host, known = _host(row["host_cpu"], row["host_ram"], machine)
    depth_key = "0" if row["live_tokens"] == "short" else row["live_tokens"]
    cell = (_plain(row["model"]), _plain(row["quant"]), machine, engine, depth_key)
    return Measured(
        line,
        row["source"],
        machine,
        cell,
        f"{row['arm']}: {row['placement']}",
        work,
        devices,
        host,
        depth,
        prompt or 512,
        after,
        generation,
        prompt_speed,
        known or not on_host,
    )


def _plain(text: str) -> str:
    return re.sub(r"\s*\([^)]*\)", "", text)


def _engine(row: dict[str, str]) -> str:
    """The program that was measured; rows of different ones are no arms of one comparison."""
    notes = row["notes"]
    if "koboldcpp" in notes:
        return "koboldcpp"
    if match := re.search(r"ik (PR\d+)", notes):
        return f"ik_llama.cpp {match[1]}"
    of_ik = "ik_llama.cpp#" in row["source"] and not re.search(r"mainline|; llama\.cpp", notes)
    return "ik_llama.cpp" if of_ik or "ik_llama.cpp" in notes else "llama.cpp"


def full_offload(path: Path = GPUS) -> tuple[list[Measured], list[Skipped]]:
    """Rows of ``gpus_tg128.csv``: a model that is whole on one device."""
    usable: list[Measured] = []
    skipped: list[Skipped] = []
    with path.open(encoding="utf-8", newline="") as file:
        for line, row in enumerate(csv.DictReader(file), start=2):
            name = f"{row['gpu']} {row['backend']} {row['quant']}"
            try:
                if "NOT tg128" in row["source"]:
                    raise Unusable("an average over other tests, not tg128")
                device = device_speed(row["gpu"], row["backend"])
                model = model_of(row["model"], row["quant"], _number(row["size_gib"]), "f16")
            except Unusable as reason:
                skipped.append(Skipped(line, row["source"], name, str(reason)))
                continue
            work = work_of(model, Where(len(model.layers), _nothing), 1, 512)
            usable.append(
                Measured(
                    line,
                    row["source"],
                    row["gpu"],
                    (row["gpu"], row["backend"], row["quant"], row["fa"]),
                    name + (" fa" if row["fa"] == "1" else ""),
                    work,
                    (device,),
                    HostSpeed(50 * GB, "of no matter"),
                    0,
                    512,
                    0,
                    _number(row["tg128"]),
                    _number(row["pp512"]),
                    True,
                )
            )
    return usable, skipped
