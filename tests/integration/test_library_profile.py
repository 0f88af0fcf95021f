"""The profile ``library``: the user's own libggml-cuda.so on a CUDA runtime without a GPU.

What is linked how, and what the runtime says, is tried with small libraries made here. The real thing, the host code of
ggml-cuda as the oracle builds it, is tried where the oracle is built (``make oracle``), and else among the slow tests.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import fitter
from fitter.api.call_worker import answering
from fitter.errors import LibraryError, UsageError
from fitter.llama.build import elf, virtual_backends
from fitter.llama.build.build_folder import may_have_cuda
from fitter.llama.build.library import cudart_path
from fitter.llama.build.virtual_backends import Answering, CudaLibrary, find_cuda_library
from fitter.llama.client import Worker
from fitter.llama.types import Params, VirtualDevice, describe
from tests.support.cases import cases, named_cases
from tests.support.command import run_python
from tests.support.cuda_builds import compile_library, cuda_build
from tests.support.llama_builds import fetched
from tools.comparisons.cuda_reference import Load, difference, loads, spread, write_model
from tools.models import shapes
from tools.oracle import build as oracle
from tools.oracle import operations

ROOT = Path(__file__).parents[2]
ORACLE = ROOT / "build" / "oracle"
needs_oracle = [] if (ORACLE / oracle.NAME).is_file() else [pytest.mark.slow]

CARDS = (
    VirtualDevice("CUDA0", "First, of two", "cuda", 890, 24 << 30, 23 << 30),
    VirtualDevice("CUDA1", "Second", "cuda", 1210, 8 << 30, 7 << 30),
)


# ---- which library, and what it is


PLUGIN = "void cudaMalloc(void); void ggml_backend_init(void) { cudaMalloc(); }"
LINKED = "void cudaMalloc(void); void ggml_backend_cuda_reg(void) { cudaMalloc(); }"


@named_cases(
    ("plugin", PLUGIN, "libcudart.so.12", 12, True),
    ("linked", LINKED, "libcudart.so.13", 13, False),
    ("CUDA 11", LINKED, "libcudart.so.11.0", 11, False),
)
def test_what_a_library_is(code: str, soname: str, version: int, plugin: bool, tmp_path: Path) -> None:
    path = cuda_build(tmp_path, code, soname)
    expected = CudaLibrary(path, (soname,), version, plugin)
    assert find_cuda_library(tmp_path) == expected
    assert find_cuda_library(path) == expected


@named_cases(
    ("another library", "void f(void) {}", "libcudart.so.12", "is not a CUDA backend"),
    ("static", "void ggml_backend_init(void) {}", None, "GGML_STATIC"),
    ("newer", LINKED + "void cudaNovelty(void); void g(void) { cudaNovelty(); }", "libcudart.so.13", "(cudaNovelty)"),
)
def test_what_cannot_be_used(code: str, soname: str | None, says: str, tmp_path: Path) -> None:
    cuda_build(tmp_path, code, soname)
    with pytest.raises(LibraryError) as caught:
        find_cuda_library(tmp_path)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_without_a_cuda_build_the_error_names_the_fix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GGML_BACKEND_PATH", raising=False)
    monkeypatch.setenv("LLAMA_CPP_LIB_PATH", str(tmp_path))
    model = shapes.write("llama-3.1-8b", tmp_path, vocab=False)
    with pytest.raises(LibraryError, match=r'no libggml-cuda.so in .*CMAKE_ARGS="-DGGML_CUDA=on".*library:DIRECTORY'):
        fitter.measure(model, gpus=["rtx-4090"], profile="library")
    with pytest.raises(LibraryError, match="nowhere does not exist: install"):
        fitter.measure(model, gpus=["rtx-4090"], profile="library:nowhere")


@named_cases(("lib", "LLAMA_CPP_LIB_PATH", ""), ("plugin", "GGML_BACKEND_PATH", virtual_backends.CUDA_BACKEND))
def test_the_environment_says_where_it_is(
    variable: str, value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = cuda_build(tmp_path, LINKED)
    for name in ("LLAMA_CPP_LIB_PATH", "GGML_BACKEND_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, str(tmp_path / value))
    assert find_cuda_library().path == path


@named_cases(
    ("another", "metal", ["rtx-4090"], "unknown profile 'metal'"),
    ("rules without cards", "cuda", [], "'cuda' is for virtual cards: describe them"),
    ("rules for no NVIDIA card", "cuda", ["metal:64GiB"], "'cuda' is for NVIDIA cards, but MTL0"),
    ("no cards", "library", [], "describe them"),
    ("no NVIDIA card", "library", ["rtx-4090", "vulkan:24GiB"], "Vulkan0"),
)
def test_what_makes_no_sense(profile: str, gpus: list[str], says: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=says):
        fitter.fit(tmp_path / "m.gguf", gpus=gpus, profile=profile)


# ---- a build's own, without being asked


@pytest.fixture(scope="module")
def prebuilt() -> Path:
    """A build with plugins, for processors only."""
    return fetched("v0.5.0")


def with_cuda(prebuilt: Path, directory: Path) -> Path:
    """Copy the build, with a libggml-cuda.so beside its libllama."""
    shutil.copytree(prebuilt, directory)
    cuda_build(directory, PLUGIN)
    return directory


ONE_OTHER = (*CARDS, VirtualDevice("Vulkan0", "Another", "vulkan", 0, 8 << 30, 7 << 30))


def test_its_own_cuda_backend_answers(prebuilt: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build = with_cuda(prebuilt, tmp_path / "build")
    own = find_cuda_library(build)
    assert answering(CARDS, None, str(build)) == Answering(own)
    assert answering(CARDS, "library", str(build)) == Answering(own)
    assert answering(CARDS, None, str(prebuilt)) is None
    assert answering((), None, str(build)) is None
    assert answering(CARDS, "cuda", str(build)) is None
    assert answering(ONE_OTHER[2:], None, str(build)) is None
    monkeypatch.setenv("FITTER_LLAMA_CPP", str(build))
    assert answering(CARDS, None, None) == Answering(own)
    assert answering(CARDS, None, "python") is None
    with pytest.raises(LibraryError, match=rf"^{prebuilt} has no CUDA backend \(libggml-cuda.so\): name a directory"):
        answering(CARDS, "library", str(prebuilt))


def test_why_its_own_cuda_backend_does_not_answer(prebuilt: Path, tmp_path: Path) -> None:
    build = with_cuda(prebuilt, tmp_path / "build")
    found = answering(ONE_OTHER, None, str(build))
    assert found is not None and found.library is None
    assert found.why == f"{build / virtual_backends.CUDA_BACKEND} answers for NVIDIA cards only"


def test_llama_cpp_python_without_cuda_is_not_looked_into(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(virtual_backends, "find", None)
    assert not may_have_cuda("python")
    assert answering(CARDS, None, None) is None


# ---- the runtime


def ask_runtime(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run Python code that has the runtime as ``cuda``."""
    start = f"import ctypes, struct; cuda = ctypes.CDLL({str(cudart_path())!r})\n"
    return run_python(start + code, FITTER_CUDART_DEVICES=describe(CARDS), **variables)


