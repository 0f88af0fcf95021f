"""Reference pages of the command line: commands, options, and llama.cpp's own options."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import click

from fitter.cli import cli, llama_options
from fitter.parameters import kinds
from fitter.parameters import table as parameters
from fitter.parameters.kinds import Kind
from fitter.parameters.table import Parameter
from tools.docs.markdown import code, codes, fenced, heading, page, plain, table

_MORE = {
    "--gpu": "The [GPUs](gpus.md) that have a name.",
    "--json": "[What is in it](json.md).",
    "--format": "[What each is](formats.md).",
    "--cases": "[Its keys](fitter-toml.md).",
}
"""What an option's help has no room for."""


@dataclass(frozen=True)
class Topic:
    """A page of options: its file, the sections of ``--help`` that are on it, and its first sentence."""

    file: str
    sections: tuple[str, ...]
    text: str


TOPICS = {
    "Model options": Topic("options-model.md", ("Model", "Repository"), "Which model or repository is planned."),
    "Program options": Topic(
        "options-program.md", ("Program",), "The program that runs the plan, and what it keeps in memory."
    ),
    "Context and batch options": Topic(
        "options-context.md", ("Context and batch",), "Context, batch, KV cache, slots and flash attention."
    ),
    "Placement options": Topic("options-placement.md", ("Placement",), "Which weights and caches go to which device."),
    "Draft model, vision and LoRA options": Topic(
        "options-draft.md", ("Draft models, vision, LoRA",), "Models and adapters that are loaded beside the model."
    ),
    "Device options": Topic(
        "options-devices.md", ("Devices and limits",), "Devices, host memory, margins, and limits of the search."
    ),
    "Speed options": Topic(
        "options-speed.md",
        ("Speed", "Claim for a device"),
        "The request that should be fast, and the figures of the estimate.",
    ),
    "Output options": Topic("options-output.md", ("Output",), "What a command prints and writes."),
    "Explore options": Topic(
        "options-explore.md",
        ("Grid", "Answer", "Where cells are planned"),
        "Options of `fitter explore`: the grid, the answer, and where plans are made.",
    ),
    "Serve options": Topic("options-serve.md", ("Server",), "Options of `fitter serve`."),
    "Case options": Topic("options-cases.md", ("Cases",), "Options of commands that read `fitter.toml`."),
}
"""The pages of options, by their titles."""


@dataclass
class Entry:
    """An option, as one or more commands have it. ``helps``: its help, with the commands that have that one."""

    names: tuple[str, ...]
    metavar: str
    section: str
    parameter: Parameter | None
    helps: dict[str, list[str]] = field(default_factory=dict)

    @property
    def anchor(self) -> str:
        """The id of its heading."""
        return self.long.lstrip("-")

    @property
    def long(self) -> str:
        """Its first long name, or the only one."""
        return next((name for name in self.names if name.startswith("--")), self.names[0])


def commands() -> dict[str, click.Command]:
    """Every command by its name."""
    context = click.Context(cli)
    found = ((name, cli.get_command(context, name)) for name in cli.list_commands(context))
    return {name: command for name, command in found if command is not None}


def entries() -> dict[tuple[str, ...], Entry]:
    """Every option of every command, by its names."""
    found: dict[tuple[str, ...], Entry] = {}
    for name, command in commands().items():
        for option in _options(command):
            names = (*option.opts, *option.secondary_opts)
            known = parameters.PARAMETERS.get(option.name or "")
            entry = found.setdefault(names, Entry(names, _metavar(option), _section(option), known))
            entry.helps.setdefault(_help(option), []).append(name)
    return found


def _options(command: click.Command) -> Iterator[click.Option]:
    return (each for each in command.params if isinstance(each, click.Option) and not each.hidden)


def _metavar(option: click.Option) -> str:
    return "" if option.is_flag or option.count else option.metavar or ""


def _section(option: click.Option) -> str:
    return str(getattr(option, "section", "Output"))


def _help(option: click.Option) -> str:
    """The help without the default, which has a place of its own."""
    return _without_default((option.help or "").split("\b")[0])


def _without_default(text: str) -> str:
    return re.sub(r" ?\[default: .*?\]", "", text.strip())


def _default(entry: Entry) -> str:
    if entry.parameter is not None and entry.parameter.default is False and not entry.parameter.unset:
        return "off"
    if entry.parameter is not None:
        return entry.parameter.default_text[len("[default: ") : -1]
    for command in commands().values():
        for option in _options(command):
            found = re.search(r"\[default: (.*?)\]", option.help or "")
            if (*option.opts, *option.secondary_opts) == entry.names and found:
                return found[1]
    return ""


