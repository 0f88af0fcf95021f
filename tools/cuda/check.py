"""Compare the cuda profile with the real ggml-cuda, built from vendor, on cards that are not here.

``make test-cuda`` builds what this needs and runs it. The library is asked as ``--profile library:DIRECTORY`` asks it.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from fitter.errors import FitterError
from fitter.llama.build.virtual_backends import find_cuda_library
from tools.cuda.toolkit import ToolkitError, architectures_of
from tools.models import shapes
from tools.oracle.draw import draw
from tools.oracle.measure import compare_rows, fill

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = ROOT / "build" / "cuda" / "bin"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the comparison; the exit status is 0 if every answer is equal."""
    parser = argparse.ArgumentParser(prog="python -m tools.cuda.check", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--library", type=Path, default=LIBRARY, help="the directory of libggml-cuda.so")
    parser.add_argument("--architectures", default="89", help="the compute capabilities that it was built for (89)")
    parser.add_argument("--count", type=int, default=200, help="loads to draw (200)")
    parser.add_argument("--seed", type=int, default=14, help="what they are drawn with (14)")
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args(arguments)
    try:
        library = find_cuda_library(options.library)
        # Code for an older card runs on a newer one, but then it is the older one's sizes that count.
        known = [int(number) for number in re.findall(r"\d+", architectures_of(options.architectures))]
    except (FitterError, ToolkitError) as error:
        print(f"cuda: {error}", file=sys.stderr)
        return 2
    rows = draw(list(shapes.SHAPES), options.count, options.seed, known)
    with tempfile.TemporaryDirectory(prefix="fitter-cuda-") as directory:
        real = fill(rows, Path(directory), library, options.jobs)
        mirror = fill(rows, Path(directory), None, options.jobs)
    return int(compare_rows(str(library.path), real, mirror) > 0)


if __name__ == "__main__":
    sys.exit(main())
