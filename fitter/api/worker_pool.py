"""Several workers at the same time, each asked by a thread of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from fitter.llama.client import Worker


def ask_in_threads(
    workers: Sequence[Worker], ask: Callable[[Worker], object], stop: Callable[[], object], *, dismiss: bool = True
) -> None:
    """Call ``ask`` with every worker, each call in a thread, and wait until all have returned.

    Args:
        workers: Workers that have been started: a process that was started early may only be taken by one thread at a
            time.
        ask: Asks one worker all that is left to ask.
        stop: Is called where a call raises; the other calls must then return.
        dismiss: Whether the workers are dismissed as well where a call raises.

    Raises:
        Exception: the first error of ``ask``.
    """
    with ThreadPoolExecutor(len(workers)) as pool:
        try:
            for done in [pool.submit(ask, worker) for worker in workers]:
                done.result()
        except BaseException:
            # The pool waits for its threads, so they must have nothing left to do or to wait for.
            stop()
            for worker in workers if dismiss else ():
                worker.dismiss()
            raise
