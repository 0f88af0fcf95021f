"""Reference pages of ``fitter.toml`` and of the pytest plugin."""

from __future__ import annotations

from fitter.parameters import kinds
from fitter.parameters.kinds import Kind
from fitter.parameters.table import GOAL_HELP, GOALS, PARAMETERS, of_a_case
from fitter.planning.fleet.residency import Member
from fitter.regression import MARKER, marks, pytest_plugin
from fitter.regression.cases import Budget, Case
from tools.docs.attributes import documented
from tools.docs.markdown import code, codes, fenced, page, plain, sentence, table
from tools.docs.of_options import default_of, meaning_of, option_link

_EXAMPLE = """\
[defaults]
gpu = "rtx-4090"
max_growth = "1%"

[cases.chat]
model = "models/chat.gguf"
n_ctx = 32768
type_k = "q8_0"
type_v = "q8_0"

[cases.chat.budget]
CUDA0 = "20GiB"
"""

_TRUST = "[`--trust`](options-cases.md#trust)"
_RELATIVE = f"string; a path with `/` is relative to the file's directory, and needs {_TRUST}"
_AMOUNT = 'a share such as `"1%"`, bytes, or a text such as `"64MiB"`'


def toml_type(kind: Kind) -> str:
    """How a value of a kind is written in TOML."""
    if isinstance(kind, kinds.Flag):
        return "`true` or `false`"
    if isinstance(kind, kinds.Mebibytes):
        return 'whole number of MiB, or a text such as `"2GiB"`'
    if isinstance(kind, kinds.Tokens):
        return 'whole number, or a text such as `"32k"`'
    if isinstance(kind, kinds.Whole):
        return "whole number"
    if isinstance(kind, kinds.Size):
        return 'bytes, or a text such as `"24GiB"`' + (", or a list of them" if kind.is_list else "")
    if isinstance(kind, kinds.Shares):
        return "list of numbers"
    if isinstance(kind, kinds.Texts):
        return "string, or list of strings"
    if isinstance(kind, kinds.Path):
        return "string, relative to the file's directory"
    return "string"


def _settings() -> list[tuple[str, str, str, str]]:
    return [
        (
            option_link(each, key) if each.options else code(key),
            _RELATIVE if key == "llama_cpp" else toml_type(each.kind),
            default_of(each),
            meaning_of(each),
        )
        for key, each in of_a_case().items()
    ]


def toml_page() -> str:
    """Every key of ``fitter.toml``."""
    case, budget = documented(Case), documented(Budget)
    limits = [
        ("`max_growth`", _AMOUNT, "0", sentence(case["max_growth"])),
        ("`max_slowdown`", 'a share such as `"5%"`', "2 %", sentence(case["max_slowdown"])),
    ]
    budgets = [
        ("a device, such as `CUDA0`", toml_type(kinds.Size()), "The most memory there."),
        ("`host`", toml_type(kinds.Size()), "The most host memory."),
        ("`n_ctx`", "whole number", sentence(budget["n_ctx"])),
        *((code(name), "number", sentence(budget[name])) for name in budget if name.endswith("per_second")),
    ]
    head = ("key", "value", "default", "meaning")
    return page(
        "fitter.toml",
        "The cases that `fitter lock` records and `fitter check` compares: each a model on a machine. `--cases` names "
        "another file. A case without `gpu` is a machine without a GPU, never this machine. Native code that the file "
        "names, addresses that are read with this machine's own keys, and patterns that lead out of its directory, are "
        f"used with {_TRUST} only: see [Security](../explanation/security.md).",
        fenced(_EXAMPLE, "the guide about CI has one that runs", "toml"),
        "## `[defaults]` { #defaults }",
        "Keys that hold for every case that does not set them: all of those below but `model` and `budget`.",
        "## `[cases.NAME]` { #cases }",
        "A table for each case. A name has no spaces, parentheses, brackets or hidden characters.",
        table(head, [("`model`", "string", "required", sentence(case["model"])), *limits, *_settings()]),
        "## `[cases.NAME.budget]` { #budget }",
        sentence(case["budget"]) + " A case that exceeds one fails, whether it did when it was recorded or not.",
        table(("key", "value", "meaning"), budgets),
        "## `[history]` { #history }",
        "The builds of llama.cpp that [`fitter history`](../guides/compare-builds.md) goes through if its command line "
        "names none.",
        table(
            ("key", "value", "meaning"),
            [("`llama_cpp`", "list of strings", "From the oldest to the newest, each as `llama_cpp` of a case.")],
        ),
        "## `[fleet]` { #fleet }",
        "The cases that share a machine: [`fitter fleet`](../guides/several-models.md) plans them together, `fitter "
        "lock` records which fit together, and `fitter check` fails a set that no longer does.",
        table(("key", "value", "default", "meaning"), _fleet()),
        "## `[fleet.models.NAME]` { #fleet-models }",
        "What is wanted of a model beyond its case. Its least context and speeds are those of its budget.",
        table(("key", "value", "default", "meaning"), _fleet_models()),
    )


