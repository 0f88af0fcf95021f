"""Whatever is wrong is one line on stderr and the right exit status: no traceback, no half-written output."""

from __future__ import annotations

import os
import shlex
import struct
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fitter import UsageError, estimate, fit, measure
from fitter.cli import main
from tests.support.cases import cases, named_cases
from tests.support.command import run_fitter
from tools.models import shapes
from tools.models.tiny import write_tiny

DENSE = shapes.SHAPES["llama-3.1-8b"]


def assert_one_line(done: subprocess.CompletedProcess[str], status: int, said: str) -> None:
    """All of what is said, since a word alone may be there for another reason."""
    assert (done.returncode, done.stdout, done.stderr) == (status, "", f"fitter: error: {said}\n")


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


def of_a_fork(path: Path) -> None:
    _with_type(path, 139)


def given_up(path: Path) -> None:
    _with_type(path, 31)


def no_type(path: Path) -> None:
    _with_type(path, 1000)


def _with_type(path: Path, number: int) -> None:
    write_tiny(path)
    data = bytearray(path.read_bytes())
    # after its name and two dimensions
    struct.pack_into("<I", data, data.index(b"token_embd.weight") + len("token_embd.weight") + 4 + 16, number)
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("write", "said"),
    [
        (missing, "{}: no such file; check the path of the model"),
        (empty, "{} is empty; download the model again"),
        (text, "{} is not a GGUF file; convert the model with llama.cpp's convert_hf_to_gguf.py"),
        (directory, "{} is a directory; give the GGUF file (there is no GGUF file in it)"),
        (fifo, "{} is not a regular file; give a GGUF file"),
        (loop, "{} cannot be read: Too many levels of symbolic links"),
        (cut_magic, "{} is truncated after 6 bytes; download the model again"),
        (cut_header, "{}: its header is truncated or damaged; download the model again"),
        (cut_tensors, "{} is truncated: the last 1600320 bytes of its tensors are missing; download it again"),
        (
            of_a_fork,
            "{} has tensors of type 139, which this llama.cpp does not have: use a newer one (--llama-cpp), or another "
            "file if this one was made for a fork such as ik_llama.cpp",
        ),
        (
            given_up,
            "{} has tensors of a type that llama.cpp has given up (TYPE_Q4_0_4_4 REMOVED, use Q4_0 with runtime "
            "repacking): take another file of the model, such as Q4_0",
        ),
        (no_type, "{}: its header is truncated or damaged; download the model again"),
        (unknown_architecture, "{}: unknown model architecture: 'perceptron'"),
        (vocabulary_only, "{} has no tensors, only a vocabulary; give the file with the weights"),
        (missing_tensors, "{}: check_tensor_dims: tensor 'blk.31.ffn_gate.weight' not found"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_models_that_cannot_be_read(tmp_path: Path, write: Callable[[Path], None], said: str) -> None:
    path = tmp_path / "model.gguf"
    write(path)
    assert_one_line(run_fitter("fit", str(path)), 3, said.format(path))


def test_a_missing_split_file_is_named(tmp_path: Path) -> None:
    path = shapes.write_split("llama-3.1-8b", tmp_path, 3, vocab=False)
    others = sorted(file for file in tmp_path.iterdir() if file != path)
    assert len(others) == 2
    others[0].unlink()
    assert_one_line(
        run_fitter(str(path)), 3, f"{path}: 1 of 3 split files are missing, download them: {others[0].name}"
    )


SPECS = (
    "name a GPU (rtx-4090), a size (24GiB), cuda:8.9:24GiB, rocm:gfx1100:24GiB, vulkan:24GiB, metal:64GiB, or none for "
    "a machine without a GPU; fitter devices --catalogue lists the names"
)
LEVERS = "the levers are no-op-offload, moe-cache, kv-q8_0, kv-q4_0, context, paging"

KEPT_OFF = (
    "-ot 'exps={0}' puts blk.0.ffn_gate_exps.weight on {0}, and -dev, -sm none or -mg keeps the model off that device: "
    "choose another buffer type, or let the model use the device"
)
SEQUENCES = "{} is {}, and 4 sequences (-np) need a token each: give 4 or more, or fewer sequences"
INVALID = "Invalid value for {} (see fitter fit --help)"

NO_SENSE: dict[str, str] = {
    "-c -1": INVALID.format("'-c' / '--ctx-size': -1 is too small; the smallest is 0"),
    "--gpu nonsense": f"--gpu 'nonsense': unknown GPU: {SPECS}",
    "--gpu ''": f"--gpu '': no GPU: {SPECS}",
    "--gpu rtx-4091": "--gpu 'rtx-4091': unknown GPU; did you mean rtx-4090 or rtx-4090-d or rtx-5090?",
    "--gpu 24": "--gpu '24': '24' has no unit: write 24MiB or 24GiB",
    "--gpu cuda:8.9": ("--gpu 'cuda:8.9': write profile, compute capability and memory, such as cuda:8.9:24GiB"),
    "--gpu voodoo:1:24GiB": (
        "--gpu 'voodoo:1:24GiB': unknown profile 'voodoo'; the profiles are cuda, rocm, vulkan, metal"
    ),
    "--gpu vulkan:1:24GiB": (
        "--gpu 'vulkan:1:24GiB': unknown Vulkan driver '1'; the drivers are radv, anv, nvidia, lavapipe"
    ),
    "--gpu '17x 24GiB'": "--gpu '17x 24GiB': llama.cpp has room for 16 devices at most",
    "--gpu '9x 24GiB' --gpu '8x 24GiB'": "--gpu '8x 24GiB': llama.cpp has room for 16 devices at most",
    "--gpu 24GiB -fitt 1,2": "2 margins for 1 devices: give one for all, or one per device",
    "--gpu 24GiB -dev CUDA1": "unknown device 'CUDA1'; there are: CUDA0",
    "--gpu 24GiB -ot '(=CPU'": (
        "pattern '(' is not a valid regular expression: Mismatched '(' and ')' in regular expression"
    ),
    "--gpu 24GiB -ot exps": "tensor override 'exps' is not of the form <name pattern>=<buffer type>",
    "--gpu 24GiB -ot exps=CUDA1": "unknown buffer type 'CUDA1'; there are: CUDA0, CPU",
    "--gpu '2x 24GiB' -ot exps=CUDA1 -dev CUDA0": KEPT_OFF.format("CUDA1"),
    "--gpu '2x 24GiB' -ot exps=CUDA0 -sm none -mg 1": KEPT_OFF.format("CUDA0"),
    "--gpu '2x 24GiB' -ot exps=CUDA1 -dev none": KEPT_OFF.format("CUDA1"),
    "--gpu 24GiB -c 3 -np 4": SEQUENCES.format("n_ctx (-c)", 3),
    "--gpu 24GiB -b 1 -np 4": SEQUENCES.format("n_batch (-b)", 1),
    "--gpu 24GiB --embedding --mtp": (
        "--embedding is for texts that are only read, and --mtp drafts tokens: leave one of them out"
    ),
    "--gpu 24GiB -sm row": (
        "split mode 'row' cannot be fitted: llama.cpp's programs list it, but its CUDA, ROCm, Vulkan and Metal "
        "backends load no model with it. Use 'tensor', which splits every tensor over all devices, or 'layer'"
    ),
    "--gpu 24GiB -sm none -mg 1": "main GPU 1 does not exist: the number of devices is 1, counted from 0",
    "--gpu 24GiB -ts -1,1": "tensor_split (-ts) has a share below 0: give each device a share of 0 or more",
    "--host-memory many": (
        "host_memory (--host-memory): 'many' is not a size: write a number and a unit, such as 24GiB or 24564MiB"
    ),
    "--host-memory 0GiB": "--host-memory is 0 bytes: give more than 0",
    "--allow everything": f"unknown lever 'everything': {LEVERS}",
    "--allow ubatch,kv-q8": f"unknown lever 'kv-q8': did you mean kv-q8_0 or kv-q4_0? {LEVERS.capitalize()}",
    "--allow ubatch,": f"unknown lever '': {LEVERS}",
    "--fit-ctx 0": INVALID.format("'-fitc' / '--fit-ctx': 0 is too small; the smallest is 1"),
    "--prompt 0": INVALID.format("'--prompt': 0 is too small; the smallest is 1"),
}


@pytest.mark.parametrize("words", NO_SENSE)
def test_words_that_make_no_sense(tiny: Path, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    status = main([str(tiny), *shlex.split(words)])
    said = capsys.readouterr()
    assert (status, said.out, said.err) == (2, "", f"fitter: error: {NO_SENSE[words]}\n")


@named_cases(
    ("left out by name", {"override_tensor": "exps=CUDA1", "devices": "CUDA0"}, KEPT_OFF.format("CUDA1")),
    ("left out by the split mode", {"override_tensor": "exps=CUDA1", "split_mode": "none"}, KEPT_OFF.format("CUDA1")),
    ("a batch without a token for each sequence", {"n_seq_max": 4, "n_batch": 3}, SEQUENCES.format("n_batch (-b)", 3)),
    (
        "an output for each sequence is missing",
        {"n_seq_max": 4, "n_outputs_max": 3},
        SEQUENCES.format("n_outputs_max", 3),
    ),
)
def test_what_llama_cpp_would_end_its_process_for_is_not_asked(words: dict[str, Any], said: str, tiny: Path) -> None:
    for call in (measure, estimate):
        if call is measure or "n_outputs_max" not in words:
            with pytest.raises(UsageError) as caught:
                call(tiny, gpus="2x 24GiB", **words)
            assert str(caught.value) == said
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


def test_what_llama_cpp_refuses(tiny: Path) -> None:
    done = run_fitter(str(tiny), "-ctv", "q8_0", "-fa", "off")
    assert_one_line(done, 3, f"{tiny}: quantized V cache requires flash_attn to be enabled")


def test_a_model_that_fits_nowhere(tmp_path: Path) -> None:
    path = shapes.write("llama-3.1-70b", tmp_path, vocab=False)
    done = run_fitter(str(path), "--gpu", "8GiB", "--host-memory", "16GiB")
    assert done.returncode == 1
    assert done.stdout == ""
    problems = [line for line in done.stderr.splitlines() if line.startswith("fitter: does not fit: ")]
    assert any("the host lacks " in problem for problem in problems)
    assert all(" MiB" in problem for problem in problems)
    assert done.stderr.endswith(problems[-1] + "\n")


def test_the_name_of_a_model_may_hold_anything(tmp_path: Path) -> None:
    odd = tmp_path / os.fsdecode(b"mod\xff\n el.gguf")
    assert_one_line(run_fitter(str(odd)), 3, f"{str(odd)!r}: no such file; check the path of the model")
    write_tiny(odd)
    done = run_fitter(str(odd), "--json")
    assert done.returncode == 0, done.stderr
    assert "\\udcff" in done.stdout
