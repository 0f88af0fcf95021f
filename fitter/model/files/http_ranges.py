"""Read parts of files on web servers.

fsspec's own reader takes the whole file if a server knows no ranges, follows every redirect and does not retry. This
one requests no more than the part, and closes the connection after any other answer.
"""

from __future__ import annotations

import base64
import http.client
import re
import socket
import ssl
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, NoReturn, TypeVar

from fitter.errors import Message, ModelError
from fitter.model.files import reach
from fitter.model.files.addresses import Address, shown
from fitter.model.files.ranges import MORE_TIME, Part, Patience, Unchanged, changed
from fitter.text import printable

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_T = TypeVar("_T")

TRIES = 4
"""Most tries of a request that fails for a temporary reason."""
_FIRST_PAUSE = 0.25
"""Seconds before the second try; each pause doubles."""
_LONGEST_PAUSE = 10.0
_MOST_SILENT = 30.0
"""Seconds of silence after which a server has failed."""
_REDIRECTS = 10
_PIECE = 1 << 16
_RANGE = re.compile(r"bytes ([0-9]{1,18})-([0-9]{1,18})/([0-9]{1,18})")
_EMPTY_RANGE = re.compile(r"bytes \*/([0-9]{1,18})")
_MOVED = (301, 302, 303, 307, 308)
_SAFE = "/%:@!$&'()*+,;=~-._?"
_NO_SUCH_HOST = frozenset(
    number
    for name in ("EAI_NONAME", "EAI_NODATA", "EAI_FAIL", "EAI_ADDRFAMILY")
    if (number := getattr(socket, name, None)) is not None
)


class _PassingError(Exception):
    """A temporary error; retried after ``pause`` seconds, if the server says so."""

    def __init__(self, message: str, pause: float | None = None) -> None:
        super().__init__(message)
        self.message, self.pause = message, pause


_sent: dict[str, Mapping[str, str]] = {}
"""Headers for addresses of each scheme; those of an empty one go with all."""


@contextmanager
def sending(headers: Mapping[str, Mapping[str, str]]) -> Iterator[None]:
    """Send ``headers`` inside the ``with`` block.

    Args:
        headers: Headers for the hosts of addresses of each scheme (``https``, ``hf``, ``ms``), or of all (``""``).
    """
    before = dict(_sent)
    _sent.update(headers)
    try:
        yield
    finally:
        _sent.clear()
        _sent.update(before)


