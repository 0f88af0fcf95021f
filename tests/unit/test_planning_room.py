"""What each device has room for, by the compute buffers that were measured. Bytes of a few MiB."""

from __future__ import annotations

from dataclasses import replace

from fitter.llama.types import Breakdown, Params, Row
from fitter.planning.placing.layer_sizes import Unit
from fitter.planning.placing.placement import Placement
from fitter.planning.pricing.trial import Trial, missing_of
from fitter.planning.request.request import SHARED_ROW
from fitter.planning.search.room import (
    Buffers,
    LearnedCompute,
    Room,
    cached_on,
    first_without_attention,
    off_by,
    room_left_by,
)
from tests.support.cases import named_cases
from tests.support.synthetic import MIB, SyntheticModel, limits, request

DEVICES, BOTH = limits(100, 80), ("CUDA0", "CUDA1")
UNITS = (Unit(0, 10 * MIB, 5 * MIB), Unit(1, 10 * MIB, 5 * MIB), Unit(2, 20 * MIB, 0))


def measured(*compute: int, extra: int = 0, shared: int = 0) -> Breakdown:
    rows = [Row(f"CUDA{d}", f"CUDA{d}", False, (10 + extra) * MIB, 5 * MIB, mib * MIB) for d, mib in enumerate(compute)]
    rows.append(Row("CPU", None, True, 7 * MIB, 0, 1 * MIB))
    if shared:
        rows.append(Row(SHARED_ROW, "CUDA0", False, 0, 0, shared * MIB))
    return Breakdown(tuple(rows), ("CUDA0", "CUDA1"), 4096, True)


WHOLE = (True, measured(30, 20), {"CUDA0": "attention", "CUDA1": "attention"})
PART = (False, measured(40, 10), {"CUDA0": "attention", "CUDA1": "attention"})
PART_WITHOUT_CACHE = (False, measured(40, 2), {"CUDA0": "attention", "CUDA1": "nothing"})
WITHOUT_CACHE = (False, measured(40, 2), {"CUDA1": "nothing"})
FIRST_ALONE = (False, measured(40, 10), {"CUDA0": "attention"})


@named_cases(
    ("nothing-known", [], True, False, (100, 80), (100, 80)),
    ("whole", [WHOLE], True, False, (70, 60), (70, 60)),
    ("of-the-other-kind", [WHOLE], False, False, (70, 60), (70, 60)),
    ("of-the-other-kind-is-left-out", [WHOLE], False, True, (100, 80), (100, 80)),
    ("each-kind-has-its-own", [WHOLE, PART], False, False, (60, 70), (60, 70)),
    ("and-so-has-the-other", [WHOLE, PART], True, False, (70, 60), (70, 60)),
    ("without-a-cache", [WHOLE, PART_WITHOUT_CACHE], False, False, (60, 60), (60, 78)),
    ("a-cache-takes-no-less", [WITHOUT_CACHE], False, False, (100, 78), (100, 78)),
    ("nor-by-an-optimist", [WITHOUT_CACHE], False, True, (100, 78), (100, 78)),
    ("whole-takes-more", [WHOLE, WITHOUT_CACHE], False, False, (70, 60), (70, 78)),
    ("an-idle-device-teaches-nothing", [FIRST_ALONE], False, False, (60, 80), (60, 80)),
)
def test_room(
    learned: list[tuple[bool, Breakdown, dict[str, bool]]],
    is_whole: bool,
    optimistic: bool,
    with_caches: tuple[int, ...],
    without: tuple[int, ...],
) -> None:
    buffers = Buffers()
    for kind, breakdown, used in learned:
        buffers.learn(breakdown, 4096, kind, used)
    room = buffers.room(DEVICES, 4096, is_whole, [0, 0], optimistic)
    assert (room.with_caches, room.without) == (tuple(n * MIB for n in with_caches), tuple(n * MIB for n in without))
    assert buffers.knows_any is bool(learned) and buffers.knows(True) is any(kind for kind, *_ in learned)
    assert is_whole or all(here <= there for here, there in zip(room.with_caches, room.without, strict=True))


