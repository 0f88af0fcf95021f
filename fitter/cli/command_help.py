"""The help of commands: options in sections, in short or all of them."""

from __future__ import annotations

import re
from typing import Any

import click

from fitter.cli.group import DOCUMENTATION, IS_PUBLISHED

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
