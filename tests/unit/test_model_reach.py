"""Headers are fetched from public addresses only, where that is asked for: whatever names, redirects and DNS say."""

from __future__ import annotations

import http.server
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from fitter.errors import ModelError
from fitter.model.files import reach
from fitter.model.files.addresses import Address
from fitter.model.files.http_ranges import HttpRanges
from fitter.model.files.ranges import Patience
from tests.support.cases import cases

PUBLIC = ("8.8.8.8", "172.32.0.1", "2606:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808", "2002:808:808::1")
PRIVATE = (
    *("127.0.0.1", "127.255.0.3", "10.1.2.3", "172.16.0.1", "172.31.255.255", "192.168.1.1", "169.254.169.254"),
    *("100.64.0.1", "0.0.0.0", "0.1.2.3", "224.0.0.1", "240.0.0.1", "255.255.255.255", "192.0.0.8", "198.18.0.1"),
    *("::1", "::", "fe80::1", "fe80::1%eth0", "fc00::1", "fd12::1", "fec0::1", "ff02::1", "2001:db8::1"),
    *("::ffff:127.0.0.1", "::ffff:10.0.0.1", "64:ff9b::7f00:1", "64:ff9b:1::7f00:1", "2002:7f00:1::", "::127.0.0.1"),
    *("localhost", "", "0x7f.1", "2130706433"),
)


@pytest.mark.parametrize("address", PUBLIC)
def test_a_public_address(address: str) -> None:
    assert reach.is_public(address)


@pytest.mark.parametrize("address", PRIVATE)
def test_an_address_that_is_not_public(address: str) -> None:
    assert not reach.is_public(address)


@pytest.fixture
def limited() -> Iterator[None]:
    reach.only_public()
    yield
    reach.only_public(False)


@contextmanager
def server(address: str, to: str = "") -> Iterator[tuple[int, list[str]]]:
    """A web server at a loopback address: its port, and what was asked of it; it redirects ``to`` another, if any."""
    asked: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.headers["Host"])
            self.send_response(302 if to else 206)
            if to:
                self.send_header("Location", to)
            self.send_header("Content-Range", "bytes 0-3/4")
            self.send_header("Content-Length", "0" if to else "4")
            self.end_headers()
            self.wfile.write(b"" if to else b"GGUF")

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    with http.server.ThreadingHTTPServer((address, 0), Handler) as found:
        threading.Thread(target=found.serve_forever, args=[0.01], daemon=True).start()
        yield found.server_port, asked
        found.shutdown()


def read(url: str) -> bytes:
    """The first bytes at ``url``."""
    ranges = HttpRanges(Address(url, url), {}, Patience(5))
    try:
        return ranges.read(0, 4).data
    finally:
        ranges.close()


REFUSED = "is in a private network, which is not asked for models: start the server with --allow-private-addresses"


@cases("127.0.0.1", "localhost", "[::ffff:127.0.0.1]", "2130706433", "0x7f.1")
def test_this_machine_is_not_asked(host: str, limited: None) -> None:
    with server("127.0.0.1") as (port, asked):
        with pytest.raises(ModelError, match=REFUSED):
            read(f"http://{host}:{port}/a.gguf")
        assert asked == []


def test_unless_it_is_allowed() -> None:
    with server("127.0.0.1") as (port, asked):
        assert read(f"http://127.0.0.1:{port}/a.gguf") == b"GGUF"
        assert asked == [f"127.0.0.1:{port}"]


def as_public(monkeypatch: pytest.MonkeyPatch, *addresses: str) -> None:
    """Have these addresses of this machine taken for public ones."""
    known = reach.is_public
    monkeypatch.setattr(reach, "is_public", lambda address: address in addresses or known(address))


def test_not_after_a_redirect_either(limited: None, monkeypatch: pytest.MonkeyPatch) -> None:
    as_public(monkeypatch, "127.0.0.1")
    with (
        server("127.0.0.2") as (inner, asked),
        server("127.0.0.1", f"http://127.0.0.2:{inner}/a.gguf") as (port, first),
        pytest.raises(ModelError, match=f"^127.0.0.2 {REFUSED}"),
    ):
        read(f"http://127.0.0.1:{port}/a.gguf")
    assert (len(first), asked) == (1, [])


def answers(monkeypatch: pytest.MonkeyPatch, *found: list[str]) -> list[str]:
    """Have names found at one list of addresses after the other; returns the names that are asked for."""
    asked: list[str] = []
    waiting = list(found)

    def lookup(host: str, port: int, *_: Any, **__: Any) -> Any:
        asked.append(host)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in waiting.pop(0)]

    monkeypatch.setattr(socket, "getaddrinfo", lookup)
    return asked


@cases(["127.0.0.2"], ["8.8.8.8", "127.0.0.2"], ["127.0.0.2", "8.8.8.8"])
def test_a_name_that_leads_to_private_ones(found: list[str], limited: None, monkeypatch: pytest.MonkeyPatch) -> None:
    names = answers(monkeypatch, found)
    with server("127.0.0.2") as (port, asked), pytest.raises(ModelError, match=f"^model.example {REFUSED}"):
        read(f"http://model.example:{port}/a.gguf")
    assert (names, asked) == (["model.example"], [])


def test_what_is_checked_is_connected_to(limited: None, monkeypatch: pytest.MonkeyPatch) -> None:
    as_public(monkeypatch, "127.0.0.1")
    with server("127.0.0.1") as (port, asked):
        # the second answer is another one, as of a name that is rebound
        names = answers(monkeypatch, ["127.0.0.1"], ["127.0.0.2"])
        assert read(f"http://model.example:{port}/a.gguf") == b"GGUF"
        assert (names, asked) == (["model.example"], [f"model.example:{port}"])


def test_a_proxy_is_not_used(limited: None, monkeypatch: pytest.MonkeyPatch) -> None:
    with server("127.0.0.1") as (port, asked):
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{port}")
        monkeypatch.delenv("no_proxy", raising=False)
        monkeypatch.delenv("NO_PROXY", raising=False)
        with pytest.raises(ModelError, match=f"^10.0.0.1 {REFUSED}"):
            read("http://10.0.0.1/a.gguf")
        reach.only_public(False)
        assert read("http://10.0.0.1/a.gguf") == b"GGUF"
        assert asked == ["10.0.0.1"]


def test_tls_checks_the_same(limited: None) -> None:
    with pytest.raises(ModelError, match=f"^127.0.0.1 {REFUSED}"):
        read("https://127.0.0.1:1/a.gguf")
