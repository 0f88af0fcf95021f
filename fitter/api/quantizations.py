"""``fitter.quants`` and ``fitter.best_shapes``: plan a model in every file type, and models of shapes in their best."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fitter import api, programs
from fitter.api.call_worker import ask_in_threads, fetch, questions_of, several_workers
from fitter.api.checked_call import checked_worker_call
from fitter.api.measure_load import without_timeout
from fitter.errors import FitterError, LlamaCppError, TimeLimitError, UsageError, WorkerError
from fitter.llama.client import Worker
from fitter.llama.header.gguf_writer import Tensor
from fitter.machine.machine import Machine, machine_of
from fitter.model.header import Model, open_model
from fitter.model.shapes.catalogue import ShapeInfo, as_converted, shapes, type_name, unknown_type, wanted
from fitter.model.shapes.mapping import header_of
from fitter.model.shapes.shape_files import PACKED
from fitter.model.tensors import source_type
from fitter.parameters.table import USEFUL_SPEED, AnyPath, Fitting
from fitter.parameters.values import shown
from fitter.planning.request.ask import Ask
from fitter.planning.request.request import DEFAULT_MARGIN, Progress
from fitter.planning.request.request_limits import own_context
from fitter.planning.request.summary import ModelSummary
from fitter.planning.tables.file_rows import FULL
from fitter.planning.tables.quantization_rows import (
    Place,
    Quantization,
    Quantizations,
    ShapePlan,
    ShapePlans,
    assumptions,
    best_of,
    best_of_shape,
    check_source,
    is_enough,
    ordered,
    published_as,
    quantization,
    short,
    types_to_plan,
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


_MOST_SHAPES = 12
"""Default of the models to find."""
_REACHED = 0.9
"""Share of its speed without attention that a plan is expected to have, before a model's first plan."""
_NEARLY = 0.95
"""A type that is expected to be so nearly fast enough is planned: Nemotron 3 Nano as Q5_K_M on an RTX 4060 Laptop."""


@checked_worker_call(Fitting)
def best_shapes(
    words: str | Sequence[str] = (),
    *,
    most: int = _MOST_SHAPES,
    tokens_per_second: float | None = None,
    on_progress: Callable[[Progress], None] | None = None,
    on_log: Callable[[str], None] | None = None,
    worker: Worker | None = None,
    **parameters: Unpack[Fitting],
) -> ShapePlans:
    """Plan the models of the catalogue on a machine, the most weights first, until ``most`` are useful.

    Of each model one to three file types are planned: those that are likely to be the best one by the estimated time to
    read their weights. Several workers plan at the same time, unless ``worker`` is given or they would share real
    devices.

    Args:
        words: Only models that have this word, or all of these, in their name, title or architecture.
        most: The number of models to find.
        tokens_per_second: The speed of generation that is useful to you, 20 by default.
        on_progress: Called after each model.
        on_log: Called with every line of llama.cpp's log.
        worker: A worker to use; it stays open.
        parameters: Keywords of ``fit`` for each plan.

    Returns:
        The models that were found, each with its best file type.

    Raises:
        UsageError: No model has these words, or a parameter makes no sense.
        FitterError: As ``fit`` raises it.
    """
    check_speed(tokens_per_second)
    if "program" not in parameters:
        parameters["program"] = programs.chosen("llama-cpp-python")
    ask = Ask.of(parameters)
    say = on_progress or (lambda _: None)
    say(Progress(0, "reading the catalogue"))
    infos = shapes(*((words,) if isinstance(words, str) else words))
    with several_workers(ask, worker, on_log, min(_MOST_WORKERS, len(infos))) as workers:
        asked = deque(_candidates(infos, _place(ask, workers[0]), tokens_per_second))
        count, told = len(asked), without_timeout(dict(parameters))
        found: list[ShapePlan] = []
        done = 0

        def wanted() -> Iterator[_Candidate]:
            while asked and len(found) < most:
                yield asked.popleft()

        def plan(candidate: _Candidate, worker: Worker) -> ShapePlan | None:
            return _plan(candidate, {**told, "worker": worker}, tokens_per_second)

        def tell(candidate: _Candidate, planned: ShapePlan | None, worker: Worker) -> None:
            nonlocal done
            done += 1
            found.extend([planned] if planned is not None else [])
            part = max(len(found) / most, done / count)
            text = f"planned {candidate.shape.name}: {len(found)} of {most} found"
            say(Progress(worker.dummy_loads, text, min(1.0, part)))

        ask_in_threads(workers, wanted(), plan, tell, dismiss=worker is None)
    found.sort(key=lambda each: (-each.shape.parameters, each.shape.name))
    return ShapePlans(tuple(found[:most]), len(asked) + max(0, len(found) - most), tokens_per_second)


