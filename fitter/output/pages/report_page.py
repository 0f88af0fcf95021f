"""A plan, a check or a verification as one HTML page that needs no network, or as a picture.

The functions draw a JSON document, return text, and write nothing. Names in a model's file are untrusted: everything is
escaped, and shown on one line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from fitter.errors import Message, PlanError, Remedy
from fitter.model.location import download
from fitter.model.shapes import catalogue
from fitter.output.arguments import arguments, command, command_line, placeholder, shell_line
from fitter.output.documents.plan_document import to_dict
from fitter.output.formats import is_unquoted, words
from fitter.output.pages.page import fragment, page, pictures
from fitter.output.pictures import drawing, plan_pictures
from fitter.output.pictures.drawing import WIDE
from fitter.output.tables.plan_facts import (
    default_speeds,
    explain_lines,
    far_lines,
    full_context,
    in_use_text,
    pool_lines,
    turns_warnings,
)
from fitter.output.tables.plan_table import later_text, parameter_lines, shared_text, work_text
from fitter.parameters.targets import FORMATS
from fitter.planning.plan.layer_map import HOST_NAME, LayerMap
from fitter.planning.plan.plan import Alternative, Plan, resolved
from fitter.planning.plan.turns import Turns
from fitter.planning.pricing.pricing import Price
from fitter.planning.tables.parameter_rows import ContextPoint
from fitter.programs import SERVER
from fitter.text import MIB, dummy_loads, duration, human, printable, speed

if TYPE_CHECKING:
    from fitter.output.pictures.curves import Chart

_COLUMNS = (
    ("total", "total"),
    ("free", "free"),
    ("model", "weights"),
    ("context", "KV cache"),
    ("compute", "compute"),
    ("shared", "beside the model"),
    ("later", "later"),
    ("used", "used"),
    ("left", "left"),
    ("margin", "margin"),
)
_RARE = ("shared", "later")
"""Columns that are hidden if they are empty."""


def plan_page(
    plan: Plan,
    layer_map: LayerMap | None = None,
    contexts: Sequence[ContextPoint] = (),
    notes: Sequence[str] = (),
) -> str:
    """Draw the page of ``plan``.

    Args:
        plan: The plan.
        layer_map: The places of its layers, if known.
        contexts: Plans for other contexts.
        notes: Further sentences.

    Raises:
        LibraryError: A package is missing.
    """
    from fitter.output.pictures.curves import charts, users_chart

    document = to_dict(plan)
    pictures_data = {
        "map": None if layer_map is None else layer_map.to_dict(),
        "contexts": [point.to_dict() for point in contexts],
        "notes": list(notes),
    }
    return page(
        "plan.html",
        title=plan.model.name,
        documents=[("plan", document), ("drawn", pictures_data)],
        heading="h1",
        below="h2",
        level="h3",
        prefix="",
        of="",
        plan=plan,
        **_shared_values(plan, document, layer_map, notes),
        charts=_charts(charts(contexts, resolved(plan).n_ctx)),
        users_charts=_charts(() if plan.turns is None else filter(None, [users_chart(plan.turns)])),
        contexts=contexts,
        has_full=any(point.full_context_tokens_per_second is not None for point in contexts),
        is_one_request=len({point.prompt for point in contexts if point.prompt is not None}) == 1,
        chosen=resolved(plan).n_ctx,
    )


NAMELESS = ("args", "shell", "ik_llama")
"""Formats without the model's file, which is on another machine than the reader of a panel."""


def plan_panel(plan: Plan, layer_map: LayerMap | None, name: str, of: str, say: Callable[[str], str] = str) -> str:
    """Draw one plan of a page with several: HTML without style and script.

    Args:
        plan: The plan.
        layer_map: The places of its layers, if known.
        name: Beginning of its ids, unique on the page.
        of: The plan's name in the names of its tables.
        say: Words a message for the page.

    Raises:
        LibraryError: A package is missing.
    """
    return fragment(
        "panel.html",
        title=plan.model.name,
        heading="h2",
        below="h3",
        level="h4",
        prefix=f"{name}-",
        of=f", {of}",
        **_shared_values(plan, to_dict(plan), layer_map, formats=NAMELESS, say=say),
    )