# Offsets of cudaDeviceProp in CUDA's headers: 12.9 and 13.0 (and 13.5, the same).
OFFSETS = {
    "cudaGetDeviceProperties_v2": {"multiProcessorCount": 388, "integrated": 396, "pciBusID": 584, "optin": 696},
    "cudaGetDeviceProperties": {"multiProcessorCount": 384, "integrated": 388, "pciBusID": 568, "optin": 672},
}


@cases(
    ("cudaGetDeviceProperties_v2", "cudaGetDeviceProperties_v2", "12"),
    ("cudaGetDeviceProperties", "cudaGetDeviceProperties", "13"),
    ("cudaGetDeviceProperties", "cudaGetDeviceProperties_v2", "11"),
)
def test_properties_are_where_cuda_has_them(function: str, layout: str, version: str) -> None:
    offsets = OFFSETS[layout]
    code = (
        "p = ctypes.create_string_buffer(b'\\xff' * 1032, 1032)\n"
        f"assert cuda.{function}(p, 1) == 0 and cuda.{function}(p, 2) == 101\n"
        "print(p.value.decode(), *struct.unpack_from('<QQ', p, 288), *struct.unpack_from('<ii', p, 360))\n"
        f"print(*(struct.unpack_from('<i', p, i)[0] for i in {list(offsets.values())}))"
    )
    done = ask_runtime(code, FITTER_CUDART_VERSION=version)
    assert done.stdout.splitlines() == [f"Second {8 << 30} {48 << 10} 12 1", f"128 0 2 {99 << 10}"], done.stderr


