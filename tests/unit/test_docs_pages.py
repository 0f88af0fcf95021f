"""When a page says what is printed."""

from __future__ import annotations

import pytest

from tools.docs.markdown import paragraphs
from tools.docs.pages import same


@pytest.mark.parametrize(
    ("written", "printed", "is_own", "expected"),
    [
        pytest.param("host  22846  40    -", "host 22138 40 24", True, True, id="a dash for a figure at the end"),
        pytest.param("host  1  x", "host  1  -", True, False, id="a dash for a word"),
        pytest.param("a - b 1", "a 2 b 1", True, False, id="a dash in the middle"),
        pytest.param("a 1 -", "a 1 2", False, False, id="figures that are the same everywhere"),
        pytest.param("host 1 2 cpu   CPU      A 1", "host 3 4 cpu CPU B", True, True, id="another processor"),
        pytest.param("RPC0 1 2 gpu RPC A", "RPC0 1 2 gpu RPC B", True, False, id="another device"),
        pytest.param("in 0.5 s", "in 2.1 s", False, True, id="seconds"),
    ],
)
def test_same(written: str, printed: str, is_own: bool, expected: bool) -> None:
    assert same(written, printed, is_own=is_own) is expected


def test_sections_of_a_docstring_become_markdown() -> None:
    docstring = """Plan it.

    Args:
        model: The path of
            a model.
        n_ctx: Tokens.

    Returns:
        The plan.

    Raises:
        UsageError: if ``n_ctx`` is wrong.
        ModelError: if there is no model.
    """
    assert paragraphs(docstring) == [
        "Plan it.",
        "- `model`: The path of a model.\n- `n_ctx`: Tokens.",
        "Returns the plan.",
        "Raises `UsageError`: if `n_ctx` is wrong; `ModelError`: if there is no model.",
    ]
