"""Options of several commands, named as in llama.cpp; a parameter's name is its keyword in the Python API.

An absent option is ``None`` and is not passed on: only ``fitter.parameters.table`` has defaults.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from fitter.cli import typed_words
from fitter.cli.group import HelpCommand
from fitter.cli.group import SectionOption as SectionOption
from fitter.cli.typed_words import check_model_option, of_fit, similar_option, with_meant_gpu
from fitter.errors import UsageError
from fitter.llama.worker import process
from fitter.model.shapes.catalogue import CONFIG, DEFAULT_TYPE, SHAPE, named
from fitter.parameters import kinds, table
from fitter.parameters.kinds import Kind
from fitter.parameters.table import DEVICES, GOAL_HELP, GOALS, OUTPUT, USEFUL_CONTEXT, USEFUL_SPEED, Parameter
from fitter.parameters.targets import FLEET_FORMATS, FORMATS

_Function = TypeVar("_Function", bound=Callable[..., Any])

if TYPE_CHECKING:
    _ParamType = click.ParamType[Any]
    _Choice = click.Choice[str]
else:
    # not generic before click 8.2
    _ParamType = click.ParamType
    _Choice = click.Choice


class Command(HelpCommand):
    """A command that names an unknown option in full, with ``-m`` for MODEL and ``-q`` beside ``-v``."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse, and name an unknown option in full: click would read ``-mx`` as ``-m`` and ``-x``."""
        words = list(args)
        try:
            check_model_option(self, ctx, words)
            rest = super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            word = next((word for word in words if word.startswith(error.option_name)), error.option_name)
            name = word.partition("=")[0]
            meant = similar_option(self, ctx, name)
            hint = f"did you mean {meant}?" if meant else of_fit(self, ctx, name)
            raise click.NoSuchOption(name, hint and f"No such option '{name}': {hint}", ctx=ctx) from None
        except click.UsageError as error:
            raise with_meant_gpu(error) from None
        _take_model_option(self, ctx)
        _take_quiet(ctx)
        return rest


class _KindType(_ParamType):
    """click's type for a parameter; the parameter's kind parses the word."""

    def __init__(self, kind: Kind) -> None:
        self.name = kind.metavar or "text"
        self._kind = kind

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return self._kind.parse(value)
        except UsageError as error:
            self.fail(str(error), param, ctx)


class _ChoiceType(_Choice):
    """click's type for a parameter with a few values, each with other spellings."""

    def __init__(self, kind: kinds.OneOf) -> None:
        super().__init__(tuple(kind.words))
        self._kind = kind

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        word = self._kind.parse(value)
        if param is not None and param.name == "program" and word in FORMATS and word not in self.choices:
            self.fail(f"'{word}' is a format of plans: write --format {word}", param, ctx)
        return super().convert(word, param, ctx)


def given(options: dict[str, Any]) -> dict[str, Any]:
    """Drop options that are ``None``."""
    return {name: value for name, value in options.items() if value is not None}


def import_meanwhile(module: str) -> None:
    """Import ``module`` while a worker computes its first answer."""
    process.meanwhile(lambda: import_module(module))


def stacked(*options: Callable[[_Function], _Function]) -> Callable[[_Function], _Function]:
    """Combine option decorators into one, in this order of ``--help``."""

    def decorate(function: _Function) -> _Function:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


def _option(section: str, *names: str, **settings: Any) -> Callable[[_Function], _Function]:
    return click.option(*names, cls=SectionOption, section=section, **{"default": None, **settings})


grid_option = _option
"""Declare an option of a single command."""


def _flag(section: str, *names: str, **settings: Any) -> Callable[[_Function], _Function]:
    return _option(section, *names, is_flag=True, **settings)


def _repeated(ctx: click.Context, param: click.Parameter, values: tuple[str, ...] | None) -> tuple[str, ...] | None:
    return tuple(values) if values else None


def _split_commas(ctx: click.Context, param: click.Parameter, values: tuple[str, ...] | None) -> tuple[str, ...] | None:
    return tuple(part for value in values for part in value.split(",")) if values else None


