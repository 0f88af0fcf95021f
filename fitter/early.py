"""What a command line will need of llama.cpp, begun before the command line is parsed.

A guess, made from the words alone: where it is wrong, the work is for nothing, and the answer the same.
"""

from __future__ import annotations

import os
from itertools import pairwise

from fitter.llama import process

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from fitter.llama.process import Then

_ONE_WORKER = ("devices", "inspect", "calibrate")
_NO_WORKER = ("backend",)
_QUICK = frozenset({"-h", "--help", "--version", "--catalogue"})
_PLACEMENT = (
    *("-ngl", "--gpu-layers", "--n-gpu-layers", "-ts", "--tensor-split", "-sm", "--split-mode", "-mg", "--main-gpu"),
    *("-dev", "--device", "-ot", "--override-tensor", "-cmoe", "--cpu-moe", "-ncmoe", "--n-cpu-moe"),
)
"""Options that change how a model is loaded, or the beginning of their names."""


def begin(args: Sequence[str]) -> bool:
    """Start the workers that ``args`` will ask; returns whether there are any."""
    if not args or args[0] in _NO_WORKER or not _QUICK.isdisjoint(args) or _values(args, "--profile"):
        # without a worker, or with none that is a plain one
        return False
    model = next((word for word in args if word.endswith(".gguf") and os.path.isfile(word)), None)

    def read(_: object) -> Then:
        return lambda session: session.header(model) if model else None

    specs = _values(args, "--gpu")
    if args[0] in _ONE_WORKER or not specs or _values(args, "--rpc"):
        # A second process would take memory of a real device before it is asked what it has free; and an rpc-server
        # talks to one at a time.
        process.prestart(read)
    elif model is None or any(word.startswith(_PLACEMENT) for word in args):
        process.prestart(_sleep)
        process.prestart(read)
    else:
        loader = process.prestart(lambda word: _load(model, word))
        description = _guess(model, specs)
        if loader is not None:
            loader.wake(description)
        # What this process and the copy both need is imported once.
        from fitter.llama import client  # noqa: F401

        # A load, which takes longest, has a processor to itself: the header is then read when it is asked for.
        process.prestart(_sleep if description else read)
    return True


def _sleep(word: Callable[[], str]) -> None:
    word()


def _values(args: Sequence[str], option: str) -> list[str]:
    """The values of an option, wherever they are."""
    after = [value for word, value in pairwise(args) if word == option]
    return after + [word.partition("=")[2] for word in args if word.startswith(option + "=")]


def _guess(model: str, specs: Sequence[str]) -> str:
    """The description of the one device that a model may well fit on; empty without one."""
    from fitter.errors import FitterError
    from fitter.llama.virtual import describe
    from fitter.machine.gpu import parse_gpus

    try:
        devices = parse_gpus(specs)
        return describe(devices) if len(devices) == 1 and os.path.getsize(model) <= devices[0].free else ""
    except (FitterError, OSError):
        # It will be said when it is asked for.
        return ""


def _load(model: str, word: Callable[[], str]) -> Then | None:
    """Load a model on the device that the word describes."""
    from fitter.llama import library
    from fitter.llama.ahead import Ahead

    try:
        library.load_only_bindings()
        library.prepare()
        description = word()
        ahead = Ahead(model, description) if description else None
    except Exception:
        # As above, and it is no reason to lose a worker.
        return None
    return None if ahead is None else lambda session: session._keep(ahead)
