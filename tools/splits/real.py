"""A process of its own that loads a model as ``llama.cpp`` does for real, and says what each CUDA card then holds.

The cards are those of the CUDA runtime that computes nothing (``bindings/cuda_runtime``): it counts. Reads a load
as JSON per line of standard input, and answers with one line for each.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import sys
from typing import Any

from fitter.llama.build import library as native
from fitter.llama.build.layouts import read_whole
from fitter.llama.build.log import captured_log, reason
from fitter.llama.load.backend_devices import cuda_registry, load_cuda_backend
from fitter.llama.load.breakdown import untouched
from fitter.llama.load.real_load import batch_of
from fitter.llama.load.structs import apply
from fitter.llama.processes import interpreter
from fitter.llama.types import Params, TensorBuftOverride

GIVEN_UP = re.compile(r"(ggml-backend-meta\.cpp:\d+: .*)")


def main() -> int:
    """Answer every line of standard input. Arguments: the CUDA backend, and whether it is a plugin."""
    path, plugin = sys.argv[1], sys.argv[2] == "1"
    # as a worker it takes the llama.cpp that its environment names
    interpreter.become_worker()
    native.prepare()
    library = native.libraries()
    load_cuda_backend(path, plugin)
    for line in sys.stdin:
        load = json.loads(line)
        overrides = tuple(TensorBuftOverride(**each) for each in load["params"].pop("tensor_buft_overrides"))
        params = Params(**load["params"], tensor_buft_overrides=overrides)
        print(json.dumps(_held(library, load["path"], params)), flush=True)
    return 0


def _held(library: native.Library, path: str, params: Params) -> dict[str, Any]:
    llama, devices = library.llama, cuda_registry()
    cudart = ctypes.CDLL(None)
    cudart.fitter_cudart_taken.restype = ctypes.c_size_t
    n_cards = len(devices.default)

    def taken() -> list[int]:
        return [int(cudart.fitter_cudart_taken(i)) for i in range(n_cards)]

    model_params, context_params = llama.llama_model_default_params(), llama.llama_context_default_params()
    pointers = apply(params, model_params, context_params, devices)
    read_whole(model_params)
    library.fitter.fitter_log_clear()
    before = taken()
    with untouched(0):
        model = llama.llama_model_load_from_file(os.fsencode(path), model_params)
        if not model:
            return _failed()
        loaded = taken()
        context = llama.llama_init_from_model(model, context_params)
    if not context:
        llama.llama_model_free(model)
        return _failed()
    used = taken()
    stopped = _stops(library, context)
    llama.llama_free(context)
    llama.llama_model_free(model)
    del pointers
    if taken() != before:
        raise RuntimeError("cards still hold something after all was freed")
    if stopped:
        return {"failure": stopped}
    model_bytes = [b - a for a, b in zip(before, loaded, strict=True)]
    return {"model": model_bytes, "context": [b - a for a, b in zip(loaded, used, strict=True)]}


def _stops(library: native.Library, context: Any) -> str:
    """What ggml gives up with where it splits a graph; "" where it goes on to compute, which no card does.

    Tokens of one sequence are computed, and then one token of each.
    """
    n_tokens = min(8, int(library.llama.llama_n_ubatch(context)))
    n_seqs = int(library.llama.llama_n_seq_max(context))
    batches = ((n_tokens, 1), (1, n_seqs))
    return next(filter(None, (_stops_at(library, context, *batch) for batch in batches)), "")


def _stops_at(library: native.Library, context: Any, n_tokens: int, n_seqs: int) -> str:
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.dup2(write, 1)
        os.dup2(write, 2)
        batch, _pointers = batch_of(n_tokens, n_seqs)
        library.llama.llama_decode(context, batch)
        os._exit(0)
    os.close(write)
    with os.fdopen(read, encoding="utf-8", errors="replace") as output:
        said = output.read()
    os.waitpid(child, 0)
    found = GIVEN_UP.search(said)
    return found[1] if found else ""


def _failed() -> dict[str, Any]:
    return {"failure": reason(captured_log()) or "nothing was said"}


if __name__ == "__main__":
    sys.exit(main())
