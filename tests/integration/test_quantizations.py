"""``fitter quants``: upstream's own answers for its twelve models, and the very files that its quantization writes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from gguf import GGMLQuantizationType, GGUFWriter

import fitter
from fitter.llama.client import Worker
from fitter.llama.types import FileTypes
from fitter.model.shapes.catalogue import FILE_TYPES
from fitter.planning.tables.quantization_rows import Quantization, needs_imatrix
from fitter.storage import parse_toml
from tests.support.command import run_fitter
from tests.support.quantize import DRY, quantized
from tools.models import shapes
from tools.models.tiny_kinds import write_half_moe, write_hybrid, write_swa

ROOT = Path(__file__).resolve().parents[2]
MODELS: dict[str, dict[str, Any]] = parse_toml(
    (ROOT / "tests" / "data" / "quantizations" / "models.toml").read_text("utf-8")
)
KEPT = {"blk.0.attn_norm.weight": (64,), "blk.0.ffn_gate_inp.weight": (64, 8), "blk.0.ssm_conv1d.weight": (4, 64)}
"""Tensors that are never quantized, though some of them have two dimensions."""


# --- upstream's snapshots


@dataclass(frozen=True)
class Snapshot:
    """Upstream's facts of one model: its figures, and by file type the tensors without the default type."""

    figures: Mapping[str, int]
    defaults: Mapping[str, str]
    others: Mapping[str, Mapping[str, str]]

    @property
    def names(self) -> set[str]:
        """The tensors that it names anywhere."""
        return {name for others in self.others.values() for name in others}


@pytest.fixture(scope="module")
def snapshots() -> Path:
    fetch = ROOT / "vendor" / "llama.cpp" / "fetch.py"
    done = subprocess.run([sys.executable, str(fetch)], capture_output=True, text=True, check=True)
    return Path(done.stdout.strip()) / "tests" / "snapshots"


def read(path: Path) -> Snapshot:
    figures: dict[str, int] = {}
    defaults: dict[str, str] = {}
    others: dict[str, dict[str, str]] = {}
    section = ""
    for line in path.read_text("utf-8").splitlines():
        if line.startswith("#"):
            figures |= {name: int(value) for name, value in re.findall(r"(n_\w+)=(\d+)", line)}
        elif match := re.fullmatch(r"\[(\w+)\] (\w+)", line):
            section = match[1]
            defaults[section], others[section] = match[2], {}
        elif line:
            name, kind = line.split()
            others[section][name] = kind
    return Snapshot(figures, defaults, others)


