"""Models and machines, and what a user may ask of llama-server: its arguments, and fitter's parameters for the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from fitter.programs.facts import facts

DRAFT = "llama-3.1-8b"
"""The shape of the draft model."""
_SERVER = facts("llama-server")


@dataclass(frozen=True)
class Pair:
    """A shape of ``tools/shapes.py`` on virtual GPUs, placed by ``keywords`` of ``fitter.measure`` and ``options`` that say
    the same to llama-server."""

    shape: str
    gpus: tuple[str, ...]
    options: tuple[str, ...]
    keywords: dict[str, Any] = field(hash=False)

    @property
    def name(self) -> str:
        """How it is called in reports."""
        return f"{self.shape}/{'+'.join(self.gpus).replace(' ', '')}/{''.join(self.options).lstrip('-')}"


@dataclass(frozen=True)
class Feature:
    """Something that llama-server is asked for. ``drafted``: the most tokens that are drafted at a time.

    ``keywords``: what it sets of the load beside outputs. ``beside``: what it loads beside the model: ``draft``, ``mtp``,
    ``projector`` or nothing.
    """

    name: str
    options: tuple[str, ...] = ()
    drafted: int = 0
    keywords: dict[str, Any] = field(default_factory=dict, hash=False)
    beside: str = ""
    shapes: tuple[str, ...] = ()

    def fits(self, pair: Pair) -> bool:
        """Whether the pair's model can do it."""
        return not self.shapes or pair.shape in self.shapes


@dataclass(frozen=True)
class Case:
    """A pair with a feature, for ``n_parallel`` slots."""

    pair: Pair
    feature: Feature
    n_parallel: int
    kv_unified: bool

    @property
    def name(self) -> str:
        """How it is called in reports."""
        cache = "one cache" if self.kv_unified else "a cache each"
        return f"{self.pair.name}/{self.feature.name}/{self.n_parallel} slots/{cache}"

    @property
    def arguments(self) -> tuple[str, ...]:
        """llama-server's, without those of files beside the model."""
        cache = "-kvu" if self.kv_unified else "-no-kvu"
        return (*self.pair.options, "-np", str(self.n_parallel), cache, *self.feature.options)

    @property
    def keywords(self) -> dict[str, Any]:
        """``fitter.measure``'s."""
        found = {**self.pair.keywords, **self.feature.keywords, "n_seq_max": self.n_parallel}
        found["kv_unified"] = self.kv_unified
        n_batch = found.get("n_batch", _SERVER.n_batch)
        if found.get("embedding"):
            # all of a batch is needed at once, and every token of it is an output
            found["n_batch"] = min(n_batch, found.get("n_ubatch", _SERVER.n_ubatch))
            found["n_outputs_max"] = found["n_batch"]
        else:
            found["n_outputs_max"] = min(n_batch, self.n_parallel * (1 + self.feature.drafted))
        return found


def _pair(shape: str, gpus: Sequence[str], options: str, **keywords: Any) -> Pair:
    return Pair(shape, tuple(gpus), tuple(options.split()), keywords)


_OT = r"ffn_.*_exps=CPU"