def _shared_values(
    plan: Plan,
    document: Mapping[str, Any],
    layer_map: LayerMap | None,
    notes: Sequence[str] = (),
    formats: Iterable[str] = tuple(FORMATS),
    say: Callable[[str], str] = str,
) -> dict[str, Any]:
    """Collect the values that every page of a plan shows."""
    return {
        "document": document,
        "command": command_entry(plan) if plan.fits else None,
        "problems": [say(problem.message) for problem in plan.problems],
        "facts": _facts(plan),
        "work": None if plan.turns is None else _work(plan.turns, say),
        "uses": _uses(document, plan),
        "memory_pictures": pictures(lambda width: plan_pictures.bars_svg(document, width=width, is_alone=False)),
        "layers": None if layer_map is None else _layers(layer_map),
        "map_pictures": ()
        if layer_map is None
        else pictures(lambda width: plan_pictures.layer_svg(layer_map, width=width, is_alone=False)),
        "formats": [{**each, "problem": say(each["problem"])} for each in _formats(plan, formats)] if plan.fits else [],
        "remarks": list(map(say, _remarks(plan, layer_map, notes))),
        "why": _explanation(plan, say),
        "choices": [
            replace(each, chosen=say(each.chosen), runner_up=None if each.runner_up is None else say(each.runner_up))
            for each in plan.choices
        ],
        "alternatives": _alternatives(plan, say),
    }


def plan_picture(plan: Mapping[str, Any], title: str = "", layer_map: LayerMap | None = None) -> str:
    """Draw a plan, given as its JSON document, as SVG: its memory, and the places of its layers if known."""
    parts = [*plan_pictures.bars(plan)]
    if layer_map is not None:
        heading = f'<text class="name" x="{drawing.EDGE}" y="14">where each layer is</text>'
        parts += [drawing.Part((heading,), 26), *plan_pictures.layer_picture(layer_map)]
    label = f"{title}: {plan_pictures.said(plan)}" if title else plan_pictures.said(plan)
    return drawing.svg(parts, label, title=title)


def plan_fragment(plan: Plan) -> str:
    """Draw a plan for an existing page, such as a notebook's: HTML without a script."""
    document = to_dict(plan)
    verdict = "fits" if plan.fits else "does not fit"
    title = f"{plan.model.name} {verdict}, {resolved(plan).n_ctx:,} tokens of context"
    style = f"<style>{drawing.STYLE}</style>"
    problems = "".join(f"<p>{drawing.text(problem.message, None)}</p>" for problem in plan.problems)
    picture = plan_pictures.bars_svg(document, title, is_alone=False)
    return f'<div style="max-width: {WIDE}px">{style}{picture}{problems}</div>'


def check_page(document: Mapping[str, Any], causes: Mapping[str, Sequence[str]], summary: str) -> str:
    """Draw the page of a check: its JSON document, possible causes of each case's differences, and a summary."""
    from fitter.output.pictures import change_pictures

    cases = [
        {
            **case,
            "causes": causes.get(case["name"], ()),
            "moves": [change_pictures.row_of(move) for move in case["moves"]],
            "pictures": pictures(partial(change_pictures.moves_svg, case["moves"])),
        }
        for case in document["cases"]
    ]
    return page(
        "check.html",
        title="fitter check",
        documents=[("check", document)],
        document=document,
        summary=summary,
        cases=cases,
    )


@dataclass(frozen=True)
class Fact:
    """A figure at the top of a report."""

    name: str
    value: str
    note: str = ""


