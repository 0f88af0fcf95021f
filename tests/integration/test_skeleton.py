"""The skeleton of a model: llama.cpp plans on it as on the model itself, and nothing of it is ever to be found."""

from __future__ import annotations

import functools
import os
import platform
import resource
import signal
import stat
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from fitter.api import Plan
from fitter.errors import LlamaCppError, ModelError
from fitter.llama.client import Worker
from fitter.llama.header.read_header import Headers, header_of
from fitter.llama.types import Params, Skeleton, TensorBuftOverride, VirtualDevice
from fitter.machine.gpu import parse_gpus
from fitter.model.files import source
from tests.support.cases import cases, named_cases
from tests.support.command import run_python
from tools.architectures import compare
from tools.architectures.compare import Machine
from tools.models import shapes, tiny
from tools.models.shapes import SHAPES, write, write_split

CARDS = [VirtualDevice(f"CUDA{i}", "Card", "cuda", 890, 400 * 2**30, 400 * 2**30) for i in range(2)]

PLACEMENTS: dict[str, Params] = {
    "all on one device": Params(n_ctx=4096, devices=("CUDA0",)),
    "in part on two devices": Params(n_ctx=2048, n_gpu_layers=11, tensor_split=(3.0, 1.0)),
    "nothing offloaded": Params(n_ctx=512, n_gpu_layers=0, devices=()),
    "tensors on the host": Params(
        n_ctx=1024, tensor_buft_overrides=(TensorBuftOverride(r"blk\.[0-7]\.ffn_(up|down)", "CPU"),)
    ),
    "other caches": Params(n_ctx=1024, type_k="q8_0", type_v="q8_0", flash_attn="on", n_ubatch=64),
}


@functools.cache
def split_model(name: str, directory: Path, n_files: int, vocab: bool = True) -> Path:
    return write_split(name, directory, n_files, vocab)


def skeleton_of(path: Path) -> Skeleton:
    return Skeleton(tuple(str(file) for file in source.model_files(path)))


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    with Worker(CARDS) as started:
        yield started


# --- the same plan

MODELS: dict[str, Callable[[Path], Path]] = {
    "dense": lambda directory: write("llama-3.1-8b", directory),
    "mixture of experts": lambda directory: write("qwen3-30b-a3b", directory),
    "latent attention": lambda directory: write("deepseek-v3.1", directory),
    "sliding window": lambda directory: write("gemma3-12b", directory),
    "recurrent": lambda directory: write("nemotron-h-9b", directory),
    "split": lambda directory: split_model("gpt-oss-20b", directory, 3),
    "without a vocabulary": lambda directory: write("llama-3.1-8b", directory, vocab=False),
    "split without a vocabulary": lambda directory: split_model("qwen3-32b", directory, 2, vocab=False),
}


@pytest.mark.parametrize("params", PLACEMENTS.values(), ids=PLACEMENTS.keys())
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS.keys())
def test_it_takes_what_the_model_takes(
    worker: Worker, directory: Path, make: Callable[[Path], Path], params: Params
) -> None:
    path = make(directory)
    assert worker.measure(skeleton_of(path), params) == worker.measure(path, params)


@cases(MODELS)
def test_it_is_described_as_the_model(make: Callable[[Path], Path], worker: Worker, directory: Path) -> None:
    path, params = make(directory), Params(n_ctx=1024)
    assert worker.layout(skeleton_of(path), params) == worker.layout(path, params)
    assert worker.model_info(skeleton_of(path), params) == worker.model_info(path, params)


def test_it_survives_other_devices_and_a_new_process(directory: Path) -> None:
    path = write("llama-3.1-8b", directory)
    params = Params(n_ctx=1024)
    with Worker(CARDS) as worker:
        expected = worker.measure(skeleton_of(path), params)
        worker.configure(CARDS[:1])
        alone = worker.measure(skeleton_of(path), params)
        assert alone.devices == ("CUDA0",)
        worker.configure(CARDS)
        assert worker.pid is not None
        os.kill(worker.pid, signal.SIGKILL)
        assert worker.measure(skeleton_of(path), params) == expected


def test_a_file_that_changes_has_another_skeleton(worker: Worker, tmp_path: Path) -> None:
    path = write("llama-3.1-8b", tmp_path, vocab=False)
    before = worker.model_info(skeleton_of(path), Params())
    os.replace(write("qwen3-30b-a3b", tmp_path, vocab=False), path)
    after = worker.model_info(skeleton_of(path), Params())
    assert (before.n_layer, after.n_layer) == (32, 48)


