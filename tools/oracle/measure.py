"""Fill in the results of a table's rows, by the oracle or by the profile."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from fitter.errors import LlamaCppError
from fitter.llama.build.virtual_backends import CudaLibrary
from fitter.llama.client import Worker
from fitter.llama.types import describe
from tools.builds.environment import with_variables
from tools.comparisons.cuda_reference import Load, cheapest_order, load_of, splits_of, write_model
from tools.comparisons.load_answers import compare, text_of

Row = dict[str, str]

_CRASH = {"result": "FAIL crash: ", "splits": ""}


def fill(rows: Sequence[Row], models: Path, oracle: Path | CudaLibrary | None, jobs: int = 2) -> list[Row]:
    """The rows with the results of the ``oracle`` (its library, or a user's), or of fitter's profile without one."""
    loads = [load_of(str(index), row) for index, row in enumerate(rows)]
    for model in sorted({load.model for load in loads}):
        write_model(model, models)
    order = sorted(range(len(rows)), key=lambda index: cheapest_order(loads[index]))
    groups = [
        list(group) for _, group in itertools.groupby(order, key=lambda i: (loads[i].environment, loads[i].devices))
    ]

    def measure(indices: Sequence[int]) -> list[tuple[int, Row]]:
        filled = []
        worker = _start(loads[indices[0]], oracle)
        try:
            for index in indices:
                result = _result(worker, models, loads[index])
                filled.append((index, {**rows[index], **result}))
                if result == _CRASH:
                    worker.close()
                    worker = _start(loads[index], oracle)
        finally:
            worker.close()
        return filled

    with ThreadPoolExecutor(jobs) as pool:
        filled = dict(itertools.chain.from_iterable(pool.map(measure, groups)))
    return [filled[index] for index in range(len(rows))]


def compare_rows(title: str, expected: Sequence[Row], actual: Sequence[Row]) -> int:
    """Print the rows whose results differ (see ``load_answers.compare``), and return how many do."""
    loads = [{key: value for key, value in row.items() if key not in _CRASH and value} for row in expected]
    answers = [[(row["result"], row["splits"]) for row in rows] for rows in (expected, actual)]
    return compare(title, loads, *answers)


def _result(worker: Worker, models: Path, load: Load) -> Row:
    path = write_model(load.model, models)
    try:
        breakdown = worker.measure(path, load.params)
    except LlamaCppError as error:
        reason = str(error).removeprefix(f"{path}: ")
        said = [line.strip() for line in error.log if line.strip().endswith(reason)]
        # A crash says where in the source it is: not the same place for oracle and profile.
        crashed = reason.startswith("llama.cpp was ended")
        return _CRASH if crashed else {"result": f"FAIL {said[-1]}", "splits": ""}
    return {"result": text_of(breakdown), "splits": splits_of(breakdown)}


def _start(load: Load, oracle: Path | CudaLibrary | None) -> Worker:
    variables = dict(load.environment)
    if isinstance(oracle, Path):
        variables |= {"GGML_BACKEND_PATH": str(oracle), "FITTER_CUDART_DEVICES": describe(load.devices)}
        worker = Worker()
    else:
        worker = Worker(load.devices, library=oracle)
    with with_variables(variables):
        worker.devices()
    return worker
