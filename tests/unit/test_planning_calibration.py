"""Comparing two sides, and what a load takes that llama.cpp does not count, with both sides made up."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from fitter.errors import LlamaCppError
from fitter.llama.header.gguf_writer import TENSOR_TYPES
from fitter.llama.types import Breakdown, DeviceInfo, Loaded, Params, Row
from fitter.planning.checked import calibration
from fitter.planning.checked.calibration import CalibrationModel, Configuration, default_margin, twin_of
from fitter.planning.request.constraints import device_limits
from tests.support.cases import named_cases

MIB = 2**20
CARD = DeviceInfo("CUDA0", "NVIDIA GeForce RTX 4090", "gpu", "CUDA", 24000 * MIB, 23000 * MIB, buffer_type="CUDA0")
SERVER = DeviceInfo("RPC0", "127.0.0.1:1", "gpu", "RPC", 24000 * MIB, 23000 * MIB, buffer_type="RPC0[127.0.0.1:1]")
MODEL = CalibrationModel("m", Path("m.gguf"), True)
PLAIN = Configuration("plain", Params(n_ctx=512))


def rows(*sizes: tuple[str, int, int, int], device: str = "CUDA0") -> Breakdown:
    made = [Row(name, device, name.endswith("Host"), *size) for name, *size in sizes]
    return Breakdown(tuple(made), (device,), 512)


ONE = rows(("CUDA0", 10, 20, 30), ("CUDA_Host", 1, 0, 2))
FAILED = LlamaCppError("m.gguf: no memory")


def answer(result: Breakdown | LlamaCppError, asked: list[Params]) -> calibration.Measure:
    def measure(path: Path, params: Params) -> Breakdown:
        asked.append(params)
        if isinstance(result, LlamaCppError):
            raise result
        return result

    return measure


@named_cases(
    ("the same", ONE, ONE, []),
    ("one byte", ONE, rows(("CUDA0", 10, 20, 31), ("CUDA_Host", 1, 0, 2)), [("CUDA0 compute", 30, 31)]),
    (
        "each kind",
        ONE,
        rows(("CUDA0", 9, 21, 30), ("CUDA_Host", 1, 0, 2)),
        [("CUDA0 model", 10, 9), ("CUDA0 context", 20, 21)],
    ),
    ("a row is missing", ONE, rows(("CUDA0", 10, 20, 30)), [("CUDA_Host model", 1, 0), ("CUDA_Host compute", 2, 0)]),
    ("a row too many", rows(("CUDA0", 10, 20, 30)), ONE, [("CUDA_Host model", 0, 1), ("CUDA_Host compute", 0, 2)]),
    ("a row of nothing", ONE, rows(("CUDA0", 10, 20, 30), ("CUDA_Host", 1, 0, 2), ("CPU", 0, 0, 0)), []),
    ("both fail", FAILED, LlamaCppError("m.gguf: no memory"), []),
    ("both fail, otherwise", FAILED, LlamaCppError("m.gguf: no"), [("load", "no memory", "no")]),
    ("only the real one fails", FAILED, ONE, [("load", "no memory", "loads")]),
    ("only the twin fails", ONE, FAILED, [("load", "loads", "no memory")]),
)
def test_every_number_that_differs_is_found(
    real: Breakdown | LlamaCppError, other: Breakdown | LlamaCppError, expected: list[tuple[str, int, int]]
) -> None:
    asked: list[Params] = []
    found = calibration.compare(answer(real, asked), answer(other, asked), [CARD], [MODEL], [PLAIN])
    assert [(each.what, each.real, each.other) for each in found.differences] == expected
    assert {(each.model, each.configuration) for each in found.differences} <= {("m", "plain")}
    assert (found.devices, found.between, found.loads) == (("CUDA0",), "twin", 1)
    assert asked == [Params(n_ctx=512, devices=("CUDA0",))] * 2


def test_every_model_is_loaded_with_every_configuration() -> None:
    asked: list[Params] = []
    two = [PLAIN, Configuration("other", Params(n_ctx=1024))]
    measure = answer(ONE, asked)
    found = calibration.compare(measure, measure, [CARD, replace(CARD, name="CUDA1")], [MODEL, MODEL], two)
    assert (found.loads, len(asked), found.devices) == (4, 8, ("CUDA0", "CUDA1"))
    assert {params.devices for params in asked} == {("CUDA0", "CUDA1")}


def test_a_device_has_its_own_name_on_both_sides() -> None:
    served = rows(("RPC0[127.0.0.1:1]", 1, 2, 3), device="RPC0")
    assert calibration.numbers_of(served, [SERVER]) == calibration.numbers_of(rows(("RPC0", 1, 2, 3)), [])


@named_cases(
    ("by the driver", CARD, 860, None, ("cuda", 860)),
    ("by the catalogue", CARD, None, None, ("cuda", 890)),
    ("no such card", replace(CARD, description="Card"), None, None, None),
    ("no profile", SERVER, None, None, None),
    ("the user's", SERVER, 750, "cuda", ("cuda", 750)),
    ("a profile without capability", SERVER, None, "vulkan", ("vulkan", 0)),
)
def test_twins(info: DeviceInfo, capability: int | None, profile: str | None, expected: tuple[str, int] | None) -> None:
    twin = twin_of(info, capability, profile)
    assert (twin and (twin.profile, twin.compute_capability)) == expected
    assert twin is None or (twin.name, twin.description, twin.total, twin.free) == (
        info.name,
        info.description,
        info.total,
        info.free,
    )


@named_cases(
    ("not measured", None, 1024),
    ("nothing", 0, 1024),
    ("as much as the slack leaves", 512, 1024),
    ("more", 513, 1025),
    ("much", 2000, 2512),
)
def test_default_margin(outside: int | None, margin: int) -> None:
    assert default_margin(None if outside is None else outside * MIB) == margin * MIB


def test_the_users_margin_comes_before_what_was_measured() -> None:
    cards = [CARD, replace(CARD, name="CUDA1")]
    defaults = [1024 * MIB, 1500 * MIB]
    assert [limit.margin for limit in device_limits(cards, None, defaults)] == defaults
    assert [limit.margin for limit in device_limits(cards, 3, defaults)] == [3, 3]
    assert [limit.margin for limit in device_limits(cards, None)] == [1024 * MIB] * 2


class FakeProcess:
    """Answers what is free from a list, one after another, and the last one beside what is loaded."""

    def __init__(self, *free: int, own: int = 0) -> None:
        self.free = [size * MIB for size in free]
        self.own = own * MIB

    def memory(self) -> tuple[DeviceInfo, ...]:
        return (replace(CARD, name="CUDA1", free=7), replace(CARD, free=self.free.pop(0)))

    def load(self, path: Path, params: Params) -> Loaded:
        assert (path, params.devices) == (MODEL.path, ("CUDA0",))
        return Loaded(rows(("CUDA0", self.own, 0, 0), ("CUDA_Host", 5, 0, 0)), self.memory())


@named_cases(
    # the observer sees before and with the other process; that one sees before and beside what it loaded
    ("context and work spaces", (23000, 22530), (22530, 22000), 500, 470, 30),
    ("nothing but its own", (23000, 23000), (23000, 22500), 500, 0, 0),
    ("a report that stands still", (23000, 23000), (23000, 23000), 500, 0, None),
    ("one MiB too little", (23000, 23000), (23000, 22501), 500, 0, None),
    ("somebody freed memory", (22000, 23000), (23000, 22400), 500, None, 100),
)
def test_what_a_load_takes(
    observed: Iterable[int], seen: Iterable[int], own: int, context: int | None, outside: int | None
) -> None:
    load = calibration.measure_load(FakeProcess(*observed), FakeProcess(*seen, own=own), CARD, MODEL)
    assert load.context == (None if context is None else context * MIB)
    assert load.outside == (None if outside is None else outside * MIB)
    device = calibration.device_calibration(CARD, None, [load, replace(load, context=MIB, outside=None)])
    assert device.context == max(load.context or 0, MIB)
    assert device.outside == load.outside
    assert device.margin == default_margin(load.outside)
    assert [record.outside for record in calibration.records([device])] == [load.outside] * (load.outside is not None)


def test_a_real_load_is_compared_with_the_dummy() -> None:
    load = calibration.MeasuredLoad(MODEL, Loaded(ONE, ()), None, None)
    other = rows(("CUDA0", 10, 20, 30), ("CUDA_Host", 1, 0, 3))
    asked: list[Params] = []
    assert calibration.compare_loads(answer(ONE, asked), [load], CARD).differences == ()
    (difference,) = calibration.compare_loads(answer(other, asked), [load, load], CARD).differences[:1]
    assert (difference.what, difference.real, difference.other) == ("CUDA_Host compute", 2, 3)
    assert asked == [replace(calibration.LOAD_PARAMS, devices=("CUDA0",))] * 3


# --- the data file


def test_configurations_differ_from_one_another() -> None:
    known = calibration.configurations()
    assert len(known) >= 20
    assert len({configuration.params for configuration in known}) == len(known)
    assert len({configuration.name for configuration in known}) == len(known)
    assert all(configuration.params.devices is None and configuration.params.n_ctx for configuration in known)
    fields = {field for each in known for field, value in vars(each.params).items() if value != vars(Params())[field]}
    assert fields >= {
        *("n_ctx", "n_gpu_layers", "tensor_buft_overrides", "n_ubatch", "n_seq_max", "kv_unified"),
        *("type_k", "type_v", "flash_attn", "offload_kqv", "op_offload", "swa_full"),
    }


def test_models_are_written(tmp_path: Path) -> None:
    models = calibration.write_models(tmp_path)
    assert [model.name for model in models] == ["dense", "experts", "window", "recurrent"]
    assert any(model.is_loaded for model in models)
    # whatever they say their size is, hardly a block of it is on the disk
    assert sum(model.path.stat().st_blocks * 512 for model in models) < 10**6
    assert {"f32", "q4_K", "q6_K", "q8_0"} <= TENSOR_TYPES.keys()


def test_a_model_that_is_written_says_what_it_is(tmp_path: Path) -> None:
    dense = calibration.write_models(tmp_path)[0]
    with dense.path.open("rb") as file:
        metadata = file.read(10**4)
    texts = {"general.architecture": "llama", "general.name": "dense", "tokenizer.ggml.model": "no_vocab"}
    for key, text in texts.items():
        # a key, the type of a text (8), its length and the text
        assert key.encode() + struct.pack("<IQ", 8, len(text)) + text.encode() in metadata
    assert b"\0llama.block_count" in metadata
