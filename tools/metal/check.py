"""``python -m tools.metal.check``: compare the metal profile with ggml-metal's own C++ on a GPU that is not there.

The exit status is 1 if anything differs."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from fitter.llama.build.library import backend_path
from fitter.llama.types import VirtualDevice, describe
from tools.comparisons.backend_loads import METAL, Load, answers, draw, store
from tools.comparisons.load_answers import compare
from tools.metal.build import build
from tools.models import shapes
from tools.oracle import operations
from tools.oracle.build import MissingError

ROOT = Path(__file__).resolve().parents[2]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.metal.check", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--source", type=Path, required=True, help="the llama.cpp source tree")
    parser.add_argument("--directory", type=Path, default=ROOT / "build" / "metal", help="where to build")
    parser.add_argument("--count", type=int, default=400, help="loads to draw (400)")
    parser.add_argument("--seed", type=int, default=1, help="what they are drawn with (1)")
    parser.add_argument("--write", action="store_true", help="store the answers as the table that the tests use")
    options = parser.parse_args()
    try:
        library = build(options.source, options.directory, operations.LIBRARIES / "libggml-base.so.0")
        ops = operations.build_ops(options.source / "ggml" / "include", options.directory)
    except MissingError as error:
        print(f"test-metal: {error}", file=sys.stderr)
        return 2
    print(f"built {library}")

    said = compare_operations(ops, library, 1_000_000)
    print(f"a million operations, {said.splitlines()[-1]}", *said.splitlines()[:-1], sep="\n  ")
    loads = draw(METAL, options.count, options.seed)
    with tempfile.TemporaryDirectory() as temporary:

        def model(load: Load) -> Path:
            return shapes.write(load.model, Path(temporary), vocab=False)

        real = list(answers(loads, model, lambda load: variables(load, library)))
        ours = list(answers(loads, model))
    if options.write:
        store(METAL, zip(loads, real, strict=True))
        print(f"wrote {METAL.table.relative_to(ROOT)}")
    different = compare("shapes", loads, real, ours)
    return int(bool(different) or not said.endswith("different: 0"))


def variables(load: Load, library: Path) -> dict[str, str]:
    """The variables with which ggml-metal's own C++ (``library``, see build.py) has the load's devices."""
    return {
        "GGML_BACKEND_PATH": str(library),
        "GGML_METAL_DEVICES": str(load.n_devices),
        "ORACLE_METAL_DEVICES": describe(load.devices),
    }


def compare_operations(ops: Path, library: Path, count: int) -> str:
    """The questions about random operations that ggml-metal and the profile answer differently, and how many."""
    device = describe([VirtualDevice("MTL0", "Apple", "metal", 0, 2**40, 2**40)])
    variables = {name: value for name, value in os.environ.items() if not name.startswith("GGML_")}
    variables |= {"GGML_METAL_DEVICES": "1", "ORACLE_METAL_DEVICES": device, "FITTER_DEVICES": device}
    command = [str(ops), str(count), "1", str(library), str(backend_path())]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 1):
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}: {done.stderr}")
    return done.stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
