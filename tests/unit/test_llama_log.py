"""What is read from llama.cpp's log, and which devices it takes by itself. No native library is loaded."""

from __future__ import annotations

import pytest

from fitter.errors import UsageError
from fitter.llama.build.functions import same_commit
from fitter.llama.build.library import Versions, is_same_version
from fitter.llama.build.log import LogLine, flash_attn_from, n_splits_from, reason, unused_from
from fitter.llama.load.backend_devices import Device, default_devices
from fitter.llama.types import DeviceInfo, VirtualDevice, describe
from tests.support.cases import cases, named_cases, stored

CHOSEN = "llama_context: flash_attn            = {}"


@cases(
    stored("llama_log", "flash_attn")
    | {
        "nothing said": ([], None),
        "automatic, not resolved": ([CHOSEN.format("auto")], None),
    }
)
def test_flash_attention_from_the_log(log: list[str], expected: bool | None) -> None:
    assert flash_attn_from(log) is expected


def test_unused_tensors_from_the_log() -> None:
    line = "model has unused tensor blk.46.attn_q.bias (size = 49152 bytes) -- ignoring\n"
    others = ["load_tensors: loading model tensors", line.replace("46.attn_q.bias", "46.nextn.eh_proj.weight")]
    assert unused_from([line, *others, line]) == ("blk.46.attn_q.bias", "blk.46.nextn.eh_proj.weight")
    assert unused_from(others[:1]) == ()


@named_cases(
    ("both the same", "sched_reserve: graph: nodes = 999, splits = 2, input objects = 5, input tensors = 6", (2, 2)),
    (
        "prompt and generation",
        "sched_reserve: graph (pp bs=512, tg bs=1): nodes = 9 / 8, splits = 146 / 98, input objects = 5 / 5, input "
        "tensors = 6 / 6",
        (146, 98),
    ),
    ("both the same, before v0.5.0", "sched_reserve: graph splits = 2", (2, 2)),
    ("both, before v0.5.0", "sched_reserve: graph splits = 146 (with bs=512), 98 (with bs=1)", (146, 98)),
    ("another line", "sched_reserve: reserve took 2.00 ms, sched copies = 1", None),
)
def test_graph_splits_from_the_log(line: str, expected: tuple[int, int] | None) -> None:
    assert n_splits_from([line]) == expected


@named_cases(
    ("no error", [(2, "llama_model_load: fine"), (3, "load: a warning")], None),
    (
        "cause before consequence",
        [
            (4, "llama_model_load: error loading model: unknown model architecture: 'foo'"),
            (4, "llama_model_load_from_file_impl: failed to load model"),
        ],
        "unknown model architecture: 'foo'",
    ),
    (
        "deeper cause",
        [
            (4, "gguf_init_from_reader: duplicate key 'a' for KV pair 3"),
            (4, "gguf_init_from_reader: failed to read key-value pairs"),
            (4, "llama_model_load: error loading model: llama_model_loader: failed to load model from x.gguf"),
            (4, "llama_model_load_from_file_impl: failed to load model"),
        ],
        "duplicate key 'a' for KV pair 3",
    ),
    ("only a consequence", [(4, "gguf_init_from_reader: failed to read header")], "failed to read header"),
    ("context", [(4, "llama_init_from_model: failed to initialize the context: n_ctx_seq == 0")], "n_ctx_seq == 0"),
)
def test_the_reason_is_the_error_that_caused_the_others(lines: list[tuple[int, str]], expected: str | None) -> None:
    assert reason([LogLine(level, text) for level, text in lines]) == expected


def device(name: str, kind: str, backend: str, device_id: str | None = None) -> Device:
    return Device(DeviceInfo(name, name, kind, backend, 1, 1), device_id, 1, name, 1)


CARD, NEXT, SERVER = (device(name, "gpu", name[:-1]) for name in ("CUDA0", "CUDA1", "RPC0"))
IN_VULKAN = device("Vulkan0", "igpu", "Vulkan")


@named_cases(
    ("no GPU", [device("CPU", "cpu", "CPU"), device("BLAS", "accel", "BLAS")], []),
    ("servers come first", [CARD, SERVER], ["RPC0", "CUDA0"]),
    (
        "one card through two backends",
        [device("CUDA0", "gpu", "CUDA", "0:1"), device("Vulkan0", "gpu", "Vulkan", "0:1")],
        ["CUDA0"],
    ),
    ("cards without an id are different ones", [CARD, NEXT], ["CUDA0", "CUDA1"]),
    ("integrated beside a card", [IN_VULKAN, CARD], ["CUDA0"]),
    ("integrated beside a server", [device("M0", "igpu", "Metal"), SERVER], ["RPC0", "M0"]),
    ("integrated through two backends", [device("A0", "igpu", "A"), device("B0", "igpu", "B")], ["A0"]),
)
def test_the_devices_that_llama_cpp_takes_by_itself(devices: list[Device], expected: list[str]) -> None:
    assert [found.info.name for found in default_devices(devices)] == expected


BUILT = Versions("0.5.0", "0.25.3", "0c1e57098bba")


@named_cases(
    # whether it is the same one, as llama-cpp-python's and as another build: which may be any of those versions
    ("as pinned", Versions("0.5.0-dev", "0.25.3", "0c1e570-dirty"), (True, True)),
    ("commit unknown", Versions("0.5.0", "0.25.3", "unknown"), (True, False)),
    ("no commit", Versions("0.5.0", "0.25.3", ""), (True, False)),
    ("another llama.cpp", Versions("0.6.0", "0.25.3", "0c1e570"), (False, False)),
    ("another ggml", Versions("0.5.0", "0.25.4", "0c1e570"), (False, False)),
    ("another commit", Versions("0.5.0", "0.25.3", "1234567"), (False, False)),
    ("no version", Versions("", "0.25.3", "0c1e570"), (False, False)),
)
def test_versions_of_one_llama_cpp(loaded: Versions, is_same: tuple[bool, bool]) -> None:
    assert tuple(is_same_version(loaded, BUILT, is_python=each) for each in (True, False)) == is_same


@cases(
    ("0c1e570", "0c1e57098bba", True),
    ("0c1e57098-dirty", "0c1e570", True),
    ("0c1e570", "0c1e571", False),
    ("", "0c1e570", None),
    ("0c1e570", "unknown", None),
    ("unknown", "unknown", None),
)
def test_commits(a: str, b: str, same: bool | None) -> None:
    assert same_commit(a, b) is same_commit(b, a) is same


def test_versions_as_text() -> None:
    assert str(BUILT) == "0.5.0 (ggml 0.25.3, commit 0c1e57098bba)"
    assert str(Versions("", "0.15.3", "f53ea51")) == "commit f53ea51 (ggml 0.15.3)"
    assert str(Versions("0.5.0", "0.25.3", "")) == "0.5.0 (ggml 0.25.3, commit unknown)"


def test_a_description_of_devices() -> None:
    card = VirtualDevice("CUDA0", "Card; with 2,\nthings", "cuda", 890, 20, 10)
    assert describe([card, card]) == ";".join(["CUDA0,cuda,890,20,10,Card with 2, things"] * 2)
    assert describe([]) == ""


def test_sixteen_devices_are_described_and_seventeen_are_not() -> None:
    cards = [VirtualDevice(f"CUDA{i}", "card", "cuda", 890, 20, 10) for i in range(17)]
    assert describe(cards[:16]).count(";") == 15
    with pytest.raises(UsageError, match="17 devices"):
        describe(cards)
