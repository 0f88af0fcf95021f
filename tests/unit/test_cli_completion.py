"""Completion in a shell: what the command answers to click's protocol."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.support.cases import cases, stored_rows


def ask(how: str, words: str = "", index: str = "") -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"_FITTER_COMPLETE": how, "COMP_WORDS": words, "COMP_CWORD": index}
    command = [sys.executable, "-m", "fitter"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)


@cases(*stored_rows("cli_completion", "bash_completes"))
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


@cases("bash", "zsh", "fish")
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


def test_cases_are_those_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "my.toml"
    (tmp_path / "a.gguf").touch()
    file.write_text('[cases.chat]\nmodel = "chat.gguf"\n[cases.every]\nmodel = "*.gguf"\n')
    words = f"--cases {file}"
    assert ask("bash_complete", f"fitter lock {words} --update e", "5").stdout.split() == ["plain,every/a"]
    assert ask("bash_complete", f"fitter check {words} -k ch", "5").stdout.split() == ["plain,chat"]
    assert ask("bash_complete", f"fitter diff {words} -k 'not (ch", "5").stdout.splitlines() == ["plain,not (chat"]
    file.write_text("no TOML")
    done = ask("bash_complete", f"fitter check {words} -k ch", "5")
    assert (done.returncode, done.stdout.split(), done.stderr) == (0, [], "")


def test_a_name_is_completed_without_the_modules_that_plan() -> None:
    code = (
        "import sys\n"
        "from fitter.cli import main\n"
        "main()\n"
        "print(*sorted(name for name in sys.modules if name.startswith(('fitter.planning', 'fitter.output.tables'))))\n"
        "print(*sorted({'rich', 'cffi', 'tomllib', 'tomli'} & set(sys.modules)))\n"
    )
    asked = {"_FITTER_COMPLETE": "bash_complete", "COMP_WORDS": "fitter m.gguf --gpu rtx", "COMP_CWORD": "3"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | asked, capture_output=True, text=True, timeout=60, check=True
    )
    *answers, planning, libraries = done.stdout.split("\n")[:-1]
    assert (planning, libraries) == ("", "")
    assert "plain,rtx-4090" in answers
