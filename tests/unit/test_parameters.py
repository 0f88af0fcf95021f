"""A parameter that is added to the table is everywhere, and nowhere else does it have to be written."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from fitter import api
from fitter.cli import cli
from fitter.cli import fit as fit_module
from fitter.cli import real_runs as verify_module
from fitter.cli.group import COMMANDS
from fitter.errors import UsageError
from fitter.llama.load.structs import model_key
from fitter.llama.processes import wire
from fitter.llama.types import Params
from fitter.output.arguments import arguments
from fitter.output.documents.document import dumps
from fitter.output.documents.plan_document import read_plan, to_dict
from fitter.output.formats import render
from fitter.output.keywords import fit_kwargs
from fitter.parameters import kinds
from fitter.parameters.kinds import Flag, Kind, Size, Whole
from fitter.parameters.table import CONTEXT, PARAMETERS, Parameter
from fitter.parameters.values import parse_tokens
from fitter.planning.request.constraints import context_of_a_sequence, params_of
from fitter.regression import marks
from fitter.regression.cases import make_cases
from fitter.regression.lockfile import without_nothing
from tests.support.cases import cases
from tests.support.plans import GIB, MIB, make_plan
from tools.docs import of_cases, of_json, of_options, of_python


@dataclass(frozen=True)
class Invention:
    """A parameter, one value of it by every way to say it, and a word that is no value."""

    parameter: Parameter
    value: Any
    words: tuple[str, ...]
    variable: str
    wrong: Any


def invented(kind: Kind, default: Any, struct: Any) -> Parameter:
    return Parameter(
        kind,
        default,
        struct,
        ("-inv", "--invented"),
        "LLAMA_ARG_INVENTED",
        CONTEXT,
        "What nobody had thought of.",
        name="invented",
    )


INVENTIONS = {
    "a flag of the model": Invention(invented(Flag(), False, "model"), True, ("-inv",), "true", "yes"),
    "a number of the context": Invention(invented(Whole(most=9), 3, "context"), 7, ("-inv", "7"), "7", 10),
    "a text of the programs": Invention(invented(Kind("TEXT"), None, "program"), "so", ("-inv", "so"), "so", 5),
}


@pytest.fixture(params=INVENTIONS.values(), ids=INVENTIONS)
def invention(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Invention]:
    found: Invention = request.param
    # one that is imported for the first time meanwhile would keep the invention
    for name in COMMANDS:
        cli.get_command(click.Context(cli), name)
    with monkeypatch.context() as patch:
        patch.setitem(PARAMETERS, "invented", found.parameter)
        importlib.reload(fit_module)
        importlib.reload(verify_module)
        yield found
    importlib.reload(fit_module)
    importlib.reload(verify_module)


def plan_with(invention: Invention) -> Any:
    return make_plan(Params.of({"n_ctx": 4096, "n_gpu_layers": 33, "invented": invention.value}))


@cases("fit", "verify")
def test_on_the_command_line(command: str, invention: Invention, monkeypatch: pytest.MonkeyPatch) -> None:
    function: click.Command = {"fit": fit_module.fit, "verify": verify_module.verify}[command]
    shown = CliRunner().invoke(function, ["--help-all"]).output
    assert "-inv, --invented" in shown
    assert "What nobody had thought of." in shown
    told: list[Any] = []

    def record(*args: Any, **given: Any) -> Any:
        told.append(given.get("invented"))
        raise UsageError("that is all")

    monkeypatch.setattr(api, command, record)
    CliRunner().invoke(function, ["model.gguf", *invention.words])
    CliRunner().invoke(function, ["model.gguf"])
    assert told == [invention.value, None]


def test_in_a_file_of_cases_and_in_a_marker(invention: Invention) -> None:
    [case] = make_cases("chat", {"model": "model.gguf", "invented": invention.value}, Path())
    assert case.keywords()["invented"] == invention.value
    with pytest.raises(UsageError, match=r"^cases\.chat\.invented is "):
        make_cases("chat", {"model": "model.gguf", "invented": invention.wrong}, Path())
    assert "invented" in marks.keywords()


def test_in_python(invention: Invention) -> None:
    assert params_of(None, invented=invention.value).more == (("invented", invention.value),)  # type: ignore[call-arg]
    assert params_of(None, invented=None) == Params()  # type: ignore[call-arg]
    with pytest.raises(UsageError, match=r"^invented \(-inv\) is "):
        api.fit("model.gguf", invented=invention.wrong)  # type: ignore[call-arg]
    assert fit_kwargs(plan_with(invention))["invented"] == invention.value


def test_in_json_both_ways(invention: Invention, tmp_path: Path) -> None:
    plan = plan_with(invention)
    document = to_dict(plan)
    assert document["params"]["invented"] == invention.value
    file = tmp_path / "plan.json"
    file.write_text(dumps(document))
    assert read_plan(file).params == replace(plan.params, devices=plan.breakdown.devices)
    file.write_text(dumps(to_dict(make_plan(Params(n_ctx=4096)))))
    assert read_plan(file).params.more == ()
    # a plan of a version that did not know it
    del document["params"]["invented"]
    file.write_text(dumps(document))
    assert read_plan(file).params.more == ()
    document["params"]["invented"] = [invention.value]
    file.write_text(dumps(document))
    with pytest.raises(UsageError, match=r"'params\.invented' is \["):
        read_plan(file)


def test_between_processes_and_in_a_lock(invention: Invention) -> None:
    params = plan_with(invention).params
    assert wire.decode(Params, wire.encode(params)) == params
    assert wire.decode(Params, without_nothing(wire.encode(params))) == params
    assert "more" not in without_nothing(wire.encode(Params()))


def test_in_arguments_and_formats(invention: Invention) -> None:
    plan = plan_with(invention)
    words = arguments(plan)
    assert " ".join(invention.words) in " ".join(words)
    assert "-inv" not in arguments(make_plan(Params(n_ctx=4096)))
    assert f"LLAMA_ARG_INVENTED={invention.variable}" in render(plan, "env").splitlines()
    assert f"invented = {invention.variable}" in render(plan, "ini").splitlines()


def test_in_the_reference(invention: Invention) -> None:
    options = of_options.topic_pages()["options-context.md"]()
    assert re.search(r"^### `-inv`, `--invented.*\n\nWhat nobody had thought of\.", options, re.MULTILINE)
    assert "`LLAMA_ARG_INVENTED`" in options
    for page in (of_python.functions_page(), of_cases.toml_page(), of_cases.pytest_page()):
        link = r"\[`invented`\]\(options-context\.md#invented\)"
        assert re.search(rf"^\| {link} \|.*What nobody had thought of\.", page, re.MULTILINE)
    assert "`params.invented`" in of_json.json_page()


def test_loads_that_differ_in_it_alone_are_not_the_same(invention: Invention) -> None:
    without, one = Params(), Params.of({"invented": invention.value})
    assert one != without and hash(one) != hash(without)
    keys = {model_key("model.gguf", params) for params in (without, one)}
    assert len(keys) == (2 if invention.parameter.struct == "model" else 1)


@cases(
    ({"kv_unified_per_slot": 2048, "n_seq_max": 4}, 8192, 2048),
    ({"kv_unified_per_slot": 2048, "n_seq_max": 4, "kv_unified": True}, 8192, 2048),
    ({"kv_unified_per_slot": 2048, "n_seq_max": 4, "kv_unified": True, "n_ctx": 4096}, 4096, 2048),
    ({"kv_unified_per_slot": 2048, "n_seq_max": 4, "n_ctx": 4096}, 4096, 1024),
    ({"kv_unified_per_slot": 2048, "n_ctx": 0}, 0, 2048),
    ({"n_seq_max": 4, "n_ctx": 8192}, 8192, 2048),
    ({}, 0, 16384),
)
def test_the_context_of_a_slot(given: dict[str, Any], n_ctx: int, each: int) -> None:
    """As llama-server makes it: room for all slots where ``-c`` is not told, and no slot with more than it may have."""
    params = params_of(None, **given)
    assert (params.n_ctx, context_of_a_sequence(params, 16384)) == (n_ctx, each)
    words = " ".join(arguments(make_plan(params, n_ctx=n_ctx or 16384)))
    assert ("--kv-unified-per-slot 2048" in words) == ("kv_unified_per_slot" in given)


def test_more_than_all_slots_can_have() -> None:
    with pytest.raises(UsageError, match="n_ctx"):
        params_of(None, kv_unified_per_slot=2**31 - 1, n_seq_max=2)


# --- what the table says itself


def test_names_are_there_once() -> None:
    options = [name for each in PARAMETERS.values() for name in (*each.positive, *each.negative)]
    variables = [each.env for each in PARAMETERS.values() if each.env]
    for names in (options, variables):
        assert len(set(names)) == len(names)


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_default_is_a_value(name: str) -> None:
    each = PARAMETERS[name]
    if each.default not in (None, ()):
        assert each.check(each.default) == each.default
        if not isinstance(each.kind, (Flag, Size)) and each.options:
            assert each.kind.parse(each.kind.word(each.default)) in (each.default, None)


@cases(
    ("n_gpu_layers", "all"),
    ("n_gpu_layers", "auto"),
    ("n_gpu_layers_draft", "all"),
    ("devices", "CUDA0,CUDA1"),
    ("devices", "none"),
    ("tensor_split", "3,1"),
    ("flash_attn", "true"),
    ("override_tensor", "a=CPU,b=CPU"),
)
def test_words_of_the_command_line_mean_the_same_in_python(name: str, word: str) -> None:
    each = PARAMETERS[name]
    parsed = each.kind.parse(word)
    # what leaves the choice to the fit is not set
    assert each.check(word) == (None if parsed is None else each.check(parsed))


@cases("allow", "rpc", "spec_type")
def test_a_list_with_commas_is_a_list(name: str) -> None:
    assert PARAMETERS[name].check("a,b") == PARAMETERS[name].check(["a", "b"]) == ("a", "b")


def test_all_layers_in_a_file() -> None:
    assert PARAMETERS["n_gpu_layers"].kind.read("cases.a.n_gpu_layers", "all") == -1


def amounts(*kind: type[Kind]) -> list[str]:
    return [name for name, each in PARAMETERS.items() if isinstance(each.kind, kind)]


@pytest.mark.parametrize("name", amounts(kinds.Tokens))
def test_tokens_are_understood_wherever_they_are_asked_for(name: str) -> None:
    each = PARAMETERS[name]
    word = "1k" if each.kind.most is None or each.kind.most >= 1024 else "0.0625k"  # type: ignore[attr-defined]
    tokens = 1024 if word == "1k" else 64
    assert [each.kind.parse(word), each.check(word), each.kind.read(name, word), each.check(tokens)] == [tokens] * 4
    for wrong in ("1kk", "k", "0.3k", "-1k", "1 k tokens", "9" * 20 + "k", ""):
        with pytest.raises(UsageError, match="whole number"):
            each.kind.parse(wrong)
        with pytest.raises(UsageError, match=f"^{name} .*give a whole number"):
            each.check(wrong)


def test_every_number_of_tokens_is_of_that_kind() -> None:
    said = {name for name, each in PARAMETERS.items() if each.help.startswith(("Tokens", "Context in tokens"))}
    said |= {name for name, each in PARAMETERS.items() if "tokens" in each.help and isinstance(each.kind, Whole)}
    # how many vectors a state has, which has no option
    assert said - set(amounts(kinds.Tokens)) <= {"n_rs_seq"}


@pytest.mark.parametrize("name", amounts(Size, kinds.Mebibytes))
def test_sizes_are_understood_wherever_they_are_asked_for(name: str) -> None:
    each, scale = PARAMETERS[name], MIB if name in amounts(kinds.Mebibytes) else 1
    for word, size in {"24GB": 24 * 10**9, "24GiB": 24 * GIB, "1.5 gib": 3 * GIB // 2, "1MiB": MIB, "0MiB": 0}.items():
        assert each.check(each.kind.parse(word)) == each.check(word) == each.kind.read(name, word) == size // scale
    with pytest.raises(UsageError, match="24G"):
        each.check(each.kind.parse("24G"))


def test_a_size_that_an_option_takes_in_mib() -> None:
    kind = PARAMETERS["moe_cache_size"].kind
    assert (kind.parse("24"), kind.parse("1.5GiB"), kind.planned(3 * MIB // 2)) == (24 * MIB, 3 * GIB // 2, MIB)
    assert (kind.word(24 * MIB), kind.native("moe_cache_size", 24 * MIB)) == ("24", 24 * MIB)


@pytest.mark.parametrize("name", [name for name in amounts(Size) if PARAMETERS[name].kind.least])  # type: ignore[attr-defined]
def test_bytes_that_must_be_of_another_unit(name: str) -> None:
    each = PARAMETERS[name]
    assert (each.check(0), each.check(MIB), each.kind.read(name, MIB)) == (0, MIB, MIB)
    for call in (each.check, lambda value: each.kind.read(name, value)):
        for value in (MIB - 1, f"{MIB - 1}B"):
            with pytest.raises(UsageError, match=f'is {MIB - 1} bytes, .* write a unit, such as "{MIB - 1}MiB" or'):
                call(value)


def test_the_least_of_a_number_of_mib() -> None:
    kind = PARAMETERS["cache_ram"].kind
    assert [kind.parse(word) for word in ("-1", "0", "1", "1MiB", "1048577B")] == [-1, 0, 1, 1, 1]
    with pytest.raises(UsageError, match="'1048575B' is less than a MiB"):
        kind.parse("1048575B")


@given(st.decimals(0, 10**6, places=4), st.sampled_from(["k", "K", "m", "M", " k"]))
def test_tokens_with_decimals_are_exact_or_refused(number: Decimal, unit: str) -> None:
    exact = number * {"k": 1024, "m": 1024**2}[unit.strip().lower()]
    if exact == int(exact):
        assert parse_tokens(f"{number}{unit}") == exact
    else:
        with pytest.raises(UsageError, match="is not a whole number of tokens"):
            parse_tokens(f"{number}{unit}")


@given(st.text(max_size=12) | st.from_regex(r"[0-9.,kKmM +-]{1,8}", fullmatch=True))
def test_any_text_is_tokens_or_refused(text: str) -> None:
    try:
        assert isinstance(parse_tokens(text), int)
    except UsageError as error:
        assert "whole number" in str(error) or "too many digits" in str(error)


ODD = (
    *(
        *(None, True, 0, -1, 2**31, -(2**63), 2**70, 10**5000, -(10**5000), 0.0, -1.5, 1e308),
        *(float("nan"), float("inf"), 1j),
    ),
    *(np.int8(-1), np.int64(7), np.uint64(2**64 - 1), np.float32(0.5), np.float64("nan"), np.bool_(True), np.str_("x")),
    *("", "0", "1GiB", "none", "\0", "\ud800", "\udcff", "a" * 10**4, "-1", "x=y", "x:nan", b"", b"1GiB", b"\xff"),
    *(bytearray(b"x"), memoryview(b"x"), Path("."), [], [None], [1, 2], ["none"], ["a", 5], [[]], (), {}, set()),
    *({"CUDA0": 1}, {"host": "1GiB"}, {5: None}, {"a": 10**5000}, object(), object, len, iter(())),
    *(np.array(3), np.array([1.0, 2.0]), np.array([]), np.array([["a"]]), np.array(None, dtype=object)),
)


@pytest.mark.parametrize("name", PARAMETERS)
def test_any_value_is_kept_or_refused(name: str) -> None:
    each, refused = PARAMETERS[name], 0
    for number, value in enumerate(ODD):
        what = f"{number}, a {type(value).__name__}"
        try:
            found = each.check(value)
        except UsageError as error:
            refused += 1
            assert any(word in str(error) for word in (name, name.replace("_", " "), "CUDA0")), (what, error)
            assert len(str(error)) < 500, what
        else:
            assert each.check(found) == found or found != found, what
    assert refused > len(ODD) / 3, "no parameter takes most of them"
