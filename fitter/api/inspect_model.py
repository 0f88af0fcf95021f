"""``fitter.inspect``: list a model's tensors by role, and the bytes of each layer."""

from __future__ import annotations

import os
from collections.abc import Callable

from fitter.api.call_worker import fetch, tokenizer_check
from fitter.api.checked_call import checked_call
from fitter.llama.client import DEFAULT_TIMEOUT, Worker
from fitter.llama.types import Params
from fitter.model.header import open_model
from fitter.parameters.table import AnyPath as Path
from fitter.planning.plan.layer_map import Inspection, inspection_of
from fitter.planning.request.request import Progress
from fitter.planning.request.request_limits import check_context


@checked_call()
def inspect(
    model: Path,
    *,
    n_ctx: int | None = None,
    llama_cpp: Path | None = None,
    timeout: float = DEFAULT_TIMEOUT,
    on_progress: Callable[[Progress], None] | None = None,
) -> Inspection:
    """List the tensors of ``model`` by role, and each layer's weights and part of the KV cache.

    Weights are bytes in the file. Caches and compute buffers are measured by llama.cpp with everything on the host.

    Args:
        model: Path or address of a GGUF file.
        n_ctx: Context in tokens; ``None`` or 0 is the model's own.
        llama_cpp: The llama.cpp to use, as in ``fit``.
        timeout: Seconds for one answer of llama.cpp.
        on_progress: Called as the header of a remote model arrives.

    Raises:
        FitterError: As ``fit`` raises it.
    """
    fetch(os.fsdecode(model), timeout, on_progress)
    with Worker(timeout=timeout, llama_cpp=llama_cpp) as worker, tokenizer_check(worker, is_alone=True) as check:
        opened = open_model(os.fsdecode(model), worker.header)
        check.begin(opened)
        check_context(n_ctx or opened.n_ctx_train, opened.n_ctx_train, 1)
        params = Params(n_ctx=n_ctx or 0, n_gpu_layers=0, devices=())
        breakdown = worker.measure(opened.skeleton, params)
        layout = worker.layout(opened.skeleton, params)
    return inspection_of(opened, breakdown, layout)