_CASES = "Cases"
_MODEL = "Model"
_CLAIM = "Claim for a device"


class _RequiredModel(click.Argument):
    """A required MODEL. click itself cannot require it, because ``-m`` may replace it."""


_model_option = _option(
    _MODEL,
    "model_option",
    "-m",
    "--model",
    type=click.Path(),
    metavar="FILE",
    brief="",
    help="The model, instead of MODEL: a GGUF file or its address, or the first one of a split model.",
)
_shape_options = stacked(
    _option(
        _MODEL,
        "shape",
        "--shape",
        shell_complete=typed_words.complete_shapes,
        metavar="NAME[:TYPE]",
        brief="A well-known model without a file, by name.",
        help="A well-known model without a file, instead of MODEL: see fitter shapes. TYPE is a file type of "
        f"llama-quantize. [default: {DEFAULT_TYPE}]",
    ),
    _option(
        _MODEL,
        "config",
        "--config",
        metavar="FILE[:TYPE]",
        brief="",
        help="The config.json of a model on Hugging Face, or its address, instead of MODEL. TYPE as for --shape.",
    ),
)
model_argument = stacked(
    click.argument("model", cls=_RequiredModel, type=click.Path(), metavar="MODEL", required=False),
    _model_option,
    _shape_options,
)
model_or_machine = stacked(
    click.argument("model", type=click.Path(), metavar="MODEL", required=False), _model_option, _shape_options
)
shapes_option = _option(
    _MODEL,
    "shapes",
    "--shape",
    shell_complete=typed_words.complete_shapes,
    multiple=True,
    metavar="NAME[:TYPE]",
    brief="A well-known model without a file, by name.",
    help="A well-known model without a file, beside or instead of others: see fitter shapes. Repeatable. "
    f"[default of TYPE: {DEFAULT_TYPE}]",
)
optional_model_argument = stacked(
    click.argument("model", type=click.Path(), metavar="[MODEL]", required=False), _model_option
)


def _take_model_option(command: click.Command, ctx: click.Context) -> None:
    """Combine MODEL, ``-m``, ``--shape`` and ``--config`` into one parameter."""
    if shapes := ctx.params.pop("shapes", None):
        several = "files" if "files" in ctx.params else "models"
        ctx.params[several] = (*ctx.params[several], *(named(SHAPE, name) for name in shapes))
    if "model_option" not in ctx.params:
        return
    option, model = ctx.params.pop("model_option"), ctx.params["model"]
    shape, config = ctx.params.pop("shape", None), ctx.params.pop("config", None)
    given = {
        f"'{model}'": model,
        f"-m '{option}'": option,
        f"--shape '{shape}'": None if shape is None else named(SHAPE, shape),
        f"--config '{config}'": None if config is None else named(CONFIG, config),
    }
    words = [word for word, value in given.items() if value is not None]
    values = list(dict.fromkeys(value for value in given.values() if value is not None))
    if len(values) > 1:
        raise click.UsageError(f"two models are given, {words[0]} and {words[-1]}: give one", ctx)
    ctx.params["model"] = values[0] if values else None
    required = next((param for param in command.params if isinstance(param, _RequiredModel)), None)
    if ctx.params["model"] is None and required is not None and not ctx.resilient_parsing:
        raise click.MissingParameter(ctx=ctx, param=required)


def _take_quiet(ctx: click.Context) -> None:
    """Make ``--quiet`` a ``verbose`` of -1."""
    if ctx.params.pop("quiet", None):
        if ctx.params["verbose"]:
            raise click.UsageError("-q prints less and -v more: give one of them", ctx)
        ctx.params["verbose"] = -1


def parameter(name: str, **settings: Any) -> Callable[[_Function], _Function]:
    """Declare the option of the parameter ``name``; ``settings`` replace click's settings from the table."""
    return _option_of(table.PARAMETERS[name], **settings)


