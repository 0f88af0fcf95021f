"""Drawn plans in every format of llama-server's, read back: upstream's own parser has the plan's parameters again.

One to eight cards, dense models and experts, vision, draft models, slots. A few are everyday tests, twenty a slow one.
"""

from __future__ import annotations

import ast
import json
import random
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

import fitter
from fitter.api import Plan
from fitter.errors import PlanError
from fitter.llama.client import Worker
from fitter.llama.types import Params, VirtualDevice
from fitter.machine.gpu import parse_gpus
from tests.formats import upstream as server
from tests.integration.test_formats import said, variables_of
from tests.unit import test_output_formats as readers
from tools.models import shapes
from tools.models.tiny_projector import write_projector

MIB = 1 << 20
EVERYDAY, ALL = 5, 20
SMALL = (("llama-3.1-8b", "gemma3-12b", "nemotron-h-9b", "qwen3-32b"), ("qwen3-30b-a3b", "gpt-oss-20b"))
LARGE = (("llama-3.1-70b", "qwen3-32b"), ("gpt-oss-120b", "glm45-air", "qwen3-235b-a22b", "qwen3-next-80b-a3b"))
"""Models for up to three cards, and for more: dense ones, and those with experts."""
CARDS = (("rtx-3060-12gb", "rtx-4090", "rtx-3090", "8GiB", "10GiB"), ("rocm:gfx1100:24GiB", "rocm:gfx1030:16GiB"))


class Drawn(NamedTuple):
    """What is planned: the name of a model, cards, and keywords of ``fit``."""

    model: str
    gpus: tuple[str, ...]
    keywords: dict[str, Any]


def draw(number: int, directory: Path) -> Drawn:
    pick = random.Random(number)
    # the number of cards goes round, every second model has experts, and each companion has its turn
    count = number * 3 % 8 + 1
    model = pick.choice((LARGE if count > 3 else SMALL)[number % 2])
    kinds = pick.sample(CARDS[number % 5 == 4], k=pick.choice([1, 2]))
    gpus = tuple(pick.choice(kinds) for _ in range(count))
    keywords: dict[str, Any] = {"n_ctx": pick.choice([4096, 16384, 32768])}
    if number % 4 == 1:
        keywords["mmproj"] = write_projector(directory / f"mmproj, {number}.gguf")
    if number % 4 == 2:
        keywords["model_draft"] = shapes.write("llama-3.1-8b", directory)
    if number % 3 == 0:
        keywords |= {"n_seq_max": pick.choice([1, 2, 8])}
    if pick.random() < 0.4:
        keywords |= {"type_k": "q8_0", "type_v": "q8_0", "flash_attn": "on"}
    if pick.random() < 0.3:
        keywords["n_ubatch"] = pick.choice([256, 1024])
    return Drawn(model, gpus, keywords)


# --- each format's words for llama-server


def of_llmkube(text: str) -> list[str]:
    """BuildArgs of LLMKube at 907ac8d (``internal/controller/runtime_llamacpp.go:76``), for what fitter writes."""
    model, service = yaml.safe_load_all(text)
    hardware, spec = model["spec"]["hardware"], service["spec"]
    gpu = hardware.get("gpu", {})
    words = ["--model", model["spec"]["source"], "--port", "8080", "--host", "::"]
    if gpu:
        words += ["--n-gpu-layers", str(gpu.get("layers", 0) or 99)]
        if gpu["count"] > 1:
            # gpu_sharding.go, line 64
            words += ["--split-mode", "layer", "--tensor-split", ",".join(["1"] * gpu["count"])]
    words += ["--ctx-size", str(spec["contextSize"])]
    words += ["--parallel", str(spec["parallelSlots"])] if "parallelSlots" in spec else []
    words += ["--flash-attn", "on"] if gpu and spec.get("flashAttention") else []
    for key, option in (("cacheTypeK", "--cache-type-k"), ("cacheTypeV", "--cache-type-v")):
        words += [option, spec[key]] if key in spec else []
    words += ["--cpu-moe"] if spec.get("moeCPUOffload") else []
    words += ["--n-cpu-moe", str(spec["moeCPULayers"])] if "moeCPULayers" in spec else []
    words += ["--no-kv-offload"] if spec.get("noKvOffload") else []
    words += [word for each in spec.get("tensorOverrides", []) for word in ("--override-tensor", each)]
    for key, option in (("batchSize", "--batch-size"), ("uBatchSize", "--ubatch-size")):
        words += [option, str(spec[key])] if key in spec else []
    return [readers.expanded(word) for word in [*words, *spec["extraArgs"], "--metrics"]]


def of_llama_swap(text: str) -> list[str]:
    return readers.from_llama_swap(text)[1:]


WORDS: dict[str, Callable[[str], list[str]]] = {
    "args": lambda text: text.split(" "),
    "shell": readers.in_sh,
    "json": lambda text: list(json.loads(text)["arguments"]),
    "compose": readers.from_compose,
    "kubernetes": readers.from_kubernetes,
    "llama-swap": of_llama_swap,
    "llmkube": of_llmkube,
}
WITHOUT_MODEL = ("args", "shell", "json")


