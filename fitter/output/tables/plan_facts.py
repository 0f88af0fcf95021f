"""The facts about a plan that everybody needs, what to be warned of, and why it was chosen; ``-v`` prints the rest."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import PurePath

from fitter.llama.build.virtual_backends import SIMULATED
from fitter.llama.types import Params
from fitter.parameters.table import of_a_load
from fitter.planning.plan.layer_map import HOST_NAME
from fitter.planning.plan.plan import Plan
from fitter.planning.plan.turns import Drafting, Turns
from fitter.planning.pricing.pricing import Price, SpeedAt, SpeedSource
from fitter.planning.request.constraints import context_of_a_sequence
from fitter.planning.request.request import DEFAULT_MARGIN
from fitter.planning.request.summary import DeviceUse, HostUse, SharedUse
from fitter.planning.speed.cost import Part
from fitter.planning.speed.explain import Bound, Choice, Reason
from fitter.text import MIB, duration, human, mib_up, printable, speed

_LABELS = {"draft": "draft", "mtp": "draft", "ngram": "draft", "lora": "LoRA", "reserve": "reserved"}
"""Labels of what a plan has room for beyond the model; its kind for all others."""

WORTH_SAYING = 1.1
"""A draft of another length is named if it is so many times as fast: an estimate of drafts is not more exact."""

_OF_A_SERVER = ("cache_ram", "ctx_checkpoints")


def facts(plan: Plan) -> Iterator[tuple[str, str]]:
    """Yield the label and the text of each fact: context, weights, KV cache, estimate, and what is beside the model."""
    yield "context", _context(plan)
    yield "weights", _weights(plan)
    yield "caches" if plan.params.moe_cache_size else "KV cache", " · ".join(_cache(plan))
    if (later := _later(plan)) is not None:
        yield "later", later
    for shared in plan.shared:
        if shared.kind == "ngram":
            yield _LABELS[shared.kind], printable(shared.name)
            continue
        name = "" if shared.kind == "reserve" else f"{printable(PurePath(shared.name).name)}: "
        yield _LABELS.get(shared.kind, shared.kind), name + shared_places(shared)
    if plan.estimate is not None:
        yield "estimate", _speeds(plan.estimate, has_pools=bool(plan.pools))
    if plan.drafting is not None:
        yield "drafting", drafting_text(plan.drafting)
    if plan.turns is not None:
        yield "work", " · ".join(_turns(plan.turns))


def warnings(plan: Plan) -> list[str]:
    """List what a user should know before the plan runs, a line each."""
    settings = [pool.setting.message for pool in plan.pools if pool.setting is not None]
    # where the model and its devices come from is no warning
    notes = [printable(note) for note in plan.notes if not note.startswith((plan.model.path, SIMULATED))]
    left_out = [left.message for left in plan.left_out]
    turns = [] if plan.turns is None else turns_warnings(plan.turns)
    return [*left_out, *reduced(plan), *given_up(plan), *settings, *turns, *notes, *cut_short(plan)]


def drafting_text(drafting: Drafting) -> str:
    """Write what drafts bring: as planned, without, and with the best length."""
    planned, off, best = drafting.planned, drafting.off, drafting.best
    assumed = ", assumed" if drafting.is_assumed else ""
    accepted = f"{drafting.accepted:.0%} of drafted tokens accepted{assumed}"
    text = f"{planned.depth} at a time: {speed(planned.each)} t/s, off {speed(off.each)} ({accepted})"
    if best.each < WORTH_SAYING * planned.each:
        return text
    how = f"--spec-draft-n-max {best.depth}" if best.depth else "no draft"
    return f"{text}; quicker with {how}: {speed(best.each)} t/s"


def best_depths_text(drafting: Drafting) -> str:
    """Write how many tokens at a time are best for each number of users."""
    best = (
        f"{_users(each.users)} {each.depth or 'none'} ({speed(each.each)} t/s each, off {speed(each.off)})"
        for each in drafting.by_users
    )
    return f"best to draft at a time: {', '.join(best)}"


def turns_warnings(turns: Turns) -> list[str]:
    """List why turns are slower than they could be, and whether users get what was asked for."""
    if_kept = turns.seconds_if_kept
    saved = "" if if_kept is None else f" ({duration(if_kept)} a turn instead of {duration(turns.all.seconds)})"
    lines = [turns.why + saved] if turns.why else []
    if turns.at_least is not None and turns.holds is not None and turns.holds < turns.session.users:
        most = f"at most {turns.holds} at once do" if turns.holds else "not even one alone does"
        each = f"{speed(turns.all.each)} t/s each, less than {turns.at_least:g}"
        lines.append(f"{_users(turns.all.users)} get {each}: {most}")
    return lines


def _context(plan: Plan) -> str:
    n_ctx, count = plan.params.n_ctx or plan.breakdown.n_ctx, plan.params.n_seq_max
    text = f"{n_ctx} tokens"
    if count == 1:
        return text
    what = "slots" if plan.program == "llama-server" else "sequences"
    each = context_of_a_sequence(replace(plan.params, n_ctx=n_ctx), n_ctx)
    return f"{text}, which {count} {what} share" if each == n_ctx else f"{text}, {each} for each of {count} {what}"


def _weights(plan: Plan) -> str:
    devices, host = plan.breakdown.devices, plan.host.model
    if not devices:
        return f"{human(host)} in host memory"
    # a share of 0 leaves a device without a layer
    holding = [name for name in devices if plan.breakdown.on(name).model] or devices
    where = holding[0] if len(holding) == 1 else f"{len(holding)} devices"
    text = f"{layers(plan)} on {printable(where)}"
    on_host = [each.pattern for each in plan.params.tensor_buft_overrides if each.buffer_type not in devices]
    if not on_host and (plan.params.n_gpu_layers < 0 or plan.params.n_gpu_layers > plan.n_layer > 0):
        return text
    experts = " (experts)" if on_host and all("exps" in pattern for pattern in on_host) else ""
    return f"{text}, {human(host)}{experts} on the host"


def layers(plan: Plan) -> str:
    """Write how many layers are on devices: ``20 of 33 layers``."""
    count, n_gpu_layers = plan.n_layer + 1, plan.params.n_gpu_layers if plan.breakdown.devices else 0
    if not plan.n_layer:
        # a plan from a file does not know the number of layers
        return "all layers" if n_gpu_layers < 0 else f"{n_gpu_layers} layers"
    return f"{count if n_gpu_layers < 0 else min(n_gpu_layers, count)} of {count} layers"


def _cache(plan: Plan) -> Iterator[str]:
    """Yield the size, the types and the place of the KV cache, and settings of it that are not the default."""
    params, host = plan.params, plan.host.context
    size = host + sum(device.context for device in plan.devices)
    types = params.type_k if params.type_k == params.type_v else f"{params.type_k}/{params.type_v}"
    if params.moe_cache_size:
        types += f" and of experts (at most {human(params.moe_cache_size)})"
    place = "" if not host or not plan.breakdown.devices else " on the host"
    yield f"{human(size)} of {types}" + (f", {human(host)} of it{place}" if place and host < size else place)
    if plan.breakdown.flash_attn is False:
        yield "flash attention off"
    if (params.n_batch, params.n_ubatch) != (Params.n_batch, Params.n_ubatch):
        yield f"batch {params.n_batch}/{params.n_ubatch}"


def _later(plan: Plan) -> str | None:
    """Write what takes much host memory later, and what makes it less; ``None`` if that is the prompt cache alone."""
    parts = sorted((each for each in plan.later if (each.bytes or 0) >= MIB), key=lambda each: -(each.bytes or 0))
    if sum(each.bytes or 0 for each in parts if each.kind != "prompt cache") < DEFAULT_MARGIN:
        return None
    slots = plan.params.n_seq_max
    fewer = ["-np"] * (slots > 1)
    # batches follow the context of an embedder, unless the user sets them
    batches = [word for name, word in (("n_batch", "-b"), ("n_ubatch", "-ub")) if plan.fit_keywords.get(name)]
    makes_less = {
        "checkpoints": ["-ctxcp", *fewer],
        "prompt cache": ["-cram"],
        "logits": (batches[:1] or ["-c"]) if plan.params.embeddings else fewer if plan.params.n_outputs_max else ["-b"],
    }
    texts, options = [], dict[str, None]()
    for each in parts:
        of_slots = f" of {slots} slot{'s' * (slots > 1)} ({each.per_slot} each)" if each.kind == "checkpoints" else ""
        texts.append(f"{human(each.bytes or 0)} of {each.kind}{of_slots}")
        if each is parts[0] or (each.bytes or 0) >= DEFAULT_MARGIN:
            options |= dict.fromkeys(makes_less[each.kind])
    smaller = " or ".join(filter(None, (", ".join([*options][:-1]), *[*options][-1:])))
    less = f": less with a smaller {smaller}" if smaller else ""
    return f"in host memory while it runs, up to {', '.join(texts)}{less}"


def _turns(turns: Turns) -> Iterator[str]:
    """Yield what a turn takes and brings, and what one user alone would have."""
    every = turns.all
    yield f"{_users(every.users)}: {duration(every.seconds)} a turn"
    if every.users == 1:
        yield f"{speed(every.each)} t/s while it answers"
    else:
        yield f"{speed(every.each)} t/s each, {speed(every.together)} in all (one alone {speed(turns.points[0].each)})"
    if turns.session.reused:
        yield f"{round(turns.computed)} of {turns.session.prompt} prompt tokens computed"


def _users(count: int) -> str:
    return "1 user" if count == 1 else f"{count} users"


def _speeds(price: Price, *, has_pools: bool) -> str:
    """Write the speeds, and assumed or tuned ones of the machine; a GPU with the host's memory stands for both."""
    prompt, generation = speed(price.prompt_tokens_per_second), speed(price.generation_tokens_per_second)
    full = full_context(price)
    at_full = "" if full is None else f", {speed(full.generation_tokens_per_second)} at {full.live_tokens} tokens"
    of: dict[str, list[str]] = {}
    for source in price.sources:
        if source.is_tuned:
            of.setdefault("tuned", []).append(source.device)
        elif source.is_default and not (has_pools and source.device == HOST_NAME):
            of.setdefault(re.split(" [(]|, which", source.text)[0], []).append(source.device)
    assumed = [f"{', '.join(devices)}: {text}" for text, devices in of.items()]
    speeds = f"{generation} t/s generation{at_full} · {prompt} t/s prompt"
    if price.inputs_per_second is not None:
        speeds = f"{inputs_text(price)} · {prompt} t/s"
    return speeds + (f" ({'; '.join(assumed)})" if assumed else "")


