"""Completion in a shell: what the command answers to click's protocol."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest


def ask(how: str, words: str = "", index: str = "") -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"_FITTER_COMPLETE": how, "COMP_WORDS": words, "COMP_CWORD": index}
    command = [sys.executable, "-m", "fitter"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize(
    ("words", "index", "expected"),
    [
        ("fitter lo", 1, ["plain,lock", "file,lo"]),
        ("fitter ver", 1, ["plain,verify", "file,ver"]),
        ("fitter --ctx", 1, ["plain,--ctx-checkpoints", "plain,--ctx-size"]),
        ("fitter m.gguf --ctx", 2, ["plain,--ctx-checkpoints", "plain,--ctx-size"]),
        ("fitter m.gguf -ctk q8", 3, ["plain,q8_0"]),
        ("fitter m.gguf -fa o", 3, ["plain,on", "plain,off"]),
        ("fitter m.gguf -t 8 --ctx", 4, ["plain,--ctx-checkpoints", "plain,--ctx-size"]),
        ("fitter m.gguf -cram 8 --ctx", 4, ["plain,--ctx-checkpoints", "plain,--ctx-size"]),
        ("fitter fit mod", 2, ["file,mod"]),
        ("fitter m.gguf -md dra", 3, ["file,dra"]),
        ("fitter -m mod", 2, ["file,mod"]),
        ("fitter verify --pl", 2, ["plain,--plan"]),
        ("fitter nothing-of --the-ki", 2, []),
    ],
)
def test_bash_completes(words: str, index: int, expected: list[str]) -> None:
    done = ask("bash_complete", words, str(index))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split() == expected


def test_every_command_is_there() -> None:
    from fitter.cli.group import COMMANDS

    lines = ask("bash_complete", "fitter ", "1").stdout.splitlines()
    assert [line.removeprefix("plain,") for line in lines[:-1]] == list(COMMANDS)


def test_zsh_and_fish_get_the_help_as_well() -> None:
    text = "Load a plan for real and compare its memory."
    assert ask("zsh_complete", "fitter ver", "1").stdout.splitlines()[:3] == ["plain", "verify", text]
    assert ask("fish_complete", "fitter ver", "ver").stdout.splitlines()[0] == f"plain,verify\t{text}"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_source_for_a_shell_is_one(shell: str, tmp_path: Path) -> None:
    done = ask(f"{shell}_source")
    assert (done.returncode, done.stderr) == (0, "")
    assert f"{shell}_complete" in done.stdout
    program = shutil.which(shell)
    if program is not None:
        script = tmp_path / "source"
        script.write_text(done.stdout)
        subprocess.run([program, "-n", str(script)], check=True, timeout=60)


def test_a_shell_that_nobody_knows() -> None:
    done = ask("elvish_source")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "fitter: error: _FITTER_COMPLETE is 'elvish_source': set it to bash_source, zsh_source or fish_source\n"
    )
