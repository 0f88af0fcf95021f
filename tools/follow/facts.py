"""The facts about a build of llama.cpp that fitter depends on, read from its source, its headers or its libraries.

They are texts by name in parts, such as the default of each parameter, so that every part is compared alike.
``known.json`` has those of the newest known builds, each part with the build that told it.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from fitter.llama.build import layouts
from fitter.llama.build.layouts import fields_of
from tools.builds.upstream_options import read_options
from tools.oracle.build import symbols

Part = dict[str, str]
Facts = dict[str, Part]

KNOWN = Path(__file__).with_name("known.json")
STRUCTS = tuple(layouts.STRUCTS)

DEFAULTS, OPERATIONS, FUNCTIONS, EXPORTS = "defaults", "operations", "functions", "exported functions"
WHERE = {
    **dict.fromkeys(STRUCTS, "fitter/llama/build/layouts.json, and a parameter in fitter/parameters/table.py"),
    DEFAULTS: "fitter/llama/build/layouts.json, and the default in fitter/parameters/table.py",
    OPERATIONS: "bindings/virtual/rules/: no rule knows a new one until it is written",
    **dict.fromkeys((FUNCTIONS, EXPORTS), "fitter/llama/build/functions.py and bindings/builds/symbols.cpp"),
    "enumerations": "the kinds of fitter/parameters/, types of tensors in fitter/llama/header/",
    "constants": "fitter/llama/header/limits.json, fitter/llama/types.py, fitter/llama/processes/rpc.py",
    "options": "fitter/parameters/table.py, or fitter/cli/llama_options.toml",
    "buffer types": "bindings/virtual/profiles/",
    "architectures": "fitter/model/: shapes, roles of tensors; `make architectures` loads one of each",
}
"""The parts, and the place of what depends on each."""

_CONSTANTS = re.compile(
    r"^[ \t]*#[ \t]*define[ \t]+"
    r"((?:LLAMA_MAX|GGML_SCHED_MAX|GGML_MAX|RPC_PROTO|GGML_BACKEND_API|GGUF_DEFAULT)\w*)[ \t]+(\w+)",
    re.MULTILINE,
)
_FILES_OF_CONSTANTS = (
    *("src/llama-cparams.h", "src/llama-hparams.h", "ggml/src/ggml-backend.cpp", "ggml/src/ggml-backend-impl.h"),
    *("ggml/include/ggml-rpc.h", "ggml/include/gguf.h", "ggml/include/ggml.h"),
)
_ARCHITECTURE = re.compile(r"\{\s*LLM_ARCH_\w+,\s*\"([^\"]+)\"\s*\}")
_BUFFER_TYPE = re.compile(r"\bggml_backend_\w*buffer_type\b(?=\s*\()")
_FUNCTION = re.compile(r"\b((?:llama|ggml|gguf)_\w+)\s*\(")
_DECLARED = re.compile(r"\b(?:LLAMA_API|GGML_API|GGML_BACKEND_API)\b([^;{}]*?)\(", re.DOTALL)
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_ENUM = re.compile(r"\benum\s+(\w+)\s*\{([^{}]*)\}")
_MOST_OPERATIONS = 256


def read_source(source: Path) -> Facts:
    """Read a source tree of llama.cpp. Raises ``OSError``, and ``ValueError`` if a file is not as expected."""
    llama_h = _text(source / "include" / "llama.h")
    ggml_h = _text(source / "ggml" / "include" / "ggml.h")
    enums = dict(_enums(llama_h)) | dict(_enums(ggml_h))
    operations = [name for name in enums if name.startswith("ggml_op.") and not name.endswith("_COUNT")]
    headers = "\n".join(map(_text, sorted((source / "ggml" / "include").glob("*.h")))) + llama_h
    return {
        **_structs(llama_h),
        OPERATIONS: dict.fromkeys((name.removeprefix("ggml_op.GGML_OP_") for name in operations), ""),
        FUNCTIONS: dict.fromkeys(sorted(_declared(headers)), ""),
        "enumerations": {
            name: value for name, value in enums.items() if not name.startswith(("ggml_op.", "llama_vocab"))
        },
        "constants": {
            name: value
            for path in _FILES_OF_CONSTANTS
            if (source / path).is_file()
            for name, value in _CONSTANTS.findall(_text(source / path))
        },
        "options": _options(source / "common" / "arg.cpp"),
        "buffer types": dict.fromkeys(sorted(set(_BUFFER_TYPE.findall(headers))), ""),
        "architectures": dict.fromkeys(_ARCHITECTURE.findall(_text(source / "src" / "llama-arch.cpp")), ""),
    }


def read_header(path: Path) -> Facts:
    """Read what a ``llama.h`` alone tells. Raises ``OSError`` and ``ValueError``."""
    return _structs(_text(path))


def read_library(where: str) -> Facts:
    """Ask a build's libraries, in another process. Raises ``ValueError`` with what it says where it does not answer."""
    command = [sys.executable, "-m", "tools.follow.ask", where]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=KNOWN.parents[2])
    if done.returncode:
        raise ValueError(f"{where} does not answer: {(done.stderr.strip().splitlines() or ['it crashed'])[-1]}")
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    exported = symbols(map(Path, answer["libraries"]), "--defined-only", "--dynamic")
    return {
        OPERATIONS: dict.fromkeys(answer["operations"], ""),
        EXPORTS: dict.fromkeys(sorted(name for name in exported if _FUNCTION.match(f"{name}(")), ""),
        **({DEFAULTS: answer["defaults"]} if answer["defaults"] else {}),
    }


