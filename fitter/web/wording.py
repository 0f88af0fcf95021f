"""Messages of the library in the page's words: its labels in place of options, and only remedies that it offers."""

from __future__ import annotations

import re
from functools import cache

from fitter.errors import Message, Remedy
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

UNSET = {
    "n_ctx": "the largest with which a request takes at most a tenth longer",
    "margin": "1024, or more where a card needs it",
}
"""Defaults of fields that the command line's help explains by another option or value."""

_ACTIONS = {"lower": "use a smaller {}", "omit": "set no {}", "raise": "use a larger {}", "set": "set another {}"}
_INSTEAD = {
    "time_limit": "set the context, or take fewer cards",
    "timeout": "try again later",
    "allow_private_addresses": "whoever starts the server can allow it",
    "format": "take another form",
    "shapes": "take one of the list",
}
"""Remedies of the page in place of those by something that it does not have; it leaves out all others of them."""
_OPTION = re.compile(r"(?<![\w-])--?[a-z][a-z0-9-]*")


@cache
def _labels() -> dict[str, str]:
    """Return the words for each option, and for a parameter as messages call it: ``n_ctx (-c)``."""
    words: dict[str, str] = {}
    for name, each in PARAMETERS.items():
        # whoever starts the server can name another llama.cpp
        if each.options and name != "llama_cpp":
            label = LABELS.get(name, each.long.replace("-", " "))
            words |= dict.fromkeys((*each.positive, *each.negative), label)
    return words


def _remedy(remedy: str) -> str:
    if not isinstance(remedy, Remedy):
        return remedy
    label = LABELS.get(remedy.parameter)
    return _INSTEAD.get(remedy.parameter, "") if label is None else _ACTIONS[remedy.action].format(label)


def worded(message: str) -> str:
    """Write a message of the library without options of the command line."""
    text = message.worded(_remedy) if isinstance(message, Message) else message
    for name, label in LABELS.items():
        text = text.replace(PARAMETERS[name].called, label)
    labels = _labels()
    return _OPTION.sub(lambda option: labels.get(option[0], option[0]), text)
