"""Ask builds of llama.cpp themselves what loads take, and compare fitter: ``python -m tools.llama_truth``."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from fitter.errors import FitterError
from fitter.llama.build.build_folder import PYTHON, find
from fitter.llama.client import Worker
from tools.builds import llama_builds, llama_python
from tools.builds.llama_builds import ROOT, FetchError
from tools.comparisons.load_answers import compare as comparison
from tools.llama_truth.loads import draw, measured, store
from tools.llama_truth.program import CompileError, answers, compiled, headers_of, servers, with_one_cpu

STORED, SEED = 60, 14


def _pinned() -> Path:
    fetch = [sys.executable, str(ROOT / "vendor" / "llama.cpp" / "fetch.py")]
    return Path(subprocess.run(fetch, capture_output=True, text=True, check=True).stdout.strip())


def compare(
    name: str, count: int, seed: int, n_servers: int, is_stored: bool, models: Path, source: Path | None = None
) -> int:
    """Ask a build and fitter about ``count`` loads; returns on how many they differ, and prints those."""
    with tempfile.TemporaryDirectory() as place, servers(name, n_servers) as endpoints:
        loads = list(draw(count, seed, bool(endpoints)))
        directory = Path(place, "build")
        directory.mkdir()
        where = with_one_cpu(name, directory)
        build = find(where)
        said = answers(
            compiled(build, headers_of(name, _pinned(), source), Path(place)), build, loads, models, endpoints
        )
        if is_stored:
            store(name, loads, said)
        with Worker(llama_cpp=where, rpc=endpoints) as worker:
            found = [measured(worker, load, models) for load in loads]
    return comparison(name, loads, said, found)


def main(argv: list[str] | None = None) -> int:
    """Compare the builds that are named, or all of them; 1 if fitter differs from one, 3 if one cannot be asked."""
    known = (PYTHON, *llama_builds.libraries(), *list(llama_builds.headers())[:-1])
    parser = argparse.ArgumentParser(description="Compare fitter with what builds of llama.cpp say themselves.")
    parser.add_argument("names", nargs="*", metavar="BUILD", help=f"which ones (default: all): {', '.join(known)}")
    parser.add_argument("--count", type=int, default=STORED, help="how many loads (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=SEED, help="which loads are drawn (default: %(default)s)")
    parser.add_argument("--rpc", type=int, default=0, metavar="N", help="with so many of a build's own rpc-servers")
    parser.add_argument("--write", action="store_true", help="store the answers in tests/data/llama_builds")
    parser.add_argument("--source", type=Path, help="llama.cpp's source, for builds newer than every llama-cpp-python")
    parser.add_argument("--models", type=Path, help="where to write the models (default: a temporary directory)")
    given = parser.parse_args(argv)
    if unknown := [name for name in given.names if name not in known]:
        parser.error(f"there is no build {unknown[0]}: choose of {', '.join(known)}")
    status = 0
    with tempfile.TemporaryDirectory() as place:
        models = given.models or Path(place)
        os.makedirs(models, exist_ok=True)
        for name in given.names or known:
            try:
                # The others are compiled for this machine.
                is_stored = given.write and name in llama_builds.libraries()
                status |= bool(compare(name, given.count, given.seed, given.rpc, is_stored, models, given.source))
            except (FetchError, CompileError, llama_python.CompileError, FitterError) as error:
                print(f"llama_truth: {name}: {error}", file=sys.stderr)
                return 3
    return status


if __name__ == "__main__":
    sys.exit(main())
