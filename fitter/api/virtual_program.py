"""``fitter backend -- PROGRAM``: what a program of llama.cpp needs to see virtual devices, and to compute on them."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from pathlib import Path

from fitter import system
from fitter.errors import LibraryError, UsageError
from fitter.llama.build import build_folder, elf, library, linking
from fitter.llama.build.functions import backend_rules, epoch_of
from fitter.llama.client import Worker
from fitter.llama.types import VirtualDevice, describe
from fitter.parameters.values import shown

_OF_GGML = b"ggml_backend_dev_"
"""A part of the names of ggml's functions, which a program has inside if llama.cpp is built into it."""


def path_of_program(name: str) -> str:
    """Return the path of a program by its name on the PATH, or by a path.

    Raises:
        UsageError: There is none.
        LibraryError: llama.cpp is built into it, so that no backend can be added.
    """
    path = build_folder.on_path(name) or os.path.abspath(os.path.expanduser(name))
    if not os.path.isfile(path) or not os.access(path, os.X_OK):
        raise UsageError(f"{shown(name)} is no program: name one on the PATH, or give its path")
    if elf.is_binary(path) and not _is_linked(path) and _has_inside(path, _OF_GGML):
        raise LibraryError(
            f"{path} has llama.cpp built into it, so it sees no other devices: take one with libggml beside it"
        )
    return path


def environment_of(program: str, devices: Sequence[VirtualDevice]) -> dict[str, str]:
    """Return the variables with which ``program``, and all that it starts, see ``devices`` and compute on them.

    Raises:
        UsageError: This system cannot load a library into a program.
        LibraryError: The program's llama.cpp is none that fitter can use.
    """
    if not system.PRELOAD:
        raise UsageError("a program can be shown virtual devices on Linux alone: plan for them with --gpu here")
    preload = [library.preload_path(), *filter(None, os.environ.get(system.PRELOAD, "").split(":"))]
    variables = {
        "FITTER_BACKEND": str(library.backend_path()),
        "FITTER_DEVICES": describe(devices),
        "FITTER_COMPUTES": "1",
        system.PRELOAD: ":".join(map(str, preload)),
    }
    if elf.is_binary(program) and _is_linked(program):
        with Worker(llama_cpp=program) as worker:
            variables["FITTER_BUILD"] = _described(worker.build().ggml)
    return variables


def _described(ggml: str) -> str:
    """Describe a build by its version of ggml, for ``FITTER_BUILD``."""
    epoch = epoch_of(ggml)
    has_params = -1 if epoch.graph_optimize_has_params is None else int(epoch.graph_optimize_has_params)
    rules = ",".join(name for name, has in backend_rules(ggml).items() if has)
    return ";".join([ggml, epoch.last_op, str(has_params), epoch.larger_alone_text, rules])


def _is_linked(program: str) -> bool:
    return any(name.startswith(("libggml", "libllama")) for name in linking.linked(program))


def _has_inside(program: str, words: bytes) -> bool:
    with Path(program).open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return content.find(words) >= 0
