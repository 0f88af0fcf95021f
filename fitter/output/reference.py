"""The table of parameters as text, from which the reference pages are made."""

from __future__ import annotations

from fitter.parameters import PARAMETERS, Parameter


def markdown() -> str:
    """Every parameter, by the sections of ``--help``: its help, and its names in every place."""
    sections: dict[str, list[Parameter]] = {}
    for each in PARAMETERS.values():
        sections.setdefault(each.section or "In Python only", []).append(each)
    return "\n\n".join(f"## {title}\n\n" + "\n".join(map(_entry, found)) for title, found in sections.items()) + "\n"


def _entry(each: Parameter) -> str:
    options = ", ".join(f"`{name}`" for name in (*each.positive, *each.negative))
    names = {
        "command line": f"{options} {each.kind.metavar or ''}".strip(),
        "`fitter.toml` and markers": f"`{each.case}`" if each.options and each.case else "",
        "JSON": f"`params.{each.key}`" if each.struct and each.key and each.is_planned else "",
        "environment of llama.cpp's programs": f"`{each.env}`" if each.env else "",
        "llama.cpp's struct": f"`llama_{each.struct}_params.{each.field}`" if each.native else "",
    }
    text = "; ".join(f"{where}: {name}" for where, name in names.items() if name)
    return f"- `{each.name}`: {each.text}" + (f" ({text})" if text else "")
