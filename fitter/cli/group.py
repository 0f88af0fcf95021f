"""The commands of ``fitter``: find them, correct misspelt names, complete words in a shell, and write their help.

Help has options in sections, in short or all of them.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Sequence
from importlib import import_module
from itertools import takewhile
from typing import Any

import click
from click.shell_completion import CompletionItem

from fitter.errors import EXIT_FITS, EXIT_USAGE, UsageError

COMPLETE = "_FITTER_COMPLETE"
"""The environment variable with which a shell asks for completions (click's own name and values)."""

COMMANDS = {
    "fit": "Find the parameters that fit (the default).",
    "devices": "List the devices and the host to plan with.",
    "quants": "Plan a model in every quantization.",
    "explore": "Plan models on many machines, and say which to buy.",
    "shapes": "List the models to plan without a file.",
    "inspect": "Show a model's metadata, tensors and layers.",
    "backend": "Show virtual GPUs to any llama.cpp program.",
    "report": "Write a plan as a page to keep and forward.",
    "serve": "Plan in the browser, with a JSON API.",
    "verify": "Load a plan for real and compare its memory.",
    "tune": "Run a plan and changes of it, keep the quickest.",
    "calibrate": "Compare real devices with virtual ones.",
    "fleet": "Plan several models on one machine.",
    "lock": "Record what the cases of fitter.toml take.",
    "check": "Fail if a case takes more than was recorded.",
    "diff": "Compare two plans, or two builds of llama.cpp.",
    "history": "Compare many builds of llama.cpp.",
    "llama-cpp": "List the builds of llama.cpp to plan with.",
    "claim": "Say what a pod or a device claim must ask for.",
    "gguf-parser": "Answer as gguf-parser, for schedulers.",
}
"""The help of each command. A command is a function in a file, which is imported on use."""

_FILES = {
    "cases": ("lock", "check", "fleet"),
    "comparisons": ("diff", "history"),
    "listings": ("devices", "inspect", "llama-cpp", "backend"),
    "real_runs": ("verify", "tune", "calibrate"),
}
"""The files with several commands; every other command has a file of its name."""

DOCUMENTATION = "https://OWNER.github.io/llama-fitter/"
"""Address of the documentation, as in the distribution's metadata."""
IS_PUBLISHED = not DOCUMENTATION.partition("//")[2].partition(".")[0].isupper()
"""Whether that address has an owner: until the first release, capitals stand for one."""

_EPILOG = """\
Examples:
  fitter model.gguf                                    what fits on this machine
  fitter model.gguf --gpu rtx-4090                     what fits on a GPU that is not here
  args=$(fitter model.gguf --format shell) && eval "llama-server -m model.gguf $args"
                                                       run it, if it fits

Options of fit: fitter fit --help, and all of them: fitter fit --help-all

Completion of commands, options and files, in ~/.bashrc or ~/.zshrc, or in fish's config.fish:
  eval "$(_FITTER_COMPLETE=bash_source fitter)"        bash; zsh: zsh_source
  _FITTER_COMPLETE=fish_source fitter | source         fish

Exit status of every command: 0 the model fits, or a check passed; 1 the model does not fit; 2 usage error; 3 the model
cannot be read or llama.cpp failed; 4 a check failed; 5 the result cannot be written; 129 ended by SIGHUP; 130
interrupted; 141 the program that read stdout has ended; 143 ended by SIGTERM.
"""


class CommandGroup(click.Group):
    """All commands; a command line that does not begin with a command runs ``fit``."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if ctx.resilient_parsing:
            # completion parses the command line and does not run it
            return super().parse_args(ctx, args if not args or args[0] in COMMANDS else ["fit", *args])
        if not args:
            click.echo(ctx.get_help(), err=True)
            ctx.exit(EXIT_USAGE)
        if args[0] == "help" and not os.path.lexists("help"):
            args = [*args[1:2], "--help"]
        if args[0] not in COMMANDS and args[0] not in ("-h", "--help", "--version"):
            _check_spelling(args)
            args = ["fit", *args]
        return super().parse_args(ctx, args)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        formatter.write_paragraph()
        formatter.write(_EPILOG)
        if IS_PUBLISHED:
            formatter.write(f"\nDocumentation: {DOCUMENTATION}\n")

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        name = cmd_name.replace("-", "_")
        file = next((file for file, names in _FILES.items() if cmd_name in names), name)
        command: click.Command = getattr(import_module(f"fitter.cli.{file}"), name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def format_usage(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        formatter.write_usage(ctx.command_path, "MODEL [OPTIONS]")
        formatter.write_usage(ctx.command_path, "COMMAND [ARGUMENTS]", prefix=" " * len("Usage: "))

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Complete commands and files, or the options of ``fit``."""
        if incomplete.startswith("-"):
            fit = self.get_command(ctx, "fit")
            assert fit is not None
            return fit.shell_complete(click.Context(fit, ctx, "fit", resilient_parsing=True), incomplete)
        items = [CompletionItem(name, help=text) for name, text in COMMANDS.items() if name.startswith(incomplete)]
        return [*items, CompletionItem(incomplete, type="file")]


def complete(cli: click.Command) -> int:
    """Answer a shell that asks for completions; return the exit status.

    Raises:
        UsageError: The environment variable has a value that no shell sets.
    """
    from click.shell_completion import shell_complete

    instruction = os.environ[COMPLETE]
    if shell_complete(cli, {}, "fitter", COMPLETE, instruction):
        raise UsageError(f"{COMPLETE} is '{instruction}': set it to bash_source, zsh_source or fish_source")
    return EXIT_FITS


def _check_spelling(args: Sequence[str]) -> None:
    """Raise ``click.UsageError`` if the first word must be a misspelt command, not a model."""
    word = args[0]
    if not re.fullmatch(r"[A-Za-z][A-Za-z_-]*", word) or os.path.lexists(word):
        return
    from fitter.model.shapes.catalogue import by_name

    if by_name(word):
        return
    close = difflib.get_close_matches(word.lower(), (*COMMANDS, "help"), n=1)
    if close:
        raise click.UsageError(f"there is no command '{word}', and no file of that name: did you mean '{close[0]}'?")
    if len(args) > 1 and (args[1] in ("-h", "--help") or not args[1].startswith("-")):
        from fitter.model.shapes.catalogue import similar_shape

        # a name of several words
        meant = similar_shape("-".join(takewhile(lambda each: not each.startswith("-"), args)))
        if len(args) > 2 and meant:
            raise click.UsageError(f"there is no command '{word}', and no file of that name; {meant}")
        listed = ", ".join(COMMANDS)
        raise click.UsageError(f"there is no command '{word}', and no file of that name; the commands are {listed}")


_MOST_OPTIONS = 20
"""The most options that ``--help`` lists in full; of more, it lists the common ones briefly."""

_IN_FULL = "fitter.help_all"


class SectionOption(click.Option):
    """An option of a section of the help. ``brief`` is its line in a short ``--help``, by default its first sentence.

    An option with an empty ``brief`` is only in ``--help-all``. ``former`` names are accepted but not shown.
    """

    def __init__(
        self,
        *args: Any,
        section: str = "Output",
        brief: str | None = None,
        former: tuple[str, ...] = (),
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.section = section
        self.former = former
        self.brief = re.split(r"(?<=\.)\s", self.help or "", maxsplit=1)[0] if brief is None else brief

    def add_to_parser(self, parser: Any, ctx: click.Context) -> None:
        """Accept the former names too."""
        shown, self.opts = self.opts, [*self.opts, *self.former]
        super().add_to_parser(parser, ctx)
        self.opts = shown

    def brief_record(self, ctx: click.Context) -> tuple[str, str]:
        """Return two names at most, and the line."""
        names, _ = self.get_help_record(ctx) or ("", "")
        for name in self.opts[2:]:
            names = names.replace(f", {name}", "")
        return names, self.brief


class HelpCommand(click.Command):
    """A command whose help lists its options in sections, in the order of their declaration.

    With many options, ``--help`` has the common ones, and ``--help-all`` every one.
    """

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """Return click's parameters and ``--help-all``."""
        return [*super().get_params(ctx), _help_all_option(is_hidden=len(self.params) <= _MOST_OPTIONS)]

    def _is_brief(self, ctx: click.Context) -> bool:
        return len(self.params) > _MOST_OPTIONS and not ctx.meta.get(_IN_FULL)

    def format_help_text(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write what the command does; in a short help, in a paragraph."""
        if self._is_brief(ctx):
            formatter.write_paragraph()
            with formatter.indentation():
                formatter.write_text((self.help or "").partition("\n\n")[0])
        else:
            super().format_help_text(ctx, formatter)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the sections."""
        is_brief = self._is_brief(ctx)
        sections: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if not isinstance(param, click.Option) or record is None:
                continue
            if is_brief and isinstance(param, SectionOption):
                record = param.brief_record(ctx)
                if not param.brief:
                    continue
            section = getattr(param, "section", "Output")
            sections.setdefault(section.partition(" (")[0] if is_brief else section, []).append(record)
        for title, records in sections.items():
            with formatter.section(title):
                formatter.write_dl(records, col_max=28 if is_brief else 36)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the epilog as it stands, and where the other options are."""
        if self.epilog:
            formatter.write_paragraph()
            formatter.write(self.epilog)
        if self._is_brief(ctx):
            page = f", or {DOCUMENTATION}reference/options.html" if IS_PUBLISHED else ""
            formatter.write(f"All options: {ctx.command_path} --help-all{page}\n")


def _help_all_option(*, is_hidden: bool) -> click.Option:
    return click.Option(
        ["--help-all"],
        is_flag=True,
        is_eager=True,
        hidden=is_hidden,
        expose_value=False,
        callback=_show_all,
        help="Show every option, by topic, and exit.",
    )


def _show_all(ctx: click.Context, _: click.Parameter, is_wanted: bool) -> None:
    if is_wanted and not ctx.resilient_parsing:
        ctx.meta[_IN_FULL] = True
        click.echo(ctx.get_help())
        ctx.exit()
