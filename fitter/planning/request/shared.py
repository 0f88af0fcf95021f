"""Draft models, projectors, adapters and reservations: their memory beside the model, measured by llama.cpp. Bytes.

The search subtracts their fixed memory from free memory. Memory that grows with the context or follows the placement
counts as compute buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from fitter.errors import UsageError
from fitter.llama.types import Breakdown, DeviceInfo, Lora, Params, Row
from fitter.machine.speed import DeviceSpeed, HostSpeed
from fitter.model.files.source import called
from fitter.model.location import local_name
from fitter.parameters.values import parse_size
from fitter.parameters.values import size as whole_size
from fitter.planning.request.pool_margin import less
from fitter.planning.request.request import SHARED_ROW, DeviceLimit, HostLimit, Measure, PoolLimit, Request
from fitter.planning.request.summary import SharedUse
from fitter.text import mib, mib_up

LATER = "later"
"""The kind of host memory reserved for a program's use after the load."""

HOST_NAME = "host"
"""The host's name, in place of a device's."""

DRAFT_MAX = 3
"""``--spec-draft-n-max`` of llama.cpp: tokens drafted at a time."""

LEAST_FOR_SPEED = 256
"""Smaller micro batches are tried only where nothing fits: ``tests/data/speeds`` has no prompts of theirs."""

_DEFAULT_TYPE = Params().type_k


def by_device(breakdown: Breakdown) -> tuple[Row, ...]:
    """Return one row for each device and the host with memory of a load."""
    return tuple(row for row in (*map(breakdown.on, breakdown.devices), breakdown.host) if row.used)


def parse_reserve(given: Mapping[str, int | str] | Sequence[str]) -> dict[str, int]:
    """Parse reservations, as a mapping or as ``DEVICE=SIZE`` texts; return bytes by the name of a device or ``host``.

    Raises:
        UsageError: A text or size is not valid.
    """
    if isinstance(given, str):
        given = (given,)
    pairs: list[tuple[str, int | str]] = []
    if isinstance(given, Mapping):
        pairs = list(given.items())
    else:
        for text in given:
            name, _, amount = text.rpartition("=")
            if not name or not amount:
                raise UsageError(f"'{text}' is not a reservation: write DEVICE=SIZE, such as CUDA0=2GiB or host=8GiB")
            pairs.append((name, amount))
    sizes: dict[str, int] = {}
    for name, value in pairs:
        size = parse_size(value) if isinstance(value, str) else whole_size(f"the reservation on {name}", value)
        sizes[name] = sizes.get(name, 0) + size
    return sizes


def reservation(
    sizes: Mapping[str, int], devices: Sequence[DeviceInfo], host_total: int | None
) -> tuple[SharedUse, ...]:
    """Reserve memory for programs outside llama.cpp.

    Raises:
        UsageError: A device is unknown or smaller than its reservation.
    """
    totals = {**{device.name: device.total for device in devices}, HOST_NAME: host_total}
    for name, size in sizes.items():
        if name not in totals:
            raise UsageError(f"--reserve names an unknown device '{name}'; there are: {', '.join(totals)}")
        total = totals[name]
        if total is not None and size > total:
            raise UsageError(f"--reserve {name}: {mib_up(size)} MiB is more than its total memory of {mib(total)} MiB")
    rows = tuple(
        Row("reserved", None if name == HOST_NAME else name, name == HOST_NAME, 0, 0, size)
        for name, size in sizes.items()
        if size
    )
    return (SharedUse("reserve", "reserved", rows),) if rows else ()


