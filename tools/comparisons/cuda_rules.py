"""Compare the rules of the cuda profile with each build's own ggml-cuda.

``python -m tools.comparisons.cuda_rules [NAME…]`` compares all builds, or those. Loads are drawn at random
(``tools/oracle/draw.py``) and measured twice with the build's own libllama: by its libggml-cuda.so, as ``--profile
library`` asks it, and by fitter's rules. The builds are the prebuilt ones with CUDA of ``llama_builds.json``, fetched
where they are not there; ``--oracle`` compares another llama.cpp by the oracle of its own source, ``--rocm`` the rules
of the rocm profile with a prebuilt libggml-hip.so. ``--update`` keeps the figures in
``fitter/llama/build/compared.json``, where a plan finds them.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fitter.errors import FitterError
from fitter.llama.build import virtual_backends
from fitter.llama.build.inspect_build import inspect_build
from fitter.llama.build.virtual_backends import find_cuda_library
from fitter.llama.processes.interpreter import LLAMA_CPP
from fitter.version import numbers_of
from tools.builds import llama_builds
from tools.models import shapes
from tools.oracle.draw import ARCHITECTURES, CAPABILITIES, draw, with_expert_caches
from tools.oracle.measure import Row, compare_rows, fill

DATA = Path(virtual_backends.__file__).with_name("compared.json")
SOFTWARE_DEVICE = "ggml-vulkan of its source, on a software device"
OWN, ORACLE = "its own libggml-cuda.so", "ggml-cuda of its source, built without a GPU"
OWN_VULKAN = "its own libggml-vulkan.so, on a software device"
OWN_HIP = "its own libggml-hip.so, on a HIP runtime without a GPU"
CARDS: dict[str, Sequence[int | str]] = {"cuda": CAPABILITIES, "rocm": ARCHITECTURES}
_VOLTA = {
    "70": "on cards of compute capability 7.0, for which its makers compiled nothing",
    "72": "on cards of compute capability 7.2, which compute with the code for 7.0 (ggml_cuda_highest_compiled_arch)",
}
"""Cards that attend as their library was compiled."""


@dataclass(frozen=True)
class Subject:
    """A build to compare with. ``where``: as ``--llama-cpp`` has it; ``library``: where its libggml-cuda.so is.

    ``profile`` is ``rocm`` where that is ggml-cuda as HIP compiles it.
    """

    name: str
    where: str
    library: Path
    by: str
    profile: str = "cuda"


def packaged(name: str) -> Subject:
    """A prebuilt one. Raises ``FetchError``."""
    directory = llama_builds.fetched(llama_builds.cuda()[name])
    return Subject(name.removesuffix("-cuda"), str(directory.resolve()), directory, OWN)


def answers(subject: Subject, rows: Sequence[Row], models: Path, jobs: int) -> tuple[list[Row], list[Row]]:
    """What the build's own backend says of each load, and what fitter's rules say. Raises ``FitterError``."""
    library = find_cuda_library(subject.library) if subject.profile == "cuda" else subject.library
    with_build = [row | {"environment": f"{row['environment']} {LLAMA_CPP}={subject.where}".strip()} for row in rows]
    return fill(with_build, models, library, jobs), fill(with_build, models, None, jobs)


def differing(real: Sequence[Row], mirror: Sequence[Row]) -> list[tuple[Row, Row]]:
    """The loads of which they say something else; two refusals are the same, whatever their words."""
    pairs = zip(real, mirror, strict=True)
    return [(a, b) for a, b in pairs if a != b and not (_is_refused(a) and _is_refused(b))]


def left(pairs: Sequence[tuple[Row, Row]]) -> str:
    """What the loads that differ have in common, in a few words."""
    kinds = Counter(
        next((_VOLTA[each] for each in real["compute_capability"].split("/") if each in _VOLTA), "not explained")
        for real, _ in pairs
    )
    return "; ".join(f"{count} {kind}" for kind, count in kinds.items())


def _is_refused(row: Row) -> bool:
    return row["result"].startswith("FAIL")


def compare(subject: Subject, rows: Sequence[Row], models: Path, jobs: int) -> dict[str, Any]:
    """The figures of a comparison, which is printed. Raises ``FitterError``."""
    real, mirror = answers(subject, rows, models, jobs)
    pairs = differing(real, mirror)
    if pairs:
        compare_rows(f"{subject.name}, which differ", *zip(*pairs, strict=True))
    return figures_of(subject, len(rows), len(rows) - len(pairs), left(pairs))


def figures_of(subject: Subject, rows: int, equal: int, explained: str = "") -> dict[str, Any]:
    """The figures of a comparison as ``compared.json`` has them; they are printed."""
    seen = inspect_build(subject.where)
    figures = {
        "llama_cpp": subject.name,
        "ggml": seen.ggml,
        # Built from a source without a history, it says the commit of whatever was around it.
        "commit": seen.commit if subject.by.startswith("its own") else "",
        "by": subject.by,
        "rows": rows,
        "equal": equal,
        "left": explained,
    }
    print(f"{subject.name} (ggml {seen.ggml}): {equal} of {rows} equal, by {subject.by}", flush=True)
    return figures


def main(argv: list[str] | None = None) -> int:
    """Compare; the exit status is 1 if a build differs more than ``compared.json`` says."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.comparisons.cuda_rules", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(llama_builds.cuda())} (all of them)")
    parser.add_argument(
        "--oracle", nargs=3, action="append", default=[], metavar=("NAME", "LLAMA_CPP", "LIBRARY"), help="another one"
    )
    parser.add_argument(
        "--library", nargs=2, action="append", default=[], metavar=("NAME", "LLAMA_CPP"), help="one with libggml-cuda"
    )
    parser.add_argument(
        "--rocm", nargs=3, action="append", default=[], metavar=("NAME", "LLAMA_CPP", "LIBRARY"), help="one of HIP"
    )
    parser.add_argument("--count", type=int, default=250, help="loads to draw (250)")
    parser.add_argument("--seed", type=int, default=14, help="what they are drawn with (14)")
    parser.add_argument("--moe-cache", action="store_true", help="with caches of experts, from b11549 on")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--update", action="store_true", help="keep the figures in compared.json")
    options = parser.parse_args(argv)
    status = 0
    try:
        is_named = options.names or options.oracle or options.library or options.rocm
        subjects = [packaged(name) for name in (options.names if is_named else llama_builds.cuda())]
        subjects += [Subject(name, where, Path(where), OWN) for name, where in options.library]
        subjects += [Subject(name, where, Path(library), ORACLE) for name, where, library in options.oracle]
        subjects += [Subject(name, where, Path(library), OWN_HIP, "rocm") for name, where, library in options.rocm]
        models = [name for name, shape in shapes.SHAPES.items() if not options.moe_cache or shape.is_moe]
        with tempfile.TemporaryDirectory(prefix="fitter-") as directory:
            for subject in subjects:
                rows = draw(models, options.count, options.seed, CARDS[subject.profile])
                if options.moe_cache:
                    rows = with_expert_caches(rows, options.seed)
                found = compare(subject, rows, Path(directory), options.jobs)
                status |= _is_worse(found, subject.profile)
                if options.update:
                    keep(found, subject.profile)
    except (FitterError, llama_builds.FetchError) as error:
        print(f"compared: {error}", file=sys.stderr)
        return 2
    return status


def _is_worse(figures: dict[str, Any], profile: str) -> bool:
    """Whether more loads differ than in the figures that are kept."""
    known = next(
        (each for each in virtual_backends.comparisons(profile) if each.llama_cpp == figures["llama_cpp"]), None
    )
    differ: int = figures["rows"] - figures["equal"]
    return differ > (known.rows - known.equal if known else 0)


def keep(figures: dict[str, Any], profile: str = "cuda") -> None:
    """Store the figures of a comparison in ``compared.json``, in place of earlier ones with the build."""
    document = json.loads(DATA.read_text(encoding="utf-8"))
    others = [each for each in document[profile] if each["llama_cpp"] != figures["llama_cpp"]]
    document[profile] = sorted([*others, figures], key=lambda each: (numbers_of(each["ggml"]), each["llama_cpp"]))
    DATA.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
