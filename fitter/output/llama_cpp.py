"""A plan as llama-cpp-python objects. Importing this module loads llama-cpp-python."""

from __future__ import annotations

from typing import Any

import llama_cpp

from fitter.errors import LlamaCppError, PlanError, UsageError
from fitter.llama import binding
from fitter.llama.types import Params
from fitter.planning.plan import PlanData

_UNMEASURED = ("embedding", "vocab_only", "lora_path")
"""Parameters of ``Llama`` that change what llama.cpp allocates and that no plan knows of."""


def llama_kwargs(plan: PlanData) -> dict[str, Any]:
    """Keyword arguments that make ``llama_cpp.Llama`` allocate what was measured for ``plan``.

    Host weights are still mapped from the file, as is ``Llama``'s default; with ``use_mmap=False`` they are allocated,
    and every buffer type has exactly the predicted bytes. Raises :class:`PlanError` where the plan does not fit, or
    needs something that ``Llama`` has no parameter for.
    """
    params = plan.params
    needs = {
        "tensor overrides": bool(params.tensor_buft_overrides),
        "the list of devices": params.devices is not None and not _are_default(plan),
        "more than one sequence": params.n_seq_max > 1,
        "the layers for multi-token prediction": params.load_mtp,
    }
    for need, is_needed in needs.items():
        if is_needed:
            raise PlanError(f"llama_cpp.Llama has no parameter for {need}, which this plan needs: use plan.load()")
    return _kwargs(plan)


def _are_default(plan: PlanData) -> bool:
    """Whether llama.cpp takes the plan's devices here without being told."""
    return not plan.virtual and plan.params.devices == tuple(d.info.name for d in binding.registry().default)


def load(plan: PlanData, model_path: str, **kwargs: Any) -> llama_cpp.Llama:
    """Load ``model_path`` with all parameters of ``plan``, those included that ``llama_cpp.Llama`` has no name for.

    ``kwargs`` go to ``llama_cpp.Llama``. ``use_mmap`` is its default, true: host weights are mapped from the file
    rather than allocated; with ``use_mmap=False`` every buffer type takes exactly the predicted bytes.

    What shares the memory has its place in the plan, and loading it is the caller's business: a draft model and a chat
    handler's projector are given to ``Llama``, and so is an adapter of the plan as ``lora_path``.

    Raises :class:`PlanError` where the plan does not fit or is for devices that are not here, :class:`UsageError` for
    ``kwargs`` that contradict the plan, :class:`LlamaCppError` where llama.cpp cannot load the model.
    """
    fixed = _kwargs(plan)
    if plan.virtual:
        raise PlanError("the plan is for virtual devices, which cannot run a model: fit again without them")
    for name, value in kwargs.items():
        if name in fixed and value != fixed[name]:
            raise UsageError(f"{name}={value!r} contradicts the plan, which has {fixed[name]!r}: fit again with it")
        if name in _UNMEASURED and value and not (name == "lora_path" and _is_counted(plan, value)):
            raise UsageError(f"{name}={value!r} takes memory that the plan does not count: leave it out")
    registry = binding.registry()
    wanted = plan.breakdown.devices if plan.params.devices is None else plan.params.devices
    here = [device.info.name for device in registry.devices]
    here_by_default = [device.info.name for device in registry.default]
    if not set(wanted) <= set(here) or (plan.params.devices is None and list(wanted) != here_by_default):
        raise PlanError(
            f"the plan is for {', '.join(wanted) or 'no device'}, but llama.cpp has "
            f"{', '.join(here_by_default) or 'no device'} here: fit again on this machine"
        )
    try:
        return PlannedLlama(model_path, params=plan.params, registry=registry, kwargs={**fixed, **kwargs})
    except (ValueError, RuntimeError) as error:
        raise LlamaCppError(f"{error}; load with verbose=True to see llama.cpp's log") from error


def _is_counted(plan: PlanData, path: object) -> bool:
    """Whether the adapter is one that the plan was made with."""
    return any(use.kind == "lora" and use.name == str(path) for use in plan.shared)


class PlannedLlama(llama_cpp.Llama):
    """A ``llama_cpp.Llama`` whose parameter structs hold a plan's parameters, whatever its constructor writes there."""

    _model_struct: Any = None
    _context_struct: Any = None
    _is_planned = False

    def __init__(self, model_path: str, *, params: Params, registry: binding.Registry, kwargs: dict[str, Any]) -> None:
        self._params = params
        self._registry = registry
        self._keep: list[object] = []
        super().__init__(model_path, **kwargs)
        self._is_planned = True

    @property
    def model_params(self) -> Any:
        """llama.cpp's ``llama_model_params``."""
        self._plan()
        return self._model_struct

    @model_params.setter
    def model_params(self, value: Any) -> None:
        self._model_struct = value

    @property
    def context_params(self) -> Any:
        """llama.cpp's ``llama_context_params``."""
        self._plan()
        return self._context_struct

    @context_params.setter
    def context_params(self, value: Any) -> None:
        self._context_struct = value

    def _plan(self) -> None:
        # The constructor writes its own values field by field and reads the struct a last time to hand it to
        # llama.cpp: writing the plan at every read is what makes the plan's values the last ones.
        if self._is_planned:
            return
        context = self._context_struct or llama_cpp.llama_context_default_params()
        self._keep = binding.apply(self._params, self._model_struct, context, self._registry)


def _kwargs(plan: PlanData) -> dict[str, Any]:
    if not plan.fits:
        raise PlanError(f"the plan does not fit: {plan.problems[0].message}")
    params = plan.params
    flash_attn = plan.breakdown.flash_attn
    return {
        "n_ctx": params.n_ctx or plan.breakdown.n_ctx,
        "n_gpu_layers": params.n_gpu_layers,
        "split_mode": getattr(llama_cpp, f"LLAMA_SPLIT_MODE_{params.split_mode.upper()}"),
        "main_gpu": params.main_gpu,
        "tensor_split": None if params.tensor_split is None else list(params.tensor_split),
        "n_batch": params.n_batch,
        "n_ubatch": params.n_ubatch,
        "type_k": binding.CACHE_TYPES[params.type_k],
        "type_v": binding.CACHE_TYPES[params.type_v],
        # Llama cannot say "auto": what llama.cpp made of it is what was measured.
        "flash_attn": params.flash_attn != "off" if flash_attn is None else flash_attn,
        "offload_kqv": params.offload_kqv,
        "op_offload": params.op_offload,
        "swa_full": params.swa_full,
    }
