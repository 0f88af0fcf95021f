"""Models and machines, and what a user may ask of llama-server: its arguments, and fitter's parameters for the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fitter.kinds import Flag
from fitter.parameters import LoadKeywords, taken_by
from fitter.programs import facts

DRAFT = "llama-3.1-8b"
"""The shape of the draft model."""
_DRAFTS = facts("llama-server").draft_tokens


def keywords_of(words: Sequence[str]) -> dict[str, Any]:
    """What ``words`` of a command line say, as keywords of ``fitter.measure`` and ``fitter.fit``."""
    found: dict[str, Any] = {}
    waiting = list(words)
    while waiting:
        word = waiting.pop(0)
        each = next(each for each in taken_by(LoadKeywords) if word in (*each.positive, *each.negative))
        if isinstance(each.kind, Flag):
            found[each.name] = word in each.positive
        elif each.kind.is_repeated:
            found[each.name] = (*found.get(each.name, ()), waiting.pop(0))
        else:
            found[each.name] = each.kind.parse(waiting.pop(0))
    return found


@dataclass(frozen=True)
class Pair:
    """A shape of ``tools/shapes.py`` on virtual GPUs.

    ``placement``: where the model is put, for comparing one load. ``options``: what else is asked for.
    """

    shape: str
    gpus: tuple[str, ...]
    placement: tuple[str, ...]
    options: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """How it is called in reports."""
        words = "".join((*self.placement, *self.options)).lstrip("-")
        return f"{self.shape}/{'+'.join(self.gpus).replace(' ', '')}/{words}"


@dataclass(frozen=True)
class Feature:
    """Something that llama-server is asked for by ``options``, and ``fitter.fit`` by ``keywords``.

    ``drafted``: the most tokens that are drafted at a time. ``measured``: what that sets of a load, as keywords of
    ``fitter.measure``. ``beside``: what is loaded beside the model: ``draft``, ``mtp``, ``projector`` or nothing.
    ``shapes``: those that have it, where not all do.
    """

    name: str
    options: tuple[str, ...] = ()
    keywords: Mapping[str, Any] = field(default_factory=dict, hash=False)
    drafted: int = 0
    measured: Mapping[str, Any] = field(default_factory=dict, hash=False)
    beside: str = ""
    shapes: tuple[str, ...] = ()

    def fits(self, pair: Pair) -> bool:
        """Whether the pair's model can do it."""
        return not self.shapes or pair.shape in self.shapes


@dataclass(frozen=True)
class Case:
    """A pair with a feature; ``n_parallel`` slots, and ``kv_unified``, ``None`` where it is not said."""

    pair: Pair
    feature: Feature
    n_parallel: int
    kv_unified: bool | None

    @property
    def name(self) -> str:
        """How it is called in reports."""
        return "/".join((self.pair.name, self.feature.name, "".join(self.slots).lstrip("-")))

    @property
    def slots(self) -> tuple[str, ...]:
        """The options for them."""
        cache = {True: ("-kvu",), False: ("-no-kvu",), None: ()}
        return ("-np", str(self.n_parallel), *cache[self.kv_unified])


def _pair(shape: str, gpus: str, placement: str, options: str = "") -> Pair:
    return Pair(shape, tuple(gpus.split("+")), tuple(placement.split()), tuple(options.split()))


_ON_HOST = "-ot ffn_.*_exps=CPU"

