"""Models without a file: llama.cpp loads each shape, and plans on it as on the file of which it is the shape."""

from __future__ import annotations

import gzip
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from gguf import GGMLQuantizationType
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import fitter
from fitter.cli import main
from fitter.errors import FitterError, ModelError
from fitter.llama.client import Worker
from fitter.llama.header.gguf_writer import write
from fitter.llama.types import Params
from fitter.model.files import header_cache
from fitter.model.header import open_model
from fitter.model.shapes import catalogue, shape_files
from fitter.model.shapes.catalogue import wanted
from fitter.model.shapes.common import ShapeHeader
from fitter.model.shapes.mapping import header_of
from fitter.planning.speed.model_facts import facts_of
from fitter.planning.speed.work import resized_layout
from fitter.storage import cache_folder, parse_toml
from tests.integration.test_quantizations import Snapshot, read, snapshots
from tests.support import ranges
from tests.support.cases import cases, named_cases
from tests.support.command import Command, run_python
from tests.support.real_cards import DATA as REAL
from tests.unit.test_shapes import WEIGHTS, config_of
from tools.comparisons.cuda_reference import DATA as CUDA
from tools.models import shapes

__all__ = ["snapshots"]

DEVICES = ["512GiB"] * 8


@pytest.fixture(scope="module")
def log() -> list[str]:
    return []


@pytest.fixture(scope="module")
def worker(log: list[str]) -> Iterator[Worker]:
    with Worker(on_log=log.append) as worker:
        yield worker


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))


def made_of(name: str, **others: Any) -> ShapeHeader:
    return header_of({**catalogue.published_shape(name).config, **others}, name)


def written(header: ShapeHeader, path: Path) -> Path:
    with path.open("wb") as file:
        write(file, header.metadata, header.tensors)
    return path


# --- every shape is what llama.cpp loads


@cases("llama-4-scout", "gemma-2-9b", "gemma-3-12b", "gpt-oss-20b", "deepseek-v4-flash", "qwen3.8-flash-next")
def test_caches_of_longer_contexts_are_those_that_llama_cpp_makes(name: str, worker: Worker, tmp_path: Path) -> None:
    header = made_of(name)
    if name == "gemma-2-9b":
        assert header.metadata.pop("gemma2.attention.sliding_window") == 4096, "llama.cpp's own default"
    path = written(header, tmp_path / "x.gguf")
    facts = facts_of(open_model(path, worker.header))
    worker.configure(())
    short, long = (Params(n_ctx=n_ctx) for n_ctx in (4096, 32768))
    found = resized_layout(facts, worker.layout(str(path), short), short, long)
    assert found == worker.layout(str(path), long)


def sample() -> list[Any]:
    """List every shape, of which those after the first of an architecture are slow, and configs of no catalogue."""
    seen: set[tuple[str, ...]] = set()
    found = []
    for name in catalogue.shape_names():
        header = made_of(name)
        kinds = (header.architecture, str(header.number("nextn_predict_layers")))
        found.append(pytest.param(header, marks=[pytest.mark.slow] if kinds in seen else [], id=name))
        seen.add(kinds)
    known = ((name, config_of(of, changes)) for name, (of, changes, *_) in WEIGHTS.items())
    return found + [pytest.param(header_of(config, name), id=name) for name, config in known]


@pytest.mark.parametrize("header", sample())
def test_llama_cpp_finds_every_tensor_and_leaves_none(
    header: ShapeHeader, worker: Worker, log: list[str], tmp_path: Path
) -> None:
    path = written(header, tmp_path / "x.gguf")
    log.clear()
    # layers for multi-token prediction are only looked at where they are to be loaded
    load_mtp = bool(header.number("nextn_predict_layers"))
    found = fitter.measure(path, gpus=DEVICES, n_ctx=512, worker=worker, load_mtp=load_mtp)
    assert [line for line in log if "unused" in line] == []
    # what is not on a device is the embedding, and some of what is small
    sizes = sum(row.model for row in found.rows)
    assert sizes >= 0.98 * sum(each.bytes for each in header.tensors)


