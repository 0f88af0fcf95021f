"""How far a profile's rules were compared with a build, and which rules a version of ggml has."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest

from fitter.llama.build import virtual_backends
from fitter.llama.build.functions import backend_rules, epochs
from fitter.llama.build.virtual_backends import Answering, Compared, CudaLibrary, around, said_of
from fitter.llama.types import VirtualDevice
from fitter.version import numbers_of
from tests.support.cases import cases, named_cases, stored_rows
from tools.comparisons.load_answers import read_table

DATA = Path(__file__).resolve().parents[1] / "data"

OLD = Compared("b100", "0.15.3", "f53ea51", "its own libggml-cuda.so", 250, 248, "2 of a kind")
SOURCE = Compared("0.3.35", "0.20.0", "", "its source", 250, 250, "")
NEW = Compared("v9", "0.25.1", "0ad4a86", "its own libggml-cuda.so", 250, 250, "")


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Others than those that are kept."""
    monkeypatch.setattr(virtual_backends, "data", lambda: {"cuda": [asdict(each) for each in (OLD, SOURCE, NEW)]})
    virtual_backends.comparisons.cache_clear()
    yield
    virtual_backends.comparisons.cache_clear()


with_figures = pytest.mark.usefixtures("figures")


@with_figures
@named_cases(
    ("the same", "cuda", "0.15.3", "f53ea51", OLD),
    ("a longer commit", "cuda", "0.15.3", "f53ea51c0ffee", OLD),
    ("a shorter commit", "cuda", "0.15.3", "f53", OLD),
    ("with changes", "cuda", "0.15.3", "f53ea51-dirty", OLD),
    ("a commit that it does not know", "cuda", "0.15.3", "unknown", OLD),
    ("no commit", "cuda", "0.15.3", "", OLD),
    ("another commit of that version", "cuda", "0.15.3", "7e4c0a9", None),
    ("neither knows the commit", "cuda", "0.20.0", "", SOURCE),
    ("the commit of what is around it", "cuda", "0.20.0", "7e4c0a9-dirty", SOURCE),
    ("a build of upstream's", "cuda", "0.20.0", "7e4c0a9", None),
    ("another version", "cuda", "0.15.4", "f53ea51", None),
    ("another profile", "rocm", "0.15.3", "f53ea51", None),
    ("a driver's profile", "vulkan-nvidia", "0.15.3", "f53ea51", None),
)
def test_which_comparison(profile: str, ggml: str, commit: str, expected: Compared | None) -> None:
    assert virtual_backends.compared(profile, ggml, commit) == expected


@with_figures
@cases(("0.9.4", (None, OLD)), ("0.15.3", (OLD, SOURCE)), ("0.24.0", (SOURCE, NEW)), ("0.100.0", (NEW, None)))
def test_those_around(ggml: str, expected: tuple[Compared | None, Compared | None]) -> None:
    assert around("cuda", ggml) == expected
    assert around("metal", ggml) == (None, None)


@with_figures
@cases(*stored_rows("llama_compared", "what_a_plan_says"))
def test_what_a_plan_says(profile: str, ggml: str, commit: str, said: str) -> None:
    assert said_of(profile, ggml, commit) == said


def card(profile: str) -> VirtualDevice:
    return VirtualDevice(f"{profile}0", "Card", profile, 890, 1 << 34, 1 << 34)


LIBRARY = CudaLibrary(Path("/x/libggml-cuda.so"), ("libcudart.so.13",), 13, True)
CANNOT = Answering(None, "/x/libggml-cuda.so answers for NVIDIA cards only")
NEVER = "profile were never compared with this llama.cpp"


@with_figures
@named_cases(
    (
        "its own",
        ["cuda", "cuda"],
        Answering(LIBRARY),
        ("0.24.0", "c0ffee1"),
        ["the cards were simulated by /x/libggml-cuda.so, a CUDA backend of llama.cpp"],
    ),
    ("all equal", ["cuda"], None, ("0.25.1", "0ad4a86"), []),
    ("no cards", [], None, ("0.24.0", ""), []),
    (
        "never",
        ["cuda", "cuda"],
        None,
        ("0.24.0", "c0ffee1"),
        [f"the rules of the cuda {NEVER}, only with 0.3.35 and v9"],
    ),
    (
        "instead of its own",
        ["cuda", "vulkan-nvidia"],
        CANNOT,
        ("0.25.1", "0ad4a86"),
        [
            "fitter's own rules answered for the cards: /x/libggml-cuda.so answers for NVIDIA cards only",
            f"the rules of the vulkan {NEVER}",
        ],
    ),
)
def test_notes(profiles: list[str], answering: Answering | None, version: tuple[str, str], expected: list[str]) -> None:
    assert list(virtual_backends.notes([card(each) for each in profiles], answering, *version)) == expected


TABLES = {
    "cuda": ("cuda/published.csv.gz", "cuda/drawn.csv.gz"),
    "rocm": ("rocm/drawn.csv.gz",),
    "vulkan": ("vulkan/bytes.csv.gz",),
    "metal": ("metal/bytes.csv.gz",),
}


@pytest.mark.parametrize("profile", TABLES)
def test_the_figures_of_the_pinned_build_are_the_stored_rows(profile: str) -> None:
    pinned = virtual_backends.compared(profile, "0.25.3", "0c1e57098")
    assert pinned is not None
    assert pinned.rows == pinned.equal == sum(len(read_table(DATA / name)) for name in TABLES[profile])
    assert said_of(profile, "0.25.3", "0c1e570-dirty") == ""


def test_the_figures_that_are_kept() -> None:
    kept = virtual_backends.comparisons("cuda")
    assert len(kept) >= 9
    assert [each.ggml for each in kept] == sorted((each.ggml for each in kept), key=numbers_of)
    assert len({each.llama_cpp for each in kept}) == len(kept)
    for each in kept:
        assert 0 < each.equal <= each.rows, each
        assert bool(each.left) == (each.equal < each.rows), each


RULES = {
    "0.13.1": set[str](),
    "0.15.1": {"cuda_attention_has_room"},
    "0.17.0": {"cuda_attention_has_room"},
    "0.19.0": {"cuda_attention_has_room", "cuda_gets_rows_of_super_blocks"},
    "0.23.0": {"cuda_attention_has_room", "cuda_gets_rows_of_super_blocks", "cuda_branches_on_many_devices"},
}
EVERY = set(backend_rules("1.0.0"))
OF_0_26 = {"cuda_groups_shared_experts", "cuda_unary_of_any_strides", "metal_adds_to_products", "metal_attends_by_size"}


@pytest.mark.parametrize("ggml", [*RULES, "0.25.1", "0.25.3", "0.26.0", "0.27.0", "1.0.0"])
def test_rules_by_version(ggml: str) -> None:
    expected = EVERY if numbers_of(ggml) >= (0, 26) else RULES.get(ggml, EVERY - OF_0_26)
    assert {name for name, is_there in backend_rules(ggml).items() if is_there} == expected


def test_a_rule_is_a_field_of_the_build() -> None:
    from fitter.llama.build.library import declarations

    fields = {n for n, _ in declarations().typeof("fitter_build_t").fields if n.startswith(("cuda_", "metal_"))}
    assert fields == set(backend_rules(epochs()[0].ggml))
