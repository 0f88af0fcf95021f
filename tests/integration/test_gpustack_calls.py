"""Every call of gguf-parser that GPUStack's calculator can write, answered by ``fitter gguf-parser``.

``LINE`` is a line of its ``gpustack/scheduler/calculator.py`` at 47277d7: for a user's parameter the field of
``GGUFParserCommandMutableParameters`` that it sets, which ``extend_command`` writes as ``--name=value``, and for the
others the line that writes it.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest

import fitter
from fitter.cli import main
from fitter.storage import parse_toml
from tests.support.cases import cases, named_cases
from tests.support.hub import hub_of
from tests.support.ranges import serving
from tools.models.tiny import TINY_DENSE, write_tiny
from tools.models.tiny_lora import write_lora
from tools.models.tiny_projector import write_projector

MIB = 1 << 20
IMMUTABLE = ["--skip-tokenizer", "--skip-metadata", "--json"]  # 560 to 562
CALLS: dict[str, dict[str, list[Any]]] = parse_toml(
    (Path(__file__).parents[1] / "data" / "gpustack" / "parameters.toml").read_text("utf-8")
)
MEASURED: dict[str, Any] = {"program": "llama-server", "n_seq_max": 4, "load_mode": "none", "n_ctx": 8192}


OFFLOADS = {
    "full": (575, ["--gpu-layers", "-1"]),
    "partial": (577, ["--gpu-layers-step", "1"]),
    "disable": (579, ["--gpu-layers", "0"]),
}
SPLITS: dict[str, tuple[int, list[str], int, int]] = {
    "no split": (582, [], 1, 0),
    "a user's split": (585, ["--tensor-split", "1,3"], 2, 0),
    "free MiB": (588, ["--tensor-split", "24210,24210,0"], 3, 0),
    "a remote card": (596, ["--tensor-split", "1,1", "--rpc", "host:80"], 2, 1),
    "remote cards": (596, ["--tensor-split", "24210,12000,24210", "--rpc", "a:50053,b:50054"], 3, 2),
}
"""LINE, its words, how many devices there are, and how many of them are remote."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny") / "org" / "repo"
    folder.mkdir(parents=True)
    return write_tiny(folder / "tiny.gguf", TINY_DENSE)


def command(*own: str, offload: str = "full", split: str = "no split") -> list[str]:
    """What GPUStack runs, without the source, for a user's parameters in its own order."""
    words = {name: value for name, (_, value) in CALLS["defaults"].items()}
    words |= dict(word.split("=", 1) for word in own)
    mutable = [f"--{name}={value}" for name, value in words.items()]
    return [*IMMUTABLE, *mutable, "--cache-path", "/nowhere", *OFFLOADS[offload][1], *SPLITS[split][1]]  # 572


@pytest.fixture
def answer(capsys: pytest.CaptureFixture[str]) -> Any:
    def answered(*words: str | Path) -> dict[str, Any]:
        status = main(["gguf-parser", *map(str, words)])
        said = capsys.readouterr()
        assert status == 0, said.err
        document: dict[str, Any] = json.loads(said.out)
        return document

    return answered


@functools.cache
def measured(path: Path, keywords: str) -> tuple[int, int]:
    """Bytes of the card and the host, by llama.cpp."""
    load = fitter.measure(path, gpus=["9999GiB"], **json.loads(keywords)).most
    return load.on("CUDA0").used, load.host.used


@named_cases(*((name, *row) for name, row in CALLS["parameters"].items()))
def test_a_users_parameter(line: int, word: str, changes: dict[str, Any], model: Path, answer: Any) -> None:
    document = answer(*command(word), "--path", model)
    (row,) = document["estimate"]["items"]
    (card,) = row["vrams"]
    keywords = {**MEASURED, **changes}
    on_card, on_host = measured(model, json.dumps(keywords))
    if keywords["load_mode"] == "mmap":
        load = fitter.measure(model, gpus=["9999GiB"], **keywords).most
        on_host -= load.host.model
    assert (card["uma"], row["ram"]["uma"]) == (on_card, on_host)
    assert card["nonuma"] - card["uma"] == (700 if "700" in word else 500) * MIB
    assert (row["fullOffloaded"], card["handleOutputLayer"]) == (True, True)


