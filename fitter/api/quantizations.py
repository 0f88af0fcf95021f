"""``fitter.quants``: plan a model in every file type that llama-quantize can make of it."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fitter import api, programs
from fitter.api.call_worker import ask_in_threads, fetch, several_workers
from fitter.api.checked_call import checked_worker_call
from fitter.api.measure_load import without_timeout
from fitter.errors import FitterError, LlamaCppError, TimeLimitError, UsageError, WorkerError
from fitter.llama.client import Worker
from fitter.model.header import Model, open_model
from fitter.model.shapes.catalogue import as_converted, type_name, unknown_type, wanted
from fitter.model.tensors import source_type
from fitter.parameters.table import AnyPath, Fitting
from fitter.parameters.values import shown
from fitter.planning.request.ask import Ask
from fitter.planning.request.request import Progress
from fitter.planning.request.request_limits import own_context
from fitter.planning.request.summary import ModelSummary
from fitter.planning.tables.file_rows import FULL
from fitter.planning.tables.quantization_rows import (
    Quantization,
    Quantizations,
    assumptions,
    best_of,
    check_source,
    ordered,
    published_as,
    quantization,
    short,
)
from fitter.storage import TemporaryDirectory

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from fitter.planning.plan.plan import Plan

_NEVER = ("F32",)
"""Types that are not planned: F32 doubles the bytes of the published weights."""
_MOST_WORKERS = 8


@checked_worker_call(Fitting)
def quants(
    model: AnyPath,
    *,
    types: str | Sequence[str] | None = None,
    tokens_per_second: float | None = None,
    on_progress: Callable[[Progress], None] | None = None,
    on_log: Callable[[str], None] | None = None,
    worker: Worker | None = None,
    **parameters: Unpack[Fitting],
) -> Quantizations:
    """Plan ``model`` in every file type that llama-quantize makes, before any of the files exists.

    One header is enough: best of the BF16 or F16 file, since a quantized file does not say the types of the original
    (``notes`` names the assumptions). llama.cpp's own rule chooses the type of each tensor, without an importance
    matrix. A header with those types is planned as ``fit`` would plan the file.

    Args:
        model: Path or address of a GGUF file.
        types: File types to plan (``Q4_K_M``, or several); by default all but those that suit only models trained for
            them.
        tokens_per_second: The estimated speed of generation that is useful to you, 20 by default. The ``best`` type
            has the most bits per weight that generates so fast, with 8192 tokens of context or more unless ``n_ctx`` or
            ``fit_ctx`` sets another.
        on_progress: Called at each step.
        on_log: Called with every line of llama.cpp's log.
        worker: A worker to use; it stays open.
        parameters: Keywords of ``fit`` for each plan; ``skeleton`` has no effect.

    Returns:
        The types with their plans, and the ``best`` one.

    Raises:
        LibraryError: This build of llama.cpp has no rule that can be asked.
        FitterError: As ``fit`` raises it.
    """
    check_speed(tokens_per_second)
    names = wanted_types(types)
    if "program" not in parameters:
        parameters["program"] = programs.chosen("llama-cpp-python")
    ask = Ask.of(parameters)
    say = on_progress or (lambda _: None)
    # llama-quantize starts from the converted model
    model = as_converted(os.fsdecode(model))
    fetch(model, ask.timeout, on_progress)
    most = min(_MOST_WORKERS, _MOST_WORKERS if names is None else len(names))
    with several_workers(ask, worker, on_log, most) as workers, TemporaryDirectory() as directory:
        opened = open_model(model, workers[0].header)
        check_source(opened)
        try:
            file_types = workers[0].file_types(opened.files, directory)
        except LlamaCppError as error:
            raise LlamaCppError(_about_model(error, opened), error.log) from error
        chosen = [quantization(opened, file_types, each) for each in file_types.found if each.name not in _NEVER]
        chosen = _select_types(chosen, names)
        told = without_timeout(dict(parameters))
        found: dict[str, Quantization] = {}

        def plan(each: Quantization, worker: Worker) -> Quantization:
            return plan_type(each, opened, Path(directory), {**told, "worker": worker})

        def tell(each: Quantization, made: Quantization, worker: Worker) -> None:
            found[each.name] = made
            say(Progress(worker.dummy_loads, f"planned {each.name}, {len(found)} of {len(chosen)}"))

        ask_in_threads(workers, chosen, plan, tell, dismiss=worker is None)
    planned = [found[each.name] for each in chosen]
    n_devices = max((len(each.plan.devices) for each in planned if each.plan is not None), default=0)
    failed = [each for each in planned if each.plan is None and each.bytes is not None]
    if failed and all(each.plan is None for each in planned):
        raise LlamaCppError(f"{short(opened)} cannot be planned as {failed[0].name}: {failed[0].problem}")
    own_type = source_type(opened.tensors)
    return Quantizations(
        ModelSummary.of(opened),
        own_type,
        ordered(planned),
        best_of(planned, own_type, tokens_per_second, published_as(opened)),
        n_devices,
        tokens_per_second,
        assumptions(opened),
    )


def check_speed(tokens_per_second: object) -> None:
    """Raise ``UsageError`` unless ``tokens_per_second`` is ``None`` or a number above 0."""
    is_number = isinstance(tokens_per_second, (int, float)) and not isinstance(tokens_per_second, bool)
    if tokens_per_second is not None and not (is_number and tokens_per_second > 0):  # type: ignore[operator]
        raise UsageError(
            f"tokens_per_second (--tokens-per-second) is {shown(tokens_per_second)}: give a number above 0, or leave "
            "it out"
        )


def wanted_types(types: str | Sequence[str] | None) -> tuple[str, ...] | None:
    """Split and check names of file types; return them in llama-quantize's spelling, ``None`` for all."""
    if types is None:
        return None
    given = types.split(",") if isinstance(types, str) else types
    if not isinstance(given, (list, tuple)) or not all(isinstance(each, str) and each.strip() for each in given):
        raise UsageError(
            f"types (--type) is {shown(types)}: name file types, such as Q4_K_M, or leave it out for all of them"
        )
    names = tuple(map(type_name, given))
    if not names:
        raise UsageError(
            "types (--type) names no file type: name some, such as Q4_K_M, or leave it out for all of them"
        )
    return names


