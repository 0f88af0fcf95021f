"""What is given before anything is searched: what is left open, llama.cpp's own placement, and how one is said."""

from __future__ import annotations

from dataclasses import replace

from fitter.llama.types import MAX_USED_DEVICES, Params, TensorBuftOverride
from fitter.planning.placing.layer_sizes import HOST, Item
from fitter.planning.placing.placement import Placement
from fitter.planning.request import given
from fitter.planning.request.request import DeviceLimit, Request
from tests.support.cases import named_cases
from tests.support.synthetic import SyntheticModel, limits, priced, request

MODEL = SyntheticModel()
TWO, MANY = limits(3000, 1000), limits(*range(100, 100 + MAX_USED_DEVICES + 2))
FIRST = Params(tensor_split=(1.0, 0.0))


def asked(
    *fixed: str, params: Params | None = None, devices: tuple[DeviceLimit, ...] = TWO, pinned: int | None = None
) -> Request:
    made = priced(request(MODEL, devices, params=params, fixed=fixed), MODEL)
    return made if pinned is None else replace(made, pinned={"blk.0.attn_q.weight": pinned})


@named_cases(
    ("all-by-free-memory", asked(), 0, (7, 2)),
    ("as-many-as-the-user-says", asked("n_gpu_layers", params=Params(n_gpu_layers=4)), 5, (3, 1)),
    ("more-than-there-are", asked("n_gpu_layers", params=Params(n_gpu_layers=99)), 0, (7, 2)),
    ("all-of-them-said", asked("n_gpu_layers", params=Params(n_gpu_layers=-1)), 0, (7, 2)),
    ("a-default-is-not-the-users", asked(params=Params(n_gpu_layers=4)), 0, (7, 2)),
    ("the-users-split", asked("tensor_split", params=Params(tensor_split=(1.0, 2.0))), 0, (3, 6)),
    ("a-split-that-is-not-the-users", asked(params=Params(tensor_split=(1.0, 2.0))), 0, (7, 2)),
    ("a-short-split", asked("tensor_split", params=Params(tensor_split=(1.0,))), 0, (9, 0)),
    ("a-split-of-nothing", asked("tensor_split", params=Params(tensor_split=(0.0, 0.0))), 0, (7, 2)),
    ("no-device", asked(devices=()), 9, ()),
)
def test_default_placement(request_: Request, first: int, counts: tuple[int, ...]) -> None:
    assert given.default_placement(request_, request_.devices) == Placement(first, counts)


@named_cases(
    ("nothing-beyond-the-margin", asked(devices=limits(60, 0, 70)), ["CUDA0", "CUDA2"]),
    ("the-users-devices", asked("devices", devices=limits(60, 0)), ["CUDA0", "CUDA1"]),
    ("the-users-split", asked("tensor_split", devices=limits(60, 0)), ["CUDA0", "CUDA1"]),
    ("an-override-needs-it", asked(devices=limits(60, 0), pinned=1), ["CUDA0", "CUDA1"]),
    ("the-largest-of-many", asked(devices=MANY), [device.name for device in MANY[2:]]),
    ("a-small-one-that-an-override-needs", asked(devices=MANY, pinned=0), ["CUDA0", *(d.name for d in MANY[3:])]),
    ("none", asked(devices=limits(0, 0)), []),
    ("layers-need-any", asked("n_gpu_layers", params=Params(n_gpu_layers=1), devices=limits(0, 0)), ["CUDA0", "CUDA1"]),
    ("no-layers", asked("n_gpu_layers", params=Params(n_gpu_layers=0), devices=limits(0)), []),
)
def test_usable_devices(request_: Request, names: list[str]) -> None:
    assert [device.name for device in given.usable_devices(request_)] == names


@named_cases(
    ("open", asked(), True, False),
    ("devices", asked("devices"), False, True),
    ("split", asked("tensor_split"), False, True),
    ("override", asked(pinned=1), True, True),
    ("one", asked(devices=limits(1000)), False, False),
    ("as-upstream", replace(asked(), strategy="llama.cpp"), False, False),
    ("nothing-to-price-by", replace(asked(), host_speed=None), False, False),
)
def test_who_chooses_devices(request_: Request, is_chosen: bool, user_chose_devices: bool) -> None:
    assert given.chooses_devices(request_, request_.devices) is is_chosen
    assert given.user_chose_devices(request_) is user_chose_devices


@named_cases(
    ("both", asked(), (7, 2), ("CUDA0", "CUDA1"), (7.0, 2.0)),
    ("an-idle-one-is-not-named", asked(), (0, 9), ("CUDA1",), None),
    ("all-idle", asked(), (0, 0), ("CUDA0", "CUDA1"), None),
    ("idle-but-the-users", asked("devices"), (0, 9), ("CUDA0", "CUDA1"), (0.0, 9.0)),
    (
        "idle-in-the-users-split",
        asked("tensor_split", params=FIRST),
        (9, 0),
        ("CUDA0", "CUDA1"),
        (1.0, 0.0),
    ),
    ("one-layer-on-the-users", asked("devices"), (0, 1), ("CUDA0", "CUDA1"), (0.0, 1.0)),
    ("no-layer-on-the-users", asked("devices"), (0, 0), ("CUDA0", "CUDA1"), None),
    ("idle-but-pinned-to", asked(pinned=0), (0, 9), ("CUDA0", "CUDA1"), (0.0, 9.0)),
    ("idle-as-upstream", replace(asked(), strategy="llama.cpp"), (0, 9), ("CUDA0", "CUDA1"), (0.0, 9.0)),
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


def test_the_users_overrides_come_first_and_ours_follow() -> None:
    mine = TensorBuftOverride("ffn_gate", "CPU")
    placement = Placement(0, (7, 2), ((Item(1, "blk.1.ffn_up", ("weight",), 1), HOST),))
    found = given.params_of(asked(params=Params(tensor_buft_overrides=(mine,))), TWO, placement, 4096)
    assert found.tensor_buft_overrides[0].pattern.startswith("ffn_gate")
    assert "blk.1.ffn_up" in found.tensor_buft_overrides[-1].pattern


def test_the_smallest_context_is_the_users() -> None:
    assert given.smallest_context(asked("n_ctx", params=Params(n_ctx=777))) == 777
    assert given.smallest_context(asked(params=Params(n_ctx=777))) == 4096


@named_cases(
    ("all-layers", Placement(0, (7, 2)), True),
    ("all-on-one", Placement(0, (0, 9)), True),
    ("a-layer-on-the-host", Placement(1, (6, 2)), False),
)
def test_is_whole(placement: Placement, expected: bool) -> None:
    assert given.is_whole(asked(), TWO, placement) is expected


@named_cases(
    ("nothing-set", asked(), False),
    ("layers", asked("n_gpu_layers", params=Params(n_gpu_layers=3)), True),
    ("no-layers", asked("n_gpu_layers", params=Params(n_gpu_layers=0)), False),
    ("a-cache-of-experts", asked(params=Params(moe_cache_size=1 << 30)), True),
)
def test_who_needs_devices(request_: Request, expected: bool) -> None:
    assert given.needs_devices(request_) is expected
