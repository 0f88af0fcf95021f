"""What generation with a quantized KV cache reserves on CUDA's and AMD's cards, which depends on the kernel."""

from __future__ import annotations

from pathlib import Path

import pytest

from fitter.llama.client import Worker
from fitter.llama.types import Params, VirtualDevice
from fitter.machine.gpu_catalogue import capability
from tools.cuda_reference import MEMORY, write_model


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def reserved(path: Path, card: VirtualDevice, params: Params) -> int:
    with Worker([card]) as worker:
        return worker.measure(path, params).on(card.name).compute


# The vector kernel reads the cache as it is, the others want it in f16.
TOKENS_WITHOUT_COPIES = {610: 2, 700: 0, 750: 1, 860: 1, 890: 2, 900: 2, 1200: 2}


@pytest.mark.parametrize(("compute_capability", "most"), TOKENS_WITHOUT_COPIES.items())
def test_how_many_tokens_need_no_copy_of_the_cache(models: Path, compute_capability: int, most: int) -> None:
    card = VirtualDevice("CUDA0", "Card", "cuda", compute_capability, MEMORY, MEMORY)
    path = write_model("llama31-8b", models)
    copies = 2 * 32768 * 1024 * 2
    for n_ubatch in (1, 2, 3):
        params = Params(n_ctx=32768, n_ubatch=n_ubatch, type_k="q8_0", type_v="q8_0")
        assert (reserved(path, card, params) < copies) == (n_ubatch <= most), n_ubatch


# Matrix instructions take over from 9 columns on, those of CDNA from 17 with heads of 128, and 8 heads of Q for one of
# K are 8 columns a token.
ON_AMD = {
    ("gpt-oss-20b", "gfx906"): 2,
    ("gpt-oss-20b", "gfx90a"): 1,
    ("gpt-oss-20b", "gfx90c"): 2,
    ("gpt-oss-20b", "gfx950"): 1,
    ("gpt-oss-20b", "gfx1030"): 2,
    ("gpt-oss-20b", "gfx1100"): 1,
    ("gpt-oss-20b", "gfx1201"): 1,
    ("qwen3-30b-a3b", "gfx90a"): 2,
    ("qwen3-30b-a3b", "gfx1100"): 1,
}


@pytest.mark.parametrize(("model", "architecture"), ON_AMD)
def test_how_many_tokens_need_no_copy_of_the_cache_on_amd(models: Path, model: str, architecture: str) -> None:
    card = VirtualDevice("ROCm0", "Card", "rocm", capability(architecture), MEMORY, MEMORY)
    cache = {"type_k": "q8_0", "type_v": "q8_0", "swa_full": True}
    sizes = [
        reserved(write_model(model, models), card, Params(n_ctx=131072, n_ubatch=n_ubatch, **cache))  # type: ignore[arg-type]
        for n_ubatch in (1, 2, 3)
    ]
    # The copies are most of what the largest of them takes.
    assert sum(size < sizes[-1] / 2 for size in sizes) == ON_AMD[model, architecture]