class HttpRanges:
    """A file on a web server. ``headers`` go only to the host of its address."""

    def __init__(self, address: Address, headers: Mapping[str, str], patience: Patience) -> None:
        self._address = address
        self._url = self._target = address.url
        scheme = address.shown.partition(":")[0].lower()
        self._headers = {**headers, **_sent.get("", {}), **_sent.get(scheme, {})}
        self._patience = patience
        self._connection: http.client.HTTPConnection | None = None
        self._peer: tuple[str, str] = ("", "")
        self._linked = ""
        self._served: tuple[str, int] | None = None

    def read(self, start: int, size: int, known: str = "") -> Part:
        """Read as ``Ranges``; the tag is the ETag, or else the time of the last change."""
        return self._with_retries(lambda: self._read(start, size, known))

    def _with_retries(self, once: Callable[[], _T]) -> _T:
        """Call ``once``, again after temporary errors."""
        pause = _FIRST_PAUSE
        for left in range(TRIES - 1, -1, -1):
            self._patience.check(self._address.shown)
            try:
                return once()
            except _PassingError as error:
                self.close()
                self._target = self._url
                self._patience.check(self._address.shown)
                if not left:
                    raise ModelError(self._address.shown + error.message) from None
                self._patience.sleep(min(error.pause or pause, _LONGEST_PAUSE))
                pause *= 2
            except BaseException:
                self.close()
                raise
        raise AssertionError("every request either succeeds or raises")

    def close(self) -> None:
        """Close the connection."""
        connection, self._connection = self._connection, None
        if connection is not None:
            self._patience.done(_closer(connection))
            connection.close()

    # --- one request

    def _read(self, start: int, size: int, known: str) -> Part:
        name = self._address.shown
        answer = self._answer({"Range": f"bytes={start}-{start + size - 1}"}, known)
        if answer.status == 304:
            if not known:
                raise ModelError(f"{name}: the server answers that it has not changed, but not what it is")
            answer.read()
            raise Unchanged
        if answer.status == 416 and start == 0 and _EMPTY_RANGE.fullmatch(answer.headers.get("Content-Range", "")):
            return Part(b"", 0, "")
        if answer.status not in (200, 206):
            self._refused(answer)
        file_bytes, promised = self._length_and_part(answer, start, size)
        served = _tag(answer.headers)
        tag = self._linked or served
        if self._served not in (None, (served, file_bytes)):
            raise changed(name)
        self._served = (served, file_bytes)
        if known and tag == known:
            raise Unchanged
        data = self._body(answer, promised)
        if len(data) < promised:
            self._broken_off()
        if not answer.isclosed():
            # the server sends more, which is not read
            self.close()
        return Part(data, file_bytes, tag)

    def _answer(self, headers: Mapping[str, str], known: str = "") -> http.client.HTTPResponse:
        """Return the answer after all redirects."""
        for _ in range(_REDIRECTS + 1):
            answer = self._ask(headers, known)
            if answer.status not in _MOVED:
                return answer
            self._follow(answer, known)
        raise ModelError(f"{self._address.shown} is redirected more than {_REDIRECTS} times: check the address")

    def _length_and_part(self, answer: http.client.HTTPResponse, start: int, size: int) -> tuple[int, int]:
        """Return the length of the whole file, and the part of it in the answer.

        Raises ``ModelError`` if it is not the requested part.
        """
        name = self._address.shown
        length = answer.headers.get("Content-Length", "")
        if answer.headers.get("Content-Encoding", "identity") != "identity":
            raise ModelError(f"{name}: the server compresses what it sends, so no part of it can be read: {_DOWNLOAD}")
        if answer.status == 200:
            if start == 0 and length.isdecimal() and len(length) < 10 and int(length) <= size:
                return int(length), int(length)
            raise ModelError(f"{name}: the server sends no parts of files, only whole ones: {_DOWNLOAD}")
        match = _RANGE.fullmatch(answer.headers.get("Content-Range", ""))
        if match is None or int(match[1]) != start or not start <= int(match[2]) < int(match[3]):
            raise ModelError(f"{name}: the server sends another part of the file than the one asked for: {_DOWNLOAD}")
        return int(match[3]), min(size, int(match[2]) + 1 - start)

    def _body(self, answer: http.client.HTTPResponse, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            self._patience.check(self._address.shown)
            self._set_timeout()
            try:
                piece = answer.read1(min(_PIECE, size - len(data)))
            except (OSError, http.client.HTTPException) as error:
                self._failed(error)
            if not piece:
                break
            data += piece
        return bytes(data)

    def _ask(self, asked: Mapping[str, str], known: str) -> http.client.HTTPResponse:
        parts = urllib.parse.urlsplit(self._target)
        headers = {**asked, "Accept-Encoding": "identity", "User-Agent": "fitter"}
        if self._is_own(self._target):
            headers |= self._headers
            if parts.username is not None:
                user = f"{urllib.parse.unquote(parts.username)}:{urllib.parse.unquote(parts.password or '')}"
                headers["Authorization"] = f"Basic {base64.b64encode(user.encode()).decode()}"
            if known.startswith(('"', "W/")):
                headers["If-None-Match"] = known
        proxy = _proxy(parts.scheme, parts.hostname or "")
        if proxy and parts.scheme == "http":
            headers |= _proxy_headers(proxy)
        path = urllib.parse.quote(parts.path or "/", _SAFE.replace("?", ""), errors="surrogateescape")
        if parts.query:
            path += "?" + urllib.parse.quote(parts.query, _SAFE, errors="surrogateescape")
        try:
            connection, before = self._connected(parts, proxy)
            self._set_timeout()
            connection.request("GET", before + path, headers=headers)
            return connection.getresponse()
        except (OSError, http.client.HTTPException, ValueError) as error:
            self._failed(error)

    def _is_own(self, url: str) -> bool:
        """Return whether ``url`` is on the host of the credentials."""
        asked, other = urllib.parse.urlsplit(self._url), urllib.parse.urlsplit(url)
        return (asked.scheme, asked.hostname, asked.port) == (other.scheme, other.hostname, other.port)

    def _connected(
        self, parts: urllib.parse.SplitResult, proxy: urllib.parse.SplitResult | None
    ) -> tuple[http.client.HTTPConnection, str]:
        """Connect to the host of a URL, or to its proxy; return the connection and the text before the path in a
        request.
        """
        host, port = parts.hostname or "", parts.port
        peer = (parts.scheme, f"{host}:{port}")
        before = f"http://{parts.netloc.rpartition('@')[2]}" if proxy and parts.scheme == "http" else ""
        if self._connection is not None and self._peer == peer:
            return self._connection, before
        self.close()
        self._patience.check(self._address.shown)
        kind = reach.connection_kind(parts.scheme)
        if proxy:
            usual = 443 if proxy.scheme == "https" else 80
            connection = kind(proxy.hostname or "", proxy.port or usual, timeout=self._seconds())
            if parts.scheme == "https":
                connection.set_tunnel(host, port or 443, _proxy_headers(proxy))
        else:
            connection = kind(host, port, timeout=self._seconds())
        self._patience.open(_closer(connection))
        self._connection, self._peer = connection, peer
        return connection, before

    def _seconds(self) -> float:
        return max(0.01, min(_MOST_SILENT, self._patience.left))

    def _set_timeout(self) -> None:
        connection = self._connection
        if connection is not None and connection.sock is not None:
            connection.sock.settimeout(self._seconds())

    # --- other answers

    def _follow(self, answer: http.client.HTTPResponse, known: str) -> None:
        """Follow a redirect. Raises ``Unchanged`` if the answer's tag is the known one."""
        name, to = self._address.shown, answer.headers.get("Location", "")
        target = _redirect_target(self._target, to)
        scheme, other = self._target.partition(":")[0].lower(), target.partition(":")[0].lower()
        if scheme != other and re.fullmatch(r"[a-z][a-z0-9+.-]*", other):
            raise ModelError(
                f"{name} is redirected from {scheme} to {other}, which is not followed: if you trust it, give "
                f"{shown(target)}"
            )
        if not to or _split(target) is None:
            raise ModelError(f"{name} is redirected to nowhere: check the address")
        # Hugging Face's hub tells the tag of a file on another host
        self._linked = answer.headers.get("X-Linked-Etag", "") or self._linked
        if known and self._linked == known:
            raise Unchanged
        with suppress(OSError, http.client.HTTPException):
            # an answer of unknown length is not read
            if answer.chunked or (answer.length is not None and answer.length <= _PIECE):
                answer.read(_PIECE)
        if not answer.isclosed():
            self.close()
        self._target = target

    def _refused(self, answer: http.client.HTTPResponse) -> NoReturn:
        status, name = answer.status, self._address.shown
        said = f"{status} {printable(answer.reason or http.client.responses.get(status, ''), 60)}".strip()
        after = answer.headers.get("Retry-After", "")
        if status in (408, 425, 429) or status >= 500:
            pause = float(after) if after.isdecimal() and len(after) < 5 else None
            raise _PassingError(f": the server answers {said}: try again later", pause)
        if self._target != self._url and status in (401, 403):
            # the address was signed for some minutes
            raise _PassingError(f": {urllib.parse.urlsplit(self._target).hostname} answers {said}: try again later")
        if self._address.is_hub and (status in (401, 403) or "Gated" in answer.headers.get("X-Error-Code", "")):
            raise ModelError(self._gated(said, answer.headers.get("X-Error-Code", "")))
        if status in (401, 403, 407):
            raise ModelError(f"{name}: the server answers {said}: check the address, and the credentials in it")
        if status in (404, 410):
            raise ModelError(f"{name}: the server has no such file ({status}): check the address")
        raise ModelError(f"{name}: the server answers {said}: check the address")

    def _gated(self, said: str, code: str) -> str:
        where = self._repository_page()
        what = "is gated" if code == "GatedRepo" else "is gated, private or not there"
        return (
            f"{self._address.shown} {what} ({said}): ask for access at {where}, and set HF_TOKEN, or log in with "
            "'hf auth login'"
        )

    def _repository_page(self) -> str:
        """Return the hub's page of the file's repository."""
        page = urllib.parse.urlsplit(self._url)
        return f"{page.scheme}://{page.netloc.rpartition('@')[2]}{page.path.partition('/resolve/')[0]}"

    def _broken_off(self) -> NoReturn:
        raise _PassingError(": the connection broke off: try again later")

    def _failed(self, error: Exception) -> NoReturn:
        """Raise the meaning of a failed request; ``_PassingError`` if it is temporary."""
        name, host = self._address.shown, urllib.parse.urlsplit(self._target).hostname
        self._patience.check(name)
        if isinstance(error, socket.gaierror) and error.errno in _NO_SUCH_HOST:
            raise ModelError(f"{name}: there is no host '{host}': check the address, and the network") from None
        if isinstance(error, ssl.SSLCertVerificationError):
            raise ModelError(f"{name}: the certificate of {host} is not valid: {error.verify_message}") from None
        if isinstance(error, TimeoutError):
            silent = f": {host} does not answer: "
            raise _PassingError(Message(silent, "try again later", MORE_TIME, joined=", or "))
        if isinstance(error, (http.client.InvalidURL, ValueError)):
            raise ModelError(f"{name} is not a URL: write it as https://host/path/model.gguf") from None
        if isinstance(error, http.client.HTTPException) and not isinstance(
            error, (http.client.IncompleteRead, http.client.RemoteDisconnected)
        ):
            raise ModelError(f"{name}: what {host} answers is not HTTP: check the address") from None
        reason = getattr(error, "strerror", None) or "the connection broke off"
        said = printable(str(reason), 100)
        raise _PassingError(f": {host} cannot be reached ({said}): check the address, and the network")


_DOWNLOAD = "download the model, and give its file"


def _closer(connection: http.client.HTTPConnection) -> _Closer:
    return _Closer(connection)


class _Closer:
    """Closes a connection that another thread waits for; two of the same connection are equal."""

    def __init__(self, connection: http.client.HTTPConnection) -> None:
        self._connection = connection

    def __call__(self) -> None:
        sock = self._connection.sock
        if sock is not None:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Closer) and other._connection is self._connection

    def __hash__(self) -> int:
        return id(self._connection)