def test_only_what_is_not_whole_is_forgotten() -> None:
    buffers = Buffers()
    for kind, breakdown, used in (WHOLE, PART):
        buffers.learn(breakdown, 4096, kind, used)
    buffers.forget_partial()
    assert (buffers.knows(True), buffers.knows(False)) == (True, False)
    for is_whole in (True, False):
        assert buffers.room(DEVICES, 4096, is_whole, [0, 0]).with_caches == (70 * MIB, 60 * MIB)


def test_what_shares_the_memory_is_there_on_other_devices_too() -> None:
    buffers = Buffers()
    buffers.learn(measured(30, 20, shared=8), 4096, True, {})
    assert Buffers(buffers.shared).room(DEVICES, 4096, True, [0, 0]).with_caches == (92 * MIB, 80 * MIB)


def test_estimates_that_were_off_leave_less() -> None:
    buffers, off = Buffers(), [3 * MIB, -2 * MIB]
    assert buffers.room(DEVICES, 4096, True, off).with_caches == (97 * MIB, 82 * MIB)
    for kind, breakdown, used in (WHOLE, PART_WITHOUT_CACHE):
        buffers.learn(breakdown, 4096, kind, used)
    room = buffers.room(DEVICES, 4096, False, off)
    assert (room.with_caches, room.without) == ((57 * MIB, 62 * MIB), (57 * MIB, 80 * MIB))


def test_the_host_is_what_a_whole_placement_left_there() -> None:
    buffers = Buffers()
    assert buffers.host_without_layers(4096, is_whole=True) is None
    buffers.learn(measured(30, 20), 4096, True, {})
    assert buffers.host_without_layers(4096, is_whole=True) == 8 * MIB


def test_layers_on_the_host_are_counted_by_their_placement() -> None:
    buffers = Buffers()
    buffers.learn(measured(30, 20), 4096, False, {}, None)
    assert buffers.host_without_layers(4096, is_whole=False) is None, "no sizes of layers are known"
    buffers.learn(measured(30, 20), 4096, False, {}, 3 * MIB)
    assert buffers.host_without_layers(4096, is_whole=False) == 5 * MIB
    assert buffers.host_without_layers(4096, is_whole=True) is None


def test_what_is_taken_over_can_have_other_names_and_is_apart() -> None:
    known, other = Buffers(), Buffers()
    known.learn(measured(30, 20), 4096, True, {"CUDA0": "attention", "CUDA1": "attention"})
    other.take_over(known, {"CUDA0": "CUDA1", "CUDA1": "CUDA0"})
    assert other.room(DEVICES, 4096, True, [0, 0]).with_caches == (80 * MIB, 50 * MIB)
    other.learn(measured(50, 50), 4096, True, {"CUDA0": "attention"})
    assert known.room(DEVICES, 4096, True, [0, 0]).with_caches == (70 * MIB, 60 * MIB)


TWO_POINTS, THREE_POINTS = {4096: 100, 8192: 200}, {1000: 10, 2000: 30, 4000: 40}


@named_cases(
    ("nothing-measured", {}, 4096, None),
    ("one-point", {4096: 100}, 9999, 100),
    ("as-measured", TWO_POINTS, 8192, 200),
    ("between", TWO_POINTS, 6144, 150),
    ("beyond", TWO_POINTS, 12288, 300),
    ("before", TWO_POINTS, 2048, 50),
    ("never-less-than-nothing", {1000: 10, 2000: 300}, 500, 0),
    ("between-the-first-two", THREE_POINTS, 1500, 20),
    ("between-the-last-two", THREE_POINTS, 3000, 35),
    ("beyond-the-last-two", THREE_POINTS, 5000, 45),
    ("before-the-first-two", THREE_POINTS, 900, 8),
)
def test_compute_buffers_are_on_a_line(points: dict[int, int], n_ctx: int, expected: int | None) -> None:
    learned = LearnedCompute()
    for measured_at, compute in reversed(points.items()):
        learned.learn("CUDA0", measured_at, compute)
    assert learned.at("CUDA0", n_ctx) == expected
    assert learned.at("CUDA1", n_ctx) is None
    assert learned.knows_any is bool(points)


