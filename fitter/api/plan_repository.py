"""``fitter.repository``: plan every model of a repository of Hugging Face's hub, or of a directory."""

from __future__ import annotations

import math
import os
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any

from fitter import api, programs
from fitter.api.call_worker import ask_in_threads, several_workers
from fitter.api.checked_call import checked_worker_call
from fitter.api.fits.shared_models import check_drafts_alone
from fitter.api.measure_load import without_timeout
from fitter.api.quantizations import check_speed, longest_context, wanted_types
from fitter.errors import FitterError, LibraryError, LlamaCppError, UsageError
from fitter.llama.client import Worker
from fitter.model import repository_models as models
from fitter.model.files import header_cache
from fitter.model.header import open_model
from fitter.model.location import is_address, local_name, model_files
from fitter.model.repository_models import Listed, Listing, SideFile
from fitter.parameters.table import AnyPath, Fitting
from fitter.planning.request.ask import Ask
from fitter.planning.request.request import Progress
from fitter.planning.tables.file_rows import Repository, RepositoryFile, best_file, ordered

if TYPE_CHECKING:
    from typing_extensions import Unpack

_AT_ONCE = 4
"""Models whose headers are fetched at the same time, and files fetched at the same time for each."""
_MOST_WORKERS = 4
_MOST_MODELS = 1000
_RUNS = ("llama-server", "llama-cli")
"""Programs that the printed command runs."""
_IN_REPOSITORY = ("mmproj", "model_draft")
"""Keywords whose value may be the name of a file in the repository."""


@checked_worker_call(Fitting)
def repository(
    model: AnyPath,
    *,
    types: str | Sequence[str] | None = None,
    tokens_per_second: float | None = None,
    on_progress: Callable[[Progress], None] | None = None,
    on_log: Callable[[str], None] | None = None,
    worker: Worker | None = None,
    **parameters: Unpack[Fitting],
) -> Repository:
    """Plan every model of a repository of Hugging Face's hub (``hf://org/repo``), or of a directory.

    Only headers are fetched. Several workers plan at the same time, unless ``worker`` is given or they would share real
    devices. A model without a plan has its ``problem``.

    Args:
        model: Address of the repository, or path of the directory.
        types: File types to plan (``Q4_K_M``, or several), as the files' names say them; all by default.
        tokens_per_second: The estimated speed of generation that is useful to you, 20 by default. The ``best`` model
            has the most bits per weight that generates so fast.
        on_progress: Called at each step.
        on_log: Called with every line of llama.cpp's log.
        worker: A worker to use; it stays open.
        parameters: Keywords of ``fit`` for each plan. ``mmproj`` and ``model_draft`` may be names in the repository.

    Returns:
        The models with their plans, the ``best`` one, and projectors, importance matrices and draft models
        (``beside``).

    Raises:
        UsageError: A parameter makes no sense, or no model is left to plan.
        FitterError: As ``fit`` raises it, where no model can be planned.
    """
    check_speed(tokens_per_second)
    wanted = wanted_types(types)
    if "program" not in parameters:
        parameters["program"] = programs.chosen("llama-cpp-python")
    ask = Ask.of(parameters)
    say = on_progress or (lambda _: None)
    say(Progress(0, "listing the repository"))
    listing = models.listing(os.fsdecode(model), ask.timeout)
    chosen = _select_types(listing, wanted)
    if len(chosen) > _MOST_MODELS:
        raise UsageError(
            f"{listing.called} has {len(chosen)} models, and no more than {_MOST_MODELS} are planned at once: name a "
            "folder of it, or file types (--type)"
        )
    parameters = _with_its_files(parameters, listing)
    ask = Ask.of(parameters)
    chosen = tuple(each for each in chosen if each.path not in (ask.sharing.model_draft, ask.sharing.mmproj))
    if not chosen:
        raise UsageError(f"{listing.called} has no other model than the draft model: leave --model-draft out")
    with several_workers(ask, worker, on_log, min(_MOST_WORKERS, len(chosen))) as workers:
        told = without_timeout(dict(parameters))
        planned = _plan_all(chosen, told, ask.timeout, say, workers, are_own=worker is None)
    n_devices = max((len(each.plan.devices) for each in planned if each.plan is not None), default=0)
    best = best_file(planned, tokens_per_second)
    return _to_repository(listing, planned, best, n_devices, tokens_per_second, ask, parameters)


def _with_its_files(parameters: Fitting, listing: Listing) -> Fitting:
    """Replace names of files in the repository by their paths or addresses."""
    keywords: dict[str, Any] = dict(parameters)
    for name in _IN_REPOSITORY:
        given = keywords.get(name)
        if given is not None and not os.path.exists(os.fsdecode(given)):
            keywords[name] = listing.path_of(os.fsdecode(given)) or given
    return keywords  # type: ignore[return-value]


def _select_types(listing: Listing, wanted: tuple[str, ...] | None) -> tuple[Listed, ...]:
    if wanted is None and listing.hub is not None and listing.hub.file_type:
        wanted = (listing.hub.file_type.upper(),)
    if wanted is None:
        return listing.models
    chosen, missing = models.only(listing, wanted)
    if missing is not None:
        raise UsageError(f"{listing.called} has no file of type {missing} (--type): it has {models.types_in(listing)}")
    return chosen


