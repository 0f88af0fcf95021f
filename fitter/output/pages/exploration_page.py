"""An explored grid as an HTML page, or as a table for a notebook; both sort, and need no network.

Both draw the exploration's JSON document. Names of models are untrusted: everything is escaped.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from fitter.errors import PlanError
from fitter.model.location import local_name
from fitter.model.shapes import catalogue
from fitter.output.arguments import placeholder, shell_line
from fitter.output.pages import page
from fitter.output.pictures.drawing import text
from fitter.output.tables.exploration_table import file_names
from fitter.text import human, speed

_AXES = {
    "model": "model",
    "file_type": "type",
    "machine": "machine",
    "asked_context": "asked context",
    "type_k": "type of keys",
    "type_v": "type of values",
    "n_ubatch": "micro batch",
}
"""Keys that identify a cell, with titles. A value that all cells share stands once above the table."""
_FULL = "full_context_tokens_per_second"
_FIGURES = {
    "n_ctx": "context",
    "used": "on devices",
    "host_weights": "weights on the host",
    "prompt_tokens_per_second": "prompt, t/s",
    "tokens_per_second": "generation, t/s",
    _FULL: "with a full context, t/s",
}
COSTS = {"price": "price", "watts": "watts", "memory": "memory of the devices"}
"""Kinds of cost of a machine, and their titles."""
_BYTES = ("used", "host_weights", "memory")
_RATES = ("prompt_tokens_per_second", "tokens_per_second", _FULL)
_TOKENS = ("n_ctx", "asked_context", "n_ubatch")
_FITS = {True: "yes", False: "no", None: "unknown"}
_SAME = "-"


def exploration_page(document: Mapping[str, Any]) -> str:
    """Draw the page of an exploration from its JSON document. Raises ``LibraryError`` if a package is missing."""
    from markupsafe import Markup

    from fitter.output.pictures.curves import fronts

    whole, document = document, _name_models(document)
    cells = document["cells"]
    models = list(dict.fromkeys(cell["model"] for cell in cells))
    return page.page(
        "exploration.html",
        title=models[0] if len(models) == 1 else f"{models[0]} and {len(models) - 1} more",
        documents=[("exploration", whole)],
        scripts=("copy.js", "sort.js"),
        styles=("report.css", "grid.css"),
        document=document,
        verdict=_verdict(document),
        same=same_everywhere(cells),
        counts=_counts(document),
        answers=[
            {**_answer(named, document["cost"]), **_command(answer["cell"])}
            for answer, named in zip(whole["answers"], document["answers"], strict=True)
        ],
        fronts=[(front.title, Markup(front.svg)) for front in fronts(cells, document["cost"])],
        cost=COSTS[document["cost"]],
        unpriced=0
        if document["cost"] == "memory"
        else sum(bool(cell["fits"]) and cell["cost"] is None for cell in cells),
        has_best=any(cell["is_best"] for cell in cells),
        table=Markup(table(document)),
        unknown=_reasons(cells),
    )


def exploration_fragment(document: Mapping[str, Any]) -> str:
    """Draw the table of an exploration for an existing page, such as a notebook's.

    Its script only sorts, and contains nothing of the document; without the script, the table is still readable.
    """
    document = _name_models(document)
    summary = "; ".join(filter(None, (_verdict(document), same_everywhere(document["cells"]))))
    style = f"<style>{page.resource('grid.css')}</style>"
    script = f"<script>{page.resource('sort.js')}</script>"
    box = '<div style="overflow: auto; max-height: 600px">'
    return f"<div>{style}<p>{text(summary, None)}</p>{box}{table(document)}</div>{script}</div>"


def _name_models(document: Mapping[str, Any]) -> dict[str, Any]:
    """Name every model in the document as the command's table does."""
    names = file_names(cell["model"] for cell in document["cells"])
    lists = {key: [{**each, "model": names[each["model"]]} for each in document[key]] for key in ("cells", "answers")}
    return {**document, **lists}


