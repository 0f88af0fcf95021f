"""A plan, a check or a verification as one page of HTML that needs no network, or as a picture.

What is drawn is data of a JSON document, so that whoever has the document can draw it: ``plan_page`` and its like give
text, and write nothing. Names in a model's file are untrusted: everything is escaped, and shown on one line.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fitter.errors import LibraryError, PlanError
from fitter.output import bars, drawing, layer_picture
from fitter.output.drawing import NARROW, WIDE
from fitter.output.explanation import default_speeds, explain_lines, far_lines
from fitter.output.formats import FORMATS
from fitter.output.json import dumps, to_dict
from fitter.output.pools import pool_lines
from fitter.output.table import later_text, parameter_lines, shared_text
from fitter.output.units import MIB, dummy_loads, duration, human, speed
from fitter.planning.context_points import ContextPoint
from fitter.planning.layer_map import LayerMap
from fitter.planning.plan import Plan, resolved
from fitter.text import printable

if TYPE_CHECKING:
    from jinja2 import Environment
    from markupsafe import Markup

_TEMPLATES = Path(__file__).with_name("templates")
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
"""Columns that are left out where they have nothing."""


def check_installed() -> None:
    """Raise ``LibraryError`` where a package is missing for a page, before anything is planned for it."""
    _environment()


def plan_page(
    plan: Plan,
    found: LayerMap | None = None,
    contexts: Sequence[ContextPoint] = (),
    notes: Sequence[str] = (),
) -> str:
    """The page of ``plan``, with where its layers are and what other contexts would take, as far as that is known.

    ``notes``: what else is to be said, a sentence each. Raises ``LibraryError`` where a package is missing for it.
    """
    document = to_dict(plan)
    drawn = {
        "map": None if found is None else found.to_dict(),
        "contexts": [point.to_dict() for point in contexts],
        "notes": list(notes),
    }
    return _page(
        "plan.html",
        title=plan.model.name,
        documents=[("plan", document), ("drawn", drawn)],
        heading="h1",
        of="",
        plan=plan,
        **_drawn(plan, document, found, notes),
        charts=_charts(contexts, plan),
        contexts=contexts,
        chosen=resolved(plan).n_ctx,
        why=_why(plan),
    )


NAMELESS = ("args", "shell", "ik_llama")
"""Formats that do not name the model's file, which is on another machine for who reads a panel."""


def plan_panel(plan: Plan, found: LayerMap | None, name: str, of: str) -> str:
    """What a page of several plans shows of one of them: HTML without style and script, for which ``style`` is.

    ``name`` is what its ids begin with, and no other's on the page; ``of`` names the plan where its tables are named.
    Raises as ``plan_page``.
    """
    return (
        _environment()
        .get_template("panel.html")
        .render(
            title=plan.model.name,
            heading="h2",
            name=name,
            of=f", {of}",
            **_drawn(plan, to_dict(plan), found, formats=NAMELESS),
        )
    )


def style() -> str:
    """The style of pages and panels, and of the pictures in them."""
    from fitter.output import curves

    return (_TEMPLATES / "report.css").read_text(encoding="utf-8") + drawing.STYLE + drawing.DARK + curves.STYLE


def copy_script() -> str:
    """The script for the buttons that copy: a page of panels needs it, and an element ``said`` for what it says."""
    return (_TEMPLATES / "copy.js").read_text(encoding="utf-8")


def _drawn(
    plan: Plan,
    document: Mapping[str, Any],
    found: LayerMap | None,
    notes: Sequence[str] = (),
    formats: Iterable[str] = tuple(FORMATS),
) -> dict[str, Any]:
    """What is shown of a plan wherever it is."""
    return {
        "document": document,
        "facts": _facts(plan),
        "uses": _uses(document),
        "memory_pictures": _pictures(lambda width: bars.bars_svg(document, width=width, is_alone=False)),
        "layers": None if found is None else _layers(found),
        "map_pictures": ()
        if found is None
        else _pictures(lambda width: layer_picture.layer_svg(found, width=width, is_alone=False)),
        "formats": _formats(plan, formats) if plan.fits else [],
        "remarks": _remarks(plan, notes),
    }


