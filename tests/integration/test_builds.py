"""The native library checks the facts that it is told of a build of llama.cpp, and reads operations by their names."""

from __future__ import annotations

import ctypes
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from fitter.llama.build import library as native
from fitter.llama.build.functions import backend_rules
from fitter.llama.build.inspect_build import CHECKS, check_build
from fitter.llama.build.layouts import STRUCTS, UNKNOWN, layouts, structs_of
from tests.support.cases import cases, named_cases
from tests.support.command import json_of_python
from tests.support.future_builds import Field, write_future_build
from tests.support.llama_builds import LAYOUTS, NEWEST, where
from tools.models.tiny import TINY_DENSE, TINY_MOE, write_tiny

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "vendor/llama.cpp/source"


def operations() -> list[str]:
    """The names of ggml.h's operations."""
    text = (SOURCE / "ggml/include/ggml.h").read_text(encoding="utf-8")
    return re.findall(r"GGML_OP_([A-Z0-9_]+)", text.partition("enum ggml_op {")[2].partition("}")[0])[:-1]


def configure(n_ops: int, last_op: str, has_params: int = 1) -> list[tuple[int, str]]:
    """Configure both libraries for this build, and return each status and last error."""
    library, backend = native.libraries(), native.open_backend()
    name, alone = library.ffi.new("char[]", last_op.encode()), library.ffi.new("char[]", b"kimi-linear minimax-01 ")
    described = {"n_ops": n_ops, "last_op": name, "backend_api": 2, "larger_alone": alone}
    described |= {"graph_optimize_has_params": has_params}
    build = library.ffi.new("fitter_build_t *", described | backend_rules("0.25.3"))
    errors = {library.fitter: library.fitter.fitter_last_error, backend: backend.fitter_virtual_error}
    return [(each.fitter_configure_build(build), library.text(error()) or "") for each, error in errors.items()]


N_OPS = len(operations())


@named_cases(
    ("one operation less", N_OPS - 1, "GLU", "is not where it was expected"),
    ("one operation more", N_OPS + 1, "GLU", "is not where it was expected"),
    ("another last operation", N_OPS, "UNARY", "is not where it was expected"),
    ("no operation", 0, "GLU", "cannot have 0 operations"),
    ("more operations than there can be", 1000, "GLU", "cannot have 1000 operations"),
)
def test_a_build_with_other_operations_is_refused(n_ops: int, last_op: str, message: str) -> None:
    for status, error in configure(n_ops, last_op):
        assert status == -1
        assert message in error


def test_the_build_that_fitter_was_compiled_for_has_no_unknown_operation() -> None:
    assert [status for status, _ in configure(N_OPS, "GLU")] == [0, 0]


# ---- operations by name, in a ggml that numbers them otherwise

_TRANSLATOR = r"""
#include "builds/operations.h"
static const char * names[] = {NAMES};
extern "C" {
const char * ggml_op_name(enum ggml_op op) { return names[op]; }
bool ggml_is_contiguous(const struct ggml_tensor *) { return false; }
struct ggml_cgraph;
static int seen[2];
bool ggml_can_fuse_subgraph_ext(const ggml_cgraph *, const int *, int, const ggml_op * ops, const int *, int) {
    seen[0] = ops[0];
    seen[1] = ops[1];
    return true;
}
int number(int n, const char * last) { try { return fitter::number_operations(n, last); } catch (...) { return -1; } }
bool same() { return fitter::are_operations_the_same(); }
int read(int op) { ggml_tensor t = {}; t.op = static_cast<ggml_op>(op); return fitter::op_of(&t); }
int fused(int a, int b) {
    const int nodes[] = {0, 1};
    const ggml_op ops[] = {static_cast<ggml_op>(a), static_cast<ggml_op>(b)};
    return fitter::can_fuse_nodes(nullptr, nodes, 2, ops, nodes, 1) ? seen[0] * 1000 + seen[1] : -1;
}
}
"""


_SOURCES = ("builds/operations.cpp", "platform/posix.cpp", "platform/linux.cpp")


def translator(names: Sequence[str], folder: Path) -> Any:
    """``builds/operations.cpp`` beside a ggml whose operations have these names."""
    listed = ", ".join(f'"{name}"' for name in names) + ', "none", "x"'
    source, library = folder / "translator.cpp", folder / f"translator-{len(names)}.so"
    (folder / "operations.inc").write_text("".join(f'{{GGML_OP_{name}, "{name}"}},\n' for name in operations()))
    source.write_text(_TRANSLATOR.replace("NAMES", listed))
    headers = [ROOT / "bindings", folder, SOURCE / "ggml/include", SOURCE / "ggml/src"]
    subprocess.run(
        [os.environ.get("CXX", "c++"), "-std=c++17", "-shared", "-fPIC", "-w", "-fvisibility-inlines-hidden"]
        + [f"-I{each}" for each in headers]
        + [str(source), *(str(ROOT / "bindings" / name) for name in _SOURCES)]
        + ["-Wl,-Bsymbolic", "-o", str(library)],
        check=True,
    )
    return ctypes.CDLL(str(library))


