"""Claims for pods and devices, and the objects of Kubernetes that carry them."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import yaml

from fitter.errors import PlanError, UsageError
from fitter.llama.types import Params, Row, TensorBuftOverride
from fitter.output.documents.deployment_documents import DEVICE_CLAIM, POD_CLAIM
from fitter.output.formats import render
from fitter.planning.plan.claims import DeviceClaim, claim_name, least_bandwidth, pod_claim
from fitter.planning.plan.plan import Plan, PoolUse, SharedUse
from fitter.programs import later
from fitter.programs.kubernetes import documents
from fitter.programs.later import Later, process_bytes
from fitter.storage import read_data
from tests.support.cases import cases, named_cases
from tests.support.plans import GIB, MIB, make_plan, shared_use

VOCAB = 32000
LOGITS = Later("logits", 4 * VOCAB, 4 * VOCAB, 1)
CACHE = Later("prompt cache", 512 * MIB, 64 * MIB, 8)


def served(params: Params | None = None, devices: tuple[str, ...] = ("CUDA0",), path: str = "/m/Model.gguf") -> Plan:
    """A plan for llama-server with a prompt cache."""
    plan = make_plan(params, devices=devices)
    host = replace(plan.host, later=512 * MIB)
    return replace(plan, program="llama-server", later=(CACHE, LOGITS), host=host, model=replace(plan.model, path=path))


# --- a pod's memory


def test_a_pod_gets_what_the_plan_counts_and_what_the_process_takes() -> None:
    claim = pod_claim(served())
    process = process_bytes(
        n_vocab=VOCAB, n_slots=1, n_ctx=4096, state=64 * MIB, counted=claim.planned, backends=("CUDA",)
    )
    assert claim.planned == (300 + 20 + 512) * MIB
    assert claim.memory % MIB == 0
    assert claim.planned + claim.process == claim.memory
    assert process <= claim.process < process + MIB


@named_cases(
    (
        "weights of a draft model",
        lambda plan: replace(plan, shared=(SharedUse("draft", "d", (Row("CPU", None, True, GIB, 0, 0),)),)),
    ),
    (
        "memory that the GPU shares",
        lambda plan: replace(plan, pools=(PoolUse("CUDA0+host", 9 * GIB, 9 * GIB, 0, 3 * GIB, ("CUDA0", "host")),)),
    ),
    ("a larger vocabulary", lambda plan: replace(plan, later=(CACHE, replace(LOGITS, each=4 * 256000)))),
    ("slots", lambda plan: replace(plan, params=replace(plan.params, n_seq_max=64))),
    ("a longer context", lambda plan: replace(plan, params=replace(plan.params, n_ctx=1 << 20))),
    ("larger states", lambda plan: replace(plan, later=(replace(CACHE, each=512 * MIB), LOGITS))),
)
def test_what_needs_more_memory(more: Callable[[Plan], Plan]) -> None:
    assert pod_claim(more(served())).memory > pod_claim(served()).memory


def test_what_others_reserve_is_not_the_pods() -> None:
    others = SharedUse("reserve", "x", (Row("CPU", None, True, GIB, 0, 0),))
    assert pod_claim(replace(served(), shared=(others,))) == pod_claim(served())


@pytest.mark.parametrize(
    "run", read_data(later.__file__)["measured"], ids=lambda run: f"{run['model']} {run['n_slots']}"
)
def test_no_run_took_more(run: dict[str, Any]) -> None:
    sizes = {name: run[name] for name in ("n_vocab", "n_slots", "n_ctx")}
    figure = process_bytes(**sizes, state=0, counted=100 * MIB) / MIB
    took = run["own_mib"] + 15.3 + 1.2
    assert took <= figure <= 1.5 * took + 20


# --- a pod's devices


@named_cases(
    ("none", (), {}),
    ("two of NVIDIA", ("CUDA0", "CUDA1"), {"nvidia.com/gpu": 2}),
    ("AMD", ("ROCm0",), {"amd.com/gpu": 1}),
    ("Intel", ("SYCL0",), {"gpu.intel.com/i915": 1}),
)
def test_devices(devices: tuple[str, ...], expected: dict[str, int]) -> None:
    assert pod_claim(served(devices=devices)).devices == expected


@cases(
    ("NVIDIA GeForce RTX 4090", "nvidia.com/gpu"),
    ("AMD Radeon (RADV)", "amd.com/gpu"),
    ("Intel Arc", "gpu.intel.com/i915"),
)
def test_a_vulkan_device_is_its_vendors(description: str, resource: str) -> None:
    plan = served(devices=("Vulkan0",))
    plan = replace(plan, devices=(replace(plan.devices[0], description=description),))
    assert pod_claim(plan).devices == {resource: 1}


REFUSED: dict[str, tuple[Plan, str]] = {
    "another server": (replace(served(), program="ollama"), "a pod runs llama-server, and the plan is for ollama"),
    "another program": (replace(served(), program="llama-cpp-python"), "a pod runs llama-server, and the plan is for"),
    "no limit": (replace(served(), later=(replace(CACHE, bytes=None), LOGITS)), "-cram -1 has no limit"),
    "a gap": (served(devices=("CUDA1",)), "the plan leaves out CUDA0"),
    "Apple": (served(devices=("MTL0",)), "no resource of Kubernetes is known for MTL0"),
    "Vulkan of nobody": (served(devices=("Vulkan0",)), "no resource of Kubernetes is known for Vulkan0"),
}


@pytest.mark.parametrize("name", ["kubernetes", "llmkube"])
@pytest.mark.parametrize(("plan", "message"), REFUSED.values(), ids=REFUSED)
def test_what_no_pod_can_have(name: str, plan: Plan, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        render(plan, name)


@cases(
    ("/m/Qwen3-30B-A3B-Q4_K_M.gguf", "qwen3-30b-a3b-q4-k-m"),
    ("https://host/a/b.gguf?download=true", "b"),
    ("/m/big-00001-of-00003.gguf", "big"),
    ("Qwen/Qwen3.6-30B-A3B", "qwen3-6-30b-a3b"),
    ("/m/8b.gguf", "model-8b"),
    ("/m/模型.gguf", "model"),
    ("/m/" + "x" * 99 + ".gguf", "x" * 56),
    ("C:\\m\\a b.gguf", "a-b"),
)
def test_names(model: str, expected: str) -> None:
    assert claim_name(model) == expected


# --- Deployment and Service


def objects(text: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(text))


def expanded(word: str) -> str:
    """What a container gets for a word of ``args``, in whose environment no variable is named."""
    return re.sub(r"\$(\$|\(HOME\))", lambda found: "$" if found[1] == "$" else "a variable", word)


@cases("/m/Model.gguf", "/my models/a 'b' \"c\".gguf", "/m/$(HOME)/$$.gguf", "/m/no")
def test_a_deployment(path: str) -> None:
    plan = served(Params(n_ctx=512, n_gpu_layers=33), path=path)
    deployment, service = objects(render(plan, "kubernetes"))
    (server,) = deployment["spec"]["template"]["spec"]["containers"]
    (volume,) = deployment["spec"]["template"]["spec"]["volumes"]
    (mount,) = server["volumeMounts"]
    claim = pod_claim(plan)
    assert server["resources"]["requests"] == server["resources"]["limits"]
    assert server["resources"]["limits"] == {"memory": f"{claim.memory // MIB}Mi", "nvidia.com/gpu": "1"}
    assert server["image"] == "ghcr.io/ggml-org/llama.cpp:server-cuda"
    assert volume == {"name": mount["name"], "hostPath": {"path": path, "type": "File"}}
    assert [expanded(word) for word in server["args"][:4]] == ["-m", mount["mountPath"], "-c", "512"]
    # a llama-server from b11521 on listens at 9931 by itself
    assert server["args"][-4:] == ["--host", "0.0.0.0", "--port", str(server["ports"][0]["containerPort"])]
    assert {
        probe: server[probe]["httpGet"]["path"] for probe in ("startupProbe", "readinessProbe", "livenessProbe")
    } == {"startupProbe": "/health", "readinessProbe": "/health", "livenessProbe": "/health"}
    assert service["spec"]["selector"] == deployment["spec"]["selector"]["matchLabels"]
    assert service["spec"]["ports"][0]["targetPort"] == server["ports"][0]["name"]


def test_a_draft_model_with_a_comma_is_one_file() -> None:
    plan = replace(served(), shared=(shared_use("draft", ("-md", "/m/a,/etc/b.gguf")),))
    (deployment, _) = objects(render(plan, "kubernetes"))
    volumes = deployment["spec"]["template"]["spec"]["volumes"]
    assert [each["hostPath"]["path"] for each in volumes] == ["/m/Model.gguf", "/m/a,/etc/b.gguf"]


def test_no_file_with_a_colon_is_mounted() -> None:
    with pytest.raises(PlanError, match="mounts no file with a colon"):
        render(served(path="/m/a:b.gguf"), "kubernetes")


@cases(
    {"a": {"b": [1, True, None, "x: y", {"c": [], "d": {}}]}, "e": "no"},
    {"list": [{"one": 1, "two": ["a", ["b"]]}, "#"]},
)
def test_yaml_is_read_back(value: dict[str, Any]) -> None:
    assert objects(documents(value, value)) == [value, value]


# --- LLMKube


@named_cases(
    (
        "fields",
        {"n_seq_max": 4, "type_k": "q8_0", "type_v": "q8_0", "n_batch": 1024, "n_ubatch": 256, "offload_kqv": False},
        {"parallelSlots": 4, "cacheTypeK": "q8_0", "batchSize": 1024, "uBatchSize": 256, "noKvOffload": True},
        ["-fit", "off"],
    ),
    ("a type without a name there", {"type_k": "bf16"}, {"contextSize": 4096}, ["-ctk", "bf16"]),
    ("a context out of its range", {"n_ctx": 64}, {}, ["-c", "64"]),
    ("flash attention off", {"flash_attn": "off"}, {}, ["-fa", "off"]),
    ("flash attention on", {"flash_attn": "on"}, {"flashAttention": True}, []),
    (
        "overrides",
        {"tensor_buft_overrides": (TensorBuftOverride("^a$", "CPU"), TensorBuftOverride("b", "CPU"))},
        {"tensorOverrides": ["^a$=CPU", "b=CPU"]},
        [],
    ),
)
def test_llmkube_has_every_parameter(params: dict[str, Any], fields: dict[str, Any], others: list[str]) -> None:
    plan = served(Params(**{"n_ctx": 4096, "n_gpu_layers": 33, **params}))
    model, service = objects(render(plan, "llmkube"))
    spec = service["spec"]
    assert {name: spec.get(name) for name in fields} == fields
    assert not set(others) - set(spec["extraArgs"])
    assert model["spec"]["hardware"]["gpu"] == {"enabled": True, "count": 1, "vendor": "nvidia", "layers": 33}
    assert spec["modelRef"] == model["metadata"]["name"]
    assert spec["resources"] == {"hostMemory": f"{pod_claim(plan).memory // MIB}Mi", "gpu": 1}
    # nothing is left out: every word is an extra argument, or its option has a field
    said = len(spec["extraArgs"])
    taken = sum(2 - (name == "noKvOffload") for name in spec if name in _FIELDS_OF_OPTIONS)
    words = plan.arguments()
    assert said + taken + 2 == len(words), (words, spec)


_FIELDS_OF_OPTIONS = {
    *("contextSize", "parallelSlots", "batchSize", "uBatchSize", "cacheTypeK", "cacheTypeV", "noKvOffload"),
    *("tensorOverrides", "flashAttention"),
}


@named_cases(
    ("files", served(path="/m/a-00001-of-00003.gguf"), "LLMKube's Model has one file, and this model has 3"),
    ("a space", served(path="/my models/a.gguf"), "from a path without spaces or an http address, not from /my models"),
    ("cards", served(devices=tuple(f"CUDA{n}" for n in range(9))), "8 GPUs of one vendor at most, and this plan uses"),
    (
        "an adapter",
        replace(served(), shared=(SharedUse("lora", "a", (), ("--lora", "/a/x.gguf")),)),
        "no field for the file of --lora: use kubernetes",
    ),
)
def test_what_llmkube_cannot_express(plan: Plan, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        render(plan, "llmkube")


def test_llmkube_reads_a_model_from_its_address() -> None:
    address = "https://huggingface.co/org/repo/resolve/main/model.gguf"
    model, _ = objects(render(served(path=address), "llmkube"))
    assert model["spec"]["source"] == address


# --- a device


@cases(0.5, 20.0, 99.0)
def test_the_least_bandwidth_reaches_the_speed(least: float) -> None:
    def speed(bandwidth: float) -> float:
        return 1 / (0.01 + 4e9 / bandwidth)

    found = least_bandwidth(speed, least)
    assert found is not None
    assert speed(found) >= least
    assert speed(found - 2e7) < least


def test_no_bandwidth_is_enough() -> None:
    assert least_bandwidth(lambda bandwidth: min(100.0, bandwidth / 1e9), 101.0) is None
    assert least_bandwidth(lambda _: math.inf, 1.0) is not None


def test_numbers_are_rounded_up_and_named_as_llmfit_does() -> None:
    claim = DeviceClaim("org/m", "m-fit", "Q4_K_M", 17_600_000_001, 17 * GIB + 1, 159.2e9, 20.0, 55, "1.0")
    assert DEVICE_CLAIM.write(claim) == {
        "schema": 1,
        "model": "org/m",
        "claimName": "m-fit",
        "quant": "Q4_K_M",
        "weightsGb": 17.6,
        "memoryGi": 18,
        "minBandwidthGBs": 160,
        "minTps": 20.0,
        "efficiencyPct": 55,
        "resolverVersion": "1.0",
    }


def test_the_document_of_a_pod() -> None:
    claim = pod_claim(served())
    document = POD_CLAIM.write(claim)
    assert document["requests"] == document["limits"] == claim.quantities
    assert (document["claimName"], document["memory"]) == ("model", claim.memory)


@cases("kubernetes", "llmkube")
def test_a_pattern_that_llama_cpp_would_cut_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match=r"a\{1,2\}"):
        render(served(Params(n_ctx=512, tensor_buft_overrides=(TensorBuftOverride("a{1,2}", "CPU"),))), name)
