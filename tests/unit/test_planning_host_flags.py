"""Which placements are those of -cmoe, -ncmoe and -ncffn, and which overrides are these flags."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fitter.llama.types import Params, TensorBuftOverride
from fitter.planning.placing.host_flags import flags_among, host_overrides, merge_overrides, override_like
from fitter.planning.placing.layer_sizes import HOST, Item
from fitter.planning.placing.placement import Placement
from fitter.planning.request.given import params_of
from tests.support.cases import named_cases
from tests.support.synthetic import SyntheticModel, limits, request

N_LAYER = 4
KINDS = ("down", "gate", "up")
EXPS = tuple(f"{kind}_exps" for kind in KINDS)


def names(kinds: Sequence[str], layers: Sequence[int], suffixes: Sequence[str] = ("weight",)) -> list[str]:
    return [f"blk.{layer}.ffn_{kind}.{suffix}" for layer in layers for kind in kinds for suffix in suffixes]


def moved(
    kinds: Sequence[str], layers: Sequence[int], suffixes: Sequence[str] = ("weight",), target: int = HOST
) -> tuple[tuple[Item, int], ...]:
    return tuple((Item(n, f"blk.{n}.ffn_{kind}", tuple(suffixes), 10), target) for n in layers for kind in kinds)


ATTENTION = [f"blk.{layer}.attn_q.weight" for layer in range(N_LAYER)]
MOE = [*ATTENTION, *names(EXPS, range(N_LAYER)), "output.weight"]
DENSE = [*ATTENTION, *names(KINDS, range(N_LAYER))]
LEADING = [*ATTENTION, *names(KINDS, [0]), *names(EXPS, range(1, N_LAYER)), *names(["up_shexp"], range(1, N_LAYER))]
BOTH = ("bias", "weight")
BIASES = [*ATTENTION, *names(EXPS, range(N_LAYER), BOTH)]
GROUPS = [*MOE, *names(["up_chexps"], range(N_LAYER))]
LAST_DENSE = [*ATTENTION, *names(EXPS, range(3)), *names(KINDS, [3])]


@named_cases(
    ("the experts of two layers", MOE, Placement(0, (5,), moved(EXPS, [0, 1])), [], ("n_cpu_moe", 2)),
    ("one tensor less of the first layer", MOE, Placement(0, (5,), moved(EXPS, [0, 1])[1:]), [], None),
    (
        "a tensor more of a later layer",
        MOE,
        Placement(0, (5,), (*moved(EXPS, [0, 1]), *moved(EXPS[:1], [3]))),
        [],
        None,
    ),
    ("other layers", MOE, Placement(0, (5,), moved(EXPS, [1, 2])), [], None),
    ("layers before them are on the host", MOE, Placement(1, (4,), moved(EXPS, [1, 2])), [], ("n_cpu_moe", 3)),
    ("the experts of all layers", MOE, Placement(0, (5,), moved(EXPS, range(N_LAYER))), [], ("cpu_moe", 1)),
    ("of all on devices", MOE, Placement(2, (3,), moved(EXPS, [2, 3])), [], ("cpu_moe", 1)),
    ("of all that have some", LAST_DENSE, Placement(0, (5,), moved(EXPS, range(3))), [], ("cpu_moe", 1)),
    ("after a dense layer", LEADING, Placement(0, (5,), moved(EXPS, [1, 2])), [], ("n_cpu_moe", 3)),
    ("a dense layer too", LEADING, Placement(0, (5,), (*moved(KINDS, [0]), *moved(EXPS, [1, 2]))), [], None),
    ("with their biases", BIASES, Placement(0, (5,), moved(EXPS, [0], BOTH)), [], ("n_cpu_moe", 1)),
    ("without their biases", BIASES, Placement(0, (5,), moved(EXPS, [0])), [], None),
    ("without those of a group", GROUPS, Placement(0, (5,), moved(EXPS, [0])), [], None),
    ("with those of a group", GROUPS, Placement(0, (5,), moved((*EXPS, "up_chexps"), [0])), [], ("n_cpu_moe", 1)),
    ("layers of two devices", MOE, Placement(0, (1, 4), moved(EXPS, [0, 1])), [], ("n_cpu_moe", 2)),
    ("first layers of each of two", MOE, Placement(0, (2, 3), moved(EXPS, [0, 2])), [], None),
    ("another device has some", MOE, Placement(0, (2, 3), moved(EXPS, [0], target=1)), [], None),
    ("another has one more", MOE, Placement(0, (2, 3), (*moved(EXPS, [0]), *moved(EXPS[:1], [1], target=1))), [], None),
    ("the user placed the others", MOE, Placement(0, (5,), moved(EXPS, [1])), names(EXPS, [0]), ("n_cpu_moe", 2)),
    ("feed-forward weights", DENSE, Placement(0, (5,), moved(KINDS, [0, 1])), [], ("n_cpu_ffn", 2)),
    (
        "attention",
        MOE,
        Placement(0, (5,), (*moved(EXPS, [0]), (Item(0, "blk.0.attn_q", ("weight",), 1), HOST))),
        [],
        None,
    ),
    ("nothing", MOE, Placement(1, (4,)), [], None),
)
def test_a_flag_says_it(
    every: list[str], placement: Placement, pinned: list[str], flag: tuple[str, int] | None
) -> None:
    override, rest = override_like(placement, every, pinned)
    assert (flags_among([override]).popitem()[1] if override else None) == flag
    assert rest == (() if override else tuple(item for item, _ in placement.moved))


@named_cases(
    ("a part of the next layer", MOE, (*moved(EXPS, [0, 1]), *moved(EXPS[:1], [2])), ("n_cpu_moe", 2), 1),
    ("most of it", MOE, (*moved(EXPS, [0, 1]), *moved(EXPS[:2], [2])), ("n_cpu_moe", 2), 2),
    ("a part of the last layer", MOE, moved(EXPS, range(N_LAYER))[:-1], ("n_cpu_moe", N_LAYER - 1), 2),
    ("of another layer", MOE, (*moved(EXPS, [0]), *moved(EXPS[:1], [2])), None, 4),
    ("of two layers", MOE, (*moved(EXPS, [0]), *moved(EXPS[:1], [1, 2])), None, 5),
    ("of the first layer alone", MOE, moved(EXPS[:2], [0]), None, 2),
    ("feed-forward weights", DENSE, (*moved(KINDS, [0]), *moved(KINDS[:1], [1])), ("n_cpu_ffn", 1), 1),
)
def test_a_flag_and_a_part_of_one_more_layer(
    every: list[str], items: tuple[tuple[Item, int], ...], flag: tuple[str, int] | None, n_rest: int
) -> None:
    override, rest = override_like(Placement(0, (5,), items), every, [])
    assert (flags_among([override]).popitem()[1] if override else None) == flag
    assert rest == tuple(item for item, _ in items)[len(items) - n_rest :]


def test_layers_for_prediction_keep_all_experts_apart() -> None:
    placement = Placement(0, (5,), moved(EXPS, range(N_LAYER)))
    override, _ = override_like(placement, MOE, [], all_layers=False)
    assert override and flags_among([override]) == {override: ("n_cpu_moe", N_LAYER)}


(CMOE,) = host_overrides(True, None, None, MOE)
(NCMOE,) = host_overrides(False, 2, None, MOE)
(MORE,) = host_overrides(False, 3, None, MOE)
(NCFFN,) = host_overrides(False, None, 1, DENSE)
OTHER, MOVED, BACK = (TensorBuftOverride(pattern, "CPU") for pattern in ("a", "^b$", r"(a)\1"))
ELSEWHERE = TensorBuftOverride("c", "CUDA0")


@named_cases(
    ("flags", [NCFFN, NCMOE], [NCFFN, NCMOE], [("n_cpu_ffn", 1), ("n_cpu_moe", 2)]),
    ("a flag beside others", [OTHER, NCMOE, MOVED], [TensorBuftOverride("a|^b$", "CPU"), NCMOE], [("n_cpu_moe", 2)]),
    ("others with a device between them", [OTHER, ELSEWHERE, MOVED], [OTHER, ELSEWHERE, MOVED], []),
    ("a back reference", [BACK, OTHER], [BACK, OTHER], []),
    ("one has the other", [NCMOE, MORE], [MORE], [("n_cpu_moe", 3)]),
    ("all have the others", [CMOE, NCMOE], [CMOE], [("cpu_moe", 1)]),
    ("beside a device, whose place in the order counts", [ELSEWHERE, NCMOE], [ELSEWHERE, NCMOE], []),
    (
        "layers that are not the first",
        [TensorBuftOverride(NCMOE.pattern.replace("0|", ""), "CPU")],
        [TensorBuftOverride(NCMOE.pattern.replace("0|", ""), "CPU")],
        [],
    ),
    ("another target", [replace(NCMOE, buffer_type="CUDA0")], [replace(NCMOE, buffer_type="CUDA0")], []),
    ("nothing", [], [], []),
)
def test_flags_among_overrides(
    given: list[TensorBuftOverride], merged: list[TensorBuftOverride], flags: list[tuple[str, int]]
) -> None:
    assert merge_overrides(given) == tuple(merged)
    assert list(flags_among(merged).values()) == flags


def test_a_plans_parameters_have_the_flags_override() -> None:
    model = SyntheticModel(experts=(10, 10, 10), dense_lead=1, bias=True)
    devices = limits(1000, 1000)
    asked = request(model, devices)
    placement = Placement(0, (4, 5), moved(EXPS, [1, 2], ("weight", "bias")))
    assert params_of(asked, devices, placement, 4096).tensor_buft_overrides == host_overrides(
        False, 3, None, asked.facts.names
    )
    own = replace(asked, params=Params(tensor_buft_overrides=host_overrides(False, 2, None, asked.facts.names)))
    own = replace(own, pinned=dict.fromkeys(names(EXPS, [1], ("weight", "bias")), HOST))
    placement = replace(placement, moved=placement.moved[3:])
    (override,) = params_of(own, devices, placement, 4096).tensor_buft_overrides
    assert flags_among([override]) == {override: ("n_cpu_moe", 3)}