def _fleet() -> list[tuple[str, str, str, str]]:
    goals = ", ".join(f'`"{goal}"`' for goal in GOALS)
    return [
        ("`cases`", "list of strings", "all", "The cases that are its models."),
        ("`goal`", goals, f'`"{GOALS[0]}"`', plain(GOAL_HELP)),
        (
            "`log`",
            "string",
            "",
            "A log of a llama-server's router, or of llama-swap at `logLevel: debug`, relative to the directory: "
            "the plan is for the order of its last 2,000 requests, in place of shares.",
        ),
        (
            "`in_a_row`",
            "number",
            "1: random order",
            "Requests for a model one after the other, on average, beyond chance: turns of a conversation.",
        ),
        (
            "`disk_bandwidth`",
            'a text such as `"3.4GB/s"`',
            "measured here with `--here`, else a common SSD's",
            "How fast models are loaded.",
        ),
    ]


def _fleet_models() -> list[tuple[str, str, str, str]]:
    about = documented(Member)
    return [
        ("`share`", "number", "1", sentence(about["share"]) + " Shares are relative to each other."),
        ("`resident`", "`true` or `false`", "`false`", sentence(about["is_resident"])),
        ("`evict`", "`true` or `false`", "`true`", sentence(about["may_be_evicted"])),
        ("`never_with`", "list of strings", "", sentence(about["never_with"])),
    ]


def pytest_page() -> str:
    """The marker, the fixtures and the options of the pytest plugin."""
    case = documented(Case)
    limits = [(code(name), plain(text)) for name, text in marks.LIMITS.items()]
    changes = [(code(name), sentence(case[name])) for name in marks.CHANGES]
    settings = [(cells[0], cells[3]) for cells in _settings() if cells[0] != option_link(PARAMETERS["gpus"], "gpu")]
    options = [
        (
            code("--" + name.replace("_", "-") + (f" {settings_['metavar']}" if "metavar" in settings_ else "")),
            code(name),
            plain(text.replace("%%", "%")),
        )
        for name, (text, settings_) in pytest_plugin.OPTIONS.items()
    ]
    fixtures = [
        (code(name), sentence(getattr(pytest_plugin, name).__doc__)) for name in ("fitter_plan", "fitter_model")
    ]
    known = set(marks.keywords())
    assert {"model", "gpu", "gpus", *marks.LIMITS, *marks.CHANGES} <= known
    head = ("keyword", "meaning")
    return page(
        "pytest",
        "The plugin comes with fitter: nothing has to be switched on. A test with the marker fails before its body "
        "runs if a marker does. It is shown as `MEMORY` if memory is the reason.",
        f"## `@pytest.mark.{MARKER}(…)` {{ #{MARKER} }}",
        f"Without any of the limits, what the test takes is compared with `fitter.lock`; `pytest --fitter-update` "
        f"records it there. With {codes(marks.CHANGES)} that comparison allows for some change. Several "
        "markers are all checked.",
        "### The model and the machine",
        table(
            head,
            [
                ("`model`", "The model's path, relative to the rootdir; by default that of `--fitter-model`."),
                ("`gpu`, `gpus`", "The GPUs, as `--gpu` describes them. Without any it is a machine without a GPU."),
            ],
        ),
        "### Limits",
        table(head, [*limits, *changes]),
        "### Parameters",
        "As the keywords of `fitter.fit`.",
        table(head, settings),
        "## Fixtures",
        table(("fixture", "what it is"), fixtures),
        "## Options",
        "On the command line, or in the ini file (`pytest.ini`, `[tool.pytest.ini_options]` of `pyproject.toml`).",
        table(("option", "ini", "meaning"), options),
    )
