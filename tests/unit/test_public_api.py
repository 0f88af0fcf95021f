"""What ``import fitter`` offers: everything that a call returns or raises has a public name, and examples are typed."""

from __future__ import annotations

import copy
import importlib
import inspect
import io
import pickle
import re
import subprocess
import sys
import typing
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typing_extensions

import fitter
from fitter import api
from fitter.planning.plan.plan import FileStamp, Problem
from tests.support.cases import cases, named_cases
from tests.support.plans import MIB, make_plan, make_price

PROBLEM = Problem("host", 244 * MIB, "the host is 244 MiB short")
ROOT = Path(__file__).parents[2]
NOT_IMPORTED = ("fitter.planning.checked.calibration", "fitter.planning.plan.verified")
"""Modules whose names annotations use without importing them."""


def plan_of(**changes: Any) -> api.Plan:
    plan: api.Plan = make_plan(**changes)
    return plan


def names() -> dict[str, Any]:
    """What annotations may say."""
    found: dict[str, Any] = {
        **vars(typing),
        "Llama": fitter.Llama,
        "Unpack": typing_extensions.Unpack,
        "CudaLibrary": object,
    }
    for module in NOT_IMPORTED:
        found |= vars(importlib.import_module(module))
    return found


def classes(annotation: object) -> Iterator[type]:
    """The classes of fitter's that an annotation names."""
    arguments = typing.get_args(annotation)
    if not arguments and inspect.isclass(annotation) and annotation.__module__.split(".")[0] == "fitter":
        yield annotation
    for argument in arguments:
        yield from classes(argument)


def results(member: object) -> Iterator[type]:
    """The classes that a function, method or property returns."""
    if isinstance(member, property):
        member = member.fget
    if isinstance(member, classmethod | staticmethod):
        member = member.__func__
    if inspect.isfunction(member) and member.__module__.split(".")[0] == "fitter":
        hints = typing.get_type_hints(inspect.unwrap(member), localns=names())
        yield from classes(hints.get("return"))


def returned() -> dict[type, str]:
    """Every class that a public call returns, or that is part of what it returns, and where it is found."""
    found: dict[type, str] = {}
    left: list[tuple[type, str]] = []
    for name in fitter.__all__:
        member = getattr(fitter, name)
        left += [(member, name)] if inspect.isclass(member) else [(each, name) for each in results(member)]
    while left:
        each, where = left.pop()
        if each in found:
            continue
        found[each] = where
        for name, hint in typing.get_type_hints(each, localns=names()).items():
            left += [(part, f"{each.__name__}.{name}") for part in classes(hint)]
        for name, _ in inspect.getmembers_static(each) if sys.version_info >= (3, 11) else inspect.getmembers(each):
            if not name.startswith("_"):
                member = inspect.getattr_static(each, name)
                left += [(part, f"{each.__name__}.{name}") for part in results(member)]
    return found


def test_every_type_that_is_returned_is_exported() -> None:
    public = {id(getattr(fitter, name)) for name in fitter.__all__}
    hidden = {where: each.__name__ for each, where in returned().items() if id(each) not in public}
    assert hidden == {}
    assert len(returned()) > 30


def test_every_error_is_exported() -> None:
    texts = [file.read_text(encoding="utf-8") for file in (ROOT / "fitter").rglob("*.py")]
    found = {name for text in texts for name in re.findall(r"(?m)^ *class ([A-Za-z]\w*(?:Error|Warning))\b", text)}
    assert found == {name for name in fitter.__all__ if name.endswith(("Error", "Warning"))}
    assert all(issubclass(getattr(fitter, name), (fitter.FitterError, fitter.PlanWarning)) for name in found)


def test_every_name_is_there_and_documented() -> None:
    assert sorted(fitter.__all__) == fitter.__all__ and set(fitter.__all__) <= set(dir(fitter))
    for name in fitter.__all__:
        member = getattr(fitter, name)
        assert name == "__version__" or inspect.getdoc(member), name
    assert [name for name in dir(fitter) if not name.startswith("__")] == [
        name for name in fitter.__all__ if not name.startswith("__")
    ]
    with pytest.raises(AttributeError, match="module 'fitter' has no attribute 'nothing'"):
        fitter.nothing  # noqa: B018


def test_a_plan_as_text_is_its_table() -> None:
    lines = str(plan_of()).splitlines()
    assert lines[0] == "Model 8B (llama, 4.0 GiB of weights) fits"
    assert lines[1].split() == ["MiB", "total", "free", "model", "context", "compute", "used", "left", "margin"]
    assert lines[-1] == "  KV cache  512.0 MiB of f16"


@cases(
    (plan_of(), "<Plan: Model 8B fits, n_ctx=4096, on CUDA0, CUDA1>"),
    (plan_of(devices=()), "<Plan: Model 8B fits, n_ctx=4096, on the host>"),
    (plan_of(problems=(PROBLEM,)), "<Plan: Model 8B does not fit, n_ctx=4096, on CUDA0, CUDA1>"),
)
def test_a_plan_in_one_line(plan: api.Plan, text: str) -> None:
    assert repr(plan) == text


def test_a_planner_in_one_line() -> None:
    with fitter.Planner("a\x1b.gguf", gpus="rtx-4090", n_ctx=4096) as planner:
        assert repr(planner) == r"<Planner: a\x1b.gguf, gpus=('rtx-4090',), n_ctx=4096>"