def changed(data: st.DataObject) -> tuple[str, dict[str, Any]]:
    """A shape, some of whose hyperparameters are otherwise, as those of another model of its class may be."""
    name = data.draw(st.sampled_from(catalogue.shape_names()))
    config = dict(catalogue.published_shape(name).config)
    for key in data.draw(st.lists(st.sampled_from(sorted({*config} - {"architectures"})), min_size=1, max_size=2)):
        value = config.pop(key, None)
        if isinstance(value, bool):
            config[key] = not value
        elif isinstance(value, (int, float)):
            config[key] = data.draw(st.sampled_from([0, 1, 7, 64, value // 2, value + 1, value * 2]))
        elif isinstance(value, list):
            config[key] = data.draw(st.sampled_from([value[:-1], value[::-1], value + value[:1]]))
    return name, config


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_changed_shape_is_loaded_whole_or_refused(
    data: st.DataObject, worker: Worker, log: list[str], tmp_path: Path
) -> None:
    name, config = changed(data)
    log.clear()
    try:
        header = header_of(config, name)
        load_mtp = bool(header.number("nextn_predict_layers"))
        path = written(header, tmp_path / "x.gguf")
        found = fitter.measure(path, gpus=DEVICES, n_ctx=512, worker=worker, load_mtp=load_mtp)
    except FitterError as error:
        assert error.exit_code == 3 and "\n" not in str(error)
    else:
        assert [line for line in log if "unused" in line] == []
        assert sum(row.model for row in found.rows) >= 0.97 * sum(each.bytes for each in header.tensors)


# --- shapes of which the header is known from elsewhere

UNPUBLISHED: dict[str, dict[str, Any]] = parse_toml((REAL.parent / "shapes" / "unpublished.toml").read_text("utf-8"))
NO_MTP = {"mtp_num_hidden_layers": 0}
OTHERWISE = {"glm45-air": "glm-4.5-air", "gemma3-12b": "gemma-3-12b"}
"""Shapes of tools/models/shapes.py that the catalogue calls otherwise."""
ALIKE = ("llama-3.1-70b", "qwen3-32b", "qwen3-235b-a22b", "kimi-k2", "gpt-oss-120b")
"""Models whose architecture another model has, too."""


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=[pytest.mark.slow] if each in ALIKE else []) for each in shapes.SHAPES]
)
def test_a_shape_is_that_of_the_known_header(name: str, worker: Worker, tmp_path: Path) -> None:
    config = UNPUBLISHED.get(name) or dict(catalogue.published_shape(OTHERWISE.get(name, name)).config)
    if name == "gemma3-12b":
        # that of the class, which the files that were published first do not have
        config["vocab_size"] = 262208
    header = header_of(config, name)
    known = shapes.SHAPES[name]
    compare(header, known.tensors, known.n_layer)
    assert architecture_and_numbers(header) >= numbers(known)
    # one of them with its words, which make no difference
    written = shapes.write(name, tmp_path, vocab=name == "llama-3.1-8b")
    compare_bytes(header, written, known.tensors, worker, tmp_path)


def test_qwen3_coder_has_the_tensors_of_the_known_qwen3() -> None:
    """It is the same model with a longer context."""
    header = header_of(dict(catalogue.published_shape("qwen3-coder-30b-a3b").config), "qwen3-coder-30b-a3b")
    known = shapes.SHAPES["qwen3-30b-a3b"]
    compare(header, known.tensors, known.n_layer)
    assert header.number("context_length") == 262144


def compare(header: ShapeHeader, tensors: tuple[shapes.Tensor, ...], n_layer: int) -> None:
    """Names and shapes are equal, and so are the types of what is never quantized."""
    assert header.number("block_count") == n_layer
    mine = {each.name: (each.shape, each.type == "f32") for each in header.tensors}
    theirs = {each.name: (_without_ones(each.shape), each.type == GGMLQuantizationType.F32) for each in tensors}
    assert mine == theirs


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    return _without_ones(shape[:-1]) if len(shape) > 1 and shape[-1] == 1 else shape


def numbers(known: shapes.Shape) -> set[tuple[str, str]]:
    """Return the metadata that decides sizes."""
    return {(key, str(value)) for key, value in known.metadata.items() if key in SIZES and not isinstance(value, list)}


SIZES = (".block_count", ".embedding_length", ".attention.head_count", ".expert_count", ".expert_used_count")


def architecture_and_numbers(header: ShapeHeader) -> set[tuple[str, str]]:
    return {(key.removeprefix(header.architecture), str(value)) for key, value in header.metadata.items()}


LOADS: tuple[dict[str, Any], ...] = (
    {"n_ctx": 8192},
    {"n_ctx": 32768, "n_gpu_layers": 7, "type_k": "q8_0", "type_v": "q8_0", "n_seq_max": 2},
)


