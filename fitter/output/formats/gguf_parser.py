"""Write a plan as gguf-parser's document, with one row. Memory of other processes is left out."""

from __future__ import annotations

from fitter.output.documents.document import dumps
from fitter.output.documents.gguf_parser_document import document, footprint
from fitter.parameters.table import MAPPED, PARAMETERS
from fitter.planning.placing.placement import llama_placement
from fitter.planning.plan.plan import Plan
from fitter.planning.tables.offload_rows import OffloadTable, offload_row


def text(plan: Plan) -> str:
    """Write the document of ``fitter gguf-parser`` for the placement of ``plan``."""
    params, names = plan.params, plan.breakdown.devices
    free = [device.free for device in plan.devices if device.name in names]
    placement = llama_placement(plan.n_layer + 1, params.n_gpu_layers, params.tensor_split, free)
    own = [row for use in plan.shared if not use.is_of_others for row in use.rows]
    table = OffloadTable(
        plan.model.architecture,
        plan.breakdown.n_ctx,
        bool(plan.breakdown.flash_attn),
        params.n_batch,
        params.n_ubatch,
        params.embeddings,
        False,
        (offload_row(placement, plan.breakdown.most, own),),
    )
    n_remote = sum(name.startswith("RPC") for name in names)
    is_mapped = params.of_parameter(PARAMETERS["load_mode"]) in MAPPED
    return dumps(document(table, footprint(None), n_remote=n_remote, is_mapped=is_mapped))
