"""What the benchmark of ``fitter check`` compares."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.check_speed import write_cases, write_models
from benchmarks.measuring import n_params, with_layers
from fitter.regression.cases import read_cases
from tools.shapes import SHAPES


@pytest.mark.slow
def test_twenty_models_from_1b_to_1t(tmp_path: Path) -> None:
    models = write_models(tmp_path)
    write_cases(tmp_path, models)
    cases = read_cases(tmp_path / "fitter.toml")
    assert sorted(case.model for case in cases) == sorted(models)
    assert len({case.model for case in cases}) == 20
    assert all(model.stat().st_blocks * 512 < 20_000_000 for model in models), "no weights on the disk"
    smallest = n_params(with_layers(SHAPES["llama-3.1-8b"], 1))
    assert 1e9 < smallest < 1.5e9
    assert n_params(SHAPES["kimi-k2"]) > 1e12
