"""``fitter.Client`` and servers that are hostile: every answer is a plan or one of fitter's errors, and in time."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import fitter
from tests.support.cases import cases, named_cases
from tests.support.plans import make_plan

PLAN = make_plan().to_dict()
QUESTION = {"model": "shape://qwen3-8b", "gpus": ["24GiB"]}


def answer(body: bytes, status: str = "200 OK", head: str = "") -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n{head}\r\n".encode() + body


def plans(*found: Any) -> bytes:
    return answer(json.dumps({"answers": [{"status": 200, "answer": each} for each in found]}).encode())


def with_value(document: Any, value: object) -> Iterator[Any]:
    """Yield copies of a document in which one value is another."""
    if isinstance(document, dict):
        for key, each in document.items():
            for changed in [value, *with_value(each, value)]:
                yield {**document, key: changed}
            yield {name: kept for name, kept in document.items() if name != key}
    elif isinstance(document, list):
        for index, each in enumerate(document):
            for changed in [value, *with_value(each, value)]:
                yield [*document[:index], changed, *document[index + 1 :]]


@contextlib.contextmanager
def serving(serve: Callable[[socket.socket], None]) -> Iterator[str]:
    """A server that does ``serve`` with each connection, after the head of its request."""
    ends = threading.Event()

    def handle(connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            connection.recv(1 << 16)
            serve(connection)
            # else what was not read would reset the connection
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(1 << 16):
                pass

    def listen() -> None:
        while not ends.is_set():
            with contextlib.suppress(TimeoutError, OSError):
                connection, _ = listener.accept()
                threading.Thread(target=handle, args=(connection,), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.05)
        thread = threading.Thread(target=listen, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/"
        ends.set()
        thread.join()


def reset(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def deep(letter: bytes, number: int = 200_000) -> bytes:
    return answer(letter * number)


CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


@named_cases(
    ("nothing", b""),
    ("no HTTP", b"\x00\x01\x02 garbage\r\n\r\n"),
    ("a status that is none", b"HTTP/1.1 abc OK\r\n\r\n"),
    ("a status of many digits", b"HTTP/1.1 99999999999999999999 OK\r\n\r\n"),
    ("a status line without an end", b"HTTP/1.1 200 " + b"x" * 100_000),
    ("an endless header", b"HTTP/1.1 200 OK\r\nA: " + b"x" * 100_000),
    ("too many headers", b"HTTP/1.1 200 OK\r\n" + b"A: b\r\n" * 1000 + b"\r\n"),
    ("less than it says", b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n{}"),
    ("a length that is none", b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n{}"),
    ("a length below 0", b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n{}"),
    ("a bad chunk", CHUNKED + b"zz\r\n{}\r\n0\r\n\r\n"),
    ("an endless chunk", CHUNKED + b"f" * 40 + b"\r\n{}"),
    ("half of a chunk", CHUNKED + b"ff\r\n{}"),
    ("no end of chunks", CHUNKED + b"2\r\n{}\r\n"),
    ("no JSON", answer(b"<html>")),
    ("no text", answer(b"\xff\xfe\x00")),
    ("deep lists", deep(b"[")),
    ("deep objects", deep(b'{"a":')),
    ("a number of many digits", answer(b'{"answers": ' + b"9" * 10_000 + b"}")),
    ("null", answer(b"null")),
    ("a list", answer(b"[]")),
    ("a text", answer(b'"answers"')),
    ("a number", answer(b"1")),
    ("no answers", answer(b"{}")),
    ("answers that are none", answer(b'{"answers": 5}')),
    ("answers that are null", answer(b'{"answers": null}')),
    ("an answer that is none", answer(b'{"answers": [null]}')),
    ("an answer without a status", answer(b'{"answers": [{"answer": {}}]}')),
    ("a status without an answer", answer(b'{"answers": [{"status": 200}]}')),
    ("a status as a list", answer(b'{"answers": [{"status": [], "answer": {}}]}')),
    ("a status as an object", answer(b'{"answers": [{"status": {}, "answer": {"error": "x"}}]}')),
    ("a refusal that is none", answer(b'{"answers": [{"status": 400, "answer": null}]}')),
    ("a refusal that is a list", answer(b'{"answers": [{"status": 422, "answer": ["error"]}]}')),
    ("a reason that is none", answer(b'{"answers": [{"status": 500, "answer": {"error": {}}}]}')),
    ("fewer answers", answer(b'{"answers": []}')),
    ("more answers", plans(PLAN, PLAN)),
    ("another status", answer(b'{"error": "no"}', "418 I'm a teapot")),
    ("a status without JSON", answer(b"<html>", "502 Bad Gateway")),
    ("an error without a reason", answer(b"[]", "400 Bad Request")),
    ("a reason as a list", answer(b'{"error": []}', "503 Busy")),
    ("a redirect", answer(b"", "302 Found", "Location: file:///etc/passwd\r\n")),
    ("a redirect to itself", answer(b"", "307 Temporary Redirect", "Location: /api/v1/plans\r\n")),
    ("only interim answers", b"HTTP/1.1 100 Continue\r\n\r\n" * 100),
)
def test_a_hostile_answer_is_a_remote_error(said: bytes) -> None:
    with serving(lambda connection: connection.sendall(said)) as url:
        client = fitter.Client(url, timeout=30)
        with pytest.raises(fitter.RemoteError) as raised:
            client.fit(**QUESTION)
        assert "\n" not in str(raised.value) and len(str(raised.value)) < 1500
        with contextlib.suppress(fitter.RemoteError):
            assert isinstance(client.health(), dict)


def test_a_connection_that_is_reset_is_a_remote_error() -> None:
    with serving(reset) as url, pytest.raises(fitter.RemoteError, match="start it with fitter serve"):
        fitter.Client(url).fit(**QUESTION)


WRONG = (None, 10**400, -1, 1e999, float("nan"), "x", [], {}, [[1]], True)


@pytest.mark.parametrize("value", WRONG, ids=lambda value: repr(value)[:20])
def test_a_wrong_value_in_a_plan_is_a_remote_error(value: object) -> None:
    said = b""
    with serving(lambda connection: connection.sendall(said)) as url:
        client = fitter.Client(url)
        # a request has 64 questions at most
        documents = list(with_value(json.loads(json.dumps(PLAN)), value))
        for start in range(0, len(documents), 64):
            some = documents[start : start + 64]
            said = plans(*some)
            for found in client.fit_all([QUESTION] * len(some)):
                assert isinstance(found, (fitter.Plan, fitter.RemoteError))


@pytest.mark.parametrize("levels", range(300, 1000, 20))
def test_a_plan_with_many_levels_is_a_remote_error(levels: int) -> None:
    said = plans({"schema": 1}).partition(b"\r\n\r\n")[2].replace(b"1", b"[" * levels + b"]" * levels)
    refused = pytest.raises(fitter.RemoteError, match=r"'schema' is \[|inside too many others|is it a server of")
    with serving(lambda connection: connection.sendall(answer(said))) as url, refused:
        fitter.Client(url).fit(**QUESTION)


def drip(start: bytes, each: bytes) -> Callable[[socket.socket], None]:
    def serve(connection: socket.socket) -> None:
        connection.sendall(start)
        while True:
            connection.sendall(each)
            time.sleep(0.05)

    return serve


@named_cases(
    ("a status line", drip(b"HTTP/1.1 200 O", b"K")),
    ("headers", drip(b"HTTP/1.1 200 OK\r\n", b"A: b\r\n")),
    ("a body", drip(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n", b" ")),
    ("chunks", drip(CHUNKED, b"1\r\n \r\n")),
    ("nothing", drip(b"", b"")),
)
def test_the_time_limit_is_of_the_whole_answer(serve: Callable[[socket.socket], None]) -> None:
    with serving(serve) as url:
        began = time.monotonic()
        with pytest.raises(fitter.RemoteError, match=r"did not answer within 0.5 s: give it more time with timeout$"):
            fitter.Client(url, timeout=0.5).health()
        assert 0.4 < time.monotonic() - began < 20


@cases("", "x", "http://", "http://[", "http://a:b/", "http://a:99999/", "file:///etc/passwd")
def test_an_address_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(fitter.UsageError, match="is no address of a server"):
        fitter.Client(url)


@cases(0, -1, float("nan"), float("inf"), "x", None)
def test_a_time_limit_that_is_none_is_refused(timeout: Any) -> None:
    with pytest.raises(fitter.UsageError, match="timeout"):
        fitter.Client(timeout=timeout)
