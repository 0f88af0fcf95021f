"""A Modelfile as Ollama reads it: its documented grammar, and the parameters that its ``api/types.go`` has."""

from __future__ import annotations

import re
from dataclasses import dataclass

_INSTRUCTIONS = ("FROM", "PARAMETER", "ADAPTER", "REQUIRES", "DRAFT", "TEMPLATE", "SYSTEM", "LICENSE", "MESSAGE")
_INTEGERS = ("num_ctx", "num_batch", "num_gpu", "main_gpu", "num_thread", "draft_num_predict")
_BOOLEANS = ("use_mmap",)


@dataclass(frozen=True)
class Modelfile:
    """Instructions in their order, and parameters by their names."""

    instructions: tuple[tuple[str, str], ...]
    parameters: dict[str, int | bool]
    comments: tuple[str, ...]

    def of(self, instruction: str) -> list[str]:
        return [value for name, value in self.instructions if name == instruction]


def parse(text: str) -> Modelfile:
    """Read ``text``. Fails where Ollama would refuse it, or drop a character."""
    instructions: list[tuple[str, str]] = []
    parameters: dict[str, int | bool] = {}
    comments: list[str] = []
    for line in text.split("\n"):
        if line.startswith("#"):
            comments.append(line)
            continue
        match = re.fullmatch(r"([A-Za-z]+)[ \t]+(.+)", line)
        assert match, f"no instruction: {line!r}"
        name, value = match[1].upper(), _unquoted(match[2])
        assert name in _INSTRUCTIONS, f"Ollama has no instruction {name}"
        assert value.isprintable(), f"Ollama drops characters of {value!r}"
        if name == "PARAMETER":
            key, value = value.split(" ", 1)
            assert key not in parameters, f"{key} is there twice"
            if key in _INTEGERS:
                parameters[key] = int(value)
            else:
                assert key in _BOOLEANS and value in ("true", "false"), f"Ollama has no {key} {value}"
                parameters[key] = value == "true"
        instructions.append((name, value))
    assert any(name == "FROM" for name, _ in instructions), "no FROM line"
    return Modelfile(tuple(instructions), parameters, tuple(comments))


def _unquoted(value: str) -> str:
    value = value.strip()
    if not value.startswith('"'):
        return value
    assert len(value) > 1 and value.endswith('"') and not value.startswith('"""'), f"an open quote: {value!r}"
    return value[1:-1]
