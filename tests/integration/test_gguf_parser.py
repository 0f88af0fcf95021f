"""``fitter gguf-parser``: its rows are what llama.cpp measures, in the document that schedulers read."""

from __future__ import annotations

import contextlib
import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest

import fitter
from fitter.cli import main
from fitter.llama.client import Worker
from fitter.model.files import addresses
from fitter.planning.tables.parameter_rows import layer_counts
from tests.support.cases import cases, named_cases, stored
from tests.support.command import run_fitter
from tools.models.tiny_projector import write_projector

MODEL = "shape://qwen3-0.6b"
CARD = ["9999GiB"]
MIB = 1 << 20
SERVER = {"program": "llama-server", "n_seq_max": 1, "load_mode": "none", "n_ctx": 4096}


def asked(*words: str | Path) -> dict[str, Any]:
    """The document that the command prints."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert main(["gguf-parser", *map(str, words), "--json"]) == 0
    document: dict[str, Any] = json.loads(printed.getvalue())
    return document


def items(*words: str | Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = asked(*words)["estimate"]["items"]
    return found


@named_cases(
    ("the largest alone", (-1, 0, 29), (29,)),
    ("none", (0, 0, 29), (0,)),
    ("none, in steps", (0, 5, 29), (0,)),
    ("each", (-1, 1, 4), (0, 1, 2, 3, 4)),
    ("steps that do not end there", (-1, 3, 7), (0, 3, 6, 7)),
    ("steps that end there", (6, 3, 7), (0, 3, 6)),
    ("more than there are", (99, 4, 7), (0, 4, 7)),
)
def test_numbers_of_layers(asked: tuple[int, int, int], counts: tuple[int, ...]) -> None:
    assert layer_counts(*asked) == counts


def test_each_row_is_a_load_of_llama_cpp(worker: Worker) -> None:
    rows = items("-m", MODEL, "-c", "4096", "--gpu-layers-step", "7", "--platform-footprint", "100,300")
    assert [row["offloadLayers"] for row in rows] == [0, 7, 14, 21, 28, 29]
    assert [row["fullOffloaded"] for row in rows] == [False] * 5 + [True]
    for row in rows:
        load = fitter.measure(MODEL, gpus=CARD, n_gpu_layers=row["offloadLayers"], **SERVER)  # type: ignore[arg-type]
        assert row["ram"]["uma"] == load.most.host.used
        (card,) = row["vrams"]
        assert card["uma"] == load.most.on("CUDA0").used
        assert card["nonuma"] == card["uma"] + 300 * MIB
        assert row["ram"]["nonuma"] == row["ram"]["uma"] + 100 * MIB
        assert card["handleLayers"] == row["offloadLayers"] - (row["offloadLayers"] > 0)


def test_layers_of_two_cards_and_of_a_remote_one() -> None:
    (row,) = items("--path", MODEL, "-c", "4096", "--tensor-split", "1,2,1", "--rpc", "far:50052")
    assert [each["handleLayers"] for each in row["vrams"]] == [8, 14, 6]
    assert [each["handleLastLayer"] for each in row["vrams"]] == [7, 21, 27]
    assert [each["handleOutputLayer"] for each in row["vrams"]] == [False, False, True]
    assert [(each["remote"], each["position"]) for each in row["vrams"]] == [(True, 0), (False, 0), (False, 1)]
    (alone,) = items("--path", MODEL, "-c", "4096", "--rpc", "far:50052")
    assert [each["remote"] for each in alone["vrams"]] == [True, False]


@cases(stored("gguf_parser", "options"))
def test_options(words: list[str], keywords: dict[str, Any]) -> None:
    if "type_k" in keywords:
        keywords = {**keywords, "type_v": "q8_0", "flash_attn": "on"}
    (row,) = items("-m", MODEL, "-c", "4096", *words)
    load = fitter.measure(MODEL, gpus=CARD, **{**SERVER, **keywords})
    assert (row["vrams"][0]["uma"], row["ram"]["uma"]) == (load.most.on("CUDA0").used, load.most.host.used)


def test_a_mapped_file_costs_no_memory_of_the_host() -> None:
    (mapped,) = items("-m", MODEL, "-c", "4096", "--mmap", "-ngl", "10")
    (read,) = items("-m", MODEL, "-c", "4096", "-ngl", "10")
    weights = fitter.measure(MODEL, gpus=CARD, n_gpu_layers=10, **SERVER).host.model  # type: ignore[arg-type]
    assert read["ram"]["uma"] - mapped["ram"]["uma"] == weights > 0


def test_a_projector_and_a_draft_model(directory: Path) -> None:
    projector = write_projector(directory / "mmproj.gguf")
    plain = items("-m", MODEL, "-c", "4096", "--gpu-layers-step", "29")
    more = items("-m", MODEL, "-c", "4096", "--gpu-layers-step", "29", "--mmproj", projector, "-md", MODEL)
    draft = fitter.measure(MODEL, gpus=CARD, n_gpu_layers=0, **SERVER).most  # type: ignore[arg-type]
    assert more[0]["ram"]["uma"] - plain[0]["ram"]["uma"] > draft.host.used
    whole = fitter.measure(MODEL, gpus=CARD, **SERVER).most  # type: ignore[arg-type]
    assert more[1]["vrams"][0]["uma"] - plain[1]["vrams"][0]["uma"] > whole.on("CUDA0").used


def test_a_model_that_reads_texts() -> None:
    path = "shape://bge-small-en-v1.5"
    estimate = asked("-m", path)["estimate"]
    assert (estimate["embeddingOnly"], estimate["reranking"]) == (True, False)
    assert estimate["contextSize"] == estimate["logicalBatchSize"] == estimate["physicalBatchSize"] == 512
    assert asked("-m", path, "-c", "4096", "--in-max-ctx-size")["estimate"]["contextSize"] == 512


def test_a_context_beyond_the_models_own() -> None:
    assert asked("-m", MODEL, "-c", "99999", "--in-max-ctx-size")["estimate"]["contextSize"] == 40960


def test_the_table() -> None:
    done = run_fitter("gguf-parser", "-m", MODEL, "-c", "4096", "--gpu-layers-step", "20")
    assert done.returncode == 0
    assert [line.split()[:2] for line in done.stdout.splitlines()[1:]] == [["0", "no"], ["20", "no"], ["29", "yes"]]


def placements() -> list[dict[str, str]]:
    """Where GPUStack placed models, by whose answer."""
    path = Path(__file__).parents[1] / "data" / "gpustack" / "placements.csv"
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_gpustack_runs_out_of_memory_with_the_other_answers_alone() -> None:
    left: dict[str, list[int]] = {"fitter": [], "gguf_parser": []}
    for row in placements():
        for name, found in left.items():
            for used, total in zip(row[f"{name}_used_mib"].split("+"), row["total_mib"].split("+"), strict=False):
                found += [int(total) - int(used)] if used else []
    assert min(left["fitter"]) >= 500 and len([each for each in left["gguf_parser"] if each < 0]) == 4


@cases("gemma-4-26b-a4b", "jamba-v0.1", "llama-3.1-8b")
def test_what_is_stored_of_them_is_what_llama_cpp_takes(model: str) -> None:
    row = next(row for row in placements() if (row["model"], row["cards"]) == (model, "12"))
    words = ("-c", row["n_ctx"], "-np", "4", "-fa", "-ngl")
    for name in ("fitter", "gguf_parser"):
        (found,) = items("-m", f"shape://{model}:Q4_K_M", *words, row[f"{name}_layers"])
        assert found["vrams"][0]["uma"] >> 20 == int(row[f"{name}_used_mib"])


ON_MODEL_SCOPE = {
    "ms://qwen/Qwen3-GGUF/q4.gguf": "https://modelscope.cn/models/qwen/Qwen3-GGUF/resolve/master/q4.gguf",
    "ms://a/b@v1/c/d.gguf": "https://modelscope.cn/models/a/b/resolve/v1/c/d.gguf",
}


@pytest.mark.parametrize(("url", "there"), ON_MODEL_SCOPE.items())
def test_addresses_of_model_scope(url: str, there: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = addresses.address(url)
    assert (found.url, found.shown, found.is_hub) == (there, url, False)
    assert addresses.download_command(url) == f"curl -LO {there}"
    monkeypatch.setenv("MS_ENDPOINT", "https://mirror.example/")
    assert addresses.address(url).url == there.replace("modelscope.cn", "mirror.example")
    assert addresses.host_of(url) == "mirror.example"


@cases("ms://a/b", "ms://a/../c.gguf", "ms://a/b/../c.gguf", "ms:///a/b/c.gguf")
def test_what_is_no_address_there(url: str) -> None:
    with pytest.raises(fitter.ModelError, match=r"ModelScope|names no file"):
        addresses.address(url)
