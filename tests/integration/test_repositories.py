"""``fitter hf://org/repo`` and ``fitter DIRECTORY``: every model of a repository, planned from its header alone."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest

import fitter
from fitter.errors import ModelError, UsageError
from fitter.model.files import remote_files
from fitter.model.files.ranges import Patience
from tests.support.cases import cases, named_cases, refused
from tests.support.command import Command
from tests.support.hub import Hub, hub_of
from tests.support.ranges import Request
from tools.models import shapes
from tools.models.tiny import TINY_MOE, write_tiny
from tools.models.tiny_lora import write_lora
from tools.models.tiny_projector import write_projector

pytestmark = pytest.mark.usefixtures("clean_environment")

ROOT = Path(__file__).resolve().parents[2]
HF = "hf://org/repo"
SECRET = "s3cr3t"
SERVER = ("--for", "llama-server")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Repositories: one of a model in three types with all that may stand beside it, and odd ones."""
    place = tmp_path_factory.mktemp("repositories")
    repo = place / "org" / "repo"
    (repo / "BF16").mkdir(parents=True)
    small, large = shapes.SHAPES["llama-3.1-8b"], shapes.SHAPES["gemma3-12b"]
    shapes.write_shape(small, repo / "m-Q4_K_M.gguf", vocab=False)
    shapes.write_shape(small, repo / "m-UD-Q4_K_M.gguf", vocab=False)
    first = shapes.write_split("llama-3.1-8b", repo, 3, vocab=False)
    for part in repo.glob(first.name.replace("00001", "*")):
        part.rename(repo / "BF16" / part.name.replace("llama-3.1-8b", "m-BF16"))
    shapes.write_shape(large, repo / "large.gguf", vocab=False)
    shapes.write_shape(replace(small, architecture="perceptron"), repo / "odd-Q5_0.gguf", vocab=False)
    (repo / "lying-Q6_K.gguf").write_bytes((repo / "m-Q4_K_M.gguf").open("rb").read(3000))
    (repo / "part-00002-of-00003.gguf").write_bytes(b"GGUF")
    (repo / "imatrix.gguf").write_bytes(b"GGUF")
    (repo / "README.md").write_text("hello")
    write_projector(repo / "mmproj-F16.gguf")
    tiny = place / "org" / "tiny"
    tiny.mkdir()
    write_tiny(tiny / "tiny-F16.gguf")
    write_tiny(tiny / "draft-Q8_0.gguf", replace(TINY_MOE, n_layer=2))
    write_lora(tiny / "adapter.gguf", tiny / "tiny-F16.gguf")
    write_projector(tiny / "mmproj-F16.gguf")
    for name, file in {"none": "README.md", "side": "mmproj-F16.gguf"}.items():
        (place / "org" / name).mkdir()
        shutil.copy(repo / file, place / "org" / name)
    return place


