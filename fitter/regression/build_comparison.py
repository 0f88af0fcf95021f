"""Cases with several builds of llama.cpp: what grew or shrank from one to another. Sizes in bytes."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fitter.api.compare_builds import OnBuild, check_builds, compare_builds
from fitter.errors import FitterError, UsageError
from fitter.llama.client import DEFAULT_TIMEOUT, Worker
from fitter.llama.types import Row
from fitter.model.location import called, is_address, name_of
from fitter.planning.plan.plan import Plan
from fitter.planning.request.shared import HOST_NAME
from fitter.regression.cases import Case, Growth
from fitter.regression.compare import Move
from fitter.regression.measuring import OnDone, go_on, in_workers, memory_of
from fitter.text import human

SHARED = "beside the model"
"""Name that stands for the buffer type of draft models, vision and LoRA."""
_PARTS = ("model", "context", "compute")


@dataclass(frozen=True)
class Subject:
    """A model on a machine, to be measured with several builds. ``keywords``: those of ``fitter.fit``."""

    name: str
    model: Path | str
    keywords: Mapping[str, Any] = field(default_factory=dict)
    max_growth: Growth = field(default_factory=Growth)

    @property
    def is_here(self) -> bool:
        """Whether it is about the devices of this machine."""
        return not self.keywords.get("gpus")


@dataclass(frozen=True)
class Compared:
    """A subject with several builds: bytes of the first plan's parameters with each build, and the plan of each build.

    ``error``: why no build can plan it, or why the words about it make no sense; there are no ``builds`` then.
    """

    subject: Subject
    builds: tuple[OnBuild, ...]
    error: FitterError | None = None

    @property
    def name(self) -> str:
        """The subject's name."""
        return self.subject.name


def of_cases(cases: Sequence[Case]) -> tuple[Subject, ...]:
    """Return the cases of ``fitter.toml`` as subjects; the builds that they name are ignored."""
    keywords = ({name: value for name, value in case.keywords().items() if name != "llama_cpp"} for case in cases)
    return tuple(
        Subject(case.name, case.model, words, case.max_growth) for case, words in zip(cases, keywords, strict=True)
    )


def of_models(models: Sequence[str], keywords: Mapping[str, Any]) -> tuple[Subject, ...]:
    """Models, all with the same keywords of ``fitter.fit``, as subjects that are called as their files."""
    paths = [model if is_address(model) else Path(model) for model in models]
    stems = [Path(name_of(path)).stem for path in paths]
    count = Counter(stems)
    names = [stem if count[stem] == 1 else called(path) for stem, path in zip(stems, paths, strict=True)]
    if twice := [name for name, times in Counter(names).items() if times > 1]:
        raise UsageError(f"{twice[0]} is named twice: leave one out")
    return tuple(Subject(name, path, keywords) for name, path in zip(names, paths, strict=True))


def over_builds(
    subjects: Sequence[Subject],
    builds: Sequence[str],
    *,
    own_plans: bool = True,
    jobs: int | None = None,
    timeout: float = DEFAULT_TIMEOUT,
    on_done: OnDone | None = None,
) -> tuple[Compared, ...]:
    """Measure all ``subjects`` with all ``builds``, as ``fitter.compare_builds`` does for one subject.

    On this machine's own devices one is measured at a time. If a subject fails with all builds, its ``error`` says why.
    Raises ``UsageError`` for builds that are not there, ``LibraryError`` for builds that cannot be used.
    """
    check_builds(builds)
    if any(subject.is_here for subject in subjects):
        # Another process would take memory of a real device.
        jobs = 1

    def begin(worker: Worker, stopped: threading.Event) -> Callable[[Subject], Compared]:
        def compared(subject: Subject) -> Compared:
            go_on(stopped)
            try:
                results = compare_builds(
                    subject.model,
                    builds,
                    own_plans=own_plans,
                    on_progress=lambda _: go_on(stopped),
                    worker=worker,
                    **dict(subject.keywords),
                )
            except FitterError as error:
                return Compared(subject, (), error)
            return Compared(subject, results)

        return compared

    results = in_workers(subjects, begin, jobs=jobs, timeout=timeout, on_done=on_done, llama_cpp=builds[0])
    return tuple(results[subject.name] for subject in subjects)


def labels(builds: Sequence[str]) -> tuple[str, ...]:
    """Return a short name for each build: the last part of its path that tells it from the others."""
    parts = [tuple(part for part in Path(build).parts if part != os.sep) or (build,) for build in builds]
    n_shared = 0
    while len({each[::-1][: n_shared + 1] for each in parts}) == 1 and n_shared < min(map(len, parts)):
        n_shared += 1
    # One that is all of another's end has no part of its own.
    ends = [each[: len(each) - n_shared] or each for each in parts]
    for length in range(1, max(map(len, ends)) + 1):
        short = tuple("/".join(each[-length:]) for each in ends)
        if len(set(short)) == len(set(parts)):
            return short
    return tuple(builds)


# --- differences


def first_of(compared: Compared) -> OnBuild | None:
    """Return the build with whose plan the others are compared; ``None`` if there is none."""
    return next((each for each in compared.builds if each.plan is not None and each.breakdown is not None), None)


