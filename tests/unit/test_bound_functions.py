"""Which functions of llama.cpp the bindings for Windows look up, and what their DLLs export."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from tests.support.cases import named_cases

BINDINGS = Path(__file__).resolve().parents[2] / "bindings"

HEADER = """
    GGML_API void ggml_called(int x);
    GGML_API const char * ggml_unused(void);
    // GGML_API void ggml_gone(void);
    static inline int ggml_inline(int x) { return ggml_called(x); }
    LLAMA_API llama_model * llama_cpp_function(const char * a);
"""
NAMES = """
{"_Z18llama_cpp_functionPKc", "?llama_cpp_function@@YAPEAUllama_model@@PEBD@Z"},
{"_ZN1a1bEv", "?b@a@@QEAAXXZ"},
"""


@pytest.fixture(scope="module")
def bound() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bound_functions", BINDINGS / "platform" / "bound_functions.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@named_cases(
    ("C", "ggml_called(1);", ["ggml_called"]),
    ("C++", "llama_cpp_function(text);", ["_Z18llama_cpp_functionPKc"]),
    ("an address", "auto f = &ggml_called;", ["ggml_called"]),
    ("its type, its name and a comment", 'decltype(&ggml_called) f = loaded("ggml_called");  // ggml_called', []),
    ("no functions of a library", "ggml_inline(2); ggml_gone(); ggml_backend_init();", []),
)
def test_what_is_bound(source: str, expected: list[str], bound: ModuleType) -> None:
    assert bound.called([HEADER], [source], NAMES) == sorted([*expected, "ggml_abort"])


def test_each_library_exports_its_functions(bound: ModuleType) -> None:
    header = (BINDINGS / "fitter.h").read_text(encoding="utf-8")
    ours, backend, cells = (set(bound.exported(f"lib{n}", header)) for n in ("fitter", "ggml-fitter", "fitter-cells"))
    assert ours & backend == {"fitter_configure_build"}
    assert {"fitter_breakdown", "fitter_gguf_open", "fitter_skeleton_write", "fitter_regex_search"} <= ours
    assert {"fitter_virtual_configure", "fitter_allocations_rows", "ggml_backend_init"} <= backend
    assert "fitter_cells_begin" in cells - ours - backend
