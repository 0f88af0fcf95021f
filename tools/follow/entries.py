"""Write the entries that make a build known: its layout, its defaults, its package, its facts."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fitter.llama.build import functions, layouts
from fitter.version import numbers_of
from tools.builds import llama_builds
from tools.follow import facts as known_facts
from tools.follow.facts import DEFAULTS, OPERATIONS, Facts
from tools.follow.subject import Subject

LAYOUTS = Path(layouts.__file__).with_name("layouts.json")
_PLAIN = re.compile(r"\[[^][{}]*\]")
"""A list without lists, which stays on one line."""
BUILDS = Path(llama_builds.__file__).with_suffix(".json")


def write(subject: Subject, ggml: str, facts: Facts, layout: layouts.Layout | None) -> Iterator[str]:
    """Write the entries of a build, and say which; nothing is written for what is known.

    ``layout`` is that of its header; ``None`` without one.
    """
    document = json.loads(LAYOUTS.read_text(encoding="utf-8"))
    yield from _write_defaults(document, facts.get(DEFAULTS, {}))
    known = document["layouts"]
    name = next((each for each, fields in known.items() if fields == layout), "")
    if layout is not None and not name:
        name = subject.name
        known[name] = layout
        document["sources"]["layouts"] += f"; {subject.name} ({subject.root.name})"
        yield f"layouts of {LAYOUTS.name}: {name}"
    yield from _write_epoch(document, ggml, facts)
    if document != json.loads(LAYOUTS.read_text(encoding="utf-8")):
        _store(LAYOUTS, document)
    if subject.package is not None and subject.library is not None and layout is not None:
        yield from _write_build(subject, name)
    if stored := known_facts.store(subject.name, facts):
        yield f"{known_facts.KNOWN.name}: {', '.join(stored)}"


def _write_defaults(document: dict[str, Any], defaults: Mapping[str, str]) -> Iterator[str]:
    """Write defaults of new fields, and new ones of others; a known field without any is one that a machine decides."""
    for field, value in defaults.items():
        struct, _, key = field.partition(".")
        values = document["defaults"][struct].get(key)
        if values is None and any(key in fields[struct] for fields in document["layouts"].values()):
            continue
        number = float(value) if set(".e").intersection(value) else int(value)
        if number not in (values or ()):
            document["defaults"][struct][key] = [*(values or ()), number]
            yield f"defaults of {LAYOUTS.name}: {field} {value}"


def _write_epoch(document: dict[str, Any], ggml: str, facts: Facts) -> Iterator[str]:
    operations = list(facts.get(OPERATIONS, {}))
    if not ggml or not operations or operations[-1] == functions.epoch_of(ggml).last_op:
        return
    document["epochs"] += [{**document["epochs"][-1], "ggml": ggml, "last_op": operations[-1]}]
    document["epochs"].sort(key=lambda each: numbers_of(each["ggml"]))
    yield f"epochs of {LAYOUTS.name}: {ggml}, whose last operation is {operations[-1]}"


def _write_build(subject: Subject, layout: str) -> Iterator[str]:
    document = json.loads(BUILDS.read_text(encoding="utf-8"))
    package, library = subject.package, subject.library
    if package is None or library is None or subject.name in document:
        return
    entry = {
        "kind": "wheel" if package.file.endswith(".whl") else "sdist",
        "package": package.name,
        "version": package.version,
        "file": package.file,
        "sha256": package.sha256,
        "folder": str(library.relative_to(subject.root)),
        "layout": layout,
    }
    others = list(document.items())
    # before the first that is no build for processors alone
    at = next((i for i, (_, each) in enumerate(others) if each["package"].endswith("-cuda")), len(others))
    _store(BUILDS, dict([*others[:at], (subject.name, entry), *others[at:]]))
    yield f"{BUILDS.name}: {subject.name}"


def _store(path: Path, document: Mapping[str, Any]) -> None:
    text = json.dumps(document, indent=2, ensure_ascii=False)
    path.write_text(_PLAIN.sub(lambda plain: json.dumps(json.loads(plain[0])), text) + "\n", encoding="utf-8")