def _option_of(each: Parameter, **settings: Any) -> Callable[[_Function], _Function]:
    kind = each.kind
    all_settings: dict[str, Any] = {"help": each.text, "brief": each.brief}
    if isinstance(kind, kinds.Flag):
        all_settings["is_flag"] = True
    else:
        all_settings["metavar"] = kind.metavar
        all_settings["type"] = _ChoiceType(kind) if isinstance(kind, kinds.OneOf) else _KindType(kind)
    if kind.is_repeated:
        all_settings |= {"multiple": True, "callback": _split_commas if kind.has_commas else _repeated, "type": str}
    if isinstance(kind, kinds.Path):
        all_settings["type"] = click.Path()
    if isinstance(kind, kinds.Gpus):
        all_settings["shell_complete"] = typed_words.complete_gpus
    all_settings |= settings
    return _option(all_settings.pop("section", each.section), each.name, *each.options, **all_settings)


def fitting_options(without: str = "") -> Callable[[_Function], _Function]:
    """Declare the options of all keywords of ``fit`` but one, in the sections of ``--help``."""
    offered = [each for each in table.taken_by(table.Fitting) if each.options and each.name != without]
    sections = (table.PROGRAM, table.CONTEXT, table.PLACEMENT, table.SHARED, DEVICES, table.SPEED, OUTPUT)
    return stacked(*(_option_of(each) for title in sections for each in offered if each.section == title))


gpu_option = parameter("gpus")
rpc_option = parameter("rpc")
llama_cpp_option = parameter("llama_cpp")
timeout_option = parameter("timeout")

verification_options = stacked(
    _option(
        OUTPUT,
        "plan",
        "--plan",
        metavar="FILE",
        help="Load the plan in this file, written by fitter --json, instead of fitting one now.",
    ),
    _option(
        OUTPUT,
        "tolerance",
        "--tolerance",
        metavar="SIZE",
        brief="",
        help="How much larger than predicted a byte count may be, such as 64KiB. [default: 0]",
    ),
    _option(
        OUTPUT,
        "server",
        "--server",
        metavar="PATH",
        help="With --for llama-server: the llama-server to start, or a directory that has one. [default: that of "
        "--llama-cpp, or the one on the PATH]",
    ),
    _option(
        OUTPUT,
        "prompts",
        "--prompts",
        type=_KindType(table.PARAMETERS["prompts"].kind),
        metavar="N",
        help="With --for llama-server: prompts that it is sent. [default: 40]",
    ),
)

catalogue_option = _flag(DEVICES, "catalogue", "--catalogue", help="List the GPUs that --gpu knows, with sources.")


def _file(
    name: str, option: str, text: str, section: str = _CASES, **settings: Any
) -> Callable[[_Function], _Function]:
    return _option(section, name, option, type=click.Path(path_type=Path), metavar="FILE", help=text, **settings)


def _jobs(text: str) -> Callable[[_Function], _Function]:
    return _option(
        _CASES, "jobs", "-j", "--jobs", type=_KindType(kinds.Whole(least=1)), metavar="N", brief="", help=text
    )


tuning_options = stacked(
    _option(
        OUTPUT,
        "minutes",
        "--minutes",
        type=_KindType(kinds.Rate("MINUTES", "minutes")),
        metavar="MINUTES",
        brief="Minutes for all runs.",
        help="Minutes for all runs; the plan itself always runs. [default: 10]",
    ),
    _option(
        OUTPUT,
        "server",
        "--server",
        metavar="PATH",
        brief="The llama-server to run.",
        help="The llama-server to start, or a directory that has one. [default: that of --llama-cpp, or the one on the "
        "PATH]",
    ),
    _flag(OUTPUT, "no_store", "--no-store", brief="", help="Do not store what was measured for later plans."),
    _file("export", "--export", "Write what was measured on this machine into this file.", OUTPUT),
    _file("imported", "--import", "Use what was measured on a machine like this one, from this file.", OUTPUT),
)

