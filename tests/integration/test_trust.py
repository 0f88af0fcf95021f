"""A checkout of somebody else: whatever its files say, none of its code is run, and no line of theirs is an option."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fitter.cli import main
from tests.support.cases import cases, named_cases
from tests.support.command import Command
from tests.support.cuda_builds import compile_library, cuda_build
from tools.comparisons import upstream
from tools.models.tiny import write_tiny

CASE = '[cases.chat]\nmodel = "tiny.gguf"\ngpu = "rtx-4090"\nn_ctx = 4096\n'
LLAMA = """
int ggml_backend_dev_count(void) { return 0; }
int ggml_backend_cpu_reg(void) { return 0; }
const char *ggml_version(void) { return "0.25.3"; }
"""
HOW = "if you trust whoever wrote that file, give --trust or set FITTER_TRUST=1"


class Checkout:
    """A directory with cases, a lock, and native code that writes a file when it is loaded."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "checkout"
        self._marker = directory / "ran"
        run = f'__attribute__((constructor)) static void run(void) {{ fclose(fopen("{self._marker}", "w")); }}'
        code = f"#include <stdio.h>\n{run}\n"
        (self.path / "evil").mkdir(parents=True)
        cpu = compile_library(self.path / "evil/libggml-cpu.so", code, "-Wl,-soname,libggml-cpu.so")
        words = ("-Wl,-soname,libllama.so", "-Wl,--no-as-needed", cpu, "-Wl,-rpath,$ORIGIN")
        compile_library(self.path / "evil/libllama.so", code + LLAMA, *words)
        cuda_build(self.path / "cuda", code + "void *ggml_backend_cuda_reg(void) { return 0; }")
        write_tiny(self.path / "tiny.gguf")
        self.write(CASE)

    def write(self, text: str, name: str = "fitter.toml") -> None:
        (self.path / name).parent.mkdir(exist_ok=True)
        (self.path / name).write_text(text)

    def has_run(self) -> bool:
        """Whether its code was run since this was asked last."""
        has_run = self._marker.exists()
        self._marker.unlink(missing_ok=True)
        return has_run


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    checkout = Checkout(tmp_path_factory.mktemp("trust"))
    assert main(["lock", "--cases", str(checkout.path / "fitter.toml")]) == 0
    return checkout


@pytest.fixture
def checkout(built: Checkout, monkeypatch: pytest.MonkeyPatch) -> Checkout:
    monkeypatch.chdir(built.path)
    monkeypatch.delenv("FITTER_TRUST", raising=False)
    built.write(CASE)
    assert not built.has_run()
    return built


BUILD = CASE + 'llama_cpp = "evil"\n'
CUDA = CASE + 'profile = "library:cuda"\n'
HISTORY = CASE + '[history]\nllama_cpp = ["python", "./evil"]\n'
TWO = ("--llama-cpp", "python", "--llama-cpp", "python")
TRIES: dict[str, tuple[str, tuple[str, ...], str]] = {
    "check": (BUILD, ("check",), "in the case 'chat' llama_cpp is 'evil'"),
    "lock": (BUILD, ("lock", "--lock", "new.lock"), "in the case 'chat' llama_cpp is 'evil'"),
    "defaults": (f'[defaults]\nllama_cpp = "./evil"\n{CASE}', ("check",), "in the case 'chat' llama_cpp is './evil'"),
    "a CUDA backend": (CUDA, ("check",), "in the case 'chat' profile is 'library:cuda'"),
    "diff": (CUDA, ("diff", "--cases", "fitter.toml", *TWO), "in the case 'chat' profile is 'library:cuda'"),
    "history": (CUDA, ("history", "fitter.toml", *TWO), "in the case 'chat' profile is 'library:cuda'"),
    "builds of a history": (HISTORY, ("history", "fitter.toml"), "llama_cpp of [history] is './evil'"),
}


@cases(TRIES)
def test_native_code_that_a_file_names(
    text: str, words: tuple[str, ...], what: str, checkout: Checkout, command: Command
) -> None:
    checkout.write(text)
    assert command(*words) == (2, "", f"fitter: error: fitter.toml: {what}, which is native code: {HOW}\n")
    assert not checkout.has_run()
    assert not (checkout.path / "new.lock").exists()


@cases(TRIES)
def test_the_same_from_somebody_who_is_trusted(
    text: str, words: tuple[str, ...], what: str, checkout: Checkout, command: Command
) -> None:
    checkout.write(text)
    status, _, err = command(*words, "--trust")
    assert status == 3 and what not in err
    assert checkout.has_run(), "it can be run, so that the other test is one"


def test_who_trusts_all_files(checkout: Checkout, monkeypatch: pytest.MonkeyPatch) -> None:
    checkout.write(BUILD)
    for value, status in (("", 2), ("0", 2), ("no", 2), ("1", 3)):
        monkeypatch.setenv("FITTER_TRUST", value)
        assert main(["check"]) == status
        assert checkout.has_run() is (value == "1")