# --- what is in it


@pytest.fixture
def headers() -> Iterator[Headers]:
    made = Headers()
    yield made
    made.close()


KINDS: dict[str, Any] = {
    "uint8": 200,
    "int8": -100,
    "uint16": 65535,
    "uint32": 2**32 - 1,
    "int64": -(2**63),
    "float32": 0.5,
    "float64": 1e300,
    "bool": True,
    "string": "grüße\nzwei",
}


def write_every_kind(path: Path, first: bool = True, n_files: int = 1) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    if first:
        for kind, value in KINDS.items():
            getattr(writer, f"add_{kind}")(f"a.{kind}", value)
        for name, values in (("names", ["x", "", "y"]), ("numbers", [1, -2, 3]), ("flags", [True, False])):
            writer.add_array(f"a.{name}", values)
        writer.add_uint32("a.tokenizer.split", 5)
        writer.add_custom_alignment(64)
        writer.add_tokenizer_model("gpt2")
        writer.add_token_list(["a", "b", "c"])
        writer.add_token_types([1, 1, 3])
        writer.add_token_merges(["a b"])
        writer.add_bos_token_id(1)
        writer.add_token_type_count(2)
        writer.add_chat_template("{{ messages }}")
        writer.add_uint32("llama.vocab_size", 99)
    if n_files > 1:
        writer.add_uint16("split.no", 0 if first else 1)
        writer.add_uint16("split.count", n_files)
        writer.add_int32("split.tensors.count", 2 * n_files)
    name = "one" if first else "two"
    writer.add_tensor_info(f"{name}.a", (3,), np.dtype("float32"), 12, gguf.GGMLQuantizationType.F32)
    writer.add_tensor_info(f"{name}.b", (5, 512), np.dtype("float32"), 5 * 288, gguf.GGMLQuantizationType.Q4_K)
    return written(writer, path)


def written(writer: gguf.GGUFWriter, path: Path) -> Path:
    """Write the header, and bytes for its tensors that are not there."""
    for write_part in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_ti_data_to_file):
        write_part()
    writer.close()
    os.truncate(path, path.stat().st_size + 4096)
    return path


def contents(path: str) -> dict[str, Any]:
    """Metadata as the gguf package reads it, with types."""
    fields = gguf.GGUFReader(path).fields
    return {key: (field.types, field.contents()) for key, field in fields.items() if not key.startswith("GGUF.")}


@named_cases(("not read before", False), ("read before", True))
def test_all_but_the_tokenizer_and_the_split_stays(read_first: bool, headers: Headers, tmp_path: Path) -> None:
    files = (
        write_every_kind(tmp_path / "a-00001-of-00002.gguf", n_files=2),
        write_every_kind(tmp_path / "a-00002-of-00002.gguf", first=False, n_files=2),
    )
    if read_first:
        for file in files:
            headers.read(str(file))
    made = headers.skeleton(Skeleton(tuple(map(str, files))))

    before, after = contents(str(files[0])), contents(made)
    uint32 = [gguf.GGUFValueType.UINT32]
    assert after.pop("tokenizer.ggml.model")[1] == "no_vocab"
    assert after.pop("tokenizer.ggml.token_type_count") == (uint32, 2)
    assert after.pop("llama.vocab_size") == (uint32, 3)
    other = ("tokenizer.", "split.", "llama.vocab_size")
    assert after == {key: value for key, value in before.items() if not key.startswith(other)}
    assert before["a.tokenizer.split"] == after["a.tokenizer.split"]

    found = gguf.GGUFReader(made).tensors
    kinds = ((".a", "F32", (3,), 12), (".b", "Q4_K", (512, 5), 1440))
    tensors = [(name + part, *rest) for name in ("one", "two") for part, *rest in kinds]
    assert [(t.name, t.tensor_type.name, tuple(t.shape), t.n_bytes) for t in found] == tensors
    assert os.stat(made).st_size >= found[-1].data_offset + found[-1].n_bytes


def test_a_vocabulary_that_is_none_keeps_its_size(headers: Headers, directory: Path) -> None:
    path = write("qwen3-32b", directory, vocab=False)
    size = headers.read(str(path)).metadata["qwen3.vocab_size"]
    made = headers.skeleton(Skeleton((str(path),)))
    assert size == SHAPES["qwen3-32b"].n_vocab
    assert headers.read(made).metadata["qwen3.vocab_size"] == size


