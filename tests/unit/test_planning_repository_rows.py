"""Which file of a repository to take, and what is said about all of them."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

from fitter.errors import Message, ModelError, Remedy
from fitter.llama.types import Params
from fitter.model.files.ranges import MORE_TIME
from fitter.model.repository_models import SideFile
from fitter.output.documents.many_plans import REPOSITORY
from fitter.output.tables.file_tables import repository_commands, repository_lines, repository_table
from fitter.output.tables.plan_table import print_to
from fitter.planning.plan.plan import Problem
from fitter.planning.tables.file_rows import Repository, RepositoryFile, best_file, ordered
from fitter.web.planner_page import worded
from tests.support.cases import cases, named_cases
from tests.support.plans import GIB, MIB, make_plan, make_price

SHORT = Problem("CUDA0", 244 * MIB, "CUDA0 lacks 244 MiB")


def made(
    kind: str, bits: float, rate: float = 40.0, *, weights: int = 8, fits: bool = True, on_devices: bool = True
) -> RepositoryFile:
    """A model of so many times 2^30 weights in a file type."""
    params = Params(n_ctx=4096, n_gpu_layers=33 if on_devices else 20)
    price = make_price(generation=rate) if fits else None
    plan = make_plan(params, problems=() if fits else (SHORT,), estimate=price)
    name = f"{weights}b-{kind}.gguf"
    size = int(weights * bits * GIB / 8)
    longest = 8192 if fits else None
    return RepositoryFile(name, (name,), size, kind, f"hf://org/repo/{name}", weights * GIB, bits, plan, longest)


FAILED = RepositoryFile("x.gguf", ("x.gguf",), 5 * MIB, "", "hf://org/repo/x.gguf", problem="unknown architecture")


@named_cases(
    ("the most bits", (made("Q4_K_M", 4.9), made("Q8_0", 8.5)), None, "8b-Q8_0.gguf"),
    ("of those that are useful", (made("Q4_K_M", 4.9), made("Q8_0", 8.5, 19)), None, "8b-Q4_K_M.gguf"),
    (
        "wherever its weights are",
        (made("Q4_K_M", 4.9), made("Q8_0", 8.5, on_devices=False), made("F16", 16, fits=False)),
        None,
        "8b-Q8_0.gguf",
    ),
    (
        "as fast as is asked for",
        (made("Q4_K_M", 4.9, 30), made("Q8_0", 8.5, 20), made("F16", 16, 10, on_devices=False)),
        15.0,
        "8b-Q8_0.gguf",
    ),
    ("none is as fast", (made("Q4_K_M", 4.9, 30),), 31.0, "8b-Q4_K_M.gguf"),
    ("without a limit of speed", (made("Q4_K_M", 4.9, 30), made("Q8_0", 8.5, 1)), 0.0, "8b-Q8_0.gguf"),
    (
        "the larger model where none is fast",
        (made("Q8_0", 8.5, 9), made("Q4_0", 4.5, 3, weights=32)),
        None,
        "32b-Q4_0.gguf",
    ),
    ("the larger model", (made("Q8_0", 8.5), made("Q2_K", 2.6, weights=32)), None, "32b-Q2_K.gguf"),
    ("but not if it is too slow", (made("Q8_0", 8.5), made("Q2_K", 2.6, 19, weights=32)), None, "8b-Q8_0.gguf"),
    ("not larger with more perplexity", (made("Q5_1", 6.0), made("Q5_K_M", 5.7)), None, "8b-Q5_K_M.gguf"),
    ("of 16 bits the model's own", (made("F16", 16), made("BF16", 16)), None, "8b-BF16.gguf"),
    ("another one's type", (made("UD-Q4_K_XL", 4.95), made("Q4_K_M", 4.9)), None, "8b-UD-Q4_K_XL.gguf"),
    ("nothing fits", (made("Q8_0", 8.5, fits=False), FAILED), None, None),
)
def test_which_file_is_the_best(found: tuple[RepositoryFile, ...], rate: float | None, name: str | None) -> None:
    for given in (found, found[::-1]):
        best = best_file(given, rate)
        assert (best and best.name) == name


def test_their_order() -> None:
    found = (FAILED, made("Q4_K_M", 4.9), made("Q8_0", 8.5))
    assert [each.name for each in ordered(found)] == ["8b-Q8_0.gguf", "8b-Q4_K_M.gguf", "x.gguf"]


BESIDE = (SideFile("mmproj.gguf", "multimodal projector", 9), SideFile("mtp-x.gguf", "draft model", 8))
HOST = made("Q8_0", 8.5, on_devices=False)
DEVICE = made("Q4_K_M", 4.9)


def of(
    *found: RepositoryFile, beside: tuple[SideFile, ...] = (), best: RepositoryFile | None = None, **more: Any
) -> Repository:
    return Repository("hf://org/repo", found, beside, best, 1, **more)


LAST = ("best: 8b-Q8_0.gguf, 8.5 GiB", "arguments: -c 4096 -ngl 20 -np 1 -fit off")
SAID: dict[str, tuple[Repository, tuple[str, ...], tuple[str, ...]]] = {
    "on devices": (
        of(HOST, DEVICE, best=DEVICE, download=("hf", "download", "a b"), run=("x", "-m", "y")),
        (),
        ("best: 8b-Q4_K_M.gguf, 4.9 GiB", "download: hf download 'a b'", "run: x -m y"),
    ),
    "on the host": (
        of(HOST, best=HOST, run=("x", "-m", "y"), hf=("-hf", "o/r:Q8_0")),
        ("8b-Q8_0.gguf has the best quality at 20 t/s or more (--tokens-per-second sets another speed)",),
        (LAST[0], "run: x -m y", "run without downloading it first: -hf o/r:Q8_0 in place of -m and the file"),
    ),
    "without a device": (Repository("hf://org/repo", (HOST,), (), HOST), (), LAST),
    "too slow": (
        of(HOST, best=HOST, tokens_per_second=99.0),
        ("none with 4 bits or more generates 99 t/s (--tokens-per-second): 8b-Q8_0.gguf has the best quality",),
        LAST,
    ),
    "nothing fits": (of(made("Q8_0", 8.5, fits=False)), ("none fits; 8b-Q8_0.gguf: CUDA0 lacks 244 MiB",), ()),
    "what has no plan, and what is beside": (
        of(DEVICE, FAILED, beside=BESIDE, best=DEVICE),
        (
            "x.gguf: unknown architecture",
            "not planned, multimodal projector (--mmproj plans with one): mmproj.gguf",
            "not planned, draft model: mtp-x.gguf",
        ),
        ("best: 8b-Q4_K_M.gguf, 4.9 GiB", "arguments: -c 4096 -ngl 33 -np 1 -fit off"),
    ),
}


@cases(SAID)
def test_what_is_said(found: Repository, below: tuple[str, ...], last: tuple[str, ...]) -> None:
    out = io.StringIO()
    print_to(out, repository_table(found))
    said = " ".join(out.getvalue().split())
    for line in below:
        assert line in said
    assert ("none" in said) is ("none" in " ".join(below))
    assert repository_commands(found) == last


def test_lines_keep_their_remedies_for_the_page() -> None:
    margin = Remedy("use a smaller margin with --fit-target", "margin", "lower")
    small = made("Q8_0", 8.5, fits=False)
    assert small.plan is not None
    problem = replace(SHORT, message=Message("CUDA0 lacks 244 MiB; ", margin))
    found = (
        replace(small, plan=replace(small.plan, problems=(problem,))),
        replace(FAILED, problem=ModelError("its header is late: ", MORE_TIME).message),
    )
    assert [worded(line) for line in repository_lines(Repository("hf://org/repo", found, BESIDE[:1], None, 1))] == [
        "x.gguf: its header is late: try again later",
        "not planned, multimodal projector: mmproj.gguf",
        "none fits; 8b-Q8_0.gguf: CUDA0 lacks 244 MiB; use a smaller margin per card",
    ]


def test_names_of_files_cannot_write_to_a_terminal() -> None:
    name = "a\x1b[2J\nb-Q8_0.gguf"
    odd = replace(HOST, name=name, path=f"hf://org/repo/{name}", problem="no\x07")
    found = of(odd, beside=(SideFile(name, "draft model", 1),), best=odd, download=("hf", name))
    out = io.StringIO()
    print_to(out, repository_table(found, verbose=True))
    text = out.getvalue() + "\n".join(repository_commands(found))
    assert "\x1b" not in text and "\x07" not in text
    assert all("\n" not in line for line in repository_commands(found))


def test_it_is_written() -> None:
    found = of(DEVICE, FAILED, beside=BESIDE, best=DEVICE)
    assert found.to_dict() == REPOSITORY.write(found)
    assert bool(found) and not Repository("x", (FAILED,), (), None)
