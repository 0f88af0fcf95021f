"""A fleet in the files of other programs. A format is a file here with ``text(fleet)``, and a line in ``FORMATS``."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from fitter.errors import PlanError, UsageError

if TYPE_CHECKING:
    from fitter.planning.fleet.fleet import Fleet

FORMATS = {
    "llama-swap": "a config.yaml for llama-swap, with a matrix",
    "llama-swap-groups": "the same with groups, for older versions",
    "ini": "a preset for llama-server --models-preset",
    "compose": "a compose.yaml with a service for each model",
    "systemd": "a unit of systemd for each model",
}
"""The help for each format."""


def render(fleet: Fleet, name: str) -> str:
    """Write ``fleet`` in the format ``name``, without a newline at the end.

    Raises:
        PlanError: The fleet does not fit, or the format cannot express a plan or a name, which the message says.
        UsageError: There is no such format.
    """
    if name not in FORMATS:
        raise UsageError(f"unknown format '{name}': choose from {', '.join(FORMATS)}")
    if not fleet.fits:
        raise PlanError(f"the models do not fit: {fleet.problems[0]}")
    text: str = import_module(f"fitter.output.formats.fleets.{name.replace('-', '_')}").text(fleet)
    return text
