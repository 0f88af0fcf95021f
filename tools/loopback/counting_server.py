"""An rpc-server of a build that has no such program, which says what it takes.

``python -m tools.loopback.counting_server`` serves the CPU of the llama.cpp that ``FITTER_LLAMA_CPP`` names, and writes
a line ``buffer BYTES`` for each buffer that it is asked for.
"""

from __future__ import annotations

import argparse
import ctypes

from fitter.llama.build import library as native
from fitter.llama.processes import interpreter

_CPU = 0  # GGML_BACKEND_DEVICE_TYPE_CPU
_ALLOC_BUFFER = 1
"""Where a buffer type has the function, counted in pointers: the same in all versions of ggml's interface."""
_Allocate = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_Start = ctypes.CFUNCTYPE(
    None, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.POINTER(ctypes.c_void_p)
)


def main() -> None:
    """Serve until the process is ended."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.loopback.counting_server", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("-H", dest="host", default="127.0.0.1")
    parser.add_argument("-p", dest="port", type=int, required=True)
    options = parser.parse_args()
    interpreter.become_worker()
    native.prepare()
    ggml = native.libraries().llama.library
    for name in ("cpu_buffer_type", "dev_by_type", "reg_by_name", "reg_get_proc_address"):
        getattr(ggml, f"ggml_backend_{name}").restype = ctypes.c_void_p
    slots = ctypes.cast(ggml.ggml_backend_cpu_buffer_type(), ctypes.POINTER(ctypes.c_void_p))
    own = _Allocate(slots[_ALLOC_BUFFER] or 0)

    def allocate(buffer_type: int, size: int) -> int | None:
        print("buffer", size, flush=True)
        return own(buffer_type, size)  # type: ignore[no-any-return]

    counted = _Allocate(allocate)
    slots[_ALLOC_BUFFER] = ctypes.cast(counted, ctypes.c_void_p).value
    devices = (ctypes.c_void_p * 1)(ggml.ggml_backend_dev_by_type(_CPU))
    rpc = ctypes.c_void_p(ggml.ggml_backend_reg_by_name(b"RPC"))
    start = _Start(ggml.ggml_backend_reg_get_proc_address(rpc, b"ggml_backend_rpc_start_server"))
    start(f"{options.host}:{options.port}".encode(), None, 2, 1, devices)


if __name__ == "__main__":
    main()
