"""``fitter.Llama``: fit a model and load it as a ``llama_cpp.Llama``."""

from __future__ import annotations

import difflib
import inspect
import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fitter.errors import LibraryError, ModelError, UsageError

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
    from fitter.api.real_runs import load_plan
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
    loaded: Llama = load_plan.load(plan, rest, api.fit)  # type: ignore[assignment]
    return loaded


def _split(keywords: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split ``keywords`` into those of ``fitter.fit`` and those of ``llama_cpp.Llama``.

    ``llama_cpp.Llama`` itself ignores unknown keywords.

    Raises:
        UsageError: Neither call has the keyword.
    """
    from fitter import api
    from fitter.api.real_runs import load_plan

    of_fit = inspect.signature(api.fit).parameters.keys() - {"model"}
    of_llama = inspect.signature(load_plan.native().llama_cpp.Llama.__init__).parameters.keys() - {"self", "kwargs"}
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

    from fitter.api.real_runs import load_plan

    # from_pretrained ends by calling its class: give it a function that returns the path
    download = load_plan.native().llama_cpp.Llama.from_pretrained.__func__
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
