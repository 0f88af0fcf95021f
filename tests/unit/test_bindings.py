"""The C++ of ``bindings/``: who includes what upstream keeps to itself, and that nothing throws across the C door."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.cases import named_cases

BINDINGS = Path(__file__).resolve().parents[2] / "bindings"

INTERNAL = {
    "ggml-backend-impl.h": {
        "builds/graph_optimize.cpp",
        "measuring/breakdown.cpp",
        "measuring/split.cpp",
        "virtual/allocations.cpp",
        "virtual/backend.cpp",
        "virtual/host_layouts.cpp",
    },
    "ggml-impl.h": {
        "builds/operations.cpp",
        "virtual/rules/cuda_graph.cpp",
        "virtual/rules/metal_graph.cpp",
        "virtual/rules/vulkan_graph.cpp",
    },
    "llama-context.h": {"platform/posix_context.cpp"},
    "llama-cparams.h": {"measuring/breakdown.cpp", "platform/windows_context.cpp"},
    "llama-ext.h": {"measuring/breakdown.cpp", "measuring/quantize.cpp", "platform/context.h"},
}
"""Headers that upstream may change at any time, and the files that include them."""

GENERATED = {"operations.inc", "file_types.inc"}
"""Written while fitter is built, from ggml.h and llama.h."""

PUBLIC = {"ggml.h", "ggml-alloc.h", "ggml-backend.h", "ggml-rpc.h", "gguf.h", "llama.h", "mtmd.h"}
"""Those of upstream's interface."""

UNGUARDED = {
    "fitter_versions": "constants",
    "fitter_last_error": "reads the message that the guard leaves",
    "fitter_virtual_error": "reads the message that the guard leaves",
    "fitter_virtual_build_difference": "reads a pointer to a constant",
    "fitter_cells_begin": "numbers; the library with an operator new of its own has no message",
    "fitter_cells_end": "numbers and madvise; the library with an operator new of its own has no message",
}
"""Functions of ``fitter.h`` that cannot throw, and why."""


def files() -> dict[str, str]:
    """The text of every C++ file below ``bindings/``, by its path there."""
    paths = [path for path in BINDINGS.rglob("*") if path.suffix in (".cpp", ".h", ".inc")]
    return {path.relative_to(BINDINGS).as_posix(): path.read_text(encoding="utf-8") for path in sorted(paths)}


def test_only_these_files_include_what_is_internal() -> None:
    found: dict[str, set[str]] = {}
    for path, text in files().items():
        for header in re.findall(r'^#include "([^"]+)"', text, re.M):
            if not (BINDINGS / header).exists() and not (BINDINGS / path).with_name(header).exists():
                found.setdefault(header, set()).add(path)
    assert {header: paths for header, paths in found.items() if header not in PUBLIC | GENERATED} == INTERNAL


@pytest.mark.parametrize("header", INTERNAL)
def test_an_internal_header_has_its_reason_above_it(header: str) -> None:
    for path in INTERNAL[header]:
        text = files()[path]
        above = text[: text.index(f'#include "{header}"')].splitlines()[-1]
        assert re.match(r"// (internal|staging): .*upstream may change it at any time", above), f"{path}: {above}"


def declared() -> set[str]:
    """The functions that ``fitter.h`` declares."""
    return set(re.findall(r"\b(fitter_\w+)\(", re.sub(r"//.*", "", files()["fitter.h"])))


def definitions(text: str) -> Iterator[tuple[str, str]]:
    """Name and body of every function at the top level whose name begins with ``fitter_``."""
    for found in re.finditer(r"^\w[\w *]*\b(fitter_\w+)\([^;{}]*\)\s*\{", text, re.M):
        depth, end = 1, found.end()
        while depth:
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            end += 1
        yield found[1], text[found.end() : end - 1].strip()


def is_guarded(body: str) -> bool:
    """Whether the guard is all that there is: a first word, and nothing behind its end."""
    return bool(re.fullmatch(r"(return )?fitter::guarded(<[^>]+>)?\(.*\}\);", body, re.S)) and not re.search(
        r"^    \S.*\n    \S", body, re.M
    )


def test_nothing_throws_across_the_c_interface() -> None:
    bodies = {name: body for text in files().values() for name, body in definitions(text)}
    assert set(bodies) >= declared()
    assert {name for name in declared() if not is_guarded(bodies[name])} == set(UNGUARDED)


@named_cases(
    ("all of it", "return fitter::guarded(false, [&] {\n        return true;\n    });", True),
    ("on one line", "fitter::guarded([] { go(); });", True),
    ("with a type", "return fitter::guarded<int32_t>(-1, [&]() -> int32_t { return 1; });", True),
    ("nothing", "return new std::regex(pattern);", False),
    ("something before it", "std::string name(text);\n    return fitter::guarded(false, [&] { return true; });", False),
    ("something behind it", "fitter::guarded([] { go(); });\n    std::string name(text);", False),
)
def test_what_is_guarded(body: str, expected: bool) -> None:
    assert [is_guarded(found) for _, found in definitions(f"bool fitter_x(void) {{\n    {body}\n}}\n")] == [expected]
