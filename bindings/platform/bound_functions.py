"""Writes the part of the bindings that only Windows needs: jumps to llama.cpp's functions, and what a DLL exports.

``python bound_functions.py LIBRARY fitter.h OUTPUT HEADER… -- SOURCE…``; the build does it. A function is called if one
of the sources has its name and one of llama.cpp's headers declares it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

_DECLARED = re.compile(r"\b(?:GGML|LLAMA)_API\b[^;{}()]*?\b((?:ggml|gguf|llama)_\w+)\s*\(")
_UNCALLED = re.compile(r'//[^\n]*|decltype\(&\w+\)|"[^"\n]*"')
_SECTION = re.compile(r"^// ---- (lib[\w-]+):(.*?)(?=^// ---- |\Z)", re.MULTILINE | re.DOTALL)
_OWN = re.compile(r"^\w.*?\b(fitter_\w+)\(", re.MULTILINE)
_IN_BOTH = ("fitter_configure_build",)
_OF_A_BACKEND = ("ggml_backend_init", "ggml_backend_score")
"""What every backend has of its own."""
_OF_MACROS = ("ggml_abort",)
"""What llama.cpp's macros call."""


def called(headers: Iterable[str], sources: Sequence[str], cpp_names: str) -> list[str]:
    """Names of the functions to bind, as the compiler writes them."""
    words = {word for source in sources for word in re.findall(r"\w+", _UNCALLED.sub("", source))}
    declared = {name for header in headers for name in _DECLARED.findall(re.sub(r"//[^\n]*", "", header))}
    used = (words & declared - {*_OF_A_BACKEND}) | {*_OF_MACROS}
    usual = re.findall(r'^\{"(_Z(\d+)(\w+))"', cpp_names, re.MULTILINE)
    cpp = {parts[: int(length)]: name for name, length, parts in usual}
    return sorted(cpp.get(name, name) for name in used)


def exported(library: str, header: str) -> list[str]:
    """Names that the library has for others."""
    names = {name for owner, text in _SECTION.findall(header) if owner == library for name in _OWN.findall(text)}
    names |= {*_IN_BOTH}
    return sorted(names | ({"ggml_backend_init"} if library == "libggml-fitter" else set()))


def write(output: Path, functions: Sequence[str], exports: Sequence[str]) -> None:
    """Write the C++ file."""
    lines = ['#include "platform/bound_functions.h"', "", f'extern "C" {{ void * fitter_targets[{len(functions)}]; }}']
    for i, name in enumerate(functions):
        lines.append(f'asm(".globl {name}\\n{name}: jmpq *fitter_targets+{8 * i}(%rip)");')
        lines.append(f'extern "C" const char jump_{i}[] asm("{name}");')
    lines += [f'asm(".section .drectve,\\"yni\\"\\n.ascii \\" -export:{name}\\"\\n.text");' for name in exports]
    lines += ["", "namespace fitter::platform {", "", "bound_list bound_functions() {"]
    lines.append("    static const bound_function all[] = {")
    lines += [f'        {{"{name}", jump_{i}, &fitter_targets[{i}]}},' for i, name in enumerate(functions)]
    lines += [
        "    };",
        "    return {all, sizeof(all) / sizeof(all[0])};",
        "}",
        "",
        "}  // namespace fitter::platform",
        "",
    ]
    output.write_text("\n".join(lines), encoding="utf-8")


def main(arguments: Sequence[str]) -> None:
    """Read the files that are named, and write the output."""
    library, own, output, *rest = arguments
    headers, sources = rest[: rest.index("--")], rest[rest.index("--") + 1 :]
    read = [Path(path).read_text(encoding="utf-8") for path in sources]
    names = Path(__file__).with_name("msvc_names.inc").read_text(encoding="utf-8")
    functions = called((Path(path).read_text(encoding="utf-8") for path in headers), read, names)
    write(Path(output), functions, exported(library, Path(own).read_text(encoding="utf-8")))


if __name__ == "__main__":
    main(sys.argv[1:])