def compare_bytes(
    header: ShapeHeader, known: Path, tensors: tuple[shapes.Tensor, ...], worker: Worker, tmp_path: Path
) -> None:
    """A file of the shape, each tensor of the type that the known file has, takes what the known file takes."""
    types = {each.name: each.type for each in tensors}
    metadata = {
        key.removeprefix(header.architecture) if key.startswith(f"{header.architecture}.") else key: value
        for key, value in header.metadata.items()
        if not key.startswith("general.") and key != "tokenizer.ggml.model" and not key.endswith(".vocab_size")
    }
    retyped = tuple(shapes.Tensor(each.name, each.shape, types[each.name]) for each in header.tensors)
    own = shapes.Shape(header.architecture, "x", header.number("vocab_size"), "default", metadata, retyped)  # type: ignore[arg-type]
    path = tmp_path / "own.gguf"
    shapes.write_shape(own, path, vocab=False)
    for split in LOADS:
        loads = (fitter.measure(each, gpus=DEVICES[:2], worker=worker, **split) for each in (path, known))
        mine, theirs = ([(row.buffer_type, row.model, row.context) for row in load.rows] for load in loads)
        assert mine == theirs


REAL_HEADERS = {
    "glm-5.2-ud-q5_k_xl": ("glm-5.2", {}, REAL),
    "qwen3.5-397b-a17b": ("qwen3.5-397b-a17b", NO_MTP, REAL),
    "gpt-oss-20b-bf16-mxfp4": ("gpt-oss-20b", {}, REAL),
    "dsv2lite": ("deepseek-v2-lite", {}, CUDA),
}
"""Headers of the reference data: the name in the catalogue, what of it is otherwise, and where the header is."""


@pytest.mark.parametrize("name", REAL_HEADERS)
def test_a_shape_has_the_tensors_of_the_reference_header(name: str, worker: Worker, tmp_path: Path) -> None:
    own, others, folder = REAL_HEADERS[name]
    path = tmp_path / "known.gguf"
    path.write_bytes(gzip.decompress((folder / f"{name}.head.gz").read_bytes()))
    os.truncate(path, 1 << 40)
    known = worker.header(path)
    header = made_of(own, **others)
    mine = {each.name: (each.shape, each.type == "f32") for each in header.tensors}
    theirs = {each.name: (each.shape, each.type == "f32") for each in known.tensors}
    # the reference data has headers without the factors of rope, which not every file has
    mine.pop("rope_freqs.weight", None)
    theirs.pop("rope_freqs.weight", None)
    assert mine == theirs
    tensors = (shapes.Tensor(each.name, each.shape, GGMLQuantizationType[each.type.upper()]) for each in known.tensors)
    compare_bytes(header, path, tuple(tensors), worker, tmp_path)


# --- file types

SNAPSHOTS: dict[str, tuple[str, Mapping[str, Any]]] = {
    "deepseek-v3.1": ("deepseek-v3.1", {}),
    "gemma-3-4b-it": ("gemma-3-4b", {}),
    "gpt-oss-120b": ("gpt-oss-120b", {"quantization_config": {}}),
    "meta-llama-3.1-70b-instruct": ("llama-3.1-70b", {}),
    "nvidia-nemotron-3-nano-30b-a3b": ("nemotron-3-nano-30b-a3b", {}),
    # its files have the output's weights beside those of the embedding, which are the same
    "qwen3-0.6b": ("qwen3-0.6b", {"tie_word_embeddings": False}),
    "qwen3-14b": ("qwen3-14b", {}),
    "qwen3.5-397b-a17b": ("qwen3.5-397b-a17b", NO_MTP),
    "qwen3.6-27b": ("qwen3.6-27b", NO_MTP),
}
"""Upstream's snapshots of models of the catalogue; those that have no layer for multi-token prediction there."""


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=[pytest.mark.slow] if "llama" in each else []) for each in SNAPSHOTS]
)
def test_file_types_are_those_of_upstreams_snapshots(
    name: str, worker: Worker, snapshots: Path, tmp_path: Path
) -> None:
    own, others = SNAPSHOTS[name]
    snapshot = read(snapshots / f"{name}.schema")
    header = made_of(own, **others).of_type("f16")
    figures(snapshot, header)
    answer = worker.file_types([written(header, tmp_path / "x.gguf")], tmp_path)
    found = {each.name: dict(zip(answer.tensors, each.types, strict=True)) for each in answer.found if each.types}
    never = {each.name for each in header.tensors if each.type == "f32"}
    for file_type, default in snapshot.defaults.items():
        types = {tensor: kind for tensor, kind in found[file_type].items() if tensor not in never}
        assert {tensor: kind for tensor, kind in types.items() if kind != default} == snapshot.others[file_type]


