"""Results of commands as tables."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Sequence
from pathlib import PurePath
from typing import IO, TYPE_CHECKING

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from fitter.llama.types import Array, DeviceInfo, MetadataValue, Row
from fitter.machine.gpu_catalogue import capability_text
from fitter.model.files.source import show
from fitter.output.tables.alternatives import alternative_lines
from fitter.output.tables.explanation import default_speeds, explain_lines, far_lines
from fitter.output.tables.narrow import NarrowTable, too_narrow
from fitter.output.tables.pool_lines import pool_lines
from fitter.output.units import dummy_loads, scaled, speed
from fitter.parameters.table import of_a_load
from fitter.planning.plan.layer_map import HOST_NAME
from fitter.planning.plan.plan import Plan
from fitter.planning.pricing.pricing import Price
from fitter.planning.request.summary import DeviceUse, HostUse, PoolUse, SharedUse
from fitter.programs.later import Later
from fitter.text import LONGEST_NAME, MIB, as_log_line, human, mib, printable

if TYPE_CHECKING:
    from fitter.machine.gpu_catalogue import CatalogueGpu
    from fitter.planning.checked.calibration import Calibration, Comparison
    from fitter.planning.plan.inspection import Inspection
    from fitter.planning.plan.verified import Kind, ServerUse, Verification, VerifiedRow

_FILE_WIDTH = 120
_LONGEST_KEY = 80
_NAMES = "description"
_KINDS = {
    "draft": "draft model",
    "mtp": "multi-token prediction of",
    "projector": "projector",
    "lora": "LoRA adapter",
    "reserve": "reserved",
}
_FOR_SERVER = ("draft", "mtp", "projector")


def print_to(stream: IO[str], renderable: RenderableType) -> None:
    """Write ``renderable`` to ``stream``: as wide as the terminal, or in 120 columns without one.

    A terminal below 40 columns gets one line that says so. Markup is not interpreted, and a folded line that would be a
    command to a CI system is broken up.
    """
    if stream.isatty():
        terminal = Console(file=stream, highlight=False, markup=False, emoji=False)
        if instead := too_narrow(terminal.width):
            stream.write(instead + "\n")
        else:
            terminal.print(renderable)
        return
    console = Console(
        file=io.StringIO(),
        width=_FILE_WIDTH,
        highlight=False,
        markup=False,
        emoji=False,
        force_terminal=False,
        color_system=None,
    )
    with console.capture() as capture:
        console.print(renderable)
    stream.write("".join(f"{as_log_line(line.rstrip())}\n" for line in capture.get().splitlines()))


def plan_text(plan: Plan) -> str:
    """Write the table of ``plan`` as into a file, without the last newline."""
    out = io.StringIO()
    print_to(out, plan_table(plan))
    return out.getvalue().removesuffix("\n")


def plan_table(plan: Plan, *, verbose: bool = False) -> RenderableType:
    """Draw the memory of ``plan`` on each device and the host, its parameters and time; ``verbose``: also why."""
    parts: list[RenderableType] = [_title(plan), _use_table(plan)]
    if verbose:
        parts.append(rows_table(plan.breakdown.rows))
        if _differs(plan.breakdown.rows):
            parts.append(Text("loaded: the compute buffer when the model is loaded for real"))
    if plan.shared:
        lines = [shared_text(shared) for shared in plan.shared]
        if any(shared.kind in _FOR_SERVER for shared in plan.shared):
            lines.append("only llama-server and llama-cli know the arguments for a draft model and a projector")
        parts.append(Text("\n".join(lines), overflow="fold"))
    if plan.left_out:
        parts.append(Text("\n".join(left.message for left in plan.left_out), overflow="fold"))
    if plan.virtual and plan.host.free is None:
        need = f"a machine with these devices needs {human(plan.host.used)} of host memory for llama.cpp"
        parts.append(Text(need + (f", {human(plan.host.later)} of it later" if plan.host.later >= MIB else "")))
    if grown := [later_text(each) for each in plan.later if each.bytes is None or each.bytes >= MIB]:
        lines = [f"later, in host memory: {', '.join(grown)}", *_smaller(plan)]
        parts.append(Text("\n".join(lines), overflow="fold"))
    if lines := pool_lines(plan):
        parts.append(Text("\n".join(lines), overflow="fold"))
    parts.append(Text("\n".join(parameter_lines(plan))))
    if plan.levers:
        parts.append(Text(f"given up, as --allow permits: {', '.join(plan.levers)}", overflow="fold"))
    if plan.estimate is not None:
        lines = [_estimate(plan.estimate), *far_lines(plan.bound)]
        lines += explain_lines(plan.estimate, plan.choices, plan.bound) if verbose else default_speeds(plan.estimate)
        parts.append(Text("\n".join(lines), overflow="fold"))
    parts += alternative_lines(plan)
    loads = dummy_loads(plan.search.dummy_loads)
    if plan.search.shared_loads:
        loads += f", and {plan.search.shared_loads} of the draft model,"
    by = f" of llama.cpp {printable(plan.llama_cpp.version)}" if plan.llama_cpp else ""
    parts.append(Text(f"measured with {loads}{by} in {plan.search.seconds:.1f} s", style="dim"))
    if plan.notes:
        parts.append(Text("\n".join(printable(note) for note in plan.notes), overflow="fold"))
    if plan.search.is_cut_short:
        parts.append(Text("the time limit ended the search: there may be a better plan"))
    return Group(*parts)


def rows_table(rows: Iterable[Row]) -> Table:
    """Draw memory per buffer type, with the compute buffers of a real load where they differ."""
    rows = tuple(rows)
    has_real = _differs(rows)
    columns = ("compute", "loaded", "used") if has_real else ("compute", "used")
    spare: list[str | tuple[str, ...]] = ["loaded"] if has_real else []
    table = _table(
        "buffer type", "MiB: model", "context", *columns, spare=[*spare, ("MiB: model", "context", "compute")]
    )
    for row in rows:
        real = (mib(row.real.compute),) if has_real else ()
        table.add_row(row.buffer_type, mib(row.model), mib(row.context), mib(row.compute), *real, mib(row.used))
    return table


def _differs(rows: Iterable[Row]) -> bool:
    """Return whether a real load is known to take other compute buffers."""
    return any(row.real.compute != row.compute for row in rows)


def devices_table(devices: tuple[DeviceInfo, ...], host: DeviceInfo) -> RenderableType:
    """Draw the devices that llama.cpp would use, and the host."""
    table = _table("device", "MiB: total", "free", spare=("backend", "type", _NAMES), names=_NAMES)
    table.add_column("type")
    table.add_column("backend")
    table.add_column(_NAMES, overflow="fold")
    for device in devices:
        kind = f"{device.type}, virtual" if device.virtual else device.type
        table.add_row(device.name, mib(device.total), mib(device.free), kind, device.backend, device.description)
    table.add_row("host", mib(host.total), mib(host.free), host.type, host.backend, host.description)
    return table


def catalogue_table(gpus: Iterable[CatalogueGpu]) -> RenderableType:
    """Draw the GPUs that ``--gpu`` knows by name, and below them the source of each figure."""
    gpus = tuple(gpus)
    sources: dict[str, int] = {}
    spare = ("PCIe", "usable", "arch", "TFLOPS", "profile", "free", "GB/s", "sources")
    table = _table("GPU", "arch", "MiB: total", "usable", "free", "GB/s", "PCIe", "TFLOPS", spare=spare)
    table.add_column("profile", no_wrap=True)
    table.add_column("sources", no_wrap=True)
    for gpu in gpus:
        figures = ("compute_capability", "total", "usable", "free", "bandwidth", "pcie", "compute")
        cited = [getattr(gpu.sources, figure) for figure in figures]
        numbers = (sources.setdefault(source, len(sources) + 1) if source else "-" for source in cited)
        table.add_row(
            gpu.key,
            capability_text(gpu.compute_capability) if gpu.compute_capability else "-",
            mib(gpu.total),
            mib(gpu.usable),
            mib(gpu.free),
            scaled(gpu.bandwidth, 10**9),
            scaled(gpu.pcie, 10**9),
            scaled(gpu.compute, 10**12),
            gpu.profile,
            " ".join(map(str, numbers)),
        )
    notes = [
        "total: the card's memory. usable: what the driver leaves of it. free: what an idle card has free.",
        "GB/s: memory bandwidth. PCIe: bandwidth from the host, also in GB/s. TFLOPS: dense fp16.",
        "sources: of arch, total, usable, free, GB/s, PCIe and TFLOPS, by number:",
    ]
    listing = [Text(f"{number:>3}  {source}", overflow="fold") for source, number in sources.items()]
    return Group(table, Text(), *map(Text, notes), *listing)


def calibration_table(calibration: Calibration) -> RenderableType:
    """Draw the result of ``fitter calibrate``: the devices, the comparisons, every number that differs."""
    spare = ("free", "MiB: total", _NAMES, "twin")
    columns = ("MiB: total", "free", "context", "outside", "margin")
    devices = _table("device", *columns, spare=spare, names=_NAMES)
    devices.add_column("twin")
    devices.add_column(_NAMES, overflow="fold")
    for device in calibration.devices:
        info, twin = device.info, device.twin
        sizes = (info.total, info.free, device.context, device.outside, device.margin)
        profile = "-" if twin is None else twin.profile
        if twin is not None and twin.compute_capability:
            profile += f" {capability_text(twin.compute_capability)}"
        devices.add_row(info.name, *map(mib, sizes), profile, info.description)
    parts: list[RenderableType] = [
        devices,
        Text(
            "context: memory that a process takes just by using the device. outside: memory that a loaded model takes\n"
            "beyond that and beyond llama.cpp's own count. margin: memory that a fit leaves free by default."
        ),
        Text(),
    ]
    parts += [Text(_comparison(comparison)) for comparison in calibration.comparisons]
    if not calibration.is_exact:
        parts += [Text(), _differences(calibration)]
    if calibration.stored is not None:
        parts += [Text(), Text(f"stored in {show(calibration.stored)}", overflow="fold")]
    return Group(*parts)


def _comparison(comparison: Comparison) -> str:
    names = ",".join(comparison.devices)
    sides = {
        "twin": f"{names} and virtual twin{'s' * (len(comparison.devices) > 1)}",
        "real load": f"{names}, loaded for real and as a dummy",
    }
    differing = {(difference.model, difference.configuration) for difference in comparison.differences}
    loads = "1 load" if comparison.loads == 1 else f"{comparison.loads} loads"
    verdict = f"bytes differ in {len(differing)}" if differing else "no byte differs"
    return f"{sides[comparison.between]}: {loads}, {verdict}"


def _differences(calibration: Calibration) -> Table:
    table = NarrowTable(spare=("against", "devices", "other", "model", "configuration"), fold=16)
    for column in ("devices", "against", "model", "configuration", "what"):
        table.add_column(column, overflow="fold")
    for column in ("bytes: real", "other", "difference"):
        table.add_column(column, justify="right", overflow="fold")
    for comparison in calibration.comparisons:
        for each in comparison.differences:
            more = f"{each.other - each.real:+d}" if isinstance(each.real, int) and isinstance(each.other, int) else ""
            where = (",".join(comparison.devices), comparison.between, each.model, each.configuration, each.what)
            table.add_row(*where, str(each.real), str(each.other), more)
    return table


def verification_table(verification: Verification) -> RenderableType:
    """Draw the result of ``fitter verify``: predicted and real bytes, the memory of each device, the verdict."""
    model = verification.model
    by = "" if verification.server is None else f" by\n{_program(verification.server)}"
    weights = f" ({model.architecture}, {human(model.bytes)} of weights), loaded{by}"
    title = Text.assemble((model.name, "bold"), weights, overflow="fold")
    sizes = _table("buffer type", "bytes: predicted", "real", "difference", spare=("bytes: predicted",))
    exceeding = set(verification.exceeding)
    for row in verification.rows:
        differing = {difference.kind: difference for difference in row.differences}
        for kind in ("model", "context", "compute"):
            predicted, real = getattr(row.predicted, kind), getattr(row.real, kind)
            difference = differing.get(kind)
            style = "bold red" if difference in exceeding else ""
            if predicted or real:
                more = Text(f"{difference.more:+,}" if difference else "", style=style)
                sizes.add_row(f"{row.real.buffer_type} {kind}", f"{predicted:,}", taken_text(row, kind), more)
    memory = _table("MiB", "free before", "after", "counted", "unaccounted", spare=("after", "free before"))
    for use in verification.memory:
        memory.add_row(use.name, mib(use.before), mib(use.after), mib(use.counted), mib(use.unaccounted))
    parts: list[RenderableType] = [title, sizes, Text(), memory]
    parts.append(
        Text(
            "unaccounted: memory taken beyond llama.cpp's count; negative if other programs freed memory, or if\n"
            "counted memory is not in use yet; - if the device always reports the same free memory"
        )
    )
    if verification.server is not None:
        parts += [Text(), *_served(verification.server)]
    for shared in verification.shared if verification.server is None else ():
        parts.append(Text(f"not loaded here: {shared.kind} {printable(shared.name)}", overflow="fold"))
    return Group(*parts, Text(), verdict(verification))


def taken_text(row: VerifiedRow, kind: Kind) -> str:
    """Write the real size of a kind; a llama-server rounds it, leaves it out, or maps a part of the file."""
    real, rounding = getattr(row.real, kind), 0 if row.rounding is None else getattr(row.rounding, kind)
    if kind not in row.unsaid:
        return f"{real:,}" if not rounding else f"{real:,} ± {rounding:,}"
    return f"{real:,} of the file" if real else "not said"


LATER = {
    "checkpoint": "a context checkpoint",
    "prompt": "a prompt in the prompt cache",
    "prompt cache": "the prompt cache",
}
"""Kinds of memory that a llama-server takes after the load."""


def _program(use: ServerUse) -> str:
    return f"{printable(use.path)} {use.version}".rstrip()


def _served(use: ServerUse) -> Iterator[RenderableType]:
    """Draw the memory that a llama-server took after the load."""
    yield Text(f"{use.answered} of {use.prompts} prompts answered, {use.tokens:,} tokens, {use.slots} at a time")
    if use.refused:
        yield Text(f"the first that was not: {use.refused}", overflow="fold")
    later = _table("then", "bytes: predicted", "real", "at most", spare=("at most",))
    for each in use.later:
        tokens = "" if each.tokens is None else f" of {each.tokens:,} tokens"
        name = f"{LATER[each.kind]}{tokens}" + (f" ({each.count} prompts)" if each.kind == "prompt cache" else "")
        real = "none said" if each.real is None else f"{each.real:,} ± {each.rounding:,}"
        most = "no limit" if each.most is None else f"{each.most:,}"
        style = "bold red" if each.more else ""
        later.add_row(name, "-" if each.predicted is None else f"{each.predicted:,}", Text(real, style=style), most)
    if use.later:
        yield later
    if use.own is None or use.resident is None:
        yield Text("memory of its process: this system does not say it")
        return
    process = _table("MiB of its process", "resident", "of files", "its own", "counted", "more", "planned", "margin")
    style = "" if use.is_within else "bold red"
    sizes = (use.resident, use.of_files, use.own, use.counted, use.unaccounted)
    planned = "no limit" if use.planned is None else mib(use.planned)
    process.add_row("at most", *(Text(mib(each), style=style) for each in sizes), planned, mib(use.margin))
    yield Text()
    yield process
    yield Text(
        "counted: what the plan counts without mapped files, and what was kept of the prompts; more: code,\n"
        "vocabulary and threads; planned: with all that may be kept of prompts"
    )


def verdict(verification: Verification) -> Text:
    """Say in a line whether the load takes the predicted bytes."""
    exceeding, differences = verification.exceeding, verification.differences
    if verification.exceeding_later:
        words = (f"{LATER[use.kind]} {use.more:+,} bytes" for use in verification.exceeding_later)
        return Text.assemble(("more than predicted", "bold red"), ": ", ", ".join(words), overflow="fold")
    if verification.server is not None and not verification.server.is_within:
        return Text("more than planned: the memory of its process", style="bold red")
    if not differences:
        text = "every byte as predicted"
        if verification.server is not None:
            text = "as predicted, as far as its log says it"
        return Text(text, style="bold green")
    if exceeding:
        text, style = "more than predicted", "bold red"
    elif any(each.more > 0 for each in differences):
        text, style = f"within the tolerance of {human(verification.tolerance)}", "bold green"
    else:
        text, style = "less than predicted", "bold green"
    words = (f"{each.buffer_type} {each.kind} {each.more:+,} bytes" for each in exceeding or differences)
    return Text.assemble((text, style), ": ", ", ".join(words), overflow="fold")


def inspection_table(inspection: Inspection) -> RenderableType:
    """Draw metadata, tensors by role, and every layer's size."""
    model = inspection.model
    parts: list[RenderableType] = [
        Text.assemble((model.name, "bold"), f" ({model.architecture}, {human(model.bytes)} of weights)")
    ]

    metadata = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    metadata.add_column(no_wrap=True)
    metadata.add_column(overflow="ellipsis", no_wrap=True)
    for key, value in inspection.metadata.items():
        metadata.add_row(printable(key, _LONGEST_KEY), _metadata(value))
    parts += [metadata, Text()]

    roles = _table("tensors", "count", "MiB")
    for role in inspection.roles:
        roles.add_row(role.role, str(role.count), mib(role.bytes))
    parts += [roles, Text()]

    columns = list(dict.fromkeys(role.role for layer in inspection.layers for role in layer.weights))
    layers = _table("layer", "MiB: weights", *columns, "KV cache", spare=columns[::-1])
    for layer in inspection.layers:
        weights = {role.role: mib(role.bytes) for role in layer.weights}
        name = "none" if layer.index is None else str(layer.index)
        layers.add_row(name, mib(layer.bytes), *(weights.get(column, "") for column in columns), mib(layer.context))
    parts += [layers, Text(), Text(f"one dummy load with a context of {inspection.n_ctx} tokens:")]
    parts.append(rows_table(inspection.rows))
    return Group(*parts)


