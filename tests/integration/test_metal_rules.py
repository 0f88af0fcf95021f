"""Rules of ggml-metal that only some versions have, against what ggml-metal's own C++ of b11549 answered.

``python -m tools.follow --rules`` compares hundreds of drawn loads with a source; this is one on which they decide.
"""

from __future__ import annotations

from pathlib import Path

from tests.support.cases import cases
from tests.support.llama_builds import NEWEST, PINNED, where
from tools.comparisons.backend_loads import METAL, Load, answers
from tools.comparisons.load_answers import params_of
from tools.models import shapes

LOAD = Load(
    METAL,
    "gpt-oss-20b",
    "",
    1,
    "",
    params_of("n_ctx=4096 n_gpu_layers=12 override=ffn_(up|gate|down)=CPU flash_attn=off swa_full=1"),
)


@cases((NEWEST, 617220096), (PINNED, 621021184))
def test_sums_are_computed_with_their_products(build: str, compute: int, tmp_path: Path) -> None:
    def model(load: Load) -> Path:
        return shapes.write(load.model, tmp_path, vocab=False)

    (said,) = answers([LOAD], model, llama_cpp=where(build))
    assert f"MTL0=926159616/92274688/{compute} splits=204/24" in said
