"""Which quantization is the best one, which needs an importance matrix, and what is said about all of them."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import fitter.api.quantizations
from fitter.llama.types import FileType, Params, TensorBuftOverride, TensorInfo
from fitter.model.header import Model
from fitter.output.tables.file_tables import quantizations_commands, quantizations_table
from fitter.output.tables.plan_table import print_to
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
from tests.support.cases import cases, document, named_cases
from tests.support.plans import GIB, MIB, MODEL, make_plan, make_price

SHORT = Problem("CUDA0", 244 * MIB, "CUDA0 lacks 244 MiB")


def made(
    name: str,
    bits: float,
    rate: float = 40.0,
    *,
    fits: bool = True,
    on_devices: bool = True,
    needs: bool = False,
    trained: bool = False,
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


def best(expected: str | None, *found: Quantization, **words: Any) -> tuple[Any, ...]:
    """The name of the best one of these, and what is asked beside a model of 16 bits at any speed."""
    return expected, found, {"own_type": "f16", "tokens_per_second": None, **words}


CASES = {
    "the most bits": best("Q8_0", IQ4_XS, Q4_K_M, Q8_0),
    "of those that fit": best("Q4_K_M", IQ4_XS, Q4_K_M, made("Q8_0", 8.5, fits=False)),
    "not larger with more perplexity": best("Q5_K_M", Q5_1, Q5_K_M),
    "larger, if the better one does not fit": best("Q5_1", Q5_1, made("Q5_K_M", 5.7, fits=False)),
    "no figure, no comparison": best("IQ4_NL", made("IQ4_NL", 4.95), Q4_K_M),
    "not what models must be trained for": best(None, made("TQ2_0", 2.5, trained=True)),
    "of 16 bits the model's own": best("BF16", made("F16", 16), made("BF16", 16), Q8_0, own_type="bf16"),
    "a quantized file has no own 16 bits": best("F16", made("F16", 16), Q8_0, own_type="q4_K"),
    "with as many bits, without the matrix": best("B", made("A", 3, needs=True), made("B", 3)),
    "as fast as is asked for, anywhere": best(
        "Q6_K",
        made("Q8_0", 8.5, 9, on_devices=False),
        made("Q6_K", 6.5, 10, on_devices=False),
        Q4_K_M,
        tokens_per_second=10.0,
    ),
    "fast enough to be useful": best("Q6_K", made("Q8_0", 8.5, 19.9), made("Q6_K", 6.5, 20), Q4_K_M),
    # Qwen3 30B-A3B on an RTX 3060 with 12 GB
    "quality rather than the device alone": best(
        "Q6_K",
        made("Q8_0", 8.51, 16.4, on_devices=False),
        made("Q6_K", 6.57, 23.1, on_devices=False),
        made("Q4_K_M", 4.86, 36.7, on_devices=False),
        made("Q2_K_S", 2.75, 129, needs=True),
    ),
    # Llama 3.3 70B on two RTX 3090
    "not below 4 bits for a little speed": best(
        "Q4_K_M", made("Q5_K_M", 5.66, 5.33), made("Q4_K_M", 4.82, 16.3), made("Q3_K_S", 3.5, 21.1)
    ),
    "nor for less than three times as much": best("Q4_K_M", made("Q4_K_M", 4.8, 10), made("Q2_K", 3, 29.9)),
    "but for three times as much": best("Q2_K", made("Q4_K_M", 4.8, 10), made("Q2_K", 3, 30)),
    "useful or not": best("Q3_K_S", made("Q4_K_M", 4.8, 1), made("Q3_K_S", 3.5, 3), made("Q2_K", 3, 4)),
    "not for less": best("Q4_K_M", made("Q4_K_M", 4.8, 1), made("Q2_K", 3, 2.9)),
    "4 bits are enough": best("A", made("A", 4.0, 19), made("B", 3.99, 50)),
    "of slow ones, a fifth slower than the fastest": best(
        "Q5_K_M", made("Q5_K_M", 5.7, 8), made("Q8_0", 8.5, 7.9), made("IQ4_XS", 4.3, 10)
    ),
    "of slow ones below 4 bits, the best": best("Q3_K_M", made("Q3_K_M", 3.9, 1), made("Q2_K", 3, 2)),
    "with as many bits, the faster": best("B", made("A", 5, 30), made("B", 5, 31)),
    "no larger one than what keeps published weights": best(
        "MXFP4_MOE", Q8_0, Q5_K_M, made("MXFP4_MOE", 4.6), IQ4_XS, own_type="mxfp4", published="MXFP4_MOE"
    ),
    "unless that one does not fit": best(
        "Q8_0",
        Q8_0,
        made("MXFP4_MOE", 4.6, fits=False),
        IQ4_XS,
        made("Q2_K", 3),
        own_type="mxfp4",
        published="MXFP4_MOE",
        tokens_per_second=40.0,
    ),
    # Qwen3 32B on an RTX 3090
    "with a useful context": best("Q4_K_M", made("Q5_K_M", 5.7, 31, n_ctx=4608), made("Q4_K_M", 4.8, 34, n_ctx=16640)),
    "with the smallest context that the user wants": best(
        "Q5_K_M", made("Q5_K_M", 5.7, 31, n_ctx=4608, fit_ctx=4096), made("Q4_K_M", 4.8, 34, n_ctx=16640, fit_ctx=4096)
    ),
    "where all that are fast have less": best(
        "Q5_K_M", made("Q8_0", 8.5, 2, n_ctx=16384), made("Q5_K_M", 5.7, n_ctx=4608), made("Q4_K_M", 4.8, n_ctx=5120)
    ),
    "of a model for less": best("Q5_K_M", made("Q5_K_M", 5.7), made("Q4_K_M", 4.8)),
    "none is as fast": best("Q8_0", Q8_0, Q4_K_M, tokens_per_second=41.0),
    "nothing fits": best(None, made("Q8_0", 8.5, fits=False)),
    "unknown": best(None, Quantization("IQ3_XXS", None, None, {}, True, problem="unknown")),
}


@cases(CASES)
def test_which_is_the_best(expected: str | None, found: tuple[Quantization, ...], words: dict[str, Any]) -> None:
    chosen = best_of(found, **words)
    assert (chosen and chosen.name) == expected


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
def test_what_is_published_quantized_has_no_original(model: Model, file_type: str, notes: tuple[str, ...]) -> None:
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


@cases(MATRIX)
def test_what_needs_an_importance_matrix(file_type: str, types: dict[str, str], expected: bool) -> None:
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
    return out.getvalue() + "".join(f"{line}\n" for line in quantizations_commands(found))


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


@cases(LAST)
def test_the_last_line(found: Quantizations, expected: str) -> None:
    assert " ".join(rendered(found).split()).endswith(expected)


def test_json() -> None:
    assert of(UNKNOWN, Q4_K_M, SLOW, best=Q4_K_M).to_dict() == document("quants")
