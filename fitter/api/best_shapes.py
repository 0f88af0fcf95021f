"""Which models a machine runs well: the best file type of each model that can be planned without a file."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fitter import programs
from fitter.api.call_worker import ask_in_threads, questions_of, several_workers
from fitter.api.checked_call import checked_worker_call
from fitter.api.measure_load import without_timeout
from fitter.api.quantizations import check_speed, plan_type
from fitter.errors import LlamaCppError
from fitter.llama.client import Worker
from fitter.llama.header.gguf_writer import Tensor
from fitter.machine.machine import Machine, machine_of
from fitter.model.header import open_model
from fitter.model.shapes.catalogue import ShapeInfo, as_converted, shapes
from fitter.model.shapes.mapping import header_of
from fitter.model.shapes.shape_files import PACKED
from fitter.parameters.table import USEFUL_SPEED, Fitting
from fitter.planning.request.ask import Ask
from fitter.planning.request.request import DEFAULT_MARGIN, Progress
from fitter.planning.tables.quantization_rows import (
    Place,
    Quantization,
    ShapePlan,
    ShapePlans,
    best_of_shape,
    is_enough,
    quantization,
    types_to_plan,
)
from fitter.storage import TemporaryDirectory

if TYPE_CHECKING:
    from typing_extensions import Unpack

MOST = 12
"""Default of the models to find."""
_REACHED = 0.9
"""Share of its speed without attention that a plan is expected to have, before a model's first plan."""
_NEARLY = 0.95
"""A type that is expected to be so nearly fast enough is planned: Nemotron 3 Nano as Q5_K_M on an RTX 4060 Laptop."""
_MOST_WORKERS = 8


@checked_worker_call(Fitting)
def best_shapes(
    words: str | Sequence[str] = (),
    *,
    most: int = MOST,
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


__all__ = ["MOST", "best_shapes"]
