"""What a command line will need of llama.cpp, begun before the command line is parsed.

A guess, made from the words alone: where it is wrong, the work is for nothing, and the answer the same.
"""

from __future__ import annotations

import os
from itertools import pairwise

from fitter.llama import process

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from fitter.llama.worker import Session

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

    def read(session: Session) -> None:
        if model:
            session.header(model)

    specs = _values(args, "--gpu")
    if args[0] in _ONE_WORKER or not specs:
        # A second process would take memory of a real device before it is asked what it has free.
        process.prestart(read)
    elif model is None or any(word.startswith(_PLACEMENT) for word in args):
        process.prestart(read, None)
    else:
        # What takes longest has a processor to itself; the header is read soon enough when it is asked for.
        process.prestart(None, lambda session: _load(session, model, specs))
    return True


def _values(args: Sequence[str], option: str) -> list[str]:
    """The values of an option, wherever they are."""
    after = [value for word, value in pairwise(args) if word == option]
    return after + [word.partition("=")[2] for word in args if word.startswith(option + "=")]


def _load(session: Session, model: str, specs: Sequence[str]) -> None:
    """Load a model on the one device that it may well fit on."""
    from fitter.llama.client import describe
    from fitter.llama.types import Params
    from fitter.machine.gpu import parse_gpus

    devices = parse_gpus(specs)
    if len(devices) == 1 and os.path.getsize(model) <= devices[0].free:
        session.configure(describe(devices))
        session.model_info(model, Params(devices=(devices[0].name,)))
