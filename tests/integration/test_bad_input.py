"""Whatever is wrong is one line on stderr and the right exit status: no traceback, no half-written output.

Most lines are rows of ``tests/data/refused/lines.toml``.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import struct
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from gguf import GGMLQuantizationType

from fitter import UsageError, estimate, fit, measure
from fitter.storage import parse_toml
from tests.support.cases import cases, named_cases, refused
from tests.support.command import Command, run_fitter
from tools.models import shapes
from tools.models.tiny import TINY_DENSE, write_tiny
from tools.models.tiny_projector import write_projector

DENSE = shapes.SHAPES["llama-3.1-8b"]
ROWS = parse_toml((Path(__file__).parents[1] / "data" / "refused" / "lines.toml").read_text("utf-8"))


def cut(size: int) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        write_tiny(path)
        os.truncate(path, size)

    return write


def of_type(number: int) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        write_tiny(path)
        data = bytearray(path.read_bytes())
        # after its name and two dimensions
        struct.pack_into("<I", data, data.index(b"token_embd.weight") + len("token_embd.weight") + 4 + 16, number)
        path.write_bytes(data)

    return write


def of_shape(vocab: bool = True, **changes: Any) -> Callable[[Path], None]:
    return lambda path: shapes.write_shape(replace(DENSE, **changes), path, vocab=vocab)


def of_one_tensor(architecture: str, kind: GGMLQuantizationType) -> Callable[[Path], None]:
    tensors = (shapes.Tensor("token_embd.weight", (32, 4), kind),)
    return of_shape(architecture=architecture, n_vocab=32, tensors=tensors, vocab=False)


FILES: dict[str, Callable[[Path], object]] = {
    "tiny.gguf": write_tiny,
    "dense.gguf": partial(write_tiny, model=TINY_DENSE),
    "draft.gguf": partial(write_tiny, model=replace(TINY_DENSE, n_layer=2)),
    "other.gguf": partial(write_tiny, model=replace(TINY_DENSE, n_expert=8)),
    "projector.gguf": write_projector,
    "llama.gguf": of_shape(vocab=False),
    "head.gguf": of_shape(architecture="eagle3", vocab=False),
    "empty.gguf": Path.touch,
    "notes.txt": lambda path: path.write_text("no model\n"),
    "empty.json": lambda path: path.write_text("{}"),
    "directory.gguf": Path.mkdir,
    "pipe.gguf": os.mkfifo,
    "loop.gguf": lambda path: path.symlink_to(path.name),
    "cut-magic.gguf": cut(6),
    "cut-header.gguf": cut(3000),
    "cut-tensors.gguf": cut(200_000),
    "fork.gguf": of_type(139),
    "given-up.gguf": of_type(31),
    "no-type.gguf": of_type(1000),
    "perceptron.gguf": of_shape(architecture="perceptron"),
    "without-tensors.gguf": of_shape(tensors=()),
    "few-tensors.gguf": of_shape(vocab=False, tensors=DENSE.tensors[:-3]),
    "novel.gguf": of_one_tensor("novel", GGMLQuantizationType.F16),
    "quantized.gguf": of_one_tensor("llama", GGMLQuantizationType.Q8_0),
}
"""What writes each file that the rows name."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with files and plans of all kinds."""
    folder = tmp_path_factory.mktemp("files")
    for name, write in FILES.items():
        write(folder / name)
    shapes.write_split("llama-3.1-8b", folder, 3, vocab=False).rename(folder / "split-00001-of-00003.gguf")
    (folder / "llama-3.1-8b-00003-of-00003.gguf").rename(folder / "split-00003-of-00003.gguf")
    here, virtual = (fit(folder / "tiny.gguf", **words).to_dict() for words in HERE_AND_VIRTUAL)
    for name, plan in {"plan": here, "virtual": virtual}.items():
        (folder / f"{name}.json").write_text(json.dumps(plan))
    (folder / "lost.json").write_text(json.dumps(here).replace("tiny.gguf", "gone.gguf"))
    return folder


HERE_AND_VIRTUAL: tuple[dict[str, Any], ...] = ({"n_ctx": 1024, "devices": ["none"]}, {"gpus": ["rtx-4090"]})


