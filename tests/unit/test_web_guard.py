"""What stands before the planner's requests, and what it may open: each refusal beside what is let through."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from fitter.errors import ModelError, UsageError
from fitter.web import planner_page
from fitter.web.allowed_files import Root
from fitter.web.app import Settings
from fitter.web.guard import HEADERS, LONGEST_BODY, LONGEST_HEADERS, Guard, Hosts
from fitter.web.questions import ASKED, PlanQuestion, PlanQuestions, wanted
from tests.support.cases import cases, named_cases, stored, stored_rows

OWN = "127.0.0.1:8080"
JSON = ("content-type", "application/json")


def answer(
    *headers: tuple[str, str],
    method: str = "GET",
    bodies: Sequence[bytes] = (b"",),
    host: str = "127.0.0.1",
    kind: str = "http",
) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of what is answered to a request; what passes is answered with its own body."""
    sent: list[Any] = []
    waiting = [
        {"type": "http.request", "body": body, "more_body": i + 1 < len(bodies)} for i, body in enumerate(bodies)
    ]

    async def app(scope: Any, receive: Any, send: Any) -> None:
        body = (await receive())["body"]
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": body})

    async def receive() -> Any:
        return waiting.pop(0)

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": kind,
        "method": method,
        "scheme": "http",
        "headers": [(name.encode(), value.encode()) for name, value in headers],
    }
    asyncio.run(Guard(app, Hosts.of(host))(scope, receive, send))
    found = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
    return sent[0]["status"], found, sent[1]["body"]


@named_cases(
    ("its own", "127.0.0.1", OWN, True),
    ("without a port", "127.0.0.1", "127.0.0.1", True),
    ("a tunnel's port", "127.0.0.1", "localhost:9000", True),
    ("in capitals", "127.0.0.1", "LOCALHOST:8080", True),
    ("IPv6", "127.0.0.1", "[::1]:8080", True),
    ("a name that leads here", "127.0.0.1", "evil.example:8080", False),
    ("a name that begins like it", "127.0.0.1", "localhost.evil.example", False),
    ("another address", "127.0.0.1", "10.0.0.1:8080", False),
    ("a user before it", "127.0.0.1", "evil.example@127.0.0.1", False),
    ("no port", "127.0.0.1", "127.0.0.1:x", False),
    ("empty", "127.0.0.1", "", False),
    ("any of its addresses", "0.0.0.0", "192.168.1.7:8080", True),
    ("a name, where it listens everywhere", "0.0.0.0", "evil.example", False),
    ("the name that it listens at", "planner.lan", "planner.lan:8080", True),
    ("another name than that", "planner.lan", "evil.example", False),
)
def test_the_host_is_its_own(host: str, said: str, is_own: bool) -> None:
    assert answer(("host", said), host=host)[0] == (200 if is_own else 421)


def test_there_is_one_host() -> None:
    assert answer()[0] == 421
    assert answer(("host", OWN), ("host", OWN))[0] == 421


@named_cases(
    ("none", (), 200),
    ("its own", (("origin", f"http://{OWN}"),), 200),
    ("its own, said by a browser", (("origin", f"http://{OWN}"), ("sec-fetch-site", "same-origin")), 200),
    ("another", (("origin", "http://evil.example"),), 403),
    ("another port", (("origin", "http://127.0.0.1:9999"),), 403),
    ("another scheme", (("origin", f"https://{OWN}"),), 403),
    ("a page without one", (("origin", "null"),), 403),
    ("two", (("origin", f"http://{OWN}"), ("origin", "http://evil.example")), 403),
    ("a form of another site", (("sec-fetch-site", "cross-site"),), 403),
    ("of another port", (("sec-fetch-site", "same-site"),), 403),
)
def test_questions_come_from_its_own_page(headers: Any, status: int) -> None:
    assert answer(("host", OWN), JSON, *headers, method="POST")[0] == status


# Requests without an Origin, as a browser describes them.
@cases(stored("web_guard", "of_another_site_only_a_link_is_answered"))
def test_of_another_site_only_a_link_is_answered(method: str, site: str, mode: str, to: str, status: int) -> None:
    said = (("sec-fetch-site", site), ("sec-fetch-mode", mode), ("sec-fetch-dest", to))
    assert answer(("host", OWN), JSON, *said, method=method)[0] == status


def test_another_site_is_known_by_its_name_alone() -> None:
    assert answer(("host", OWN), ("sec-fetch-site", "cross-site"))[0] == 403
    assert answer(("host", OWN), ("sec-fetch-site", "cross-site"), ("sec-fetch-mode", "navigate"))[0] == 403
    # no browser: it could say whatever it likes
    assert answer(("host", OWN))[0] == 200


