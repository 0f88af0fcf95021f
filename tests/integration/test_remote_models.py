"""Models that are elsewhere: planned from their headers alone, which are fetched from servers of every kind once."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import huggingface_hub.constants
import pytest

import fitter
from fitter.errors import ModelError
from fitter.installation import install_command
from fitter.llama.client import Worker
from fitter.model.files import header_cache, remote_files
from fitter.planning.request.request import Progress
from tests.support.cases import cases, named_cases, refused
from tests.support.command import Command, run_fitter
from tests.support.patience import SECONDS, until
from tests.support.ranges import FileServer, Request, serving
from tools.models import shapes
from tools.models.tiny import write_tiny

pytestmark = pytest.mark.usefixtures("clean_environment")

ROOT = Path(__file__).resolve().parents[2]
GPUS = ["4x 31600MiB", "2x 23688MiB", "2x 48270MiB"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("served")


@pytest.fixture(scope="module")
def tiny(folder: Path) -> Path:
    return write_tiny(folder / "tiny.gguf")


@pytest.fixture
def server(folder: Path) -> Iterator[FileServer]:
    remote_files.forget()
    with serving(folder) as server:
        yield server


def kept() -> set[str]:
    """All that is in the cache of headers."""
    place = remote_files.folder()
    return {str(path.relative_to(place)) for path in place.rglob("*")} if place.exists() else set()


def entries_of(name: str) -> list[Path]:
    """The folders that are kept of models with a file of that name."""
    place = remote_files.folder()
    return [place / path.relative_to(place).parts[0] for path in place.rglob(name)]


def said_of(plan: fitter.Plan) -> dict[str, Any]:
    """Return the document of a plan without the model's place and the figures of the search."""
    document = plan.to_dict()
    document["model"] = {**document["model"], "path": ""}
    del document["search"]
    return document


@cases(("gpt-oss-120b", 9, 3), ("kimi-k2", 14, 1))
def test_a_large_model_is_planned_from_its_header(
    shape: str, n_files: int, given: int, server: FileServer, worker: Worker, folder: Path
) -> None:
    first = shapes.write_split(shape, folder, n_files)
    files = sorted(folder.glob(f"{shape}-*.gguf"))
    headers = sum(worker.header(str(file)).data_offset for file in files)
    here = fitter.fit(first, gpus=GPUS, n_ctx=32768, worker=worker)

    url = f"{server.url}/{files[given - 1].name}"
    plan = fitter.fit(url, gpus=GPUS, n_ctx=32768, worker=worker)
    assert plan.model.path == f"{server.url}/{first.name}"
    assert said_of(plan) == said_of(here)
    assert headers < server.sent < 1.2 * headers
    assert set(server.statuses) == {206}

    server.forget()
    assert said_of(fitter.fit(url, gpus=GPUS, n_ctx=32768, worker=worker)) == said_of(here)
    assert server.requests == []
    remote_files.forget()
    assert said_of(fitter.fit(url, gpus=GPUS, n_ctx=32768, worker=worker)) == said_of(here)
    assert (server.statuses, server.sent) == ({304: n_files}, 0)


def test_what_is_asked_of_a_model_has_the_same_answer(server: FileServer, worker: Worker, tiny: Path) -> None:
    url = f"{server.url}/{tiny.name}"
    words: dict[str, Any] = {"gpus": "rtx-4090", "n_ctx": 4096, "worker": worker}
    assert fitter.measure(url, **words).rows == fitter.measure(tiny, **words).rows
    assert fitter.estimate(url, **words) == fitter.estimate(tiny, **words)
    seen = fitter.inspect(url, n_ctx=512)
    assert seen.model.path == url
    assert replace(seen, model=replace(seen.model, path=str(tiny))) == fitter.inspect(tiny, n_ctx=512)


