"""Plans loaded with other versions of llama-cpp-python than the pinned one, whose libraries are compiled here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tools.builds import llama_builds, llama_python

VERSIONS = list(llama_builds.headers())
PINNED = VERSIONS[-1]
LACKS = {"0.3.25": ["load_mtp"], "0.3.30": ["load_mtp"]}
"""Parameters of a plan that a version has no field for."""

ROOT = Path(__file__).resolve().parents[2]

_SCRIPT = """
import dataclasses, json, sys
import llama_cpp
import fitter
from fitter.llama.load.breakdown import breakdown_of

model, words = sys.argv[1], json.loads(sys.argv[2])

def rows(breakdown):
    return {row.buffer_type: (row.model, row.context, row.compute) for row in breakdown.rows if row.used}

def say(llm):
    return llm.create_completion("ba lu mi", max_tokens=4, temperature=0)["choices"][0]["text"]

found = {"version": llama_cpp.__version__}
plan = fitter.fit(model, **words)
for name, llm in (
    ("load", plan.load(verbose=False, use_mmap=False)),
    ("Llama", fitter.Llama(model, verbose=False, use_mmap=False, **words)),
):
    assert isinstance(llm, llama_cpp.Llama)
    found[name] = [rows(breakdown_of(llm.ctx)), rows(llm.plan.breakdown)]
    if words.get("embedding"):
        found["text"] = len(llm.embed("ba lu"))
    else:
        found.setdefault("text", say(llm))
        assert say(llm) == found["text"]
    llm.close()
try:
    fitter.measure(model, n_ctx=512, load_mtp=True)
    found["lacks"] = []
except fitter.FitterError as error:
    found["lacks"] = [type(error).__name__, str(error)]
print(json.dumps(found))
"""

WORDS: dict[str, dict[str, Any]] = {
    "little": {"n_ctx": 512},
    "much": {"n_ctx": 2048, "n_ubatch": 128, "type_k": "q8_0", "type_v": "q8_0", "override_tensor": ["exps=CPU"]},
    "flash attention off": {"n_ctx": 1024, "flash_attn": "off", "kv_unified": True, "n_seq_max": 2},
    "embeddings": {"n_ctx": 512, "embedding": True},
}


def environment(version: str) -> dict[str, str]:
    if version == PINNED:
        return {}
    try:
        return llama_python.environment(version)
    except llama_builds.FetchError as error:
        pytest.skip(str(error))


def run(version: str, *words: str | Path) -> subprocess.CompletedProcess[str]:
    given = environment(version)
    path = os.pathsep.join(filter(None, (given.get("PYTHONPATH"), str(ROOT))))
    variables = {**os.environ, **given, "PYTHONPATH": path}
    return subprocess.run(
        [sys.executable, *map(str, words)], capture_output=True, text=True, timeout=200, check=False, env=variables
    )


def of_versions() -> list[Any]:
    return [each if each == PINNED else pytest.param(each, marks=pytest.mark.llama_cpp) for each in VERSIONS]


# Compiling is part of the first one.
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("words", WORDS.values(), ids=WORDS)
@pytest.mark.parametrize("version", of_versions())
def test_a_plan_is_loaded(version: str, words: dict[str, Any], model: Path) -> None:
    """``plan.load`` and ``fitter.Llama`` take the bytes that the plan says."""
    done = run(version, "-c", _SCRIPT, model, json.dumps(words))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["version"] == version
    for how in ("load", "Llama"):
        loaded, planned = found[how]
        assert loaded == planned
        assert sum(map(sum, loaded.values())) > 2**20
    assert found["text"]
    if version in LACKS:
        kind, message = found["lacks"]
        assert (kind, message.partition(" of llama.cpp ")[0]) == ("UsageError", "load_mtp is not a parameter")
    else:
        assert not found["lacks"]


@pytest.mark.timeout(2400)
@pytest.mark.parametrize("version", of_versions())
def test_the_command_plans_with_it(version: str, model: Path) -> None:
    done = run(version, "-m", "fitter", model, "--gpu", "8GiB", "-c", "512")
    assert (done.returncode, done.stdout) == (0, "-c 512 -ngl 5 -np 1 -fit off\n"), done.stderr


@pytest.mark.llama_cpp
@pytest.mark.timeout(2400)
def test_the_libraries_that_pip_builds_plan_the_same(model: Path) -> None:
    """Those of `make install` are built for the tools as well, with options of their own."""
    words = ("-m", "fitter", model, "--gpu", "40MiB", "--gpu", "8GiB", "-c", "2048", "-fitt", "8", "--json")
    ours = run(PINNED, *words)
    built = run(PINNED, *words, "--llama-cpp", llama_python.as_pip_builds_it(PINNED))
    assert ours.returncode == built.returncode == 0, ours.stderr + built.stderr
    plan, other = (json.loads(done.stdout) for done in (ours, built))
    changed = {key for key in plan | other if plan.get(key) != other.get(key)}
    assert changed <= {"llama_cpp", "search"}, changed
