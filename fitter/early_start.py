"""Start the work that a command line needs of llama.cpp before it is parsed.

A guess from the words alone: a wrong guess wastes the work, and changes no answer.
"""

from __future__ import annotations

import functools
import os
from itertools import pairwise

from fitter import system
from fitter.llama.processes.worker_environment import of_llama_cpp
from fitter.llama.worker import process

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from fitter.llama.worker.process import Then

_ONE_WORKER = ("devices", "inspect", "calibrate", "explore")
_NO_WORKER = ("backend", "diff", "history", "llama-cpp", "serve")
_MANY_WORKERS = ("lock", "check")
_MOST_WORKERS = 4
_HELD = "held "
"""Beginning of the word for a load whose tensors wait."""

_OF = " of model "
"""Text in the word between the devices and the model's file."""

_QUICK = frozenset({"-h", "--help", "--version", "--catalogue"})
_PLACEMENT = (
    *("-ngl", "--gpu-layers", "--n-gpu-layers", "-ts", "--tensor-split", "-sm", "--split-mode", "-mg", "--main-gpu"),
    *("-dev", "--device", "-ot", "--override-tensor", "-cmoe", "--cpu-moe", "-ncmoe", "--n-cpu-moe", "--mtp"),
)
"""Options that change how a model is loaded, or the beginning of their names."""
_FILES = frozenset({"-md", "--model-draft", "--spec-draft-model", "-mm", "--mmproj", "--lora"})
"""Options whose value is a file beside the model."""


def begin(args: Sequence[str]) -> bool:
    """Start the workers that ``args`` will need; return whether ``fitter.api`` uses them."""
    named = _values(args, "--llama-cpp")
    if not args or args[0] in _NO_WORKER or not _QUICK.isdisjoint(args) or _is_by_library(args, named):
        # without a worker, or with none that is a plain one
        return False
    prestart = functools.partial(process.prestart, variables=of_llama_cpp(named[-1] if named else None))
    if args[0] in _MANY_WORKERS:
        for _ in range(min(system.processors(), _MOST_WORKERS)):
            prestart(lambda word: None)
        return False
    model = next(
        (
            word
            for before, word in pairwise(("", *args))
            if before not in _FILES and word.endswith(".gguf") and os.path.isfile(word)
        ),
        None,
    )

    url = next((word for before, word in pairwise(("", *args)) if _is_address(before, word)), None)

    def read(_: object) -> Then:
        return lambda session: session.header(model) if model else None

    specs = _values(args, "--gpu")
    if args[0] in _ONE_WORKER or not specs or _values(args, "--rpc"):
        # A second process would take memory of a real device before it is asked what it has free; and an rpc-server
        # talks to one at a time.
        prestart(read)
    elif (model is None and url is None) or any(word.startswith(_PLACEMENT) for word in args):
        prestart(_sleep)
        prestart(read)
    else:
        local = model
        loader = prestart(lambda word: load(local, word))
        # where a header was kept takes imports to find out, so that is told later
        model = model or stored_header(url or "")
        description, is_held = _guess(model, specs) if model else ("", False)
        if loader is not None:
            of = f"{_OF}{model}" if description and not local else ""
            loader.wake(f"{_HELD if is_held else ''}{description}{of}")
        # What this process and the copy both need is imported once.
        from fitter.llama import client  # noqa: F401

        # A load that is all there is to wait for has a processor to itself: the header is read when it is asked for.
        prestart(_sleep if description and not is_held else read)
    return True


def _is_by_library(args: Sequence[str], named: Sequence[str]) -> bool:
    """Return whether a CUDA backend answers for described cards; its worker needs it from the start."""
    if profiles := _values(args, "--profile"):
        return profiles[-1] != "cuda"
    return bool(named and _values(args, "--gpu")) and os.path.isfile(os.path.join(named[-1], "libggml-cuda.so"))


def _sleep(word: Callable[[], str]) -> None:
    word()


def _values(args: Sequence[str], option: str) -> list[str]:
    """Return the values of an option, wherever they are."""
    after = [value for word, value in pairwise(args) if word == option]
    return after + [word.partition("=")[2] for word in args if word.startswith(option + "=")]


def _is_address(before: str, word: str) -> bool:
    return before not in _FILES and "://" in word and ".gguf" in word and not word.startswith("-")


def stored_header(url: str) -> str | None:
    """Return the last fetched header of a remote model, which may be outdated."""
    try:
        from fitter.model.files import remote_files

        files = remote_files.stored_files(url)
    except Exception:
        # It will be said when it is asked for.
        return None
    # a word is one line
    return str(files[0]) if files and "\n" not in str(files[0]) else None


def _guess(model: str, specs: Sequence[str]) -> tuple[str, bool]:
    """Guess the devices to load a model on; return their description and whether the tensors wait.

    One device that the model may fit on, or all devices if it is too large; an empty text for no guess.
    """
    from fitter.errors import FitterError
    from fitter.llama.virtual import describe, is_surely_spilled
    from fitter.machine.gpu import parse_gpus

    try:
        devices, size = parse_gpus(specs), os.path.getsize(model)
        is_held = is_surely_spilled(size, devices)
        is_wanted = is_held or (len(devices) == 1 and size <= devices[0].free)
        return (describe(devices), is_held) if is_wanted else ("", False)
    except (FitterError, OSError):
        # It will be said when it is asked for.
        return "", False


def load(model: str | None, word: Callable[[], str]) -> Then | None:
    """Load a model, or the one in the word, on the devices in the word."""
    from fitter.llama.build import library
    from fitter.llama.load.first_load import Ahead

    library.load_cells()
    try:
        library.prepare()
    except Exception:
        # It will be said again by the first request, and the word must not be taken for one.
        word()
        return None
    description, _, named = word().partition(_OF)
    is_held = description.startswith(_HELD)
    description = description.removeprefix(_HELD)
    try:
        ahead = Ahead(model or named, description, is_held=is_held) if description else None
    except Exception:
        # As above, and it is no reason to lose a worker.
        return None
    return None if ahead is None else lambda session: session._keep(ahead)
