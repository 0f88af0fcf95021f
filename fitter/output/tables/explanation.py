"""Explain in lines why a plan was chosen."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from fitter.planning.plan.plan import Plan
from fitter.planning.pricing.pricing import Price, SpeedSource
from fitter.planning.speed.cost import Part
from fitter.planning.speed.explain import Bound, Choice, Reason
from fitter.text import duration, human

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
    return lines + _speeds(price, lambda source: source.is_default or source.is_remote)


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
    return _speeds(price, lambda source: source.is_default or source.is_tuned)


def _speeds(price: Price, is_shown: Callable[[SpeedSource], bool]) -> list[str]:
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
