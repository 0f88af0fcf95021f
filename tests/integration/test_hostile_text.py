"""Text from files is hostile: 100 names that act on terminals, CI logs and comments, through every command and format.

One process and one worker that live over all of them, and a few runs as a user makes them.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import pty
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fitter import api
from fitter.api import call_worker, device_calls, measure_load
from fitter.api.real_runs import verify_plan
from fitter.cli import main
from fitter.errors import FitterError
from fitter.llama.client import Worker
from fitter.llama.header.gguf_writer import Tensor, Value, write_file
from fitter.llama.types import DeviceInfo, Params, VirtualDevice
from fitter.machine.gpu import parse_gpus
from fitter.parameters.targets import FORMATS
from fitter.regression import measuring
from tests.support.attacks import ATTACKS
from tests.support.cases import cases
from tests.support.command import run_fitter

NAMES = [*ATTACKS, *(f"{'x' * 119}{attack} {attack}" for attack in ATTACKS)]
"""Each attack alone, and twice behind a text that reaches the column where a line is folded."""

METADATA: dict[str, Value] = {
    ".block_count": 1,
    ".context_length": 4096,
    ".embedding_length": 64,
    ".feed_forward_length": 64,
    ".attention.head_count": 2,
    ".attention.head_count_kv": 2,
    ".vocab_size": 32,
    ".attention.key_length": 32,
    ".attention.value_length": 32,
    ".attention.layer_norm_rms_epsilon": 1e-6,
}
TENSORS = (
    *(Tensor(f"{name}.weight", (64, 32), "f16") for name in ("token_embd", "output")),
    *(Tensor(f"{name}norm.weight", (64,), "f32") for name in ("output_", "blk.0.attn_", "blk.0.ffn_")),
    *(Tensor(f"blk.0.attn_{name}_norm.weight", (32,), "f32") for name in "qk"),
    *(Tensor(f"blk.0.attn_{name}.weight", (64, 64), "f16") for name in ("q", "k", "v", "output")),
    *(Tensor(f"blk.0.ffn_{name}.weight", (64, 64), "f16") for name in ("gate", "up", "down")),
)
GPU = ("--gpu", "8GiB")


def write_model(
    path: Path, name: str, architecture: str = "qwen3", tensors: Sequence[Tensor] = TENSORS, **more: Value
) -> Path:
    metadata = {"general.architecture": architecture, "general.name": name, "tokenizer.ggml.model": "no_vocab", **more}
    own = {architecture + key: value for key, value in METADATA.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    return write_file(path, {**metadata, **own}, tensors)


def file_name(name: str) -> str:
    """``name`` as a file system takes it, below 255 bytes with what is put around it."""
    return os.fsdecode(name.replace("/", "_").replace("\0", "_").encode()[:200])


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A model for each name: it is its own, its file's, and stands in its metadata as a key and as a value."""
    root = tmp_path_factory.mktemp("models")
    return [
        write_model(root / f"{number:03}" / f"{file_name(name)}.gguf", name, **{"general.url": name, name: 1})
        for number, name in enumerate(NAMES)
    ]


class _Kept(Worker):
    """A worker that stays open, so that every call of a test uses it."""

    def dismiss(self) -> None:
        pass

    def close(self) -> None:
        pass


