"""A hub like Hugging Face's, for tests: repositories that are folders, their lists of files, and files on another host.

``python -m tests.support.hub FOLDER`` serves ``FOLDER/org/repo`` until it is interrupted, and says what to set for it.
"""

from __future__ import annotations

import hashlib
import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import parse_qs, quote, unquote, urlsplit

from tests.support.ranges import FileServer, Request, serving

COMMIT = "0123456789" * 4
"""Of every repository."""


@dataclass
class Hub:
    """The hub at ``url`` has the repositories ``org/repo`` below ``folder``; ``files`` is the host of their contents.

    ``token``: where it is not empty, only who sends it gets a file, and ``is_private``: a list. ``page``: how many
    files a page of a list has.
    """

    folder: Path
    server: FileServer
    files: FileServer
    token: str = ""
    is_private: bool = False
    page: int = 1000
    renamed: dict[str, str] = field(default_factory=dict)
    signed: int = 0

    @property
    def url(self) -> str:
        """Return the value for ``HF_ENDPOINT``."""
        return self.server.url

    def answer(self, request: Request) -> bool:
        """Answer as the hub does."""
        path = unquote(urlsplit(request.path).path)
        words = path.strip("/").split("/")
        is_api = words[:2] == ["api", "models"]
        repo = "/".join(words[2:4] if is_api else words[:2])
        is_known = request.headers.get("Authorization") == f"Bearer {self.token}"
        if repo in self.renamed:
            request.say(307, b"", {"Location": quote(path.replace(repo, self.renamed[repo], 1)) + "?recursive=true"})
        elif not (self.folder / repo).is_dir() or (self.is_private and not is_known):
            request.say(401, b"", {"X-Error-Code": "RepoNotFound"})
        elif is_api and words[4] == "refs":
            refs = {"branches": [{"name": "main", "targetCommit": COMMIT}]}
            request.say(200, json.dumps(refs).encode(), {"Content-Type": "application/json"})
        elif is_api and words[4] == "revision":
            names = [{"rfilename": each["path"]} for each in self._files(repo, "") if each["type"] == "file"]
            document = {"id": repo, "sha": COMMIT, "siblings": names}
            request.say(200, json.dumps(document).encode(), {"Content-Type": "application/json"})
        elif is_api:
            self._list(request, repo, words[5], "/".join(words[6:]))
        elif words[2] == "resolve" and self.token and not is_known:
            request.say(403, b"", {"X-Error-Code": "GatedRepo"})
        elif words[2] == "resolve" and (self.folder / repo / "/".join(words[4:])).is_file():
            self._send(request, repo, "/".join(words[4:]))
        else:
            request.say(404, b"", {"X-Error-Code": "EntryNotFound"})
        return True

    def _list(self, request: Request, repo: str, revision: str, folder: str) -> None:
        place = self.folder / repo
        if revision not in ("main", "v1", "refs/pr/1", COMMIT):
            request.say(404, b"", {"X-Error-Code": "RevisionNotFound"})
            return
        if not (place / folder).is_dir():
            request.say(404, b"", {"X-Error-Code": "EntryNotFound"})
            return
        every = self._files(repo, folder)
        query = urlsplit(request.path)
        begin = int(parse_qs(query.query).get("cursor", ["0"])[0])
        headers = {"Content-Type": "application/json"}
        if begin + self.page < len(every):
            following = f"{self.url}{query.path}?recursive=true&cursor={begin + self.page}"
            headers["Link"] = f'<{following}>; rel="next"'
        request.say(200, json.dumps(every[begin : begin + self.page]).encode(), headers)

    def _files(self, repo: str, folder: str) -> list[dict[str, object]]:
        """Describe each file and folder as the hub's list does."""
        place = self.folder / repo
        return [
            {"type": "file" if path.is_file() else "directory", "path": path.relative_to(place).as_posix()}
            | {"oid": hashlib.sha1(bytes(path)).hexdigest(), "size": path.stat().st_size if path.is_file() else 0}
            for path in sorted((place / folder).rglob("*"))
        ]

    def _send(self, request: Request, repo: str, name: str) -> None:
        status = (self.folder / repo / name).stat()
        with self.server.lock:
            self.signed += 1
        to = f"{self.files.url.replace('127.0.0.1', 'localhost')}/{quote(f'{repo}/{name}')}?signed={self.signed}"
        tag = f'"{status.st_size:x}{status.st_mtime_ns:x}"'
        request.say(
            302,
            b"",
            {"Location": to, "X-Linked-Etag": tag, "X-Linked-Size": str(status.st_size), "X-Repo-Commit": COMMIT},
        )


@contextmanager
def hub_of(folder: Path, **settings: object) -> Iterator[Hub]:
    """A hub on free ports of loopback with the repositories in ``folder``; ``settings`` are those of ``Hub``."""
    with serving(folder) as files, serving(folder) as server:
        hub = Hub(folder, server, files, **settings)  # type: ignore[arg-type]
        server.answer = hub.answer
        yield hub


def main() -> None:
    """Serve until interrupted."""
    with hub_of(Path(sys.argv[1]).resolve()) as hub:
        print(f"HF_ENDPOINT={hub.url}", flush=True)
        threading.Event().wait()


if __name__ == "__main__":
    main()
