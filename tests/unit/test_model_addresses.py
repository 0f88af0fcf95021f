from __future__ import annotations

from pathlib import Path

import pytest

from fitter.errors import ModelError
from fitter.model import location
from fitter.model.files.addresses import (
    addresses,
    as_url,
    download_command,
    file_name,
    hub_file,
    shown,
    without_secrets,
)
from tests.support.cases import cases, named_cases


@named_cases(
    ("a web server", "https://host/m.gguf", "https://host/m.gguf"),
    ("without a slash", "https:/host/m.gguf", "https://host/m.gguf"),
    ("the hub", "hf://org/repo/m.gguf", "hf://org/repo/m.gguf"),
    ("a bucket", "s3://bucket/m.gguf", "s3://bucket/m.gguf"),
    ("one in another", "zip://m.gguf::s3://bucket/m.zip", "zip://m.gguf::s3://bucket/m.zip"),
    ("a path", "models/m.gguf", None),
    ("a path with a colon", "a:b/m.gguf", None),
    ("a drive", "c:/models/m.gguf", None),
    ("a drive with two slashes", "c://models/m.gguf", None),
)
def test_what_is_a_url(path: str, url: str | None) -> None:
    assert as_url(path) == url
    assert location.is_address(path) == (url is not None)
    assert as_url(Path(path)) == url or "::" in path


def test_a_url_of_a_file_is_a_path() -> None:
    assert not location.is_address("file:///models/m.gguf")


@cases(
    ("https://me:pass@host:8080/a/m.gguf?X-Amz-Signature=1#x", "https://host:8080/a/m.gguf"),
    ("https://me@host/m.gguf", "https://host/m.gguf"),
    ("https://me:p@ss?w#rd@host/m.gguf", "https://host/m.gguf"),
    ("http://me:pass@[::1]:8080/m.gguf", "http://[::1]:8080/m.gguf"),
    ("hf://org/repo@v1/m.gguf", "hf://org/repo@v1/m.gguf"),
    ("s3://bucket/a@b/m.gguf", "s3://bucket/a@b/m.gguf"),
    ("zip://m.gguf::ftp://me:pass@host/m.zip?a=b", "zip://m.gguf::ftp://host/m.zip"),
    # what nobody has encoded
    ("https://me:p/a/s@host/m.gguf", "https://host/m.gguf"),
    ("https://me:p#a/s@host/m.gguf?b=c", "https://host/m.gguf"),
    ("zip://m.gguf::https://me:p/a@host/m.zip", "zip://m.gguf::https://host/m.zip"),
    ("https://host:8080/a@b/m.gguf", "https://host:8080/a@b/m.gguf"),
    ("http://[::1]:80/a@b.gguf", "http://[::1]:80/a@b.gguf"),
    ("sftp://host:/a@b.gguf", "sftp://host:/a@b.gguf"),
)
def test_what_is_shown_holds_no_secret(url: str, expected: str) -> None:
    assert shown(url) == expected


def test_what_others_say_of_an_address_holds_no_secret() -> None:
    url = "sftp://me:p%40ss@host/m.gguf?token=t0ken"
    said = f"me:p@ss@host refused p%40ss and ?token=t0ken\nof {url}: https://other:word@host/x?a=b"
    assert without_secrets(said, url) == ("…@host refused … and … of sftp://host/m.gguf: https://host/x")
    assert without_secrets("no such file", "hf://org/repo@v1/m.gguf") == "no such file"


@cases(
    ("https://host/a/m.gguf?b=/c", "m.gguf"),
    ("https://host/a/my%20model.gguf", "my model.gguf"),
    ("zip://folder/m.gguf::https://host/m.zip", "m.gguf"),
    ("memory://m.gguf", "m.gguf"),
    ("http://[::1]:8080/m.gguf", "m.gguf"),
)
def test_the_name_of_the_file(url: str, name: str) -> None:
    assert file_name(url) == name


@cases("https://host", "https://host/", "https://host/a%2Fb", "https://host/%2e%2e", "s3://")
def test_an_address_without_a_file(url: str) -> None:
    with pytest.raises(ModelError) as caught:
        file_name(url)
    assert str(caught.value) == f"{url} names no file: give the address of a GGUF file"


def test_every_file_of_a_split_model_has_the_same_rest() -> None:
    found = addresses("https://me:pass@host/a/m-00002-of-00003.gguf?sig=1")
    assert [address.url for address in found] == [
        f"https://me:pass@host/a/m-0000{number}-of-00003.gguf?sig=1" for number in (1, 2, 3)
    ]
    assert [address.shown for address in found] == [f"https://host/a/m-0000{n}-of-00003.gguf" for n in (1, 2, 3)]
    assert [address.name for address in found] == [f"m-0000{number}-of-00003.gguf" for number in (1, 2, 3)]
    assert len(addresses("https://host/m-00004-of-00003.gguf")) == 1


def test_a_page_of_the_hub_is_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_ENDPOINT", raising=False)
    (found,) = addresses("https://huggingface.co/org/repo/blob/main/blob/m.gguf")
    assert (found.url, found.is_hub) == ("https://huggingface.co/org/repo/resolve/main/blob/m.gguf", True)
    (other,) = addresses("https://example.com/org/repo/blob/main/m.gguf")
    assert (other.url, other.is_hub) == ("https://example.com/org/repo/blob/main/m.gguf", False)


HUB = {
    "hf://org/repo/m.gguf": ("org/repo", "m.gguf", None, None),
    "hf://org/repo@v1/a/m.gguf": ("org/repo", "a/m.gguf", "v1", None),
    "hf://org/repo@refs/pr/3/a/m.gguf": ("org/repo", "a/m.gguf", "refs/pr/3", None),
    "hf://org/repo@a%2Fb/m.gguf": ("org/repo", "m.gguf", "a/b", None),
    "hf://datasets/org/repo/m.gguf": ("org/repo", "m.gguf", None, "dataset"),
}


@pytest.mark.parametrize("url", HUB)
def test_a_file_of_the_hub(url: str) -> None:
    assert hub_file(url) == HUB[url]


@cases(
    ("https://host/it's.gguf", """curl -LO 'https://host/it'"'"'s.gguf'"""),
    ("hf://datasets/org/repo@v1/m.gguf", "hf download org/repo m.gguf --revision v1 --repo-type dataset --local-dir ."),
    (
        "s3://bucket/m-00001-of-00002.gguf",
        """python -c 'import fsspec; fsspec.filesystem('"'"'s3'"'"').get("""
        """'"'"'s3://bucket/m-*-of-00002.gguf'"'"', '"'"'.'"'"')'""",
    ),
)
def test_the_command_that_downloads_it(url: str, command: str) -> None:
    assert download_command(url) == command


def test_where_it_is_once_it_is_downloaded() -> None:
    assert location.local_name("hf://org/repo/q4/m.gguf") == "q4/m.gguf"
    assert location.local_name("https://host/q4/m.gguf") == "m.gguf"
    assert location.local_name("q4/m.gguf") == "q4/m.gguf"


def test_the_user_of_a_hub_is_asked_with_as_it_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "https://Me:PassWord@Mirror.example")
    (found,) = addresses("https://Me:PassWord@mirror.example/org/repo/blob/main/m.gguf")
    assert found.url == "https://Me:PassWord@Mirror.example/org/repo/resolve/main/m.gguf"
    assert (found.is_hub, found.shown) == (True, "https://mirror.example/org/repo/blob/main/m.gguf")
