"""The questions of a fit: the user's own, and the same with another split mode, fewer slots or other caches.

One loop asks them, each with what won before, and keeps the best plan. A program that cuts layers by itself, or takes
memory beside them, has questions of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from fitter.errors import LibraryError, LlamaCppError, TimeLimitError, UsageError, WorkerError
from fitter.llama.client import Worker
from fitter.machine.device_memory import used_by_default
from fitter.machine.machine import Machine
from fitter.model.header import Model
from fitter.planning.placing.layer_sizes import cache_layer
from fitter.planning.plan.layer_map import placement_of
from fitter.planning.plan.plan import Plan
from fitter.planning.pricing.objective import GAIN, best_pair, longest_for, seconds_for
from fitter.planning.pricing.split_price import pipelined
from fitter.planning.request.ask import Ask
from fitter.planning.request.session import Session
from fitter.planning.request.shared import parse_reserve
from fitter.planning.speed.explain import Choice
from fitter.programs import PROGRAMS, Attempt
from fitter.text import mib_up

MODES = ("layer", "tensor")
"""The split modes that are compared."""

_CLEARLY = 0.1
"""The share of a turn that a plan must save to be chosen: estimated turns are off by a sixth."""

_RESERVES = 3
"""So many plans at most reserve what the program takes beside llama.cpp."""

_OF_SLOTS = frozenset({"n_seq_max", "kv_unified", "kv_unified_per_slot"})

_Words = Mapping[str, Any]


@dataclass(frozen=True)
class PlanAnswer:
    """The plan of one question.

    Attributes:
        conversation: Computes the bytes of a conversation at its end in the prompt cache.
        own_room: MiB of the program's own prompt cache.
        has_windows: Whether the model has sliding windows.
    """

    plan: Plan
    conversation: Callable[[], int] = lambda: 0
    own_room: int = 0
    has_windows: bool = False


_Tries = Callable[[PlanAnswer], Iterator[_Words]]
"""Yields keywords to change, from the best answer so far."""


class Questions:
    """The best answer so far, and the keywords that it has other than the user's question.

    Args:
        ask: The user's question.
        answer: Plans with some keywords changed.
        words: Keywords of the first question.
        deadline: Time of ``time.monotonic`` at which to end.

    Raises:
        FitterError: As ``answer`` raises it for the first question. A failure of a later one leaves the best plan.
    """

    def __init__(
        self, ask: Ask, answer: Callable[[_Words], PlanAnswer], words: _Words, deadline: float | None = None
    ) -> None:
        self._ask, self._answer, self._deadline = ask, answer, deadline
        self._first = self._best = answer(words)
        self.words = words
        self.are_more = False
        """Whether more than one question was asked."""
        self._is_cut_short = False

    @property
    def plan(self) -> Plan:
        """The best plan."""
        plan = self._best.plan
        is_cut_short = plan.search.is_cut_short or self._is_cut_short
        return replace(plan, search=replace(plan.search, is_cut_short=is_cut_short))

    def ask_of_modes(self) -> None:
        """Compare with split mode ``tensor``: the plan with ``layer`` stays unless that is clearly faster."""
        others: list[Plan] = []

        def is_better(plan: Plan, than: Plan) -> bool:
            others.append(plan)
            return _is_faster_split(self._ask, plan, than)

        by_layer = self._best.plan
        failure = self._ask_each(lambda answer: iter([{"split_mode": "tensor"}]), is_better)
        plans = (*others, by_layer) if self._best.plan is not by_layer else (by_layer, *others)
        seconds = [_split_seconds(self._ask.objective, plan) for plan in plans]
        if failure is not None:
            note = f"planned with split mode 'layer' alone: {_without_remedy(failure)}"
            self._say((), (note,))
        elif all(plan.fits for plan in plans) and seconds[0] is not None and seconds[1] is not None:
            chosen, other = (f"by {plan.params.split_mode}" for plan in plans)
            choice = Choice("how the model is split over the devices", chosen, seconds[0], other, seconds[1])
            self._say((choice,))
        self._first = self._best

    def ask_of_program(self, groups: Sequence[Sequence[Attempt]], words: _Words) -> None:
        """Choose the best of the first plans in ``groups`` that fit and that the program can be told.

        The first question was the first attempt, with ``words`` beside it. Where none fits, the one that lacks least.
        """
        asked: list[tuple[PlanAnswer, _Words]] = [(self._best, self.words)]
        found: list[tuple[PlanAnswer, _Words]] = []
        for group in groups:
            for attempt in group:
                if attempt is not groups[0][0]:
                    chosen = {**words, **attempt.words}
                    if (answer := self._attempted(chosen)) is None:
                        continue
                    asked.append((answer, chosen))
                plan = asked[-1][0].plan
                if plan.fits and (not attempt.layers or _layers_of(plan) in attempt.layers):
                    if not found or _is_faster_split(self._ask, plan, found[0][0].plan):
                        found.insert(0, asked[-1])
                    break
        lacking = sorted(asked, key=lambda each: sum(problem.missing for problem in each[0].plan.problems))
        self._best, self.words = (found or lacking)[0]
        self._first = self._best

    def reserve_more(self, model: Model) -> None:
        """Plan again with room for what the program takes beside llama.cpp's weights, if it takes any.

        Raises:
            FitterError: As ``answer`` does.
        """
        sizes = PROGRAMS[self._ask.program].more(model)
        reserved: dict[str, int] = {}
        for _ in range(_RESERVES if sizes else 0):
            plan = self.plan
            taken = _taken(sizes, plan)
            if all(size <= reserved.get(name, 0) for name, size in taken.items()) or not plan.fits:
                return
            # a layer more, since a reservation may move one
            wanted = {name: size + max(sizes.values()) for name, size in taken.items()}
            reserved = {name: max(reserved.get(name, 0), wanted.get(name, 0)) for name in (*reserved, *wanted)}
            own = parse_reserve(self._ask.sharing.reserve)
            both = {name: own.get(name, 0) + reserved.get(name, 0) for name in (*own, *reserved)}
            self.words = {**self.words, "reserve": both}
            self.are_more = True
            self._first = self._best = self._answer(self.words)

    def _attempted(self, words: _Words) -> PlanAnswer | None:
        try:
            if self._deadline is not None and time.monotonic() >= self._deadline:
                raise TimeLimitError("the time limit was over")
            self.are_more = True
            return self._answer(words)
        except (LibraryError, LlamaCppError, TimeLimitError, UsageError, WorkerError) as error:
            self._is_cut_short |= isinstance(error, TimeLimitError)
            return None

    def ask_of_conversations(self, session: Session) -> None:
        """Look for plans whose turns are clearly quicker: with fewer slots, one cache, or ``swa_full``.

        A slot's cache takes memory from weights, and the prompt cache on the host keeps a conversation for less. So
        where weights are on the host, or nothing fits, half as many slots are tried, and so on while turns get quicker,
        with room for all conversations. Where a turn finds its beginning gone for want of a checkpoint, whole caches of
        sliding windows are tried, which need none. Where some slots are idle while others answer, one cache of all is
        tried: llama.cpp computes slots with caches of their own together only where they are neighbours
        (``llama_batch_allocr::split_equal``).
        """
        given = self._ask.given
        for tries in (_of_windows, _of_slots, _of_caches):
            self._ask_each(partial(tries, given=given, session=session), partial(_is_quicker, session))
        if self._best is self._first:
            return
        plans = self._best.plan, self._first.plan
        names = [_conversations_of(plan) for plan in plans]
        seconds = [None if plan.turns is None else plan.turns.all.seconds for plan in plans]
        assert seconds[0] is not None
        would = "do not fit" if not seconds[1] else f"would take {seconds[1]:.3g} s a turn, not {seconds[0]:.3g} s"
        choice = Choice("how conversations are kept", names[0], seconds[0], names[1], seconds[1])
        self._say((choice,), (f"planned with {names[0]}: {names[1]} {would}",))

    def _ask_each(self, tries: _Tries, is_better: Callable[[Plan, Plan], bool]) -> Exception | None:
        """Ask questions while each has a better plan than the one before; return what ended them, if an error did."""
        for words in tries(self._best):
            try:
                if self._deadline is not None and time.monotonic() >= self._deadline:
                    raise TimeLimitError("the time limit was over")
                self.are_more = True
                answer = self._answer({**self.words, **words})
            except (LibraryError, LlamaCppError, TimeLimitError, UsageError, WorkerError) as error:
                self._is_cut_short |= isinstance(error, TimeLimitError)
                return error
            if not is_better(answer.plan, self._best.plan):
                break
            self._best, self.words = answer, {**self.words, **words}
        return None

    def _say(self, choices: tuple[Choice, ...], notes: tuple[str, ...] = ()) -> None:
        plan = self._best.plan
        plan = replace(plan, choices=(*plan.choices, *choices), notes=(*plan.notes, *notes))
        self._best = replace(self._best, plan=plan)


def _is_faster_split(ask: Ask, plan: Plan, than: Plan) -> bool:
    if not (plan.fits and than.fits):
        return plan.fits
    seconds, before = (_split_seconds(ask.objective, each) for each in (plan, than))
    if seconds is None or before is None:
        return False
    pairs = ((than.params.n_ctx, before * (1 - GAIN)), (plan.params.n_ctx, seconds))
    return best_pair(pairs, lambda quickest: longest_for(ask.objective, ask.context_cost, quickest)) != pairs[0]


def _layers_of(plan: Plan) -> int:
    """Return the layers of a plan on devices, with the output as the last one."""
    layers, most = plan.params.n_gpu_layers, plan.n_layer + 1
    if not plan.breakdown.devices:
        return 0
    return most if layers < 0 else min(layers, most)


def _split_seconds(objective: str, plan: Plan) -> float | None:
    """Estimate the seconds of a plan for its objective, to compare split modes.

    Devices that hold a whole model layer by layer work on one prompt at once; the estimate includes that.
    """
    price = plan.estimate
    if price is None:
        return None
    estimate = price.estimate
    is_whole = not any(part.name.startswith("host:") for part in estimate.parts)
    devices = [name for name in plan.breakdown.devices if plan.breakdown.on(name).model]
    if plan.params.split_mode == "layer" and is_whole and devices:
        estimate = pipelined(estimate, len(devices), price.workload, plan.params.n_ubatch)
    return seconds_for(objective, price.workload, estimate)


def _without_remedy(error: Exception) -> str:
    """Cut the advice to use another split mode from an error, because that is being done."""
    text, colon, _ = str(error).rpartition(": use ")
    return text if colon else str(error)


def _of_windows(best: PlanAnswer, given: frozenset[str], session: Session) -> Iterator[_Words]:
    plan = best.plan
    if best.has_windows and "swa_full" not in given and plan.turns is not None and not plan.turns.kept:
        yield {"swa_full": True, "n_seq_max": plan.params.n_seq_max, "kv_unified": plan.params.kv_unified}


def _of_slots(best: PlanAnswer, given: frozenset[str], session: Session) -> Iterator[_Words]:
    plan = best.plan
    parts = () if plan.estimate is None else plan.estimate.estimate.parts
    if given & _OF_SLOTS or (plan.fits and not any(part.name.startswith("host:") for part in parts)):
        return
    slots, conversation = min(session.users, plan.params.n_seq_max), best.conversation()
    while slots > 1:
        slots //= 2
        room = mib_up((session.users - slots) * conversation)
        is_enough = "cache_ram" in given or room <= best.own_room
        more = {} if is_enough else {"cache_ram": room}
        yield {"n_seq_max": slots, "kv_unified": plan.params.kv_unified, **more}


def _of_caches(best: PlanAnswer, given: frozenset[str], session: Session) -> Iterator[_Words]:
    # where all slots are busy all the time, their own caches are read as quickly, and attention needs less
    n_seq_max = best.plan.params.n_seq_max
    if not given & _OF_SLOTS - {"n_seq_max"} and n_seq_max > 1 and (session.gap or not session.reused):
        yield {"kv_unified": True, "n_seq_max": n_seq_max}


def _is_quicker(session: Session, plan: Plan, than: Plan) -> bool:
    n_ctx = plan.params.n_ctx or plan.breakdown.n_ctx
    if plan.params.kv_unified and n_ctx < plan.params.n_seq_max * session.longest:
        # one cache has no room for a conversation of each slot, to its end
        return False
    if plan.turns is None or than.turns is None:
        return plan.fits
    return plan.turns.all.seconds < than.turns.all.seconds * (1 - _CLEARLY)


def _conversations_of(plan: Plan) -> str:
    slots = plan.params.n_seq_max
    more = f"{' in one cache' * plan.params.kv_unified}{' with --swa-full' * plan.params.swa_full}"
    return f"{slots} slot{'s' * (slots > 1)}{more}"


def attempts_of(ask: Ask, model: Model, machine: Machine) -> list[list[Attempt]]:
    """List the groups of plans to make for the program of ``ask``."""
    devices = used_by_default(machine.devices)
    if ask.named is not None:
        devices = tuple(device for name in ask.named for device in machine.devices if device.name == name)
    if ask.load.split_mode == "none":
        devices = devices[ask.main_gpu : ask.main_gpu + 1]
    free = {device.name: device.free for device in devices}
    return PROGRAMS[ask.program].attempts(model, free, ask.set_words)


def _taken(sizes: Mapping[int, int], plan: Plan) -> dict[str, int]:
    homes = placement_of(plan, plan.n_layer + 1).homes
    names = plan.breakdown.devices
    taken: dict[str, int] = {}
    for layer, size in sizes.items():
        if homes[layer] >= 0:
            taken[names[homes[layer]]] = taken.get(names[homes[layer]], 0) + size
    return taken


def with_own_split(plan: Plan, model: Model, worker: Worker) -> Plan:
    """Add the shares with which the program cuts layers like ``plan``, or a note where none do."""
    if len(plan.breakdown.devices) < 2 or plan.params.split_mode != "layer" or not plan.params.n_gpu_layers:
        return plan

    def caches() -> list[int]:
        sizes = [0] * model.n_layer
        for cache in worker.caches(model.skeleton, plan.params).caches:
            for tensor in cache.tensors:
                if (layer := cache_layer(tensor.name, -1)) >= 0:
                    sizes[layer] += tensor.row_bytes * tensor.rows * tensor.planes
        return sizes

    program = PROGRAMS[plan.program]
    split = program.split(model, plan.params, caches, placement_of(plan, plan.n_layer + 1).counts)
    if split is None:
        note = f"no -ts of {program.title} cuts layers like this plan: use one device less (-dev), or another -c"
        return replace(plan, notes=(*plan.notes, note))
    return replace(plan, own_split=tuple(split))
