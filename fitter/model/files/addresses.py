"""Addresses of remote models: the URL to request, and the part of it that may be shown."""

from __future__ import annotations

import glob
import os
import re
import shlex
import urllib.parse
from collections.abc import Sequence
from dataclasses import dataclass

from fitter.errors import LibraryError, ModelError
from fitter.installation import install_command
from fitter.model.files.source import split_path

EXTRA = "remote"
"""The extra with packages for addresses other than HTTP's."""

HUB = "hf"
"""Scheme of files on Hugging Face's hub: ``hf://org/repo/file.gguf``."""

MODEL_SCOPE = "ms"
"""Scheme of files on ModelScope: ``ms://org/repo[@revision]/file.gguf``."""

_URL = re.compile(r"(?P<scheme>[a-zA-Z][a-zA-Z0-9+.-]+)://.*", re.DOTALL)
_CHAINED = re.compile(r"[a-z][a-z0-9+.-]+(://[^:]*)?::.*", re.DOTALL)
_FLATTENED = re.compile(r"(?P<scheme>https?|hf|ms|s3|gs|gcs|az|abfs|ftp|sftp|file):/(?P<rest>[^/].*)", re.DOTALL)
"""A URL after ``pathlib`` removed a slash."""
_USER = re.compile(r"//(?:[^/:\[]*:(?![0-9]*(?:[:/?#]|$))(?:(?!::).)*@|[^/]*@)", re.DOTALL)
"""A user before a host. After a colon, anything but a port is a password, even with a slash."""
_QUERY = re.compile(r"[?#].*?(?=::|$)", re.DOTALL)
_REFERENCE = re.compile(r"refs/(?:pr|convert)/[^/]+")
"""A revision of the hub with slashes in its name."""
_SPLIT = re.compile(r"(?P<before>[^?#]*?)-(?P<number>[0-9]{5})-of-(?P<count>[0-9]{5})\.gguf(?=$|[?#]|::)")
_KINDS = {"datasets": "dataset", "spaces": "space"}
_ID = re.compile(r"\w[\w.-]*", re.ASCII)
"""Name of an organization or repository on the hub."""
_ON_MODEL_SCOPE = re.compile(
    r"ms://(?P<repository>\w[\w.-]*/\w[\w.-]*)(?:@(?P<revision>[\w.%-]+))?/(?P<file>[^?#]+)", re.ASCII | re.IGNORECASE
)
_PAGE = re.compile(r"(/[^/]+/[^/]+)/(?:blob|raw|tree)/")
"""Pages of the hub that show a file instead of the file itself."""
_DEFAULT_ENDPOINT = "https://huggingface.co"
_MODEL_SCOPE_ENDPOINT = "https://modelscope.cn"
_SHORT = ("https://hf.co", "https://www.huggingface.co")
"""Other names of the usual hub."""
_SUFFIX = ".gguf"
_MOST_FILES = 1000
"""Most files of a model: llama.cpp opens all at once, and a process usually may open 1024."""


@dataclass(frozen=True)
class Address:
    """The place of a remote file.

    Attributes:
        url: The URL to request, perhaps with credentials.
        shown: The URL without credentials.
        is_hub: Whether it is on Hugging Face's hub, whose token goes with the request.
    """

    url: str
    shown: str
    is_hub: bool = False

    @property
    def scheme(self) -> str:
        """Its scheme in lower case, such as ``https``."""
        return self.url.partition(":")[0].lower()

    @property
    def is_http(self) -> bool:
        """Whether a web server has it."""
        return self.scheme in ("http", "https")

    @property
    def name(self) -> str:
        """Name of the file: the last part of its path."""
        return file_name(self.shown)


def as_url(path: str | os.PathLike[str]) -> str | None:
    """Return the URL that ``path`` is, also after ``pathlib`` removed a slash; ``None`` for a local file."""
    text = os.fspath(path)
    if _URL.fullmatch(text) or _CHAINED.fullmatch(text):
        return text
    flat = _FLATTENED.fullmatch(text)
    return f"{flat['scheme']}://{flat['rest']}" if flat and not os.path.lexists(text) else None


def shown(url: str) -> str:
    """Return ``url`` without possible secrets: user and password, and everything after ``?`` or ``#``."""
    return _QUERY.sub("", _USER.sub("//", url))


