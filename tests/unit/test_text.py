from __future__ import annotations

import sys

from fitter.errors import FitterError, LlamaCppError
from fitter.text import as_log_line, printable
from tests.support.cases import cases


@cases(
    ("", ""),
    ("Qwen3 30B-A3B", "Qwen3 30B-A3B"),
    ("名前 é ☃ 😀 [red] @me $(x) \\x1b", "名前 é ☃ 😀 [red] @me $(x) \\x1b"),
    ("\x1b]0;a\x07", r"\x1b]0;a\x07"),
    ("a\nb\tc\r\n d\x85e\u2028f\xa0g", "a b c   d e f g"),
    ("\x00\x7f\x9b", r"\x00\x7f\x9b"),
    ("\u202ea\u2066b\u200b\ufeff\u00ad", r"\u202ea\u2066b\u200b\ufeff\xad"),
    ("\ue000\U000f0000\uffff\udcff", r"\ue000\U000f0000\uffff\udcff"),
    ("a\ufe0fb\U000e0100c\u3164d", r"a\ufe0fb\U000e0100c\u3164d"),
    ("##[error]a ###[b ##vso[c] ## d", "# #[error]a ## #[b # #vso[c] ## d"),
)
def test_printable(text: str, shown: str) -> None:
    assert printable(text) == shown
    assert printable(shown) == shown


def test_every_character_is_one_that_is_seen() -> None:
    for number in range(sys.maxunicode + 1):
        shown = printable(chr(number))
        assert shown.isprintable()
        assert shown.encode()


def test_a_long_one_is_cut() -> None:
    assert printable("a" * 10, 10) == "a" * 10
    assert printable("a" * 11, 10) == "a" * 9 + "…"


@cases(
    ("::error::a", ": :error::a"),
    ("  ::error::a", "  : :error::a"),
    (":::a", ": ::a"),
    ("a ::error::a", "a ::error::a"),
    (": a", ": a"),
)
def test_the_line_of_a_log(text: str, shown: str) -> None:
    assert as_log_line(text) == shown
    assert not shown.lstrip().startswith("::")


def test_a_message_is_printable() -> None:
    assert str(FitterError("model '\x1b[31m\n' is none")) == r"model '\x1b[31m ' is none"
    assert LlamaCppError("a", ("b\x07", "c")).log == (r"b\x07", "c")
