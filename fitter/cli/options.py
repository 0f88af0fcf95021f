"""Options that several subcommands share, named as in llama.cpp; a parameter's name is its keyword in the Python API.

An option that is not given is ``None`` and is not passed on, so that defaults are written down once, in ``fitter.api``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import click
from click.shell_completion import CompletionItem

from fitter.errors import UsageError
from fitter.llama import process
from fitter.output.formats import FORMATS
from fitter.output.units import from_mib
from fitter.planning.wording import parse_whole, shown
from fitter.text import as_log_line

_Function = TypeVar("_Function", bound=Callable[..., Any])

if TYPE_CHECKING:
    _ParamType = click.ParamType[Any]
else:
    # not generic before click 8.2
    _ParamType = click.ParamType

CACHE_TYPES = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1")
"""KV cache types that llama.cpp's own tools accept."""


class SectionOption(click.Option):
    """An option with the section of ``--help`` that it stands in."""

    def __init__(self, *args: Any, section: str = "Output", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.section = section


class Command(click.Command):
    """A command whose ``--help`` has its options in sections, in the order in which they were declared."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse; an option that is not there is named in full, where click takes ``-md`` for ``-m`` and ``-d``."""
        words = list(args)
        try:
            _check_model_option(self, ctx, words)
            rest = super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            name = next((word for word in words if word.startswith(error.option_name)), error.option_name)
            raise click.NoSuchOption(name.partition("=")[0], ctx=ctx) from None
        _take_model_option(self, ctx)
        return rest

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the sections."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if isinstance(param, click.Option) and record is not None:
                sections.setdefault(getattr(param, "section", "Output"), []).append(record)
        for title, records in sections.items():
            with formatter.section(title):
                formatter.write_dl(records, col_max=36)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the epilog as it stands."""
        if self.epilog:
            formatter.write_paragraph()
            formatter.write(self.epilog)


def _split(text: str) -> list[str]:
    """The parts of a list: llama.cpp takes commas and slashes, and several of them for one."""
    return re.split("[,/]+", text)


def _whole(kind: _ParamType, text: str, param: click.Parameter | None, ctx: click.Context | None) -> int:
    """The number that ``text`` is for ``param``."""
    try:
        return parse_whole(text)
    except UsageError as error:
        kind.fail(str(error), param, ctx)


class AtLeast(_ParamType):
    """A whole number from ``minimum`` up."""

    name = "N"

    def __init__(self, minimum: int) -> None:
        self.minimum = minimum

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """The number."""
        number = _whole(self, value, param, ctx)
        if number < self.minimum:
            self.fail(f"{shown(number)} is too small; the smallest is {self.minimum}", param, ctx)
        return number


class GpuLayers(_ParamType):
    """``auto``, ``all`` or a number; llama.cpp also reads -1 as ``auto`` and -2 as ``all``."""

    name = "N"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | None:
        """``None`` for ``auto``, -1 for ``all``."""
        if value in ("auto", "-1"):
            return None
        if value in ("all", "-2"):
            return -1
        if not value.isascii() or not value.isdigit():
            self.fail(f"'{value}' is not a number of layers, 'auto' or 'all'", param, ctx)
        return _whole(self, value, param, ctx)


class FlashAttn(_ParamType):
    """``on``, ``off`` or ``auto``, or one of the other words that llama.cpp has for them."""

    name = "on|off|auto"
    _WORDS: ClassVar[dict[str, tuple[str, ...]]] = {
        "on": ("on", "enabled", "true", "1"),
        "off": ("off", "disabled", "false", "0"),
        "auto": ("auto", "-1"),
    }

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """The first of the words."""
        for first, words in self._WORDS.items():
            if value in words:
                return first
        self.fail(f"'{value}' is not one of 'on', 'off', 'auto'", param, ctx)

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """The words that begin like ``incomplete``."""
        return [CompletionItem(word) for word in self._WORDS if word.startswith(incomplete)]


class Floats(_ParamType):
    """Numbers with commas (or slashes) between them."""

    name = "N0,N1,..."

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[float, ...]:
        """The numbers."""
        try:
            return tuple(float(part) for part in _split(value))
        except ValueError:
            self.fail(f"'{value}' is not a list of numbers such as 3,1", param, ctx)


class Mib(_ParamType):
    """A whole number of MiB, or with ``many`` several with commas between them."""

    name = "MiB"

    def __init__(self, *, many: bool = False) -> None:
        self.many = many

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> int | tuple[int, ...] | None:
        """Bytes: a number, or several where several were given."""
        parts = _split(value)
        if not all(part.isascii() and part.isdigit() for part in parts) or (len(parts) > 1 and not self.many):
            example = "1024 or 1024,512" if self.many else "1024"
            self.fail(f"'{value}' is not a number of MiB such as {example}", param, ctx)
        sizes = tuple(from_mib(_whole(self, part, param, ctx)) for part in parts)
        return sizes if len(sizes) > 1 else sizes[0]


class Names(_ParamType):
    """Names with commas between them."""

    name = "DEV0,DEV1,..."

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, ...]:
        """The names; none at all for ``none``."""
        if value == "none":
            return ()
        names = tuple(value.split(","))
        if not all(names):
            self.fail(f"'{value}' has an empty name in it", param, ctx)
        return names


def given(options: dict[str, Any]) -> dict[str, Any]:
    """Those of ``options`` that were given."""
    return {name: value for name, value in options.items() if value is not None}


def import_meanwhile(module: str, *, is_long: bool = False) -> None:
    """Import what shows the answer while the first one is waited for, or the first one that takes long."""
    process.meanwhile(lambda: import_module(module), is_long=is_long)


def log_line(line: str) -> None:
    """Show a line of llama.cpp's log."""
    click.echo(as_log_line(line), err=True)


def stacked(*options: Callable[[_Function], _Function]) -> Callable[[_Function], _Function]:
    """Several option decorators as one, shown in this order."""

    def decorate(function: _Function) -> _Function:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


def _option(section: str, *names: str, **settings: Any) -> Callable[[_Function], _Function]:
    settings.setdefault("default", None)
    return click.option(*names, cls=SectionOption, section=section, **settings)


def _flag(section: str, *names: str, **settings: Any) -> Callable[[_Function], _Function]:
    return _option(section, *names, is_flag=True, **settings)


def _repeated(ctx: click.Context, param: click.Parameter, values: tuple[str, ...] | None) -> tuple[str, ...] | None:
    return tuple(values) if values else None


def _split_commas(ctx: click.Context, param: click.Parameter, values: tuple[str, ...] | None) -> tuple[str, ...] | None:
    return tuple(part for value in values for part in value.split(",")) if values else None


_CONTEXT = "Context and batch"
_PLACEMENT = "Placement (kept as given; the rest is fitted around it)"
_SHARED = "Beside the model, in the same memory (measured, and kept free)"
_DEVICES = "Devices and limits"
_CASES = "Cases"
_SPEED = "Speed (estimated; it decides between what fits)"
_OUTPUT = "Output"

_MODEL = "Model"


class _NeededModel(click.Argument):
    """MODEL where there must be one. It may come with ``-m``, so that click cannot ask for it."""


_model_option = _option(
    _MODEL, "model_option", "-m", "--model", type=click.Path(), metavar="FILE", help="The model, in place of MODEL."
)
model_argument = stacked(
    click.argument("model", cls=_NeededModel, type=click.Path(), metavar="MODEL", required=False), _model_option
)
optional_model_argument = stacked(
    click.argument("model", type=click.Path(), metavar="[MODEL]", required=False), _model_option
)


def words_after(command: click.Command, ctx: click.Context) -> dict[str, int]:
    """How many words follow each of the options of ``command``, by each of their names."""
    return {
        name: 0 if param.is_flag or param.count else param.nargs
        for param in command.get_params(ctx)
        if isinstance(param, click.Option)
        for name in (*param.opts, *param.secondary_opts)
    }


def _check_model_option(command: click.Command, ctx: click.Context, words: Sequence[str]) -> None:
    """Raise ``click.NoSuchOption`` for ``-mx``: click would take it for ``-m x``, llama.cpp never does."""
    own = words_after(command, ctx)
    for before, word in pairwise(("", *words)):
        if word == "--":
            return
        if word.startswith("-m") and len(word) > 2 and word.partition("=")[0] not in own and not own.get(before):
            raise click.NoSuchOption(word, ctx=ctx)


def _take_model_option(command: click.Command, ctx: click.Context) -> None:
    """Make one model of MODEL and ``-m``."""
    if "model_option" not in ctx.params:
        return
    option, argument = ctx.params.pop("model_option"), ctx.params["model"]
    if option is not None and argument not in (None, option):
        raise click.UsageError(f"two models are given, '{argument}' and -m '{option}': give one", ctx)
    ctx.params["model"] = argument if option is None else option
    needed = next((param for param in command.params if isinstance(param, _NeededModel)), None)
    if ctx.params["model"] is None and needed is not None and not ctx.resilient_parsing:
        raise click.MissingParameter(ctx=ctx, param=needed)


def ctx_size_option(default: str) -> Callable[[_Function], _Function]:
    """``-c``; ``default`` says what happens without it."""
    return _option(
        _CONTEXT,
        "n_ctx",
        "-c",
        "--ctx-size",
        type=AtLeast(0),
        metavar="N",
        help=f"Context in tokens; 0 is the model's own. [default: {default}]",
    )


def device_option(section: str, text: str) -> Callable[[_Function], _Function]:
    """``-dev``; ``text`` says what the command does with them."""
    return _option(section, "devices", "-dev", "--device", type=Names(), help=text)


context_options = stacked(
    ctx_size_option("the largest that fits"),
    _option(
        _CONTEXT,
        "n_seq_max",
        "-np",
        "--parallel",
        type=AtLeast(1),
        metavar="N",
        help="Sequences (slots of llama-server) that share the context. [default: 1]",
    ),
    _option(
        _CONTEXT,
        "kv_unified",
        "-kvu/-no-kvu",
        "--kv-unified/--no-kv-unified",
        is_flag=True,
        help="One KV cache for all sequences. [default: each its own]",
    ),
    _option(
        _CONTEXT,
        "n_batch",
        "-b",
        "--batch-size",
        type=AtLeast(1),
        metavar="N",
        help="Logical batch size. [default: 2048]",
    ),
    _option(
        _CONTEXT,
        "n_ubatch",
        "-ub",
        "--ubatch-size",
        type=AtLeast(1),
        metavar="N",
        help="Physical batch size. [default: 512]",
    ),
    _option(
        _CONTEXT,
        "type_k",
        "-ctk",
        "--cache-type-k",
        type=click.Choice(CACHE_TYPES),
        metavar="TYPE",
        help=f"Type of K in the KV cache: {', '.join(CACHE_TYPES)}. [default: f16]",
    ),
    _option(
        _CONTEXT,
        "type_v",
        "-ctv",
        "--cache-type-v",
        type=click.Choice(CACHE_TYPES),
        metavar="TYPE",
        help="Type of V in the KV cache. [default: f16]",
    ),
    _option(
        _CONTEXT,
        "flash_attn",
        "-fa",
        "--flash-attn",
        type=FlashAttn(),
        metavar="on|off|auto",
        help="Flash attention. [default: auto]",
    ),
    _flag(_CONTEXT, "swa_full", "--swa-full", help="KV cache of full size for sliding-window layers."),
)

placement_options = stacked(
    _option(
        _PLACEMENT,
        "n_gpu_layers",
        "-ngl",
        "--gpu-layers",
        "--n-gpu-layers",
        type=GpuLayers(),
        help="Layers on the devices: a number, auto or all. [default: auto]",
    ),
    _option(
        _PLACEMENT,
        "tensor_split",
        "-ts",
        "--tensor-split",
        type=Floats(),
        help="Share of the layers that each device takes, such as 3,1.",
    ),
    _option(
        _PLACEMENT,
        "override_tensor",
        "-ot",
        "--override-tensor",
        multiple=True,
        callback=_split_commas,
        metavar="PATTERN=TYPE,...",
        help="Tensors matching a regular expression go to a buffer type, such as exps=CPU. Repeatable.",
    ),
    _flag(_PLACEMENT, "cpu_moe", "-cmoe", "--cpu-moe", help="All expert weights stay in host memory."),
    _option(
        _PLACEMENT,
        "n_cpu_moe",
        "-ncmoe",
        "--n-cpu-moe",
        type=AtLeast(0),
        metavar="N",
        help="Expert weights of the first N layers stay in host memory.",
    ),
    device_option(_PLACEMENT, "Devices to use, in this order; none for the CPU alone. [default: all]"),
    _option(
        _PLACEMENT,
        "split_mode",
        "-sm",
        "--split-mode",
        metavar="none|layer",
        help="One device alone, or layers shared among all of them. [default: layer]",
    ),
    _option(
        _PLACEMENT,
        "main_gpu",
        "-mg",
        "--main-gpu",
        type=AtLeast(-1),
        metavar="INDEX",
        help="The device to use with -sm none. [default: 0]",
    ),
    _option(
        _PLACEMENT,
        "offload_kqv",
        "-kvo/-nkvo",
        "--kv-offload/--no-kv-offload",
        is_flag=True,
        help="KV cache beside the layers on the devices, or in host memory. [default: on the devices]",
    ),
    _option(
        _PLACEMENT,
        "op_offload",
        "--op-offload/--no-op-offload",
        is_flag=True,
        help="Let devices compute with host weights on large batches. [default: let them]",
    ),
)

shared_options = stacked(
    _option(
        _SHARED,
        "model_draft",
        "-md",
        "--model-draft",
        "--spec-draft-model",
        type=click.Path(),
        metavar="FILE",
        help="A draft model; it follows the context, and goes to the device with which the plan is best.",
    ),
    _option(
        _SHARED,
        "n_gpu_layers_draft",
        "-ngld",
        "--gpu-layers-draft",
        "--n-gpu-layers-draft",
        "--spec-draft-ngl",
        type=GpuLayers(),
        help="Layers of the draft model on its devices: a number, auto or all. [default: auto]",
    ),
    _option(
        _SHARED,
        "devices_draft",
        "-devd",
        "--device-draft",
        "--spec-draft-device",
        type=Names(),
        help="Devices of the draft model; none for the host. [default: chosen]",
    ),
    _option(
        _SHARED,
        "type_k_draft",
        "-ctkd",
        "--cache-type-k-draft",
        "--spec-draft-type-k",
        type=click.Choice(CACHE_TYPES),
        metavar="TYPE",
        help="Type of K in the KV cache that drafting uses. [default: f16]",
    ),
    _option(
        _SHARED,
        "type_v_draft",
        "-ctvd",
        "--cache-type-v-draft",
        "--spec-draft-type-v",
        type=click.Choice(CACHE_TYPES),
        metavar="TYPE",
        help="Type of V in the KV cache that drafting uses. [default: f16]",
    ),
    _flag(_SHARED, "mtp", "--mtp", help="The model's own layers for multi-token prediction draft."),
    _option(
        _SHARED,
        "draft_max",
        "--spec-draft-n-max",
        type=AtLeast(1),
        metavar="N",
        help="Tokens that --mtp drafts at a time. [default: 3]",
    ),
    _option(
        _SHARED,
        "mmproj",
        "-mm",
        "--mmproj",
        type=click.Path(),
        metavar="FILE",
        help="A multimodal projector.",
    ),
    _option(
        _SHARED,
        "mmproj_device",
        "-mmdev",
        "--mmproj-device",
        metavar="DEV",
        help="The device of the projector; none for the host. [default: chosen]",
    ),
    _option(
        _SHARED,
        "image_min_tokens",
        "--image-min-tokens",
        type=AtLeast(1),
        metavar="N",
        help="Tokens that an image takes at least. [default: the projector's own]",
    ),
    _option(
        _SHARED,
        "image_max_tokens",
        "--image-max-tokens",
        type=AtLeast(1),
        metavar="N",
        help="Tokens that an image takes at most. [default: the projector's own]",
    ),
    _option(
        _SHARED,
        "lora",
        "--lora",
        multiple=True,
        callback=_split_commas,
        metavar="FILE,...",
        help="LoRA adapters. Repeatable.",
    ),
    _option(
        _SHARED,
        "lora_scaled",
        "--lora-scaled",
        multiple=True,
        callback=_split_commas,
        metavar="FILE:SCALE,...",
        help="LoRA adapters, each with its scale. Repeatable.",
    ),
    _option(
        _SHARED,
        "reserve",
        "--reserve",
        multiple=True,
        callback=_repeated,
        metavar="DEVICE=SIZE",
        help="Memory for whatever else, such as CUDA0=2GiB or host=8GiB. Repeatable.",
    ),
)

gpu_option = _option(
    _DEVICES,
    "gpus",
    "--gpu",
    multiple=True,
    callback=_repeated,
    metavar="SPEC",
    help="Plan for this GPU, which need not be here, instead of this machine's devices: rtx-4090, 2x rtx-3090, 24GiB, "
    "rtx-4090:free=20GiB, cuda:8.9:24564MiB, rocm:gfx1100:24GiB, vulkan:24GiB, metal:64GiB (all of a "
    "Mac's memory), or none for a machine without a GPU. Repeatable.",
)

profile_option = _option(
    _DEVICES,
    "profile",
    "--profile",
    metavar="library[:DIR]",
    help="What plays the NVIDIA cards of --gpu: library is the libggml-cuda.so of llama-cpp-python, or the one in "
    "DIR; no GPU is needed. [default: fitter's own model of it]",
)

rpc_option = _option(
    _DEVICES,
    "rpc",
    "--rpc",
    multiple=True,
    callback=_split_commas,
    metavar="HOST:PORT,...",
    help="Also use the devices of these rpc-servers, before all others. Only for trusted networks. Repeatable.",
)

rpc_options = stacked(
    rpc_option,
    _option(
        _DEVICES,
        "rpc_bandwidth",
        "--rpc-bandwidth",
        metavar="SIZE/s[,...]",
        help="How fast remote devices read their memory, such as 900GB/s: one value for all, or one for each. "
        "[default: measured once]",
    ),
)

timeout_option = _option(
    _DEVICES,
    "timeout",
    "--timeout",
    type=float,
    metavar="SECONDS",
    help="Longest wait for a single answer of llama.cpp or an rpc-server. [default: 120]",
)

calibration_options = stacked(
    device_option(_DEVICES, "Devices to calibrate. [default: all]"),
    rpc_option,
    _option(
        _DEVICES,
        "twin",
        "--twin",
        metavar="PROFILE",
        help="Profile of the virtual twins, such as cuda:8.6. [default: that of each device's backend]",
    ),
    _flag(_DEVICES, "no_store", "--no-store", help="Do not keep what was measured for the default margin."),
)

verification_options = stacked(
    _option(
        _OUTPUT,
        "plan",
        "--plan",
        metavar="FILE",
        help="Load the plan in a file that fitter --json wrote, instead of fitting one now.",
    ),
    _option(
        _OUTPUT,
        "tolerance",
        "--tolerance",
        metavar="SIZE",
        help="How far a number of bytes may exceed its prediction, such as 64KiB. [default: 0]",
    ),
)

catalogue_option = _flag(_DEVICES, "catalogue", "--catalogue", help="The GPUs that --gpu knows, with sources.")

time_limit_option = _option(
    _DEVICES,
    "time_limit",
    "--time-limit",
    type=float,
    metavar="SECONDS",
    help="Longest time for the whole search. The best plan found by then is confirmed with one more load, and printed. "
    "[default: no limit]",
)

limit_options = stacked(
    gpu_option,
    profile_option,
    rpc_options,
    timeout_option,
    time_limit_option,
    _option(
        _DEVICES,
        "margin",
        "-fitt",
        "--fit-target",
        type=Mib(many=True),
        metavar="MiB[,MiB...]",
        help="Memory that must stay free on each device: one number, or one per device. "
        "[default: 1024, or what fitter calibrate measured]",
    ),
    _option(
        _DEVICES,
        "fit_ctx",
        "-fitc",
        "--fit-ctx",
        type=AtLeast(1),
        metavar="N",
        help="Smallest context that fitting may choose. [default: 4096]",
    ),
    _option(
        _DEVICES,
        "host_memory",
        "--host-memory",
        metavar="SIZE",
        help="Host memory to plan with, such as 64GiB. [default: what is available here; unlimited beside --gpu]",
    ),
    _option(
        _DEVICES,
        "host_margin",
        "--host-margin",
        type=Mib(),
        metavar="MiB",
        help="Host memory that must stay free. [default: 1024]",
    ),
    _option(
        _DEVICES,
        "allow",
        "--allow",
        multiple=True,
        callback=_split_commas,
        metavar="LEVERS",
        help="What may be given up so that the model fits, or is 2 % faster by estimate, such as ubatch,kv-q8_0. "
        "ubatch: a smaller physical batch. kv-q8_0, kv-q4_0: a KV cache of that type, with flash attention. "
        "no-op-offload: devices no longer compute with weights on the host. context: less than -c, at least --fit-ctx. "
        "paging: weights on the host may be read from disk again and again.",
    ),
)

search_options = _option(
    _OUTPUT,
    "skeleton",
    "--skeleton/--no-skeleton",
    default=None,
    help="Search on a copy of the model's header without the tokenizer, which loads faster. The plan is measured on "
    "the model itself either way. [default: on]",
)

speed_options = stacked(
    _option(
        _SPEED,
        "prompt",
        "--prompt",
        type=AtLeast(1),
        metavar="N",
        help="Length, in tokens, of the prompt of the request to optimize for. [default: 2048]",
    ),
    _option(
        _SPEED,
        "generate",
        "--generate",
        type=AtLeast(1),
        metavar="N",
        help="Tokens that the request generates after its prompt. [default: 512]",
    ),
    _option(
        _SPEED,
        "objective",
        "--objective",
        metavar="OBJECTIVE",
        help="What to optimize: request (its total time), generation, prompt, or context (the largest). "
        "[default: request]",
    ),
    _option(
        _SPEED,
        "strategy",
        "--strategy",
        metavar="STRATEGY",
        help="How weights are placed: fastest, by estimate, or llama.cpp, like its own fit. [default: fastest]",
    ),
    _option(
        _SPEED,
        "host_bandwidth",
        "--host-bandwidth",
        metavar="SIZE/s",
        help="How fast the host reads its memory, such as 60GB/s. [default: measured once on this machine; "
        "40GB/s beside --gpu]",
    ),
)

regression_options = stacked(
    _option(
        _CASES,
        "cases_file",
        "--file",
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="The file of cases. [default: fitter.toml]",
    ),
    _option(
        _CASES,
        "lock_file",
        "--lock",
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="The lock: what was recorded of them. [default: fitter.lock beside the cases]",
    ),
    _option(
        _CASES,
        "jobs",
        "-j",
        "--jobs",
        type=AtLeast(1),
        metavar="N",
        help="Cases that are measured at the same time. [default: one per processor]",
    ),
)

selection_option = _option(
    _CASES,
    "expression",
    "-k",
    metavar="EXPRESSION",
    help="Only cases whose names match, such as 'chat or not q8'.",
)

report_options = stacked(
    _flag(_OUTPUT, "verbose", "-v", "--verbose", help="Also show the cases that did not change."),
    _flag(_OUTPUT, "as_markdown", "--markdown", help="Markdown on stdout, for a comment on a pull request."),
    _option(
        _OUTPUT,
        "junit",
        "--junit",
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="Also write JUnit XML to a file.",
    ),
)

json_option = _flag(_OUTPUT, "as_json", "--json", help="JSON on stdout, sizes in bytes.")

format_option = _option(
    _OUTPUT,
    "output_format",
    "--format",
    type=click.Choice(tuple(FORMATS)),
    metavar="FORMAT",
    help="What is written to stdout. [default: args]\n\n\b\n"
    + "\n".join(f"{name}: {text}" for name, text in FORMATS.items()),
)

anyway_option = _flag(
    _OUTPUT,
    "anyway",
    "--anyway",
    help="Also print the arguments of a plan that does not fit. The exit status stays 1.",
)

verbose_option = _option(
    _OUTPUT,
    "verbose",
    "-v",
    "--verbose",
    count=True,
    default=0,
    help="Show every step, memory per buffer type and the reasons for the plan; -vv: also llama.cpp's log.",
)