def test_what_the_command_line_names_is_its_users_word(checkout: Checkout) -> None:
    checkout.write(BUILD)
    assert main(["check", "--llama-cpp", "python"]) == 0
    assert main(["check", "--llama-cpp", "evil"]) == 3
    assert checkout.has_run()


def test_what_is_not_measured_needs_no_trust(checkout: Checkout) -> None:
    checkout.write(CASE + '[cases.other]\nmodel = "tiny.gguf"\nllama_cpp = "evil"\n')
    assert main(["check", "-k", "chat"]) == 0
    assert main(["lock", "--prune"]) == 0
    assert not checkout.has_run()


def test_a_name_is_none_of_the_current_directory(
    checkout: Checkout, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Not beside the file with the cases, and so a name, but here where the command is run.
    text = '[cases.chat]\nmodel = "../tiny.gguf"\nllama_cpp = "evil"\nbudget.host = "1GiB"\n'
    checkout.write(text, "sub/fitter.toml")
    for entries in ("", ":/usr/bin:", ".:/usr/bin", "evil"):
        monkeypatch.setenv("PATH", entries)
        status, _, said = command("check", "--cases", "sub/fitter.toml")
        assert status == 2 and said.startswith(f"fitter: error: llama_cpp '{checkout.path}/sub/evil' is not there: ")
        assert not checkout.has_run()


@named_cases(
    ("a bucket", 'model = "s3://bucket/a.gguf"', "model is 's3://bucket/a.gguf'"),
    ("a file in another", 'model = "zip://a.gguf::sftp://h/a.zip"\n', "model is 'zip://a.gguf::sftp://h/a.zip'"),
    ("a projector", 'model = "tiny.gguf"\nmmproj = "sftp://h/p.gguf"', "mmproj is 'sftp://h/p.gguf'"),
    ("an adapter", 'model = "tiny.gguf"\nlora = ["a.gguf", "ssh://h/l.gguf"]', "lora is 'ssh://h/l.gguf'"),
    ("a draft model", 'model = "tiny.gguf"\nmodel_draft = "smb://h/d.gguf"', "model_draft is 'smb://h/d.gguf'"),
    ("a configuration", 'model = "config://s3://b/config.json"', "model is 's3://b/config.json'"),
)
def test_addresses_that_are_read_with_keys(text: str, what: str, checkout: Checkout, command: Command) -> None:
    checkout.write(f'[cases.chat]\n{text}\nbudget.host = "1GiB"\n')
    why = f"in the case 'chat' {what}, which is read with this machine's own keys"
    assert command("check", "--lock", "none.lock") == (2, "", f"fitter: error: fitter.toml: {why}: {HOW}\n")


@pytest.mark.timeout(60)
@named_cases(
    ("a pipe", 'model = "tiny.gguf"\nworkload = "pipe"', "pipe is no file: give the log of a server"),
    ("a device", 'model = "tiny.gguf"\nworkload = "/dev/zero"', "/dev/zero is no file: give the log of a server"),
    ("every file", 'model = "/**/*.gguf"', f"'/**/*.gguf' looks outside of the directory of fitter.toml, at /: {HOW}"),
)
def test_what_would_never_end_is_one_line(text: str, what: str, checkout: Checkout, command: Command) -> None:
    if not Path("pipe").exists():
        os.mkfifo("pipe")
    checkout.write(f'[cases.chat]\n{text}\ngpu = "24GiB"\n')
    status, _, err = command("lock", "--lock", "new.lock")
    assert status == 2 and f"{what}\n" in err


def test_a_command_that_was_not_asked_reads_none_of_it(checkout: Checkout) -> None:
    """The checkout has cases, and files that Python or pytest would take for their own."""
    checkout.write(BUILD + HISTORY.removeprefix(CASE))
    checkout.write("fitter_llama_cpp = evil\n".join(["[pytest]\n", ""]), "pytest.ini")
    for name in ("conftest.py", "sitecustomize.py", "usercustomize.py", "fitter.py", "llama_cpp.py", "click.py"):
        checkout.write(f"raise SystemExit('{name} was run')\n", name)
    script = f"import sys; sys.path[:] = {[p for p in sys.path if p]!r}; from fitter.__main__ import main; main()"
    fit = ("tiny.gguf", "--gpu", "24GiB", "-c", "512")
    for words in (fit, ("inspect", "tiny.gguf"), ("check", "--help"), ("diff",)):
        done = subprocess.run(
            [sys.executable, "-I", "-c", script, *words], capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == (2 if words == ("diff",) else 0), done.stderr
        assert "was run" not in done.stdout + done.stderr
        assert not checkout.has_run()
    for path in checkout.path.glob("*.py"):
        path.unlink()
    (checkout.path / "pytest.ini").unlink()


def test_a_plan_hands_no_other_options_to_a_program(checkout: Checkout, command: Command) -> None:
    model, server = str(checkout.path / "tiny.gguf"), str(upstream.tool("llama-server"))
    words = (model, "--device", "none", "-c", "512", "--for", "llama-server", "--llama-cpp", server, "--json")
    plan = command(*words).document
    written = checkout.path / "written"
    verify = ("verify", "--plan", "plan.json", "--for", "llama-server", "--server", server, "--prompts", "1")
    logs = ["--log-file", str(written)]
    for arguments in (logs, ["-ts", "1", *logs], ["--mtp", "--log-file"], ["-md"]):
        plan["shared"] = [{"kind": "lora", "name": "a", "memory": [], "arguments": arguments}]
        checkout.write(json.dumps(plan), "plan.json")
        status, _, said = command(*verify)
        assert status == 2 and said.startswith("fitter: error: plan.json: 'shared[0].arguments' is [")
        assert said.endswith(", not options that a plan has, each with a value\n")
        assert not written.exists()


# --- what has too many levels


def _parentheses(n: int) -> str:
    return "(" * n + "chat" + ")" * n


@named_cases(
    ("parentheses", _parentheses(5000), 2, "has more than 50 parentheses inside one another: leave some out"),
    ("parentheses that are not closed", "(" * 60000, 2, "has more than 50 parentheses inside one another"),
    ("some parentheses", _parentheses(50), 0, ""),
    ("not", "not " * 5000 + "chat", 2, "is not an expression"),
    ("a long word", "y" * 100_000, 2, "…' selects no case; the cases are chat"),
)
def test_a_long_expression(expression: str, status: int, says: str, checkout: Checkout, command: Command) -> None:
    code, _, said = command("check", "-k", expression)
    assert code == status and says in said
    assert said.count("\n") == (status != 0) and len(said) < 200


def _lists(n: int) -> str:
    return "[" * n + "]" * n


LEVELS: dict[str, Callable[[int], str]] = {
    "lists": lambda n: f"{CASE}x = {_lists(n)}\n",
    "tables": lambda n: f"{CASE}budget = {'{a=' * n}1{'}' * n}\n",
    "parts of a key": lambda n: f"{CASE}{'a.' * n}a = 1\n",
    "parts in quotes": lambda n: CASE + '"b c" . ' * n + "a = 1\n",
    "parts of a header": lambda n: f"{CASE}[{'a.' * n}a]\n",
}


@pytest.mark.parametrize("n", [900, 100_000])
@pytest.mark.parametrize("text", LEVELS.values(), ids=LEVELS)
def test_levels_of_toml(text: Callable[[int], str], n: int, checkout: Checkout, command: Command) -> None:
    checkout.write(text(n))
    checkout.write(text(n).replace(CASE, "schema = 1\n[cases.chat.params]\n"), "deep.lock")
    answers = [command(*words) for words in (("check",), ("history", "fitter.toml"), ("lock", "--update", "chat"))]
    checkout.write(CASE)
    answers.append(command("check", "--lock", "deep.lock"))
    for name, (status, _, said) in zip(("fitter.toml",) * 3 + ("deep.lock",), answers, strict=True):
        assert status == 2 and said.startswith(f"fitter: error: {name} has ") and said.count("\n") == 1
        assert "bug" not in said


def test_dots_that_join_no_keys(checkout: Checkout) -> None:
    path = "./" * 60 + "tiny.gguf"
    patterns = ", ".join(f'"blk.{i}.ffn_up.weight=CPU"' for i in range(40))
    dots = "# " + ". " * 99 + "a.b.c " * 40 + "\n"
    checkout.write(CASE.replace("tiny.gguf", path) + f"override_tensor = [{patterns}] {dots}{dots}")
    assert main(["check", "--lock", "none.lock"]) == 2  # there is no such lock, but the file is one


@cases(900, 100_000)
def test_levels_of_plans(n: int, checkout: Checkout, command: Command) -> None:
    plan = command("tiny.gguf", "--gpu", "24GiB", "-c", "512", "--json").out
    checkout.write(plan, "plan.json")
    for key, value in (("n_ctx", "512"), ("tensor_split", "null"), ("load_mode", '"auto"')):
        deep = json.dumps({**json.loads(plan), "params": {**json.loads(plan)["params"], key: "HERE"}})
        checkout.write(deep.replace('"HERE"', _lists(n)), "deep.json")
        for words in (("diff", "deep.json", "plan.json"), ("verify", "--plan", "deep.json")):
            status, _, said = command(*words)
            assert status == 2, (key, value, words)
            assert said.startswith("fitter: error: deep.json") and said.count("\n") == 1 and len(said) < 200