@dataclass(frozen=True)
class _Candidate:
    """A model, and file types that could be useful with their most tokens per second, the most bits first."""

    shape: ShapeInfo
    types: tuple[tuple[str, float], ...]


def _place(ask: Ask, worker: Worker) -> Place:
    machine: Machine = machine_of(
        worker.devices, ask.virtual, ask.host_memory, is_described=ask.is_described, has_rpc=bool(ask.rpc)
    )
    questions = questions_of(ask, worker, machine)
    speeds = questions.speeds(machine.devices).values()
    fastest = max(speeds, key=lambda each: each.bandwidth, default=None)
    margin = ask.margin if isinstance(ask.margin, int) else DEFAULT_MARGIN
    return Place(sum(max(0, each.free - margin) for each in machine.devices), fastest, questions.host_speed())


def _candidates(infos: Sequence[ShapeInfo], place: Place, tokens_per_second: float | None) -> Iterator[_Candidate]:
    """Yield the models that could be useful, the most weights first."""
    least = USEFUL_SPEED if tokens_per_second is None else tokens_per_second
    for shape in sorted(infos, key=lambda each: (-each.parameters, each.name)):
        header = header_of(shape.config, shape.name)
        if header.metadata.get(f"{header.architecture}.attention.causal") is False:
            # an embedder generates nothing
            continue
        tensors: Sequence[Tensor] = header.tensors
        used = header.number("expert_used_count") / shape.n_expert if shape.n_expert else 1.0
        is_packed = any(tensor.type == PACKED for tensor in tensors)
        bits_of = types_to_plan(is_packed, 8 * shape.bytes / shape.parameters)
        rates = (
            (name, place.most_tokens_per_second(tensors, shape.n_layer, used, bits)) for name, bits in bits_of.items()
        )
        if types := tuple((name, rate) for name, rate in rates if rate >= least):
            yield _Candidate(shape, types)


def _plan(candidate: _Candidate, told: dict[str, Any], tokens_per_second: float | None) -> ShapePlan | None:
    """Plan file types of a model until the best is known; ``None`` if none is useful."""
    worker, least = told["worker"], USEFUL_SPEED if tokens_per_second is None else tokens_per_second
    planned: list[Quantization] = []
    with TemporaryDirectory() as directory:
        try:
            opened = open_model(as_converted(candidate.shape.model), worker.header)
            file_types = worker.file_types(opened.files, directory)
        except LlamaCppError:
            # this llama.cpp does not have the architecture
            return None
        by_name = {each.name: each for each in file_types.found}
        types = [(name, rate) for name, rate in candidate.types if name in by_name]
        first, last, reached = 0, len(types) - 1, _REACHED
        while first <= last:
            # of the types that are left, the one with the most bits that is likely to be fast enough
            likely = (i for i in range(first, last + 1) if types[i][1] * reached >= least)
            index = next(likely, last)
            each = quantization(opened, file_types, by_name[types[index][0]])
            each = plan_type(each, opened, Path(directory), told, with_longest=False)
            planned.append(each)
            reached = (each.tokens_per_second or 0.0) / types[index][1] or reached
            if is_enough(each, candidate.shape, tokens_per_second):
                last = index - 1
                if types[last][1] * reached < _NEARLY * least:
                    break
            else:
                first = index + 1
    return best_of_shape(planned, candidate.shape, tokens_per_second)


__all__ = ["Quantization", "Quantizations", "best_shapes", "quants"]