def errors_of(model: type[BaseModel], given: object) -> list[Any]:
    with pytest.raises(ValidationError) as raised:
        model.model_validate(given)
    return raised.value.errors()


UNKNOWN = {f"{number:x}": 1 for number in range(6500)}


def test_many_wrong_parts_of_a_question_are_few_errors() -> None:
    """Each takes the server some time in which it answers nobody."""
    (error,) = errors_of(PlanQuestion, {"model": "x", **UNKNOWN})
    assert (error["type"], error["loc"]) == ("extra_forbidden", ("0",))
    assert len(errors_of(PlanQuestions, {"questions": [{"model": "x"}], **UNKNOWN})) == 1
    assert len(errors_of(PlanQuestions, {"questions": [{"model": "x", **UNKNOWN}]})) == 1
    wrong = {name: {} for name in ASKED}
    assert len(errors_of(PlanQuestion, {"model": "x", **wrong})) == len(ASKED)


WRONG_VALUES = [{}, [[]], [{}], [None], [True], [1.5], "x" * 301, ["x" * 301], [1] * 65]


@pytest.mark.parametrize("value", WRONG_VALUES, ids=lambda value: repr(value)[:20])
def test_a_value_of_no_kind_is_refused(value: object) -> None:
    (error,) = errors_of(PlanQuestion, {"model": "x", "margin": value})
    assert error["loc"] == ("margin",)
    for right in (1, 1.5, "x" * 300, ["x" * 300, 1], True, None, []):
        assert PlanQuestion.model_validate({"model": "x", "margin": right}).margin == right


@cases("", "text/plain", "application/x-www-form-urlencoded", "text/plain; application/json")
def test_a_body_that_a_form_can_send_is_refused(kind: str) -> None:
    assert answer(("host", OWN), ("content-type", kind), method="POST")[0] == 415
    assert answer(("host", OWN), ("content-type", "application/json; charset=utf-8"), method="POST")[0] == 200