def inputs_text(price: Price) -> str:
    """Write the inputs per second of a model that embeds or ranks texts, and their length."""
    return f"{speed(price.inputs_per_second or 0.0)} inputs/s of {price.input_tokens} tokens"


def in_use_text(use: DeviceUse | HostUse) -> str:
    """Say how much of the margin a real load takes; nothing where it takes none."""
    left = use.loaded.left
    taken = use.margin - left if use.fits and left is not None else 0
    return f"compute takes {mib_up(taken)} MiB of the margin" if taken > 0 else ""


def full_context(price: Price) -> SpeedAt | None:
    """Return the speed with a full context; ``None`` if that reads as the request's, or if nothing is generated."""
    full, usual = price.full_context, speed(price.generation_tokens_per_second)
    return None if full is None or speed(full.generation_tokens_per_second) == usual else full


def shared_places(shared: SharedUse) -> str:
    """Write the bytes of ``shared`` on each device and the host."""
    places = (f"{human(row.used)} on {row.device or 'the host'}" for row in shared.rows if row.used)
    return ", ".join(places) or "no memory"


def reduced(plan: Plan) -> list[str]:
    """List the options that the plan reduces to fit host memory."""
    table = of_a_load()
    values = {name: plan.params.of_parameter(table[name]) for name in _OF_A_SERVER if name not in plan.fit_keywords}
    words = [f"{table[name].option} {value}" for name, value in values.items() if value is not None]
    return [f"reduced to fit host memory: {' '.join(words)}"] if words and plan.fits else []


