"""Reference pages of errors and exit statuses."""

from __future__ import annotations

import inspect
import re

import click

from fitter import errors
from fitter.cli import cli
from fitter.errors import FitterError
from tools.docs.markdown import code, page, paragraphs, plain, table
from tools.docs.of_options import commands


def statuses(epilog: str) -> dict[int, str]:
    """What each status means, from the end of a command's ``--help``; empty if that does not say."""
    found = re.search(r"Exit status[^:]*: (.*?)\.\s*(?:\n\n|$)", epilog + "\n\n", re.DOTALL)
    words = re.split(r"(?:^|[,;] )(\d+) ", " ".join(found[1].split())) if found else [""]
    return {int(number): text.rstrip(",;. ") for number, text in zip(words[1::2], words[2::2], strict=True)}


def of_every_command() -> dict[int, str]:
    """The statuses that any command may end with."""
    formatter = click.HelpFormatter(width=120)
    cli.format_epilog(click.Context(cli), formatter)
    return statuses(formatter.getvalue())


def exit_statuses_page() -> str:
    """Every exit status, and what it says for each command."""
    every = of_every_command()
    raised = {
        status: ", ".join(code(kind.__name__) for kind in _tree(FitterError) if kind.exit_code == status)
        for status in every
    }
    rows = [(code(status), plain(text), raised[status]) for status, text in every.items()]
    of_commands = []
    for name, command in commands().items():
        own = statuses(command.epilog or "")
        said = "; ".join(f"{code(status)} {plain(text)}" for status, text in own.items())
        of_commands.append((f"[`{name}`](commands.md#{name})", said or "as above"))
    return page(
        "Exit statuses",
        "Every error is one line on stderr, which begins with `fitter: error:` and says what to do. In Python the same "
        "cases are [exceptions](errors.md) with the attribute `exit_code`.",
        table(("status", "meaning", "errors"), rows),
        "## By command",
        table(("command", "statuses"), of_commands),
    )


def _tree(kind: type[FitterError]) -> list[type[FitterError]]:
    return [kind, *(each for child in kind.__subclasses__() for each in _tree(child))]


def _branch(kind: type[FitterError], depth: int) -> list[str]:
    own = [f"{'    ' * depth}- [`{kind.__name__}`](#{kind.__name__.lower()})"]
    return own + [line for child in kind.__subclasses__() for line in _branch(child, depth + 1)]


def _entry(kind: type[Exception]) -> str:
    status = getattr(kind, "exit_code", None)
    parts = [f"## `{kind.__name__}` {{ #{kind.__name__.lower()} }}"]
    parent = kind.__mro__[1].__name__
    facts = f"Base: `{parent}`." + (f" Exit status `{status}`." if status is not None else "")
    own = [name for name in inspect.signature(kind).parameters if name != "message"] if status is not None else []
    if own and "__init__" in vars(kind):
        facts += f" Attributes: {', '.join(map(code, own))}."
    return "\n\n".join([*parts, facts, *paragraphs(kind.__doc__)])


def errors_page() -> str:
    """The tree of errors, and each of them."""
    return page(
        "Errors",
        "What fitter raises on purpose is a `fitter.FitterError`. Its message is one line that says what is wrong and "
        "what to do; `exit_code` is the [exit status](exit-statuses.md) that the command has in the same case. All of "
        "them are in `fitter` itself: `fitter.PlanError`.",
        "\n".join(_branch(FitterError, 0)),
        *map(_entry, _tree(FitterError)),
        "A warning, which nothing but a load in Python gives:",
        _entry(errors.PlanWarning),
    )