def figures(snapshot: Snapshot, header: ShapeHeader) -> None:
    known = {"n_embd": "embedding_length", "n_layer": "block_count", "n_head": "attention.head_count"}
    assert {key: header.number(name) for key, name in known.items()} == {key: snapshot.figures[key] for key in known}
    assert snapshot.figures["n_vocab"] in (0, header.number("vocab_size"))


def test_a_file_type_is_kept_and_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = wanted("shape://smollm2-135m:Q5_K_M")
    assert asked is not None
    (path,) = shape_files.model_files(asked)
    before = path.stat()
    monkeypatch.setattr(shape_files, "Worker", None)
    assert shape_files.model_files(asked) == (path,) and path.stat().st_mtime_ns == before.st_mtime_ns
    assert path.name == "smollm2-135m-Q5_K_M.gguf"


# --- what is kept of them

WRITES = """
import sys
from fitter.model.shapes import shape_files as files
from fitter.model.shapes.catalogue import wanted
sys.stdin.readline()
for name in sys.argv[1:]:
    print(files.model_files(wanted(name))[0].stat().st_size)
"""
NOT_KEPT = "the header of smollm2-135m-Q4_K_M.gguf cannot be kept in {}/llama-fitter/shapes: {}; set XDG_CACHE_HOME to "


def test_several_processes_write_the_same_shapes_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    words = [sys.executable, "-c", WRITES, *(f"shape://{name}:BF16" for name in catalogue.shape_names()[:12])]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    both = [subprocess.Popen(words, text=True, **pipes) for _ in range(2)]
    for each in both:
        assert each.stdin is not None
        each.stdin.write("\n")
        each.stdin.flush()
    said = [each.communicate() for each in both]
    assert said[0] == said[1] and said[0][1] == "" and len(said[0][0].split()) == 12
    kept = [path.name for path in cache_folder(header_cache.SHAPES).rglob("*") if path.is_file()]
    assert len(kept) == 12 and all(name.endswith(".gguf") for name in kept)


def test_a_shape_that_was_used_is_the_last_to_be_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for _ in range(2):
        (path,) = shape_files.model_files(_asked("smollm2-135m:BF16"))
        assert time.time() - path.parent.stat().st_mtime < 60
        os.utime(path.parent, (0, 0))
    monkeypatch.setattr(header_cache, "MOST_ENTRIES", 2)
    shape_files.model_files(_asked("qwen3-32b:BF16"))
    assert shape_files.model_files(_asked("smollm2-135m:BF16")) == (path,)
    (new,) = shape_files.model_files(_asked("llama-3.1-8b:BF16"))
    assert {*cache_folder(header_cache.SHAPES).iterdir()} == {path.parent, new.parent}


def test_a_shape_that_cannot_be_kept_is_said_and_leaves_nothing(tmp_path: Path) -> None:
    """The disk takes no file of that size, and then is none at all."""
    said = {tmp_path / "full": "File too large", tmp_path / "file": "Not a directory"}
    (tmp_path / "file").write_text("")
    limited = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20)); "
    for place, reason in said.items():
        code = f"{limited}from fitter.__main__ import main; main()"
        done = run_python(code, "fit", "--shape", "smollm2-135m", "--gpu", "8GiB", XDG_CACHE_HOME=str(place))
        expected = f"fitter: error: {NOT_KEPT.format(place, reason)}a directory that can be written\n"
        assert (done.returncode, done.stdout, done.stderr) == (3, "", expected)
    assert [path for path in (tmp_path / "full").rglob("*") if path.is_file()] == []


@named_cases(("a file", None), ("a full disk", "size=4k"), ("a disk for reading", "ro"))
def test_a_shape_is_planned_without_a_cache(mount: str | None, tmp_path: Path) -> None:
    place, within = tmp_path / "cache", ()
    if mount is None:
        place.touch()
    else:
        place.mkdir()
        script = f'mount -t tmpfs -o {mount} none "$0" && exec "$@"'
        within = ("unshare", "-rm", "sh", "-c", script, str(place))
        if subprocess.run([*within, "true"], capture_output=True).returncode:
            pytest.skip("this machine lets nobody mount a disk of their own")
    words = (sys.executable, "-m", "fitter", "--shape", "smollm2-135m:Q8_0", "--gpu", "8GiB")
    done = subprocess.run(
        [*within, *words],
        capture_output=True,
        text=True,
        env={**os.environ, "XDG_CACHE_HOME": str(place), "TMPDIR": str(tmp_path)},
    )
    assert (done.returncode, done.stdout) == (0, subprocess.run(words, capture_output=True, text=True).stdout)
    (line,) = (line for line in done.stderr.splitlines() if "warning" in line)
    assert line.startswith(f"fitter: warning: {place}/llama-fitter cannot be written (")
    assert line.endswith("), so nothing is kept there: set XDG_CACHE_HOME to a directory of your own")
    assert [path.name for path in tmp_path.iterdir()] == ["cache"]


