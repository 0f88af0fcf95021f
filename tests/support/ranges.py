"""A web server for tests: files with ranges and ETags, counted, and made to fail in the ways of real ones."""

from __future__ import annotations

import hashlib
import os
import re
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from unittest import mock
from urllib.parse import unquote, urlsplit

_RANGE = re.compile(r"bytes=([0-9]+)-([0-9]*)")


@dataclass
class FileServer:
    """Serves the files below ``folder`` at ``url``.

    ``requests`` are the methods, paths and statuses of all that was asked, ``headers`` theirs, and ``sent`` the bytes
    of every body. ``answer`` may answer in place of the server: it gets the request, and returns whether it has; one
    that is to wait for as long as the server lasts waits for ``closing``.
    """

    folder: Path
    url: str = ""
    has_ranges: bool = True
    has_etags: bool = True
    version: str = "HTTP/1.1"
    host: str = "127.0.0.1"
    answer: Callable[[Request], bool] = lambda request: False
    last_modified: str = ""
    etag: Callable[[Path], str] | None = None
    requests: list[tuple[str, str, int]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    sent: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)
    closing: threading.Event = field(default_factory=threading.Event)

    def forget(self) -> None:
        """Begin to count anew."""
        with self.lock:
            self.requests.clear()
            self.headers.clear()
            self.sent = 0

    @property
    def statuses(self) -> Counter[int]:
        """How often each status was answered."""
        return Counter(status for _, _, status in self.requests)


class Request(BaseHTTPRequestHandler):
    """One connection; ``files`` is the server that it belongs to."""

    protocol_version = "HTTP/1.1"
    # an answer's head and body in one packet
    wbufsize = -1
    disable_nagle_algorithm = True
    files: FileServer

    def do_GET(self) -> None:
        """Answer with a file, or a part of it."""
        with self.files.lock:
            self.files.headers.append(dict(self.headers))
        if self.files.answer(self):
            return
        path = self.files.folder / unquote(urlsplit(self.path).path).lstrip("/")
        if not path.is_file():
            self.say(404, b"nothing here\n")
            return
        size, etag = path.stat().st_size, self._etag(path)
        headers = {"ETag": etag} if etag else {}
        if self.files.last_modified:
            headers["Last-Modified"] = self.files.last_modified
        if etag and self.headers.get("If-None-Match") == etag:
            self.say(304, b"", headers)
            return
        match = _RANGE.fullmatch(self.headers.get("Range", ""))
        if not self.files.has_ranges or match is None:
            self._whole(path, size, headers)
            return
        start, end = int(match[1]), min(int(match[2] or size), size - 1)
        if start >= size:
            self.say(416, b"", {"Content-Range": f"bytes */{size}"})
            return
        with path.open("rb") as file:
            file.seek(start)
            body = file.read(end - start + 1)
        self.say(206, body, {**headers, "Content-Range": f"bytes {start}-{end}/{size}", "Accept-Ranges": "bytes"})

    def do_HEAD(self) -> None:
        """Answer without what follows the head."""
        self.do_GET()

    def say(self, status: int, body: bytes = b"", headers: dict[str, str] | None = None) -> None:
        """Answer with ``body``."""
        self._begin(status, {"Content-Length": str(len(body)), **(headers or {})})
        self._send(b"" if self.command == "HEAD" else body)

    def drip(self, pause: float, headers: dict[str, str]) -> None:
        """Answer with a byte at a time, each after a ``pause`` in seconds, for as long as the server lasts."""
        self._begin(206, headers)
        while not self.files.closing.wait(pause):
            self._send(b"G")

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""

    def _etag(self, path: Path) -> str:
        if not self.files.has_etags:
            return ""
        if self.files.etag is not None:
            return self.files.etag(path)
        status = path.stat()
        return f'"{hashlib.md5(f"{path.name} {status.st_mtime_ns} {status.st_size}".encode()).hexdigest()}"'

    def _whole(self, path: Path, size: int, headers: dict[str, str]) -> None:
        self._begin(200, {**headers, "Content-Length": str(size), "Accept-Ranges": "bytes"})
        if self.command == "HEAD":
            self._send(b"")
            return
        with path.open("rb") as file:
            while piece := file.read(1 << 16):
                self._send(piece)

    def _begin(self, status: int, headers: dict[str, str]) -> None:
        with self.files.lock:
            self.files.requests.append((self.command, self.path, status))
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    def _send(self, data: bytes) -> None:
        try:
            self.wfile.write(data)
            self.wfile.flush()
        except OSError:
            # who asked has gone
            self.close_connection = True
            raise ConnectionAbortedError from None
        with self.files.lock:
            self.files.sent += len(data)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    # Of more connections at once than this, the system has some begin again after a second.
    request_queue_size = 128

    def handle_error(self, request: object, client_address: object) -> None:
        """Say nothing: tests end connections on purpose."""


@contextmanager
def serving(folder: Path, **settings: object) -> Iterator[FileServer]:
    """A server of the files in ``folder`` on a free port of loopback; ``settings`` are those of ``FileServer``."""
    files = FileServer(folder, **settings)  # type: ignore[arg-type]
    kind = type("Server", (_Server,), {"address_family": socket.AF_INET6}) if ":" in files.host else _Server
    server = kind((files.host, 0), type("Answers", (Request,), {"files": files, "protocol_version": files.version}))
    files.url = f"http://{f'[{files.host}]' if ':' in files.host else files.host}:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield files
    finally:
        files.closing.set()
        server.shutdown()
        server.server_close()
        thread.join()


def clean_environment() -> dict[str, str]:
    """This environment without proxies and tokens of whoever runs the tests."""
    unwanted = ("proxy", "hf_", "hugging_face_hub_")
    kept = {name: value for name, value in os.environ.items() if not any(word in name.lower() for word in unwanted)}
    return {**kept, "NO_PROXY": "*"}


@contextmanager
def in_clean_environment() -> Iterator[None]:
    """That is this process's, too, for as long as this lasts, and Hugging Face's directory is in the cache's."""
    clean = clean_environment() | {"HF_HOME": os.path.join(os.environ["XDG_CACHE_HOME"], "hub")}
    with mock.patch.dict(os.environ, clean, clear=True):
        yield
