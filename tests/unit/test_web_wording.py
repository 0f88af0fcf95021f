"""Messages of the library in the words of the page: no option of the command line is left in them."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import fitter
from fitter.parameters.table import PARAMETERS
from fitter.web.wording import worded
from tests.support.cases import cases

LACKS = "CUDA0 lacks 3 MiB: 4 MiB are needed plus a margin of 1024 MiB, but 4 MiB are free; "

MESSAGES: dict[str, tuple[str, str]] = {
    "a smaller context": (
        f"{LACKS}use a smaller -c, free host memory",
        f"{LACKS}use a smaller context, free host memory",
    ),
    "what is set": (
        f"{LACKS}leave -c out or use a smaller margin with --fit-target",
        f"{LACKS}set no context or use a smaller margin per card",
    ),
    "a lever that the page does not have": (
        f"{LACKS}let weights be read from disk again and again with --allow paging or use a machine with 9 MiB more",
        f"{LACKS}use a machine with 9 MiB more",
    ),
    "the host's margin": ("use a smaller -c or use a smaller margin with --host-margin", "use a smaller context"),
    "a parameter by its name": ("n_ctx (-c) is -1: give 0 to 9", "context is -1: give 0 to 9"),
    "a card": (
        "--gpu 'rtx-9999': unknown GPU; did you mean rtx-4090?",
        "card 'rtx-9999': unknown GPU; did you mean rtx-4090?",
    ),
    "no directory": (
        "'a' is no address, and the server offers no directory: name a shape or an address, or start it with --root",
        "'a' is no address, and the server offers no directory: name a shape or an address",
    ),
    "the best of a repository": (
        "a-Q4_K_M.gguf has the best quality at 20 t/s or more (--tokens-per-second sets another speed)",
        "a-Q4_K_M.gguf has the best quality at 20 t/s or more",
    ),
    "another quantization": ("--shape llama-3.3-70b:Q3_K_M", "quantization Q3_K_M"),
    "the usual margin": ("1024, or auto where that is more", "1024, or more where a card needs it"),
    "another option": ("use --split-mode layer, or -ub 512", "use split mode layer, or ubatch size 512"),
    "no option": ("gpt-oss-120b -x f16 e-5 - a--b", "gpt-oss-120b -x f16 e-5 - a--b"),
}


@cases(MESSAGES)
def test_a_message_has_the_words_of_the_page(message: str, expected: str) -> None:
    assert worded(message) == expected


def texts(room: str) -> list[str]:
    """Every text in the code of a room, without its docstrings; what is put into it is a letter."""
    found = []
    for file in sorted((Path(fitter.__file__).parent / room).rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Raise) or (isinstance(node, ast.Call) and "roblem" in ast.dump(node.func)):
                for each in ast.walk(node):
                    if isinstance(each, ast.JoinedStr):
                        parts = (part.value if isinstance(part, ast.Constant) else "X" for part in each.values)
                        found.append("".join(map(str, parts)))
                    elif isinstance(each, ast.Constant) and isinstance(each.value, str):
                        found.append(each.value)
    return found


@cases("machine", "model", "planning", "web")
def test_no_message_keeps_an_option_of_the_table(room: str) -> None:
    messages = texts(room)
    assert len(messages) > 10
    options = {name for each in PARAMETERS.values() for name in (*each.positive, *each.negative)}
    left = {word for message in messages for word in re.findall(r"(?<![\w-])--?[a-z][a-z-]*", worded(message))}
    assert not left & options
