from __future__ import annotations

import json
import math
from dataclasses import replace

import jsonschema

from fitter.llama.types import Array, DeviceInfo, Params, TensorBuftOverride
from fitter.machine.gpu_catalogue import CatalogueGpu, Sources
from fitter.output.arguments import arguments
from fitter.output.documents.checked_documents import CALIBRATION as CALIBRATION_DOCUMENT
from fitter.output.documents.document import dumps
from fitter.output.documents.inspection_document import INSPECTION as INSPECTION_DOCUMENT
from fitter.output.documents.listing_documents import CATALOGUE, DEVICES, Catalogue, Devices
from fitter.output.documents.plan_document import to_dict
from fitter.planning.plan.plan import Alternative, Problem
from fitter.planning.speed.cost import Workload
from tests.support.answers import CALIBRATION, INSPECTION
from tests.support.cases import cases
from tests.support.plans import GIB, MIB, make_plan, make_price
from tools.docs.of_json import DOCUMENTS, keys, printed
from tools.docs.of_json import document as document_schema

USED = (2048 + 256 + 100) * MIB


def test_a_plan_by_the_schema() -> None:
    plan = make_plan(
        Params(
            n_ctx=4096,
            n_gpu_layers=33,
            tensor_split=(20.0, 13.0),
            tensor_buft_overrides=(TensorBuftOverride("^blk.1.", "CPU"),),
            devices=("CUDA0", "CUDA1"),
        )
    )
    device = {
        "total": 8 * GIB,
        "free": 8 * GIB,
        "margin": 1 * GIB,
        "model": 2048 * MIB,
        "context": 256 * MIB,
        "compute": 100 * MIB,
        "shared": 0,
        "used": USED,
        "left": 8 * GIB - USED,
        "more_in_use": 0,
    }
    sizes = {"model": 2048 * MIB, "context": 256 * MIB, "compute": 100 * MIB}
    expected = {
        "schema": 1,
        "fits": True,
        "program": "any",
        "model": {"path": "model.gguf", "name": "Model 8B", "architecture": "llama", "bytes": 4 * GIB},
        "params": {
            "n_ctx": 4096,
            "n_gpu_layers": 33,
            "tensor_split": [20.0, 13.0],
            "tensor_buft_overrides": [{"pattern": "^blk.1.", "buffer_type": "CPU"}],
            "n_batch": 2048,
            "n_ubatch": 512,
            "n_seq_max": 1,
            "type_k": "f16",
            "type_v": "f16",
            "flash_attn": "auto",
            "offload_kqv": True,
            "op_offload": True,
            "kv_unified": False,
            "swa_full": False,
            "embeddings": False,
            "split_mode": "layer",
            "main_gpu": 0,
            "moe_cache_size": 0,
            "devices": ["CUDA0", "CUDA1"],
            "load_mtp": False,
            "n_rs_seq": 0,
            "n_outputs_max": 0,
            "lora": [],
            "load_mode": "auto",
            "pooling_type": "model",
            "kv_unified_per_slot": None,
            "cache_ram": None,
            "ctx_checkpoints": None,
            "checkpoint_min_step": None,
            "cache_idle_slots": True,
            "reranking": False,
            "backend_sampling": False,
            "logits_all": False,
        },
        "own_split": [],
        "arguments": arguments(plan),
        "devices": [
            {"name": "CUDA0", "description": "Card of CUDA0", **device},
            {"name": "CUDA1", "description": "Card of CUDA1", **device},
        ],
        "host": {
            "total": None,
            "free": None,
            "margin": 1 * GIB,
            "model": 300 * MIB,
            "context": 0,
            "compute": 20 * MIB,
            "shared": 0,
            "later": 0,
            "used": 320 * MIB,
            "left": None,
            "more_in_use": 0,
        },
        "pools": [],
        "memory": [
            {"buffer_type": "CUDA0", "device": "CUDA0", "is_host": False, **sizes, "reserved": None},
            {"buffer_type": "CUDA1", "device": "CUDA1", "is_host": False, **sizes, "reserved": None},
            {
                "buffer_type": "CPU",
                "device": None,
                "is_host": True,
                "model": 300 * MIB,
                "context": 0,
                "compute": 20 * MIB,
                "reserved": None,
            },
        ],
        "estimate": None,
        "drafting": None,
        "turns": None,
        "explanation": {"choices": [], "bound": None},
        "levers": [],
        "shared": [],
        "later": [],
        "left_out": [],
        "rpc": [],
        "notes": [],
        "llama_cpp": None,
        "search": {"dummy_loads": 5, "shared_loads": 0, "seconds": 1.25, "cut_short": False},
        "problems": [],
        "alternatives": [],
    }
    document = to_dict(plan)
    assert document == expected
    # dict equality does not see the order, which is part of what is stable
    assert json.dumps(document) == json.dumps(expected)


