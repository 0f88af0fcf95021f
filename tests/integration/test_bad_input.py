"""Whatever is wrong is one line on stderr and the right exit status: no traceback, no half-written output."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fitter import UsageError, estimate, fit, measure
from tools import shapes
from tools.tiny import write_tiny

DENSE = shapes.SHAPES["llama-3.1-8b"]


def fitter(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "fitter", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def assert_one_line(done: subprocess.CompletedProcess[str], status: int, *parts: str) -> None:
    assert done.returncode == status, done.stderr
    assert done.stdout == ""
    assert done.stderr.startswith("fitter: error: "), done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    for part in parts:
        assert part in done.stderr


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("tiny") / "tiny.gguf")


def missing(path: Path) -> None:
    pass


def empty(path: Path) -> None:
    path.touch()


def text(path: Path) -> None:
    path.write_text("no model at all\n")


def directory(path: Path) -> None:
    path.mkdir()


def fifo(path: Path) -> None:
    os.mkfifo(path)


def loop(path: Path) -> None:
    """A file that nobody can read, root included."""
    path.symlink_to(path.name)


def cut_magic(path: Path) -> None:
    _cut(path, 6)


def cut_header(path: Path) -> None:
    _cut(path, 3000)


def cut_tensors(path: Path) -> None:
    _cut(path, 200_000)


def _cut(path: Path, size: int) -> None:
    write_tiny(path)
    os.truncate(path, size)


def unknown_architecture(path: Path) -> None:
    shapes.write_shape(replace(DENSE, architecture="perceptron"), path)


def vocabulary_only(path: Path) -> None:
    shapes.write_shape(replace(DENSE, tensors=()), path)


def missing_tensors(path: Path) -> None:
    shapes.write_shape(replace(DENSE, tensors=DENSE.tensors[:-3]), path, vocab=False)


@pytest.mark.parametrize("command", ["fit", "inspect"])
@pytest.mark.parametrize(
    ("write", "said"),
    [
        (missing, "no such file"),
        (empty, "is empty"),
        (text, "is not a GGUF file"),
        (directory, "is a directory"),
        (fifo, "is not a regular file"),
        (loop, "cannot be read"),
        (cut_magic, "truncated"),
        (cut_header, "truncated"),
        (cut_tensors, "bytes of its tensors are missing"),
        (unknown_architecture, "perceptron"),
        (vocabulary_only, "no tensors"),
        (missing_tensors, "tensor 'blk.31.ffn_gate.weight' not found"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_models_that_cannot_be_read(tmp_path: Path, command: str, write: Callable[[Path], None], said: str) -> None:
    path = tmp_path / "model.gguf"
    write(path)
    assert_one_line(fitter(command, str(path)), 3, str(path), said)


def test_a_missing_split_file_is_named(tmp_path: Path) -> None:
    path = shapes.write_split("llama-3.1-8b", tmp_path, 3, vocab=False)
    others = sorted(file for file in tmp_path.iterdir() if file != path)
    assert len(others) == 2
    others[0].unlink()
    assert_one_line(fitter(str(path)), 3, "1 of 3 split files are missing", others[0].name)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["-c", "-1"], "-c"),
        (["--gpu", "nonsense"], "unknown GPU"),
        (["--gpu", ""], "--gpu"),
        (["--gpu", "rtx-4091"], "rtx-4090"),
        (["--gpu", "24"], "no unit"),
        (["--gpu", "cuda:8.9"], "cuda:8.9"),
        (["--gpu", "voodoo:1:24GiB"], "unknown profile"),
        (["--gpu", "vulkan:1:24GiB"], "unknown Vulkan driver"),
        (["--gpu", "17x 24GiB"], "16"),
        (["--gpu", "9x 24GiB", "--gpu", "8x 24GiB"], "16"),
        (["--gpu", "24GiB", "-fitt", "24577", "-ngl", "1"], "24577 MiB of CUDA0 with 24576 MiB"),
        (["--gpu", "24GiB", "-fitt", "24577", "--host-memory", "1025MiB"], "the host lacks "),
        (["--gpu", "24GiB", "-fitt", "1,2"], "2 margins"),
        (["--gpu", "24GiB", "-dev", "CUDA1"], "unknown device 'CUDA1'; there are: CUDA0"),
        (["--gpu", "24GiB", "-ot", "(=CPU"], "'(' is not a valid regular expression"),
        (["--gpu", "24GiB", "-ot", "exps"], "'exps'"),
        (["--gpu", "24GiB", "-ot", "exps=CUDA1"], "unknown buffer type 'CUDA1'"),
        (["--gpu", "2x 24GiB", "-ot", "exps=CUDA1", "-dev", "CUDA0"], "puts blk.0.ffn_gate_exps.weight on CUDA1, and"),
        (["--gpu", "2x 24GiB", "-ot", "exps=CUDA0", "-sm", "none", "-mg", "1"], "-sm none or -mg keeps the model off"),
        (["--gpu", "2x 24GiB", "-ot", "exps=CUDA1", "-dev", "none"], "keeps the model off that device"),
        (["--gpu", "24GiB", "-c", "3", "-np", "4"], "n_ctx (-c) is 3, and 4 sequences (-np) need a token each"),
        (["--gpu", "24GiB", "-b", "1", "-np", "4"], "n_batch (-b) is 1, and 4 sequences"),
        (["--gpu", "24GiB", "--embedding", "--mtp"], "--mtp drafts tokens: leave one of them out"),
        (["--gpu", "24GiB", "-sm", "row"], "'row'"),
        (["--gpu", "24GiB", "-sm", "none", "-mg", "1"], "main GPU 1"),
        (["--gpu", "24GiB", "-ts", "-1,1"], "below 0"),
        (["--host-memory", "many"], "'many' is not a size"),
        (["--host-memory", "0GiB"], "--host-memory is 0 bytes"),
        (["--allow", "everything"], "paging"),
        (["--allow", "ubatch,kv-q8"], "unknown lever 'kv-q8': did you mean kv-q8_0"),
        (["--allow", "ubatch,"], "unknown lever ''"),
        (["--fit-ctx", "0"], "--fit-ctx"),
        (["--prompt", "0"], "--prompt"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_words_that_make_no_sense(tiny: Path, words: list[str], said: str) -> None:
    assert_one_line(fitter(str(tiny), *words), 2, said)


@pytest.mark.parametrize(
    "words",
    [
        pytest.param({"override_tensor": "exps=CUDA1", "devices": "CUDA0"}, id="left-out-by-name"),
        pytest.param({"override_tensor": "exps=CUDA1", "split_mode": "none"}, id="left-out-by-the-split-mode"),
        pytest.param({"n_seq_max": 4, "n_batch": 3}, id="a-batch-without-a-token-for-each-sequence"),
        pytest.param({"n_seq_max": 4, "n_outputs_max": 3}, id="an-output-for-each-sequence-is-missing"),
    ],
)
def test_what_llama_cpp_would_end_its_process_for_is_not_asked(tiny: Path, words: dict[str, Any]) -> None:
    for call in (measure, estimate):
        if call is measure or "n_outputs_max" not in words:
            with pytest.raises(UsageError):
                call(tiny, gpus="2x 24GiB", **words)
    assert measure(tiny, gpus="2x 24GiB", override_tensor="exps=CUDA1,nothing=CUDA0", devices="CUDA1").rows


def test_a_smallest_context_has_a_token_for_each_sequence(tiny: Path) -> None:
    plan = fit(tiny, gpus="24GiB", margin=0, fit_ctx=1, n_seq_max=256, kv_unified=True, objective="generation")
    assert plan.fits and plan.params.n_ctx >= 256


HUGE = str(2**70)
ENDLESS = "9" * 5000


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["-c", "4194305"], ["n_ctx (-c) is 4194305", "4194304 at most", "trained for 16384"]),
        (["-c", str(2**31)], ["-c", str(2**31), "0 to 2147483647"]),
        (["-c", HUGE], ["-c", HUGE, "0 to 2147483647"]),
        (["-c", ENDLESS], ["-c", "has too many digits"]),
        (["-np", "257"], ["-np", "is 257", "1 to 256"]),
        (["-b", HUGE], ["-b", HUGE, "1 to 4194304"]),
        (["-ub", str(2**40)], ["-ub", str(2**40), "1 to 4194304"]),
        (["-ngl", ENDLESS], ["-ngl", "has too many digits"]),
        (["-ncmoe", ENDLESS], ["-ncmoe", "has too many digits"]),
        (["-mg", HUGE], ["-mg", HUGE, "-1 to 15"]),
        (["-fitc", HUGE], ["-fitc", HUGE, "1 to 2147483647"]),
        (["--prompt", HUGE], ["--prompt", HUGE, "1 to 2147483647"]),
        (["--generate", ENDLESS], ["--generate", "has too many digits"]),
        (["--mtp", "--spec-draft-n-max", "65"], ["--spec-draft-n-max", "is 65", "1 to 64"]),
        (["--image-max-tokens", HUGE], ["--image-max-tokens", HUGE, "1 to 16384"]),
        (["-ts", "inf,1"], ["-ts", "a share of inf"]),
        (["-ts", "1e308,1e308"], ["-ts", "1e+308"]),
        (["-ts", ",".join("1" * 17)], ["-ts", "17 shares", "16 devices"]),
        (["-fitt", HUGE], ["-fitt", HUGE, "1099511627776 MiB at most"]),
        (["-fitt", ENDLESS], ["-fitt", "has too many digits"]),
        (["--host-margin", HUGE], ["--host-margin", HUGE, "1099511627776 MiB at most"]),
        (["--timeout", "inf"], ["timeout of inf seconds is too long"]),
        (["--lora-scaled", "a.gguf:1e308"], ["'a.gguf:1e308' is not a scaled adapter"]),
        (["-ot", "a" * 10000 + "=CPU"], ["-ot", "10000 characters", "8192 at most"]),
        (["--gpu", "99999999x 24GiB"], ["--gpu", "is not a size"]),
    ],
    ids=lambda value: " ".join(value)[:30] if isinstance(value, list) else "",
)
def test_more_than_there_can_be(tiny: Path, words: list[str], parts: list[str]) -> None:
    done = bounded(str(tiny), "--gpu", "24GiB", *words)
    assert_one_line(done, 2, *parts)
    assert len(done.stderr) < 300


def bounded(*words: str) -> subprocess.CompletedProcess[str]:
    """``fitter`` with a memory of 4 GiB, what it maps included, so that what goes wrong does no harm."""
    command = ["prlimit", f"--as={4 << 30}", sys.executable, "-m", "fitter", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize(
    ("option", "most", "more"),
    [
        ("-ncmoe", "4", "5"),
        ("-ncmoe", "4", "999"),
        ("-ncmoe", "4", "10000000"),
        ("-ncmoe", "4", HUGE),
        ("-ngl", "5", HUGE),
        ("-fitc", "16384", "2147483647"),
    ],
)
def test_more_layers_than_there_are_are_all_of_them(tiny: Path, option: str, most: str, more: str) -> None:
    expected = bounded(str(tiny), "--gpu", "24GiB", option, most)
    done = bounded(str(tiny), "--gpu", "24GiB", option, more)
    assert done.returncode == expected.returncode == 0, done.stderr
    assert done.stdout == expected.stdout


@pytest.mark.parametrize("words", [["-ctv", "q8_0", "-fa", "off"]], ids=" ".join)
def test_what_llama_cpp_refuses(tiny: Path, words: list[str]) -> None:
    done = fitter(str(tiny), *words)
    assert done.returncode in (2, 3)
    assert_one_line(done, done.returncode)


def test_a_model_that_fits_nowhere(tmp_path: Path) -> None:
    path = shapes.write("llama-3.1-70b", tmp_path, vocab=False)
    done = fitter(str(path), "--gpu", "8GiB", "--host-memory", "16GiB")
    assert done.returncode == 1
    assert done.stdout == ""
    problems = [line for line in done.stderr.splitlines() if line.startswith("fitter: does not fit: ")]
    assert any("the host lacks " in problem for problem in problems)
    assert all(" MiB" in problem for problem in problems)
    assert done.stderr.endswith(problems[-1] + "\n")


@pytest.mark.parametrize(("mib", "status"), [(24576, 1), (24577, 2)])
def test_a_margin_beyond_the_only_device_is_no_matter_of_fitting(tiny: Path, mib: int, status: int) -> None:
    assert fitter(str(tiny), "--gpu", "24GiB", "-ngl", "1", "-fitt", str(mib)).returncode == status


def test_the_name_of_a_model_may_hold_anything(tmp_path: Path) -> None:
    odd = tmp_path / os.fsdecode(b"mod\xff\n el.gguf")
    assert_one_line(fitter(str(odd)), 3, "no such file")
    write_tiny(odd)
    done = fitter(str(odd), "--json")
    assert done.returncode == 0, done.stderr
    assert "\\udcff" in done.stdout
