"""Twelve fleets of published models on machines that are not here: what the tests plan, and what logs are replayed on.

Each has its models' keywords by name, and the keywords of the machine. Servers keep 1 GiB of prompts each.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class FleetExample:
    """A fleet.

    Attributes:
        name: Its name.
        models: Keywords of ``fitter.fleet`` by model.
        machine: Keywords of ``fit`` for the machine.
    """

    name: str
    models: Mapping[str, Mapping[str, Any]]
    machine: Mapping[str, Any] = field(default_factory=dict)

    @property
    def keywords(self) -> dict[str, Any]:
        """The keywords of the machine and of every server."""
        return {"cache_ram": 1024, **self.machine}


def _chat(shape: str, share: float = 1, **more: Any) -> dict[str, Any]:
    return {"model": f"shape://{shape}", "share": share, **more}


def _embed(shape: str = "nomic-embed-text-v1.5", share: float = 1, **more: Any) -> dict[str, Any]:
    return {"model": f"shape://{shape}", "share": share, "embedding": True, **more}


FLEETS = (
    FleetExample(
        "chat, coder and embedder on one card",
        {
            "chat": _chat("gemma-3-12b", 2),
            "coder": _chat("qwen2.5-14b"),
            "embed": _embed(share=3, resident=True),
        },
        {"gpus": ["rtx-4090"], "host_memory": "64GiB"},
    ),
    FleetExample(
        "a chat and an embedder that both fit",
        {"chat": _chat("llama-3.1-8b", 3), "embed": _embed()},
        {"gpus": ["rtx-3090"], "host_memory": "32GiB"},
    ),
    FleetExample(
        "two models too large together on a small card",
        {"chat": _chat("llama-3.1-8b"), "coder": _chat("qwen2-7b")},
        {"gpus": ["rtx-4060"], "host_memory": "32GiB"},
    ),
    FleetExample(
        "a large expert model and two small ones",
        {"large": _chat("gpt-oss-120b"), "small": _chat("llama-3.1-8b", 4), "embed": _embed(share=2)},
        {"gpus": ["2x rtx-3090"], "host_memory": "128GiB"},
    ),
    FleetExample(
        "four models on two unequal cards",
        {
            "chat": _chat("qwen3-32b", 3),
            "coder": _chat("gpt-oss-20b", 2),
            "small": _chat("llama-3.1-8b"),
            "embed": _embed(share=2, resident=True),
        },
        {"gpus": ["rtx-3090", "rtx-4060-ti-16gb"], "host_memory": "64GiB"},
    ),
    FleetExample(
        "eight models on two cards",
        {
            "chat": _chat("qwen3-32b", 4),
            "coder": _chat("gpt-oss-20b", 3),
            "vision": _chat("gemma-3-27b"),
            "draft": _chat("qwen2.5-0.5b"),
            "small": _chat("llama-3.1-8b", 2),
            "medium": _chat("qwen2.5-14b"),
            "phi": _chat("phi-4"),
            "large": _chat("gpt-oss-120b"),
        },
        {"gpus": ["2x rtx-3090"], "host_memory": "128GiB"},
    ),
    FleetExample(
        "six large models on eight cards",
        {
            "llama": _chat("llama-3.3-70b", 3),
            "gpt": _chat("gpt-oss-120b", 3),
            "glm": _chat("glm-4.5-air", 2),
            "scout": _chat("llama-4-scout"),
            "gemma": _chat("gemma-3-27b", 2),
            "embed": _embed(share=4, resident=True),
        },
        {"gpus": ["8x rtx-3090"], "host_memory": "512GiB"},
    ),
    FleetExample(
        "two models that must stay and one in turns",
        {
            "chat": _chat("qwen3-32b"),
            "small": _chat("llama-3.2-3b", 2, resident=True),
            "embed": _embed(share=3, resident=True),
        },
        {"gpus": ["rtx-3090"], "host_memory": "64GiB"},
    ),
    FleetExample(
        "three models on a Mac",
        {"chat": _chat("gpt-oss-20b", 2), "coder": _chat("qwen3-32b"), "embed": _embed(share=2)},
        {"gpus": ["m4-max-32c"]},
    ),
    FleetExample(
        "three models on a processor alone",
        {"chat": _chat("llama-3.2-3b", 2), "coder": _chat("qwen2.5-14b"), "embed": _embed(share=2)},
        {"gpus": ["none"], "host_memory": "16GiB"},
    ),
    FleetExample(
        "two models that are never together",
        {
            "one": _chat("llama-3.1-8b", never_with=["other"]),
            "other": _chat("qwen2-7b"),
            "embed": _embed(),
        },
        {"gpus": ["rtx-4090"], "host_memory": "64GiB"},
    ),
    FleetExample(
        "agents, and many users of a small model",
        {
            "agent": _chat("gpt-oss-20b", 2, workload="agent"),
            "small": _chat("llama-3.2-3b", 3, users=8),
            "coder": _chat("qwen3-32b"),
        },
        {"gpus": ["rtx-5090"], "host_memory": "64GiB"},
    ),
)
"""From 2 to 8 models, on one card, two equal and unequal ones, eight, a Mac and a processor."""
