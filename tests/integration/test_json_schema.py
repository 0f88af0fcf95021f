"""Every JSON document is what its published schema says, and every key of a schema is printed by some document."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest

import fitter
from fitter.api.compare_builds import OnBuild
from fitter.output.documents.checked_documents import TUNING, VERIFICATION
from fitter.planning.plan.verified import LaterUse, MemoryGrowth, MemoryUse, ServerUse
from fitter.planning.search import best_plan
from fitter.regression import build_report
from fitter.regression.build_comparison import Compared, Subject
from tests.support.command import Command
from tests.support.plans import make_plan
from tools.docs import models
from tools.docs.of_json import DOCUMENTS, keys, printed
from tools.docs.pages import ROOT

pytestmark = pytest.mark.usefixtures("one_worker")

SERVED = {"workload": "chat", "users": 3, "at_least": 20, "program": "llama-server"}
PLANS: dict[str, tuple[str, dict[str, Any]]] = {
    "it fits": ("llama-3.1-8b.gguf", {"gpus": "rtx-4090"}),
    "experts on the host": ("qwen3-30b-a3b.gguf", {"gpus": ["12GiB", "rtx-3060-12gb"], "host_memory": "64GiB"}),
    "far from the bound": ("qwen3-30b-a3b.gguf", {"gpus": "rtx-4090:free=2GiB", "n_ctx": 4096}),
    "tensors are placed": ("qwen3-30b-a3b.gguf", {"gpus": "24GiB", "override_tensor": "exps=CPU", "tensor_split": [1]}),
    "it does not fit": ("llama-3.1-8b.gguf", {"gpus": "2GiB", "n_gpu_layers": 33, "host_memory": "1GiB"}),
    "no GPU": ("llama-3.1-8b.gguf", {"gpus": "none", "n_seq_max": 4, "kv_unified_per_slot": 4096}),
    "a card is left out": ("llama-3.1-8b.gguf", {"gpus": ["24GiB", "1GiB"]}),
    "something is given up": ("llama-3.1-8b.gguf", {"gpus": "12GiB", "n_ctx": 65536, "allow": ["kv-q8_0"]}),
    "draft, adapter, reserved": (
        "llama-3.1-8b.gguf",
        {"gpus": "rtx-4090", "model_draft": "draft.gguf", "lora": "adapter.gguf", "reserve": "host=1GiB"},
    ),
    "projector": ("gemma3-12b.gguf", {"gpus": "vulkan:24GiB", "mmproj": "mmproj.gguf"}),
    "drafts of its own": ("glm45-air.gguf", {"gpus": "2x 48GiB", "mtp": True, "n_ctx": 8192}),
    "a server, with less to keep": (
        "gemma3-12b.gguf",
        {"gpus": "24GiB", "n_ctx": 8192, "program": "llama-server", "host_memory": "8GiB", "spec_type": "ngram-mod"},
    ),
    "several users": ("llama-3.1-8b.gguf", {**SERVED, "gpus": "rtx-4090", "n_seq_max": 1, "cache_ram": 0}),
    "far from its bound": ("llama-3.1-8b.gguf", {"gpus": "4GiB", "n_ctx": 131072}),
    "memory that is shared": ("qwen3-30b-a3b.gguf", {"gpus": "m4-pro:24GiB"}),
    "with alternatives": ("qwen3-30b-a3b.gguf", {"gpus": "12GiB", "alternatives": True}),
    "as upstream places": ("qwen3-30b-a3b.gguf", {"gpus": "rocm:gfx1100:16GiB", "strategy": "llama.cpp"}),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("models")
    names = {model for model, _ in PLANS.values()} | {"draft.gguf", "adapter.gguf", "mmproj.gguf", "small.gguf"}
    models.place(tuple(sorted(names)), found)
    return found


@pytest.fixture(scope="module")
def plan(folder: Path) -> Iterator[Callable[[str], fitter.Plan]]:
    """The plans, each made when it is first asked for."""

    @functools.cache
    def made(name: str) -> fitter.Plan:
        model, keywords = PLANS[name]
        return fitter.fit(model, **keywords)

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        # time for all alternatives
        patch.setattr(best_plan, "SHARE", 1000)
        yield made


@functools.cache
def validator(name: str) -> jsonschema.Draft202012Validator:
    schema = json.loads((ROOT / "docs" / "reference" / f"{name}.schema.json").read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def check(name: str, *documents: dict[str, Any], all_keys: bool = True) -> None:
    """Each of ``documents`` is one by its schema, and together they have all of its keys."""
    for document in documents:
        validator(name).validate(json.loads(json.dumps(document)))
    if all_keys:
        schema = validator(name).schema
        listed = {path for path, _ in keys(schema)}
        assert {path for document in documents for path in printed(schema, document)} == listed


def test_plans_of_all_kinds(plan: Callable[[str], fitter.Plan]) -> None:
    assert plan("it fits").fits and not plan("it does not fit").fits
    documents = {name: plan(name).to_dict() for name in PLANS}
    check("plan", *documents.values())
    document = plan("draft, adapter, reserved").to_dict()
    for place in (document, document["params"], document["host"], document["search"], *document["memory"][:1]):
        place["another"] = 1
        with pytest.raises(jsonschema.ValidationError, match="'another' was unexpected"):
            check("plan", document, all_keys=False)
        del place["another"]
    for name, document in documents.items():
        # None of them has all keys.
        with pytest.raises(AssertionError, match="=="):
            check("plan", document)
        assert documents[name] == plan(name).to_dict()


def test_verifications(plan: Callable[[str], fitter.Plan], folder: Path) -> None:
    done = fitter.verify(folder / "small.gguf", n_ctx=512, devices=["none"])
    assert done.holds
    refused = fitter.verify(folder / "small.gguf", devices=["none"], host_memory=2**24)
    assert not refused.fits
    # No device is here: what it would be is added.
    everything = plan("draft, adapter, reserved")
    with_card = replace(
        done, memory=(MemoryUse("CUDA0", 5, 2, 2), *done.memory), shared=everything.shared, params=everything.params
    )
    overrides = replace(done, params=plan("tensors are placed").params)
    # the real llama-server is in test_verify_server.py
    later = (LaterUse("checkpoint", 2, 60, 5, 5, 1, 6), LaterUse("prompt cache", 0, None, None, None, 0, None))
    grown = MemoryGrowth("CUDA0", 5, 4, 2, 1, 3.0)
    use = ServerUse("/llama-server", "1 (abcdef0)", 40, 39, 1000, 4, "too long", later, 9, 4, 5, 7, 2, (grown,))
    with_server = replace(done, server=use, rows=(replace(done.rows[0], unsaid=("model",)), *done.rows[1:]))
    unknown = replace(done, server=replace(use, resident=None, planned=None))
    check("verify", *map(VERIFICATION.write, (done, refused, with_card, overrides, with_server, unknown)))


def test_tunings(plan: Callable[[str], fitter.Plan]) -> None:
    first = fitter.TuningRun((), plan("no GPU"), 2.0, 3.0, 0.1, 0.01, 0.02, 0.5, 0.7)
    change = fitter.TuningChange("threads", (), ("-t", "2"), (("GGML_OP_OFFLOAD_MIN_BATCH", "128"),))
    failed = fitter.TuningRun((change,), plan("no GPU"), problem="no such threads")
    tuning = fitter.Tuning((first, failed), first, ("-t 4",), "/llama-server", "/tuned.json", 2.9)
    check("tune", TUNING.write(tuning), TUNING.write(replace(tuning, tuned=None)), all_keys=False)


def test_fleets() -> None:
    models = {
        "chat": {"model": "shape://llama-3.1-8b", "resident": True},
        "coder": {"model": "shape://qwen2-7b"},
        "small": {"model": "shape://qwen2.5-0.5b"},
        "other": {"model": "shape://qwen2-7b"},
    }
    fleet = fitter.fleet(models, gpus="8GiB", host_memory="24GiB", cache_ram=0, program="llama-server")
    assert fleet.swaps
    large = fitter.fleet({name: {"model": "shape://llama-3.1-70b"} for name in "ab"}, gpus="8GiB", host_memory="8GiB")
    assert large.problems
    # the plans in it are those of the tests above
    check("fleet", fleet.to_dict(), large.to_dict(), all_keys=False)


def test_inspections_and_devices(folder: Path, command: Command) -> None:
    check("inspect", command("inspect", folder / "small.gguf", "--json").document)
    check("devices", command("devices", "--gpu", "rtx-4090", "--json").document)
    check("catalogue", command("devices", "--catalogue", "--json").document)
    check("shapes", command("shapes", "--json").document)
    check("shape-plans", command("shapes", "smollm2", "--gpu", "1GiB", "--json").document, all_keys=False)


def test_quantizations(folder: Path) -> None:
    words = {"types": ("Q8_0", "Q1_0", "IQ3_XXS"), "n_ctx": 4096}
    some = fitter.quants(folder / "llama-3.1-8b.gguf", gpus="12GiB", **words)
    check("quants", some.to_dict())
    none = fitter.quants(folder / "llama-3.1-8b.gguf", gpus="1GiB", host_memory="1GiB", **words)
    check("quants", none.to_dict(), all_keys=False)
    assert (some.fits, none.fits) == (True, False)


def test_repositories(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "llama-3.1-8b-Q4_K_M.gguf").symlink_to(folder / "llama-3.1-8b.gguf")
    (tmp_path / "mmproj.gguf").symlink_to(folder / "small.gguf")
    words = {"n_ctx": 4096, "program": "llama-server"}
    some = fitter.repository(tmp_path, gpus="12GiB", **words)
    on_hub = {"download": ("hf", "download"), "hf": ("-hf", "org/repo")}
    check("repository", replace(some, **on_hub).to_dict())
    none = fitter.repository(tmp_path, gpus="1GiB", host_memory="1GiB", **words)
    check("repository", none.to_dict(), all_keys=False)
    assert (some.fits, none.fits) == (True, False)


def test_explorations(folder: Path) -> None:
    model = folder / "llama-3.1-8b.gguf"
    words: dict[str, Any] = {"n_ctx": 4096, "type_k": "q8_0", "type_v": "q8_0", "n_ubatch": 256, "types": "Q8_0"}
    some = fitter.explore(model, ["12GiB", "2GiB"], prices={"12GiB": 300}, answer="fits", **words, host_memory="4GiB")
    check("explore", some.to_dict())
    none = fitter.explore(model, ["2GiB"], answer="4k context at 900 t/s", types="IQ3_XXS")
    check("explore", none.to_dict(), all_keys=False)
    assert (some.fits, none.fits) == (True, False)


BUILDS = ("--llama-cpp", "python", "--llama-cpp", "python")


def compared_by_hand() -> dict[str, Any]:
    """A plan that takes more, and has another context, with a second build."""
    first = make_plan()
    more = tuple(replace(row, compute=row.compute + 1) for row in first.breakdown.rows)
    answers = (
        OnBuild("old", "1", first.breakdown, (), {}, first),
        OnBuild("new", "2", replace(first.breakdown, rows=more), (), {"CUDA0": 1}, make_plan(n_ctx=2048)),
    )
    return build_report.to_dict((Compared(Subject("a", Path("a.gguf")), answers),), ("old", "new"))


CASES = """\
[cases.same]
model = "llama-3.1-8b.gguf"
gpu = "rtx-4090"

[cases.longer]
model = "llama-3.1-8b.gguf"
gpu = ["12GiB", "8GiB"]
n_ctx = {n_ctx}
"""


def test_checks_and_differences(
    folder: Path,
    plan: Callable[[str], fitter.Plan],
    monkeypatch: pytest.MonkeyPatch,
    command: Command,
) -> None:
    monkeypatch.chdir(folder)
    Path("fitter.toml").write_text(CASES.format(n_ctx=8192))
    assert command("lock").status == 0
    Path("fitter.toml").write_text(CASES.format(n_ctx=131072) + '[cases.new]\nmodel = "missing.gguf"\n')
    check("check", command("check", "--json").document)
    for name in ("it fits", "it does not fit"):
        Path(f"{name}.json").write_text(json.dumps(plan(name).to_dict()))
    check("diff", command("diff", "it fits.json", "it does not fit.json", "--json").document)
    whole = command("diff", "small.gguf", "--gpu", "none", *BUILDS, "--json").document
    assert whole["equal"]
    check("history", whole, compared_by_hand())
    assert set(DOCUMENTS) == {path.name.partition(".")[0] for path in ROOT.glob("docs/reference/*.schema.json")}
