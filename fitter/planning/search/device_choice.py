"""Variants on other devices: fewer, others, or another first one, where that may be better.

Each function yields the variants to ask for next, one after the other; the caller asks each before it takes the next.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import islice

from fitter.planning.placing.float_sum import float_sum
from fitter.planning.placing.layer_sizes import HOST
from fitter.planning.placing.placement import Placement
from fitter.planning.pricing.objective import WORTH_SHARING, is_worth_a_load
from fitter.planning.pricing.trial import Trial
from fitter.planning.request.given import pinned_devices, user_chose_devices, user_chose_split
from fitter.planning.request.request import DeviceLimit
from fitter.planning.search import choices
from fitter.planning.search.expectations import expected_placement, expected_seconds, is_too_large, total_target
from fitter.planning.search.proposals import place_from
from fitter.planning.search.search_state import SearchState
from fitter.planning.search.variants import Answer, Variant, Variants

_SLOW = 0.7
"""A device with less than this share of the fastest one's bandwidth is slow.

With none, Qwen3 235B on an RTX 5090 and a GTX 1080 Ti takes 32 % longer for a prompt of 30,000 tokens."""

_MAX_FOR_LAST = 3
"""So many devices, the fastest first, are tested with the last layer alone.

With one, GLM-4.5 Air on three nearly full Arc Pro B60 (machine 102 of ``tools.search``) takes 1.9 times as long."""


def in_better_order(state: SearchState) -> SearchState:
    """Put the device first that streams weights of the host fastest, where that is estimated faster.

    In prompts, llama.cpp has the first device compute with the host's weights, over its own link (``op_offload``).
    """
    devices, n_ctx = state.devices, state.smallest_context
    if not state.chooses_devices or not is_too_large(state, n_ctx):
        return state
    prices = state.prices()
    # a remote device never computes with them, so its place does not matter
    local = [d for d in range(len(devices)) if not prices.is_remote(d)]
    remote = [d for d in range(len(devices)) if d not in local]
    seconds = {d: prices.streaming(d) for d in local}
    if not local or not is_worth_a_load(min(seconds.values()), seconds[local[0]]):
        return state
    first = min(local, key=lambda d: seconds[d])
    others = [d for d in local if d != first]
    reordered = state.on(tuple(devices[d] for d in (*remote, first, *others)))
    before, after = (expected_seconds(order, n_ctx) for order in (state, reordered))
    if not is_worth_a_load(after, before):
        return state
    state.callbacks.on_choice(choices.which_device_is_first(devices[first], after, devices[local[0]], before))
    return reordered


def others(variants: Variants) -> Iterator[Variant]:
    """Yield all of these, each function's in turn."""
    for each in (with_fewer_remotes, with_fewer, with_others, with_the_last_layer):
        yield from each(variants)


def with_fewer_remotes(variants: Variants) -> Iterator[Variant]:
    """Leave out remote devices that are not worth their network, as long as the plan gets better."""
    tested = set[tuple[DeviceLimit, ...]]()
    while group := next((each for each in _doubtful_remotes(variants.best) if each not in tested), None):
        tested.add(group)
        variants.price_best()
        before = variants.best.trial
        # a device that the plan has no use for may have one without them
        variant = variants.here._replace(devices=tuple(each for each in variants.devices if each not in group))
        yield variant
        chosen, other = variants.best.trial, before
        if chosen is before:
            other = variants.settle(variant).trial
        if choice := choices.are_remotes_worth_it(group, chosen, other):
            variants.best.state.callbacks.on_choice(choice)
    used, speeds = variants.best.trial.devices, variants.request.speeds
    variants.devices = tuple(
        each for each in variants.devices if each in used or each.name not in speeds or not speeds[each.name].is_remote
    )


def with_fewer(variants: Variants) -> Iterator[Variant]:
    """Leave out doubtful devices, whose part in every graph may cost too much, as long as the plan gets better."""
    before = None
    while before is not variants.best and not user_chose_devices(variants.request) and _is_priced(variants.best.trial):
        before, doubtful = variants.best, _doubtful(variants)
        yield from islice((each for each, is_small in doubtful if _promises(variants, each, is_small)), 1)


def with_others(variants: Variants) -> Iterator[Variant]:
    """Try other choices and orders of devices where the best plan is far from its bound or leaves a device idle.

    Where the user names the devices, some of them may get nothing if not all of the model is on them.
    """
    request, best = variants.request, variants.best.trial
    if not variants.devices or user_chose_split(request) or best.seconds is None:
        return
    is_at_bound = best.fits and not is_worth_a_load(1.0, variants.best.distance_at_its_context)
    if is_at_bound or ("devices" in request.fixed and not best.placement.is_spilled):
        return
    for likely, variant in _untested(variants):
        if variants.best.trial.fits and not _beats(likely, variants.best.trial):
            break
        yield variant


