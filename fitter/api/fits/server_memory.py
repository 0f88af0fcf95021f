"""Host memory that a server fills after the load: measured by a worker, planned for, and listed in the plan. Bytes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from fitter.api.fits.shared_models import Drafts, drafting_params
from fitter.errors import LlamaCppError, TimeLimitError, UsageError
from fitter.llama.client import Worker
from fitter.llama.types import LlamaCpp, Params, Row
from fitter.machine.speed import DeviceSpeed, HostSpeed
from fitter.model.header import Model
from fitter.model.shapes.catalogue import note
from fitter.model.tensors import is_expert, layer_of
from fitter.parameters.table import PARAMETERS
from fitter.planning.plan.plan import Plan, is_on_devices
from fitter.planning.plan.pool_use import left_for_host, with_host
from fitter.planning.plan.turns import Drafting, drafting_of, turns_of
from fitter.planning.pricing.objective import longest_seconds, objective_seconds
from fitter.planning.pricing.pricing import Price
from fitter.planning.request.ask import Ask
from fitter.planning.request.context_limit import EXPENSIVE
from fitter.planning.request.request import Request
from fitter.planning.request.session import Session
from fitter.planning.request.shared import HOST_NAME, LATER, later_of
from fitter.planning.request.summary import SharedUse
from fitter.planning.speed.cost import default, family_name, token_seconds
from fitter.programs import PROGRAMS, Facts, LlamaServer, facts
from fitter.programs.later import Later, SequenceState, ServerCaches, output_bytes, reduce_to, server_caches, state_of
from fitter.text import MIB, mib_up

_FIXED = frozenset({"cache_ram", "ctx_checkpoints"})


def facts_of_program(program: str, build: LlamaCpp, llama_cpp: str | None) -> Facts:
    """Return the facts about ``program`` in this ``build``; a llama-server that ``llama_cpp`` names prints its own
    help.
    """
    from fitter.programs.finding import named_server

    return facts(program, build, named_server(llama_cpp) if program == LlamaServer.name else None)


class _Keeping(NamedTuple):
    """What is kept of conversations.

    Attributes:
        often: Returns how often a turn finds the one before, for a number of users.
        why: Why not always, and what would keep it.
        largest: Bytes of a conversation at its end in the prompt cache.
        moved: Bytes of an average one.
    """

    often: Callable[[int], float]
    why: str = ""
    largest: int = 0
    moved: int = 0


@dataclass(frozen=True)
class ServerMemory:
    """The memory that the program of ``ask`` fills after loading ``model`` and its ``drafts``."""

    ask: Ask
    worker: Worker
    model: Model
    drafts: Drafts | None
    known: Facts

    def fitted(self, request: Request, fit: Callable[[Request, tuple[SharedUse, ...]], Plan]) -> Plan:
        """Fit ``request``: the time with the smallest context comes first, then what the program keeps, then context.

        Without described work, a longer context shares the memory that the smallest one leaves with what is kept.

        Args:
            request: The request.
            fit: Fits a request with this memory reserved.

        Raises:
            UsageError: A cache has no limit, but the host's memory has one.
            FitterError: As ``fit`` raises it.
        """
        least, every = self._reserved(request)
        started, found = time.monotonic(), list[Plan]()

        def attempt(request: Request, size: int) -> Plan:
            row = Row(LATER, None, True, 0, 0, size)
            try:
                plan = fit(request, (SharedUse(LATER, self.ask.program, (row,)),) if size else ())
            except TimeLimitError:
                if not found:
                    raise
                return replace(found[-1], search=replace(found[-1].search, is_cut_short=True))
            plan = replace(plan, search=replace(plan.search, seconds=time.monotonic() - started))
            found.append(self._with_server_memory(plan))
            return found[-1]

        plan, is_settled = None, True
        if every == least or _may_fit(request, every):
            plan = attempt(request, every)
            is_settled = request.session is not None or _leaves_context(plan, request)
            if every == least or (is_settled and _is_free(plan, request)):
                return plan
        smallest = attempt(request.with_context(request.n_ctx_min), least)
        room = left_for_host(smallest.pools, smallest.host)
        if not smallest.fits or room is None:
            return smallest
        if plan and plan.fits and plan.estimate and smallest.estimate:
            seconds, least_seconds = (
                objective_seconds(request, each.estimate) for each in (plan.estimate, smallest.estimate)
            )
            if seconds <= longest_seconds(request, least_seconds) and is_settled:
                return plan
        room += smallest.host.later
        on_devices = is_on_devices(smallest) and not smallest.pools
        if on_devices:
            # there a longer context takes host memory for compute buffers alone
            room -= self._growth(smallest, request)
        size = min(every, room) if on_devices else self._beside_context(smallest, request, room)
        # work that the user described needs no more
        if on_devices or room >= every or request.session is None:
            larger = attempt(request, max(least, size))
            if larger.fits and larger.params.n_ctx > smallest.params.n_ctx:
                is_shorter = plan and plan.fits and plan.params.n_ctx > larger.params.n_ctx
                return plan if plan and is_shorter else larger
        note = f"the context is the smallest: what {self.ask.program} keeps comes before a longer one; -c sets it"
        return replace(smallest, notes=(*smallest.notes, note)) if self._lowered(smallest) else smallest

    def _beside_context(self, smallest: Plan, request: Request, room: int) -> int:
        """Return what is kept beside a longer context, of the ``room`` that the plan with the smallest one leaves.

        Both grow with the context. Where not all checkpoints and a conversation have room, they get half.
        """
        low, high = smallest.params.n_ctx or smallest.breakdown.n_ctx, min(request.n_ctx_max, EXPENSIVE)
        in_pools = {name for pool in request.pools for name in pool.devices}
        cells = smallest.host.context + sum(use.context for use in smallest.devices if use.name in in_pools)
        kept, more = (self._kept_at(request, n_ctx) for n_ctx in (low, min(2 * low, high)))
        each = cells / low + (more - kept) / low
        longer = min(high - low, int((room - kept) / each)) if each else 0
        return min(room // 2, self._kept_at(request, low + longer)) if longer > 0 else room // 2

    def _kept_at(self, request: Request, n_ctx: int) -> int:
        """Add up logits, all checkpoints, and a prompt cache of a conversation, or of the size that the user set."""
        kept, _ = self._own(replace(request.params, n_ctx=n_ctx))
        cache = kept.prompt_cache or 0
        if "cache_ram" not in self.ask.given:
            cache = min(cache, kept.state)
        return sum(each.bytes or 0 for each in self._logits(request.params)) + kept.checkpoints + cache

    def _growth(self, plan: Plan, request: Request) -> int:
        """Measure the host's compute buffers with the longest context; return the bytes beyond those of ``plan``."""
        params = replace(plan.params, n_ctx=min(request.n_ctx_max, EXPENSIVE))
        try:
            measured = self.worker.measure(self.model.skeleton, params)
        except LlamaCppError:
            return 0
        return max(0, measured.host.compute - plan.host.compute)

    def _reserved(self, request: Request) -> tuple[int, int]:
        """Return the least host memory that a plan reserves, and what it reserves before a longer context.

        The least are logits and caches with a size that the user set. An open context leaves room for all checkpoints
        and a conversation in the prompt cache: whatever else its limit allows is of use to further ones alone.

        Raises:
            UsageError: A cache has no limit, but the host's memory has one.
        """
        fixed = self.ask.given & _FIXED
        least = sum(each.bytes or 0 for each in self._logits(request.params))
        every = least
        drafts = bool(request.pools) and bool(self.ask.sharing.drafted(self.known))
        is_open = "n_ctx" not in request.fixed and request.n_ctx_min < request.n_ctx_max
        keeps_all = is_open and not request.is_for_most_context and request.host.free is not None
        if PROGRAMS[self.ask.program].is_server and (fixed or drafts or keeps_all):
            n_ctx = max(request.n_ctx_min, min(request.n_ctx_max, EXPENSIVE))
            kept, _ = self._own(replace(request.params, n_ctx=n_ctx))
            if "cache_ram" in fixed and kept.prompt_cache is None and request.host.free is not None:
                raise UsageError("-cram -1 has no limit, so no plan has room for it: give the MiB that it may take")
            least += (kept.prompt_cache or 0) if "cache_ram" in fixed else 0
            # drafting needs its checkpoints, and a full pool would leave no memory for them
            least += kept.checkpoints if "ctx_checkpoints" in fixed else kept.per_draft if drafts else 0
            every = self._kept_at(request, n_ctx) if keeps_all else least
        return least, every

    def _with_server_memory(self, plan: Plan) -> Plan:
        """Add caches and logits to ``plan``, with limits small enough for the host memory that is left."""
        logits = self._logits(plan.params)
        of_logits = sum(each.bytes or 0 for each in logits)
        host = replace(plan.host, shared=plan.host.shared - later_of(plan.shared), later=of_logits)
        pools = with_host(plan.pools, plan.host, host)
        shared = tuple(use for use in plan.shared if use.kind != LATER)
        notes = (*note(self.model.called), *plan.notes)
        plan = replace(plan, host=host, pools=pools, later=logits, shared=shared, notes=notes)
        if not PROGRAMS[self.ask.program].is_server:
            return plan
        caches, unknown = self._own(plan.params)
        kept = caches
        room = left_for_host(pools, host)
        if room is not None:
            given = self.ask.given
            kept = reduce_to(
                caches,
                room,
                is_cache_fixed="cache_ram" in given,
                are_checkpoints_fixed="ctx_checkpoints" in given,
            )
        limits = {"cache_ram": (caches.cache_ram, kept.cache_ram)}
        if kept.checkpoint:
            limits["ctx_checkpoints"] = (caches.ctx_checkpoints, kept.ctx_checkpoints)
        lowered = {name: now for name, (before, now) in limits.items() if now != before}
        full = replace(host, later=of_logits + kept.bytes)
        return replace(
            plan,
            params=plan.params.having(lowered),
            host=full,
            pools=with_host(pools, host, full),
            later=(*kept.lines(), *logits),
            notes=(*notes, *unknown),
        )

    def _lowered(self, plan: Plan) -> bool:
        """Return whether ``plan`` lowers what the program keeps."""
        return any(plan.params.of_parameter(PARAMETERS[name]) is not None for name in _FIXED - self.ask.given)

    def with_turns(self, plan: Plan, request: Request) -> Plan:
        """Add the turns of the work that the user described, and speeds with drafts, to a ``plan``."""
        price = plan.estimate
        if price is None:
            return plan
        if request.most_drafted and request.host_speed is not None:
            plan = replace(plan, drafting=self._drafting(plan, price, request, request.host_speed))
        if request.session is None:
            return plan
        keeping = self._keeping(plan.params, request.session)
        slots = plan.params.n_seq_max

        host = default().host
        saves_idle = self._saves_idle(plan.params)

        def moved(users: int, share: float) -> float:
            in_slots = min(1.0, slots / users)
            saved = (users - 1) / users if saves_idle else 1 - in_slots if share > in_slots else 0.0
            return keeping.moved * (saved / host.saved + max(0.0, share - in_slots) / host.restored)

        turns = turns_of(
            request.session,
            price,
            slots,
            keeping.often,
            keeping.why,
            self.ask.at_least,
            moved,
            sampling=host.sampling * self.model.n_vocab,
            is_unified=plan.params.kv_unified,
        )
        return replace(plan, turns=turns)

    def conversation(self, params: Params, session: Session) -> int:
        """Return the bytes of a conversation at its end in the prompt cache; 0 where none is kept or it is unknown."""
        try:
            return self._keeping(params, session).largest
        except LlamaCppError:
            return 0

    def _drafting(self, plan: Plan, price: Price, request: Request, host: HostSpeed) -> Drafting | None:
        """Estimate drafts: a draft model reads its weights for each token, MTP its own layers and the output.

        The processor chooses each of them.
        """
        places: dict[str | None, DeviceSpeed | HostSpeed] = dict(request.speeds.items())
        places[None] = host
        if self.drafts is not None:
            rows = [row for use in plan.shared if use.kind == "draft" for row in use.rows]
            total = sum(row.model for row in rows) or 1
            layers_of = {row.device: self.drafts.model.n_layer * row.model / total for row in rows}
            seconds = sum(token_seconds(row.model, layers_of[row.device], places[row.device]) for row in rows)
        else:
            facts, computed = request.facts, len(request.facts.layers)
            layers = [each for each in self.model.tensors if (layer_of(each.name) or 0) >= computed]
            number = facts.n_layer - computed
            used = facts.n_expert_used / facts.n_expert if facts.n_expert else 1.0
            size = sum(each.bytes * (used if is_expert(each.name) else 1.0) for each in layers)
            size += sum(tensor.bytes for tensor in facts.output)
            last = plan.breakdown.devices[-1] if plan.breakdown.devices else None
            seconds = token_seconds(size, number, places[last])
        sharing = self.ask.sharing
        depth = sharing.draft_max or self.known.draft_n_max
        chosen = default().host.sampling * (self.model if self.drafts is None else self.drafts.model).n_vocab
        kinds = {family_name(request.speeds[name]) for name in plan.breakdown.devices if name in request.speeds}
        slower = max((default().families[kind].drafts for kind in kinds), default=1.0)
        return drafting_of(price, depth, seconds, sharing.acceptance, chosen, slower)

    def _keeping(self, params: Params, session: Session) -> _Keeping:
        """Return how often a turn finds the one before.

        llama-server keeps a conversation in its slot, and in the prompt cache when another one takes the slot. Where
        the end of a conversation cannot be removed, it goes back to a checkpoint.
        """
        slots, room, more, moved, one = params.n_seq_max, 0, "", 0, 0
        if PROGRAMS[self.ask.program].is_server and session.reused:
            states = self._states(params)
            caches = self._limits_in_room(params, states)
            limit, checkpoints = (
                own if (set_ := params.of_parameter(PARAMETERS[name])) is None else int(set_)
                for name, own in (("cache_ram", caches.cache_ram), ("ctx_checkpoints", caches.ctx_checkpoints))
            )
            if caches.checkpoint and not checkpoints:
                why = "each turn is computed whole: -ctxcp 32 would keep a context checkpoint"
                return _Keeping(lambda users: 0.0, why)
            one = sum(each.full(session.longest) for each in states)
            moved = sum(each.full(session.prompt) for each in states)
            room = session.users if limit < 0 else limit * MIB // max(1, one)
            more = f" or -cram {mib_up((session.users - slots) * one)}"
        held = slots + room
        if held >= session.users or not session.reused:
            return _Keeping(lambda users: 1.0, "", one, moved)
        kept = f"{slots} in slots, {room} in the prompt cache"
        why = f"{session.users} users have more conversations than are kept ({kept})"
        remedy = f"-np {session.users}{more} would keep all"
        if not PROGRAMS[self.ask.program].has_slots:
            remedy = f"{self.ask.program} keeps one, --for llama-server one for each slot"
        return _Keeping(lambda users: min(1.0, held / users), f"{why}: {remedy}", one, moved)

    def _logits(self, params: Params) -> tuple[Later, ...]:
        """Return the output buffer of a batch, if the program reads logits."""
        if not PROGRAMS[self.ask.program].reads_logits:
            return ()
        rows, model = params.n_outputs_max or params.n_batch, self.model
        drafts_itself = self.ask.sharing.mtp
        has_samplers = self.known.backend_sampling or bool(params.of_parameter(PARAMETERS["backend_sampling"]))
        of_batch = model.n_embd if drafts_itself else 0
        n_embd = model.n_embd if params.embeddings else 0
        size = output_bytes(
            rows,
            model.n_vocab,
            n_embd=n_embd,
            n_embd_of_batch=of_batch,
            n_batch=params.n_batch,
            has_samplers=has_samplers,
        )
        if drafts_itself:
            size += output_bytes(
                params.n_seq_max,
                model.n_vocab,
                n_embd=model.n_embd,
                has_samplers=self.known.draft_backend_sampling,
            )
        elif self.drafts is not None:
            size += output_bytes(params.n_seq_max, self.drafts.model.n_vocab)
        return (Later("logits", size, size // rows, rows),)

    def _own(self, params: Params) -> tuple[ServerCaches, tuple[str, ...]]:
        """Return the caches with the user's limits or the program's own, and a note where their sizes are unknown."""
        try:
            return self._limits_in_room(params, () if params.embeddings else self._states(params)), ()
        except LlamaCppError as error:
            # only the limit of the prompt cache is known
            note = f"what {self.ask.program} keeps of each slot later is not in the plan: {error}"
            return self._limits_in_room(params, ()), (note,)

    def _limits_in_room(self, params: Params, states: tuple[SequenceState, ...]) -> ServerCaches:
        is_rolled_back = any(state.needs_checkpoints for state in states[:1])
        drafted = self.ask.sharing.drafted(self.known)
        takes_back = any(
            state.removal == "whole" or (state.removal == "bounded" and drafted > state.caches.n_rs_seq)
            for state in states
        )
        words: Mapping[str, Any] = self.ask.words
        return server_caches(
            self.known,
            params.n_seq_max,
            sum(state.largest for state in states),
            sum(state.largest_checkpoint for state in states) if is_rolled_back else 0,
            # only prompts of completions are kept
            0 if params.embeddings else words.get("cache_ram"),
            words.get("ctx_checkpoints"),
            self._saves_idle(params),
            1 if drafted and takes_back else 0,
        )

    def _saves_idle(self, params: Params) -> bool:
        """Return whether the slots of other users are saved when a turn begins."""
        has_cache, is_on = (params.of_parameter(PARAMETERS[name]) for name in ("cache_ram", "cache_idle_slots"))
        return self.known.cache_idle_slots and has_cache != 0 and bool(is_on)

    def _states(self, params: Params) -> tuple[SequenceState, ...]:
        """Measure the state of one slot: of the model's context, and of the draft's."""
        skeleton = self.model.skeleton
        states = [state_of(self.worker.caches(skeleton, params), swa_full=params.swa_full)]
        drafting = drafting_params(self.ask.sharing, self.drafts, params)
        if drafting is not None:
            draft = skeleton if self.drafts is None else self.drafts.model.skeleton
            states.append(state_of(self.worker.caches(draft, drafting), swa_full=params.swa_full))
        return tuple(states)


def _may_fit(request: Request, size: int) -> bool:
    """Return whether all memory together has room for the weights beside ``size`` reserved bytes."""
    host = request.host
    if host.target is None or host.paging:
        return True
    if request.pools:
        return request.model_bytes + size <= host.target
    return request.model_bytes + size <= host.target + sum(max(0, device.target) for device in request.devices)


def _leaves_context(plan: Plan, request: Request) -> bool:
    """Return whether a longer context takes no memory from what is kept, or there is none."""
    if plan.params.n_ctx >= request.n_ctx_max or not (plan.host.context or plan.pools):
        return True
    room = left_for_host(plan.pools, plan.host)
    return room is None or room >= request.model_bytes / request.n_layer + plan.host.compute


def _is_free(plan: Plan, request: Request) -> bool:
    """Return whether host memory decides nothing about the place of the model.

    With the smallest context, another layer and compute buffers of twice the size would have room. Or a plan that does
    not fit lacks other memory.
    """
    host = plan.host
    if host.left is None or not plan.fits:
        pooled = {HOST_NAME, *(pool.name for pool in plan.pools)}
        return not any(problem.device in pooled for problem in plan.problems)
    longer = 1 - request.n_ctx_min / (plan.params.n_ctx or plan.breakdown.n_ctx)
    context = sum(use.context for use in plan.devices)
    rooms = [host.left - host.margin, *(pool.left - pool.margin + longer * context for pool in plan.pools)]
    compute = host.compute + sum(use.compute for use in plan.devices)
    return min(rooms) + longer * host.context >= request.model_bytes / request.n_layer + compute