def test_no_file_is_read_twice(headers: Headers, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    really_parse = headers.parse

    def count(path: str) -> Any:
        opened.append(path)
        return really_parse(path)

    monkeypatch.setattr(headers, "parse", count)
    files = skeleton_of(split_model("gpt-oss-20b", directory, 3)).files
    other = str(write("llama-3.1-8b", directory))
    for file in files:
        headers.read(file)
    assert len(headers.parsed) == 3
    first = headers.skeleton(Skeleton(files))
    assert headers.skeleton(Skeleton(files)) == first
    assert opened == list(files)
    assert not headers.parsed  # nor kept longer than needed
    for _ in range(3):
        headers.read(other)
    assert list(headers.parsed) == [other]


def test_tokens_are_not_kept(headers: Headers, directory: Path) -> None:
    path = str(write("llama-3.1-8b", directory))
    found = headers.read(path)
    ((_, parsed),) = headers.parsed.values()
    kept = header_of(headers.library, parsed)
    tokens = "tokenizer.ggml.tokens"
    assert tokens in found.metadata
    assert tokens not in kept.metadata


# --- nobody sees it


def test_it_is_private_and_small(headers: Headers, directory: Path) -> None:
    made = headers.skeleton(skeleton_of(write("kimi-k2", directory)))
    status = os.stat(made)
    assert stat.S_IMODE(status.st_mode) == 0o600
    assert status.st_size > 500 * 10**9
    assert status.st_blocks * 512 < 300_000
    assert not os.get_inheritable(int(Path(made).name))
    assert "(deleted)" in os.readlink(made)
    headers.close()
    assert not os.path.exists(made)


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty directory that is everybody's directory for temporary files."""
    path = tmp_path / "temporary"
    path.mkdir()
    monkeypatch.setenv("TMPDIR", str(path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return path


def test_nothing_is_left_or_seen(temporary: Path, directory: Path, tmp_path: Path) -> None:
    path = write("llama-3.1-8b", directory)
    before = sorted(os.listdir(directory))
    with Worker(CARDS) as worker:
        worker.header(path)
        worker.measure(skeleton_of(path), Params(n_ctx=512))
        assert os.listdir(temporary) == []
        with pytest.raises(LlamaCppError, match=r"none\.gguf"):
            worker.measure(Skeleton((str(tmp_path / "none.gguf"),)), Params())
        assert os.listdir(temporary) == []
        worker.measure(skeleton_of(path), Params(n_ctx=512))
        assert worker.pid is not None
        os.kill(worker.pid, signal.SIGKILL)
        assert worker.devices()
        assert os.listdir(temporary) == []
    assert os.listdir(temporary) == []
    assert sorted(os.listdir(directory)) == before


_MEMFD_CREATE = {"x86_64": 319, "aarch64": 279}

_WITHOUT_MEMORY_FILES = """
import ctypes, os, struct, sys
libc = ctypes.CDLL(None, use_errno=True)
# seccomp: this system call fails with ENOSYS, all others are allowed
program = b"".join(struct.pack("HBBI", *line) for line in (
    (0x20, 0, 0, 0), (0x15, 0, 1, int(sys.argv[1])), (0x06, 0, 0, 0x00050026), (0x06, 0, 0, 0x7FFF0000)))
code = ctypes.create_string_buffer(program, len(program))
class Filter(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("code", ctypes.c_void_p)]
assert libc.prctl(38, 1, 0, 0, 0) == 0
assert libc.prctl(22, 2, ctypes.byref(Filter(4, ctypes.addressof(code))), 0, 0) == 0, ctypes.get_errno()
from fitter.llama.load.backend_devices import register_virtual, registry
from fitter.llama.header.read_header import Headers
from fitter.llama.load.loader import Loader
from fitter.llama.types import Params, Skeleton
headers = Headers()
skeleton = Skeleton((sys.argv[2],))
made = headers.skeleton(skeleton)
status = os.stat(made)
print(os.readlink(made), oct(status.st_mode), os.listdir(os.environ["TMPDIR"]), status.st_blocks * 512 < 10**6)
register_virtual("CUDA0,cuda,890,99000000000,99000000000,x")
loader = Loader(registry(True), headers)
print(loader.measure(skeleton, Params(n_ctx=512)) == loader.measure(sys.argv[2], Params(n_ctx=512)))
"""


def without_memory_files(path: Path, temporary: Path) -> subprocess.CompletedProcess[str]:
    return run_python(_WITHOUT_MEMORY_FILES, _MEMFD_CREATE[platform.machine()], path, TMPDIR=str(temporary))


def test_without_any_place_for_a_file_it_is_an_error(tmp_path: Path, directory: Path) -> None:
    result = without_memory_files(write("llama-3.1-8b", directory), tmp_path / "nowhere")
    no_file = "no temporary file can be created for a copy of its header (set TMPDIR to another directory)"
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1].endswith(f"can be made: {no_file}: No such file or directory")


def test_without_files_of_memory_it_has_no_name_either(temporary: Path, directory: Path) -> None:
    result = without_memory_files(write("llama-3.1-8b", directory), temporary)
    assert result.returncode == 0, result.stderr
    described, same = result.stdout.splitlines()
    name, *rest = described.rsplit(" ", 3)
    assert name.startswith(str(temporary)) and name.endswith("(deleted)")
    assert rest == ["0o100600", "[]", "True"]
    assert same == "True"
    assert os.listdir(temporary) == []


# --- a model that has none


def write_bare(path: Path, build: Callable[[gguf.GGUFWriter], None], tensor: str = "one") -> str:
    writer = gguf.GGUFWriter(path, "llama")
    build(writer)
    writer.add_tensor_info(tensor, (3,), np.dtype("float32"), 12, gguf.GGMLQuantizationType.F32)
    return str(written(writer, path))


def with_tokens(writer: gguf.GGUFWriter) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["a", "b"])


def with_text_for_tokens(writer: gguf.GGUFWriter) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_string("tokenizer.ggml.tokens", "a")


@named_cases(
    ("no file", lambda d: (), "files"),
    ("a file that is not there", lambda d: (str(d / "none"),), "No such file"),
    ("no tokenizer", lambda d: (write_bare(d / "a", lambda w: w.add_vocab_size(4)),), "how many tokens"),
    ("tokens that are no list", lambda d: (write_bare(d / "a", with_text_for_tokens),), "how many tokens"),
    (
        "a tensor in two files",
        lambda d: (write_bare(d / "a", with_tokens), write_bare(d / "b", lambda w: None)),
        "tensor 'one' is in two",
    ),
    ("not enough to load", lambda d: (write_bare(d / "a", with_tokens),), "block_count|key not found"),
)
def test_no_skeleton_is_an_error_and_no_crash(
    files: Callable[[Path], tuple[str, ...]], message: str, worker: Worker, tmp_path: Path
) -> None:
    worker.devices()
    pid = worker.pid
    with pytest.raises(LlamaCppError, match=message) as caught:
        worker.write_skeleton(Skeleton(files(tmp_path)), tmp_path / "skeleton")
        worker.measure(tmp_path / "skeleton", Params())
    assert type(caught.value) is LlamaCppError
    assert len(str(caught.value).splitlines()) == 1
    assert pid is not None and worker.pid == pid


def test_a_limit_on_the_length_of_files_is_an_error(headers: Headers, directory: Path) -> None:
    skeleton = skeleton_of(write("llama-3.1-8b", directory))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**30, hard))
    try:
        with pytest.raises(LlamaCppError, match="cannot be as long as the model: File too large"):
            headers.skeleton(skeleton)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert os.path.exists(headers.skeleton(skeleton))