@cases({"flash_attn": "off"}, {"n_batch": 256}, {"override_tensor": ["ffn_.*=CPU"]})
def test_the_model_here_shows_what_changes(changes: dict[str, Any], model: Path) -> None:
    """Or the table above would say little."""
    assert measured(model, json.dumps({**MEASURED, **changes})) != measured(model, json.dumps(MEASURED))


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("offload", OFFLOADS)
def test_a_call(offload: str, split: str, model: Path, answer: Any) -> None:
    _, _, n_devices, n_remote = SPLITS[split]
    document = answer(*command(offload=offload, split=split), "--path", model)
    rows = document["estimate"]["items"]
    counts = {"full": [5], "partial": [0, 1, 2, 3, 4, 5], "disable": [0]}[offload]
    assert [row["offloadLayers"] for row in rows] == counts
    for row in rows:
        assert [each["remote"] for each in row["vrams"]] == [True] * n_remote + [False] * (n_devices - n_remote)
        layers = [row["ram"]["handleLayers"], *(each["handleLayers"] for each in row["vrams"])]
        assert sum(layers) == 4 and sum(layers[1:]) == max(0, row["offloadLayers"] - 1)


@named_cases(
    ("all on the main card", ["split-mode=none", "main-gpu=1"], "a user's split", [0, 4]),
    ("all on the first card", ["split-mode=none", "main-gpu=0"], "a user's split", [4, 0]),
    ("all on the only card", ["split-mode=none", "main-gpu=1"], "no split", [4]),
    ("all on the own card", ["split-mode=none", "main-gpu=1"], "a remote card", [0, 4]),
    ("rows as layers", ["split-mode=row", "main-gpu=1"], "a user's split", [2, 2]),
    ("an override without its card", ["override-tensor=ffn_up=CUDA3"], "a user's split", [2, 2]),
    ("an override of the own card", ["override-tensor=ffn_up=CUDA0"], "a remote card", [3, 1]),
)
def test_where_the_layers_are(own: list[str], split: str, layers: list[int], model: Path, answer: Any) -> None:
    (row,) = answer(*command(*own, split=split), "--path", model)["estimate"]["items"]
    assert [each["handleLayers"] for each in row["vrams"]] == layers
    assert [each["uma"] > 0 for each in row["vrams"]] == [count > 0 for count in layers]
    if "split-mode=none" in own:
        assert max(each["uma"] for each in row["vrams"]) == measured(model, json.dumps(MEASURED))[0]


def test_overrides_name_cards_and_servers(model: Path, answer: Any) -> None:
    def used(override: str, split: str = "a remote card") -> list[int]:
        (row,) = answer(*command(f"override-tensor={override}", split=split), "--path", model)["estimate"]["items"]
        return [each["uma"] for each in row["vrams"]]

    plain = used("nothing=CPU")
    # CUDA0 is the first card of the own machine, wherever its name comes from
    own = used("ffn_up=CUDA0")
    assert own[0] < plain[0] and own[1] > plain[1] and own == used("ffn_up=ROCm0") == used("ffn_up=CUDA7")
    server = used("ffn_up=RPC[host:80]")
    assert server[0] > plain[0] and server[1] < plain[1] and server == used("ffn_up=RPC0[host:80]")
    cards = used("ffn_up=CUDA1", "a user's split")
    assert cards[1] > used("nothing=CPU", "a user's split")[1]


