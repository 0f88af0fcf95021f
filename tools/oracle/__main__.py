"""``python -m tools.oracle``: build the oracle, make what is in tests/data/cuda anew, compare the profile with it.

With ``--rocm`` the oracle is the one for AMD's cards, and what it answers is in tests/data/rocm.

The exit status is 1 if anything changed or differs."""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from fitter.llama.build.library import backend_path
from tools.comparisons import cuda_reference
from tools.comparisons.load_answers import read_table, write_table
from tools.models import shapes
from tools.oracle import build as build_cuda
from tools.oracle import build_hip, operations
from tools.oracle.build import MissingError
from tools.oracle.draw import ARCHITECTURES, CAPABILITIES, draw
from tools.oracle.measure import Row, compare_rows, fill
from tools.oracle.upstream_fit import ROCM_SETS, SETS, compare

ROOT = Path(__file__).resolve().parents[2]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.oracle", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--source", type=Path, required=True, help="the llama.cpp source tree")
    parser.add_argument("--directory", type=Path, default=ROOT / "build" / "oracle", help="where to build")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--check", action="store_true", help="leave tests/data as it is")
    parser.add_argument("--draw", type=int, metavar="N", help="first draw the second table's settings anew, N rows")
    parser.add_argument("--random", type=int, default=0, metavar="N", help="compare the profile on N more random loads")
    parser.add_argument("--fit", action="store_true", help="compare what upstream's llama-fit-params chooses on both")
    parser.add_argument("--seed", type=int, default=1, help="of what is drawn")
    parser.add_argument("--rocm", action="store_true", help="ggml-cuda as HIP compiles it, tests/data/rocm")
    options = parser.parse_args()
    known: Sequence[int | str] = ARCHITECTURES if options.rocm else CAPABILITIES
    tables = cuda_reference.ROCM_TABLES if options.rocm else cuda_reference.TABLES
    drawn = tables["rocm" if options.rocm else "drawn"]
    cards = operations.ROCM_CARDS if options.rocm else operations.CUDA_CARDS
    stored = operations.ROCM_ANSWERS if options.rocm else operations.ANSWERS
    build = build_hip.build if options.rocm else build_cuda.build
    try:
        library = build(options.source, options.directory, operations.LIBRARIES / "libggml-base.so.0", options.jobs)
        ops = operations.build_ops(options.source / "ggml" / "include", options.directory)
    except MissingError as error:
        print(f"oracle: {error}", file=sys.stderr)
        return 2
    except subprocess.CalledProcessError as error:
        print(f"oracle: {error.cmd[0]} failed, see above", file=sys.stderr)
        return 2
    print(f"built {library}")

    differences = 0
    answers = operations.answers(ops, library, cards)
    if not stored.exists() or answers != stored.read_text():
        print(operations.disagreements(ops, library, backend_path(), cards), end="")
        differences += 1
        if not options.check:
            stored.write_text(answers)
    print(f"operations: {len(answers.splitlines())}, {'changed' if differences else 'as stored'}")

    if options.draw:
        _write_rows(drawn, draw(list(shapes.SHAPES), options.draw, options.seed, known))
    with tempfile.TemporaryDirectory() as temporary:
        models = Path(temporary)
        for name, path in tables.items():
            rows = read_table(path)
            filled = fill(rows, models, library, options.jobs)
            changed = compare_rows(f"{name}, stored and now", rows, filled)
            if changed and not options.check:
                _write_rows(path, filled)
            differences += changed
        if options.random:
            rows = draw(list(shapes.SHAPES), options.random, options.seed, known)
            real = fill(rows, models, library, options.jobs)
            ours = fill(rows, models, None, options.jobs)
            differences += compare_rows("random, oracle and profile", real, ours)
        if options.fit:
            count, lines = compare(models, library, options.jobs, ROCM_SETS if options.rocm else SETS)
            print(f"llama-fit-params: {count} pairs of shape and devices, different: {len(lines)}", *lines, sep="\n  ")
            differences += len(lines)
    return int(differences > 0)


def _write_rows(path: Path, rows: Sequence[Row]) -> None:
    write_table(path, [list(rows[0]), *(list(row.values()) for row in rows)])


if __name__ == "__main__":
    sys.exit(main())
