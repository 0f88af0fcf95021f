"""Pairs of a model's shape and a machine, for the comparison with upstream's own fit (tests and benchmark)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """A shape of ``tests/shapes.py`` on virtual GPUs, with options that fitter and upstream both know."""

    shape: str
    gpus: tuple[str, ...]
    options: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """How the case is called in reports."""
        machine = "+".join(self.gpus).replace(" ", "")
        return "/".join([self.shape, machine, *("".join(self.options).lstrip("-"),) * bool(self.options)])


_EIGHT = ("4x 31600MiB", "2x 23688MiB", "2x 48270MiB")

CASES: tuple[Case, ...] = (
    Case("llama-3.1-8b", ("rtx-4090",)),
    Case("llama-3.1-8b", ("8GiB",)),
    Case("llama-3.1-8b", ("4GiB",)),
    Case("llama-3.1-8b", ("6GiB", "3GiB")),
    Case("llama-3.1-8b", ("4GiB",), ("-c", "16384")),
    Case("llama-3.1-70b", ("rtx-4090",)),
    Case("llama-3.1-70b", ("rtx-4090", "rtx-3060-12gb")),
    Case("llama-3.1-70b", ("rtx-4090", "rtx-5090")),
    Case("llama-3.1-70b", ("4x 8GiB", "2x 6GiB", "2x 12GiB")),
    Case("qwen3-32b", ("rtx-4090",)),
    Case("qwen3-32b", ("12GiB", "8GiB")),
    Case("qwen3-32b", ("4x 4GiB", "2x 3GiB", "2x 2GiB")),
    Case("qwen3-30b-a3b", ("12GiB",)),
    Case("qwen3-30b-a3b", ("8GiB", "6GiB")),
    Case("qwen3-30b-a3b", ("12GiB", "10GiB")),
    Case("qwen3-30b-a3b", ("2x 4GiB", "6x 3GiB")),
    Case("qwen3-235b-a22b", ("rtx-4090",)),
    Case("qwen3-235b-a22b", ("rtx-4090", "12GiB")),
    Case("qwen3-235b-a22b", ("4x 16GiB", "2x 12GiB", "2x 8GiB")),
    Case("deepseek-v3.1", ("rtx-5090",)),
    Case("deepseek-v3.1", ("2x 48073MiB",), ("--fit-ctx", "131072")),
    Case("deepseek-v3.1", _EIGHT, ("-c", "32768")),
    Case("deepseek-v3.1", _EIGHT),
    Case("kimi-k2", _EIGHT),
    Case("gemma3-12b", ("8GiB",)),
    Case("gpt-oss-20b", ("8GiB",)),
    Case("gpt-oss-120b", ("rtx-4090", "12GiB")),
    Case("qwen3-next-80b-a3b", ("rtx-4090",)),
    Case("nemotron-h-9b", ("4GiB", "3GiB")),
)
