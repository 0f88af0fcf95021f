"""``python -m fitter`` runs the command ``fitter``. The slowest work is started before the imports."""

from __future__ import annotations

import gc
import os
import signal
import sys

from fitter import early, streams
from fitter.errors import EXIT_FAILURE
from fitter.llama import memory_limit, process
from fitter.text import printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn

_INTERRUPTED = 128 + signal.SIGINT


def main() -> NoReturn:
    """Run the process's command line, and end the process with its exit status."""
    # Garbage collection and interpreter shutdown only cost time in a process this short.
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
        # An interrupted import would print a traceback.
        signal.signal(signal.SIGINT, _leave)
    args = sys.argv[1:]
    has_begun = early.begin(args)
    if args[:1] != ["calibrate"]:
        # After the early workers, which are forks of a process with one thread. To calibrate is to fill memory.
        memory_limit.watch(_run_out)
    from fitter import cli

    if has_begun:
        # Every command that uses a worker needs it.
        import fitter.api  # noqa: F401
    try:
        if is_default:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        status = cli.main(args)
        sys.stderr.flush()
        return status
    except KeyboardInterrupt:
        return _INTERRUPTED


def _run_out(why: str) -> NoReturn:
    """End the process because it takes too much memory."""
    print(f"fitter: error: {why}", file=sys.stderr, flush=True)
    process.end_early()
    os._exit(EXIT_FAILURE)


def _fail(error: Exception) -> int:
    """Report an unexpected error in one line. Python itself would exit with status 1, which means "does not fit"."""
    if sys.flags.dev_mode:
        sys.excepthook(type(error), error, error.__traceback__)
    if isinstance(error, ImportError):
        message = f"fitter cannot be imported ({error}): reinstall llama-fitter"
    elif isinstance(error, MemoryError):
        message = "the memory that this process may take ran out: end other programs, or raise its limit (ulimit)"
    else:
        trace = error.__traceback__
        while trace is not None and trace.tb_next is not None:
            trace = trace.tb_next
        place = f" in {os.path.basename(trace.tb_frame.f_code.co_filename)}:{trace.tb_lineno}" if trace else ""
        what = f"{type(error).__name__}{place}: {error}"
        message = f"{what}; this is a bug: run it again with PYTHONDEVMODE=1 and report the traceback"
    print(f"fitter: error: {printable(message)}", file=sys.stderr, flush=True)
    return EXIT_FAILURE


def _leave(*_: object) -> None:
    process.end_early()
    os._exit(_INTERRUPTED)


if __name__ == "__main__":
    main()