def _table(
    first: str, *numbers: str, spare: Sequence[str | tuple[str, ...]] = (), names: str | None = None, fold: int = 10_000
) -> NarrowTable:
    """Make a table with a column of names, then columns of numbers; for the keywords see ``NarrowTable``."""
    table = NarrowTable(spare=spare, names=names, fold=fold)
    table.add_column(first, no_wrap=True)
    for number in numbers:
        table.add_column(number, justify="right", no_wrap=True)
    return table


def _title(plan: Plan) -> Text:
    model = plan.model
    verdict = ("fits", "bold green") if plan.fits else ("does not fit", "bold red")
    return Text.assemble(
        (model.name, "bold"), f" ({model.architecture}, {human(model.bytes)} of weights) ", verdict, overflow="fold"
    )


def _use_table(plan: Plan) -> Table:
    has_shared, has_later = any(use.rows for use in plan.shared), plan.host.later >= MIB
    more = [part for part, is_there in (("shared", has_shared), ("later", has_later)) if is_there]
    parts = ("model", "context", "compute", *more)
    spare = ("", "total", ("model", "context", "compute", "shared", "later"), "free")
    table = _table("MiB", "total", "free", *parts, "used", "left", "margin", spare=spare, names="")
    table.add_column("", overflow="fold", style="dim")
    uses: dict[str, DeviceUse | HostUse] = {**{use.name: use for use in plan.devices}, HOST_NAME: plan.host}
    sizes = {name: [getattr(use, part, None) for part in parts] for name, use in uses.items()}
    for name, use in uses.items():
        _add_use(table, name, use, getattr(use, "description", ""), sizes[name])
    for pool in plan.pools:
        sums = [sum(filter(None, column)) for column in zip(*(sizes[name] for name in pool.members), strict=True)]
        # pages of the file that both map count once
        _add_use(table, pool.name, pool, "both together", [sums[0] - pool.mapped_twice, *sums[1:]])
    return table


