"""Alternatives to a plan, a line each."""

from __future__ import annotations

from rich.text import Text

from fitter.output.units import speed
from fitter.planning.plan.plan import Alternative, Plan
from fitter.planning.pricing.pricing import Price


def alternative_lines(plan: Plan) -> list[Text]:
    """Draw for each alternative the words to add (or the other file), and the tokens per second with them and now."""
    words = [" ".join(each.arguments) or f"a {each.file_type} file" for each in plan.alternatives]
    width = max(map(len, words), default=0)
    verdict = "or" if plan.fits else "fits with"
    return [
        Text(f"{verdict}    {text:{width}}    {_speeds(plan, each)}", overflow="fold")
        for text, each in zip(words, plan.alternatives, strict=True)
    ]


def _speeds(plan: Plan, alternative: Alternative) -> str:
    is_prompt = plan.fit_keywords.get("objective") == "prompt" or _is_for_prompts(plan, alternative)
    about = "" if alternative.is_measured else "about "
    text = about + _speed(alternative, is_prompt)
    if plan.estimate is None:
        return text
    n_ctx = plan.params.n_ctx
    at = f" {n_ctx}:" if alternative.n_ctx != n_ctx else ""
    return f"{text} (now{at} {_speed(plan.estimate, is_prompt)})"


def _is_for_prompts(plan: Plan, alternative: Alternative) -> bool:
    """Whether another micro batch makes prompts faster rather than generation."""
    if "-ub" not in alternative.arguments or plan.estimate is None:
        return False
    prompt = alternative.prompt_tokens_per_second / plan.estimate.prompt_tokens_per_second
    return prompt >= alternative.generation_tokens_per_second / plan.estimate.generation_tokens_per_second


def _speed(of: Alternative | Price, is_prompt: bool) -> str:
    """Write the speed that the alternative changes."""
    if is_prompt:
        return f"{speed(of.prompt_tokens_per_second)} t/s prompt"
    return f"{speed(of.generation_tokens_per_second)} t/s"