def test_the_estimate() -> None:
    assert to_dict(make_plan(levers=("no op_offload",)))["levers"] == ["no op_offload"]
    assert to_dict(make_plan(estimate=make_price()))["estimate"] == {
        "prompt_tokens_per_second": 1240,
        "generation_tokens_per_second": 38.04,
        "full_context": None,
        "input_tokens": None,
        "inputs_per_second": None,
    }
    of_texts = replace(make_price(), workload=Workload(310, 0))
    assert to_dict(make_plan(estimate=of_texts))["estimate"] == {
        "prompt_tokens_per_second": 1240,
        "generation_tokens_per_second": None,
        "full_context": None,
        "input_tokens": 310,
        "inputs_per_second": 4.001,
    }
    estimate = to_dict(make_plan(estimate=make_price(full=30.12345)))["estimate"]
    assert estimate["full_context"] == {"tokens": 4096, "generation_tokens_per_second": 30.12}


def test_what_llama_cpp_chose_is_said_where_nobody_set_it() -> None:
    params = to_dict(make_plan(Params(n_ctx=0), n_ctx=8192))["params"]
    assert params["n_ctx"] == 8192
    assert params["devices"] == ["CUDA0", "CUDA1"]
    assert params["tensor_split"] is None


def test_a_plan_that_does_not_fit_says_where_and_by_how_much() -> None:
    plan = make_plan(host_free=100 * MIB, problems=(Problem("host", 1244 * MIB, "too little"),))
    document = to_dict(plan)
    assert document["fits"] is False
    assert document["problems"] == [{"device": "host", "missing": 1244 * MIB, "message": "too little"}]
    assert document["host"]["left"] == -220 * MIB


def test_alternatives_of_a_plan() -> None:
    plan = replace(make_plan(), alternatives=(Alternative(("-c", "8192"), 8192, 1234.56, 12.3456, False),))
    assert to_dict(plan)["alternatives"] == [
        {
            "arguments": ["-c", "8192"],
            "n_ctx": 8192,
            "prompt_tokens_per_second": 1235.0,
            "generation_tokens_per_second": 12.35,
            "measured": False,
            "file_type": "",
        }
    ]


def test_devices() -> None:
    card = DeviceInfo("CUDA0", "Card", "gpu", "CUDA", 8 * GIB, 7 * GIB, virtual=True, buffer_type="CUDA0")
    host = DeviceInfo("CPU", "Processor", "cpu", "CPU", 32 * GIB, 30 * GIB)
    assert DEVICES.write(Devices((card,), host)) == {
        "schema": 1,
        "devices": [
            {
                "name": "CUDA0",
                "description": "Card",
                "type": "gpu",
                "backend": "CUDA",
                "total": 8 * GIB,
                "free": 7 * GIB,
                "virtual": True,
            }
        ],
        "host": {"description": "Processor", "total": 32 * GIB, "free": 30 * GIB},
    }


