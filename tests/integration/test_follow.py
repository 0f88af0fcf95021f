"""``python -m tools.follow``: what a build differs in, told from its source or its libraries, and what is written."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.cases import named_cases
from tests.support.llama_builds import NEWEST, fetched
from tools.builds import llama_builds
from tools.follow import entries, facts
from tools.follow.__main__ import main
from tools.follow.subject import FollowError, subject_of

SOURCE = Path(__file__).resolve().parents[2] / "vendor" / "llama.cpp" / "source"
needs_source = pytest.mark.skipif(not (SOURCE / "common").is_dir(), reason="llama.cpp's source is not here")

_READ = (
    *("include/llama.h", "common/arg.cpp", "src/llama-arch.cpp", "src/llama-cparams.h", "src/llama-hparams.h"),
    *("ggml/src/ggml-backend.cpp", "ggml/src/ggml-backend-impl.h"),
)
CHANGES = {
    "include/llama.h": ("bool embeddings;", "size_t new_size; bool embeddings;"),
    "ggml/include/ggml.h": ("GGML_OP_COUNT,", "GGML_OP_NEW, GGML_OP_COUNT,"),
    "src/llama-hparams.h": ("LLAMA_MAX_LAYERS  512", "LLAMA_MAX_LAYERS  1024"),
    "common/arg.cpp": ('{"-ncmoe", "--n-cpu-moe"}', '{"-ncmoe", "--n-cpu-moe", "--new-name"}'),
    "src/llama-arch.cpp": ("{ LLM_ARCH_LLAMA, ", '{ LLM_ARCH_NEW, "new" }, { LLM_ARCH_LLAMA, '),
}
"""A text in each file, and the text in its place in a source from the future."""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Copies of the files that are written."""
    for module, name in ((facts, "KNOWN"), (entries, "LAYOUTS"), (entries, "BUILDS")):
        path = tmp_path / getattr(module, name).name
        shutil.copy(getattr(module, name), path)
        monkeypatch.setattr(module, name, path)
    yield tmp_path


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """What is read of the pinned source."""
    place = tmp_path / "llama.cpp-b99999"
    for name in (*_READ, *(str(path.relative_to(SOURCE)) for path in (SOURCE / "ggml" / "include").glob("*.h"))):
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(SOURCE / name, place / name)
    return place


@needs_source
def test_the_pinned_source_is_older(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(source)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert "  - moe_cache_size size_t, after type_v" in lines
    assert "  - --moe-cache-mib 1 words, LLAMA_ARG_MOE_CACHE_MIB" in lines
    assert "  - ggml_backend_sched_set_copy_callback" in lines
    assert "defaults: not told; known from b11739" in lines


@needs_source
def test_a_source_from_the_future(source: Path, own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    facts.store("b90000", facts.read_source(source))
    for name, (old, new) in CHANGES.items():
        text = (source / name).read_text()
        assert old in text, name
        (source / name).write_text(text.replace(old, new, 1))
    assert main([str(source), "--write"]) == 1
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  ")]
    assert lines[:-2] == [
        "  + new_size size_t, after abort_callback_data",
        "  ~ embeddings bool, after abort_callback_data -> bool, after new_size",
        "  + NEW",
        "  ~ LLAMA_MAX_LAYERS 512 -> 1024",
        "  + -ncmoe, --n-cpu-moe, --new-name 1 words, LLAMA_ARG_N_CPU_MOE",
        "  - -ncmoe, --n-cpu-moe 1 words, LLAMA_ARG_N_CPU_MOE",
        "  + new",
    ]
    assert lines[-2] == "  layouts of layouts.json: b99999"
    layouts = json.loads((own / "layouts.json").read_text())["layouts"]
    assert layouts["b99999"]["llama_context_params"]["new_size"] == "size_t"
    assert main([str(source)]) == 0


def test_a_known_library_differs_in_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    directory = fetched(NEWEST)
    assert main([str(directory), "--name", NEWEST]) == 0
    printed = capsys.readouterr().out
    assert "checks: symbols, layout, operations, models" in printed
    assert "exported functions: 0 of" in printed
    assert "defaults: 0 of" in printed


def test_a_package_is_written_as_a_build(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is written of the newest build is what stands there."""
    document = json.loads((own / "llama_builds.json").read_text())
    expected = document.pop(NEWEST)
    (own / "llama_builds.json").write_text(json.dumps(document))
    layouts = json.loads((own / "layouts.json").read_text())
    known = layouts["layouts"].pop(expected["layout"])
    del layouts["defaults"]["llama_context_params"]["moe_cache_size"]
    (own / "layouts.json").write_text(json.dumps(layouts))
    try:
        subject = subject_of(f"{expected['package']}=={expected['version']}")
    except FollowError as error:
        pytest.skip(str(error))
    assert subject.package and subject.package.sha256 == expected["sha256"]
    told = facts.parts_of([facts.read_header(subject.header or Path()), facts.read_library(str(subject.library))])
    written = list(entries.write(subject, "0.27.0", told, known))
    assert written[:3] == [
        "defaults of layouts.json: llama_context_params.moe_cache_size 0",
        f"layouts of layouts.json: {NEWEST}",
        f"llama_builds.json: {NEWEST}",
    ]
    assert json.loads((own / "llama_builds.json").read_text())[NEWEST] == {**expected, "layout": NEWEST}
    assert json.loads((own / "layouts.json").read_text())["layouts"][NEWEST] == known


@named_cases(
    ("no file", ["none"], "none is neither a file, nor a directory, nor PACKAGE==VERSION"),
    ("an empty directory", ["{}/b12345"], "there is neither a source, nor a llama.h, nor a libllama.so in {}/b12345"),
    ("a directory without a number", ["{}/plain"], "says no number of a build: name it with --name"),
    ("no archive", ["{}/b12345.zip"], "{}/b12345.zip cannot be unpacked: "),
    ("rules without a library", ["{}/header-b12345", "--rules", "1"], "--rules needs the source and the libraries"),
)
def test_wrong_words(words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("b12345", "plain", "header-b12345"):
        (tmp_path / name).mkdir()
    (tmp_path / "b12345.zip").write_text("no archive")
    shutil.copy(llama_builds.fetched(llama_builds.packaged()["0.3.36"]) / "llama.h", tmp_path / "header-b12345")
    assert main([word.replace("{}", str(tmp_path)) for word in words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said.replace("{}", str(tmp_path)) in line
