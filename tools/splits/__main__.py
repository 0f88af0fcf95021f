"""``python -m tools.splits``: what cards take with ``-sm tensor``, by fitter and by a real ggml-cuda without a card.

The exit status is 1 if any load differs."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from fitter.llama.build.virtual_backends import find_cuda_library
from tools.comparisons.load_answers import compare
from tools.splits.loads import draw, real, store, virtual


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.splits", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--library", type=Path, required=True, help="a libggml-cuda.so, or a directory that has one")
    parser.add_argument("--loads", type=int, default=300, metavar="N", help="how many are drawn")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--store", type=Path, metavar="FILE", help="where to keep what the library says")
    parser.add_argument(
        "--llama-cpp", metavar="WHERE", help="the llama.cpp that it belongs to, by default llama-cpp-python"
    )
    options = parser.parse_args()
    library = find_cuda_library(options.library)
    loads = draw(options.loads, options.seed)
    with tempfile.TemporaryDirectory() as temporary:
        ours = virtual(loads, Path(temporary), options.llama_cpp)
        theirs = real(loads, library, Path(temporary), options.llama_cpp, options.jobs)
    if options.store is not None:
        store(options.store, theirs)
    return int(compare("split mode tensor", loads, theirs, ours) > 0)


if __name__ == "__main__":
    sys.exit(main())
