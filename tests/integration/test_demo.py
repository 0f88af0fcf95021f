"""The demo as a newcomer sees it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from benchmarks.results import load
from examples import demo
from tests.support.cases import named_cases
from tests.support.command import run_python
from tools.models import shapes
from tools.models.tiny import TINY_DENSE, TINY_MOE, write_tiny

HEADINGS = ["1. A model", "2. Two GPUs that are not here", "3. This machine", "4. The proof"]


def run(folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(demo.ROOT / "examples" / "demo.py"), str(folder)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry), "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("demo") / "not yet there"


@pytest.fixture(scope="module")
def done(folder: Path) -> subprocess.CompletedProcess[str]:
    return run(folder)


def test_it_succeeds_and_llama_cpp_is_quiet(done: subprocess.CompletedProcess[str]) -> None:
    assert (done.returncode, done.stderr) == (0, "")
    assert [line for line in done.stdout.splitlines() if re.match(r"\d\. ", line)] == HEADINGS
    assert not re.findall(r"^(?:llama_|ggml_|load_|print_info|sched_|graph_).*", done.stdout, re.MULTILINE)
    assert max(map(len, done.stdout.splitlines())) < 300


def test_the_virtual_gpus_are_unequal_and_spill_experts(done: subprocess.CompletedProcess[str]) -> None:
    part = done.stdout.split(HEADINGS[1])[1].split(HEADINGS[2])[0]
    totals = dict(re.findall(r"^ *(CUDA\d)\s+(\d+)", part, re.MULTILINE))
    assert set(totals) == {"CUDA0", "CUDA1"}
    assert len(set(totals.values())) == 2
    assert sum(map(int, totals.values())) * 2**20 < 1.5 * 130e6
    arguments = part.strip().splitlines()[-1].split()
    assert "-dev" not in arguments, "llama.cpp uses both by itself"
    # the experts of the first layers, and perhaps a part of one more
    assert 0 < int(arguments[arguments.index("-ncmoe") + 1]) < 12
    if "-ot" in arguments:
        pattern, _, buffer_type = arguments[arguments.index("-ot") + 1].rpartition("=")
        assert buffer_type == "CPU" and not re.search(pattern, "blk.11.attn_q.weight")


def test_the_command_that_is_shown_gives_what_is_shown(done: subprocess.CompletedProcess[str], folder: Path) -> None:
    part = done.stdout.split(HEADINGS[1])[1].split(HEADINGS[2])[0]
    (command,) = re.findall(r"^\$ (.*)$", part, re.MULTILINE)
    again = subprocess.run(command, shell=True, cwd=demo.ROOT, capture_output=True, text=True, check=True)
    assert part.strip().splitlines()[-1] == again.stdout.strip()


def test_it_generates_and_compares(done: subprocess.CompletedProcess[str]) -> None:
    part = done.stdout.split(HEADINGS[3])[1]
    assert f"({demo.MAX_TOKENS} tokens)" in part
    rows = re.findall(r"^(\w+) +(model|context|compute) +([\d,]+) +([\d,]+)$", part, re.MULTILINE)
    assert {kind for _, kind, _, _ in rows} == {"model", "context", "compute"}
    assert all(predicted == real for _, _, predicted, real in rows)
    assert part.strip().endswith("Equal, to the byte.")


def test_the_second_time_the_model_is_there(done: subprocess.CompletedProcess[str], folder: Path) -> None:
    before = (folder / "tiny-moe.gguf").stat()
    again = run(folder)
    after = (folder / "tiny-moe.gguf").stat()
    assert again.returncode == 0
    assert "tiny-moe.gguf is there from the last time." in again.stdout
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    failed = run(tmp_path / "file")
    assert failed.returncode == 3
    assert failed.stderr.count("\n") == 1
    assert "Traceback" not in failed.stderr + failed.stdout


CPU, REPACK = ("CPU", "model"), ("CPU_REPACK", "model")


@named_cases(
    ("equal", {CPU: 1000, REPACK: 5}, {CPU: 1000, REPACK: 5}, 0, "Equal, to the byte."),
    ("more", {CPU: 1000, REPACK: 5}, {CPU: 1001, REPACK: 5}, 1, "+1 in reality"),
    ("elsewhere", {CPU: 1000, REPACK: 5}, {CPU: 1005}, 1, "-5 in reality"),
    ("another buffer type", {CPU: 1000}, {CPU: 1000, REPACK: 7}, 1, "+7 in reality"),
)
def test_what_differs_is_said(
    predicted: dict[tuple[str, str], int],
    real: dict[tuple[str, str], int],
    status: int,
    said: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert demo.compare(Counter(predicted), Counter(real)) == status
    assert said in capsys.readouterr().out


# --- the benchmark end to end on one small case


ROOT = Path(__file__).resolve().parents[2]
MB = 10**6


def test_one_case(tmp_path: Path) -> None:
    raw, tables = tmp_path / "raw.json", tmp_path / "RESULTS.md"
    command = [sys.executable, "-m", "benchmarks.compare", "--results", str(tables)]
    measure = ["--only", "llama-3.1-8b/8GiB", "--runs", "1", "--output", str(raw)]
    done = subprocess.run([*command, *measure], cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    assert "[1/1] llama-3.1-8b/8GiB: " in done.stderr

    results = load(raw)
    (case,) = results.comparisons
    assert (results.failed, results.devices, results.layers) == ((), (), ())
    assert (case.name, case.n_devices, case.n_vocab) == ("llama-3.1-8b/8GiB", 1, 128256)
    assert case.n_params == pytest.approx(8.03e9, rel=1e-3)
    assert case.fitter.memory.processes >= 2 and case.upstream.memory.processes == 1
    for program in (case.fitter, case.upstream):
        assert len(program.seconds) == 1 and program.seconds[0] > 0.05
        assert program.loads >= 1
        assert 20 * MB < program.memory.peak <= program.memory.at_most * 1.1 < 1000 * MB
        assert program.chosen is not None and not program.chosen.over
        assert program.chosen.n_ctx >= 4096 and program.chosen.left >= 0
        assert program.chosen.weights > 4 * 10**9

    written = tables.read_text()
    assert str(tmp_path) not in written
    assert f"| {case.name} | 1 | 128256 | " in written
    again = subprocess.run([*command, "--from", str(raw)], cwd=ROOT, capture_output=True, text=True, check=False)
    assert again.returncode == 0, again.stderr
    assert tables.read_text() == written


# --- models that the tests and the demo write, as llama.cpp reads them in a process of its own


DUMMY_LOAD = """
import json, sys
import llama_cpp as L