@cases({f"{topic}: {name}": tuple(row) for topic, rows in ROWS.items() for name, row in rows.items()})
def test_what_is_refused_is_one_line(
    words: str, status: int, said: str, folder: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PATH", str(folder))
    before = {path.name: path.lstat().st_mtime_ns for path in folder.iterdir()}
    code, out, err = command(*shlex.split(words))
    start = "fitter: " if status == 1 else "fitter: error: "
    pattern = ".*".join(map(re.escape, f"{start}{said}".split("…")))
    assert (code, out) == (status, ""), err
    assert re.fullmatch(f"{pattern}\n", err), err
    assert {path.name: path.lstat().st_mtime_ns for path in folder.iterdir()} == before


KEPT_OFF = (
    "-ot 'exps=CUDA1' puts blk.0.ffn_gate_exps.weight on CUDA1, and -dev, -sm none or -mg keeps the model off that "
    "device: choose another buffer type, or let the model use the device"
)
SEQUENCES = "{} is 3, and 4 sequences (-np) need a token each: give 4 or more, or fewer sequences"


@named_cases(
    ("left out by name", {"override_tensor": "exps=CUDA1", "devices": "CUDA0"}, KEPT_OFF),
    ("left out by the split mode", {"override_tensor": "exps=CUDA1", "split_mode": "none"}, KEPT_OFF),
    ("a batch without a token for each", {"n_seq_max": 4, "n_batch": 3}, SEQUENCES.format("n_batch (-b)")),
    ("an output for each is missing", {"n_seq_max": 4, "n_outputs_max": 3}, SEQUENCES.format("n_outputs_max")),
)
def test_what_llama_cpp_would_end_its_process_for_is_not_asked(words: dict[str, Any], said: str, tiny: Path) -> None:
    for call in (measure, estimate):
        if call is measure or "n_outputs_max" not in words:
            with refused(UsageError, said):
                call(tiny, gpus="2x 24GiB", **words)
    assert measure(tiny, gpus="2x 24GiB", override_tensor="exps=CUDA1,nothing=CUDA0", devices="CUDA1").rows


def test_a_smallest_context_has_a_token_for_each_sequence(tiny: Path) -> None:
    plan = fit(tiny, gpus="24GiB", margin=0, fit_ctx=1, n_seq_max=256, kv_unified=True, objective="generation")
    assert plan.fits and plan.params.n_ctx >= 256


HUGE = str(2**70)
ENDLESS = "9" * 5000
DIGITS = f"'{'9' * 36}... has too many digits (see fitter fit --help)"

TOO_MUCH: dict[str, tuple[list[str], str]] = {
    "a context beyond 64 bits": (["-c", HUGE], f"n_ctx (-c) is {HUGE}: give 0 to 2147483647"),
    "a context without end": (["-c", ENDLESS], f"Invalid value for '-c' / '--ctx-size': {DIGITS}"),
    "layers": (["-ngl", ENDLESS], f"Invalid value for '-ngl' / '--n-gpu-layers' / '--gpu-layers': {DIGITS}"),
    "seventeen shares": (
        ["-ts", ",".join("1" * 17)],
        "tensor_split (-ts) has 17 shares: llama.cpp has room for 16 devices",
    ),
    "a margin without end": (["-fitt", ENDLESS], f"Invalid value for '-fitt' / '--fit-target': {DIGITS}"),
    "a time": (["--timeout", "inf"], "a timeout of inf seconds is too long: give 1e+06 or less"),
    "a scale": (
        ["--lora-scaled", "a.gguf:1e308"],
        "'a.gguf:1e308' is not a scaled adapter: write FILE:SCALE, such as style.gguf:0.5",
    ),
    "a pattern": (["-ot", "a" * 10000 + "=CPU"], "the tensor overrides (-ot) have 10000 characters: give 8192 at most"),
    "GPUs": (
        ["--gpu", "99999999x 24GiB"],
        "--gpu '99999999x 24GiB': '99999999x 24GiB' is not a size: "
        "write a number and a unit, such as 24GiB or 24564MiB",
    ),
}


@cases(TOO_MUCH)
def test_more_than_there_can_be(words: list[str], said: str, tiny: Path) -> None:
    done = bounded(str(tiny), "--gpu", "24GiB", *words)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"fitter: error: {said}\n")


def bounded(*words: str) -> subprocess.CompletedProcess[str]:
    """``fitter`` with a memory of 4 GiB, what it maps included, so that what goes wrong does no harm."""
    command = ["prlimit", f"--as={4 << 30}", sys.executable, "-m", "fitter", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@cases(("-ncmoe", "4", HUGE), ("-ngl", "5", HUGE), ("-fitc", "16384", "2147483647"))
def test_more_layers_than_there_are_are_all_of_them(option: str, most: str, more: str, tiny: Path) -> None:
    expected = bounded(str(tiny), "--gpu", "24GiB", option, most)
    done = bounded(str(tiny), "--gpu", "24GiB", option, more)
    assert done.returncode == expected.returncode == 0, done.stderr
    assert done.stdout == expected.stdout


def test_a_model_that_fits_nowhere(tmp_path: Path, command: Command) -> None:
    path = shapes.write("llama-3.1-70b", tmp_path, vocab=False)
    status, out, err = command(path, "--gpu", "8GiB", "--host-memory", "16GiB")
    assert (status, out) == (1, "")
    problems = [line for line in err.splitlines() if line.startswith("fitter: does not fit: ")]
    assert any("the host lacks " in problem for problem in problems)
    assert all(" MiB" in problem for problem in problems)
    assert err.endswith(problems[-1] + "\n")


def test_the_name_of_a_model_may_hold_anything(tmp_path: Path) -> None:
    odd = tmp_path / os.fsdecode(b"mod\xff\n el.gguf")
    done = run_fitter(str(odd))
    said = f"fitter: error: {str(odd)!r}: no such file; check the path of the model\n"
    assert (done.returncode, done.stdout, done.stderr) == (3, "", said)
    write_tiny(odd)
    done = run_fitter(str(odd), "--json")
    assert done.returncode == 0, done.stderr
    assert "\\udcff" in done.stdout
