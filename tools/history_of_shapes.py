"""What happened to twelve well-known models from one build of llama.cpp to the next: figures, picture and table.

    python -m tools.history_of_shapes

The models are headers of their published shapes, the builds those of ``tools.llama_builds`` and the installed
llama-cpp-python. It takes some minutes, and writes the CSV and the picture to ``docs/images``, and the table into the
guide to comparing builds.
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from fitter.llama.types import Breakdown
from fitter.output.progress import counted
from fitter.output.units import human
from fitter.regression import build_report
from fitter.regression.build_comparison import Compared, Subject, change_on, first_of, labels, over_builds
from fitter.regression.cases import Growth
from fitter.regression.compare import change
from tools import llama_builds, shapes

ROOT = Path(__file__).resolve().parent.parent
GUIDE = ROOT / "docs" / "guides" / "compare-builds.md"
PICTURE = ROOT / "docs" / "images" / "llama-cpp-history.svg"
FIGURES = PICTURE.with_suffix(".csv")

BUILDS = ("b9842", "b10068", "b10361", "b10434", "v0.4.0", "v0.5.0")
PYTHON = "python"
"""The newest build is that of the installed llama-cpp-python."""

N_CTX, N_UBATCH = 32768, 2048
MACHINES: Mapping[str, str] = {
    "llama-3.1-8b": "rtx-4090",
    "gemma3-12b": "24GiB",
    "gpt-oss-20b": "24GiB",
    "qwen3-30b-a3b": "rtx-5090",
    "qwen3-32b": "2x rtx-3090",
    "llama-3.1-70b": "3x rtx-3090",
    "qwen3-next-80b-a3b": "rtx-pro-6000-blackwell",
    "gpt-oss-120b": "rtx-pro-6000-blackwell",
    "glm45-air": "rtx-pro-6000-blackwell",
    "qwen3-235b-a22b": "180GiB",
    "deepseek-v3.1": "3x 180GiB",
    "kimi-k2": "7x rtx-pro-6000-blackwell",
}
"""The cards of each model: those that have all of it."""

_TABLE = re.compile(r"(?<=<!-- history: begin -->\n).*?(?=<!-- history: end -->)", re.DOTALL)


def subjects(directory: Path) -> tuple[Subject, ...]:
    """The models, whose headers are written to ``directory``."""
    words = {"n_ctx": N_CTX, "n_ubatch": N_UBATCH}
    return tuple(
        Subject(f"{name}, {machine}", shapes.write(name, directory), {**words, "gpus": [machine]})
        for name, machine in MACHINES.items()
    )


def table(compared: Sequence[Compared], builds: Sequence[str]) -> str:
    """A line of Markdown for each model: its compute buffers with every build, on devices and on the host."""
    head = ["model, GPUs", "", *labels(builds)]
    lines = [f"| {' | '.join(head)} |", f"| --- | --- |{' ---: |' * len(builds)}"]
    for each in compared:
        for place in ("GPUs", "host"):
            sizes = [_compute(asked.breakdown, is_host=place == "host") for asked in each.builds]
            cells = [_cell(sizes, step) for step in range(len(sizes))]
            mark = ["" if asked.breakdown is None or asked.fits else " ✕" for asked in each.builds]
            shown = [cell + (more if place == "GPUs" else "") for cell, more in zip(cells, mark, strict=True)]
            lines.append(f"| {' | '.join([each.name if place == 'GPUs' else '', place, *shown])} |")
    return "\n".join(lines) + "\n"


def _compute(breakdown: Breakdown | None, *, is_host: bool) -> int | None:
    return None if breakdown is None else sum(row.compute for row in breakdown.rows if row.is_host is is_host)


def _cell(sizes: Sequence[int | None], step: int) -> str:
    """A size that is another than that of the build before, ``=`` for the same, ``-`` where nothing was measured."""
    known = [size for size in sizes[:step] if size is not None]
    size = sizes[step]
    if size is None:
        return "-"
    if not known:
        return human(size)
    return "=" if size == known[-1] else f"**{human(size)}** ({change(known[-1], size, 'bytes')})"


def others(compared: Sequence[Compared]) -> list[str]:
    """Anything but compute buffers that is another with the last build: none of it is in the table."""
    return [
        f"{each.name}: {move.what} {move.detail}"
        for each in compared
        if first_of(each) is not None
        for move in change_on(each, each.builds[-1], Growth())
        if move.unit == "bytes" and {part.split()[0] for part in move.detail.split(", ")} != {"compute"}
    ]


def main() -> int:
    """Measure, write, and print the table."""
    try:
        builds = [str(llama_builds.fetched(llama_builds.packaged()[name])) for name in BUILDS] + [PYTHON]
    except llama_builds.FetchError as error:
        print(error, file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as folder, counted(sys.stderr, "measuring") as on_done:
        compared = over_builds(subjects(Path(folder)), builds, own_plans=False, on_done=on_done)
    for line in (*build_report.error_lines(compared, builds), *others(compared)):
        print(line, file=sys.stderr)
    text = table(compared, builds)
    PICTURE.write_text(build_report.to_svg(compared, builds), encoding="utf-8")
    FIGURES.write_text(build_report.to_csv(compared, builds), encoding="utf-8")
    page = GUIDE.read_text(encoding="utf-8")
    GUIDE.write_text(_TABLE.sub(lambda _: f"\n{text}\n", page), encoding="utf-8")
    print(text, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
