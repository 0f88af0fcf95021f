"""Write a plan or a fleet as a compose file that starts llama-server in containers, with an image of llama.cpp's own.

The images and the devices that each needs are those of llama.cpp's ``docs/docker.md``.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from fitter.errors import PlanError
from fitter.output.arguments import OptionValue, check_line, split_files, with_absolute_paths
from fitter.output.formats import distinct, file_name
from fitter.planning.fleet.fleet import Fleet
from fitter.planning.plan.plan import Plan

_IMAGE = "ghcr.io/ggml-org/llama.cpp:server"
PORT = 8080
"""llama-server's own port."""
_DRI = ["devices:", '  - "/dev/dri"']
_NVIDIA = [
    "deploy:",
    "  resources:",
    "    reservations:",
    "      devices:",
    '        - driver: "nvidia"',
    '          count: "all"',
    '          capabilities: ["gpu"]',
]
_BACKENDS = {
    "": ("", []),
    "CUDA": ("-cuda", _NVIDIA),
    "ROCm": ("-rocm", ["devices:", '  - "/dev/kfd"', '  - "/dev/dri"']),
    "SYCL": ("-intel", _DRI),
    "Vulkan": ("-vulkan", _DRI),
}
"""Ending of the image's tag, and the lines that lend devices to its container, by backend."""
_DEVICES = ("-dev", "-devd", "-mmdev")
"""Options whose values are devices."""


def compose_text(plan: Plan) -> str:
    """Write a file with one service. Raises :class:`PlanError` as ``_service``."""
    return "\n".join(["services:", "  llama-server:", *(f"    {line}" for line in _service(plan))])


def compose_fleet(fleet: Fleet) -> str:
    """Write the services, each with a port of its own.

    If not all models fit together, only those that are loaded at the start run without being asked for. The others have
    a profile each, and a comment lists the sets that fit together.

    Raises :class:`PlanError` if no image has a plan's devices, and for two names that would be the same.
    """
    names = distinct(fleet, _service_name)
    is_one_set = len(fleet.sets[0].models) == len(fleet.models)
    lines = [] if is_one_set else [f"# {line}" for line in _comments(fleet, names)]
    lines.append("services:")
    for number, each in enumerate(fleet.models):
        name = json.dumps(names[each.name])
        own = _service(each.plan, PORT + number)
        if not is_one_set and not each.is_resident:
            own.append(f"profiles: [{name}]")
        lines += [f"  {name}:", *(f"    {line}" for line in own)]
    return "\n".join(lines)


def _service_name(name: str) -> str:
    """Name a service: its profile must have two characters at least."""
    safe = file_name(name)
    return safe if len(safe) > 1 else f"model-{safe}"


def _comments(fleet: Fleet, names: Mapping[str, str]) -> Iterator[str]:
    first = [names[each.name] for each in fleet.models if each.is_resident]
    if first:
        yield f"docker compose up -d starts {', '.join(first)}."
    yield "docker compose up -d NAME starts another model, and docker compose stop NAME ends one."
    if len(fleet.sets[0].models) == fleet.any_together:
        many = f"Any {fleet.any_together} of them fit together" if fleet.any_together > 1 else "One of them fits"
        yield f"Compose ends none by itself. {many}, and no more."
        return
    yield "Compose ends none by itself. These fit together:"
    for each in fleet.sets:
        yield f"  {', '.join(names[name] for name in each.models)}"


@dataclass(frozen=True)
class Container:
    """A container with llama-server that runs a plan.

    Attributes:
        image: llama.cpp's image with the backend of the plan's devices.
        options: The words of each option, with paths in the container.
        files: Path in the container of each file of this machine.
        devices: Lines of a compose file that lend it devices.
    """

    image: str
    options: tuple[tuple[str, ...], ...]
    files: Mapping[str, str]
    devices: tuple[str, ...]


def _service(plan: Plan, port: int = PORT) -> list[str]:
    """Write a service with the image for the plan's devices, each file of the model mounted, and the plan's arguments.

    ``port`` is on this machine. In the container it is always ``PORT``, where the image checks the health. Raises
    :class:`PlanError` if no image has the plan's devices.
    """
    made = container(plan)
    return [
        f"image: {_scalar(made.image)}",
        "command:",
        "  [",
        *(f"    {', '.join(map(_scalar, words))}," for words in made.options),
        "  ]",
        "ports:",
        f'  - "127.0.0.1:{port}:{PORT}"',
        "volumes:",
        *(f"  {line}" for line in _volumes(made.files)),
        *made.devices,
    ]


def container(plan: Plan) -> Container:
    """Describe the container of ``plan``. Raises :class:`PlanError` if no image has its devices."""
    values, files = with_absolute_paths(plan), _Files()
    named = [name for each in values if each.option.name in _DEVICES for name in each.value.split(",")]
    ending, devices = _backend((*plan.breakdown.devices, *named))
    options = [files.mounted(each).words for each in values]
    for words in options:
        check_line(words)
    options += [["--host", "0.0.0.0"], ["--port", str(PORT)]]
    return Container(_IMAGE + ending, tuple(map(tuple, options)), files.targets, tuple(devices))


def _backend(names: Iterable[str]) -> tuple[str, list[str]]:
    kinds = {re.sub(r"\d+$", "", name) for name in names if name != "none"} or {""}
    if len(kinds) > 1:
        raise PlanError(
            f"no image of llama.cpp has {' and '.join(sorted(kinds))} devices, which this plan uses: choose with -dev"
        )
    (kind,) = kinds
    if kind not in _BACKENDS:
        raise PlanError(f"no image of llama.cpp has {kind} devices, which this plan uses: use another format")
    return _BACKENDS[kind]


class _Files:
    """Files of this machine, and their paths in the container."""

    def __init__(self) -> None:
        self.targets: dict[str, str] = {}

    def mounted(self, argument: OptionValue) -> OptionValue:
        """Return ``argument`` with paths in the container."""
        if not argument.option.is_file:
            return argument
        scaled = argument.option.name == "--lora-scaled"
        return replace(argument, value=",".join(self._target(part, scaled) for part in argument.parts))

    def _target(self, path: str, scaled: bool) -> str:
        path, colon, scale = path.rpartition(":") if scaled else (path, "", "")
        name, folder = os.path.basename(path), "/models"
        while any(target == f"{folder}/{name}" and source != path for source, target in self.targets.items()):
            folder += "/more"
        self.targets |= {file: f"{folder}/{os.path.basename(file)}" for file in split_files(path)}
        return f"{folder}/{name}{colon}{scale}"


def _volumes(files: Mapping[str, str]) -> Iterable[str]:
    """Write a read-only mount of each file: of files, since those of a cache are often links to elsewhere."""
    for source, target in files.items():
        yield '- type: "bind"'
        yield f"  source: {_scalar(source)}"
        yield f"  target: {_scalar(target)}"
        yield "  read_only: true"


def _scalar(word: str) -> str:
    """Quote a text for YAML, in which compose takes ``$`` for a variable."""
    return json.dumps(word.replace("$", "$$"), ensure_ascii=False)