@dataclass(frozen=True)
class Draft:
    """A draft model, placed as llama-server places it.

    Attributes:
        path: Its path.
        devices: Names of its devices, empty for the host; ``None``: the main model's.
        n_gpu_layers: Its layers on devices.
        type_k: Type of K in its cache.
        type_v: Type of V in its cache.
        measure: Makes a dummy load of it.
        n_max: Tokens drafted at a time.
        n_ubatch: Tokens of its micro batch; ``None``: the main model's.
    """

    path: str
    devices: tuple[str, ...] | None
    n_gpu_layers: int
    type_k: str
    type_v: str
    measure: Measure = field(compare=False)
    n_max: int = DRAFT_MAX
    n_ubatch: int | None = None

    def params(self, main: Params) -> Params:
        """Derive the draft's parameters from those of the ``main`` model, as llama-server does.

        It takes all of them but those with own options, even the tensor split, and outputs one token per sequence
        (``common_base_params_to_speculative``).

        Raises:
            UsageError: The split has only zeros, so free memory would decide.
        """
        devices = self.on(main)
        is_alone = len(devices) == 1
        split = None
        if len(devices) > 1:
            split = _split(main) or (1.0,) * len(devices)
            if not any(split[: len(devices)]):
                raise UsageError(
                    f"-ts has only zeros for the devices of the draft model ({', '.join(devices)}), which llama-server "
                    "splits by the first shares: choose one device with -devd"
                )
        return replace(
            main,
            n_gpu_layers=self.n_gpu_layers,
            tensor_split=split,
            tensor_buft_overrides=(),
            type_k=self.type_k,
            type_v=self.type_v,
            n_ubatch=self.n_ubatch or main.n_ubatch,
            embeddings=False,
            split_mode="layer" if is_alone else main.split_mode,
            main_gpu=0 if is_alone else main.main_gpu,
            devices=devices,
            load_mtp=False,
            n_rs_seq=0,
            n_outputs_max=main.n_seq_max,
            lora=(),
        )

    def on(self, main: Params) -> tuple[str, ...]:
        """Return its devices beside a main model with these parameters."""
        return (main.devices or ()) if self.devices is None else self.devices

    @property
    def is_in_one_place(self) -> bool:
        """Whether its memory is independent of the main model's placement."""
        return self.devices is not None and len(self.devices) < 2

    def arguments(self, main: Params) -> tuple[str, ...]:
        """Return the arguments of llama-server and llama-cli that reproduce the measured memory."""
        layers = "all" if self.n_gpu_layers < 0 else str(self.n_gpu_layers)
        devices = self.on(main)
        words = ["-md", local_name(self.path), "-devd", ",".join(devices) or "none", "-ngld", layers]
        words += [*_cache_types(self.type_k, self.type_v), "--spec-type", "draft-simple", *_draft_arguments(self)]
        if len(devices) > 1 and _split(main) is None:
            words += ["-ts", ",".join("1" for _ in devices)]
        return tuple(words)


@dataclass(frozen=True)
class Mtp:
    """The model's own layers for multi-token prediction, in a second context of the model.

    Attributes:
        name: The model's file name.
        type_k: Type of K in its cache.
        type_v: Type of V in its cache.
        n_max: Tokens drafted at a time.
        n_ubatch: Tokens of its micro batch; ``None``: the model's.
    """

    name: str
    type_k: str = _DEFAULT_TYPE
    type_v: str = _DEFAULT_TYPE
    n_max: int = DRAFT_MAX
    n_ubatch: int | None = None

    def params(self, main: Params) -> Params:
        """Derive the second context's parameters from the first one's, as llama-server does."""
        return replace(
            main,
            lora=(),
            ctx_type="mtp",
            type_k=self.type_k,
            type_v=self.type_v,
            n_ubatch=self.n_ubatch or main.n_ubatch,
            n_rs_seq=0,
            n_outputs_max=main.n_seq_max,
        )

    def arguments(self) -> tuple[str, ...]:
        """Return the arguments of llama-server and llama-cli."""
        return ("--spec-type", "draft-mtp", *_cache_types(self.type_k, self.type_v), *_draft_arguments(self))


@dataclass(frozen=True)
class Projector:
    """A multimodal projector.

    Attributes:
        path: Its path.
        device: Name of its device; ``None`` for the host.
        options: Further arguments, as measured.
        measure: Measures it on a device.
    """

    path: str
    device: str | None
    options: tuple[str, ...]
    measure: Callable[[str | None], Sequence[Row]] = field(compare=False)

    def use(self) -> SharedUse:
        """Measure its memory."""
        words = ("--mmproj", local_name(self.path), "-mmdev", self.device or "none", *self.options)
        return SharedUse("projector", self.path, _by_place(self.measure(self.device)), words)