def older() -> list[str]:
    """Return the operations of 0.3.25."""
    later = {"COL2IM_1D", "LIGHTNING_INDEXER", "DSV4_HC_COMB", "DSV4_HC_PRE", "DSV4_HC_POST"}
    return [name for name in operations() if name not in later]


def newer() -> list[str]:
    """With one in the middle that nobody knows."""
    names = operations()
    return [*names[:40], "SOMETHING_NEW", *names[40:]]


@named_cases(("fewer operations", older(), 0), ("an operation more", newer(), 1))
def test_operations_are_read_by_name(names: list[str], n_unknown: int, tmp_path: Path) -> None:
    known = {name: number for number, name in enumerate(operations())}
    unknown = len(known)
    shim = translator(names, tmp_path)
    assert not shim.same()
    assert shim.number(len(names) - 1, b"GLU") == shim.number(len(names) + 1, b"GLU") == -1
    assert shim.read(names.index("GLU")) == names.index("GLU"), "a numbering that was refused changes nothing"

    assert shim.number(len(names), b"GLU") == n_unknown
    assert [shim.read(number) for number in range(len(names))] == [known.get(name, unknown) for name in names]
    assert shim.read(len(names)) == shim.read(255) == shim.read(100000) == unknown
    assert shim.fused(known["GLU"], known["MUL"]) == names.index("GLU") * 1000 + names.index("MUL")
    assert (shim.fused(known["COL2IM_1D"], known["MUL"]) == -1) == ("COL2IM_1D" not in names)
    assert shim.fused(unknown, known["MUL"]) == -1


def test_the_same_operations_are_told(tmp_path: Path) -> None:
    assert translator(operations(), tmp_path).same()


# ---- a buffer type, in both versions of ggml's interface of backends

# The order of the words in each version; those that are not named are NULL.
BUFFER_TYPES = {
    2: ["name", "alloc", "alignment", "max_size", "alloc_size", "is_host", "device", "context"],
    3: ["name", "alloc", "", "alignment", "max_size", "alloc_size", "", "is_host", "device", "context"],
}

_BUFFER_TYPE = r"""
#include "builds/buffer_type.h"
#include "builds/build.h"
static fitter::build is;
const fitter::build & fitter::loaded_build() { return is; }
static fitter::buffer_type type;
extern "C" {
void * fill(int version) {
    is.backend_api = version;
    const fitter::buffer_type_functions functions = {
        (const char * (*)(ggml_backend_buffer_type_t)) 1,
        (ggml_backend_buffer_t (*)(ggml_backend_buffer_type_t, size_t)) 2,
        (size_t (*)(ggml_backend_buffer_type_t)) 3, (size_t (*)(ggml_backend_buffer_type_t)) 4,
        (size_t (*)(ggml_backend_buffer_type_t, const ggml_tensor *)) 5, (bool (*)(ggml_backend_buffer_type_t)) 6};
    type.set(functions, (ggml_backend_dev_t) 9, (void *) 8);
    type.set_device((ggml_backend_dev_t) 7);
    return type.get();
}
bool reads() { return type.device() == (ggml_backend_dev_t) 7 && fitter::context_of(type.get()) == (void *) 8; }
}
"""
_WORDS = ["", "name", "alloc", "alignment", "max_size", "alloc_size", "is_host", "device", "context"]


@pytest.mark.parametrize("version", BUFFER_TYPES)
def test_a_buffer_type_as_each_version_of_ggml_has_it(version: int, tmp_path: Path) -> None:
    source, library = tmp_path / "buffer_type.cpp", tmp_path / "buffer_type.so"
    source.write_text(_BUFFER_TYPE)
    subprocess.run(
        [os.environ.get("CXX", "c++"), "-std=c++17", "-shared", "-fPIC", "-w", "-DFITTER_GGML_BACKEND_API_VERSION=2"]
        + [f"-I{each}" for each in (ROOT / "bindings", SOURCE / "ggml/include")]
        + [str(source), str(ROOT / "bindings/builds/buffer_type.cpp"), "-o", str(library)],
        check=True,
    )
    shim = ctypes.CDLL(str(library))
    shim.fill.restype = ctypes.POINTER(ctypes.c_size_t)
    found = shim.fill(version)
    assert [_WORDS[found[i]] for i in range(len(BUFFER_TYPES[version]))] == BUFFER_TYPES[version]
    assert shim.reads()


