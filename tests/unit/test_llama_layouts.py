"""Which layout the parameter structs of a libllama have, told from what its default parameters write."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fitter.errors import LibraryError
from fitter.llama.build import layouts
from fitter.llama.build.functions import Epoch, backend_api, epoch_of
from fitter.llama.build.layouts import HEADER, UNKNOWN, WRITTEN, disagreement, fields_of, layout_of, structs_of
from tests.support.cases import cases, named_cases

Layout = dict[str, dict[str, str]]
KNOWN = layouts.layouts()
SIZES = {"0.3.25": (72, 152), "0.3.30": (72, 160), "0.3.35": (72, 160), "0.3.36": (80, 160), "b11549": (80, 168)}
"""Bytes of the two structs in each version, as a debugger told them."""


class Build:
    """A libllama of a layout: what it writes as default parameters. ``changes`` are other values, by field."""

    def __init__(self, layout: Layout, changes: dict[str, float] | None = None, padding: bytes = b"") -> None:
        self.layout = layout
        self.changes = changes or {}
        self.padding = padding

    def __call__(self, function: str, memory: ctypes.Array[ctypes.c_char]) -> None:
        name = next(name for name, each in layouts.STRUCTS.items() if each == function)
        shape = structs_of(self.layout)[name]
        if self.padding:
            ctypes.memset(memory, self.padding[0], ctypes.sizeof(shape))
        out = shape.from_buffer(memory)
        for field, kind in self.layout[name].items():
            value = self.changes.get(field, next(iter(layouts.data()["defaults"][name].get(field, [0]))))
            setattr(out, field, None if kind.endswith("*") else float(value) if kind == "float" else int(value))


def header_of(layout: Layout) -> str:
    """A llama.h that declares a layout."""
    words = {"void *": "void *", "float *": "const float *"}
    declared = {
        name: "".join(
            f"        {words.get(kind, kind)} {field}; // {field}; of {name}\n" for field, kind in fields.items()
        )
        for name, fields in layout.items()
    }
    return "#pragma once\n" + "".join(f"    struct {name} {{\n{text}    }};\n" for name, text in declared.items())


@pytest.mark.parametrize("name", KNOWN)
def test_sizes(name: str) -> None:
    assert tuple(map(ctypes.sizeof, structs_of(KNOWN[name]).values())) == SIZES[name]


@pytest.mark.parametrize("padding", [b"", b"\0", b"\xff"], ids=["left", "zero", "other"])
@pytest.mark.parametrize("forced", KNOWN)
@pytest.mark.parametrize("own", KNOWN)
def test_every_layout_on_every_other(own: str, forced: str, padding: bytes) -> None:
    wrong = disagreement(KNOWN[forced], layouts.written_by(Build(KNOWN[own], padding=padding)))
    assert (wrong is None) == (own == forced), wrong


@pytest.mark.parametrize("own", KNOWN)
def test_the_layout_of_a_build(own: str) -> None:
    assert layout_of(Build(KNOWN[own])) == (own, KNOWN[own])


MODEL, CONTEXT = layouts.STRUCTS
NEWEST = list(KNOWN.values())[-1]
New = tuple[str, str, str, float]
"""Struct, the field behind it, kind and default of a new field."""


def with_new(*new: New) -> tuple[Layout, dict[str, float]]:
    """The newest layout with new fields, and their defaults."""
    fields = {struct: list(each.items()) for struct, each in NEWEST.items()}
    for number, (struct, behind, kind, _) in enumerate(new):
        at = [name for name, _ in fields[struct]].index(behind)
        fields[struct].insert(at, (f"new_{number}", kind))
    return {struct: dict(each) for struct, each in fields.items()}, {f"new_{i}": each[3] for i, each in enumerate(new)}


def places(layout: Layout) -> dict[str, tuple[int, int]]:
    """Where each field is that fitter writes."""
    return {
        f"{struct}.{field}": (getattr(shape, field).offset, getattr(shape, field).size)
        for struct, shape in structs_of(layout).items()
        for field in layout[struct]
        if field in WRITTEN
    }


REFUSED: dict[str, tuple[New, ...]] = {
    "a flag like those beside it": ((CONTEXT, "op_offload", "bool", 1),),
    "a number like those beside it": ((CONTEXT, "n_rs_seq", "int32_t", 0),),
    "a pointer beside those that fitter writes": ((MODEL, "devices", "void *", 0),),
    "three": tuple((CONTEXT, field, "int32_t", 7) for field in ("n_batch", "n_threads", "type_k")),
}


@named_cases(
    ("first", ((MODEL, "devices", "int32_t", 3),)),
    ("in the middle of each", ((MODEL, "tensor_split", "int32_t", 7), (CONTEXT, "n_threads", "size_t", 9))),
    ("two in one", ((CONTEXT, "n_batch", "int32_t", 7), (CONTEXT, "type_k", "float", 0.5))),
    ("a pointer where fitter writes none", ((CONTEXT, "cb_eval", "void *", 0),)),
    ("a flag that no other is like", ((CONTEXT, "embeddings", "bool", 1),)),
)
def test_a_newer_layout_follows_from_its_defaults(new: tuple[New, ...]) -> None:
    layout, defaults = with_new(*new)
    name, found = layout_of(Build(layout, defaults))
    assert name == UNKNOWN
    assert places(found) == places(layout)


@given(st.data())
def test_a_layout_that_follows_is_right(data: st.DataObject) -> None:
    """Whatever is new, a field that fitter writes is where the build has it, or the build is refused."""
    kinds = {"bool": (0, 1), "int32_t": (0, 1, 512, 7), "size_t": (0, 9), "float": (0, -1, 0.5)}
    new = []
    for _ in range(data.draw(st.integers(1, 2), "fields")):
        struct = data.draw(st.sampled_from((MODEL, CONTEXT)), "struct")
        kind = data.draw(st.sampled_from(sorted(kinds)), "kind")
        behind = data.draw(st.sampled_from(list(NEWEST[struct])), "behind")
        new.append((struct, behind, kind, data.draw(st.sampled_from(kinds[kind]), "default")))
    layout, defaults = with_new(*new)
    try:
        name, found = layout_of(Build(layout, defaults))
    except LibraryError:
        return
    # what agrees with a known layout, the small models tell apart
    if name == UNKNOWN:
        assert places(found) == places(layout)


def test_a_field_that_is_gone() -> None:
    layout = {**NEWEST, CONTEXT: {name: kind for name, kind in NEWEST[CONTEXT].items() if name != "yarn_orig_ctx"}}
    name, found = layout_of(Build(layout))
    assert (name, places(found)) == (UNKNOWN, places(layout))


@pytest.mark.parametrize("new", REFUSED.values(), ids=REFUSED)
def test_an_unclear_layout_is_refused_or_read(new: tuple[New, ...], tmp_path: Path) -> None:
    layout, defaults = with_new(*new)
    build = Build(layout, defaults)
    with pytest.raises(LibraryError, match="as in no version that fitter knows"):
        layout_of(build)
    own, other, broken = tmp_path / "own.h", tmp_path / "other.h", tmp_path / "broken.h"
    own.write_text(header_of(layout))
    other.write_text(header_of(KNOWN["0.3.30"]))
    broken.write_text("struct llama_model_params { int a : 3; };")
    paths = [str(tmp_path / "none.h"), str(broken), str(other)]
    assert layout_of(build, [*paths, str(own)]) == (HEADER, layout)
    with pytest.raises(LibraryError) as caught:
        layout_of(build, paths)
    for why in ("none.h cannot be read", "broken.h has 'int a : 3'", "other.h belongs to another version (llama_"):
        assert why in str(caught.value)


def test_a_header_tells_what_defaults_cannot(tmp_path: Path) -> None:
    # it takes four bytes that the struct left unused, and main_gpu is behind it
    layout, defaults = with_new((MODEL, "main_gpu", "int32_t", 0))
    build = Build(layout, defaults)
    assert layout_of(build)[0] == "b11549"
    path = tmp_path / "llama.h"
    path.write_text(header_of(layout))
    assert layout_of(build, [str(path)]) == (HEADER, layout)


def test_a_field_that_is_not_written_is_not_there(tmp_path: Path) -> None:
    known = {name: layout for name, layout in KNOWN.items() if name != "0.3.36"}
    fields = KNOWN["0.3.36"]["llama_model_params"]
    at = list(fields).index("tensor_split")
    # it would be where the struct has four bytes that are not used, so that all else is as it was
    more = dict([*list(fields.items())[:at], ("n_new", "int32_t"), *list(fields.items())[at:]])
    path = tmp_path / "llama.h"
    path.write_text(header_of({**KNOWN["0.3.36"], "llama_model_params": more}))
    with pytest.raises(LibraryError, match=r"another version \(llama_model_params\.n_new is not written\)"):
        layout_of(Build(KNOWN["0.3.36"]), [str(path)], {"0.3.25": known["0.3.25"]})


def test_a_header_of_another_version_is_not_believed_where_the_layout_is_known(tmp_path: Path) -> None:
    path = tmp_path / "llama.h"
    path.write_text(header_of(KNOWN["0.3.25"]))
    assert layout_of(Build(KNOWN["0.3.36"]), [str(path)])[0] == "0.3.36"


@cases(("n_ctx", 4096), ("use_extra_bufts", 0), ("yarn_ext_factor", 1.0), ("n_samplers", 1), ("lazy_mode", 0))
def test_another_default_is_refused(field: str, value: float) -> None:
    with pytest.raises(LibraryError, match="in no version"):
        layout_of(Build(KNOWN["0.3.36"], {field: value}))


def test_what_writes_nothing_is_refused() -> None:
    with pytest.raises(LibraryError, match="in no version"):
        layout_of(lambda function, memory: None)


def test_two_layouts_that_agree_are_refused() -> None:
    own = KNOWN["0.3.36"]
    with pytest.raises(LibraryError, match="several versions that fitter knows: a, b"):
        layout_of(Build(own), known={"a": own, "b": own})


@pytest.mark.parametrize("name", KNOWN)
def test_a_file_is_read_and_not_mapped(name: str) -> None:
    params = structs_of(KNOWN[name])["llama_model_params"].from_buffer(bytearray(b"\1" * 80))
    layouts.read_whole(params)
    fields = [
        field
        for field in ("load_mode", "use_mmap", "use_direct_io", "use_mlock")
        if field in KNOWN[name]["llama_model_params"]
    ]
    assert fields
    assert not any(getattr(params, field) for field in fields)


# --- llama.h

TYPES = (
    "typedef bool (*my_callback)(int a);\ntypedef struct my_thing * my_handle;\ntypedef enum my_e { A, B } my_enum;\n"
)


@named_cases(
    ("scalars", "int32_t a; uint32_t b; bool c; float d; size_t e;", "int32_t int32_t bool float size_t"),
    ("pointers", "const char * a; struct b_t *b; const float * c; void ** d;", "void *|void *|float *|void *"),
    ("enums", "enum llama_split_mode a; my_enum b;", "int32_t int32_t"),
    ("callbacks", "my_callback a; ggml_abort_callback b; my_handle c;", "void *|void *|void *"),
    ("several", "int32_t a, b;", "int32_t int32_t"),
    ("comments", "int32_t a; // bool x;\n /* bool y;\n */ bool b;", "int32_t bool"),
)
def test_declarations(declarations: str, kinds: str) -> None:
    found = fields_of(f"{TYPES}struct s {{ {declarations} }};", "s")
    assert list(found) == list("abcde")[: len(found)]
    assert list(found.values()) == (kinds.split("|") if "|" in kinds else kinds.split())


REFUSED = {
    "no struct": "struct t { int a; };",
    "only named": "struct s; void f(struct s * a);",
    "empty": "struct s { };",
    "bits": "struct s { int a : 3; };",
    "array": "struct s { int a[4]; };",
    "struct inside": "struct s { struct t { int a; } b; };",
    "struct by value": "struct s { struct t b; };",
    "unknown type": "struct s { llama_token a; };",
    "condition": "struct s {\n#ifdef X\n int a;\n#endif\n};",
    "function": "struct s { void (*f)(int a); };",
    "twice": "struct s { int a; bool a; };",
    "two pointers": "struct s { int * a, b; };",
    "no type": "struct s { a; };",
    "not closed": "struct s { int a;",
}


@pytest.mark.parametrize("text", REFUSED.values(), ids=REFUSED)
def test_a_header_that_is_not_understood(text: str) -> None:
    with pytest.raises(ValueError, match=r"^has "):
        fields_of(text, "s")


@given(
    st.lists(st.sampled_from(["struct", "s", "{", "}", ";", "int", "*", "a", ",", "/*", "*/", "//", "\n", "(", "[4]"]))
)
def test_any_text_is_read_or_refused(words: list[str]) -> None:
    try:
        assert fields_of(" ".join(["struct s {", *words, "};"]), "s")
    except ValueError as error:
        assert str(error).startswith("has ")


@given(
    st.dictionaries(
        st.from_regex(r"[a-z_][a-z0-9_]{0,9}", fullmatch=True),
        st.sampled_from(["bool", "float", "int32_t", "size_t", "float *", "void *"]),
        min_size=1,
    )
)
def test_what_is_declared_is_read(fields: dict[str, str]) -> None:
    assert fields_of(header_of({"s": fields}), "s") == fields


# --- epochs


@cases(
    ("0.13.1", False, ()),
    ("0.20.0", False, ()),
    ("0.21.0", None, ()),
    ("0.22.1", None, ()),
    ("0.23.0", True, ("minimax-01",)),
    ("0.24.0", True, ("kimi-linear", "minimax-01")),
    ("0.25.1", True, ("kimi-linear", "minimax-01")),
    ("0.25.3-dev", True, ("kimi-linear", "minimax-01")),
    ("1.0.0", True, ("kimi-linear", "minimax-01")),
)
def test_epochs(ggml: str, has_params: bool | None, alone: tuple[str, ...]) -> None:
    found = epoch_of(ggml)
    assert (found.graph_optimize_has_params, found.larger_alone) == (has_params, alone)


@cases("0.9.11", "0.13.0", "", "unknown")
def test_a_ggml_that_is_too_old(ggml: str) -> None:
    with pytest.raises(LibraryError, match=r"0\.13\.1 is needed: take llama\.cpp"):
        epoch_of(ggml)


def test_operations_are_counted_by_name() -> None:
    epoch = Epoch("0.1", "GLU", True, ())
    names = ["NONE", "ADD_ID", "GLU", "some other text"]
    assert epoch.n_operations(lambda i: names[i]) == 3
    for wrong in (["NONE", "a text"], ["NONE", ""], ["NONE"] * 300):
        with pytest.raises(LibraryError, match="do not end with GLU"):
            epoch.n_operations(lambda i, wrong=wrong: wrong[i])  # type: ignore[misc]


def test_the_interface_of_backends_is_told_by_a_function_that_came_with_it() -> None:
    class Older:
        ggml_version = None

    class Newer(Older):
        ggml_backend_buft_alloc_buffer_n = None

    assert [backend_api(each) for each in (Older, Newer)] == [2, 3]  # type: ignore[arg-type]
