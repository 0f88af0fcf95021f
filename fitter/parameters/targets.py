"""The programs that a plan can be for, and the formats of plans and fleets: the one list of ``fitter/programs``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Target:
    """A module or folder of ``fitter/programs``. Its names are words of the command line, each with its help.

    Attributes:
        programs: Programs for ``--for``, with what each sets.
        formats: Formats of a plan.
        fleets: Formats of a fleet.
    """

    programs: Mapping[str, str] = field(default_factory=dict)
    formats: Mapping[str, str] = field(default_factory=dict)
    fleets: Mapping[str, str] = field(default_factory=dict)


TARGETS = {
    "llama_server": Target(
        {
            "llama-server": "one output per slot, four slots unless -np says otherwise, a prompt cache and context "
            "checkpoints",
            "llama-cli": "llama-server's own code with one slot",
        },
        {
            "args": "llama.cpp's arguments on one line",
            "shell": "the same, quoted for eval in sh, bash, zsh, fish",
            "json": "the whole plan, sizes in bytes",
            "ini": "a preset for llama-server --models-preset",
            "env": "LLAMA_ARG_ lines for sh, systemd or docker",
        },
        {"ini": "a preset for llama-server --models-preset"},
    ),
    "llama_cpp_python": Target(
        {"llama-cpp-python": "one output, as plan.load() and fitter.Llama set it"},
        {"python": "a script that loads with llama-cpp-python"},
    ),
    "llama_bench": Target({"llama-bench": "an output for every token, one sequence"}),
    "llama_swap": Target(
        formats={"llama-swap": "a model for llama-swap's config.yaml"},
        fleets={
            "llama-swap": "a config.yaml for llama-swap, with a matrix",
            "llama-swap-groups": "the same with groups, for older versions",
        },
    ),
    "compose": Target(
        formats={"compose": "a compose.yaml with llama.cpp's image"},
        fleets={"compose": "a compose.yaml with a service for each model"},
    ),
    "systemd": Target(fleets={"systemd": "a unit of systemd for each model"}),
    "kubernetes": Target(formats={"kubernetes": "a Deployment and a Service"}),
    "llmkube": Target(formats={"llmkube": "LLMKube's Model and InferenceService"}),
    "gguf_parser": Target(formats={"gguf-parser": "gguf-parser's document, for schedulers"}),
    "ik_llama": Target(
        {
            "ik_llama": "ik_llama.cpp's server: it cuts layers over devices by bytes, and divides the context by "
            "its slots"
        },
        {"ik_llama": "arguments of ik_llama.cpp on one line"},
    ),
    "ollama": Target(
        {"ollama": "Ollama: it splits by free memory, knows no -ot, and has one batch and one slot"},
        {"ollama": "a Modelfile for Ollama"},
    ),
    "any_program": Target({"any": "an output for every token, which holds for all programs"}),
}
"""All targets, in the order of ``--help``."""

PROGRAMS = {name: text for target in TARGETS.values() for name, text in target.programs.items()}
"""Programs for ``--for``, with what each sets."""

FORMATS = {name: text for target in TARGETS.values() for name, text in target.formats.items()}
"""Formats of a plan, with the help for each."""

FLEET_FORMATS = {name: text for target in TARGETS.values() for name, text in target.fleets.items()}
"""Formats of a fleet, with the help for each."""

OWN_FORMATS = tuple(name for name in FORMATS if name in PROGRAMS)
"""Formats of one program alone, which has the same name."""