def without_secrets(text: str, url: str) -> str:
    """Remove the secret parts of ``url`` from ``text``, in one line."""
    text = text.replace(url, shown(url))
    users = [match[0][2:-1] for match in _USER.finditer(url)]
    secrets = {*users, *(user.partition(":")[2] for user in users), *(match[0] for match in _QUERY.finditer(url))}
    for secret in sorted({*secrets, *map(urllib.parse.unquote, secrets)} - {""}, key=len, reverse=True):
        text = text.replace(secret, "…")
    return " ".join(shown(word) if "://" in word else word for word in text.split())


def file_name(url: str) -> str:
    """Return the file's name in a URL. Raises ``ModelError`` if there is none."""
    scheme, _, path = shown(url).partition("://")
    # in other schemes :: begins the archive that contains the file
    path = path.partition("/")[2] if scheme.lower() in ("http", "https") else path.partition("::")[0]
    name = urllib.parse.unquote(path.rstrip("/").rpartition("/")[2])
    if not name or name in (".", "..") or "/" in name or "\0" in name or len(os.fsencode(name)) > 200:
        raise ModelError(f"{shown(url)} names no file: give the address of a GGUF file")
    return name


def addresses(url: str) -> tuple[Address, ...]:
    """Return the addresses of all files of the model with the file ``url``.

    Raises ``ModelError`` if it is no address of a file, ``LibraryError`` if its package is missing.
    """
    file_name(url)
    split = _bounded(url)
    if split is None:
        return (address(url),)
    before, after, count = split
    return tuple(address(split_path(before, number, count) + after) for number in range(1, count + 1))


def names(url: str) -> tuple[Address, ...]:
    """Return as ``addresses`` the printable addresses, which need no package."""
    file_name(url)
    split = _bounded(url)
    if split is None:
        return (Address("", shown(url)),)
    before, after, count = split
    every = (split_path(before, number, count) + after for number in range(1, count + 1))
    return tuple(Address("", shown(each)) for each in every)


def _bounded(url: str) -> tuple[str, str, int] | None:
    """Split as ``_split``. Raises ``ModelError`` for too many files."""
    split = _split(url)
    if split is not None and split[2] > _MOST_FILES:
        raise ModelError(
            f"{shown(url)} is one of {split[2]} files by its name, and of no more than {_MOST_FILES} any is asked for: "
            "check the address"
        )
    return split


def _split(url: str) -> tuple[str, str, int] | None:
    """Return the text before and after a split file's number, and the number of files; ``None`` for another file."""
    match = _SPLIT.match(url)
    if match is None or not 1 <= int(match["number"]) <= int(match["count"]):
        return None
    return match["before"], url[match.end() :], int(match["count"])


def address(url: str) -> Address:
    """Parse a URL. Raises ``ModelError`` if it is not valid, ``LibraryError`` without its package."""
    scheme = url.partition(":")[0].lower()
    if scheme == HUB:
        return Address(_of_hub(url), shown(url), is_hub=True)
    if scheme == MODEL_SCOPE:
        return Address(_of_model_scope(url), shown(url))
    if scheme not in ("http", "https"):
        return Address(url, shown(url))
    try:
        parts = urllib.parse.urlsplit(url)
        # both raise ValueError if they are not valid
        host, _ = parts.hostname, parts.port
    except ValueError:
        host = None
    if not host:
        raise ModelError(f"{shown(url)} is not a URL: write it as https://host/path/model.gguf")
    if not _is_of_hub(parts):
        return Address(url, shown(url))
    if (place := hub_folder(url)) is not None:
        raise _is_repository(url, place.url)
    path = _PAGE.sub(r"\1/resolve/", parts.path, count=1)
    hub = urllib.parse.urlsplit(_hub())
    there = parts._replace(scheme=hub.scheme, netloc=hub.netloc, path=path, query="", fragment="")
    return Address(urllib.parse.urlunsplit(there), shown(url), is_hub=True)


def host_of(url: str) -> str:
    """Return the host of a URL, without port; empty without one."""
    hosts = {HUB: _hub(), MODEL_SCOPE: _model_scope()}
    try:
        parts = urllib.parse.urlsplit(hosts.get(url.partition(":")[0].lower(), url))
        return (parts.hostname or "").rstrip(".")
    except ValueError:
        return ""


def endpoint() -> str:
    """Return the URL of Hugging Face's hub (``HF_ENDPOINT``)."""
    return _hub().lower()


def _hub() -> str:
    """Return the hub's URL as written: users and passwords have upper case."""
    return (os.environ.get("HF_ENDPOINT") or _DEFAULT_ENDPOINT).rstrip("/")


def _model_scope() -> str:
    return (os.environ.get("MS_ENDPOINT") or _MODEL_SCOPE_ENDPOINT).rstrip("/")


