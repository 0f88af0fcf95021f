"""Layouts of weights for this machine's processor, such as AMX's: avoided where they crash."""

from __future__ import annotations

import functools

from fitter.errors import LibraryError
from fitter.llama.build import library as native
from fitter.llama.processes import worker_environment


@functools.cache
def settle() -> bool:
    """Try the processor's own layouts once for each build, in another process; let this process avoid them if they
    crash.

    Returns whether they are avoided. Raises ``LibraryError`` if there is no llama.cpp.
    """
    backend = native.open_backend()
    if worker_environment.is_canary() or not backend.fitter_virtual_has_own_layouts():
        return False
    from fitter.llama.build import verdicts

    try:
        problem = verdicts.problem_of_computing(native.loaded_build(), native.own_libraries())
    except LibraryError:
        # without a result, use them
        return False
    if problem:
        backend.fitter_virtual_leave_out_own_layouts()
    return bool(problem)
