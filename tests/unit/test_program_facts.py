"""What programs set by their version, and what their own help says."""

from __future__ import annotations

import importlib
import itertools
import re
import stat
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from fitter.errors import UsageError
from fitter.llama.types import LlamaCpp
from fitter.programs import facts as facts_of
from fitter.programs.facts import DRAFTS, OPTIONS, Facts, data, parse, with_defaults
from tests.support.cases import cases, named_cases, stored


def build(ggml: str) -> LlamaCpp:
    return LlamaCpp("", ggml, "", "", "", "")


@cases(stored("program_facts", "a_fact_of_a_version"))
def test_a_fact_of_a_version(program: str, ggml: str, name: str, value: Any) -> None:
    assert getattr(facts_of(program, build(ggml)), name) == value


def test_without_a_build_the_newest_is_meant() -> None:
    assert facts_of("llama-server") == facts_of("llama-server", build("0.27.0"))


def test_a_way_to_draft_that_came_later() -> None:
    before, after = (facts_of("llama-server", build(ggml)).draft_tokens for ggml in ("0.15.1", "0.20.0"))
    assert {*after} - {*before} == {"draft-dflash", "draft-dspark"}
    assert before["ngram-mod"] == 64 and before["ngram-cache"] == 8 and before["ngram-simple"] == 48


def test_an_unknown_program() -> None:
    message = f"unknown program 'llama': give one of {', '.join(data())}"
    with pytest.raises(UsageError, match=f"^{re.escape(message)}$"):
        facts_of("llama")


def entries() -> list[tuple[str, str, list[dict[str, Any]]]]:
    found = []
    for program, values in data().items():
        section = {name: each for name, each in values.items() if name != "like"}
        drafts = section.pop("draft_tokens", {})
        found += [(program, name, values) for name, values in {**section, **drafts}.items()]
    return found


@pytest.mark.parametrize(
    ("program", "name", "values"), entries(), ids=lambda each: each if isinstance(each, str) else ""
)
def test_every_value_has_a_source_and_they_are_in_order(program: str, name: str, values: list[dict[str, Any]]) -> None:
    assert all({*each} == {"since", "value", "source"} and each["source"] for each in values)
    since = [tuple(map(int, each["since"].split("."))) for each in values]
    assert since == sorted(set(since))
    assert all(before["value"] != after["value"] for before, after in itertools.pairwise(values))


HELP = """\
----- common params -----

-h,    --help, --usage                  print usage and exit
-b,    --batch-size N                   logical maximum batch size (default: 1024)
-fa,   --flash-attn [on|off|auto]       set Flash Attention use ('on', 'off', or 'auto', default: 'off')
--keep N                                number of tokens to keep (default: 0, -1 =
                                        all)
-fit,  --fit [on|off]                   whether to adjust unset arguments to fit in device memory ('on' or
                                        'off', default: 'off')
-ctxcp, --ctx-checkpoints, --swa-checkpoints N
                                        max number of context checkpoints to create per slot (default:
                                        7)[(more info)]
-cram, --cache-ram N                    set the maximum cache size in MiB (default: -1, -1 - no limit)
--cache-idle-slots, --no-cache-idle-slots
                                        save idle slots (default: disabled, requires cache-ram)
--warmup, --no-warmup                   whether to perform warmup (default: perhaps)
--spec-draft-n-max N                    number of tokens to draft (default: 5)
--spec-ngram-mod-n-max N                maximum number of ngram tokens (default: 32)
-ub,   --ubatch-size N                  physical maximum batch size
"""

SAID = {
    "n_batch": 1024,
    "flash_attn": "off",
    "n_ctx_checkpoints": 7,
    "cache_ram_mib": -1,
    "cache_idle_slots": False,
    "ngram-mod": 32,
    **dict.fromkeys(DRAFTS, 5),
}


def test_defaults_are_read_from_help() -> None:
    assert parse(HELP) == SAID


def test_what_is_read_is_a_fact() -> None:
    known = facts_of("llama-server")
    names = {name for name, _ in OPTIONS.values()}
    assert names <= {each.name for each in fields(Facts)} | {*known.draft_tokens}
    assert {*DRAFTS} <= {*known.draft_tokens}


def test_help_goes_before_what_is_known() -> None:
    known = facts_of("llama-server")
    found = with_defaults(known, SAID)
    drafts = {**known.draft_tokens, **dict.fromkeys(DRAFTS, 5), "ngram-mod": 32}
    own = {name: value for name, value in SAID.items() if name not in drafts}
    assert found == replace(known, **own, draft_tokens=drafts)
    assert found.draft_n_max == 5


@named_cases(("auto", "-1", 4, True), ("a number", "6", 6, False))
def test_slots_in_help(said: str, n_parallel: int, kv_unified: bool) -> None:
    text = f"-np,   --parallel N                     number of server slots (default: {said}, -1 = auto)\n"
    found = with_defaults(facts_of("llama-server"), parse(text))
    assert (found.n_parallel, found.kv_unified) == (n_parallel, kv_unified)


def script(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_a_program_is_asked_again_only_when_it_changed(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    program = tmp_path / "llama-server"
    say = f"echo >>{runs}; echo '-b, --batch-size N  at most (default: 77)'"
    found = [facts_of("llama-server", executable=script(program, say)).n_batch]
    found.append(facts_of("llama-server", executable=str(program)).n_batch)
    assert found == [77, 77] and len(runs.read_text().splitlines()) == 1
    # the options may be in a library beside it
    (tmp_path / "libllama-common.so").write_text("other", encoding="utf-8")
    assert facts_of("llama-server", executable=str(program)).n_batch == 77
    assert len(runs.read_text().splitlines()) == 2


@named_cases(
    ("it fails", "echo '-b, --batch-size N  at most (default: 77)'; exit 1"),
    ("it says nothing", "exit 0"),
    ("it says something else", "echo hello"),
    ("it does not end", "exec sleep 60"),
)
def test_a_program_that_does_not_say(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.import_module("fitter.programs.facts"), "SECONDS", 0.3)
    known = facts_of("llama-server")
    assert facts_of("llama-server", executable=script(tmp_path / "llama-server", text)) == known


def test_a_program_that_is_not_there(tmp_path: Path) -> None:
    assert facts_of("llama-server", executable=str(tmp_path / "llama-server")) == facts_of("llama-server")
