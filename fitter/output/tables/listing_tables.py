"""Shapes, their plans on a machine, and builds of llama.cpp: the tables of ``fitter shapes`` and ``llama-cpp``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fitter.llama.build.virtual_backends import compared
from fitter.machine.gpu import PROFILES
from fitter.output.arguments import command_line
from fitter.output.documents.document import SCHEMA
from fitter.output.tables.narrow import table_of
from fitter.parameters.table import USEFUL_SPEED
from fitter.text import human, mib, printable, speed

if TYPE_CHECKING:
    from fitter.llama.build.inspect_build import BuildReport
    from fitter.llama.build.virtual_backends import Compared
    from fitter.model.shapes.catalogue import ShapeInfo
    from fitter.planning.tables.quantization_rows import ShapePlans


def shapes_table(shapes: Sequence[ShapeInfo]) -> RenderableType:
    """Draw a row for each shape; one alone is shown with its source and its hyperparameters."""
    if len(shapes) == 1:
        return _alone(shapes[0])
    columns = ("shape", "architecture", "parameters", "layers", "experts", "context", "GiB")
    table = table_of(*columns, texts=("architecture",), spare=("layers", "experts", "GiB"))
    for each in shapes:
        table.add_row(
            each.name,
            each.architecture,
            _count(each.parameters),
            str(each.n_layer),
            str(each.n_expert or "-"),
            str(each.n_ctx_train),
            f"{each.bytes / 2**30:.1f}",
        )
    notes = (
        f"{len(shapes)} shapes: 'fitter --shape NAME' plans one, 'fitter shapes NAME' shows where its figures are from",
        "GiB: of all tensors before it is quantized; layers: with those for multi-token prediction",
    )
    return Group(table, Text(), *(Text(note, overflow="fold") for note in notes))


def plans_table(plans: ShapePlans, asked: Sequence[str] = ()) -> RenderableType:
    """Draw a row for each model with its best file type; ``asked`` are words of the command, for the last lines."""
    columns = ("shape", "type", "parameters", "MiB", "host MiB", "context", "prompt t/s", "t/s")
    table = table_of(*columns, texts=("type",), spare=("parameters", "prompt t/s", "MiB", "host MiB"))
    for each in plans.found:
        best = each.best
        rates = (
            "-" if rate is None else speed(rate) for rate in (best.prompt_tokens_per_second, best.tokens_per_second)
        )
        size = _count(each.shape.parameters), mib(best.bytes), mib(best.host_weights)
        table.add_row(each.shape.name, best.name, *size, str(best.n_ctx), *rates)
    return Group(*([table] if plans.found else []), *(Text(line, overflow="fold") for line in _below(plans, asked)))


def _below(plans: ShapePlans, asked: Sequence[str]) -> Iterator[str]:
    rate = f"{USEFUL_SPEED if plans.tokens_per_second is None else plans.tokens_per_second:g} t/s"
    if not plans.found:
        yield f"none of these models generates {rate} there: --tokens-per-second N accepts less"
        return
    yield (
        f"the most weights first, each in the file type with the most bits per weight that generates {rate} or more "
        "(--tokens-per-second)"
    )
    if plans.left:
        yield f"{plans.left} smaller models were not planned: --most N shows more, and words choose among them"
    if any(each.best.plan is not None and each.best.plan.host.total is None for each in plans.found):
        yield "host memory is unlimited here: --host-memory 32GiB says what the machine has"
    first = plans.found[0]
    yield f"plan one: fitter {command_line([f'{first.shape.name}:{first.best.name}', *asked], quoted=True)}"


def _alone(each: ShapeInfo) -> RenderableType:
    title = Text.assemble((each.title, "bold"), f" ({each.architecture})", overflow="fold")
    experts = f", {each.n_expert} experts" if each.n_expert else ""
    lines = [
        f"{_count(each.parameters)} parameters in {each.n_layer} layers{experts}, for up to {each.n_ctx_train} tokens",
        f"{human(each.bytes)} as it is converted ({each.type.upper()})",
        f"source: {each.source}",
        f"plan it: fitter --shape {each.name}",
        "",
        *_listed(each.config),
    ]
    return Group(title, *(Text(printable(line), overflow="fold") for line in lines))


def _listed(config: Mapping[str, Any]) -> Iterator[str]:
    for key, value in config.items():
        yield f"{key} = {_value(value)}"


def _value(value: Any) -> str:
    """Write a value on one line; a run of equal values is written once with its length."""
    if isinstance(value, list) and len(value) > 8:
        runs: list[tuple[Any, int]] = []
        for each in value:
            if runs and runs[-1][0] == each:
                runs[-1] = (each, runs[-1][1] + 1)
            else:
                runs.append((each, 1))
        return ", ".join(f"{each}" if n == 1 else f"{n}x {each}" for each, n in runs)
    if isinstance(value, dict):
        return ", ".join(f"{key} {_value(each)}" for key, each in value.items())
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def _count(parameters: int) -> str:
    """Write a number of parameters as in models' names: 8.03B, 360M, 1.03T."""
    size, unit = next((each for each in _UNITS if parameters >= 0.9995 * each[0]), _UNITS[-1])
    return f"{parameters / size:.3g}{unit}"


_UNITS = ((1e12, "T"), (1e9, "B"), (1e6, "M"))


def builds_to_dict(looks: Iterable[BuildReport]) -> dict[str, Any]:
    """Write the document of ``fitter llama-cpp``; a figure is ``null`` if the build does not tell it."""
    return {
        "schema": SCHEMA,
        "builds": [
            {
                **{name: None if value == "" else value for name, value in asdict(look).items()},
                "rules": {profile: rule and asdict(rule) for profile, rule in _rules(look).items()},
            }
            for look in looks
        ],
    }


def _rules(look: BuildReport) -> dict[str, Compared | None]:
    """Return the comparison of each profile's rules with a build."""
    return {profile: None if look.problem else compared(profile, look.ggml, look.commit) for profile in PROFILES}


def builds_table(looks: Iterable[BuildReport]) -> RenderableType:
    """Draw a row for each build, and below them why one cannot be used."""
    looks = tuple(looks)
    table = Table(box=None, pad_edge=False)
    table.add_column("llama.cpp", overflow="fold")
    for column in ("version", "ggml", "commit", "backends", "layout", "checked"):
        table.add_column(column, no_wrap=True)
    for look in looks:
        lists = " ".join(look.backends), look.layout, " ".join(look.checks)
        values = (look.version, look.ggml, look.commit, *lists)
        table.add_row(printable(look.where), *(printable(text) or "-" for text in values))
    if not looks:
        return Text(
            "There is no llama.cpp: pip install llama-cpp-python, or name a directory with libllama.so: fitter "
            "llama-cpp DIRECTORY"
        )
    parts: list[RenderableType] = [table, *(Text(printable(look.problem)) for look in looks if look.problem)]
    if usable := [look for look in looks if not look.problem]:
        rules = Table(box=None, pad_edge=False)
        rules.add_column("fitter's rules", overflow="fold")
        for profile in _rules(usable[0]):
            rules.add_column(profile, no_wrap=True)
        for look in usable:
            coverage = _rules(look).values()
            texts = (f"{each.equal} of {each.rows}" if each else "never compared" for each in coverage)
            rules.add_row(printable(look.where), *texts)
        parts += [Text(), rules, Text("loads of which fitter's rules and the build's own backend said the same bytes")]
    return Group(*parts)