@named_cases(
    ("the longest", [b"x" * LONGEST_BODY], (), 200),
    ("the longest, in pieces", [b"x" * (LONGEST_BODY // 2)] * 2, (), 200),
    ("too long", [b"x" * (LONGEST_BODY + 1)], (), 413),
    ("too long, in pieces", [b"x" * 1024] * 65, (), 413),
    ("too long, it says", [b""], (("content-length", str(LONGEST_BODY + 1)),), 413),
    ("endless, it says", [b""], (("content-length", "9" * 400),), 413),
    ("the longest, it says", [b"x" * LONGEST_BODY], (("content-length", str(LONGEST_BODY)),), 200),
)
def test_a_body_has_a_limit(bodies: list[bytes], headers: Any, status: int) -> None:
    found, _, body = answer(("host", OWN), JSON, *headers, method="POST", bodies=bodies)
    assert found == status
    if status == 200:
        assert body == b"".join(bodies), "what passes is whole"


@cases((LONGEST_HEADERS, 200), (LONGEST_HEADERS + 1, 431))
def test_headers_have_a_limit(length: int, status: int) -> None:
    own = len("host") + len(OWN) + len("x")
    assert answer(("host", OWN), ("x", "y" * (length - own)))[0] == status


def test_only_http_is_answered() -> None:
    assert answer(("host", OWN), kind="websocket")[0] == 400


@cases((OWN,), "evil.example")
def test_every_answer_says_what_a_browser_may_do(host: str) -> None:
    assert HEADERS.items() <= answer(("host", host))[1].items()
    assert "access-control-allow-origin" not in answer(("host", host))[1]


@pytest.fixture
def root(tmp_path: Path) -> Root:
    inside = tmp_path / "models"
    (inside / "deep").mkdir(parents=True)
    outside = tmp_path / "elsewhere"
    outside.mkdir()
    for path in (inside / "a.gguf", inside / "deep" / "b.gguf", inside / "notes.txt", outside / "secret.gguf"):
        path.write_bytes(b"GGUF")
    for number in (1, 2):
        (outside / f"s-{number:05d}-of-00002.gguf").write_bytes(b"GGUF")
    (inside / "link.gguf").symlink_to(outside / "secret.gguf")
    (inside / "folder").symlink_to(outside)
    (inside / "own-link.gguf").symlink_to(inside / "a.gguf")
    (inside / "loop.gguf").symlink_to(inside / "loop.gguf")
    (inside / "s-00001-of-00002.gguf").write_bytes(b"GGUF")
    (inside / "s-00002-of-00002.gguf").symlink_to(outside / "s-00002-of-00002.gguf")
    (inside / "directory.gguf").mkdir()
    return Root.of(inside)


@named_cases(
    ("a parent", "../elsewhere/secret.gguf"),
    ("a parent in between", "deep/../../elsewhere/secret.gguf"),
    ("a parent that stays inside", "deep/../a.gguf"),
    ("encoded", "%2e%2e/elsewhere/secret.gguf"),
    ("encoded twice", "%252e%252e/elsewhere/secret.gguf"),
    ("an encoded slash", "..%2felsewhere%2fsecret.gguf"),
    ("backslashes", "..\\elsewhere\\secret.gguf"),
    ("absolute", "/etc/hostname.gguf"),
    ("absolute, twice", "//etc/hostname.gguf"),
    ("absolute, and inside", "{root}/a.gguf"),
    ("a link to elsewhere", "link.gguf"),
    ("a linked folder", "folder/secret.gguf"),
    ("a link to itself", "loop.gguf"),
    ("a part that is a link to elsewhere", "s-00001-of-00002.gguf"),
    ("NUL", "a.gguf\0.gguf"),
    ("NUL before the end", "a\0.gguf"),
    ("no GGUF", "notes.txt"),
    ("a directory", "directory.gguf"),
    ("a home directory", "~/a.gguf"),
    ("a dot", "./a.gguf"),
    ("no name", ".gguf/"),
    ("too long", "a/" * 3000 + "a.gguf"),
    ("a surrogate", "\udc80.gguf"),
)
def test_nothing_outside_of_the_root_is_opened(name: str, root: Root) -> None:
    with pytest.raises(ModelError, match=r"there is no model '.*' here: take one of the list"):
        root.file(name.replace("{root}", str(root.path)))


def test_what_is_inside_is_opened(root: Root) -> None:
    assert [root.file(name) for name in ("a.gguf", "deep/b.gguf", "own-link.gguf")] == [
        root.path / name for name in ("a.gguf", "deep/b.gguf", "own-link.gguf")
    ]
    assert [each.path for each in root.models()] == ["a.gguf", "deep/b.gguf", "own-link.gguf"]


def test_a_root_is_a_directory(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--root .*/none: No such file or directory: name a directory with models"):
        Root.of(tmp_path / "none")
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"--root .*/file: Not a directory: name a directory with models"):
        Root.of(tmp_path / "file")


@cases(*stored_rows("web_guard", "other_schemes_are_refused"))
def test_other_schemes_are_refused(address: str, root: Root) -> None:
    with pytest.raises((UsageError, ModelError), match=r"is asked for: give https://|there is no model"):
        wanted(address, root)


@cases("https://host/a.gguf", "HTTP://host/a.gguf", "hf://org/repo/a.gguf")
def test_web_servers_and_the_hub_are_asked(address: str) -> None:
    assert wanted(address, None).is_elsewhere


def test_without_a_root_there_are_no_files() -> None:
    with pytest.raises(UsageError, match=r"'a\.gguf' is no address, and the server offers no directory"):
        wanted("a.gguf", None)
    with pytest.raises(UsageError, match=r"^no model has the name 'gpt-oss:20'; did you mean gpt-oss-20b or "):
        wanted("gpt-oss:20", None)


@named_cases(
    ("below the root", "{root}/deep/b.gguf is empty", "deep/b.gguf is empty"),
    ("of this machine", "/opt/x/lib/libllama.so: no", "…/libllama.so: no"),
    ("in quotes", "'/etc/x.conf' cannot be read", "'…/x.conf' cannot be read"),
    ("of the user", "{home}/my models/a.gguf", "…/my models/a.gguf"),
    ("of others", "see https://host/a/b.gguf", "see https://host/a/b.gguf"),
    ("of the hub", "hf://org/repo/a/b.gguf: no", "hf://org/repo/a/b.gguf: no"),
)
def test_messages_say_nothing_of_the_machine(message: str, told: str, root: Root) -> None:
    assert planner_page.told(message.format(root=root.path, home=Path.home()), root) == told


@cases(("127.0.0.1", True), ("localhost", True), ("::1", True), ("0.0.0.0", False))
def test_who_may_plan_for_this_machine(host: str, has_devices: bool) -> None:
    assert Settings(host=host).has_devices == has_devices
    asked = PlanQuestion(model="shape://qwen3-0.6b", session="")
    if has_devices:
        assert asked.keywords(has_devices=has_devices)["gpus"] is None
    else:
        with pytest.raises(UsageError, match="so its own are not told: name cards"):
            asked.keywords(has_devices=has_devices)
    assert ("this machine" in planner_page.page(None, has_devices=has_devices)) == has_devices