def _add_use(
    table: Table, name: str, use: DeviceUse | HostUse | PoolUse, note: str, sizes: Sequence[int | None]
) -> None:
    margin = "-" if use.free is None else mib(use.margin)
    left = Text(mib(use.left), style="" if use.fits else "bold red")
    table.add_row(name, mib(use.total), mib(use.free), *map(mib, sizes), mib(use.used), left, margin, note)


def later_text(later: Later) -> str:
    """Write one line: memory that grows after the load, and its limit."""
    most = "no limit" if later.bytes is None else f"up to {human(later.bytes)}"
    if later.kind == "prompt cache":
        return f"{most} of prompt cache" + (f" (a full slot is {human(later.each)})" if later.each else "")
    if later.kind == "checkpoints":
        return f"{most} of checkpoints ({later.per_slot} of {human(later.each)} for each slot)"
    return f"{most} of {later.kind}"


_OF_A_SERVER = ("cache_ram", "ctx_checkpoints")


def _smaller(plan: Plan) -> list[str]:
    """List the options that the plan reduces to fit host memory."""
    table = of_a_load()
    values = {name: plan.params.of_parameter(table[name]) for name in _OF_A_SERVER if name not in plan.fit_keywords}
    words = [f"{table[name].option} {value}" for name, value in values.items() if value is not None]
    return [f"reduced to fit host memory: {' '.join(words)}"] if words and plan.fits else []


