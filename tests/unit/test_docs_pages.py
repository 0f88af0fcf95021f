"""When a page says what is printed."""

from __future__ import annotations

from tests.support.cases import named_cases
from tools.docs.markdown import paragraphs
from tools.docs.pages import same


@named_cases(
    ("a dash for a figure at the end", "host  22846  40    -", "host 22138 40 24", True, True),
    ("a dash for a word", "host  1  x", "host  1  -", True, False),
    ("a dash in the middle", "a - b 1", "a 2 b 1", True, False),
    ("figures that are the same everywhere", "a 1 -", "a 1 2", False, False),
    ("another processor", "host 1 2 cpu   CPU      A 1", "host 3 4 cpu CPU B", True, True),
    ("another device", "RPC0 1 2 gpu RPC A", "RPC0 1 2 gpu RPC B", True, False),
    ("seconds", "in 0.5 s", "in 2.1 s", False, True),
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