def _facts(plan: Plan) -> list[Fact]:
    facts = [Fact("context", f"{resolved(plan).n_ctx:,}", "tokens")]
    price = plan.estimate
    if plan.turns is not None:
        facts.append(Fact("a turn", duration(plan.turns.all.seconds), "estimated"))
    if price is not None and price.inputs_per_second is not None:
        facts.append(
            Fact("inputs", speed(price.inputs_per_second), f"a second of {price.input_tokens:,} tokens, estimated")
        )
        facts.append(Fact("input", speed(price.prompt_tokens_per_second), "tokens/s, estimated"))
    elif price is not None:
        note = "tokens/s, estimated"
        if (full := full_context(price)) is not None:
            note += f"; {speed(full.generation_tokens_per_second)} at {full.live_tokens:,} tokens"
        facts.append(Fact("generation", speed(price.generation_tokens_per_second), note))
        facts.append(Fact("prompt", speed(price.prompt_tokens_per_second), "tokens/s, estimated"))
    if plan.devices:
        used, total = (sum(getattr(use, what) for use in plan.devices) for what in ("used", "total"))
        number = "1 device" if len(plan.devices) == 1 else f"{len(plan.devices)} devices"
        facts.append(Fact(f"on {number}", human(used), f"of {human(total)}"))
    total = plan.host.total
    of_host = "without a limit" if total is None else f"of {human(total)}"
    facts.append(Fact("host memory", human(plan.host.used), of_host))
    facts += [Fact(pool.name, human(pool.used), f"of {human(pool.total)}") for pool in plan.pools]
    return facts


def _work(turns: Turns, say: Callable[[str], str]) -> dict[str, Any]:
    """Return the line, the warnings and the turns of the work that the user described."""
    return {"line": work_text(turns.session), "warnings": list(map(say, turns_warnings(turns))), "turns": turns}


def _uses(document: Mapping[str, Any], plan: Plan) -> dict[str, Any]:
    """Return the table of devices, host and pools: columns, and a row of bytes for each."""
    in_use = {**{use.name: in_use_text(use) for use in plan.devices}, HOST_NAME: in_use_text(plan.host)}
    places = plan_pictures.shown(document)
    columns = [(key, name) for key, name in _COLUMNS if key not in _RARE or any(use.get(key, 0) for use in places)]
    lacking = {problem["device"] for problem in document["problems"]}
    rows = [
        {
            "name": use["name"],
            "description": use["description"],
            "lacks": use["name"] in lacking,
            "in_use": in_use.get(use["name"]),
            "sizes": [use.get(key, 0) for key, _ in columns],
        }
        for use in places
    ]
    return {"columns": [name for _, name in columns], "rows": rows}


def _layers(layer_map: LayerMap) -> list[tuple[str, list[tuple[str, list[tuple[str, int]]]]]]:
    """Return the map as rows: the group, and for each run of layers the places with their bytes."""
    return [
        (group, [(run.layers(layer_map.n_layer), list(run.bytes)) for run in members])
        for group, members in plan_pictures.by_place(layer_map).items()
    ]


def _charts(drawings: Iterable[Chart]) -> list[Any]:
    from markupsafe import Markup

    return [(chart.title, chart.lines, Markup(chart.svg)) for chart in drawings]


def _alternatives(plan: Plan, say: Callable[[str], str]) -> dict[str, Any] | None:
    """List other plans that could be had, the plan itself first where it fits; ``None`` if there are none."""
    if not plan.alternatives:
        return None

    def row(words: str, of: Alternative | Price, n_ctx: int, about: str = "") -> dict[str, Any]:
        rates = {"generation": of.generation_tokens_per_second, "prompt": of.prompt_tokens_per_second}
        return {"words": words, "n_ctx": n_ctx, "about": about, **rates}

    rows = [row("this plan", plan.estimate, resolved(plan).n_ctx)] if plan.fits and plan.estimate else []
    for each in plan.alternatives:
        words = " ".join(each.arguments) or f"a {each.file_type} file"
        if each.file_type and each.arguments:
            words = Message("", Remedy(words, "shape"), otherwise=f"quantization {each.file_type}")
        rows.append(row(say(words), each, each.n_ctx, "" if each.is_measured else "about "))
    return {"title": "What else could be had" if plan.fits else "What would fit", "rows": rows}