def test_results_in_one_line() -> None:
    plan = replace(plan_of(), model=replace(plan_of().model, name="a\x1bb"))
    run = fitter.TuningRun((), plan)
    lines = {
        repr(fitter.ShapePlans((), 3)): "<ShapePlans: none is useful>",
        repr(fitter.Quantizations(plan.model, "bf16", (), None)): r"<Quantizations: a\x1bb in 0 file types, none fits>",
        repr(fitter.Exploration((), "price")): "<Exploration: 0 plans, 0 fit>",
        repr(fitter.Repository("hf://org/repo", (), (), None)): "<Repository: 0 models, none fits>",
        repr(fitter.Verification(plan.model, plan.params, 0)): r"<Verification: a\x1bb as predicted>",
        repr(fitter.Tuning((run,), run)): f"<Tuning: 1 runs, the best is {run.text}>",
        repr(make_price()): "<Price: 1240 tokens a second of prompt, 38.04 generation>",
    }
    assert [*lines] == [*lines.values()]


def test_nothing_in_a_name_acts() -> None:
    plan = plan_of()
    hostile = replace(plan, model=replace(plan.model, name="a\n\x1b[31m" + "b" * 900))
    assert "\n" not in repr(hostile)
    assert "\x1b" not in repr(hostile)
    assert len(repr(hostile)) < 300


def earlier(plan: api.Plan) -> api.Plan:
    """``plan`` from a pickle as it was when ``Plan`` was a class of ``fitter.api``."""
    file = io.BytesIO()
    pickler = pickle.Pickler(file, protocol=0)
    pickler.dispatch_table = {}
    pickler.dump(plan)
    data = file.getvalue().replace(b"fitter.planning.plan.plan\nPlan", b"fitter.api\nPlan")
    assert b"fitter.planning.request.summary\nDeviceUse" in data and b"fit_keywords" in data
    data = data.replace(b"fit_keywords", b"asked")
    read: api.Plan = pickle.loads(data.replace(b"fitter.planning.request.summary\n", b"fitter.planning.plan.plan\n"))
    return read


def before_fit_keywords(plan: api.Plan) -> api.Plan:
    """``plan`` from a pickle as it was when ``fit_keywords`` was ``asked``."""
    data = pickle.dumps(plan, protocol=0)
    assert b"fit_keywords" in data
    read: api.Plan = pickle.loads(data.replace(b"fit_keywords", b"asked"))
    return read


@named_cases(
    ("copy", copy.copy),
    ("deepcopy", copy.deepcopy),
    ("pickle", lambda plan: pickle.loads(pickle.dumps(plan))),
    ("a pickle of an earlier version", earlier),
    ("a pickle with an earlier name", before_fit_keywords),
    ("replace", replace),
)
def test_a_copy_is_the_plan(made: Callable[[api.Plan], api.Plan]) -> None:
    plan = replace(plan_of(), fit_keywords={"n_ctx": 4096}, files=(FileStamp("model.gguf", 1, 2),))
    found = made(plan)
    assert type(found) is api.Plan
    assert found == plan and hash(found) == hash(plan) and vars(found) == vars(plan)
    assert found.arguments() == plan.arguments()
    assert found.asked == found.fit_keywords == {"n_ctx": 4096}


def test_plans_differ_by_what_they_say_alone() -> None:
    plan = plan_of()
    assert plan == replace(plan, fit_keywords={"n_ctx": 4096}) != replace(plan, levers=("no op_offload",))
    assert plan and not replace(plan, problems=(PROBLEM,))


def test_a_plan_of_another_process_has_its_methods(tmp_path: Path) -> None:
    (tmp_path / "plan").write_bytes(pickle.dumps(plan_of()))
    code = "import pickle, sys; print(*pickle.load(open(sys.argv[1], 'rb')).arguments())"
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "plan")], capture_output=True, text=True)
    assert done.stdout.split() == plan_of().arguments(), done.stderr


# --- types

PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
TYPED = """
llm = fitter.Llama("model.gguf", n_ctx=4096, n_threads=8)
plan: fitter.Plan = llm.plan
device: fitter.DeviceUse = plan.devices[0]
again: fitter.Llama = plan.load()
other: fitter.Llama = fitter.Llama.from_pretrained("a/b", "*.gguf", n_ctx=4096)
text: str = str(plan)
found: fitter.Verification = plan.verify()
tokens: list[int] = llm.tokenize(b"a")
try:
    fitter.devices()
except fitter.OutOfMemoryError as error:
    missing: int = error.missing
"""


def examples(page: Path) -> list[str]:
    """The files of Python on ``page``: one for each with a title, and one of all the other blocks."""
    found = re.findall(r"^```python([^\n]*)\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    others = "".join(text for title, text in found if not title)
    return [*(text for title, text in found if title), *([others] if others else [])]


def check_types(directory: Path, *examples: str) -> subprocess.CompletedProcess[str]:
    paths = [directory / f"example_{index}.py" for index in range(len(examples))]
    for path, text in zip(paths, examples, strict=True):
        path.write_text(text if "import fitter" in text else f"import fitter\n{text}")
    command = [sys.executable, "-m", "mypy", "--strict", *map(str, paths)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)


def test_every_example_is_typed(tmp_path: Path) -> None:
    found = [example for page in PAGES for example in examples(page)]
    assert len(found) >= 8
    done = check_types(tmp_path, *found, TYPED)
    assert done.returncode == 0, done.stdout + done.stderr


def test_mypy_would_say_so(tmp_path: Path) -> None:
    done = check_types(tmp_path, "llm = fitter.Llama('a')\nllm.plan.nothing\nx: int = fitter.fit('a')\n")
    assert done.stdout.count("error:") == 2, done.stdout
