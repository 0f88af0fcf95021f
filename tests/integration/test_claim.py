"""``fitter claim``: a llama-server keeps the memory of its claim, and a device claim is what plans say of such."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

import fitter
from fitter.api.claim_model import claim_device
from fitter.model.shapes.catalogue import published_shape
from fitter.planning.plan.claims import pod_claim
from tests.support.cases import cases
from tests.support.command import run_fitter
from tests.support.hub import hub_of
from tools.measurements import claimed
from tools.models.tiny import TINY_DENSE, write_tiny

SHAPE = "shape://llama-3.1-8b"
GIB = 1 << 30
REFERENCE = Path(__file__).parents[2] / "docs" / "reference"


def asked(*words: str | Path) -> dict[str, Any]:
    """The document that the command prints."""
    done = run_fitter("claim", *map(str, words), "--json")
    assert done.returncode == 0, done.stderr
    document: dict[str, Any] = json.loads(done.stdout)
    kind = "device" if "--min-tps" in words else "pod"
    jsonschema.validate(document, json.loads((REFERENCE / f"{kind}-claim.schema.json").read_text()))
    return document


# --- a pod


def test_a_server_keeps_its_claim_and_is_killed_with_less(tmp_path: Path) -> None:
    plan = claimed.plan_of(claimed.LOADS["weights"], tmp_path)
    claim = pod_claim(plan)
    full = claimed.serve(plan, claim.memory, 40)
    assert (full.was_killed, full.answered) == (False, 40)
    assert full.own <= claim.memory
    with claimed.memory_group(claim.memory) as group:
        is_limited = group is not None
    if is_limited:
        assert claimed.serve(plan, int(claim.memory * claimed.LESS), 40).was_killed
    else:
        assert full.most > claim.memory * claimed.LESS


def test_the_command_says_what_the_deployment_asks_for(tmp_path: Path) -> None:
    model = write_tiny(tmp_path / "tiny.gguf", TINY_DENSE)
    words = (model, "--gpu", "24GiB", "-c", "1024", "-cram", "64")
    document = asked(*words)
    assert document["requests"] == {"memory": f"{document['memory'] >> 20}Mi", "nvidia.com/gpu": "1"}
    deployment = run_fitter(*map(str, words), "--for", "llama-server", "--format", "kubernetes", "-q").stdout
    assert deployment.count(f'memory: "{document["requests"]["memory"]}"') == 2


# --- a device


def test_a_card_with_the_claims_bandwidth_is_as_fast() -> None:
    for gpu, bandwidth in (("rtx-3090", 936), ("rtx-4090", 1008)):
        load = {
            "gpus": gpu,
            "n_ctx": 8192,
            "prompt": 2048,
            "n_gpu_layers": -1,
            "program": "llama-server",
            "n_seq_max": 1,
        }
        speed = fitter.estimate(f"{SHAPE}:Q4_K_M", **load).generation_tokens_per_second
        found = asked(SHAPE, "--quant", "Q4_K_M", "-np", "1", "--min-tps", f"{speed:.4f}")
        assert found["minBandwidthGBs"] == pytest.approx(bandwidth, rel=0.01)


def test_the_model_is_on_a_card_with_the_claims_memory() -> None:
    found = asked(SHAPE, "--min-tps", "20", "-np", "1", "-c", "16384")
    assert found["quant"] == "Q4_K_M"
    load = {"gpus": "9999GiB", "n_gpu_layers": -1, "n_ctx": 16384, "n_seq_max": 1, "program": "llama-server"}
    used = sum(row.used for row in fitter.measure(f"{SHAPE}:Q4_K_M", **load).rows if not row.is_host)
    # driver and process take a part of a card, never the tenth of one of this size
    assert used < found["memoryGi"] * GIB * 0.96
    assert (found["memoryGi"] - 1) * GIB * 0.9 < used


def test_percent_of_the_bandwidth() -> None:
    found = {share: asked(SHAPE, "--min-tps", "20", "--efficiency", str(share)) for share in (50, 100)}
    assert found[50]["minBandwidthGBs"] == pytest.approx(2 * found[100]["minBandwidthGBs"], abs=1)
    # the token embedding is looked up
    assert 0.85 < found[100]["minBandwidthGBs"] / (20 * found[100]["weightsGb"]) < 1
    assert [found[share]["efficiencyPct"] for share in found] == [50, 100]


def test_the_words_of_llmfit_dra(tmp_path: Path) -> None:
    model = write_tiny(tmp_path / "tiny-Q4_0.gguf", TINY_DENSE)
    found = asked(model, "--min-tps", "20", "--quant", "Q4_0", "--efficiency", "55")
    kinds = {key: type(value) for key, value in found.items()}
    assert kinds == {
        "schema": int,
        "model": str,
        "claimName": str,
        "quant": str,
        "weightsGb": float,
        "memoryGi": int,
        "minBandwidthGBs": int,
        "minTps": float,
        "efficiencyPct": int,
        "resolverVersion": str,
    }
    assert found["claimName"] == "tiny-q4-0-fit"


@pytest.mark.parametrize("more", [("--min-tps", "20"), ("--gpu", "8GiB")], ids=["a device", "a pod"])
@pytest.mark.parametrize(
    ("name", "quant", "why"),
    [
        ("tiny-Q4_0.gguf", "Q8_0", "is a file of Q4_0, and --quant says Q8_0: name the file of that type"),
        ("tiny.gguf", "Q8_0", "is one file, whose name says no file type, and --quant says Q8_0: name the file"),
        ("tiny.gguf", "nonsense", "is one file, whose name says no file type, and --quant says nonsense"),
        ("tiny.gguf", "", "--quant is an empty text: give a file type"),
    ],
)
def test_a_file_type_that_the_file_does_not_say(
    tmp_path: Path, name: str, quant: str, why: str, more: tuple[str, str]
) -> None:
    model = write_tiny(tmp_path / name, TINY_DENSE)
    done = run_fitter("claim", str(model), "--quant", quant, *more)
    assert (done.returncode, done.stdout) == (2, "")
    assert why in done.stderr


@cases(
    ({"quant": 5}, "quant is 5"), ({"min_tps": "x"}, "min-tps is 'x'"), ({"efficiency": [1]}, r"efficiency is \[1\]")
)
def test_values_of_other_kinds_in_python(words: dict[str, Any], why: str) -> None:
    with pytest.raises(fitter.UsageError, match=why):
        claim_device(SHAPE, **{"min_tps": 20, **words})


def test_names_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = tmp_path / "org" / "Small-1B"
    small.mkdir(parents=True)
    (small / "config.json").write_text(json.dumps(dict(published_shape("smollm2-135m").config)))
    files = tmp_path / "org" / "Tiny-GGUF"
    files.mkdir()
    write_tiny(files / "tiny-Q8_0.gguf", TINY_DENSE)
    write_tiny(files / "tiny-Q4_0.gguf", TINY_DENSE)
    with hub_of(tmp_path) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        found = asked("org/Small-1B", "--quant", "Q8_0", "--min-tps", "20")
        assert (found["model"], found["quant"], found["claimName"]) == ("org/Small-1B", "Q8_0", "small-1b-fit")
        for name in ("org/Tiny-GGUF", "hf://org/Tiny-GGUF"):
            assert asked(name, "--quant", "Q8_0", "--min-tps", "20")["quant"] == "Q8_0"
            assert asked(name, "--quant", "Q8_0", "--gpu", "none")["claimName"] == "tiny-q8-0"
        refused = run_fitter("claim", "org/Tiny-GGUF", "--min-tps", "20")
        assert refused.returncode == 2
        assert "has no Q4_K_M: its file types are Q4_0, Q8_0; name one with --quant" in refused.stderr
