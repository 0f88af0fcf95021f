"""Write a plan as arguments of llama.cpp, for llama-server, llama-cli and llama-fit-params alike.

Formats of other programs are made from the same arguments as pairs of an option and its value, so that none can leave
one out.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fitter.errors import PlanError, Remedy
from fitter.model import location
from fitter.model.files.source import split_name, split_path
from fitter.parameters.kinds import Flag
from fitter.parameters.table import PARAMETERS, SHARED, Parameter, of_a_load
from fitter.planning.placing.host_flags import flags_among
from fitter.planning.plan.plan import Plan
from fitter.planning.request.summary import SharedUse
from fitter.version import numbers_of

_LOAD_MODE = (0, 19, 0)
"""First version of ggml whose programs have ``--load-mode`` in place of ``_OLDER_MODES``."""
_OLDER_MODES = {
    "none": ["--no-mmap"],
    "mmap": [],
    "mlock": ["--no-mmap", "--mlock"],
    "mmap+mlock": ["--mlock"],
    "dio": ["--direct-io"],
}
"""Arguments of older programs for each load mode."""

_N_CPU_FFN = (0, 24, 0)
"""First version of ggml whose programs all have ``-ncffn``: llama.cpp 0.4.0 has it with the version before."""


def arguments(plan: Plan) -> list[str]:
    """List the arguments that make a llama.cpp program allocate the measured bytes of ``plan``.

    They include every parameter that affects memory, unless it has a default that all three programs share.

    Raises:
        PlanError: llama.cpp has no argument for one of the plan's parameters.
    """
    args: list[str] = []
    for name, each in of_a_load().items():
        if each.is_planned and each.options and each.section != SHARED:
            args += _words(plan, each)
        if name == "n_ctx" and plan.rpc:
            # before -dev, which names their devices
            args += [PARAMETERS["rpc"].option, ",".join(plan.rpc)]
    return [*args, *_shared(plan.shared), "-fit", "off"]


def _words(plan: Plan, each: Parameter) -> list[str]:
    """List the arguments for one parameter; none if its default suffices."""
    params = plan.params
    value = params.of_parameter(each)
    if each.key == "n_ctx":
        value = value or plan.breakdown.n_ctx
    if each.key == "tensor_split" and len(plan.breakdown.devices) < 2:
        return []
    # Without -np, llama-server uses four slots with a unified KV cache; with it, the cache is split by default. Only
    # llama-server knows -kvu, and one sequence takes the same memory with it and without.
    if each.key == "kv_unified" and params.n_seq_max == 1:
        return []
    if value == each.default and not each.is_always:
        return []
    if each.key == "devices" and value and value == plan.default_devices and params.split_mode == "layer":
        return []
    if each.key == "load_mode" and _is_before(plan, _LOAD_MODE):
        return _OLDER_MODES[value]
    if each.key == "tensor_buft_overrides":
        return _override_words(plan)
    return option_words(each, value)


def _override_words(plan: Plan) -> list[str]:
    overrides = plan.params.tensor_buft_overrides
    flags = flags_among(overrides)
    if _is_before(plan, _N_CPU_FFN):
        flags = {override: flag for override, flag in flags.items() if flag[0] != "n_cpu_ffn"}
    others = [override for override in overrides if override not in flags]
    words = option_words(PARAMETERS["override_tensor"], others) if others else []
    return [*words, *(word for name, value in flags.values() for word in option_words(PARAMETERS[name], value))]


def option_words(each: Parameter, value: Any) -> list[str]:
    """Write a parameter as llama.cpp's option with its value."""
    return [each.option] if isinstance(each.kind, Flag) else [each.option, each.kind.word(value)]


def _is_before(plan: Plan, version: tuple[int, ...]) -> bool:
    """Whether the plan's build of llama.cpp has an older ggml."""
    return plan.llama_cpp is not None and numbers_of(plan.llama_cpp.ggml) < version


def _shared(shared: Sequence[SharedUse]) -> list[str]:
    """List the arguments for draft models, vision and LoRA.

    Several LoRA adapters, and several ways to draft, become one argument with commas: llama.cpp takes the last one.
    """
    args: list[str] = []
    for use in shared:
        words = list(use.arguments)
        while words:
            option, *words = words
            if option in _LISTS and option in args:
                args[args.index(option) + 1] += f",{words.pop(0)}"
            else:
                args.append(option)
    return args


_LISTS = ("--lora", "--lora-scaled", "--spec-type")
"""Options for draft models, vision and LoRA whose value is a list."""


_RUNS = ("llama-server", "llama-cli")
"""Programs that take a plan's arguments; ``llama-bench`` has names of its own."""


def command(plan: Plan, others: Sequence[str] = ()) -> list[str] | None:
    """List the words that start the program of ``plan`` with its model, its arguments and ``others``.

    ``None`` for a program that does not take them, and for a model whose name cannot be on a command line. Raises
    :class:`PlanError` for an argument that cannot.
    """
    model = location.local_name(plan.model.path)
    if plan.program not in _RUNS or not model.isprintable():
        return None
    args = [*arguments(plan), *others]
    check_line(args)
    return [plan.program, "-m", model, *args]


def run_hint(plan: Plan) -> str:
    """Say that ``command`` runs the plan, and what to do first if the model's file is not here."""
    path = plan.model.path
    if download := location.download(path):
        return f"download: {download}\nrun it:"
    return (
        f"run it, with your file in place of {location.local_name(path)}:" if location.is_address(path) else "run it:"
    )