def given_up(plan: Plan) -> list[str]:
    """List the concessions of the plan."""
    return [f"given up, as --allow permits: {', '.join(plan.levers)}"] if plan.levers else []


def cut_short(plan: Plan) -> list[str]:
    """Say that the search had to end before it was done."""
    return ["the time limit ended the search: there may be a better plan"] if plan.search.is_cut_short else []


def pool_lines(plan: Plan) -> list[str]:
    """Write a line for each fact about the pools of ``plan`` that a table of figures does not show."""
    lines = []
    for pool in plan.pools:
        if pool.mapped_twice >= MIB:
            lines.append(
                f"{pool.name}: {human(pool.mapped_twice)} of weights are mapped by both, and counted once in their sum"
            )
        if pool.mapped_between >= MIB and not pool.load_mode:
            lines.append(
                f"{pool.members[0]}: {human(pool.mapped_between)} of its margin are for weights of the host that lie "
                "between its own in the file, since it maps those as well"
            )
        if pool.load_mode and plan.fits:
            lines.append(
                "the file must not be mapped: the GPU would map what the host has of the layers as well "
                f"(--load-mode {pool.load_mode}, in older builds of llama.cpp --no-mmap)"
            )
        if pool.setting is not None:
            lines.append(pool.setting.message)
    return lines


