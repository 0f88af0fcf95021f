"""Plans for ik_llama.cpp and Ollama, drawn at random, read back by the rules of these programs.

What such a program makes of the text is loaded by llama.cpp once more, without allocating: every device must keep its
margin. ``tests/formats/ik_llama.py`` and ``tests/formats/modelfile.py`` have the rules, with lines of their sources.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import fitter
from fitter.api import Plan
from fitter.errors import PlanError, UsageError
from fitter.parameters.targets import OWN_FORMATS
from tests.formats import ik_llama, modelfile
from tools.models import shapes
from tools.models.shapes import SHAPES
from tools.models.tiny import TINY_DENSE, write_tiny
from tools.models.tiny_projector import write_projector

Drawn = tuple[str, list[str], dict[str, Any]]

EVERY_DAY = 5
DRAWN = 20

NAMED: dict[str, tuple[str, Drawn]] = {
    # its -ts by layers was 10,17,12,23, of which it makes 12, 16, 11 and 23: 29,314 MiB of 23,832
    "ik_llama cuts by bytes": (
        "ik_llama",
        (
            "deepseek-v3.1",
            ["4x rtx-3090"],
            {"n_ctx": 32768, "n_ubatch": 2048, "type_k": "q8_0", "type_v": "q8_0", "flash_attn": "on"},
        ),
    ),
    "ik_llama with a part of the layers": (
        "ik_llama",
        ("llama-3.1-70b", ["2x rtx-3090"], {"n_ctx": 8192, "n_gpu_layers": 50}),
    ),
    "ik_llama with all caches on the host": ("ik_llama", ("gemma3-12b", ["8GiB"], {"n_ctx": 65536})),
    "ollama on two cards": ("ollama", ("llama-3.1-70b", ["2x rtx-4090"], {"n_ctx": 5888})),
    "ollama on three cards": ("ollama", ("qwen3-32b", ["3x 16GiB"], {"n_ctx": 32768})),
}

MODELS = (
    *("llama-3.1-8b", "qwen3-32b", "gemma3-12b", "llama-3.1-70b"),
    *("qwen3-30b-a3b", "gpt-oss-20b", "gpt-oss-120b", "glm45-air", "qwen3-235b-a22b", "deepseek-v3.1"),
    "qwen3-next-80b-a3b",
)
CARDS = ("rtx-3060-12gb", "rtx-3090", "rtx-4090", "8GiB", "16GiB", "rtx-4090:free=15GiB")
SAID = {"ik_llama": ("a draft model by bytes",), "ollama": ("a DRAFT file as heads of the model", "one slot for")}
"""What each program cannot be told, in the one line that says so."""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("held")
    write_projector(folder / "mmproj.gguf")
    write_tiny(folder / "draft.gguf", TINY_DENSE)
    return folder


def draw(pick: random.Random, files: Path) -> Drawn:
    """A model, cards and keywords of ``fit``."""
    name = pick.choice(MODELS)
    count = pick.randint(1, 8)
    kinds = pick.choice([[pick.choice(CARDS)] * count, pick.choices(CARDS, k=count)])
    words: dict[str, Any] = {"n_ctx": pick.choice([4096, 8192, 32768])}
    if pick.random() < 0.5:
        words |= dict.fromkeys(("type_k", "type_v"), "q8_0") | {"flash_attn": "on"}
    if pick.random() < 0.3:
        words["n_seq_max"] = pick.choice([2, 4])
    if pick.random() < 0.3:
        words["n_ubatch"] = pick.choice([256, 1024, 2048])
    drafts: list[dict[str, Any]] = [{"model_draft": files / "draft.gguf"}, {"mtp": True}]
    others = pick.choice([{}, {}, {"mmproj": files / "mmproj.gguf"}, *drafts])
    if "mtp" not in others or name == "glm45-air":
        words |= others
    return name, kinds, words


def planned(program: str, number: int | str, files: Path) -> tuple[Drawn, Plan | str]:
    """The named plan, or the first drawn one that fits; or what the program cannot be told."""
    pick = random.Random(f"{program} {number}")
    while True:
        drawn = name, kinds, words = NAMED[number][1] if isinstance(number, str) else draw(pick, files)
        model = shapes.write(name, files, vocab=False)
        try:
            plan = fitter.fit(model, gpus=kinds, program=program, host_bandwidth="60GB/s", **words)
            if plan.fits:
                plan.format(program)
                return drawn, plan
            assert not isinstance(number, str), plan.problems
        except (PlanError, UsageError) as error:
            assert not isinstance(number, str), error
            return drawn, str(error)


def check(plan: Plan, drawn: Drawn, parameters: Mapping[str, Any], more: Mapping[str, int]) -> None:
    """Load what the program makes of the text, and check the margin of every device."""
    name, kinds, words = drawn
    mtp = {"load_mtp": True, "n_rs_seq": 3} if "mtp" in words else {}
    breakdown = fitter.measure(Path(plan.model.path), gpus=kinds, **parameters, **mtp)
    for use in plan.devices:
        taken = breakdown.on(use.name).used + sum(each.on(use.name) for each in plan.shared if each.kind != "reserve")
        assert taken + more.get(use.name, 0) <= use.free - use.margin, (name, kinds, words, use.name)


def numbers(program: str) -> list[Any]:
    named = [pytest.param(name, id=name) for name, (of, _) in NAMED.items() if of == program]
    return [*named, *(pytest.param(n, marks=[] if n < EVERY_DAY else pytest.mark.slow) for n in range(DRAWN))]


def test_ik_llama_does_not_cut_by_layers() -> None:
    """What a replay of its source gave: this -ts, meant for ten layers on the first card, puts twelve there."""
    words = "-c 32768 -dev CUDA0,CUDA1,CUDA2,CUDA3 -ngl 999 -ts 10,17,12,23 -ub 2048 -ctk q8_0 -ctv q8_0 -np 1 -fa on"
    assert ik_llama.counts(SHAPES["deepseek-v3.1"], words.split()) == [12, 16, 11, 23]


@pytest.mark.parametrize("number", numbers("ik_llama"))
def test_ik_llama_holds_plans(number: int | str, files: Path) -> None:
    drawn, plan = planned("ik_llama", number, files)
    if isinstance(plan, str):
        assert any(said in plan for said in SAID["ik_llama"]), plan
        return
    shape, found = SHAPES[drawn[0]], ik_llama.parse(words := plan.format("ik_llama").split(" "))
    names = tuple(name for name in found["-dev"].split(",") if name != "none")
    counts = ik_llama.counts(shape, words)
    layers = int(found["-ngl"])
    # -ngl below all layers leaves the output out, which -ot then puts on a device
    is_part = 0 < layers <= shape.n_layer
    homes = [device for device, count in enumerate(counts) for _ in range(count)]
    if is_part:
        counts[homes[-1]] += 1
        homes.append(homes[-1])
    # attn_kv_b, which it computes of attn_k_b and attn_v_b (src/llama.cpp, line 3406)
    computed = {} if shape.architecture not in ik_llama.MLA else dict.fromkeys(range(shape.n_layer), 544 * 256 * 128)
    more: dict[str, int] = {}
    for layer, device in enumerate(homes, shape.n_layer + 1 - len(homes)):
        more[names[device]] = more.get(names[device], 0) + computed.get(layer, 0)
    parameters = {
        "n_ctx": int(found["-c"]),
        "devices": names or ["none"],
        "n_gpu_layers": sum(counts),
        "tensor_split": counts if len(names) > 1 and any(counts) else None,
        "override_tensor": [found["-ot"]] if "-ot" in found else None,
        "n_batch": int(found.get("-b", "2048")),
        "n_ubatch": int(found.get("-ub", "512")),
        "n_seq_max": int(found["-np"]),
        "type_k": found.get("-ctk", "f16"),
        "type_v": found.get("-ctv", "f16"),
        "flash_attn": found["-fa"],
        "offload_kqv": "-nkvo" not in found,
        "swa_full": True,
        "program": "any",
    }
    check(plan, drawn, parameters, more)


@pytest.mark.parametrize("number", numbers("ollama"))
def test_ollama_holds_plans(number: int | str, files: Path) -> None:
    drawn, plan = planned("ollama", number, files)
    if isinstance(plan, str):
        assert any(said in plan for said in SAID["ollama"]), plan
        return
    args = modelfile.llama_server(modelfile.parse(plan.format("ollama")), SHAPES[drawn[0]], plan.devices)
    if "mmproj" in drawn[2]:
        (use,) = (use for use in plan.shared if use.kind == "projector")
        places = {row.device or "host" for row in use.rows if row.model}
        assert places == {args.mmproj_device}
    check(plan, drawn, {**args.parameters, "program": "llama-server"}, {})


def test_every_program_with_a_text_is_drawn() -> None:
    assert set(OWN_FORMATS) == SAID.keys()
