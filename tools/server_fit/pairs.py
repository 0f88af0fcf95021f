"""Models and machines, and what a user may ask of llama-server: its arguments, and fitter's parameters for the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fitter.parameters.kinds import Flag
from fitter.parameters.table import BesideKeywords, LoadKeywords, ServerKeywords, taken_by
from fitter.programs import facts

DRAFT = "llama-3.1-8b"
"""The shape of the draft model."""
_DRAFTS = facts("llama-server").draft_tokens


_UNKNOWN = frozenset({"-bs"})
"""What takes nothing that a fit measures, llama-server's own included."""
_KNOWN = tuple(each for group in (LoadKeywords, ServerKeywords, BesideKeywords) for each in taken_by(group))


def keywords_of(words: Sequence[str]) -> dict[str, Any]:
    """What ``words`` of a command line say, as keywords of ``fitter.fit``."""
    found: dict[str, Any] = {}
    waiting = [word for word in words if word not in _UNKNOWN]
    while waiting:
        word = waiting.pop(0)
        each = next(each for each in _KNOWN if word in (*each.positive, *each.negative))
        if isinstance(each.kind, Flag):
            found[each.name] = word in each.positive
        elif each.kind.is_repeated:
            value = waiting.pop(0)
            found[each.name] = (*found.get(each.name, ()), *(value.split(",") if each.kind.has_commas else (value,)))
        else:
            found[each.name] = each.kind.parse(waiting.pop(0))
    return found


def of_a_load(keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Those of ``keywords`` that ``fitter.measure`` has."""
    names = {each.name for each in taken_by(LoadKeywords)}
    return {name: value for name, value in keywords.items() if name in names}


@dataclass(frozen=True)
class Pair:
    """A shape of ``tools/models/shapes.py`` on virtual GPUs.

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
    """Something that llama-server is asked for by ``options``.

    ``drafted``: the most tokens that are drafted at a time. ``measured``: what that sets of a load, as keywords of
    ``fitter.measure``. ``beside``: what is loaded beside the model: ``draft``, ``mtp``, ``projector`` or nothing.
    ``shapes``: those that have it, where not all do.
    """

    name: str
    options: tuple[str, ...] = ()
    drafted: int = 0
    measured: Mapping[str, Any] = field(default_factory=dict, hash=False)
    beside: str = ""
    shapes: tuple[str, ...] = ()

    def fits(self, pair: Pair) -> bool:
        """Whether the pair's model can do it."""
        return not self.shapes or pair.shape in self.shapes


@dataclass(frozen=True)
class Case:
    """A pair with a feature, and the options for the ``slots`` of llama-server."""

    pair: Pair
    feature: Feature
    slots: tuple[str, ...]

    @property
    def name(self) -> str:
        """How it is called in reports."""
        return "/".join((self.pair.name, self.feature.name, "".join(self.slots).lstrip("-") or "auto"))

    @property
    def options(self) -> tuple[str, ...]:
        """All options but those of the placement and of files."""
        return (*self.pair.options, *self.slots, *self.feature.options)


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

_MTP = _DRAFTS["draft-mtp"]


def _feature(name: str, options: str = "", drafted: str | int = 0, **more: Any) -> Feature:
    return Feature(name, tuple(options.split()), _DRAFTS[drafted] if isinstance(drafted, str) else drafted, **more)


def _mtp(name: str, options: str, n_max: int, drafted: int) -> Feature:
    measured = {"load_mtp": True, "n_rs_seq": n_max}
    return _feature(name, options, drafted, measured=measured, beside="mtp", shapes=("glm45-air",))


FEATURES: tuple[Feature, ...] = (
    _feature("nothing"),
    _feature("draft", "--spec-type draft-simple", "draft-simple", beside="draft"),
    _feature("draft of 7", "--spec-type draft-simple --spec-draft-n-max 7", 7, beside="draft"),
    _feature(
        *("draft on the host", "--spec-type draft-simple -devd none -ngld 0 -ctkd q8_0", "draft-simple"),
        beside="draft",
    ),
    _feature(
        *("a part of the draft", "--spec-type draft-simple -ngld 20 -ctkd q4_0", "draft-simple"),
        beside="draft",
    ),
    _feature("draft and n-grams", "--spec-type draft-simple,ngram-cache", "ngram-cache", beside="draft"),
    _mtp("mtp", "--spec-type draft-mtp", _MTP, _MTP),
    _mtp("mtp of 5", "--spec-type draft-mtp --spec-draft-n-max 5 -ctkd q8_0", 5, 5),
    _mtp("mtp and n-grams", "--spec-type draft-mtp,ngram-simple", _MTP, _DRAFTS["ngram-simple"]),
    _feature("n-grams", "--spec-type ngram-mod", "ngram-mod"),
    _feature("n-grams of a map", "--spec-type ngram-map-k", "ngram-map-k"),
    _feature("n-grams of 9", "--spec-type ngram-simple --spec-ngram-simple-size-m 9", 9),
    _feature("embeddings", "--embedding"),
    _feature("mean of embeddings", "--embedding --pooling mean"),
    _feature("reranking", "--reranking", measured={"embedding": True, "pooling_type": "rank"}),
    _feature("projector", beside="projector", shapes=("llama-3.1-8b", "gemma3-12b")),
    _feature("sampling on the device", "-bs"),
)
SLOTS = tuple(
    tuple(words.split()) for words in ("-np 1 -no-kvu", "-np 1 -kvu", "-np 4 -no-kvu", "-np 4 -kvu", "", "-np 3")
)


def cases() -> list[Case]:
    """Every pair with every feature that it has, for all ``SLOTS``."""
    return [
        Case(pair, feature, slots) for pair in PAIRS for feature in FEATURES if feature.fits(pair) for slots in SLOTS
    ]
