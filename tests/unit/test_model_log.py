"""Requests of each model in logs of llama-server's router and of llama-swap, and logs of any kind that are hostile."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from fitter.errors import UsageError
from fitter.planning.request import session
from fitter.planning.request.session import MOST_REQUESTS, last_requests, requests_of, session_of
from tests.support import patience
from tests.support.cases import cases, named_cases
from tests.support.patience import until

COLOURED = "\x1b[34m0.03.031.900\x1b[0m \x1b[32mI \x1b[0msrv  proxy_reques: proxying request to model {} on port 44761"
"""As llama-server b11739 writes it with ``--log-colors on --log-timestamps --log-prefix``."""
PLAIN = "srv  proxy_reques: proxying request to model {} on port 55879"
JSON = (
    '{{"type":"log","time":3031900,"level":"I","msg":"srv  proxy_reques: proxying request to model {} on port 1\\n"}}'
)
SWAP = "[DEBUG] dispatch: using local process for model: {}"
SWAP_TIMED = "2026-11-26T20:00:00Z [DEBUG] dispatch: using local process for model: {}"


def log(folder: Path, lines: list[str], end: str = "\n") -> Path:
    path = folder / "server.log"
    path.write_bytes("".join(line + end for line in lines).encode())
    return path


@named_cases(
    ("router with colours", COLOURED, "\n"),
    ("router", PLAIN, "\n"),
    ("router on Windows", PLAIN, "\r\n"),
    ("router as JSON", JSON, "\n"),
    ("llama-swap", SWAP, "\n"),
    ("llama-swap on Windows", SWAP, " \r\n"),
    ("llama-swap with times", SWAP_TIMED, "\n"),
)
def test_requests_are_read_in_their_order(template: str, end: str, tmp_path: Path) -> None:
    asked = ["chat", "org/embed:Q8_0", "chat", "a b", "other", "chat on port 80"]
    path = log(tmp_path, [line for name in asked for line in (template.format(name), "srv  log_server_r: done")], end)
    order = last_requests(path, ("embed", "a b", "chat", "org/embed:Q8_0", "chat on port 80"))
    assert order == ("chat", "org/embed:Q8_0", "chat", "a b", "chat on port 80")


@cases(
    "srv          load: spawning server instance with name=chat on port 44761",
    "[DEBUG] dispatch: using peer for model: chat",
    "[44761] slot get_availabl: id  3 | task -1 | selected slot by LRU, t_last = -1",
)
def test_other_lines_are_no_requests(line: str, tmp_path: Path) -> None:
    assert last_requests(log(tmp_path, [line, PLAIN.format("chat")]), ["chat"]) == ("chat",)


def test_bytes_that_are_no_text_do_not_end_a_log(tmp_path: Path) -> None:
    path = tmp_path / "server.log"
    path.write_bytes(
        b"\xff proxying request to model \xc3( on port 1\n" + PLAIN.format("chat").encode() + b"\n" + b"x\0" * 5000
    )
    assert last_requests(path, ["chat"]) == ("chat",)


def test_a_log_without_line_ends_is_read_in_pieces(tmp_path: Path) -> None:
    path = tmp_path / "server.log"
    path.write_bytes(b"x" * 300_000 + b"\n" + PLAIN.format("chat").encode())
    assert last_requests(path, ["chat"]) == ("chat",)


def test_of_a_long_log_the_last_requests_are_read(tmp_path: Path) -> None:
    names = ["old"] * 3 + ["new"] * MOST_REQUESTS
    path = log(tmp_path, [PLAIN.format(name) for name in names])
    assert last_requests(path, ["old", "new"]) == ("new",) * MOST_REQUESTS
    path = log(tmp_path, [PLAIN.format(name) for name in names[:-1]])
    assert last_requests(path, ["old", "new"]) == ("old",) + ("new",) * (MOST_REQUESTS - 1)


NO_TEXT = "{} is no text in UTF-8: give the log as the server wrote it"
NO_REQUEST = "give the log of a llama-server that routes to models, or of llama-swap with logLevel: debug"


@named_cases(
    ("missing", None, "{} does not exist: give the log of a server"),
    ("directory", "folder", "{} is a directory: give the log in it"),
    ("binary", b"GGUF\x03\0\0\0", NO_TEXT),
    ("UTF-16", "proxying request to model chat on port 1".encode("utf-16"), NO_TEXT),
    ("empty", b"", "{} has no request for chat, embed: " + NO_REQUEST),
    ("no debug level", b"[INFO] ready\n", "{} has no request for chat, embed: " + NO_REQUEST),
    (
        "other names",
        b"".join(PLAIN.format(name).encode() + b"\n" for name in ("x", "y", "x", "z", "w")),
        "{} has requests for x, y, z and none for chat, embed: name the models as the server does",
    ),
    (
        "names that would colour a terminal",
        PLAIN.format("\x1b[31mx").encode(),
        r"{} has requests for \x1b[31mx and none for chat, embed: name the models as the server does",
    ),
)
def test_what_is_no_log_of_these_models_is_refused(content: bytes | str | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / "server.log"
    if isinstance(content, str):
        path.mkdir()
    elif content is not None:
        path.write_bytes(content)
    with pytest.raises(UsageError) as caught:
        last_requests(path, ["chat", "embed"])
    assert str(caught.value) == message.format(path)


def test_a_path_that_no_system_takes_is_refused() -> None:
    with pytest.raises(UsageError, match=r"cannot be read \(embedded null byte\): give a log that you may read$"):
        last_requests(Path("a\0b"), ["chat"])


# --- lines of any log


def log_of_requests(path: Path) -> Path:
    path.write_bytes(
        b"prompt eval time = 1.0 ms / 300 tokens\n eval time = 2.0 ms / 20 tokens\nstop processing: n_tokens = 319\n"
        + PLAIN.format("chat").encode()
    )
    return path


def a_pipe(path: Path) -> Path:
    os.mkfifo(path)
    return path


def a_device(path: Path) -> Path:
    path.symlink_to("/dev/zero")
    return path


def a_sparse_line(path: Path) -> Path:
    log_of_requests(path)
    with open(path, "r+b") as file:
        file.truncate(2 << 30)
    return path


def letters_without_an_end(path: Path) -> Path:
    path.write_bytes(b"x" * (8 << 20))
    return path


READERS = {
    "work": lambda path: session_of(str(path), None),
    "models": lambda path: last_requests(path, ["chat"]),
    "requests": lambda path: requests_of(str(path)),
}
HOSTILE = {
    "a pipe": (a_pipe, r"is no file: give the log of a server$"),
    "a device": (a_device, r"is no file: give the log of a server$"),
    "a sparse line": (a_sparse_line, r"is no text in UTF-8: give the log as the server wrote it$"),
    "letters without an end": (letters_without_an_end, r"has no request "),
}


@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
@pytest.mark.parametrize(("make", "why"), HOSTILE.values(), ids=HOSTILE)
def test_no_reader_of_logs_waits_or_fills_the_memory(
    tmp_path: Path, read: Callable[[Path], object], make: Callable[[Path], Path], why: str
) -> None:
    path = make(tmp_path / "server.log")
    tracemalloc.start()
    try:
        with pytest.raises(UsageError, match=why):
            read(path)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


@cases(READERS)
def test_every_reader_of_logs_reads_the_end_of_a_long_one(
    read: Callable[[Path], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = log_of_requests(tmp_path / "server.log")
    expected = read(path)
    monkeypatch.setattr(session, "MOST_BYTES", 300)
    content = path.read_bytes()
    path.write_bytes(b"x" * 100_000 + b"\n" + content)
    assert read(path) == expected
    path.write_bytes(content + b"\n" + b"x" * 100_000)
    with pytest.raises(UsageError, match="has no request"):
        read(path)


@cases(19, 401, 5000)
def test_a_number_of_too_many_digits_is_none(digits: int, tmp_path: Path) -> None:
    text = log_of_requests(tmp_path / "server.log").read_text()
    for number in ("300", "319"):
        (tmp_path / "server.log").write_text(text.replace(number, "9" * digits))
        with pytest.raises(UsageError, match="has no request of a llama-server"):
            requests_of(str(tmp_path / "server.log"))
    (tmp_path / "server.log").write_text(text.replace("300", "9" * 18).replace("319", "9" * 18))
    session = session_of(str(tmp_path / "server.log"), None)
    assert session is not None and session.prompt == 10**18


@pytest.fixture(scope="module")
def long_log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A log of a line that takes a regular expression long, very often."""
    path = tmp_path_factory.mktemp("log") / "server.log"
    path.write_bytes(b"prompt eval time = 1.0 ms / 1 tokens\nstop processing: n_tokens = 5\n" * 3_000_000)
    return path


@cases(signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
def test_the_first_signal_ends_the_reading_of_a_log(number: signal.Signals, long_log: Path) -> None:
    command = [sys.executable, "-m", "fitter", "--shape", "qwen3-0.6b", "--gpu", "24GiB", "--workload", str(long_log)]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL) as process:
        own = psutil.Process(process.pid)
        until(lambda: any(file.path == str(long_log) for file in own.open_files()))
        process.send_signal(number)
        assert process.wait(timeout=patience.SECONDS) == 128 + number