# ---- structs, by what a function writes


def test_a_struct_is_returned_into_a_poisoned_buffer() -> None:
    library = native.libraries()
    structs = structs_of(layouts()["0.3.36"])
    for name in ("llama_model_default_params", "llama_context_default_params"):
        function = getattr(library.llama, name)
        expected = bytes(function())
        address = library.pointer(ctypes.cast(function, ctypes.c_void_p))
        written = []
        for poison in (0x00, 0xA5):
            buffer = library.ffi.new("unsigned char[4096]", bytes([poison]) * 4096)
            assert library.fitter.fitter_probe(address, buffer, 4096)
            written.append(bytes(library.ffi.buffer(buffer)))
            assert written[-1][len(expected) :] == bytes([poison]) * (4096 - len(expected))
        struct = structs[name.replace("default_", "")]
        for field, *_ in struct._fields_:
            place = getattr(struct, field)
            bytes_of_field = slice(place.offset, place.offset + place.size)
            assert written[0][bytes_of_field] == written[1][bytes_of_field] == expected[bytes_of_field], field


def test_a_buffer_that_is_too_small_is_not_written() -> None:
    library = native.libraries()
    buffer = library.ffi.new("unsigned char[64]")
    assert not library.fitter.fitter_probe(library.ffi.cast("void *", 1), buffer, 64)


# ---- in a process of their own: what one load after another shows


_OPTIMIZED = """
import json, sys
from fitter.llama.load import backend_devices as devices
from fitter.llama.build import library as native
from fitter.llama.load.loader import Loader
from fitter.llama.types import Params, VirtualDevice, describe
from tests.integration.test_builds import N_OPS, configure
native.prepare()
configure(N_OPS, "GLU", has_params={"with": 1, "without": 0, "unknown": -1}[sys.argv[2]])
native.register_virtual(describe([VirtualDevice("CUDA0", "Card", "cuda", 890, 2**34, 2**34)]))
found = Loader(devices.registry(virtual=True)).measure(sys.argv[1], Params(n_ctx=512))
difference = native.open_backend().fitter_virtual_build_difference()
print(json.dumps([native.libraries().text(difference), sum(row.compute for row in found.rows)]))
"""


@named_cases(("dense", TINY_DENSE), ("MoE", TINY_MOE))
def test_another_graph_optimize_than_configured_is_told(shape: Any, tmp_path: Path) -> None:
    model = str(write_tiny(tmp_path / "model.gguf", shape))
    assert json_of_python(_OPTIMIZED, model, "with")[0] is None
    assert json_of_python(_OPTIMIZED, model, "unknown") == json_of_python(_OPTIMIZED, model, "with")
    assert "called with an argument" in json_of_python(_OPTIMIZED, model, "without")[0]


# --- builds of llama.cpp that are newer than every known one: they are refused, or taken and right


OF_MODEL, OF_CONTEXT = STRUCTS

REFUSED = {
    "a flag like those beside it": (
        Field(OF_CONTEXT, "op_offload", "bool", "01"),
        "its parameters are laid out as in no version that fitter knows",
    ),
    "what defaults cannot tell: main_gpu": (Field(OF_MODEL, "main_gpu", "int32_t", "00"), "bytes of CUDA0 instead of"),
    "what defaults cannot tell: kv_unified": (
        Field(OF_CONTEXT, "kv_unified", "bool", "00"),
        "one of two devices: the KV cache take",
    ),
    "what defaults cannot tell: no_alloc": (
        Field(OF_MODEL, "no_alloc", "bool", "00"),
        "a load that should allocate nothing takes real memory",
    ),
}


def future(directory: Path, *fields: Field) -> str:
    """The newest build with further fields."""
    return str(write_future_build(directory, Path(where(NEWEST)), layouts()[LAYOUTS[NEWEST]], fields))


def fit(model: Path, build: str) -> tuple[int, str, str]:
    words = ["-m", "fitter", str(model), "--gpu", "24MiB", "--gpu", "8GiB", "--llama-cpp", build, "--json"]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=120, check=False)
    return done.returncode, done.stdout, done.stderr


@named_cases(
    (
        "a field in the middle of each struct",
        (Field(OF_MODEL, "tensor_split", "int32_t", "07"), Field(OF_CONTEXT, "n_threads", "size_t", "2a")),
    ),
    (
        "two fields of one struct",
        (Field(OF_CONTEXT, "n_batch", "int32_t", "07"), Field(OF_CONTEXT, "embeddings", "bool", "01")),
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
