"""What is read of libraries that are not loaded: of ones that are whole, damaged and for other machines."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fitter.errors import LibraryError
from fitter.llama.build import elf
from tests.support import libraries
from tests.support.cases import named_cases

ID = "3b71ad7d7c18482d74c453dc90ea6ea2958da52a"


def _write(directory: Path, name: str = "liba.so") -> Path:
    return libraries.write(
        directory / name, needed=("libb.so.0", "libc.so.6"), runpath="$ORIGIN:/opt/lib", defined=("f", "g"), build_id=ID
    )


def test_what_a_library_is_linked_to(tmp_path: Path) -> None:
    found = elf.linking_of(_write(tmp_path))
    assert found == elf.Linking("liba.so", ("libb.so.0", "libc.so.6"), (), ("$ORIGIN", "/opt/lib"), ID)
    assert elf.read(tmp_path / "liba.so").defined == {"f", "g"}


def test_one_that_was_not_made_here() -> None:
    found = elf.linking_of("/proc/self/exe")
    assert found.name == ""
    assert any(name.startswith("libc.so") for name in found.needed)


@named_cases(
    ("32 bits", {"bits": 32}, "is for 32-bit machines"),
    ("other machine", {"machine": libraries.OTHER}, f"is for {libraries.OTHER}, this machine is"),
    ("unknown machine", {"machine": "vax"}, "is for another machine (number 0)"),
)
def test_for_another_machine(changes: dict[str, int | str], message: str, tmp_path: Path) -> None:
    path = libraries.write(tmp_path / "liba.so", **changes)  # type: ignore[arg-type]
    with pytest.raises(LibraryError) as caught:
        elf.linking_of(path)
    assert message in str(caught.value)
    assert "name a llama.cpp that was built for" in str(caught.value)


def test_a_file_that_is_none(tmp_path: Path) -> None:
    text = tmp_path / "liba.so"
    text.write_text("INPUT(libb.so)")
    for path, said in ((text, "is not a library"), (tmp_path, "cannot be read"), (tmp_path / "no", "cannot be read")):
        with pytest.raises(LibraryError, match=said):
            elf.linking_of(path)


def test_every_shorter_file_is_refused(tmp_path: Path) -> None:
    whole = _write(tmp_path).read_bytes()
    # behind the strings are the sections only, which the linker does not need
    end = whole.rindex(b"g\0") + 2
    part = tmp_path / "part.so"
    for length in range(end):
        part.write_bytes(whole[:length])
        with pytest.raises(LibraryError, match=r"part\.so"):
            elf.linking_of(part)


def test_a_file_without_the_end_of_its_code_is_refused(tmp_path: Path) -> None:
    path = libraries.write(tmp_path / "liba.so", code=1000)
    assert elf.linking_of(path).name == "liba.so"
    path.write_bytes(path.read_bytes()[:1200])
    with pytest.raises(LibraryError, match="is damaged or not all there"):
        elf.linking_of(path)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 700), st.integers(0, 255)), min_size=1, max_size=8))
def test_damage_is_an_error_or_harmless(tmp_path: Path, changes: list[tuple[int, int]]) -> None:
    data = bytearray(_write(tmp_path).read_bytes())
    for at, value in changes:
        data[at % len(data)] = value
    path = tmp_path / "damaged.so"
    path.write_bytes(data)
    for read in (elf.linking_of, elf.read):
        try:
            read(path)
        except LibraryError as error:
            assert str(path) in str(error)