def _tag(headers: http.client.HTTPMessage) -> str:
    etag = headers.get("X-Linked-Etag") or headers.get("ETag")
    if etag:
        return etag
    changed_at = headers.get("Last-Modified")
    return f"last changed {changed_at}" if changed_at else ""


def _redirect_target(url: str, to: str) -> str:
    try:
        return urllib.parse.urljoin(url, to)
    except ValueError:
        return ""


def _split(url: str) -> urllib.parse.SplitResult | None:
    try:
        parts = urllib.parse.urlsplit(url)
        # an invalid port raises
        _ = parts.port
        return parts if parts.hostname else None
    except ValueError:
        return None


def _proxy(scheme: str, host: str) -> urllib.parse.SplitResult | None:
    """Return the environment's proxy for a host, if any."""
    if reach.is_limited():
        return None
    proxy = urllib.request.getproxies().get(scheme)
    if not proxy or urllib.request.proxy_bypass(host):
        return None
    return _split(proxy if "://" in proxy else f"http://{proxy}")


def _proxy_headers(proxy: urllib.parse.SplitResult) -> dict[str, str]:
    if proxy.username is None:
        return {}
    user = f"{urllib.parse.unquote(proxy.username)}:{urllib.parse.unquote(proxy.password or '')}"
    return {"Proxy-Authorization": f"Basic {base64.b64encode(user.encode()).decode()}"}


def hub_headers() -> dict[str, str]:
    """Return headers with Hugging Face's token, as huggingface_hub stores it; none without that package."""
    try:
        from huggingface_hub import get_token
    except ImportError:
        return {}
    token = get_token()
    if token and not (token.isascii() and token.isprintable()):
        raise ModelError("HF_TOKEN, or what 'hf auth login' has kept, is no token: set it again, or unset it")
    return {"Authorization": f"Bearer {token}"} if token else {}
