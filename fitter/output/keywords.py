"""A plan as keyword arguments of ``llama_cpp.Llama``."""

from __future__ import annotations

from typing import Any

from fitter.errors import PlanError
from fitter.llama.parameters import CACHE_TYPES, SPLIT_MODES
from fitter.llama.types import Params
from fitter.planning.limits import MAX_SEQUENCES
from fitter.planning.plan import PlanData, check_fits


def llama_kwargs(plan: PlanData, *, anyway: bool = False) -> dict[str, Any]:
    """Keyword arguments that make ``llama_cpp.Llama`` allocate what was measured for ``plan``.

    Host weights are still mapped from the file, as is ``Llama``'s default; with ``use_mmap=False`` they are allocated,
    and every buffer type has exactly the predicted bytes. Raises :class:`PlanError` where the plan does not fit, unless
    it is asked for ``anyway``, or needs something that ``Llama`` has no parameter for.
    """
    if not anyway:
        check_fits(plan)
    params = plan.params
    needs = {
        "devices of rpc-servers": bool(plan.rpc),
        "tensor overrides": bool(params.tensor_buft_overrides),
        "the list of devices": params.devices is not None and not _are_default(plan),
        "more than one sequence": (params.n_seq_max, params.kv_unified) not in _sequences(params),
        "the layers for multi-token prediction": params.load_mtp,
    }
    for need, is_needed in needs.items():
        if is_needed:
            raise PlanError(f"llama_cpp.Llama has no parameter for {need}, which this plan needs: use plan.load()")
    return keywords(plan)


def _sequences(params: Params) -> tuple[tuple[int, bool], ...]:
    """What ``Llama`` itself asks for: numbers of sequences, and whether they share a cache."""
    if params.embeddings:
        return ((min(params.n_batch, params.n_ctx or params.n_batch, MAX_SEQUENCES), True),)
    return ((1, False), (1, True))


def _are_default(plan: PlanData) -> bool:
    """Whether llama.cpp takes the plan's devices here without being told."""
    from fitter.llama.devices import default_names

    return not plan.virtual and plan.params.devices == default_names()


def keywords(plan: PlanData) -> dict[str, Any]:
    """All that ``llama_cpp.Llama`` has a keyword for. Raises ``PlanError`` for more adapters than it has room for."""
    params = plan.params
    flash_attn = plan.breakdown.flash_attn
    return {
        "n_ctx": params.n_ctx or plan.breakdown.n_ctx,
        "n_gpu_layers": params.n_gpu_layers,
        "split_mode": SPLIT_MODES[params.split_mode],
        "main_gpu": params.main_gpu,
        "tensor_split": None if params.tensor_split is None else list(params.tensor_split),
        "n_batch": params.n_batch,
        "n_ubatch": params.n_ubatch,
        "type_k": CACHE_TYPES[params.type_k],
        "type_v": CACHE_TYPES[params.type_v],
        # Llama cannot say "auto": what llama.cpp made of it is what was measured.
        "flash_attn": params.flash_attn != "off" if flash_attn is None else flash_attn,
        "offload_kqv": params.offload_kqv,
        "op_offload": params.op_offload,
        "swa_full": params.swa_full,
        "embedding": params.embeddings,
        **_adapter(plan),
    }


def _adapter(plan: PlanData) -> dict[str, Any]:
    adapters = plan.params.lora
    if len(adapters) > 1:
        raise PlanError(f"llama_cpp.Llama has room for one adapter, and the plan has {len(adapters)}: fit with one")
    return {"lora_path": adapters[0].path, "lora_scale": adapters[0].scale} if adapters else {}
