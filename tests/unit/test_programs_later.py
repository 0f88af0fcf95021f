"""What a server keeps in host memory after the load, and how the room that a plan leaves there is shared out."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from fitter.programs import facts
from fitter.programs.later import Later, ServerCaches, reduce_to, server_caches
from tests.support.cases import named_cases
from tests.support.plans import GIB, MIB

OWN = ServerCaches(n_slots=4, state=100 * MIB, checkpoint=10 * MIB, cache_ram=8192, ctx_checkpoints=32)
"""1280 MiB of checkpoints, and 8 GiB of prompt cache."""


def test_sizes() -> None:
    assert (OWN.prompt_cache, OWN.checkpoints, OWN.bytes) == (8 * GIB, 1280 * MIB, 8 * GIB + 1280 * MIB)
    endless = replace(OWN, cache_ram=-1)
    assert (endless.prompt_cache, endless.checkpoints, endless.bytes) == (None, 1280 * MIB, 1280 * MIB)


@named_cases(
    ("both", OWN, (Later("prompt cache", 8 * GIB, 100 * MIB, 81), Later("checkpoints", 1280 * MIB, 10 * MIB, 128, 32))),
    ("memory that is rolled back", replace(OWN, checkpoint=0), (Later("prompt cache", 8 * GIB, 100 * MIB, 81),)),
    ("no checkpoints", replace(OWN, ctx_checkpoints=0), (Later("prompt cache", 8 * GIB, 100 * MIB, 81),)),
    ("no prompt cache", replace(OWN, cache_ram=0), (Later("checkpoints", 1280 * MIB, 10 * MIB, 128, 32),)),
    ("neither", replace(OWN, cache_ram=0, ctx_checkpoints=0), ()),
    (
        "idle slots, a part of the cache",
        replace(OWN, checkpoint=0, saves_idle=True),
        (Later("prompt cache", 8 * GIB, 100 * MIB, 81), Later("idle slots", 0, 100 * MIB, 4, 1)),
    ),
    ("idle slots without a cache", replace(OWN, cache_ram=0, checkpoint=0, saves_idle=True), ()),
    ("no limit", replace(OWN, cache_ram=-1, checkpoint=0), (Later("prompt cache", None, 100 * MIB, None),)),
    ("slots that keep nothing", replace(OWN, state=0, checkpoint=0), (Later("prompt cache", 8 * GIB, 0, None),)),
    ("less than one state", replace(OWN, cache_ram=99, checkpoint=0), (Later("prompt cache", 99 * MIB, 100 * MIB, 0),)),
)
def test_lines(kept: ServerCaches, expected: tuple[Later, ...]) -> None:
    assert kept.lines() == expected


@named_cases(
    ("the server's own", None, None, (8192, 32)),
    ("a smaller cache", 512, None, (512, 32)),
    ("no cache", 0, None, (0, 32)),
    ("a cache without a limit", -1, None, (-1, 32)),
    ("other checkpoints", None, 64, (8192, 64)),
    ("none", 0, 0, (0, 0)),
)
def test_the_servers_own_limits(cache_ram: int | None, ctx_checkpoints: int | None, expected: tuple[int, int]) -> None:
    found = server_caches(facts("llama-server"), 4, 100, 10, cache_ram, ctx_checkpoints, cache_idle_slots=None)
    assert found.saves_idle
    assert not server_caches(facts("llama-server"), 4, 100, 10, cache_idle_slots=False).saves_idle
    assert (found.n_slots, found.state, found.checkpoint) == (4, 100, 10)
    assert (found.cache_ram, found.ctx_checkpoints) == expected


def fit(own: ServerCaches, room: int, cache: bool = False, checkpoints: bool = False) -> tuple[int, int]:
    found = reduce_to(own, room, is_cache_fixed=cache, are_checkpoints_fixed=checkpoints)
    assert (found.n_slots, found.state, found.checkpoint) == (own.n_slots, own.state, own.checkpoint)
    return found.cache_ram, found.ctx_checkpoints


@named_cases(
    ("more than enough", OWN, 100 * GIB, (8192, 32)),
    ("just enough", OWN, 8 * GIB + 1280 * MIB, (8192, 32)),
    ("a byte less", OWN, 8 * GIB + 1280 * MIB - 1, (8191, 32)),
    ("twice the checkpoints", OWN, 2560 * MIB, (1280, 32)),
    ("half for checkpoints", OWN, 800 * MIB, (400, 10)),
    ("no room for one in each slot", OWN, 39 * MIB, (39, 0)),
    ("one checkpoint in each slot", OWN, 80 * MIB, (40, 1)),
    ("nothing", OWN, 0, (0, 0)),
    ("less than nothing", OWN, -5 * GIB, (0, 0)),
    ("what the cache leaves goes to checkpoints", replace(OWN, cache_ram=100), 1000 * MIB, (100, 22)),
    ("no checkpoints are made", replace(OWN, checkpoint=0), 500 * MIB, (500, 32)),
    ("no limit, and room", replace(OWN, cache_ram=-1), 10 * GIB, (10 * 1024 - 1280, 32)),
    ("no cache", replace(OWN, cache_ram=0), 400 * MIB, (0, 10)),
)
def test_the_room_is_shared_out(own: ServerCaches, room: int, expected: tuple[int, int]) -> None:
    assert fit(own, room) == expected


@named_cases(
    ("the cache, with room for it", 8 * GIB + 400 * MIB, True, False, (8192, 10)),
    ("the cache, without", GIB, True, False, (8192, 0)),
    ("the checkpoints, with room for them", 1280 * MIB + 7 * MIB, False, True, (7, 32)),
    ("the checkpoints, without", MIB, False, True, (0, 32)),
    ("both", 0, True, True, (8192, 32)),
)
def test_what_the_user_sets_stays(room: int, cache: bool, checkpoints: bool, expected: tuple[int, int]) -> None:
    assert fit(OWN, room, cache, checkpoints) == expected


KEEPS = st.builds(
    ServerCaches,
    n_slots=st.integers(1, 16),
    state=st.integers(0, 4 * GIB),
    checkpoint=st.just(0) | st.integers(1, 300 * MIB),
    cache_ram=st.integers(-1, 20000),
    ctx_checkpoints=st.integers(0, 64),
)
ROOM = st.integers(-GIB, 64 * GIB)
MOST = 1 << 62


def limit(cache_ram: int) -> int:
    return MOST if cache_ram < 0 else cache_ram


@given(own=KEEPS, room=ROOM)
def test_never_beyond_the_room_nor_the_programs_own(own: ServerCaches, room: int) -> None:
    found = reduce_to(own, room, is_cache_fixed=False, are_checkpoints_fixed=False)
    assert found.bytes <= max(0, room)
    assert 0 <= found.cache_ram <= limit(own.cache_ram)
    assert 0 <= found.ctx_checkpoints <= own.ctx_checkpoints


@given(own=KEEPS, room=ROOM, cache=st.booleans())
def test_what_is_fixed_stays_and_the_rest_fits_beside_it(own: ServerCaches, room: int, cache: bool) -> None:
    found = reduce_to(own, room, is_cache_fixed=cache, are_checkpoints_fixed=not cache)
    if cache:
        assert found.cache_ram == own.cache_ram
        assert found.checkpoints <= max(0, room - (own.prompt_cache or 0))
    else:
        assert found.ctx_checkpoints == own.ctx_checkpoints
        assert (found.prompt_cache or 0) <= max(0, room - own.checkpoints)


@given(own=KEEPS, room=ROOM)
def test_nothing_is_left_that_one_more_would_fit_in(own: ServerCaches, room: int) -> None:
    found = reduce_to(own, room, is_cache_fixed=False, are_checkpoints_fixed=False)
    left = max(0, room) - found.bytes
    if found.cache_ram < limit(own.cache_ram):
        assert left < MIB
    if own.checkpoint and found.ctx_checkpoints < own.ctx_checkpoints:
        assert left < own.n_slots * own.checkpoint


@given(own=KEEPS, room=ROOM, more=st.integers(0, 8 * GIB))
def test_more_room_takes_nothing_away(own: ServerCaches, room: int, more: int) -> None:
    small = reduce_to(own, room, is_cache_fixed=False, are_checkpoints_fixed=False)
    large = reduce_to(own, room + more, is_cache_fixed=False, are_checkpoints_fixed=False)
    assert large.ctx_checkpoints >= small.ctx_checkpoints
    # a checkpoint more for each slot may take from the cache what a checkpoint has
    assert large.cache_ram >= small.cache_ram - own.n_slots * own.checkpoint // MIB - 1


@given(own=KEEPS)
def test_all_of_it_where_all_has_room(own: ServerCaches) -> None:
    own = replace(own, cache_ram=max(0, own.cache_ram))
    if own.checkpoint == 0:
        own = replace(own, ctx_checkpoints=0)
    assert reduce_to(own, own.bytes, is_cache_fixed=False, are_checkpoints_fixed=False) == own
