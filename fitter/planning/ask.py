"""What ``fit`` is asked for beside llama.cpp's own parameters: checked values, each with its default. Bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from fitter.llama.types import VirtualDevice
from fitter.parameters import DEFAULTS


@dataclass(frozen=True)
class Ask:
    """The machine, its limits, and what the best plan is; named as the keywords of ``fit``."""

    gpus: tuple[str | VirtualDevice, ...] = DEFAULTS["gpus"]
    profile: str | None = DEFAULTS["profile"]
    rpc: tuple[str, ...] = DEFAULTS["rpc"]
    timeout: float = DEFAULTS["timeout"]
    time_limit: float | None = DEFAULTS["time_limit"]
    host_memory: int | None = DEFAULTS["host_memory"]
    host_margin: int = DEFAULTS["host_margin"]
    margin: int | tuple[int, ...] | None = DEFAULTS["margin"]
    fit_ctx: int = DEFAULTS["fit_ctx"]
    allow: tuple[str, ...] = DEFAULTS["allow"]
    skeleton: bool = DEFAULTS["skeleton"]
    devices: tuple[str, ...] | None = DEFAULTS["devices"]
    prompt: int | None = DEFAULTS["prompt"]
    generate: int | None = DEFAULTS["generate"]
    host_bandwidth: float | str | None = DEFAULTS["host_bandwidth"]
    rpc_bandwidth: float | str | tuple[float | str, ...] | None = DEFAULTS["rpc_bandwidth"]
    objective: str = DEFAULTS["objective"]
    strategy: str = DEFAULTS["strategy"]
    live_tokens: int | None = DEFAULTS["live_tokens"]

    @classmethod
    def of(cls, checked: Mapping[str, Any]) -> Ask:
        """What is asked with these keywords; those that are not there are not set."""
        return cls(**{field.name: checked[field.name] for field in fields(cls) if field.name in checked})
