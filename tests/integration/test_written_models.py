"""Models that the tests and the demo write, as llama.cpp reads them in a process of its own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.command import run_python
from tools.models import shapes
from tools.models.tiny import TINY_DENSE, TINY_MOE, write_tiny

DUMMY_LOAD = """
import json, sys
import llama_cpp as L

log = []
callback = L.llama_log_callback(lambda level, text, data: log.append(text))
L.llama_log_set(callback, None)
for path in sys.argv[1:]:
    log.clear()
    params = L.llama_model_default_params()
    params.no_alloc, params.load_mode, params.n_gpu_layers = True, L.LLAMA_LOAD_MODE_NONE, 0
    model = L.llama_model_load_from_file(path.encode(), params)
    context_params = L.llama_context_default_params()
    context_params.n_ctx = 4096
    context = model and L.llama_init_from_model(model, context_params)
    said = {"error": b"".join(log[-5:]).decode()} if not context else {
        "bytes": L.llama_model_size(model),
        "n_layer": L.llama_model_n_layer(model),
        "n_vocab": L.llama_vocab_n_tokens(L.llama_model_get_vocab(model)),
    }
    print(json.dumps(said), flush=True)
    if context:
        L.llama_free(context)
    if model:
        L.llama_model_free(model)
"""

GENERATE = """
import json, sys
import llama_cpp

llm = llama_cpp.Llama(sys.argv[1], n_ctx=256, verbose=False)
answer = llm.create_completion("ba lu mi", max_tokens=8, temperature=0)
print(json.dumps({"text": answer["choices"][0]["text"], **answer["usage"]}))
"""


def _python(code: str, *arguments: Path) -> list[dict[str, object]]:
    done = run_python(code, *arguments)
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("vocab", [pytest.param(True, marks=pytest.mark.slow), False], ids=["vocab", "no vocab"])
def test_llama_cpp_loads_every_shape(vocab: bool, tmp_path: Path) -> None:
    paths = [shapes.write(name, tmp_path, vocab) for name in shapes.SHAPES]
    assert dict(zip(shapes.SHAPES, _python(DUMMY_LOAD, *paths), strict=True)) == {
        # llama.cpp does not count the layers for multi-token prediction
        name: {
            "bytes": shape.bytes,
            "n_layer": shape.n_layer - int(str(shape.metadata.get(".nextn_predict_layers", 0))),
            "n_vocab": shape.n_vocab,
        }
        for name, shape in shapes.SHAPES.items()
    }


def test_llama_cpp_loads_a_split_model(tmp_path: Path) -> None:
    (said,) = _python(DUMMY_LOAD, shapes.write_split("deepseek-v3.1", tmp_path, 9, vocab=False))
    assert said.get("bytes") == shapes.SHAPES["deepseek-v3.1"].bytes, said


@pytest.mark.parametrize("model", [TINY_MOE, TINY_DENSE], ids=lambda model: model.name)
def test_a_tiny_model_generates(model: object, tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "tiny.gguf", model)  # type: ignore[arg-type]
    assert path.stat().st_size < 5_000_000
    (said,) = _python(GENERATE, path)
    assert said["completion_tokens"] == 8
    assert str(said["text"]).strip().replace(" ", "").isalpha(), "it says syllables"
