"""How weights get into host memory: what is printed, loaded with and estimated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import fitter
from fitter.output.keywords import mapping
from tests.support.cases import cases, named_cases
from tests.support.llama_builds import every, where

DENSE, EXPERTS = MODELS = ("llama-3.1-8b", "qwen3-30b-a3b")


@named_cases(
    ("experts on the host", EXPERTS, {"gpus": "rtx-3060"}, "none"),
    ("experts on the host, in Vulkan", EXPERTS, {"gpus": "vulkan:8GiB"}, "none"),
    ("layers on the host, in Vulkan", DENSE, {"gpus": "2x vulkan:3GiB"}, "none"),
    ("for ik_llama.cpp", EXPERTS, {"gpus": "vulkan:8GiB", "program": "ik_llama"}, "none"),
    ("for Ollama", EXPERTS, {"gpus": "vulkan:8GiB", "program": "ollama"}, "none"),
    ("the user's word stands, in Vulkan", EXPERTS, {"gpus": "vulkan:8GiB", "load_mode": "mmap"}, "mmap"),
    ("and is no slower on the card", DENSE, {"gpus": "vulkan:24GiB", "load_mode": "mmap"}, "mmap"),
    ("layers on the host", DENSE, {"gpus": "4GiB"}, "none"),
    ("all on the card", DENSE, {"gpus": "rtx-4090"}, "auto"),
    ("the user's word stands", EXPERTS, {"gpus": "rtx-3060", "load_mode": "mmap"}, "mmap"),
    ("a Mac has one memory", EXPERTS, {"gpus": "metal:48GiB"}, "auto"),
    ("where the GPU would map what the host has", EXPERTS, {"gpus": "metal:24GiB"}, "none"),
    ("no card", DENSE, {"gpus": "none"}, "auto"),
    (
        "weights that are read again and again",
        EXPERTS,
        {"gpus": "rtx-3060", "host_memory": "6GiB", "allow": ("paging",)},
        "auto",
    ),
    (
        "that are read again and again where auto comes to none",
        EXPERTS,
        {"gpus": "dgx-spark:available=14GiB", "allow": ("paging",)},
        "mmap",
    ),
    ("that have room where auto comes to none", EXPERTS, {"gpus": "dgx-spark", "allow": ("paging",)}, "auto"),
    ("no device computes with them", EXPERTS, {"gpus": "rtx-3060", "op_offload": False}, "auto"),
    ("all devices split every tensor", EXPERTS, {"gpus": "2x 9GiB", "split_mode": "tensor"}, "auto"),
    ("prompts too short to copy for", EXPERTS, {"gpus": "rtx-3060", "prompt": 31, "generate": 8}, "auto"),
    ("prompts just long enough", EXPERTS, {"gpus": "rtx-3060", "prompt": 32, "generate": 8}, "none"),
    ("for any program", EXPERTS, {"gpus": "rtx-3060", "program": "any"}, "auto"),
)
def test_the_mode_of_a_plan(model: str, keywords: dict[str, Any], mode: str, models: dict[str, Path]) -> None:
    plan = fitter.fit(models[model], **{"program": "llama-server", "n_ctx": 4096, **keywords})
    assert plan.fits
    args = plan.arguments()
    assert (args[args.index("-lm") + 1] if "-lm" in args else "auto") == mode == plan.to_dict()["params"]["load_mode"]
    note = f"with --load-mode {mode} prompts are slower, since devices copy weights from the mapped file: leave it out"
    is_slower = keywords.get("load_mode") == "mmap" and model == EXPERTS
    assert is_slower == (note in plan.notes)


@cases(("args", " -lm none "), ("ik_llama", " --no-mmap "), ("ollama", "\nPARAMETER use_mmap false\n"))
def test_what_each_program_is_told(name: str, words: str, models: dict[str, Path]) -> None:
    program = "llama-server" if name == "args" else name
    assert words in fitter.fit(models[EXPERTS], gpus="vulkan:8GiB", n_ctx=4096, program=program).format(name)


@pytest.mark.parametrize("name", every())
def test_the_words_of_a_build(models: dict[str, Path], name: str) -> None:
    keywords: dict[str, Any] = {"gpus": "rtx-3060", "n_ctx": 4096, "program": "llama-server", "llama_cpp": where(name)}
    plan = fitter.fit(models[EXPERTS], **keywords)
    numbers = tuple(int(part) for part in plan.llama_cpp.ggml.split("-")[0].split("."))
    word = "--no-mmap" if numbers < (0, 19, 0) else "-lm none"
    assert f" {word} " in " ".join(plan.arguments())


def test_llama_is_told_as_well(models: dict[str, Path]) -> None:
    plan = fitter.fit(models[DENSE], gpus="4GiB", n_ctx=4096, program="llama-cpp-python")
    assert plan.params.planned()["load_mode"] == "none"
    assert mapping(plan) == {"use_mmap": False}
    whole = fitter.fit(models[DENSE], gpus="rtx-4090", n_ctx=4096, program="llama-cpp-python")
    assert mapping(whole) == {}


def test_copies_from_mapped_weights_are_slower(models: dict[str, Path]) -> None:
    """Prompts alone, and only where a device copies the weights; ``auto`` is what a plan makes of it."""

    def price(**keywords: Any) -> tuple[float, float]:
        found = fitter.estimate(models[EXPERTS], gpus="h100-sxm", n_ctx=8192, **keywords)
        return found.prompt_tokens_per_second, found.generation_tokens_per_second

    mapped, read = price(cpu_moe=True, load_mode="mmap"), price(cpu_moe=True, load_mode="none")
    assert read[0] > 2 * mapped[0] and read[1] == mapped[1]
    assert price(cpu_moe=True) == read
    assert price(load_mode="mmap") == price(load_mode="none")
