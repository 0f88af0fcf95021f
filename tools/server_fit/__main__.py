"""``python -m tools.server_fit``: what llama-server's own fit measures beside what fitter measures, for every case.

The exit status is 1 if anything differs."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from fitter.llama.client import Worker
from tools.server_fit.compare import Models, differences
from tools.server_fit.pairs import cases


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.server_fit", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", default="", metavar="WORD", help="cases whose name has this word")
    options = parser.parse_args()
    wanted = [case for case in cases() if options.only in case.name]
    n_different = 0
    with tempfile.TemporaryDirectory() as directory, Worker() as worker:
        models = Models(Path(directory))
        for case in wanted:
            found = differences(case, models, worker)
            n_different += bool(found)
            for each in found:
                print(f"{case.name}: {each}", flush=True)
    print(f"{len(wanted)} cases, {n_different} of them differ")
    return 1 if n_different else 0


if __name__ == "__main__":
    raise SystemExit(main())
