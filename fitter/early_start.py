"""Start the workers that a command will need before its imports."""

from __future__ import annotations

from fitter import system
from fitter.llama.worker import process

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

_NO_WORKER = ("backend", "diff", "history", "llama-cpp", "serve")
_MANY_WORKERS = ("lock", "check")
_MOST_WORKERS = 4
_QUICK = frozenset({"-h", "--help", "--version", "--catalogue"})
_OTHER_LLAMA_CPP = ("--llama-cpp", "--profile")
"""Options that give a worker an environment of its own."""


def begin(args: Sequence[str]) -> bool:
    """Start the workers of a command; return whether ``fitter.api`` uses them.

    One worker loads models. Another one sleeps until a tokenizer is to be read.
    """
    if not args or args[0] in _NO_WORKER or not _QUICK.isdisjoint(args):
        return False
    if any(word.startswith(_OTHER_LLAMA_CPP) for word in args):
        return False
    if args[0] in _MANY_WORKERS:
        for _ in range(min(system.processors(), _MOST_WORKERS)):
            process.prestart()
        return False
    if system.CAN_FORK:
        # this process and both forks need it
        import fitter.llama.types  # noqa: F401
    process.prestart()
    process.prestart(is_asleep=True)
    return True
