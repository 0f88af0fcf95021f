"""The place that this llama-fitter was installed from, and the command that installs more of it from there."""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_NAME = "llama-fitter"


def install_command(extra: str = "") -> str:
    """Return the command that installs llama-fitter, with one of its extras, from where it came (PEP 610).

    Args:
        extra: An extra of the distribution, such as ``web``.
    """
    from shlex import quote
    from urllib.parse import urlsplit

    from fitter import system

    with_extra = f"[{extra}]" if extra else ""
    origin = _origin()
    url = str(origin.get("url", ""))
    if url.startswith("file:") and "vcs_info" not in origin:
        path = system.path_of_url(urlsplit(url).path)
        # a clone or an archive that was removed since installs nothing
        if os.path.exists(path):
            is_editable = origin.get("dir_info", {}).get("editable") is True
            return f"pip install {'-e ' if is_editable else ''}{quote(path + with_extra)}"
    elif url:
        return f"pip install {quote(f'{_NAME}{with_extra} @ {_requirement(url, origin)}')}"
    return f"pip install {quote(_NAME + with_extra)}"


def _requirement(url: str, origin: dict[str, Any]) -> str:
    """Return the address as pip takes it: of a repository with its kind, and the revision that was asked for."""
    vcs = origin.get("vcs_info", {})
    revision = f"@{vcs['requested_revision']}" if vcs.get("requested_revision") else ""
    folder = f"#subdirectory={origin['subdirectory']}" if origin.get("subdirectory") else ""
    return f"{vcs['vcs']}+{url}{revision}{folder}" if vcs.get("vcs") else url + folder


def _origin() -> dict[str, Any]:
    """Read the record of the installation; empty if it came from an index, or is not installed."""
    import json
    from importlib.metadata import PackageNotFoundError, distribution

    try:
        origin = json.loads(distribution(_NAME).read_text("direct_url.json") or "{}")
    except (PackageNotFoundError, ValueError):
        return {}
    return origin if isinstance(origin, dict) else {}
