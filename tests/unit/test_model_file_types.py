"""The next smaller file type of a model, by the type of most of its weights."""

from __future__ import annotations

import pytest

from fitter.model.tensors import SmallerType, smaller_type
from tests.support.cases import cases, named_cases


@named_cases(
    ("not quantized", "bf16", 16.0, "Q8_0"),
    ("the largest", "q8_0", 8.5, "Q6_K"),
    ("many tensors in larger types", "q4_K", 5.3, "Q3_K_M"),
    ("the smallest", "q3_K", 4.1, None),
    ("no type of the list", "q4_0", 4.6, "Q3_K_M"),
    ("no type of the list, smaller than all", "iq3_s", 3.5, None),
    ("no weights", "", 0.0, None),
)
def test_the_next_smaller_type(own_type: str, bits: float, expected: str | None) -> None:
    found = smaller_type("model.gguf", "llama", own_type, bits)
    assert (found and found.name) == expected
    assert found is None or (0.5 < found.share < 1 and not found.arguments)


@cases(
    ("shape://llama-3.1-8b", ("--shape", "llama-3.1-8b:Q3_K_M")),
    ("shape://llama-3.1-8b:Q4_K_M", ("--shape", "llama-3.1-8b:Q3_K_M")),
    ("config:///models/x/config.json:Q4_K_M", ("--config", "/models/x/config.json:Q3_K_M")),
    ("hf://org/repo/model-Q4_K_M.gguf", ()),
)
def test_words_that_ask_for_it(called: str, arguments: tuple[str, ...]) -> None:
    found = smaller_type(called, "llama", "q4_K", 4.8)
    assert found == SmallerType("Q3_K_M", pytest.approx(4.0 / 4.9), arguments)


def test_a_model_that_is_published_quantized_has_none() -> None:
    assert smaller_type("shape://gpt-oss-20b", "gpt-oss", "mxfp4", 4.4) is None
