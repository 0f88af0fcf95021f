"""``fitter explore``: plan models on machines, with every combination of contexts, KV types and file types."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fitter.cli import answers, options, typed_words
from fitter.errors import UsageError
from fitter.parameters.table import CONTEXT, DEVICES, OUTPUT, PARAMETERS, PROGRAM, SPEED

if TYPE_CHECKING:
    from fitter.planning.tables.exploration import ExploredCell

_EPILOG = """\
Examples:
  fitter explore model.gguf --gpu rtx-3060 --gpu rtx-4090 --gpu "2x rtx-3090" -c 8192,32768
  fitter explore model.gguf --gpu rtx-3090 --gpu "rtx-4090 + rtx-3060" --type Q4_K_M,Q8_0
  fitter explore models/ --gpu rtx-3090 -c 32k -ctk f16,q8_0 -ctv f16,q8_0
  fitter explore model.gguf --gpu rtx-3060 --gpu rtx-4090 --price rtx-3060=280 --price rtx-4090=1600 \\
      --answer "32k context at 20 t/s"
  fitter explore *.gguf --gpu rtx-4090 --resume cells.jsonl -o grid.csv

Exit status: 0 a cell fits, or with --answer a machine does it; 1 none; 2 usage error; 3 no model can be read,
or llama.cpp failed; 5 a file cannot be written.
"""
_GRID = "Grid (every combination is a plan)"
_WHERE = "Where cells are planned"
_FIXED = {
    PROGRAM: ("program", "llama_cpp"),
    CONTEXT: ("n_seq_max", "flash_attn", "n_batch", "fit_ctx"),
    DEVICES: ("host_memory", "host_margin", "margin", "allow"),
    SPEED: ("prompt", "generate", "workload", "users", "host_bandwidth", "objective"),
    OUTPUT: ("timeout",),
}
"""Parameters with one value for all cells, by section."""


def _list_of(name: str) -> Callable[..., Any]:
    """Make a callback that splits a list at commas, and checks each value."""

    def split(ctx: click.Context, param: click.Parameter, texts: tuple[str, ...]) -> list[Any] | None:
        kind = PARAMETERS[name].kind
        try:
            words = [word.strip() for text in texts for word in text.split(",")]
            return [PARAMETERS[name].check(kind.parse(word)) for word in words] or None
        except UsageError as error:
            raise click.BadParameter(str(error), ctx, param) from None

    return split


def _costs(option: str) -> Callable[..., Any]:
    """Make a callback that parses ``CARD=NUMBER``."""

    def parse(ctx: click.Context, param: click.Parameter, texts: tuple[str, ...]) -> dict[str, float] | None:
        costs: dict[str, float] = {}
        for text in texts:
            name, equals, number = text.rpartition("=")
            try:
                value = float(number)
            except ValueError:
                equals = ""
            if not equals or not name.strip():
                raise click.BadParameter(f"'{text}': give a card and its number, such as rtx-4090=1600", ctx, param)
            if name in costs:
                raise click.BadParameter(f"{name} is given twice: leave one of them out", ctx, param)
            costs[name] = value
        return costs or None

    return parse


def _axis_option(name: str, text: str) -> Callable[..., Any]:
    names = PARAMETERS[name].options
    return options.grid_option(_GRID, name, *names, multiple=True, metavar="LIST", callback=_list_of(name), help=text)


@click.command(cls=options.Command, epilog=_EPILOG)
@click.argument("models", nargs=-1, type=click.Path(), metavar="MODEL...")
@options.shapes_option
@options.grid_option(
    _GRID,
    "machines",
    "--gpu",
    shell_complete=typed_words.complete_gpus,
    multiple=True,
    metavar="SPEC",
    brief="A machine: rtx-4090, '2x rtx-3090', none.",
    help="A machine: rtx-4090, '2x rtx-3090', 'rtx-4090 + rtx-3060', or none for one without a GPU. A comma begins "
    "another machine: rtx-3060,rtx-4090. Repeatable.",
)
@_axis_option(
    "n_ctx", "Contexts in tokens, such as 8k,32k. [default: the one that --answer asks for, else a fit chooses]"
)
@_axis_option("type_k", "Types of K in the KV cache, such as f16,q8_0. [default: f16]")
@_axis_option(
    "type_v",
    "Types of V in the KV cache, one for each of -ctk. With -ctk f16,q8_0 -ctv f16,q8_0 there are two caches. "
    "[default: f16, also with -ctk, as in llama.cpp]",
)
@options.grid_option(
    _GRID,
    "cross_cache_types",
    "--cross-cache-types",
    is_flag=True,
    brief="",
    help="Combine every type of -ctk with every type of -ctv.",
)
@_axis_option("n_ubatch", "Micro batches in tokens, such as 512,2048. [default: chosen by the fit]")
@options.grid_option(
    _GRID,
    "types",
    "--type",
    shell_complete=typed_words.complete_types,
    multiple=True,
    metavar="LIST",
    brief="File types, such as Q4_K_M,Q8_0.",
    help="File types of llama-quantize, such as Q4_K_M,Q8_0, planned from the model's header."
    " [default: the file's own]",
)
@options.grid_option(
    _GRID,
    "max_cells",
    "--max-cells",
    type=int,
    metavar="N",
    brief="",
    help="The most cells that are planned. [default: 2000]",
)
@options.grid_option(
    "Answer",
    "answer",
    "--answer",
    metavar="TEXT",
    brief="The cheapest that does this: '32k context at 20 t/s'.",
    help="Name the cheapest machine that does this, such as '32k context at 20 t/s', 'prompt 500 t/s' or 'fits', and "
    "confirm it on the model itself.",
)
@options.grid_option(
    "Answer",
    "prices",
    "--price",
    multiple=True,
    metavar="CARD=N",
    callback=_costs("--price"),
    brief="The price of a card, such as rtx-4090=1600.",
    help="The price of a card in any currency, such as rtx-4090=1600. Repeatable. [default: none; the least memory is "
    "the cheapest]",
)
@options.grid_option(
    "Answer",
    "watts",
    "--watts",
    multiple=True,
    metavar="CARD=N",
    callback=_costs("--watts"),
    brief="",
    help="The watts of a card, in place of its price. Repeatable.",
)
@options.grid_option(
    _WHERE,
    "jobs",
    "-j",
    "--jobs",
    type=int,
    metavar="N",
    help="How many cells are planned at the same time. [default: one per processor]",
)
@options.grid_option(
    _WHERE,
    "resume",
    "--resume",
    type=click.Path(path_type=Path),
    metavar="FILE",
    brief="Write each cell here, and plan it only once.",
    help="Write each cell to this file when it is done, and plan none again that is there.",
)
@options.stacked(*(options.parameter(name, section=section) for section, names in _FIXED.items() for name in names))
@options.grid_option(
    OUTPUT,
    "output",
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    metavar="FILE",
    brief="Also write all cells, as .csv, .json or .parquet.",
    help="Also write all cells to a file that ends in .csv, .json or .parquet.",
)
@options.page_option
@options.json_option
@options.verbose_option
def explore(
    models: tuple[str, ...],
    machines: tuple[str, ...],
    types: tuple[str, ...] | None,
    resume: Path | None,
    output: Path | None,
    page_file: Path | None,
    as_json: bool | None,
    verbose: int,
    **given: Any,
) -> int:
    """Plan every MODEL on every machine, with every context, KV type, micro batch and file type that is named.

    MODEL may be a directory or a repository (hf://org/repo): every model in it. Each --gpu is a machine of its own
    here. Every row of the table is a plan that llama.cpp has measured, on a copy of the model's header; what --answer
    names is confirmed on the model itself. Marked are the best trade-offs: plans that no other one beats in context,
    speed and price.
    """
    from fitter import programs
    from fitter.api.explore import explore_grid
    from fitter.output.tables import exploration_table

    if not models:
        raise click.UsageError("no model is given: name one, such as model.gguf or --shape llama-3.1-8b")
    if not machines:
        raise click.UsageError("no machine is given: name one with --gpu, such as rtx-4090 or '2x rtx-3090'")
    if output is not None:
        exploration_table.check_output(output)
        answers.check_place("-o", output)
        if resume is not None and output.resolve() == resume.resolve():
            raise UsageError(f"-o {output} is the file of --resume too: name another one")
    if page_file is not None:
        answers.check_files({"--report": page_file}, *models, others={"-o": output, "--resume": resume})
    given["program"] = given["program"] or programs.chosen("llama-server")
    done = [0, 0]
    try:
        with nullcontext() if verbose < 0 else answers.counted(sys.stderr, "planning cells") as count:

            def tell(cell: ExploredCell, number: int, total: int) -> None:
                done[:] = number, total
                if count is not None:
                    count(number, total, cell.machine)

            exploration = explore_grid.explore(
                models,
                machines,
                types=[word for text in types for word in text.split(",")] if types else None,
                resume=resume,
                on_cell=tell,
                **options.given(given),
            )
    except KeyboardInterrupt:
        if not done[1]:
            raise
        where = f"are in {resume}: the same command plans the rest" if resume else "are lost: --resume FILE keeps them"
        click.echo(f"fitter: interrupted, {done[0]} of {done[1]} cells {where}", err=True)
        raise
    if output is not None:
        exploration_table.write(exploration, output)
    status = answers.print_plans(exploration, "exploration", as_json=as_json, verbose=verbose)
    if page_file is not None:
        from fitter.output.pages.exploration_page import exploration_page

        sys.stdout.flush()
        answers.write_file(page_file, exploration_page(exploration.to_dict()))
    return status
