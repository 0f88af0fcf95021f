"""Small models with known results, which test a build of llama.cpp before it is trusted.

A build that fitter was not compiled for may mean something else by the same words. In another process (see
``fitter.llama.build.verdicts``) it loads models whose layers, tensors and caches must go where arithmetic says. Every
build also computes, if the processor has own layouts for weights.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from fitter.errors import FitterError, LlamaCppError
from fitter.llama.build import library as native
from fitter.llama.header.gguf_writer import Tensor, Value, write_file
from fitter.llama.load.backend_devices import register_virtual, registry
from fitter.llama.load.breakdown import counted
from fitter.llama.load.loader import Loader
from fitter.llama.load.real_load import RealLoad
from fitter.llama.processes import interpreter
from fitter.llama.processes.worker_exit import is_resource_error
from fitter.llama.types import Breakdown, Params, TensorBuftOverride, VirtualDevice, describe
from fitter.storage import TemporaryDirectory
from fitter.system import DESCRIPTORS

_GIB = 1 << 30
CARDS = tuple(VirtualDevice(f"CUDA{i}", f"canary {i}", "cuda", 890, _GIB, _GIB) for i in range(2))
HOST = ""
"""The host's name, in place of a device's."""

# sizes without padding in any buffer type: f16 and f32 tensors, each a multiple of 256 bytes
_LAYERS, _EMBD, _HEADS, _HEADS_KV, _FF, _EXPERTS, _VOCAB, _TRAINED = 3, 512, 8, 8, 512, 4, 512, 4096
_EMBD_KV = _EMBD // _HEADS * _HEADS_KV
_SEQUENCES, _CONTEXT, _UNEVEN_CONTEXT = 2, 1024, 1280
_F16 = 2
_LITTLE = 1 << 20
"""Bytes that a dummy load may allocate, such as the room for results; the weights take ten times as much."""
_BLOCK, _BLOCK_BYTES = 32, 34
"""Elements and bytes of a block of q8_0."""


def _tensors(has_experts: bool) -> Iterator[Tensor]:
    yield Tensor("token_embd.weight", (_EMBD, _VOCAB), "f16")
    yield Tensor("output_norm.weight", (_EMBD,), "f32")
    yield Tensor("output.weight", (_EMBD, _VOCAB), "f16")
    stack, end, last = ((_EXPERTS,), "_exps", "f16") if has_experts else ((), "", "f16")
    for i in range(_LAYERS):
        for name in ("attn_norm", "ffn_norm"):
            yield Tensor(f"blk.{i}.{name}.weight", (_EMBD,), "f32")
        for name, width in (("q", _EMBD), ("k", _EMBD_KV), ("v", _EMBD_KV), ("output", _EMBD)):
            yield Tensor(f"blk.{i}.attn_{name}.weight", (_EMBD, width), "f16")
        if has_experts:
            yield Tensor(f"blk.{i}.ffn_gate_inp.weight", (_EMBD, _EXPERTS), "f32")
        yield Tensor(f"blk.{i}.ffn_gate{end}.weight", (_EMBD, _FF, *stack), last)
        yield Tensor(f"blk.{i}.ffn_up{end}.weight", (_EMBD, _FF, *stack), last)
        yield Tensor(f"blk.{i}.ffn_down{end}.weight", (_FF, _EMBD, *stack), last)


DENSE, EXPERTS = tuple(_tensors(False)), tuple(_tensors(True))


QUANTIZED = tuple(replace(tensor, type="q8_0") if tensor.type == "f16" else tensor for tensor in DENSE)
"""A model that a processor with AMX computes in tiles."""


def write(folder: Path, tensors: Sequence[Tensor]) -> Path:
    """Write a model, a ``llama``. Raises ``OSError``."""
    values: dict[str, Value] = {
        ".block_count": _LAYERS,
        ".context_length": _TRAINED,
        ".embedding_length": _EMBD,
        ".feed_forward_length": _FF,
        ".attention.head_count": _HEADS,
        ".attention.head_count_kv": _HEADS_KV,
        ".attention.layer_norm_rms_epsilon": 1e-5,
        ".rope.dimension_count": _EMBD // _HEADS,
        ".vocab_size": _VOCAB,
    }
    if tensors == EXPERTS:
        values |= {".expert_count": _EXPERTS, ".expert_used_count": 2}
    metadata: dict[str, Value] = {"general.architecture": "llama", "tokenizer.ggml.model": "no_vocab"}
    metadata |= {f"llama{name}": value for name, value in values.items()}
    return write_file(folder / f"canary-{len(os.listdir(folder))}.gguf", metadata, tensors)


def _layer(tensor: Tensor) -> int:
    """Return the layer of a tensor as llama.cpp places it: the output counts as one more, the token embedding as -1."""
    parts = tensor.name.split(".")
    if parts[0] == "blk":
        return int(parts[1])
    return -1 if parts[0] == "token_embd" else _LAYERS


def weights(tensors: Iterable[Tensor], devices: Iterable[str], on_host: str = "") -> dict[str, int]:
    """Add up bytes of weights by device.

    Args:
        tensors: The model's tensors.
        devices: A device for each layer and the output.
        on_host: A part of the names of tensors that are on the host in every layer.
    """
    places = {-1: HOST, **dict(enumerate(devices))}
    sizes: Counter[str] = Counter()
    for tensor in tensors:
        is_kept = bool(on_host) and on_host in tensor.name
        sizes[HOST if is_kept else places[_layer(tensor)]] += tensor.bytes
    return dict(sizes)


def cache(devices: Iterable[str], n_ctx: int, type_k: str = "f16", type_v: str = "f16") -> dict[str, int]:
    """Compute bytes of the KV cache by device, with a device for each layer."""
    row = {"f16": _EMBD_KV * _F16, "q8_0": _EMBD_KV // _BLOCK * _BLOCK_BYTES}
    counter: Counter[str] = Counter()
    for device in devices:
        counter[device] += n_ctx * (row[type_k] + row[type_v])
    return dict(counter)


def differences(what: str, found: Breakdown, model: dict[str, int], context: dict[str, int]) -> Iterator[str]:
    """Yield the differences between a load and the expected bytes, a few words each."""
    measured: dict[str, Counter[str]] = {"weights": Counter(), "the KV cache": Counter()}
    for row in found.rows:
        measured["weights"][HOST if row.is_host else row.device or HOST] += row.model
        measured["the KV cache"][HOST if row.is_host else row.device or HOST] += row.context
    for kind, expected in (("weights", model), ("the KV cache", context)):
        got = {device: size for device, size in measured[kind].items() if size}
        if got != expected:
            yield f"{what}: {kind} take {_sizes_text(got)} instead of {_sizes_text(expected)}"


def _sizes_text(sizes: dict[str, int]) -> str:
    return ", ".join(f"{size} bytes of {device or 'the host'}" for device, size in sorted(sizes.items())) or "nothing"


def problem_of_loaded() -> str:
    """Return why the llama.cpp of this process cannot be trusted, in one line; '' if it can.

    Raises ``FitterError`` if it refuses a load. It loads on virtual devices, so call it in another process.
    """
    native.prepare()
    register_virtual(describe(CARDS))
    first, second = (card.name for card in CARDS)
    with _models(DENSE, EXPERTS) as (dense, experts):
        loader = Loader(registry(virtual=True))
        try:
            problems = [*_of_dense(loader, dense, first, second), *_of_experts(loader, experts, first)]
        finally:
            loader.close()
    if difference := native.open_backend().fitter_virtual_build_difference():
        problems.append(str(native.libraries().text(difference)))
    return problems[0] if problems else ""


@contextmanager
def _models(*kinds: Sequence[Tensor]) -> Iterator[tuple[str, ...]]:
    """Write models and yield their paths. A crash leaves no file where a deleted file can still be opened."""
    with ExitStack() as stack:
        with TemporaryDirectory() as folder:
            paths = [write(Path(folder), tensors) for tensors in kinds]
            if sys.platform != "linux" or not os.path.isdir(DESCRIPTORS):
                yield tuple(map(str, paths))
                return
            files = [stack.enter_context(path.open("rb")) for path in paths]
        yield tuple(f"{DESCRIPTORS}/{file.fileno()}" for file in files)


def _of_dense(loader: Loader, path: str, first: str, second: str) -> Iterator[str]:
    """Test layers, devices, splits, and caches on the host."""
    split = (second, second, first, first)
    params = Params(n_ctx=_CONTEXT, devices=(second, first), tensor_split=(1.0, 1.0))
    with counted(really=True) as allocations:
        measured = loader.measure(path, params)
    if sum(row.model for row in allocations.rows) > _LITTLE:
        yield "a load that should allocate nothing takes real memory"
    yield from differences("a split", measured, weights(DENSE, split), cache(split[:_LAYERS], _CONTEXT))
    if measured.devices != (second, first) or measured.n_ctx != _CONTEXT:
        yield f"a split: {measured.n_ctx} tokens on {measured.devices}"

    host = (HOST, HOST, first, first)
    params = Params(n_ctx=_CONTEXT, devices=(first,), n_gpu_layers=2, flash_attn="off")
    measured = loader.measure(path, params)
    yield from differences("two layers on a device", measured, weights(DENSE, host), cache(host[:_LAYERS], _CONTEXT))
    yield from _attention("flash attention off", measured, False)

    params = Params(n_ctx=_CONTEXT, devices=(first,), offload_kqv=False)
    measured = loader.measure(path, params)
    yield from differences(
        "a KV cache on the host", measured, weights(DENSE, [first] * 4), cache([HOST] * _LAYERS, _CONTEXT)
    )

    # one cache for each sequence would be rounded up
    params = Params(
        n_ctx=_UNEVEN_CONTEXT,
        n_seq_max=_SEQUENCES,
        kv_unified=True,
        devices=(first, second),
        split_mode="none",
        main_gpu=1,
    )
    measured = loader.measure(path, params)
    yield from differences(
        "one of two devices", measured, weights(DENSE, [second] * 4), cache([second] * _LAYERS, _UNEVEN_CONTEXT)
    )


_OF_EXPERTS = "_exps"


def _on_host() -> tuple[TensorBuftOverride, ...]:
    return (TensorBuftOverride(_OF_EXPERTS, "CPU"),)


def _of_experts(loader: Loader, path: str, first: str) -> Iterator[str]:
    """Test overrides, sequences, cache types and flash attention."""
    params = Params(
        n_ctx=_CONTEXT,
        n_seq_max=_SEQUENCES,
        devices=(first,),
        tensor_buft_overrides=_on_host(),
        type_k="q8_0",
        type_v="q8_0",
        flash_attn="on",
    )
    breakdown = loader.measure(path, params)
    caches = cache([first] * _LAYERS, _CONTEXT, "q8_0", "q8_0")
    yield from differences("experts on the host", breakdown, weights(EXPERTS, [first] * 4, _OF_EXPERTS), caches)
    yield from _attention("flash attention on", breakdown, True)


def _attention(what: str, measured: Breakdown, expected: bool) -> Iterator[str]:
    # some builds do not log it
    if measured.flash_attn not in (None, expected):
        yield f"{what}: llama.cpp says the opposite"


def main() -> None:
    """Print why the build of this process's environment cannot be trusted, an empty line if it can."""
    interpreter.become_worker(is_canary=True)
    try:
        native.load_cells()
        problem = problem_of_loaded()
    except FitterError as error:
        _check_machine(error)
        problem = f"it refuses a small model ({error})" if isinstance(error, LlamaCppError) else str(error)
    print("\n" + " ".join(problem.split()), flush=True)
    # skip llama.cpp's code at exit
    os._exit(0)


def compute() -> None:
    """Compute with weights in this processor's own layouts, which may crash; print an empty line otherwise."""
    interpreter.become_worker(is_canary=True)
    try:
        native.prepare()
        with _models(QUANTIZED) as (path,):
            RealLoad(path, Params(n_ctx=256, devices=(), n_gpu_layers=0), registry()).close()
    except FitterError as error:
        # a refusal of llama.cpp is no crash
        _check_machine(error)
    print(flush=True)
    os._exit(0)


def _check_machine(error: FitterError) -> None:
    """Raise ``error`` again if the machine, not the build, caused it: there is no answer then."""
    if is_resource_error(error):
        raise error