def _verdict(document: Mapping[str, Any]) -> str:
    cells = document["cells"]
    fitting = sum(cell["fits"] is True for cell in cells)
    count = f"{fitting} of {len(cells)} plans fit"
    if document["asked"] is None:
        return count
    answers = document["answers"]
    doing = sum(answer["cell"] is not None for answer in answers)
    if len(answers) > 1:
        return f"{document['asked']}: for {doing} of {len(answers)} models there is a machine that does it"
    return f"{document['asked']}: " + ("a machine does it" if doing else "no machine does it")


def _counts(document: Mapping[str, Any]) -> list[tuple[str, str]]:
    of = [cell["fits"] for cell in document["cells"]]
    counts = [("plans", len(of)), ("fit", of.count(True)), ("do not fit", of.count(False)), ("unknown", of.count(None))]
    return [(name, f"{count:,}") for name, count in counts if count or name != "unknown"]


def shown(value: Any, key: str) -> str:
    """Write a value of a cell in words; ``-`` without one."""
    if value is None:
        return _SAME
    if key in _BYTES:
        return human(value)
    if key in _RATES:
        return speed(value)
    return f"{value:,}" if key in _TOKENS else f"{value:g}" if key == "cost" else str(value)


def _varied(cells: Sequence[Mapping[str, Any]]) -> list[str]:
    return [key for key in _AXES if len({cell[key] for cell in cells}) > 1]


def same_everywhere(cells: Sequence[Mapping[str, Any]]) -> str:
    """Write the values that all cells share."""
    varied = _varied(cells)
    return _words(cells[0], [key for key in _AXES if key not in varied and cells[0][key] is not None])


def about(cell: Mapping[str, Any], varied: Sequence[str]) -> str:
    """Write the values in which a cell differs from others."""
    return _words(cell, varied) or str(cell["machine"])


def _words(cell: Mapping[str, Any], keys: Sequence[str]) -> str:
    titles = {key: "" if key in ("model", "file_type", "machine") else f"{_AXES[key]} " for key in keys}
    return ", ".join(f"{titles[key]}{shown(cell[key], key)}" for key in keys)


@dataclass(frozen=True)
class _Column:
    key: str
    title: str
    is_number: bool = True


def _columns(document: Mapping[str, Any]) -> list[_Column]:
    cells = document["cells"]
    varied = _varied(cells) or ["machine"]
    columns = [_Column(key, _AXES[key], key in _TOKENS) for key in varied]
    columns += [_Column("fits", "fits", False), _Column("is_best", "best trade-off", False)]
    has_full = any(cell[_FULL] is not None for cell in cells)
    columns += [_Column(key, title) for key, title in _FIGURES.items() if key != _FULL or has_full]
    cost = "memory" if document["cost"] == "memory" else "cost"
    columns.append(_Column(cost, COSTS[document["cost"]]))
    has_notes = any(any(_notes(cell)) for cell in cells)
    return [*columns, *([_Column("note", "note", False)] if has_notes else [])]


def table(document: Mapping[str, Any]) -> str:
    """Draw the table of all cells: HTML, with every figure of JSON in ``data-value``."""
    columns = _columns(document)
    heads = (f'<th scope="col"{_class(column)}>{text(column.title)}</th>' for column in columns)
    rows = (_row(cell, columns) for cell in document["cells"])
    return "\n".join(
        ['<table class="fitter-grid stacked"><thead><tr>', *heads, "</tr></thead><tbody>", *rows, "</tbody></table>"]
    )


def _class(column: _Column) -> str:
    return ' class="number"' if column.is_number else ""