# --- commands and calls


def test_a_shape_is_planned_as_a_file_is(worker: Worker, tmp_path: Path) -> None:
    plan = fitter.fit("shape://qwen3-0.6b", gpus="8GiB", n_ctx=4096, worker=worker)
    assert (plan.model.path, plan.model.name, plan.fits) == ("shape://qwen3-0.6b:Q4_K_M", "Qwen3 0.6B", True)
    assert plan.notes[0].startswith("shape://qwen3-0.6b:Q4_K_M is the shape of a model, not a file: ")
    assert fitter.measure("shape://qwen3-0.6b:BF16", gpus="8GiB", n_ctx=64, worker=worker).rows
    assert fitter.estimate("shape://qwen3-0.6b", gpus="8GiB", n_ctx=64, worker=worker).generation_tokens_per_second > 0
    assert fitter.inspect("shape://qwen3-0.6b:Q8_0", n_ctx=64).model.bytes > 600 << 20
    with pytest.raises(ModelError, match="is a model without a file, which cannot be loaded: give the path of a GGUF"):
        plan.load()
    with pytest.raises(ModelError, match="is a model without a file"):
        fitter.verify(plan=plan)


def test_packed_experts_stay_packed(worker: Worker) -> None:
    plan = fitter.fit("shape://gpt-oss-20b", gpus="24GiB", n_ctx=4096, worker=worker)
    assert plan.model.path == "shape://gpt-oss-20b:MXFP4_MOE"
    (path,) = shape_files.model_files(_asked("gpt-oss-20b:MXFP4_MOE"))
    assert {each.type for each in worker.header(path).tensors} == {"mxfp4", "q8_0", "f32"}


def _asked(name: str) -> Any:
    return wanted(f"shape://{name}")


def test_quants_are_of_the_model_as_it_is_converted(worker: Worker) -> None:
    found = fitter.quants("shape://qwen3-0.6b:Q4_K_M", gpus="8GiB", n_ctx=512, types="Q8_0", worker=worker)
    assert (found.model.path, found.source_type) == ("shape://qwen3-0.6b:BF16", "bf16")
    assert [each.plan and each.plan.model.path for each in found.found] == ["shape://qwen3-0.6b:Q8_0"]


LADDER = "Q8_0,Q6_K,Q5_K_M,Q4_K_M,Q3_K_M"


def test_the_best_models_for_a_card_are_as_quants_says(worker: Worker) -> None:
    """The most weights first, each in its best type; what is too slow is not there."""
    machine: dict[str, Any] = {"gpus": "rtx-3060", "worker": worker, "program": "llama-server"}
    plans = fitter.best_shapes(("qwen2.5",), **machine)
    rows = [(each.shape.name, each.best.name) for each in plans.found]
    assert [name for name, _ in rows] == ["qwen2.5-14b", "qwen2.5-7b", "qwen2.5-3b", "qwen2.5-0.5b"]
    for name, file_type in rows[1:2]:
        best = fitter.quants(f"shape://{name}", types=LADDER, **machine).best
        assert best is not None and best.name == file_type
    assert all((each.best.tokens_per_second or 0) >= 20 and (each.best.n_ctx or 0) >= 8192 for each in plans.found)
    fewer = fitter.best_shapes(("qwen2.5",), most=1, **machine)
    assert ([each.shape.name for each in fewer.found], fewer.left) == (["qwen2.5-14b"], 3)
    faster = fitter.best_shapes(("qwen2.5",), tokens_per_second=150, **machine)
    assert [each.shape.name for each in faster.found] == [each["name"] for each in faster.to_dict()["shapes"]]
    assert faster and [each.shape.name for each in faster.found] == ["qwen2.5-0.5b"]
    assert not fitter.best_shapes("arctic-embed", **machine)


