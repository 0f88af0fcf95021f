"""What is given before anything is searched: what is left open, llama.cpp's own placement, and how one is said."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fitter.llama.types import Params
from fitter.planning.placing.placement import Placement
from fitter.planning.request import given
from fitter.planning.request.request import DeviceLimit, Request
from tests.support.synthetic import SyntheticModel, limits, priced, request

MODEL = SyntheticModel()
TWO = limits(3000, 1000)


def asked(
    *fixed: str, params: Params | None = None, devices: tuple[DeviceLimit, ...] = TWO, pinned: int | None = None
) -> Request:
    made = priced(request(MODEL, devices, params=params, fixed=fixed), MODEL)
    return made if pinned is None else replace(made, pinned={"blk.0.attn_q.weight": pinned})


@pytest.mark.parametrize(
    ("request_", "first", "counts"),
    [
        pytest.param(asked(), 0, (7, 2), id="all-by-free-memory"),
        pytest.param(asked("n_gpu_layers", params=Params(n_gpu_layers=4)), 5, (3, 1), id="as-many-as-the-user-says"),
        pytest.param(asked("n_gpu_layers", params=Params(n_gpu_layers=99)), 0, (7, 2), id="more-than-there-are"),
        pytest.param(asked("n_gpu_layers", params=Params(n_gpu_layers=-1)), 0, (7, 2), id="all-of-them-said"),
        pytest.param(asked(params=Params(n_gpu_layers=4)), 0, (7, 2), id="a-default-is-not-the-users"),
        pytest.param(asked("tensor_split", params=Params(tensor_split=(1.0, 2.0))), 0, (3, 6), id="the-users-split"),
        pytest.param(asked("tensor_split", params=Params(tensor_split=(1.0,))), 0, (9, 0), id="a-short-split"),
        pytest.param(asked("tensor_split", params=Params(tensor_split=(0.0, 0.0))), 0, (7, 2), id="a-split-of-nothing"),
        pytest.param(asked(devices=()), 9, (), id="no-device"),
    ],
)
def test_default_placement(request_: Request, first: int, counts: tuple[int, ...]) -> None:
    assert given.default_placement(request_, request_.devices) == Placement(first, counts)


@pytest.mark.parametrize(
    ("request_", "names"),
    [
        pytest.param(asked(devices=limits(60, 0, 70)), ["CUDA0", "CUDA2"], id="nothing-beyond-the-margin"),
        pytest.param(asked("devices", devices=limits(60, 0)), ["CUDA0", "CUDA1"], id="the-users-devices"),
        pytest.param(asked("tensor_split", devices=limits(60, 0)), ["CUDA0", "CUDA1"], id="the-users-split"),
        pytest.param(asked(devices=limits(60, 0), pinned=1), ["CUDA0", "CUDA1"], id="an-override-needs-it"),
        pytest.param(asked(devices=limits(0, 0)), [], id="none"),
        pytest.param(
            asked("n_gpu_layers", params=Params(n_gpu_layers=1), devices=limits(0, 0)),
            ["CUDA0", "CUDA1"],
            id="layers-must-be-somewhere",
        ),
        pytest.param(asked("n_gpu_layers", params=Params(n_gpu_layers=0), devices=limits(0)), [], id="no-layers"),
    ],
)
def test_usable_devices(request_: Request, names: list[str]) -> None:
    assert [device.name for device in given.usable_devices(request_)] == names


@pytest.mark.parametrize(
    ("request_", "is_chosen", "user_chose_devices"),
    [
        pytest.param(asked(), True, False, id="open"),
        pytest.param(asked("devices"), False, True, id="devices"),
        pytest.param(asked("tensor_split"), False, True, id="split"),
        pytest.param(asked(pinned=1), True, True, id="override"),
        pytest.param(asked(devices=limits(1000)), False, False, id="one"),
        pytest.param(replace(asked(), strategy="llama.cpp"), False, False, id="as-upstream"),
        pytest.param(replace(asked(), host_speed=None), False, False, id="nothing-to-price-by"),
    ],
)
def test_who_chooses_devices(request_: Request, is_chosen: bool, user_chose_devices: bool) -> None:
    assert given.chooses_devices(request_, request_.devices) is is_chosen
    assert given.user_chose_devices(request_) is user_chose_devices


@pytest.mark.parametrize(
    ("request_", "counts", "names", "split"),
    [
        pytest.param(asked(), (7, 2), ("CUDA0", "CUDA1"), (7.0, 2.0), id="both"),
        pytest.param(asked(), (0, 9), ("CUDA1",), None, id="an-idle-one-is-not-named"),
        pytest.param(asked(), (0, 0), ("CUDA0", "CUDA1"), None, id="all-idle"),
        pytest.param(asked("devices"), (0, 9), ("CUDA0", "CUDA1"), (0.0, 9.0), id="idle-but-the-users"),
        pytest.param(asked(pinned=0), (0, 9), ("CUDA0", "CUDA1"), (0.0, 9.0), id="idle-but-pinned-to"),
        pytest.param(
            replace(asked(), strategy="llama.cpp"), (0, 9), ("CUDA0", "CUDA1"), (0.0, 9.0), id="idle-as-upstream"
        ),
    ],
)
def test_params_of(
    request_: Request, counts: tuple[int, ...], names: tuple[str, ...], split: tuple[float, ...] | None
) -> None:
    params = given.params_of(request_, TWO, Placement(9 - sum(counts), counts), 5120)
    assert (params.n_ctx, params.n_gpu_layers, params.devices, params.tensor_split) == (5120, sum(counts), names, split)


def test_what_the_user_fixed_is_said_as_it_is() -> None:
    mine = Params(n_gpu_layers=99, tensor_split=(3.0, 1.0))
    request_ = asked("n_gpu_layers", "tensor_split", params=mine)
    params = given.params_of(request_, TWO, Placement(0, (7, 2)), 4096)
    assert (params.n_gpu_layers, params.tensor_split) == (99, (3.0, 1.0))


@pytest.mark.parametrize(
    ("placement", "expected"),
    [
        pytest.param(Placement(0, (7, 2)), True, id="all-layers"),
        pytest.param(Placement(0, (0, 9)), True, id="all-on-one"),
        pytest.param(Placement(1, (6, 2)), False, id="a-layer-on-the-host"),
    ],
)
def test_is_whole(placement: Placement, expected: bool) -> None:
    assert given.is_whole(asked(), TWO, placement) is expected


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        pytest.param(asked(), False, id="nothing-set"),
        pytest.param(asked("n_gpu_layers", params=Params(n_gpu_layers=3)), True, id="layers"),
        pytest.param(asked("n_gpu_layers", params=Params(n_gpu_layers=0)), False, id="no-layers"),
        pytest.param(asked(params=Params(moe_cache_size=1 << 30)), True, id="a-cache-of-experts"),
    ],
)
def test_who_needs_devices(request_: Request, expected: bool) -> None:
    assert given.needs_devices(request_) is expected