def test_catalogue() -> None:
    sources = Sources("a page", "a log", None, "estimated", "a sheet", None, "a bus")
    card = CatalogueGpu("card-8gb", "Card", "cuda", 1210, 8 * GIB, None, 7 * GIB, sources, 1e12, None, 32e9)
    assert CATALOGUE.write(Catalogue((card,))) == {
        "schema": 1,
        "gpus": [
            {
                "name": "card-8gb",
                "description": "Card",
                "profile": "cuda",
                "compute_capability": "12.1",
                "total": 8 * GIB,
                "usable": None,
                "free": 7 * GIB,
                "bandwidth": 1e12,
                "pcie": 32e9,
                "nvlink": None,
                "compute": None,
                "unified": False,
                "sources": {
                    "compute_capability": "a page",
                    "total": "a log",
                    "usable": None,
                    "free": "estimated",
                    "bandwidth": "a sheet",
                    "pcie": "a bus",
                    "nvlink": None,
                    "compute": None,
                },
            }
        ],
    }


def test_calibration() -> None:
    document = CALIBRATION_DOCUMENT.write(CALIBRATION)
    assert (document["schema"], document["exact"], document["stored"]) == (1, False, "kept.json")
    card, server = document["devices"]
    assert card == {
        "name": "CUDA0",
        "description": "Card",
        "backend": "CUDA",
        "total": 8 * GIB,
        "free": 7 * GIB,
        "twin": {"profile": "cuda", "compute_capability": "8.9"},
        "context": 400 * MIB,
        "outside": 600 * MIB,
        "margin": 1112 * MIB,
    }
    assert (server["twin"], server["context"], server["outside"], server["margin"]) == (None, None, None, GIB)
    first, second = document["comparisons"]
    assert (first["devices"], first["between"], first["loads"]) == (["CUDA0"], "twin", 96)
    assert first["differences"][0] == {
        "model": "dense",
        "configuration": "defaults",
        "what": "CUDA0 compute",
        "real": 5,
        "other": 3,
    }
    assert second == {"devices": ["CUDA0"], "between": "real load", "loads": 1, "differences": []}
    schema = document_schema(DOCUMENTS["calibrate"][1])
    jsonschema.Draft202012Validator(schema).validate(document)
    assert set(printed(schema, document)) == {path for path, _ in keys(schema)}
    exact = CALIBRATION_DOCUMENT.write(replace(CALIBRATION, comparisons=CALIBRATION.comparisons[1:], stored=None))
    assert (exact["exact"], exact["stored"]) == (True, None)


@cases(math.nan, math.inf, -math.inf)
def test_json_has_no_such_numbers(number: float) -> None:
    metadata = {"a": number, "a.list": Array("f32", 2, (1.0, number))}
    document = INSPECTION_DOCUMENT.write(replace(INSPECTION, metadata=metadata))
    expected = {"a": str(number), "a.list": {"type": "f32", "length": 2, "values": [1.0, str(number)]}}
    assert json.loads(json.dumps(document, allow_nan=False))["metadata"] == expected


def test_inspection() -> None:
    document = INSPECTION_DOCUMENT.write(INSPECTION)
    assert document["metadata"]["a.list"] == {"type": "i32", "length": 2, "values": [1, 2]}
    assert document["metadata"]["tokens"] == {"type": "str", "length": 9, "values": []}
    assert document["roles"][0] == {"role": "attention", "count": 2, "bytes": 2 * MIB}
    assert document["layers"] == [
        {"layer": None, "bytes": MIB, "weights": {"output": MIB}, "context": 0},
        {"layer": 0, "bytes": 2 * MIB, "weights": {"attention": 2 * MIB}, "context": 5 * MIB},
    ]
    assert document["memory"] == [
        {"buffer_type": "CPU", "device": None, "model": 3 * MIB, "context": 5 * MIB, "compute": 7 * MIB}
    ]


def test_text_is_ascii_whatever_a_name_holds() -> None:
    text = dumps({"name": "modèle \udcff"})
    assert text.isascii()
    assert json.loads(text) == {"name": "modèle \udcff"}