# --- how a header is read


def with_kinds_of_tokens(n: int) -> Callable[[gguf.GGUFWriter], None]:
    def build(writer: gguf.GGUFWriter) -> None:
        with_tokens(writer)
        writer.add_token_types([1] * n)
        writer.add_string("after", "the tokenizer")

    return build


def vocabulary_alone(path: Path) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    with_tokens(writer)
    return written(writer, path)


@named_cases(
    ("every kind of value", lambda d: str(write_every_kind(d / "a.gguf"))),
    ("a long tokenizer", lambda d: str(write("llama-3.1-8b", d))),
    ("4096 kinds", lambda d: write_bare(d / "a.gguf", with_kinds_of_tokens(4096))),
    ("4097 kinds", lambda d: write_bare(d / "a.gguf", with_kinds_of_tokens(4097))),
    ("a text for tokens", lambda d: write_bare(d / "a.gguf", with_text_for_tokens)),
    ("no tokenizer", lambda d: str(write("llama-3.1-8b", d, vocab=False))),
    ("no tensors", lambda d: str(vocabulary_alone(d / "a.gguf"))),
)
def test_a_header_whose_tokenizer_is_stepped_over_is_that_of_ggml(
    build: Callable[[Path], str], headers: Headers, tmp_path: Path
) -> None:
    path = build(tmp_path)
    expected = header_of(headers.library, headers.open(path))
    found = headers.read(path)
    assert found == expected
    assert list(found.metadata) == list(expected.metadata)