def tensors_of(snapshot: Snapshot, model: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Shapes of the model's tensors: a file type names only those with another type than most, so experts are added."""
    names = snapshot.names
    experts = {name.split(".")[2] for name in names if name.endswith("_exps.weight")}
    layers = {name.split(".")[1] for name in names if name.endswith("_exps.weight")}
    names |= {f"blk.{layer}.{expert}.weight" for layer in layers for expert in experts}
    found = {}
    for name in names:
        end = name.split(".")[-2]
        row = model["rows"].get(end, snapshot.figures["n_embd"])
        planes = snapshot.figures.get("n_expert", 1) if end.endswith("_exps") else model.get("planes", {}).get(end, 1)
        found[name] = (row, 32, planes)
    return found


def write_header(path: Path, snapshot: Snapshot, model: Mapping[str, Any]) -> Path:
    """A file without a byte of weights, with as little metadata as the rule looks at."""
    figures, architecture = snapshot.figures, model["architecture"]
    writer = GGUFWriter(path, architecture)
    writer.add_block_count(figures["n_layer"])
    writer.add_embedding_length(figures["n_embd"])
    writer.add_feed_forward_length(figures["n_ff"])
    writer.add_head_count(figures["n_head"])
    writer.add_head_count_kv(figures["n_head_kv"])
    writer.add_expert_count(figures.get("n_expert", 0))
    for shapes_, kind in ((tensors_of(snapshot, model), "F16"), (KEPT, "F32")):
        for name, shape in shapes_.items():
            tensor = shapes.Tensor(name, shape, GGMLQuantizationType[kind])
            writer.add_tensor_info(name, shape[::-1], np_dtype(kind), tensor.bytes, tensor.type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    lengthen(path)
    return path


def lengthen(path: Path) -> None:
    """ggml wants to see where the first tensor begins."""
    with path.open("ab") as file:
        file.truncate(path.stat().st_size + 4096)


def np_dtype(kind: str) -> Any:
    import numpy as np

    return np.dtype(np.float16 if kind == "F16" else np.float32)


@pytest.mark.parametrize("name", MODELS)
def test_every_type_of_every_tensor_is_upstreams(name: str, worker: Worker, snapshots: Path, tmp_path: Path) -> None:
    model = MODELS[name]
    snapshot = read(snapshots / f"{model['file']}.schema")
    answer = worker.file_types([write_header(tmp_path / "header.gguf", snapshot, model)], tmp_path)
    found = {each.name: dict(zip(answer.tensors, each.types, strict=True)) for each in answer.found if each.types}
    assert not any(each.problem for each in answer.found if each.name in snapshot.defaults)
    assert set(snapshot.defaults) <= set(found)
    for file_type, default in snapshot.defaults.items():
        types = found[file_type]
        assert {types.pop(kept) for kept in KEPT} == {"f32"}
        assert {tensor: kind for tensor, kind in types.items() if kind != default} == snapshot.others[file_type]


def test_upstream_has_no_other_snapshots(snapshots: Path) -> None:
    assert sorted(path.stem for path in snapshots.glob("*.schema")) == sorted(each["file"] for each in MODELS.values())


# --- files that upstream writes

FILES = ("F16", "Q4_K_M", "Q2_K", "Q2_K_S", "MXFP4_MOE", "TQ2_0")
REAL: dict[str, Callable[[Path], Path]] = {"moe": write_half_moe, "swa": write_swa, "hybrid": write_hybrid}
MACHINE: dict[str, Any] = {"gpus": ["cuda:8.9:1400MiB", "cuda:8.6:1300MiB"]}


@pytest.fixture(scope="module", params=REAL)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, dict[str, str]]:
    """A real model, the folder with the files that upstream's quantization made of it, and how."""
    folder = tmp_path_factory.mktemp(request.param)
    model = REAL[request.param](folder / "model-F16.gguf")
    return model, folder, quantized(model, folder, FILES)


def tensors(path: Path, worker: Worker) -> list[tuple[str, str, int]]:
    return [(tensor.name, tensor.type, tensor.bytes) for tensor in worker.header(path).tensors]


def test_the_files_that_upstream_writes_are_those_that_were_predicted(
    made: tuple[Path, Path, dict[str, str]], worker: Worker, tmp_path: Path
) -> None:
    model, folder, how = made
    answer: FileTypes = worker.file_types([model], tmp_path)
    for each in answer.found:
        if each.name in how:
            predicted = list(zip(answer.tensors, each.types, each.sizes, strict=True))
            assert tensors(folder / f"{each.name}.gguf", worker) == predicted
    found = fitter.quants(model, types=FILES, worker=worker, gpus="none", n_ctx=512)
    assert {each.name: each.bytes for each in found.found} == {
        name: (folder / f"{name}.gguf").stat().st_size for name in FILES
    }
    assert {each.name: "imatrix" if each.needs_imatrix else "plain" for each in found.found} == how


def test_the_plan_of_the_file_is_the_predicted_one(made: tuple[Path, Path, dict[str, str]], worker: Worker) -> None:
    model, folder, how = made
    found = fitter.quants(model, types=FILES, worker=worker, **MACHINE)
    assert {each.name for each in found.found} == set(how)
    for each in found.found:
        real = fitter.fit(folder / f"{each.name}.gguf", worker=worker, **MACHINE)
        plan = each.plan
        assert plan is not None
        assert plan.fits
        assert (plan.params, plan.devices, plan.host) == (real.params, real.devices, real.host)
        assert plan.breakdown == real.breakdown
        assert plan.estimate == real.estimate
        assert plan.model.bytes == real.model.bytes
        assert plan.arguments() == real.arguments()


def test_types_that_upstream_refuses_without_an_importance_matrix(worker: Worker, tmp_path: Path) -> None:
    model = write_hybrid(tmp_path / "model.gguf")
    answer = worker.file_types([model], tmp_path)
    assert {each.name for each in answer.found} == set(FILE_TYPES)
    every = [each.name for each in answer.found if each.name not in ("F32", "IQ3_XXS")]
    how = quantized(model, DRY, every)
    needing = {each.name for each in answer.found if each.name in how and needs_imatrix(answer.tensors, each)}
    assert needing == {name for name, done in how.items() if done == "imatrix"}
    assert needing == {"IQ1_M", "IQ1_S", "IQ2_M", "IQ2_S", "IQ2_XS", "IQ2_XXS", "IQ3_XS", "Q2_K_S"}


# --- what is said


@pytest.fixture(scope="module")
def shape(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shapes.write("llama-3.1-8b", tmp_path_factory.mktemp("shape"))


def by_name(found: fitter.Quantizations) -> dict[str, Quantization]:
    return {each.name: each for each in found.found}


def test_a_quantized_file_gives_what_its_original_gives(shape: Path) -> None:
    found = fitter.quants(shape, types="Q4_K_M,Q6_K,IQ3_XXS", gpus="8GiB", n_ctx=8192)
    each = by_name(found)
    assert found.source_type == "q4_K"
    assert found.notes == (
        "llama-3.1-8b.gguf is quantized itself (q4_K, q6_K); it is assumed that its 66 tensors of other types have "
        "these in the original too. Quantize the original: llama-quantize takes a quantized file only with "
        "--allow-requantize, which loses quality",
    )
    # the shape is that of a Q4_K_M file, so that is what it must be again
    assert each["Q4_K_M"].plan is not None
    assert each["Q4_K_M"].plan.model.bytes == found.model.bytes
    assert each["Q4_K_M"].plan.model.path == str(shape.with_name("llama-3.1-8b-Q4_K_M.gguf"))
    assert found.best is each["Q6_K"]
    assert [one.name for one in found.found] == ["Q6_K", "Q4_K_M", "IQ3_XXS"]
    unknown = each["IQ3_XXS"]
    assert (unknown.plan, unknown.bytes, unknown.needs_imatrix) == (None, None, True)
    assert (
        unknown.problem
        == "its tensors' types depend on the importance matrix, and llama.cpp tells only those without one"
    )


def test_the_fast_enough_one_with_the_most_bits(shape: Path) -> None:
    found = fitter.quants(shape, types=("Q8_0", "Q4_K_M", "Q2_K"), gpus="4GiB", n_ctx=4096, tokens_per_second=9)
    each = by_name(found)
    assert not each["Q8_0"].is_on_devices
    rates = {name: one.tokens_per_second or 0 for name, one in each.items()}
    assert rates["Q8_0"] < 9 < rates["Q4_K_M"] < rates["Q2_K"]
    assert found.best is each["Q4_K_M"]


def test_a_model_in_parts(tmp_path: Path) -> None:
    whole = shapes.write("llama-3.1-8b", tmp_path, vocab=False)
    parts = shapes.write_split("llama-3.1-8b", tmp_path, 3, vocab=False)
    words: dict[str, Any] = {"types": "Q5_K_M", "gpus": "12GiB", "n_ctx": 4096}
    one, other = fitter.quants(whole, **words).found[0], fitter.quants(parts, **words).found[0]
    assert (one.bytes, one.types) == (other.bytes, other.types)
    assert one.plan is not None
    assert other.plan is not None
    assert one.plan.breakdown == other.plan.breakdown


FOR = ("--for", "llama-cpp-python")


def test_the_command_says_the_best(shape: Path) -> None:
    done = run_fitter(
        "quants", str(shape), "--gpu", "12GiB", "-c", "4096", "--type", "q4_k_m,q8_0", "--type", "F16", *FOR
    )
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines[2:5]] == ["F16", "Q8_0", "Q4_K_M"]
    assert [line.split()[-1] == "best" for line in lines[2:5]] == [False, True, False]
    assert lines[-2:] == ["best: Q8_0, 8.0 GiB", ARGUMENTS]


ARGUMENTS = "arguments: -c 4096 -ngl 33 -np 1 -fit off"


def test_json_has_the_same(shape: Path) -> None:
    done = run_fitter(
        "quants", str(shape), "--gpu", "3GiB", "--host-memory", "2GiB", "-c", "4096", "--type", "Q8_0,Q1_0", "--json"
    )
    document = json.loads(done.stdout)
    assert (done.returncode, done.stderr, document["fits"], document["best"]) == (0, "", True, None)
    large, small = document["file_types"]
    assert (large["name"], large["fits"], large["arguments"], large["n_ctx"]) == ("Q8_0", False, None, None)
    assert " lacks " in large["problem"]
    assert (small["name"], small["fits"], small["n_ctx"], small["problem"]) == ("Q1_0", True, 4096, None)
    assert sum(small["types"].values()) == 292


def test_none_fits(shape: Path) -> None:
    done = run_fitter(
        "quants", str(shape), "--gpu", "2GiB", "--host-memory", "1GiB", "-c", "4096", "--type", "Q8_0,Q4_0"
    )
    assert (done.returncode, done.stderr) == (1, "")
    assert "none fits; as Q4_0: the host lacks " in done.stdout


# --- errors


def test_nothing_is_left_behind(shape: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    fitter.quants(shape, types="Q4_0", gpus="12GiB", n_ctx=4096)
    assert list(tmp_path.iterdir()) == []