def test_the_largest_compute_buffer_counts_once_corrected() -> None:
    learned = LearnedCompute()
    for measured, expected in ((500, 500), (300, 300), (280, 300), (320, 320), (310, 320)):
        learned.learn("CUDA0", 4096, measured)
        assert learned.at("CUDA0", 4096) == expected
    learned.learn("CUDA0", 8192, 100)
    assert learned.at("CUDA0", 8192) == 100, "another context is not corrected yet"


def test_what_is_learned_of_a_copy_is_its_own() -> None:
    first = LearnedCompute()
    for compute in (10, 20):
        first.learn("CUDA0", 4096, compute)
    other = first.copy({"CUDA0": "CUDA1"})
    assert (other.at("CUDA1", 4096), other.at("CUDA0", 4096)) == (20, None)
    other.learn("CUDA1", 4096, 15)
    assert other.at("CUDA1", 4096) == 20, "it was corrected before, so that the largest counts"
    other.learn("CUDA1", 8192, 99)
    assert first.at("CUDA0", 8192) == 20


def trial(placement: Placement, breakdown: Breakdown) -> Trial:
    return Trial(placement, DEVICES, Params(n_ctx=4096), breakdown, ())


STATE = Unit(0, 10 * MIB, 2 * MIB, state=2 * MIB)
KV = Unit(0, 10 * MIB, 5 * MIB)
NEITHER = Unit(0, 20 * MIB, 0)


def hybrid(*kinds: Unit) -> tuple[Unit, ...]:
    return tuple(replace(kind, index=index) for index, kind in enumerate(kinds))


HYBRID = hybrid(STATE, KV, NEITHER, STATE, NEITHER, STATE, NEITHER)


@named_cases(
    ("caches of attention", UNITS, Placement(1, (1, 1)), ["attention", "nothing"]),
    ("no layer on the host", UNITS, Placement(0, (2, 1)), ["layers", "nothing"]),
    ("the output alone", UNITS, Placement(2, (1, 0)), ["nothing", "nothing"]),
    ("states behind attention of a device", HYBRID, Placement(1, (3, 3)), ["attention", "states"]),
    ("the first state behind attention of the host", HYBRID, Placement(2, (5,)), ["attention"]),
    ("as first layer too", HYBRID, Placement(3, (4,)), ["attention"]),
    ("the second state", HYBRID, Placement(4, (3,)), ["states"]),
    ("behind a device without caches", HYBRID, Placement(2, (1, 4)), ["nothing", "attention"]),
    ("only one device computes it", HYBRID, Placement(2, (2, 3)), ["attention", "states"]),
    ("all on the host", HYBRID, Placement(7, (0,)), ["nothing"]),
    ("no attention at all", hybrid(STATE, STATE), Placement(1, (1,)), ["states"]),
)
def test_caches_that_a_device_computes_with(units: tuple[Unit, ...], placement: Placement, cached: list[str]) -> None:
    assert cached_on(units, placement) == cached


@named_cases(
    ("attention in every layer", UNITS, 2),
    ("behind the state that follows attention", HYBRID, 4),
    ("attention last", hybrid(STATE, KV, NEITHER), 2),
    ("no attention", hybrid(STATE, STATE), 1),
)
def test_the_first_layer_without_attention(units: tuple[Unit, ...], first: int) -> None:
    assert first_without_attention(units) == first
    for start in range(len(units)):
        computes = cached_on(units, Placement(start, (len(units) - start,)))[0] == "attention"
        assert not computes or start < first


