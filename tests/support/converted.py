"""The tensors that llama.cpp's own converter writes for each shape of the catalogue, without a byte of weights.

``python -m tests.support.converted --write`` puts it into ``tests/data/shapes/converted.toml``. It needs torch and
transformers, which fitter itself does not, so run it in an environment of its own that has them, and what gguf and
fitter require. transformers makes each model on its ``meta`` device, which has shapes and no data; the converter of the
vendored llama.cpp is given its tensors as if it had read them from files. What transformers does not make, layers for
multi-token prediction, is not compared.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from fitter.llama.header.gguf_writer import Tensor
from fitter.model.shapes.catalogue import published_shape, shape_names
from fitter.model.shapes.common import ShapeHeader
from fitter.model.shapes.mapping import KNOWN

ROOT = Path(__file__).resolve().parents[2]
OTHERWISE = ("glm-5.2", "glm-5.3", "qwen3-reranker-0.6b", "qwen3-vl-235b-a22b", "qwen3-vl-30b-a3b")
"""Shapes whose files have tensors that transformers does not make, or makes otherwise: indexers of layers that share
another's, the head of a reranker, which the converter makes of two words of the tokenizer, and experts of Qwen3-VL, of
which the files have the rows as columns.
"""
TIED = "_tied_weights_keys"
"""The key in transformers under which the tied weights stand: tensors that no file has, since others are the same."""
HALVES = ("float16", "float32")
"""Types of weights of which the converter makes F16, where no other is asked for."""
FILE = ROOT / "tests" / "data" / "shapes" / "converted.toml"


def digest(tensors: Iterable[Tensor]) -> str:
    """One word for the names, shapes and types of tensors, whatever their order."""
    lines = sorted(f"{each.name} {'x'.join(map(str, each.shape))} {each.type}" for each in tensors)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:32]


def trunk(header: ShapeHeader) -> tuple[Tensor, ...]:
    """The tensors of a shape that are not of layers for multi-token prediction."""
    n_layer = header.number("block_count") - header.number("nextn_predict_layers")
    return tuple(each for each in header.tensors if _layer(each.name) < n_layer)


def _layer(name: str) -> int:
    parts = name.split(".")
    return int(parts[1]) if parts[0] == "blk" else -1


def converted(config: Mapping[str, Any]) -> tuple[Tensor, ...]:
    """The tensors that the converter writes of a model with this ``config.json``."""
    source = _source()
    sys.path[:0] = [str(source), str(source / "gguf-py")]
    import gguf
    import torch
    from conversion import base, get_model_class

    values = dict(config)
    file_type = gguf.LlamaFileType.MOSTLY_F16 if values.get("torch_dtype") in HALVES else None
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(values))
        n_vocab = values.get("vocab_size") or values["text_config"]["vocab_size"]
        words = {str(number): number for number in range(n_vocab)}
        # some converters count the tokens
        (folder / "tokenizer.json").write_text(
            json.dumps({"model": {"type": "WordPiece", "vocab": words}, "added_tokens": []})
        )
        state = _state(folder, values)
        base.ModelBase.index_tensors = _index(state, base.LazyTorchTensor, torch)
        architecture = base.get_model_architecture(base.ModelBase.load_hparams(folder, False), base.ModelType.TEXT)
        made = get_model_class(architecture)
        made.set_vocab = lambda self: None
        model = made(folder, file_type or gguf.LlamaFileType.MOSTLY_BF16, folder / "out.gguf", dry_run=True)
        model = getattr(model, "impl", model)
        model.prepare_tensors()
        return tuple(
            Tensor(name, _without_ones(tuple(reversed(info.shape))), info.dtype.name.lower())
            for part in model.gguf_writer.tensors
            for name, info in part.items()
        )


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    n = len(shape)
    while n > 1 and shape[n - 1] == 1:
        n -= 1
    return tuple(map(int, shape[:n]))


def _source() -> Path:
    fetch = ROOT / "vendor" / "llama.cpp" / "fetch.py"
    done = subprocess.run([sys.executable, str(fetch)], capture_output=True, text=True, check=True)
    return Path(done.stdout.strip())


def _state(folder: Path, values: Mapping[str, Any]) -> dict[str, Any]:
    """Names and tensors as in the files that the model would be published in."""
    import torch
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder)
    # the part for text alone, where there is a class for it
    name = values["architectures"][0]
    named = getattr(transformers, name.replace("ForConditionalGeneration", "ForCausalLM"), None)
    named = named or getattr(transformers, name)
    if not isinstance(config, named.config_class):
        config = named.config_class(text_config=config)
    with torch.device("meta"):
        torch.set_default_dtype(torch.bfloat16)
        model = named(config)
    state = dict(model.state_dict())
    if config.tie_word_embeddings or config.get_text_config().tie_word_embeddings:
        for name in getattr(model, TIED) or {}:
            state.pop(name, None)
    from transformers.core_model_loading import revert_weight_conversion

    found: dict[str, Any] = revert_weight_conversion(model, state)
    return found


def _index(state: Mapping[str, Any], lazy: Any, torch: Any) -> Any:
    def index(self: Any, remote_hf_model_id: str | None = None) -> dict[str, Any]:
        found = {}
        for name, tensor in state.items():
            empty = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
            one = lazy(meta=empty, args=(empty,), func=lambda each: torch.zeros(each.shape, dtype=each.dtype))
            kept = self.filter_tensors((name, lambda one=one: one))
            if kept is not None:
                found[kept[0]] = kept[1]
        return found

    return index


def main() -> int:
    """Print, or write, the digest of each shape; those that cannot be asked about are said."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="write them into tests/data")
    parser.add_argument("names", nargs="*", help="shapes; all of them by default")
    options = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    logging.disable(logging.CRITICAL)
    lines = []
    for name in options.names or [each for each in shape_names() if each not in OTHERWISE]:
        published = published_shape(name)
        config = {"model_type": KNOWN[published.config["architectures"][0]][0], **published.config}
        config.pop("quantization_config", None)
        if config.get("q_lora_rank") == 0:
            # which TOML cannot say
            config["q_lora_rank"] = None
        # another process each, since the converter keeps what it knows of a model in its classes
        reader, writer = os.pipe()
        child = os.fork()
        if not child:
            try:
                tensors = converted(config)
                text = f"{digest(tensors)} {len(tensors)}"
            except BaseException as error:
                text = f"! {type(error).__name__}: {str(error)[:150]}"
            os.write(writer, text.replace("\n", " ").encode())
            os._exit(0)
        os.close(writer)
        with os.fdopen(reader) as answer:
            said = answer.read()
        os.waitpid(child, 0)
        print(name, said or "! ended", flush=True)
        if said and not said.startswith("!"):
            found, count = said.split()
            lines.append(f'"{name}" = {{ tensors = {count}, digest = "{found}" }}')
    if options.write:
        head = FILE.read_text("utf-8").partition("\n\n")[0]
        FILE.write_text(head + "\n\n" + "\n".join(lines) + "\n", "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
