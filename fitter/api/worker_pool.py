"""Ask several workers at the same time, each in a thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from fitter.llama.client import Worker


def ask_in_threads(
    workers: Sequence[Worker], ask: Callable[[Worker], object], stop: Callable[[], object], *, dismiss: bool = True
) -> None:
    """Call ``ask`` with every worker, each call in a thread, and wait until all have returned.

    Args:
        workers: Started workers: only one thread at a time may take a process that was started early.
        ask: Asks one worker all remaining questions.
        stop: Called after the first error; makes the other calls return.
        dismiss: Whether to dismiss the workers after an error.

    Raises:
        Exception: The first error of ``ask``.
    """
    with ThreadPoolExecutor(len(workers)) as pool:
        try:
            for done in [pool.submit(ask, worker) for worker in workers]:
                done.result()
        except BaseException:
            # the pool waits for its threads, so they must end
            stop()
            for worker in workers if dismiss else ():
                worker.dismiss()
            raise