PAIRS: tuple[Pair, ...] = (
    _pair("llama-3.1-8b", ["rtx-4090"], "-c 8192 -ngl 99", n_ctx=8192, n_gpu_layers=99),
    _pair("llama-3.1-8b", ["8GiB"], "-c 16384 -ngl 20", n_ctx=16384, n_gpu_layers=20),
    _pair("llama-3.1-8b", ["6GiB", "3GiB"], "-c 8192 -ngl 99 -ts 2,1", n_ctx=8192, n_gpu_layers=99, tensor_split=[2, 1]),
    _pair("llama-3.1-8b", ["rx-7900-xtx"], "-c 32768 -ngl 99 -ub 1024", n_ctx=32768, n_gpu_layers=99, n_ubatch=1024),
    _pair("llama-3.1-8b", ["m2-ultra"], "-c 32768 -ngl 99", n_ctx=32768, n_gpu_layers=99),
    _pair("llama-3.1-8b", ["arc-a380"], "-c 4096 -ngl 12", n_ctx=4096, n_gpu_layers=12),
    _pair("llama-3.1-8b", ["rtx-3060-12gb"], "-c 8192 -ngl 99 -b 256 -ub 64", n_ctx=8192, n_gpu_layers=99, n_batch=256, n_ubatch=64),
    _pair("llama-3.1-70b", ["2x rtx-3090"], "-c 8192 -ngl 99 -ts 1,1", n_ctx=8192, n_gpu_layers=99, tensor_split=[1, 1]),
    _pair("llama-3.1-70b", ["rtx-4090"], "-c 8192 -ngl 40", n_ctx=8192, n_gpu_layers=40),
    _pair(
        *("llama-3.1-70b", ["rtx-5090", "gtx-1080-ti"], "-c 16384 -ngl 70 -ts 3,1 -ctk q8_0 -ctv q8_0 -fa on"),
        **dict(n_ctx=16384, n_gpu_layers=70, tensor_split=[3, 1], type_k="q8_0", type_v="q8_0", flash_attn="on"),
    ),
    _pair("qwen3-32b", ["rtx-4090"], "-c 16384 -ngl 99 -fa off", n_ctx=16384, n_gpu_layers=99, flash_attn="off"),
    _pair("qwen3-32b", ["12GiB", "8GiB"], "-c 8192 -ngl 60 -ts 3,2", n_ctx=8192, n_gpu_layers=60, tensor_split=[3, 2]),
    _pair("qwen3-32b", ["rtx-5090"], "-c 40960 -ngl 99 -nkvo", n_ctx=40960, n_gpu_layers=99, offload_kqv=False),
    _pair("qwen3-30b-a3b", ["12GiB"], f"-c 32768 -ngl 99 -ot {_OT}", n_ctx=32768, n_gpu_layers=99, override_tensor=[_OT]),
    _pair("qwen3-30b-a3b", ["8GiB", "6GiB"], "-c 8192 -ngl 20 -ts 1,1", n_ctx=8192, n_gpu_layers=20, tensor_split=[1, 1]),
    _pair(
        *("qwen3-30b-a3b", ["rtx-4090"], f"-c 8192 -ngl 99 -ot {_OT} --no-op-offload"),
        **dict(n_ctx=8192, n_gpu_layers=99, override_tensor=[_OT], op_offload=False),
    ),
    _pair("qwen3-235b-a22b", ["rtx-4090"], f"-c 8192 -ngl 99 -ot {_OT}", n_ctx=8192, n_gpu_layers=99, override_tensor=[_OT]),
    _pair("deepseek-v3.1", ["rtx-5090"], f"-c 8192 -ngl 99 -ot {_OT}", n_ctx=8192, n_gpu_layers=99, override_tensor=[_OT]),
    _pair("kimi-k2", ["2x 48073MiB"], "-c 16384 -ngl 10 -ts 1,1", n_ctx=16384, n_gpu_layers=10, tensor_split=[1, 1]),
    _pair("gemma3-12b", ["8GiB"], "-c 16384 -ngl 99", n_ctx=16384, n_gpu_layers=99),
    _pair("gemma3-12b", ["rtx-4090"], "-c 32768 -ngl 99 --swa-full", n_ctx=32768, n_gpu_layers=99, swa_full=True),
    _pair("gemma3-12b", ["rx-7900-xtx"], "-c 8192 -ngl 30", n_ctx=8192, n_gpu_layers=30),
    _pair("gpt-oss-20b", ["rtx-4090"], "-c 32768 -ngl 99", n_ctx=32768, n_gpu_layers=99),
    _pair("gpt-oss-120b", ["rtx-4090", "12GiB"], f"-c 8192 -ngl 99 -ts 2,1 -ot {_OT}", n_ctx=8192, n_gpu_layers=99,
          tensor_split=[2, 1], override_tensor=[_OT]),
    _pair("qwen3-next-80b-a3b", ["rtx-4090"], f"-c 16384 -ngl 99 -ot {_OT}", n_ctx=16384, n_gpu_layers=99, override_tensor=[_OT]),
    _pair("nemotron-h-9b", ["4GiB", "3GiB"], "-c 8192 -ngl 30 -ts 1,1", n_ctx=8192, n_gpu_layers=30, tensor_split=[1, 1]),
    _pair("nemotron-h-9b", ["rtx-4060"], "-c 16384 -ngl 99", n_ctx=16384, n_gpu_layers=99),
    _pair("glm45-air", ["2x rtx-5090"], "-c 16384 -ngl 99 -ts 1,1", n_ctx=16384, n_gpu_layers=99, tensor_split=[1, 1]),
    _pair("glm45-air", ["rtx-4090"], f"-c 8192 -ngl 99 -ot {_OT}", n_ctx=8192, n_gpu_layers=99, override_tensor=[_OT]),
    _pair("glm45-air", ["h100-pcie"], "-c 32768 -ngl 99 -ub 2048", n_ctx=32768, n_gpu_layers=99, n_ubatch=2048),
)  # fmt: skip

_DRAFTS = _SERVER.draft_tokens

FEATURES: tuple[Feature, ...] = (
    Feature("nothing"),
    Feature("draft", ("--spec-type", "draft-simple"), _DRAFTS["draft-simple"], beside="draft"),
    Feature("draft of 7", ("--spec-type", "draft-simple", "--spec-draft-n-max", "7"), 7, beside="draft"),
    Feature(
        "mtp",
        ("--spec-type", "draft-mtp"),
        _DRAFTS["draft-mtp"],
        {"load_mtp": True, "n_rs_seq": _DRAFTS["draft-mtp"]},
        "mtp",
        ("glm45-air",),
    ),
    Feature("n-grams", ("--spec-type", "ngram-mod"), _DRAFTS["ngram-mod"]),
    Feature("n-grams of a map", ("--spec-type", "ngram-map-k"), _DRAFTS["ngram-map-k"]),
    Feature("draft and n-grams", ("--spec-type", "draft-simple,ngram-cache"), _DRAFTS["ngram-cache"], beside="draft"),
    Feature("embeddings", ("--embedding",), keywords={"embedding": True}),
    Feature("reranking", ("--reranking",), keywords={"embedding": True}),
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