def known() -> dict[str, tuple[str, Part]]:
    """The facts of the newest known builds: the name of the build that told each part, and the part."""
    document = json.loads(KNOWN.read_text(encoding="utf-8"))
    return {part: (each["build"], each["facts"]) for part, each in document.items()}


def store(build: str, facts: Mapping[str, Part]) -> list[str]:
    """Make the facts of a build the known ones, for the parts that no newer build told; return these parts."""
    document = json.loads(KNOWN.read_text(encoding="utf-8")) if KNOWN.is_file() else {}
    stored = [part for part in facts if part not in document or _number(document[part]["build"]) <= _number(build)]
    document |= {part: {"build": build, "facts": facts[part]} for part in stored}
    lines = (f"{json.dumps(part)}: {json.dumps(document[part])}" for part in WHERE if part in document)
    KNOWN.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    return stored


def _number(build: str) -> int:
    return int("".join(filter(str.isdigit, build)) or 0)


def differences(before: Mapping[str, str], now: Mapping[str, str]) -> Iterator[str]:
    """Say what of a part is new (+), gone (-) or another (~)."""
    for name in [*now, *(name for name in before if name not in now)]:
        if name not in before:
            yield f"+ {name} {now[name]}".rstrip()
        elif name not in now:
            yield f"- {name} {before[name]}".rstrip()
        elif before[name] != now[name]:
            yield f"~ {name} {before[name]} -> {now[name]}"


def names_of_operations(name_of: Any, last: str) -> list[str]:
    """The names of ggml's operations up to the ``last`` one, or to what cannot be a name."""
    found = []
    for i in range(_MOST_OPERATIONS):
        name = (name_of(i) or b"").decode("ascii", "replace")
        if not re.fullmatch("[A-Z0-9_]+", name):
            break
        found.append(name)
        if name == last:
            break
    return found


def _structs(text: str) -> Facts:
    found = {}
    for struct in STRUCTS:
        before, part = "the start", {}
        for field, kind in fields_of(text, struct).items():
            part[field] = f"{kind}, after {before}"
            before = field
        found[struct] = part
    return found


def _declared(text: str) -> set[str]:
    names = {words[-1] for words in (each.replace("*", " ").split() for each in _DECLARED.findall(text)) if words}
    return {name for name in names if _FUNCTION.match(f"{name}(")}


def _enums(text: str) -> Iterator[tuple[str, str]]:
    for enum, body in _ENUM.findall(text):
        value = -1
        for entry in filter(None, (each.strip() for each in body.split(","))):
            name, _, given = (part.strip() for part in entry.partition("="))
            value = int(given, 0) if re.fullmatch(r"-?(0x)?[0-9a-fA-F]+", given) else value + 1
            yield f"{enum}.{name}", given if given and not given.lstrip("-").isalnum() else str(value)


def _options(path: Path) -> Part:
    return {
        ", ".join((*option.names, *option.negative)): f"{option.arity} words"
        + (f", {option.env}" if option.env else "")
        for option in read_options(path)
    }


def _text(path: Path) -> str:
    return _COMMENT.sub(" ", path.read_text(encoding="utf-8", errors="replace"))


def parts_of(every: Iterable[Facts]) -> Facts:
    """The facts of several readings as one; what is told twice is taken from the last."""
    return {part: facts for each in every for part, facts in each.items()}
