"""What of a repository is a model, what it is called, and what has llama.cpp download it."""

from __future__ import annotations

import pytest

from fitter.model.files.addresses import HubFolder, hub_download, hub_folder
from fitter.model.repository_models import Listing, SideFile, hf_words, listed, only, type_by_name
from tests.support.cases import cases, named_cases

HUB = HubFolder("org/repo")


def of_hub(folder: str = "", revision: str | None = None, file_type: str = "", **more: str) -> HubFolder:
    return HubFolder("org/repo", folder, revision, file_type=file_type, **more)


PLACES: dict[str, tuple[str, HubFolder | None]] = {
    "a repository": ("hf://org/repo", HUB),
    "with a slash": ("hf://org/repo/", HUB),
    "a branch": ("hf://org/repo@v1", of_hub("", "v1")),
    "a pull request": ("hf://org/repo@refs/pr/1", of_hub("", "refs/pr/1")),
    "a folder of one": ("hf://org/repo@refs/pr/1/sub", of_hub("sub", "refs/pr/1")),
    "a folder": ("hf://org/repo/a/b%20c", of_hub("a/b c")),
    "a dataset": ("hf://datasets/org/repo", of_hub(kind="dataset")),
    "a type, as llama.cpp says it": ("hf://org/repo:Q4_K_M", of_hub(file_type="Q4_K_M")),
    "a type of a revision": ("hf://org/repo@v1:q4_0", of_hub("", "v1", "q4_0")),
    "a type of a pull request": ("hf://org/repo@refs/pr/1:Q4_0", of_hub("", "refs/pr/1", "Q4_0")),
    "a type of a folder": ("HF://Org/Repo/a/b:Q4_0", HubFolder("Org/Repo", "a/b", file_type="Q4_0")),
    "a folder above": ("hf://org/repo/../other", None),
    "the same, quoted": ("hf://org/repo/%2e%2e/other", None),
    "a repository above": ("hf://org/..", None),
    "no name of a repository": ("hf://org/re%2Fpo", None),
    "its page": ("https://huggingface.co/org/repo", HUB),
    "its short page": ("https://hf.co/org/repo/", HUB),
    "its tree": ("https://huggingface.co/org/repo/tree/main?x=1", HUB),
    "a folder's page": ("https://huggingface.co/org/repo/tree/main/UD-Q4%20K", of_hub("UD-Q4 K")),
    "a pull request's page": ("https://huggingface.co/org/repo/tree/refs%2Fpr%2F3", of_hub("", "refs/pr/3")),
    "a branch with a slash": ("https://huggingface.co/org/repo/tree/try%2Fit/sub", of_hub("sub", "try/it")),
    "a file": ("hf://org/repo/x.gguf", None),
    "a file's page": ("https://huggingface.co/org/repo/blob/main/x.gguf", None),
    "a file's own address": ("https://huggingface.co/org/repo/resolve/main/x.gguf?download=true", None),
    "a file where folders are shown": ("https://huggingface.co/org/repo/tree/main/x.gguf", None),
    "another page": ("https://huggingface.co/org/repo/discussions", None),
    "an organization": ("hf://org", None),
    "another host": ("https://example.com/org/repo", None),
    "no host": ("http://[::1", None),
}