def _explanation(plan: Plan, say: Callable[[str], str]) -> dict[str, Any] | None:
    """List where the time goes, the choices, and the distance from the best; ``None`` without an estimate."""
    price = plan.estimate
    if price is None:
        return None
    workload = price.workload
    prompt, generation = (sum(getattr(part, kind) for part in price.parts) or 1.0 for kind in ("prompt", "generation"))
    # the longest step of a request first
    ordered = sorted(
        price.parts,
        key=lambda part: workload.users * part.prompt * workload.prompt + part.generation * workload.generate,
        reverse=True,
    )
    parts = [(part.name, part.prompt / prompt, part.generation / generation) for part in ordered]
    answers = "" if price.input_tokens is not None else f" and {workload.generate:,} generated ones"
    return {
        "answers": bool(answers),
        "workload": f"a request of {workload.prompt:,} tokens{answers}"
        + (f", from each of {workload.users} users at once" if workload.users > 1 else ""),
        "seconds": price.seconds,
        "parts": [(name, *shares) for name, *shares in parts if max(shares) >= 0.005],
        "bound": [say(line) for line in explain_lines(price, (), plan.bound)[2 if answers else 1 :][:1]]
        if plan.bound is not None
        else [],
        "far": list(map(say, far_lines(plan.bound))),
        "speeds": list(map(say, default_speeds(price))),
    }


def command_entry(plan: Plan) -> dict[str, str]:
    """Return the command to paste as one of ``_formats``: only the arguments for a program that takes no such ones."""
    path, note, meaning = plan.model.path, "", "paste it into a shell"
    words = command(replace(plan, program=SERVER) if plan.program == "any" else plan)
    if words is None:
        meaning = "arguments of llama.cpp, quoted for a shell"
    elif catalogue.wanted(path) is not None:
        words[words.index("-m") + 1] = placeholder(path)
        note = "This model has no file yet: write the path of yours in place of path/to/…"
    elif first := download(path):
        note = f"Download the model first: {first}"
    entry = {"name": "command", "title": "Run it", "meaning": meaning, "text": "", "problem": "", "note": note}
    try:
        return _checked({**entry, "text": shell_line(words or arguments(plan))}, "use fitter --json")
    except PlanError as error:
        return {**entry, "problem": str(error)}


def _checked(entry: dict[str, str], instead: str) -> dict[str, str]:
    """Replace a text with invisible characters by the problem: the page would show another text than the needed one."""
    if any(printable(line) != line for line in entry["text"].split("\n")):
        return {**entry, "text": "", "problem": Message("it has invisible characters: ", Remedy(instead, "format"))}
    return entry


_UNQUOTED = "It has no quotes, as for $(...): a shell would change it where it is pasted."


def _formats(plan: Plan, names: Iterable[str]) -> list[dict[str, str]]:
    """Return the plan for each program: the text to copy, or the reason for its absence."""
    formats = []
    for name in names:
        if name == "json":
            continue
        entry = {"name": name, "meaning": FORMATS[name], "text": "", "problem": "", "note": ""}
        try:
            entry["text"] = plan.format(name)
        except PlanError as error:
            entry["problem"] = error.message
        entry = _checked(entry, f"use fitter fit --format {name}")
        if entry["text"] and is_unquoted(name) and entry["text"] != command_line(words(plan, name), quoted=True):
            entry["note"] = _UNQUOTED + (" Take shell for that." if name == "args" else "")
        formats.append(entry)
    return formats


def _remarks(plan: Plan, layer_map: LayerMap | None, notes: Sequence[str]) -> list[str]:
    loads = dummy_loads(plan.search.dummy_loads)
    by = f" of llama.cpp {plan.llama_cpp.version}" if plan.llama_cpp else ""
    remarks = [*parameter_lines(plan), *map(shared_text, plan.shared), *pool_lines(plan)]
    later = [later_text(each) for each in plan.later if each.bytes is None or each.bytes >= MIB]
    remarks += [f"later, in host memory: {', '.join(later)}"] if later else []
    remarks += [left.message for left in plan.left_out]
    remarks += [f"given up, as --allow permits: {', '.join(plan.levers)}"] if plan.levers else []
    remarks += [*plan.notes, *notes]
    packed = 0 if layer_map is None else plan.host.model + plan.host.context - layer_map.on(HOST_NAME)
    if packed >= MIB:
        remarks.append(
            f"the host takes {human(packed)} more than the map shows: llama.cpp packs tensors for its processor"
        )
    if plan.search.is_cut_short:
        remarks.append("the time limit ended the search: there may be a better plan")
    if plan.virtual:
        remarks.append("the devices are described ones, and need not be in this machine")
    return [*remarks, f"measured with {loads}{by} in {plan.search.seconds:.1f} s"]
