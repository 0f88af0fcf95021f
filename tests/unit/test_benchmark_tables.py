"""What the benchmark says of its raw results: medians, goals on both sides of their bounds, and the tables."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import compare, tables
from benchmarks.measuring import with_layers
from benchmarks.results import Chosen, Comparison, Growth, Memory, Program, Results, Setting, load, save
from benchmarks.tables import DEVICES, EIGHT_LOADS, EIGHT_RATIO, LAYERS, MEMORY, ONE_RATIO, checks, document
from tests.support.cases import cases, named_cases
from tools.models.shapes import SHAPES

MB = 10**6
GIB = 2**30
MIB = 2**20

SETTING = Setting("2026-01-02", "1.2.3", "abc1234", "0.3.36", "0c1e57098", "3.12.1", "A CPU", 2, 3)


def comparison(
    n_devices: int = 8,
    seconds: tuple[float, ...] = (1.0,),
    upstream: tuple[float, ...] = (30.0,),
    loads: int = 5,
    n_vocab: int = 130_000,
    peak: int = 100 * MB,
    name: str = "a",
) -> Comparison:
    chosen = Chosen(4096, 3 * GIB, 7 * MIB)
    return Comparison(
        name,
        n_devices,
        n_vocab,
        10**12,
        Program(seconds, loads, Memory(peak, peak + 20 * MB, 2), chosen),
        Program((2.5,), 9, Memory(90 * MB, 95 * MB, 2), replace(chosen, n_ctx=6144)),
        Program(upstream, 43, Memory(60 * MB, 61 * MB, 1), replace(chosen, n_ctx=8192, over=("CUDA1",))),
    )


def growth(n: int, seconds: float) -> Growth:
    return Growth(n, (seconds,), 4, n, GIB, 4 * GIB)


@named_cases(
    ("just 25 times", comparison(upstream=(25.0,)), EIGHT_RATIO, True, "25.00×"),
    ("not quite 25 times", comparison(upstream=(24.9,)), EIGHT_RATIO, False, "24.90×"),
    ("medians", comparison(seconds=(9.0, 1.0, 1.0), upstream=(26.0, 26.0, 0.1)), EIGHT_RATIO, True, "26.00×"),
    ("six loads", comparison(loads=6), EIGHT_LOADS, True, "6 loads"),
    ("seven loads", comparison(loads=7), EIGHT_LOADS, False, "7 loads"),
    ("as fast", comparison(1, upstream=(1.0,)), ONE_RATIO, True, "1.00×"),
    ("slower", comparison(1, upstream=(0.99,)), ONE_RATIO, False, "0.99×"),
    ("a vocabulary of 128k", comparison(1, n_vocab=128_000), ONE_RATIO, True, "30.00×"),
    ("a smaller vocabulary", comparison(1, n_vocab=127_999), ONE_RATIO, None, ""),
    ("two devices are no eight", comparison(2), EIGHT_RATIO, None, ""),
    ("nor one", comparison(2), ONE_RATIO, None, ""),
    ("eight are not one", comparison(8), ONE_RATIO, None, ""),
    ("below 250 MB", comparison(2, peak=250 * MB - 1), MEMORY, True, "250 MB"),
    ("250 MB", comparison(2, peak=250 * MB), MEMORY, False, "250 MB"),
)
def test_goals_on_a_case(case: Comparison, goal: str, met: bool | None, shown: str) -> None:
    found = [check for check in checks(Results(SETTING, (case,))) if check.goal == goal]
    assert [(check.case, check.met, check.shown) for check in found] == ([] if met is None else [("a", met, shown)])


@named_cases(
    ("linear", (1.0, 2.0, 6.25), (True, True)),
    ("steeper at once", (1.0, 2.1, 6.25), (False, True)),
    ("steeper at the end", (0.5, 1.0, 3.2), (True, False)),
)
def test_growth_is_compared_with_the_first_row(seconds: tuple[float, ...], met: tuple[bool, ...]) -> None:
    rows = tuple(growth(n, s) for n, s in zip((16, 32, 100), seconds, strict=True))
    for goal, results in ((LAYERS, Results(SETTING, layers=rows)), (DEVICES, Results(SETTING, devices=rows))):
        assert [(check.goal, check.met) for check in checks(results)] == [(goal, value) for value in met]


RESULTS = Results(
    SETTING,
    (
        comparison(8, seconds=(2.0, 1.0, 3.0), name="eight"),
        comparison(1, upstream=(4.5,), name="one"),
        replace(comparison(2, peak=300 * MB, name="two"), upstream=Program((1.0,), 9, Memory(1, 1, 1), None)),
    ),
    devices=(growth(1, 0.5), growth(2, 0.6)),
    layers=(growth(16, 1.0), growth(32, 2.5)),
)


@cases(
    f"- **{EIGHT_RATIO}**: not met in 1 of 1 case: eight (15.00×).",
    f"- **{EIGHT_LOADS}**: met (1 case; the closest 5 loads, eight).",
    f"- **{MEMORY}**: not met in 1 of 3 cases: two (300 MB).",
    f"- **{DEVICES}**: met (1 case; the closest 1.20×, 2 devices).",
    f"- **{LAYERS}**: not met in 1 of 1 case: 32 layers (2.50×).",
    "| eight | 8 | 130000 | 15.0× | 2.000 | 30.00 | 5 | 43 | 2.500 | 9 | not met: 15.00× |",
    "| one | 1 | 130000 | 4.5× | 1.000 | 4.50 | 5 | 43 | 2.500 | 9 | met |",
    "| two | 2 | 130000 | 1.0× | 1.000 | 1.00 | 5 | 9 | 2.500 | 9 |  |",
    "| eight | 1000 | 100 | 120 | 90 | 2 | 60 | 61 | met |",
    "| two | 1000 | 300 | 320 | 90 | 2 | 0 | 0 | not met: 300 MB |",
    "| eight | 6144 | 4096 | 8192 | 3.00 | 3.00 | 7 | 7 (over on CUDA1) |",
    "| two | 6144 | 4096 | gave up | 3.00 | gave up | 7 | gave up |",
    "| 1 | 1 | 25 % | 0.500 | 4 | 1.00× | 1.00× |  |",
    "| 2 | 2 | 25 % | 0.600 | 4 | 1.20× | 2.00× | met |",
    "| 32 | 32 | 25 % | 2.500 | 4 | 2.50× | 2.00× | not met: 2.50× |",
)
def test_lines_of_the_document(line: str) -> None:
    assert line in document(RESULTS).splitlines()


def test_few_devices_come_first() -> None:
    rows = [line.split(" |")[0] for line in document(RESULTS).splitlines()]
    assert [row for row in rows if row in ("| one", "| two", "| eight")] == ["| one", "| two", "| eight"] * 3


def test_what_was_not_measured_is_said() -> None:
    text = document(Results(SETTING, failed=("a: fitter ended with 1: why",)))
    assert "- a: fitter ended with 1: why" in text.splitlines()
    assert text.count("**: not measured.") == len(tables.GOALS)
    assert "## Speed" not in text and "## More" not in text


def test_setting_is_in_the_document() -> None:
    text = document(Results(SETTING))
    for words in ("2026-01-02", "fitter 1.2.3 (abc1234)", "0.3.36", "0c1e57098", "A CPU, 2 cores", "of 3 runs each"):
        assert words in text


def test_tables_from_raw_results(tmp_path: Path) -> None:
    save(RESULTS, tmp_path / "raw.json")
    assert load(tmp_path / "raw.json") == RESULTS
    out = tmp_path / "RESULTS.md"
    assert compare.main(["--from", str(tmp_path / "raw.json"), "--results", str(out)]) == 0
    assert out.read_text() == document(RESULTS)


def test_a_part_that_failed_makes_the_status(tmp_path: Path) -> None:
    save(Results(SETTING, failed=("a: b",)), tmp_path / "raw.json")
    assert compare.main(["--from", str(tmp_path / "raw.json"), "--results", str(tmp_path / "a.md")]) == 1


@cases((["--runs", "0"], "--runs needs at least one"), (["--only", "gpt-2"], "no case has 'gpt-2' in its name"))
def test_bad_arguments(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        compare.main(arguments)
    assert said in capsys.readouterr().err


@cases(16, 94, 100)
def test_more_and_fewer_layers(n_layer: int) -> None:
    whole = SHAPES["qwen3-235b-a22b"]
    shape = with_layers(whole, n_layer)
    assert shape.n_layer == n_layer
    assert len({tensor.name for tensor in shape.tensors}) == len(shape.tensors) == 3 + 12 * n_layer
    per_layer = sum(tensor.bytes for tensor in whole.tensors if tensor.name.startswith("blk.")) / whole.n_layer
    layers = sum(tensor.bytes for tensor in shape.tensors if tensor.name.startswith("blk."))
    assert layers / n_layer == pytest.approx(per_layer, rel=0.02)
    assert {t for t in shape.tensors if not t.name.startswith("blk.")} == set(whole.tensors[:3])
    if n_layer == whole.n_layer:
        assert set(shape.tensors) == set(whole.tensors)