@dataclass(frozen=True)
class Companions:
    """Everything that shares the devices with the model, each in one place.

    Attributes:
        reserved: Memory for programs outside llama.cpp.
        draft: The draft model.
        projector: The projector.
        mtp: The layers for multi-token prediction.
        ngrams: Ways to draft without a model.
        may_shrink: Whether the context for drafting may have a smaller micro batch than the model's.
        rank: Order among choices of places. Rank 1 is tried if no choice of rank 0 fits with the largest context, rank
            2 if none of 0 and 1 fits.
    """

    reserved: tuple[SharedUse, ...] = ()
    draft: Draft | None = None
    projector: Projector | None = None
    mtp: Mtp | None = None
    ngrams: tuple[SharedUse, ...] = ()
    may_shrink: bool = False
    rank: int = 0

    @property
    def smaller(self) -> Companions | None:
        """The same with a small micro batch for drafting, where memory is short; ``None`` where it may have none."""
        if not self.may_shrink:
            return None
        draft = self.draft and replace(self.draft, n_ubatch=LEAST_FOR_SPEED)
        mtp = self.mtp and replace(self.mtp, n_ubatch=LEAST_FOR_SPEED)
        return replace(self, draft=draft, mtp=mtp, may_shrink=False)

    @property
    def places(self) -> tuple[tuple[str, str], ...]:
        """Draft model and projector, each with its place in words."""
        pairs = []
        if self.draft is not None:
            devices = self.draft.devices
            place = "the model's devices" if devices is None else ", ".join(devices) or "the host"
            pairs.append(("the draft model", place))
        if self.projector is not None:
            pairs.append(("the projector", self.projector.device or "the host"))
        return tuple(pairs)

    def uses(self, params: Params, breakdown: Breakdown, measure: Measure) -> tuple[SharedUse, ...]:
        """Measure all of it beside the model with ``params``.

        Args:
            params: Parameters of the model.
            breakdown: llama.cpp's measurement of the model with them.
            measure: Makes dummy loads of the model itself.

        Raises:
            FitterError: As ``measure`` raises it.
        """
        params = replace(params, n_ctx=breakdown.n_ctx)
        uses = [*self._fixed()]
        for lora, taken_by in zip(params.lora, breakdown.lora, strict=True):
            named = replace(lora, path=called(Path(lora.path)))
            uses.append(SharedUse("lora", named.path, _by_place(taken_by), _lora_arguments(named)))
        if self.draft is not None:
            rows = by_device(self.draft.measure(self.draft.params(params)))
            uses.append(SharedUse("draft", self.draft.path, rows, self.draft.arguments(params)))
        if self.mtp is not None:
            # its weights are part of the model's
            rows = tuple(replace(row, model=0) for row in by_device(measure(self.mtp.params(params))))
            used = tuple(row for row in rows if row.used)
            uses.append(SharedUse("mtp", self.mtp.name, used, self.mtp.arguments()))
        return (*uses, *self.ngrams)

    def known(self, request: Request) -> tuple[SharedUse, ...]:
        """Measure the fixed memory, at the smallest context of ``request``."""
        uses = [*self._fixed()]
        if self.draft is not None and self.draft.is_in_one_place:
            is_fixed = "n_ctx" in request.fixed and "context" not in request.allow
            n_ctx = request.params.n_ctx if is_fixed else min(request.n_ctx_min, request.params.n_ctx)
            rows = by_device(self.draft.measure(self.draft.params(replace(request.params, n_ctx=n_ctx))))
            uses.append(SharedUse("draft", self.draft.path, rows))
        return tuple(uses)

    def _fixed(self) -> tuple[SharedUse, ...]:
        """Return what depends neither on the context nor on the placement."""
        return (*self.reserved, *([self.projector.use()] if self.projector is not None else []))


def lowered(request: Request, fixed: Sequence[SharedUse], others: Sequence[DeviceLimit]) -> Request:
    """Subtract ``fixed`` memory from the devices, host and pools of ``request``.

    Args:
        request: The request.
        fixed: Memory that is known before the placement.
        others: Devices that the model itself must not use.
    """
    host = request.host
    if host.free is not None:
        host = HostLimit(host.total, host.free - taken(fixed, None), host.margin, host.paging)
    occupied = occupied_by(fixed)
    every = [_reduce_free(device, taken(fixed, device.name)) for device in (*request.devices, *others)]
    return replace(
        request,
        devices=tuple(every[: len(request.devices)]),
        host=host,
        pools=tuple(less(pool, taken_of(fixed, pool)) for pool in request.pools),
        beside=tuple(device for device in every if device.name in occupied),
    )


def occupied_by(uses: Sequence[SharedUse]) -> set[str]:
    """Return the devices on which llama.cpp itself puts something."""
    rows = (row for use in uses if not use.is_of_others for row in use.rows)
    return {row.device for row in rows if row.device is not None and row.used}


def taken(uses: Sequence[SharedUse], device: str | None) -> int:
    """Add up bytes on a device, or on the host (``None``)."""
    return sum(use.on(device) for use in uses)


def taken_of(uses: Sequence[SharedUse], pool: PoolLimit) -> int:
    """Add up bytes on the devices of a pool and on the host."""
    return sum(taken(uses, name) for name in (*pool.devices, None))


def later_of(uses: Sequence[SharedUse]) -> int:
    """Add up the host memory that the user reserves for a program's use after the load."""
    return sum(use.on(None) for use in uses if use.kind == LATER)


