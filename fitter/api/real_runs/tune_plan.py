"""``fitter.tune``: run a plan and changes of it for real, and keep the quickest."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path as FilePath
from typing import TYPE_CHECKING, Any

from fitter.api.checked_call import checked_call
from fitter.api.fits.fit_model import fit
from fitter.api.real_runs.verify_plan import real_load_patience
from fitter.errors import LlamaCppError, PlanError, TimeLimitError, UsageError
from fitter.machine.bandwidth import key_of, this_host
from fitter.machine.measured import factors_of, read_tuned, store_tuned, tuned_document, tuned_rows
from fitter.model import location
from fitter.output.arguments import arguments, command, shell_line, with_absolute_paths
from fitter.parameters.table import AnyPath as Path
from fitter.parameters.table import Fitting
from fitter.planning.checked.tuning import (
    MINUTES,
    ROUNDS,
    RUNS,
    Factored,
    Tuning,
    TuningChange,
    TuningRun,
    best_of,
    changes_of,
    joined,
    parts_of,
    tuned_of,
)
from fitter.planning.plan.plan import Plan, check_can_run, check_fits, resolved
from fitter.planning.request.request import Progress
from fitter.planning.speed.cost import seconds_of
from fitter.programs import SERVER
from fitter.programs.finding import asked, check_same_build, find_server
from fitter.programs.running_server import running
from fitter.programs.server_requests import Load, take_turns
from fitter.storage import read_text, replace_document
from fitter.text import printable

if TYPE_CHECKING:
    from typing_extensions import Unpack


@checked_call(Fitting)
def tune(
    model: Path,
    *,
    minutes: float = MINUTES,
    server: Path | None = None,
    store: bool = True,
    on_progress: Callable[[Progress], None] | None = None,
    on_log: Callable[[str], None] | None = None,
    **parameters: Unpack[Fitting],
) -> Tuning:
    """Run a plan and changes of it for real, keep the quickest, and have later plans know this machine.

    ``fit`` makes the plan. A llama-server loads it and is sent turns of the work (``workload``, ``users``) without
    gaps, or one user's requests. Then other numbers of threads, batch sizes, load modes and so on are tried, each on
    top of what has won so far, and only where every margin is kept. A change stays if it is quicker beyond noise, also
    when it and the plan are started a second time. The measurements of all runs are stored for this machine and build,
    and later plans correct their estimates by them; runs that other programs or noise decide are not (``doubt``).

    Args:
        model: Path of a GGUF file.
        minutes: Minutes for all runs. No run begins that would not end in time; the plan itself always runs. Turns are
            cut so that several runs have time.
        server: The llama-server (file or directory); by default the one of ``llama_cpp``, else the one on the PATH.
        store: Whether to store the measurements.
        on_progress: Called at each step.
        on_log: Called with every line of the log.
        parameters: Keywords of ``fit``.

    Returns:
        All runs, and the best. A plan that does not fit is not run: it is then the only one, and has ``problems``.

    Raises:
        UsageError: The devices are virtual, the model embeds or ranks texts, or a keyword makes no sense.
        PlanError: The llama-server is another build than the plan's.
        LlamaCppError: The llama-server cannot run the plan.
        AnswerError: The measurements cannot be stored.
        FitterError: As ``fit`` raises it.
    """
    began = time.monotonic()
    if not 0 < minutes <= 24 * 60:
        raise UsageError(f"minutes is {minutes:g}: give more than 0, and at most a day of 1440")
    if parameters.get("gpus"):
        raise UsageError("virtual devices cannot run a model: tune a plan for those that are here")
    if parameters.get("program") not in (None, SERVER):
        raise UsageError(f"only a {SERVER} can be tuned: leave --for out")
    location.check_is_here(os.fsdecode(model))
    tuner = Tuner(model, server, began + 60 * minutes, parameters, on_progress, on_log)
    tuner.run(())
    if not tuner.runs[0].plan.fits:
        return tuner.result(store=False)
    for values in tuner.kinds():
        best, is_in_time = best_of(tuner.runs), True
        for change in values:
            is_in_time = is_in_time and tuner.has_time()
            if not is_in_time:
                tuner.left.append(change.text)
                continue
            tuner.run((*best.changes, change))
    tuner.repeat()
    return tuner.result(store=store)


class Tuner:
    """Runs plans, and remembers what they took."""

    def __init__(
        self,
        model: Path,
        server: Path | None,
        deadline: float,
        parameters: Fitting,
        on_progress: Callable[[Progress], None] | None,
        on_log: Callable[[str], None] | None,
    ) -> None:
        self._model, self._deadline = os.fsdecode(model), deadline
        self._say = on_progress or (lambda _: None)
        self._on_log = on_log
        self._given: dict[str, Any] = {name: value for name, value in parameters.items() if value is not None}
        llama_cpp = self._given.get("llama_cpp")
        where = None if server is None else os.fsdecode(server)
        self._server = asked(find_server(where, None if llama_cpp is None else os.fsdecode(llama_cpp)))
        self._first = self._longest = 0.0
        self._began, self._said = time.monotonic(), 0.0
        self._load: Load | None = None
        self.cut = ""
        self.runs: list[TuningRun] = []
        self.left: list[str] = []

    def kinds(self) -> list[tuple[TuningChange, ...]]:
        """List what to try."""
        return list(changes_of(self.runs[0].plan, self._given, this_host().cores))

    def has_time(self) -> bool:
        """Whether a run as long as the longest until now would end in time."""
        return time.monotonic() + self._longest < self._deadline

    def run(self, changes: tuple[TuningChange, ...]) -> None:
        """Fit with ``changes``, and run the plan. Only the first run raises errors; others end with a reason."""
        began = time.monotonic()
        draft = TuningRun(changes, self.runs[0].plan) if self.runs else None
        try:
            run = TuningRun(changes, self._plan(changes))
            if any(_words(other) == _words(run) for other in self.runs):
                # the plan has it already
                return
            if self.runs:
                check_fits(run.plan)
            if run.plan.fits:
                run = self._measured(run, f"run {len(self.runs) + 1}: {run.text}")
        except (PlanError, LlamaCppError, TimeLimitError, UsageError) as error:
            if draft is None:
                raise
            run = replace(draft, problem=printable(str(error).split("\n")[0], 200))
        seconds = time.monotonic() - began
        self._first, self._longest = self._first or seconds, max(self._longest, seconds)
        self.runs.append(run)

    def repeat(self) -> None:
        """Start the best and the plan a second time, while there is time: turns of one start share its luck."""
        best = best_of(self.runs)
        again = [index for index, run in enumerate(self.runs) if run is best or not index]
        for index in reversed(again):
            run = self.runs[index]
            if self.has_time():
                with contextlib.suppress(LlamaCppError):
                    self.runs[index] = joined(run, self._measured(run, f"again: {run.text}"))

    def _plan(self, changes: tuple[TuningChange, ...]) -> Plan:
        keywords = {name: value for change in changes for name, value in change.keywords}
        for run in self.runs:
            if run.keywords == keywords:
                # words and variables of the server alone are changed
                return run.plan
        fixed = {"n_ctx": resolved(self.runs[0].plan).n_ctx} if self.runs else {}
        plan = fit(
            self._model,
            on_progress=self._say,
            on_log=self._on_log,
            **{**self._given, **fixed, **keywords, "program": SERVER},
        )
        check_can_run(plan)
        if plan.params.embeddings:
            raise UsageError(
                "only a model that answers can be tuned, and this one embeds or ranks texts: 'fitter MODEL' estimates "
                "its inputs a second, and 'llama-bench -embd 1 -n 0 -p 512 -ub 512,2048' measures it"
            )
        check_same_build(plan.llama_cpp, self._server)
        return plan

    def _measured(self, run: TuningRun, doing: str) -> TuningRun:
        plan, price, began = run.plan, run.plan.estimate, time.monotonic()
        if price is None:
            raise PlanError("the plan has no estimate to compare runs with: tune another one")
        whole = _load_of(plan)
        # a change that takes twice as long has lost
        deadline = min(self._deadline, began + 2 * self._first) if self._load else self._deadline
        budget = None if self._load else (self._deadline - began) / RUNS

        def say() -> None:
            now = time.monotonic()
            if now - self._said >= 1:
                self._said, left = now, self._deadline - now
                part = min(1.0, (now - self._began) / (self._deadline - self._began))
                when = f"{left:.0f} s left" if left > 0 else f"{-left:.0f} s over: the plan always runs"
                self._say(Progress(0, f"{doing} ({when})", part))

        self._say(Progress(0, f"{doing} ({max(0.0, self._deadline - began):.0f} s left)"))
        words = [*(word for each in with_absolute_paths(plan) for word in each.words), *run.words]
        patience = real_load_patience(self._given.get("timeout"), plan.model.bytes)
        with running([self._server.path, *words], patience, self._on_log, run.environment, say) as server:
            load = self._load or whole
            taken = take_turns(server, load, text_of_turns(), deadline, budget, is_limited=self._load is not None)
        lookups = server.said.lookups
        self._load = load = taken.load
        if load != whole:
            self.cut = (
                f"{load.rounds} turns of {load.new} + {load.answer} tokens for each user, not {whole.rounds} of "
                f"{whole.new} + {whole.answer}, so that several runs have time"
            )
        workload = replace(price.workload, prompt=load.new, generate=load.answer)
        per_token = price.estimate.prompt_seconds, price.estimate.generation_seconds
        return replace(
            run,
            estimated=price.seconds if load == whole else seconds_of(workload, *per_token),
            seconds=taken.seconds,
            spread=taken.spread,
            prompt=taken.prompt,
            step=taken.step,
            acceptance=taken.acceptance,
            others=taken.others,
            hit_rate=lookups.hits / max(1, lookups.hits + lookups.misses) if lookups else None,
        )

    def result(self, *, store: bool) -> Tuning:
        """Store the measurements, and return the result."""
        best = best_of(self.runs)
        machine, key = key_of(this_host()), best.plan.llama_cpp.key if best.plan.llama_cpp else ""
        earlier = read_tuned()
        factors = factors_of(earlier, machine, key)
        found = (tuned_of(run, best, machine, key, _words(run), factors) for run in self.runs)
        rows = [row for row in found if row is not None]
        stored = str(store_tuned(rows)) if store and rows else ""
        after = factors_of((*earlier, *rows), machine, key)
        tuned_seconds = _estimated(best, factors, after)
        return Tuning(tuple(self.runs), best, tuple(self.left), self._server.path, stored, tuned_seconds, self.cut)


def _words(run: TuningRun) -> list[str]:
    """List the variables and arguments of a run's llama-server."""
    return [*(f"{name}={value}" for name, value in run.environment.items()), *arguments(run.plan), *run.words]


