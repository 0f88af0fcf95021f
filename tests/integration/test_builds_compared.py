"""Real builds of llama.cpp compared: a lock of one checked with another, what grew, and whether a plan still fits.

They are fetched by package name; where the package index cannot be reached, these tests are skipped.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import fitter
from fitter.api.compare_builds import load_keywords
from fitter.cli import main
from fitter.regression import build_report
from fitter.regression.check_cases import check, lock
from tests.support.cases import cases
from tests.support.command import Command
from tests.support.llama_builds import fetched
from tests.support.patience import SECONDS, all_end, suspended
from tools.docs import models
from tools.models import shapes
from tools.models.tiny import TINY_MOE, write_tiny

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
n_ubatch = 512

[cases.qwen]
model = "qwen3-235b-a22b.gguf"
gpu = "cuda:9.0:192GiB"
n_ctx = 32768
n_ubatch = 2048
"""


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
    assert main(["lock", "--trust", "--cases", str(path / "fitter.toml")]) == 0
    return Place(path)


def checked(place: Place, command: Command, *words: str) -> tuple[int, dict[str, Any]]:
    said = command("check", "--trust", "--json", "--cases", place.toml, *words)
    return said.status, {case["name"]: case for case in said.document["cases"]}


def test_a_lock_names_its_build_and_no_path(place: Place) -> None:
    text = (place.path / "fitter.lock").read_text()
    assert text.count(f'llama_cpp = "{OLD_VERSION}"') == 3
    assert str(place.path) not in text
    assert f'"{OLD}"' not in text


def test_a_newer_build_is_named_with_what_grew(place: Place, command: Command) -> None:
    status, cases = checked(place, command, "--llama-cpp", str(place.path / NEW))
    statuses = {name: case["status"] for name, case in cases.items()}
    assert (status, statuses) == (4, {"kimi": "failed", "llama": "changed", "qwen": "failed"})
    cause = {"kind": "llama.cpp", "what": "llama.cpp", "before": OLD_VERSION, "after": NEW_VERSION}
    assert all(case["causes"] == [cause] for case in cases.values())
    (qwen,) = (move for move in cases["qwen"]["moves"] if move["what"] == "CUDA0")
    assert (qwen["after"] - qwen["before"]) // MIB == 323
    # Seven cards keep all of it but the token embeddings: some layers have an expert tensor on another card.
    moved = [move["what"] for move in cases["kimi"]["moves"]]
    assert moved == [*(f"CUDA{card}" for card in range(7)), "generation speed"]
    assert cases["llama"]["moves"] == []


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


# --- without a lock

LOADS: dict[str, dict[str, Any]] = {
    "one card": {"gpus": "24GiB"},
    "two cards, experts on the host": {"gpus": ["8GiB", "12GiB"], "n_ctx": 8192},
    "what the user says": {
        "gpus": ["24GiB", "24GiB"],
        "override_tensor": [r"blk\.(1|2)\.ffn_down_exps=CPU", "output=CUDA1"],
        "tensor_split": [3, 1],
        "type_k": "q8_0",
        "n_ubatch": 256,
    },
    "several sequences": {"gpus": "24GiB", "n_seq_max": 4, "kv_unified": False, "n_ctx": 16384},
    "no card": {"gpus": "none"},
    "no flash attention": {"gpus": "rtx-4090", "flash_attn": "off", "op_offload": False},
}


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shapes.write("qwen3-30b-a3b", tmp_path_factory.mktemp("moe"))


@cases(LOADS)
def test_the_same_parameters_are_the_same_load(told: dict[str, Any], moe: Path) -> None:
    plan = fitter.fit(moe, **told)
    again = fitter.measure(moe, **load_keywords(plan, told))
    assert (again.rows, again.n_ctx, again.devices) == (
        plan.breakdown.rows,
        plan.breakdown.n_ctx,
        plan.breakdown.devices,
    )


def test_a_build_twice_answers_the_same(moe: Path) -> None:
    first, second = fitter.compare_builds(moe, ["python", "python"], gpus=["8GiB", "12GiB"])
    assert first.plan is not None and second.plan is not None and first.breakdown is not None
    assert first.plan.params == second.plan.params
    assert (second.breakdown, second.version, second.fits) == (first.breakdown, first.version, True)


class StopError(Exception):
    """Nothing more is wanted."""


def test_progress_may_end_it(moe: Path) -> None:
    said: list[str] = []

    def listen(step: fitter.Progress) -> None:
        said.append(step.text)
        if step.text.endswith("has answered"):
            raise StopError

    with pytest.raises(StopError) as stopped:
        fitter.compare_builds(moe, ["python", "python"], gpus="24GiB", on_progress=listen)
    assert stopped.value.args == ()
    assert [text for text in said if "python" in text] == ["asking python", "python has answered"]
    assert len(said) > 2, "the steps of a fit are among them"