PAIRS: tuple[Pair, ...] = (
    _pair("llama-3.1-8b", "rtx-4090", "-c 8192 -ngl 99"),
    _pair("llama-3.1-8b", "8GiB", "-c 16384 -ngl 20"),
    _pair("llama-3.1-8b", "6GiB+3GiB", "-c 8192 -ngl 99 -ts 2,1"),
    _pair("llama-3.1-8b", "rx-7900-xtx", "-c 32768 -ngl 99", "-ub 1024"),
    _pair("llama-3.1-8b", "m2-ultra", "-c 32768 -ngl 99"),
    _pair("llama-3.1-8b", "arc-a380", "-c 4096 -ngl 12"),
    _pair("llama-3.1-8b", "rtx-3060-12gb", "-c 8192 -ngl 99", "-b 256 -ub 64"),
    _pair("llama-3.1-70b", "2x rtx-3090", "-c 8192 -ngl 99 -ts 1,1"),
    _pair("llama-3.1-70b", "rtx-4090", "-c 8192 -ngl 40"),
    _pair("llama-3.1-70b", "rtx-5090+gtx-1080-ti", "-c 16384 -ngl 70 -ts 3,1", "-ctk q8_0 -ctv q8_0 -fa on"),
    _pair("qwen3-32b", "rtx-4090", "-c 16384 -ngl 99", "-fa off"),
    _pair("qwen3-32b", "12GiB+8GiB", "-c 8192 -ngl 60 -ts 3,2"),
    _pair("qwen3-32b", "rtx-5090", "-c 40960 -ngl 99", "-nkvo"),
    _pair("qwen3-30b-a3b", "12GiB", f"-c 32768 -ngl 99 {_ON_HOST}"),
    _pair("qwen3-30b-a3b", "8GiB+6GiB", "-c 8192 -ngl 20 -ts 1,1"),
    _pair("qwen3-30b-a3b", "rtx-4090", f"-c 8192 -ngl 99 {_ON_HOST}", "--no-op-offload"),
    _pair("qwen3-235b-a22b", "rtx-4090", f"-c 8192 -ngl 99 {_ON_HOST}"),
    _pair("deepseek-v3.1", "rtx-5090", f"-c 8192 -ngl 99 {_ON_HOST}"),
    _pair("kimi-k2", "2x 48073MiB", "-c 16384 -ngl 10 -ts 1,1"),
    _pair("gemma3-12b", "8GiB", "-c 16384 -ngl 99"),
    _pair("gemma3-12b", "rtx-4090", "-c 32768 -ngl 99", "--swa-full"),
    _pair("gemma3-12b", "rx-7900-xtx", "-c 8192 -ngl 30"),
    _pair("gpt-oss-20b", "rtx-4090", "-c 32768 -ngl 99"),
    _pair("gpt-oss-120b", "rtx-4090+12GiB", f"-c 8192 -ngl 99 -ts 2,1 {_ON_HOST}"),
    _pair("qwen3-next-80b-a3b", "rtx-4090", f"-c 16384 -ngl 99 {_ON_HOST}"),
    _pair("nemotron-h-9b", "4GiB+3GiB", "-c 8192 -ngl 30 -ts 1,1"),
    _pair("nemotron-h-9b", "rtx-4060", "-c 16384 -ngl 99"),
    _pair("glm45-air", "2x rtx-5090", "-c 16384 -ngl 99 -ts 1,1"),
    _pair("glm45-air", "rtx-4090", f"-c 8192 -ngl 99 {_ON_HOST}"),
    _pair("glm45-air", "h100-pcie", "-c 32768 -ngl 99", "-ub 2048"),
)

_SIMPLE = _DRAFTS["draft-simple"]
_MTP = _DRAFTS["draft-mtp"]

FEATURES: tuple[Feature, ...] = (
    Feature("nothing"),
    Feature("draft", ("--spec-type", "draft-simple"), {}, _SIMPLE, beside="draft"),
    Feature(
        "draft of 7", ("--spec-type", "draft-simple", "--spec-draft-n-max", "7"), {"draft_max": 7}, 7, beside="draft"
    ),
    Feature(
        "mtp",
        ("--spec-type", "draft-mtp"),
        {"mtp": True},
        _MTP,
        {"load_mtp": True, "n_rs_seq": _MTP},
        "mtp",
        ("glm45-air",),
    ),
    Feature("n-grams", ("--spec-type", "ngram-mod"), {"spec_type": ("ngram-mod",)}, _DRAFTS["ngram-mod"]),
    Feature(
        "n-grams of a map", ("--spec-type", "ngram-map-k"), {"spec_type": ("ngram-map-k",)}, _DRAFTS["ngram-map-k"]
    ),
    Feature(
        "draft and n-grams",
        ("--spec-type", "draft-simple,ngram-cache"),
        {"spec_type": ("draft-simple", "ngram-cache")},
        _DRAFTS["ngram-cache"],
        beside="draft",
    ),
    Feature("embeddings", ("--embedding",), {"embedding": True}),
    Feature("reranking", ("--reranking",), {"reranking": True}, measured={"embedding": True, "pooling_type": "rank"}),
    Feature("projector", beside="projector", shapes=("llama-3.1-8b", "gemma3-12b")),
    Feature("sampling on the device", ("-bs",)),
)


def cases() -> list[Case]:
    """Every pair with every feature that it has, for one and four slots, with one cache and with one each."""
    return [
        Case(pair, feature, n_parallel, kv_unified)
        for pair in PAIRS
        for feature in FEATURES
        if feature.fits(pair)
        for n_parallel in (1, 4)
        for kv_unified in (False, True)
    ]