@pytest.fixture(scope="module", autouse=True)
def one_worker() -> Iterator[None]:
    """The same worker for every call, and one fit of each model for all formats."""
    kept = _Kept()
    made = api.fit
    plans: dict[Any, api.Plan] = {}

    def worker(virtual: Sequence[VirtualDevice] = (), **_: Any) -> Worker:
        kept.configure(virtual)
        return kept

    def fit(model: Any, **words: Any) -> api.Plan:
        for name in ("on_progress", "on_log", "worker"):
            words.pop(name, None)
        key = os.fspath(model), str(sorted(words.items()))
        if key not in plans:
            plans[key] = made(model, worker=kept, **words)
        return plans[key]

    with pytest.MonkeyPatch.context() as patch:
        for module in (call_worker, measure_load, device_calls, verify_plan):
            patch.setattr(module, "Worker", worker)
        patch.setattr(measuring, "Worker", worker)
        patch.setattr(api, "fit", fit)
        yield
    Worker.close(kept)


Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run the command, and look at everything that it says."""

    def run(*words: str | Path) -> tuple[int, str, str]:
        status = main(list(map(str, words)))
        out, err = capsys.readouterr()
        assert_inert(out, is_exact="--format" in words)
        assert_inert(err)
        return status, out, err

    return run


def assert_inert(text: str, *, is_exact: bool = False) -> None:
    """Nothing in ``text`` acts on a terminal or on a CI that collects it; ``is_exact``: paths are as they are."""
    unseen = [char for char in text if char != "\n" and not char.isprintable()]
    assert not unseen, (unseen, text)
    assert is_exact or not re.search(r"##(\[|vso\[)", text), text
    commands = [line for line in text.splitlines() if line.lstrip().startswith("::")]
    ours = re.compile(r"::(error|notice) (file=[^:,]*,(line=\d+,)?)?title=fitter%3A [^:,]*::")
    assert all(ours.match(line) for line in commands), commands


# --- a name that llama.cpp takes


def test_fit_in_every_format(models: list[Path], run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for path in models:
        # control characters in a path cannot be in these, and it is said
        with_path = ("env", "ini", "llama-swap", "compose", "ollama")
        refusing = with_path if not str(path).isprintable() else ()
        answers = {}
        for form in FORMATS:
            status, out, err = run(path, *GPU, "--format", form)
            assert status in ((0, 3) if form in with_path else (0,)), err
            assert status == 3 or form not in refusing, out
            assert not out or form in ("json", "python", *with_path) or out.count("\n") == 1
            answers[form] = out
        assert_exact(path, answers["json"], answers["python"])
    assert not list(tmp_path.iterdir())


def assert_exact(path: Path, document: str, script: str) -> None:
    """The plan and the script name exactly the file of the model."""
    assert json.loads(document)["model"]["path"] == str(path)
    loaded: list[str] = []
    script = re.sub(r"^import .*$", "", script, flags=re.MULTILINE)
    with contextlib.suppress(AttributeError):
        # loading it, once it is fitted, is beyond a recorder
        exec(script, {"llama_cpp": _Recorder(loaded), "fitter": _Recorder(loaded)})
    assert loaded == [str(path)]


class _Recorder:
    def __init__(self, into: list[str]) -> None:
        self._into = into

    def __getattr__(self, _: str) -> Any:
        return lambda path, **_: self._into.append(path)


@cases(("-v", 0), ("--host-memory 1MiB", 1), ("-ot a\x1b=CPU", 3))
def test_fit_verbosely_too_large_and_with_an_odd_pattern(words: str, status: int, models: list[Path], run: Run) -> None:
    assert {run(path, *GPU, *words.split(" "))[0] for path in models[::10]} == {status}


def test_inspect(models: list[Path], run: Run) -> None:
    for path, name in zip(models, NAMES, strict=True):
        assert run("inspect", path)[0] == 0
        status, out, _ = run("inspect", path, "--json")
        assert status == 0
        assert json.loads(out)["metadata"]["general.name"] == name


def test_the_log(models: list[Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with Worker(parse_gpus(["8GiB"]), on_log=(lines := []).append) as worker, monkeypatch.context() as patch:  # type: ignore[var-annotated]
        for path in models[::3]:
            worker.header(path)
            worker.measure(path, replace(Params(), n_gpu_layers=0))
        assert any("general.name" in line or "owned" in line for line in lines)

        def refuse(*_: Any, on_log: Callable[[str], None], **__: Any) -> None:
            for line in lines:
                on_log(line)
            raise FitterError("that was all")

        patch.setattr(api, "fit", refuse)
        main([str(models[0]), *GPU, "-vv"])
    out, err = capsys.readouterr()
    assert err.count("\n") > 100
    assert_inert(out + err)


def test_what_stands_beside_the_model(models: list[Path], run: Run) -> None:
    """Its path is in the arguments."""
    draft, quoted = models[0], 0
    for path in models[::6]:
        for form in FORMATS:
            status, out, _ = run(models[0], *GPU, "-md", path, "--format", form)
            assert status == 0 or not out
            if form == "shell" and status == 0:
                assert str(path) in shlex.split(out)
                quoted += 1
        draft = path
    assert quoted >= 5, "some paths cannot be said in a shell"
    assert run(models[0], *GPU, "--lora", draft, "--mmproj", draft)[0] == 3


def test_diff_and_verify(models: list[Path], run: Run, tmp_path: Path) -> None:
    before = None
    for number, path in enumerate(models):
        plan = tmp_path / f"{number}.json"
        document = json.loads(run(path, *GPU, "--json")[1])
        # as another program may have written it
        for place in (document["model"], document["devices"][0]):
            place.update({key: NAMES[number] for key in ("name", "architecture", "description") if key in place})
        document["params"]["devices"] = [document["devices"][0]["name"]]
        document["params"]["type_k"] = NAMES[number]
        plan.write_text(json.dumps(document))
        for form in ((), ("--json",)):
            assert run("diff", before or plan, plan, *form)[0] in ((0, 4) if before else (0,))
        status, _, err = run("verify", path, "--plan", plan)
        assert status == 2, err
        before = plan
    odd = tmp_path / "\x1b]0;owned\x07.json"
    assert run("diff", odd, odd)[0] == 2
    assert run("verify", "--plan", odd)[0] == 2
    odd.write_text('{"schema": "\\u001b[31m"}')
    assert run("verify", "--plan", odd)[0] == 2


# --- as a test


def test_lock_and_check(
    models: list[Path], run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in models:
        os.link(path, tmp_path / f"{path.parent.name}{path.name}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    cases = tmp_path / "fitter.toml"
    cases.write_text('[cases.all]\nmodel = "*.gguf"\ngpu = "8GiB"\nn_ctx = 512\n')
    status, _, err = run("lock", "-j", "1")
    assert status == 0, err
    lock = tmp_path / "fitter.lock"
    assert_inert(lock.read_text())
    assert run("check", "-j", "1")[0] == 0
    # Whoever sends a pull request writes the lock as well.
    names = iter(NAMES * 2)
    text = re.sub(
        r'^(architecture|description) = ".*"$',
        lambda key: f"{key[1]} = {_toml(next(names))}",
        lock.read_text(),
        flags=re.M,
    )
    text = re.sub(r"^model = (\d)", r"model = 1", text, flags=re.M)
    lock.write_text(re.sub(r'^"blk\.\*', '"\\\\u001b[31m@octocat', text, flags=re.M))
    for form in ((), ("-v",), ("--json",), ("--markdown",), ("--junit", "a.xml")):
        status, out, err = run("check", "-j", "1", *form)
        assert status == 4, err
        assert err.count("\n::error ") + err.startswith("::error ") == len(NAMES)
        if form == ("--markdown",):
            assert_no_markup(out)
    assert_inert((tmp_path / "a.xml").read_text())


def _toml(text: str) -> str:
    """A text of TOML, all of it escaped."""
    return '"' + "".join(f"\\U{ord(char):08x}" for char in text) + '"'


def assert_no_markup(text: str) -> None:
    """Nobody is pinged, nothing is a link: what has signs is code."""
    assert text.startswith("### ❌ fitter check")
    for line in text.splitlines()[1:]:
        assert not line or line.startswith(("| ", "- ")), line
        bare = re.sub(r"(?<!`)(`+)(?!`).*?(?<!`)\1(?!`)", "", line)
        assert not re.search(r"@|#|<|\]\(|`|://|www\.|GH-|~~|_\w", bare), (bare, line)
        assert not line.startswith("|") or len(re.findall(r"(?<!\\)\|", line)) == 7, line


def test_cases_with_such_names(run: Run, tmp_path: Path) -> None:
    cases = tmp_path / "fitter.toml"
    commands = ["lock", "check"]
    for name in NAMES:
        for text in (
            f"[cases.{_toml(name)}]\nmodel = 'a.gguf'",
            f"[cases.a]\nmodel = {_toml(name)}",
            f"[cases.a]\nmodel = 'a.gguf'\n{_toml(name)} = 1",
            f"[cases.a]\nmodel = 'a.gguf'\ngpu = {_toml(name)}",
        ):
            cases.write_text(text)
            commands = commands[::-1]
            assert run(commands[0], "--cases", cases, "-j", "1")[0] in (2, 3)


# --- what llama.cpp refuses


def test_architectures_and_tensors(run: Run, tmp_path: Path) -> None:
    odd = TENSORS[-1]
    for number, name in enumerate(NAMES[:: len(NAMES) // 20]):
        by_architecture = write_model(tmp_path / f"{number}a.gguf", "a", architecture=name)
        # ggml reads names of 63 bytes
        short = name.encode()[:40].decode(errors="ignore")
        renamed = (*TENSORS[:-1], replace(odd, name=f"blk.0.{short}.weight"))
        by_tensor = write_model(tmp_path / f"{number}t.gguf", "a", tensors=renamed)
        by_both = write_model(tmp_path / f"{number}d.gguf", "a", tensors=(*TENSORS, replace(odd, name=short)))
        for path in (by_architecture, by_tensor, by_both):
            for words in (("fit", path, *GPU), ("fit", path, *GPU, "-v"), ("inspect", path), ("verify", path)):
                status, out, err = run(*words)
                assert status == 3, (words, out, err)
                assert not out


# --- devices


def test_devices(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, command in zip(NAMES, itertools.cycle(("devices", "backend", "fit a.gguf")), strict=False):
        status, out, _ = run(*command.split(), "--gpu", name)
        assert status == 2
        assert not out
        assert run("--rpc", name, "a.gguf")[0] == 2
        assert run(name)[0] in (2, 3)
        assert run("devices", name)[0] == 2
    # what a driver says of a card
    info = DeviceInfo("CUDA0", "[/foo] [red]Card :smile: " + "x" * 100 + "::error::", "gpu", "CUDA", 2**33, 2**33)
    monkeypatch.setattr(api, "devices", lambda *_, **__: ((info,), info))
    assert "[/foo] [red]Card :smile:" in run("devices")[1]


# --- as a user has it


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    name = "\x1b]0;owned\x07\x9b31m\n::error::owned ##[error]@octocat $(touch owned)"
    return write_model(tmp_path_factory.mktemp("hostile") / f"{file_name(name)}.gguf", name)


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    path = write_model(tmp_path / os.fsdecode(b"m\xff\x9b.gguf"), "QQQQ")
    path.write_bytes(path.read_bytes().replace(b"QQQQ", b"\x9b\xff\x1b["))
    done = run_fitter(path, *GPU, "--format", "python")
    assert done.returncode == 0, done.stderr
    assert_inert(done.stdout + done.stderr)
    assert_inert(run_fitter(path, *GPU, "--json").stdout)


def test_a_terminal_gets_no_sequence_but_colours(hostile: Path) -> None:
    for words in (("fit", *GPU, "-v"), ("inspect",)):
        parent, child = pty.openpty()
        environment = os.environ | {"TERM": "xterm-256color"}
        command = [sys.executable, "-m", "fitter", words[0], str(hostile), *words[1:]]
        process = subprocess.Popen(command, stdin=child, stdout=child, stderr=child, env=environment)
        os.close(child)
        seen = b""
        # Linux ends the reading of a terminal that nobody has open with an error.
        with contextlib.suppress(OSError):
            while part := os.read(parent, 1 << 16):
                seen += part
        os.close(parent)
        assert process.wait(timeout=120) == 0
        left = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", seen.decode()).replace("\r", "")
        assert "\\x1b]0;owned\\x07" in left
        assert_inert(left)


SHELLS = ("sh", "bash", "zsh", "fish")


@pytest.mark.parametrize("shell", [shell for shell in SHELLS if shutil.which(shell)])
def test_a_shell_reads_the_quoted_line_as_it_is(shell: str, models: list[Path], run: Run, tmp_path: Path) -> None:
    """Whatever is in the name of a file: nothing is executed, and the words are those of the plan."""
    script, expected = [], []
    say = f"{sys.executable} -c {shlex.quote('import sys; print(ascii(sys.argv[1:]))')}"
    for path in models[:50]:
        status, out, _ = run(models[0], *GPU, "-md", path, "--format", "shell")
        if status:
            assert not str(path).isprintable() or "," in str(path)
            continue
        (tmp_path / f"{len(script)}").write_text(out)
        if shell == "fish":
            script.append(f"set args (cat {len(script)}); and eval {shlex.quote(say)} $args")
        else:
            script.append(f'args=$(cat {len(script)}) && eval {shlex.quote(say)}" $args"')
        expected.append(ascii(shlex.split(out)))
    assert len(expected) > 10
    before = sorted(os.listdir(tmp_path))
    done = subprocess.run([shell], input="\n".join(script), cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == expected, done.stderr
    assert sorted(os.listdir(tmp_path)) == before