def test_a_card_without_a_model_lists_the_models_for_it(command: Command) -> None:
    status, out, _ = command("shapes", "smollm2", "--gpu", "1GiB", "--most", "1")
    head = r"shape +type +parameters +MiB +host MiB +context +prompt t/s +t/s\nsmollm2-1.7b +Q3_K_M "
    assert status == 0 and re.match(head, out)
    assert "2 smaller models were not planned" in out
    assert "plan one: fitter smollm2-1.7b:Q3_K_M --gpu 1GiB" in " ".join(out.split())
    status, out, _ = command("--gpu", "none", "--tokens-per-second", "1e6")
    assert status == 1 and out.startswith("none of these models generates 1e+06 t/s there")


def test_shapes_are_listed(command: Command) -> None:
    listed = command("shapes", "--json").document["shapes"]
    assert [each["name"] for each in listed] == list(catalogue.shape_names())
    start = "Qwen3 8B (qwen3)\n8.19B parameters in 36 layers, for up to 40960 "
    assert command("shapes", "qwen3-8b").out.startswith(start)


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a case of a shape and one of a ``config.json`` beside it, and their lock."""
    tmp_path = tmp_path_factory.mktemp("locked")
    config = dict(catalogue.published_shape("smollm2-135m").config)
    (tmp_path / "config.json").write_text(json.dumps(config))
    models = {"shape": "shape://smollm2-135m", "config": "config://config.json"}
    (tmp_path / "fitter.toml").write_text(
        "".join(f'[cases.{name}]\nmodel = "{model}"\ngpu = "8GiB"\nn_ctx = 512\n' for name, model in models.items())
    )
    assert main(["lock", "--cases", str(tmp_path / "fitter.toml")]) == 0
    lock = (tmp_path / "fitter.lock").read_text()
    assert 'file = "smollm2-135m-Q4_K_M.gguf"' in lock and 'file = "model-Q4_K_M.gguf"' in lock
    assert str(tmp_path) not in lock
    return tmp_path


def test_a_lock_of_shapes_is_compared_wherever_it_is(locked: Path, tmp_path: Path, command: Command) -> None:
    here = tmp_path / "elsewhere"
    shutil.copytree(locked, here)
    words = ("check", "--cases", here / "fitter.toml")
    assert command(*words) == (0, "2 cases: 2 unchanged\n", "")
    config = json.loads((here / "config.json").read_text())
    (here / "config.json").write_text(json.dumps({**config, "vocab_size": 2 * config["vocab_size"]}))
    code, stdout, _ = command(*words)
    assert code == 4 and "config failed" in stdout and "2 cases: 1 failed, 1 unchanged" in stdout
    (here / "config.json").write_text(json.dumps({**config, "vocab_size": "many"}))
    said = f"config: {here}/config.json has vocab_size 'many': give a whole number from 1 to 2097152"
    unmeasured = "2 cases: 1 could not be measured, 1 unchanged\n"
    assert command(*words) == (3, unmeasured, f"fitter: error: {said}\n")


def test_a_shape_that_a_later_version_no_longer_has_is_said(locked: Path, tmp_path: Path, command: Command) -> None:
    here = tmp_path / "later"
    shutil.copytree(locked, here)
    cases = (here / "fitter.toml").read_text()
    (here / "fitter.toml").write_text(cases.replace("smollm2-135m", "smollm2-136m"))
    said = "there is no shape 'smollm2-136m': did you mean smollm2-360m or smollm2-135m or smollm2-1.7b? 'fitter shapes"
    for name in ("check", "lock"):
        code, _, stderr = command(name, "--cases", here / "fitter.toml")
        assert code == 2 and stderr.startswith(f"fitter: error: shape: {said}' lists them\n")
    assert (here / "fitter.lock").read_text() == (locked / "fitter.lock").read_text()


def test_a_config_is_fetched(tmp_path: Path, worker: Worker) -> None:
    (tmp_path / "own-7b").mkdir()
    config = dict(catalogue.published_shape("smollm2-135m").config)
    (tmp_path / "own-7b" / "config.json").write_text(json.dumps(config))
    with ranges.serving(tmp_path) as server:
        address = f"config://{server.url}/own-7b/config.json:Q8_0"
        plan = fitter.fit(address, gpus="8GiB", n_ctx=512, worker=worker)
        assert (plan.model.path, plan.model.name) == (address, "own-7b")
        with pytest.raises(ModelError, match=r"/none/config\.json: the server has no such file \(404\)"):
            fitter.fit(f"config://{server.url}/none/config.json", gpus="8GiB", worker=worker)
