"""``fitter.toml``: what a case is, what is wrong with one in a line, and what ``-k`` selects."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

from fitter import api
from fitter.errors import UsageError
from fitter.parameters.table import of_a_case
from fitter.regression.cases import Budget, Case, Growth, read_cases, select, with_build
from tests.support.cases import cases, stored

GIB = 2**30
MIB = 2**20


def cases_of(directory: Path, text: str, *, is_trusted: bool = False) -> dict[str, Case]:
    path = directory / "fitter.toml"
    path.write_text(text)
    return {case.name: case for case in read_cases(path, is_trusted=is_trusted)}


def test_a_case_with_everything(tmp_path: Path) -> None:
    text = """
    [defaults]
    n_ubatch = 256
    max_growth = "1%"

    [cases.chat]
    model = "models/a.gguf"
    gpu = ["rtx-4090", "2x 12GiB"]
    host_memory = "64GiB"
    margin = ["1GB", 1048576, "0 B"]
    n_ctx = 32768
    n_ubatch = 1024
    tensor_split = [3, 1]
    kv_unified = true
    allow = "ubatch"
    max_growth = "64 MiB"
    max_slowdown = "5%"

    [cases.chat.budget]
    CUDA0 = "22 GiB"
    host = 1024
    n_ctx = 16384
    generation_tokens_per_second = 20
    """
    case = cases_of(tmp_path, text)["chat"]
    assert case.model == tmp_path / "models/a.gguf"
    assert case.settings == {
        "gpu": ("rtx-4090", "2x 12GiB"),
        "host_memory": 64 * GIB,
        "margin": (10**9, 2**20, 0),
        "n_ctx": 32768,
        "tensor_split": (3.0, 1.0),
        "n_ubatch": 1024,
        "kv_unified": True,
        "allow": ("ubatch",),
    }
    assert (case.max_growth, case.max_slowdown) == (Growth(bytes=64 * MIB), 0.05)
    assert case.budget == Budget({"cuda0": 22 * GIB, "host": 1024}, 16384, None, 20.0)


def test_files_beside_the_model_are_relative_as_well(tmp_path: Path) -> None:
    text = (
        '[cases.a]\nmodel = "a.gguf"\nmmproj = "m/p.gguf"\nmodel_draft = "/d.gguf"\nlora = ["x.gguf", "y.gguf"]\n'
        'lora_scaled = "z.gguf:0.5"\nreserve = "CUDA0=1GiB"\nmtp = true'
    )
    case = cases_of(tmp_path, text)["a"]
    assert case.settings["mmproj"] == "m/p.gguf", "what a lock says has no path of the machine"
    assert case.keywords() == {
        "program": "any",
        "gpus": ("none",),
        "mmproj": str(tmp_path / "m/p.gguf"),
        "model_draft": "/d.gguf",
        "lora": [str(tmp_path / "x.gguf"), str(tmp_path / "y.gguf")],
        "lora_scaled": [str(tmp_path / "z.gguf:0.5")],
        "reserve": ("CUDA0=1GiB",),
        "mtp": True,
    }


@cases(stored("regression_cases", "a_build_is_named_from_the_file"))
def test_a_build_is_named_from_the_file(
    text: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    (tmp_path / "builds/v0.5.0").mkdir(parents=True)
    for program in ("bin/llama-server", "cwd/llama-server", "cwd/mine"):
        (tmp_path / program).parent.mkdir(exist_ok=True)
        (tmp_path / program).touch(0o755)
    monkeypatch.chdir(tmp_path / "cwd")
    monkeypatch.setenv("PATH", f":.:{tmp_path / 'bin'}:")
    cases = cases_of(
        tmp_path,
        f'[defaults]\nllama_cpp = "{text}"\n[cases.a]\nmodel = "a.gguf"\n'
        '[cases.b]\nmodel = "b.gguf"\nllama_cpp = "/b"\nn_ctx = 512',
    )
    assert cases["a"].llama_cpp == expected.format(here=tmp_path)
    assert cases["a"].keywords()["llama_cpp"] == cases["a"].llama_cpp
    assert cases["b"].llama_cpp == "/b"
    assert cases["b"].settings == {"n_ctx": 512}, "what a lock says has no path of the machine"
    assert [case.llama_cpp for case in with_build(cases.values(), "new")] == ["new", "new"]
    assert with_build(cases.values(), None) == tuple(cases.values())


def test_what_is_not_said(tmp_path: Path) -> None:
    case = cases_of(tmp_path, '[defaults]\ngpu = "24GiB"\nmax_growth = "1%"\n[cases.a]\nmodel = "a.gguf"')["a"]
    assert (case.settings, case.max_growth.of(1000), bool(case.budget)) == ({"gpu": ("24GiB",)}, 10, False)
    bare = cases_of(tmp_path, '[cases.a]\nmodel = "a.gguf"')["a"]
    assert (bare.max_growth.of(10**12), bare.max_slowdown) == (0, 0.02)
    assert bare.keywords() == {"program": "any", "gpus": ("none",)}, (
        "never the devices of the machine that this runs on"
    )


def test_every_setting_is_a_parameter_of_fit() -> None:
    known = inspect.signature(api.fit).parameters
    assert [each.name for each in of_a_case().values() if each.name not in known] == []


def test_a_pattern_makes_a_case_for_each_model(tmp_path: Path) -> None:
    for name in ("q/a.gguf", "q/deep/b (1).gguf", "q/c-00001-of-00002.gguf", "q/c-00002-of-00002.gguf", "q/d.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    found = cases_of(
        tmp_path, '[cases.z]\nmodel = "q/**/*.gguf"\n[cases.b]\nmodel = "q/[x].gguf"\n'.replace("[x]", "[a]")
    )
    assert {name: case.model.relative_to(tmp_path).as_posix() for name, case in found.items()} == {
        "b/a": "q/a.gguf",
        "z/a": "q/a.gguf",
        "z/c": "q/c-00001-of-00002.gguf",
        "z/deep/b__1_": "q/deep/b (1).gguf",
    }
    assert list(found) == sorted(found)
    (tmp_path / "q" / "[a].gguf").touch()
    assert "b" in cases_of(tmp_path, '[cases.b]\nmodel = "q/[a].gguf"'), "a file of that name is no pattern"


def test_a_pattern_may_be_a_path_from_the_root(tmp_path: Path) -> None:
    models, cases = tmp_path / "models", tmp_path / "cases"
    for name in ("a.gguf", "deep/b.gguf"):
        (models / name).parent.mkdir(parents=True, exist_ok=True)
        (models / name).touch()
    cases.mkdir()
    found = cases_of(cases, f'[cases.z]\nmodel = "{models}/**/*.gguf"', is_trusted=True)
    assert {name: case.model for name, case in found.items()} == {
        "z/a": models / "a.gguf",
        "z/deep/b": models / "deep/b.gguf",
    }


@cases("{root}/**/*.gguf", "../*.gguf", "/**/*.gguf", "out/**/*.gguf", "ou?/*.gguf", "o*/../*.gguf", "**/../../*")
def test_only_a_trusted_pattern_leads_out_of_the_directory(pattern: str, tmp_path: Path) -> None:
    cases = tmp_path / "cases"
    cases.mkdir()
    (tmp_path / "a.gguf").touch()
    (cases / "out").symlink_to(tmp_path)
    with pytest.raises(UsageError, match=r"looks outside of the directory .* give --trust or set FITTER_TRUST=1$"):
        cases_of(cases, f'[cases.z]\nmodel = "{pattern.format(root=tmp_path)}"')


def test_a_link_inside_of_the_directory_is_followed(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models/a.gguf").symlink_to("/outside.gguf")
    (tmp_path / "link").symlink_to("models")
    assert list(cases_of(tmp_path, '[cases.z]\nmodel = "lin[k]/*.gguf"')) == ["z/link/a"]


@pytest.mark.timeout(60)
def test_a_pattern_over_very_many_files_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    folder.mkdir()
    # 65,536 paths
    for name in ("b", "c"):
        (folder / name).symlink_to(folder)
    with pytest.raises(UsageError, match=r"'\*.*' looks at more than 20000 files: name their directories$"):
        cases_of(tmp_path, f'[cases.z]\nmodel = "{"*/" * 16}*.gguf"')
    with pytest.raises(UsageError, match="no file matches"):
        cases_of(tmp_path, '[cases.z]\nmodel = "**/*.gguf"')


CASE = '[cases.a]\nmodel = "a.gguf"\n'


@cases(
    stored("regression_cases", "wrong")
    | {name: (CASE + text, says) for name, (text, says) in stored("regression_cases", "wrong_of_a_case").items()}
    | {
        "no file": (None, r"fitter.toml does not exist: write one, such as \[cases.chat\]"),
        "a model as default": ('[defaults]\nmodel = "a"\n' + CASE, "unknown key 'model' in defaults"),
        "a default that is wrong": ('[defaults]\nn_ctx = "x"\n' + CASE, "cases.a.n_ctx is 'x': give a whole number"),
        "beyond all numbers": (CASE + f"n_ctx = {'9' * 5000}", "cannot be read: it has a number with thousands of"),
        "a share beyond all numbers": (CASE + f"tensor_split = [{'9' * 400}]", "cases.a.tensor_split is about 1e4"),
        "a speed beyond all numbers": (
            CASE + f"budget.prompt_tokens_per_second = {'9' * 400}",
            "prompt_tokens_per_second is about 1e.*: give a number of tokens per second",
        ),
        "a margin that no machine has": (CASE + f"margin = {2**60 + 1}", "cases.a.margin is .* more memory than any"),
    }
)
def test_one_clear_line(text: str | None, says: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "fitter.toml").write_text(text)
    with pytest.raises(UsageError, match=says) as caught:
        read_cases(tmp_path / "fitter.toml")
    assert "\n" not in str(caught.value)
    assert "fitter.toml" in str(caught.value)


@cases(("0", 0.0), ("0.0", 0.0), ('"0%"', 0.0), ('"1.5 %"', 0.015), ('" 100% "', 1.0))
def test_slowdowns(text: str, expected: float, tmp_path: Path) -> None:
    assert cases_of(tmp_path, CASE + f"max_slowdown = {text}")["a"].max_slowdown == expected


@cases(1e-9, 0.5, 1, 1e15)
def test_speeds(speed: float, tmp_path: Path) -> None:
    case = cases_of(tmp_path, CASE + f"budget.generation_tokens_per_second = {speed}")["a"]
    assert case.budget == Budget(generation_tokens_per_second=speed)


NAMES = ("chat", "chat-q8", "Code/a", "code/b", "nota")


@cases(
    ("chat", ["chat", "chat-q8"]),
    ("CODE", ["Code/a", "code/b"]),
    ("not chat", ["Code/a", "code/b", "nota"]),
    ("chat or /a", ["chat", "chat-q8", "Code/a"]),
    ("chat and not q8", ["chat"]),
    ("not (chat or code)", ["nota"]),
    ("not not chat", ["chat", "chat-q8"]),
    ("chat and q8 or nota", ["chat-q8", "nota"]),
    ("nota", ["nota"]),
    ("xyz", []),
    ("not not not chat", ["Code/a", "code/b", "nota"]),
    ("code and (/a or /b) and not (/b and code)", ["Code/a"]),
    ("(" * 50 + "nota" + ")" * 50, ["nota"]),
)
def test_selection(expression: str, expected: list[str]) -> None:
    cases = [Case(name, Path("a.gguf"), {}) for name in NAMES]
    assert [case.name for case in select(cases, expression)] == expected


@cases("", "or", "and", ")", "a or", "a or and", "a or )", "not", "not or", "(a", "a)", "a b", "()", "and a")
def test_no_expression(expression: str) -> None:
    with pytest.raises(UsageError, match="is not an expression"):
        select([Case("a", Path("a"), {})], expression)
