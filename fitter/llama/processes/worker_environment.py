"""The environment of a worker, and whether this process is a worker. Imports nothing, so that it can be early."""

from __future__ import annotations

LLAMA_CPP = "FITTER_LLAMA_CPP"
"""Environment variable with a worker's llama.cpp."""

CPU = "FITTER_LLAMA_CPU"
"""Environment variable with the file name of a worker's CPU backend, if its llama.cpp has several."""

_is_worker = False
_is_canary = False


def of_llama_cpp(where: str | None, cpu: str = "") -> dict[str, str]:
    """Return the variables of a worker.

    Args:
        where: Its llama.cpp; ``None`` for the environment's.
        cpu: File name of its CPU backend; empty for the best one.
    """
    return {**({} if where is None else {LLAMA_CPP: where}), **({CPU: cpu} if cpu else {})}


def is_worker() -> bool:
    """Return whether this process is a worker."""
    return _is_worker


def is_canary() -> bool:
    """Return whether this process tests a build of llama.cpp."""
    return _is_canary


def become_worker(is_canary: bool = False) -> None:
    """Mark this process as a worker, or as one that tests a build of llama.cpp."""
    global _is_worker, _is_canary
    _is_worker, _is_canary = True, is_canary