def test_room_with_states_is_a_guess_until_it_is_measured() -> None:
    buffers = Buffers()
    for learned, expected in [
        ("attention", ((60, 80), (60, 80), (100, 80), (60, 80))),
        ("nothing", ((60, 80), (60, 80), (98, 80), (98, 80))),
        ("states", ((60, 80), (60, 80), (90, 80), (98, 80))),
        ("layers", ((75, 80), (60, 80), (90, 80), (98, 80))),
    ]:
        compute = {"attention": 40, "nothing": 2, "states": 10, "layers": 25}[learned]
        buffers.learn(measured(compute, 0), 4096, False, {"CUDA0": learned})  # type: ignore[dict-item]
        room = buffers.room(DEVICES, 4096, False, [0, 0])
        assert room == Room(*(tuple(mib * MIB for mib in mibs) for mibs in expected))


@named_cases(
    ("a-cache-on-the-first", Placement(1, (1, 1)), ((1, 1), (67, 1), (67, 1), (67, 62))),
    ("an-idle-one-keeps-its-room", Placement(1, (2, 0)), ((1, 1), (67, 1), (67, 1), (67, 2))),
    ("no-cache-at-all", Placement(2, (1, 0)), ((1, 1), (1, 1), (1, 1), (67, 2))),
    ("no-layer-on-the-host", Placement(0, (3, 0)), ((67, 1), (1, 1), (1, 1), (2, 2))),
)
def test_room_left_by_a_trial(placement: Placement, expected: tuple[tuple[int, int], ...]) -> None:
    room = Room(*[(1 * MIB, 1 * MIB)] * 3, (2 * MIB, 2 * MIB))
    found = room_left_by(trial(placement, measured(30, 20)), UNITS, room, [3 * MIB, -2 * MIB])
    assert found == Room(*(tuple(mib * MIB for mib in mibs) for mibs in expected))


def test_room_left_by_a_trial_with_states_alone() -> None:
    room = Room((60 * MIB, 0), (60 * MIB, 0), (90 * MIB, 0), (95 * MIB, 0))
    found = room_left_by(trial(Placement(4, (3, 0)), measured(20, 0)), HYBRID, room, [4 * MIB, 0])
    assert found == Room((60 * MIB, 0), (60 * MIB, 0), (76 * MIB, 0), (95 * MIB, 0))


def test_room_that_was_larger_before_is_kept_where_there_is_no_cache() -> None:
    room = Room(*[(1 * MIB, 1 * MIB)] * 3, (2 * MIB, 90 * MIB))
    found = room_left_by(trial(Placement(1, (1, 1)), measured(30, 20)), UNITS, room, [0, 0])
    assert found.without == (70 * MIB, 90 * MIB)


def test_off_by_is_what_was_measured_beyond_the_estimate() -> None:
    found = off_by(trial(Placement(1, (1, 1)), measured(30, 20, extra=3)), UNITS)
    assert found == [3 * MIB, -2 * MIB]


def test_room_of_a_placement_is_by_where_its_caches_are() -> None:
    room = Room((80, 70), (60, 50), (65, 60), (70, 65))
    assert room.of(UNITS, Placement(1, (1, 1))) == [60, 65]
    assert room.of(UNITS, Placement(2, (1, 0))) == [70, 65]
    assert room.of(UNITS, Placement(0, (2, 1))) == [80, 65]
    assert replace(room, without=(60, 50)).of(UNITS, Placement(1, (1, 1))) == [60, 50]


@named_cases(("nothing", 0, ()), ("a byte", 1, (("CUDA1", 10 * MIB + 1),)))
def test_a_device_answers_for_what_is_on_it(used: int, missing: tuple[tuple[str, int], ...]) -> None:
    devices = (DEVICES[0], replace(DEVICES[1], free=0, margin=10 * MIB))
    rows = (Row("CUDA0", "CUDA0", False, 100 * MIB, 0, 0), Row("CUDA1", "CUDA1", False, 0, 0, used))
    assert missing_of(request(SyntheticModel(), devices), Breakdown(rows, BOTH, 4096), devices) == missing
