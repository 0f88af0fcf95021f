"""A program that always ends, finding a llama-server, what its process has, and the prompts that it is sent."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from fitter.errors import LibraryError, LlamaCppCrashError, PlanError, UsageError
from fitter.llama.processes.supervisor import SupervisedProgram
from fitter.llama.types import LlamaCpp
from fitter.programs import running_server, server_requests
from fitter.programs.finding import ServerProgram, check_same_build, find_server
from fitter.programs.running_server import Gone, Resident, resident
from fitter.programs.server_requests import feed
from tests.support.cases import cases, named_cases
from tests.support.patience import SECONDS, until, with_more_time

SH = "/bin/sh"

# --- a program that ends


def is_there(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@named_cases(
    ("by itself", "echo said; exit 3", 3, "said\n"),
    ("by a signal", "kill -11 $$", -11, ""),
    ("asked to", "echo ready; exec sleep 600", -15, "ready\n"),
    ("killed, as it does not", "trap '' TERM; echo ready; while :; do sleep 1; done", -9, "ready\n"),
)
def test_how_a_program_ends(script: str, status: int, output: str) -> None:
    with SupervisedProgram([SH, "-c", script], os.environ) as program:
        said = program.output.readline() if output else b""
        if output == "ready\n":
            assert program.wait(0.05) is None
        else:
            assert program.wait(SECONDS) == status
        assert program.status == program.wait(0)
    assert program.status == status and not is_there(program.pid)
    assert (said + program.output.read()).decode() == output


def test_what_a_program_started_ends_with_it() -> None:
    with SupervisedProgram([SH, "-c", "(trap '' TERM; exec sleep 60) & echo $!; wait"], os.environ) as program:
        other = int(program.output.readline())
        assert is_there(other)
    until(lambda: not is_there(other), "it goes on")


def test_an_exception_ends_it() -> None:
    with pytest.raises(KeyError), SupervisedProgram(["/bin/sleep", "60"], os.environ) as program:
        raise KeyError
    assert program.status == -signal.SIGTERM and not is_there(program.pid)


def test_it_has_no_input_and_the_environment_that_was_given() -> None:
    with SupervisedProgram([SH, "-c", "cat; echo $ONE$HOME"], {"ONE": "1"}) as program:
        assert program.wait(SECONDS) == 0
    assert program.output.read() == b"1\n"


@cases(("gone", FileNotFoundError), ("plain", PermissionError))
def test_a_program_that_cannot_be_started(name: str, error: type[OSError], tmp_path: Path) -> None:
    (tmp_path / "plain").write_text("x")
    with pytest.raises(error) as caught:
        SupervisedProgram([str(tmp_path / name)], os.environ)
    assert caught.value.filename == str(tmp_path / name)


# --- which llama-server


def test_where_a_server_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for place in ("path", "build/bin", "one/lib", "one/bin"):
        (tmp_path / place).mkdir(parents=True)
    for place in ("path", "build/bin", "one/bin"):
        (tmp_path / place / "llama-server").touch(mode=0o755)
    library = tmp_path / "one/lib/libllama.so"
    library.touch()
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    cases: dict[tuple[str | None, str | None], str] = {
        (None, None): "path",
        (None, "python"): "path",
        (None, str(tmp_path / "build")): "build/bin",
        (None, str(tmp_path / "build/bin/llama-server")): "build/bin",
        (None, str(library)): "one/bin",
        (str(tmp_path / "build"), str(library)): "build/bin",
        ("llama-server", str(library)): "path",
    }
    for (server, llama_cpp), place in cases.items():
        found = find_server(server, llama_cpp)
        assert os.path.realpath(found) == str(tmp_path / place / "llama-server"), (server, llama_cpp)
    monkeypatch.setenv("FITTER_LLAMA_CPP", str(tmp_path / "build"))
    assert find_server() == str(tmp_path / "build/bin/llama-server")
    with pytest.raises(UsageError, match=r"there is no llama-server at /gone: name the file with --server"):
        find_server(llama_cpp="/gone")
    with pytest.raises(UsageError, match=r"is no llama-server and has none: name the file with --server"):
        find_server(llama_cpp=str(tmp_path / "one"), server=str(tmp_path / "one/lib"))
    monkeypatch.delenv("FITTER_LLAMA_CPP")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LibraryError, match=r"there is no llama-server on the PATH: install llama.cpp, or name one"):
        find_server()


PLANNED = LlamaCpp("0.5.0 (ggml 0.25.3, commit 0c1e57098)", "0.25.3", "0c1e570-dirty", "libllama.so", "key", "")


@cases(
    ("0.5.0-dev (build 1, commit 0c1e570)", "0c1e570"), ("5920 (0c1e57098)", "0c1e57098"), ("1 (unknown)", ""), ("", "")
)
def test_the_commit_that_a_server_says(version: str, commit: str) -> None:
    server = ServerProgram("/llama-server", version)
    assert server.commit == commit
    check_same_build(None, server)
    if commit:
        check_same_build(PLANNED, server)
    else:
        advice = "fit with --llama-cpp /llama-server$" if version else "is it a llama-server[?] Name one with --server$"
        with pytest.raises(PlanError, match=advice):
            check_same_build(PLANNED, server)


def test_another_build() -> None:
    with pytest.raises(PlanError) as caught:
        check_same_build(PLANNED, ServerProgram("/llama-server", "5920 (abcdef012)"))
    assert str(caught.value) == (
        "the plan was made with llama.cpp 0.5.0 (ggml 0.25.3, commit 0c1e57098), and /llama-server is 5920 "
        "(abcdef012), which may take other memory: fit with --llama-cpp /llama-server"
    )


# --- what its process has


def test_the_memory_of_a_process(tmp_path: Path) -> None:
    folder = tmp_path / "proc/7"
    folder.mkdir(parents=True)
    (folder / "status").write_text(
        "Name:\tllama-server\nVmRSS:\t   25160 kB\nRssAnon:\t8884 kB\nRssFile:\t   16276 kB\n"
    )
    found = resident(7, tmp_path)
    assert found == Resident(25160 * 1024, 16276 * 1024) and found.own == 8884 * 1024
    (folder / "status").write_text("Name:\tother system\n")
    assert resident(7, tmp_path) is None
    assert resident(8, tmp_path) is None


def test_the_environment_of_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = {"LLAMA_ARG_PORT": "1", "LLAMA_ARG_LOG_JSONL": "1", "LLAMA_API_KEY": "x", "LLAMA_ARG_SSL_KEY_FILE": "x"}
    theirs = {"LLAMA_ARG_THREADS": "1", "CUDA_VISIBLE_DEVICES": "0"}
    for name, value in {**ours, **theirs}.items():
        monkeypatch.setenv(name, value)
    found = running_server.environment()
    assert not ours.keys() & found.keys() and theirs.items() <= found.items()


# --- prompts


class Server:
    """A llama-server that answers after ``seconds``, and ends after so many prompts.

    The first that are asked ``together`` are answered once all of them are asked.
    """

    path = "/llama-server"
    log = ("one line",)

    def __init__(
        self, seconds: float = 0.0, ends_after: int = 10**9, answer: tuple[int, Any] = (200, {}), together: int = 0
    ) -> None:
        self.together = threading.Barrier(together, timeout=SECONDS) if together else None
        self.seconds, self.ends_after, self._answer = seconds, ends_after, answer
        self.asked: list[tuple[str, Mapping[str, Any]]] = []
        self.status: int | None = None
        self.at_once = self.most_at_once = 0
        self._lock = threading.Lock()

    def tick(self, seconds: float = 0.01) -> int | None:
        time.sleep(seconds)
        return self.status

    def ask(self, method: str, path: str, body: Mapping[str, Any], seconds: float) -> tuple[int, Any]:
        if path == "/tokenize":
            return 200, {"tokens": [1, 7]}
        with self._lock:
            self.asked.append((path, body))
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
            if len(self.asked) > self.ends_after:
                self.status = -9
            waits = self.together is not None and len(self.asked) <= self.together.parties
        if waits and self.together is not None:
            self.together.wait()
        time.sleep(min(self.seconds, seconds))
        with self._lock:
            self.at_once -= 1
        if self.status is not None or seconds < self.seconds:
            raise Gone
        return self._answer

    def end(self) -> None:
        pass

    def why(self) -> str:
        return "no memory"


def sent(server: Server, **options: Any) -> server_requests.Fed:
    return feed(server, **{"slots": 4, "room": 512, "n_vocab": 1000, "number": 40, **options})  # type: ignore[arg-type]


def test_prompts_fill_the_slots() -> None:
    server = Server(together=4)
    fed = sent(server)
    lengths = [len(body["prompt"]) for _, body in server.asked]
    assert (fed.prompts, fed.answered, fed.tokens, fed.slots, fed.refused) == (40, 40, sum(lengths), 4, "")
    assert server.most_at_once == 4
    assert max(lengths) <= 512 - 12 and max(lengths) > 400 and min(lengths[8:]) >= 250
    assert len({body["prompt"][0] for _, body in server.asked}) == 40, "no two begin alike"
    assert {path for path, _ in server.asked} == {"/completion"}
    assert all(body["logit_bias"] == [[7, 1000.0]] for _, body in server.asked), "what it writes is text"
    assert all(0 <= token < 1000 for _, body in server.asked for token in body["prompt"])


@cases((1, 1), (5, 3), (100_000, 2))
def test_prompts_of_odd_servers(room: int, n_vocab: int) -> None:
    server = Server()
    fed = sent(server, room=room, n_vocab=n_vocab, number=6)
    assert fed.answered == 6
    assert all(1 <= len(body["prompt"]) <= 4096 for _, body in server.asked)


def test_embeddings_are_only_read() -> None:
    server = Server()
    sent(server, is_read=True, number=3)
    assert {path for path, _ in server.asked} == {"/v1/embeddings"}
    assert all(set(body) == {"input"} for _, body in server.asked)


def test_a_slow_server_gets_short_prompts_and_then_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    def attempt(seconds: float) -> None:
        monkeypatch.setattr(server_requests, "SECONDS", seconds)
        server = Server(5 * seconds)
        fed = sent(server, room=4096, slots=2)
        assert 0 < fed.answered < 40
        assert all(len(body["prompt"]) <= 2048 for _, body in server.asked)

    with_more_time(attempt, 0.02, 0.2, 1)


def test_what_a_server_refuses() -> None:
    fed = sent(Server(answer=(400, {"error": {"message": "too\nlong"}})), number=5)
    assert (fed.answered, fed.tokens, fed.refused) == (0, 0, "too long")
    assert sent(Server(answer=(502, None)), number=1).refused == "HTTP status 502"


def test_a_server_that_ends_in_between() -> None:
    with pytest.raises(LlamaCppCrashError) as caught:
        sent(Server(0.01, ends_after=8))
    assert str(caught.value).startswith("/llama-server ended while it answered prompts, ")
    assert str(caught.value).endswith(" of 40 (signal 9): no memory")
    assert caught.value.log == ("one line",)
