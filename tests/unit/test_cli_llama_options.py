"""llama.cpp's own options on fitter's command line: which there are, and what becomes of each."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import click
import pytest

from fitter import api
from fitter.cli import main, typed_words
from fitter.cli.fit import fit
from fitter.cli.llama_options import Used, all_options, split
from fitter.llama.types import Params
from tests.support.cases import cases, stored_rows
from tests.support.plans import make_plan
from tools.builds.upstream_options import SOURCE, UpstreamOption, read_options
from tools.follow.facts import known

NEWEST = {name: int(said.split()[0]) for names, said in known()["options"][1].items() for name in names.split(", ")}
"""The options of the newest build whose source was read, and how many words follow each."""

needs_source = pytest.mark.skipif(not SOURCE.exists(), reason="llama.cpp's source is not here")

_CONTEXT = click.Context(fit, info_name="fitter fit")
OWN = typed_words.words_after(fit, _CONTEXT) | {"-h": 0, "--help": 0, "--usage": 0, "--version": 0}
"""fitter's options, and those of the command itself."""

OTHER_MEANING = {
    "--prompt": "tokens here, a text there",
    "--timeout": "of a dummy load here, of a request there",
    "--verbose": "fitter's own log",
    "-v": "fitter's own log",
}
"""Names of llama.cpp's that are options of another kind here; the option's other names stand in the file."""


@pytest.fixture(scope="module")
def upstream() -> tuple[UpstreamOption, ...]:
    found = read_options()
    assert len(found) > 300
    return found


@needs_source
def test_every_option_of_llama_cpp_is_decided_on(upstream: tuple[UpstreamOption, ...]) -> None:
    names = {name for option in upstream for name in (*option.names, *option.negative)}
    assert sorted(names - OWN.keys() - all_options().keys()) == []


def test_every_option_of_the_newest_build_is_decided_on() -> None:
    assert sorted(NEWEST.keys() - OWN.keys() - all_options().keys()) == []
    said = {name: option.values for name, option in all_options().items()} | OWN
    others = {name for name, count in NEWEST.items() if said[name] != count}
    assert others <= OTHER_MEANING.keys()


@needs_source
def test_no_option_is_made_up(upstream: tuple[UpstreamOption, ...]) -> None:
    names = {name for option in upstream for name in (*option.names, *option.negative)} | NEWEST.keys()
    assert sorted(name for name, option in all_options().items() if name not in names and option.use != "renamed") == []
    assert sorted(name for name, option in all_options().items() if name in names and option.use == "renamed") == []


@needs_source
def test_as_many_words_follow_as_in_llama_cpp(upstream: tuple[UpstreamOption, ...]) -> None:
    arity = {name: option.arity for option in upstream for name in (*option.names, *option.negative)}
    assert {name: option.values for name, option in all_options().items() if name in arity} == {
        name: arity[name] for name in all_options() if name in arity
    }
    own = {name: count for name, count in OWN.items() if name in arity and name not in OTHER_MEANING}
    assert own == {name: arity[name] for name in own}


@needs_source
def test_an_option_that_fitter_has_has_every_name_of_llama_cpps(upstream: tuple[UpstreamOption, ...]) -> None:
    lacking = {
        name: option.names
        for option in upstream
        if (own := set(option.names).union(option.negative) & OWN.keys()) and not own <= OTHER_MEANING.keys()
        for name in (*option.names, *option.negative)
        if name not in OWN
    }
    assert lacking == {}


@needs_source
def test_what_goes_on_is_read_by_llama_server(upstream: tuple[UpstreamOption, ...]) -> None:
    read = {
        name
        for option in upstream
        if {"common", "server"}.intersection(option.programs)
        for name in (*option.names, *option.negative)
    }
    newer = NEWEST.keys() - {name for option in upstream for name in (*option.names, *option.negative)}
    passed = {name for name, option in all_options().items() if option.use == "passed"}
    assert sorted(passed - read - newer) == []


@needs_source
@cases("tensor_buft_overrides", "embedding", "no_host", "cache_ram_mib", "pooling_type")
def test_what_sets_memory_is_never_passed_on(field: str, upstream: tuple[UpstreamOption, ...]) -> None:
    names = [name for option in upstream if field in option.fields for name in option.names if name in all_options()]
    assert {all_options()[name].use for name in names} <= {"memory", "other", "model"}


def test_a_name_stands_in_the_file_once() -> None:
    rows = {id(option): option for option in all_options().values()}.values()
    names = [name for option in rows for name in option.names]
    assert sorted(names) == sorted(set(names)) == sorted(all_options())


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    made: list[tuple[str, dict[str, Any]]] = []
    plan = make_plan(Params(n_ctx=4096, n_gpu_layers=33))

    def answer(model: str, **given: Any) -> api.Plan:
        words = {name: value for name, value in given.items() if not name.startswith("on_") and name != "alternatives"}
        made.append((model, words))
        return api.Plan(**{field.name: getattr(plan, field.name) for field in fields(plan)})

    monkeypatch.setattr(api, "fit", answer)
    return made


FITTED = "-c 4096 -ngl 33 -np 1 -fit off"