def shared_text(shared: SharedUse) -> str:
    """Write one line: kind, name, and bytes on each device and the host."""
    if shared.kind == "ngram":
        return f"drafts tokens with {printable(shared.name)}"
    places = ", ".join(f"{human(row.used)} on {row.device or 'the host'}" for row in shared.rows if row.used)
    name = "" if shared.kind == "reserve" else f" {printable(PurePath(shared.name).name)}"
    return f"{_KINDS.get(shared.kind, shared.kind)}{name}: {places or 'no memory'}"


def parameter_lines(plan: Plan) -> list[str]:
    params = plan.params
    where = [f"context {params.n_ctx or plan.breakdown.n_ctx}", f"{_layers(plan)} on devices"]
    if params.tensor_split is not None and len(plan.breakdown.devices) > 1:
        where.append("split " + ",".join(f"{value:g}" for value in params.tensor_split))
    how = [f"batch {params.n_batch}/{params.n_ubatch}"]
    how.append(f"KV cache {params.type_k}/{params.type_v}" + ("" if params.offload_kqv else " on the host"))
    if plan.breakdown.flash_attn is not None:
        how.append(f"flash attention {'on' if plan.breakdown.flash_attn else 'off'}")
    if params.n_seq_max > 1:
        caches = "one KV cache" if params.kv_unified else "a KV cache each"
        how.append(f"{params.n_seq_max} sequences, {caches}")
    lines = [" · ".join(where), " · ".join(how)]
    lines += [f"{override.pattern} in {override.buffer_type}" for override in params.tensor_buft_overrides]
    return list(map(printable, lines))


def _layers(plan: Plan) -> str:
    layers, n_gpu_layers = plan.n_layer + 1, plan.params.n_gpu_layers if plan.breakdown.devices else 0
    if not plan.n_layer:
        # a plan from a file does not know the number of layers
        return "all layers" if n_gpu_layers < 0 else f"{n_gpu_layers} layers"
    return f"{layers if n_gpu_layers < 0 else min(n_gpu_layers, layers)} of {layers} layers"


def _estimate(price: Price) -> str:
    workload = price.workload
    prompt, generation = speed(price.prompt_tokens_per_second), speed(price.generation_tokens_per_second)
    return (
        f"estimated {prompt} t/s prompt · {generation} t/s generation "
        f"({workload.prompt} + {workload.generate} tokens: {price.seconds:.1f} s)"
    )


def _metadata(value: MetadataValue) -> str:
    if isinstance(value, Array):
        if value.values and len(value.values) == value.length and value.length <= 16:
            return "[" + ", ".join(str(item) for item in value.values) + "]"
        return f"{value.length} × {value.type}"
    return " ".join(printable(str(value), LONGEST_NAME).split())
