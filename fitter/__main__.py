"""Run the command ``fitter`` by ``python -m fitter``. The slowest work starts before the imports."""

from __future__ import annotations

import sys

from fitter.llama.processes import interpreter

# ``python -m`` has the current directory first: nothing from there is imported, unless fitter itself is there.
sys.path[:] = interpreter.search_path()

import errno  # noqa: E402
import gc  # noqa: E402
import os  # noqa: E402
import signal  # noqa: E402
import warnings  # noqa: E402

from fitter import early_start, system  # noqa: E402
from fitter.errors import EXIT_FAILURE  # noqa: E402
from fitter.llama.processes import memory_limit  # noqa: E402
from fitter.llama.worker import process  # noqa: E402
from fitter.text import printable  # noqa: E402

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn

_INTERRUPTED = 128 + signal.SIGINT
_ended_by = signal.SIGINT
"""The signal that interrupted this process."""


def main() -> NoReturn:
    """Run the process's command line, and end the process with its exit status."""
    # Garbage collection and interpreter shutdown only cost time in a process this short.
    gc.disable()
    early_start.open_standard()
    try:
        status = _say(problem) if (problem := interpreter.stack_problem()) else _run()
    except Exception as error:
        status = _fail(error)
    _tidy()
    os._exit(128 + _ended_by if status == _INTERRUPTED else status)


def _run() -> int:
    # what is ignored, as SIGHUP by nohup, stays so
    handled = [number for number, usual in _USUAL.items() if signal.getsignal(number) is usual]
    for number in handled:
        # An interrupted import would print a traceback.
        signal.signal(number, _leave)
    warnings.showwarning = _warn
    args = sys.argv[1:]
    has_begun = early_start.begin(args)
    if args[:1] != ["calibrate"]:
        # After the early workers, which are forks of a process with one thread. To calibrate is to fill memory.
        memory_limit.watch(_run_out)
    from fitter import cli

    if has_begun:
        # Every command that uses a worker needs it.
        import fitter.api.fits.fit_model  # noqa: F401
    try:
        for number in handled:
            signal.signal(number, _interrupt)
        system.watch_interrupts(_leave)
        status = cli.main(args)
        sys.stderr.flush()
        return status
    except KeyboardInterrupt:
        return _INTERRUPTED


def _run_out(why: str) -> NoReturn:
    """End the process because it uses too much memory."""
    print(f"fitter: error: {why}", file=sys.stderr, flush=True)
    _tidy()
    os._exit(EXIT_FAILURE)


def _fail(error: Exception) -> int:
    """Report an unexpected error in one line. Python itself would exit with status 1, which means "does not fit"."""
    if sys.flags.dev_mode:
        sys.excepthook(type(error), error, error.__traceback__)
    if isinstance(error, ImportError):
        message = f"fitter cannot be imported ({error}): reinstall llama-fitter"
    elif isinstance(error, MemoryError):
        message = "the memory that this process may take ran out: end other programs, or raise its limit (ulimit)"
    elif isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        message = "this process may open no more files: raise their limit (ulimit -n)"
    else:
        trace = error.__traceback__
        while trace is not None and trace.tb_next is not None:
            trace = trace.tb_next
        place = f" in {os.path.basename(trace.tb_frame.f_code.co_filename)}:{trace.tb_lineno}" if trace else ""
        what = f"{type(error).__name__}{place}: {error}"
        message = f"{what}; this is a bug: run it again with PYTHONDEVMODE=1 and report the traceback"
    return _say(message)


def _say(message: str) -> int:
    print(f"fitter: error: {printable(message)}", file=sys.stderr, flush=True)
    return EXIT_FAILURE


def _warn(message: Warning | str, *_: object, **__: object) -> None:
    print(f"fitter: warning: {printable(str(message))}", file=sys.stderr, flush=True)


_USUAL = {signal.SIGINT: signal.default_int_handler, **dict.fromkeys(system.ENDING, signal.SIG_DFL)}


def _interrupt(number: int, _: object) -> None:
    """End workers and remove directories on any signal that ends the process."""
    global _ended_by
    _ended_by = signal.Signals(number)
    raise KeyboardInterrupt


def _leave(number: int, _: object) -> None:
    _tidy()
    os._exit(128 + number)


def _tidy() -> None:
    process.end_early()
    # an interrupted import of the module has made no directory
    if remove := getattr(sys.modules.get("fitter.storage"), "remove_temporary", None):
        remove()


if __name__ == "__main__":
    main()