def test_every_command_takes_an_address(
    server: FileServer, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    url = f"{server.url}/{tiny.name}"
    monkeypatch.chdir(tmp_path)
    Path("fitter.toml").write_text(f'[cases.chat]\nmodel = "{url}"\ngpu = "rtx-4090"\n')
    two = ["--llama-cpp", "python", "--llama-cpp", "python", "--gpu", "rtx-4090"]
    commands = {
        "fit": [url, "--gpu", "rtx-4090", "--json"],
        "inspect": ["inspect", url, "--json"],
        "lock": ["lock"],
        "check": ["check"],
        "diff": ["diff", url, *two],
        "history": ["history", url, *two],
    }
    said = {name: command(*words) for name, words in commands.items()}
    place = str(remote_files.folder())
    assert not {name: each for name, each in said.items() if each.status or place in each.out}
    assert said["fit"].document["model"]["path"] == said["inspect"].document["model"]["path"] == url
    lock = Path("fitter.lock").read_text()
    assert 'file = "tiny.gguf"' in lock and server.url not in lock and place not in lock
    # a lock says the same of the file and of its header
    Path("fitter.toml").write_text(f'[cases.chat]\nmodel = "{tiny}"\ngpu = "rtx-4090"\n')
    assert command("lock").status == 0
    assert Path("fitter.lock").read_text() == lock


# --- what a server may answer

WHO = "ask who provides it, or take another file"
DOWNLOAD = "download the model, and give its file"


def status(number: int, body: bytes = b"", **headers: str) -> Callable[[Request], bool]:
    """Answers everything with a status."""

    def answer(request: Request) -> bool:
        request.say(number, body, {name.replace("_", "-"): value for name, value in headers.items()})
        return True

    return answer


def another_part(request: Request) -> bool:
    request.say(206, b"GGUF", {"Content-Range": "bytes 5-8/100"})
    return True


def broken_off(request: Request) -> bool:
    request.close_connection = True
    return True


def not_http(request: Request) -> bool:
    request.wfile.write(b"hello\r\n\r\n")
    request.close_connection = True
    return True


def silent(request: Request) -> bool:
    request.files.closing.wait()
    return True


def in_a_circle(request: Request) -> bool:
    request.say(302, b"", {"Location": request.path})
    return True


REFUSED: dict[str, tuple[Callable[[Request], bool], str]] = {
    "not there": (status(404), "{}: the server has no such file (404): check the address"),
    "not allowed": (status(403), "{}: the server answers 403 Forbidden: check the address, and the credentials in it"),
    "it fails": (status(503), "{}: the server answers 503 Service Unavailable: try again later"),
    "no ranges": (
        status(200, b"x" * (1 << 20)),
        f"{{}}: the server sends no parts of files, only whole ones: {DOWNLOAD}",
    ),
    "another part": (
        another_part,
        f"{{}}: the server sends another part of the file than the one asked for: {DOWNLOAD}",
    ),
    "compressed": (
        status(206, b"GGUF", Content_Range="bytes 0-3/9", Content_Encoding="gzip"),
        f"{{}}: the server compresses what it sends, so no part of it can be read: {DOWNLOAD}",
    ),
    "broken off": (
        broken_off,
        "{}: 127.0.0.1 cannot be reached (the connection broke off): check the address, and the network",
    ),
    "not HTTP": (not_http, "{}: what 127.0.0.1 answers is not HTTP: check the address"),
    "in a circle": (in_a_circle, "{} is redirected more than 10 times: check the address"),
    "to https": (
        status(302, Location="https://127.0.0.1/x.gguf?sig=secret"),
        "{} is redirected from http to https, which is not followed: if you trust it, give https://127.0.0.1/x.gguf",
    ),
    "to a file": (
        status(301, Location="file:///etc/passwd"),
        "{} is redirected from http to file, which is not followed: if you trust it, give file:///etc/passwd",
    ),
    "cut off": (
        status(206, b"GGUF\x03\0\0\0", Content_Range="bytes 0-7/8"),
        f"{{}}: its header is truncated or damaged; {WHO}",
    ),
    "too many tensors": (
        status(206, b"GGUF\x03\0\0\0" + b"\xff" * 7 + b"\0" * 9, Content_Range="bytes 0-23/1000000"),
        f"{{}}: its header is truncated or damaged; {WHO}",
    ),
    "a header without end": (
        status(206, b"GGUF\x03\0\0\0" + b"\0\0\0\x10\0\0\0\0" + b"\0" * 8, Content_Range=f"bytes 0-23/{2**50}"),
        "{}: its header has more than 64.0 MiB, which that of no model has; take another file",
    ),
}


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Failed requests are made again, but at once."""
    from fitter.model.files.ranges import Patience

    monkeypatch.setattr(Patience, "sleep", lambda self, seconds: None)


@pytest.mark.usefixtures("impatient")
@cases(REFUSED)
def test_an_answer_that_is_no_model(
    answer: Callable[[Request], bool], said: str, server: FileServer, tiny: Path, command: Command
) -> None:
    server.answer, before = answer, kept()
    url = f"{server.url}/{tiny.name}"
    assert command(url, "--gpu", "rtx-4090") == (3, "", f"fitter: error: {said.format(url)}\n")
    assert kept() == before
    assert server.sent < 12 << 20


NO_SUCH_HOST = "{}: there is no host 'no-such-host.invalid': check the address, and the network"
WHOLE = "{} is a whole repository: add the name of a GGUF file in it; 'fitter {}' lists them"


@named_cases(
    ("no such host", "http://no-such-host.invalid/m.gguf", NO_SUCH_HOST),
    ("no host", "http:///m.gguf", "{} is not a URL: write it as https://host/path/model.gguf"),
    ("a repository", "hf://org/repo", WHOLE),
)
def test_an_address_that_is_none(url: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody(*_: Any, **__: Any) -> Any:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", nobody)
    with refused(ModelError, said.format(url, url)):
        fitter.measure(url, gpus="rtx-4090")


@pytest.mark.usefixtures("impatient")
def test_a_proxy_is_asked(server: FileServer, tiny: Path, worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "")
    monkeypatch.setenv("http_proxy", server.url.replace("//", "//me:s3cr3t@"))
    assert fitter.measure(f"http://models.invalid/{tiny.name}", gpus="rtx-4090", worker=worker).rows
    assert {path for _, path, _ in server.requests} == {f"http://models.invalid/{tiny.name}"}
    assert {headers.get("Proxy-Authorization") for headers in server.headers} == {"Basic bWU6czNjcjN0"}


@pytest.mark.usefixtures("impatient")
def test_what_passes_is_tried_again(server: FileServer, tiny: Path, worker: Worker) -> None:
    answers = iter([status(503), status(429, Retry_After="1"), broken_off])
    server.answer = lambda request: next(answers, lambda _: False)(request)
    assert fitter.measure(f"{server.url}/{tiny.name}", gpus="rtx-4090", worker=worker).rows
    assert [number for _, _, number in server.requests][:3] == [503, 429, 206]


def drips(request: Request) -> bool:
    request.drip(0.1, {"Content-Range": "bytes 0-399999/1000000", "Content-Length": "400000"})
    return True


def drips_headers(request: Request) -> bool:
    request.wfile.write(b"HTTP/1.1 206 Partial Content\r\n")
    while not request.files.closing.wait(0.1):
        request.wfile.write(b"X-Later: yes\r\n")
        request.wfile.flush()
    return True


@cases(drips, drips_headers, silent)
def test_an_answer_without_end_is_given_up(answer: Callable[[Request], bool], server: FileServer, tiny: Path) -> None:
    server.answer, before = answer, kept()
    late = f"{server.url}/{{}}: its header did not arrive within 0.5 s: give it more time (--timeout)"
    with refused(ModelError, late.format(tiny.name)):
        fitter.measure(f"{server.url}/{tiny.name}", gpus="rtx-4090", timeout=0.5)
    with refused(ModelError, late.format("config.json")):
        remote_files.beginning(f"{server.url}/config.json", 100, timeout=0.5)
    assert kept() == before


def test_an_interrupt_ends_it_and_leaves_nothing(server: FileServer, tiny: Path) -> None:
    server.answer, before = silent, kept()
    command = [sys.executable, "-m", "fitter", f"{server.url}/{tiny.name}", "--gpu", "rtx-4090"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT)
    until(lambda: server.headers or process.poll() is not None)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=SECONDS)
    assert (process.returncode, out, err) == (130, b"", b"")
    assert kept() == before


def test_a_file_that_changes_while_it_is_read(server: FileServer, folder: Path) -> None:
    first = shapes.write("qwen3-30b-a3b", folder)
    tags = iter(f'"{number}"' for number in range(1000))
    server.etag = lambda path: next(tags)
    before = kept()
    with refused(ModelError, f"{server.url}/{first.name} has changed while its header was read: try again"):
        fitter.measure(f"{server.url}/{first.name}", gpus="rtx-4090")
    assert kept() == before


def test_a_file_that_has_changed_is_read_again(server: FileServer, worker: Worker, folder: Path) -> None:
    path = write_tiny(folder / "changing.gguf")
    url = f"{server.url}/{path.name}"
    small = fitter.measure(url, gpus="24GiB", worker=worker)
    shapes.write_shape(shapes.SHAPES["llama-3.1-8b"], path, vocab=False)
    assert fitter.measure(url, gpus="24GiB", worker=worker).rows == small.rows
    remote_files.forget()
    large = fitter.measure(url, gpus="24GiB", worker=worker)
    assert large.rows == fitter.measure(path, gpus="24GiB", worker=worker).rows != small.rows


def test_a_kept_header_is_left_where_it_has_changed(server: FileServer, folder: Path) -> None:
    path = write_tiny(folder / "begun.gguf")
    url = f"{server.url}/{path.name}"

    def planned(model: str) -> dict[str, Any]:
        done = run_fitter(model, "--gpu", "rtx-4090", "-c", 4096, "--json", cwd=ROOT)
        assert done.returncode == 0, done.stderr
        return {key: value for key, value in json.loads(done.stdout).items() if key not in ("model", "search")}

    small = planned(url)
    assert planned(url) == small == planned(str(path))
    shapes.write_shape(shapes.SHAPES["llama-3.1-8b"], path)
    assert planned(url) == planned(str(path)) != small


@cases("last changed", "none")
def test_a_server_without_etags(tags: str, folder: Path, worker: Worker) -> None:
    remote_files.forget()
    path = shapes.write("qwen3-30b-a3b", folder)
    with serving(folder, has_etags=False) as server:
        if tags == "last changed":
            server.last_modified = "Sun, 22 Nov 2026 12:00:00 GMT"
        url = f"{server.url}/{path.name}"
        rows = fitter.measure(url, gpus="24GiB", worker=worker).rows
        once, before = server.sent, kept()
        remote_files.forget()
        assert fitter.measure(url, gpus="24GiB", worker=worker).rows == rows
        assert server.sent == 2 * once if tags == "none" else once < server.sent < 2 * once
        assert kept() == before


@named_cases(
    ("a connection for each request", {"version": "HTTP/1.0"}),
    ("an IPv6 address", {"host": "::1"}),
    ("weak ETags", {"etag": lambda path: f'W/"{path.stat().st_size}"'}),
)
def test_other_servers(settings: dict[str, Any], tiny: Path, folder: Path, worker: Worker) -> None:
    rows = fitter.measure(tiny, gpus="24GiB", worker=worker).rows
    with serving(folder, **settings) as server:
        url = f"{server.url}/{tiny.name}"
        for sent in (True, False):
            remote_files.forget()
            server.forget()
            assert fitter.measure(url, gpus="24GiB", worker=worker).rows == rows
            assert (server.sent > 0) is sent
            assert fitter.fit(url, gpus="24GiB", worker=worker).model.path == url


@named_cases(
    ("a space, percent-encoded", "a b.gguf", "a%20b.gguf"),
    ("a question mark", "what?.gguf", "what%3F.gguf"),
    ("letters of another script", "模型.gguf", "模型.gguf"),
    ("a query", "plain.gguf", "plain.gguf?download=true"),
)
def test_the_names_of_files(
    name: str, written: str, server: FileServer, tiny: Path, folder: Path, worker: Worker
) -> None:
    shutil.copy(tiny, folder / name)
    url = f"{server.url}/{written}"
    plan = fitter.fit(url, gpus="24GiB", worker=worker)
    assert plan.model.path == url.partition("?")[0]
    assert {status for _, _, status in server.requests} == {206}
    assert f'"{Path.cwd() / name}"' in plan.format("python")


# --- secrets

SECRET = "s3cr3t"


def secrets_in(place: Path) -> list[Path]:
    found = []
    for path in (path for path in place.rglob("*") if path.is_file()):
        with path.open("rb") as file:
            # the rest of a header's file was never written
            if SECRET.encode() in file.read(1 << 20) or SECRET in str(path):
                found.append(path)
    return found


@cases("user", "query")
def test_credentials_go_to_their_server_and_nowhere_else(
    how: str, server: FileServer, tiny: Path, command: Command
) -> None:
    host = server.url.removeprefix("http://")
    url = f"http://me:{SECRET}@{host}/{tiny.name}" if how == "user" else f"{server.url}/{tiny.name}?sig={SECRET}"
    shown = command(url, "--gpu", "rtx-4090", "--json", "-vv")
    assert SECRET not in shown.out + shown.err
    assert shown.document["model"]["path"] == f"{server.url}/{tiny.name}"
    if how == "user":
        assert {headers.get("Authorization") for headers in server.headers} == {"Basic bWU6czNjcjN0"}
    else:
        assert {path for _, path, _ in server.requests} == {f"/{tiny.name}?sig={SECRET}"}
    assert secrets_in(remote_files.folder()) == []
    server.answer = status(403)
    remote_files.forget()
    status_, _, said = command(url, "--gpu", "rtx-4090")
    assert status_ == 3 and SECRET not in said and f"{server.url}/{tiny.name}: the server answers 403" in said


def test_a_redirect_to_another_host_gets_no_credentials(server: FileServer, tiny: Path, worker: Worker) -> None:
    def elsewhere(request: Request) -> bool:
        if "/moved/" not in request.path:
            return False
        request.say(302, b"moved\n", {"Location": f"{server.url.replace('127.0.0.1', 'localhost')}/{tiny.name}"})
        return True

    server.answer = elsewhere
    url = f"{server.url.replace('//', f'//me:{SECRET}@')}/moved/{tiny.name}"
    assert fitter.measure(url, gpus="rtx-4090", worker=worker).rows
    sent = {
        (path, headers.get("Authorization") is not None)
        for (_, path, _), headers in zip(server.requests, server.headers, strict=True)
    }
    assert sent == {(f"/moved/{tiny.name}", True), (f"/{tiny.name}", False)}


# --- Hugging Face's hub


@pytest.fixture
def hub(folder: Path, server: FileServer, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FileServer]:
    """A hub that has the files of ``folder`` in ``org/repo``, which another host sends to whoever has a token."""

    def resolve(request: Request) -> bool:
        words = request.path.split("?")[0].split("/")
        if words[1:4] != ["org", "repo", "resolve"]:
            request.say(401, b"", {"X-Error-Code": "RepoNotFound"})
        elif request.headers.get("Authorization") != f"Bearer {SECRET}":
            request.say(403, b"", {"X-Error-Code": "GatedRepo"})
        else:
            to = f"{server.url.replace('127.0.0.1', 'localhost')}/{words[-1]}?signed={time.monotonic()}"
            request.say(302, b"", {"Location": to, "X-Linked-Etag": '"0123"', "X-Linked-Size": "1"})
        return True

    with serving(folder, answer=resolve) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("HF_TOKEN", SECRET)
        yield hub


FORMS = [
    "hf://org/repo/{}",
    "hf://org/repo@main/{}",
    "{}/org/repo/blob/main/{}",
    "{}/org/repo/tree/main/{}",
    "{}/org/repo/resolve/main/{}?download=true",
]


@pytest.mark.parametrize("form", FORMS)
def test_a_file_of_the_hub(hub: FileServer, server: FileServer, tiny: Path, worker: Worker, form: str) -> None:
    url = form.format(hub.url, tiny.name) if form.startswith("{}/") else form.format(tiny.name)
    remote_files.forget()
    shutil.rmtree(remote_files.folder(), ignore_errors=True)
    plan = fitter.fit(url, gpus="rtx-4090", worker=worker)
    assert plan.model.path == url.partition("?")[0]
    assert said_of(plan) == said_of(fitter.fit(tiny, gpus="rtx-4090", worker=worker))
    assert {path for _, path, _ in hub.requests} == {f"/org/repo/resolve/main/{tiny.name}"}
    assert [headers for headers in server.headers if "Authorization" in headers] == []
    assert secrets_in(remote_files.folder()) == []
    for each in (hub, server):
        each.forget()
    remote_files.forget()
    assert fitter.fit(url, gpus="rtx-4090", worker=worker).model.path == url.partition("?")[0]
    assert (len(hub.requests), hub.sent, server.requests) == (1, 0, [])


def test_the_hub_is_not_asked_offline(
    hub: FileServer, tiny: Path, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, other = f"hf://org/repo/{tiny.name}", "hf://org/repo/another.gguf"
    rows = fitter.measure(url, gpus="rtx-4090", worker=worker).rows
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    remote_files.forget()
    hub.forget()
    assert fitter.measure(url, gpus="rtx-4090", worker=worker).rows == rows
    unknown = "HF_HUB_OFFLINE is set, and its header was not fetched before: unset it, or give a file of this machine"
    with refused(ModelError, f"{other}: {unknown}"):
        fitter.measure(other, gpus="rtx-4090")
    assert hub.requests == []


@cases(("repo", "gated (403 Forbidden)"), ("another", "gated, private or not there (401 Unauthorized)"))
def test_a_gated_file_of_the_hub(repository: str, why: str, hub: FileServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "wrong")
    url, how = f"hf://org/{repository}/gated.gguf", "and set HF_TOKEN, or log in with 'hf auth login'"
    with refused(ModelError, f"{url} is {why}: ask for access at {hub.url}/org/{repository}, {how}"):
        fitter.measure(url, gpus="rtx-4090")


# --- other places


def test_what_fsspec_knows(tiny: Path, worker: Worker) -> None:
    files = fsspec.filesystem("memory")
    files.pipe_file("/models/tiny.gguf", tiny.read_bytes())
    url = "memory://models/tiny.gguf"
    remote_files.forget()
    assert fitter.fit(url, gpus="rtx-4090", worker=worker).model.path == url
    assert (
        fitter.measure(url, gpus="24GiB", worker=worker).rows == fitter.measure(tiny, gpus="24GiB", worker=worker).rows
    )
    for broken, said in {
        "memory://models/none.gguf": "memory://models/none.gguf: no such file; check the address",
        "memory://models/folder": "memory://models/folder is a directory; give the address of a GGUF file in it",
        "nosuch://models/tiny.gguf": "nosuch://models/tiny.gguf cannot be read: Protocol not known: nosuch",
    }.items():
        files.makedirs("/models/folder", exist_ok=True)
        with refused(ModelError, said):
            fitter.measure(broken, gpus="24GiB")


def test_a_file_url_is_a_path(tiny: Path, worker: Worker) -> None:
    plan = fitter.fit(f"file://{tiny}", gpus="rtx-4090", worker=worker)
    assert plan.model.path == str(tiny)


@cases(("fsspec", "memory://models/x.gguf"), ("huggingface_hub", "hf://org/repo/x.gguf"))
def test_a_package_that_is_not_installed(
    package: str, url: str, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    said = f"{url} is read with {package}, which is not installed: {install_command('remote')}"
    assert command(url, "--gpu", "24GiB") == (3, "", f"fitter: error: {said}\n")


# --- what needs the weights

PART = "m-00002-of-00003.gguf"


@cases(
    ("https://host/a/m.gguf?sig=x", "curl -LO https://host/a/m.gguf"),
    (f"https://host/{PART}", "curl -LO 'https://host/m-[00001-00003]-of-00003.gguf'"),
    ("hf://org/repo/q4/m.gguf", "hf download org/repo q4/m.gguf --local-dir ."),
    (f"hf://org/repo@v1/{PART}", "hf download org/repo --include 'm-*-of-00003.gguf' --revision v1 --local-dir ."),
)
def test_a_model_that_is_to_be_loaded_is_downloaded_first(url: str, how: str, command: Command) -> None:
    said = f"{url.partition('?')[0]} has to be here to be loaded: download it with {how}"
    with refused(ModelError, said):
        fitter.Llama(url)
    assert command("verify", url) == (3, "", f"fitter: error: {said}\n")


def test_a_plan_of_an_address_is_not_loaded(server: FileServer, tiny: Path, worker: Worker, tmp_path: Path) -> None:
    url = f"{server.url}/{tiny.name}"
    plan = fitter.fit(url, gpus="24GiB", worker=worker)
    said = f"{url} has to be here to be loaded: download it with curl -LO {url}"
    (tmp_path / "plan.json").write_text(json.dumps(plan.to_dict()))
    for call in (plan.load, lambda: fitter.verify(plan=tmp_path / "plan.json")):
        with refused(ModelError, said):
            call()
    assert f'"{Path.cwd() / tiny.name}"' in plan.format("python")


# --- the cache


def test_processes_share_what_they_fetch(server: FileServer, folder: Path) -> None:
    first = shapes.write_split("llama-3.1-8b", folder, 3)
    before = kept()
    command = [sys.executable, "-m", "fitter", f"{server.url}/{first.name}", "--gpu", "rtx-4090", "--json"]
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT) for _ in range(3)]
    answers = [process.communicate(timeout=120) for process in started]
    assert [process.returncode for process in started] == [0, 0, 0], answers
    plans = [json.loads(out) for out, _ in answers]
    assert all(plan["devices"] == plans[0]["devices"] for plan in plans)
    # a folder for what the address has now, what is known of it, and a folder with the three files
    assert len(kept() - before) == 6


def test_a_header_that_was_removed_is_fetched_again(server: FileServer, folder: Path, worker: Worker) -> None:
    path = write_tiny(folder / "removed.gguf")
    url = f"{server.url}/{path.name}"
    remote_files.fetched(url)
    (entry,) = entries_of(path.name)
    assert header_cache.remove(entry)
    planned = fitter.fit(url, gpus="24GiB", worker=worker)
    assert said_of(planned) == said_of(fitter.fit(path, gpus="24GiB", worker=worker))
    assert server.statuses == {206: 2}


def test_a_header_that_is_planned_with_is_not_removed(server: FileServer, folder: Path, worker: Worker) -> None:
    path = shapes.write("qwen3-30b-a3b", folder)
    url = f"{server.url}/{path.name}"
    here = fitter.fit(path, gpus="24GiB", worker=worker)
    found: list[bool] = []

    def remove(_: Progress) -> None:
        found.extend(header_cache.remove(entry) for entry in entries_of(path.name))

    assert said_of(fitter.fit(url, gpus="24GiB", worker=worker, on_progress=remove)) == said_of(here)
    assert found and not any(found)
    assert all(header_cache.remove(entry) for entry in entries_of(path.name)), "the plan is made"


def test_what_one_thread_fetches_another_waits_for_in_its_own_time(server: FileServer, tiny: Path) -> None:
    server.answer = silent
    url = f"{server.url}/{tiny.name}"
    with fetching(server, url) as threads:
        with refused(ModelError, f"{url}: its header did not arrive within 0.2 s: give it more time (--timeout)"):
            remote_files.fetched(url, timeout=0.2)
        with pytest.raises(LeftError, match="nobody wants it"):
            remote_files.fetched(url, timeout=SECONDS, say=leave)
        assert threads[0].is_alive() and len(server.headers) == 1


class LeftError(Exception):
    """The caller that wanted a header has left."""


def leave(_: remote_files.Fetching) -> None:
    raise LeftError("nobody wants it")


@contextmanager
def fetching(server: FileServer, *urls: str) -> Iterator[list[threading.Thread]]:
    """Threads that fetch, until the end, from a server that is silent."""
    end = threading.Event()

    def fetch(url: str) -> None:
        with suppress(LeftError):
            remote_files.fetched(url, timeout=SECONDS, say=lambda fetching: leave(fetching) if end.is_set() else None)

    threads = [threading.Thread(target=fetch, args=[url]) for url in urls]
    for number, thread in enumerate(threads, 1):
        thread.start()
        until(lambda n=number: len(server.headers) == n)  # type: ignore[misc]
    try:
        yield threads
    finally:
        end.set()
        for thread in threads:
            thread.join()


def test_threads_that_cannot_be_ended_have_a_limit(
    server: FileServer, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_files, "MOST_READERS", 2)
    server.answer = silent
    third = f"{server.url}/3.gguf"
    said = f"{third}: too many headers are being fetched: try again later"
    with fetching(server, f"{server.url}/1.gguf", f"{server.url}/2.gguf"), refused(ModelError, said):
        remote_files.fetched(third)
    server.answer = lambda request: False
    until(lambda: not [thread for thread in threading.enumerate() if thread.name == remote_files.READER])
    assert fitter.measure(f"{server.url}/{tiny.name}", gpus="24GiB").rows


def test_what_was_damaged_or_left_is_replaced(server: FileServer, folder: Path, worker: Worker) -> None:
    path = write_tiny(folder / "kept.gguf")
    url = f"{server.url}/{path.name}"
    rows = fitter.measure(url, gpus="24GiB", worker=worker).rows
    (header,) = remote_files.folder().rglob("kept.gguf")
    with header.open("r+b") as file:
        file.write(b"FUGG")
    partial = remote_files.folder() / ".partial-left"
    partial.mkdir()
    remote_files.forget()
    assert fitter.measure(url, gpus="24GiB", worker=worker).rows == rows
    assert header.read_bytes()[:4] == b"GGUF"
    assert not partial.exists()


def test_a_cache_that_cannot_be_written(
    server: FileServer, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    said = f"{tmp_path}/file/llama-fitter cannot be written .Not a directory., so nothing is kept there: set XDG_CACHE_"
    with pytest.warns(UserWarning, match=said):
        found = fitter.measure(f"{server.url}/{tiny.name}", gpus="24GiB")
    assert found.rows == fitter.measure(tiny, gpus="24GiB").rows


@named_cases(
    (
        "more than any model has",
        99_999,
        0,
        "is one of 99999 files by its name, and of no more than 1000 any is asked for: check the address",
    ),
    ("more than it says", 1000, 1, "is one of 4 files by its header, but one of 1000 by its name; {}"),
)
def test_the_first_file_says_how_many_there_are(
    count: int, asked: int, said: str, server: FileServer, folder: Path
) -> None:
    first = shapes.write_split("qwen3-32b", folder, 4, vocab=False)

    def always_the_first(request: Request) -> bool:
        request.path = f"/{first.name}"
        return False

    server.answer = always_the_first
    url = f"{server.url}/m-00001-of-{count:05}.gguf"
    with refused(ModelError, f"{url} {said.format(WHO)}"):
        fitter.measure(url, gpus="24GiB")
    assert len(server.requests) == asked


def test_a_missing_part_of_a_split_model(server: FileServer, folder: Path) -> None:
    shapes.write_split("qwen3-32b", folder, 4, vocab=False)
    (folder / "qwen3-32b-00003-of-00004.gguf").unlink()
    before = kept()
    with pytest.raises(ModelError) as caught:
        fitter.measure(f"{server.url}/qwen3-32b-00001-of-00004.gguf", gpus="24GiB")
    third = f"{server.url}/qwen3-32b-00003-of-00004.gguf"
    assert str(caught.value) == f"{third}: the server has no such file (404): check the address"
    assert kept() == before
