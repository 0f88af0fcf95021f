"""Messages of the library in the words of the page: no option of the command line is left in them."""

from __future__ import annotations

import ast
import copy
import re
from pathlib import Path

import fitter
from fitter.errors import Message, Remedy, UsageError
from fitter.parameters.table import PARAMETERS
from fitter.web.wording import worded
from tests.support.cases import cases, stored

LACKS = "CUDA0 lacks 3 MiB: 4 MiB are needed plus a margin of 1024 MiB, but 4 MiB are free; "
CONTEXT = Remedy("use a smaller -c", "n_ctx", "lower")
MARGIN = Remedy("use a smaller margin with --fit-target", "margin", "lower")
PAGING = Remedy("let weights be read from disk again and again with --allow paging", "allow")
HOST_MARGIN = Remedy("use a smaller margin with --host-margin", "host_margin", "lower")
MACHINE = "use a machine with 9 MiB more"


@cases(stored("web_wording", "messages"))
def test_a_message_has_the_words_of_the_page(message: str, expected: str) -> None:
    assert worded(message.replace("{lacks}", LACKS)) == expected.replace("{lacks}", LACKS)


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