_Arrived = tuple[Listed, FitterError | None]
"""A model whose header was fetched, or the reason why it was not."""


def _plan_all(
    chosen: Sequence[Listed],
    told: dict[str, Any],
    timeout: float,
    say: Callable[[Progress], None],
    workers: Sequence[Worker],
    *,
    are_own: bool,
) -> list[RepositoryFile]:
    """Fetch the headers of models in threads, and plan each model by ``fit(**told)`` when its header has arrived.

    Own workers are ended after an error. Raises the first model's error where no model has a plan.
    """
    count = len(chosen)
    say(Progress(0, f"reading the headers of {count} models", 0.0))
    ready: queue.SimpleQueue[_Arrived | None] = queue.SimpleQueue()
    left = deque(chosen)
    for _ in range(_AT_ONCE):
        threading.Thread(target=_fetch, args=(left, timeout, ready.put), daemon=True).start()
    found: dict[Listed, RepositoryFile] = {}
    errors: dict[Listed, FitterError] = {}

    def plan(arrived: _Arrived, worker: Worker) -> RepositoryFile:
        listed, error = arrived
        made = RepositoryFile(listed.name, listed.files, listed.bytes, listed.file_type, listed.path)
        try:
            if error is not None:
                raise error
            with header_cache.reading():
                return replace(made, problem=listed.problem) if listed.problem else _plan_file(made, worker, told)
        except LibraryError:
            raise
        except FitterError as failed:
            errors[listed] = failed
            return replace(made, problem=_reason(failed, made))

    def tell(arrived: _Arrived, made: RepositoryFile, worker: Worker) -> None:
        found[arrived[0]] = made
        said = f"planned {len(found)} of {count}: {made.name}"
        say(Progress(worker.dummy_loads, said))
        if len(found) < count:
            # draws a bar on a terminal
            say(Progress(worker.dummy_loads, said, len(found) / count))

    def stop() -> None:
        left.clear()
        ready.put(None)

    ask_in_threads(workers, islice(iter(ready.get, None), count), plan, tell, stop=stop, dismiss=are_own)
    if errors and all(each.plan is None for each in found.values()):
        raise next(errors[each] for each in chosen if each in errors)
    return [found[each] for each in chosen]


def _fetch(left: deque[Listed], timeout: float, put: Callable[[_Arrived], None]) -> None:
    with suppress(IndexError):
        while True:
            listed = left.popleft()
            error: FitterError | None = None
            try:
                if listed.problem is None:
                    model_files(listed.path, timeout=timeout, at_once=_AT_ONCE)
            except FitterError as failed:
                error = failed
            except BaseException as failed:
                error = LlamaCppError(f"{type(failed).__name__}: {failed}")
            put((listed, error))


def _plan_file(made: RepositoryFile, worker: Worker, told: dict[str, Any]) -> RepositoryFile:
    opened = open_model(made.path, worker.header)
    check_drafts_alone(opened)
    weights = sum(math.prod(tensor.shape) for tensor in opened.tensors)
    # the file's own size: a list of files may be wrong
    made = replace(
        made,
        bytes=sum(file.stat().st_size for file in opened.files),
        weights=weights,
        bits_per_weight=8 * opened.bytes / weights if weights else None,
    )
    told = {**told, "worker": worker}
    plan = api.fit(made.path, **told)
    longest = longest_context(plan, opened, opened.path, told)
    return replace(made, plan=plan, longest_context=longest)


def _reason(error: FitterError, made: RepositoryFile) -> str:
    return error.message.removeprefix(f"{made.path}: ").removeprefix(f"{made.path} ")


def _to_repository(
    listing: Listing,
    planned: Sequence[RepositoryFile],
    best: RepositoryFile | None,
    n_devices: int,
    tokens_per_second: float | None,
    ask: Ask,
    parameters: Fitting,
) -> Repository:
    answer = Repository(listing.called, ordered(planned), listing.beside, best, n_devices, tokens_per_second)
    if best is None or best.plan is None:
        return answer
    from fitter.model.files.addresses import hub_download
    from fitter.output.arguments import arguments

    words = arguments(best.plan)
    if ask.program in _RUNS:
        answer = replace(answer, run=(ask.program, "-m", local_name(best.path), *words))
    if listing.hub is None:
        return answer
    beside = [os.fsdecode(str(parameters.get(name))) for name in _IN_REPOSITORY if parameters.get(name) is not None]
    beside += [os.fsdecode(each.path) for each in best.plan.params.lora]
    same = [each for each in beside if is_address(each) and each in {listing.path_of(name) for name in listing.names}]
    answer = replace(answer, download=tuple(hub_download([best.path, *dict.fromkeys(same)])))
    chosen = next(each for each in listing.models if each.name == best.name)
    return replace(answer, hf=tuple(models.hf_words(listing, chosen) or ()) or None) if not beside else answer


__all__ = ["Repository", "RepositoryFile", "SideFile", "repository"]