_NAMED_PARTS = 3


def explanation(plan: Plan) -> str:
    """Explain ``plan``: where its time goes, each choice with its runner-up, its greatest distance from the best."""
    if plan.estimate is None:
        return "this plan has no time estimate" if plan.fits else "a plan that does not fit has no time estimate"
    return "\n".join(explain_lines(plan.estimate, plan.choices, plan.bound))


def explain_lines(price: Price, choices: Sequence[Choice] = (), bound: Bound | None = None) -> list[str]:
    """List where the time goes, each choice with its runner-up, the lower bound, and the assumed speeds."""
    workload = price.workload
    prompts = workload.users * workload.prompt * price.estimate.prompt_seconds
    answers = workload.generate * price.estimate.generation_seconds
    name = "prompt" if workload.users == 1 else "prompts"
    if price.input_tokens is not None:
        name = "input"
    lines = [_spent(name, prompts, price.parts, lambda part: part.prompt)]
    if price.input_tokens is None:
        lines.append(_spent("generation", answers, price.parts, lambda part: part.generation))
    lines += [_choice(choice) for choice in choices]
    if bound is not None:
        lines.append(_bound(bound, price.seconds))
    return lines + _speed_words(price, lambda source: source.is_default or source.is_remote)


def far_lines(bound: Bound | None) -> list[str]:
    """Say by how much a plan exceeds the lower bound, and why, if it takes much longer."""
    if bound is None or bound.reached is None or not bound.is_far:
        return []
    times = f"{bound.reached / bound.seconds:.1f} times the lower bound of {duration(bound.seconds)} for any placement"
    return [f"{times}, because of {'; '.join(map(_reason, bound.reasons))}" if bound.reasons else times]


def _reason(reason: Reason) -> str:
    if reason.kind == "context":
        cache = f"{human(reason.bytes)} of cache for this context"
        return f"{cache}, which raises it to {duration(reason.seconds)} (a smaller -c takes less)"
    if reason.kind == "compute":
        buffers = f"{human(reason.bytes)} of compute buffers"
        text = f"{buffers}, which raise it to {duration(reason.seconds)}"
        if not reason.devices:
            return text
        verb = "have" if len(reason.devices) > 1 else "has"
        return f"{text} ({' and '.join(reason.devices)} {verb} no room for them)"
    return "the rest, since layers and tensors cannot be divided and each device takes consecutive layers"


def default_speeds(price: Price) -> list[str]:
    """List the speeds that are assumed because the device was not measured, and those that were tuned."""
    return _speed_words(price, lambda source: source.is_default or source.is_tuned)


def _speed_words(price: Price, is_shown: Callable[[SpeedSource], bool]) -> list[str]:
    return [f"speed of {source.device}: {source.text}" for source in price.sources if is_shown(source)]


def _spent(what: str, seconds: float, parts: Sequence[Part], of: Callable[[Part], float]) -> str:
    total = sum(map(of, parts))
    if not total:
        return f"{what}: {duration(seconds)}"
    # equal parts stay in their order
    largest = sorted(parts, key=lambda part: -of(part))[:_NAMED_PARTS]
    shares = [f"{part.name} {100 * of(part) / total:.0f} %" for part in largest if of(part)]
    rest = 1 - sum(map(of, largest)) / total
    if rest >= 0.005:
        shares.append(f"other {100 * rest:.0f} %")
    return f"{what}: {duration(seconds)} ({', '.join(shares)})"


def _choice(choice: Choice) -> str:
    line = f"{choice.subject}: {choice.chosen} ({duration(choice.seconds)})"
    if choice.runner_up is None:
        return line
    line += f"; runner-up: {choice.runner_up}"
    if choice.runner_up_seconds is None or choice.excess is None:
        return line
    sign = "-" if choice.excess < 0 else "+"
    more = f"{sign}{duration(abs(choice.excess))}"
    if choice.seconds:
        more += f", {100 * choice.excess / choice.seconds:+.1f} %"
    return f"{line} ({duration(choice.runner_up_seconds)}: {more})"


def _bound(bound: Bound, request_seconds: float) -> str:
    line = f"lower bound: {duration(bound.seconds)}"
    distance = bound.distance(request_seconds)
    if distance is None:
        return line
    # rounded up, since it is "at most"
    percent = math.ceil(1000 * (distance - 1e-9)) / 10
    return f"{line}; this plan takes at most {percent:.1f} % more than {bound.text}"