def _select_types(quantizations: list[Quantization], wanted: tuple[str, ...] | None) -> list[Quantization]:
    if wanted is None:
        # ternary weights and the like ruin a model that was not trained for them
        return [each for each in quantizations if not each.is_trained_for]
    names = [each.name for each in quantizations]
    if missing := next((name for name in wanted if name not in names), None):
        raise unknown_type(missing, names)
    return [each for each in quantizations if each.name in wanted]


def plan_type(
    each: Quantization, model: Model, directory: Path, told: dict[str, Any], *, with_longest: bool = True
) -> Quantization:
    """Plan one type unless it has a problem; a refusal of llama.cpp becomes its problem.

    Args:
        each: The type.
        model: The model.
        directory: The directory with the headers of all types.
        told: Keywords of ``fit``, with a worker.
        with_longest: Whether to look for the longest context, too.
    """
    if each.problem is not None:
        return each
    header = directory / f"{each.name}.gguf"
    try:
        # the header has no tokenizer
        told = {**told, "skeleton": False}
        plan = api.fit(header, **told)
        longest = longest_context(plan, model, header, told) if with_longest else None
    except (LlamaCppError, TimeLimitError) as error:
        return replace(each, problem=str(error).replace(str(header), short(model)))
    shape = wanted(model.called)
    before, slash, last = model.called.rpartition("/")
    path = f"{before}{slash}{named(Path(last), each.name)}" if shape is None else shape.of_type(each.name).address
    summary = replace(plan.model, path=path, name=model.name)
    return replace(each, plan=replace(plan, model=summary, files=()), longest_context=longest)


def longest_context(plan: Plan, model: Model, header: Path, told: dict[str, Any]) -> int | None:
    """Find the longest context with which ``model`` fits, in tokens.

    Returns:
        ``plan``'s context where a longer one is excluded or nothing longer fits; ``None`` where the plan does not fit.
    """
    if not plan.fits:
        return None
    context, most = plan.params.n_ctx or plan.breakdown.n_ctx, own_context(model.n_ctx_train, 1)
    if told.get("n_ctx") is not None or told.get("objective") == "context" or context >= most:
        return context
    is_shared = plan.params.n_seq_max == 1 or plan.params.kv_unified
    if is_shared and told.get("n_gpu_layers") is None:
        # if the model's own context fits with all layers on the host, a few loads replace the search
        on_host = {**told, "n_ctx": most, "n_gpu_layers": 0}
        try:
            if api.fit(header, **on_host).fits:
                return most
        except WorkerError:
            raise
        except FitterError:
            # does not load: search
            pass
    other = api.fit(header, **{**told, "objective": "context"})
    return max(context, other.params.n_ctx or other.breakdown.n_ctx) if other.fits else context


def named(path: Path, file_type: str) -> Path:
    """Return the path of the model in another file type: in the same folder, with the type in its name."""
    from fitter.model.files.source import split_name

    split = split_name(path)
    stem = split[0] if split else path.stem
    before, dash, last = stem.rpartition("-")
    is_type = dash and (last.lower() in FULL or (last.upper().startswith(("Q", "IQ", "TQ", "MXFP4")) and "_" in last))
    return path.with_name(f"{before if is_type else stem}-{file_type}.gguf")


def _about_model(error: LlamaCppError, model: Model) -> str:
    if "unsupported model architecture" in str(error):
        return (
            f"this llama.cpp does not have the architecture '{model.architecture}' of {short(model)}: use a newer "
            "one (--llama-cpp)"
        )
    return str(error)


__all__ = ["Quantization", "Quantizations", "quants"]