def _of_model_scope(url: str) -> str:
    """Return the URL of a file on ModelScope. Raises ``ModelError`` if it is not the address of one."""
    match = _ON_MODEL_SCOPE.fullmatch(shown(url))
    if match is None or {".", ".."} & set(urllib.parse.unquote(match["file"]).split("/")):
        raise ModelError(f"{shown(url)} is not a file of ModelScope: write it as ms://org/repo/file.gguf")
    check_endpoint(_model_scope(), "MS_ENDPOINT", _MODEL_SCOPE_ENDPOINT)
    return f"{_model_scope()}/models/{match['repository']}/resolve/{match['revision'] or 'master'}/{match['file']}"


def check_endpoint(host: str, variable: str = "HF_ENDPOINT", usual: str = _DEFAULT_ENDPOINT) -> None:
    """Raise ``ModelError`` if the ``host`` in an environment variable is no URL; ``usual`` is one."""
    try:
        parts = urllib.parse.urlsplit(host)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_url = False
    if not is_url:
        raise ModelError(f"{variable} is no URL: set it to one such as {usual}, or unset it")


def _is_of_hub(parts: urllib.parse.SplitResult) -> bool:
    host = f"{parts.scheme}://{parts.netloc}".lower()
    return host == endpoint() or (endpoint() == _DEFAULT_ENDPOINT and host in _SHORT)


@dataclass(frozen=True)
class HubFolder:
    """A repository on Hugging Face's hub, or a folder of it.

    Attributes:
        revision: Its revision; ``None`` for the usual one.
        kind: ``dataset`` or ``space``; ``None`` for models.
        file_type: The text after a colon, as in llama.cpp's ``-hf org/repo:Q4_K_M``.
    """

    repository: str
    folder: str = ""
    revision: str | None = None
    kind: str | None = None
    file_type: str = ""

    @property
    def url(self) -> str:
        """Its address, without the file type."""
        kind = next((f"{word}/" for word, kind in _KINDS.items() if kind == self.kind), "")
        revision = f"@{_quoted(self.revision)}" if self.revision else ""
        return f"{HUB}://{kind}{self.repository}{revision}" + (f"/{self.folder}" if self.folder else "")

    def file(self, name: str) -> str:
        """Return the address of a file by its path in the repository."""
        return f"{HubFolder(self.repository, '', self.revision, self.kind).url}/{urllib.parse.quote(name, safe=_PLAIN)}"


def _quoted(revision: str) -> str:
    """Quote a revision for an address, with slashes only where they belong to it."""
    return urllib.parse.quote(revision, safe="/" if _REFERENCE.fullmatch(revision) else "")


_PLAIN = "/ !$&'()*+,;=:@[]{}~"
"""Characters that need no quoting in an address."""


def hub_folder(url: str) -> HubFolder | None:
    """Parse a repository or folder of the hub, also the hub's page of one; ``None`` for a file or another place."""
    scheme = url.partition(":")[0].lower()
    if scheme in ("http", "https"):
        url = _of_page(url)
        scheme = url.partition(":")[0].lower()
    if scheme != HUB:
        return None
    plain = shown(url)
    path, _, file_type = plain.rpartition(":")
    is_typed = "://" in path and "/" not in file_type
    plain = path if is_typed else plain
    if plain.lower().endswith(_SUFFIX):
        return None
    try:
        repository, folder, revision, kind = hub_file(f"{plain.rstrip('/')}/{_SUFFIX}")
    except ModelError:
        return None
    folder = urllib.parse.unquote(folder.removesuffix(_SUFFIX).rstrip("/"))
    return HubFolder(repository, folder, revision, kind, file_type if is_typed else "")


def _of_page(url: str) -> str:
    """Return ``hf://…`` for a page of the hub that shows a repository or folder; else an empty text."""
    try:
        parts = urllib.parse.urlsplit(url)
    except ValueError:
        return ""
    words = [word for word in parts.path.split("/") if word]
    kind = f"{words.pop(0)}/" if words and words[0] in _KINDS else ""
    if not _is_of_hub(parts) or len(words) < 2 or words[0] in ("api", "docs", "blog", "collections", "papers"):
        return ""
    org, repository, *more = words
    if not more:
        return f"{HUB}://{kind}{org}/{repository}"
    if more[0] != "tree" or len(more) < 2:
        return ""
    revision = _quoted(urllib.parse.unquote(more[1]))
    usual = "" if revision == "main" else f"@{revision}"
    return "/".join([f"{HUB}://{kind}{org}/{repository}{usual}", *more[2:]])


