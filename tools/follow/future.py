"""A source of llama.cpp from the future, compiled: ``python -m tools.follow.future SOURCE INTO``.

A field is added in the middle of both parameter structs, and an operation in the middle of ggml's, which moves the
number of every one after it. ``fitter --llama-cpp INTO/build/bin`` should then refuse it in a line, or take it and be
right: plans as with the source's own build. Compiling takes about eight minutes with two processors.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

_MODEL, _CONTEXT = "        /*.tensor_split                =*/ nullptr,\n", "        /*.n_threads                   =*/"
EDITS = (
    # file, what is there, what is before it then
    ("include/llama.h", "        const float * tensor_split;\n", "        int32_t n_future;\n"),
    ("include/llama.h", "        int32_t  n_threads; ", "        size_t future_size;\n"),
    ("src/llama-model.cpp", _MODEL, "        /*.n_future =*/ 7,\n"),
    ("src/llama-context.cpp", _CONTEXT, "        /*.future_size =*/ 42,\n"),
    ("ggml/include/ggml.h", "        GGML_OP_MUL,\n", "        GGML_OP_FUTURE,\n"),
    ("ggml/src/ggml.c", '    "MUL",\n', '    "FUTURE",\n'),
    ("ggml/src/ggml.c", '    "x*y",\n', '    "future(x)",\n'),
)
_COUNTED = ("ggml/src/ggml.c", "ggml/include/ggml-rpc.h")
_OPTIONS = ("TESTS", "EXAMPLES", "TOOLS", "SERVER", "COMMON")


def edit(source: Path) -> None:
    """Change a source. Raises ``ValueError`` if something is not where it was in b11549."""
    for name, there, before in EDITS:
        text = (source / name).read_text(encoding="utf-8")
        if there not in text:
            raise ValueError(f"{name} has no line '{there.strip()}': add what it has now to tools/follow/future.py")
        (source / name).write_text(text.replace(there, before + there, 1), encoding="utf-8")
    operations = (source / "ggml/include/ggml.h").read_text(encoding="utf-8").partition("enum ggml_op {")[2]
    count = operations.partition("GGML_OP_COUNT,")[0].count("GGML_OP_")
    for name in _COUNTED:
        text = (source / name).read_text(encoding="utf-8")
        text = text.replace(f"GGML_OP_COUNT == {count - 1}", f"GGML_OP_COUNT == {count}")
        (source / name).write_text(text, encoding="utf-8")


def main(argv: list[str] | None = None) -> int:
    """Copy, edit and compile."""
    parser = argparse.ArgumentParser(description="Compile a llama.cpp with fields and an operation that none has.")
    parser.add_argument("source", type=Path, help="a source of llama.cpp, b11549 or newer")
    parser.add_argument("into", type=Path, help="a new directory")
    args = parser.parse_args(argv)
    shutil.copytree(args.source, args.into / "source")
    edit(args.into / "source")
    options = [f"-DLLAMA_BUILD_{each}=OFF" for each in _OPTIONS]
    options += ["-DCMAKE_BUILD_TYPE=Release", "-DBUILD_SHARED_LIBS=ON", "-DGGML_OPENMP=OFF"]
    build = args.into / "build"
    for command in (
        ["cmake", "-S", args.into / "source", "-B", build, *options],
        ["cmake", "--build", build, "--target", "llama", "--parallel"],
    ):
        subprocess.run(command, check=True)
    print(build / "bin")
    return 0


if __name__ == "__main__":
    sys.exit(main())