def test_a_card_that_is_not_there_is_said(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gguf-parser", *command("override-tensor=ffn_up=CUDA1", "split-mode=row"), "--path", str(model)]) == 0
    assert capsys.readouterr().err.splitlines() == [
        "fitter: warning: llama.cpp's CUDA, ROCm, Vulkan and Metal do not split rows: --split-mode row is measured as "
        "layer",
        "fitter: warning: there is no CUDA1: what --override-tensor puts there counts on the last device",
    ]


def test_a_card_stands_for_every_share(model: Path, answer: Any) -> None:
    words = ["--json", "--path", model, "--ctx-size=512", "--tensor-split", "1,1"]
    one = answer(*words, "--gpu", "rtx-4060")["estimate"]["items"]
    assert one == answer(*words, "--gpu", "2x rtx-4060")["estimate"]["items"]
    assert [each["handleLayers"] for each in one[0]["vrams"]] == [3, 1]


def test_a_draft_has_caches_of_the_usual_type(model: Path, answer: Any) -> None:
    """llama-server's ``-ctk`` is for the model alone."""

    def taken(*words: str | Path) -> int:
        (row,) = answer("--json", "--path", model, "--ctx-size=8192", *words)["estimate"]["items"]
        return int(row["vrams"][0]["uma"])

    draft = ["--draft-path", model]
    assert taken("--cache-type-k=q8_0", *draft) - taken("--cache-type-k=q8_0") == taken(*draft) - taken()
    assert taken("--cache-type-k=q8_0") < taken()


def test_adapters_beside_the_model(model: Path, directory: Path, answer: Any) -> None:
    words = ["--json", "--path", model, "--ctx-size=512", "--tensor-split", "1,1", "--gpu-layers", "4"]
    (plain,) = answer(*words)["estimate"]["items"]
    (more,) = answer(*words, "--control-vector-path", "a.gguf", "--control-vector-url", "b.gguf")["estimate"]["items"]
    width = 4 * TINY_DENSE.n_embd
    # a vector for each layer but the first, which the host has
    assert plain["ram"]["handleLayers"] == 1 and more["ram"]["uma"] == plain["ram"]["uma"]
    grown = [new["uma"] - old["uma"] for new, old in zip(more["vrams"], plain["vrams"], strict=True)]
    assert grown == [2 * width, width]
    # Stable Diffusion's files are nothing to a model of text
    assert answer(*words, "--upscale-path", "a.gguf", "--control-net-path", "b.gguf")["estimate"]["items"] == [plain]
    lora = write_lora(directory / "lora.gguf", model)
    (adapted,) = answer(*words, "--lora-path", lora)["estimate"]["items"]
    assert sum(each["uma"] for each in adapted["vrams"]) > sum(each["uma"] for each in plain["vrams"])


def test_sources(model: Path, answer: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Line 1217, 1225 and 1256: a repository of a hub, and its projector; adapters of it are gguf-parser's alone."""
    there = model.parent
    write_lora(there / "lora.gguf", model)
    write_projector(there / "mmproj.gguf")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    local = answer(*command(), "--path", model, "--mmproj", there / "mmproj.gguf")["estimate"]
    adapted = answer(*command(), "--path", model, "--lora", there / "lora.gguf")["estimate"]
    with hub_of(there.parent.parent, token="mine") as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        # a token is for its own hub
        source = ["--hf-repo", "org/repo", "--hf-file", "tiny.gguf", "--ms-token", "yours"]
        # _gguf_parser_env, line 197
        monkeypatch.setenv("HF_TOKEN", "mine")
        assert answer(*command(), *source, "--hf-mmproj-file", "mmproj.gguf")["estimate"] == local
        assert answer(*command(), *source, "--hf-lora-file", "lora.gguf")["estimate"] == adapted
    resolved = tmp_path / "models" / "org" / "repo" / "resolve" / "master"
    resolved.parent.mkdir(parents=True)
    resolved.symlink_to(there)
    with serving(tmp_path) as server:
        monkeypatch.setenv("MS_ENDPOINT", server.url)
        source = ["--ms-repo", "org/repo", "--ms-file", "tiny.gguf", "--ms-token", "yours"]
        assert answer(*command(), *source, "--ms-mmproj-file", "mmproj.gguf")["estimate"] == local
        assert answer(*command(), *source, "--ms-lora-file", "lora.gguf")["estimate"] == adapted
        assert {each.get("Authorization") for each in server.headers} == {"Bearer yours"}


def test_headers_go_with_an_address(model: Path, answer: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with serving(model.parent) as server:
        words = [f"--url={server.url}/{model.name}", "--token=t", "--hf-token=u", "--header=X-Team:  a: b"]
        assert answer(*command(), *words)["estimate"] == answer(*command(), "--path", model)["estimate"]
        assert {(each["Authorization"], each["X-Team"]) for each in server.headers} == {("Bearer t", "a: b")}
        server.forget()
        answer(*command(), f"--url={server.url}//{model.name}")
        assert all("X-Team" not in each for each in server.headers)