def hub_file(url: str) -> tuple[str, str, str | None, str | None]:
    """Split ``hf://org/repo[@revision]/file`` into repository, file, revision and kind.

    ``None`` is the usual revision, or a repository of models. Raises ``ModelError`` for other addresses.
    """
    path = shown(url).partition("://")[2].strip("/")
    first, _, rest = path.partition("/")
    kind = _KINDS.get(first)
    if kind:
        path = rest
    org, _, rest = path.partition("/")
    repo, _, file = rest.partition("/")
    repo, is_revised, revision = repo.partition("@")
    if is_revised and (long := _REFERENCE.match(f"{revision}/{file}")):
        revision, file = long[0], f"{revision}/{file}"[long.end() + 1 :]
    if not org or not repo:
        raise ModelError(f"{shown(url)} names no file: write it as hf://org/repo/file.gguf")
    if not _ID.fullmatch(org) or not _ID.fullmatch(repo) or {".", ".."} & set(urllib.parse.unquote(file).split("/")):
        raise ModelError(f"{shown(url)} is not a file of the hub: write it as hf://org/repo/file.gguf")
    if not file:
        raise _is_repository(url, shown(url))
    return f"{org}/{repo}", file, urllib.parse.unquote(revision) or None, kind


def _is_repository(url: str, place: str) -> ModelError:
    return ModelError(
        f"{shown(url)} is a whole repository: add the name of a GGUF file in it; 'fitter {place}' lists them"
    )


def hub_name(url: str) -> str:
    """Return the path of a file in its repository, by its address. Raises as ``hub_file``."""
    return urllib.parse.unquote(hub_file(url)[1])


def _of_hub(url: str) -> str:
    """Return the URL of a file on the hub."""
    repository, file, revision, kind = hub_file(url)
    try:
        from huggingface_hub import hf_hub_url
        from huggingface_hub.errors import HFValidationError
    except ImportError:
        raise LibraryError(
            f"{shown(url)} is read with huggingface_hub, which is not installed: {install_command(EXTRA)}"
        ) from None
    where = (os.environ.get("HF_ENDPOINT") or "").rstrip("/") or None
    check_endpoint(where or _DEFAULT_ENDPOINT)
    try:
        file = urllib.parse.unquote(file)
        address: str = hf_hub_url(repository, file, repo_type=kind, revision=revision, endpoint=where)
    except (HFValidationError, ValueError) as error:
        raise ModelError(f"{shown(url)} is not a file of the hub: {' '.join(str(error).split())}") from None
    return address


def hub_download(urls: Sequence[str]) -> list[str]:
    """Return the command that downloads files of one repository into the current directory."""
    repository, _, revision, kind = hub_file(urls[0])
    files: list[str] = []
    patterns: list[str] = []
    for url in urls:
        split = _split(shown(url))
        name = hub_name(url)
        if split is None:
            files.append(name)
        else:
            patterns.append(f"{glob.escape(name[: -len('-00001-of-00001.gguf')])}-*-of-{split[2]:05d}.gguf")
    if patterns or any(name.startswith("-") for name in files):
        # the command takes either names or patterns, and treats words like -x as options
        every = (*patterns, *map(glob.escape, files))
        files = [word for each in every for word in _included(each)]
    more = [*(["--revision", revision] if revision else []), *(["--repo-type", kind] if kind else [])]
    return ["hf", "download", repository, *files, *more, "--local-dir", "."]


def _included(pattern: str) -> tuple[str, ...]:
    return (f"--include={pattern}",) if pattern.startswith("-") else ("--include", pattern)


def download_command(url: str) -> str:
    """Return the command that downloads the whole model."""
    plain, split = shown(url), _split(shown(url))
    scheme = plain.partition(":")[0].lower()
    if scheme == HUB:
        return shlex.join(hub_download([url]))
    if scheme == MODEL_SCOPE:
        plain, scheme = _of_model_scope(plain), "https"
        split = split and _split(plain)
    if scheme in ("http", "https"):
        if split is not None:
            plain = f"{split[0]}-[00001-{split[2]:05d}]-of-{split[2]:05d}.gguf"
        return shlex.join(["curl", "-LO", plain])
    if split is not None:
        plain = f"{split[0]}-*-of-{split[2]:05d}.gguf"
    return shlex.join(["python", "-c", f"import fsspec; fsspec.filesystem({scheme!r}).get({plain!r}, '.')"])