log = []
callback = L.llama_log_callback(lambda level, text, data: log.append(text))
L.llama_log_set(callback, None)
for path in sys.argv[1:]:
    log.clear()
    params = L.llama_model_default_params()
    params.no_alloc, params.load_mode, params.n_gpu_layers = True, L.LLAMA_LOAD_MODE_NONE, 0
    model = L.llama_model_load_from_file(path.encode(), params)
    context_params = L.llama_context_default_params()
    context_params.n_ctx = 4096
    context = model and L.llama_init_from_model(model, context_params)
    said = {"error": b"".join(log[-5:]).decode()} if not context else {
        "bytes": L.llama_model_size(model),
        "n_layer": L.llama_model_n_layer(model),
        "n_vocab": L.llama_vocab_n_tokens(L.llama_model_get_vocab(model)),
    }
    print(json.dumps(said), flush=True)
    if context:
        L.llama_free(context)
    if model:
        L.llama_model_free(model)
"""

GENERATE = """
import json, sys
import llama_cpp

llm = llama_cpp.Llama(sys.argv[1], n_ctx=256, verbose=False)
answer = llm.create_completion("ba lu mi", max_tokens=8, temperature=0)
print(json.dumps({"text": answer["choices"][0]["text"], **answer["usage"]}))
"""


def _python(code: str, *arguments: Path) -> list[dict[str, object]]:
    done = run_python(code, *arguments)
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("vocab", [pytest.param(True, marks=pytest.mark.slow), False], ids=["vocab", "no vocab"])
def test_llama_cpp_loads_every_shape(vocab: bool, tmp_path: Path) -> None:
    paths = [shapes.write(name, tmp_path, vocab) for name in shapes.SHAPES]
    assert dict(zip(shapes.SHAPES, _python(DUMMY_LOAD, *paths), strict=True)) == {
        # llama.cpp does not count the layers for multi-token prediction
        name: {
            "bytes": shape.bytes,
            "n_layer": shape.n_layer - int(str(shape.metadata.get(".nextn_predict_layers", 0))),
            "n_vocab": shape.n_vocab,
        }
        for name, shape in shapes.SHAPES.items()
    }


def test_llama_cpp_loads_a_split_model(tmp_path: Path) -> None:
    (said,) = _python(DUMMY_LOAD, shapes.write_split("deepseek-v3.1", tmp_path, 9, vocab=False))
    assert said.get("bytes") == shapes.SHAPES["deepseek-v3.1"].bytes, said


@pytest.mark.parametrize("model", [TINY_MOE, TINY_DENSE], ids=lambda model: model.name)
def test_a_tiny_model_generates(model: object, tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "tiny.gguf", model)  # type: ignore[arg-type]
    assert path.stat().st_size < 5_000_000
    (said,) = _python(GENERATE, path)
    assert said["completion_tokens"] == 8
    assert str(said["text"]).strip().replace(" ", "").isalpha(), "it says syllables"