def values(kind: Kind) -> str:
    """What a value may be, in a sentence; empty if the help says it."""
    if isinstance(kind, kinds.OneOf):
        return "" if "|" in (kind.metavar or "") else f"One of {codes(kind.words)}."
    if isinstance(kind, kinds.Layers) or not isinstance(kind, kinds.Whole):
        return ""
    several = ", or a list of them" if isinstance(kind, kinds.TokenCounts) else ""
    return f"A whole number{several}, {kind.range}."


def default_of(each: Parameter) -> str:
    """What happens if a parameter is not given, as it is said outside of the command line."""
    if isinstance(each.kind, kinds.Flag):
        return code(each.default)
    text = each.default_text[len("[default: ") : -1]
    if isinstance(each.kind, kinds.Size) and each.kind.in_mib:
        text = re.sub(r"^\d+", lambda number: f"{number[0]} MiB", text)
    return plain(text)


def meaning_of(each: Parameter) -> str:
    """What a parameter means, and which values it may have, as Markdown."""
    text, more = each.help, values(each.kind)
    if each.name == "allow":
        # A page of their own has what each of them means.
        text, more = text.partition(f" {next(iter(parameters.LEVERS))}: ")[0], "All [levers](levers.md)."
    return " ".join(filter(None, (plain(text.replace(" Repeatable.", "")), more)))


def _entry(entry: Entry) -> str:
    shown = [*entry.names[:-1], f"{entry.names[-1]} {entry.metavar}".strip()]
    each = entry.parameter
    lines = []
    for text, of in entry.helps.items():
        where = f" ({codes(of)})" if len(entry.helps) > 1 else ""
        is_the_tables = each is not None and text == _without_default(each.help)
        more = " May be given several times." if text.endswith(" Repeatable.") else ""
        meaning = meaning_of(each) if each is not None and is_the_tables else plain(text.removesuffix(" Repeatable."))
        lines.append(meaning + more + where)
    default = plain(_default(entry))
    facts = {"default": f"**{default}**" if default else ""}
    if len(entry.helps) == 1:
        facts["commands"] = codes(next(iter(entry.helps.values())))
    if each is not None:
        is_in_json = each.struct and each.key and each.is_planned
        facts |= {
            "Python": code(each.name),
            "`fitter.toml`, marker": code(each.case or ""),
            "JSON": code(f"params.{each.key}") if is_in_json else "",
            "llama.cpp's variable": code(each.env or ""),
        }
    if more := next((_MORE[name] for name in entry.names if name in _MORE), ""):
        lines[0] += f" {more}"
    said = " · ".join(f"*{name}* {value}" for name, value in facts.items() if value)
    return "\n\n".join([heading(3, codes(shown), entry.anchor), *lines, *([f"{said}\n{{ .facts }}"] if said else [])])


def _topic(section: str) -> str:
    section = section.partition(" (")[0]
    for title, topic in TOPICS.items():
        if section in topic.sections:
            return title
    raise ValueError(f"section '{section}' of --help has no page: add it to TOPICS in tools/docs/of_options.py")


def _by_topic() -> dict[str, list[Entry]]:
    found: dict[str, list[Entry]] = {title: [] for title in TOPICS}
    for entry in entries().values():
        found[_topic(entry.section)].append(entry)
    return found


def option_link(each: Parameter | Entry, shown: str) -> str:
    """A link from a page of the reference to an option; ``shown`` is code."""
    anchor = each.anchor if isinstance(each, Entry) else each.long
    return f"[{code(shown)}]({TOPICS[_topic(each.section)].file}#{anchor})"


def options_page() -> str:
    """The topics, with their options."""
    intro = (
        "If llama.cpp has an option, the option of fitter has its names and its meaning. The fit chooses the value of "
        "an option that you do not set, or takes its default. [Commands](commands.md) lists the options of each "
        "command, and [llama.cpp's options](llama-options.md) says what fitter does with the other options of a "
        "llama-server command line."
    )
    rows = [
        (f"[{title}]({TOPICS[title].file})", ", ".join(option_link(entry, entry.long) for entry in of))
        for title, of in _by_topic().items()
    ]
    facts = (
        "The last line of each option has its other names: *Python* is the keyword of `fitter.fit` and of the other "
        "functions ([Python](python.md)); *`fitter.toml`, marker* the key of a case ([fitter.toml](fitter-toml.md)) "
        "and the keyword of a [pytest marker](pytest.md); *JSON* the key in a [plan](json.md); *llama.cpp's variable* "
        "the variable that `--format env` writes, which fitter itself does not read."
    )
    return page("Options", intro, table(("topic", "options"), rows), facts)


