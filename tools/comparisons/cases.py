"""Pairs of a model's shape and a machine, for the comparisons with upstream's own fit (tests and benchmarks)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """A shape of ``tools/models/shapes.py`` on virtual GPUs, with options that fitter and upstream both know.

    ``prompt``: tokens of the request's prompt, where they are not the usual ones; upstream has no such option.
    """

    shape: str
    gpus: tuple[str, ...]
    options: tuple[str, ...] = ()
    prompt: int | None = None

    @property
    def name(self) -> str:
        """How the case is called in reports."""
        machine = "+".join(self.gpus).replace(" ", "")
        words = [*self.options, *(["--prompt", str(self.prompt)] if self.prompt else [])]
        return "/".join([self.shape, machine, *("".join(words).lstrip("-"),) * bool(words)])


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

# Cards of different speed in both orders, one that would hold everything beside another, long prompts, other backends.
MIXED: tuple[Case, ...] = (
    Case("llama-3.1-8b", ("rtx-4090", "gtx-1060-6gb"), ("-c", "8192")),
    Case("llama-3.1-8b", ("gtx-1060-6gb", "rtx-4090"), ("-c", "8192")),
    Case("llama-3.1-8b", ("2x rtx-3090",)),
    Case("llama-3.1-8b", ("gtx-1060-6gb",)),
    Case("llama-3.1-8b", ("rtx-4060",), prompt=30000),
    Case("llama-3.1-8b", ("arc-a380",)),
    Case("llama-3.1-70b", ("rtx-5090", "gtx-1080-ti")),
    Case("llama-3.1-70b", ("gtx-1080-ti", "rtx-5090")),
    Case("llama-3.1-70b", ("2x rtx-3090",)),
    Case("llama-3.1-70b", ("2x rtx-3090",), prompt=30000),
    Case("llama-3.1-70b", ("rtx-4090",), ("-c", "32768"), prompt=30000),
    Case("llama-3.1-70b", ("h100-pcie", "rtx-3090"), ("-c", "32768")),
    Case("llama-3.1-70b", ("3x rtx-3060-12gb",)),
    Case("llama-3.1-70b", ("m2-ultra",)),
    Case("llama-3.1-70b", ("rx-7900-xtx",)),
    Case("qwen3-32b", ("rtx-4090", "rtx-3060-12gb")),
    Case("qwen3-32b", ("rtx-3060-12gb", "rtx-4090"), ("-c", "32768")),
    Case("qwen3-32b", ("rtx-3090",), ("-c", "32768"), prompt=30000),
    Case("qwen3-30b-a3b", ("rtx-3060-12gb", "gtx-1060-6gb")),
    Case("qwen3-30b-a3b", ("rtx-5090", "gtx-1080-ti"), ("-c", "16384")),
    Case("qwen3-30b-a3b", ("rtx-4070",), prompt=30000),
    Case("qwen3-235b-a22b", ("2x rtx-3090",)),
    Case("qwen3-235b-a22b", ("rtx-3090", "h100-pcie"), ("-c", "16384")),
    Case("qwen3-235b-a22b", ("rtx-5090", "gtx-1080-ti"), prompt=30000),
    Case("qwen3-235b-a22b", ("m2-ultra",)),
    Case("deepseek-v3.1", ("h100-sxm", "rtx-6000-ada")),
    Case("deepseek-v3.1", ("rtx-6000-ada",), ("-c", "32768"), prompt=30000),
    Case("kimi-k2", ("4x rtx-3090",)),
    Case("kimi-k2", _EIGHT, ("-c", "32768")),
    Case("kimi-k2", ("rocm:gfx1151:96GiB",)),
    Case("gpt-oss-120b", ("rtx-5090",), ("-c", "32768")),
    Case("gpt-oss-120b", ("2x rtx-3090",), prompt=30000),
    Case("gpt-oss-20b", ("rtx-4060-ti-16gb", "rtx-3060-12gb")),
    Case("gemma3-12b", ("rtx-4060", "gtx-1070")),
    Case("gemma3-12b", ("rtx-3060-12gb",), prompt=30000),
    Case("qwen3-next-80b-a3b", ("rtx-3090", "rtx-3060-12gb")),
    Case("nemotron-h-9b", ("gtx-1060-6gb",)),
)