def command_line(tuning: Tuning) -> str:
    """Write the line that starts the best run: variables, llama-server, and all arguments, quoted for a shell."""
    best = tuning.best
    words = command(best.plan, best.words) or [*arguments(best.plan), *best.words]
    return " ".join([*(f"{name}={value}" for name, value in best.environment.items()), shell_line(words)])


def export_rows(path: FilePath) -> int:
    """Write the rows of this machine into a file; return their number.

    Raises:
        UsageError: There is nothing to write.
        AnswerError: The file cannot be written.
    """
    if not (rows := read_tuned()):
        raise UsageError("nothing was measured on this machine yet: run fitter tune with a model first")
    replace_document(path, (json.dumps(tuned_document(rows), indent=1) + "\n").encode())
    return len(rows)


def import_rows(path: FilePath) -> tuple[FilePath, int]:
    """Add the rows of a file to those of this machine, as if they were measured here; return file and number.

    Raises:
        UsageError: The file cannot be read, or has no such rows.
        AnswerError: They cannot be stored.
    """
    try:
        rows = tuned_rows(json.loads(read_text(path)))
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}") from None
    except (ValueError, KeyError, TypeError, RecursionError):
        raise UsageError(f"{path} has no runs that fitter tune --export wrote") from None
    here = key_of(this_host())
    return store_tuned(replace(row, machine=here) for row in rows), len(rows)


