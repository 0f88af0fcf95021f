"""Draws the picture of README.md and of the guide to reports: ``python -m tools.docs.picture [--check]``.

It is what ``fitter report --svg`` draws of the same plan.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
TARGET = ROOT / "docs" / "images" / "plan.svg"
SHAPE = "gpt-oss-120b"
OPTIONS: dict[str, Any] = {
    "gpus": ["rtx-5090", "rtx-3090"],
    "host_memory": "64GiB",
    "n_ctx": 0,
    "program": "llama-server",
}
"""Keywords of the plan: the example of docs/guides/reports.md."""


def readme_picture() -> str:
    """Plan the example of the guide to reports, and draw it."""
    import fitter
    from fitter.api.report_plan import beside
    from fitter.output.pages.report_page import plan_picture
    from tools.models import shapes

    with tempfile.TemporaryDirectory() as folder:
        plan = fitter.fit(shapes.write(SHAPE, Path(folder)), **OPTIONS)
        found = beside(plan, with_contexts=False)
    title = f"{plan.model.name} with {plan.params.n_ctx:,} tokens of context"
    return plan_picture(plan.to_dict(), title, found.layer_map)


def main(words: Sequence[str]) -> int:
    """Write docs/images/plan.svg; with ``--check`` return status 1 if it is stale."""
    drawn = readme_picture()
    if words == ["--check"]:
        fresh = TARGET.is_file() and TARGET.read_text(encoding="utf-8") == drawn
        if not fresh:
            print(f"{TARGET.relative_to(ROOT)} is stale: run 'python -m tools.docs.picture'", file=sys.stderr)
        return 0 if fresh else 1
    TARGET.parent.mkdir(parents=True, exist_ok=True)
    TARGET.write_text(drawn, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