def _row(cell: Mapping[str, Any], columns: Sequence[_Column]) -> str:
    parts = []
    for number, column in enumerate(columns):
        words, value = _cell(cell, column.key)
        name, scope = ("td", "") if number else ("th", ' scope="row"')
        kind = ' class="words"' if column.key == "note" else _class(column)
        label = f'data-label="{text(column.title)}" data-value="{text(value, None)}"'
        parts.append(f"<{name}{scope}{kind} {label}>{text(words, None)}</{name}>")
    return f"<tr{' class=' + chr(34) + 'best' + chr(34) if cell['is_best'] else ''}>{''.join(parts)}</tr>"


def _cell(cell: Mapping[str, Any], key: str) -> tuple[str, str]:
    """Return the text of a cell and its sort key, which is empty for an unknown value."""
    if key == "note":
        words = ", ".join(_notes(cell))
        return words, words
    if key == "is_best":
        return ("best", "best") if cell["is_best"] else ("", "")
    if key == "fits":
        return _FITS[cell["fits"]], _FITS[cell["fits"]] if cell["fits"] is not None else ""
    value = cell[key]
    if value is None:
        is_none = key in _AXES or (key != "cost" and cell["fits"] is False)
        return _SAME if is_none else "unknown", ""
    return shown(value, key), str(value)


def _notes(cell: Mapping[str, Any]) -> Iterator[str]:
    if cell["needs_imatrix"]:
        yield "needs an importance matrix"
    if cell["problem"]:
        yield cell["problem"]


def _reasons(cells: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[str]]]:
    """List each reason for a missing plan with its cells."""
    varied = _varied(cells)
    reasons: dict[str, list[str]] = {}
    for cell in cells:
        if cell["fits"] is None:
            reasons.setdefault(cell["problem"] or "no reason is known", []).append(about(cell, varied))
    return list(reasons.items())


def _answer(answer: Mapping[str, Any], cost: str) -> dict[str, Any]:
    """Write an answer in words."""
    name, cell = answer["model"], answer["cell"]
    refused = answer["refused"]
    confirmed = "on the header that llama-quantize would write" if answer["is_of_header"] else "on the model itself"
    notes = [f"{refused} did it by their header, but not when the model itself was measured"] if refused else []
    if cell is None:
        return {"model": name, "cell": None, "facts": [], "notes": notes}
    why = {"price": "the cheapest", "watts": "the one with the fewest watts", "memory": "the one with the least memory"}
    if cost != "memory" and cell["cost"] is None:
        notes.append(f"its {cost} is unknown, and no machine with a known one does it")
    else:
        notes.append(f"it is {why[cost]} that does it")
    notes.append(f"confirmed {confirmed}")
    if cell["needs_imatrix"]:
        notes.append("a file of that type is only made with an importance matrix")
    keys = ["n_ctx", "tokens_per_second", _FULL, "prompt_tokens_per_second", "host_weights", "used"]
    keys.append("memory" if cost == "memory" else "cost")
    titles = {**_FIGURES, "cost": COSTS[cost], "memory": COSTS["memory"]}
    kind = [] if cell["file_type"] is None else [("type", cell["file_type"])]
    figures = [(titles[key], shown(cell[key], key)) for key in keys if cell[key] is not None]
    return {
        "model": name,
        "cell": cell,
        "facts": [*kind, *figures],
        "notes": notes,
    }


def _command(cell: Mapping[str, Any] | None) -> dict[str, str]:
    """Return the command that runs a cell, or the problem with it."""
    if cell is None:
        return {}
    model, file_type = cell["model"], cell["file_type"]
    shape = catalogue.wanted(model)
    if shape is not None:
        file = placeholder(shape.of_type(file_type or shape.file_type).address)
    elif file_type is not None:
        # llama-quantize has not made it yet
        file = placeholder(f"{PurePath(local_name(model)).stem}-{file_type}.gguf")
    else:
        file = local_name(model)
    try:
        return {"command": shell_line(["llama-server", "-m", file, *(cell["arguments"] or ())]), "problem": ""}
    except PlanError as error:
        return {"command": "", "problem": str(error)}


__all__ = ["exploration_fragment", "exploration_page"]
