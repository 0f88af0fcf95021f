"""Messages of the library in the words of the page: no option of the command line is left in them."""

from __future__ import annotations

import ast
import copy
import re
from pathlib import Path

import fitter
from fitter.errors import Message, Remedy, UsageError
from fitter.parameters.table import PARAMETERS
from fitter.web.planner_page import worded
from tests.support.cases import cases

LACKS = "CUDA0 lacks 3 MiB: 4 MiB are needed plus a margin of 1024 MiB, but 4 MiB are free; "
CONTEXT = Remedy("use a smaller -c", "n_ctx", "lower")
MARGIN = Remedy("use a smaller margin with --fit-target", "margin", "lower")
PAGING = Remedy("let weights be read from disk again and again with --allow paging", "allow")
HOST_MARGIN = Remedy("use a smaller margin with --host-margin", "host_margin", "lower")
MACHINE = "use a machine with 9 MiB more"

MESSAGES: dict[str, tuple[str, str]] = {
    "a smaller context": (
        Message(LACKS, CONTEXT, "free host memory"),
        f"{LACKS}use a smaller context or free host memory",
    ),
    "what is set": (
        Message(LACKS, Remedy("leave -c out", "n_ctx", "omit"), MARGIN),
        f"{LACKS}set no context or use a smaller margin per card",
    ),
    "a lever that the page does not have": (Message(LACKS, PAGING, MACHINE), LACKS + MACHINE),
    "the host's margin": (Message(LACKS, CONTEXT, HOST_MARGIN), f"{LACKS}use a smaller context"),
    "nothing that the page has": (Message(LACKS, PAGING, HOST_MARGIN, otherwise=MACHINE), LACKS + MACHINE),
    "only together": (
        Message(LACKS, CONTEXT, MARGIN, joined=" and ", end=": only together"),
        f"{LACKS}use a smaller context and use a smaller margin per card: only together",
    ),
    "only together, and the page has one of them": (
        Message(LACKS, CONTEXT, PAGING, joined=" and ", end=": only together", otherwise=MACHINE),
        LACKS + MACHINE,
    ),
    "the same remedy there": (
        Message("a: ", "try again later", Remedy("give it more time (--timeout)", "timeout", "raise"), joined=", or "),
        "a: try again later",
    ),
    "more before it": (
        "a: " + ("b: " + Message("c: ", PAGING, CONTEXT)).removeprefix("b: "),
        "a: c: use a smaller context",
    ),
    "an error": (
        UsageError("no slots: ", PAGING, Remedy("'fitter shapes' lists all", "shapes")).message,
        "no slots: take one of the list",
    ),
    "an error without a remedy": (UsageError("give one of these:").message, "give one of these:"),
    "a parameter by its name": ("n_ctx (-c) is -1: give 0 to 9", "context is -1: give 0 to 9"),
    "a card": (
        "--gpu 'rtx-9999': unknown GPU; did you mean rtx-4090?",
        "card 'rtx-9999': unknown GPU; did you mean rtx-4090?",
    ),
    "an option of another command": (
        Message("a has the best quality", Remedy(" (--tokens-per-second sets a speed)", "tokens_per_second"), end="."),
        "a has the best quality.",
    ),
    "another option": ("use --split-mode layer, or -ub 512", "use split mode layer, or ubatch size 512"),
    "another llama.cpp": ("name one with --llama-cpp", "name one with --llama-cpp"),
    "no option": ("gpt-oss-120b -x f16 e-5 - a--b", "gpt-oss-120b -x f16 e-5 - a--b"),
}


@cases(MESSAGES)
def test_a_message_has_the_words_of_the_page(message: str, expected: str) -> None:
    assert worded(message) == expected
    assert worded(copy.deepcopy(message)) == expected


def test_an_error_names_the_parameters_of_its_remedies() -> None:
    error = UsageError("nothing fits: ", CONTEXT)
    assert str(error) == "nothing fits: use a smaller -c"
    assert [(each.parameter, each.action) for each in error.remedies if isinstance(each, Remedy)] == [
        ("n_ctx", "lower")
    ]


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


def test_a_remedy_names_a_parameter_or_an_option_of_a_command() -> None:
    """The page leaves out a remedy by a name that it does not know."""
    sources = [file.read_text(encoding="utf-8") for file in Path(fitter.__file__).parent.rglob("*.py")]
    named = {
        node.args[1].value
        for source in sources
        if "Remedy(" in source
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "Remedy" and isinstance(node.args[1], ast.Constant)
    }
    of_commands = {
        "allow_private_addresses",
        "catalogue",
        "format",
        "json",
        "root",
        "shape",
        "shapes",
        "tokens_per_second",
    }
    assert named - set(PARAMETERS) == of_commands
