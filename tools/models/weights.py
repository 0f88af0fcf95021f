"""Fill a file of a shape with random weights: llama.cpp computes with it at the speed of the real model."""

from __future__ import annotations

import ctypes
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tools.models import shapes

DEVIATION = 0.02
_SAMPLE = 1 << 22
_ROW = 1024
_PART = 1 << 26


def write_random(name: str, directory: Path, ggml_base: Path) -> Path:
    """Write the shape ``name`` with normally distributed weights into ``directory`` and return its path.

    Weights of a type repeat after four million, norms are 1, and routers differ for each expert. ``ggml_base`` is
    the libggml-base that quantizes.
    """
    path = shapes.write(name, directory)
    shape = shapes.SHAPES[name]
    sizes = [-(-tensor.bytes // shapes.ALIGNMENT) * shapes.ALIGNMENT for tensor in shape.tensors]
    offset = path.stat().st_size - sum(sizes)
    samples = {kind: _sample(kind, ggml_base) for kind in {tensor.type for tensor in shape.tensors}}
    file = os.open(path, os.O_WRONLY)
    try:
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            for tensor, size in zip(shape.tensors, sizes, strict=True):
                data = _weights(tensor, samples[tensor.type])
                for start in range(0, tensor.bytes, _PART):
                    pool.submit(_write, file, data, offset + start, start, min(_PART, tensor.bytes - start))
                offset += size
    finally:
        os.close(file)
    return path


def _write(file: int, data: npt.NDArray[np.uint8], offset: int, start: int, size: int) -> None:
    at = start % len(data)
    os.pwrite(file, np.resize(np.roll(data, -at) if at else data, size).tobytes(), offset)


def _weights(tensor: shapes.Tensor, sample: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    if tensor.type != shapes.F32:
        return sample
    if tensor.name.endswith(("norm.weight", "rope_freqs.weight")):
        return np.ones(1, np.float32).view(np.uint8)
    random = np.random.default_rng(len(tensor.name)).standard_normal(tensor.shape, np.float32)
    return (random * np.float32(DEVIATION)).ravel().view(np.uint8)


def _sample(kind: shapes.GGMLQuantizationType, ggml_base: Path) -> npt.NDArray[np.uint8]:
    weights = np.random.default_rng(0).standard_normal(_SAMPLE, np.float32) * np.float32(DEVIATION)
    if kind == shapes.F32:
        return weights.view(np.uint8)
    block, size = shapes.GGML_QUANT_SIZES[kind]
    result = np.zeros(_SAMPLE // block * size, np.uint8)
    quantize = ctypes.CDLL(str(ggml_base)).ggml_quantize_chunk
    quantize.restype = ctypes.c_size_t
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    quantize.argtypes = [ctypes.c_int, pointer, pointer, number, number, number, pointer]
    written = quantize(int(kind), weights.ctypes.data, result.ctypes.data, 0, _SAMPLE // _ROW, _ROW, None)
    assert written == len(result), f"{kind.name}: {written} bytes are not {len(result)}"
    return result
