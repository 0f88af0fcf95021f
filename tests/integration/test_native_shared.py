"""Projectors and LoRA adapters: what llama.cpp says that they take, and what they really take."""

from __future__ import annotations

import importlib.util
import re
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gguf
import pytest

from fitter.errors import LibraryError, ModelError, UsageError
from fitter.llama.client import Worker
from fitter.llama.types import Breakdown, Lora, Params, Row, Skeleton, VirtualDevice
from tests.support.cases import cases, named_cases
from tests.support.command import run_python
from tools.loopback import rpc_servers
from tools.models.tiny import TINY_DENSE, TINY_MOE, write_tiny
from tools.models.tiny_lora import write_lora
from tools.models.tiny_projector import TinyProjector, write_projector

GIB = 2**30
CARDS = tuple(VirtualDevice(f"CUDA{i}", "Card", "cuda", 890, 24 * GIB, 24 * GIB) for i in range(2))
CUDA_ALIGNMENT, CPU_ALIGNMENT = 128, 32

FIXED = TinyProjector()
DYNAMIC = TinyProjector("lfm2", scale_factor=2)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    folder = tmp_path_factory.mktemp("files")
    dense, moe = write_tiny(folder / "dense.gguf", TINY_DENSE), write_tiny(folder / "moe.gguf", TINY_MOE)
    wider = write_tiny(folder / "wider.gguf", replace(TINY_DENSE, n_embd=256))
    wide = ("attn_q", "ffn_down", "output", "token_embd")
    return {
        "dense": dense,
        "moe": moe,
        "projector": write_projector(folder / "projector.gguf", FIXED),
        "dynamic projector": write_projector(folder / "dynamic.gguf", DYNAMIC),
        "adapter": write_lora(folder / "adapter.gguf", dense),
        "wide adapter": write_lora(folder / "wide.gguf", dense, rank=512, targets=wide),
        "experts' adapter": write_lora(folder / "experts.gguf", moe),
        "adapter of another model": write_lora(folder / "wider-lora.gguf", wider),
        "adapter of another architecture": write_lora(folder / "other.gguf", dense, architecture="llama"),
    }


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    with Worker(CARDS) as started:
        yield started


@pytest.fixture(scope="module")
def host() -> Iterator[Worker]:
    with Worker() as started:
        yield started


