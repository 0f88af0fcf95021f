"""Work of several users: plan with fewer slots, one cache, whole caches of windows, and keep the quickest turn."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from fitter.api.choose_split_mode import OnProgress, counting, joined_searches
from fitter.errors import FitterError, TimeLimitError
from fitter.parameters.table import Fitting
from fitter.planning.plan.plan import Plan
from fitter.planning.request.session import Session
from fitter.planning.speed.explain import Choice
from fitter.text import mib_up

_CLEARLY = 0.1
"""The share of a turn that a plan must save to be chosen: estimated turns are off by a sixth."""
_OF_SLOTS = frozenset({"n_seq_max", "kv_unified", "kv_unified_per_slot"})


def quickest(
    plan: Plan,
    fit: Callable[..., Plan],
    model: str,
    parameters: Fitting,
    *,
    session: Session,
    conversation: int,
    own_room: int,
    has_windows: bool,
    deadline: float | None,
    on_progress: OnProgress | None,
    **others: Any,
) -> Plan:
    """Return ``plan``, or one whose turns are clearly quicker: with fewer slots, one cache, or ``swa_full``.

    A slot's cache takes memory from weights, and the prompt cache on the host keeps a conversation for less. So where
    weights are on the host, or nothing fits, half as many slots are tried, and so on while turns get quicker, with
    room for all conversations. Where a turn finds its beginning gone for want of a checkpoint, whole caches of sliding
    windows are tried, which need none. Where some slots are idle while others answer, one cache of all is tried:
    llama.cpp computes slots with caches of their own together only where they are neighbours
    (``llama_batch_allocr::split_equal``).

    Args:
        plan: The plan with a slot for each user.
        fit: ``fitter.fit``.
        model: Path or address.
        parameters: Keywords of ``fit``; what they set is kept.
        session: The work.
        conversation: Bytes of a conversation at its end in the prompt cache.
        own_room: MiB of the program's own prompt cache.
        has_windows: Whether the model has sliding windows.
        deadline: Time of ``time.monotonic`` at which to end.
        on_progress: Called at each step, with the dummy loads of all fits.
        others: Further keywords of ``fit``.
    """
    started = time.monotonic()
    given = {name for name, value in parameters.items() if value is not None}
    best, search = plan, plan.search
    kept: dict[str, Any] = {}
    if not has_windows:
        given.add("swa_full")
    of_slots = partial(_of_slots, users=session.users, conversation=conversation, own_room=own_room)
    for tries in (_of_windows, of_slots, partial(_of_caches, session=session)):
        for words in tries(best, given):
            left = {} if deadline is None else {"time_limit": deadline - time.monotonic()}
            if left and left["time_limit"] <= 0:
                search = replace(search, is_cut_short=True)
                break
            say = counting(on_progress, search.dummy_loads)
            try:
                other = fit(model, **{**parameters, **kept, **words, **left}, on_progress=say, **others)
            except FitterError as error:
                # there is a plan already
                search = replace(search, is_cut_short=search.is_cut_short or isinstance(error, TimeLimitError))
                break
            search = joined_searches(search, other.search, plan.search.seconds + time.monotonic() - started)
            if not _is_quicker(other, best) or not _holds(other, session):
                break
            best = other
            kept |= words
    if search is plan.search:
        return plan
    if best is not plan:
        best = _with_choice(best, plan, {**plan.fit_keywords, **kept})
    return replace(best, search=search)


def _of_windows(plan: Plan, given: set[str]) -> Iterator[dict[str, Any]]:
    if "swa_full" not in given and plan.turns is not None and not plan.turns.kept:
        yield {"swa_full": True, "n_seq_max": plan.params.n_seq_max, "kv_unified": plan.params.kv_unified}


def _of_slots(plan: Plan, given: set[str], *, users: int, conversation: int, own_room: int) -> Iterator[dict[str, Any]]:
    parts = () if plan.estimate is None else plan.estimate.estimate.parts
    if given & _OF_SLOTS or (plan.fits and not any(part.name.startswith("host:") for part in parts)):
        return
    slots = min(users, plan.params.n_seq_max)
    while slots > 1:
        slots //= 2
        room = mib_up((users - slots) * conversation)
        is_enough = "cache_ram" in given or room <= own_room
        more = {} if is_enough else {"cache_ram": room}
        yield {"n_seq_max": slots, "kv_unified": plan.params.kv_unified, **more}


def _of_caches(plan: Plan, given: set[str], *, session: Session) -> Iterator[dict[str, Any]]:
    # where all slots are busy all the time, their own caches are read as quickly, and attention needs less
    if not given & _OF_SLOTS - {"n_seq_max"} and plan.params.n_seq_max > 1 and (session.gap or not session.reused):
        yield {"kv_unified": True, "n_seq_max": plan.params.n_seq_max}


def _holds(plan: Plan, session: Session) -> bool:
    """Return whether one cache of all slots has room for a conversation in each, to its end."""
    n_ctx = plan.params.n_ctx or plan.breakdown.n_ctx
    return not plan.params.kv_unified or n_ctx >= plan.params.n_seq_max * session.longest


def _is_quicker(plan: Plan, than: Plan) -> bool:
    if plan.turns is None or than.turns is None:
        return plan.fits
    return plan.turns.all.seconds < than.turns.all.seconds * (1 - _CLEARLY)


def _with_choice(plan: Plan, before: Plan, words: dict[str, Any]) -> Plan:
    """Add to ``plan`` what it was chosen instead of, and keywords that fit it again."""
    names, seconds = [], []
    for each in (plan, before):
        slots = each.params.n_seq_max
        more = f"{' in one cache' * each.params.kv_unified}{' with --swa-full' * each.params.swa_full}"
        names.append(f"{slots} slot{'s' * (slots > 1)}{more}")
        seconds.append(None if each.turns is None else each.turns.all.seconds)
    assert seconds[0] is not None
    choice = Choice("how conversations are kept", names[0], seconds[0], names[1], seconds[1])
    would = (
        f"{names[1]} would take {seconds[1]:.3g} s a turn, not {seconds[0]:.3g} s"
        if seconds[1]
        else f"{names[1]} do not fit"
    )
    note = f"planned with {names[0]}: {would}"
    return replace(plan, choices=(*plan.choices, choice), notes=(*plan.notes, note), fit_keywords=words)
