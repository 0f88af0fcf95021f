"""Layouts of weights that only the processor here has: not on a described machine, nor where llama.cpp crashes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fitter.llama.build import verdicts
from fitter.llama.build.build_folder import find
from fitter.llama.build.library import own_libraries
from fitter.llama.build.verdicts import answers_folder
from fitter.llama.load.canary import DENSE, write
from fitter.llama.types import VirtualDevice, describe
from tests.support.cases import cases
from tests.support.command import json_of_python
from tools.models.tiny import TINY_DENSE, write_tiny

CRASHED = "it ended with signal 11 when a small model was loaded"

# A processor with AMX: ggml's CPU buffer type under that name, which llama.cpp then prefers to CPU_REPACK.
WITH_AMX = """
import ctypes, json, sys
from fitter.llama.build import library as native
from fitter.llama.load import backend_devices
from fitter.llama.processes import interpreter
from fitter.llama.load.backend_devices import registry
from fitter.llama.load.loader import Loader
from fitter.llama.types import Params

interpreter.become_worker()
native.prepare()
ggml = native.libraries().llama.library
LIST, NAME = b"ggml_backend_dev_get_extra_bufts", ctypes.CFUNCTYPE(ctypes.c_char_p, ctypes.c_void_p)
LOOK_UP = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)
OFFER = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)

def function(name, result, *arguments):
    found = getattr(ggml, name)
    found.restype, found.argtypes = result, arguments
    return found

cpu = function("ggml_backend_dev_by_type", ctypes.c_void_p, ctypes.c_int)(0)
registration = function("ggml_backend_dev_backend_reg", ctypes.c_void_p, ctypes.c_void_p)(cpu)
plain = function("ggml_backend_cpu_buffer_type", ctypes.c_void_p)()
look_up = (ctypes.c_void_p * 6).from_address(registration)
own = LOOK_UP(look_up[4])
amx = (ctypes.c_void_p * 8)(*(ctypes.c_void_p * 8).from_address(plain))
name = NAME(lambda _: b"AMX")
amx[0] = ctypes.cast(name, ctypes.c_void_p).value
types = [ctypes.addressof(amx)]
if (offered := own(registration, LIST)) and (pointer := OFFER(offered)(cpu)):
    every = ctypes.cast(pointer, ctypes.POINTER(ctypes.c_void_p))
    while every[len(types) - 1]:
        types.append(every[len(types) - 1])
array = (ctypes.c_void_p * (len(types) + 1))(*types, None)
offer = OFFER(lambda _: ctypes.addressof(array))
other = LOOK_UP(lambda asked, name: ctypes.cast(offer, ctypes.c_void_p).value if name == LIST else own(asked, name))
look_up[4] = ctypes.cast(other, ctypes.c_void_p).value

backend = native.open_backend()
assert backend.fitter_virtual_has_own_layouts()

def has_amx():
    loader = Loader(registry())
    try:
        found = loader.measure(sys.argv[1], Params(n_ctx=256, devices=(), n_gpu_layers=0))
    finally:
        loader.close()
    return "AMX" in {row.buffer_type for row in found.rows}

said = []
"""


def run(code: str, model: Path, cache: Path) -> Any:
    return json_of_python(f"{WITH_AMX}{code}\nprint(json.dumps(said))", model, XDG_CACHE_HOME=str(cache))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("models"), DENSE)


def test_only_this_machine_has_them(model: Path, tmp_path: Path) -> None:
    described = "; ".join(
        f"backend.fitter_virtual_host_is_described({is_described}); said.append(has_amx())"
        for is_described in (True, False)
    )
    assert run(f"said.append(has_amx()); {described}", model, tmp_path) == [True, False, True]


@cases(("", False), (CRASHED, True))
def test_what_crashes_is_left_out(
    problem: str, is_left_out: bool, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    kept_verdict(problem)
    code = (
        "said += [backend_devices.settle_host_layouts(), has_amx()]; backend.fitter_virtual_host_is_described(False); "
    )
    assert run(code + "said.append(has_amx())", model, tmp_path) == [is_left_out, not is_left_out, not is_left_out]


def kept_verdict(problem: str) -> None:
    """Have it be known already how this build computes."""
    build = find(os.environ.get("FITTER_LLAMA_CPP", "python"))
    assert verdicts.problem_of_computing(build, own_libraries()) == ""
    (file,) = answers_folder().glob("computing-*.json")
    file.write_text(json.dumps({"problem": problem}))


@cases(("", True), (CRASHED, False))
def test_a_worker_has_them_where_it_is_asked_about_this_machine(
    problem: str, is_there: bool, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    kept_verdict(problem)
    mac = describe([VirtualDevice("MTL0", "Apple M3 Max", "metal", 0, 2**36, 2**36)])
    code = f"""
from fitter.llama.worker.worker import Commands

session = Commands()
for description in ({mac!r}, "", {mac!r}):
    session.configure(description)
    rows = session.measure(sys.argv[1], Params(n_ctx=256, devices=(), n_gpu_layers=0), "own", False).rows
    said.append("AMX" in {{row.buffer_type for row in rows}})
"""
    assert run(code, model, tmp_path) == [False, is_there, False]


@cases(("", False), (CRASHED, True))
def test_a_model_is_loaded_without_what_crashes(
    problem: str, is_warned: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    kept_verdict(problem)
    code = """
import warnings
import fitter

with warnings.catch_warnings(record=True) as warned:
    warnings.simplefilter("always")
    llm = fitter.Llama(sys.argv[1], n_ctx=256, gpus=None, verbose=False)
said += [any("crashes where it computes with AMX" in str(each.message) for each in warned)]
said += [has_amx()]
"""
    tiny = write_tiny(tmp_path / "tiny.gguf", TINY_DENSE)
    assert run(code, tiny, tmp_path) == [is_warned, not is_warned]


def test_what_cannot_be_tried_is_not_left_out(model: Path, tmp_path: Path) -> None:
    code = """
from fitter.errors import LibraryError
from fitter.llama.build import verdicts

def refuse(*_):
    raise LibraryError("not now")

verdicts.problem_of_computing = refuse
said += [backend_devices.settle_host_layouts(), has_amx()]
"""
    assert run(code, model, tmp_path) == [False, True]


def test_it_is_tried_with_a_real_load() -> None:
    code = """
import os
from fitter.llama.load import canary

class Loaded(canary.RealLoad):
    def __init__(self, *arguments):
        super().__init__(*arguments)
        os.abort()

canary.RealLoad = Loaded
canary.compute()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=120, check=False)
    assert done.returncode == -signal.SIGABRT
