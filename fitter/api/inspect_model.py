"""Say what a model is made of: tensors by role, and the bytes of each layer."""

from __future__ import annotations

import os
from collections.abc import Callable

from fitter.api.call_worker import fetch
from fitter.api.checked_call import checked_call
from fitter.llama.client import DEFAULT_TIMEOUT, Worker
from fitter.llama.types import Params
from fitter.model.header import open_model
from fitter.parameters.table import AnyPath as Path
from fitter.planning.plan.inspection import Inspection, inspection_of
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
    """What a model is made of: tensors by role, each layer's weights and its part of the KV cache at ``n_ctx``.

    ``n_ctx`` ``None`` or 0 is the model's own context. Weights are the bytes in the file; caches and compute buffers
    are what llama.cpp asks for with everything on the host. ``on_progress`` is told how far the header of a model is
    that is elsewhere. Raises what ``fit`` raises.
    """
    fetch(os.fsdecode(model), timeout, on_progress)
    with Worker(timeout=timeout, llama_cpp=llama_cpp) as worker:
        opened = open_model(os.fsdecode(model), worker.header)
        check_context(n_ctx or opened.n_ctx_train, opened.n_ctx_train, 1)
        params = Params(n_ctx=n_ctx or 0, n_gpu_layers=0, devices=())
        breakdown = worker.measure(str(opened.path), params)
        layout = worker.layout(str(opened.path), params)
    return inspection_of(opened, breakdown, layout)
