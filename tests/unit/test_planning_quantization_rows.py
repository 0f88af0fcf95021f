"""Which quantization is the best one, which needs an importance matrix, and what is said about all of them."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest

import fitter.api.quantizations
from fitter.llama.types import FileType, Params, TensorBuftOverride, TensorInfo
from fitter.model.header import Model
from fitter.output.tables.plan_table import print_to
from fitter.output.tables.quantizations_table import commands, quantizations_table
from fitter.planning.plan.plan import Problem
from fitter.planning.tables.quantization_rows import (
    Quantization,
    Quantizations,
    assumptions,
    best_of,
    needs_imatrix,
    ordered,
    published_as,
)
from tests.support.cases import named_cases
from tests.support.plans import GIB, MIB, MODEL, make_plan, make_price

SHORT = Problem("CUDA0", 244 * MIB, "CUDA0 lacks 244 MiB")


def made(
    name: str,
    bits: float,
    *,
    fits: bool = True,
    on_devices: bool = True,
    needs: bool = False,
    trained: bool = False,
    rate: float = 40.0,
    n_ctx: int = 4096,
    **asked: int,
) -> Quantization:
    """A model of 8 × 2^30 weights in a file type."""
    params = Params(n_ctx=n_ctx, n_gpu_layers=33 if on_devices else 20)
    price = make_price(generation=rate) if fits else None
    plan = replace(make_plan(params, problems=() if fits else (SHORT,), estimate=price), fit_keywords=asked)
    longest = 8192 if fits else None
    return Quantization(name, int(bits * GIB), bits, {"q4_K": 2, "f32": 1}, needs, trained, plan, longest)


Q8_0 = made("Q8_0", 8.5)
Q5_1 = made("Q5_1", 6.0)
Q5_K_M = made("Q5_K_M", 5.7)
Q4_K_M = made("Q4_K_M", 4.9)
IQ4_XS = made("IQ4_XS", 4.4)

CASES: dict[str, tuple[tuple[Quantization, ...], dict[str, object], str | None]] = {
    "the most bits": ((IQ4_XS, Q4_K_M, Q8_0), {}, "Q8_0"),
    "of those that fit": ((IQ4_XS, Q4_K_M, made("Q8_0", 8.5, fits=False)), {}, "Q4_K_M"),
    "not larger with more perplexity": ((Q5_1, Q5_K_M), {}, "Q5_K_M"),
    "larger, if the better one does not fit": ((Q5_1, made("Q5_K_M", 5.7, fits=False)), {}, "Q5_1"),
    "no figure, no comparison": ((made("IQ4_NL", 4.95), Q4_K_M), {}, "IQ4_NL"),
    "not what models must be trained for": ((made("TQ2_0", 2.5, trained=True),), {}, None),
    "of 16 bits the model's own": ((made("F16", 16), made("BF16", 16), Q8_0), {"own_type": "bf16"}, "BF16"),
    "a quantized file has no own 16 bits": ((made("F16", 16), Q8_0), {"own_type": "q4_K"}, "F16"),
    "with as many bits, without the matrix": ((made("A", 3, needs=True), made("B", 3)), {}, "B"),
    "as fast as is asked for, anywhere": (
        (made("Q8_0", 8.5, on_devices=False, rate=9), made("Q6_K", 6.5, on_devices=False, rate=10), Q4_K_M),
        {"tokens_per_second": 10.0},
        "Q6_K",
    ),
    "fast enough to be useful": ((made("Q8_0", 8.5, rate=19.9), made("Q6_K", 6.5, rate=20), Q4_K_M), {}, "Q6_K"),
    # Qwen3 30B-A3B on an RTX 3060 with 12 GB
    "quality rather than the device alone": (
        (
            made("Q8_0", 8.51, on_devices=False, rate=16.4),
            made("Q6_K", 6.57, on_devices=False, rate=23.1),
            made("Q4_K_M", 4.86, on_devices=False, rate=36.7),
            made("Q2_K_S", 2.75, rate=129, needs=True),
        ),
        {},
        "Q6_K",
    ),
    # Llama 3.3 70B on two RTX 3090
    "not below 4 bits for a little speed": (
        (made("Q5_K_M", 5.66, rate=5.33), made("Q4_K_M", 4.82, rate=16.3), made("Q3_K_S", 3.5, rate=21.1)),
        {},
        "Q4_K_M",
    ),
    "nor for less than three times as much": ((made("Q4_K_M", 4.8, rate=10), made("Q2_K", 3, rate=29.9)), {}, "Q4_K_M"),
    "but for three times as much": ((made("Q4_K_M", 4.8, rate=10), made("Q2_K", 3, rate=30)), {}, "Q2_K"),
    "useful or not": (
        (made("Q4_K_M", 4.8, rate=1), made("Q3_K_S", 3.5, rate=3), made("Q2_K", 3, rate=4)),
        {},
        "Q3_K_S",
    ),
    "not for less": ((made("Q4_K_M", 4.8, rate=1), made("Q2_K", 3, rate=2.9)), {}, "Q4_K_M"),
    "4 bits are enough": ((made("A", 4.0, rate=19), made("B", 3.99, rate=50)), {}, "A"),
    "of slow ones, a fifth slower than the fastest": (
        (made("Q5_K_M", 5.7, rate=8), made("Q8_0", 8.5, rate=7.9), made("IQ4_XS", 4.3, rate=10)),
        {},
        "Q5_K_M",
    ),
    "of slow ones below 4 bits, the best": ((made("Q3_K_M", 3.9, rate=1), made("Q2_K", 3, rate=2)), {}, "Q3_K_M"),
    "with as many bits, the faster": ((made("A", 5, rate=30), made("B", 5, rate=31)), {}, "B"),
    "no larger one than what keeps published weights": (
        (Q8_0, Q5_K_M, made("MXFP4_MOE", 4.6), IQ4_XS),
        {"own_type": "mxfp4", "published": "MXFP4_MOE"},
        "MXFP4_MOE",
    ),
    "unless that one does not fit": (
        (Q8_0, made("MXFP4_MOE", 4.6, fits=False), IQ4_XS, made("Q2_K", 3, fits=True)),
        {"own_type": "mxfp4", "published": "MXFP4_MOE", "tokens_per_second": 40.0},
        "Q8_0",
    ),
    # Qwen3 32B on an RTX 3090
    "with a useful context": (
        (made("Q5_K_M", 5.7, rate=31, n_ctx=4608), made("Q4_K_M", 4.8, rate=34, n_ctx=16640)),
        {},
        "Q4_K_M",
    ),
    "with the smallest context that the user wants": (
        (
            made("Q5_K_M", 5.7, rate=31, n_ctx=4608, fit_ctx=4096),
            made("Q4_K_M", 4.8, rate=34, n_ctx=16640, fit_ctx=4096),
        ),
        {},
        "Q5_K_M",
    ),
    "where all that are fast have less": (
        (made("Q8_0", 8.5, rate=2, n_ctx=16384), made("Q5_K_M", 5.7, n_ctx=4608), made("Q4_K_M", 4.8, n_ctx=5120)),
        {},
        "Q5_K_M",
    ),
    "of a model for less": ((made("Q5_K_M", 5.7), made("Q4_K_M", 4.8)), {}, "Q5_K_M"),
    "none is as fast": ((Q8_0, Q4_K_M), {"tokens_per_second": 41.0}, "Q8_0"),
    "nothing fits": ((made("Q8_0", 8.5, fits=False),), {}, None),
    "unknown": ((Quantization("IQ3_XXS", None, None, {}, True, problem="unknown"),), {}, None),
}


@pytest.mark.parametrize("name", CASES)
def test_which_is_the_best(name: str) -> None:
    found, words, expected = CASES[name]
    all_words = {"own_type": "f16", "tokens_per_second": None, **words}
    best = best_of(found, **all_words)  # type: ignore[arg-type]
    assert (best and best.name) == expected


@named_cases(("CPU", "CPU", False), ("host", "CUDA_Host", False), ("device", "CUDA1", True))
def test_a_tensor_on_the_host_is_not_on_devices(override: str, expected: bool) -> None:
    params = Params(n_gpu_layers=33, tensor_buft_overrides=(TensorBuftOverride("exps", override),))
    assert replace(Q8_0, plan=make_plan(params)).is_on_devices is expected


def model_of(architecture: str, **types: str) -> Model:
    tensors = tuple(TensorInfo(name, kind, (64, 64), 1024) for name, kind in types.items())
    path = Path("m-BF16.gguf")
    return Model(path, (path,), "m", architecture, 2048, 1, 0, 4096, 0, tensors, {})


AGAIN = (
    "m-BF16.gguf is quantized itself (q8_0); it is assumed that its 1 tensors of other types have these in the "
    "original too. Quantize the original: llama-quantize takes a quantized file only with --allow-requantize, which "
    "loses quality"
)
PUBLISHED = (
    "m-BF16.gguf has weights in MXFP4 as they are published, which MXFP4_MOE keeps: llama-quantize makes the other "
    "file types only with --allow-requantize, and no larger one is better"
)


@named_cases(
    ("as published", model_of("gpt-oss", up="mxfp4", q="bf16"), "MXFP4_MOE", (PUBLISHED,)),
    ("with the rest quantized", model_of("gpt-oss", up="mxfp4", q="q8_0", norm="f32"), "MXFP4_MOE", (PUBLISHED, AGAIN)),
    ("of 16 bits", model_of("gpt-oss", up="bf16"), "", ()),
    # of which there is an original with more bits
    ("another model", model_of("qwen3moe", up="mxfp4", norm="f32"), "", (AGAIN.replace("q8_0", "mxfp4"),)),
)
def test_what_is_published_quantized_has_no_better_original(
    model: Model, file_type: str, notes: tuple[str, ...]
) -> None:
    assert published_as(model) == file_type
    assert assumptions(model) == notes


MATRIX: dict[str, tuple[str, dict[str, str], bool]] = {
    "a type that needs it": ("IQ2_XS", {"blk.0.ffn_up.weight": "iq2_xs"}, True),
    "but not for the output": ("IQ2_XS", {"output.weight": "iq2_xs", "token_embd.weight": "iq1_s"}, False),
    "q2_K alone in Q2_K_S": ("Q2_K_S", {"blk.0.ffn_up.weight": "q2_K"}, True),
    "q2_K in any other file": ("Q2_K", {"blk.0.ffn_up.weight": "q2_K"}, False),
    "a tensor of another file type": ("IQ3_XS", {"blk.0.attn_k.weight": "iq3_xxs", "output.weight": "q6_K"}, True),
    "none": ("IQ3_S", {"blk.0.ffn_up.weight": "iq3_s"}, False),
}


@pytest.mark.parametrize("name", MATRIX)
def test_what_needs_an_importance_matrix(name: str) -> None:
    file_type, types, expected = MATRIX[name]
    sizes = (1,) * len(types)
    assert needs_imatrix(tuple(types), FileType(file_type, tuple(types.values()), sizes, "")) is expected


NAMES = {
    "model-BF16.gguf": "model-Q4_K_M.gguf",
    "model-f16.gguf": "model-Q4_K_M.gguf",
    "model-Q8_0.gguf": "model-Q4_K_M.gguf",
    "model-IQ4_XS.gguf": "model-Q4_K_M.gguf",
    "model-8B.gguf": "model-8B-Q4_K_M.gguf",
    "Qwen3-Q.gguf": "Qwen3-Q-Q4_K_M.gguf",
    "model.gguf": "model-Q4_K_M.gguf",
    "model-BF16-00001-of-00003.gguf": "model-Q4_K_M.gguf",
}


@pytest.mark.parametrize("given", NAMES)
def test_the_name_of_the_file(given: str) -> None:
    assert fitter.api.quantizations.named(Path("there") / given, "Q4_K_M") == Path("there") / NAMES[given]


UNKNOWN = Quantization("IQ3_XXS", None, None, {}, True, problem="not told")
TRAINED = made("TQ2_0", 2.5, trained=True)
SLOW = made("Q8_0", 8.5, fits=False)


def of(*found: Quantization, best: Quantization | None = None, rate: float | None = None) -> Quantizations:
    return Quantizations(MODEL, "bf16", ordered(found), best, 2, rate, ("a note",))


def rendered(found: Quantizations, *, verbose: bool = False) -> str:
    out = io.StringIO()
    print_to(out, quantizations_table(found, verbose=verbose))
    return out.getvalue() + "".join(f"{line}\n" for line in commands(found))


def test_the_table() -> None:
    assert rendered(of(UNKNOWN, TRAINED, Q4_K_M, SLOW, best=Q4_K_M), verbose=True) == (
        "Model 8B (llama, bf16)\n"
        "file type   MiB  bits     fits  context  longest  host MiB  t/s\n"
        "Q8_0       8704  8.50       no        -        -         -    -\n"
        "Q4_K_M     5017  4.90      yes     4096     8192       300   40  best\n"
        "TQ2_0      2560  2.50      yes     4096     8192       300   40  for models trained for it\n"
        "IQ3_XXS       -     -  unknown        -        -         -    -  needs an importance matrix\n"
        "Q8_0: 2 q4_K, 1 f32\n"
        "Q4_K_M: 2 q4_K, 1 f32\n"
        "TQ2_0: 2 q4_K, 1 f32\n"
        "IQ3_XXS: not told\n"
        "a note\n"
        "context: of the plan, which is for speed; longest: the most that fits, whatever it costs in time\n"
        "Q4_K_M has the best quality at 20 t/s or more (--tokens-per-second sets another speed)\n"
        "best: Q4_K_M, 4.9 GiB\n"
        "arguments: -c 4096 -ngl 33 -np 1 -fit off\n"
    )


LAST: dict[str, tuple[Quantizations, str]] = {
    "with a matrix": (
        of(replace(IQ4_XS, needs_imatrix=True), best=replace(IQ4_XS, needs_imatrix=True)),
        "whatever it costs in time IQ4_XS has the best quality at 20 t/s or more (--tokens-per-second sets another "
        "speed) best: IQ4_XS, 4.4 GiB, made with an importance matrix "
        "arguments: -c 4096 -ngl 33 -np 1 -fit off",
    ),
    "with a useful context": (
        of(wide := made("Q8_0", 8.5, n_ctx=8192), best=wide),
        "Q8_0 has the best quality at 20 t/s or more, with 8192 tokens of context or more (--tokens-per-second and "
        "--fit-ctx set others) best: Q8_0, 8.5 GiB arguments: -c 8192 -ngl 33 -np 1 -fit off",
    ),
    "none fast enough": (
        of(Q8_0, best=Q8_0, rate=50.0),
        "none with 4 bits or more generates 50 t/s (--tokens-per-second): Q8_0 has the best quality of those that are "
        "nearly the fastest best: Q8_0, 8.5 GiB arguments: -c 4096 -ngl 33 -np 1 -fit off",
    ),
    "few bits, and slow": (
        of(made("Q2_K", 3), best=made("Q2_K", 3), rate=50.0),
        "none generates 50 t/s (--tokens-per-second): with 4 bits, none fits or is a third as fast as Q2_K "
        "best: Q2_K, 3.0 GiB arguments: -c 4096 -ngl 33 -np 1 -fit off",
    ),
    "none fits": (of(SLOW, made("Q2_K", 3, fits=False)), "none fits; as Q2_K: CUDA0 lacks 244 MiB"),
    "none is known": (of(UNKNOWN), "a note"),
}


@pytest.mark.parametrize("name", LAST)
def test_the_last_line(name: str) -> None:
    found, expected = LAST[name]
    assert " ".join(rendered(found).split()).endswith(expected)


def test_json() -> None:
    document = of(UNKNOWN, Q4_K_M, SLOW, best=Q4_K_M).to_dict()
    assert (document["fits"], document["best"], document["source_type"]) == (True, "Q4_K_M", "bf16")
    assert document["notes"] == ["a note"]
    assert document["file_types"] == [
        {
            "name": "Q8_0",
            "bytes": SLOW.bytes,
            "bits_per_weight": 8.5,
            "types": {"q4_K": 2, "f32": 1},
            "needs_imatrix": False,
            "fits": False,
            "n_ctx": None,
            "longest_context": None,
            "host_weights": 300 * MIB,
            "on_devices": False,
            "tokens_per_second": None,
            "arguments": None,
            "problem": "CUDA0 lacks 244 MiB",
        },
        {
            "name": "Q4_K_M",
            "bytes": Q4_K_M.bytes,
            "bits_per_weight": 4.9,
            "types": {"q4_K": 2, "f32": 1},
            "needs_imatrix": False,
            "fits": True,
            "n_ctx": 4096,
            "longest_context": 8192,
            "host_weights": 300 * MIB,
            "on_devices": True,
            "tokens_per_second": 40.0,
            "arguments": ["-c", "4096", "-ngl", "33", "-np", "1", "-fit", "off"],
            "problem": None,
        },
        {
            "name": "IQ3_XXS",
            "bytes": None,
            "bits_per_weight": None,
            "types": {},
            "needs_imatrix": True,
            "fits": None,
            "n_ctx": None,
            "longest_context": None,
            "host_weights": None,
            "on_devices": None,
            "tokens_per_second": None,
            "arguments": None,
            "problem": "not told",
        },
    ]