def _load_of(plan: Plan) -> Load:
    """Return the average turn that the plan is priced for, as it is sent."""
    assert plan.estimate is not None
    workload = plan.estimate.workload
    params = resolved(plan)
    room = params.n_ctx // (1 if params.kv_unified else params.n_seq_max)
    room = room // workload.users if params.kv_unified else room
    if not workload.cached:
        return Load(0, workload.prompt, workload.generate, workload.users, ROUNDS)
    grown = (ROUNDS + 1) * (workload.prompt + workload.generate)
    prefix = max(1, min(workload.cached - grown // 2, room - grown - 8))
    return Load(prefix, workload.prompt, workload.generate, workload.users, ROUNDS)


def _estimated(run: TuningRun, before: Factored, after: Factored) -> float | None:
    """Estimate a turn of ``run`` as later plans do."""
    price = run.plan.estimate
    if price is None:
        return None
    parts = parts_of(price, run.plan.devices, before)
    prompt, step = (
        sum(seconds[kind] * after.get(name, (1.0, 1.0))[kind] for name, seconds in parts.items()) for kind in (0, 1)
    )
    return seconds_of(price.workload, prompt, step)


def text_of_turns() -> str:
    """Return a long text in English that every Python has: of real text, experts and drafts are those of real use."""
    from pydoc_data.topics import topics

    return "\n".join(topics.values())
