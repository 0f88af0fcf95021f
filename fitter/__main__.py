"""``python -m fitter`` is the command ``fitter``. What takes longest begins before the imports."""

from __future__ import annotations

import gc
import os
import signal
import sys

from fitter import early, streams
from fitter.errors import EXIT_FAILURE
from fitter.llama import process
from fitter.text import printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn

_INTERRUPTED = 128 + signal.SIGINT


def main() -> NoReturn:
    """Run the process's command line, and end the process with its exit status."""
    # A process this short has nothing to gain from collecting garbage, nor from taking itself apart at its end.
    gc.disable()
    streams.open_standard()
    try:
        status = _run()
    except Exception as error:
        status = _fail(error)
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


def _fail(error: Exception) -> int:
    """Say in one line what nobody has foreseen. Python's own end with status 1 would say that a model does not fit."""
    if sys.flags.dev_mode:
        sys.excepthook(type(error), error, error.__traceback__)
    if isinstance(error, ImportError):
        said = f"fitter cannot be imported ({error}): install llama-fitter again"
    else:
        trace = error.__traceback__
        while trace is not None and trace.tb_next is not None:
            trace = trace.tb_next
        place = f" in {os.path.basename(trace.tb_frame.f_code.co_filename)}:{trace.tb_lineno}" if trace else ""
        what = f"{type(error).__name__}{place}: {error}"
        said = f"{what}; this is a bug, please report it with what PYTHONDEVMODE=1 adds"
    print(f"fitter: error: {printable(said)}", file=sys.stderr, flush=True)
    return EXIT_FAILURE


def _leave(*_: object) -> None:
    process.end_early()
    os._exit(_INTERRUPTED)


if __name__ == "__main__":
    main()
