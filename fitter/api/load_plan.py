"""From a plan to a ``llama_cpp.Llama``: what ``Plan.load`` does, and may fit again for."""

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
"""How often a load that was refused memory is fitted again."""

_EVERY_OUTPUT = {
    "logits_all": "logits_all=True",
    "draft_model": "logits_all=True, which a draft model needs",
}
"""Parameters of ``Llama`` that make every token of a batch an output, and how to fit for each."""

_UNMEASURED = {
    "lora_path": "fit with it",
    "vocab_only": "leave it out",
}
"""Parameters of ``Llama`` that change what llama.cpp allocates, and what to do where a plan does not count them."""


def load(plan: Plan, kwargs: Mapping[str, Any], fit: Callable[..., Plan]) -> PlannedLlama:
    """Load ``plan``, or what ``fit`` makes fit now where a device refuses memory that it counts on."""
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
    """Load ``model_path`` with all parameters of ``plan``, those included that ``llama_cpp.Llama`` has no name for.

    ``kwargs`` go to ``llama_cpp.Llama``. ``use_mmap`` is what the plan's load mode says, by default true: host weights
    are mapped from the file rather than allocated; with ``use_mmap=False`` every buffer type takes exactly the
    predicted bytes. ``timeout``: seconds in which rpc-servers may be silent.

    What shares the memory has its place in the plan, and loading it is the caller's business: a draft model and a chat
    handler's projector are given to ``Llama``. An adapter of the plan is applied.

    Raises :class:`PlanError` where the plan does not fit or is for devices that are not here, :class:`UsageError` for
    ``kwargs`` that contradict the plan, :class:`OutOfMemoryError` where a device refuses memory, :class:`RemoteError`
    where an rpc-server fails, :class:`LlamaCppError` where llama.cpp cannot load the model for another reason. None of
    these ends the process, whatever llama.cpp does.
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
    """What needs llama-cpp-python. Raises ``LibraryError`` where that is missing, or another version."""
    from fitter.llama.build import library

    library.libraries()
    from fitter.llama.this_process import plan_load

    return plan_load


def check_unchanged(plan: Plan) -> None:
    """Raise ``ModelError`` where the plan's model is gone, or no longer what was fitted."""
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
