"""Messages of the library in the page's words: its labels in place of options, and only remedies that it offers."""

from __future__ import annotations

import re
from functools import cache

from fitter.parameters.table import PARAMETERS

LABELS = {
    "gpus": "card",
    "n_ctx": "context",
    "type_k": "keys",
    "type_v": "values",
    "n_seq_max": "slots",
    "workload": "work",
    "users": "users",
    "margin": "margin per card",
    "host_memory": "host memory",
    "program": "program",
}
"""Labels of the page's fields, by parameter. Other parameters are called by the words of their long option."""

_REMEDIES = (
    (r"the request takes at most --context-cost longer", "a request takes at most a tenth longer"),
    (r"(?<=; )(let weights be read[^;]* with --allow paging|use a smaller margin with --host-margin) or ", ""),
    (r"(,? or|;| and) (let weights be read[^;]* with --allow paging|use a smaller margin with --host-margin)", ""),
    (r"margin with --fit-target", LABELS["margin"]),
    (
        r"raise --time-?(limit|out)(, or set more parameters yourself, such as -c)?",
        "set the context, or take fewer cards",
    ),
    (r", or give it more time \(--timeout\)", ""),
    (r"give it more time \(--timeout\)", "try again later"),
    (r", or (name )?another (llama\.cpp |one )?with --llama-cpp", ""),
    (r"(, or )?[a-z ]+ \(--llama-cpp( python)?\)", ""),
    (r", and this file with --(mmproj|lora)", ""),
    (r"start the server with --allow-private-addresses if it may be", "whoever starts the server can allow it"),
    (r"use fitter fit --format \w+", "take another form"),
    (r", or use --json|: use fitter --json", ""),
    (r"'fitter shapes' lists (all|them)", "take one of the list"),
    (r": --tokens-per-second N marks the one of them that generates as fast", ""),
    (r" \(--(mmproj plans with one|tokens-per-second[^)]*)\)", ""),
    (r", or start it with --root", ""),
    (r"; fitter devices --catalogue lists the names", ""),
    (r"leave (-\S+) out", r"set no \1"),
    (r"--(shape|config) \S+:(\w+)", r"quantization \2"),
    (r"or auto where that is more", "or more where a card needs it"),
)
"""Remedies of the command line, and those of the page."""
_OPTION = re.compile(r"(?<![\w-])--?[a-z][a-z0-9-]*")


@cache
def _labels() -> dict[str, str]:
    """Return the words for each option, and for a parameter as messages call it: ``n_ctx (-c)``."""
    words: dict[str, str] = {}
    for name, each in PARAMETERS.items():
        if each.options:
            label = LABELS.get(name, each.long.replace("-", " "))
            words |= dict.fromkeys((*each.positive, *each.negative), label)
    return words


def worded(message: str) -> str:
    """Write a message of the library without options of the command line."""
    for name, label in LABELS.items():
        message = message.replace(PARAMETERS[name].called, label)
    for pattern, words in _REMEDIES:
        message = re.sub(pattern, words, message)
    labels = _labels()
    return _OPTION.sub(lambda option: labels.get(option[0], option[0]), message)


__all__ = ["LABELS", "worded"]
