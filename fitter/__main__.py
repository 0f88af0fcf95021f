"""``python -m fitter`` is the command ``fitter``. What takes longest begins before the imports."""

from __future__ import annotations

import gc
import os
import signal
import sys

from fitter import early
from fitter.llama import process

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn

_INTERRUPTED = 128 + signal.SIGINT


def main() -> NoReturn:
    """Run the process's command line, and end the process with its exit status."""
    # A process this short has nothing to gain from collecting garbage, nor from taking itself apart at its end.
    gc.disable()
    status = _run()
    process.end_early()
    os._exit(status)


def _run() -> int:
    is_default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_default:
        # An import that is interrupted prints what it was doing.
        signal.signal(signal.SIGINT, _leave)
    args = sys.argv[1:]
    has_begun = early.begin(args)
    from fitter import cli

    if has_begun:
        # Whoever asks a worker imports it sooner or later.
        import fitter.api  # noqa: F401
    try:
        if is_default:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        status = cli.main(args)
        sys.stderr.flush()
        return status
    except KeyboardInterrupt:
        return _INTERRUPTED


def _leave(*_: object) -> None:
    process.end_early()
    os._exit(_INTERRUPTED)


if __name__ == "__main__":
    main()