@pytest.fixture
def hub(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    remote_files.forget()
    with hub_of(folder) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        yield hub


MODELS = ["BF16/m-BF16-00001-of-00003.gguf", "large.gguf", "m-Q4_K_M.gguf", "m-UD-Q4_K_M.gguf"]
PROBLEMS = {
    "lying-Q6_K.gguf": "its header is truncated or damaged; ask who provides it, or take another file",
    "odd-Q5_0.gguf": "unknown model architecture: 'perceptron'",
    "part-00002-of-00003.gguf": "2 of its 3 files are missing",
}


def test_every_model_of_a_repository_is_planned(hub: Hub, folder: Path) -> None:
    found = fitter.repository("hf://org/repo", gpus="12GiB", program="llama-server")
    planned = {each.name: each for each in found.found if each.plan is not None}
    assert sorted(planned) == MODELS
    assert {each.name: each.problem for each in found.found if each.plan is None} == PROBLEMS
    assert {each.name: each.kind for each in found.beside} == {
        "imatrix.gguf": "importance matrix",
        "mmproj-F16.gguf": "multimodal projector",
    }
    for name, each in planned.items():
        path = folder / "org" / "repo" / name
        here = fitter.fit(path, gpus="12GiB", program="llama-server")
        longest = fitter.fit(path, gpus="12GiB", program="llama-server", objective="context")
        assert each.plan is not None and each.plan.devices == here.devices, name
        assert each.plan.arguments() == here.arguments() and each.plan.estimate == here.estimate, name
        assert each.longest_context == longest.params.n_ctx, name
        assert each.plan.model == replace(here.model, path=f"hf://org/repo/{name}"), name
        assert each.host_weights == here.host.model
        assert each.bytes == sum((folder / "org" / "repo" / file).stat().st_size for file in each.files)
    assert len(planned[MODELS[0]].files) == 3
    # another model with more weights comes before any type of the smaller one
    assert found.best is not None and found.best.name == "large.gguf"
    assert found.download == ("hf", "download", "org/repo", "large.gguf", "--local-dir", ".")
    assert found.best.plan is not None
    assert found.run == ("llama-server", "-m", "large.gguf", *found.best.plan.arguments())
    assert found.hf == ("-hf", "org/repo", "-hff", "large.gguf", "--no-mmproj")


def test_headers_are_fetched_once(hub: Hub) -> None:
    shutil.rmtree(remote_files.folder(), ignore_errors=True)
    words: dict[str, Any] = {"gpus": "12GiB", "n_ctx": 4096, "types": "Q4_K_M"}
    first = fitter.repository("hf://org/repo", **words)
    assert [each.name for each in first.found] == ["m-Q4_K_M.gguf", "m-UD-Q4_K_M.gguf"]
    assert 0 < hub.files.sent < 1 << 20
    hub.files.forget()
    hub.server.forget()
    remote_files.forget()
    again = fitter.repository("hf://org/repo", **words)
    assert again.to_dict() == first.to_dict()
    # the list, and the tag of each of both files
    assert [status for _, _, status in hub.server.requests] == [200, 302, 302]
    assert hub.files.requests == []


def test_the_table(hub: Hub, command: Command) -> None:
    shown = command(HF, "--gpu", "12GiB", "--type", "q4_k_m,Q6_K", "-c", "4096", *SERVER)
    rows = [re.split(r"\s{2,}", line.strip()) for line in shown.out.splitlines()]
    assert rows[0] == ["hf://org/repo"]
    assert rows[1] == ["file", "MiB", "bits", "fits", "context", "longest", "host MiB", "prompt t/s", "t/s"]
    assert [row[0] for row in rows[2:5]] == ["m-Q4_K_M.gguf", "m-UD-Q4_K_M.gguf", "lying-Q6_K.gguf"]
    assert [row[-1] == "best" for row in rows[2:5]] == [False, True, False]
    assert rows[4][3] == "unknown"
    text = " ".join(shown.out.split())
    for said in (
        f"lying-Q6_K.gguf: {PROBLEMS['lying-Q6_K.gguf']}",
        "not planned, importance matrix: imatrix.gguf",
        "not planned, multimodal projector (--mmproj plans with one): mmproj-F16.gguf",
        "download: hf download org/repo m-UD-Q4_K_M.gguf --local-dir . run: llama-server -m m-UD-Q4_K_M.gguf -c 4096",
        "run without downloading it first: -hf org/repo:UD-Q4_K_M --no-mmproj in place of -m and the file",
    ):
        assert said in text
    assert (shown.status, shown.err) == (0, "")


def test_json(hub: Hub, command: Command) -> None:
    document = command("hf://org/tiny", "--gpu", "24GiB", "--json", "--mmproj", "mmproj-F16.gguf", *SERVER).document
    assert document["best"] == "tiny-F16.gguf"
    assert document["download"] == [
        *("hf", "download", "org/tiny", "tiny-F16.gguf", "mmproj-F16.gguf", "--local-dir", ".")
    ]
    assert document["run"][:3] == ["llama-server", "-m", "tiny-F16.gguf"]
    assert "mmproj-F16.gguf" in document["run"] and document["hf"] is None


@cases(["--lora-scaled", "{}:0.5"], ["--lora", "{}", "--lora", "{}"])
def test_what_runs_with_an_adapter_downloads_it(words: list[str], hub: Hub, folder: Path, command: Command) -> None:
    for place, files in (("hf://org", ["tiny-F16.gguf", "adapter.gguf"]), (folder / "org", ["tiny-F16.gguf"])):
        given = [each.format(f"{place}/tiny/adapter.gguf") for each in words]
        document = command("hf://org/tiny", "--gpu", "24GiB", "--type", "F16", "--json", *given, *SERVER).document
        assert document["download"] == ["hf", "download", "org/tiny", *files, "--local-dir", "."]
        assert words[0] in document["run"] and document["hf"] is None


def test_files_of_the_repository_beside_its_models(hub: Hub, folder: Path) -> None:
    """Named as they are there, by their address, or by their path here: the plan is the same."""
    here = folder / "org" / "tiny"
    words: dict[str, Any] = {"gpus": "24GiB", "types": "F16", "program": "llama-server"}
    beside = {"mmproj": "mmproj-F16.gguf", "model_draft": "draft-Q8_0.gguf"}
    plans = []
    for place in ("", "hf://org/tiny/", f"{here}/"):
        found = fitter.repository("hf://org/tiny", **words, **{name: place + file for name, file in beside.items()})
        assert [each.name for each in found.found] == ["tiny-F16.gguf"]
        assert found.best is not None and found.best.plan is not None
        plans.append(found.best.plan)
    assert plans[0].shared == plans[1].shared
    assert {use.kind: use.name for use in plans[0].shared if use.kind != "later"} == {
        "projector": "hf://org/tiny/mmproj-F16.gguf",
        "draft": "hf://org/tiny/draft-Q8_0.gguf",
    }
    rows = [[(use.kind, use.rows) for use in plan.shared] for plan in plans]
    assert rows[0] == rows[2]


# --- addresses beside one model


def test_everything_beside_a_model_may_be_elsewhere(hub: Hub, folder: Path, tmp_path: Path) -> None:
    here, there = folder / "org" / "tiny", "hf://org/tiny"
    files = {"mmproj": "mmproj-F16.gguf", "model_draft": "draft-Q8_0.gguf"}
    files |= {"lora": "adapter.gguf", "lora_scaled": "adapter.gguf:0.5"}
    plans = []
    for place in (str(here), there):
        beside = {name: f"{place}/{file}" for name, file in files.items()}
        plans.append(fitter.fit(here / "tiny-F16.gguf", gpus="24GiB", **beside))
    local, plan = plans
    assert plan.devices == local.devices and plan.host == local.host
    assert [use.rows for use in plan.shared] == [use.rows for use in local.shared]
    names = [use.name for use in plan.shared if use.kind in ("draft", "projector", "lora")]
    assert sorted(names) == sorted(f"{there}/{file.removesuffix(':0.5')}" for file in files.values())
    assert [each.path for each in plan.params.lora] == [f"{there}/adapter.gguf"] * 2
    words = plan.arguments()
    options = {"mmproj": "--mmproj", "model_draft": "-md", "lora": "--lora", "lora_scaled": "--lora-scaled"}
    assert {name: words[words.index(option) + 1] for name, option in options.items()} == files
    assert str(remote_files.folder()) not in json.dumps(plan.to_dict())
    (tmp_path / "plan.json").write_text(json.dumps(plan.to_dict()))
    for call in (plan.load, lambda: fitter.verify(plan=tmp_path / "plan.json")):
        with pytest.raises(ModelError) as caught:
            call()
        assert re.fullmatch(
            rf"{there}/\S+\.gguf has to be here to be loaded: download it with hf download org/tiny \S+ --local-dir \.",
            str(caught.value),
        )
    words = {"gpus": "24GiB", "n_ctx": 512}
    assert (
        fitter.measure(here / "tiny-F16.gguf", lora=f"{there}/adapter.gguf", **words).lora
        == fitter.measure(here / "tiny-F16.gguf", lora=here / "adapter.gguf", **words).lora
    )


CONVERT = "is not a multimodal projector; convert one with llama.cpp's convert_hf_to_gguf.py --mmproj"


@cases(("tiny-F16.gguf", f" {CONVERT}"), ("none.gguf", ": the server has no such file (404): check the address"))
def test_what_is_beside_a_model_is_said_by_its_address(name: str, said: str, hub: Hub, folder: Path) -> None:
    with refused(ModelError, f"hf://org/tiny/{name}{said}"):
        fitter.fit(folder / "org" / "tiny" / "tiny-F16.gguf", gpus="24GiB", mmproj=f"hf://org/tiny/{name}")


# --- which one


@named_cases(
    ("all of it on devices", ["--gpu", "12GiB", "--type", "Q4_K_M,BF16"], "m-UD-Q4_K_M.gguf"),
    ("fast enough", ["--gpu", "12GiB", "--tokens-per-second", "1"], "large.gguf"),
    ("nothing on devices fits", ["--gpu", "2GiB"], "large.gguf"),
)
def test_the_best_one(words: list[str], name: str, hub: Hub, command: Command) -> None:
    assert command(HF, *words, "--json").document["best"] == name


def test_none_fits(hub: Hub, command: Command) -> None:
    status, out, _ = command(HF, "--type", "Q4_K_M", "--gpu", "1GiB", "--host-memory", "1GiB")
    assert status == 1 and "none fits; m-Q4_K_M.gguf: the host lacks " in " ".join(out.split())
    assert "download" not in out and "run:" not in out


# --- places

FORMS = ["hf://org/repo:q4_k_m", "hf://org/repo@v1", "{hub}/org/repo", "{hub}/org/repo/tree/main", "hf://org/renamed"]


@pytest.mark.parametrize("form", FORMS)
def test_other_ways_to_name_a_repository(hub: Hub, form: str) -> None:
    hub.renamed = {"org/renamed": "org/repo"}
    hub.page = 2
    words = {} if "q4" in form else {"types": "Q4_K_M"}
    found = fitter.repository(form.format(hub=hub.url), gpus="12GiB", n_ctx=512, **words)
    assert [each.name for each in found.found] == ["m-Q4_K_M.gguf", "m-UD-Q4_K_M.gguf"]
    assert all(each.fits for each in found.found)


def test_a_folder_of_a_repository(hub: Hub) -> None:
    found = fitter.repository("hf://org/repo/BF16", gpus="24GiB", n_ctx=512)
    assert [each.name for each in found.found] == [MODELS[0]]
    assert found.download == (
        *("hf", "download", "org/repo", "--include", "BF16/m-BF16-*-of-00003.gguf", "--local-dir", "."),
    )


def test_a_directory(folder: Path, command: Command) -> None:
    place = folder / "org" / "repo"
    document = command(place, "--gpu", "12GiB", "--json", *SERVER).document
    assert document["repository"] == str(place)
    assert {each["name"] for each in document["files"]} == {*MODELS, *PROBLEMS}
    assert {each["name"]: each["problem"] for each in document["files"] if each["fits"] is None} == {
        **PROBLEMS,
        "lying-Q6_K.gguf": "its header is truncated or damaged; download the model again",
    }
    assert document["download"] is None and document["hf"] is None
    assert document["run"][:3] == ["llama-server", "-m", str(place / "large.gguf")]


# --- what is refused

ACCESS = "ask for access at {hub}/org/absent, and set HF_TOKEN, or log in with 'hf auth login'"
ONLY = "{} has no GGUF file of a model, only of another kind (multimodal projector): take another one"


@named_cases(
    ("no GGUF file", "org/none", 3, "{} has no GGUF file: look for a repository with GGUF files of this model"),
    ("no model", "org/side", 3, ONLY),
    ("no repository", "org/absent", 3, f"{{}} is gated, private or not there (401): {ACCESS}"),
    ("no revision", "org/repo@v9", 3, "{}: the repository has no revision 'v9'"),
    ("no folder", "org/repo/q9", 3, "{}: the repository has no folder 'q9'"),
    (
        "no such type",
        "org/repo --type Q9_K",
        2,
        "{} has no file of type Q9_K (--type): it has BF16, Q4_K_M, Q5_0, Q6_K, UD-Q4_K_M",
    ),
    (
        "one model's format",
        "org/repo --format shell",
        2,
        "--format shell is for one model: name a file of {}, or leave it out",
    ),
    ("a wrong parameter", "org/repo --no-op-offload -md x", 3, "x: no such file; check the path of the model"),
)
def test_what_is_no_repository_of_models(words: str, status: int, said: str, hub: Hub, command: Command) -> None:
    url, *more = f"hf://{words}".split()
    text = f"fitter: error: {said.format(url, hub=hub.url)}\n"
    assert command(url, "--gpu", "12GiB", *more) == (status, "", text)


def test_a_repository_that_is_gated_or_private(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.token = SECRET
    with pytest.raises(ModelError) as caught:
        fitter.repository("hf://org/tiny", gpus="24GiB")
    assert re.fullmatch(
        rf"hf://org/tiny/\S+\.gguf is gated \(403 Forbidden\): ask for access at {hub.url}/org/tiny, and set HF_TOKEN, "
        "or log in with 'hf auth login'",
        str(caught.value),
    )
    hub.is_private = True
    with pytest.raises(ModelError, match="is gated, private or not there"):
        fitter.repository("hf://org/tiny", gpus="24GiB")
    monkeypatch.setenv("HF_TOKEN", SECRET)
    assert fitter.repository("hf://org/tiny", gpus="24GiB", n_ctx=512).fits
    # where the contents are nobody sees the token
    assert [headers for headers in hub.files.headers if "Authorization" in headers] == []


NO_LIST = "hf://org/tiny: the hub's answer is no list of files: check HF_ENDPOINT, or try again later"
TOO_MANY = "hf://org/tiny has too many files: name a folder of it, or a file"
UNNAMEABLE = {"../repo/m-Q4_K_M.gguf": "../repo/m-Q4_K_M.gguf", "/etc/m.gguf": "/etc/m.gguf", "a\0.gguf": "a\\x00.gguf"}


def listed(*names: str, size: int = 1) -> bytes:
    """Return a list of files as the hub writes it."""
    return json.dumps([{"type": "file", "path": name, "size": size} for name in names]).encode()


ANSWERS: dict[str, tuple[int, bytes, dict[str, str], str]] = {
    "it fails": (503, b"", {}, "hf://org/tiny: the server answers 503 Service Unavailable: try again later"),
    "no JSON": (200, b"<html>", {}, NO_LIST),
    "a strange file": (200, listed("x.gguf", size=-1), {}, NO_LIST),
    **{
        f"{name!r}": (
            200,
            listed(name),
            {},
            f"hf://org/tiny: the hub lists '{said}', which no repository has: check HF_ENDPOINT",
        )
        for name, said in (UNNAMEABLE | {"m" * 1020 + ".gguf": "m" * 59 + "…"}).items()
    },
    "too many files": (200, listed(*map(str, range(100_001))), {}, TOO_MANY),
    "too long a page": (200, b"[" + b" " * (8 << 20) + b"]", {}, TOO_MANY),
    "pages of another host": (200, b"[]", {"Link": '<http://example.com/x>; rel="next"'}, NO_LIST),
    "pages without end": (200, b"[]", {"Link": '</api/v1/models/org/tiny/tree/main>; rel="next"'}, TOO_MANY),
    "deep": (200, b"[" * 100_000, {}, NO_LIST),
}


@cases(ANSWERS)
def test_an_answer_that_is_no_list(
    status: int, body: bytes, headers: dict[str, str], said: str, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answer(request: Request) -> bool:
        request.say(status, body, headers)
        return True

    monkeypatch.setattr(Patience, "sleep", lambda self, seconds: None)
    hub.server.answer = answer
    with refused(ModelError, said):
        fitter.repository("hf://org/tiny", gpus="24GiB")


def test_a_repository_of_more_models_than_are_planned(hub: Hub) -> None:
    names = [f"m{number}-Q{4 + (number > 0)}_0.gguf" for number in range(1001)]

    def answer(request: Request) -> bool:
        request.say(200, listed(*names), {})
        return True

    ask, hub.server.answer = hub.answer, answer
    with pytest.raises(UsageError) as caught:
        fitter.repository("hf://org/tiny", gpus="24GiB")
    assert str(caught.value) == (
        "hf://org/tiny has 1001 models, and no more than 1000 are planned at once: name a folder of it, or file types "
        "(--type)"
    )
    hub.server.answer = lambda request: (answer if "/tree/" in request.path else ask)(request)
    # one of them alone is asked for, and is not there
    with pytest.raises(ModelError, match=r"^hf://org/tiny/m0-Q4_0\.gguf: the server has no such file"):
        fitter.repository("hf://org/tiny", gpus="24GiB", types="Q4_0")


def test_a_list_that_lies_about_the_bytes(hub: Hub, folder: Path) -> None:
    def answer(request: Request) -> bool:
        request.say(200, listed("tiny-F16.gguf", size=1 << 62), {})
        return True

    ask = hub.answer
    hub.server.answer = lambda request: answer(request) if "/tree/" in request.path else ask(request)
    (found,) = fitter.repository("hf://org/tiny", gpus="24GiB", n_ctx=512).found
    assert found.bytes == (folder / "org" / "tiny" / "tiny-F16.gguf").stat().st_size


NO_URL = "HF_ENDPOINT is no URL: set it to one such as https://huggingface.co, or unset it"
NO_TOKEN = "HF_TOKEN, or what 'hf auth login' has kept, is no token: set it again, or unset it"
NOBODY = "{}: 127.0.0.1 cannot be reached (Connection refused): check the address, and the network"


@named_cases(
    ("no URL", "HF_ENDPOINT", "hub.example.com", NO_URL),
    ("no host", "HF_ENDPOINT", "https://user:s3cr3t@[bad", NO_URL),
    ("nobody there", "HF_ENDPOINT", "http://user:s3cr3t@127.0.0.1:9", NOBODY),
    ("no token", "HF_TOKEN", "s3cr3t€", NO_TOKEN),
)
def test_settings_that_make_no_sense(
    name: str, value: str, said: str, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Patience, "sleep", lambda self, seconds: None)
    monkeypatch.setenv(name, value)
    for call, url in ((fitter.repository, "hf://org/tiny"), (fitter.fit, "hf://org/tiny/tiny-F16.gguf")):
        with refused(ModelError, said.format(url)):
            call(url, gpus="24GiB")


NEITHER = "is no repository and no directory: give one of them (hf://org/repo), or plan the model itself"


@cases(
    ("shape://qwen3-0.6b", "shape://qwen3-0.6b"),
    ("/none", "/none"),
    (f"https://user:{SECRET}@host/m.gguf?token={SECRET}", "https://host/m.gguf"),
    ("hf://org/..", "hf://org/.."),
)
def test_what_is_neither_a_repository_nor_a_directory(path: str, said: str) -> None:
    with refused(ModelError, f"{said} {NEITHER}"):
        fitter.repository(path, gpus="24GiB")


def test_a_hub_that_does_not_answer(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    def silent(request: Request) -> bool:
        request.files.closing.wait()
        return True

    hub.server.answer = silent
    late = "its list of files did not arrive within 0.5 s: give it more time (--timeout)"
    with refused(ModelError, f"hf://org/tiny: {late}"):
        fitter.repository("hf://org/tiny", gpus="24GiB", timeout=0.5)
    hub.server.forget()
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    offline = "HF_HUB_OFFLINE is set, so the hub is not asked: unset it, or give a directory"
    with refused(ModelError, f"hf://org/tiny: {offline}"):
        fitter.repository("hf://org/tiny", gpus="24GiB")
    assert hub.server.requests == []


def test_types_are_for_repositories(folder: Path, command: Command) -> None:
    path = folder / "org" / "tiny" / "tiny-F16.gguf"
    said = f"--type chooses among the models of a repository, and {path} is one model"
    assert command(path, "--type", "Q4_K_M") == (2, "", f"fitter: error: {said}\n")
    with pytest.raises(UsageError, match="tokens_per_second"):
        fitter.repository(folder / "org" / "tiny", tokens_per_second=-1)


# --- what is said to be done works


def test_what_it_says_downloads_the_files(hub: Hub, folder: Path, tmp_path: Path) -> None:
    found = fitter.repository("hf://org/tiny", gpus="24GiB", mmproj="mmproj-F16.gguf", program="llama-server")
    assert found.download is not None and found.run is not None
    command = [str(Path(sys.executable).with_name("hf")), *found.download[1:]]
    environment = {**os.environ, "HF_HUB_DISABLE_XET": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    for name in (found.run[2], found.run[found.run.index("--mmproj") + 1]):
        assert (tmp_path / name).read_bytes() == (folder / "org" / "tiny" / name).read_bytes()


def test_llama_server_takes_the_same_file(hub: Hub, tmp_path: Path) -> None:
    """``-hf`` with the printed words downloads the file that was planned."""
    server = ROOT / "build" / "llama" / "bin" / "llama-server"
    if not server.exists():
        pytest.skip("needs make tools")
    found = fitter.repository("hf://org/tiny", gpus="24GiB", types="Q8_0", n_ctx=64)
    assert found.hf == ("-hf", "org/tiny:Q8_0", "--no-mmproj")
    environment = {**os.environ, "MODEL_ENDPOINT": hub.url, "HF_HOME": str(tmp_path)}
    command = [str(server), *found.hf, "-c", "64", "-np", "1", "--port", "0", "--no-webui"]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        assert process.stdout is not None
        said: list[str] = []
        for line in process.stdout:
            said.append(line)
            if "listening" in line:
                break
    finally:
        process.kill()
        process.communicate()
    assert any("listening" in line for line in said), said
    taken = {path.name for path in (tmp_path / "hub").rglob("*.gguf")}
    assert taken == {"draft-Q8_0.gguf"}
