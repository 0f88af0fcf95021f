from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import jsonschema

from fitter.llama.types import Array, DeviceInfo, Params, TensorBuftOverride
from fitter.machine.gpu_catalogue import CatalogueGpu, Sources
from fitter.output.documents.checked_documents import CALIBRATION as CALIBRATION_DOCUMENT
from fitter.output.documents.document import dumps
from fitter.output.documents.listing_documents import CATALOGUE, DEVICES, Catalogue, Devices
from fitter.output.documents.plan_document import INSPECTION as INSPECTION_DOCUMENT
from fitter.output.documents.plan_document import to_dict
from fitter.planning.plan.plan import Alternative, Problem
from fitter.planning.speed.cost import Workload
from tests.support.answers import CALIBRATION, INSPECTION
from tests.support.cases import cases, document
from tests.support.plans import GIB, MIB, make_plan, make_price
from tools.docs.of_json import DOCUMENTS, keys, printed
from tools.docs.of_json import document as document_schema


def test_a_plan_by_the_schema() -> None:
    overrides = (TensorBuftOverride("^blk.1.", "CPU"),)
    params = Params(4096, 33, tensor_split=(20.0, 13.0), tensor_buft_overrides=overrides, devices=("CUDA0", "CUDA1"))
    # the order of the keys is part of what is stable
    assert json.dumps(to_dict(make_plan(params))) == json.dumps(document("plan"))


def test_the_estimate() -> None:
    def estimate(**more: Any) -> Any:
        return to_dict(make_plan(estimate=replace(make_price(full=more.pop("full", None)), **more)))["estimate"]

    nothing = dict.fromkeys(("full_context", "input_tokens", "inputs_per_second"))
    expected = {"prompt_tokens_per_second": 1240, "generation_tokens_per_second": 38.04, **nothing}
    assert to_dict(make_plan(levers=("no op_offload",)))["levers"] == ["no op_offload"]
    assert estimate() == expected
    of_texts = {"generation_tokens_per_second": None, "input_tokens": 310, "inputs_per_second": 4.001}
    assert estimate(workload=Workload(310, 0)) == {**expected, **of_texts}
    assert estimate(full=30.12345)["full_context"] == {"tokens": 4096, "generation_tokens_per_second": 30.12}


def test_what_llama_cpp_chose_is_said_where_nobody_set_it() -> None:
    params = to_dict(make_plan(Params(n_ctx=0), n_ctx=8192))["params"]
    assert params["n_ctx"] == 8192
    assert params["devices"] == ["CUDA0", "CUDA1"]
    assert params["tensor_split"] is None


def test_a_plan_that_does_not_fit_says_where_and_by_how_much() -> None:
    written = to_dict(make_plan(host_free=100 * MIB, problems=(Problem("host", 1244 * MIB, "too little"),)))
    assert written["fits"] is False
    assert written["problems"] == [{"device": "host", "missing": 1244 * MIB, "message": "too little"}]
    assert written["host"]["left"] == -220 * MIB


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
    assert DEVICES.write(Devices((card,), host)) == document("devices")


def test_catalogue() -> None:
    sources = Sources("a page", "a log", None, "estimated", "a sheet", None, "a bus")
    card = CatalogueGpu("card-8gb", "Card", "cuda", 1210, 8 * GIB, None, 7 * GIB, sources, 1e12, None, 32e9)
    assert CATALOGUE.write(Catalogue((card,))) == document("catalogue")


def test_calibration() -> None:
    written = CALIBRATION_DOCUMENT.write(CALIBRATION)
    assert (written["schema"], written["exact"], written["stored"]) == (1, False, "kept.json")
    card, server = written["devices"]
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
    first, second = written["comparisons"]
    assert (first["devices"], first["between"], first["loads"]) == (["CUDA0"], "twin", 96)
    difference = {"model": "dense", "configuration": "defaults", "what": "CUDA0 compute", "real": 5, "other": 3}
    assert first["differences"][0] == difference
    assert second == {"devices": ["CUDA0"], "between": "real load", "loads": 1, "differences": []}
    schema = document_schema(DOCUMENTS["calibrate"][1])
    jsonschema.Draft202012Validator(schema).validate(written)
    assert set(printed(schema, written)) == {path for path, _ in keys(schema)}
    exact = CALIBRATION_DOCUMENT.write(replace(CALIBRATION, comparisons=CALIBRATION.comparisons[1:], stored=None))
    assert (exact["exact"], exact["stored"]) == (True, None)


@cases(math.nan, math.inf, -math.inf)
def test_json_has_no_such_numbers(number: float) -> None:
    metadata = {"a": number, "a.list": Array("f32", 2, (1.0, number))}
    written = INSPECTION_DOCUMENT.write(replace(INSPECTION, metadata=metadata))
    expected = {"a": str(number), "a.list": {"type": "f32", "length": 2, "values": [1.0, str(number)]}}
    assert json.loads(json.dumps(written, allow_nan=False))["metadata"] == expected


def test_inspection() -> None:
    written = INSPECTION_DOCUMENT.write(INSPECTION)
    assert written["metadata"]["a.list"] == {"type": "i32", "length": 2, "values": [1, 2]}
    assert written["metadata"]["tokens"] == {"type": "str", "length": 9, "values": []}
    assert written["roles"][0] == {"role": "attention", "count": 2, "bytes": 2 * MIB}
    assert written["layers"] == [
        {"layer": None, "bytes": MIB, "weights": {"output": MIB}, "context": 0},
        {"layer": 0, "bytes": 2 * MIB, "weights": {"attention": 2 * MIB}, "context": 5 * MIB},
    ]
    assert written["memory"] == [
        {"buffer_type": "CPU", "device": None, "model": 3 * MIB, "context": 5 * MIB, "compute": 7 * MIB}
    ]


def test_text_is_ascii_whatever_a_name_holds() -> None:
    text = dumps({"name": "modèle \udcff"})
    assert text.isascii()
    assert json.loads(text) == {"name": "modèle \udcff"}