def same_parameters(before: OnBuild, after: OnBuild, max_growth: Growth) -> tuple[Move, ...]:
    """Compare the bytes of the first plan's parameters, by place and buffer type, and whether they still fit.

    Where a device or the host as a whole grew by more than ``max_growth``, what grew there has a ``failure``.
    """
    if before.breakdown is None or after.breakdown is None:
        return ()
    moves = []
    if before.fits != after.fits:
        failure = f"it no longer fits: {lacking(after.missing)}" if before.fits else ""
        moves.append(Move("fits", int(before.fits), int(after.fits), "", lacking(after.missing), failure))
    old, new = by_buffer_type(before), by_buffer_type(after)
    grown = _grown_places(_by_place(old), _by_place(new), max_growth)
    for key in sorted(dict.fromkeys((*old, *new)), key=lambda key: (key[0] == HOST_NAME, key)):
        was, now = old.get(key, _NOTHING), new.get(key, _NOTHING)
        if was != now:
            moves.append(_move(key, was, now, is_grown=key[0] in grown))
    if before.breakdown.n_ctx != after.breakdown.n_ctx:
        moves.append(Move("context", before.breakdown.n_ctx, after.breakdown.n_ctx, "tokens"))
    return tuple(moves)


def own_plans(before: Plan, after: Plan) -> tuple[Move, ...]:
    """Compare another build's own plan: fit, context, layers on devices, weights on the host, estimated speeds."""
    moves = [Move("fits", int(before.fits), int(after.fits), "")] if before.fits != after.fits else []
    if before.breakdown.n_ctx != after.breakdown.n_ctx:
        moves.append(Move("context", before.breakdown.n_ctx, after.breakdown.n_ctx, "tokens"))
    if _layers(before) != _layers(after):
        moves.append(Move("layers on devices", _layers(before), _layers(after), "layers"))
    if before.host.model != after.host.model:
        moves.append(Move("weights on the host", before.host.model, after.host.model, "bytes"))
    if before.estimate and after.estimate:
        for kind in ("prompt", "generation"):
            was, now = (getattr(plan.estimate, f"{kind}_tokens_per_second") for plan in (before, after))
            if f"{was:.4g}" != f"{now:.4g}":
                moves.append(Move(f"{kind} speed", was, now, "tokens/s"))
    return tuple(moves)


def change_on(compared: Compared, each: OnBuild, max_growth: Growth | None = None) -> tuple[Move, ...]:
    """``same_parameters`` of one build against the first, by the subject's own ``max_growth`` if none is given."""
    first = first_of(compared)
    limit = compared.subject.max_growth if max_growth is None else max_growth
    return () if first is None or each is first else same_parameters(first, each, limit)


def has_grown(compared: Compared) -> bool:
    """Whether the last build takes more than the first that measured it, beyond what it may, or no longer fits."""
    return bool(compared.builds) and any(move.failure for move in change_on(compared, compared.builds[-1]))


def by_buffer_type(build: OnBuild) -> dict[tuple[str, str], Row]:
    """Return the rows of a measurement that are not empty, by place (a device, or ``host``) and buffer type.

    The memory beside the model is one row for each place. Empty without a measurement.
    """
    if build.breakdown is None:
        return {}
    devices, host = memory_of(build.breakdown.rows)
    rows = {
        (place, name): Row(name, None, place == HOST_NAME, memory.model, memory.context, memory.compute)
        for place, memories in {**devices, HOST_NAME: host}.items()
        for name, memory in memories.items()
    }
    for row in (row for use in build.shared for row in use.rows if row.used):
        place = row.device or HOST_NAME
        sum_of = rows.get((place, SHARED), Row(SHARED, None, place == HOST_NAME, 0, 0, 0))
        rows[place, SHARED] = replace(sum_of, **{name: getattr(sum_of, name) + getattr(row, name) for name in _PARTS})
    return rows


def used_on(build: OnBuild) -> dict[str, int]:
    """Sum bytes on each device, and on ``host``."""
    return _by_place(by_buffer_type(build))


def _by_place(rows: Mapping[tuple[str, str], Row]) -> dict[str, int]:
    used: dict[str, int] = {}
    for (place, _), row in rows.items():
        used[place] = used.get(place, 0) + row.used
    return used


def lacking(missing: Mapping[str, int]) -> str:
    """``CUDA0 lacks 12.0 MiB``; empty if nothing is missing."""
    return ", ".join(
        f"{'the host' if name == HOST_NAME else name} lacks {human(size)}" for name, size in missing.items()
    )


_NOTHING = Row("", None, False, 0, 0, 0)


def _grown_places(before: Mapping[str, int], after: Mapping[str, int], max_growth: Growth) -> frozenset[str]:
    """The places that take more than they may."""
    was = {place: before.get(place, 0) for place in after}
    return frozenset(place for place, used in after.items() if used > was[place] + max_growth.of(was[place]))


def _move(key: tuple[str, str], was: Row, now: Row, *, is_grown: bool) -> Move:
    place, buffer_type = key
    what = place if place == buffer_type else f"{place} {buffer_type}"
    is_why = is_grown and now.used > was.used
    failure = f"{what} takes {human(now.used)} instead of {human(was.used)}" if is_why else ""
    return Move(what, was.used, now.used, "bytes", ", ".join(_parts(was, now)), failure)


def _parts(was: Row, now: Row) -> Iterator[str]:
    for name in _PARTS:
        delta = getattr(now, name) - getattr(was, name)
        if delta:
            yield f"{name} {'+' if delta > 0 else '-'}{human(abs(delta))}"


def _layers(plan: Plan) -> int:
    """Layers on devices, the output layer counted as one."""
    every = plan.n_layer + 1
    if not plan.breakdown.devices:
        return 0
    return every if plan.params.n_gpu_layers < 0 else min(plan.params.n_gpu_layers, every)