@cases(PLACES)
def test_a_place_of_the_hub(url: str, place: HubFolder | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_ENDPOINT", raising=False)
    assert hub_folder(url) == place


@pytest.mark.parametrize("place", [place for _, place in PLACES.values() if place and not place.file_type])
def test_a_place_has_an_address(place: HubFolder) -> None:
    assert hub_folder(place.url) == place


@cases("x.gguf", "a/b c.gguf", "50%#1?.gguf", "tür.gguf")
def test_a_file_has_an_address(name: str) -> None:
    for place in (
        HUB,
        HubFolder("org/repo", "a", "refs/pr/1"),
        HubFolder("org/repo", "", "try/it"),
        HubFolder("org/repo", kind="dataset"),
    ):
        assert hub_download([place.file(name)])[3] == name


TYPES = {
    "Qwen3-30B-A3B-UD-Q4_K_XL.gguf": "UD-Q4_K_XL",
    "Q4_K_M/x-Q4_K_M-00001-of-00003.gguf": "Q4_K_M",
    "BF16/DeepSeek-00001-of-00030.gguf": "BF16",
    "llama.Q5_K_S.gguf": "Q5_K_S",
    "gemma-3-12b-it-q4_0.gguf": "Q4_0",
    "gpt-oss-20b-mxfp4.gguf": "MXFP4",
    "gpt-oss-120b-MXFP4_MOE.gguf": "MXFP4_MOE",
    "Kimi-K2-UD-TQ1_0-00001-of-00005.gguf": "UD-TQ1_0",
    "x.i1-IQ3_M.gguf": "IQ3_M",
    "model.gguf": "",
    "FAQ4_K.gguf": "",
    "seq2-F16x.gguf": "",
}


@pytest.mark.parametrize("name", TYPES)
def test_the_type_by_its_name(name: str) -> None:
    assert type_by_name(name) == TYPES[name]


def made(*names: str, hub: HubFolder | None = HUB) -> Listing:
    return listed("hf://org/repo", [(name, 10) for name in sorted(names)], hub)


def test_split_files_are_one_and_others_are_apart() -> None:
    found = made(
        "a-Q4_0.gguf",
        "q8/b-Q8_0-00001-of-00002.gguf",
        "q8/b-Q8_0-00002-of-00002.gguf",
        "c-00002-of-00003.gguf",
        "c-00003-of-00003.gguf",
        "mmproj-F16.gguf",
        "x/model-mmproj-BF16.gguf",
        "imatrix.gguf",
        "mtp-a-Q4_0.gguf",
    )
    assert [(each.name, each.bytes, each.problem) for each in found.models] == [
        ("a-Q4_0.gguf", 10, None),
        ("c-00002-of-00003.gguf", 20, "1 of its 3 files are missing"),
        ("q8/b-Q8_0-00001-of-00002.gguf", 20, None),
    ]
    assert [each.path for each in found.models][2] == "hf://org/repo/q8/b-Q8_0-00001-of-00002.gguf"
    assert found.beside == (
        SideFile("imatrix.gguf", "importance matrix", 10),
        SideFile("mmproj-F16.gguf", "multimodal projector", 10),
        SideFile("mtp-a-Q4_0.gguf", "draft model", 10),
        SideFile("x/model-mmproj-BF16.gguf", "multimodal projector", 10),
    )


def test_only_some_types() -> None:
    found = made("a-Q4_K_M.gguf", "a-UD-Q4_K_M.gguf", "a-Q8_0.gguf", "a.gguf")
    assert [each.name for each in only(found, ("q4_k_m",))[0]] == ["a-Q4_K_M.gguf", "a-UD-Q4_K_M.gguf"]
    assert [each.name for each in only(found, ("UD-Q4_K_M", "Q8_0"))[0]] == ["a-Q8_0.gguf", "a-UD-Q4_K_M.gguf"]
    assert only(found, ("Q8_0", "Q5_0"))[1] == "Q5_0"


TWO = made("a-Q4_K_M.gguf", "a-UD-Q4_K_M.gguf")


@named_cases(
    ("by its type", made("a-Q4_K_M.gguf", "a-Q8_0.gguf"), "a-Q8_0.gguf", "-hf org/repo:Q8_0"),
    ("two of the type", TWO, "a-Q4_K_M.gguf", "-hf org/repo -hff a-Q4_K_M.gguf"),
    ("one of two", TWO, "a-UD-Q4_K_M.gguf", "-hf org/repo:UD-Q4_K_M"),
    ("no type", made("a.gguf", "b.gguf"), "b.gguf", "-hf org/repo -hff b.gguf"),
    ("no projector", made("a-Q8_0.gguf", "mmproj-F16.gguf"), "a-Q8_0.gguf", "-hf org/repo:Q8_0 --no-mmproj"),
    ("a folder", made("q/a-Q8_0.gguf", hub=of_hub("q")), "q/a-Q8_0.gguf", "-hf org/repo -hff q/a-Q8_0.gguf"),
    ("another revision", made("a-Q8_0.gguf", hub=of_hub("", "v1")), "a-Q8_0.gguf", None),
    ("a preset", made("a-Q8_0.gguf", "preset.ini"), "a-Q8_0.gguf", None),
    ("a directory", made("a-Q8_0.gguf", hub=None), "a-Q8_0.gguf", None),
)
def test_what_has_llama_cpp_download_it(found: Listing, name: str, words: str | None) -> None:
    (chosen,) = (each for each in found.models if each.name == name)
    assert hf_words(found, chosen) == (words and words.split())


def test_many_parts_are_counted_once() -> None:
    """Not each of them for each of them."""
    count = 40_000
    (found,) = made(*(f"m-{number:05d}-of-{count}.gguf" for number in range(1, count))).models
    assert (len(found.files), found.bytes, found.problem) == (
        count - 1,
        10 * (count - 1),
        f"1 of its {count} files are missing",
    )


def test_names_that_a_command_would_take_for_something_else() -> None:
    assert hub_download([HUB.file("--help.gguf"), HUB.file("a.gguf")]) == [
        *("hf", "download", "org/repo", "--include=--help.gguf", "--include", "a.gguf", "--local-dir", ".")
    ]
    assert hub_download([HUB.file("[a]-00001-of-00002.gguf")]) == [
        *("hf", "download", "org/repo", "--include", "[[]a]-*-of-00002.gguf", "--local-dir", ".")
    ]


def test_what_downloads_several_files() -> None:
    split = HUB.file("q 8/b-00001-of-00002.gguf")
    assert hub_download([HUB.file("a.gguf"), HUB.file("mmproj.gguf")]) == [
        *("hf", "download", "org/repo", "a.gguf", "mmproj.gguf", "--local-dir", ".")
    ]
    assert hub_download([split, HUB.file("mmproj.gguf")]) == [
        *("hf", "download", "org/repo", "--include", "q 8/b-*-of-00002.gguf", "--include", "mmproj.gguf"),
        *("--local-dir", "."),
    ]
