"""``python -m tests.oracle``: build the oracle, make the tables of tests/data/cuda anew, compare the profile."""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import llama_cpp

from tests import cuda_reference, shapes
from tests.oracle.build import MissingError, build
from tests.oracle.draw import draw
from tests.oracle.measure import Row, fill

ROOT = Path(__file__).resolve().parents[2]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.oracle", description=__doc__)
    parser.add_argument("--source", type=Path, required=True, help="the llama.cpp source tree")
    parser.add_argument("--directory", type=Path, default=ROOT / "build" / "oracle", help="where to build")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--check", action="store_true", help="leave the tables as they are; fail if they would change")
    parser.add_argument("--draw", type=int, metavar="N", help="first draw the second table's settings anew, N rows")
    parser.add_argument("--random", type=int, default=0, metavar="N", help="compare the profile on N more random loads")
    parser.add_argument("--seed", type=int, default=1, help="of what is drawn")
    options = parser.parse_args()
    base = Path(llama_cpp.__file__).parent / "lib" / "libggml-base.so"
    try:
        library = build(options.source.resolve(), options.directory, base, options.jobs)
    except MissingError as error:
        print(f"oracle: {error}", file=sys.stderr)
        return 2
    except subprocess.CalledProcessError as error:
        print(f"oracle: {error.cmd[0]} failed, see above", file=sys.stderr)
        return 2
    print(f"built {library}")

    if options.draw:
        cuda_reference.write(cuda_reference.TABLES["drawn"], draw(list(shapes.SHAPES), options.draw, options.seed))
    with tempfile.TemporaryDirectory() as temporary:
        models = Path(temporary)
        differences = 0
        for name, path in cuda_reference.TABLES.items():
            rows = cuda_reference.read(path)
            filled = fill(rows, models, library, options.jobs)
            changed = _report(f"{name}: {len(rows)} rows, changed", "stored", rows, "now", filled)
            if changed and not options.check:
                cuda_reference.write(path, filled)
            differences += changed
        if options.random:
            rows = draw(list(shapes.SHAPES), options.random, options.seed)
            real = fill(rows, models, library, options.jobs)
            ours = fill(rows, models, None, options.jobs)
            differences += _report(f"random: {len(rows)} rows, different", "oracle", real, "profile", ours)
    return int(differences > 0 and (options.check or options.random > 0))


def _report(title: str, first: str, one: Sequence[Row], second: str, other: Sequence[Row]) -> int:
    pairs = [(a, b) for a, b in zip(one, other, strict=True) if a != b]
    print(f"{title}: {len(pairs)}")
    for a, b in pairs[:10]:
        print(" ", {key: value for key, value in a.items() if key not in ("result", "splits")})
        for label, row in ((first, a), (second, b)):
            print(f"    {label:8}{row['result']} {row['splits']}")
    return len(pairs)


if __name__ == "__main__":
    sys.exit(main())