def test_memory_is_a_reservation() -> None:
    code = (
        "n, f, t, p = ctypes.c_int(), ctypes.c_size_t(), ctypes.c_size_t(), ctypes.c_void_p()\n"
        "cuda.cudaGetDeviceCount(ctypes.byref(n)); cuda.cudaMemGetInfo(ctypes.byref(f), ctypes.byref(t))\n"
        "assert cuda.cudaMalloc(ctypes.byref(p), ctypes.c_size_t(1 << 40)) == 0 and p.value\n"
        "assert cuda.cudaMemset(p, 0, ctypes.c_size_t(1 << 40)) == 0 and cuda.cudaFree(p) == 0\n"
        "print(n.value, f.value, t.value)\n"
        "peak = next(line for line in open('/proc/self/status') if line.startswith('VmHWM'))\n"
        "assert int(peak.split()[1]) < 100_000, peak"
    )
    done = ask_runtime(code)
    assert (done.stdout, done.stderr) == (f"2 {23 << 30} {24 << 30}\n", "")


@cases("cudaLaunchKernel", "cublasSgemm_v2", "cuMemCreate", "ncclAllReduce")
def test_what_computes_is_a_trap(name: str) -> None:
    done = ask_runtime(f"cuda.{name}()")
    assert done.returncode == -6
    assert done.stderr == f"fitter: error: {name} was called, but a virtual GPU computes nothing\n"


def test_the_runtime_takes_the_place_of_cuda_whatever_the_search_path(tmp_path: Path) -> None:
    # DT_RPATH is searched before LD_LIBRARY_PATH.
    path = cuda_build(tmp_path / "build", LINKED)
    search = ("-Wl,--disable-new-dtags", f"-Wl,-rpath,{path.parent}")
    own = ("-Wl,--no-as-needed", path.parent / "libcudart.so.12", *search)
    compile_library(path, LINKED, *own)
    (tmp_path / "links").mkdir()
    library = find_cuda_library(path)
    environment = os.environ | library.environment(tmp_path / "links", describe(CARDS))
    code = f"import ctypes; ctypes.CDLL({str(path)!r}); print(open('/proc/self/maps').read())"
    done = subprocess.run([sys.executable, "-I", "-c", code], env=environment, capture_output=True, text=True)
    assert done.stderr == ""
    assert str(cudart_path()) in done.stdout
    assert "libcudart.so.12" not in done.stdout


