"""``python -m fitter`` is the command ``fitter``. What takes longest begins before the imports."""

from __future__ import annotations

import os
import signal
import sys

from fitter.llama import process

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

_WORKERS = {"devices": 1, "inspect": 1, "calibrate": 1, "backend": 0}
"""Worker processes that a command will ask; ``fit``, which needs no name, searches with one and confirms with one."""

_WORKERS_OF_FIT = 2
_INTERRUPTED = 128 + signal.SIGINT


def main() -> int:
    """Run the process's command line and return its exit status."""
    is_default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_default:
        # An import that is interrupted prints what it was doing.
        signal.signal(signal.SIGINT, _leave)
    args = sys.argv[1:]
    if count := workers(args):
        process.prestart(count)
    from fitter import cli

    if count:
        # Whoever asks a worker imports it sooner or later.
        import fitter.api  # noqa: F401
    try:
        if is_default:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        return cli.main(args)
    except KeyboardInterrupt:
        return _INTERRUPTED


def workers(args: Sequence[str]) -> int:
    """How many plain workers ``args`` will need, as far as can be said without parsing them."""
    if not args or not {"-h", "--help", "--version", "--catalogue"}.isdisjoint(args):
        return 0
    if any(word.startswith("--profile") for word in args):
        # not a plain one
        return 0
    return _WORKERS.get(args[0], _WORKERS_OF_FIT)


def _leave(*_: object) -> None:
    process.end_early()
    os._exit(_INTERRUPTED)


if __name__ == "__main__":
    raise SystemExit(main())