def with_the_last_layer(variants: Variants) -> Iterator[Variant]:
    """Try the last layer alone on each of the fastest devices where the best plan has nothing on any.

    It has no cache, so a device may take it at a context at which it takes no other layer. Also where llama.cpp keeps
    most weights of device layers on the host: each costs a split of the graph, and together more than devices save.
    """
    request, best = variants.request, variants.best.trial
    if "n_gpu_layers" in request.fixed or not _is_priced(best):
        return
    splits = best.breakdown.n_splits
    are_many = bool(best.params.devices) and splits is not None and splits[1] > request.n_layer
    is_idle = len(best.placement.idle) == len(best.devices)
    if is_idle or (are_many and not user_chose_devices(request) and variants.best.state.keeps_on_host):
        by_speed = sorted(variants.devices, key=lambda device: -request.speeds[device.name].bandwidth)
        groups = [(device,) for device in by_speed[:_MAX_FOR_LAST]]
        here = variants.here
        for devices in [variants.devices] if user_chose_devices(request) else groups:
            yield here._replace(devices=devices, last_layer=True)


def _is_priced(trial: Trial) -> bool:
    return trial.fits and trial.seconds is not None


def _doubtful(variants: Variants) -> Iterator[tuple[Variant, bool]]:
    """Yield untested choices of fewer devices, each with whether those left out hold little (or else are slow)."""
    best, small = variants.best.trial, _small(variants.best.trial)
    # an idle device may get something where another one is left out
    for group in dict.fromkeys((*small, *_slow(variants))):
        for devices in dict.fromkeys((best.used[0], best.devices)):
            others = variants.first_of_equal(device for device in devices if device not in group)
            variant = variants.here._replace(devices=others)
            if others and not variants.is_tested(variant):
                yield variant, group in small


def _slow(variants: Variants) -> list[tuple[DeviceLimit, ...]]:
    """Group the slow devices, whose part of the context may cost too much time: the slowest, then more of them."""
    best, of_request = variants.best.trial, variants.request.speeds
    speeds = {d: of_request[d.name].bandwidth for d in best.devices if best.breakdown.on(d.name).used}
    slow = sorted({speed for speed in speeds.values() if speed < _SLOW * max(speeds.values())})
    return [tuple(device for device in speeds if speeds[device] <= speed) for speed in slow]


def _promises(variants: Variants, variant: Variant, is_small: bool) -> bool:
    """Whether a plan on the devices of ``variant`` is worth its dummy loads, by the known compute buffers."""
    best, likely = variants.best.trial, _expected_seconds(variants, variant)
    if is_small and len(variant.devices) == 1:
        # known buffers include the pipeline's, which a single device does not need
        return math.isfinite(likely)
    if not (_beats(likely, best) or is_small or variants.state(variant).buffers.knows(False)):
        # buffers of a whole model are larger: each device has several, to work ahead
        likely = _expected_seconds(variants, variant, optimistic=True)
    return _beats(likely, best)


def _expected_seconds(variants: Variants, variant: Variant, *, optimistic: bool = False) -> float:
    state = _with_known_buffers(variants, variant)
    placement = expected_placement(state, variants.best.trial.params.n_ctx, optimistic=optimistic)
    return math.inf if placement is None else _seconds(variants, state, placement)


def _with_known_buffers(variants: Variants, variant: Variant) -> SearchState:
    """Return the state of a variant, with the compute buffers of the best plan unless that lost flash attention.

    On other devices llama.cpp may leave flash attention on, where buffers are gigabytes smaller.
    """
    state = variants.state(variant)
    return state if variants.best.trial.lost_flash else state.with_buffers_of(variants.best.state)


def _seconds(variants: Variants, state: SearchState, placement: Placement) -> float:
    """Estimate the seconds of a placement, to compare with what was expected of the best one.

    Where that took longer for its splits of the graph, a placement without weights on the host has none.
    """
    best, seconds = variants.best.trial, state.seconds(placement)
    is_split = best.placement.is_spilled and not placement.is_spilled
    return seconds * best.expected / best.seconds if is_split and best.expected and best.seconds else seconds


def _seconds_from_same_layer(variants: Variants, variant: Variant) -> float:
    """Estimate the seconds with the same first layer as the best plan, which takes a tenth of the time of a proposal.

    It tells enough of devices that have no more memory. Infinite on the devices of the best plan, and less on others,
    where they have no room for so many layers.
    """
    best, state = variants.best.trial, _with_known_buffers(variants, variant)
    state.prices()
    placement = place_from(state.situation(best.params.n_ctx, is_whole=False), best.placement.first)
    unknown = math.inf if variant == variants.here else -math.inf
    return _seconds(variants, state, placement) if placement else unknown


def _beats(likely: float, best: Trial) -> bool:
    return math.isfinite(likely) and (best.expected is None or is_worth_a_load(likely, best.expected))


