"""``Plan.load`` and ``fitter.Llama``: load a plan as a ``llama_cpp.Llama``, and fit again where memory has gone."""

from __future__ import annotations

import difflib
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from fitter.errors import LibraryError, ModelError, OutOfMemoryError, UsageError
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


if TYPE_CHECKING:
    from fitter.planning.plan.plan import Llama as Llama
else:

    class _Loaded(type):
        """Makes what was loaded an instance of ``Llama``, without llama-cpp-python before something is."""

        def __instancecheck__(cls, instance):
            planned = sys.modules.get("fitter.llama.this_process.plan_load")
            return planned is not None and isinstance(instance, planned.PlannedLlama)

        def __subclasscheck__(cls, other):
            planned = sys.modules.get("fitter.llama.this_process.plan_load")
            return other is cls or (planned is not None and issubclass(other, planned.PlannedLlama))

    class Llama(metaclass=_Loaded):
        """Fit a model and load it: a ``llama_cpp.Llama`` with the whole plan applied, which is its ``plan``.

        Keywords of ``fitter.fit`` go there (``n_ctx``, ``type_k``, ``margin``, ``rpc``, ...), all others to
        ``llama_cpp.Llama`` (``n_threads``, ``chat_format``, ``verbose``, ...); ``embedding=True`` goes to both. Where
        another process took the memory meanwhile, it is fitted again, at most twice, with a ``PlanWarning``.

        Raises ``UsageError`` for a keyword that neither knows, ``PlanError`` where the model does not fit, and what
        ``fitter.fit`` and ``Plan.load`` raise. It cannot be subclassed.
        """

        # llama-cpp-python is imported when something is loaded
        def __new__(cls, model_path, **keywords):
            return _fit_and_load(model_path, keywords)

        def __init_subclass__(cls) -> None:
            raise TypeError("fitter.Llama cannot be subclassed: subclass llama_cpp.Llama, and load with plan.load()")

        @classmethod
        def from_pretrained(cls, repo_id, filename, additional_files=None, **keywords):
            """Download a model from Hugging Face's hub, fit it and load it; needs the package ``huggingface-hub``.

            ``filename`` names a file of ``repo_id``, or is a pattern for one; ``additional_files`` are downloaded too,
            such as the other parts of a split model. ``local_dir``, ``local_dir_use_symlinks`` and ``cache_dir`` are as
            in ``llama_cpp.Llama.from_pretrained``, all other keywords as in ``fitter.Llama``.

            Raises ``LibraryError`` without that package, ``UsageError`` where not exactly one file matches,
            ``ModelError`` where the download fails, and what ``fitter.Llama`` raises.
            """
            where = {name: keywords.pop(name) for name in _DOWNLOAD_KEYWORDS if name in keywords}
            _split(keywords)
            return cls(_downloaded(repo_id, filename, additional_files, where), **keywords)


_DOWNLOAD_KEYWORDS = ("local_dir", "local_dir_use_symlinks", "cache_dir")


def _fit_and_load(model_path: str | os.PathLike[str], keywords: Mapping[str, Any]) -> Llama:
    """Fit and load for ``Llama``."""
    from fitter import api
    from fitter.llama.build.build_folder import PYTHON
    from fitter.model.location import check_is_here
    from fitter.programs import LlamaCppPython

    check_is_here(os.fsdecode(model_path))
    asked, rest = _split(keywords)
    if rest.get("draft_model") is not None:
        # a draft model makes Llama need the logits of every token
        asked.setdefault("logits_all", True)
    asked = {name: _as_fit_says(name, value) for name, value in asked.items()}
    # None is Llama's default; fit's own defaults differ
    asked = {name: value for name, value in asked.items() if value is not None}
    # llama-cpp-python will load the plan, whatever the environment names
    plan = api.fit(model_path, **{"llama_cpp": PYTHON, "program": LlamaCppPython.name, **asked})
    loaded: Llama = load(plan, rest, api.fit)  # type: ignore[assignment]
    return loaded


def _split(keywords: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split ``keywords`` into those of ``fitter.fit`` and those of ``llama_cpp.Llama``.

    ``llama_cpp.Llama`` itself ignores unknown keywords.

    Raises:
        UsageError: Neither call has the keyword.
    """
    from fitter import api

    of_fit = inspect.signature(api.fit).parameters.keys() - {"model"}
    of_llama = inspect.signature(native().llama_cpp.Llama.__init__).parameters.keys() - {"self", "kwargs"}
    names = sorted(of_fit | of_llama)
    for name in [name for name in keywords if name not in names]:
        close = difflib.get_close_matches(name, names, n=1)
        raise UsageError(f"fitter.Llama has no keyword '{name}'" + (f"; did you mean '{close[0]}'?" if close else ""))
    asked = {name: value for name, value in keywords.items() if name in of_fit}
    return asked, {name: value for name, value in keywords.items() if name not in of_fit}


def _downloaded(repo_id: str, filename: str | None, additional_files: Any, where: Mapping[str, Any]) -> str:
    """Download a file of Hugging Face's hub by llama-cpp-python; return its path."""

    def path_of(model_path: str, **_: Any) -> str:
        return model_path

    # from_pretrained ends by calling its class: give it a function that returns the path
    download = native().llama_cpp.Llama.from_pretrained.__func__
    try:
        path: str = download(path_of, repo_id, filename, additional_files, **where)
    except ImportError:
        raise LibraryError("from_pretrained needs huggingface-hub: pip install huggingface-hub") from None
    except ValueError as error:
        raise UsageError(f"{repo_id}: {' '.join(str(error).split())}") from None
    except OSError as error:
        raise ModelError(f"{repo_id} cannot be downloaded: {' '.join(str(error).split())}") from None
    return path


def _as_fit_says(name: str, value: Any) -> Any:
    """Convert a value of ``Llama`` to ``fit``'s: numbers of ggml's types to names, a ``bool`` of flash attention to a
    word.

    Raises:
        UsageError: The number names nothing.
    """
    from fitter.parameters.table import CACHE_TYPES, POOLING, SPLIT_MODES

    if name == "flash_attn" and isinstance(value, bool):
        return "on" if value else "off"
    pooling = {"model": -1, **POOLING}
    numbers = {"type_k": CACHE_TYPES, "type_v": CACHE_TYPES, "split_mode": SPLIT_MODES, "pooling_type": pooling}
    if name not in numbers or isinstance(value, bool) or not isinstance(value, int):
        return value
    for word, number in numbers[name].items():
        if number == value:
            return word
    choices = ", ".join(f"{n} ({word})" for word, n in numbers[name].items())
    raise UsageError(f"{name} is {value}: give one of {choices}")
