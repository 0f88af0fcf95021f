"""Write a plan as a model of llama-swap, which starts llama-server for the model that a request names.

The syntax is that of its ``config-schema.json``, and of the commands in its ``internal/config``.
"""

from __future__ import annotations

import json
import re
import shlex

from fitter.errors import PlanError
from fitter.output.arguments import check_line
from fitter.output.formats.format_options import with_absolute_paths
from fitter.output.formats.ini import section
from fitter.planning.plan.plan import Plan


def text(plan: Plan) -> str:
    """Write ``models`` of a config.yaml with one model, named as in a preset of llama-server.

    Raises :class:`PlanError` as ``model``.
    """
    return "\n".join(["models:", *model(section(plan.model.path), plan)])


def model(name: str, plan: Plan) -> list[str]:
    """Write the lines of a model below ``models``.

    llama-swap puts a free port in place of ``${PORT}``, and sends requests there.

    Args:
        name: Its name in requests.
        plan: Its plan.

    Raises:
        PlanError: llama-swap would change the name or a value.
    """
    if "${" in name:
        raise PlanError(f"llama-swap would take '${{' in '{name}' for a macro: rename the model")
    options = [each.words for each in with_absolute_paths(plan)]
    for words in options:
        check_line(words)
        if macro := next((word for word in words if "${" in word), None):
            raise PlanError(f"llama-swap would take '${{' in '{macro}' for a macro: rename the file")
    lines = ["llama-server --port ${PORT}", *(" ".join(map(_quoted, words)) for words in options)]
    return [f"  {scalar(name)}:", "    cmd: |", *(f"      {line}" for line in lines)]


def scalar(word: str) -> str:
    """Quote a text without control characters for YAML."""
    return json.dumps(word, ensure_ascii=False)


def _quoted(word: str) -> str:
    """Quote a word of a command: if possible so that llama-swap reads it on Windows too, which has only ``"``."""
    if re.fullmatch(r"[\w@%+=:,./-]+", word, re.ASCII):
        return word
    return shlex.quote(word) if re.search(r'"|\\[\\$`]|\\$', word) else f'"{word}"'
