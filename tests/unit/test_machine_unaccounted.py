"""What was measured of devices beyond llama.cpp's count, and the margins that follow from it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fitter.errors import UsageError
from fitter.llama.types import DeviceInfo, TensorInfo
from fitter.machine.device_memory import has_half_experts, unaccounted
from fitter.machine.gpu import parse_gpus
from fitter.parameters.table import PARAMETERS
from fitter.planning.request.constraints import auto_margin, default_margin
from tests.support.cases import cases, named_cases
from tests.support.plans import MIB

CARD = DeviceInfo("CUDA0", "a card", "gpu", "CUDA", 1, 1)


@named_cases(
    ("an NVIDIA card", CARD, False, 245),
    ("one that weights of 16 bits are sent to", CARD, True, 778),
    ("an AMD card", replace(CARD, backend="ROCm"), False, 1100),
    ("one that weights of 16 bits are sent to, of AMD's", replace(CARD, backend="HIP"), True, 1100),
    ("a kind that nobody measured", replace(CARD, backend="Vulkan"), True, None),
    ("a server's", replace(CARD, backend="RPC"), True, None),
)
def test_what_was_measured(device: DeviceInfo, halves: bool, mib: int | None) -> None:
    assert unaccounted(device, (), halves=halves) == (None if mib is None else mib * MIB)


@cases(("24GiB", 245), ("rocm:gfx1100:24GiB", 1100), ("vulkan:24GiB", None))
def test_described_devices_are_like_the_real_ones(gpu: str, mib: int | None) -> None:
    cards = parse_gpus([gpu])
    device = replace(CARD, name=cards[0].name, backend="virtual", virtual=True)
    assert unaccounted(device, cards, halves=False) == (None if mib is None else mib * MIB)


@cases(((), False), (("q4_k", "f16"), False), (("q4_k", "bf16"), True), (("BF16",), True))
def test_experts_of_sixteen_bits(types: tuple[str, ...], expected: bool) -> None:
    assert has_half_experts(TensorInfo(f"blk.{i}", name, (1,), 2) for i, name in enumerate(types)) is expected


@cases((None, 1024, 1024), (0, 1024, 512), (153, 1024, 665), (512, 1024, 1024), (513, 1025, 1025), (1100, 1612, 1612))
def test_margins(outside: int | None, default: int, auto: int) -> None:
    size = None if outside is None else outside * MIB
    assert (default_margin(size), auto_margin(size)) == (default * MIB, auto * MIB)


def test_auto_is_a_margin_in_every_place() -> None:
    each = PARAMETERS["margin"]
    assert (each.check("auto"), each.kind.parse("auto"), each.kind.read("here", "auto")) == ("auto",) * 3
    assert each.check(np.array([MIB, 0])) == (MIB, 0), "an array is compared with a text without harm"
    with pytest.raises(UsageError, match="automatic"):
        each.check("automatic")