def test_a_key_that_is_there_twice_is_refused_in_the_tokenizer_too(headers: Headers, tmp_path: Path) -> None:
    path = Path(write_bare(tmp_path / "a.gguf", with_kinds_of_tokens(3)))
    data = path.read_bytes()
    path.write_bytes(data.replace(b"\x05\0\0\0\0\0\0\0after", b"\x15\0\0\0\0\0\0\0tokenizer.ggml.tokens"))
    with pytest.raises(ModelError, match="not a readable GGUF file"):
        headers.read(str(path))


# --- the same plan with a skeleton of the header and without it; ``make test-architectures`` does all architectures


_EIGHT = ("4x 31600MiB", "2x 23688MiB", "2x 48270MiB")

CASES = {
    "dense, one device": ("llama-3.1-8b", ("6GiB",), {}),
    "windows of attention, one device": ("gpt-oss-20b", ("8GiB",), {}),
    "experts, two devices": ("qwen3-30b-a3b", ("12GiB", "10GiB"), {}),
    "recurrent layers, two devices, a fixed context": ("nemotron-h-9b", ("4GiB", "3GiB"), {"n_ctx": 16384}),
    "latent attention, eight devices": ("deepseek-v3.1", _EIGHT, {"n_ctx": 32768}),
    "no device": ("gemma3-12b", (), {}),
    "a host that is too small": ("llama-3.1-8b", ("3GiB",), {"host_memory": "2GiB"}),
}


@pytest.fixture(scope="session")
def skeletons(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("skeletons")


@pytest.mark.parametrize(("shape", "gpus", "options"), CASES.values(), ids=list(CASES))
def test_the_plan_is_the_same_with_the_skeleton_and_without(
    skeletons: Path, shape: str, gpus: tuple[str, ...], options: Mapping[str, Any]
) -> None:
    machine = Machine("machine", parse_gpus(gpus) if gpus else (), options)
    comparison = compare.compare_plans(shapes.write(shape, skeletons), machine)
    assert (comparison.difference, comparison.refused) == ("", "")


def test_the_plan_of_a_split_model_is_the_same(skeletons: Path) -> None:
    machine = Machine("machine", parse_gpus(["8GiB"]))
    comparison = compare.compare_plans(shapes.write_split("llama-3.1-8b", skeletons, 3), machine)
    assert (comparison.difference, comparison.refused) == ("", "")


@pytest.mark.parametrize("model", [tiny.TINY_DENSE, tiny.TINY_MOE], ids=lambda model: model.name)
def test_a_small_model_gets_the_same_plans_on_every_kind_of_machine(tmp_path: Path, model: tiny.TinyModel) -> None:
    path = tiny.write_tiny(tmp_path / "tiny.gguf", model)
    with compare.kept_workers():
        checked = compare.check("tiny", [(path, machine) for machine in compare.machines_for_size(path)])
    assert checked.verdict == "equal", str(checked)


# --- what the comparison itself would notice


def one_token_less(fit: Callable[..., Plan]) -> Callable[..., Plan]:
    """``fit`` with a skeleton that changes the plan."""

    def changed(*arguments: Any, skeleton: bool, **options: Any) -> Plan:
        plan = fit(*arguments, skeleton=skeleton, **options)
        return replace(plan, params=replace(plan.params, n_ctx=plan.params.n_ctx - skeleton))

    return changed


def test_a_plan_that_the_skeleton_changes_is_told(skeletons: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare.api, "fit", one_token_less(compare.api.fit))
    path = shapes.write("llama-3.1-8b", skeletons)
    comparison = compare.compare_plans(path, Machine("machine", parse_gpus(["6GiB"]), {"n_ctx": 8192}))
    assert "params.n_ctx is 8191 with the skeleton, 8192 without" in comparison.difference
