"""List the files of a repository of Hugging Face's hub, by the hub's own interface.

huggingface_hub would silently try five times, without a limit for all of it.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import threading
import urllib.parse
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, NoReturn

from fitter.errors import LibraryError, ModelError
from fitter.installation import install_command
from fitter.model.files.addresses import EXTRA, Address, HubFolder, check_endpoint
from fitter.model.files.http_ranges import HttpRanges, hub_headers
from fitter.model.files.ranges import MORE_TIME, Patience
from fitter.text import printable

_LONGEST_PAGE = 8 << 20
"""Most bytes of an answer."""
_MOST_PAGES, _MOST_FILES = 100, 100_000
"""A page of the hub's has a thousand files."""
_LONGEST_PATH = 1024
"""Most characters of a file's path."""
_NEXT = re.compile(r"<([^<>]*)>\s*;\s*rel=\"next\"")


def files_of(place: HubFolder, patience: Patience) -> tuple[tuple[str, int], ...]:
    """Return path and bytes of every file in ``place``, in the order of their paths.

    Raises ``ModelError`` if the hub does not list them, ``LibraryError`` without huggingface_hub.
    """
    url = _endpoint(place) + (f"/{urllib.parse.quote(place.folder)}" if place.folder else "")
    pages = _Pages(Address(f"{url}?recursive=true", place.url, is_hub=True), hub_headers(), patience, place)
    sizes: dict[str, int] = {}
    # resolving a name cannot be interrupted, so it runs on another thread
    failed: list[BaseException] = []

    def ask() -> None:
        try:
            for number, (path, size) in enumerate(_files(pages.all(), place)):
                if number == _MOST_FILES:
                    raise pages.too_many()
                sizes[path] = size
        except BaseException as error:
            failed.append(error)
        finally:
            pages.close()

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    try:
        while asking.is_alive() and patience.left > 0:
            asking.join(min(0.1, max(0.0, patience.left)))
    except BaseException:
        patience.stop()
        raise
    if asking.is_alive():
        patience.stop()
        raise pages.late()
    if failed:
        raise pages.late() if patience.left <= 0 else failed[0]
    return tuple(sorted(sizes.items()))


def _endpoint(place: HubFolder) -> str:
    """Return the URL that lists the files of a repository's revision."""
    try:
        from huggingface_hub import constants
    except ImportError:
        raise LibraryError(
            f"{place.url} is read with huggingface_hub, which is not installed: {install_command(EXTRA)}"
        ) from None
    if constants.HF_HUB_OFFLINE:
        raise ModelError(f"{place.url}: HF_HUB_OFFLINE is set, so the hub is not asked: unset it, or give a directory")
    host = (os.environ.get("HF_ENDPOINT") or constants.ENDPOINT).rstrip("/")
    check_endpoint(host)
    revision = urllib.parse.quote(place.revision or "main", safe="")
    return f"{host}/api/{place.kind or 'model'}s/{place.repository}/tree/{revision}"


def _files(pages: Iterator[Any], place: HubFolder) -> Iterator[tuple[str, int]]:
    for page in pages:
        if not isinstance(page, list):
            raise _not_a_list(place)
        for each in page:
            if not isinstance(each, dict) or each.get("type") != "file":
                continue
            path, size = each.get("path"), each.get("size")
            if not isinstance(path, str) or type(size) is not int or not 0 <= size < 1 << 63:
                raise _not_a_list(place)
            if not _is_path(path):
                name = printable(path, 60)
                raise ModelError(f"{place.url}: the hub lists '{name}', which no repository has: check HF_ENDPOINT")
            yield path, size


def _is_path(path: str) -> bool:
    """Return whether a path is valid in a repository, not in a folder above it."""
    is_text = "\0" not in path and not any("\ud800" <= char <= "\udfff" for char in path)
    return is_text and len(path) <= _LONGEST_PATH and not {"", ".", ".."} & set(path.split("/"))


def _not_a_list(place: HubFolder) -> ModelError:
    return ModelError(f"{place.url}: the hub's answer is no list of files: check HF_ENDPOINT, or try again later")


class _Pages(HttpRanges):
    """The pages of a list on the hub."""

    def __init__(self, address: Address, headers: dict[str, str], patience: Patience, place: HubFolder) -> None:
        super().__init__(address, headers, patience)
        self._place = place

    def all(self) -> Iterator[Any]:
        """Yield each page."""
        for _ in range(_MOST_PAGES):
            page, after = self._with_retries(self._page)
            yield page
            if not after:
                return
            after = urllib.parse.urljoin(self._url, after)
            if not self._is_own(after):
                raise _not_a_list(self._place)
            self._url = self._target = after
        raise self.too_many()

    def too_many(self) -> ModelError:
        """Make the error for too many files."""
        return ModelError(f"{self._place.url} has too many files: name a folder of it, or a file")

    def late(self) -> ModelError:
        """Make the error after the time limit."""
        seconds = f"{self._patience.seconds:g} s"
        return ModelError(f"{self._place.url}: its list of files did not arrive within {seconds}: ", MORE_TIME)

    def _page(self) -> tuple[Any, str]:
        answer = self._answer({"Accept": "application/json"})
        if answer.status != 200:
            self._refused(answer)
        body = self._body(answer, _LONGEST_PAGE)
        if len(body) == _LONGEST_PAGE:
            raise self.too_many()
        match = _NEXT.search(answer.headers.get("Link", ""))
        # a chunked body marks its end, others tell their length
        length = answer.headers.get("Content-Length", "")
        if length.isdecimal() and len(body) < int(length):
            self._broken_off()
        # the body is complete: close it before the request for the next page
        answer.close()
        with suppress(ValueError, RecursionError):
            return json.loads(body), match[1] if match else ""
        raise _not_a_list(self._place)

    def _refused(self, answer: http.client.HTTPResponse) -> NoReturn:
        place, code = self._place, answer.headers.get("X-Error-Code", "")
        if code == "RevisionNotFound":
            raise ModelError(f"{place.url}: the repository has no revision '{place.revision or 'main'}'")
        if code == "EntryNotFound" or (answer.status == 404 and place.folder and code != "RepoNotFound"):
            raise ModelError(f"{place.url}: the repository has no folder '{place.folder}'")
        if code == "RepoNotFound" or answer.status == 404:
            raise ModelError(self._gated(f"{answer.status}", "RepoNotFound"))
        super()._refused(answer)

    def _repository_page(self) -> str:
        url = urllib.parse.urlsplit(self._url)
        kind = f"{self._place.kind}s/" if self._place.kind else ""
        return f"{url.scheme}://{url.netloc.rpartition('@')[2]}/{kind}{self._place.repository}"
