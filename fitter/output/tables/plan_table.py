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
from fitter.output.arguments import option_words
from fitter.output.tables.narrow import Indented, table_of, too_narrow
from fitter.output.tables.plan_facts import (
    best_depths_text,
    cut_short,
    drafting_text,
    explain_lines,
    facts,
    far_lines,
    full_context,
    given_up,
    in_use_text,
    inputs_text,
    layers,
    pool_lines,
    reduced,
    shared_places,
    turns_warnings,
    warnings,
)
from fitter.parameters.table import PARAMETERS
from fitter.planning.placing.host_flags import flags_among
from fitter.planning.plan.layer_map import HOST_NAME
from fitter.planning.plan.plan import Alternative, Plan
from fitter.planning.plan.turns import Turns
from fitter.planning.pricing.pricing import Price
from fitter.planning.request.session import Session
from fitter.planning.request.summary import DeviceUse, HostUse, PoolUse, SharedUse
from fitter.programs.later import Later
from fitter.text import LONGEST_NAME, MIB, as_log_line, dummy_loads, human, mib, printable, scaled, speed

if TYPE_CHECKING:
    from fitter.machine.gpu_catalogue import CatalogueGpu
    from fitter.planning.plan.layer_map import Inspection


def alternative_lines(plan: Plan) -> list[Text]:
    """Draw for each alternative the words to add (or the other file), and the tokens per second with them and now."""
    words = [" ".join(each.arguments) or f"a {each.file_type} file" for each in plan.alternatives]
    width = max(map(len, words), default=0)
    verdict = "or" if plan.fits else "fits with"
    return [
        Text(f"{verdict}    {text:{width}}    {_speeds(plan, each)}", overflow="fold")
        for text, each in zip(words, plan.alternatives, strict=True)
    ]


def _speeds(plan: Plan, alternative: Alternative) -> str:
    is_prompt = plan.fit_keywords.get("objective") == "prompt" or _is_for_prompts(plan, alternative)
    about = "" if alternative.is_measured else "about "
    text = about + _speed(alternative, is_prompt)
    if plan.estimate is None:
        return text
    n_ctx = plan.params.n_ctx
    at = f" {n_ctx}:" if alternative.n_ctx != n_ctx else ""
    return f"{text} (now{at} {_speed(plan.estimate, is_prompt)})"


def _is_for_prompts(plan: Plan, alternative: Alternative) -> bool:
    """Whether another micro batch makes prompts faster rather than generation."""
    if "-ub" not in alternative.arguments or plan.estimate is None:
        return False
    prompt = alternative.prompt_tokens_per_second / plan.estimate.prompt_tokens_per_second
    return prompt >= alternative.generation_tokens_per_second / plan.estimate.generation_tokens_per_second


def _speed(of: Alternative | Price, is_prompt: bool) -> str:
    """Write the speed that the alternative changes."""
    if is_prompt:
        return f"{speed(of.prompt_tokens_per_second)} t/s prompt"
    return f"{speed(of.generation_tokens_per_second)} t/s"


