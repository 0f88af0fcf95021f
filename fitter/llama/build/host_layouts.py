"""The layouts that this machine's processor has of its own for weights, such as AMX's: left out where they crash."""

from __future__ import annotations

import functools

from fitter.errors import LibraryError
from fitter.llama.build import library as native
from fitter.llama.processes import worker_environment


@functools.cache
def settle() -> bool:
    """Have every load of this process do without them where its llama.cpp crashes with them; whether that is so.

    It is tried once of each build, in a process of its own. Raises ``LibraryError`` if there is no llama.cpp.
    """
    backend = native.open_backend()
    if worker_environment.is_canary() or not backend.fitter_virtual_has_own_layouts():
        return False
    from fitter.llama.build import verdicts

    try:
        problem = verdicts.problem_of_computing(native.loaded_build(), native.own_libraries())
    except LibraryError:
        # It could not be tried now: no reason to do without.
        return False
    if problem:
        backend.fitter_virtual_leave_out_own_layouts()
    return bool(problem)