def plan_picture(plan: Mapping[str, Any], title: str = "", found: LayerMap | None = None) -> str:
    """The SVG of a plan, given as its JSON document: its memory, and where its layers are if that is known."""
    parts = [*bars.bars(plan)]
    if found is not None:
        heading = f'<text class="name" x="{drawing.EDGE}" y="14">where each layer is</text>'
        parts += [drawing.Part((heading,), 26), *layer_picture.layer_picture(found)]
    label = f"{title}: {bars.said(plan)}" if title else bars.said(plan)
    return drawing.svg(parts, label, title=title)


def plan_fragment(plan: Plan) -> str:
    """The picture of a plan for a page that is there already, such as a notebook's: HTML without a script."""
    document = to_dict(plan)
    verdict = "fits" if plan.fits else "does not fit"
    title = f"{plan.model.name} {verdict}, {resolved(plan).n_ctx:,} tokens of context"
    style = f"<style>{drawing.STYLE}</style>"
    problems = "".join(f"<p>{drawing.text(problem.message, None)}</p>" for problem in plan.problems)
    drawn = bars.bars_svg(document, title, is_alone=False)
    return f'<div style="max-width: {WIDE}px">{style}{drawn}{problems}</div>'


def check_page(document: Mapping[str, Any], causes: Mapping[str, Sequence[str]], summary: str) -> str:
    """The page of a check, given as its JSON document, what may have caused each case's differences, and a summary."""
    from fitter.output import moves_picture

    cases = [
        {
            **case,
            "causes": causes.get(case["name"], ()),
            "moves": [moves_picture.row_of(move) for move in case["moves"]],
            "pictures": _pictures(partial(moves_picture.moves_svg, case["moves"])),
        }
        for case in document["cases"]
    ]
    return _page(
        "check.html",
        title="fitter check",
        documents=[("check", document)],
        document=document,
        summary=summary,
        cases=cases,
    )


def verification_page(document: Mapping[str, Any], verdict: str) -> str:
    """The page of a verification, given as its JSON document, and its verdict in words."""
    return _page(
        "verification.html",
        title=document["model"]["name"],
        documents=[("verification", document)],
        verdict=verdict,
        document=document,
        kinds=("model", "context", "compute"),
    )


def _page(template: str, *, documents: Sequence[tuple[str, Mapping[str, Any]]], **values: Any) -> str:
    from markupsafe import Markup

    environment = _environment()
    script = copy_script()
    allowed = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return environment.get_template(template).render(
        documents=[(name, Markup(_in_script(document))) for name, document in documents],
        script=Markup(script),
        style=Markup(style()),
        policy=f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'sha256-{allowed}'; "
        "base-uri 'none'; form-action 'none'",
        **values,
    )


@cache
def _environment() -> Environment:
    try:
        import pygal  # noqa: F401
        from jinja2 import Environment, FileSystemLoader, StrictUndefined
    except ImportError as error:
        raise LibraryError(
            f"a report needs the package {error.name}, which is missing: pip install 'llama-fitter[report]'"
        ) from None
    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_shown,
    )
    environment.filters |= {"human": human, "duration": duration, "speed": speed, "lines": _lines}
    return environment


def _shown(value: Any) -> Any:
    """What a template puts out: text on one line, without anything invisible."""
    return printable(value) if isinstance(value, str) and not hasattr(value, "__html__") else value


def _lines(text: str) -> Markup:
    """Text of several lines, each of them made safe to show."""
    from markupsafe import Markup, escape

    return Markup("\n").join(escape(printable(line)) for line in text.split("\n"))


def _in_script(document: Mapping[str, Any]) -> str:
    """JSON that cannot end the script that it stands in: as ``--json`` prints it, but for ``<``."""
    return dumps(dict(document)).replace("<", r"\u003c")


def _pictures(drawn: Callable[[int], str]) -> list[tuple[str, Markup]]:
    """A picture for a page and one for a telephone, of which a style sheet shows one."""
    from markupsafe import Markup

    return [("wide", Markup(drawn(WIDE))), ("narrow", Markup(drawn(NARROW)))]


@dataclass(frozen=True)
class Fact:
    """A figure that stands at the top of a report."""

    name: str
    value: str
    note: str = ""


def _facts(plan: Plan) -> list[Fact]:
    facts = [Fact("context", f"{resolved(plan).n_ctx:,}", "tokens")]
    price = plan.estimate
    if price is not None:
        facts.append(Fact("generation", speed(price.generation_tokens_per_second), "tokens/s, estimated"))
        facts.append(Fact("prompt", speed(price.prompt_tokens_per_second), "tokens/s, estimated"))
    if plan.devices:
        used, total = (sum(getattr(use, what) for use in plan.devices) for what in ("used", "total"))
        number = "1 device" if len(plan.devices) == 1 else f"{len(plan.devices)} devices"
        facts.append(Fact(f"on {number}", human(used), f"of {human(total)}"))
    total = plan.host.total
    facts.append(Fact("host memory", human(plan.host.used), "no limit" if total is None else f"of {human(total)}"))
    return facts