def _untested(variants: Variants) -> list[tuple[float, Variant]]:
    """List untested choices of devices, each with its expected seconds, the most promising first."""
    found: dict[float, Variant] = {}
    least = _seconds_from_same_layer(variants, variants.here)
    # of choices with the same expectation the smallest counts: more devices are of no use
    for devices in dict.fromkeys(map(variants.first_of_equal, sorted(_other_orders(variants), key=len))):
        variant = variants.here._replace(devices=devices)
        is_larger = total_target(variants.state(variant)) > total_target(variants.best.state)
        if not variants.is_tested(variant) and (is_larger or _seconds_from_same_layer(variants, variant) < least):
            likely = _expected_seconds(variants, variant)
            if not all(device.is_default for device in devices):
                # other micro batches may save more
                likely /= 1 - WORTH_SHARING / 2
            found.setdefault(likely, variant)
    return sorted(found.items(), key=lambda each: each[0])


def _other_orders(variants: Variants) -> list[tuple[DeviceLimit, ...]]:
    """List choices of devices: some in the user's order, and all by size and by speed."""
    devices, request, used = variants.devices, variants.request, variants.here.devices
    if not variants.best.trial.fits:
        return [devices] if len(devices) > len(variants.first.devices) else []
    by_size = sorted(devices, key=lambda device: -device.target)
    by_speed = sorted(devices, key=lambda device: -request.speeds[device.name].bandwidth)
    groups = [by_size[:count] for count in range(1, len(devices) + 1)]
    groups += [by_speed[:count] for count in range(1, len(devices))]
    groups += [[device for device in used if device != removed] for removed in used]
    wider = [[*used, device] for device in devices if device not in used]
    # not a set: the order must be the same in each run
    orders = dict.fromkeys(tuple(d for d in devices if d in group) for group in (*groups, *wider) if group)
    if "devices" in request.fixed or len(devices) < 2:
        return list(orders)
    for group in (used, devices, *(group for group in wider if not group[-1].is_default)):
        orders |= dict.fromkeys((tuple(d for d in by_size if d in group), tuple(d for d in by_speed if d in group)))
    return list(orders)


def _small(best: Trial) -> list[tuple[DeviceLimit, ...]]:
    """Devices that cost more compute buffer than they hold: first all of them, then each alone."""
    rows = {device: best.breakdown.on(device.name) for device in best.devices}
    used = {device: row for device, row in rows.items() if row.used}
    compute = sum(row.compute for row in used.values())
    small = [d for d, row in used.items() if row.model + row.context < (compute - row.compute) / 2]
    small.sort(key=lambda device: used[device].model + used[device].context)
    groups: list[tuple[DeviceLimit, ...]] = [tuple(small)] if 1 < len(small) < len(used) else []
    return groups + [(device,) for device in small if len(used) > 1]


def _doubtful_remotes(best: Answer) -> list[tuple[DeviceLimit, ...]]:
    """List groups of remote devices that a plan may be better without.

    First all that are slower than the host. Then each one whose layers in ``placement`` are estimated to take less time
    elsewhere, the most doubtful first.
    """
    state, placement = best.state, best.trial.placement
    devices, request = state.devices, state.request
    if not state.is_priced or request.fixed & {"devices", "tensor_split", "n_gpu_layers"}:
        return []
    pinned = pinned_devices(request)
    remote = [d for d, device in enumerate(devices) if request.speeds[device.name].is_remote and device not in pinned]
    if not remote:
        return []
    prices = state.prices()
    seconds = [prices.unit_seconds(d) for d in (*range(len(devices)), HOST)]
    slower = tuple(devices[d] for d in remote if _are_slower_than_host(state, (devices[d],)))
    gained: dict[int, float] = {}
    for d, (start, stop) in enumerate(placement.ranges()):
        if d in remote and start < stop:
            there = float_sum(seconds[d][start:stop]) + prices.visits[d]
            gained[d] = there - min(
                float_sum(by_unit[start:stop]) for other, by_unit in enumerate(seconds) if other != d
            )
    one_by_one: list[tuple[DeviceLimit, ...]] = [
        (devices[d],) for d in sorted(gained, key=lambda d: -gained[d]) if gained[d] > 0
    ]
    is_used = any(devices[d] in slower for d in gained)
    return [slower, *(group for group in one_by_one if group != slower)] if is_used else one_by_one


def _are_slower_than_host(state: SearchState, remote: Sequence[DeviceLimit]) -> bool:
    """Whether each of ``remote`` takes longer for the whole model than the host."""
    prices = state.prices()
    on_host = float_sum(prices.unit_seconds(HOST))
    places = [state.devices.index(device) for device in remote]
    return all(float_sum(prices.unit_seconds(d)) + prices.visits[d] > on_host for d in places)
