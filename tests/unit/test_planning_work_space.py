"""Work space for attention without flash attention, against what an H100 was seen to take."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fitter.llama.types import Breakdown, Params, Row
from fitter.planning.request import DeviceLimit, HostLimit, Request
from fitter.planning.work import LayerFacts, ModelFacts
from fitter.planning.work_space import lacking, work_spaces

MIB = 2**20
CARD = DeviceLimit("CUDA0", "", 8192 * MIB, 8000 * MIB, 1024 * MIB, "CUDA0", outside=100 * MIB, has_work_space=True)
OTHER = replace(CARD, name="Vulkan0", has_work_space=False)
FACTS = ModelFacts(2, (LayerFacts((), n_head=8), LayerFacts((), n_head=32)), (), 4096, 0, 0, 0)


def request(*devices: DeviceLimit) -> Request:
    return Request(Params(), frozenset(), devices, HostLimit(None, None, 0), 2, 32768, str.isupper, False, facts=FACTS)


def breakdown(*names: str, n_ctx: int = 32768, flash_attn: bool | None = False, context: int = 1) -> Breakdown:
    return Breakdown(tuple(Row(name, name, False, 0, context, 0) for name in names), names, n_ctx, flash_attn)


@pytest.mark.parametrize(
    ("params", "found", "expected"),
    [
        # seen: 1135 MiB beyond the count after 31000 tokens, of which 84 were there with flash attention as well
        pytest.param({}, {}, 1024 + 100, id="32 heads, 32768 tokens, 512 at a time"),
        pytest.param({"n_ubatch": 64}, {}, 128 + 100, id="a smaller micro batch"),
        pytest.param({"n_ubatch": 4096}, {}, 4096 + 100, id="no larger than the batch"),
        pytest.param({}, {"n_ctx": 4096}, 128 + 100, id="a smaller context"),
        pytest.param({"n_seq_max": 4}, {}, 256 + 100, id="four caches"),
        pytest.param({"n_seq_max": 4, "kv_unified": True}, {}, 1024 + 100, id="one cache for four"),
        pytest.param({"type_k": "q8_0"}, {}, 1024 + 100, id="quantized keys"),
        pytest.param({"type_v": "f32"}, {}, None, id="values that are as wide"),
        pytest.param({}, {"flash_attn": True}, None, id="flash attention"),
        pytest.param({}, {"flash_attn": None}, None, id="not known"),
        pytest.param({"offload_kqv": False}, {}, None, id="attention on the host"),
        pytest.param({}, {"context": 0}, None, id="no attention there"),
    ],
)
def test_what_has_to_be_free(params: dict[str, Any], found: dict[str, Any], expected: int | None) -> None:
    spaces = work_spaces(request(CARD, OTHER), Params(**params), breakdown("CUDA0", "Vulkan0", **found))
    assert spaces == ({} if expected is None else {"CUDA0": expected * MIB})


@pytest.mark.parametrize(("used", "is_short"), [(6876, False), (6877, True)])
def test_what_is_short(used: int, is_short: bool) -> None:
    spaces = {"CUDA0": 1124 * MIB}
    found = Breakdown((Row("CUDA0", "CUDA0", False, used * MIB, 0, 0),), ("CUDA0",), 4096, False)
    assert lacking(spaces, request(CARD), found) == (spaces if is_short else {})