def read(form: str, text: str, reader: Path, devices: tuple[VirtualDevice, ...], directory: Path) -> server.Reading:
    """What llama-server has of a plan's text."""
    if form == "env":
        return server.read(reader, devices, variables=variables_of(text, directory))
    if form == "ini":
        (directory / "models.ini").write_text(text + "\n")
        _, words = server.preset(reader, directory / "models.ini")
    else:
        words = WORDS[form](text)
    return server.read(reader, devices, words)


def without_order(reading: server.Reading) -> server.Reading:
    """Sort the overrides, whose order is nothing where all are for the host: presets and LLMKube have their own."""
    overrides = reading.params.tensor_buft_overrides
    if any(each.buffer_type != "CPU" for each in overrides):
        return reading
    ordered = tuple(sorted(overrides, key=lambda each: each.pattern))
    return replace(reading, params=replace(reading.params, tensor_buft_overrides=ordered))


CANNOT = {
    "env": r"no environment variable for (--no-op-offload|-devd)",
    "llmkube": r"no field for the file of (-md|--mmproj): use kubernetes|the plan leaves out (CUDA|ROCm)\d",
    "kubernetes": r"the plan leaves out (CUDA|ROCm)\d",
}
"""What a format may say that it cannot hold."""


def check(plan: Plan, gpus: tuple[str, ...], reader: Path, directory: Path) -> dict[str, Params]:
    """Read every format of ``plan`` back; return the parameters of each format that holds it."""
    devices = parse_gpus(gpus)
    path = plan.model.path
    # llama-server sets how many outputs there are
    params = replace(said(plan), n_outputs_max=0, more=())
    expected = without_order(server.Reading(path, params, fits_itself=False))
    words = ["-m", path, *plan.arguments()]
    beside = server.read(reader, devices, words).beside
    for use in plan.shared:
        assert all(word in dict(beside).values() for word in use.arguments if word.startswith("/")), (use, beside)
    held = {}
    for form in (*WORDS, "env", "ini"):
        try:
            text = plan.format(form)
        except PlanError as error:
            assert form in CANNOT and re.search(CANNOT[form], str(error)), (form, error)
            continue
        if form == "args" and any(" " in word for word in plan.arguments()):
            continue
        found = without_order(read(form, text, reader, devices, directory))
        model = "" if form in WITHOUT_MODEL else path
        assert found == replace(expected, model=model), form
        assert found.beside == beside, form
        held[form] = found.params
    return held


def check_margins(plan: Plan, gpus: tuple[str, ...], params: Params) -> None:
    """Load what was read back: every device has its margin beside the rest of the plan."""
    # llama-server itself sets these
    params = replace(params, n_outputs_max=plan.params.n_outputs_max, more=plan.params.more)
    with Worker(parse_gpus(gpus)) as worker:
        breakdown = worker.measure(plan.model.path, params, reserve=True)
    for device in plan.devices:
        shared = sum(use.on(device.name) for use in plan.shared)
        assert breakdown.on(device.name).used + shared + device.margin <= device.free, device
    assert breakdown.rows == plan.breakdown.rows


def planned(number: int, directory: Path, **keywords: Any) -> tuple[Plan, tuple[str, ...]]:
    drawn = draw(number, directory)
    path = shapes.write(drawn.model, directory)
    plan = fitter.fit(path, gpus=drawn.gpus, **drawn.keywords, **keywords)
    assert plan.fits, (drawn, plan.problems)
    return plan, drawn.gpus


NUMBERS = [pytest.param(number, marks=[pytest.mark.slow] if number >= EVERYDAY else []) for number in range(ALL)]


@pytest.mark.parametrize("number", NUMBERS)
def test_llama_server_has_the_plan(number: int, reader: Path, directory: Path, tmp_path: Path) -> None:
    plan, gpus = planned(number, directory, program="llama-server")
    held = check(plan, gpus, reader, tmp_path)
    assert {"shell", "json", "ini", "compose", "llama-swap"} <= set(held)
    check_margins(plan, gpus, held["ini"])


@pytest.mark.parametrize("number", NUMBERS)
def test_a_script_has_the_plan(number: int, directory: Path) -> None:
    """The script of ``--format python``, with its values as Python reads them."""
    plan, gpus = planned(number, directory, program="llama-cpp-python")
    call = next(node for node in ast.walk(ast.parse(plan.format("python"))) if isinstance(node, ast.Call) and node.args)
    assert ast.literal_eval(call.args[0]) == plan.model.path
    keywords: Mapping[str, Any] = {str(each.arg): ast.literal_eval(each.value) for each in call.keywords}
    again = fitter.fit(plan.model.path, gpus=gpus, **keywords)
    assert again.params == plan.params
    assert again.breakdown.rows == plan.breakdown.rows
    # the script names the devices that have a part of the plan
    left = {each.name: each.left for each in plan.devices}
    assert all(each.left == left.pop(each.name) for each in again.devices)
    assert all(each.left == each.free for each in plan.devices if each.name in left)


def test_the_draws_have_everything(directory: Path) -> None:
    drawn = [draw(number, directory) for number in range(ALL)]
    assert {len(each.gpus) for each in drawn} == set(range(1, 9))
    for key in ("mmproj", "model_draft", "n_seq_max", "type_k", "n_ubatch"):
        assert sum(key in each.keywords for each in drawn) >= 3
        assert key == "n_ubatch" or any(key in each.keywords for each in drawn[:EVERYDAY])