# ---- ggml-cuda itself


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory with the oracle: a libggml-cuda.so that is a plugin."""
    if (ORACLE / oracle.NAME).is_file():
        return ORACLE
    directory = tmp_path_factory.mktemp("oracle")
    oracle.build(source(), directory, operations.LIBRARIES / "libggml-base.so.0")
    return directory


def source() -> Path:
    fetch = ROOT / "vendor" / "llama.cpp" / "fetch.py"
    done = subprocess.run([sys.executable, str(fetch)], capture_output=True, text=True, check=True)
    return Path(done.stdout.strip())


def link_again(real: Path, directory: Path) -> Path:
    """The same as an ordinary build has it: no plugin, linked to ggml."""
    shutil.copytree(operations.LIBRARIES, directory, dirs_exist_ok=True)
    (directory / "map").write_text("{ global: *; local: ggml_backend_init; };")
    runtime = next(real.glob("libcudart.so.*"))
    oracle.run(
        *("c++", "-shared", "-o", directory / oracle.NAME, *(real / f"{name}.o" for name in oracle.SOURCES)),
        *(real / "allreduce.o", real / "traps.o", runtime, directory / "libggml-base.so.0"),
        *(f"-Wl,--version-script={directory / 'map'}", "-Wl,-soname,libggml-cuda.so.0"),
    )
    shutil.copy(directory / oracle.NAME, directory / "libggml-cuda.so.0")
    return directory


SAMPLE = [load for load in spread(loads("published"), 97) if not load.environment]


def check(library: CudaLibrary, models: Path, sample: list[Load]) -> None:
    with Worker() as worker:
        for load in sample:
            worker.configure(load.devices, library)
            assert not difference(worker, models, load)


@pytest.mark.parametrize("_", [pytest.param(None, marks=needs_oracle, id="oracle")])
def test_loads_are_what_they_are_on_real_cuda(_: None, real: Path, tmp_path: Path) -> None:
    assert any(load.rows is None for load in SAMPLE) and len({load.model for load in SAMPLE}) > 3
    check(find_cuda_library(real), tmp_path, SAMPLE)


@pytest.mark.parametrize("_", [pytest.param(None, marks=needs_oracle, id="oracle")])
def test_devices_and_plan(_: None, real: Path, tmp_path: Path) -> None:
    with Worker(CARDS, library=find_cuda_library(real)) as worker:
        devices = worker.devices()
        assert [(d.name, d.description, d.total, d.free, d.virtual, d.backend) for d in devices] == [
            (card.name, card.description, card.total, card.free, True, "CUDA") for card in CARDS
        ]
        assert worker.layout(write_model("qwen3-0.6b", tmp_path), Params(n_ctx=512)).alignment == 128
    model = write_model("llama31-8b", tmp_path)
    one, other = (
        fitter.fit(model, gpus=["rtx-4090", "8GiB"], n_ctx=16384, profile=name) for name in (f"library:{real}", None)
    )
    assert one.fits and one.params == other.params
    assert one.to_dict()["devices"] == other.to_dict()["devices"]


@pytest.mark.slow
def test_a_cuda_build_of_libllama(real: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # libggml.so of a CUDA build: its registry is compiled to know ggml-cuda, and it is linked to it.
    directory = link_again(real, tmp_path / "build")
    ggml = source() / "ggml"
    oracle.run(
        *("c++", "-std=c++17", "-O1", "-fPIC", "-w", "-shared", "-DGGML_USE_CUDA", "-DGGML_USE_CPU", "-DGGML_SHARED"),
        *("-DGGML_BUILD", "-DGGML_BACKEND_SHARED", f"-I{ggml / 'include'}", f"-I{ggml / 'src'}"),
        *(ggml / "src" / "ggml-backend-reg.cpp", ggml / "src" / "ggml-backend-dl.cpp"),
        *(directory / f"{name}.so.0" for name in ("libggml-cuda", "libggml-cpu", "libggml-base")),
        *("-Wl,-soname,libggml.so.0", "-Wl,-rpath,$ORIGIN", "-o", directory / "libggml.so.0"),
    )
    shutil.copy(directory / "libggml.so.0", directory / "libggml.so")
    monkeypatch.setenv("LLAMA_CPP_LIB_PATH", str(directory))
    check(find_cuda_library(), tmp_path, SAMPLE)
    with (
        Worker(CARDS, library=find_cuda_library(real)) as worker,
        pytest.raises(LibraryError, match="already has another CUDA backend"),
    ):
        worker.devices()


def test_a_backend_that_ggml_refuses(tmp_path: Path) -> None:
    cuda_build(tmp_path, "void cudaMalloc(void); void * ggml_backend_init(void) { cudaMalloc; return 0; }")
    library = find_cuda_library(tmp_path)
    with Worker(CARDS, library=library) as worker, pytest.raises(LibraryError, match="cannot be used with"):
        worker.devices()


def test_what_is_exported_is_all_that_ctypes_can_call() -> None:
    defined = elf.read(cudart_path()).defined
    assert {"cudaMalloc", "cudaLaunchKernel", "__cudaRegisterFatBinary", "cublasCreate_v2"} <= defined
    runtime = ctypes.CDLL(str(cudart_path()))
    assert all(hasattr(runtime, name) for name in defined)