def _uses(document: Mapping[str, Any]) -> dict[str, Any]:
    """The table of the devices, the host and what they share: columns, and a row of bytes for each."""
    places = bars.places(document)
    columns = [(key, name) for key, name in _COLUMNS if key not in _RARE or any(use.get(key, 0) for use in places)]
    lacking = {problem["device"] for problem in document["problems"]}
    together = "what they share, both together"
    pools = [{**{key: "" for key, _ in columns}, "description": together, **pool} for pool in document["pools"]]
    rows = [
        {
            "name": use["name"],
            "description": use["description"],
            "lacks": use["name"] in lacking,
            "sizes": [use.get(key, 0) for key, _ in columns],
        }
        for use in (*places, *pools)
    ]
    return {"columns": [name for _, name in columns], "rows": rows}


def _layers(found: LayerMap) -> list[tuple[str, list[tuple[str, list[tuple[str, int]]]]]]:
    """The map as rows: the group, and for each run of layers the places with their bytes."""
    return [
        (group, [(run.layers(found.n_layer), list(run.bytes)) for run in members])
        for group, members in layer_picture.by_place(found).items()
    ]


def _charts(contexts: Sequence[ContextPoint], plan: Plan) -> list[Any]:
    from markupsafe import Markup

    from fitter.output.curves import charts

    return [(chart.title, chart.lines, Markup(chart.svg)) for chart in charts(contexts, resolved(plan).n_ctx)]


def _why(plan: Plan) -> dict[str, Any] | None:
    """What takes the time, what was chosen over what, and how far it is from the best; ``None`` without an estimate."""
    price = plan.estimate
    if price is None:
        return None
    workload = price.workload
    totals = [sum(getattr(part, kind) for part in price.parts) for kind in ("prompt", "generation")]
    parts = [
        (part.name, [getattr(part, kind) / total if total else 0 for kind, total in zip(_SPENT, totals, strict=True)])
        for part in price.parts
    ]
    return {
        "workload": f"a request of {workload.prompt:,} tokens and {workload.generate:,} generated ones",
        "seconds": price.seconds,
        "parts": [(name, *shares) for name, shares in parts if max(shares) >= 0.005],
        "bound": explain_lines(price, (), plan.bound)[2:3] if plan.bound is not None else [],
        "far": far_lines(plan.bound),
        "speeds": default_speeds(price),
    }


_SPENT = ("prompt", "generation")


def _formats(plan: Plan, names: Iterable[str]) -> list[dict[str, str]]:
    """The plan for each program: the text to copy, or why there is none."""
    found = []
    for name in names:
        if name == "json":
            continue
        entry = {"name": name, "meaning": FORMATS[name], "text": "", "problem": ""}
        try:
            entry["text"] = plan.format(name)
        except PlanError as error:
            entry["problem"] = str(error)
        if any(printable(line) != line for line in entry["text"].split("\n")):
            # what is shown would not be what is needed
            entry |= {"text": "", "problem": f"it has invisible characters: use fitter fit --format {name}"}
        found.append(entry)
    return found


def _remarks(plan: Plan, notes: Sequence[str]) -> list[str]:
    loads = dummy_loads(plan.search.dummy_loads)
    by = f" of llama.cpp {plan.llama_cpp.version}" if plan.llama_cpp else ""
    remarks = [*parameter_lines(plan), *map(shared_text, plan.shared), *pool_lines(plan)]
    later = [later_text(each) for each in plan.later if each.bytes is None or each.bytes >= MIB]
    remarks += [f"later, in host memory: {', '.join(later)}"] if later else []
    remarks += [left.message for left in plan.left_out]
    remarks += [f"given up, as --allow permits: {', '.join(plan.levers)}"] if plan.levers else []
    remarks += [*plan.notes, *notes]
    if plan.search.is_cut_short:
        remarks.append("the time limit ended the search: there may be a better plan")
    if plan.virtual:
        remarks.append("the devices are described ones, and need not be in this machine")
    return [*remarks, f"measured with {loads}{by} in {plan.search.seconds:.1f} s"]