def test_an_interrupt_ends_a_history_at_once(place: Place) -> None:
    """Every process of llama.cpp is stopped as it begins, so that only the interrupt ends it."""
    told = ["--llama-cpp", str(place.path / OLD), "--llama-cpp", str(place.path / NEW), "--cases", place.toml]
    command = [sys.executable, "-m", "fitter", "history", *told]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        children = suspended(process, 1.0, with_forks=False)
        process.send_signal(signal.SIGINT)
        said = process.communicate(timeout=SECONDS)
        # No build is asked any more: one that was not stopped would answer.
        assert (process.returncode, *said) == (130, "", "")
    assert all_end(children)


def test_what_is_beside_the_model_is_measured_in_the_same_places(tmp_path: Path) -> None:
    models.place(("llama-3.1-8b.gguf", "draft.gguf"), tmp_path)
    told: dict[str, Any] = {"model_draft": str(tmp_path / "draft.gguf"), "reserve": "host=1GiB", "n_ctx": 8192}
    builds = ["python", str(fetched(NEW)), "python"]
    whole = tmp_path / "llama-3.1-8b.gguf"
    first, other, again = fitter.compare_builds(whole, builds, gpus=["16GiB", "8GiB"], own_plans=False, **told)
    assert first.plan is not None and first.shared == first.plan.shared
    assert {use.kind for use in first.shared} == {"draft", "reserve"}
    assert (again.shared, again.breakdown, again.error) == (first.shared, first.breakdown, None)
    # As for the model itself, only the part on the host may be another.
    assert [use.on("CUDA0") + use.on("CUDA1") for use in other.shared] == [
        use.on("CUDA0") + use.on("CUDA1") for use in first.shared
    ]
    assert first.fits and other.fits and again.fits


def test_what_fitted_no_longer_fits(place: Place, command: Command) -> None:
    """The parameters of seven cards lack memory on four of them, and the newer build's own plan is slower."""
    builds = [str(place.path / OLD), str(place.path / NEW)]
    told = ["--llama-cpp", builds[0], "--llama-cpp", builds[1], "--cases", place.toml]
    said = command("diff", "-k", "kimi or llama", "--json", *told)
    document = said.document
    kimi, llama = document["cases"]
    assert (said.status, document["equal"], document["grown"]) == (4, False, True)
    assert document["builds"] == [
        {"llama_cpp": builds[0], "label": OLD, "version": OLD_VERSION},
        {"llama_cpp": builds[1], "label": NEW, "version": NEW_VERSION},
    ]
    old, new = kimi["builds"]
    assert (old["fits"], new["fits"], set(new["missing"])) == (True, False, {"CUDA1", "CUDA2", "CUDA3", "CUDA4"})
    grown = {move["what"]: (move["after"] - move["before"]) / MIB for move in new["moves"] if move["unit"] == "bytes"}
    assert grown == {f"CUDA{card}": 896 for card in range(7)}
    assert [move["what"] for move in new["plan"]] == ["generation speed"]
    assert [(each["moves"], each["plan"]) for each in llama["builds"]] == [([], []), ([], [])]


def test_a_history_of_what_a_file_names(place: Place, tmp_path: Path, command: Command) -> None:
    path = place.path / "history.toml"
    path.write_text(f'[history]\nllama_cpp = ["{OLD}", "{NEW}"]\n{CASES}')
    files = {name: tmp_path / name for name in ("a.csv", "a.svg", "a.json")}
    words = ["--csv", files["a.csv"], "--svg", files["a.svg"], "--badge", files["a.json"], "-k", "not kimi"]
    said = command("history", "--trust", path, *words)
    assert (said.status, said.err) == (4, "")
    assert [line.split() for line in said.out.splitlines()[:5]] == [
        ["case", "on", OLD, NEW],
        ["llama", "devices", "8.6", "GiB", "="],
        ["host", "329.8", "MiB", "="],
        ["qwen", "devices", "139.1", "GiB", "+323.1", "MiB"],
        ["host", "525.9", "MiB", "="],
    ]
    assert said.out.splitlines()[-1] == f"2 cases: 1 takes more with {NEW} than with {OLD}, 1 takes the same"
    assert files["a.csv"].read_text().splitlines()[0] == ",".join(build_report.COLUMNS)
    assert "+323.1 MiB" in files["a.svg"].read_text()
    assert json.loads(files["a.json"].read_text())["message"] == "1 of 2 grew"


def test_a_build_that_is_refused_is_named(place: Place, command: Command) -> None:
    too_old = str(fetched("b7347"))
    model = str(place.path / "llama-3.1-8b.gguf")
    told = ["--gpu", "24GiB", "-c", "4096", "--llama-cpp", str(place.path / OLD), "--llama-cpp", too_old]
    said = command("history", model, *told)
    refused = "fitter: error: llama-3.1-8b with b7347: "
    assert said.status == 3 and said.err.startswith(refused) and "too old" in said.err
    assert said.out.splitlines()[-1] == "1 case: 1 could not be compared"
    # A build that is too old for the others is no reason to stop.
    assert command("history", model, *told[:4], "--llama-cpp", too_old, *told[4:6], "--llama-cpp", told[5]).status == 0