_FILE_WIDTH = 120
_LONGEST_KEY = 80
_NAMES = "description"
_KINDS = {
    "draft": "draft model",
    "mtp": "multi-token prediction of",
    "projector": "projector",
    "lora": "LoRA adapter",
    "reserve": "reserved",
    "beside": "beside it",
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
    return text_of(plan_table(plan))


def text_of(renderable: RenderableType) -> str:
    """Write ``renderable`` as into a file, without the last newline."""
    out = io.StringIO()
    print_to(out, renderable)
    return out.getvalue().removesuffix("\n")


def plan_table(plan: Plan, *, verbose: bool = False) -> RenderableType:
    """Draw the memory of ``plan`` on each device and the host, four facts and what to be warned of.

    Args:
        plan: The plan.
        verbose: Whether to draw everything about it in place of the facts, and why it was chosen.
    """
    parts: list[RenderableType] = [_use_table(plan)]
    if verbose:
        parts += _details(plan)
    else:
        parts += [_facts_table(plan), *alternative_lines(plan), *_folded(warnings(plan))]
    return Group(_title(plan), Indented(Group(*parts)))


def _folded(lines: Sequence[str]) -> Iterator[Text]:
    """Yield ``lines`` as one text that folds, if there are any."""
    if lines:
        yield Text("\n".join(lines), overflow="fold")


def _facts_table(plan: Plan) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for label, text in facts(plan):
        table.add_row(label, text)
    return table


def _details(plan: Plan) -> Iterator[RenderableType]:
    """Yield everything about ``plan`` that the table of its memory does not show."""
    yield rows_table(plan.breakdown.rows)
    if _differs(plan.breakdown.rows):
        yield Text("loaded: the compute buffer when the model is loaded for real")
    if plan.shared:
        lines = [shared_text(shared) for shared in plan.shared]
        if any(shared.kind in _FOR_SERVER for shared in plan.shared):
            lines.append("only llama-server and llama-cli know the arguments for a draft model and a projector")
        yield from _folded(lines)
    yield from _folded([left.message for left in plan.left_out])
    if plan.virtual and plan.host.free is None:
        need = f"a machine with these devices needs {human(plan.host.used)} of host memory for llama.cpp"
        yield Text(need + (f", {human(plan.host.later)} of it later" if plan.host.later >= MIB else ""))
    if grown := [later_text(each) for each in plan.later if each.bytes is None or each.bytes >= MIB]:
        yield from _folded([f"later, in host memory: {', '.join(grown)}", *reduced(plan)])
    yield from _folded(pool_lines(plan))
    yield Text("\n".join(parameter_lines(plan)))
    yield from _folded(given_up(plan))
    if plan.estimate is not None:
        lines = [*_estimate_lines(plan.estimate), *far_lines(plan.bound)]
        yield from _folded([*lines, *explain_lines(plan.estimate, plan.choices, plan.bound)])
    if plan.drafting is not None:
        yield Text(f"drafting: {drafting_text(plan.drafting)}", overflow="fold")
        depths = (f"{each.depth}: {speed(each.each)} t/s" for each in plan.drafting.depths)
        yield Text(f"drafted at a time: {', '.join(depths)}", overflow="fold")
        if len(plan.drafting.by_users) > 1:
            yield Text(best_depths_text(plan.drafting), overflow="fold")
    if plan.turns is not None:
        yield from _folded([f"work: {work_text(plan.turns.session)}", *turns_warnings(plan.turns)])
        yield users_table(plan.turns)
    yield from alternative_lines(plan)
    loads = dummy_loads(plan.search.dummy_loads)
    if plan.search.shared_loads:
        loads += f", and {plan.search.shared_loads} of the draft model,"
    by = f" of llama.cpp {printable(plan.llama_cpp.version)}" if plan.llama_cpp else ""
    yield Text(f"measured with {loads}{by} in {plan.search.seconds:.1f} s", style="dim")
    yield from _folded([printable(note) for note in plan.notes])
    yield from _folded(cut_short(plan))


def rows_table(rows: Iterable[Row]) -> Table:
    """Draw memory per buffer type, with the compute buffers of a real load where they differ."""
    rows = tuple(rows)
    has_real = _differs(rows)
    columns = ("compute", "loaded", "used") if has_real else ("compute", "used")
    spare: list[str | tuple[str, ...]] = ["loaded"] if has_real else []
    table = table_of(
        "buffer type", "MiB: model", "context", *columns, spare=[*spare, ("MiB: model", "context", "compute")]
    )
    for row in rows:
        real = (mib(row.real.compute),) if has_real else ()
        table.add_row(row.buffer_type, mib(row.model), mib(row.context), mib(row.compute), *real, mib(row.used))
    return table


def work_text(session: Session) -> str:
    """Write one line: the work that the plan is for, on average."""
    parts = [f"{session.prompt} + {session.answer} tokens a turn"]
    if session.reused:
        parts.append(f"{session.reused:.1%} of the prompt reused, {session.turns} turns to {session.longest} tokens")
    if session.gap:
        parts.append(f"{session.gap:g} s between turns")
    return " · ".join(parts)


def users_table(turns: Turns) -> Table:
    """Draw what each and all get for one user, twice as many and so on, and where more users bring little."""
    table = table_of("users", "s a turn", "t/s each", "t/s in all", names="")
    table.add_column("", style="dim")
    for point in turns.points:
        if point.users & (point.users - 1) and point is not turns.all and point.users != turns.knee:
            continue
        note = "more bring little" if point.users == turns.knee and point is not turns.all else ""
        numbers = scaled(point.seconds, 1), speed(point.each), speed(point.together)
        table.add_row(str(point.users), *numbers, note)
    return table


def _differs(rows: Iterable[Row]) -> bool:
    """Return whether a real load is known to take other compute buffers."""
    return any(row.real.compute != row.compute for row in rows)


def devices_table(devices: tuple[DeviceInfo, ...], host: DeviceInfo) -> RenderableType:
    """Draw the devices that llama.cpp would use, and the host."""
    table = table_of("device", "MiB: total", "free", spare=("backend", "type", _NAMES), names=_NAMES)
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
    table = table_of("GPU", "arch", "MiB: total", "usable", "free", "GB/s", "PCIe", "TFLOPS", spare=spare)
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

    roles = table_of("tensors", "count", "MiB")
    for role in inspection.roles:
        roles.add_row(role.role, str(role.count), mib(role.bytes))
    parts += [roles, Text()]

    columns = list(dict.fromkeys(role.role for layer in inspection.layers for role in layer.weights))
    layers = table_of("layer", "MiB: weights", *columns, "KV cache", spare=columns[::-1])
    for layer in inspection.layers:
        weights = {role.role: mib(role.bytes) for role in layer.weights}
        name = "none" if layer.index is None else str(layer.index)
        layers.add_row(name, mib(layer.bytes), *(weights.get(column, "") for column in columns), mib(layer.context))
    parts += [layers, Text(), Text(f"one dummy load with a context of {inspection.n_ctx} tokens:")]
    parts.append(rows_table(inspection.rows))
    return Group(*parts)


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
    spare = ("total", "", "margin", ("model", "context", "compute", "shared", "later"), "free")
    table = table_of("MiB", "total", "free", *parts, "used", "left", "margin", spare=spare, names="")
    table.add_column("", overflow="fold", style="dim")
    uses: dict[str, DeviceUse | HostUse] = {**{use.name: use for use in plan.devices}, HOST_NAME: plan.host}
    sizes = {name: [getattr(use.loaded, part, None) for part in parts] for name, use in uses.items()}
    for name, use in uses.items():
        notes = [getattr(use, "description", ""), in_use_text(use)]
        _add_use(table, name, use, "; ".join(filter(None, notes)), sizes[name])
    for pool in plan.pools:
        sums = [sum(filter(None, column)) for column in zip(*(sizes[name] for name in pool.members), strict=True)]
        # pages of the file that both map count once
        _add_use(table, pool.name, pool, "both together", [sums[0] - pool.mapped_twice, *sums[1:]])
    return table


def _add_use(
    table: Table, name: str, use: DeviceUse | HostUse | PoolUse, note: str, sizes: Sequence[int | None]
) -> None:
    margin = "-" if use.free is None else mib(use.margin)
    loaded = use.loaded
    left = Text(mib(loaded.left), style="" if use.fits else "bold red")
    table.add_row(name, mib(use.total), mib(use.free), *map(mib, sizes), mib(loaded.used), left, margin, note)


def later_text(later: Later) -> str:
    """Write one line: memory that grows after the load, and its limit."""
    most = "no limit" if later.bytes is None else f"up to {human(later.bytes)}"
    if later.kind == "prompt cache":
        return f"{most} of prompt cache" + (f" (a full slot is {human(later.each)})" if later.each else "")
    if later.kind == "checkpoints":
        return f"{most} of checkpoints ({later.per_slot} of {human(later.each)} for each slot)"
    return f"{most} of {later.kind}"


def shared_text(shared: SharedUse) -> str:
    """Write one line: kind, name, and bytes on each device and the host."""
    if shared.kind == "ngram":
        return f"drafts tokens with {printable(shared.name)}"
    name = "" if shared.kind == "reserve" else f" {printable(PurePath(shared.name).name)}"
    return f"{_KINDS.get(shared.kind, shared.kind)}{name}: {shared_places(shared)}"


def parameter_lines(plan: Plan) -> list[str]:
    params = plan.params
    where = [f"context {params.n_ctx or plan.breakdown.n_ctx}", f"{layers(plan)} on devices"]
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
    flags = flags_among(params.tensor_buft_overrides)
    for override in params.tensor_buft_overrides:
        flag = " ".join(option_words(PARAMETERS[flags[override][0]], flags[override][1])) if override in flags else ""
        lines.append(f"{flag or override.pattern} in {override.buffer_type}")
    return list(map(printable, lines))


def _estimate_lines(price: Price) -> Iterator[str]:
    workload = price.workload
    prompt, generation = speed(price.prompt_tokens_per_second), speed(price.generation_tokens_per_second)
    if price.inputs_per_second is not None:
        yield f"estimated {inputs_text(price)} · {prompt} t/s"
        return
    each = "" if workload.users == 1 else f" for each of {workload.users} users at once"
    yield (
        f"estimated {prompt} t/s prompt · {generation} t/s generation "
        f"({workload.prompt} + {workload.generate} tokens{each}: {price.seconds:.1f} s)"
    )
    if (full := full_context(price)) is not None:
        of_each = "" if workload.users == 1 else " of each user"
        rate = speed(full.generation_tokens_per_second)
        yield f"with a full context ({full.live_tokens} tokens{of_each}): {rate} t/s generation"


def _metadata(value: MetadataValue) -> str:
    if isinstance(value, Array):
        if value.values and len(value.values) == value.length and value.length <= 16:
            return "[" + ", ".join(str(item) for item in value.values) + "]"
        return f"{value.length} × {value.type}"
    return " ".join(printable(str(value), LONGEST_NAME).split())