def command_line(args: Sequence[str], *, quoted: bool) -> str:
    """Write ``args`` as one line.

    ``quoted`` is for a person who copies it into a shell. Without it the line has no quotes, as ``$(fitter ...)`` and
    ``xargs`` need it: a shell would not remove quotes there.
    """
    return shlex.join(args) if quoted else " ".join(args)


def unsafe_arguments(args: Sequence[str]) -> list[str]:
    """List the ``args`` that ``$(...)`` or ``xargs`` would change without quotes."""
    return [arg for arg in args if re.search(r"[\s'\"\\]", arg)]


def check_line(args: Sequence[str]) -> None:
    """Raise :class:`PlanError` if one of ``args`` has control characters, which could break the line or a terminal."""
    for arg in args:
        if not arg.isprintable():
            why = f"'{arg}' has control characters, which a command line cannot contain: rename the file"
            raise PlanError(why, Remedy(", or use --json", "json"))


def shell_word(arg: str) -> str:
    r"""Quote ``arg`` for ``eval`` in sh, bash, zsh and fish.

    Only fish treats a backslash in single quotes as an escape, so ``\`` and ``'`` are written outside of quotes.
    """
    if re.fullmatch(r"[A-Za-z0-9_+:,./-]+", arg):
        return arg
    parts = re.findall(r"[^'\\]+|['\\]", arg)
    return "".join(f"\\{part}" if part in ("'", "\\") else f"'{part}'" for part in parts) or "''"


def shell_line(words: Sequence[str]) -> str:
    """Write ``words`` as one line for sh, bash, zsh and fish. Raises :class:`PlanError` as ``check_line``."""
    check_line(words)
    return " ".join(map(shell_word, words))


def placeholder(path: str) -> str:
    """Return the path to write for a model without a file: it is clearly none that is here."""
    return f"path/to/{location.local_name(path)}"


@dataclass(frozen=True)
class Option:
    """An option of llama.cpp (``common/arg.cpp``) in a plan's arguments.

    Attributes:
        name: Its name in ``arguments``.
        key: Its long name, in the positive form and without dashes.
        env: The environment variable that llama.cpp's programs read, if any.
        value: The value that a flag sets; ``None`` for an option with a value.
        is_file: Whether its value is a file.
        is_list: Whether llama.cpp splits its value at commas.
    """

    name: str
    key: str
    env: str | None
    value: str | None = None
    is_file: bool = False
    is_list: bool = False


@dataclass(frozen=True)
class OptionValue:
    """An option and its value; a flag's is ``true`` or ``false``."""

    option: Option
    value: str

    @property
    def parts(self) -> list[str]:
        """The values that llama.cpp reads in it."""
        return self.value.split(",") if self.option.is_list else [self.value]

    @property
    def words(self) -> list[str]:
        """The words of a command line."""
        return [self.option.name] if self.option.value is not None else [self.option.name, self.value]


MODEL = Option("-m", "model", "LLAMA_ARG_MODEL", is_file=True)
_NO_PARAMETERS = (
    MODEL,
    Option("-fit", "fit", "LLAMA_ARG_FIT"),
    Option("--spec-type", "spec-type", "LLAMA_ARG_SPEC_TYPE"),
)
"""Options in a plan's arguments that are not parameters of fitter."""


def options() -> dict[str, Option]:
    """List every option that fitter shares with llama.cpp's programs, by the name that a plan's arguments use."""
    table = {option.name: option for option in _NO_PARAMETERS}
    for each in PARAMETERS.values():
        if each.options and not each.is_ours:
            value = each.kind.word(not each.default) if isinstance(each.kind, Flag) else None
            table[each.option] = Option(
                each.option, each.long, each.env, value, each.kind.is_file, each.kind.has_commas
            )
    return table


def option_values(plan: Plan) -> list[OptionValue]:
    """List the arguments of ``plan``, option by option. Raises :class:`PlanError` for an argument that is not known."""
    words, table = iter(arguments(plan)), options()
    values = []
    for word in words:
        option = table.get(word)
        if option is None:
            raise PlanError(f"this format cannot express {word}, which this plan needs: use args or json")
        values.append(OptionValue(option, next(words) if option.value is None else option.value))
    return values


def with_absolute_paths(plan: Plan) -> list[OptionValue]:
    """List the model and the arguments of ``plan`` with absolute paths, for a file that is read in any directory.

    Raises :class:`PlanError` where llama.cpp would split such a path.
    """
    return list(map(_absolute, [OptionValue(MODEL, location.local_name(plan.model.path)), *option_values(plan)]))


def _absolute(argument: OptionValue) -> OptionValue:
    if not argument.option.is_file:
        return argument
    paths = list(map(os.path.abspath, argument.parts))
    if argument.option.is_list and (path := next((path for path in paths if "," in path), None)):
        raise PlanError(f"llama.cpp's {argument.option.name} splits '{path}' at the comma: rename it, or its directory")
    return OptionValue(argument.option, ",".join(paths))


def check_is_for(plan: Plan, program: str, what: str) -> None:
    """Raise :class:`PlanError` where ``plan`` is for another program than this format, which is ``what``.

    Also where the plan is of a file, which does not say how many layers the model has.
    """
    if plan.program != program:
        raise PlanError(f"{what} are for {program}, and the plan is for {plan.program}: fit with --for {program}")
    if not plan.n_layer:
        raise PlanError(f"the plan does not say how many layers the model has: fit again with --format {program}")


def split_files(path: str) -> list[str]:
    """List the files of the model whose first file is at ``path``."""
    split = split_name(Path(path))
    if split is None:
        return [path]
    prefix, _, count = split
    return [os.path.join(os.path.dirname(path), split_path(prefix, each + 1, count)) for each in range(count)]
