"""The order of a search: which plan is asked for first, and what is asked once more before one goes out.

Each step takes the best plan so far and gives it back, or a better one. What is better is said in ``objective``; what
is known in ``known``; what could be placed in ``proposals``, and how it is measured and corrected in ``settling``;
which context in ``contexts``; which devices in ``devices`` and ``remotes``. What may be given up comes after all of
it, in ``levers``. Bytes.
"""

from __future__ import annotations

from collections.abc import Callable

from fitter.llama.types import Params
from fitter.planning import context_limit
from fitter.planning.devices import Devices, in_better_order
from fitter.planning.explain import Choice
from fitter.planning.given import usable_devices
from fitter.planning.known import Calls, CutShort, Known
from fitter.planning.remotes import worth_their_network
from fitter.planning.request import Measure, Record, Request
from fitter.planning.shared import remembered
from fitter.planning.trial import Trial


def search(
    request: Request,
    measure: Measure,
    record: Record,
    on_candidate: Callable[[Params], None] = lambda params: None,
    on_choice: Callable[[Choice], None] = lambda choice: None,
) -> Trial:
    """The best trial that fits, or where none does the one that misses least.

    ``on_candidate`` is told of what may turn out to be the answer, as soon as that can be said, ``on_choice`` of what
    was chosen over what by its price. Raises whatever ``measure`` raises: llama.cpp refusing the user's own parameters
    is an answer too. A time limit is raised where nothing that fits was found before; else it is the best so far.
    """
    calls = Calls(remembered(measure), record, on_candidate, on_choice)
    taking = context_limit.usable(request, usable_devices(request))
    try:
        return _best(Known(request, taking, calls))
    except CutShort as cut:
        return cut.best


def _best(known: Known) -> Trial:
    known = in_better_order(known)
    devices = Devices(known)
    best = devices.without_idle(known)
    best = devices.with_more_context(best)
    best = worth_their_network(known, best)
    devices.forget_remotes(best)
    best = devices.without_doubtful(best)
    return devices.on_others(best)
