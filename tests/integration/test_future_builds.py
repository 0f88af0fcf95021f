"""Builds of llama.cpp that are newer than every known one: they are refused, or taken and right."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from fitter.llama.build import layouts
from fitter.llama.build.inspect_build import CHECKS, check_build
from fitter.llama.build.layouts import UNKNOWN
from tests.support.cases import cases, named_cases
from tests.support.future_builds import Field, write_future_build
from tests.support.llama_builds import LAYOUTS, NEWEST, where
from tools.models.tiny import write_tiny

MODEL, CONTEXT = layouts.STRUCTS

REFUSED = {
    "a flag like those beside it": (
        Field(CONTEXT, "op_offload", "bool", "01"),
        "its parameters are laid out as in no version that fitter knows",
    ),
    "what defaults cannot tell: main_gpu": (Field(MODEL, "main_gpu", "int32_t", "00"), "bytes of CUDA0 instead of"),
    "what defaults cannot tell: kv_unified": (
        Field(CONTEXT, "kv_unified", "bool", "00"),
        "one of two devices: the KV cache take",
    ),
    "what defaults cannot tell: no_alloc": (
        Field(MODEL, "no_alloc", "bool", "00"),
        "a load that should allocate nothing takes real memory",
    ),
}


def future(directory: Path, *fields: Field) -> str:
    """The newest build with further fields."""
    return str(write_future_build(directory, Path(where(NEWEST)), layouts.layouts()[LAYOUTS[NEWEST]], fields))


def fit(model: Path, build: str) -> tuple[int, str, str]:
    words = ["-m", "fitter", str(model), "--gpu", "24MiB", "--gpu", "8GiB", "--llama-cpp", build, "--json"]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=120, check=False)
    return done.returncode, done.stdout, done.stderr


@named_cases(
    (
        "a field in the middle of each struct",
        (Field(MODEL, "tensor_split", "int32_t", "07"), Field(CONTEXT, "n_threads", "size_t", "2a")),
    ),
    (
        "two fields of one struct",
        (Field(CONTEXT, "n_batch", "int32_t", "07"), Field(CONTEXT, "embeddings", "bool", "01")),
    ),
)
def test_a_build_that_is_taken_is_right(fields: tuple[Field, ...], tmp_path: Path) -> None:
    build, model = future(tmp_path / "future", *fields), write_tiny(tmp_path / "moe.gguf")
    found = check_build(build)
    assert (found.problem, found.layout, found.checks) == ("", UNKNOWN, CHECKS)
    plans = []
    for each in (build, where(NEWEST)):
        status, printed, said = fit(model, each)
        assert status == 0, said
        plan = json.loads(printed)
        plans.append({key: plan[key] for key in ("params", "devices", "host", "fits")})
    assert plans[0] == plans[1]


@cases(REFUSED)
def test_a_build_that_is_refused(field: Field, why: str, tmp_path: Path) -> None:
    build, model = future(tmp_path / "future", field), write_tiny(tmp_path / "moe.gguf")
    status, printed, said = fit(model, build)
    assert (status, printed) == (3, "")
    (line,) = said.splitlines()
    assert f"{build}/libllama.so" in line
    assert why in line