def _topic_page(title: str) -> str:
    sections: dict[str, list[str]] = {}
    for entry in _by_topic()[title]:
        sections.setdefault(entry.section.partition(" (")[0], []).append(_entry(entry))
    parts = [
        "\n\n".join([*([heading(2, name)] if len(sections) > 1 else []), *found]) for name, found in sections.items()
    ]
    return page(title, f"{TOPICS[title].text} [All options](options.md).", *parts)


def topic_pages() -> dict[str, Callable[[], str]]:
    """The page of each topic, by its file."""
    return {topic.file: partial(_topic_page, title) for title, topic in TOPICS.items()}


def commands_page() -> str:
    """Every command, with its arguments, its options and its own examples."""
    links = {entry.names: option_link(entry, entry.names[0]) for entry in entries().values()}
    parts = []
    for name, command in commands().items():
        # With the settings of the whole: a command keeps the help option of the first context that it sees.
        above = click.Context(cli, info_name="fitter", **cli.context_settings)
        context = click.Context(command, above, info_name=name)
        usage = command.get_usage(context).removeprefix("Usage: ")
        sections: dict[str, list[str]] = {}
        for option in _options(command):
            names = (*option.opts, *option.secondary_opts)
            sections.setdefault(_section(option).partition(" (")[0], []).append(links[names])
        rows = [(section, ", ".join(found)) for section, found in sections.items()]
        text = [plain(part) for part in re.split(r"\n\s*\n", (command.help or "").strip())]
        epilog = [fenced(command.epilog, "the end of --help")] if command.epilog else []
        parts.append(
            "\n\n".join(
                [
                    heading(2, code(f"fitter {name}"), name),
                    fenced(usage, "how a command is written"),
                    *text,
                    table(("section", "options"), rows),
                    *epilog,
                ]
            )
        )
    intro = (
        "`MODEL` is a GGUF file, or the first one of a split model. "
        "`fitter MODEL` is short for `fitter fit MODEL`. Every command has `--help`, and `--help-all` with all of its "
        "options. What a command answers goes to stdout; tables of `fit`, progress, warnings and errors go to stderr. "
        "[Options](options.md) has each option one by one, [exit statuses](exit-statuses.md) what a command's status "
        "says."
    )
    return page("Commands", intro, *parts)


_USES = {
    "passed": ("Passed on", "They do not change what is allocated: they are printed with the plan's arguments."),
    "renamed": ("Passed on by another name", "Spellings of other versions of llama.cpp."),
    "ignored": ("Ignored", "They change nothing that llama-server does with a plan. One line on stderr names them."),
    "hub": (
        "Taken as `MODEL`",
        "`org/repo:Q4_K_M` is `hf://org/repo --type Q4_K_M`. Fitter reads headers, and downloads nothing else.",
    ),
    "memory": (
        "Refused: they change what is allocated",
        "Fitter cannot plan for them. The exit status is 2.",
    ),
    "model": (
        "Refused: they name a model",
        "Fitter needs a file or an address, as `MODEL` or with `-m`. The exit status is 2.",
    ),
    "removed": ("Refused: llama.cpp has removed them", "The exit status is 2."),
    "other": (
        "Refused: they belong to other programs",
        "Options of llama.cpp's other tools, which no plan is for. The exit status is 2.",
    ),
}


def llama_options_page() -> str:
    """What is done with llama.cpp's options that are not fitter's."""
    found: dict[str, list[llama_options.LlamaOption]] = {use: [] for use in _USES}
    for one in {option.names: option for option in llama_options.all_options().values()}.values():
        found[one.use].append(one)
    parts = []
    for use, (title, text) in _USES.items():
        rows = []
        for one in found[use]:
            same = [f"{code(word)} is {code(ours) if ours else 'taken'}" for word, ours in one.same.items()]
            names = [*one.names[:-1], one.names[-1] + " VALUE" * one.values]
            rows.append((codes(names), "; ".join([*([plain(one.instead)] if one.instead else []), *same])))
        parts.append("\n\n".join([heading(2, title), text, table(("option", "instead"), rows)]))
    intro = (
        "A llama-server command line can be given to `fitter` and `fitter verify` as it is: `-m FILE` is the model. "
        "[Options](options.md) that are fitter's too set what is planned. All others of llama.cpp are here, with what "
        "fitter does with each."
    )
    return page("llama.cpp's options", intro, *parts)