@cases(*stored_rows("cli_llama_options", "they_go_on_or_are_named"))
def test_they_go_on_or_are_named(
    words: str, passed: str, ignored: str, calls: list[tuple[str, dict[str, Any]]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["model.gguf", *words.split()]) == 0
    assert calls == [("model.gguf", {})]
    out, err = capsys.readouterr()
    assert out == f"{FITTED} {passed}".strip() + "\n"
    said = [line for line in err.splitlines() if "ignored" in line]
    assert said == ([f"fitter: ignored options: {ignored} (they have no effect on a plan)"] if ignored else [])


def test_they_go_on_quoted_for_sh(calls: list[tuple[str, dict[str, Any]]], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["model.gguf", "--alias", "my model", "--format", "shell"]) == 0
    assert capsys.readouterr().out == f"{FITTED} --alias 'my model'\n"


@cases("json", "ini", "env")
def test_a_format_that_is_no_arguments_names_them(
    form: str, calls: list[tuple[str, dict[str, Any]]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["model.gguf", "-t", "8", "--no-webui", "-p", "x", "--format", form]) == 0
    out, err = capsys.readouterr()
    assert "fitter: ignored options: -p (they have no effect on a plan)\n" in err
    assert f"fitter: ignored options: -t, --no-webui (--format {form} contains only the plan)\n" in err
    assert "threads" not in out


@cases(
    ("--no-mmap", {"load_mode": "none"}),
    ("-lm mmap --mlock", {"load_mode": "mmap+mlock"}),
    ("--mlock", {"load_mode": "mmap+mlock"}),
    ("--no-mmap --mlock", {"load_mode": "mlock"}),
    ("--mlock -t 4 --no-mmap", {"load_mode": "mlock"}),
    ("--no-mmap --mmap --mlock", {"load_mode": "mmap+mlock"}),
    ("--mlock --mmap", {"load_mode": "mmap+mlock"}),
    ("-fa 1", {"flash_attn": "on"}),
    ("-fa enabled", {"flash_attn": "on"}),
    ("-fa true", {"flash_attn": "on"}),
    ("-fa 0", {"flash_attn": "off"}),
    ("--flash_attn disabled", {"flash_attn": "off"}),
    ("-fa false", {"flash_attn": "off"}),
    ("-fa -1", {"flash_attn": "auto"}),
    ("--ctx_size 512 --cache_type_k=q8_0", {"n_ctx": 512, "type_k": "q8_0"}),
    ("-ts 3,/1", {"tensor_split": (3.0, 1.0)}),
    ("-fitt 512/1", {"margin": (512 << 20, 1 << 20)}),
    ("--no_kv_offload", {"offload_kqv": False}),
    # what a plan with a draft model, or with the model's own layers, says
    ("--spec-type draft-simple -c 512", {"spec_type": ("draft-simple",), "n_ctx": 512}),
    ("--spec-type=draft-mtp,ngram-mod", {"spec_type": ("draft-mtp", "ngram-mod")}),
    # what llama-server takes after the load
    (
        "--cache_ram=100 --swa-checkpoints 4 -cms 64",
        {"cache_ram": 100, "ctx_checkpoints": 4, "checkpoint_min_step": 64},
    ),
    ("-bs", {"backend_sampling": True}),
    ("--no-cache-idle-slots --rerank", {"cache_idle_slots": False, "reranking": True}),
)
def test_words_of_llama_cpp_for_options_of_fitter(
    words: str, keywords: dict[str, Any], calls: list[tuple[str, dict[str, Any]]]
) -> None:
    assert main(["model.gguf", *words.split()]) == 0
    assert calls == [("model.gguf", keywords)]


@cases(
    ("-m model.gguf", "model.gguf"),
    ("fit --model model.gguf", "model.gguf"),
    ("model.gguf -m model.gguf", "model.gguf"),
    ("--model=a=b.gguf -t 4", "a=b.gguf"),
    ("-t 4 -- -odd.gguf", "-odd.gguf"),
    ("-md d.gguf -m model.gguf", "model.gguf"),
)
def test_the_model_may_be_an_option(words: str, model: str, calls: list[tuple[str, dict[str, Any]]]) -> None:
    assert main(words.split()) == 0
    assert calls[0][0] == model


@cases(*stored_rows("cli_llama_options", "what_changes_the_plan_is_refused"))
def test_what_changes_the_plan_is_refused(
    words: str, message: str, calls: list[tuple[str, dict[str, Any]]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words.split()) == 2
    out, err = capsys.readouterr()
    assert (out, calls, err.count("\n")) == ("", [], 1)
    assert message in err


@cases(
    ("verfy x.gguf", "there is no command 'verfy', and no file of that name: did you mean 'verify'?"),
    ("lokc", "did you mean 'lock'?"),
    ("Devices", "did you mean 'devices'?"),
    ("qwen 3.6 27b --gpu 4090", "there is no command 'qwen', and no file of that name; did you mean qwen3.6-27b or "),
    ("analyse x.gguf", "there is no command 'analyse', and no file of that name; the commands are fit, "),
)
def test_a_misspelt_command_is_named(
    words: str, message: str, calls: list[tuple[str, dict[str, Any]]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words.split()) == 2
    assert calls == []
    assert message in capsys.readouterr().err


@cases("lokc", "model.gguf", "./lokc", "tiny")
def test_a_model_is_no_misspelt_command(
    model: str, calls: list[tuple[str, dict[str, Any]]], tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lokc").touch()
    assert main([model]) == 0
    assert calls[0][0] == model


@cases(
    ("-hf org/repo", "hf://org/repo"),
    ("--hf-repo=org/repo -c 4096", "hf://org/repo -c 4096"),
    ("-hfr org/repo:Q4_K_M", "hf://org/repo --type Q4_K_M"),
)
def test_a_repository_of_the_hub_is_the_model(words: str, model: str) -> None:
    assert split(words.split(), {"--type": 1, "-c": 1}) == (model.split(), Used())


def test_a_type_is_of_no_use_to_a_command_that_plans_one_file() -> None:
    with pytest.raises(click.UsageError, match=r"write hf://org/repo/FILE\.gguf"):
        split(["-hf", "org/repo:Q4_K_M"], {})