def beyond(fixed: Sequence[SharedUse], uses: Sequence[SharedUse]) -> tuple[Row, ...]:
    """Return the memory beyond ``fixed`` as compute buffers, which the search learns from measurements."""
    names = {row.device for use in (*fixed, *uses) for row in use.rows}
    rows = []
    for name in sorted(names, key=lambda name: name or ""):
        more = taken(uses, name) - taken(fixed, name)
        if more:
            rows.append(Row(SHARED_ROW, name, name is None, 0, 0, more))
    return tuple(rows)


def lacking(
    fixed: Sequence[SharedUse], devices: Sequence[DeviceLimit], host: HostLimit, pools: Sequence[PoolLimit] = ()
) -> int:
    """Add up the bytes that ``fixed`` memory alone lacks of all margins."""
    occupied = occupied_by(fixed)
    lacks = [taken(fixed, device.name) - device.target for device in devices if device.name in occupied]
    if host.target is not None:
        lacks.append(taken(fixed, None) - host.target)
    lacks += [taken_of(fixed, pool) - pool.target for pool in pools]
    return sum(lack for lack in lacks if lack > 0)


def draft_seconds(
    uses: Sequence[SharedUse], speeds: Mapping[str, DeviceSpeed], host: HostSpeed | None, tokens: int
) -> float:
    """Estimate the seconds to draft ``tokens``: the draft model's weights are read once for each."""
    seconds = 0.0
    for row in (row for use in uses if use.kind == "draft" for row in use.rows):
        speed: DeviceSpeed | HostSpeed | None = host if row.device is None else speeds.get(row.device)
        seconds += row.model / speed.bandwidth if speed is not None else 0.0
    return seconds * tokens


def places(devices: Sequence[DeviceLimit], speeds: Mapping[str, DeviceSpeed], n_max: int) -> tuple[str, ...]:
    """Choose up to ``n_max`` devices that can hold something whole, the fastest first.

    Of equal devices, the first (which has the buffers for streamed weights) and the last are tried.
    """
    kinds: dict[tuple[str, int, int], list[DeviceLimit]] = {}
    for device in (device for device in devices if device.target > 0):
        kinds.setdefault((device.description, device.total, device.margin), []).append(device)
    chosen = [each for kind in kinds.values() for each in dict.fromkeys((kind[0], kind[-1]))]
    chosen.sort(key=lambda device: -speeds[device.name].bandwidth if device.name in speeds else 0.0)
    return tuple(device.name for device in chosen[:n_max])


def _reduce_free(device: DeviceLimit, size: int) -> DeviceLimit:
    """Take ``size`` bytes from the device's free memory; a negative rest goes into the margin."""
    if not size:
        return device
    free = max(0, device.free - size)
    return replace(device, free=free, margin=free - (device.target - size))


def _split(main: Params) -> tuple[float, ...] | None:
    """Return the tensor split among the main model's arguments."""
    return main.tensor_split if len(main.devices or ()) > 1 else None


def _by_place(rows: Sequence[Row]) -> tuple[Row, ...]:
    """Add up rows to one for each device and one for the host."""
    sums: dict[str | None, Row] = {}
    for row in rows:
        place = None if row.is_host else row.device
        old = sums.get(place, Row(place or "Host", place, place is None, 0, 0, 0))
        sums[place] = replace(
            old, model=old.model + row.model, context=old.context + row.context, compute=old.compute + row.compute
        )
    return tuple(sums.values())


def _lora_arguments(lora: Lora) -> tuple[str, ...]:
    path = local_name(lora.path)
    if "," in path:
        raise UsageError(f"llama.cpp's --lora splits '{path}' at the comma: rename the file, or its directory")
    return ("--lora", path) if lora.scale == 1 else ("--lora-scaled", f"{path}:{lora.scale:.9g}")


def _draft_arguments(drafting: Draft | Mtp) -> list[str]:
    words = [] if drafting.n_max == DRAFT_MAX else ["--spec-draft-n-max", str(drafting.n_max)]
    return [*words, *(["--spec-draft-n-ubatch", str(drafting.n_ubatch)] if drafting.n_ubatch else [])]


def _cache_types(type_k: str, type_v: str) -> list[str]:
    words = []
    if type_k != _DEFAULT_TYPE:
        words += ["-ctkd", type_k]
    if type_v != _DEFAULT_TYPE:
        words += ["-ctvd", type_v]
    return words


def remembered(measure: Callable[[Params], Breakdown]) -> Measure:
    """Cache ``measure`` by its parameters."""
    answers: dict[Params, Breakdown] = {}

    def ask(params: Params) -> Breakdown:
        if params not in answers:
            answers[params] = measure(params)
        return answers[params]

    return ask