_trust_option = _flag(
    _CASES,
    "trust",
    "--trust",
    brief="",
    help="Use native code that the file with the cases names (llama_cpp or profile with a path), addresses that are "
    "read with this machine's own keys (s3://, sftp://, ...), and patterns of models that lead out of its directory. "
    "FITTER_TRUST=1 does the same.",
)

regression_options = stacked(
    # users' scripts have --file
    _file("cases_file", "--cases", "The file with the cases. [default: fitter.toml]", former=("--file",)),
    _file(
        "lock_file",
        "--lock",
        "The lock, with the recorded memory of the cases. [default: fitter.lock beside the cases]",
    ),
    _jobs("How many cases to measure at the same time. [default: one per processor]"),
    parameter(
        "llama_cpp",
        section=_CASES,
        help=f"{table.PARAMETERS['llama_cpp'].help} [default: what the cases name, or python]",
    ),
    _trust_option,
)


def _format_option(formats: Mapping[str, str], text: str) -> Callable[[_Function], _Function]:
    return _option(
        OUTPUT,
        "output_format",
        "--format",
        type=click.Choice(tuple(formats)),
        metavar="FORMAT",
        brief=f"{', '.join(formats)}.",
        help=f"{text}\n\n\b\n" + "\n".join(f"{name}: {about}" for name, about in formats.items()),
    )


fleet_options = stacked(
    _file("cases_file", "--cases", "The file with the cases and the fleet. [default: fitter.toml]"),
    _option(
        _CASES,
        "goal",
        "--goal",
        type=click.Choice(GOALS),
        metavar="GOAL",
        brief=f"{', '.join(GOALS)}.",
        help=f"{GOAL_HELP} [default: what the file says, or time]",
    ),
    _flag(DEVICES, "is_here", "--here", help="Plan for the devices of this machine, whatever the cases name."),
    rpc_option,
    parameter("llama_cpp"),
    _jobs("How many models to measure at the same time. [default: one per processor; 1 on this machine's devices]"),
    _trust_option,
    _format_option(FLEET_FORMATS, "The file of another program on stdout. [default: tables]"),
)

builds_option = _option(
    "Builds",
    "builds",
    "--llama-cpp",
    multiple=True,
    callback=_repeated,
    metavar="WHERE",
    brief="A build of llama.cpp, from the oldest on.",
    help="A build of llama.cpp, from the oldest to the newest: a llama-server, a directory with libllama and ggml's "
    "libraries, or python for that of the installed llama-cpp-python, or else of fitter's wheel. Repeatable.",
)

subject_options = stacked(
    _file("cases_file", "--cases", "Compare the cases in this file, such as fitter.toml."),
    _jobs("How many to measure at the same time. [default: one per processor; 1 on this machine's own devices]"),
    _trust_option,
)

selection_option = _option(
    _CASES,
    "expression",
    "-k",
    shell_complete=typed_words.complete_cases,
    metavar="EXPRESSION",
    help="Only cases whose names match, such as 'chat or not q8'.",
)

markdown_option = _flag(
    OUTPUT, "as_markdown", "--markdown", help="Markdown on stdout, for a comment on a pull request."
)

report_options = stacked(
    _flag(OUTPUT, "verbose", "-v", "--verbose", help="Also show the cases that did not change."),
    markdown_option,
    _file("junit", "--junit", "Also write JUnit XML to a file.", OUTPUT),
)

page_option = _file("page_file", "--report", "Also write a report to a file, as HTML to forward.", OUTPUT)

page_options = stacked(
    _option(
        OUTPUT,
        "page_file",
        "-o",
        "--output",
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="The report, one file of HTML; - is stdout.",
    ),
    _file("svg_file", "--svg", "The pictures of it alone, as SVG: for a README.", OUTPUT),
    _flag(
        OUTPUT,
        "no_contexts",
        "--no-contexts",
        help="Leave out what other contexts would take. [default: up to 9 of them are planned, for 20 seconds at most]",
    ),
)

