"""Rules of ggml-cuda that some versions do not have: what each of them decides, on the pinned libllama or a newer one.

That a version has them is measured on its own libggml-cuda.so: ``python -m tools.comparisons.cuda_rules``, and
test_llama_cuda.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fitter.llama.build.build_folder import PYTHON
from fitter.llama.build.functions import backend_rules
from fitter.llama.processes.interpreter import LLAMA_CPP
from tests.support.command import json_of_python
from tests.support.llama_builds import where
from tools.models.shapes import write

ROOT = Path(__file__).resolve().parents[2]
PINNED = "0.25.3"

_MEASURED = """
import json, sys
from fitter.errors import LlamaCppError
from fitter.llama.load import backend_devices as devices
from fitter.llama.build import library as native
from fitter.llama.processes.interpreter import become_worker
rules, path, count, load = json.loads(sys.argv[1]), sys.argv[2], int(sys.argv[3]), json.loads(sys.argv[4])
become_worker()
native.backend_rules = lambda ggml: rules
native.prepare()
from fitter.llama.load.loader import Loader
from fitter.llama.types import Params, VirtualDevice, describe
cards = [VirtualDevice(f"CUDA{i}", "Card", "cuda", 890, 2**40, 2**40) for i in range(count)]
native.register_virtual(describe(cards))
try:
    found = Loader(devices.registry(virtual=True)).measure(path, Params(**load))
    print(json.dumps([[row.buffer_type, row.model, row.context, row.compute] for row in found.rows]))
except LlamaCppError as error:
    print(json.dumps(" ".join(str(error).split()[-3:])))
"""


def measured(rules: dict[str, bool], model: Path, count: int, load: dict[str, Any], **variables: str) -> Any:
    """The rows of a load on ``count`` cards with these rules, or the last words of why it fails."""
    words = [json.dumps(rules), str(model), str(count), json.dumps(load)]
    return json_of_python(_MEASURED, *words, **variables)


def changed(one: Any, other: Any) -> set[tuple[str, str]]:
    """Buffer types and kinds of bytes that differ."""
    kinds = ("model", "context", "compute")
    before, after = ({row[0]: row[1:] for row in rows} for rows in (one, other))
    return {
        (name, kind)
        for name in before.keys() | after.keys()
        for kind, a, b in zip(kinds, before.get(name, [0] * 3), after.get(name, [0] * 3), strict=True)
        if a != b
    }


ONE = {"n_ctx": 65536, "n_ubatch": 64}
DECIDED: dict[str, tuple[str, int, dict[str, Any], dict[str, str], set[tuple[str, str]]]] = {
    "gets_rows_of_super_blocks": ("qwen3-30b-a3b", 1, ONE, {}, {("CPU", "model"), ("CUDA_Host", "model")}),
    "attention_has_room": ("llama-3.1-8b", 1, ONE | {"type_k": "q8_0", "type_v": "q8_0"}, {}, {("CUDA0", "compute")}),
    "attention_of_any_types": (
        "llama-3.1-8b",
        1,
        ONE | {"type_k": "q8_0", "type_v": "q4_0"},
        {},
        {("CUDA0", "compute"), ("CUDA_Host", "compute")},
    ),
    "keeps_topk_moe": ("qwen3-30b-a3b", 1, {"n_ctx": 4096}, {}, {("CUDA0", "compute")}),
    "groups_shared_experts": ("glm45-air", 1, {"n_ctx": 4096}, {}, {("CUDA0", "compute")}),
    "branches_on_many_devices": (
        "glm45-air",
        2,
        ONE | {"n_ubatch": 1, "n_batch": 1},
        {"GGML_CUDA_GRAPH_OPT": "1"},
        {("CUDA0", "compute"), ("CUDA1", "compute")},
    ),
    "unary_of_any_strides": ("qwen3-next-80b-a3b", 1, {"n_ctx": 4096}, {}, {("CUDA0", "compute")}),
}


BUILDS = {"unary_of_any_strides": "b11739"}
"""Builds other than the pinned one, of whose graphs none depends on the rule."""


@pytest.mark.parametrize("name", DECIDED)
def test_what_a_rule_decides(name: str, tmp_path: Path) -> None:
    shape, count, load, variables, expected = DECIDED[name]
    model = write(shape, tmp_path, vocab=False)
    variables = variables | {LLAMA_CPP: where(BUILDS.get(name, PYTHON))}
    rules = backend_rules(PINNED)
    with_it, without = (
        measured(rules | {f"cuda_{name}": value}, model, count, load, **variables) for value in (True, False)
    )
    assert changed(with_it, without) == expected


def test_types_that_attention_did_not_have(tmp_path: Path) -> None:
    model = write("llama-3.1-8b", tmp_path, vocab=False)
    load = ONE | {"type_k": "q5_0", "type_v": "q5_0"}
    rules = backend_rules(PINNED)
    with_it, without = (
        measured(rules | {"cuda_attention_of_any_types": value}, model, 1, load) for value in (True, False)
    )
    assert changed(with_it, without) == {("CUDA0", "compute"), ("CUDA_Host", "compute")}


def test_one_device_branches_in_every_version(tmp_path: Path) -> None:
    model = write("glm45-air", tmp_path, vocab=False)
    load = ONE | {"n_ubatch": 1, "n_batch": 1}
    rules = backend_rules(PINNED) | {"cuda_branches_on_many_devices": False}
    with_streams, without = (measured(rules, model, 1, load, GGML_CUDA_GRAPH_OPT=value) for value in ("1", "0"))
    assert changed(with_streams, without) == {("CUDA0", "compute")}
