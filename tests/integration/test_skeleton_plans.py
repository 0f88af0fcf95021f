"""The same plan with a skeleton of the header and without it; ``make test-architectures`` does all architectures."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fitter.api import Plan
from fitter.machine.gpu import parse_gpus
from tools.architectures import compare
from tools.architectures.compare import Machine
from tools.models import shapes, tiny

_EIGHT = ("4x 31600MiB", "2x 23688MiB", "2x 48270MiB")

CASES = {
    "dense, one device": ("llama-3.1-8b", ("6GiB",), {}),
    "windows of attention, one device": ("gpt-oss-20b", ("8GiB",), {}),
    "experts, two devices": ("qwen3-30b-a3b", ("12GiB", "10GiB"), {}),
    "recurrent layers, two devices, a fixed context": ("nemotron-h-9b", ("4GiB", "3GiB"), {"n_ctx": 16384}),
    "latent attention, eight devices": ("deepseek-v3.1", _EIGHT, {"n_ctx": 32768}),
    "no device": ("gemma3-12b", (), {}),
    "a host that is too small": ("llama-3.1-8b", ("3GiB",), {"host_memory": "2GiB"}),
}


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("skeletons")


@pytest.mark.parametrize(("shape", "gpus", "options"), CASES.values(), ids=list(CASES))
def test_the_plan_is_the_same_with_the_skeleton_and_without(
    models: Path, shape: str, gpus: tuple[str, ...], options: Mapping[str, Any]
) -> None:
    machine = Machine("machine", parse_gpus(gpus) if gpus else (), options)
    comparison = compare.compare_plans(shapes.write(shape, models), machine)
    assert (comparison.difference, comparison.refused) == ("", "")


def test_the_plan_of_a_split_model_is_the_same(models: Path) -> None:
    machine = Machine("machine", parse_gpus(["8GiB"]))
    comparison = compare.compare_plans(shapes.write_split("llama-3.1-8b", models, 3), machine)
    assert (comparison.difference, comparison.refused) == ("", "")


@pytest.mark.parametrize("model", [tiny.TINY_DENSE, tiny.TINY_MOE], ids=lambda model: model.name)
def test_a_small_model_gets_the_same_plans_on_every_kind_of_machine(tmp_path: Path, model: tiny.TinyModel) -> None:
    path = tiny.write_tiny(tmp_path / "tiny.gguf", model)
    with compare.kept_workers():
        checked = compare.check("tiny", [(path, machine) for machine in compare.machines_for_size(path)])
    assert checked.verdict == "equal", str(checked)


# --- what the comparison itself would notice


def one_token_less(fit: Callable[..., Plan]) -> Callable[..., Plan]:
    """``fit`` with a skeleton that changes the plan."""

    def changed(*arguments: Any, skeleton: bool, **options: Any) -> Plan:
        plan = fit(*arguments, skeleton=skeleton, **options)
        return replace(plan, params=replace(plan.params, n_ctx=plan.params.n_ctx - skeleton))

    return changed


def test_a_plan_that_the_skeleton_changes_is_told(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare.api, "fit", one_token_less(compare.api.fit))
    path = shapes.write("llama-3.1-8b", models)
    comparison = compare.compare_plans(path, Machine("machine", parse_gpus(["6GiB"]), {"n_ctx": 8192}))
    assert "params.n_ctx is 8191 with the skeleton, 8192 without" in comparison.difference
