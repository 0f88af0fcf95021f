"""Real loads, of a model or of its tokenizer alone, and facts that only a device's driver knows. For workers.

Dummy loads are made without the tokenizer, which takes most of the time of a load, and on which no byte of memory
depends. So it is read once for each build of llama.cpp, and the answer is kept by its key.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from fitter.errors import LibraryError, LlamaCppError, RemoteError
from fitter.llama.build import library as native
from fitter.llama.build.functions import Batch
from fitter.llama.build.layouts import read_whole
from fitter.llama.build.linking import CUDA_DRIVER
from fitter.llama.build.log import captured_log, failure
from fitter.llama.build.verdicts import read_answer, write_answer
from fitter.llama.load.backend_devices import Device, Registry
from fitter.llama.load.breakdown import breakdown_of, check_split_mode, computed_in, split_counted
from fitter.llama.load.structs import Adapters, apply
from fitter.llama.processes import rpc
from fitter.llama.types import Breakdown, MeasuredSpeed, Params

N_GENERATED = 4
"""Single tokens to compute after the prompt: ggml-cuda records a graph after the second one."""

_CU_MAJOR, _CU_MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, _MINOR


class RealLoad:
    """A model and a context that has computed full micro batches and single tokens, so that all memory is in use.

    Raises ``LlamaCppError`` if llama.cpp cannot load it or compute with it. Call ``close`` to free it.
    """

    def __init__(self, path: str, params: Params, devices: Registry) -> None:
        self._llama = native.libraries().llama
        check_split_mode(native.libraries(), params)
        model_params = self._llama.llama_model_default_params()
        context_params = self._llama.llama_context_default_params()
        self._keep = apply(params, model_params, context_params, devices)
        read_whole(model_params)
        self._context: Any = None
        self._adapters: Adapters | None = None
        library = native.libraries()
        with split_counted(library, params, None) as made:
            self._model = self._llama.llama_model_load_from_file(os.fsencode(path), model_params)
            made.append(self._model)
        if not self._model:
            raise failure(path, "llama.cpp cannot load the model")
        try:
            with split_counted(library, params, self._model) as made:
                self._context = self._llama.llama_init_from_model(self._model, context_params)
                made.append(self._context)
            if not self._context:
                raise failure(path, "llama.cpp cannot make a context")
            if params.lora:
                self._adapters = Adapters(native.libraries(), params.lora, self._model, really=True)
                self._adapters.apply(params.lora, self._context)
            with split_counted(library, params, self._model) as made:
                self._compute(path)
                made.append(computed_in(self._context))
        except BaseException:
            self.close()
            raise

    def breakdown(self) -> Breakdown:
        """Return its memory by llama.cpp's own count."""
        breakdown = breakdown_of(self._context)
        return replace(breakdown, lora=self._adapters.rows) if self._adapters else breakdown

    def close(self) -> None:
        """Free the context and the model."""
        context, self._context = self._context, None
        model, self._model = self._model, None
        adapters, self._adapters = self._adapters, None
        if context:
            self._llama.llama_free(context)
        if adapters:
            adapters.free()
        if model:
            self._llama.llama_model_free(model)

    def _compute(self, path: str) -> None:
        for batch in self._batches():
            if self._refuses(batch):
                raise failure(path, "llama.cpp cannot compute with the model")
        self._llama.llama_synchronize(self._context)

    def _batches(self) -> Iterator[tuple[int, int]]:
        """Yield tokens per sequence and sequences: prompts of one and of all sequences, then single tokens."""
        llama = self._llama
        n_seq_max = int(llama.llama_n_seq_max(self._context))
        # llama.cpp aborts beyond the training context if the model has learned positions.
        n_ctx_train = int(llama.llama_model_n_ctx_train(self._model)) or 2**31
        length = min(int(llama.llama_n_ctx_seq(self._context)), n_ctx_train)
        room = int(llama.llama_n_ubatch(self._context))
        for n_seqs in sorted({1, min(n_seq_max, room)}):
            if n_seqs > 1 and (memory := llama.llama_get_memory(self._context)):
                llama.llama_memory_clear(memory, False)
            # in a unified cache each sequence gets an equal share
            share = min(length, int(llama.llama_n_ctx(self._context)) // n_seqs)
            prompt = max(1, min(room // n_seqs, share - N_GENERATED))
            yield prompt, n_seqs
            yield from [(1, n_seqs)] * min(N_GENERATED, share - prompt)

    def _refuses(self, tokens: tuple[int, int]) -> bool:
        """Return whether llama.cpp cannot compute a batch (tokens per sequence, sequences); an encoder runs first."""
        llama = self._llama
        batch, _pointers = batch_of(*tokens)
        if llama.llama_model_has_encoder(self._model) and llama.llama_encode(self._context, batch):
            return True
        return bool(llama.llama_model_has_decoder(self._model) and llama.llama_decode(self._context, batch))


def batch_of(n_tokens: int, n_seqs: int) -> tuple[Batch, list[object]]:
    """Build a batch of ``n_tokens`` tokens of each sequence; return it with the memory that it points to."""
    count = n_tokens * n_seqs
    tokens = (ctypes.c_int32 * count)(*[0] * count)
    sequences = [ctypes.pointer(ctypes.c_int32(i)) for i in range(n_seqs)]
    counts = (ctypes.c_int32 * count)(*[1] * count)
    sequence_ids = (ctypes.POINTER(ctypes.c_int32) * count)(*(sequences[i // n_tokens] for i in range(count)))
    # without positions llama.cpp continues; without logits it computes those of the last token
    return Batch(count, tokens, None, None, counts, sequence_ids, None), [tokens, sequences, counts, sequence_ids]


def device_speed(device: Device, memory: int, seconds: float) -> MeasuredSpeed:
    """Measure the speed of matrix products on ``device``, with up to ``memory`` bytes of zeros, for about ``seconds``.

    Raises ``LlamaCppError`` if it cannot be measured.
    """
    library = native.libraries()
    out = library.ffi.new("fitter_speed_t *")
    if not library.fitter.fitter_device_speed(library.pointer(device.address), memory, seconds, out):
        raise LlamaCppError(f"the speed of {device.info.name} cannot be measured: {library.last_error()}")
    return MeasuredSpeed(float(out.round_trip), float(out.link), float(out.bandwidth), float(out.compute))


def add_rpc_server(endpoint: str) -> None:
    """Register the devices of an rpc-server with ggml, as llama.cpp's ``--rpc`` does.

    If the server does not answer, llama.cpp ends the process.

    Raises:
        LibraryError: libllama has no RPC.
        RemoteError: The server has no device, or another protocol.
    """
    ggml = native.libraries().llama.library
    for name, arguments in (
        ("ggml_backend_reg_by_name", [ctypes.c_char_p]),
        ("ggml_backend_reg_get_proc_address", [ctypes.c_void_p, ctypes.c_char_p]),
        ("ggml_backend_register", [ctypes.c_void_p]),
    ):
        function = getattr(ggml, name)
        function.argtypes, function.restype = arguments, ctypes.c_void_p
    registry = ggml.ggml_backend_reg_by_name(b"RPC")
    address = registry and ggml.ggml_backend_reg_get_proc_address(registry, b"ggml_backend_rpc_add_server")
    if not address:
        raise LibraryError('libllama has no RPC: install llama-cpp-python with CMAKE_ARGS="-DGGML_RPC=on"')
    server = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_char_p)(address)(endpoint.encode())
    if not server:
        raise RemoteError(rpc.refusal_of(endpoint, (line.text for line in captured_log())))
    ggml.ggml_backend_register(server)


def reset_connections() -> None:
    """Let the connections to rpc-servers end with a reset, so that the end of this process kills no server."""
    import socket
    import stat

    from fitter.llama.processes.rpc import RESET

    for name in os.listdir("/dev/fd"):
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                connection = socket.socket(fileno=int(name))
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
                connection.detach()


def compute_capabilities(devices: Registry) -> dict[str, int]:
    """Return the compute capability (890 for 8.9) of each CUDA device by name, if the driver reports it."""
    capabilities: dict[str, int] = {}
    for device in devices.default:
        if device.info.backend == "CUDA" and device.device_id and (capability := _capability(device.device_id)):
            capabilities[device.info.name] = capability
    return capabilities


def _capability(pci_id: str) -> int | None:
    try:
        driver = ctypes.CDLL(CUDA_DRIVER)
    except OSError:
        return None
    device, major, minor = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    # ggml appends "-v1" to the id of a card that it lists more than once
    pci = pci_id.split("-")[0].encode()
    if (
        driver.cuInit(0)
        or driver.cuDeviceGetByPCIBusId(ctypes.byref(device), pci)
        or driver.cuDeviceGetAttribute(ctypes.byref(major), _CU_MAJOR, device)
        or driver.cuDeviceGetAttribute(ctypes.byref(minor), _CU_MINOR, device)
    ):
        return None
    return major.value * 100 + minor.value * 10


_PIECE = 1 << 20
_LEAST_TOKENIZER = 1 << 16
"""llama.cpp reads a smaller tokenizer as fast as its key is computed."""


def tokenizer_key(path: str) -> str:
    """Return a key that is equal for equal tokenizers, of one architecture, in one build of llama.cpp.

    The key is a digest of all metadata that only a tokenizer reads, byte for byte. So llama.cpp accepts all tokenizers
    with one key, or refuses all. It is empty for a small tokenizer, and for a header of an unknown form.
    """
    library = native.libraries()
    out = library.ffi.new("fitter_columns_t *")
    if not library.fitter.fitter_tokenizer_entries(os.fsencode(path), out):
        return ""
    _, (offsets, sizes) = library.columns(out, 0, 2)
    if sum(sizes) < _LEAST_TOKENIZER:
        return ""
    digest = hashlib.sha256(native.loaded().key.encode())
    try:
        with open(path, "rb") as file:
            for offset, size in zip(offsets, sizes, strict=True):
                file.seek(offset)
                while size > 0 and (piece := file.read(min(size, _PIECE))):
                    digest.update(piece)
                    size -= len(piece)
    except OSError:
        # the load of the file reports it
        return ""
    return digest.hexdigest()


def is_tokenizer_read(path: str) -> bool:
    """Return whether llama.cpp is known to read the tokenizer of the model at ``path``.

    A small tokenizer is read at once. Raises ``LlamaCppError`` where llama.cpp refuses that.
    """
    if key := tokenizer_key(path):
        return read_answer(_tokenizer_name(key)) is not None
    _read_tokenizer(path)
    return True


def check_tokenizer(path: str) -> None:
    """Read a tokenizer, and remember that llama.cpp can. Raises ``LlamaCppError`` with its reason if it cannot."""
    key = tokenizer_key(path)
    _read_tokenizer(path)
    if key and key == tokenizer_key(path):
        write_answer(_tokenizer_name(key), {"tokenizer": key})


def _read_tokenizer(path: str) -> None:
    llama = native.libraries().llama
    params = llama.llama_model_default_params()
    nothing = (ctypes.c_void_p * 1)(None)
    params.devices = ctypes.cast(nothing, ctypes.c_void_p)
    params.vocab_only = True
    read_whole(params)
    model = llama.llama_model_load_from_file(os.fsencode(path), params)
    if not model:
        raise failure(path, "llama.cpp cannot load the model")
    llama.llama_model_free(model)


def _tokenizer_name(key: str) -> str:
    return f"tokenizer-{key}"
