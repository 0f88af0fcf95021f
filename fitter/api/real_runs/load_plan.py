"""``Plan.load``: load a plan as a ``llama_cpp.Llama``, and fit again where memory has gone."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from fitter.errors import ModelError, OutOfMemoryError, UsageError
from fitter.llama.client import DEFAULT_TIMEOUT
from fitter.model.files.source import show
from fitter.model.location import model_files
from fitter.output.keywords import keywords, mapping
from fitter.planning.plan.plan import Plan, check_can_run, check_fits, check_is_here, check_llama_cpp, stamp_of

if TYPE_CHECKING:
    from fitter.llama.this_process.plan_load import PlannedLlama

REFITS = 2
"""Most fits after a device refused memory."""

_EVERY_OUTPUT = {
    "logits_all": "logits_all=True",
    "draft_model": "logits_all=True, which a draft model needs",
}
"""Parameters of ``Llama`` that make every token of a batch an output, and the keyword of ``fit`` for each."""

_UNMEASURED = {
    "lora_path": "fit with it",
    "vocab_only": "leave it out",
}
"""Parameters of ``Llama`` that take memory outside the plan, and the remedy for each."""


def load(plan: Plan, kwargs: Mapping[str, Any], fit: Callable[..., Plan]) -> PlannedLlama:
    """Load ``plan``; where a device refuses memory, fit again with the memory that is free now, twice at most.

    Args:
        plan: The plan.
        kwargs: Keywords for ``llama_cpp.Llama``.
        fit: ``fitter.fit``.

    Raises:
        FitterError: As ``load_once`` and ``fit`` raise it.
    """
    check_is_here(plan)
    timeout = plan.fit_keywords.get("timeout", DEFAULT_TIMEOUT)
    for again in range(REFITS + 1):
        check_unchanged(plan)
        try:
            return load_once(plan, plan.model.path, kwargs, timeout)
        except OutOfMemoryError as refused:
            if not plan.fit_keywords:
                raise
            if again == REFITS:
                message = f"{refused} (fitted again {REFITS} times)"
                raise OutOfMemoryError(message, refused.device, refused.missing, refused.log) from refused
            native().warn(f"{refused}. Fitting again with the memory that is free now ({again + 1} of {REFITS})")
            plan = _refit(plan, refused, fit)
    raise AssertionError("every load either succeeds or raises")


def load_once(plan: Plan, model_path: str, kwargs: Mapping[str, Any], timeout: float | None = None) -> PlannedLlama:
    """Load a model with all parameters of ``plan``, also those that ``llama_cpp.Llama`` has no name for.

    ``use_mmap`` follows the plan's load mode. With mmap, host weights are mapped from the file; without it every buffer
    type takes exactly the predicted bytes. Adapters of the plan are applied. The caller gives a draft model and a chat
    handler with a projector to ``Llama``; the plan only has room for them. No failure ends the process.

    Args:
        plan: The plan.
        model_path: The file to load.
        kwargs: Keywords for ``llama_cpp.Llama``.
        timeout: Seconds in which rpc-servers may be silent.

    Raises:
        PlanError: The plan does not fit, or its devices are not here.
        UsageError: A keyword contradicts the plan.
        OutOfMemoryError: A device refused memory.
        RemoteError: An rpc-server failed.
        LlamaCppError: llama.cpp cannot load the model.
    """
    check_fits(plan)
    native_module, fixed = native(), keywords(plan)
    check_can_run(plan)
    check_llama_cpp(plan, native_module.loaded_build(), "fit again with llama_cpp='python'")
    _check_keywords(plan, fixed, kwargs)
    loaded: PlannedLlama = native_module.load(plan, model_path, fixed, {**mapping(plan), **kwargs}, timeout)
    return loaded


def _check_keywords(plan: Plan, fixed: Mapping[str, Any], kwargs: Mapping[str, Any]) -> None:
    native_module = native()
    native_module.check_names(kwargs)
    for name, value in kwargs.items():
        if name in fixed and value != fixed[name]:
            raise UsageError(f"{name}={value!r} contradicts the plan, which has {fixed[name]!r}: fit again with it")
        if name in _UNMEASURED and value and name not in fixed:
            raise UsageError(f"{name}={value!r} takes memory that the plan does not include: {_UNMEASURED[name]}")
        if name in _EVERY_OUTPUT and value and plan.params.n_outputs_max:
            raise UsageError(
                f"{name} needs the outputs of all tokens, and the plan counts {plan.params.n_outputs_max}: fit again "
                f"with {_EVERY_OUTPUT[name]}"
            )
        if name == "model_path":
            raise UsageError("model_path is set by the plan: to load another model, fit that one")
    projector = getattr(kwargs.get("chat_handler"), "clip_model_path", None)
    if projector and not _is_shared(plan, "projector", projector):
        native_module.warn(
            f"the chat handler's {projector} takes memory that the plan does not include: fit with mmproj="
        )


def _is_shared(plan: Plan, kind: str, path: str) -> bool:
    return any(
        shared.kind == kind and os.path.realpath(shared.name) == os.path.realpath(path) for shared in plan.shared
    )


def native() -> ModuleType:
    """Import the module that needs llama-cpp-python.

    Raises:
        LibraryError: llama-cpp-python is missing, or has another version than the one supported.
    """
    from fitter.llama.build import library

    library.libraries()
    from fitter.llama.this_process import plan_load

    return plan_load


def check_unchanged(plan: Plan) -> None:
    """Raise ``ModelError`` if a file of the plan's model is gone or has changed."""
    model_files(plan.model.path)
    for stamp in plan.files:
        try:
            is_same = stamp_of(stamp.path) == stamp
        except OSError as error:
            raise ModelError(f"{show(Path(stamp.path))} cannot be read: {error.strerror}") from None
        if not is_same:
            raise ModelError(f"{show(Path(stamp.path))} has changed since it was fitted: fit it again")


def _refit(plan: Plan, refused: OutOfMemoryError, fit: Callable[..., Plan]) -> Plan:
    fitted = fit(plan.model.path, **plan.fit_keywords)
    if not fitted.fits:
        problem = fitted.problems[0]
        raise OutOfMemoryError(
            f"{refused}; fitted again with the memory that is free now: {problem.message}",
            problem.device,
            problem.missing,
            refused.log,
        ) from refused
    return fitted