history_options = stacked(
    _file(
        "csv_file",
        "--csv",
        "Also write bytes by case, build and buffer type to a file, as CSV.",
        OUTPUT,
        brief="Also write bytes as CSV.",
    ),
    _file("svg_file", "--svg", "Also draw the differences, as SVG.", OUTPUT),
    _file("badge_file", "--badge", "Also write what shields.io shows as a badge, as JSON.", OUTPUT, brief=""),
)


def _choice_options(section: str, types: str) -> Callable[[_Function], _Function]:
    """Options that choose among plans in several file types; ``types`` is the help for ``--type``."""
    return stacked(
        _option(
            section,
            "types",
            "--type",
            multiple=True,
            callback=_split_commas,
            shell_complete=typed_words.complete_types,
            metavar="TYPE",
            brief="Only this file type, such as Q4_K_M.",
            help=types,
        ),
        _useful_speed(section),
    )


def _useful_speed(section: str) -> Callable[[_Function], _Function]:
    return _option(
        section,
        "tokens_per_second",
        "--tokens-per-second",
        type=float,
        metavar="N",
        brief="A useful speed, in tokens per second.",
        help="The speed of generation that is useful to you: the best is the most bits per weight that generates N "
        f"tokens per second, with {USEFUL_CONTEXT} tokens of context or more unless -c or --fit-ctx sets others. "
        f"[default: {USEFUL_SPEED:g}]",
    )


best_shapes_options = stacked(
    _useful_speed(DEVICES),
    _option(
        DEVICES,
        "most",
        "--most",
        type=_KindType(kinds.Whole(least=1)),
        metavar="N",
        brief="List so many models for --gpu.",
        help="List so many models for --gpu, those with the most weights first. [default: 12]",
    ),
)

quantization_options = _choice_options(
    _MODEL, "Only this file type of llama-quantize, such as Q4_K_M. Repeatable. [default: all that suit the model]"
)
claim_options = stacked(
    _option(
        _MODEL,
        "quant",
        "--quant",
        metavar="TYPE",
        brief="The file type, such as Q4_K_M.",
        help=f"The model's file type, if it has several or no file. [default: {DEFAULT_TYPE}]",
    ),
    _option(
        _CLAIM,
        "min_tps",
        "--min-tps",
        type=_KindType(kinds.Rate("T/S")),
        metavar="T/S",
        brief="Claim a device that generates so fast.",
        help="Say what one device must have to generate so many tokens per second, instead of what a pod takes.",
    ),
    _option(
        _CLAIM,
        "efficiency",
        "--efficiency",
        type=_KindType(kinds.Whole(least=1, most=100)),
        metavar="PERCENT",
        brief="Percent of its bandwidth that a device reaches.",
        help="With --min-tps: percent of its datasheet's bandwidth that a device reaches in reading the weights. "
        "[default: estimated as for plans]",
    ),
)
repository_options = _choice_options(
    "Model",
    "Only the models of this file type, such as Q4_K_M, by the names of their files. Repeatable. [default: all]",
)

json_option = _flag(OUTPUT, "as_json", "--json", help="JSON on stdout, sizes in bytes.")

format_option = _format_option(FORMATS, "The format of the result on stdout. [default: args]")

anyway_option = _flag(
    OUTPUT,
    "anyway",
    "--anyway",
    brief="",
    help="Also print a plan that does not fit, while the exit status stays 1; with --format ollama also one that "
    "Ollama can be told only in part.",
)

alternatives_option = _flag(
    OUTPUT,
    "alternatives",
    "--alternatives/--no-alternatives",
    brief="",
    help="Say what else could be had, such as a longer context or a smaller quantization, with a quarter of the "
    "search's dummy loads. [default: without JSON]",
)

verbose_option = stacked(
    _option(
        OUTPUT,
        "verbose",
        "-v",
        "--verbose",
        count=True,
        default=0,
        brief="Show every step and the reasons; -vv: logs too.",
        help="Show every step, memory per buffer type and the reasons for the plan; -vv: also llama.cpp's log.",
    ),
    _flag(OUTPUT, "quiet", "-q", "--quiet", help="Print only the answer, errors, and what does not fit."),
)
"""Both set ``verbose``, which is -1 with ``--quiet``."""
