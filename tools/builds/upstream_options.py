"""The options that llama.cpp's programs read, as ``common/arg.cpp`` of the pinned source declares them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "vendor/llama.cpp/source/common/arg.cpp"

_TOKEN = re.compile(
    r'//[^\n]*|/\*.*?\*/|R"\((?P<raw>.*?)\)"|"(?P<text>(?:\\.|[^"\\])*)"|\'(?:\\.|[^\'\\])\'|\w+|\S', re.DOTALL
)


@dataclass(frozen=True)
class UpstreamOption:
    """One option: its names, the names that turn it off, how many words follow it, its environment variable."""

    names: tuple[str, ...]
    negative: tuple[str, ...]
    arity: int
    env: str | None
    programs: tuple[str, ...]
    fields: tuple[str, ...]


def read_options(path: Path = SOURCE) -> tuple[UpstreamOption, ...]:
    """Every option that ``add_opt`` registers, in the order of the source; names of presets alone are left out."""
    tokens = [token for token in _TOKEN.finditer(path.read_text()) if not token[0].startswith(("//", "/*"))]
    starts = [
        index
        for index, token in enumerate(tokens)
        if token[0] == "add_opt"
        and [each[0] for each in tokens[index + 1 : index + 5]] == ["(", "common_arg", "(", "{"]
    ]
    found = []
    for start in starts:
        end = _closing(tokens, start + 1)
        own = tokens[start + 4 : end]
        text = [token[0] for token in own]
        names_end = text.index("}")
        negative: tuple[str, ...] = ()
        if text[names_end + 1 : names_end + 3] == [",", "{"]:
            negative = _strings(own[names_end + 2 : text.index("}", names_end + 1)])
        setters = list(_calls(own))
        if "set_preset_only" in dict(setters):
            continue
        programs = dict(setters).get("set_examples", [])
        env = _strings(dict(setters).get("set_env", []))
        found.append(
            UpstreamOption(
                names=_strings(own[:names_end]),
                negative=negative,
                arity=_arity(text),
                env=env[0] if env else None,
                programs=tuple(
                    token[0].removeprefix("LLAMA_EXAMPLE_").lower()
                    for token in programs
                    if token[0].startswith("LLAMA_EXAMPLE_")
                )
                or ("common",),
                fields=tuple(dict.fromkeys(_fields(text))),
            )
        )
    return tuple(found)


def _closing(tokens: list[re.Match[str]], opening: int) -> int:
    depth = 0
    for index in range(opening, len(tokens)):
        if tokens[index][0] in ("(", "{", "["):
            depth += 1
        elif tokens[index][0] in (")", "}", "]"):
            depth -= 1
            if depth == 0:
                return index
    raise ValueError("a parenthesis is not closed")


def _strings(tokens: list[re.Match[str]]) -> tuple[str, ...]:
    return tuple(token["text"] for token in tokens if token["text"] is not None)


def _arity(text: list[str]) -> int:
    """The words that the option's handler gets: its parameters beside the struct, a bool being the name itself."""
    start = next(index for index in range(len(text)) if text[index : index + 3] == ["[", "]", "("])
    end = text.index(")", start)
    parameters = " ".join(text[start + 3 : end]).split(",")[1:]
    return sum(" bool " not in f" {parameter} " for parameter in parameters)


def _calls(tokens: list[re.Match[str]]) -> Iterator[tuple[str, list[re.Match[str]]]]:
    """The calls of ``.set_...(...)`` that follow, with what stands in their parentheses."""
    for index in range(len(tokens) - 2):
        if tokens[index][0] == "." and tokens[index + 1][0].startswith("set_"):
            yield tokens[index + 1][0], tokens[index + 2 : _closing(tokens, index + 2)]


def _fields(text: list[str]) -> Iterator[str]:
    for index in range(len(text) - 2):
        if text[index : index + 2] == ["params", "."]:
            end = index + 2
            while text[end + 1 : end + 2] == ["."]:
                end += 2
            yield "".join(text[index + 2 : end + 1])