@dataclass
class Server:
    """An rpc-server on loopback that writes down what it allocates."""

    endpoint: str
    log: Path
    seen: int = 0

    def allocated(self) -> list[int]:
        """Sizes of the buffers that it has allocated since this was asked last."""
        text = self.log.read_text()
        fresh, self.seen = text[self.seen :], len(text)
        return [int(size) for size in re.findall(r"^\[alloc_buffer\].* size: (\d+) ->", fresh, re.MULTILINE)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("server") / "log"
    process, endpoint = rpc_servers.start(log=log)
    try:
        yield Server(endpoint, log)
    finally:
        rpc_servers.stop(process)


@pytest.fixture(scope="module")
def remote(server: Server) -> Iterator[Worker]:
    with Worker(rpc=[server.endpoint]) as started:
        yield started


def by_place(rows: tuple[Row, ...]) -> dict[str | None, tuple[int, int]]:
    return {row.device: (row.model, row.compute) for row in rows}


def stored(path: Path, alignment: int) -> int:
    """Bytes of a file's tensors, each padded."""
    return sum(-(-int(tensor.n_bytes) // alignment) * alignment for tensor in gguf.GGUFReader(path).tensors)


# --- projectors


def test_a_projector_on_a_card(worker: Worker, files: Mapping[str, Path]) -> None:
    rows = worker.projector(files["projector"], device="CUDA1")
    image = FIXED.image_size**2 * 3 * 4
    places = by_place(rows)
    assert places.keys() == {"CUDA1", None}
    assert places["CUDA1"][0] == stored(files["projector"], CUDA_ALIGNMENT)
    assert places["CUDA1"][1] > image
    # the host holds the image, which is copied to the card
    assert places[None] == (0, image)
    assert [row.is_host for row in rows] == [False, True]


def test_a_projector_on_the_host(worker: Worker, host: Worker, files: Mapping[str, Path]) -> None:
    rows = worker.projector(files["projector"], device=None)
    assert by_place(rows).keys() == {None}
    assert by_place(rows)[None][0] == stored(files["projector"], CPU_ALIGNMENT)
    assert host.projector(files["projector"], device=None) == rows


def test_limits_of_an_image_reach_libmtmd(worker: Worker, files: Mapping[str, Path]) -> None:
    """libmtmd warms up with the largest square image that the limit allows: 256 tokens where there is none."""

    def image(**limits: int) -> int:
        return by_place(worker.projector(files["dynamic projector"], device="CUDA0", **limits))[None][1]

    pixels = (DYNAMIC.patch_size * DYNAMIC.scale_factor) ** 2
    assert image() == 256 * pixels * 3 * 4
    assert image(image_max_tokens=1024) == 1024 * pixels * 3 * 4
    assert image(image_min_tokens=64, image_max_tokens=64) == 64 * pixels * 3 * 4
    assert image(image_min_tokens=100) == image()


def test_flash_attention_of_a_projector(worker: Worker, tmp_path: Path) -> None:
    """Off takes the scores of all patches; a card without kernels for the length of a head is off by itself."""

    def compute(path: Path, **flash: Any) -> int:
        return by_place(worker.projector(path, device="CUDA0", **flash))["CUDA0"][1]

    heads_of_64 = write_projector(tmp_path / "64.gguf", replace(DYNAMIC, n_embd=128, n_head=2))
    heads_of_24 = write_projector(tmp_path / "24.gguf", DYNAMIC)
    assert compute(heads_of_64, flash_attn="off") > compute(heads_of_64, flash_attn="on") == compute(heads_of_64)
    assert compute(heads_of_24, flash_attn="off") == compute(heads_of_24) > compute(heads_of_24, flash_attn="on")


LOAD = """
import json, sys
from fitter.llama.build import library
from fitter.llama.load import projector, real_load as real
from fitter.llama.processes import wire
from fitter.llama.load.backend_devices import registry
from fitter.llama.load.breakdown import counted

library.prepare()
if sys.argv[2]:
    real.add_rpc_server(sys.argv[2])
with counted(really=True) as allocations:
    with projector.loaded(sys.argv[1], "RPC0" if sys.argv[2] else None, registry()):
        pass
print(json.dumps(wire.encode(allocations.rows)))
"""


@cases("projector", "dynamic projector")
def test_a_projector_really_takes_that_on_the_host(name: str, host: Worker, files: Mapping[str, Path]) -> None:
    (predicted,) = host.projector(files[name], device=None)
    assert f'"model": {predicted.used},' in run_python(LOAD, files[name], "").stdout


@cases("projector", "dynamic projector")
def test_a_projector_really_takes_that_on_a_device(
    name: str, remote: Worker, server: Server, files: Mapping[str, Path]
) -> None:
    server.allocated()
    predicted = by_place(remote.projector(files[name], device="RPC0"))
    assert server.allocated() == []
    assert run_python(LOAD, files[name], server.endpoint).returncode == 0
    assert server.allocated() == list(predicted["RPC0"])


ENCODE = """
import ctypes, sys
import llama_cpp
from llama_cpp import mtmd_cpp
from fitter.llama.build import library
from fitter.llama.load import projector, real_load as real
from fitter.llama.load.backend_devices import registry

path, model_path, endpoint, side = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])
native = library.libraries()
real.add_rpc_server(endpoint)
params = llama_cpp.llama_model_default_params()
params.n_gpu_layers = 0
model = llama_cpp.llama_model_load_from_file(model_path.encode(), params)
with projector.loaded(path, "RPC0", registry(), model) as pointer:
    context = native.address(pointer)
    images = (mtmd_cpp.mtmd_bitmap_p_ctypes * 1)(
        mtmd_cpp.mtmd_bitmap_init(side, side, (ctypes.c_uint8 * (side * side * 3))())
    )
    text = mtmd_cpp.mtmd_input_text(text=b"<__media__>", text_len=11, add_special=False, parse_special=True)
    chunks = mtmd_cpp.mtmd_input_chunks_init()
    assert mtmd_cpp.mtmd_tokenize(context, chunks, ctypes.byref(text), images, 1) == 0
    for i in range(mtmd_cpp.mtmd_input_chunks_size(chunks)):
        chunk = mtmd_cpp.mtmd_input_chunks_get(chunks, i)
        if mtmd_cpp.mtmd_input_chunk_get_type(chunk) == mtmd_cpp.MTMD_INPUT_CHUNK_TYPE_IMAGE:
            assert mtmd_cpp.mtmd_encode_chunk(context, chunk) == 0
            print(mtmd_cpp.mtmd_input_chunk_get_n_tokens(chunk))
"""


def test_an_image_of_a_projector_of_one_size_takes_no_more(
    remote: Worker, server: Server, files: Mapping[str, Path]
) -> None:
    predicted = by_place(remote.projector(files["projector"], device="RPC0"))["RPC0"]
    server.allocated()
    done = run_python(ENCODE, files["projector"], files["dense"], server.endpoint, 1000)
    assert (done.returncode, done.stdout) == (0, "4\n"), done.stderr
    assert server.allocated() == list(predicted)


# --- adapters


PLACES: dict[str, tuple[str, tuple[str, ...], dict[str, Any]]] = {
    "adapter": ("dense", ("adapter",), {}),
    "wide": ("dense", ("wide adapter",), {}),
    "two": ("dense", ("adapter", "wide adapter"), {}),
    "the same twice": ("dense", ("adapter", "adapter"), {}),
    "experts": ("moe", ("experts' adapter",), {}),
    "half of the layers": ("dense", ("wide adapter",), {"n_gpu_layers": 2}),
    "four sequences": ("dense", ("wide adapter",), {"n_seq_max": 4, "kv_unified": True}),
    "small micro batch": ("dense", ("wide adapter",), {"n_ubatch": 64}),
}


def measure(worker: Worker, files: Mapping[str, Path], model: str, names: tuple[str, ...], **params: Any) -> Breakdown:
    lora = tuple(Lora(str(files[name])) for name in names)
    return worker.measure(files[model], Params(**{"n_ctx": 2048, **params}, lora=lora))


def load(worker: Worker, files: Mapping[str, Path], model: str, names: tuple[str, ...], **params: Any) -> Breakdown:
    lora = tuple(Lora(str(files[name])) for name in names)
    try:
        return worker.load(files[model], Params(**{"n_ctx": 2048, **params}, lora=lora)).breakdown
    finally:
        worker.unload()


@pytest.mark.parametrize(("model", "names", "params"), PLACES.values(), ids=PLACES.keys())
@pytest.mark.parametrize("place", ["host", "device"])
def test_adapters_really_take_that(
    host: Worker,
    remote: Worker,
    server: Server,
    files: Mapping[str, Path],
    place: str,
    model: str,
    names: tuple[str, ...],
    params: dict[str, Any],
) -> None:
    worker, devices = (host, ()) if place == "host" else (remote, ("RPC0",))
    server.allocated()
    predicted = measure(worker, files, model, names, devices=devices, **params)
    assert server.allocated() == []
    real = load(worker, files, model, names, devices=devices, **params)
    assert real.rows == predicted.rows
    assert real.lora == predicted.lora
    assert len(predicted.lora) == len(names)
    if place == "device":
        taken = server.allocated()
        row = predicted.on("RPC0")
        assert {row.model, row.context, row.compute} <= set(taken)
        adapters = [row.model for rows in predicted.lora for row in rows if row.device == "RPC0"]
        assert set(adapters) <= set(taken) and bool(adapters) == bool(names)


def test_an_adapter_of_scale_zero_is_loaded_and_not_computed_with(remote: Worker, files: Mapping[str, Path]) -> None:
    path, params = files["dense"], Params(n_ctx=2048)
    without = remote.measure(path, params)
    adapter = str(files["wide adapter"])
    idle = remote.measure(path, replace(params, lora=(Lora(adapter, 0.0),)))
    half = remote.measure(path, replace(params, lora=(Lora(adapter, 0.5),)))
    whole = remote.measure(path, replace(params, lora=(Lora(adapter),)))
    assert idle.rows == without.rows != whole.rows == half.rows
    assert idle.lora == half.lora == whole.lora


def test_an_adapter_is_where_its_tensors_are(worker: Worker, files: Mapping[str, Path]) -> None:
    def places(**params: Any) -> dict[str | None, int]:
        (rows,) = measure(worker, files, "dense", ("adapter",), **params).lora
        return {row.device: row.model for row in rows}

    total = stored(files["adapter"], CUDA_ALIGNMENT)
    layer = total // TINY_DENSE.n_layer
    assert places(devices=("CUDA1",)) == {"CUDA1": total}
    # the output is one of the layers that are split, and has no part of the adapter
    assert places(devices=("CUDA0", "CUDA1"), tensor_split=(3.0, 2.0)) == {"CUDA0": 3 * layer, "CUDA1": layer}
    assert places(devices=("CUDA0",), n_gpu_layers=3) == {"CUDA0": 2 * layer, None: 2 * layer}
    assert places(devices=()) == {None: total}


def test_an_adapter_on_a_skeleton(worker: Worker, files: Mapping[str, Path]) -> None:
    params = Params(n_ctx=2048, devices=("CUDA0",), lora=(Lora(str(files["wide adapter"])),))
    own = worker.measure(files["dense"], params)
    assert own == worker.measure(Skeleton((str(files["dense"]),)), params)
    assert own.lora


def test_an_adapter_that_has_changed_is_loaded_again(worker: Worker, files: Mapping[str, Path], tmp_path: Path) -> None:
    path = write_lora(tmp_path / "adapter.gguf", files["dense"], rank=8)
    params = Params(n_ctx=2048, devices=("CUDA0",), lora=(Lora(str(path)),))
    (before,) = worker.measure(files["dense"], params).lora
    write_lora(path, files["dense"], rank=16)
    (after,) = worker.measure(files["dense"], params).lora
    assert after[0].model == 2 * before[0].model


# --- what is no projector and no adapter


def cut(path: Path, source: Path, size: int) -> Path:
    path.write_bytes(source.read_bytes()[:size])
    return path


def broken(files: Mapping[str, Path], name: str, folder: Path) -> Path:
    whole = files["projector"] if name.startswith("projector") else files["adapter"]
    path = folder / "file.gguf"
    if name.endswith("in the tensors"):
        return cut(path, whole, whole.stat().st_size - 1)
    if name.endswith("in the header"):
        return cut(path, whole, 300)
    if name == "garbage":
        path.write_bytes(b"garbage" * 1000)
        return path
    if name == "empty":
        path.write_bytes(b"")
        return path
    if name == "a directory":
        return folder
    return folder / "missing.gguf" if name == "missing" else files[name]


NO_FILE = {
    "garbage": "invalid magic characters: 'garb'",
    "empty": "failed to read magic",
    "missing": "missing.gguf cannot be read: No such file or directory",
    "a directory": "is a directory; give the GGUF file in it",
}
NO_PROJECTOR = {
    **NO_FILE,
    "projector, cut in the tensors": "the last 1 bytes of its tensors are missing",
    "projector, cut in the header": "exceeds remaining file size",
    "dense": "is not a multimodal projector",
    "adapter": "is not a multimodal projector",
}


@cases(*NO_PROJECTOR.items())
def test_no_projector(name: str, message: str, worker: Worker, files: Mapping[str, Path], tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=message) as raised:
        worker.projector(broken(files, name, tmp_path), device="CUDA0")
    assert "\n" not in str(raised.value)
    assert worker.projector(files["projector"], device="CUDA0")


NO_ADAPTER = {
    **NO_FILE,
    "adapter, cut in the tensors": "the last 1 bytes of its tensors are missing",
    "adapter, cut in the header": "failed to read (key-value pairs|tensor info)",
    "dense": "is not a LoRA adapter",
    "projector": "is not a LoRA adapter",
    "adapter of another model": "tensor 'blk.0.attn_q.weight' has incorrect shape",
    "adapter of another architecture": "model arch and LoRA arch mismatch",
    "experts' adapter": "arch mismatch",
}


@cases(*NO_ADAPTER.items())
def test_no_adapter(name: str, message: str, worker: Worker, files: Mapping[str, Path], tmp_path: Path) -> None:
    wrong = Lora(str(broken(files, name, tmp_path)))
    right = Lora(str(files["adapter"]))
    for lora in ((wrong,), (right, wrong)):
        with pytest.raises(ModelError, match=message) as raised:
            worker.measure(files["dense"], Params(n_ctx=2048, lora=lora))
        assert str(raised.value).startswith(wrong.path)
        assert "\n" not in str(raised.value)
    assert len(worker.measure(files["dense"], Params(n_ctx=2048, lora=(right,))).lora) == 1


def test_a_projector_with_a_tensor_missing(worker: Worker, tmp_path: Path) -> None:
    """The whole file is there, and libmtmd itself says what is wrong with it."""
    path = write_projector(tmp_path / "projector.gguf", replace(FIXED, kind="lfm2"))
    data = path.read_bytes()
    path.write_bytes(data.replace(b"mm.1.bias", b"mm.9.bias"))
    with pytest.raises(ModelError, match=r"unable to find tensor mm\.1\.bias$"):
        worker.projector(path, device="CUDA0")


def test_devices_and_limits_that_cannot_be(worker: Worker, files: Mapping[str, Path]) -> None:
    with pytest.raises(UsageError, match="unknown device 'CUDA9'; there are: CUDA0, CUDA1"):
        worker.projector(files["projector"], device="CUDA9")
    with pytest.raises(UsageError, match="image_max_tokens is 8, less than image_min_tokens \\(9\\)"):
        worker.projector(files["projector"], device=None, image_min_tokens=9, image_max_tokens=8)


# One with all functions and another struct.
ANOTHER = """
struct mtmd_context_params { bool use_gpu; int more; char rest[256]; };
extern "C" {
mtmd_context_params mtmd_context_params_default() { return {true, -1, {1, 2, 3}}; }
void mtmd_default_marker() {}
void mtmd_log_set() {}
void mtmd_init_from_file() {}
void mtmd_free() {}
}
void mtmd_get_memory_usage(const char *, mtmd_context_params) {}
"""


def compile_library(path: Path, source: str, linked: bool) -> None:
    spec = importlib.util.find_spec("llama_cpp")
    assert spec is not None and spec.origin is not None
    libraries = Path(spec.origin).parent / "lib"
    needed = (
        ["-Wl,--no-as-needed", *(str(libraries / f"lib{name}.so.0") for name in ("llama", "ggml"))] if linked else []
    )
    command = ["c++", "-shared", "-fPIC", "-x", "c++", "-", "-x", "none", *needed, "-o", str(path)]
    subprocess.run(command, input=source, text=True, check=True, timeout=60)


@named_cases(
    ("none", None, "a projector needs libmtmd, but there is none in .*: pip install -U llama-cpp-python"),
    ("no library", "", "libmtmd cannot be loaded .*: pip install -U llama-cpp-python"),
    ("of nothing", "int unused;", "belongs to another libllama than the loaded one: pip install -U llama-cpp-python"),
    (
        "without its functions",
        "int llama;",
        r"is not the libmtmd of llama.cpp .*: it has no mtmd_context_params_default; pip install -U llama-cpp-python",
    ),
    (
        "of another version",
        ANOTHER,
        r"is not the libmtmd of llama.cpp \d.*: its mtmd_context_params is another one; pip install -U llama-cpp",
    ),
)
def test_a_libmtmd_that_is_none(
    source: str | None, message: str, files: Mapping[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if source == "":
        (tmp_path / "libmtmd.so").write_text("no library")
    elif source is not None:
        compile_library(tmp_path / "libmtmd.so", source, linked="llama" in source or "mtmd" in source)
    monkeypatch.setenv("MTMD_CPP_LIB", str(tmp_path))
    with Worker(CARDS) as started:
        with pytest.raises(LibraryError, match=message):
            started.projector(files["projector"], device="CUDA0")
        # and nothing else needs it
        assert started.measure(files["dense"], Params(n_ctx=2048, lora=(Lora(str(files["adapter"])),))).lora
